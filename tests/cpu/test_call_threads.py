"""Threads and forks: a communicator for each thread, one that two threads use, copies of a process that has one."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane import Communicator, CommunicatorClosedError, Config, PeerError
from sidelane.collectives.call_thread import CallThread


def communicator(group: dist.ProcessGroup, **settings: Any) -> Communicator:
    return Communicator(group, device="cpu", config=Config(**{"timeout_s": 20, **settings}))


def a_communicator_for_each_thread(group: dist.ProcessGroup, seed: int) -> int:
    """Both need staging that grows, again and again, which is an exchange of handles each time."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    comms = [communicator(group) for _ in range(2)]
    errors: list[BaseException] = []
    made = [0, 0]

    def work(which: int) -> None:
        try:
            comm = comms[which]
            generator = torch.Generator().manual_seed(1000 * seed + 10 * which + rank)
            for k in range(25):
                numel = (1 << 12) * (k % 5 + 1) * (which + 1) + 64 * k
                shard = torch.full((numel,), 1000 * which + 10 * k + rank, dtype=torch.int32)
                output = torch.empty(n * numel, dtype=torch.int32)
                time.sleep(float(torch.rand((), generator=generator)) * 2e-3)
                comm.all_gather(output, shard)
                right = torch.tensor([1000 * which + 10 * k + r for r in range(n)], dtype=torch.int32)
                assert torch.equal(output.view(n, numel)[:, 0], right) and torch.equal(
                    output.view(n, numel)[:, -1], right
                )
                if k % 8 == which:
                    block = comm.empty(1 << 16, dtype=torch.uint8)
                    block.fill_(rank)
                    comm.broadcast(block, root=k % n)
                    assert int(block.sum()) == (k % n) << 16
                made[which] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for comm in comms:
        comm.close()
    if errors:
        raise errors[0]
    return sum(made)


@pytest.mark.parametrize("seed", range(6))
def test_two_communicators_of_one_group_have_a_thread_each(pool: RankPool, seed: int) -> None:
    assert pool.run(a_communicator_for_each_thread, 3, seed, timeout_s=150) == [50] * 3


def two_threads_at_once(group: dist.ProcessGroup) -> tuple[str, str, str]:
    rank = dist.get_rank(group)
    comm = communicator(group)
    inside: list[BaseException] = []

    def first() -> None:
        try:
            comm.all_reduce(torch.ones(3))  # rank 0 waits in it for the others
        except BaseException as error:
            inside.append(error)

    if rank == 0:
        thread = threading.Thread(target=first)
        thread.start()
        while not comm._calls.entrance.locked():
            time.sleep(1e-3)
        with pytest.raises(RuntimeError) as caught:
            comm.all_gather(torch.empty(2), torch.empty(1))
        thread.join(20)
        own = str(caught.value)
    else:
        time.sleep(0.5)
        with pytest.raises(PeerError) as caught:
            comm.all_reduce(torch.ones(3))
        own = str(caught.value)
        inside.append(caught.value)
    with pytest.raises(CommunicatorClosedError) as later:
        comm.barrier()
    comm.close()
    return own, type(inside[0]).__name__, str(later.value)


def test_two_threads_in_one_communicator_are_an_error_at_once(pool: RankPool) -> None:
    """Nobody knows which of the two calls the peers are in, so that it is the end on all ranks, and nobody waits."""
    (own, inside, later), (peer, _, _) = pool.run(two_threads_at_once, 2)
    assert own.startswith("all_gather: another call of this communicator is under way in another thread (value=")
    assert "allowed=one call at a time: a communicator for each thread" in own
    assert inside == "PeerError"
    assert "rank 0 gave up: rank 0 called all_gather in two threads at once" in peer
    assert "unusable since a call failed" in later and "in two threads at once" in later


def threads_that_take_turns(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        lock = threading.Lock()
        total = torch.zeros(1, dtype=torch.int64)

        def work() -> None:
            for _ in range(50):
                with lock:  # their order makes no difference here: all calls are alike
                    one = torch.ones(1, dtype=torch.int64)
                    comm.all_reduce(one)
                    total.add_(one)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert int(total) == 200 * comm.world_size


def test_threads_may_take_turns(pool: RankPool) -> None:
    pool.run(threads_that_take_turns, 3)


def in_a_forked_copy(function: Any, patience_s: float = 10) -> str:
    """What a function says in a copy of this process, and how long that took: a copy that hangs is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    began = time.monotonic()
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() - began > patience_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.01)
    with os.fdopen(reading, "rb") as answer:
        return answer.read().decode()


def forked_copies(group: dist.ProcessGroup) -> list[str]:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    comm = communicator(group)
    tensor = comm.empty(n, dtype=torch.int32)
    tensor.fill_(rank)
    comm.all_reduce(torch.ones(3))
    work = comm.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    handle = comm.prepare_all_gather(tensor, tensor[rank : rank + 1])
    handle.arm()

    def use_and_close() -> str:
        comm.close()
        with comm:
            pass
        return "closed"

    found = [
        in_a_forked_copy(lambda: comm.all_reduce(torch.ones(3))),
        in_a_forked_copy(lambda: comm.all_reduce(torch.ones(3), async_op=True)),
        in_a_forked_copy(comm.barrier),
        in_a_forked_copy(lambda: comm.empty(3)),
        in_a_forked_copy(comm.synchronize),
        in_a_forked_copy(handle.trigger),
        in_a_forked_copy(handle.arm),
        in_a_forked_copy(lambda: communicator(group)),
        in_a_forked_copy(use_and_close),
        in_a_forked_copy(lambda: work.is_completed()),
    ]
    handle.trigger()
    assert tensor.tolist() == list(range(n))
    handle.close()
    if rank == 0:  # the others are late: a copy cannot wait for what a thread of this process does
        pending = comm.all_reduce(torch.ones(3), async_op=True)
        found.append(in_a_forked_copy(pending.wait))
        pending.wait()
    else:
        time.sleep(1.0)
        comm.all_reduce(torch.ones(3))
    total = torch.ones(2)
    comm.all_reduce(total)
    assert total.tolist() == [n, n]
    comm.close()
    return found


def test_a_forked_copy_is_told_at_once(pool: RankPool) -> None:
    first, *others = pool.run(forked_copies, 2)
    for found in (first, *others):
        for text in (*found[:8], *found[10:]):
            assert text.startswith("CommunicatorClosedError: Communicator: it was made in another process (pid"), found
            assert "of which this one (pid" in text and "is a forked copy" in text
        assert found[8:10] == ["closed", "True"]
    assert len(first) == len(others[0]) + 1


def test_whoever_has_waited_holds_the_last_reference() -> None:
    """Ranks reckon with one order in which tensors go: no thread may keep one for a moment longer."""
    thread, hold = CallThread(), threading.Event()
    try:
        tensor = torch.empty(1)
        seen: list[bool] = []
        gone = weakref.ref(tensor)
        future = thread.submit(lambda given: hold.wait() and None, tensor)
        future.add_done_callback(lambda _: seen.append(gone() is None))
        del tensor
        hold.set()
        future.result()
        thread.submit(lambda: None).result()  # callbacks come behind the result
        assert seen == [True]
    finally:
        thread.close()
