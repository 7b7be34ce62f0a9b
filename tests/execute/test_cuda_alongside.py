"""What stays on a rank while other bytes cross links: copied in rows, which leave the links their speed."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
from cuda_world import world_of
from small_programs import programs

from sidelane.choice.candidate import find
from sidelane.collectives.agreement import Agreement, CallPart
from sidelane.collectives.plan import make_program
from sidelane.config import COMPUTE, NOTHING
from sidelane.execute.cuda import copy_batches, plan, streams
from sidelane.execute.cuda.bind import copies_of
from sidelane.execute.cuda.calls import Memcpy, MemcpyEveryOther, Operand, counts_of
from sidelane.execute.cuda.copy_batches import LEAST_SPLIT_BYTES, MOST_ROWS, split_in_rows
from sidelane.execute.cuda.plan import plan_calls
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build
from sidelane.program.collective import Buffer, Collective, Kind
from sidelane.program.ir import EPOCH, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.transform import freeze, hold, lower
from sidelane.program.verify import verify
from sidelane_lab.sim.prelaunch import prelaunch
from sidelane_lab.studies.phases.stamp import stamp

MIB = 1 << 20


def own_calls(collective: Collective, *, alone: bool, captured: bool = False, transport: Transport = Transport.PUSH):
    program = dataclasses.replace(build(collective, "b2b", transport), alone=alone)
    made = plan_calls(freeze(program) if captured else program, 0, captured=captured)
    return [call for call in made.calls(1) if isinstance(call, Memcpy | MemcpyEveryOther)]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("transport", [Transport.PUSH, Transport.PULL])
def test_a_large_own_part_is_copied_in_rows_if_nothing_computes(transport: Transport, captured: bool) -> None:
    gather = define.all_gather([LEAST_SPLIT_BYTES + 16] * 2)
    *rows, rest = own_calls(gather, alone=True, captured=captured, transport=transport)
    assert [type(call) for call in rows] == [MemcpyEveryOther] * 2 and (type(rest), rest.nbytes) == (Memcpy, 16)
    (whole,) = own_calls(gather, alone=False, captured=captured, transport=transport)
    assert isinstance(whole, Memcpy) and whole.within_rank


@pytest.mark.parametrize(
    ("collective", "why"),
    [
        (define.all_gather([LEAST_SPLIT_BYTES - 16] * 2), "too small"),
        (define.all_to_all([[32 * MIB, 31 * MIB], [64 * MIB, 0]]), "more than crosses a link, which it would outlast"),
        (define.all_gather([32 * MIB]), "nothing crosses a link"),
    ],
)
def test_other_own_parts_are_copied_as_fast_as_can_be(collective: Collective, why: str) -> None:
    assert not any(isinstance(call, MemcpyEveryOther) for call in own_calls(collective, alone=True)), why


def test_what_several_engines_copy_of_an_own_part_counts_together() -> None:
    """Each copies no more than crosses a link; both together would outlast that."""
    program = build(define.all_to_all([[64 * MIB, 32 * MIB], [32 * MIB, 64 * MIB]]), "b2b", Transport.PUSH)
    queues: list[Queue] = []
    for queue in program.queues:
        if queue.engine.kind is EngineKind.DMA:
            place = queue.commands.index(Signal(Flag(queue.rank, 4), EPOCH))
            marks = Signal(Flag(queue.rank, 5), EPOCH)
            queues.append(
                dataclasses.replace(queue, commands=(*queue.commands[:place], marks, *queue.commands[place:]))
            )
            continue
        _, whole = queue.commands
        assert isinstance(whole, Copy)
        for number in range(2):
            dst, src = (
                dataclasses.replace(end, offset=end.offset + number * 32 * MIB, nbytes=32 * MIB)
                for end in (whole.dst, whole.src)
            )
            half = Wait(Flag(queue.rank, 4 + number), EPOCH), Copy(dst, src)
            queues.append(Queue(queue.rank, Engine(EngineKind.LOCAL, number), half))
    spread = dataclasses.replace(program, queues=tuple(queues), flag_count=6, alone=True)
    verify(spread)
    own = [call for call in plan_calls(spread, 0).calls() if isinstance(call, Memcpy) and call.within_rank]
    assert [call.nbytes for call in own] == [32 * MIB] * 2


@pytest.mark.parametrize("transform", [freeze, hold, prelaunch, stamp, functools.partial(lower, native={Copy})])
def test_no_transform_forgets_whether_something_computes(transform: Callable[[Program], Program]) -> None:
    program = build(define.all_gather([32 * MIB] * 2), "b2b", Transport.PUSH)
    for alone in (False, True):
        assert transform(dataclasses.replace(program, alone=alone)).alone == alone


def test_what_waits_for_one_trigger_is_copied_in_rows_too() -> None:
    program = dataclasses.replace(build(define.all_gather([32 * MIB] * 2), "b2b", Transport.PUSH), alone=True)
    assert sum(isinstance(call, MemcpyEveryOther) for call in plan_calls(hold(program), 0).calls()) == 2


def test_what_is_staged_first_is_not_in_the_shadow_of_anything() -> None:
    program = build(define.all_gather([32 * MIB] * 2), "b2b", Transport.STAGED)
    made = plan_calls(dataclasses.replace(program, alone=True), 0)
    staged = [call for call in made.calls() if isinstance(call, Memcpy) and call.dst.buffer == Buffer.STAGING]
    assert [call.nbytes for call in staged] == [32 * MIB]


def test_rows_are_all_of_a_copy_and_nothing_else() -> None:
    draw = random.Random(5)
    draws = (draw.randrange(LEAST_SPLIT_BYTES, 40 << 30) for _ in range(50))
    sizes = [LEAST_SPLIT_BYTES, 2 * MIB * MOST_ROWS + 1, *draws]
    for nbytes in sizes:
        ends = Operand(0, Buffer.OUTPUT, draw.randrange(1 << 40)), Operand(0, Buffer.INPUT, draw.randrange(1 << 40))
        first, second, *rest = split_in_rows(Memcpy(*ends, nbytes, within_rank=True))
        assert first.rows == second.rows <= MOST_ROWS and first.nbytes == second.nbytes
        for side, start in zip(("dst", "src"), ends, strict=True):
            assert getattr(first, side) == start
            assert getattr(second, side).offset == start.offset + first.nbytes
            behind = start.offset + 2 * first.rows * first.nbytes
            assert [getattr(call, side).offset for call in rest] == [behind] * bool(rest)
        assert 2 * first.rows * first.nbytes + sum(call.nbytes for call in rest) == nbytes


def test_what_a_copy_in_rows_touches_reaches_to_the_end_of_its_last_row() -> None:
    (copy,) = copies_of(MemcpyEveryOther(Operand(0, Buffer.OUTPUT, 5), Operand(0, Buffer.INPUT, 7), 10, 3))
    assert (copy.dst.offset, copy.src.offset, copy.nbytes) == (5, 7, 50)


def test_rows_are_counted_as_calls() -> None:
    program = build(define.all_gather([LEAST_SPLIT_BYTES + 16] * 2), "b2b", Transport.PUSH)
    plain, rows = (counts_of(plan_calls(dataclasses.replace(program, alone=alone), 0)) for alone in (False, True))
    assert (rows.calls, rows.local_copies) == (plain.calls + 2, plain.local_copies + 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_every_builder_moves_the_right_bytes_in_rows(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "INLINE_BYTES", 0)
    monkeypatch.setattr(plan, "LEAST_SPLIT_BYTES", 1)
    monkeypatch.setattr(copy_batches, "MOST_ROWS", 1)
    in_rows = 0
    with world_of(3) as world:
        for seed, program in enumerate(programs(3)):
            alone = dataclasses.replace(freeze(program) if frozen else program, alone=True)
            in_rows += any(isinstance(call, MemcpyEveryOther) for call in plan_calls(alone, 0, captured=frozen).calls())
            loaded = world.load(alone, frozen=frozen)
            expected = loaded.fill(seed)
            if not frozen:
                loaded.start()
                world.synchronize()
            else:
                world.replay(world.captured(loaded.start))
            loaded.check(expected)
    assert in_rows > 10


@pytest.mark.parametrize("beside", [NOTHING, COMPUTE])
def test_a_call_is_alone_unless_its_caller_says_otherwise(beside: str) -> None:
    candidate = find(Kind.ALL_GATHER, "b2b")
    assert candidate is not None
    gather = define.all_gather([64, 64])
    agreement = Agreement((CallPart(gather, "uint8", (0, 0), (1, 0)),), "b2b", frozen=False, beside=beside)
    assert make_program(agreement, candidate, {Copy}).alone == (beside == NOTHING)


def test_rows_of_odd_sizes_hold_what_they_should() -> None:
    """The two of every other row and the rest, as a driver would copy them."""
    nbytes = 3 * LEAST_SPLIT_BYTES + 12345
    source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    found = np.zeros_like(source)
    for call in split_in_rows(Memcpy(Operand(0, "output", 0), Operand(0, "input", 0), nbytes, within_rank=True)):
        rows, step = (call.rows, 2 * call.nbytes) if isinstance(call, MemcpyEveryOther) else (1, call.nbytes)
        for row in range(rows):
            to, at = call.dst.offset + row * step, call.src.offset + row * step
            found[to : to + call.nbytes] = source[at : at + call.nbytes]
    assert np.array_equal(found, source)
