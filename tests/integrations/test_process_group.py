"""The process group on CPU ranks: the same results as Gloo's, through every door that torch has."""

from __future__ import annotations

import group_cases as cases
import pytest
from marks import long
from ranks import RankError, RankPool

ALONE = [
    cases.averages,
    cases.more_dtypes,
    cases.objects,
    cases.many_back_to_back,
    cases.callbacks,
    cases.coalesced,
    cases.strided_elsewhere,
    cases.alike,
    cases.batches,
    cases.functional_collectives,
    cases.compiled,
    long(cases.compiled_as_gloos),
    cases.distributed_tensors,
    cases.trains_ddp,
    cases.joins_ddp,
    cases.profiled,
    cases.hooks_of_ddp,
    cases.refused_in_graphs,
    cases.memory_for_fsdp,
    cases.memory_without_a_line,
    cases.lends_its_communicator,
    cases.trains_fsdp,
]


@pytest.mark.parametrize("ranks", [1, 2, (5, 1, 3)])
def test_every_collective_is_as_gloos(pool: RankPool, ranks: int | tuple[int, ...]) -> None:
    pool.run(cases.like_gloo, ranks)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.__name__)
def test_it_works_as_torch_expects(pool: RankPool, case: object) -> None:
    pool.run(case, 2)  # type: ignore[arg-type]


@pytest.mark.long  # Inductor compiles C++
def test_inductor_leaves_a_group_alone(pool: RankPool) -> None:
    pool.run(cases.compiled_as_gloos, 2, "inductor", timeout_s=200)


def test_what_sidelane_does_not_do_goes_to_gloo_and_is_reported(pool: RankPool) -> None:
    for rows in pool.run(cases.elsewhere, 3):
        found = {(operation, where) for operation, where, _ in rows}
        assert {("all_reduce", "gloo"), ("reduce", "gloo"), ("send", "gloo"), ("recv", "gloo")} >= found
        whys = {why for _, _, why in rows}
        assert {"max of bool", "operation product", "Sidelane has no such operation"} == whys


def test_large_exchanges_of_ordinary_tensors_are_left_to_nccl(pool: RankPool) -> None:
    for rows in pool.run(cases.slower_staged, 2, False):
        assert sorted({where for where, _ in rows}) == ["nccl", "sidelane"]
        (why,) = {why for where, why in rows if where == "nccl"}
        assert why.startswith("ordinary tensors of ") and "sidelane.pool" in why


def test_ranks_whose_memory_differs_are_told(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match="ranks made different calls: rank 0: all_to_all_single of 40000 bytes of ordinary"
    ):
        pool.run(cases.slower_staged, 2, True)


def test_an_existing_group_is_wrapped_and_stays(pool: RankPool) -> None:
    for rows in pool.run(cases.wrapped, 2):
        assert rows == [
            "all_reduce float32 sidelane 3",
            "all_reduce bool gloo 1",
            "all_reduce float32 sidelane 1",
        ]
