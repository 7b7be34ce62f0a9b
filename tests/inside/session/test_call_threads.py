"""Threads and forks: a communicator for each thread, one that two threads use, copies of a process that has one."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, in_a_forked_copy
from marks import long
from on_ranks import on_ranks
from ranks import RankPool
from turns import Turns

import sidelane
from sidelane import CommunicatorClosedError, PeerError
from sidelane.collectives.work import CallThread
from sidelane.integrations.ledger import Ledger
from sidelane.memory import record as records


@on_ranks(3, timeout_s=150)
@pytest.mark.parametrize("seed", [0, 1, *map(long, range(2, 6))])
def test_two_communicators_of_one_group_have_a_thread_each(group: dist.ProcessGroup, seed: int) -> None:
    """Both need staging that grows, again and again, which is an exchange of handles each time."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    comms = [communicator(group) for _ in range(2)]
    made = [0, 0]

    def work(which: int) -> None:
        comm = comms[which]
        generator = torch.Generator().manual_seed(1000 * seed + 10 * which + rank)
        for k in range(25):
            numel = (1 << 12) * (k % 5 + 1) * (which + 1) + 64 * k
            shard = torch.full((numel,), 1000 * which + 10 * k + rank, dtype=torch.int32)
            output = torch.empty(n * numel, dtype=torch.int32)
            time.sleep(float(torch.rand((), generator=generator)) * 2e-3)
            comm.all_gather(output, shard)
            right = torch.tensor([1000 * which + 10 * k + r for r in range(n)], dtype=torch.int32)
            assert torch.equal(output.view(n, numel)[:, 0], right) and torch.equal(output.view(n, numel)[:, -1], right)
            if k % 8 == which:
                block = comm.empty(1 << 16, dtype=torch.uint8)
                block.fill_(rank)
                comm.broadcast(block, root=k % n)
                assert int(block.sum()) == (k % n) << 16
            made[which] += 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2), timeout=120))
    for comm in comms:
        comm.close()
    assert made == [25, 25]


@on_ranks(2)
def test_two_threads_in_one_communicator_are_an_error_at_once(group: dist.ProcessGroup) -> None:
    """Nobody knows which of the two calls the peers are in, so that it is the end on all ranks, and nobody waits."""
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
        while not comm.calls.entrance.locked():
            time.sleep(1e-3)
        with pytest.raises(RuntimeError) as caught:
            comm.all_gather(torch.empty(2), torch.empty(1))
        thread.join(20)
        text = str(caught.value)
        assert text.startswith("all_gather: another call of this communicator is under way in another thread (value=")
        assert "one call is made at a time. Give each thread a communicator" in text
        assert isinstance(inside[0], PeerError)
    else:
        time.sleep(0.5)
        with pytest.raises(PeerError, match="rank 0 gave up: rank 0 called all_gather in two threads at once"):
            comm.all_reduce(torch.ones(3))
    with pytest.raises(CommunicatorClosedError, match="unusable since a call failed") as later:
        comm.barrier()
    assert rank or "in two threads at once" in str(later.value)
    comm.close()


