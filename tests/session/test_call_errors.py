"""Wrong calls and failing peers: clear errors on every rank, nothing moved, nothing hangs, nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, error_of
from ranks import RankPool, crew

import sidelane
from sidelane import Communicator, CommunicatorClosedError, MismatchError, PeerError, PeerTimeoutError
from sidelane.errors import SidelaneError


def wrong_arguments(group: dist.ProcessGroup) -> list[str]:
    """Calls that every rank gets wrong in the same way."""
    texts = []
    with communicator(group) as comm, communicator(group) as other:
        n = comm.world_size
        f = torch.empty
        mine, foreign, whole = comm.empty(4 * n), other.empty(4), f(8 * n)
        wrong = [
            (comm.all_gather, (f(4 * n + 1), f(4)), {}),
            (comm.all_gather, (f(4 * n), f(4, dtype=torch.float64)), {}),
            (comm.all_gather, (f(4, n).t(), f(4)), {}),
            (comm.all_gather, (f(4 * n, device="meta"), f(4, device="meta")), {}),
            (comm.all_gather, (mine, foreign), {}),
            (comm.all_gather, (whole[: 4 * n], whole[2:6] if comm.rank else whole[6:10]), {}),
            (comm.all_gather, (f(4 * n), f(4)), {"variant": "swap"}),
            (comm.all_gather, (f(4 * n), f(4)), {"variant": "bcst"}),
            (comm.all_gather, (None, f(4)), {}),
            (comm.all_to_all, (f(n + 1), f(n + 1)), {}),
            (comm.all_to_all, (whole[: 4 * n], whole[1 : 4 * n + 1]), {}),
            (comm.all_to_all, (f(n), f(n)), {"input_split_sizes": [1] * n}),
            (
                comm.all_to_all,
                (f(n), f(n)),
                {"input_split_sizes": [2] * n, "output_split_sizes": [1] * n},
            ),
            (comm.reduce_scatter, (f(4), f(4 * n)), {"op": "product"}),
            (comm.reduce_scatter, (f(4, dtype=torch.float64), f(4 * n, dtype=torch.float64)), {}),
            (comm.all_reduce, (f(4),), {"output": f(5)}),
            (comm.broadcast, (f(4),), {"root": n}),
            (comm.scatter, (f(4), None if comm.rank == 0 else f(4 * n)), {"root": 0}),
            (comm.gather, (f(4 * n + 1) if comm.rank == 0 else f(1), f(4)), {"root": 0}),
        ]
        for function, args, kwargs in wrong:
            error = error_of(function, *args, **kwargs)
            assert isinstance(error, ValueError | TypeError), error
            assert function.__name__ in str(error) or "another communicator" in str(error), error
            texts.append(str(error))
        # Whatever was refused, the ranks are still in step.
        total = torch.ones(3)
        comm.all_reduce(total)
        assert total.tolist() == [n] * 3
    return texts


def test_wrong_arguments_are_refused_on_every_rank_and_nothing_breaks(pool: RankPool) -> None:
    texts = pool.run(wrong_arguments, 3)[0]
    assert "output must hold 3 times the elements of input (output=13, input=4, allowed output=12)" in texts[0]
    assert "another communicator" in texts[4]
    assert "as tensor.contiguous() makes them" in texts[2]
    assert "in-place call" in texts[5]
    assert "(value='swap', allowed=auto, b2b, striped, bcst" in texts[6]
    assert "symmetric memory" in texts[7]
    assert "allowed=sum, avg, min, max" in texts[13]


def one_rank_is_wrong(group: dist.ProcessGroup) -> tuple[str, str]:
    with communicator(group) as comm:
        n = comm.world_size
        out = torch.full((5 * n,), -1.0)
        error = error_of(comm.all_gather, out, torch.empty(6 if comm.rank == 2 else 5))
        assert (out == -1).all(), "bytes moved before the call was agreed"
        comm.barrier()
        return type(error).__name__, str(error)


def test_one_ranks_mistake_is_an_error_on_all(pool: RankPool) -> None:
    results = pool.run(one_rank_is_wrong, 4)
    assert [name for name, _ in results] == ["PeerError", "PeerError", "ValueError", "PeerError"]
    assert all("rank 2 refused it: ValueError: all_gather: output must hold" in results[rank][1] for rank in (0, 1, 3))


def odd_mistakes(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Mistakes of rank 1 alone, of kinds that validation meets in unusual places. The others hear of each."""
    results = []
    with communicator(group) as comm:
        n, odd = comm.world_size, comm.rank == 1
        good = torch.ones(4)
        sparse, lazy = torch.eye(4).to_sparse(), torch.ones(4, dtype=torch.complex64).conj()
        pairs: list[tuple[Any, Any]] = [
            (lambda: comm.all_reduce(sparse), lambda: comm.all_reduce(good)),
            (lambda: comm.all_reduce(good, op=["sum"]), lambda: comm.all_reduce(good)),  # type: ignore[arg-type]
            (lambda: comm.broadcast([1, 2], root=0), lambda: comm.broadcast(good[:3], root=0)),  # type: ignore[arg-type]
            (lambda: comm.broadcast(lazy, root=0), lambda: comm.broadcast(good[:2], root=0)),
            (lambda: comm.empty(4, dtype="float32"), lambda: comm.empty(4)),  # type: ignore[arg-type]
            (lambda: comm.empty(-1), lambda: comm.empty(1)),
        ]
        for wrong, right in pairs:
            error = error_of(wrong if odd else right)
            results.append((type(error).__name__, str(error)))
        total = torch.ones(3)
        comm.all_reduce(total)
        assert total.tolist() == [n] * 3
    return results


