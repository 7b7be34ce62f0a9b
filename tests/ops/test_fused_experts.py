"""Rows to several experts and back, between CPU processes, by Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util

import pytest
from marks import long
from ranks import Crew

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import fused_experts
import fused_gemms
import fused_tokens

from sidelane.ops.pipelined_gemm import MOST_TABLES

MOST_FUNCTIONS = 45
"""Largest number of Python functions of a cached call (issue 66)."""


@pytest.mark.parametrize(("world_size", "calls"), [long(2, 8), (3, 2), long(3, 8)])
def test_gemm_all_to_all_back_to_back(four: Crew, world_size: int, calls: int) -> None:
    done = four.run(fused_gemms.back_to_back, world_size, world_size, calls, timeout_s=110)
    assert done == [2 * calls + 8] * world_size


def test_results_are_passed_on_where_they_lie(four: Crew) -> None:
    assert four.run(fused_gemms.results_passed_on, 3, 2, timeout_s=110) == [2] * 3


def test_results_stay_while_other_operators_run_unfused(four: Crew) -> None:
    assert four.run(fused_gemms.results_apart, 2, timeout_s=110) == [["begin", "exchange", "product", "end"]] * 2


def test_gemms_of_ranks_with_depths_of_their_own(four: Crew) -> None:
    assert four.run(fused_gemms.depths_of_their_own, 3, timeout_s=110) == [4] * 3


@pytest.mark.parametrize("world_size", [long(1), 2, long(4)])
def test_all_to_all_gemm_back_to_back(four: Crew, world_size: int) -> None:
    assert four.run(fused_gemms.dispatches_back_to_back, world_size, world_size, 3, timeout_s=110) == [22] * world_size


@pytest.mark.parametrize(
    ("world_size", "first", "calls"), [(1, 2, 3), long(1, 0, 5), long(2, 2, 3), long(3, 0, 2), long(4, 0, 2)]
)
def test_several_experts_by_every_way(four: Crew, world_size: int, first: int, calls: int) -> None:
    """Three ranks begin with the first kinds, two go on with the others: an interpreted call takes seconds.

    Alone the last three kinds do: depths and choices, below, are found with the first one, between ranks.
    """
    done = four.run(fused_experts.back_to_back, world_size, world_size, calls, first, timeout_s=110)
    assert done == [12 * calls] * world_size


def test_experts_behind_depths_that_differ(four: Crew) -> None:
    assert all(four.run(fused_experts.depths_that_differ, 3))


def test_several_experts_are_always_fused(four: Crew) -> None:
    for told in four.run(fused_experts.refused, 2):
        assert len(told) == 6 and all(line.endswith(("allowed=auto, fused)", "allowed=fused)")) for line in told), told


def test_counts_of_the_host_in_captures(four: Crew) -> None:
    for ways in four.run(fused_gemms.counts_in_captures, 2, timeout_s=110):
        combine, dispatch = " ".join(ways).split(" | ")
        # What is unfused moves its rows by the kernel of the combine.
        assert combine == "fused fused split split split split fused fused split"
        assert dispatch == "fused fused split split split split fused fused split |"


def test_a_cached_call_takes_a_short_walk(four: Crew) -> None:
    """Functions of Python up to the backend of CPU ranks, which enters about 40 more to post and check a call."""
    for found in four.run(fused_gemms.walks, 2, timeout_s=110):
        assert max(found.values()) <= MOST_FUNCTIONS, found


def test_programs_that_a_graph_holds_stay(four: Crew) -> None:
    found = four.run(fused_gemms.routings_that_are_kept, 2, timeout_s=110)
    assert found == [(False, True, MOST_TABLES, True, True)] * 2


@pytest.mark.parametrize("world_size", [1, long(2), 3])
def test_rows_are_sums_of_rows(four: Crew, world_size: int) -> None:
    assert all(four.run(fused_tokens.sums_back_to_back, world_size, world_size, 4, timeout_s=110))


@pytest.mark.parametrize(("world_size", "calls"), [(1, 1), (2, 1), long(2, 2), long(3, 3), long(4, 2)])
def test_tokens_travel_once_and_come_back_as_sums(four: Crew, world_size: int, calls: int) -> None:
    done = four.run(fused_tokens.there_and_back, world_size, world_size, calls, timeout_s=110)
    assert done == [3 * calls] * world_size


def test_places_are_those_of_the_worked_example(four: Crew) -> None:
    assert four.run(fused_tokens.worked_example, 2) == [2, 2]


def test_tokens_without_room_are_left_out(four: Crew) -> None:
    assert four.run(fused_tokens.left_out, 3) == [3] * 3


@pytest.mark.parametrize(("world_size", "calls"), [(2, 2), long(2, 4), long(3, 4)])
def test_nothing_is_left_of_tokens_without_room(four: Crew, world_size: int, calls: int) -> None:
    """With two calls: tokens of one expert, and of two; with four of three, and each dtype, too."""
    done = four.run(fused_tokens.left_out_of_used_buffers, world_size, 5, calls, timeout_s=110)
    assert done == [calls] * world_size


@pytest.mark.parametrize("known", ["", "2", "12", "21", "213"])
def test_ranks_with_different_numbers_of_experts_are_told(four: Crew, known: str) -> None:
    """Where both numbers are new, where one of them is, where both are known, and where no rank has its last one."""
    for told in four.run(fused_tokens.experts_that_differ, 2, known):
        assert told.startswith(("MismatchError", "PeerError")) and "ranks made different calls" in told, told


def test_tokens_travel_in_float8(four: Crew) -> None:
    assert four.run(fused_tokens.by_float8, 2, timeout_s=110) == [3] * 2


@pytest.mark.long
def test_experts_of_tokens_are_compiled_whole(four: Crew) -> None:
    assert four.run(fused_tokens.there_and_back, 2, 5, 1, "aot_eager", timeout_s=110) == [3] * 2
