"""Making calls on one communicator, and checking every byte that they write and every byte that they must not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidelane.collectives.work import Work
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.soak.described import Call, Form, Part
from sidelane_lab.soak.judge import Judge
from sidelane_lab.soak.memory import Bound, Memory
from sidelane_lab.soak.mistakes import MISTAKES, Wrong
from sidelane_lab.soak.steps import Differ, Overlap, Refuse
from sidelane_lab.soak.tally import Tally


class Caller:
    """One rank's calls on one communicator.

    Args:
        communicator: whose.
        memory: of its calls.
        judge: compares.
        tally: counts.
    """

    def __init__(self, communicator: Communicator, memory: Memory, judge: Judge, tally: Tally) -> None:
        self.communicator, self.memory, self.judge, self.tally = communicator, memory, judge, tally
        self.rank, self.world_size = communicator.rank, communicator.world_size

    def once(self, call: Call, key: int, bound: Sequence[Bound] | None = None, *, asynchronous: bool = False) -> None:
        """Make a call and check it. ``bound``: on these tensors; None: on those that are its own."""
        bound = self.memory.bind(call) if bound is None else bound
        self.memory.fill(call, key, bound)
        work = self.start(call, bound, asynchronous=asynchronous)
        if work is not None:
            work.wait()
        self.check(call, key, bound)
        self.count(call.label)

    def overlap(self, step: Overlap) -> None:
        """Start several calls, wait for them in an order of this rank's own, and check each."""
        bound = [self.memory.bind(call) for call, _ in step.calls]
        for (call, key), each in zip(step.calls, bound, strict=True):
            self.memory.fill(call, key, each)
        works = []
        last = len(step.calls) - 1
        for number, ((call, _), each) in enumerate(zip(step.calls, bound, strict=True)):
            works.append(self.start(call, each, asynchronous=not (step.ends_blocking and number == last)))
        order = list(range(len(works)))
        random.Random(step.calls[0][1] + self.rank).shuffle(order)
        for number in order:
            work = works[number]
            if work is not None:
                work.wait()
            call, key = step.calls[number]
            self.check(call, key, bound[number])
            self.count(call.label)

    def start(self, call: Call, bound: Sequence[Bound], *, asynchronous: bool = False) -> Work | None:
        """Make a call, whatever its form."""
        options: dict[str, Any] = {"variant": call.variant, "beside": call.beside}
        if call.form is Form.BATCH:
            with self.communicator.batch(**options, async_op=asynchronous) as batch:
                for part, each in zip(call.parts, bound, strict=True):
                    getattr(batch, part.kind)(*tensors_of(part, each), **details_of(part), **output_of(part, each))
            return batch.work
        if asynchronous:
            options["async_op"] = True
        if call.form is Form.LIST:
            return self._start_list(call, bound, options)
        (part,) = call.parts
        work: Work | None = getattr(self.communicator, part.kind)(
            *tensors_of(part, bound[0]), **details_of(part, self.rank), **output_of(part, bound[0]), **options
        )
        return work

    def _start_list(self, call: Call, bound: Sequence[Bound], options: dict[str, Any]) -> Work | None:
        if not call.parts:
            return self.communicator.all_gather([], [], **options)
        kind, pairs = call.parts[0].kind, list(zip(call.parts, bound, strict=True))
        details = details_of(call.parts[0])
        if kind is Kind.ALL_REDUCE:
            # Each of them in place or not: the call takes what is read and what is written.
            details["output"] = [each.output for each in bound]
        columns = zip(*(tensors_of(part, each) for part, each in pairs), strict=True)
        work: Work | None = getattr(self.communicator, kind)(*map(list, columns), **details, **options)
        return work

    def check(self, call: Call, key: int, bound: Sequence[Bound]) -> None:
        """Everything that a call wrote, what lies around it, and that it left alone what it read."""
        memory, same = self.memory, self.judge.same
        for number, each in enumerate(bound):
            if each.guarded is not None:
                same(each.guarded, memory.expected(call, key, number), call, "output", number, key)
            if each.is_read and each.filled is not None:
                same(each.filled, memory.input(call, key, number), call, "input", number, key)

    def check_untouched(self, call: Call, key: int, bound: Sequence[Bound]) -> None:
        """Nothing of a call has moved."""
        memory, same = self.memory, self.judge.same
        for number, each in enumerate(bound):
            if each.guarded is not None:
                same(each.guarded, memory.untouched(call, key, number), call, "untouched output", number, key)
            if each.is_read and each.filled is not None:
                same(each.filled, memory.input(call, key, number), call, "untouched input", number, key)

    def refuse(self, step: Refuse, foreign: torch.Tensor | None) -> None:
        """A call that is wrong here, or on the rank that gets it wrong alone: errors as promised, and nothing moves."""
        call, mistake = step.call, MISTAKES[step.mistake]
        bound = self.memory.bind(call)
        self.memory.fill(call, step.key, bound)
        if step.culprit in (None, self.rank):
            (part,) = call.parts
            wrong = Wrong(
                str(part.kind), list(tensors_of(part, bound[0])), details_of(part, self.rank), self.world_size
            )
            wrong.options["variant"], wrong.foreign = call.variant, foreign
            mistake.change(wrong)
            self.must_raise(mistake.errors, functools.partial(wrong.make, self.communicator), step.mistake)
        else:
            error = self.must_raise((PeerError,), lambda: self.start(call, bound), step.mistake)
            if isinstance(error, PeerError) and (isinstance(error, PeerTimeoutError) or error.ranks != (step.culprit,)):
                self.tally.fail(f"{step.mistake} on rank {step.culprit}: {_shown(error)}")
                raise error
        self.check_untouched(call, step.key, bound)
        self.tally.refusals += self.rank == 0

    def differ(self, step: Differ) -> None:
        """This rank or another one makes another call: all hear of it, and nothing moves."""
        call = step.another if self.rank == step.culprit else step.call
        bound = self.memory.bind(call)
        self.memory.fill(call, step.key, bound)
        what = f"{step.call} against {step.another} on rank {step.culprit}"
        self.must_raise((MismatchError,), lambda: self.start(call, bound), what)
        self.check_untouched(call, step.key, bound)
        self.tally.refusals += self.rank == 0

    def must_raise(
        self, allowed: tuple[type[Exception], ...], call: Callable[[], object], what: str
    ) -> Exception | None:
        """Call what must be refused; what it raised, if that is one of ``allowed``."""
        try:
            call()
        except allowed as error:
            return error
        except PeerError:
            raise  # a fault, not a refusal: the communicator is done for
        except Exception as error:
            self.tally.fail(f"{what}: {_shown(error)} (allowed={', '.join(each.__name__ for each in allowed)})")
        else:
            self.tally.fail(f"{what}: no error was raised (allowed={', '.join(each.__name__ for each in allowed)})")
        return None

    def count(self, label: str, calls: int = 1) -> None:
        """A call was made and checked; every rank does that, one of them counts."""
        if self.rank == 0:
            self.tally.calls[label] += calls


def tensors_of(part: Part, bound: Bound) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a part as the methods take them by position."""
    match part.kind:
        case Kind.BROADCAST:
            return (bound.output,)
        case Kind.ALL_REDUCE:
            return (bound.output if part.in_place else bound.input,)
        case _:
            return (bound.output, bound.input)


def output_of(part: Part, bound: Bound) -> dict[str, Any]:
    """The output of a part where it has a name of its own."""
    return {"output": bound.output} if part.kind is Kind.ALL_REDUCE and not part.in_place else {}


def details_of(part: Part, rank: int = 0) -> dict[str, Any]:
    """The arguments of a part that are no tensors of its input and output."""
    details: dict[str, Any] = {}
    if part.op:
        details["op"] = part.op
    if part.kind in (Kind.BROADCAST, Kind.SCATTER, Kind.GATHER):
        details["root"] = part.root
    if part.splits:
        details["output_split_sizes"] = [row[rank] for row in part.splits]
        details["input_split_sizes"] = list(part.splits[rank])
    return details


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}{getattr(error, 'ranks', '')}: {error}"