def test_odd_mistakes_of_one_rank_reach_the_others(pool: RankPool) -> None:
    results = pool.run(odd_mistakes, 3)
    assert all(name in ("ValueError", "TypeError") for name, _ in results[1]), results[1]
    for rank in (0, 2):
        for name, text in results[rank]:
            assert name == "PeerError", text
            assert "rank 1 refused it" in text


def mistake_in_a_loop(group: dist.ProcessGroup, debug: bool, refused: bool) -> list[str]:
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
    return [type(error).__name__ for error in told]


@pytest.mark.parametrize(("refused", "there"), [(True, "ValueError"), (False, "MismatchError")])
def test_a_mistake_in_a_loop_ends_the_communicator_as_the_guide_says(pool: RankPool, refused: bool, there: str) -> None:
    told = pool.run(mistake_in_a_loop, 2, False, refused)
    assert told == [["PeerError", "CommunicatorClosedError"], [there, "PeerError"]]
    assert pool.run(mistake_in_a_loop, 2, True, refused) == [["PeerError" if refused else there], [there]]


def shapes(group: dist.ProcessGroup) -> list[str]:
    with communicator(group) as comm:
        sizes: Any = (2, 3), ([2, 3],), (torch.Size((2, 3)),), (np.int64(2), 3)
        for size in sizes:
            assert comm.empty(*size).shape == (2, 3)
        assert comm.empty(np.int64(2)).shape == (2,)
        assert comm.empty().shape == ()
        wrong: tuple[Any, ...] = (1.5, "24", None, (2, 1.5), [[2]])
        told = [str(error_of(comm.empty, size)) for size in wrong]
        large = (2**40, 2**40), (2**62,), (-(2**40), 2**40), (0, 2**64), (10**400,), (2**31, 2**31, 2**31)
        assert all(type(error_of(comm.empty, *size)) is ValueError for size in large)
        for given in ({"us": 10**400}, {"gemm": (2**40, 2**40, 2**40, "float32")}):
            assert "beside: " in str(error_of(lambda given=given: comm.beside(**given)))
        assert comm.empty(0, 2**40).shape == (0, 2**40)
        comm.barrier()
    return told


def test_shapes_that_are_none_are_named(pool: RankPool) -> None:
    for told in pool.run(shapes, 2):
        assert [text.split(",")[0] for text in told[:3]] == [
            f"empty: size (value={value}" for value in ("1.5", "'24'", "None")
        ]
        assert all(text.endswith("allowed=whole numbers, or one sequence of them)") for text in told), told


def sizes_of_pools(group: dist.ProcessGroup) -> list[str]:
    with communicator(group) as comm:
        told = [str(error_of(sidelane.pool, comm, size)) for size in ("1G", 2e9, "lots", True, 0)]
        comm.barrier()
    return told


def test_a_size_of_a_pool_that_is_none_is_told_as_a_number(pool: RankPool) -> None:
    for told in pool.run(sizes_of_pools, 2):
        assert told == [
            "pool: nbytes (value='1G', allowed=a whole number of bytes, such as 1073741824)",
            "pool: nbytes (value=2000000000.0, allowed=a whole number of bytes, such as 2000000000)",
            "pool: nbytes (value='lots', allowed=a whole number of bytes, such as 1 << 30)",
            "pool: nbytes (value=True, allowed=a whole number of bytes, such as 1 << 30)",
            "pool: nbytes (value=0, allowed=1 and more)",
        ]


