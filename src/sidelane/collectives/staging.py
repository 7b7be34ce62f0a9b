"""Staging: symmetric scratch memory of a communicator, which grows as calls need it."""

from __future__ import annotations

from sidelane.collectives.backend import Backend, SecondMapping
from sidelane.errors import UnavailableError
from sidelane.memory.base import SymmetricBlock

STEP_BYTES = 1 << 20
"""Bytes of which the size of staging is a multiple. Small staging doubles, so that it seldom has to grow."""

MOST_SPARE_BYTES = 64 << 20
"""Largest number of bytes that are allocated beyond the need of a call."""


class Staging:
    """One symmetric block, which is replaced by a larger one when a call needs more.

    Args:
        backend: allocates the memory.
        spread: map the ranks' blocks at equal distances, if the device can.
    """

    def __init__(self, backend: Backend, *, spread: bool = False) -> None:
        self._backend, self._wants_spread = backend, spread
        self._spread: SecondMapping | None = None
        self._block: SymmetricBlock | None = None
        self._is_captured = False
        self._kept: list[SymmetricBlock] = []

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the ranks' blocks in this process; empty before the first call that needs staging."""
        if self._spread is not None:
            return self._spread.addresses
        return () if self._block is None else self._block.addresses

    @property
    def is_spread(self) -> bool:
        """True if the blocks are mapped at equal distances."""
        return self._spread is not None

    @property
    def nbytes(self) -> int:
        """Size on every rank in bytes."""
        return 0 if self._block is None else self._block.tensor.nbytes

    def close(self) -> None:
        """Release the memory, including blocks that captured graphs refer to."""
        self._block, self._spread = None, None
        self._kept.clear()

    def reserve(self, nbytes: int, frozen: bool) -> bool:
        """Make sure that a call has enough staging. Collective if it grows.

        Args:
            nbytes: bytes that the call needs on every rank.
            frozen: the call is being captured, and its graph will refer to the block for as long as it lives.

        Returns:
            True if the block was replaced, so that programs that refer to the old one must be loaded again.

        Raises:
            UnavailableError: staging would have to grow during a capture, or there is not enough memory.
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
                # The allocation is collective: when it ends, the calls on the old block have ended on every rank.
                self._backend.synchronize()
            steps = -(-max(nbytes, have + min(have, MOST_SPARE_BYTES)) // STEP_BYTES)
            block = self._block = self._backend.memory.allocate(steps * STEP_BYTES)
            self._spread = self._backend.spread(block) if self._wants_spread else None
            self._is_captured = False
        self._is_captured |= frozen and nbytes > 0
        return grows
