"""What ``async_op=True`` returns is a ``torch.distributed.Work``, to wait for, to ask, and to hang callbacks on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expected import versions_of
from on_ranks import default_stream, on_ranks
from sweeps import communicator

from sidelane import Communicator, Config, Work
from sidelane.collectives import backend_cuda
from sidelane.collectives.backend_cuda import CudaMarkedWork, CudaWork
from sidelane.errors import PeerError, PeerTimeoutError


@on_ranks(3, gpu=default_stream)
def test_work_is_what_torch_expects(group: dist.ProcessGroup) -> None:
    """The handle of an asynchronous call answers every question that torch.distributed asks."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = torch.zeros(2 * n), torch.full((2,), float(rank))
        expected = torch.arange(n).float().repeat_interleave(2)
        work = comm.all_gather(output, input, async_op=True)
        assert isinstance(work, Work) and isinstance(work, dist.Work)
        assert work.wait() is True and work.wait(timedelta(seconds=20)) is True
        assert work.is_completed() and work.is_success() and work.exception() is None
        (found,) = work.result()
        assert found is output and torch.equal(output, expected)

        total = torch.ones(3)
        work = comm.all_reduce(total, async_op=True)
        assert work is not None
        later = work.get_future().then(lambda future: future.value()[0] / n)
        assert torch.equal(later.wait(), torch.ones(3)) and torch.equal(total, torch.full((3,), float(n)))
        assert torch.equal(work.get_future().wait()[0], total), "of one that has ended, too"

        many = [torch.zeros(n), torch.zeros(3 * n)]
        work = comm.all_gather(many, [torch.ones(1), torch.ones(3)], async_op=True)
        assert work is not None and [tensor.sum().item() for tensor in work.result()] == [n, 3 * n]
        with comm.batch(async_op=True) as batch:
            batch.all_gather(output, input)
            batch.all_reduce(total)
        assert batch.work is not None
        first, second = batch.work.get_future().wait()
        assert first is output and second is total and torch.equal(total, torch.full((3,), float(n * n)))
        gathered = comm.gather(output if rank == 0 else None, input, root=0, async_op=True)
        assert gathered is not None and len(gathered.result()) == (rank == 0)


def test_a_captured_call_has_not_ended_before_its_last_trigger() -> None:
    """Its program is captured behind the last one, and has no end before."""
    program = mock.Mock(marks=2)
    with mock.patch.object(backend_cuda, "StreamMark", return_value=mock.Mock(**{"query.return_value": True})):
        work = CudaMarkedWork(mock.Mock(), mock.Mock(), program)
        for number in range(2):
            assert not work.is_completed() and not program.run.called
            work.mark(number, (1, True))
        assert work.is_completed() and program.run.call_count == 1


class LateFailure:
    """Backend, executor, driver, stream and end of a call that fails while a wait for it looks for failures.

    Args:
        answers: what the end answers, in turn.
    """

    def __init__(self, *answers: bool | None) -> None:
        self.executor = self.driver = self.stream = self
        self.answers = list(answers)
        self.current = contextlib.nullcontext

    def follow(self) -> bool | None:
        return self.answers.pop(0)

    def check(self) -> None:
        if not self.answers:
            raise PeerError("rank 1 died", (1,))


def test_a_wait_of_a_gpu_raises_what_it_meets_on_its_way() -> None:
    """A wait that has not waited never says that it has."""
    for answers in ((True,), (None, False), (None, None)):
        made: Any = LateFailure(*answers)
        work = CudaWork(made, made)
        work.end = made
        if answers[-1] is not None:
            assert work.wait()
        else:
            with pytest.raises(PeerError, match="rank 1 died"):
                work.wait()
        assert not made.answers


