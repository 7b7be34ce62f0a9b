"""Cases of GEMMs whose results are reduced, or whose inputs are gathered; PyTorch's own operators among what they meet.

``symm_mem`` are ``fused_matmul_reduce_scatter`` and ``fused_all_gather_matmul`` of ``torch.ops.symm_mem``, on GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from sidelane import ops
from sidelane.choice.fused import UNFUSED
from sidelane.collectives import Communicator
from sidelane_lab.studies.fused.case import (
    AS_CALLED,
    NCCL,
    SYMM_MEM,
    Auto,
    Case,
    Run,
    dtype_of,
    fill,
    group_name,
    ordinary,
)
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD, in_parts

PIECES = (1, 2, 4)


def reduce_scatter(comm: Communicator, rows: int, depth: int, columns: int) -> Case:
    """``depth`` is a rank's."""
    n, dtype = comm.world_size, dtype_of(comm)
    x, weight = ordinary(comm, rows, depth), ordinary(comm, columns, depth).normal_()
    y, out = ordinary(comm, rows, columns), ordinary(comm, rows // n, columns)
    own_y, own_out = comm.empty(rows, columns, dtype=dtype), comm.empty(rows // n, columns, dtype=dtype)

    def through_group() -> torch.Tensor:
        dist.reduce_scatter_tensor(out, torch.mm(x, weight.T, out=y))
        return out

    def through_ours() -> torch.Tensor:
        comm.reduce_scatter(own_out, torch.mm(x, weight.T, out=own_y))
        return own_out

    def of_torch() -> torch.Tensor:
        group = group_name(comm)  # first: the operators come with PyTorch's symmetric memory
        found: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.T, "sum", 0, group)
        return found

    def expected() -> torch.Tensor:
        total = x.double() @ weight.double().T
        dist.all_reduce(total)
        return total.chunk(n)[comm.rank]

    unfused: dict[tuple[str, str], Run] = {
        (NCCL, "mm, process group"): through_group,
        (OWN, "mm, sidelane"): through_ours,
        (OWN, OWN_METHOD): lambda: ops.gemm_reduce_scatter(comm, x, weight, method=UNFUSED),
    }
    if comm.device.type == "cuda":
        unfused[SYMM_MEM, "fused_matmul_reduce_scatter"] = of_torch
    return Case(
        "gemm_reduce_scatter",
        f"{rows}x{depth}x{columns} a rank",
        lambda seed: fill(comm, x, seed),
        expected,
        {"mm": lambda: torch.mm(x, weight.T, out=y)},
        {
            "process group": lambda: dist.reduce_scatter_tensor(out, y),
            "sidelane": lambda: comm.reduce_scatter(own_out, own_y),
        },
        unfused,
        _in_parts(ops.split_gemm_reduce_scatter, comm, x, weight),
        {AS_CALLED: Auto(lambda: ops.gemm_reduce_scatter(comm, x, weight), (rows, depth, columns))},
    )


def all_reduce(comm: Communicator, rows: int, depth: int, columns: int) -> Case:
    """``depth`` is a rank's."""
    x, weight = ordinary(comm, rows, depth), ordinary(comm, columns, depth).normal_()
    y, own_y = ordinary(comm, rows, columns), comm.empty(rows, columns, dtype=dtype_of(comm))

    def through_group() -> torch.Tensor:
        dist.all_reduce(torch.mm(x, weight.T, out=y))
        return y

    def through_ours() -> torch.Tensor:
        comm.all_reduce(torch.mm(x, weight.T, out=own_y))
        return own_y

    def expected() -> torch.Tensor:
        total = x.double() @ weight.double().T
        dist.all_reduce(total)
        return total

    return Case(
        "gemm_all_reduce",
        f"{rows}x{depth}x{columns} a rank",
        lambda seed: fill(comm, x, seed),
        expected,
        {"mm": lambda: torch.mm(x, weight.T, out=y)},
        {"process group": lambda: dist.all_reduce(y), "sidelane": lambda: comm.all_reduce(own_y)},
        {
            (NCCL, "mm, process group"): through_group,
            (OWN, "mm, sidelane"): through_ours,
            (OWN, OWN_METHOD): lambda: ops.gemm_all_reduce(comm, x, weight, method=UNFUSED),
        },
        _in_parts(ops.split_gemm_all_reduce, comm, x, weight),
        {AS_CALLED: Auto(lambda: ops.gemm_all_reduce(comm, x, weight), (rows, depth, columns))},
    )


def all_gather(comm: Communicator, rows: int, depth: int, columns: int) -> Case:
    """``rows`` and ``columns`` are a rank's."""
    n, dtype = comm.world_size, dtype_of(comm)
    x, weight = ordinary(comm, rows, depth), ordinary(comm, columns, depth).normal_()
    gathered, own_gathered = ordinary(comm, n * rows, depth), comm.empty(n * rows, depth, dtype=dtype)
    own_x = comm.empty(rows, depth, dtype=dtype)
    y = ordinary(comm, n * rows, columns)

    def refill(seed: int) -> None:
        fill(comm, x, seed)
        own_x.copy_(x)

    def through_group() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, x)
        return torch.mm(gathered, weight.T, out=y)

    def through_ours() -> torch.Tensor:
        comm.all_gather(own_gathered, own_x)
        return torch.mm(own_gathered, weight.T, out=y)

    def of_torch() -> torch.Tensor:
        group = group_name(comm)
        call = torch.ops.symm_mem.fused_all_gather_matmul
        found: list[torch.Tensor] = call(x, [weight.T], 0, group, return_A=False)[1]
        return found[0]

    def expected() -> torch.Tensor:
        wide = torch.empty(n * rows, depth, dtype=torch.float64, device=comm.device)
        dist.all_gather_into_tensor(wide, x.double())
        return wide @ weight.double().T

    unfused: dict[tuple[str, str], Run] = {
        (NCCL, "process group, mm"): through_group,
        (OWN, "sidelane, mm"): through_ours,
        (OWN, OWN_METHOD): lambda: ops.all_gather_gemm(comm, x, weight, method=UNFUSED),
    }
    if comm.device.type == "cuda":
        unfused[SYMM_MEM, "fused_all_gather_matmul"] = of_torch
    return Case(
        "all_gather_gemm",
        f"{rows}x{depth}x{columns} a rank",
        refill,
        expected,
        {"mm": lambda: torch.mm(gathered, weight.T, out=y)},
        {
            "process group": lambda: dist.all_gather_into_tensor(gathered, x),
            "sidelane": lambda: comm.all_gather(own_gathered, own_x),
        },
        unfused,
        _in_parts(ops.split_all_gather_gemm, comm, x, weight),
        {AS_CALLED: Auto(lambda: ops.all_gather_gemm(comm, x, weight), (rows, depth, columns))},
    )


MAKE: dict[str, Callable[..., Case]] = {
    "gemm_reduce_scatter": reduce_scatter,
    "gemm_all_reduce": all_reduce,
    "all_gather_gemm": all_gather,
}
"""Operators, and how to make a case of a shape."""


def _in_parts(
    call: Callable[..., torch.Tensor], comm: Communicator, x: torch.Tensor, weight: torch.Tensor
) -> dict[str, Run]:
    return {in_parts(pieces): functools.partial(call, comm, x, weight, pieces=pieces) for pieces in PIECES}
