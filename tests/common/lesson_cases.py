"""What CPU ranks do, on the path of GPUs, with ordinary tensors from whose addresses they learn without waiting."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import learn_cases
import torch
import torch.distributed as dist
from fake_driver import FakeDriver
from learn_cases import LEARNING, by_c, counted, done
from made_up_gpus import made_up_gpus
from reach_cases import shared

from sidelane import Communicator
from sidelane.collectives import call_path
from sidelane.collectives.learning import knowledge
from sidelane.collectives.learning.board import BEGUN, READ, RING, WINDOW
from sidelane.collectives.learning.mappings import LOOK_S
from sidelane.collectives.learning.protocol import AheadPrograms
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError


class Gathers:
    """All-gathers of one communicator, on tensors that come again.

    Attributes:
        native: of each call, whether compiled code made it as one that goes ahead.
    """

    def __init__(self, comm: Communicator, period: int = 1, size: int = 100) -> None:
        self.comm, self.size, self.native, self.step = comm, size, [], 0
        self.tensors = [(self.new(comm.world_size), self.new(1)) for _ in range(period)]

    def new(self, parts: int) -> torch.Tensor:
        made: torch.Tensor = shared(parts * self.size, torch.int32)
        return made.fill_(-1)

    def call(self, times: int = 1, *, finish: bool = True) -> list[bool]:
        """Make some calls; whether C made each."""
        for _ in range(times):
            output, input = self.tensors[self.step % len(self.tensors)]
            before = self.made_by_c()
            if finish:
                input.fill_(1000 * self.step + self.comm.rank)
                output.fill_(-1)
            self.comm.all_gather(output, input, variant="b2b")
            if finish:
                self.end()
                self.check(output)
            self.native.append(self.made_by_c() > before)
            self.step += 1
        return self.native[-times:]

    def made_by_c(self) -> int:
        return by_c(self.comm)

    def end(self) -> None:
        """Calls have ended when they return."""

    def check(self, output: torch.Tensor) -> None:
        found = output.view(self.comm.world_size, self.size)
        expected = torch.tensor([1000 * self.step + rank for rank in range(self.comm.world_size)], dtype=torch.int32)
        assert torch.equal(found, expected.view(-1, 1).expand_as(found)), (self.step, found[:, 0].tolist())


SETTLED = 15 * WINDOW
"""Lessons behind which those of a loop around a few tensors go ahead."""


def of(group: dist.ProcessGroup, name: str, *args: Any) -> Any:
    """One of the cases that other ranks run, too."""
    with made_up_gpus():
        return getattr(learn_cases, name)(group, *args)


class Lessons(Gathers):
    """All-gathers from which ranks learn.

    Attributes:
        ahead: of each call, whether it went ahead.
    """

    def __init__(self, group: dist.ProcessGroup, comm: Communicator, driver: FakeDriver, period: int) -> None:
        super().__init__(comm, period)
        self.group, self.driver = group, driver
        self.ahead: list[bool] = []

    def end(self) -> None:
        self.comm.synchronize()
        self.driver.synchronize()

    def made_by_c(self) -> int:
        return 0 if self.comm._repeats is None else self.comm._repeats.tracked

    def call(self, times: int = 1, *, finish: bool = True) -> list[bool]:
        for _ in range(times):
            super().call(finish=finish)
            choice = self.comm.last_choice()
            self.ahead.append(choice is not None and "no host waits" in choice.reason)
            if finish:
                dist.barrier(self.group)  # hosts stay together
        return self.native[-times:]


@contextmanager
def lessons(
    group: dist.ProcessGroup, period: int = 1, *, finish: bool = True
) -> Iterator[tuple[FakeDriver, Lessons, Any]]:
    """Such calls, which go ahead from now on."""
    with (
        made_up_gpus(finish=finish) as driver,
        counted() as said,
        Communicator(group, config=LEARNING) as comm,
    ):
        made = Lessons(group, comm, driver, period)
        made.call(10)
        time.sleep(0.05)  # for the thread that maps
        made.call(SETTLED)
        yield driver, made, said


def made_by(group: dist.ProcessGroup, period: int, calls: int) -> tuple[list[bool], list[bool], int]:
    """Of calls whose addresses come again: which compiled code made, which went ahead, and how many were numbered."""
    with lessons(group, period) as (_, made, _):
        made.call(calls)
        return made.native[-calls:], made.ahead[-calls:], next(made.comm._calls.numbers) - 1


def compiled_late(
    group: dist.ProcessGroup, python_calls: tuple[int, ...], calls: int
) -> tuple[list[bool], list[bool], int]:
    """Make calls as :func:`made_by`; on each rank, compiled code comes after a number of calls by Python."""
    mine, load, asked = python_calls[dist.get_rank(group)], call_path.load_replays_soon, []

    def soon() -> Any:
        asked.append(None)
        return load() if len(asked) > mine else None

    with mock.patch.object(call_path, "load_replays_soon", soon):
        return made_by(group, 1, calls)


def goes_back(group: dist.ProcessGroup, what: str) -> tuple[list[bool], list[bool], list[bool], dict[str, int]]:
    """Whether C makes lessons before something happens to one rank or to all, in that call, and behind it."""
    with lessons(group) as (driver, made, said):
        comm, first = made.comm, dist.get_rank(group) == 0
        assert all(made.ahead[-4:])
        before = made.native[-4:]
        output, input = made.tensors[0]
        if what == "another address":
            if first:
                made.tensors = [(output, made.new(1))]
            during = made.call()
            made.tensors = [(output, input)]
            time.sleep(2 * LOOK_S)  # for the threads that look at what was freed
            behind = made.call(SETTLED)
        elif what == "freed":
            if first:
                address = output.data_ptr()
                made.tensors.clear()
                del output
                gc.collect()
                others = []  # what fills other gaps, which earlier tests have left
                for _ in range(200):
                    made.tensors = [(made.new(comm.world_size), input)]
                    if made.tensors[0][0].data_ptr() == address:
                        break
                    others.append(made.tensors[0][0])
                assert made.tensors[0][0].data_ptr() == address, "the test would prove nothing"
            during = made.call()
            time.sleep(2 * LOOK_S)  # likewise
            behind = made.call(2 * SETTLED)
        elif what == "another stream":
            one, driver.caller = driver.caller, driver.create_stream()
            during = made.call()
            behind = made.call(3)
            driver.caller = one
            behind += made.call(3)
        elif what == "a capture":
            driver.begin_capture()
            comm.all_gather(output, input, variant="b2b")
            graph = driver.end_capture()
            during, behind = [], made.call(3)
            for _ in range(3):
                made.step += 1
                input.fill_(1000 * made.step + comm.rank)
                output.fill_(-1)
                driver.replay(graph)
                driver.synchronize()
                made.check(output)
                behind += made.call()
        elif what == "memory":
            extra = comm.empty(16)
            during = made.call()
            behind = made.call(3)
            del extra
        else:
            assert what == "closed"
            comm.close()
            try:
                comm.all_gather(output, input, variant="b2b")
            except CommunicatorClosedError:
                during = [False]
            behind = []
        dist.barrier(group)
        return before, during, behind, done(said, comm)


def gives_up(group: dist.ProcessGroup, patience: int, calls: int) -> tuple[int, int, list[bool]]:
    """Calls that never come again, and then some that do: lessons, those made by C, and what C did in the last ones."""
    with (
        made_up_gpus(),
        mock.patch.object(knowledge, "PATIENCE_WITH_NEW", patience),
        counted() as said,
        Communicator(group, config=LEARNING) as comm,
    ):
        n, rank, kept = comm.world_size, comm.rank, []
        for _ in range(calls):
            kept.append((shared(n * 10, torch.int32), shared(10, torch.int32)))
            comm.all_gather(*kept[-1], variant="b2b")
            dist.barrier(group)
        found = done(said, comm)
        assert comm._repeats is not None
        made, real_run = [], comm._repeats.run

        def run(*asked: Any) -> Any:
            made.append(real_run(*asked))
            return made[-1]

        comm._repeats.run = run
        output, input = kept[0]
        for step in range(5):
            comm.all_gather(output, input.fill_(step + rank), variant="b2b")
            assert output[9::10].tolist() == [step + peer for peer in range(n)]
        assert done(said, comm) == found, "no lessons any more"
        return found["staged"], found.get("by C", 0), made


def gives_up_as_a_window_begins(group: dist.ProcessGroup, vain: int) -> tuple[list[bool], list[bool]]:
    """One of two signatures is given up in a call of its own that compiled code has begun, the first one of a window;
    the next lesson is Python's on rank 0. Who made the last calls before, and which calls of the other one went ahead.
    """
    with (
        made_up_gpus() as driver,
        mock.patch.object(knowledge, "PATIENCE", vain * knowledge.VAIN),
        counted(),
        Communicator(group, config=LEARNING) as comm,
    ):
        lasting, other = Lessons(group, comm, driver, 1), Lessons(group, comm, driver, 1)
        learning, repeats = comm._path.learning, comm._repeats
        assert learning is not None and repeats is not None
        other.size = 33
        other.tensors = [(other.new(comm.world_size), other.new(1))]
        if comm.rank == 0:  # peers cannot map that
            other.tensors = [(other.tensors[0][0], torch.empty(other.size, dtype=torch.int32))]
        other.call(), lasting.call()
        first, _ = learning._signatures
        while other.call() and learning._signatures[first] is not None:
            lasting.call()
            if not learning.is_quiet:
                time.sleep(0.05)  # for the thread that maps
        assert learning._board.number % WINDOW == 1, "the test would prove nothing"
        if comm.rank == 0:
            repeats.forget()
        lasting.call(3)
        begun: list[int] = [0] * comm.world_size
        dist.all_gather_object(begun, learning._board.number, group=group)
        assert len({*begun}) == 1, f"ranks have begun other lessons: {begun}"
        if comm.rank == 1:  # all do something else from some window on
            lasting.tensors = [(lasting.tensors[0][0], lasting.new(1))]
        lasting.call(7 * WINDOW)
        return other.native[-WINDOW:-1], lasting.ahead


def one_is_late(group: dist.ProcessGroup, calls: int) -> tuple[int, dict[str, int]]:
    """Now and then rank 1 waits until rank 0 is further ahead than there is room for posts. How far ahead it got, and
    what this rank did."""
    most = 0
    with lessons(group, finish=False) as (_, made, said):
        learning, rank = made.comm._path.learning, made.comm.rank
        assert learning is not None
        board = learning._board
        output, input = made.tensors[0]
        made.end()
        input.fill_(rank)
        for step in range(calls):
            until = time.monotonic() + 20
            while rank == 1 and step % 400 == 100 and board._parts[0].words[BEGUN] < board.number + RING + WINDOW:
                assert time.monotonic() < until, "rank 0 waits for rank 1"
                time.sleep(0.001)
            Gathers.call(made, finish=False)
            if rank == 0:
                lesson, late = board.number, board._parts[1].words
                if late[READ] < lesson - RING:
                    assert board._own.slots[lesson % RING].number != lesson, "nothing is posted over what is not read"
                most = max(most, lesson - late[BEGUN])
            if step % 20 == 0 and not 100 <= step % 400 < 200:  # else hosts stay together
                made.end()
                dist.barrier(group)
        made.end()
        output.fill_(-1)
        Gathers.call(made, finish=False)
        made.end()
        assert output.view(made.comm.world_size, -1)[:, -1].tolist() == list(range(made.comm.world_size))
        dist.barrier(group)
        return most, done(said, made.comm)


def slow_to_map(group: dist.ProcessGroup, calls: int) -> tuple[list[bool], dict[str, int]]:
    """Rank 1 takes its time to map what it is offered, while all ranks make calls. Which of them went ahead until then,
    and what this rank did by some calls later."""
    with made_up_gpus(), counted() as said, Communicator(group, config=LEARNING) as comm:
        rank, go_on = comm.rank, threading.Event()
        memory = comm._backend.ordinary
        assert memory is not None
        real_map = memory.map

        def map(handle: str, name: str) -> Any:
            assert go_on.wait(60)
            return real_map(handle, name)

        if rank == 1:
            memory.map = map  # type: ignore[method-assign]
        made = Lessons(group, comm, FakeDriver(), 1)
        made.call(calls)
        before = list(made.ahead)
        go_on.set()
        time.sleep(0.1)
        made.call(SETTLED)
        return before, done(said, comm)


def lets_go(group: dist.ProcessGroup) -> tuple[int, int]:
    """Rank 0 frees tensors that it does not use any more, while compiled code makes most other calls. Calls until all
    ranks have let go of them, and those of them that C has made."""
    with lessons(group) as (driver, made, _):
        other = Lessons(group, made.comm, driver, 1)
        other.size = 33
        other.tensors = [(other.new(made.comm.world_size), other.new(1))]
        other.call(10), made.call(SETTLED)
        learning = made.comm._path.learning
        assert learning is not None and made.native[-1]
        known = len(learning._knowledge.known)
        if made.comm.rank == 0:
            other.tensors.clear()
            gc.collect()
        time.sleep(2 * LOOK_S)  # for the thread that looks
        for calls in range(1, 300):
            made.call()
            if len(learning._knowledge.known) == known - 2:
                return calls, sum(made.native[-calls:])
        return 0, 0


def hosts_run_ahead(group: dist.ProcessGroup, seed: int, calls: int) -> tuple[dict[str, int], int]:
    """Calls that no host waits for, with work on the stream around them, hosts that are late now and then, and tensors
    that are replaced for a call or for good. What this rank did; and outputs that were wrong."""
    draw = random.Random(100 * seed + dist.get_rank(group))
    wrong, size = 0, 50
    with (
        made_up_gpus(finish=False) as driver,
        counted() as said,
        Communicator(group, config=LEARNING) as comm,
    ):
        n, rank, stream = comm.world_size, comm.rank, driver.caller
        kept = [(shared(n * size, torch.int32), shared(size, torch.int32)) for _ in range(3)]
        alive = []  # on GPUs, whoever frees memory waits for the work that it is in
        extra = comm.empty(n, dtype=torch.int32)

        def look(output: torch.Tensor, step: int) -> None:
            nonlocal wrong
            found = output.view(n, size)
            wrong += any(int((found[peer] != 8 * step + peer).sum()) for peer in range(n))

        for step in range(calls):
            place = step % len(kept)
            output, input = kept[place]
            how = draw.random() if step > 200 else 1
            if how < 0.003 or (rank == 0 and step == 150):
                input = shared(size, torch.int32)
            elif how < 0.006:
                output = shared(n * size, torch.int32)
            elif how < 0.008:
                output, input = kept[place] = shared(n * size, torch.int32), shared(size, torch.int32)
            alive.append((output, input))
            driver.do(stream, functools.partial(input.fill_, 8 * step + rank))
            driver.do(stream, functools.partial(output.fill_, -1))
            comm.all_gather(output, input, variant="b2b")
            driver.do(stream, functools.partial(look, output, step))
            driver.do(stream, functools.partial(input.fill_, -2))
            if step % 100 < 3:  # the ring of posts comes round, and these are no lessons
                for _ in range(70):
                    comm.all_gather(extra, extra[rank : rank + 1], variant="b2b")
            if how < 0.02:
                time.sleep(0.005)
            if step % (10 if step < 200 else 30) == 0:  # hosts are together while they learn
                comm.synchronize(), driver.synchronize()
                alive.clear()
                gc.collect()
                dist.barrier(group)
        comm.synchronize(), driver.synchronize()
        dist.barrier(group)
        return done(said, comm), wrong


def alone_or_not(group: dist.ProcessGroup, config: Config, beside: str) -> set[bool]:
    """What calls that go ahead were told of a computation next to them."""
    said: set[bool] = set()

    def prepare(self: AheadPrograms, key: Any, signature: Any, *args: Any) -> Any:
        said.add(signature.alone)
        return original(self, key, signature, *args)

    original = AheadPrograms.prepare
    with made_up_gpus() as driver, Communicator(group, config=config) as comm, counted():
        gathers = Lessons(group, comm, driver, 1)
        output, input = gathers.tensors[0]
        with mock.patch.object(AheadPrograms, "prepare", prepare):
            for _ in range(SETTLED + 3):
                comm.all_gather(output, input, variant="b2b", beside=beside)
                gathers.end()
    return said
