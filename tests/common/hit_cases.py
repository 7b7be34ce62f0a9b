"""What CPU ranks do, on the path of GPUs, with ordinary tensors whose addresses come again."""

from __future__ import annotations

import functools
import gc
import random
import time
from typing import Any

import ahead_cases
import torch
import torch.distributed as dist
from ahead_cases import ahead_of_peers, by_c
from fake_driver import FakeDriver
from made_up_gpus import made_up_gpus
from reach_cases import MAPPING, shared

from sidelane import Communicator
from sidelane.errors import CommunicatorClosedError

LEARNT = 5
"""Calls behind which those of a loop around one tensor go ahead."""


def of(group: dist.ProcessGroup, name: str, *args: Any) -> Any:
    """One of the cases that other ranks run, too."""
    with made_up_gpus():
        return getattr(ahead_cases, name)(group, *args)


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


def made_by(group: dist.ProcessGroup, period: int, calls: int) -> tuple[list[bool], int]:
    """Who makes calls whose addresses come again; and calls that were numbered."""
    with made_up_gpus(), Communicator(group, config=MAPPING) as comm:
        gathers = Gathers(comm, period)
        gathers.call(calls)
        return gathers.native, next(comm._calls.numbers) - 1


def goes_back(group: dist.ProcessGroup, what: str) -> tuple[list[bool], list[bool], list[bool]]:
    """Who makes calls before something happens to one rank or to all, in that call, and behind it."""
    lag = 4
    with made_up_gpus() as driver, ahead_of_peers(lag) as said, Communicator(group, config=MAPPING) as comm:
        gathers = Gathers(comm)
        before = gathers.call(LEARNT + 5)
        waits, first = said["waits"], comm.rank == 0
        during: list[bool] = []
        output, input = gathers.tensors[0]
        if what == "another address":
            if first:
                gathers.tensors = [(output, gathers.new(1))]
            during = gathers.call()
            gathers.tensors = [(output, input)]
            behind = gathers.call(lag - 1)
            assert said["waits"] == waits, "nobody hears it yet"
            heard = gathers.call()
            assert said["waits"] == waits + 1 and heard == [False], "all ranks hear it in one call"
            behind += heard + gathers.call(3)
        elif what == "freed":
            if first:
                address = output.data_ptr()
                gathers.tensors.clear()
                del output
                gc.collect()
                for _ in range(50):  # another thread may have got the place meanwhile
                    gathers.tensors = [(gathers.new(comm.world_size), input)]
                    if gathers.tensors[0][0].data_ptr() == address:
                        break
                    gathers.tensors.clear()
                    time.sleep(0.01)
                assert gathers.tensors[0][0].data_ptr() == address, "the test would prove nothing"
            during = gathers.call()
            behind = gathers.call(24)
            assert said["waits"] > waits
        elif what == "another stream":
            one, driver.caller = driver.caller, driver.create_stream()
            during = gathers.call()
            behind = gathers.call(3)
            driver.caller = one
            behind += gathers.call(3)
        elif what == "a capture":
            driver.begin_capture()
            comm.all_gather(output, input, variant="b2b")
            during = [by_c(comm) > sum(gathers.native)]
            graph = driver.end_capture()
            behind = gathers.call(3)
            for _ in range(3):
                gathers.step += 1
                input.fill_(1000 * gathers.step + comm.rank)
                output.fill_(-1)
                driver.replay(graph)
                driver.synchronize()
                gathers.check(output)
                behind += gathers.call()
        elif what == "memory":
            extra = comm.empty(16)
            during = gathers.call()
            behind = gathers.call(3)
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
        return before, during, behind


def one_is_late(group: dist.ProcessGroup, calls: int) -> tuple[int, int]:
    """Rank 1 comes late to many calls, which rank 0 makes ahead. How far ahead it got, and calls made by C."""
    lag, most = 8, 0
    late = random.Random(5)
    with made_up_gpus(finish=False) as driver, ahead_of_peers(lag), Communicator(group, config=MAPPING) as comm:
        control, rank = comm.lane.control, comm.rank
        gathers = Gathers(comm)
        output, input = gathers.tensors[0]
        input.fill_(rank)
        for _ in range(LEARNT):
            gathers.call(finish=False)
            _finish(comm, driver)
        for _ in range(calls):
            if rank == 1 and late.random() < 0.1:
                time.sleep(0.01)
            gathers.call(finish=False)
            if rank == 0:
                most = max(most, control.begun(0) - control.begun(1))
        output.fill_(-1)
        gathers.call(finish=False)
        _finish(comm, driver)
        assert output.view(comm.world_size, -1)[:, -1].tolist() == list(range(comm.world_size))
        dist.barrier(group)
        return most, by_c(comm)


def lets_go(group: dist.ProcessGroup) -> tuple[int, int]:
    """Rank 0 frees tensors that it does not use any more, while compiled code makes all other calls. Calls until all
    ranks have let go of them, and those of them that C has made."""
    with made_up_gpus(), ahead_of_peers(4), Communicator(group, config=MAPPING) as comm:
        kept, other = Gathers(comm), Gathers(comm, size=33)
        kept.call(20), other.call(20)
        assert kept.native[-1] and other.native[-1], "the test would prove nothing"
        reach = comm._path.reach
        assert reach is not None
        known = len(reach._known)
        if comm.rank == 0:
            other.tensors.clear()
            gc.collect()
        for calls in range(1, 100):
            kept.call()
            if len(reach._known) == known - 2:
                return calls, sum(kept.native[-calls:])
        return 0, 0


def hosts_run_ahead(group: dist.ProcessGroup, seed: int, calls: int) -> tuple[dict[str, int], int]:
    """Calls that no host waits for, with work on the stream around them, hosts that are late now and then, and tensors
    that are replaced for a call or for good. What this rank did; and outputs that were wrong."""
    draw = random.Random(100 * seed + dist.get_rank(group))
    wrong, size = 0, 50
    with made_up_gpus(finish=False) as driver, ahead_of_peers(8) as said, Communicator(group, config=MAPPING) as comm:
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
            how = draw.random()
            if how < 0.01:
                input = shared(size, torch.int32)
            elif how < 0.02:
                output = shared(n * size, torch.int32)
            elif how < 0.025:
                output, input = kept[place] = shared(n * size, torch.int32), shared(size, torch.int32)
            alive.append((output, input))
            driver.do(stream, functools.partial(input.fill_, 8 * step + rank))
            driver.do(stream, functools.partial(output.fill_, -1))
            comm.all_gather(output, input, variant="b2b")
            driver.do(stream, functools.partial(look, output, step))
            driver.do(stream, functools.partial(input.fill_, -2))
            if step % 100 < 3:  # the ring of posts comes round, and these wait for nobody's host
                for _ in range(70):
                    comm.all_gather(extra, extra[rank : rank + 1], variant="b2b")
            if how > 0.97:
                time.sleep(0.005)
            if how > 0.99:
                _finish(comm, driver)
                alive.clear()
                gc.collect()
        _finish(comm, driver)
        said["by C"] = by_c(comm)
        dist.barrier(group)
    return dict(said), wrong


def _finish(comm: Communicator, driver: FakeDriver) -> None:
    comm.synchronize()
    driver.synchronize()
