"""What one rank counted in an episode, in numbers and words that travel."""

from __future__ import annotations

import collections
import dataclasses

MOST_TEXTS, MOST_TEXT = 6, 8000


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts of one rank.

    Attributes:
        calls: that were made and checked, by label; of each communicator its rank 0 counts them.
        refusals: calls that were wrong, or differed, and were refused on all ranks as they must be; likewise.
        allocations: of symmetric memory; likewise.
        compared_bytes: by this rank.
        wrong: comparisons that found wrong bytes.
        errors: everything else that was not as it must be.
        noted: what else a storm has counted, by name; of all ranks.
        texts: the first of both, in words.
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
        """Something is not as it must be."""
        self.errors += 1
        self.tell(text)

    def tell(self, text: str) -> None:
        """Keep a text."""
        if len(self.texts) < MOST_TEXTS:
            self.texts.append(shortened(text, MOST_TEXT))

    def add(self, other: Tally) -> None:
        """Add what another rank or thread counted."""
        self.calls += other.calls
        self.refusals += other.refusals
        self.allocations += other.allocations
        self.compared_bytes += other.compared_bytes
        self.wrong += other.wrong
        self.errors += other.errors
        self.noted.update(other.noted)
        for text in other.texts:
            self.tell(text)


def shortened(text: str, most: int) -> str:
    """A text, or its begin and its end.

    >>> shortened("abcdefghij", 4)
    'ab ... ij'
    """
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"
