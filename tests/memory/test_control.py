"""The control block: what ranks tell each other, and how they find out that one is late, gone, or gave up."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import crew, shared_memory

from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.memory.liveness import ProcessIdentity
from sidelane.memory.posts import RING_CALLS


def failure(control: ControlBlock, call: int, within_s: float = 5.0) -> tuple[str, tuple[int, ...], str]:
    """Poll ``check`` until it raises: type, ranks and text."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            control.check(call)
        except PeerError as error:
            return type(error).__name__, error.ranks, str(error)
        time.sleep(0.01)
    raise AssertionError(f"check({call}) found nothing")


@on_ranks(1, 3, (2, 5))
def test_posted_calls_reach_all(group: dist.ProcessGroup) -> None:
    control = ControlBlock(Exchange(group, 60.0))
    rank = dist.get_rank(group)
    for call in range(1, 3 * RING_CALLS):
        control.post_call(call, f"call {call} of rank {rank}", "bad dtype" if (call + rank) % 50 == 0 else None)
        posted = control.calls_of_all(call, 10.0)
        assert [post.rank for post in posted] == list(range(control.world_size))
        assert [post.signature for post in posted] == [f"call {call} of rank {r}" for r in range(control.world_size)]
        refusals = [post.refusal for post in posted]
        assert refusals == ["bad dtype" if (call + r) % 50 == 0 else None for r in range(control.world_size)]
    # Later posts of a call replace earlier ones; text is kept as it is, up to 1023 bytes, then told apart by a digest.
    long = "ü" * 800 + str(rank)
    control.post_call(1000, "short")
    control.post_call(1000, long, refusal="naïve\0" + "x" * 1200)
    posted = control.calls_of_all(1000, 10.0)
    dist.barrier(group)
    posted = control.calls_of_all(1000, 10.0)
    assert all(post.signature.startswith("ü" * 490) and len(post.signature.encode()) < 1024 for post in posted)
    assert len({post.signature for post in posted}) == control.world_size
    assert all(
        post.refusal is not None and post.refusal.startswith("naïve\N{REPLACEMENT CHARACTER}x") for post in posted
    )
    control.close()
    with pytest.raises(CommunicatorClosedError):
        control.post_call(1001, "late")
    dist.barrier(group)


@on_ranks(2)
def test_a_post_stays_until_all_have_read_it(group: dist.ProcessGroup) -> None:
    """Rank 1 has read what all posted and makes hundreds of calls, before rank 0 looks."""
    control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
    control.post_call(1, f"first of rank {rank}")
    dist.barrier(group)
    if rank == 0:
        time.sleep(0.5)
    posted = control.calls_of_all(1, 20.0)
    for call in range(2, 5 * RING_CALLS):
        control.post_call(call, f"call {call}")
    control.close()
    assert [post.signature for post in posted] == ["first of rank 0", "first of rank 1"]


@on_ranks(2)
def test_nobody_waits_for_a_reader_that_left(group: dist.ProcessGroup) -> None:
    """Nobody waits for a reader that has closed its side or given up."""
    for leave in (ControlBlock.close, lambda control: control.abort("had enough")):
        control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
        control.post_call(1, "first")
        dist.barrier(group)
        if rank == 0:
            leave(control)
        else:
            control.calls_of_all(1, 1000.0) if leave is ControlBlock.close else None
            for call in range(2, 3 * RING_CALLS):
                control.post_call(call, "more")
        dist.barrier(group)


@on_ranks(2)
def test_nobody_waits_for_a_rank_that_has_passed_a_call_without_reading(group: dist.ProcessGroup) -> None:
    """Rank 0 reads the posts of a call; rank 1 has made it before, and reads none, then or later."""
    control = ControlBlock(Exchange(group, 60.0))
    for call in range(1, 3 * RING_CALLS):
        control.post_call(call, f"call {call} of {control.rank}")
        if call == 1:
            if control.rank == 0:
                assert [post.signature for post in control.calls_of_all(1, 3600.0)] == ["call 1 of 0", "call 1 of 1"]
            dist.barrier(group)
    dist.barrier(group)
    control.close()