def interrupted(group: dist.ProcessGroup) -> list[str]:
    """Rank 0 is inside of a call, for which rank 1 is late, when a signal handler makes others there."""
    rank, said = dist.get_rank(group), []
    ours, comm = sidelane.wrap(group), communicator(group)
    calls: tuple[Callable[..., Any], ...] = (lambda x, **more: dist.all_reduce(x, group=ours, **more), comm.all_reduce)
    tensors = [torch.ones(1 << 20) for _ in calls]
    for call, tensor in zip(calls, tensors, strict=True):
        call(tensor)
    turn, goes = ours._lifetime.orders["cpu"]._mutex, torch.empty(1)  # type: ignore[attr-defined]

    class Sends:
        def __init__(self, call: Callable[..., Any]) -> None:
            self.call, self.itself = call, self

        def __del__(self) -> None:
            tell(lambda: self.call(torch.ones(3)))

    def tell(function: Callable[[], object]) -> None:
        try:
            function()
            said.append("made")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    def while_inside(is_inside: Callable[[], bool], call: Callable[[], object], handler: Callable[[], None]) -> None:
        if rank:
            dist.recv(goes, group=group, group_src=0)
            call()
            return

        handled: list[bool] = []

        def handle(*_: object) -> None:
            if not handled:
                handled.append(True)
                handler()
                dist.send(goes, group=group, group_dst=1)

        def interrupt() -> None:
            while not is_inside():
                time.sleep(1e-3)
            while not handled:  # one that comes just before the thread blocks is handled when it goes on
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                time.sleep(0.02)

        before = signal.signal(signal.SIGUSR2, handle)
        thread = threading.Thread(target=interrupt)
        thread.start()
        call()
        thread.join(20)
        signal.signal(signal.SIGUSR2, before)

    late: list[dist.Work] = []
    for call, is_inside in zip(
        calls, (lambda: repr(turn._lock).startswith("<locked"), comm.calls.entrance.locked), strict=True
    ):

        def again(call: Callable[..., Any] = call) -> None:
            gc.collect()
            Sends(call)
            tell(lambda: call(torch.ones(3)))
            tell(lambda: dist.barrier(ours) if call is calls[0] else comm.empty(3))
            gc.collect()
            assert str(sidelane.report())
            late.append(dist.all_reduce(tensors[0], group=ours, async_op=True))  # type: ignore[arg-type]
            if call is calls[0]:
                tell(late[-1].wait)

        while_inside(is_inside, lambda call=call: call(tensors[1]), again)  # type: ignore[misc]
        if rank:
            late.append(dist.all_reduce(tensors[0], group=ours, async_op=True))  # type: ignore[arg-type]
        late[-1].wait()
    assert tensors[0].eq(8).all() and tensors[1].eq(8).all()
    for call in calls:
        call(torch.ones(3))
    while_inside(comm.calls.entrance.locked, lambda: tell(lambda: comm.all_reduce(tensors[1])), comm.close)
    dist.barrier(group)
    comm.close()
    dist.destroy_process_group(ours)
    return said


def test_a_call_that_interrupts_one_of_its_thread_is_refused_in_one_piece(pool: RankPool) -> None:
    said, peer = pool.run(interrupted, 2)
    inside = "this thread is already inside of"
    for text, name in zip(
        said,
        (
            *(f"allreduce: {inside} allreduce", f"barrier: {inside} allreduce", f"allreduce: {inside} allreduce"),
            f"wait: {inside} a call that it would wait for",
            *(f"all_reduce: {inside} all_reduce", f"empty: {inside} all_reduce", f"all_reduce: {inside} all_reduce"),
        ),
        strict=False,
    ):
        assert text.startswith(f"RuntimeError: {name}, and a signal handler or a finaliser"), said
    assert len(said) == 8 and said[7].startswith("CommunicatorClosedError: rank 0 closed its executor during")
    assert peer == [text for text in peer if text.startswith("PeerError")] and len(peer) == 1


class Interrupted:
    """Stands for a lock behind which a signal handler comes in."""

    def __init__(self, handler: Callable[[], None]) -> None:
        self._lock, self._handlers = threading.Lock(), [handler]
        self.acquire = self._lock.acquire

    def release(self) -> None:
        self._lock.release()
        while self._handlers:
            self._handlers.pop()()


class Report(str):
    """Part of a key in the middle of whose use a signal handler asks for a report."""

    def __hash__(self) -> int:
        assert str(sidelane.report())
        return super().__hash__()


def test_what_a_thread_holds_its_signal_handlers_may_take() -> None:
    def fence() -> None:
        records._own.lock = lock  # type: ignore[assignment]
        records.full_fence()

    def note() -> None:
        Ledger([0]).note((Report("all_reduce"), "float32", "cpu", "sidelane", "b2b"), "", 4)

    lock = Interrupted(fence)
    for function in (fence, note):
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), function


@on_ranks(3)
def test_threads_may_take_turns(group: dist.ProcessGroup) -> None:
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


@on_ranks(2)
def test_a_forked_copy_is_told_at_once(group: dist.ProcessGroup) -> None:
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
    assert len(found) == (11 if rank == 0 else 10) and found[8:10] == ["closed", "True"]
    for text in (*found[:8], *found[10:]):
        assert text.startswith("CommunicatorClosedError: Communicator: it was made in another process (pid"), found
        assert "of which this one (pid" in text and "is a forked copy" in text


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
        thread.end()


def test_threads_take_turns_in_one_order():
    turns, seen = Turns(3), []

    def work(number: int, times: int) -> None:
        for _ in range(times):
            with turns.take(number):
                seen.append(number)
        turns.leave(number)

    threads = [threading.Thread(target=work, args=pair) for pair in ((0, 2), (1, 5), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [0, 1, 2, 0, 1, 2, 1, 2, 1, 1]
