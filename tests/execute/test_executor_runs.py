"""The CPU executor as a whole, with ranks that share this process: arming, failing, stopping, leaving nothing."""

from __future__ import annotations

import dataclasses
import gc
import re
import threading
import time

import pytest
from worlds import POISON, LocalWorld, wrong_bytes

from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError, ProgramError
from sidelane.execute.cpu.executor import counts_of_queues
from sidelane.program.builders import Transport, build
from sidelane.program.collective import Buffer, Collective, Span, all_gather, all_to_all, broadcast
from sidelane.program.ir import EPOCH, Comparison, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Value, Wait
from sidelane.program.verify import verify

DMA, LOCAL = Engine(EngineKind.DMA), Engine(EngineKind.LOCAL)
NBYTES = 64


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sidelane-")]


def test_engine_threads_persist_between_invocations_and_end_with_the_executor() -> None:
    assert not threads()
    world = LocalWorld(3)
    loaded = world.load(build(all_gather([100] * 3), "pcpy"))
    assert not threads(), "no thread before there is something to run"
    loaded.run_checked(1)
    first = threads()
    assert sorted(thread.name for thread in first) == sorted(
        f"sidelane-{queue.rank}-{queue.engine}" for queue in loaded.ranks[0].program.queues
    )
    loaded.run_checked(2)
    loaded.run_checked(7)
    assert threads() == first
    for executor in world.executors:
        executor.close()
        executor.close()
    assert not threads()
    for method in (loaded.ranks[0].start, world.executors[0].load):
        with pytest.raises(CommunicatorClosedError, match="the executor was closed"):
            method(loaded.ranks[0].program, None) if method == world.executors[0].load else method(8)


def test_a_forgotten_executor_ends_its_threads() -> None:
    world = LocalWorld(2)
    world.load(build(all_gather([8] * 2), "b2b")).run_checked(1)
    assert threads()
    del world
    gc.collect()
    assert not threads()


def test_start_checks_its_arguments() -> None:
    with LocalWorld(1) as world:
        (loaded,) = world.load(build(all_gather([8]), "pcpy")).ranks
        with pytest.raises(ValueError, match=r"epochs begin at 1 \(value=0\)"):
            loaded.start(0)


def test_a_rank_without_queues_is_done_at_once() -> None:
    program = dataclasses.replace(build(all_gather([8] * 2), "pcpy"), queues=())
    with LocalWorld(2) as world:
        (pending, _) = world.load(program).start(3)
        pending.wait()
        assert pending.done()
        assert world.monitor.ended_calls == [3, 3]


