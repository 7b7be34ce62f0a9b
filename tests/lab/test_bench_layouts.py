"""The study of all-to-alls with a layout: from end to end on CPU ranks, what it compares, and wrong bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from sweeps import communicator

from sidelane_lab.studies.layout_exchanges import LayoutCase, LayoutExchanges
from sidelane_lab.studies.layouts import (
    CONTIGUOUS,
    LAYOUTS,
    LayoutOptions,
    parse_shape,
    shapes_of,
)

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 1, "timeout_s": 100.0}
WAYS = [
    ("gloo", "ordinary", "each"),
    ("gloo", "ordinary", "together"),
    ("auto", "symmetric", "b2b"),
    ("auto", "ordinary", "b2b"),
]


def wrong_bytes_are_found(group: dist.ProcessGroup) -> list[str | None]:
    with communicator(group) as comm:
        case = LayoutCase((2, 8, 4, 4), 2, comm.rank, comm.world_size, comm.device)
        found: list[str | None] = []
        for make in LayoutExchanges(comm, case).ways(LAYOUTS, "nothing").values():
            way = make("eager")
            if way.implementation == "auto":
                way.fill(3)
                way.run()
                found.append(way.error(3))
                way._results[1].view(torch.int16)[0, -1, 0, 0] += 1
                found.append(way.error(3))
            way.close()
        return found


def test_wrong_bytes_are_found(pool: RankPool) -> None:
    for found in pool.run(wrong_bytes_are_found, 2):
        assert len(found) == 2 * 2 * len(LAYOUTS) and set(found[::2]) == {None}
        assert all(text is not None and text.startswith("tensor 1 of ") for text in found[1::2])


def test_what_a_rank_gets_is_what_the_others_sent() -> None:
    cases = [LayoutCase((1, 6, 4, 2), 1, rank, 2, torch.device("cpu")) for rank in range(2)]
    whole = torch.cat([case.sent(5, 0, "there").view(torch.int16) for case in cases], 1)
    for case in cases:
        assert torch.equal(case.right(5, 0, "there").view(torch.int16), whole.tensor_split(2, 2)[case.rank])
        assert torch.equal(case.right(5, 0, "back").view(torch.int16), whole.tensor_split(2, 1)[case.rank])
        parts = [one.sent(5, 0, CONTIGUOUS).view(torch.int16).flatten().tensor_split(2)[case.rank] for one in cases]
        assert torch.equal(case.right(5, 0, CONTIGUOUS).view(torch.int16).flatten(), torch.cat(parts))


def test_shapes_of_a_node_of_gpus() -> None:
    options, rank = LayoutOptions(), type("Rank", (), {"world_size": 8, "device": torch.device("cuda")})()
    shapes = shapes_of(options, rank)
    assert shapes[:2] == [(1, 32760, 40, 128), (1, 8192, 32, 128)]
    rows = [LayoutCase(shape, 3, 0, 8, torch.device("cpu")).row_bytes for shape in shapes[1:]]
    assert rows == [1 << 10, 128, 512, 4 << 10, 16 << 10, 64 << 10]
    assert {shape[1] * shape[2] * shape[3] * 2 for shape in shapes[1:]} == {64 << 20}
    with pytest.raises(ValueError, match=r"shape \(value='1x2x3', allowed=BATCHxPOSITIONS"):
        parse_shape("1x2x3")