@on_ranks(2)
def test_a_post_that_is_gone_is_no_time_out(group: dist.ProcessGroup) -> None:
    """Rank 1 has not compared call 5 and is far beyond it."""
    control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
    for call in range(1, 6 if rank == 0 else 5 + RING_CALLS + 1):
        control.post_call(call, "same text")
    dist.barrier(group)
    if rank == 0:
        own, other = [post.signature for post in control.calls_of_all(5, 20.0)]
        assert own == "same text"
        assert other.startswith("64 calls ahead, its call 5 is no longer on record")


@on_ranks(3)
def test_progress_is_seen_and_ends_are_counted_in_order(group: dist.ProcessGroup) -> None:
    control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
    assert control.absent(1) == (0, 1, 2)
    dist.barrier(group)
    if rank != 1:
        control.begin(4, "all_gather pcpy")
    dist.barrier(group)
    assert control.absent(4) == (1,)
    assert control.absent(5) == (0, 1, 2)
    assert [control.begun(r) for r in range(3)] == [4, 0, 4]
    assert "in call 4, all_gather pcpy" in control.describe(2)
    assert "alive, has begun no call" in control.describe(1)
    dist.barrier(group)
    if rank == 0:
        control.begin(6, "six")
        control.end(6)  # before 4
        control.note(4, "still four")
    dist.barrier(group)
    assert [control.ended(r) for r in range(3)] == [3, 0, 0]
    assert "in call 6" in (said := control.describe(0, 3)) and said.count("has ended call 3") == 1
    assert "has ended" not in control.describe(0, 4), "which 0 is still in"
    assert control.at_fault((0, 1, 2)) == (1, 2), "0 waits for a peer itself"
    assert control.at_fault((0,)) == (0,)
    dist.barrier(group)
    control.end(4) if rank == 0 else None
    dist.barrier(group)
    assert [control.ended(r) for r in range(3)] == [6, 0, 0]
    assert "ended call 6" in control.describe(0)
    assert control.at_fault((0, 1)) == (0, 1)
    control.check(6)
    dist.barrier(group)


@on_ranks(4)
def test_ranks_that_do_not_post_are_named_to_all(group: dist.ProcessGroup) -> None:
    control, rank, missing = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group), (1, 2)
    if rank in missing:
        kind, ranks, text = failure(control, 1)
        assert kind == "PeerTimeoutError"
    else:
        control.post_call(1, "all_gather of 12 bytes")
        while not all(control.begun(peer) for peer in (0, 3)):
            time.sleep(0.01)  # a loaded machine may start them one after the other
        with pytest.raises(PeerTimeoutError) as caught:
            control.calls_of_all(1, 0.3)
        ranks, text = caught.value.ranks, str(caught.value)
    assert ranks == missing and "call 1 (all_gather of 12 bytes)" in text
    assert "rank 1 (pid" in text and "rank 2 (pid" in text and "has begun no call" in text


@on_ranks(3)
def test_the_first_abort_speaks_for_all(group: dist.ProcessGroup) -> None:
    control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
    control.check(1)
    dist.barrier(group)
    if rank == 1:
        control.abort("out of patience at step 3", [2], timed_out=True)
        control.abort("said twice", [0])
    first = failure(control, 1)
    dist.barrier(group)
    if rank == 0:
        control.abort("me too")
    dist.barrier(group)
    expected = ("PeerTimeoutError", (2,), "rank 1 gave up: out of patience at step 3")
    assert first == failure(control, 99) == expected


@on_ranks(3)
def test_a_refused_call_fails_on_the_others_and_only_that_call(group: dist.ProcessGroup) -> None:
    control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
    if rank == 1:
        control.post_call(5, "all_gather", refusal="TypeError: float64")
        control.check(5)  # its own refusal was raised where it was found
    else:
        expected = ("PeerError", (1,), "rank 1 refused call 5, all_gather: TypeError: float64")
        assert failure(control, 5) == expected
        control.check(4)
        control.check(6)
        control.check_present(5)
    dist.barrier(group)