def test_a_start_that_a_close_overtakes_fails_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start has seen that the executor is open, and hands over its queues when it no longer is."""
    with LocalWorld(2) as world:
        loaded = world.load(build(all_gather([8] * 2), "b2b"))
        loaded.run_checked(1)
        world.executors[0].close()
        monkeypatch.setattr(world.executors[0], "check_open", lambda method: None)
        pending = loaded.ranks[0].start(2)
        with pytest.raises(CommunicatorClosedError, match="closed its executor"):
            pending.wait()
        assert not [thread for thread in threads() if thread.name.startswith("sidelane-0")]
        with pytest.raises(PeerError, match="closed its executor"):
            loaded.ranks[1].start(2).wait()


def test_copies_to_peers_and_within_the_rank_are_counted_apart() -> None:
    queues = [queue for queue in build(all_gather([NBYTES] * 3), "b2b").queues if queue.rank == 0]
    counts = counts_of_queues(queues)
    assert (counts.peer_copies, counts.local_copies, counts.calls) == (2, 1, len(queues))


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named_with_the_step() -> None:
    with LocalWorld(3, timeout_s=0.5) as world:
        loaded = world.load(build(all_gather([NBYTES] * 3), "pcpy"))
        pendings = [loaded.ranks[0].start(4), loaded.ranks[2].start(4)]
        texts = []
        for pending in pendings:
            with pytest.raises(PeerTimeoutError) as caught:
                pending.wait()
            assert caught.value.ranks == (1,)
            assert pending.done()
            texts.append(str(caught.value))
        original = min(texts, key=len)  # the other one quotes it
        assert "all_gather(3 ranks, 192 bytes, out of place) pcpy, invocation 4: rank" in original
        assert re.search(r"queue dma:\d command \d \(wait flag 1 >= epoch\) waited \d+\.\d s;", original)
        assert original.endswith("rank 1 (in call 0) has not come")
        assert any(call == 4 and "(wait flag 1 >= epoch)" in text for _, call, text in world.monitor.notes)
        # It comes late: it is told what happened, and moves nothing.
        with pytest.raises(PeerTimeoutError, match="gave up") as late:
            loaded.ranks[1].start(4)
        assert late.value.ranks == (1,)
        assert bool((loaded.memory[1, Buffer.OUTPUT] == POISON).all())


def test_a_flag_that_nobody_signals_is_said_to_be_one() -> None:
    program = Program(all_gather([4]), "by hand", (Queue(0, DMA, (Wait(Flag(0, 0), EPOCH),)),), (0,), 1)
    with LocalWorld(1, timeout_s=0.05) as world:
        with pytest.raises(PeerTimeoutError, match="has not fired this trigger") as caught:
            world.load(program).run(1)
        assert caught.value.ranks == (0,)


def test_a_dead_peer_fails_the_wait_before_the_time_out() -> None:
    with LocalWorld(2, timeout_s=60) as world:
        loaded = world.load(build(all_gather([NBYTES] * 2), "b2b"))
        pending = loaded.ranks[0].start(1)
        assert not pending.done()
        world.monitor.dead.add(1)
        with pytest.raises(PeerError) as caught:
            pending.wait()
        assert caught.value.ranks == (1,)
        assert world.monitor.aborted is None, "everybody can see that for himself"


def test_an_error_in_an_engine_is_raised_here_and_names_its_place_to_the_peers() -> None:
    def fail(queue: Queue, index: int) -> None:
        if index == 1:
            raise ZeroDivisionError("injected")

    with LocalWorld(2, timeout_s=60, delays={1: fail}) as world:
        loaded = world.load(build(all_gather([NBYTES] * 2), "b2b", Transport.STAGED))
        first, last = loaded.start(1)
        with pytest.raises(ZeroDivisionError, match="injected"):
            last.wait()
        with pytest.raises(PeerError) as caught:
            first.wait()
        assert caught.value.ranks == (1,)
        assert "rank 1 gave up: all_gather(2 ranks, 128 bytes, out of place) b2b, invocation 1: rank 1 queue" in str(
            caught.value
        )
        assert str(caught.value).endswith("ZeroDivisionError: injected")


def test_no_thread_touches_memory_after_wait_has_raised() -> None:
    """One queue fails while another one has thousands of copies left, which it leaves at once."""
    begun: list[int] = []

    def slow_down(queue: Queue, index: int) -> None:
        if queue.engine is LOCAL:
            begun.append(index)
            time.sleep(1e-4)

    nbytes = 1 << 20
    copy = Copy(Span(0, Buffer.OUTPUT, 0, nbytes), Span(0, Buffer.INPUT, 0, nbytes))
    queues = (Queue(0, DMA, (Wait(Flag(0, 0), EPOCH),)), Queue(0, LOCAL, (copy,) * 10_000))
    program = Program(all_gather([nbytes]), "by hand", queues, (0,), 1)
    with LocalWorld(1, timeout_s=0.1, delays={0: slow_down}) as world:
        loaded = world.load(program)
        loaded.memory[0, Buffer.INPUT].fill_(1)
        (pending,) = loaded.start(1)
        with pytest.raises(PeerTimeoutError):
            pending.wait()
        output = loaded.memory[0, Buffer.OUTPUT]
        assert not bool((output == POISON).all()) and len(begun) < 9_999, "it was at work, and has left the rest"
        output.fill_(POISON)
        time.sleep(0.1)
        assert bool((output == POISON).all())


def test_closing_fails_what_runs_here_and_there() -> None:
    with LocalWorld(3, timeout_s=60) as world:
        loaded = world.load(build(all_gather([NBYTES] * 3), "pcpy"))
        mine, other = loaded.ranks[0].start(1), loaded.ranks[1].start(1)
        world.executors[0].close()
        with pytest.raises(CommunicatorClosedError, match="rank 0 closed its executor during all_gather"):
            mine.wait()
        with pytest.raises(PeerError, match="rank 0 gave up: rank 0 closed its executor"):
            other.wait()


def test_two_worlds_in_one_process_do_not_disturb_each_other() -> None:
    with LocalWorld(2, timeout_s=20) as good, LocalWorld(2, timeout_s=0.2) as bad:
        works, fails = (world.load(build(all_gather([NBYTES] * 2), "pcpy")) for world in (good, bad))
        lonely = fails.ranks[0].start(1)
        for epoch in range(1, 40):
            works.run_checked(epoch)
        with pytest.raises(PeerTimeoutError):
            lonely.wait()
        bad.executors[0].close()
        works.run_checked(50)


def test_many_waiting_threads_leave_time_for_those_that_work() -> None:
    """8 ranks with 8 threads each on whatever cores there are."""
    with LocalWorld(8, timeout_s=60) as world:
        loaded = world.load(build(all_to_all([[NBYTES] * 8] * 8), "pcpy"))
        for epoch in range(1, 6):
            loaded.run_checked(epoch)
        assert len(threads()) == 64


# --- wrong programs ---------------------------------------------------------------------------------------------------


def exchange(rank: int) -> Copy:
    """Half of a two-rank all-gather in place: push the own shard into the peer's output."""
    return Copy(Span(1 - rank, Buffer.OUTPUT, rank * NBYTES, NBYTES), Span(rank, Buffer.OUTPUT, rank * NBYTES, NBYTES))


