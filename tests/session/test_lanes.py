"""Communicators that share memory: orders of calls that do not wait for each other, and misuse."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import default_stream, on_ranks

from sidelane import Communicator, Config
from sidelane.errors import UnavailableError


def first_lane(group: dist.ProcessGroup, **settings: Any) -> Communicator:
    return Communicator(group, device=torch.get_default_device(), config=Config(**{"timeout_s": 30, **settings}))


def open_lanes(comm: Communicator) -> list[str]:
    return [lane.name for lane in (comm, *comm.derived) if not lane.calls.closed]


@on_ranks(1, 2, long(4), seed=1, calls=60)
@on_ranks(gpu=default_stream, seed=0, calls=200)
@on_ranks(gpu=default_stream, seed=1, calls=200)
def test_lanes_of_one_thread(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Lanes of one thread: their asynchronous calls overlap, on tensors that are symmetric in all of them."""
    rng, delays = random.Random(seed), random.Random(seed + 1 + dist.get_rank(group))
    with first_lane(group) as made:
        lanes = [Communicator(made, name=name) for name in ("prefetch", "reduce", "side")]
        n, rank = lanes[0].world_size, lanes[0].rank
        sizes = [rng.randrange(1, 5000) for _ in lanes]
        # Each tensor comes from another lane than the one that uses it.
        shared = [lanes[number - 1].empty(n * size, dtype=torch.int32) for number, size in enumerate(sizes)]
        plain = [torch.empty(n * size, dtype=torch.int32) for size in sizes]
        for call in range(calls):
            works = []
            for number in rng.sample(range(3), 3):
                target = (shared if rng.random() < 0.5 else plain)[number]
                if delays.random() < 0.1:
                    time.sleep(delays.random() * 0.002)
                shard = torch.full((sizes[number],), 100 * call + rank + number, dtype=torch.int32)
                work = lanes[number].all_gather(target.fill_(-1), shard, async_op=True)
                works.append((number, target, work))
            for number, target, work in rng.sample(works, 3):
                assert work is not None
                work.wait()
                want = [100 * call + peer + number for peer in range(n)]
                assert target.view(n, -1)[:, -1].tolist() == want, (call, number)
            total = torch.full((3,), rank + call, dtype=torch.int32)
            lanes[call % 3].all_reduce(total)
            assert total.tolist() == [sum(range(n)) + n * call] * 3
        lanes[1].close()  # on its own: the others go on, and no longer look after its streams
        assert open_lanes(made) == ["lane 0", "prefetch", "side"]
        first = lanes[0].empty(7, dtype=torch.int32)
        del first
        assert lanes[2].empty(7, dtype=torch.int32).numel() == 7


