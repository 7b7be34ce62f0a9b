"""Programs of one's own: held to a contract between named buffers, as others are to their collective."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from contracts import contract_of, under_contract
from loads import handover as ring
from test_verify_builders import SUM, make, programs

from sidelane.errors import ProgramError
from sidelane.program.builders import build
from sidelane.program.collective import Buffer, Kind, ReduceOp, Reduction, Span, all_gather, reduce_scatter
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.verify import verify, verify_sequence
from sidelane_lab.machines.load import named
from sidelane_lab.sim.simulate import simulate

SOURCE, TARGET = Span(0, "cache", 64, 32), Span(1, "inbox", 0, 32)
SIZES = {"cache": (96, 0), "inbox": (0, 40)}


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [(kind, place) for kind in Kind for place in (False, True) if not (place and kind in (Kind.SCATTER, Kind.GATHER))],
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_builders_programs_keep_the_contract_that_says_the_same(kind: Kind, n: int, in_place: bool) -> None:
    for program in programs(make(kind, n, 5, in_place)):
        verify(under_contract(program))


def test_programs_with_and_without_a_contract_follow_each_other() -> None:
    program = build(all_gather([40] * 3), "b2b")
    verify_sequence([program, under_contract(program), program])


def handover(*commands: Any, contract: Contract | None = None, variant: str = "listed") -> Program:
    """Rank 0 pushes a part of its cache into the inbox of rank 1, when that is free."""
    engine = Engine(EngineKind.DMA)
    given = commands or (Wait(Flag(0, 0), EPOCH), Copy(TARGET, SOURCE), Signal(Flag(1, 0), EPOCH))
    queues = (
        Queue(0, engine, given),
        Queue(1, engine, (Signal(Flag(0, 0), EPOCH), Wait(Flag(1, 0), EPOCH))),
    )
    claimed = contract or Contract.of("handover", SIZES, [Result(TARGET, (SOURCE,))])
    return Program(claimed, variant, queues, (0, 0), 1)


def test_a_program_of_ones_own_is_proved() -> None:
    program = handover()
    verify(program)
    assert str(program.collective) == "handover(2 ranks, 32 bytes)"
    assert program.remote_buffers() == {"inbox"}


WAIT, SIGNAL = Wait(Flag(0, 0), EPOCH), Signal(Flag(1, 0), EPOCH)


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ((WAIT, SIGNAL), r"wrong bytes: rank 1 .*inbox@1\[0:32\] holding inbox@1\[0:32\], not cache@0\[64:96\]"),
        ((WAIT, Copy(TARGET, Span(0, "cache", 0, 32)), SIGNAL), r"holding cache@0\[0:32\], not cache@0\[64:96\]"),
        ((Copy(TARGET, SOURCE), WAIT, SIGNAL), "race"),
        ((WAIT, SIGNAL, Copy(TARGET, SOURCE)), "race"),
        (
            (WAIT, Copy(TARGET, SOURCE), Copy(Span(1, "inbox", 32, 8), Span(0, "cache", 0, 8)), SIGNAL),
            r"inbox@1\[32:40\] holding cache@0\[0:8\], not inbox@1\[32:40\]",
        ),
        ((WAIT, Copy(TARGET, SOURCE), Copy(Span(0, "cache", 0, 8), Span(0, "cache", 8, 8)), SIGNAL), "wrong bytes"),
        ((WAIT, Copy(TARGET, Span(0, "mailbox", 0, 32)), SIGNAL), r"mailbox@0 has 0 bytes"),
        ((WAIT, Copy(TARGET, Span(0, "cache", 72, 32)), SIGNAL), r"out of bounds: cache@0 has 96 bytes"),
        ((WAIT, Copy(TARGET, Span(0, Buffer.INPUT, 0, 32)), SIGNAL), r"input@0 has 0 bytes"),
    ],
    ids=["nothing", "other bytes", "early", "late", "unclaimed", "source spoilt", "no buffer", "too far", "input"],
)
def test_what_breaks_the_contract_is_refused(commands: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        verify(handover(*commands))


def test_scratch_may_hold_anything_but_feeds_no_result() -> None:
    sizes = {**SIZES, "scratch": (0, 32)}
    middle = Span(1, "scratch", 0, 32)
    contract = Contract.of("handover", sizes, [Result(TARGET, (SOURCE,))], scratch=["scratch"])
    through = (WAIT, Copy(middle, SOURCE), Copy(TARGET, middle), SIGNAL)
    verify(handover(*through, contract=contract))
    kept = dataclasses.replace(contract, scratch=())
    with pytest.raises(ProgramError, match=r"scratch@1\[0:32\] holding cache"):
        verify(handover(*through, contract=kept))
    with pytest.raises(ProgramError, match=r"holding scratch@1\[0:32\], not cache"):
        verify(handover(WAIT, Copy(TARGET, middle), SIGNAL, contract=contract))


def test_staging_in_plain_words_is_staging() -> None:
    program = build(all_gather([40] * 3), "b2b")
    copy = Copy(Span(0, "staging", 0, 8), Span(0, "input", 0, 8))
    queues = (*program.queues, Queue(0, Engine(EngineKind.DMA, 7), (copy,)))
    verify(dataclasses.replace(program, staging_bytes=(8,) * 3, queues=queues))
    with pytest.raises(ProgramError, match="staging@0 has 0 bytes"):
        verify(dataclasses.replace(program, queues=queues))


@pytest.mark.parametrize(
    ("sizes", "results", "scratch", "words"),
    [
        ({}, [], (), "one number of ranks"),
        ({"a": (1, 2), "b": (1,)}, [], (), "one number of ranks"),
        ({"a": (1, -2)}, [], (), "negative"),
        ({"staging": (1, 2)}, [], (), "names of buffers"),
        (SIZES, [], ("elsewhere",), "scratch"),
        (SIZES, [Result(Span(1, "inbox", 16, 32), (SOURCE,))], (), "bytes that there are not"),
        (SIZES, [Result(Span(2, "inbox", 0, 32), (SOURCE,))], (), "bytes that there are not"),
        (SIZES, [Result(TARGET, (Span(0, "cache", 0, 16),))], (), "differ in size"),
        (SIZES, [Result(TARGET, (SOURCE, SOURCE))], (), "a copy of one span"),
        (SIZES, [Result(TARGET, (), SUM)], (), "a copy of one span"),
        (SIZES, [Result(Span(1, "inbox", 0, 6), (Span(0, "cache", 0, 6),), SUM)], (), "whole elements of 4 bytes"),
        (SIZES, [Result(TARGET, (SOURCE,)), Result(TARGET, (SOURCE,))], (), "two results"),
        (SIZES, [Result(TARGET, (SOURCE,))], ("inbox",), "in scratch"),
    ],
)  # fmt: skip
def test_a_contract_that_says_nothing_sensible_is_refused(
    sizes: dict[str, tuple[int, ...]], results: list[Result], scratch: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Contract.of("wrong", sizes, results, scratch=scratch)


def test_a_program_of_ones_own_is_simulated() -> None:
    """A rank's bytes cross one link of 450 GB/s, of which a copy engine takes some: 64 MiB in 150 us and more."""
    times = [simulate(ring(4, nbytes), named("h200x4")).time_us for nbytes in (1 << 10, 64 << 20)]
    assert 1 < times[0] < 50
    assert 150 < times[1] < 300


def test_a_reduction_is_held_to_its_order() -> None:
    collective = reduce_scatter([4, 8, 12], Reduction(ReduceOp.SUM, "float32"))
    contract, program = contract_of(collective), under_contract(build(collective, "b2b"))
    verify(program)
    turned = dataclasses.replace(
        contract,
        results=tuple(dataclasses.replace(result, srcs=result.srcs[::-1]) for result in contract.results),
    )
    with pytest.raises(ProgramError, match="wrong bytes"):
        verify(dataclasses.replace(program, collective=turned))
