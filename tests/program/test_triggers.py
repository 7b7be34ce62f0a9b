"""Programs that their callers release in slices: what is proved of them, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from sliced import sliced_gather

from sidelane.errors import ProgramError
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, SignalOp, Wait
from sidelane.program.pieces import gathering_program
from sidelane.program.transform import triggers_of, without_callers
from sidelane.program.verify import verify
from sidelane_lab.machines.load import named
from sidelane_lab.sim.simulate import simulate


@pytest.mark.parametrize(("ranks", "slices"), [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 5)])
def test_slices_are_proved(ranks: int, slices: int) -> None:
    program = sliced_gather(ranks, slices, 24)
    verify(program)
    for rank in range(ranks):
        expected = [(Signal(Flag(rank, number), EPOCH),) for number in range(slices)]
        assert list(triggers_of(program, rank)) == expected
    engines = {queue.engine for queue in without_callers(program).queues}
    assert engines == {Engine(EngineKind.DMA)}


def test_a_program_without_callers_stays_as_it_is() -> None:
    program = without_callers(sliced_gather(2, 2, 8))
    assert without_callers(program) is program and triggers_of(program, 0) == ()


def test_a_slice_that_is_copied_before_its_trigger_is_a_race() -> None:
    with pytest.raises(ProgramError, match=r"race on shard@0\[24:48\]"):
        verify(sliced_gather(2, 3, 24, late=1))


def on_caller(change: Callable[[tuple[Command, ...]], tuple[Command, ...]]) -> Program:
    """The first trigger of rank 0, changed."""
    program = sliced_gather(2, 2, 8)
    queues = tuple(
        dataclasses.replace(queue, commands=change(queue.commands))
        if queue.rank == 0 and queue.engine == Engine(EngineKind.CALLER)
        else queue
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda commands: commands[::-1], "computes in front of its signals"),
        (lambda commands: commands[:1], "wait flag 0 >= epoch"),
        (lambda commands: commands[1:], "wrong bytes"),
        (lambda commands: (Copy(Span(0, "output", 0, 8), Span(0, "shard", 0, 8)), *commands), "its own rank computes"),
        (
            lambda commands: (Copy(Span(1, "shard", 0, 8), Span(0, "computed", 0, 8)), *commands),
            "its own rank computes",
        ),
        (lambda commands: (Copy(Span(0, "shard", 0, 8), Span(0, "computed", 4, 8)), *commands[1:]), "wrong bytes"),
        (lambda commands: (Copy(Span(0, "shard", 0, 16), Span(0, "computed", 0, 16)), *commands[1:]), "race"),
        (lambda commands: (*commands, Signal(Flag(0, 1), EPOCH)), "flag 1"),
    ],
    ids=["late", "never", "nothing", "moves", "elsewhere", "other bytes", "too much", "of another one"],
)
def test_triggers_that_are_wrong(change: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        verify(on_caller(change))


def test_engines_cannot_copy_what_is_only_computed() -> None:
    contract = Contract.of(
        "early", {"computed": [8], "output": [8]}, [Result(Span(0, "output", 0, 8), (Span(0, "computed", 0, 8),))],
        computed=["computed"],
    )  # fmt: skip
    copy = Copy(Span(0, "output", 0, 8), Span(0, "computed", 0, 8))
    with pytest.raises(ProgramError, match="only caller engines copy from it"):
        verify(Program(contract, "one", (Queue(0, Engine(EngineKind.DMA), (copy,)),), (0,), 0))
    verify(Program(contract, "one", (Queue(0, Engine(EngineKind.CALLER), (copy,)),), (0,), 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda commands: (Wait(Flag(0, 2), EPOCH), *commands), "waits and signals"),
        (lambda commands: commands[:1], "sets flags of its own rank, one or more"),
        (lambda commands: (*commands, Signal(Flag(1, 1), EPOCH)), "sets flags of its own rank"),
        (lambda commands: (commands[0], Signal(Flag(0, 0), EPOCH, SignalOp.ADD)), "sets flags of its own rank"),
    ],
)
def test_callers_that_are_no_triggers(change: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        triggers_of(on_caller(change), 1)


@pytest.mark.parametrize(
    ("left_out", "engine", "words"),
    [
        (Wait, EngineKind.CALLER, "race"),
        (Wait, EngineKind.DMA, "lost|race|nobody"),
    ],
)
def test_what_is_read_before_it_came_is_a_race(left_out: type, engine: EngineKind, words: str) -> None:
    program = gathering_program(2, 3, 2, 8)
    verify(program)
    queues = tuple(
        dataclasses.replace(queue, commands=tuple(c for c in queue.commands if not isinstance(c, left_out)))
        if queue.engine.kind is engine
        else queue
        for queue in program.queues
    )
    with pytest.raises(ProgramError, match=words):
        verify(dataclasses.replace(program, queues=queues))


def test_readers_that_are_none() -> None:
    """Engines cannot copy to what is only used; and callers read behind their waits, and what their own rank has."""
    sizes = {"output": [8, 8], "used": [8, 8]}
    here, use = Span(0, "output", 0, 8), Span(0, "used", 0, 8)
    contract = Contract.of("late", sizes, [Result(use, (here,))], used=["used"])
    flag = Flag(0, 0)
    tells = Queue(0, Engine(EngineKind.DMA), (Signal(flag, EPOCH),))
    caller = Engine(EngineKind.CALLER)
    for commands, words in (
        ((Copy(use, here), Wait(flag, EPOCH)), "reads behind its waits"),
        ((Wait(flag, EPOCH), Copy(use, Span(1, "output", 0, 8))), "only signals and waits"),
        ((Wait(flag, EPOCH), Copy(here, Span(0, "output", 0, 8))), "only signals and waits"),
    ):
        with pytest.raises(ProgramError, match=words):
            verify(Program(contract, "one", (tells, Queue(0, caller, commands)), (0, 0), 1))
    with pytest.raises(ProgramError, match="they copy to it"):
        verify(Program(contract, "one", (Queue(0, Engine(EngineKind.DMA), (Copy(use, here),)),), (0, 0), 1))
    verify(Program(contract, "one", (tells, Queue(0, caller, (Wait(flag, EPOCH), Copy(use, here)))), (0, 0), 1))


def test_numbers_of_triggers() -> None:
    program = sliced_gather(1, 2, 8)
    queues = [queue for queue in program.queues if queue.engine != Engine(EngineKind.CALLER)]
    with pytest.raises(ValueError, match=r"triggers of rank 0 \(value=\[1\], allowed=0, 1, 2 \.\.\.\)"):
        triggers_of(dataclasses.replace(program, queues=tuple(queues)), 0)


def test_contracts_with_what_is_computed() -> None:
    sizes = {"computed": [8], "output": [8]}
    result = Result(Span(0, "output", 0, 8), (Span(0, "computed", 0, 8),))
    assert Contract.of("some", sizes, [result], computed=["computed"]).bound == ("output",)
    assert Contract.of("some", sizes, [result], used=["output"]).bound == ("computed",)
    with pytest.raises(ValueError, match="computed and used"):
        Contract.of("some", sizes, [result], computed=["computed"], used=["computed"])
    with pytest.raises(ValueError, match=r"computed \(value=\['shard'\]"):
        Contract.of("some", sizes, [result], computed=["shard"])
    with pytest.raises(ValueError, match="scratch and computed"):
        Contract.of("some", sizes, [result], computed=["computed"], scratch=["computed"])
    with pytest.raises(ValueError, match="neither in scratch nor in a computed buffer"):
        Contract.of("some", sizes, [result], computed=["output"])


def test_the_simulator_takes_triggers_for_pulled() -> None:
    machine = named("h200x4")
    whole, sliced = (simulate(sliced_gather(4, slices, (1 << 20) // slices), machine).time_us for slices in (1, 4))
    assert 0 < whole < sliced < 3 * whole