@on_ranks(2)
def test_a_rank_that_closed_does_not_come(group: dist.ProcessGroup) -> None:
    control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
    control.begin(1, "one")
    control.end(1)
    if rank == 1:
        control.close()
    dist.barrier(group)
    control.check(1)
    control.check_present(1)
    if rank == 0:
        with pytest.raises(PeerError):
            control.check_present(2)
        kind, ranks, text = failure(control, 2)
        assert (kind, ranks) == ("PeerError", (1,))
        assert text.startswith("rank 1 closed its communicator before call 2: rank 1 (pid")
        assert "closed, ended call 1" in text
    dist.barrier(group)


@on_ranks(2)
@pytest.mark.parametrize(
    ("says", "asks", "seen"),
    [
        ("abort", "calls", "rank 1 gave up: rank 1 was interrupted"),
        ("abort", "check", "rank 1 gave up: rank 1 was interrupted"),
        ("refusal", "calls", "broadcast None; all_gather TypeError: float64"),
        ("refusal", "check", "rank 1 refused call 2, all_gather: TypeError: float64"),
        ("post", "calls", "broadcast None; all_gather None"),
    ],
)
def test_what_a_rank_said_before_it_closed_is_heard(group: dist.ProcessGroup, says: str, asks: str, seen: str) -> None:
    """Rank 1 says something and closes between the two looks of rank 0: at what was said, and at who is gone."""

    class Slow(ControlBlock):
        looks = 0

        def _check_gone(self, *args: Any, **kwargs: Any) -> None:
            self.looks += 1
            if self.looks == 1:
                dist.barrier(group)
                dist.barrier(group)
            super()._check_gone(*args, **kwargs)

    control = Slow(Exchange(group, 60.0))
    if dist.get_rank(group) == 1:
        dist.barrier(group)
        if says == "abort":
            control.abort("rank 1 was interrupted", (1,))
        else:
            control.post_call(2, "all_gather", "TypeError: float64" if says == "refusal" else None)
        control.close()
        dist.barrier(group)
        return
    try:
        if asks == "check":
            text = "nothing"
            control.check(2)
        else:
            control.post_call(2, "broadcast")
            text = "; ".join(f"{post.signature} {post.refusal}" for post in control.calls_of_all(2, 10.0))
    except PeerError as error:
        text = str(error)
    finally:
        control.close()
    assert text.startswith(seen)


def die(group: dist.ProcessGroup) -> tuple[tuple[str, tuple[int, ...], str], str, tuple[str, ...]] | None:
    control, rank = ControlBlock(Exchange(group, 60.0)), dist.get_rank(group)
    control.begin(1, "one")
    control.end(1)
    if rank != 1:
        control.begin(2, "two")
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = failure(control, 2)
    control.check(1)  # that one it had ended
    with pytest.raises(PeerError) as caught:
        control.calls_of_all(2, 30.0)
    text = str(caught.value)
    assert shared_memory()
    del control, caught  # a traceback holds on to what its frames hold
    gc.collect()
    return seen, text, tuple(shared_memory())


def test_a_killed_rank_is_named_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    with crew(3) as own:
        first, code, last = own.run(die, None, dying=[1], timeout_s=30)
    assert code == -signal.SIGKILL
    for (kind, ranks, text), posted, left in (first, last):
        assert (kind, ranks) == ("PeerError", (1,))
        assert text.startswith("rank 1 died in or before call 2: rank 1 (pid")
        assert "dead, ended call 1" in text
        assert "rank 1 died" in posted
        assert left == ()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "sidelane" in name}


def test_a_process_is_not_mistaken_for_another() -> None:
    own = ProcessIdentity.own()
    assert own.alive(own)
    assert own._replace(started=own.started - 1).alive(own) is False, "its pid was used again"
    assert own._replace(namespace=own.namespace + 1).alive(own) is None
    assert own._replace(boot="another", host="elsewhere").alive(own) is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()
    identity = own._replace(pid=child.pid, started=int(fields[19]))
    untimed = identity._replace(started=0)  # a system without start times
    assert identity.alive(own)
    assert untimed.alive(own)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet buried: a zombie
    assert identity.alive(own) is False
    child.wait()
    assert identity.alive(own) is False
    assert untimed.alive(own) is False
