"""Sums in the order of the ranks, in float32, rounded once: in every program, variant, size and form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from expected import in_rank_order, orders_differ, same_bytes
from marks import long, needs_triton
from on_ranks import on_ranks
from sweeps import communicator, variants

from sidelane import Communicator, Config, config, ops
from sidelane.config import from_environment
from sidelane.errors import Page, ProgramError, UnavailableError, page_of
from sidelane.integrations import fsdp_calls
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build, build_batch
from sidelane.program.builders.reducing import PIECES_FROM
from sidelane.program.builders.registry import algorithms
from sidelane.program.collective import Kind, ReduceOp, Reduction, all_gather, all_reduce, reduce_scatter
from sidelane.program.ir import Program, Reduce
from sidelane.program.shape import CallShape
from sidelane.program.verify import verify

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    assert seen == {"b2b", "chunked", "pcpy"}, "another algorithm that adds: give it sizes of its own here"


LARGE, SMALL = 2.0**13, 2.0**-12
"""float32 holds no sum of the two: a small term is lost between a large one and its opposite, and stays elsewhere."""

ENOUGH = 64
"""Number of elements from which on every other order is sure to have other bits."""

OPS = (ReduceOp.SUM, ReduceOp.AVG)


def terms(world_size: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """The terms of all ranks: of each element, one rank has a large number, one its opposite, and others small ones."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = SMALL * (1 + torch.rand(world_size, count, generator=generator, device="cpu"))
    if world_size > 2:
        large, apart = (
            torch.randint(most, (1, count), generator=generator, device="cpu") for most in (world_size, world_size - 1)
        )
        places = torch.cat([large, (large + 1 + apart) % world_size])
        values.scatter_(0, places, torch.tensor([[LARGE], [-LARGE]], device="cpu").expand(2, count))
    rows = [row.to(dtype) for row in values]
    assert count < ENOUGH or orders_differ(rows)
    return [row.to(torch.get_default_device()) for row in rows]


@needs_triton
@on_ranks(long(2), 3, long(4), interpreted=True, counts=(1, 7, 64, 1000))  # a sum of two terms has one order
@on_ranks(long(2), 3, long(4), interpreted=True, counts=(40_003,))
@on_ranks(gpu=True, counts=(1, 7, 64, 1000, 40_003, 1 << 20, (8 << 20) + 5), timeout_s=170)
def test_every_form_of_a_sum(group: dist.ProcessGroup, counts: Sequence[int]) -> None:
    """Compare every variant, size, dtype and form of a sum with that in the order of the ranks."""
    compared = 0
    own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
    with config.override(Config(deterministic=True)), communicator(group, timeout_s=60) as comm:
        n, rank = comm.world_size, comm.rank
        for dtype in DTYPES:
            for count in counts:
                rows = terms(n, count, dtype, seed=count)
                for op in OPS:
                    wanted = in_rank_order(rows, op)
                    for name, found in _sums(comm, rows[rank], op):
                        assert same_bytes(found, wanted), (name, dtype, count, op)
                        compared += 1
                dist.all_reduce(mine := rows[rank].clone(), group=own)
                assert same_bytes(mine, in_rank_order(rows, ReduceOp.SUM)), ("a process group", dtype, count)
    dist.destroy_process_group(own)
    assert compared >= len(DTYPES) * len(counts) * len(OPS) * 12


