"""Programs of one's own between CPU processes: right bytes next to collectives, refusals, billions of calls, deaths."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import loads
import pytest
import torch.distributed as dist
from counting import skip
from cpu_calls import communicator
from marks import long
from ranks import RankPool, crew

from sidelane.errors import PeerError, UnavailableError


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 1), (3, 2), long(4, 3), (5, 4), long(8, 5)])
def test_programs_of_all_builders_under_contracts(pool: RankPool, n: int, seed: int) -> None:
    assert pool.run(loads.builders, n, seed, 60 if n < 5 else 25, timeout_s=150) == [9] * n


@pytest.mark.parametrize("slope", [1, 7])
def test_a_program_that_no_collective_is(pool: RankPool, slope: int) -> None:
    pool.run(loads.handed_over, 3, 40, slope)


def test_a_built_in_program_is_loaded_like_any_other(pool: RankPool) -> None:
    pool.run(loads.contract_is_the_collectives, 3)


def test_engines_that_add(pool: RankPool) -> None:
    pool.run(loads.engines_that_add, 3)


def test_gathers_in_a_ring_with_and_without_entries(pool: RankPool) -> None:
    pool.run(loads.gathers_in_a_ring, 3, 1027)


AROUND = [2**26 - 3, 2**31 - 9, 2**31 + 3, 3 * 2**30, 2**32 - 9, 2**33]


def test_a_call_waits_for_no_rank_to_begin_it(pool: RankPool) -> None:
    pool.run(loads.calls_that_wait_for_nobody, 2)


def test_flags_of_ones_own_are_renewed(pool: RankPool) -> None:
    pool.run(loads.far_on, 3, AROUND, skip, timeout_s=100)


def test_mistakes_are_refused_on_every_rank(pool: RankPool) -> None:
    expected = [
        "TypeError: load: program (value=str",
        "TypeError: load: buffers (value=list",
        "ValueError: load: ranks of the program (value=4, have=3)",
        "are missing (value=['inbox'], needed=['cache', 'inbox'])",
        "ValueError: load: handover(3 ranks, 12000 bytes) has no such buffers (value=['outbox']",
        "ValueError: load: buffer 'cache' (value=4099 bytes, allowed=4100 and more)",
        "ValueError: load: buffer 'inbox' is touched by peers, so that it must be symmetric memory",
        "ValueError: a tensor is symmetric memory of another communicator",
        "ValueError: load: tensors must be contiguous",
        "TypeError: load: tensors expected (value=str, allowed=torch.Tensor)",
        "ValueError: load: buffers 'cache' and 'inbox' overlap",
        "ProgramError: verify: refused handover(3 ranks, 12000 bytes) push:",
        "RuntimeError: a call of handover(3 ranks, 12000 bytes) push, which was closed",
    ]
    for texts in pool.run(loads.mistakes, 3):
        assert len(texts) == len(expected)
        for text, words in zip(texts, expected, strict=True):
            assert words in text, texts


def test_texts_mean_what_they_say_and_memory_that_there_is_not_is_refused(pool: RankPool) -> None:
    for text in pool.run(loads.written_in_texts, 3):
        assert text.startswith("ProgramError: verify: refused all_reduce(3 ranks") and "names a rank outside" in text, (
            text
        )


def test_ranks_that_load_different_programs(pool: RankPool) -> None:
    for texts in pool.run(loads.different, 3):
        assert all(text.startswith("MismatchError") for text in texts), texts


def left(group: dist.ProcessGroup, error: type[BaseException] | None) -> float:
    """Leave a communicator that has a program, while a call is under way that the other rank never makes."""
    comm = communicator(group, timeout_s=60)
    case = loads.Case(comm, loads.handover(comm.world_size))
    case.run()
    out, shard = comm.empty(4 * comm.world_size), comm.empty(4)
    comm.all_gather(out, shard)
    dist.barrier(group)
    began = time.monotonic()
    if comm.rank == 0:
        with contextlib.suppress(KeyboardInterrupt, ValueError), comm:
            comm.all_gather(out, shard, async_op=True)
            if error is not None:
                raise error
    took = time.monotonic() - began
    dist.barrier(group)
    comm.close()
    return took


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_closing_does_not_wait_for_calls_that_peers_never_make(error: type[BaseException] | None) -> None:
    with crew(2) as ranks:
        assert max(ranks.run(left, 2, error)) < 20


def unloaded(group: dist.ProcessGroup) -> str:
    """A rank cannot bind the trigger of a call, so that all drop the memory that they have loaded it to."""
    with communicator(group) as comm:
        forgotten: list[object] = []
        backend: Any = comm.backend
        backend.forget_flags = lambda bases, block: forgotten.append(bases)
        if comm.rank == 0:
            backend.bind_trigger = refuse
        out, shard = comm.empty(4 * comm.world_size), comm.empty(4)
        try:
            comm.prepare_all_gather(out, shard)
        except (UnavailableError, PeerError) as error:
            assert len(forgotten) == 1 and not comm.preparer.own_programs
            return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def refuse(*_: object) -> None:
    raise UnavailableError("no channel is left")


def test_flags_of_a_program_that_a_rank_cannot_load_are_forgotten(pool: RankPool) -> None:
    first, second = pool.run(unloaded, 2)
    assert first == "UnavailableError: no channel is left"
    assert second.startswith("PeerError") and "rank 0 refused it: UnavailableError: no channel" in second
