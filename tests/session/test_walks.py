"""The way of a call through the library: how many of its files and functions a call enters.

The bounds only fall: a change that makes a way longer says in tools/house.toml what it is for.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made_up_gpus import made_up_gpus
from native_driver import NativeDriver
from process_groups import sidelane_group
from ranks import RankPool

import sidelane
from sidelane import Communicator, Config

LIBRARY = sidelane.__path__[0]


def walk(call: Callable[[], Any], *ends: Callable[[], Any]) -> tuple[int, int]:
    """Make a call; the library's files and functions that it enters. ``ends`` wait for its end, which do not count."""
    seen: set[tuple[str, int, str]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_firstlineno, code.co_name))

    gc.disable()  # finalizers of what other tests left are no part of the call
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert not any(end() for end in ends)
    return len({file for file, *_ in seen}), len(seen)


def all_gather(group: dist.ProcessGroup, calls: int) -> list[tuple[int, int]]:
    """All-gathers of one shape in symmetric memory: what each of them enters."""
    with (
        made_up_gpus(driver=NativeDriver(), finish=False) as driver,
        Communicator(group, config=Config(timeout_s=30)) as comm,
    ):
        output, input = comm.empty(comm.world_size * 1000), comm.empty(1000)
        return [
            walk(lambda: comm.all_gather(output, input), comm.synchronize, driver.synchronize) for _ in range(calls)
        ]


def all_reduce_on_gpus(group: dist.ProcessGroup, calls: int) -> list[tuple[int, int]]:
    """``dist.all_reduce`` of one tensor on a Sidelane group that orders calls by streams: what each of them enters."""
    with made_up_gpus(driver=NativeDriver()) as driver:
        ours: Any = sidelane.wrap(group)
        orders = ours._lifetime.orders
        orders["cpu"] = orders["cuda"]
        try:
            tensor, found = torch.ones(1000, dtype=torch.int32), []  # of which the driver adds bytes
            for _ in range(calls):
                found.append(walk(lambda: dist.all_reduce(tensor, group=ours)))
                ours.communicator("cpu").synchronize()
                driver.synchronize()
            assert tensor.eq(group.size() ** calls).all()
            (row,) = (row for row in sidelane.report().rows if row.group == ours.group_name)
            assert (row.operation, row.where, row.calls, row.nbytes) == ("all_reduce", "sidelane", calls, 4000 * calls)
            return found
        finally:
            ours.shutdown()


def all_reduce(group: dist.ProcessGroup, calls: int) -> list[tuple[int, int]]:
    """``dist.all_reduce`` of one tensor on a Sidelane group of CPU ranks: what each of them enters."""
    with sidelane_group(group) as ours:
        tensor = torch.ones(1000)
        return [walk(lambda: dist.all_reduce(tensor, group=ours)) for _ in range(calls)]


WAYS: dict[str, tuple[Callable[..., Any], tuple[int, int], tuple[int, int]]] = {
    "all_gather on the path of GPUs": (all_gather, (60, 388), (2, 3)),
    "dist.all_reduce on the path of GPUs": (all_reduce_on_gpus, (86, 600), (6, 8)),
    "dist.all_reduce between CPU ranks": (all_reduce, (74, 512), (25, 72)),
}
"""Most files and functions of a first call, which vary by a few with the waits in it, and of one that comes again."""


@pytest.mark.parametrize("way", WAYS)
def test_a_call_enters_no_more_than_it_did(pool: RankPool, way: str) -> None:
    case, first, again = WAYS[way]
    for found in pool.run(case, 2, 5):
        assert found[0][0] <= first[0] and found[0][1] <= first[1], found
        assert min(each[0] for each in found) <= again[0] and min(each[1] for each in found) <= again[1], found
