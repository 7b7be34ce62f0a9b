"""Strategies as data: what is registered, and that the runner, ``overlap``, the simulator and the commands go by it."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading

import pytest
import torch

from sidelane.c3 import overlap
from sidelane.c3.strategies import Mover, Order, Partition, named, strategies
from sidelane.cli import main
from sidelane_lab.pairs.pair import YIELDING, Workers
from sidelane_lab.pairs.workload import applies, implementation_of

CPU = torch.device("cpu")
NAMES = tuple(strategy.name for strategy in strategies())


def test_the_strategies_in_the_order_of_studies() -> None:
    assert (
        *("serial", "c3_base", "c3_sp", "c3_rp", "c3_sp_rp", "priority"),
        *("conccl", "conccl_rp", "conccl_left", "nccl_ce", "sm_rp", "sm_priority"),
    ) == NAMES


@pytest.mark.parametrize(
    ("name", "order", "mover", "priority", "partition"),
    [
        ("serial", Order.SERIAL, Mover.LIBRARY, 0, None),
        ("c3_base", Order.GEMM_FIRST, Mover.LIBRARY, 0, None),
        ("c3_sp", Order.COLLECTIVE_FIRST, Mover.LIBRARY, 0, None),
        ("priority", Order.GEMM_FIRST, Mover.LIBRARY, 1, None),
        ("c3_rp", Order.GEMM_FIRST, Mover.LIBRARY, 0, Partition()),
        ("c3_sp_rp", Order.COLLECTIVE_FIRST, Mover.LIBRARY, 0, Partition()),
        ("conccl", Order.COLLECTIVE_FIRST, Mover.DMA, 0, None),
        ("conccl_rp", Order.COLLECTIVE_FIRST, Mover.DMA, 0, Partition(memory_bound_only=True)),
        ("conccl_left", Order.COLLECTIVE_FIRST, Mover.DMA_LEFT, 0, None),
        ("nccl_ce", Order.COLLECTIVE_FIRST, Mover.LIBRARY_DMA, 0, None),
    ],
)
def test_what_each_one_says(name: str, order: Order, mover: Mover, priority: int, partition: Partition | None) -> None:
    one = named(name)
    assert (one.order, one.mover, one.priority, one.partition) == (order, mover, priority, partition)
    assert one.recipe and "\n" not in one.recipe


def test_our_kernels_have_those_of_the_library() -> None:
    for ours, theirs in (("sm_rp", "c3_rp"), ("sm_priority", "priority")):
        assert named(ours) == dataclasses.replace(named(theirs), name=ours, mover=Mover.SM, preference=100)


def test_implementations() -> None:
    assert implementation_of(named("c3_sp"), {"gloo", "dma"}) == "gloo"
    assert implementation_of(named("c3_sp"), {"nccl", "gloo"}) == "nccl"
    assert implementation_of(named("nccl_ce"), {"gloo", "dma"}) is None
    assert implementation_of(named("sm_rp"), {"sm", "nccl"}) == "sm"


def test_units_taken() -> None:
    assert applies(Partition(), memory_bound=True) and applies(Partition(), memory_bound=False)
    few = Partition(memory_bound_only=True)
    assert applies(few, memory_bound=True) and not applies(few, memory_bound=False)


def test_a_serial_strategy_has_nothing_to_give_way_to() -> None:
    assert all(one.concurrent or (one.priority, one.partition) == (0, None) for one in strategies())
    assert {one.priority for one in strategies()} == {0, 1}
    with pytest.raises(ValueError, match="allowed=serial, c3_base"):
        named("c4")


def test_commands_take_every_name() -> None:
    (option,) = (option for option in main.find("c3").params if option.name == "strategies")
    assert tuple(option.type.choices) == NAMES  # type: ignore[attr-defined]


def test_overlap_takes_those_that_calls_can_be_told() -> None:
    assert overlap.NAMES == ("conccl", "c3_sp", "priority", "c3_base", "serial")
    refused = (
        ("c3_rp", "green contexts"),
        ("conccl_left", "copy_own_part=False"),
        ("sm_priority", "no kernels"),
        ("sm_sp", "none of that name"),
        ("nccl_ce", "not told"),
        ("fastest", "none of that name"),
    )
    for name, reason in refused:
        with pytest.raises(ValueError, match=rf"value='{name}', allowed=conccl, .*{reason}"):
            overlap.possible(name, CPU)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process's")
def test_a_priority_on_cpus_is_a_thread_that_yields() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with Workers() as workers:
        assert workers.of(named("c3_base")).submit(niceness).result(timeout=60) == before
        found = workers.of(named("priority")).submit(niceness).result(timeout=60)
    assert found == min(19, before + YIELDING)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
