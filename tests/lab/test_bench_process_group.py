"""The study of process groups: from end to end on CPU ranks, and with a group that is wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

import sidelane
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.process_group import (
    KINDS,
    GroupOptions,
    GroupRow,
    rows_of,
)
from sidelane_lab.studies.torch_groups import GroupWay

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 1, "timeout_s": 100.0}
WAYS = [("gloo", "ordinary"), *(("sidelane", tensors) for tensors in ("ordinary", "pooled"))]
CPU = torch.device("cpu")


class Two:
    """StudyGroups that are there: Gloo's, and one of Sidelane in front of it, which breaks a call of one rank."""

    def __init__(self, gloo: dist.ProcessGroup, ours: dist.ProcessGroup) -> None:
        self._groups = {"gloo": gloo, "sidelane": ours}

    def way(self, implementation: str, *, pooled: bool) -> GroupWay:
        if pooled:
            raise sidelane.UnavailableError("no room")
        return GroupWay(implementation, self._groups[implementation])


def rows_of_a_wrong_group(group: dist.ProcessGroup, raises: bool) -> list[GroupRow]:
    rank = Rank(dist.get_rank(group), dist.get_world_size(group), CPU, print)
    ours, made = sidelane.wrap(group), dist.all_gather_into_tensor

    def wrong(output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        work = made(output, input, group=group, async_op=async_op)
        if group is ours and rank.rank == 1 and not async_op:
            if raises:
                raise RuntimeError("of no use")
            output.view(torch.uint8)[-1] += 1
        return work

    case = Case(KINDS["all_gather_into_tensor"], 4096, torch.bfloat16, rank.rank, rank.world_size, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_into_tensor", wrong)
        groups, options, seeds = Two(group, ours), GroupOptions(**QUICK), itertools.count(1)
        return list(rows_of(Meter(CPU, group=group), groups, options, "all_gather_into_tensor", case, seeds))


@pytest.mark.parametrize("raises", [False, True])
def test_what_is_wrong_has_no_time(pool: RankPool, raises: bool) -> None:
    for rows in pool.run(rows_of_a_wrong_group, 2, raises):
        assert [row.note for row in rows if row.tensors == "pooled"] == ["rank 0: UnavailableError: no room"] * 2
        rows = [row for row in rows if row.tensors != "pooled"]
        verdicts = {(row.implementation, row.launch): row.correct for row in rows}
        assert verdicts.pop(("sidelane", "eager")) is (None if raises else False)
        assert list(verdicts.values()) == [True] * 3
        for row in rows:
            assert (row.time_us is None) == (row.correct is not True)
            if row.time_us is None:
                assert row.note.startswith("rank 1: " + ("RuntimeError: of no use" if raises else "1 of 4096"))