def in_place() -> Collective:
    return all_gather([NBYTES] * 2, in_place=True)


def test_a_lost_signal_hangs_as_verify_says() -> None:
    """Flags that their waiter takes back, and no entry handshake: a fast rank's next signal comes before the reset."""

    def queue(rank: int) -> Queue:
        raised, mine = Value(1), Flag(rank, 0)
        commands = (
            exchange(rank),
            Signal(Flag(1 - rank, 0), raised),
            Wait(mine, raised, Comparison.EQ),
            Signal(mine, Value(0)),
        )
        return Queue(rank, DMA, commands)

    program = Program(in_place(), "frozen without entry", (queue(0), queue(1)), (0, 0), flag_count=1)
    with pytest.raises(ProgramError, match="lost|reset|erase"):
        verify(program)
    signalled_again = threading.Event()
    counts = {"signals": 0, "resets": 0}

    def slow(queue: Queue, index: int) -> None:
        if index == 3:
            counts["resets"] += 1
            if counts["resets"] == 1:
                assert signalled_again.wait(10)

    def fast(queue: Queue, index: int) -> None:
        if index == 2:  # behind its signal
            counts["signals"] += 1
            if counts["signals"] == 2:
                signalled_again.set()

    with LocalWorld(2, timeout_s=1, delays={0: slow, 1: fast}) as world:
        loaded = world.load(program)
        first = loaded.start(1)
        first[1].wait()
        ahead = loaded.ranks[1].start(2)
        first[0].wait()
        behind = loaded.ranks[0].start(2)
        ahead.wait()
        with pytest.raises(PeerTimeoutError) as caught:
            behind.wait()
        assert "command 2 (wait flag 0 == 1)" in str(caught.value)
        assert "rank 1 (in call 2) began it, but did not signal" in str(caught.value)
        assert caught.value.ranks == (1,)
    with LocalWorld(2) as world:  # with luck it goes well: only a proof finds it
        world.load(program).run_checked(1)


def test_two_queues_without_a_flag_between_them_give_wrong_bytes_as_verify_says() -> None:
    """A local engine stages what a DMA engine sends, and nothing orders the two."""
    staged, shard = Span(0, Buffer.STAGING, 0, NBYTES), Span(0, Buffer.INPUT, 0, NBYTES)
    target, done = Span(1, Buffer.OUTPUT, 0, NBYTES), Flag(1, 1)
    own = Span(0, Buffer.OUTPUT, 0, NBYTES)
    queues = (
        Queue(0, LOCAL, (Copy(staged, shard), Copy(own, shard))),
        Queue(0, DMA, (Wait(Flag(0, 0), EPOCH), Copy(target, staged), Signal(done, EPOCH))),
        Queue(1, DMA, (Signal(Flag(0, 0), EPOCH), Wait(done, EPOCH))),
    )
    collective = broadcast(NBYTES, 2, root=0)
    program = Program(collective, "unordered staging", queues, (NBYTES, 0), flag_count=2)
    with pytest.raises(ProgramError, match="staging@0"):
        verify(program)
    sent = threading.Event()

    def late(queue: Queue, index: int) -> None:
        if queue.engine == LOCAL and index == 0:
            assert sent.wait(10)
        if queue.engine == DMA and index == 2:
            sent.set()

    with LocalWorld(2, delays={0: late}) as world:
        loaded = world.load(program)
        with pytest.raises(AssertionError, match="wrong bytes"):
            loaded.run_checked(1)


def test_a_missing_entry_handshake_overwrites_what_is_still_read_as_verify_says() -> None:
    """Epochs lose no signal, but a fast rank writes into an output that its peer still looks at."""

    def queue(rank: int, peer: int) -> Queue:
        return Queue(rank, DMA, (exchange(rank), Signal(Flag(peer, 0), EPOCH), Wait(Flag(rank, 0), EPOCH)))

    program = Program(in_place(), "no entry", (queue(0, 1), queue(1, 0)), (0, 0), flag_count=1)
    with pytest.raises(ProgramError, match="output@"):
        verify(program)
    sent = threading.Event()
    count = {"sent": 0}

    def fast(queue: Queue, index: int) -> None:
        if index == 2:
            count["sent"] += 1
            if count["sent"] == 2:
                sent.set()

    with LocalWorld(2, delays={0: fast}) as world:
        loaded = world.load(program)
        loaded.run_checked(1)
        output = loaded.memory[1, Buffer.OUTPUT]
        assert wrong_bytes(in_place(), 1, 1, output[:0], output) == 0
        loaded.memory[0, Buffer.OUTPUT][:NBYTES] = POISON  # the caller of rank 0 makes its next input
        ahead = loaded.ranks[0].start(2)
        assert sent.wait(10)
        assert wrong_bytes(in_place(), 1, 1, output[:0], output) > 0, "rank 1 has not called again"
        loaded.ranks[1].start(2).wait()
        ahead.wait()
