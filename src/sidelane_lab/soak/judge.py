"""Comparing bytes: at once on a CPU; on a GPU as work of its own, whose findings are looked at a thousand at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

FINDINGS = 1024
MOST_WRONG = 5
"""Wrong outputs of a rank that are told; one with more stops."""

What = tuple[object, ...]
"""Names a comparison; put into words only if it finds something."""


class WrongBytesError(Exception):
    """There were more wrong outputs than anybody wants to read."""


class Judge:
    """Compares on one rank.

    Args:
        device: of what is compared.
        tell: hears of each comparison that failed, in words.
        before: called before findings are looked at; raises if a call has failed, whose outputs are undefined.
    """

    def __init__(
        self, device: torch.device, tell: Callable[[str], None], before: Callable[[], object] = lambda: None
    ) -> None:
        self._tell, self._before = tell, before
        self.compared_bytes = self.wrong = 0
        self._waiting: list[tuple[What, int]] = []
        self._findings = None if device.type == "cpu" else torch.zeros(FINDINGS, dtype=torch.int64, device=device)

    def same(self, found: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
        """Compare bytes (uint8, 1-d)."""
        self.compared_bytes += found.numel()
        if self._findings is None:
            if not torch.equal(found, expected):
                first = (found != expected).nonzero()
                at = f", at {first[0].item()} and on" if len(first) else ""
                self._found(what, found.numel(), f"{len(first)}{at}" if found.shape == expected.shape else "all")
            return
        torch.sum(found != expected, dim=0, out=self._findings[len(self._waiting)])
        self._waiting.append((what, found.numel()))
        if len(self._waiting) == FINDINGS:
            self.settle()

    def settle(self) -> None:
        """Look at everything that was compared so far. Waits for the current stream, on which it was."""
        if self._findings is None or not self._waiting:
            return
        self._before()
        counts = self._findings[: len(self._waiting)].tolist()
        for (what, nbytes), count in zip(self._waiting, counts, strict=True):
            if count:
                self._found(what, nbytes, str(count))
        self._waiting.clear()

    def forget(self) -> None:
        """What was compared since the last look proves nothing: a call has failed meanwhile."""
        self._waiting.clear()

    def _found(self, what: What, nbytes: int, count: str) -> None:
        self.wrong += 1
        self._tell(f"wrong bytes ({count} of {nbytes}): {', '.join(map(str, what))}")
        if self.wrong >= MOST_WRONG:
            raise WrongBytesError(f"{self.wrong} outputs were wrong")
