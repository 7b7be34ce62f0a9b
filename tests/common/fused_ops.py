"""What ranks do with fused operators in tests, under Triton's interpreter or on GPUs: against float64, with late ranks.

A rank's tensors are on its default device, which the processes for GPUs set. All ranks draw the same sizes and inputs,
so that each knows what the others have.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from sidelane import Communicator, Config, ops
from sidelane.device.context import begin, end, wait_acquire
from sidelane.errors import SidelaneError
from sidelane.ops import reference
from sidelane.ops.embedding import EmbeddingAllToAll
from sidelane.ops.gemv import Tiling

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of an element, next to the largest one: the last place of the dtype, twice."""


class Draws:
    """Sizes and inputs that all ranks draw alike, and the rank that is late, which each draws for itself."""

    def __init__(self, seed: int, rank: int) -> None:
        self.sizes, self._late = random.Random(seed), random.Random(100 * seed + rank)
        self._values = torch.Generator().manual_seed(seed)

    def late(self) -> None:
        """Be late at random."""
        time.sleep(0.02 * self._late.random() * (self._late.random() < 0.3))

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, on the CPU."""
        return torch.randn(*shape, generator=self._values)


def check_close(found: torch.Tensor, expected: torch.Tensor, where: object) -> None:
    """Compare with float64."""
    scale = max(1e-3, float(expected.abs().max())) if expected.numel() else 1.0
    error = (found.double().cpu() - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert error <= TOLERANCE[found.dtype], (where, error)


@contextlib.contextmanager
def communicator(group: dist.ProcessGroup, *, debug: bool = False) -> Iterator[Communicator]:
    """One that is patient: CPU ranks interpret kernels."""
    config = Config(timeout_s=60, debug=debug)
    with Communicator(group, device=torch.get_default_device(), config=config) as comm:
        yield comm


def gemv_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Random shapes, dtypes, schedules and orders; outputs of all kinds; who is late changes."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        draws = Draws(seed, rank)
        tiling = Tiling(16, 32, 1, 1)
        symmetric = {dtype: comm.empty(16 * 70, dtype=dtype) for dtype in DTYPES}
        shapes = [(draws.sizes.randrange(1, 70), draws.sizes.choice((1, 2, 3, 5, 16))) for _ in range(6)]
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            rows, tokens = draws.sizes.choice(shapes)
            columns = [draws.sizes.randrange(1, 50) for _ in range(n)]
            dtype, schedule = draws.sizes.choice(DTYPES), draws.sizes.choice(("one_shot", "two_phase"))
            order, where = draws.sizes.choice(("remote_first", "oblivious")), draws.sizes.randrange(3)
            weights = [draws.normal(rows, width).to(dtype) for width in columns]
            xs = [draws.normal(tokens, width).to(dtype) for width in columns]
            expected = sum(x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True))
            assert isinstance(expected, torch.Tensor)
            weight, x = weights[rank].to(comm.device), xs[rank].to(comm.device)
            if number % 3 == 0:  # rows that lie apart
                weight = torch.cat([weight, weight], dim=1)[:, : columns[rank]]
            if tokens == 1 and number % 2:
                x, expected = x[0], expected[0]
            out = None
            if where:
                place = symmetric[dtype] if where == 1 else torch.empty(16 * 70, dtype=dtype)
                out = place[: expected.numel()].view(expected.shape)
            draws.late()
            result = ops.gemv_all_reduce(comm, weight, x, out=out, schedule=schedule, order=order, tiling=tiling)
            if where == 1:
                result = result.clone()  # peers may store into it in the next call, which comes behind this
            kept.append((result, expected))
        comm.synchronize()
        for number, (result, expected) in enumerate(kept):
            check_close(result, expected, number)
        weight, x = torch.ones(20, 8), torch.ones(3, 8)
        check_close(reference.gemv_all_reduce(comm, weight, x), torch.full((3, 20), 8.0 * n).double(), "unfused")
    return len(kept)


def rms_norm_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Random shapes and dtypes, with a residual and without, in place and not."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        draws = Draws(seed, rank)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(calls):
            tokens, hidden = draws.sizes.choice((1, 2, 3, 5, 7)), 2 * draws.sizes.choice((1, 17, 40))
            dtype, in_place = draws.sizes.choice(DTYPES), draws.sizes.random() < 0.5
            has_residual, eps = draws.sizes.random() < 0.7, draws.sizes.choice((1e-6, 1e-3))
            xs = [draws.normal(tokens, hidden).to(dtype) for _ in range(n)]
            residual, weight = draws.normal(tokens, hidden).to(dtype), draws.normal(hidden).to(dtype)
            total = torch.stack(xs).double().sum(0) + (residual.double() if has_residual else 0)
            expected = total / (total.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()
            device = comm.device
            x, before = xs[rank].to(device), residual.to(device) if has_residual else None
            draws.late()
            places: dict[str, Any] = {"out": x, "residual_out": before} if in_place else {}
            kept += zip(
                ops.all_reduce_rms_norm(comm, x, before, weight.to(device), eps=eps, **places),
                (expected, total),
                strict=True,
            )
        comm.synchronize()
        for number, (result, expected) in enumerate(kept):
            check_close(result, expected, number)
        x, weight = torch.full((2, 4), 1.0), torch.full((4,), 2.0)
        y, total = reference.all_reduce_rms_norm(comm, x, x, weight)
        check_close(total, torch.full((2, 4), n + 1.0).double(), "unfused")
        check_close(y, torch.full((2, 4), 2.0).double(), "unfused")
    return len(kept) // 2


@triton.jit
def consumer(context, producer, output, seen, owner, flag, first, count, TILE: tl.constexpr):
    """Takes a slice once it is there: launched as often as its producer, so that generations are the same."""
    generation = begin(context)
    wait_acquire(producer, owner, flag, generation)
    offsets = tl.arange(0, TILE)
    tl.store(seen + offsets, tl.load(output + first + offsets, mask=offsets < count), mask=offsets < count)
    end(context, generation)


def embedding_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Uneven tables and batches, empty bags, all modes and dtypes; outputs that peers write while others are late."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = Draws(seed, rank)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dtype in DTYPES:
            dim, batch = draws.sizes.choice((1, 5, 8)), draws.sizes.randrange(n, 3 * n)
            counts = [draws.sizes.randrange(1, 3) for _ in range(n)]
            tables = [
                [draws.normal(draws.sizes.randrange(1, 30), dim).to(dtype) for _ in range(count)] for count in counts
            ]
            own = [table.to(device) for table in tables[rank]]
            width = sum(counts) * dim
            shared = comm.empty(-(-batch // n), width, dtype=dtype)
            samples = [batch // n + (peer < batch % n) for peer in range(n)]
            mine = slice(sum(samples[:rank]), sum(samples[: rank + 1]))
            for number in range(calls):
                kind = draws.sizes.choice(("sum", "mean", "weighted"))
                index = draws.sizes.choice((torch.int32, torch.int64))
                order, cut = draws.sizes.choice(("remote_first", "oblivious")), draws.sizes.choice((None, 1, 3))
                bags = [
                    [[draws.sizes.randrange(len(table)) for _ in range(draws.sizes.choice((0, 1, 4, 11)))]]
                    for some in tables
                    for table in some
                    for _ in range(batch)
                ]
                factors = [draws.normal(len(bag)).to(dtype) for (bag,) in bags]
                pooled = [
                    pool(table, bag, factor if kind == "weighted" else None, mean=kind == "mean")
                    for table, (bag,), factor in zip(
                        [table for some in tables for table in some for _ in range(batch)], bags, factors, strict=True
                    )
                ]
                expected = torch.stack(pooled).view(sum(counts), batch, dim).transpose(0, 1).reshape(batch, width)[mine]
                first, last = sum(counts[:rank]) * batch, sum(counts[: rank + 1]) * batch
                lengths = [len(bag) for (bag,) in bags[first:last]]
                indices = torch.tensor([row for (bag,) in bags[first:last] for row in bag], dtype=index)
                offsets = torch.tensor([0, *lengths]).cumsum(0).to(index)
                weights = torch.cat(factors[first:last]) if kind == "weighted" else None
                out = shared[: samples[rank]] if number % 2 else None
                draws.late()
                mode = "mean" if kind == "mean" else "sum"
                result = ops.embedding_all_to_all(
                    *(comm, own, indices.to(device), offsets.to(device)),
                    mode=mode,
                    per_sample_weights=None if weights is None else weights.to(device),
                    out=out,
                    order=order,
                    slice_bags=cut,
                )
                kept.append((result.clone(), expected))
            unfused = reference.embedding_all_to_all(
                comm, own, indices, offsets, counts, mode=mode, per_sample_weights=weights
            )
            check_close(unfused, expected, "unfused")
        comm.synchronize()
        for number, (result, expected) in enumerate(kept):
            check_close(result, expected, number)
    return len(kept)


def pool(table: torch.Tensor, bag: list[int], factors: torch.Tensor | None, *, mean: bool) -> torch.Tensor:
    """A bag in float64."""
    rows = table.double()[bag] if bag else table.new_zeros(0, table.shape[1]).double()
    if factors is not None:
        rows = rows * factors.double()[:, None]
    return rows.sum(0) / (max(1, len(bag)) if mean else 1)


def slices_as_they_come(group: dist.ProcessGroup) -> int:
    """A consumer of one slice of each owner, launched once for each call."""
    with communicator(group) as comm:
        dim, batch = 4, 4 * comm.world_size
        table = torch.arange(8.0).repeat_interleave(dim).view(8, dim) + 10 * comm.rank
        handle = EmbeddingAllToAll(comm, [table, table + 100], batch, slice_bags=2)
        consumers = [comm.load_kernel(consumer, flags=0) for _ in range(comm.world_size)]
        offsets = torch.arange(2 * batch + 1)
        for call in range(3):
            output = handle((torch.arange(2 * batch) + call) % 8, offsets)
            for owner, kernel in enumerate(consumers):
                seen, column = torch.zeros(dim), (2 * owner + 1) * dim
                at, flag = 2 * output.shape[1] + column, handle.flag_of_slice(1, 2)
                kernel.launch((1,), handle.context, output, seen, owner, flag, at, dim, TILE=4)
                comm.synchronize()
                row = (batch + 4 * comm.rank + 2 + call) % 8
                assert seen.eq(row + 10 * owner + 100).all(), (call, owner, seen)
            comm.barrier()
    return 3


def refusals(group: dist.ProcessGroup, kind: str) -> list[list[str]]:
    """For each wrong call, made by the last rank only, what each rank is told; then a call that is right."""
    told: list[str] = []
    with communicator(group, debug=kind == "embedding") as comm:
        wrong, right = {"gemv": gemv_calls, "rms_norm": rms_norm_calls, "embedding": embedding_calls}[kind](comm)
        for call in wrong:
            try:
                (call if comm.rank == comm.world_size - 1 else right)()
                told.append("nothing")
            except (TypeError, ValueError, SidelaneError) as error:
                told.append(f"{type(error).__name__}: {error}")
        right()
        comm.synchronize()
    return [told]


def gemv_calls(comm: Communicator) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
    weight, x = torch.ones(20, 8), torch.ones(3, 8)

    def call(weight: Any = weight, x: Any = x, **options: Any) -> Callable[[], Any]:
        return lambda: ops.gemv_all_reduce(comm, weight, x, **options)

    wrong = [
        call(x=torch.ones(3, 7)),
        call(x=torch.ones(17, 8)),
        call(x=x.half()),
        call(weight=[1]),
        call(weight=torch.ones(8, 20).T),
        call(out=torch.ones(20, 3)),
        call(schedule="ring"),
        call(order="local_first"),
        call(weight=torch.ones(20, 8, dtype=torch.int32)),
    ]
    return wrong, call()


def rms_norm_calls(comm: Communicator) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
    x, weight = torch.ones(3, 8), torch.ones(8)

    def call(x: Any = x, residual: Any = None, weight: Any = weight, **options: Any) -> Callable[[], Any]:
        return lambda: ops.all_reduce_rms_norm(comm, x, residual, weight, **options)

    odd = torch.ones(25, dtype=torch.float16)[1:].view(3, 8)
    wrong = [
        call(x=torch.ones(513, 8)),
        call(x=torch.ones(8)),
        call(x=torch.ones(3, 8, dtype=torch.int64)),
        call(x=torch.ones(3, 7).half(), weight=torch.ones(7).half()),
        call(x=odd, weight=weight.half()),
        call(x=torch.ones(8, 3).T),
        call(x=torch.ones(1, 16384), weight=torch.ones(16384)),
        call(residual=torch.ones(3, 7)),
        call(residual=torch.ones(3, 8).half()),
        call(weight=torch.ones(7)),
        call(out=torch.ones(2, 8)),
    ]
    return wrong, call()


def embedding_calls(comm: Communicator) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
    tables, indices, offsets = [torch.ones(5, 4), torch.ones(6, 4)], torch.tensor([0, 4, 3, 5]), torch.arange(5)

    def call(some: Any = tables, rows: Any = indices, starts: Any = offsets, **options: Any) -> Callable[[], Any]:
        return lambda: ops.embedding_all_to_all(comm, some, rows, starts, **options)

    wrong = [
        call([]),
        call([torch.ones(5, 4), torch.ones(6, 3)]),
        call([torch.ones(5, 4), torch.ones(6, 4).half()]),
        call([torch.ones(4, 5).T, torch.ones(6, 4)]),
        call(rows=indices.float()),
        call(rows=torch.tensor([0, 5, 3, 5])),
        call(starts=torch.arange(4)),
        call(starts=torch.tensor([0, 2, 1, 3, 4])),
        call(starts=torch.tensor([0, 1, 2, 3, 5])),
        call(mode="max"),
        call(order="last"),
        call(slice_bags=0),
        call(rows=indices[:2], starts=torch.arange(3)),
        call(mode="mean", per_sample_weights=torch.ones(4)),
        call(per_sample_weights=torch.ones(3)),
        call(out=torch.ones(1, 4 * 2 * comm.world_size)),
        call(out=comm.kept.setdefault("test", torch.ones(2, 2))),
    ]
    return wrong, call()