@on_ranks(2)
def test_a_wait_with_a_time_out_gives_up_and_the_collective_goes_on(group: dist.ProcessGroup) -> None:
    with Communicator(group, device="cpu", config=Config(timeout_s=30)) as comm:
        tensor = torch.ones(4)
        comm.all_reduce(tensor)
        if dist.get_rank(group) == 1:
            time.sleep(1.0)
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        if dist.get_rank(group) == 0:
            began = time.monotonic()
            with pytest.raises(PeerTimeoutError, match=r"shape \(4,\)\) has not ended within 0.1 s"):
                work.wait(timedelta(milliseconds=100))
            assert time.monotonic() - began >= 0.1
            assert not work.is_completed() and work.exception() is None and not work.is_success()
        assert work.wait(timedelta(seconds=20))
        assert torch.equal(tensor, torch.full((4,), 4.0))


@on_ranks(2)
def test_a_failure_goes_to_whoever_asks(group: dist.ProcessGroup) -> None:
    with Communicator(group, device="cpu", config=Config(timeout_s=1)) as comm:
        tensor = torch.ones(4)
        comm.all_reduce(tensor)
        if dist.get_rank(group) == 1:
            dist.barrier(group)  # until the other one has given up
            return
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future()
        with pytest.raises(RuntimeError, match="rank 1 .* has not come"):
            future.wait()
        with pytest.raises(RuntimeError, match="rank 1 .* has not come"):
            torch.futures.collect_all([future]).wait()  # C++ sees the error, too, and no result
        assert work.is_completed() and not work.is_success()
        with pytest.raises(PeerError):
            work.result()
        dist.barrier(group)
        assert isinstance(work.exception(), PeerTimeoutError)


class CompiledCode:
    """Compiled code and a stream of asynchronous calls, as a GPU has them: it notes what it is asked."""

    def __init__(self) -> None:
        self.backend, self.aside, self.knows, self.is_aside = self, self, True, False
        self.said: list[tuple[Any, ...]] = []

        self.replay, self.handle, self.mark = SimpleNamespace(made=0), 7, object()

    def remember(self, *_: object, **__: object) -> None:
        """It is asked what it knows by each test."""

    def run(self, *given: Any) -> Any:
        if len(given) == 1:  # a function, as the stream's
            self.is_aside = True
            try:
                return given[0]()
            finally:
                self.is_aside = False
        kind, _, _, _, _, *handle = given
        self.said.append((str(kind), self.is_aside, *handle))
        return self.knows and (self.mark if handle else True)

    def work_on(self, side: object, tensors: Sequence[torch.Tensor], outputs: Any, mark: object) -> str:
        assert side is self.aside and mark is self.mark
        self.said.append((len(tensors), outputs))
        return "work"


@on_ranks(2)
def test_asynchronous_calls_are_asked_of_compiled_code_beside_the_callers_stream(group: dist.ProcessGroup) -> None:
    with Communicator(group) as comm:
        given, found, code = torch.full((4,), float(comm.rank)), torch.empty(8), CompiledCode()
        comm.path.repeats = code  # type: ignore[assignment]
        comm.all_gather(found, given)  # Python's: it finds the code that has been compiled by now
        before = versions_of([found])
        work: Any = comm.all_gather(found, given, async_op=True)
        assert code.said.pop(0) == ("all_gather", False, 7)
        count, outputs = code.said.pop(0)
        assert work == "work" and count == 2 and outputs[0] is found
        assert versions_of([found]) > before, "autograd knows of it"
        assert comm.all_gather([found], [given], async_op=True) == "work"
        count, outputs = code.said.pop()
        assert count == 2 and len(outputs) == 1 and outputs[0] is found
        assert comm.all_gather(found, given) is None and code.said.pop() == ("all_gather", False)
        code.knows = False
        code.said.clear()
        comm.all_gather(found.fill_(-1), given, async_op=True).wait()  # Python makes it
        assert found.tolist() == [0.0] * 4 + [1.0] * 4
        assert code.said == [("all_gather", False, 7), ("all_gather", True)], "Python made the call aside"
        comm.path.repeats = None
