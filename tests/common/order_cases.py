"""Sums whose bits tell the order of their terms, by every way that adds floats between ranks: on CPU ranks and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from batch_cases import variants
from expected import in_rank_order, orders_differ, same_bytes
from fused_ops import DTYPES, communicator

from sidelane import Communicator, Config, config, ops
from sidelane.ops.handle import INTERPRETED
from sidelane.program.collective import Kind, ReduceOp

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


def everything(group: dist.ProcessGroup, counts: Sequence[int]) -> int:
    """Compare every variant, size, dtype and form of a sum with that in the order of the ranks. Return how many."""
    compared = 0
    own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
    with config.override(Config(deterministic=True)), communicator(group) as comm:
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
    return compared


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


def fused(group: dist.ProcessGroup) -> int:
    """Compare sums of fused operators with those in the order of the ranks. Return how many.

    Triton's interpreter rounds bfloat16 otherwise than GPUs.
    """
    compared = 0
    dtypes = [dtype for dtype in DTYPES if not (INTERPRETED and dtype is torch.bfloat16)]
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        for dtype in dtypes:
            rows = terms(n, 3 * 264, dtype)
            wanted = in_rank_order(rows, ReduceOp.SUM).view(3, 264)
            for schedule in ("cells", "pushed"):
                weight, mine = torch.ones(264, dtype=dtype), rows[rank].view(3, 264)
                _, total = ops.all_reduce_rms_norm(comm, mine, None, weight, schedule=schedule, method="fused")
                assert same_bytes(total, wanted), (schedule, dtype)
                compared += 1
            for tokens in (1, 4):  # a partial result of which all products but one are 0 is that term
                values = terms(n, 80 * tokens, dtype, seed=tokens)
                weight, x = torch.zeros(80, 32, dtype=dtype), torch.zeros(tokens, 32, dtype=dtype)
                weight[:, :tokens] = values[rank].view(80, tokens)
                x[range(tokens), range(tokens)] = 1
                found = ops.gemv_all_reduce(comm, weight, x, method="fused")
                wanted_by_row = in_rank_order(values, ReduceOp.SUM).view(80, tokens)
                assert same_bytes(found, wanted_by_row.T), (tokens, dtype)
                compared += 1
    return compared


def refusals(group: dist.ProcessGroup) -> list[str]:
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
    return texts
