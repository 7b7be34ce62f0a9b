"""Mistakes in what is moved and how it is combined. Some are none: a copy in two halves is a copy."""

from __future__ import annotations

import dataclasses
import random

from attack.edits import Place, at, cut, edited, perturbed, places, replaced, respanned, rewritten
from sidelane.program.collective import ELEMENT_BYTES, SLOT_ALIGNMENT, Buffer, ReduceOp, Reduction, Span
from sidelane.program.ir import MOVES, Broadcast, Copy, Program, Reduce, Swap, spans


def span(program: Program, rng: random.Random) -> Program | None:
    """An operand is shifted, on another rank or in another buffer."""
    place = _place(program, rng, *MOVES, Reduce)
    if place is None:
        return None
    command = at(program, place)
    chosen = rng.choice(list(spans(command)))
    other = rng.choice(list(perturbed(chosen, program.world_size)))
    return replaced(program, place, respanned(command, lambda s: other if s is chosen else s))


def shorter(program: Program, rng: random.Random) -> Program | None:
    """A byte or an element less is moved, at the end or the beginning."""
    place = _place(program, rng, *MOVES, Reduce)
    if place is None:
        return None
    command = at(program, place)
    less = command.reduction.element_bytes if isinstance(command, Reduce) else rng.choice((1, 4))
    start = rng.choice((0, less))
    return replaced(program, place, respanned(command, lambda s: cut(s, start, s.nbytes - less + start)))


def halves(program: Program, rng: random.Random) -> Program | None:
    """A move or reduction in two parts, cut anywhere, in either order; they may overlap, or leave a byte out."""
    place = _place(program, rng, *MOVES, Reduce)
    size = place and next(spans(at(program, place))).nbytes
    if not place or not size or size < 2:
        return None
    command = at(program, place)
    unit = command.reduction.element_bytes if isinstance(command, Reduce) and rng.random() < 0.8 else 1
    middle = rng.randrange(unit, size, unit) if size > unit else 1
    again = middle if rng.random() < 0.8 else max(0, min(size - 1, middle + rng.choice((-unit, unit))))
    parts = [respanned(command, lambda s: cut(s, 0, middle)), respanned(command, lambda s: cut(s, again, size))]
    return replaced(program, place, *rng.sample(parts, 2))


