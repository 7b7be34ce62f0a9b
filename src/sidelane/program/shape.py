"""What a call is, for those who decide how to run it: legality of algorithms, measured times, rules of thumb."""

from __future__ import annotations

import dataclasses

from sidelane.config import BESIDE, NOTHING
from sidelane.program.collective import Collective, Kind


@dataclasses.dataclass(frozen=True, slots=True)
class CallShape:
    """Everything about a call that the choice looks at; the same on every rank.

    Attributes:
        kind: which collective.
        world_size: ranks in the group.
        nbytes: gathered size of an all_gather, the largest local buffer of the others.
        dtype: of the elements; it matters to the reducing collectives only.
        in_place: input and output share memory; of a list, of some tensor.
        symmetric: peers can write into the output (it lies at one place in symmetric memory); of a reduce_scatter read
            the input, of an all_reduce both.
        captured: into a graph of the caller's.
        beside: what runs next to it: ``nothing`` or ``compute``.
        even: every two ranks exchange the same number of bytes, the root and each of the others if there is one (the
            shards of an all_reduce may differ).
        listed: it is one with many tensors; ``nbytes`` are those of all, the rest is true of every one.
        tensors: how many.
        mixed: they are not all for one kind of collective; ``kind`` is that with the most bytes.
        uniform: they have one reduction and dtype, where they reduce, and one root, where they have any.
    """

    kind: Kind
    world_size: int
    nbytes: int
    dtype: str = "bfloat16"
    in_place: bool = False
    symmetric: bool = True
    captured: bool = False
    beside: str = NOTHING
    even: bool = True
    listed: bool = False
    tensors: int = 1
    mixed: bool = False
    uniform: bool = True

    @staticmethod
    def of(collective: Collective, dtype: str, *, symmetric: bool, captured: bool, beside: str) -> CallShape:
        """Describe a call of ``collective``."""
        check_beside(str(collective.kind), beside)
        sizes = {nbytes for row in collective.counts for nbytes in row}
        return CallShape(
            kind=collective.kind,
            world_size=collective.world_size,
            nbytes=collective.largest_buffer,
            dtype=dtype,
            in_place=collective.in_place,
            symmetric=symmetric,
            captured=captured,
            beside=beside,
            even=len(sizes) == 1 or collective.kind in (Kind.ALL_REDUCE, Kind.BROADCAST),
        )


def check_beside(function: str, beside: str) -> None:
    """Refuse an unknown hint.

    Raises:
        ValueError: with the allowed ones.
    """
    if beside not in BESIDE:
        raise ValueError(f"{function}: beside (value={beside!r}, allowed={', '.join(BESIDE)})")