def alone(group: dist.ProcessGroup) -> list[str]:
    """Rank 0 makes a communicator that rank 1 does not make, and then calls one that it has closed."""
    with communicator(group) as comm:
        told = [str(error_of(communicator, group, timeout_s=0.2))] if comm.rank == 0 else []
        comm.barrier()
    told.append(str(error_of(comm.all_reduce, torch.ones(4))))
    return told


def test_a_missing_or_closed_communicator_says_what_is_needed(pool: RankPool) -> None:
    first, second = pool.run(alone, 2)
    assert "for rank 1: all ranks of a group make its communicators and calls, in one order" in first[0]
    assert first[1:] == second == ["Communicator: closed; calls come before close(), or inside of its block"]


def misspelt(group: dist.ProcessGroup) -> list[str]:
    with communicator(group) as comm:
        good = torch.ones(4)
        wrong: Any = lambda: comm.all_reduce(good, asnyc_op=True)  # noqa: E731
        told = [str(error_of(wrong if comm.rank == 1 else lambda: comm.all_reduce(good)))]
        told.append(str(error_of(lambda: Communicator(group, device="gpu"))))
        comm.barrier()
    return told


def test_misspelt_arguments_are_told_with_what_is_allowed(pool: RankPool) -> None:
    results = pool.run(misspelt, 2)
    for calls, device in results:
        assert "keyword argument 'asnyc_op' (allowed=tensor, op=, output=" in calls
        assert "(did you mean 'async_op'?)" in calls
        assert device == "Communicator: device (value='gpu', allowed=cpu, cuda, cuda:N)"


def collectives_that_are_none(group: dist.ProcessGroup) -> list[str]:
    def never() -> None:
        raise AssertionError("it ran")

    def keyword(comm: Any, *, scale: int = 1) -> int:
        return scale

    class Step:
        def both(self, comm: Any) -> int:
            return 2

    with communicator(group) as comm:
        x = torch.ones(4)
        wrong: list[Any] = [None, comm.all_reduce(x), lambda: comm.all_reduce(x), lambda one, two: None]
        told = [str(error_of(sidelane.overlap, never, each, comm)) for each in wrong]
        told.append(str(error_of(sidelane.Overlap, comm, strategies="serial")))
        fine: list[Any] = [keyword, Step().both, lambda *comms: 3, lambda comm, more=4: more]
        assert [sidelane.overlap(lambda: 0, each, comm)[1] for each in fine] == [1, 2, 3, 4]
        comm.barrier()
    return told


def test_what_is_no_collective_is_refused_before_the_computation(pool: RankPool) -> None:
    for told in pool.run(collectives_that_are_none, 2):
        *collectives, strategies = told
        for text in collectives:
            assert "overlap: collective (value=" in text and "lambda comm: comm.all_gather" in text
        assert "<lambda> of 0, allowed=a callable of one communicator" in collectives[2]
        assert strategies.startswith("Overlap: strategies (value='serial', allowed=several names")


def different_calls(group: dist.ProcessGroup, debug: bool, repeated: bool) -> str:
    with communicator(group, debug=debug) as comm:
        n = comm.world_size
        small, large = (torch.full((5 * n,), -1.0), torch.empty(5)), (torch.full((9 * n,), -1.0), torch.empty(9))
        if repeated:
            for out, shard in (small, large):
                comm.all_gather(out, shard)
                out.fill_(-1)
        out, shard = large if comm.rank == 1 else small
        error = error_of(comm.all_gather, out, shard)
        assert isinstance(error, MismatchError), error
        assert (out == -1).all()
        comm.barrier()
        return str(error)


@pytest.mark.parametrize(("debug", "repeated"), [(False, False), (True, False), (True, True)])
def test_different_sizes_are_named(pool: RankPool, debug: bool, repeated: bool) -> None:
    for text in pool.run(different_calls, 3, debug, repeated):
        assert "rank 0: all_gather(3 ranks, 60 bytes" in text and "rank 1: all_gather(3 ranks, 108 bytes" in text


def different_collectives(group: dist.ProcessGroup) -> str:
    with communicator(group, debug=True) as comm:
        tensor = torch.ones(6)
        error = error_of(comm.all_reduce if comm.rank else lambda t: comm.broadcast(t, root=0), tensor)
        assert isinstance(error, MismatchError), error
        return str(error)


