"""Sums in the order of the ranks, in float32, rounded once: in every program, variant, size and form."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from marks import long
from ranks import Crew

from sidelane import Config, fsdp
from sidelane.config import from_environment
from sidelane.errors import Page, ProgramError, UnavailableError, page_of
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build, build_batch
from sidelane.program.builders.reducing import PIECES_FROM
from sidelane.program.builders.registry import algorithms
from sidelane.program.collective import Kind, ReduceOp, Reduction, all_gather, all_reduce, reduce_scatter
from sidelane.program.ir import Program, Reduce
from sidelane.program.shape import CallShape
from sidelane.program.verify import verify

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def rotated(program: Program) -> Program:
    """The program with sums that begin with the second of their terms."""
    queues = tuple(
        dataclasses.replace(
            queue,
            commands=tuple(
                dataclasses.replace(command, srcs=(*command.srcs[1:], command.srcs[0]))
                if isinstance(command, Reduce)
                else command
                for command in queue.commands
            ),
        )
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


def programs(world_size: int, shard_bytes: int, dtype: str) -> list[Program]:
    """The sums of every algorithm that is legal for them, alone and in a batch."""
    reduction = Reduction(ReduceOp.SUM, dtype)
    shards = (shard_bytes,) * world_size
    made = [
        build(make(shards, reduction), algorithm.name, transport)
        for kind, make in ((Kind.REDUCE_SCATTER, reduce_scatter), (Kind.ALL_REDUCE, all_reduce))
        for algorithm in algorithms(kind)
        for transport in (Transport.PUSH, Transport.PULL)
        if not algorithm.objection(CallShape(kind, world_size, shard_bytes))
    ]
    parts = reduce_scatter(shards, reduction), all_reduce(shards, reduction), all_gather(shards)
    batch = Batch("batch", world_size, parts)
    return [*made, *(build_batch(batch, variant, [Transport.PUSH] * 3) for variant in ("b2b", "pcpy"))]


@pytest.mark.parametrize("world_size", [2, 3, 4, long(8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_are_proved_in_the_order_of_the_ranks_alone(world_size: int, dtype: str) -> None:
    """The proof that every program has in front of its first run refuses every other order."""
    seen = set()
    for shard_bytes in (4, 260, 4096, PIECES_FROM[0], PIECES_FROM[-1]):
        for program in programs(world_size, shard_bytes, dtype):
            seen.add(program.variant)
            reduces = [command for queue in program.queues for command in queue.commands if isinstance(command, Reduce)]
            assert reduces
            verify(program, invocations=1)
            with pytest.raises(ProgramError, match="wrong bytes"):
                verify(rotated(program), invocations=1)
    assert seen == {"b2b", "pcpy"}, "another algorithm that adds: give it sizes of its own here"


@needs_triton
@pytest.mark.parametrize("world_size", [long(2), 3, long(4)])  # a sum of two terms has one order
def test_every_form_of_a_sum(four: Crew, world_size: int) -> None:
    import order_cases

    sizes = (1, 7, 1000, 40_003)
    assert min(four.run(order_cases.everything, world_size, sizes)) >= 3 * len(sizes) * 2 * 12


@needs_triton
@pytest.mark.parametrize("world_size", [3, long(4)])
def test_fused_sums(four: Crew, world_size: int) -> None:
    import order_cases

    assert min(four.run(order_cases.fused, world_size)) == 2 * 4


@needs_triton
def test_other_orders_are_refused(four: Crew) -> None:
    import order_cases

    for texts in four.run(order_cases.refusals, 2):
        refused, made = "UnavailableError: ", "made"
        assert [text[: len(refused)] if text != made else made for text in texts] == [
            *(refused, made, refused, refused, made, made, made, refused, made)
        ]
        assert "gemm_reduce_scatter: refused by Config.deterministic: split adds the ranks' parts" in texts[0]
        assert "all_reduce: refused by Config.deterministic: gloo would make it (sum of float64)" in texts[2]
        assert "all_reduce: refused by Config.deterministic: " in texts[7], texts[7]


def test_the_setting() -> None:
    assert from_environment({"SIDELANE_DETERMINISTIC": "1"}).deterministic


def test_atomic_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow PyTorch's own switch, too."""
    pytest.importorskip("triton")
    from sidelane.ops.embedding_tables import refuse_atomics

    def comm(*, deterministic: bool) -> Any:
        return SimpleNamespace(config=Config(deterministic=deterministic))

    refuse_atomics(comm(deterministic=False), "backward")
    with pytest.raises(UnavailableError, match="sparse=True") as refused:
        refuse_atomics(comm(deterministic=True), "backward")
    assert page_of(refused.value) is Page.DETERMINISM
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(UnavailableError, match=r"torch.use_deterministic_algorithms\(True\)"):
            refuse_atomics(comm(deterministic=False), "backward")
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="in an order that changes"):
            refuse_atomics(comm(deterministic=False), "backward")
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_backends_add_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 and groups on several nodes have ways around a Sidelane group's calls."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    calls = SimpleNamespace(is_of=lambda group: False)
    scatter = fsdp.Scatter(cast(Any, calls), cast(Any, None), True)
    group: Any = None
    with pytest.raises(UnavailableError, match="nccl would make it \\(another group than that of the shards\\)"):
        scatter(torch.ones(2), torch.ones(4), group, dist.ReduceOp.AVG)

    comm: Any = SimpleNamespace(config=Config(deterministic=True))
    nodes: Any = object.__new__(NodesCommunicator)
    nodes.owner = SimpleNamespace(require=lambda: None)
    nodes.calls = comm
    with pytest.raises(UnavailableError, match="all_reduce: .* sums of nodes are rounded"):
        nodes.all_reduce(torch.ones(4))
