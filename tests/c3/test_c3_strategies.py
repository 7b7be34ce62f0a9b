"""Strategies as data: what is registered, and that the runner, ``overlap``, the simulator and the commands go by it."""

from __future__ import annotations

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
    assert [(one.name, one.code) for one in strategies()] == [
        ("serial", "serial"),
        *(("compute_first", "c3_base"), ("collective_first", "c3_sp")),
        *(("partition", "c3_rp"), ("collective_first_partition", "c3_sp_rp"), ("priority", "priority")),
        *(("copy_engines", "conccl"), ("copy_engines_partition", "conccl_rp"), ("copy_engines_sums", "conccl_sums")),
        *(("copy_engines_left", "conccl_left"), ("nccl_copy_engines", "nccl_ce")),
    ]
    assert tuple(named(one.code) for one in strategies()) == strategies(), "result files have the codes"


@pytest.mark.parametrize(
    ("name", "order", "mover", "priority", "partition"),
    [
        ("serial", Order.SERIAL, Mover.LIBRARY, 0, None),
        ("compute_first", Order.GEMM_FIRST, Mover.LIBRARY, 0, None),
        ("collective_first", Order.COLLECTIVE_FIRST, Mover.LIBRARY, 0, None),
        ("priority", Order.GEMM_FIRST, Mover.LIBRARY, 1, None),
        ("partition", Order.GEMM_FIRST, Mover.LIBRARY, 0, Partition()),
        ("collective_first_partition", Order.COLLECTIVE_FIRST, Mover.LIBRARY, 0, Partition()),
        ("copy_engines", Order.COLLECTIVE_FIRST, Mover.DMA, 0, None),
        ("copy_engines_partition", Order.COLLECTIVE_FIRST, Mover.DMA, 0, Partition(memory_bound_only=True)),
        ("copy_engines_sums", Order.GEMM_FIRST, Mover.DMA, 0, Partition(requested=True)),
        ("copy_engines_left", Order.COLLECTIVE_FIRST, Mover.DMA_LEFT, 0, None),
        ("nccl_copy_engines", Order.COLLECTIVE_FIRST, Mover.LIBRARY_DMA, 0, None),
    ],
)
def test_what_each_one_says(name: str, order: Order, mover: Mover, priority: int, partition: Partition | None) -> None:
    one = named(name)
    assert (one.order, one.mover, one.priority, one.partition) == (order, mover, priority, partition)
    assert one.recipe and "\n" not in one.recipe


def test_implementations() -> None:
    assert implementation_of(named("collective_first"), {"gloo", "dma"}) == "gloo"
    assert implementation_of(named("collective_first"), {"nccl", "gloo"}) == "nccl"
    assert implementation_of(named("nccl_copy_engines"), {"gloo", "dma"}) is None


def test_units_taken() -> None:
    assert applies(Partition(), memory_bound=True) and applies(Partition(), memory_bound=False)
    few = Partition(memory_bound_only=True)
    assert applies(few, memory_bound=True) and not applies(few, memory_bound=False)


def test_a_serial_strategy_has_nothing_to_give_way_to() -> None:
    assert all(one.concurrent or (one.priority, one.partition) == (0, None) for one in strategies())
    assert {one.priority for one in strategies()} == {0, 1}
    with pytest.raises(ValueError, match="allowed=serial, compute_first"):
        named("c4")


def test_commands_take_every_name() -> None:
    (option,) = (option for option in main.find("c3").params if option.name == "strategies")
    assert tuple(option.type.choices) == NAMES  # type: ignore[attr-defined]


def test_overlap_takes_those_that_calls_can_be_told() -> None:
    assert overlap.NAMES == ("copy_engines", "collective_first", "priority", "compute_first", "serial")
    refused = (
        ("partition", "green contexts"),
        ("copy_engines_left", "copy_own_part=False"),
        *((gone, "none of that name") for gone in ("sm_sp", "sm_rp", "kernels_priority")),
        ("nccl_copy_engines", "not told"),
        ("fastest", "none of that name"),
    )
    for name, reason in refused:
        with pytest.raises(ValueError, match=rf"value='{name}', allowed=copy_engines, .*{reason}"):
            overlap.possible(name, CPU)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process's")
def test_a_priority_on_cpus_is_a_thread_that_yields() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with Workers() as workers:
        assert workers.of(named("compute_first")).submit(niceness).result(timeout=60) == before
        found = workers.of(named("priority")).submit(niceness).result(timeout=60)
    assert found == min(19, before + YIELDING)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
