"""What every rank must receive, from the definitions that torch.distributed gives."""

from __future__ import annotations

import random

from attack.arithmetic import operands, reduced
from sidelane.program.collective import Collective, Kind


def inputs(collective: Collective, rng: random.Random) -> list[bytes]:
    """Fresh bytes for the input of every rank."""
    sizes = [collective.input_bytes(rank) for rank in range(collective.world_size)]
    if collective.reduction is None:
        return [rng.randbytes(size) for size in sizes]
    return operands(collective.reduction, sizes[0] // collective.reduction.element_bytes, len(sizes), rng)


def outputs(collective: Collective, given: list[bytes]) -> list[bytes]:
    """The output of every rank; ``given`` are the inputs. Sums are in the order of the ranks, the same for all."""
    counts = collective.counts
    ranks = range(collective.world_size)
    root = collective.root or 0
    match collective.kind:
        case Kind.ALL_GATHER:
            return [b"".join(given)] * collective.world_size
        case Kind.BROADCAST:
            return [given[root]] * collective.world_size
        case Kind.GATHER:
            return [b"".join(given) if rank == root else b"" for rank in ranks]
        case Kind.SCATTER:
            return [_part(given[root], counts[root], rank) for rank in ranks]
        case Kind.ALL_TO_ALL:
            return [b"".join(_part(given[src], counts[src], rank) for src in ranks) for rank in ranks]
    assert collective.reduction is not None
    total = reduced(collective.reduction, given)
    if collective.kind is Kind.ALL_REDUCE:
        return [total] * collective.world_size
    return [_part(total, counts[0], rank) for rank in ranks]


def own_place(collective: Collective, rank: int) -> slice:
    """Where in the output of ``rank`` its own part of an all_to_all is due."""
    start = sum(row[rank] for row in collective.counts[:rank])
    return slice(start, start + collective.counts[rank][rank])


def _part(data: bytes, sizes: tuple[int, ...], index: int) -> bytes:
    start = sum(sizes[:index])
    return data[start : start + sizes[index]]
