"""What the study of fused operators runs: an operator at one shape, and everything that does the same unfused.

Data are bfloat16 on GPUs. Embedding dimension and pooling are those of the fused operators paper (section IV), the
other shapes those of decoders of today.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional

from sidelane import ops
from sidelane.bench.fused.kept import OWN, OWN_METHOD, in_parts
from sidelane.bench.fused.shapes import half_for_one
from sidelane.choice.fused import FUSED, UNFUSED
from sidelane.collectives import Communicator
from sidelane.ops import rms_norm as norms
from sidelane.ops.gemv import CELLS, TWO_PHASE
from sidelane.ops.handle import ORDERS

EMBEDDING_DIM = 256
TABLE_ROWS = 1 << 14
EPS = 1e-6

NCCL = "unfused_nccl"
Run = Callable[[], torch.Tensor]


@dataclasses.dataclass
class Case:
    """An operator at one shape, on this rank.

    Attributes:
        op: its name.
        shape: in words.
        refill: gives inputs new values, from a seed that is alike on all ranks.
        expected: the result in float64, by the process group.
        compute: the computation alone, in every way that is there.
        collective: the collective alone, likewise.
        unfused: by implementation, and what it is made of.
        fused: by schedule.
    """

    op: str
    shape: str
    refill: Callable[[int], None]
    expected: Run
    compute: dict[str, Callable[[], object]]
    collective: dict[str, Callable[[], object]]
    unfused: dict[tuple[str, str], Run]
    fused: dict[str, Run]


def gemv(comm: Communicator, rows: int, columns: int, tokens: int) -> Case:
    """``columns`` are those of all ranks."""
    dtype, width = dtype_of(comm), columns // comm.world_size
    weight, x = ordinary(comm, rows, width), ordinary(comm, tokens, width)
    weight.normal_()
    y, symmetric, out = (
        ordinary(comm, tokens, rows),
        comm.empty(tokens, rows, dtype=dtype),
        ordinary(comm, tokens, rows),
    )

    def product(output: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.T, out=output)

    def through_group() -> torch.Tensor:
        dist.all_reduce(product(y))
        return y

    def through_ours() -> torch.Tensor:
        comm.all_reduce(product(symmetric))
        return symmetric

    def expected() -> torch.Tensor:
        total = x.double() @ weight.double().T
        dist.all_reduce(total)
        return total

    fused: dict[str, Run] = {"auto": lambda: ops.gemv_all_reduce(comm, weight, x, out=out, method=FUSED)}
    fused |= {
        name: lambda schedule=schedule, order=order: ops.gemv_all_reduce(  # type: ignore[misc]
            comm, weight, x, out=out, schedule=schedule, order=order, method=FUSED
        )
        for name, schedule, order in (
            (CELLS, CELLS, ORDERS[0]),
            (TWO_PHASE, TWO_PHASE, ORDERS[0]),
            (f"{TWO_PHASE}, {ORDERS[1]}", TWO_PHASE, ORDERS[1]),
        )
    }
    return Case(
        "gemv_all_reduce",
        f"{rows}x{columns}, {tokens} tokens",
        lambda seed: fill(comm, x, seed),
        expected,
        {"mm": lambda: product(y)},
        {"process group": lambda: dist.all_reduce(y), "sidelane": lambda: comm.all_reduce(symmetric)},
        {
            (NCCL, "mm, process group"): through_group,
            (OWN, "mm, sidelane"): through_ours,
            (OWN, OWN_METHOD): lambda: ops.gemv_all_reduce(comm, weight, x, method=UNFUSED),
        },
        fused,
    )


def rms_norm(comm: Communicator, tokens: int, hidden: int) -> Case:
    """With a residual."""
    dtype = dtype_of(comm)
    x, summed = ordinary(comm, tokens, hidden), ordinary(comm, tokens, hidden)
    symmetric, total = comm.empty(tokens, hidden, dtype=dtype), comm.empty(tokens, hidden, dtype=dtype)
    residual, weight = ordinary(comm, tokens, hidden).fill_(0.5), ordinary(comm, hidden).fill_(1.5)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)

    def normed(added: torch.Tensor) -> torch.Tensor:
        torch.add(added, residual, out=residual_out)
        return functional.rms_norm(residual_out, (hidden,), weight, EPS)

    def refill(seed: int) -> None:
        fill(comm, x, seed)
        symmetric.copy_(x)

    def through_group() -> torch.Tensor:
        summed.copy_(x)  # whoever adds up in place has no use for what was there
        dist.all_reduce(summed)
        return normed(summed)

    def through_ours() -> torch.Tensor:
        comm.all_reduce(symmetric, output=total)
        return normed(total)

    def fused(schedule: str) -> torch.Tensor:
        y, _ = ops.all_reduce_rms_norm(
            comm, x, residual, weight, eps=EPS, out=out, residual_out=residual_out, schedule=schedule, method=FUSED
        )
        return y

    def expected() -> torch.Tensor:
        wide = x.double()
        dist.all_reduce(wide)
        return functional.rms_norm(wide + residual.double(), (hidden,), weight.double(), EPS)

    return Case(
        "all_reduce_rms_norm",
        f"{tokens}x{hidden}",
        refill,
        expected,
        {"add, rms_norm": lambda: normed(x)},
        {
            "process group": lambda: dist.all_reduce(summed),
            "sidelane": lambda: comm.all_reduce(symmetric, output=total),
        },
        {
            (NCCL, "copy, process group, add, norm"): through_group,
            (OWN, "sidelane, add, norm"): through_ours,
            (OWN, OWN_METHOD): lambda: ops.all_reduce_rms_norm(comm, x, residual, weight, eps=EPS, method=UNFUSED)[0],
        },
        {schedule: functools.partial(fused, schedule) for schedule in norms.SCHEDULES},
    )


def embedding(comm: Communicator, batch: int, tables: int, pooling: int) -> Case:
    """``batch`` samples of all ranks, ``tables`` on each."""
    n, dim, device = comm.world_size, EMBEDDING_DIM if comm.device.type != "cpu" else 8, comm.device
    rows = TABLE_ROWS if device.type != "cpu" else 50
    part = batch // n
    whole = ordinary(comm, tables * rows, dim).normal_()
    some = list(whole.view(tables, rows, dim))
    indices = torch.zeros(tables, n, part, pooling, dtype=torch.int64, device=device)
    batched = torch.zeros(n, tables, part, pooling, dtype=torch.int64, device=device)
    offsets = torch.arange(tables * batch + 1, device=device) * pooling
    of_table = offsets[: batch + 1].clone()
    dtype = dtype_of(comm)
    sent, received = ordinary(comm, n, tables, part, dim), ordinary(comm, n, tables, part, dim)
    own_sent, own_received = (comm.empty(n, tables, part, dim, dtype=dtype) for _ in range(2))
    out = ordinary(comm, part, n * tables, dim)

    def refill(seed: int) -> None:
        generator = torch.Generator("cpu").manual_seed(seed + comm.rank)
        indices.copy_(torch.randint(rows, indices.shape, generator=generator, device="cpu"))
        first_rows = torch.arange(tables, device=device)[:, None, None, None] * rows
        batched.copy_((indices + first_rows).transpose(0, 1))

    def table_by_table(output: torch.Tensor) -> torch.Tensor:
        pooled = [
            functional.embedding_bag(own.view(-1), table, of_table, mode="sum", include_last_offset=True)
            for own, table in zip(indices, some, strict=True)
        ]
        return torch.stack([bags.view(n, part, dim) for bags in pooled], dim=1, out=output)

    def at_once() -> torch.Tensor:
        pooled = functional.embedding_bag(batched.view(-1), whole, offsets, mode="sum", include_last_offset=True)
        return pooled.view(n, tables, part, dim)

    def laid_out(bags: torch.Tensor) -> torch.Tensor:
        out.copy_(bags.view(n * tables, part, dim).transpose(0, 1))
        return out.view(part, -1)

    def through_group(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        dist.all_to_all_single(received, make())
        return laid_out(received)

    def through_ours() -> torch.Tensor:
        own_sent.copy_(at_once())  # symmetric memory, where embedding_bag does not write
        comm.all_to_all(own_received, own_sent)
        return laid_out(own_received)

    def through_ours_staged() -> torch.Tensor:
        comm.all_to_all(own_received, at_once())
        return laid_out(own_received)

    def fused(order: str) -> torch.Tensor:
        return ops.embedding_all_to_all(comm, some, indices.view(-1), offsets, order=order, method=FUSED)

    def expected() -> torch.Tensor:
        wide = torch.empty(n, tables, part, dim, dtype=torch.float64, device=device)
        for number, (own, table) in enumerate(zip(indices, some, strict=True)):
            wide[:, number] = table.double()[own].sum(-2)
        came = torch.empty_like(wide)
        dist.all_to_all_single(came, wide)
        return came.view(n * tables, part, dim).transpose(0, 1).reshape(part, -1)

    return Case(
        "embedding_all_to_all",
        f"batch {batch}, {tables} tables a rank, pooling {pooling}, dim {dim}",
        refill,
        expected,
        {"a kernel a table": lambda: table_by_table(sent), "one kernel": at_once},
        {
            "process group": lambda: dist.all_to_all_single(received, sent),
            "sidelane": lambda: comm.all_to_all(own_received, own_sent),
        },
        {
            (NCCL, "a kernel a table, process group, copy"): lambda: through_group(lambda: table_by_table(sent)),
            (NCCL, "one kernel, process group, copy"): lambda: through_group(at_once),
            (OWN, "one kernel, copy, sidelane, copy"): through_ours,
            (OWN, "one kernel, sidelane, copy"): through_ours_staged,
            (OWN, OWN_METHOD): lambda: ops.embedding_all_to_all(comm, some, indices.view(-1), offsets, method=UNFUSED),
        },
        {order: lambda order=order: fused(order) for order in ORDERS},  # type: ignore[misc]
    )


def gemm(comm: Communicator, rows: int, depth: int, columns: int) -> Case:
    """``rows`` of this rank, half of which its routing keeps for one peer in turn: skewed, as much for each rank."""
    n, rank, dtype = comm.world_size, comm.rank, dtype_of(comm)
    counts = [list(row) for row in half_for_one(rows, n)]
    table = torch.tensor(counts, device=comm.device)
    sent_rows, came_rows = counts[rank], [row[rank] for row in counts]
    x, weight = ordinary(comm, rows, depth), ordinary(comm, columns, depth).normal_()
    y, out = ordinary(comm, rows, columns), ordinary(comm, rows, columns)
    own_sent, own_out = (comm.empty(rows, columns, dtype=dtype) for _ in range(2))

    def through_group() -> torch.Tensor:
        dist.all_to_all_single(out, torch.mm(x, weight.T, out=y), came_rows, sent_rows)
        return out

    def exchange() -> None:
        comm.all_to_all(own_out, own_sent, output_split_sizes=came_rows, input_split_sizes=sent_rows)

    def through_ours() -> torch.Tensor:
        torch.mm(x, weight.T, out=own_sent)
        exchange()
        return own_out

    def expected() -> torch.Tensor:
        wide = x.double() @ weight.double().T
        came = torch.empty_like(wide)
        dist.all_to_all_single(came, wide, came_rows, sent_rows)
        return came

    def fused(order: str) -> torch.Tensor:
        return ops.gemm_all_to_all(comm, x, weight, table, most_rows=rows, order=order, method=FUSED)

    def split(pieces: int) -> torch.Tensor:
        return ops.split_gemm_all_to_all(comm, x, weight, counts, most_rows=rows, pieces=pieces)

    return Case(
        "gemm_all_to_all",
        f"{rows}x{depth}x{columns} a rank, half for one peer",
        lambda seed: fill(comm, x, seed),
        expected,
        {"mm": lambda: torch.mm(x, weight.T, out=y)},
        {"process group": lambda: dist.all_to_all_single(out, y, came_rows, sent_rows), "sidelane": exchange},
        {
            (NCCL, "mm, process group"): through_group,
            (OWN, "mm, sidelane"): through_ours,
            (OWN, OWN_METHOD): lambda: ops.gemm_all_to_all(comm, x, weight, table, most_rows=rows, method=UNFUSED),
        },
        {
            **{order: functools.partial(fused, order) for order in ORDERS},
            **{in_parts(pieces): functools.partial(split, pieces) for pieces in (1, 2, 4)},
        },
    )


MAKE: dict[str, Callable[..., Case]] = {
    "gemv_all_reduce": gemv,
    "all_reduce_rms_norm": rms_norm,
    "embedding_all_to_all": embedding,
    "gemm_all_to_all": gemm,
}
"""Operators, and how to make a case of a shape."""


def dtype_of(comm: Communicator) -> torch.dtype:
    """Of all tensors."""
    return torch.float32 if comm.device.type == "cpu" else torch.bfloat16


def ordinary(comm: Communicator, *size: int) -> torch.Tensor:
    """Zeros in ordinary memory."""
    return torch.zeros(*size, dtype=dtype_of(comm), device=comm.device)


def fill(comm: Communicator, tensor: torch.Tensor, seed: int) -> None:
    """Values that another rank does not have."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + comm.rank)
    tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cpu"))
