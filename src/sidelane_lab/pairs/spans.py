"""When operations of a run began and ended, and how much of them was at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Span = tuple[float, float]
"""When something began and ended, in microseconds of one clock."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """When every operation of a run began and ended."""

    gemms: tuple[Span, ...]
    collectives: tuple[Span, ...]

    @property
    def time_us(self) -> float:
        """From the first begin to the last end."""
        spans = (*self.gemms, *self.collectives)
        return max(end for _, end in spans) - min(begin for begin, _ in spans)

    @property
    def overlap_rate(self) -> float:
        """See :func:`shared_share`."""
        return shared_share(self.collectives, self.gemms)


def shared_share(collectives: Sequence[Span], gemms: Sequence[Span]) -> float:
    """Share of the collectives' time during which a GEMM ran (overlap paper, 4.2.1).

    >>> shared_share([(0.0, 10.0), (10.0, 20.0)], [(5.0, 12.0), (8.0, 14.0)])
    0.45
    """
    shared = 0.0
    for begin, end in collectives:
        reached = begin
        for first, last in sorted(gemms):
            shared += max(0.0, min(end, last) - max(reached, first))
            reached = max(reached, last)
    return shared / sum(end - begin for begin, end in collectives)