def test_different_collectives_are_named(pool: RankPool) -> None:
    for text in pool.run(different_collectives, 2):
        assert "rank 0: broadcast(" in text and "rank 1: all_reduce(" in text


def different_places(group: dist.ProcessGroup, kind: str) -> str:
    with communicator(group) as comm:
        n = comm.world_size
        there = comm.empty(4 * n).fill_(1)
        source = there.clone() if comm.rank == 1 else there
        output = torch.full((4,), -1.0)
        call = (
            (lambda: comm.reduce_scatter(output, source))
            if kind == "reduce_scatter"
            else (lambda: comm.all_reduce(source))
        )
        error = error_of(call)
        assert isinstance(error, MismatchError), error
        assert (source == 1).all() and (output == -1).all()
        comm.barrier()
        return str(error)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_symmetric_memory_on_some_ranks_only_is_named(pool: RankPool, kind: str) -> None:
    """Peers read the inputs of reductions, and write the outputs of an all_reduce."""
    for text in pool.run(different_places, 3, kind):
        assert f"rank 0: {kind}(3 ranks" in text and "input symmetric" in text and "input ordinary" in text


def different_sizes_of_memory(group: dist.ProcessGroup) -> str:
    with communicator(group) as comm:
        error = error_of(comm.empty, 100 + comm.rank)
        assert isinstance(error, MismatchError), error
        assert comm.empty(100).numel() == 100
        return str(error)


def test_different_sizes_of_symmetric_memory_are_named(pool: RankPool) -> None:
    for text in pool.run(different_sizes_of_memory, 3):
        assert "rank 0: empty of 400 bytes; rank 1: empty of 404 bytes" in text


def no_memory_without_all(group: dist.ProcessGroup) -> tuple[int, ...]:
    with communicator(group, timeout_s=2) as comm:
        if comm.rank == 1:
            dist.barrier(group)  # until the others have given up
            return ()
        error = error_of(comm.empty, 100)
        assert isinstance(error, PeerTimeoutError), error
    dist.barrier(group)
    return error.ranks


def test_a_rank_that_does_not_allocate_is_named(pool: RankPool) -> None:
    assert pool.run(no_memory_without_all, 3) == [(1,), (), (1,)]


def far_ahead(group: dist.ProcessGroup) -> tuple[str, str]:
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
        return type(error).__name__, str(error)


def test_a_mismatch_with_a_rank_that_is_far_ahead_is_named(pool: RankPool) -> None:
    (name, text), (peers_name, peers_text) = pool.run(far_ahead, 2)
    assert name == "MismatchError", text
    assert "call 2: ranks made different calls: rank 0: all_gather(2 ranks, 48 bytes" in text
    assert "rank 1: 99 calls ahead, its call 2 is no longer on record (SIDELANE_DEBUG=1" in text
    assert peers_name == "PeerError" and "rank 0" in peers_text and "no longer on record" in peers_text


def different_known_calls(group: dist.ProcessGroup, ahead: int) -> str:
    """Rank 0 reduces, the others gather: the flags of a gather are not enough for a reduction."""
    with communicator(group, timeout_s=1) as comm:
        n = comm.world_size
        out, shard, total = torch.empty(5 * n), torch.empty(5), torch.ones(7 * n)
        comm.all_gather(out, shard)
        comm.all_reduce(total)
        if comm.rank == 0:
            dist.barrier(group)
            return str(error_of(comm.all_reduce, total))
        works = [comm.all_gather(out, shard, async_op=True) for _ in range(1 + ahead)]
        dist.barrier(group)
        return str(error_of(works[-1].wait))


@pytest.mark.parametrize("ahead", [1, 80])
def test_a_time_out_names_the_call_that_the_peer_made(pool: RankPool, ahead: int) -> None:
    gone = "80 calls ahead, its call 3 is no longer on record (SIDELANE_DEBUG=1"
    theirs = gone if ahead == 80 else "its call 3 is all_gather(2 ranks, 40 bytes"
    for text in pool.run(different_known_calls, 2, ahead):
        assert theirs in text or "its call 3 is all_reduce(2 ranks, 56 bytes" in text  # either may be first to give up


