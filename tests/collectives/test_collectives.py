"""Every collective between real processes: bytes against a reference, all dtypes, odd sizes, 2 to 8 ranks."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from unittest import mock

import pytest
import sweeps
import torch
import torch.distributed as dist
from expected import MOVING_DTYPES, REDUCING_DTYPES
from marks import long
from on_ranks import on_ranks
from ranks import RankPool

from sidelane.choice import Choice
from sidelane.choice.candidate import find
from sidelane.collectives.agreement import Agreement
from sidelane.program.collective import Kind


@pytest.mark.parametrize("n", [2, 3, long(4), long(6), long(8)])
def test_moving_collectives(pool: RankPool, n: int) -> None:
    sizes = {2: (1,), 4: (1, 1023)}.get(n, (257,))
    assert pool.run(sweeps.moving_sweep, n, (torch.bfloat16,), sizes) == [2 * len(sizes)] * n


@pytest.mark.parametrize("n", [2, long(3)])
def test_every_dtype_moves(pool: RankPool, n: int) -> None:
    some = ("auto",)  # a program moves bytes: variants do not know of dtypes
    assert pool.run(sweeps.moving_sweep, n, MOVING_DTYPES, (37,), some, timeout_s=120) == [2 * len(MOVING_DTYPES)] * n


@pytest.mark.parametrize("n", [2, 3, long(5), long(7), long(8)])
def test_reducing_collectives(pool: RankPool, n: int) -> None:
    dtypes = REDUCING_DTYPES if n == 3 else (torch.float32,)
    assert pool.run(sweeps.reducing_sweep, n, dtypes, (333,)) == [8 * len(dtypes)] * n


@pytest.mark.parametrize("n", [1, 4])
def test_no_bytes_and_one_rank(pool: RankPool, n: int) -> None:
    pool.run(sweeps.nothing_and_alone, n)
    pool.run(sweeps.moving_sweep, n, (torch.float32,), (5,))
    pool.run(sweeps.reducing_sweep, n, (torch.float32,), (5,))


@pytest.mark.parametrize(("n", "seed"), [long(2, 1), (3, 2), long(8, 4)])
def test_calls_of_every_kind_in_turn(pool: RankPool, n: int, seed: int) -> None:
    pool.run(sweeps.of_every_kind, n, seed, {2: 1000, 3: 300, 8: 80}[n], timeout_s=150)


def test_large_messages(pool: RankPool) -> None:
    pool.run(sweeps.large_messages, 3)


@pytest.mark.parametrize("n", [2, 5])
def test_uneven_all_to_all(pool: RankPool, n: int) -> None:
    pool.run(sweeps.uneven, n)


def test_places_that_need_not_be_the_same(pool: RankPool) -> None:
    pool.run(sweeps.places, 3)


def test_growing_staging(pool: RankPool) -> None:
    pool.run(sweeps.growing_staging, 4)


def test_written_tensors_count_as_modified(pool: RankPool) -> None:
    pool.run(sweeps.versions, 3)


def old_staging(group: dist.ProcessGroup, captured: bool) -> list[bool]:
    """Is the first block of staging still there after it grew? As under capture: CPU programs can be frozen, too."""
    with sweeps.communicator(group) as comm:
        alive = []
        tensor = torch.ones(100)
        comm.all_reduce(tensor)
        preparer = comm.preparer
        if captured:
            request = comm.arguments.all_reduce(tensor, tensor, "sum")
            preparer.prepare(Agreement.of((request,), "b2b", frozen=True), (request,))
        for size in (1 << 20, 1 << 22):
            old = weakref.ref(preparer._stagings[0]._block.tensor)
            comm.all_reduce(tensor, async_op=True)
            large = torch.ones(size)
            comm.all_reduce(large)
            assert large.eq(comm.world_size).all()
            gc.collect()
            alive.append(old() is not None)
        return alive


@pytest.mark.parametrize("captured", [False, True])
def test_only_captured_staging_is_kept(pool: RankPool, captured: bool) -> None:
    assert pool.run(old_staging, 2, captured) == [[captured, False]] * 2


@on_ranks(3)
def test_a_first_call_reserves_what_its_capture_needs(group: dist.ProcessGroup) -> None:
    """``auto`` takes another variant in a capture than outside. As on GPUs: CPUs have no captures."""
    with sweeps.communicator(group) as comm:
        preparer = comm.preparer
        tensor = comm.empty(comm.world_size * 200_000)
        request = comm.arguments.all_to_all(tensor, tensor)

        def choice(agreement: Agreement) -> Choice:
            candidate = find(Kind.ALL_TO_ALL, "b2b" if agreement.frozen else "swap")
            assert candidate is not None
            return Choice(candidate, "as the test wants it", ())

        preparer.planner.choice = choice  # type: ignore[method-assign]
        preparer.planner._abilities = dataclasses.replace(comm.backend.abilities, captures=True)
        comm.all_to_all(tensor, tensor)
        preparer.prepare(Agreement.of((request,), "auto", frozen=True), (request,))


def without_staging_in_a_capture(group: dist.ProcessGroup) -> tuple[str, str]:
    """``auto`` would take what needs staging in a capture, and no call has been made before."""
    with sweeps.communicator(group) as comm:
        tensor = comm.empty(comm.world_size * 200_000)
        request = comm.arguments.all_to_all(tensor, tensor)
        found = [one for name in ("b2b", "swap") if (one := find(Kind.ALL_TO_ALL, name)) is not None]
        table = tuple((candidate, None) for candidate in found)
        wanted = Choice(found[0], "as the test wants it", table)
        with mock.patch.object(comm.preparer.planner, "choice", return_value=wanted):
            prepared = comm.preparer.prepare(Agreement.of((request,), "auto", frozen=True), (request,))
            comm.all_to_all(tensor, tensor, variant="b2b")
            again = comm.preparer.prepare(Agreement.of((request,), "auto", frozen=True), (request,))
        return prepared.choice.candidate.variant, again.choice.candidate.variant


def test_a_capture_does_without_staging_that_is_not_there(pool: RankPool) -> None:
    assert pool.run(without_staging_in_a_capture, 3) == [("swap", "b2b")] * 3


def test_asynchronous_calls_keep_their_order(pool: RankPool) -> None:
    pool.run(sweeps.asynchronous, 4)


def test_two_communicators_do_not_disturb_each_other(pool: RankPool) -> None:
    pool.run(sweeps.interleaved, 4, ())


def test_sub_groups_count_their_own_ranks(pool: RankPool) -> None:
    assert pool.run(sweeps.sub_group, (1, 4, 6)) == [[1.0, 4.0, 6.0, 4.0]] * 3


def test_many_calls_back_to_back(pool: RankPool) -> None:
    pool.run(sweeps.many, 4, 300)