@on_ranks(2, long(3), calls=60)
def test_a_lane_for_each_thread(group: dist.ProcessGroup, calls: int) -> None:
    """Lanes of a thread each, in no common order: each makes its calls, allocates and grows its staging."""
    errors: list[BaseException] = []
    with first_lane(group) as made:
        lanes = [Communicator(made, name=f"thread {number}") for number in range(3)]

        def run(number: int) -> None:
            try:
                comm, rng = lanes[number], random.Random(number)
                n, rank = comm.world_size, comm.rank
                for call in range(calls):
                    size = rng.randrange(1, 4000 * (1 + call // 10))
                    if rng.random() < 0.1:
                        own = comm.empty(size, dtype=torch.int32)
                        assert own.numel() == size
                    target = torch.empty(n * size, dtype=torch.int32)
                    comm.all_gather(target, torch.full((size,), 10 * call + rank + number, dtype=torch.int32))
                    found = target.view(n, -1)[:, -1].tolist()
                    assert found == [10 * call + peer + number for peer in range(n)], (number, call)
            except BaseException as error:
                errors.append(error)
                made.close()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@on_ranks(3)
def test_a_lane_waits_for_no_other(group: dist.ProcessGroup) -> None:
    """While a call of one lane waits for a late rank, calls of the other lane get on."""
    with first_lane(group) as made:
        slow, fast = Communicator(made, name="slow"), Communicator(made, name="fast")
        n, rank = slow.world_size, slow.rank
        late, quick = torch.empty(n * 10), torch.empty(n * 10)
        for comm in (slow, fast):
            comm.all_gather(late, torch.ones(10))
        work = None if rank == 1 else slow.all_gather(late, torch.full((10,), float(rank)), async_op=True)
        for call in range(20):
            fast.all_gather(quick, torch.full((10,), float(rank + call)))
            fast.synchronize()
            assert quick.view(n, 10)[:, 3].tolist() == [peer + call for peer in range(n)]
        assert work is None or not work.is_completed()
        if rank == 1:
            time.sleep(0.3)
            work = slow.all_gather(late, torch.full((10,), float(rank)), async_op=True)
        assert work is not None
        work.wait()
        assert late.view(n, 10)[:, 5].tolist() == list(range(n))


@on_ranks(3)
def test_memory_outlives_the_communicator_that_made_it(group: dist.ProcessGroup) -> None:
    with first_lane(group) as made:
        comm, other = Communicator(made, name="one"), Communicator(made, name="three")
        tensor = comm.empty(4 * comm.world_size)
        comm.close()
        other.all_gather(tensor, torch.full((4,), float(comm.rank)))
        other.synchronize()
        assert tensor.view(-1, 4)[:, 2].tolist() == list(range(comm.world_size))
        made.close()


FAILURES = ("name", "device", "executor", "memory", "choice", "path", "interrupt")
"""Places at which the making of a lane can fail on one rank."""


@on_ranks(3)
@pytest.mark.parametrize("where", FAILURES)
def test_a_rank_that_cannot_make_its_lane_tells_its_peers(group: dist.ProcessGroup, where: str) -> None:
    """One rank cannot make its lane: its peers do not wait for the time-out, and no thread is left."""
    errors: dict[str, BaseException] = {
        "device": UnavailableError("no device"),  # of Sidelane's own, which tells nobody of itself
        "executor": MemoryError("no executor"),
        "memory": UnavailableError("no memory"),
        "choice": ValueError("no choice"),
        "path": RuntimeError("no path"),  # after all that ranks exchange
        "interrupt": KeyboardInterrupt(),
    }
    targets = {
        "device": "sidelane.session.communicator.make_backend",
        "executor": "sidelane.collectives.backend_cpu.CpuExecutor",
        "memory": "sidelane.session.communicator.LaneMemory",
        "choice": "sidelane.session.communicator.Planner",
        "path": "sidelane.session.communicator.CallPath",
        "interrupt": "sidelane.session.communicator.CallPath",
    }
    with first_lane(group, timeout_s=20) as made, contextlib.ExitStack() as failing:
        first = Communicator(made, name="first")
        threads = threading.active_count()
        name = "second"
        if first.rank == 1:
            if where == "name":
                name = "first"
            else:
                failing.enter_context(mock.patch(targets[where], side_effect=errors[where]))
        began = time.monotonic()
        try:
            Communicator(made, name=name)
            told = "no error"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        assert time.monotonic() - began < 5, "they do not wait for the time-out"
        failing.close()
        assert threading.active_count() == threads
        for again in (Communicator(made, name="third"), first):  # what was not made is no lane on any rank
            tensor = again.empty(3)
            again.all_reduce(tensor.fill_(1))
            assert tensor.tolist() == [again.world_size] * 3
        assert open_lanes(made) == ["lane 0", "first", "third"]
    own = "ValueError: Communicator: name (value='first'"
    if where != "name":
        own = f"{type(errors[where]).__name__}: {errors[where]}"
    if first.rank == 1:
        assert told.startswith(own), told
    else:
        assert told.startswith("PeerError") and "rank 1" in told and own.removesuffix(": ") in told, told