def unequal_splits(group: dist.ProcessGroup) -> str:
    with communicator(group) as comm:
        n = comm.world_size
        receive = [1] * n
        send = [2, *([1] * (n - 1))] if comm.rank == 1 else [1] * n
        error = error_of(
            comm.all_to_all,
            torch.empty(sum(receive)),
            torch.empty(sum(send)),
            output_split_sizes=receive,
            input_split_sizes=send,
        )
        comm.barrier()
        return str(error)


def test_splits_that_do_not_match_are_named(pool: RankPool) -> None:
    for text in pool.run(unequal_splits, 3):
        assert "rank 1 sends 2 float32 to rank 0, which expects 1" in text


def refuses_a_known_call(group: dist.ProcessGroup) -> tuple[str, str]:
    """Without the debug switch, a known call is not compared: the peers find out while they wait."""
    with communicator(group, timeout_s=5) as comm:
        n = comm.world_size
        out, shard = torch.empty(5 * n), torch.empty(5)
        comm.all_gather(out, shard)
        error = error_of(comm.all_gather, out, torch.empty(6) if comm.rank == 1 else shard)
        if comm.rank != 1:
            with pytest.raises(CommunicatorClosedError, match="unusable since a call failed"):
                comm.all_gather(out, shard)
        return type(error).__name__, str(error)


def test_a_refused_known_call_is_an_error_on_the_peers(pool: RankPool) -> None:
    results = pool.run(refuses_a_known_call, 3)
    assert results[1][0] == "ValueError"
    for rank in (0, 2):
        assert results[rank][0] == "PeerError"
        assert "rank 1" in results[rank][1] and "output must hold" in results[rank][1]


def absent(group: dist.ProcessGroup, known: bool) -> tuple[str, tuple[int, ...], str, float]:
    with communicator(group, timeout_s=2) as comm:
        n = comm.world_size
        out, shard = comm.empty(5 * n), torch.empty(5)
        if known:
            comm.all_gather(out, shard)
        if comm.rank == 1:
            dist.barrier(group)  # until the others have given up
            return "", (), "", 0.0
        begun = time.monotonic()
        error = error_of(comm.all_gather, out, shard)
        waited_s = time.monotonic() - begun
    dist.barrier(group)
    return type(error).__name__, getattr(error, "ranks", ()), str(error), waited_s


@pytest.mark.parametrize("known", [False, True])
def test_an_absent_peer_is_named_within_the_time_out(pool: RankPool, known: bool) -> None:
    results = pool.run(absent, 4, known)
    for rank in (0, 2, 3):
        name, ranks, text, waited_s = results[rank]
        assert (name, ranks) == ("PeerTimeoutError", (1,)), text
        assert "rank 1" in text and "all_gather" in text
        assert waited_s < 15, "a time-out of 2 s on a busy machine"


def dies(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...], str]:
    comm = communicator(group, timeout_s=15)
    n = comm.world_size
    out, shard = comm.empty(5 * n), torch.full((5,), float(comm.rank))
    for _ in range(3):
        comm.all_gather(out, shard)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(comm.all_gather, out, shard)
    comm.close()
    # The process goes on: the ranks that are left make a new communicator (torch needs a new group for that).
    return type(error).__name__, getattr(error, "ranks", ()), str(error)


def test_a_dead_peer_is_named_and_nothing_is_left(tmp_path: Any) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    with crew(4) as ranks:
        results = ranks.run(dies, 4, dying=(2,))
        for rank in (0, 1, 3):
            name, at_fault, text = results[rank]
            assert issubclass({"PeerError": PeerError, "PeerTimeoutError": PeerTimeoutError}[name], PeerError)
            assert at_fault == (2,), text
            assert "rank 2" in text
    if os.path.isdir("/dev/shm"):
        left = [name for name in set(os.listdir("/dev/shm")) - before if "sidelane" in name]
        assert not left


def threads_and_files(group: dist.ProcessGroup) -> tuple[list[str], int]:
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
    return left, count() - before


def test_closing_leaves_no_thread_and_no_file(pool: RankPool) -> None:
    for threads, files in pool.run(threads_and_files, 3):
        assert threads == []
        assert files <= 1


def closed(group: dist.ProcessGroup) -> None:
    comm = communicator(group)
    tensor = comm.empty(4)
    comm.close()
    comm.close()
    tensor.fill_(1)
    with pytest.raises(CommunicatorClosedError, match="closed"):
        comm.all_reduce(tensor)


def test_a_closed_communicator_says_so_and_its_tensors_live_on(pool: RankPool) -> None:
    pool.run(closed, 2)
