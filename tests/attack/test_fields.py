"""Wrong values in a program, a contract or a definition are refused by name where it is made.

Made-up values take the place of every field of programs that are right. A constructor refuses one with TypeError or
ValueError, or ``verify`` judges the program; what that accepts must show no failure under any schedule.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable, Iterator
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attack.contracts import own
from attack.interpreter import failure
from sidelane.config import Config
from sidelane.errors import ProgramError
from sidelane.program.batch import Batch
from sidelane.program.builders import build, build_batch, variants
from sidelane.program.builders.registry import Transport
from sidelane.program.collective import (
    Buffer,
    Collective,
    Kind,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    split_evenly,
)
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import (
    EPOCH,
    Broadcast,
    Comparison,
    Copy,
    Engine,
    EngineKind,
    Flag,
    Program,
    Queue,
    Reduce,
    Signal,
    SignalOp,
    Stamp,
    Swap,
    Value,
    Wait,
)
from sidelane.program.shape import CallShape, Computation
from sidelane.program.verify import verify, verify_sequence

SUM = Reduction(ReduceOp.SUM, "int32")
HERE, THERE = Span(0, "input", 0, 8), Span(1, "output", 0, 8)
FLAG, DMA = Flag(0, 0), Engine(EngineKind.DMA)
EVEN = ((4, 4), (4, 4))


class Other(StrEnum):
    """Members whose texts are those of others."""

    SUM = "sum"
    ADD = "add"
    LOCAL = "local"
    INPUT = "input"


class Number(IntEnum):
    ONE = 1


class OtherSpan(Span):
    """A span that says that it ends elsewhere."""

    @property
    def end(self) -> int:
        return 0


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no reduction": (lambda: Reduction("product", "float32"), r"Reduction: op \(value='product', allowed=sum, avg"),
    "a function": (lambda: Reduction(sum, "float32"), r"Reduction: op \(value=<built-in"),
    "a dtype of torch": (lambda: Reduction("sum", torch.float32), r"Reduction: dtype \(value=torch.float32"),
    "half a byte": (lambda: Span(0, "input", 0, 2.5), r"Span: nbytes \(value=2.5, allowed=whole"),
    "a truth": (lambda: Span(True, "input", 0, 8), r"Span: rank \(value=True"),
    "a truth of numpy": (lambda: Span(np.bool_(True), "input", 0, 8), "Span: rank"),
    "a truth of torch": (lambda: Span(torch.tensor(True), "input", 0, 8), "Span: rank"),
    "a buffer by number": (lambda: Span(0, 1, 0, 8), r"Span: buffer \(value=1, allowed=text"),
    "a flag of half a rank": (lambda: Flag(0.0, 1), r"Flag: rank \(value=0.0"),
    "half an epoch": (lambda: Value(0, 0.5), r"Value: per_epoch \(value=0.5"),
    "a wait for a number": (lambda: Wait(FLAG, 1), r"Wait: value \(value=1, allowed=Value"),
    "a comparison": (lambda: Wait(FLAG, EPOCH, ">"), r"Wait: comparison \(value='>', allowed===, >=\)"),
    "a signal": (lambda: Signal(FLAG, EPOCH, "and"), r"Signal: op \(value='and', allowed=set, add\)"),
    "a flag as a tuple": (lambda: Signal((0, 0), EPOCH), r"Signal: flag \(value=\(0, 0\), allowed=Flag"),
    "a slot": (lambda: Stamp(1.0), r"Stamp: slot \(value=1.0"),
    "a copy of text": (lambda: Copy(THERE, "input@0[0:8]"), r"Copy: src \(value='input"),
    "a span that lies": (lambda: Copy(THERE, OtherSpan(0, "input", 0, 8)), r"Copy: src .*allowed=Span"),
    "destinations": (lambda: Broadcast(THERE, HERE), r"Broadcast: dsts .*allowed=a tuple"),
    "a destination": (lambda: Broadcast((THERE, None), HERE), r"Broadcast: dsts\[1\] \(value=None"),
    "a swap with a flag": (lambda: Swap(HERE, FLAG), r"Swap: b \(value=Flag"),
    "a reduction by text": (lambda: Reduce(THERE, (HERE, HERE), "sum"), r"Reduce: reduction \(value='sum'"),
    "sources without an order": (lambda: Reduce(THERE, {HERE, THERE}, SUM), r"Reduce: srcs .*allowed=a tuple"),
    "an engine": (lambda: Engine("gpu"), r"Engine: kind \(value='gpu', allowed=dma, local, compute, caller\)"),
    "its number": (lambda: Engine("dma", -1), r"Engine: index \(value=-1, allowed=0 and more"),
    "an engine by text": (lambda: Queue(0, "dma", ()), r"Queue: engine \(value='dma'"),
    "a command by text": (lambda: Queue(0, DMA, "x"), r"Queue: commands \(value='x', allowed=a tuple"),
    "commands by text": (lambda: Queue(0, DMA, ("x",)), r"Queue: commands\[0\] \(value='x', allowed=.*Copy"),
    "flags with a fraction": (lambda: Program(all_gather((4,)), "x", (), (0,), 4.0), r"flag_count \(value=4.0"),
    "staging with one": (lambda: Program(all_gather((4,)), "x", (), (0.5,), 4), r"Program: staging_bytes\[0\]"),
    "no definition": (lambda: Program("all_gather", "x", (), (0,), 4), r"Program: collective \(value='all_gather'"),
    "no queue": (lambda: Program(all_gather((4,)), "x", (None,), (0,), 4), r"Program: queues\[0\] \(value=None"),
    "prelaunched by text": (lambda: Program(all_gather((4,)), "x", (), (0,), 4, "no"), r"Program: prelaunched"),
    "a kind": (lambda: Collective("all_collect", 2, EVEN), r"Collective: kind \(value='all_collect'"),
    "a world with a fraction": (lambda: Collective("all_gather", 2.0, EVEN), r"Collective: world_size \(value=2.0"),
    "another world": (lambda: Collective("all_gather", 3, EVEN), "all_gather: counts must be square"),
    "an uneven gather": (lambda: Collective("all_gather", 2, ((4, 2), (4, 4))), "each row of counts must be one size"),
    "two sums": (lambda: Collective("all_reduce", 2, ((4, 8), (8, 4)), reduction=SUM), "rows of counts must be"),
    "no reduction given": (lambda: Collective("all_reduce", 2, EVEN), r"reduction \(value=None, allowed=a Reduction"),
    "no counts": (lambda: Collective("all_gather", 2, None), r"Collective: counts \(value=None, allowed=a tuple"),
    "no root given": (lambda: Collective("gather", 2, ((4, 0), (4, 0))), r"gather: root \(value=None, allowed=0..1"),
    "a root too many": (lambda: Collective("all_gather", 2, EVEN, root=0), r"root \(value=0, allowed=None"),
    "two roots": (lambda: Collective("scatter", 2, EVEN, root=0), "counts must be 0 but for those of the root"),
    "in place of nothing": (lambda: Collective("gather", 2, ((4, 0), (4, 0)), True, 0), r"in_place \(value=True"),
    "half a shard": (lambda: all_gather((4, 2.5)), r"all_gather: sizes\[1\] \(value=2.5"),
    "a shard by text": (lambda: all_gather(("4", 4)), r"all_gather: sizes\[0\] \(value='4'"),
    "a root that is true": (lambda: broadcast(4, 2, True), r"broadcast: root \(value=True, allowed=0..1"),
    "ranks with a fraction": (lambda: broadcast(4, 2.0, 0), r"broadcast: number of ranks \(value=2.0"),
    "in place by number": (lambda: all_gather((4, 4), in_place=1), r"Collective: in_place \(value=1"),
    "half of a split": (lambda: split_evenly(8.0, 2), r"split_evenly \(value=8.0"),
    "a part": (lambda: Batch("x", 2, ("all_gather",)), r"Batch: parts\[0\] \(value='all_gather'"),
    "no ranks": (lambda: Batch("x", 0, ()), r"Batch: world_size \(value=0"),
    "a result by text": (lambda: Contract.of("x", {"a": [8]}, ["a"]), r"Contract: results\[0\] \(value='a'"),
    "half of a buffer": (lambda: Contract.of("x", {"a": [7.5]}, []), r"bytes of 'a'\[0\] \(value=7.5"),
    "buffers without sizes": (lambda: Contract.of("x", ["a"], []), r"Contract: buffers \(value=\['a'\]"),
    "scratch by letters": (lambda: Contract.of("x", {"a": [8]}, [], scratch="a"), r"Contract: scratch \(value='a'"),
    "a contract by hand": (lambda: Contract("x", 2, (("a", (8, -1)),), ()), "sizes must not be negative"),
    "one name twice": (lambda: Contract("x", 1, (("a", (8,)), ("a", (9,))), ()), "each once"),
    "a result of nothing": (lambda: Result(THERE, None), r"Result: srcs \(value=None"),
    "what is proved": (lambda: verify("x"), r"verify: program \(value='x'"),
    "how often": (lambda: verify(gathered(), invocations=2.0), r"verify: invocations \(value=2.0"),
    "a sequence": (lambda: verify_sequence([gathered(), None]), r"verify_sequence: programs\[1\] \(value=None"),
    "what is built": (lambda: build("all_gather", "b2b"), r"build: collective \(value='all_gather'"),
    "how it is built": (lambda: build(all_gather((4, 4)), "b2b", "shove"), r"build: transport \(value='shove'"),
    "variants": (lambda: variants("all_collect"), r"algorithms: kind \(value='all_collect'"),
    "a call": (lambda: CallShape("all_collect", 2, 8), r"CallShape: kind \(value='all_collect'"),
    "a computation": (lambda: Computation("5"), r"Computation: us \(value='5'"),
    "a matrix": (lambda: Computation(5, gemm=(1, 2, 3)), r"Computation: gemm \(value=\(1, 2, 3\)"),
    "nodes": (lambda: Config(virtual_nodes=[0, "a"]), r"Config: virtual_nodes \(value=\[0, 'a'\]"),
}  # fmt: skip


def gathered() -> Program:
    return build(all_gather((8, 4)), "b2b")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_value_of_a_field_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_texts_and_numbers_of_others_become_the_values_that_they_name() -> None:
    """The text of a program, which ranks compare, and all identities are those of the plain values."""
    i = np.int64
    pairs: list[tuple[Any, Any]] = [
        (Reduction("avg", np.str_("float32")), Reduction(ReduceOp.AVG, "float32")),
        (Reduction(Other.SUM, "int32"), SUM),
        (Span(i(0), "staging", np.uint8(252), np.uint8(200)), Span(0, Buffer.STAGING, 252, 200)),
        (Span(torch.tensor(1), Other.INPUT, 0, 8), Span(1, Buffer.INPUT, 0, 8)),
        (Span(0, Other.SUM, 0, 8), Span(0, "sum", 0, 8)),
        (Signal(Flag(i(1), Number.ONE), Value(i(1)), Other.ADD), Signal(Flag(1, 1), Value(1), SignalOp.ADD)),
        (Wait(FLAG, EPOCH, "=="), Wait(FLAG, EPOCH, Comparison.EQ)),
        (Queue(i(0), Engine(Other.LOCAL, i(1)), [Stamp(i(2))]), Queue(0, Engine(EngineKind.LOCAL, 1), (Stamp(2),))),
        (Reduce(THERE, [HERE, HERE], SUM), Reduce(THERE, (HERE, HERE), SUM)),
        (Collective("all_to_all", i(2), np.full((2, 2), 4)), all_to_all(EVEN)),
        (Contract.of("x", {Other.INPUT: np.array([8])}, []), Contract("x", 1, (("input", (8,)),), ())),
        (Contract.of("x", {"a": [8]}, [], scratch={"a"}), Contract("x", 1, (("a", (8,)),), (), ("a",))),
        (Batch("x", 2, [all_to_all(EVEN)]), Batch("x", 2, (all_to_all(EVEN),))),
        (build(all_gather((8, 4)), np.str_("b2b"), "push"), build(all_gather((8, 4)), "b2b", Transport.PUSH)),
        (build_batch(Batch("x", 2, [all_gather((8, 4))]), "b2b", ["push"]),
         build_batch(Batch("x", 2, (all_gather((8, 4)),)), "b2b", [Transport.PUSH])),
        (variants("all_gather"), variants(Kind.ALL_GATHER)),
        (CallShape("all_gather", i(2), i(8)), CallShape(Kind.ALL_GATHER, 2, 8)),
        (Config(i(5), virtual_nodes=[0, i(1)], memory_bytes=i(9)), Config(5.0, virtual_nodes=(0, 1), memory_bytes=9)),
    ]  # fmt: skip
    for made, plain in pairs:
        assert (repr(made), made) == (repr(plain), plain)
    assert Reduction("avg", "float32").op is ReduceOp.AVG and Wait(FLAG, EPOCH, ">=").comparison is Comparison.GE
    with pytest.raises(ProgramError, match=r"staging@0\[252:452\] is out of bounds"):
        copied = Copy(Span(0, "staging", np.uint8(252), np.uint8(200)), Span(0, "input", 0, np.uint8(200)))
        verify(Program(all_gather((256,)), "x", (Queue(0, DMA, (copied,)),), (256,), 0))
    with pytest.raises(ProgramError, match="a local engine moves bytes that stay on rank 0"):
        verify(Program(all_gather((8, 8)), "x", (Queue(0, Engine("local"), (Copy(THERE, HERE),)),), (0, 0), 0))


def test_copies_of_a_program_are_that_program() -> None:
    program = build(all_reduce((8, 8), Reduction("avg", "int32")), "pcpy")
    for again in (copy.copy(program), copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert again == program and repr(again) == repr(program)
    with pytest.raises(TypeError, match=r"Program: flag_count \(value=1.5"):
        dataclasses.replace(program, flag_count=1.5)


def test_flags_of_two_ranks_are_two() -> None:
    """Beyond 2**40, flags of one rank had the numbers of those of the next: this one hangs, and was accepted."""
    queues = (Queue(0, DMA, (Signal(Flag(0, 2**40), EPOCH),)), Queue(1, DMA, (Wait(Flag(1, 0), EPOCH),)))
    with pytest.raises(ProgramError, match=r"flag_count is 2199023255552 \(allowed="):
        verify(Program(all_gather((0, 0)), "x", queues, (0, 0), 2**41))


# --- made-up values in right programs ---------------------------------------------------------------------------------


def _programs() -> tuple[Program, ...]:
    average = Reduction(ReduceOp.AVG, "int32")
    made = [build(all_reduce((4, 8), average), "b2b"), build(all_gather((3, 5), in_place=True), "bcst")]
    made += [build(all_to_all([[4] * 2] * 2), "swap"), build(broadcast(6, 3, 1), "b2b"), own(random.Random(1), 3)]
    return tuple(made)


def _fields(value: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """Everything in a value, with what puts something else in its place."""
    if isinstance(value, tuple):
        for k, item in enumerate(value):
            for found, put in ((item, lambda new: new), *_fields(item)):
                yield found, lambda new, k=k, put=put: (*value[:k], put(new), *value[k + 1 :])
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            for found, put in ((item, lambda new: new), *_fields(item)):
                yield found, lambda new, name=field.name, put=put: dataclasses.replace(value, **{name: put(new)})


PLACES = [place for program in _programs() for place in _fields(program)]


def _made_up(value: Any) -> list[Any]:
    """Values that might stand in the place of the right one."""
    found: list[Any] = [None, True, 0, -1, 1, 2, 3, 2**31, 2**40, 0.5, "", "x", b"x", [], (), {}, value, [value]]
    found += [*ReduceOp, *Comparison, *SignalOp, *EngineKind, *Buffer, *Kind, *Other, torch.int32, "int64", "float16"]
    found += [HERE, FLAG, EPOCH, DMA, Stamp(0), SUM, all_gather((4, 4)), np.float32(1), np.bool_(True), float("nan")]
    if isinstance(value, int):
        found += [float(value), str(value), value + 0.5, value + 1, value - 1, -value, value + 4, 4 * value]
        found += [kind(value) for kind in (np.int64, np.uint8, np.float64, torch.tensor) if 0 <= value < 256]
    if isinstance(value, str):
        found += [str(value), np.str_(value), value.upper(), value.encode()]
    if isinstance(value, tuple):
        found += [[*value], value[1:], value[::-1], (*value, *value), {*map(str, value)}, iter(value)]
    return found


@given(st.integers(0, len(PLACES) - 1), st.data())
@settings(max_examples=600, deadline=None)
def test_made_up_values_are_refused_or_mean_what_they_say(number: int, data: st.DataObject) -> None:
    value, put = PLACES[number]
    made_up = data.draw(st.sampled_from(_made_up(value)))
    try:
        program = put(made_up)
    except (TypeError, ValueError) as refusal:
        text = str(refusal)
        assert "(value=" in text or "must" in text or text.startswith(("Contract", *Kind)), text
        return
    try:
        verify(program)
    except ProgramError:
        return
    assert "np." not in repr(program) and "tensor" not in repr(program)
    sizes = (program.buffer_bytes(rank, buffer) for rank in range(program.world_size) for buffer in Buffer)
    assert max(sizes) >= 2**16 or failure([program], range(3)) is None
