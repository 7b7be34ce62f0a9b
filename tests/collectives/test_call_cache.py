"""The cache of calls: what goes first, and exchanges of sizes that come again."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Collection
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import on_ranks

from sidelane import Communicator, PeerError
from sidelane.collectives import call_cache, plan
from sidelane.collectives.call_cache import CallCache, CallEntry, PreparedCall
from sidelane.collectives.prepare import Preparer
from sidelane.execute.base import Addresses
from sidelane.execute.cpu.commands import compile_queue
from sidelane.execute.cpu.executor import CpuExecutor, CpuProgram
from sidelane.program.builders import build
from sidelane.program.caching import BASE_BYTES, Once, loaded_bytes, program_bytes
from sidelane.program.collective import Buffer, ReduceOp, Reduction, all_gather, all_reduce
from sidelane.program.ir import Program


def keys(cache: CallCache) -> list[object]:
    return [entry.key[0] for entry in cache]


def enter(cache: CallCache, numbers: range, program: Program | None = None) -> None:
    for number in numbers:
        entry = cache.entry((number,))
        if program is not None:
            entry.prepared = PreparedCall(mock.Mock(program=program), "", False, mock.Mock())


def test_calls_that_never_come_again_are_the_newest_ones_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_NEW", 4)
    cache = CallCache()
    enter(cache, range(4))
    assert cache.get((1,)) is cache.entry((1,))
    enter(cache, range(4, 40))
    assert keys(cache) == [1, 36, 37, 38, 39] and cache.nbytes == BASE_BYTES
    enter(cache, range(7, 9))  # again, though they were forgotten
    enter(cache, range(40, 50))
    assert keys(cache) == [1, 7, 8, 46, 47, 48, 49] and cache.nbytes == 3 * BASE_BYTES


def test_the_oldest_that_was_not_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_NEW", 0)
    monkeypatch.setattr(call_cache, "MOST_BYTES", 4 * BASE_BYTES)
    cache = CallCache()
    enter(cache, range(8))
    assert not keys(cache)
    enter(cache, range(4))
    assert cache.get((0,)) is cache.entry((0,))
    enter(cache, range(4, 5))
    assert sorted(keys(cache)) == [0, 2, 3, 4], "one that is used is as good as new, once"
    enter(cache, range(5, 8))
    assert keys(cache) == [0, 5, 6, 7] and cache.nbytes == 4 * BASE_BYTES


def test_calls_share_the_bytes_of_their_program_and_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    program, other = (build(all_gather([nbytes, nbytes]), "b2b") for nbytes in (64, 128))
    monkeypatch.setattr(call_cache, "MOST_NEW", 0)
    monkeypatch.setattr(CallCache, "has_seen", lambda *_: True)
    monkeypatch.setattr(CallEntry, "held_program", lambda entry: other if entry.key[0] >= 100 else program)
    cache = CallCache()
    enter(cache, range(5))
    assert cache.nbytes == 5 * loaded_bytes(program) + program_bytes(program)
    monkeypatch.setattr(call_cache, "MOST_BYTES", 6 * loaded_bytes(other))
    enter(cache, range(100, 120))
    held = [entry.program for entry in cache]
    assert held.count(other) == len(held) == 5 and cache.nbytes == 5 * loaded_bytes(other) + program_bytes(other)


def allocated(make: Callable[[int], object]) -> float:
    """The bytes that Python allocates for one of such objects."""
    kept = [make(number) for number in range(4)]
    gc.collect()
    tracemalloc.start()
    kept = [make(number) for number in range(4, 44)]
    gc.collect()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return nbytes / len(kept)


@pytest.mark.parametrize("n", [2, 5])
def test_estimates_are_near_to_what_programs_take(n: int) -> None:
    memory = (ctypes.c_uint8 * (1 << 16))()
    every = Addresses({(rank, name): ctypes.addressof(memory) for rank in range(n) for name in Buffer}, (1 << 20,) * n)

    def reducing(number: int) -> Program:
        return build(all_reduce([64 + 4 * number] * n, Reduction(ReduceOp.SUM, "float32")), "b2b")

    def load(number: int) -> object:
        made = reducing(number)
        return made, [compile_queue(queue, made, every) for queue in made.queues_of(0)]

    program, taken = reducing(0), allocated(reducing)
    assert taken / 2 < program_bytes(program) < 2 * taken
    taken = allocated(load) - taken
    assert taken / 2 < loaded_bytes(program) - BASE_BYTES < 2 * taken


def test_values_derived_from_a_program_go_with_it() -> None:
    once: Once[Program, set[int]] = Once(lambda program: {len(program.queues)})
    program = build(all_gather([64, 64]), "b2b")
    assert once(program) is once(program)
    value = weakref.ref(once(program))
    del program
    assert value() is None


def test_all_goes_at_once_and_who_holds_some_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, told = CallCache(), []
    cache.keepers.append(lambda: told.append("told"))
    owner = object()
    monkeypatch.setattr(call_cache, "MOST_NEW", 2)
    for number in range(3):
        for key in ((number,), (owner, number)):
            assert cache.entry(key) is cache.get(key)
    assert len(keys(cache)) == 4 + 2 and cache.nbytes == 4 * BASE_BYTES
    cache.forget_calls_of(owner)
    assert keys(cache) == [0, 1, 2] and cache.nbytes == 2 * BASE_BYTES
    assert not told
    cache.clear()
    assert (keys(cache), cache.nbytes, told) == ([], 0, ["told"])


def exchange(comm: Communicator, counts: list[list[int]], output: torch.Tensor, input: torch.Tensor) -> None:
    """An all_to_all of ``counts[i][j]`` rows from rank i to rank j; each rank sends its own number."""
    sent, expected = counts[comm.rank], [row[comm.rank] for row in counts]
    output.fill_(-1)
    comm.all_to_all(output, input.fill_(comm.rank), input_split_sizes=sent, output_split_sizes=expected)
    rows = [float(peer) for peer in range(comm.world_size) for _ in range(expected[peer])]
    assert output[:, 0].tolist() == output[:, -1].tolist() == rows


@on_ranks(3)
@pytest.mark.parametrize("shared", [False, True])
def test_sizes_that_come_again_are_not_planned_again(group: dist.ProcessGroup, shared: bool) -> None:
    """One of other rows in the same bytes is refused."""
    found, prepare = [], Preparer.prepare

    def counted(*given: object, **named: object) -> object:
        found.append(given)
        return prepare(*given, **named)  # type: ignore[arg-type]

    with Communicator(group) as comm, mock.patch.object(Preparer, "prepare", counted):
        output, input = torch.empty(6, 4), torch.empty(6, 4)
        if shared:
            output.share_memory_()
            input.share_memory_()
        first, other = [[2, 2, 2], [2, 2, 2], [2, 2, 2]], [[2, 2, 2], [2, 1, 3], [2, 3, 1]]
        for counts in (first, first, first, other, other, first):  # rank 0 always does the same
            exchange(comm, counts, output, input)
        refused = "must be 3 sizes that add up to dimension 0"
        with pytest.raises((ValueError, PeerError), match=refused):
            comm.all_to_all(output.view(3, 8), input, output_split_sizes=[2, 2, 2], input_split_sizes=[2, 2, 2])
        exchange(comm, other, output, input)
    assert len(found) == 2


def alive(before: Collection[object] = ()) -> list[object]:
    """Loaded programs, and tensors of as many elements as flags and scratch have, that are alive and were not before.

    Other tests leave some in this process: it keeps the groups of ``process_groups``.
    """
    gc.collect()
    known = {id(one) for one in before}
    return [
        one
        for one in gc.get_objects()
        if (isinstance(one, CpuProgram) or (type(one) is torch.Tensor and one.numel() == 32768))
        and id(one) not in known
    ]


@on_ranks(2)
@pytest.mark.parametrize("kind", [long("all_reduce"), "asynchronous", "list", long("uneven"), long("batch")])
def test_sizes_that_never_come_again_take_the_place_of_each_other(group: dist.ProcessGroup, kind: str) -> None:
    """Calls of sizes that never come again, between those of a loop: loaded programs and scratch tensors that are alive
    after half of them and in the end, and the number of loads in the loop."""
    looks, loads, load, calls, before = [], [], CpuExecutor.load, 160, alive()

    def counted(*given: object, **named: object) -> object:
        loads.append(given)
        return load(*given, **named)  # type: ignore[arg-type]

    with Communicator(group) as comm, mock.patch.object(plan, "MOST_PROGRAMS", 8):
        n, again = comm.world_size, torch.empty(16)
        for number in range(1, calls + 1):
            own, all_of = torch.ones(2 * number), [torch.empty(number) for _ in range(n)]
            if kind == "all_reduce":
                comm.all_reduce(own)
                assert own[0] == own[-1] == n
            elif kind == "asynchronous":
                work = comm.all_reduce(own, async_op=True)
                assert work is not None and work.wait()
            elif kind == "list":
                comm.all_reduce([own, *all_of])
                assert own[-1] == n
            elif kind == "uneven":
                comm.all_to_all(
                    all_of[0],
                    own[:number],
                    input_split_sizes=split(number, n, comm.rank),
                    output_split_sizes=split(number, n, comm.rank),
                )
            else:
                with comm.batch() as batch:
                    batch.broadcast(own, root=number % n)
                    batch.all_gather(torch.empty(n * number), all_of[0])
            with mock.patch.object(CpuExecutor, "load", counted):
                comm.all_reduce(again.fill_(number))
            assert again[0] == n * number
            if number % (calls // 2) == 0:
                found = [isinstance(one, CpuProgram) for one in alive(before)]
                looks.append(sum(found))
        assert 0 < found.count(False) <= n + 1, "flags are one; engines have scratch, and programs have none"
    half, end = looks
    assert 0 < end <= half <= call_cache.MOST_NEW + 8, "the rest was let go of"
    assert len(loads) <= 2, "what comes again is kept"


def split(total: int, n: int, rank: int) -> list[int]:
    """Sizes of a symmetric exchange: each rank sends to the others what these send to it."""
    rest = total - (n - 1) * (total // n)
    return [rest if peer == rank else total // n for peer in range(n)]
