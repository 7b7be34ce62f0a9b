"""Programs whose reads count once the owner has confirmed the place, for every set of ranks that miss."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest

from sidelane.collectives.call_cache import CallCache
from sidelane.collectives.learning import protocol
from sidelane.collectives.learning.knowledge import TrackedSignature
from sidelane.errors import ProgramError
from sidelane.execute.cuda.release import READ_CAPACITY
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build, variants
from sidelane.program.builders.confirmed import can_be_confirmed, confirmed
from sidelane.program.builders.flags import CONFIRMATIONS
from sidelane.program.collective import (
    MAX_NODE_RANKS,
    Collective,
    Kind,
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    scatter,
)
from sidelane.program.ir import Command, Copy, Program, Signal, Wait
from sidelane.program.transform import prelaunch
from sidelane.program.verify import verify
from sidelane.program.verify.check import verify_sequence

KINDS: tuple[Callable[[int], Collective | Batch], ...] = (
    lambda n: all_gather([8] * n),
    lambda n: all_gather([4 * (rank + 1) for rank in range(n)], in_place=True),
    lambda n: all_to_all([[4 * (i + j) for j in range(n)] for i in range(n)]),
    lambda n: all_to_all([[4] * n] * n, copies_own=False),
    lambda n: broadcast(8, n, 1, in_place=True),
    lambda n: gather([4] * n, 0),
    lambda n: scatter([4] * n, 1),
    lambda n: Batch("all_gather", n, (all_gather([8] * n), all_gather([0] * n), all_gather([12] * n, in_place=True))),
    lambda n: Batch("batch", n, (all_to_all([[4] * n] * n), broadcast(8, n, 1, in_place=True), all_gather([4] * n))),
)


def subsets(ranks: Iterable[int]) -> Iterator[set[int]]:
    """All sets of ranks that may miss, or of those of which that is known."""
    found = sorted(ranks)
    for count in range(len(found) + 1):
        yield from map(set, itertools.combinations(found, count))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_all_bytes_are_right_whoever_misses(kind: Callable[[int], Collective | Batch], n: int) -> None:
    collective = kind(n)
    assert can_be_confirmed(collective)
    for missing in subsets(range(n)):
        for unread in subsets(missing):
            verify(confirmed(collective, missing, elsewhere=True, unread=unread))


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_nobody_always_runs_the_same(kind: Callable[[int], Collective | Batch]) -> None:
    n = 4
    usual = confirmed(kind(n))
    for missing in subsets(range(n)):
        for unread in subsets(missing):
            alike = confirmed(kind(n), unread, unread=unread)  # as far as a rank knows that does not miss
            program = confirmed(kind(n), missing, unread=unread)
            assert program.staging_bytes == usual.staging_bytes, "there is room for it before"
            for rank in set(range(n)) - missing:
                assert program.queues_of(rank) == alike.queues_of(rank)


def test_they_may_follow_each_other_and_other_programs() -> None:
    draw, n = random.Random(1), 3
    kinds = [kind(n) for kind in KINDS]
    single = [each for each in kinds if isinstance(each, Collective)]
    for _ in range(12):
        programs: list[Program] = []
        for _ in range(3):
            collective, missing = draw.choice(kinds), draw.choice([*subsets(range(n))])
            programs.append(confirmed(collective, missing, elsewhere=True))
            programs.append(build(draw.choice(single), "b2b", draw.choice([*Transport])))
        programs.append(build(all_reduce([4] * n, Reduction("sum", "float32")), "b2b", Transport.PUSH))
        draw.shuffle(programs)
        verify_sequence(programs)


def test_flags_of_confirmations_are_nothing_else() -> None:
    assert CONFIRMATIONS + MAX_NODE_RANKS <= READ_CAPACITY, "whoever waits in vain can be told for which"
    for variant in variants(Kind.ALL_GATHER):
        for nbytes in (1 << 20, 1 << 28):
            largest = build(all_gather([nbytes] * MAX_NODE_RANKS), variant)
            assert prelaunch(largest).flag_count <= CONFIRMATIONS, variant


def without(program: Program, rank: int, mistaken: Callable[[list[Command]], list[Command]]) -> Program:
    """The program with other commands on the first engine of a rank."""
    changed = [
        dataclasses.replace(queue, commands=tuple(mistaken(list(queue.commands))))
        if queue == program.queues_of(rank)[0]
        else queue
        for queue in program.queues
    ]
    return dataclasses.replace(program, queues=tuple(changed))


def is_confirmation(command: Command) -> bool:
    return isinstance(command, Signal | Wait) and command.flag.index >= CONFIRMATIONS


def confirms_early(commands: list[Command]) -> list[Command]:
    signals = [c for c in commands if is_confirmation(c) and isinstance(c, Signal)]
    return [*signals, *(c for c in commands if c not in signals)]


def waits_for_no_confirmation(commands: list[Command]) -> list[Command]:
    return [c for c in commands if not (is_confirmation(c) and isinstance(c, Wait))]


def writes_before_it_was_read(commands: list[Command]) -> list[Command]:
    written = [c for c in commands if isinstance(c, Copy) and c.dst.rank != c.src.rank and c.src.rank == 1]
    return [*written, *(c for c in commands if c not in written)]


def does_not_write(commands: list[Command]) -> list[Command]:
    return [c for c in commands if not (isinstance(c, Copy) and c.dst.rank != c.src.rank and c.src.rank == 1)]


@pytest.mark.parametrize(
    ("rank", "mistake"),
    [(1, confirms_early), (0, waits_for_no_confirmation), (1, writes_before_it_was_read), (1, does_not_write)],
)
def test_mistakes_are_refused(rank: int, mistake: Callable[[list[Command]], list[Command]]) -> None:
    program = confirmed(all_gather([8, 8]), {1}, elsewhere=True)
    with pytest.raises(ProgramError):
        verify(without(program, rank, mistake))


def test_what_cannot_be_confirmed() -> None:
    assert not can_be_confirmed(all_to_all([[4, 4], [4, 4]], in_place=True))
    assert not can_be_confirmed(all_gather([0, 0]))
    assert not can_be_confirmed(all_reduce([4, 4], Reduction("sum", "float32")))
    with pytest.raises(ValueError, match="unread="):
        confirmed(all_gather([4, 4]), {1}, unread={0})


def test_mistakes_with_lists_are_refused() -> None:
    # One tensor of a list lies elsewhere: whoever writes but that, or confirms the rest early, is found.
    definition = Batch("all_gather", 2, (all_gather([8, 8]), all_gather([4, 4])))
    program = confirmed(definition, {1}, elsewhere=True)
    verify(program)

    def writes_only_one(commands: list[Command]) -> list[Command]:
        written = [c for c in commands if isinstance(c, Copy) and c.dst.rank == 0]
        return [c for c in commands if c != written[0]]

    for mistake in (writes_only_one, confirms_early, writes_before_it_was_read):
        with pytest.raises(ProgramError):
            verify(without(program, 1, mistake))
    for parts in ((all_gather([4, 4]), all_reduce([4, 4], Reduction("sum", "float32"))), (all_gather([0, 0]),), ()):
        assert not can_be_confirmed(Batch("batch", 2, parts))
    assert not can_be_confirmed(Batch("all_to_all", 2, (all_to_all([[4, 4], [4, 4]], in_place=True),)))


@pytest.mark.parametrize("first", [True, False])
def test_calls_share_a_proof_whatever_runs_next_to_them(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[Program] = []
    monkeypatch.setattr(protocol, "verify", proved.append)
    calls = SimpleNamespace(
        control=SimpleNamespace(rank=0), config=SimpleNamespace(verify=True), making_ready=contextlib.nullcontext
    )
    bound: list[Program] = []
    preparer = SimpleNamespace(
        cache=CallCache(), make_room=lambda program: None, bind=lambda program, *_, **__: bound.append(program)
    )
    programs, gather = protocol.AheadPrograms(calls, preparer), all_gather([8] * 2)  # type: ignore[arg-type]

    def signature(alone: bool) -> TrackedSignature:
        return TrackedSignature("", gather, (gather,), "", (), alone)

    programs.make_room(signature(True))
    for alone in (first, not first, first):
        programs.prepare((), signature(alone), ({},))
    assert [program.alone for program in bound] == [first, not first, first]
    assert bound[0] is bound[2], "plans are kept by program"
    assert len(proved) == 1
    programs.prepare((), signature(first), ({},), frozenset({1}))
    assert len(proved) == 2
