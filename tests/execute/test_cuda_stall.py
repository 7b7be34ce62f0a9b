"""From flag words to the rank and the command that are missing."""

from __future__ import annotations

import pytest

from sidelane.execute.cuda.stall import assume_missing, find_stall
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build
from sidelane.program.collective import ReduceOp, Reduction
from sidelane.program.ir import Copy, Program, Signal, Wait
from sidelane.program.transform import freeze, lower
from sidelane.program.wraparound import reached

EPOCH = 5


def words_when(program: Program, dead: dict[int, int]) -> dict[int, list[int]]:
    """Run invocation 5 until nothing moves; rank r in ``dead`` executes only ``dead[r]`` commands of each queue."""
    words = {rank: [EPOCH - 1] * program.flag_count for rank in range(program.world_size)}
    done = [0] * len(program.queues)
    moved = True
    while moved:
        moved = False
        for number, queue in enumerate(program.queues):
            limit = min(len(queue.commands), dead.get(queue.rank, len(queue.commands)))
            while done[number] < limit:
                command = queue.commands[done[number]]
                if isinstance(command, Wait) and words[command.flag.rank][command.flag.index] < EPOCH:
                    break
                if isinstance(command, Signal):
                    words[command.flag.rank][command.flag.index] = EPOCH
                done[number] += 1
                moved = True
    return words


PROGRAMS = [
    build(define.all_gather([8] * 4), "b2b"),
    build(define.all_gather([8] * 4), "pcpy", Transport.PULL),
    build(define.all_to_all([[8] * 4] * 4), "b2b", Transport.STAGED),
    build(define.all_to_all([[8] * 4] * 4, in_place=True), "pcpy", Transport.STAGED),
    lower(build(define.all_to_all([[8] * 4] * 4), "swap"), {Copy}),
    build(define.all_reduce([8] * 4, Reduction(ReduceOp.SUM, "int32")), "b2b"),
    # Queues of one rank wait for each other in turn.
    build(define.all_gather([4096] * 4), "striped"),
    build(define.scatter([4096] * 4, 2), "striped"),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.collective.kind}-{program.variant}")
@pytest.mark.parametrize("progress", [0, 1, 2, 3])
def test_a_rank_that_stopped_is_the_one_at_fault(program: Program, progress: int) -> None:
    words = words_when(program, {2: progress})
    for rank in (0, 1, 3):
        stall = find_stall(program, rank, EPOCH, words)
        if stall.waiting:
            assert stall.ranks == (2,), f"rank {rank}, {progress} commands: {stall}"
            assert "queue " in stall.missing[0][1]


def test_two_ranks_that_stopped_are_both_named() -> None:
    program = build(define.all_gather([8] * 4), "b2b")
    assert find_stall(program, 0, EPOCH, words_when(program, {1: 0, 3: 0})).ranks == (1, 3)


def test_nothing_is_missing_when_all_came() -> None:
    for program in PROGRAMS:
        stall = find_stall(program, 1, EPOCH, words_when(program, {}))
        assert stall.waiting == "" and stall.missing == ()


def test_a_rank_whose_words_cannot_be_read_is_still_judged_by_its_signals() -> None:
    program = build(define.all_gather([8] * 3), "b2b")
    words = words_when(program, {2: 0})
    del words[2]
    assert find_stall(program, 0, EPOCH, words).ranks == (2,)


@pytest.mark.parametrize("frozen", [False, True])
def test_without_words_the_suspects_tell_where_a_rank_waits(frozen: bool) -> None:
    program = PROGRAMS[0]
    if frozen:
        program = freeze(program)
    stall = find_stall(program, 0, EPOCH, assume_missing(program, EPOCH, {2}))
    assert stall.ranks == (2,) and "wait flag 2 " in stall.waiting


def test_frozen_flags_make_every_silent_rank_a_suspect() -> None:
    program = freeze(build(define.all_gather([8] * 3), "b2b"))
    words = {rank: [0] * program.flag_count for rank in range(3)}
    words[0][1] = 1  # the entry of rank 1
    stall = find_stall(program, 0, 1, words)
    assert 2 in stall.ranks


@pytest.mark.parametrize(
    ("word", "value", "expected"),
    [(5, 5, True), (6, 5, True), (4, 5, False), (3, 2**32 - 2, True), (2**32 - 2, 3, False), (5 + 2**30, 5, True)],
)
def test_words_compare_in_a_circle(word: int, value: int, expected: bool) -> None:
    assert reached(word, value) is expected