def detour(program: Program, rng: random.Random) -> Program | None:
    """A copy goes through staging: of its own, or of somebody else's, on the way."""
    place = _place(program, rng, Copy)
    if place is None:
        return None
    copy, rank = at(program, place), program.queues[place[0]].rank
    assert isinstance(copy, Copy)
    sizes = list(program.staging_bytes)
    end = -(-sizes[rank] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    offset = end if rng.random() < 0.6 else rng.randrange(end + 1)
    held = Span(rank, Buffer.STAGING, offset, copy.src.nbytes)
    sizes[rank] = max(sizes[rank], held.end)
    longer = replaced(program, place, Copy(held, copy.src), Copy(copy.dst, held))
    return dataclasses.replace(longer, staging_bytes=tuple(sizes))


def slot(program: Program, rng: random.Random) -> Program | None:
    """Two slots of staging are one."""
    used = [s for q in program.queues for c in q.commands for s in spans(c) if s.buffer is Buffer.STAGING]
    if not used:
        return None
    one = rng.choice(used)
    starts = sorted({s.offset for s in used if s.rank == one.rank} - {one.offset})
    if not starts:
        return None
    distance = rng.choice(starts) - one.offset

    def shared(s: Span) -> Span:
        inside = (s.rank, s.buffer) == (one.rank, one.buffer) and one.offset <= s.offset and s.end <= one.end
        return dataclasses.replace(s, offset=s.offset + distance) if inside else s

    return rewritten(program, lambda c: (respanned(c, shared),))


def staging(program: Program, rng: random.Random) -> Program | None:
    """A rank has less staging than is used."""
    ranks = [rank for rank, nbytes in enumerate(program.staging_bytes) if nbytes]
    if not ranks:
        return None
    rank, less = rng.choice(ranks), rng.choice((1, SLOT_ALIGNMENT))
    sizes = [max(0, n - less) if r == rank else n for r, n in enumerate(program.staging_bytes)]
    return dataclasses.replace(program, staging_bytes=tuple(sizes))


def sources(program: Program, rng: random.Random) -> Program | None:
    """The sources of a reduction are in another order; or one is there twice, missing, or another one's."""
    place = _place(program, rng, Reduce)
    if place is None:
        return None
    command = at(program, place)
    assert isinstance(command, Reduce)
    srcs = list(command.srcs)
    change = rng.choice(("order", "order", "twice", "missing", "other", "one"))
    if change == "order":
        rng.shuffle(srcs)
    elif change == "twice":
        srcs.insert(rng.randint(0, len(srcs)), rng.choice(srcs))
    elif change == "missing":
        srcs.pop(rng.randrange(len(srcs)))
    elif change == "other":
        srcs[rng.randrange(len(srcs))] = rng.choice(srcs)
    else:
        srcs = [rng.choice(srcs)]
    return replaced(program, place, dataclasses.replace(command, srcs=tuple(srcs)))


def roundings(program: Program, rng: random.Random) -> Program | None:
    """A reduction in two steps: some sources first, then their result with the others."""
    place = _place(program, rng, Reduce)
    if place is None:
        return None
    command = at(program, place)
    assert isinstance(command, Reduce)
    if len(command.srcs) < 2:
        return None
    first = rng.randint(1 if rng.random() < 0.2 else 2, len(command.srcs))
    held, sizes = command.dst, list(program.staging_bytes)
    if rng.random() < 0.4:  # in staging of its own, so that the destination may be a source
        rank = program.queues[place[0]].rank
        held = Span(rank, Buffer.STAGING, -(-sizes[rank] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT, command.dst.nbytes)
        sizes[rank] = held.end
    steps = [
        Reduce(held, command.srcs[:first], command.reduction),
        Reduce(command.dst, (held, *command.srcs[first:]), command.reduction),
    ]
    return dataclasses.replace(replaced(program, place, *steps), staging_bytes=tuple(sizes))


def reduction(program: Program, rng: random.Random) -> Program | None:
    """One reduction is another operation, or takes its elements for others."""
    place = _place(program, rng, Reduce)
    if place is None:
        return None
    command = at(program, place)
    assert isinstance(command, Reduce)
    op, dtype = command.reduction.op, command.reduction.dtype
    other = Reduction(rng.choice(list(ReduceOp)), dtype) if rng.random() < 0.5 else Reduction(op, _dtype(rng))
    return replaced(program, place, dataclasses.replace(command, reduction=other))


def destinations(program: Program, rng: random.Random) -> Program | None:
    """A broadcast to one rank, to three, or twice to one; a copy that is a broadcast."""
    place = _place(program, rng, Broadcast) or _place(program, rng, Copy)
    if place is None:
        return None
    command = at(program, place)
    assert isinstance(command, Broadcast | Copy)
    dsts = list(command.dsts) if isinstance(command, Broadcast) else [command.dst]
    change = rng.choice(("one", "more", "same"))
    if change == "one":
        dsts = dsts[:1]
    else:
        last = dsts[-1]
        elsewhere = dataclasses.replace(last, rank=(last.rank + 1) % program.world_size)
        dsts.append(elsewhere if change == "more" else last)
        if rng.random() < 0.3:
            dsts = dsts[-2:]
    return replaced(program, place, Broadcast(tuple(dsts), command.src))  # type: ignore[arg-type]


def exchanged(program: Program, rng: random.Random) -> Program | None:
    """A swap in two copies, of which the second reads what the first has written; copies in another order."""
    place = _place(program, rng, Swap)
    if place is not None:
        command = at(program, place)
        assert isinstance(command, Swap)
        return replaced(program, place, Copy(command.a, command.b), Copy(command.b, command.a))
    queues = [q for q, queue in enumerate(program.queues) if sum(isinstance(c, MOVES) for c in queue.commands) > 1]
    if not queues:
        return None
    q = rng.choice(queues)
    commands = list(program.queues[q].commands)
    first, second = rng.sample([c for c, command in enumerate(commands) if isinstance(command, MOVES)], 2)
    commands[first], commands[second] = commands[second], commands[first]
    return edited(program, q, commands)


def _dtype(rng: random.Random) -> str:
    return rng.choice(list(ELEMENT_BYTES))


def _place(program: Program, rng: random.Random, *kinds: type) -> Place | None:
    found = list(places(program, *kinds))
    return rng.choice(found) if found else None
