"""Staging: symmetric scratch memory of a communicator that grows by what calls need."""

from __future__ import annotations

from sidelane.collectives.backend import Backend, SecondMapping
from sidelane.errors import UnavailableError
from sidelane.memory.base import SymmetricBlock

STEP_BYTES = 1 << 20
"""Staging grows to multiples of this, doubling while it is small, so that growing is rare."""

MOST_SPARE_BYTES = 64 << 20
"""More than this is never added beyond what a call needs."""


class Staging:
    """One block, replaced by a larger one when a call needs that.

    Args:
        backend: whose memory.
        spread: the blocks of the ranks lie at equal distances, where the device can map them so.
    """

    def __init__(self, backend: Backend, *, spread: bool = False) -> None:
        self._backend, self._wants_spread = backend, spread
        self._spread: SecondMapping | None = None
        self._block: SymmetricBlock | None = None
        self._is_captured = False
        self._kept: list[SymmetricBlock] = []

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where this process reaches the block of each rank; empty before the first call that needs one."""
        if self._spread is not None:
            return self._spread.addresses
        return () if self._block is None else self._block.addresses

    @property
    def is_spread(self) -> bool:
        """They lie at equal distances in one mapping."""
        return self._spread is not None

    @property
    def nbytes(self) -> int:
        """What every rank has."""
        return 0 if self._block is None else self._block.tensor.nbytes

    def close(self) -> None:
        """Let go of the memory, also of what captured graphs refer to."""
        self._block, self._spread = None, None
        self._kept.clear()

    def reserve(self, nbytes: int, frozen: bool) -> bool:
        """Have room for a call. Collective where it grows.

        Args:
            nbytes: needed on every rank.
            frozen: the call is being captured, and its graph will refer to the block for as long as it lives.

        Returns:
            True if the block is another one now, so that whatever refers to the old one must be loaded again.

        Raises:
            UnavailableError: it would have to grow during a capture, or the memory is not there.
        """
        have = self.nbytes
        grows = nbytes > have
        if grows and frozen:
            raise UnavailableError(
                f"this call needs {nbytes} bytes of staging and memory cannot be allocated while a graph is captured "
                f"(have={have}): make the call once before the capture (most need less with tensors from "
                f"Communicator.empty)"
            )
        if grows:
            if self._block is not None and self._is_captured:
                self._kept.append(self._block)
            elif self._block is not None:
                self._backend.synchronize()  # on every rank before the allocation, which is collective, ends on any
            steps = -(-max(nbytes, have + min(have, MOST_SPARE_BYTES)) // STEP_BYTES)
            block = self._block = self._backend.memory.allocate(steps * STEP_BYTES)
            self._spread = self._backend.spread(block) if self._wants_spread else None
            self._is_captured = False
        self._is_captured |= frozen and nbytes > 0
        return grows
