"""The pool: any right program, drawn at random from all builders, transports, transforms, kinds, sizes and places."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from sidelane.program import collective as define
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build, build_batch, list_variants, variants, writes_into_outputs
from sidelane.program.builders.reducing import reduce
from sidelane.program.builders.relay import RELAY, relay
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import Broadcast, Copy, Move, Program, Swap
from sidelane.program.transform import freeze, hold, lower
from sidelane_lab.sim.prelaunch import prelaunch
from sidelane_lab.studies.phases.stamp import stamp

WORLDS = (1, *(2,) * 8, *(3,) * 8, 4, 4, 4, 5, 6, 7, 8)
"""World sizes, as often as they are drawn: most mistakes show between two or three ranks, where a run is short."""

LISTED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
"""Kinds that take lists of tensors."""

FORMS = ("plain", "plain", "stamped", "prelaunched", "held", "frozen", "prelaunched frozen")


def program(rng: random.Random, ranks: int, form: str | None = None) -> Program:
    """Draw a program.

    Args:
        rng: to draw with.
        ranks: of the world.
        form: one of ``FORMS``; drawn if None.
    """
    style = rng.random()
    if style < 0.2:
        made = _batch(rng, ranks)
    elif style < 0.3:
        made = _in_pieces(rng, ranks)
    else:
        made = _single(rng, ranks)
    return formed(made, rng, form)


def collective(rng: random.Random, kind: Kind, ranks: int, largest: int = 9, *, even: bool = False) -> Collective:
    """Draw a collective.

    Args:
        rng: to draw with.
        kind: which.
        ranks: of the world.
        largest: elements of a part; bytes where nothing is reduced.
        even: parts are equal.
    """
    sizes = [rng.randint(1, largest) if even or rng.random() < 0.9 else 0] * ranks
    if not even and rng.random() < 0.6:
        sizes = [rng.choice((0, 1, rng.randint(0, largest), largest)) for _ in range(ranks)]
    in_place, root = rng.random() < 0.5, rng.randrange(ranks)
    match kind:
        case Kind.ALL_GATHER:
            return define.all_gather(sizes, in_place=in_place)
        case Kind.ALL_TO_ALL:
            counts = [[sizes[(i + j) % ranks] for j in range(ranks)] for i in range(ranks)]
            if not even and rng.random() < 0.3:
                counts = [[rng.choice((0, 1, largest)) for _ in range(ranks)] for _ in range(ranks)]
            symmetric = all(counts[i][j] == counts[j][i] for i in range(ranks) for j in range(i))
            return define.all_to_all(counts, in_place=in_place and symmetric, copies_own=rng.random() < 0.7)
        case Kind.BROADCAST:
            return define.broadcast(sizes[0], ranks, root, in_place=in_place)
        case Kind.SCATTER:
            return define.scatter(sizes, root)
        case Kind.GATHER:
            return define.gather(sizes, root)
    reduction = Reduction(rng.choice(list(ReduceOp)), rng.choice(list(ELEMENT_BYTES)))
    shards = [reduction.element_bytes * size for size in sizes]
    make: Callable[..., Collective] = define.all_reduce if kind is Kind.ALL_REDUCE else define.reduce_scatter
    return make(shards, reduction, in_place=in_place)


def _single(rng: random.Random, ranks: int) -> Program:
    kind = rng.choice(list(Kind))
    # Copies are cut in two, and slots aligned, at multiples of 256 bytes.
    given = collective(rng, kind, ranks, rng.choice((3, 9, 9, 9, 700)))
    # Every collective has the last of these: only staging suits an all_to_all in place, only equal parts a swap.
    ways = list(itertools.product(variants(kind), Transport))
    for variant, transport in [*rng.sample(ways, len(ways)), ("b2b", Transport.STAGED)]:
        try:
            return build(given, variant, transport)
        except ValueError:
            continue
    raise AssertionError(f"no program for {given}")


def _in_pieces(rng: random.Random, ranks: int) -> Program:
    """Large ones travel in pieces; smaller ones can."""
    if ranks == 1 or rng.random() < 0.3:
        given = define.broadcast(rng.choice((300, 700, 1100)), ranks, rng.randrange(ranks), in_place=rng.random() < 0.5)
        return relay(given, rounds=rng.choice((1, 2, 3)))
    kind, pieces = rng.choice(REDUCING), rng.choice(((1, 1), (2, 1), (3, 2, 1)))
    given = collective(rng, kind, ranks, rng.choice((130, 200)))
    return reduce(given, rng.choice(("b2b", "pcpy")), rng.choice(list(Transport)), pieces)


def _batch(rng: random.Random, ranks: int) -> Program:
    """A list of one kind, or a mixture of several."""
    kinds = [rng.choice(LISTED)] if rng.random() < 0.5 else list(Kind)
    count = rng.choice((0, 1, 2, 2, 3, 3, 4))
    parts = [collective(rng, rng.choice(kinds), ranks, rng.choice((3, 9)), even=True) for _ in range(count)]
    shared = set.intersection(*(set(list_variants(kind)) for kind in kinds)) - {RELAY}
    if not all(part.copies_own for part in parts):
        shared -= {"swap"}
    variant = rng.choice(sorted(shared))
    return build_batch(Batch("batch", ranks, tuple(parts)), variant, [_transport(p, variant, rng) for p in parts])


def _transport(part: Collective, variant: str, rng: random.Random) -> Transport:
    if writes_into_outputs(variant) or part.kind in REDUCING:
        return Transport.PUSH
    return Transport.STAGED if part.kind is Kind.ALL_TO_ALL and part.in_place else rng.choice(list(Transport))


def formed(made: Program, rng: random.Random, form: str | None = None) -> Program:
    """What executors make of a program before it runs: in the order that these transforms have."""
    form = form or rng.choice(FORMS)
    native: set[type[Move]] = {Copy} | {kind for kind in (Broadcast, Swap) if rng.random() < 0.4}
    made = lower(made, native)
    if "stamped" in form or rng.random() < 0.05:
        made = stamp(made)
    if "prelaunched" in form:
        made = prelaunch(made)
    elif "held" in form:
        made = hold(made)
    return freeze(made) if "frozen" in form else made