def _sums(comm: Communicator, mine: torch.Tensor, op: ReduceOp) -> list[tuple[str, torch.Tensor]]:
    """The sum of all ranks' terms, in every way of this machine."""
    n, count, dtype, found = comm.world_size, len(mine), mine.dtype, []
    for variant in variants(comm, Kind.ALL_REDUCE):
        there = comm.empty(count, dtype=dtype).copy_(mine)
        comm.all_reduce(there, op=op, variant=variant)
        found.append((f"all_reduce {variant}", there))
        ordinary, output = mine.clone(), torch.empty_like(mine)
        if variant != "two_shot_push":  # symmetric memory only
            comm.all_reduce(ordinary, output=output, op=op, variant=variant)
            found.append((f"all_reduce {variant} of ordinary memory", output))
    for variant in variants(comm, Kind.REDUCE_SCATTER):
        parts, part = comm.empty(n, count, dtype=dtype).copy_(mine), torch.empty_like(mine)
        comm.reduce_scatter(part, parts, op=op, variant=variant)
        found.append((f"reduce_scatter {variant}", part))
    listed, odd = [mine.clone(), mine[: count // 2 + 1].clone()], mine.clone()
    comm.all_reduce(listed, op=op)
    gathered = torch.empty(n * count, dtype=dtype)
    with comm.batch() as batch:
        batch.all_reduce(odd, op=op)
        batch.all_gather(gathered, mine)
    found += [("a list", listed[0]), ("a batch", odd)]
    if mine.is_cuda:
        captured = mine.clone()
        comm.all_reduce(captured, op=op)  # a capture can make no room
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce(captured, op=op)
        captured.copy_(mine)
        graph.replay()
        torch.cuda.synchronize()
        found.append(("a graph", captured))
    work = comm.all_reduce(again := mine.clone(), op=op, async_op=True)
    assert work is not None
    work.wait()
    return [*found, ("asynchronous", again)]


@needs_triton
@on_ranks(3, long(4), interpreted=True, gpu=True)
def test_fused_sums(group: dist.ProcessGroup) -> None:
    """Compare sums of fused operators with those in the order of the ranks.

    Triton's interpreter rounds bfloat16 otherwise than GPUs.
    """
    from sidelane.ops.handle import INTERPRETED

    dtypes = [dtype for dtype in DTYPES if not (INTERPRETED and dtype is torch.bfloat16)]
    with communicator(group, timeout_s=60) as comm:
        n, rank = comm.world_size, comm.rank
        for dtype in dtypes:
            rows = terms(n, 3 * 264, dtype)
            wanted = in_rank_order(rows, ReduceOp.SUM).view(3, 264)
            for schedule in ("cells", "pushed"):
                weight, mine = torch.ones(264, dtype=dtype), rows[rank].view(3, 264)
                _, total = ops.all_reduce_rms_norm(comm, mine, None, weight, schedule=schedule, method="fused")
                assert same_bytes(total, wanted), (schedule, dtype)
            for tokens in (1, 4):  # a partial result of which all products but one are 0 is that term
                values = terms(n, 80 * tokens, dtype, seed=tokens)
                weight, x = torch.zeros(80, 32, dtype=dtype), torch.zeros(tokens, 32, dtype=dtype)
                weight[:, :tokens] = values[rank].view(80, tokens)
                x[range(tokens), range(tokens)] = 1
                found = ops.gemv_all_reduce(comm, weight, x, method="fused")
                wanted_by_row = in_rank_order(values, ReduceOp.SUM).view(80, tokens)
                assert same_bytes(found, wanted_by_row.T), (tokens, dtype)


@needs_triton
@on_ranks(2, interpreted=True)
def test_other_orders_are_refused(group: dist.ProcessGroup) -> None:
    """Calls that a deterministic communicator and group refuse, and calls that they still make."""
    texts: list[str] = []

    def refused(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("made")

    settings = Config(deterministic=True, timeout_s=60)
    with config.override(settings), Communicator(group, config=settings) as comm:
        n = comm.world_size
        x, weight = torch.ones(n, 4), torch.ones(8, 4)
        refused(lambda: ops.gemm_reduce_scatter(comm, x, weight, method="split"))
        refused(lambda: ops.gemm_all_reduce(comm, x, weight, method="split"))
        call = ops.operator.OperatorCall((), (1, 1, 1), 4)
        assert ops.operator.OPERATORS["gemm_all_reduce"].choose(comm, "auto", None, call).name == "unfused"
        own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
        refused(lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64), group=own))
        refused(lambda: dist.reduce(torch.ones(3), 0, group=own))
        refused(lambda: dist.reduce(torch.ones(3, dtype=torch.int64), 0, group=own))
        refused(lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64), op=dist.ReduceOp.MAX, group=own))
        refused(lambda: dist.all_reduce(torch.ones(3), group=own))
        dist.destroy_process_group(own)
    with config.override(Config(deterministic=True, virtual_nodes=tuple(range(dist.get_world_size())))):
        apart = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
        refused(lambda: dist.all_reduce(torch.ones(1 << 16), group=apart))
        refused(lambda: dist.all_reduce(torch.ones(1 << 16, dtype=torch.int32), group=apart))
        dist.destroy_process_group(apart)
    no, made = "UnavailableError: ", "made"
    assert [text[: len(no)] if text != made else made for text in texts] == [
        *(no, made, no, no, made, made, made, no, made)
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
    scatter = fsdp_calls.Scatter(cast(Any, calls), cast(Any, None), True)
    group: Any = None
    with pytest.raises(UnavailableError, match="nccl would make it \\(another group than that of the shards\\)"):
        scatter(torch.ones(2), torch.ones(4), group, dist.ReduceOp.AVG)

    comm: Any = SimpleNamespace(config=Config(deterministic=True))
    nodes: Any = object.__new__(NodesCommunicator)
    nodes.owner = SimpleNamespace(require=lambda: None)
    nodes.calls = comm
    with pytest.raises(UnavailableError, match="all_reduce: .* sums of nodes are rounded"):
        nodes.all_reduce(torch.ones(4))
