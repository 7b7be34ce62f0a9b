"""Wrong calls and failing peers: clear errors on every rank, nothing moved, nothing hangs, nothing left behind."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, error_of
from on_ranks import on_ranks

from sidelane import CommunicatorClosedError, MismatchError, PeerError
from sidelane.errors import SidelaneError


@on_ranks(2)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("refused", "there"), [(True, "ValueError"), (False, "MismatchError")])
def test_a_mistake_in_a_loop_ends_the_communicator_as_the_guide_says(
    group: dist.ProcessGroup, debug: bool, refused: bool, there: str
) -> None:
    """Rank 0 repeats a call that all have made, rank 1 makes a mistake instead; then all make one that is right."""
    with communicator(group, debug=debug) as comm:
        good = torch.ones(4)
        comm.all_reduce(good)
        other = (lambda: comm.all_reduce(good, op="foo")) if refused else (lambda: comm.all_reduce(good.bfloat16()))
        told = [error_of(other if comm.rank == 1 else lambda: comm.all_reduce(good))]
        try:
            comm.all_reduce(good)
        except SidelaneError as error:
            told.append(error)
    plain = [["PeerError", "CommunicatorClosedError"], [there, "PeerError"]]
    expected = [["PeerError" if refused else there], [there]] if debug else plain
    assert [type(error).__name__ for error in told] == expected[comm.rank]


@on_ranks(2)
def test_a_missing_or_closed_communicator_says_what_is_needed(group: dist.ProcessGroup) -> None:
    """Rank 0 makes a communicator that rank 1 does not make, and then calls one that it has closed."""
    with communicator(group) as comm:
        if comm.rank == 0:
            needed = "for rank 1: all ranks of a group make its communicators and calls, in one order"
            assert needed in str(error_of(communicator, group, timeout_s=0.2))
        comm.barrier()
    closed = "Communicator: closed; calls come before close(), or inside of its block"
    assert str(error_of(comm.all_reduce, torch.ones(4))) == closed


@on_ranks(3)
def test_known_calls_are_compared_in_debug(group: dist.ProcessGroup) -> None:
    with communicator(group, debug=True) as comm:
        n = comm.world_size
        small, large = (torch.full((5 * n,), -1.0), torch.empty(5)), (torch.full((9 * n,), -1.0), torch.empty(9))
        for out, shard in (small, large):
            comm.all_gather(out, shard)
            out.fill_(-1)
        out, shard = large if comm.rank == 1 else small
        error = error_of(comm.all_gather, out, shard)
        assert isinstance(error, MismatchError) and (out == -1).all(), error
        comm.barrier()
        text = str(error)
        assert "rank 0: all_gather(3 ranks, 60 bytes" in text and "rank 1: all_gather(3 ranks, 108 bytes" in text
        assert "each rank splits 1 rows" in str(error_of(comm.agree, "rows", f"each rank splits {comm.rank} rows"))


@on_ranks(2)
def test_a_mismatch_with_a_rank_that_is_far_ahead_is_named(group: dist.ProcessGroup) -> None:
    """Rank 1 makes a hundred known calls while rank 0 makes a new one: what rank 1 posted for it is gone."""
    with communicator(group) as comm:
        n = comm.world_size
        out, shard = torch.empty(5 * n), torch.empty(5)
        comm.all_gather(out, shard)
        if comm.rank == 1:
            works = [comm.all_gather(out, shard, async_op=True) for _ in range(100)]
            dist.barrier(group)
            error = error_of(works[0].wait)
        else:
            dist.barrier(group)
            error = error_of(comm.all_gather, torch.empty(6 * n), torch.empty(6))
        name, text = type(error).__name__, str(error)
    assert "no longer on record" in text, text
    if comm.rank == 0:
        assert name == "MismatchError", text
        assert "call 2: ranks made different calls: rank 0: all_gather(2 ranks, 48 bytes" in text
        assert "rank 1: 99 calls ahead, its call 2 is no longer on record (SIDELANE_DEBUG=1" in text
    else:
        assert name == "PeerError" and "rank 0" in text


@on_ranks(2)
@pytest.mark.parametrize("ahead", [1, 80])
def test_a_time_out_names_the_call_that_the_peer_made(group: dist.ProcessGroup, ahead: int) -> None:
    """Rank 0 reduces, the others gather: the flags of a gather are not enough for a reduction."""
    with communicator(group, timeout_s=1) as comm:
        n = comm.world_size
        out, shard, total = torch.empty(5 * n), torch.empty(5), torch.ones(7 * n)
        comm.all_gather(out, shard)
        comm.all_reduce(total)
        if comm.rank == 0:
            dist.barrier(group)
            text = str(error_of(comm.all_reduce, total))
        else:
            works = [comm.all_gather(out, shard, async_op=True) for _ in range(1 + ahead)]
            dist.barrier(group)
            text = str(error_of(works[-1].wait))
    gone = "80 calls ahead, its call 3 is no longer on record (SIDELANE_DEBUG=1"
    theirs = gone if ahead == 80 else "its call 3 is all_gather(2 ranks, 40 bytes"
    assert theirs in text or "its call 3 is all_reduce(2 ranks, 56 bytes" in text  # either may be first to give up


@on_ranks(3)
def test_a_refused_known_call_is_an_error_on_the_peers(group: dist.ProcessGroup) -> None:
    """Without the debug switch, a known call is not compared: the peers find out while they wait."""
    with communicator(group, timeout_s=5) as comm:
        n = comm.world_size
        out, shard = torch.empty(5 * n), torch.empty(5)
        comm.all_gather(out, shard)
        error = error_of(comm.all_gather, out, torch.empty(6) if comm.rank == 1 else shard)
        if comm.rank == 1:
            assert isinstance(error, ValueError)
        else:
            assert isinstance(error, PeerError) and "rank 1" in str(error) and "output must hold" in str(error)
            with pytest.raises(CommunicatorClosedError, match="unusable since a call failed"):
                comm.all_gather(out, shard)


@on_ranks(3)
def test_closing_leaves_no_thread_and_no_file(group: dist.ProcessGroup) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    with communicator(group) as comm:  # the first one warms up what stays for good
        comm.all_reduce(torch.ones(3))
    before, running = count(), set(threading.enumerate())  # of other tests: what answers for descriptors stays
    for _ in range(5):
        with communicator(group) as comm:
            tensor = comm.empty(1000)
            comm.all_reduce(tensor.fill_(1.0))
            comm.all_gather(torch.empty(comm.world_size), torch.ones(1))
        del tensor
    left = [thread.name for thread in set(threading.enumerate()) - running if thread.name.startswith("sidelane")]
    assert left == []
    assert count() - before <= 1


@on_ranks(2)
def test_a_closed_communicator_says_so_and_its_tensors_live_on(group: dist.ProcessGroup) -> None:
    comm = communicator(group)
    tensor = comm.empty(4)
    comm.close()
    comm.close()
    tensor.fill_(1)
    with pytest.raises(CommunicatorClosedError, match="closed"):
        comm.all_reduce(tensor)
