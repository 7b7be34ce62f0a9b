"""The comparisons of one rank, and its counts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import torch

FINDINGS = 1024
"""Comparisons on a GPU before their findings are looked at."""

MOST_WRONG = 5
"""Wrong outputs of a rank that are described; one with more stops."""

MOST_TEXTS, MOST_TEXT = 6, 8000


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts of one rank, which travel to the parent.

    Attributes:
        calls: calls that were made and checked, by label; rank 0 of each communicator counts them.
        refusals: calls that were wrong, or differed, and were refused on all ranks as they must be; likewise.
        allocations: blocks of symmetric memory; likewise.
        compared_bytes: bytes that this rank compared.
        wrong: comparisons that found wrong bytes.
        errors: everything else that was not as it must be.
        noted: other counts of a storm, by name; every rank's.
        texts: descriptions of the first wrong bytes and errors.
    """

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refusals: int = 0
    allocations: int = 0
    compared_bytes: int = 0
    wrong: int = 0
    errors: int = 0
    noted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    texts: list[str] = dataclasses.field(default_factory=list)

    def fail(self, text: str) -> None:
        """Count something that is not as it must be."""
        self.errors += 1
        self.describe(text)

    def describe(self, text: str) -> None:
        """Keep a text."""
        if len(self.texts) < MOST_TEXTS:
            self.texts.append(shortened(text, MOST_TEXT))

    def add(self, other: Tally) -> None:
        """Add the counts of another rank or thread."""
        for name in ("refusals", "allocations", "compared_bytes", "wrong", "errors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.calls += other.calls
        self.noted.update(other.noted)
        for text in other.texts:
            self.describe(text)


def shortened(text: str, most: int) -> str:
    """Return a text, or its begin and its end.

    >>> shortened("abcdefghij", 4)
    'ab ... ij'
    """
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"


class WrongBytesError(Exception):
    """There were more wrong outputs than anybody wants to read."""


class Judge:
    """Compares bytes: at once on a CPU; on a GPU as work of its own, whose findings are looked at a thousand at a time.

    Args:
        device: the device of the tensors.
        tell: takes a description of each comparison that failed.
        before: called before findings are looked at; raises if a call has failed, whose outputs are undefined.
    """

    def __init__(
        self, device: torch.device, tell: Callable[[str], None], before: Callable[[], object] = lambda: None
    ) -> None:
        self._tell, self._before = tell, before
        self.compared_bytes = self.wrong = 0
        self._waiting: list[tuple[tuple[object, ...], int]] = []
        self._findings = None if device.type == "cpu" else torch.zeros(FINDINGS, dtype=torch.int64, device=device)

    def same(self, found: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
        """Compare bytes (uint8, 1-d). ``what`` names them, in words only if they differ."""
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
        """Drop the comparisons since the last look, which prove nothing: a call has failed meanwhile."""
        self._waiting.clear()

    def _found(self, what: tuple[object, ...], nbytes: int, count: str) -> None:
        self.wrong += 1
        self._tell(f"wrong bytes ({count} of {nbytes}): {', '.join(map(str, what))}")
        if self.wrong >= MOST_WRONG:
            raise WrongBytesError(f"{self.wrong} outputs were wrong")
