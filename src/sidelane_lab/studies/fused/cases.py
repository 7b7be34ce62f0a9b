"""What the study of fused operators runs: an operator at one shape, and everything that does the same unfused.

Data are bfloat16 on GPUs. Shapes are those of the fused operators paper (section IV), or of decoders of today.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidelane import ops
from sidelane.choice.fused import FUSED, UNFUSED
from sidelane.choice.fused_thumb import ROUTED
from sidelane.collectives import Communicator
from sidelane.ops.gemv_tiling import tiling_of
from sidelane_lab.studies.fused import dispatch_cases, embedding_cases, gemm_cases, norm_cases, routed_cases
from sidelane_lab.studies.fused.case import (
    AS_CALLED,
    NCCL,
    SYMM_MEM,
    Auto,
    Case,
    OneShot,
    Run,
    dtype_of,
    fill,
    ordinary,
)
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD, with_programs
from sidelane_lab.studies.fused.shapes import ROUTINGS

CELLS = "cells"
"""How a GEMV is fused, as rows have it."""

SWEPT = ((8192, 8192, 1), (8192, 8192, 16), (20, 16, 1))
"""Shapes of GEMVs at which programs on a unit are swept, on GPUs and on CPUs."""


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

    fused: dict[str, Run] = {CELLS: lambda: ops.gemv_all_reduce(comm, weight, x, out=out, method=FUSED)}

    if (rows, columns, tokens) in SWEPT:
        usual = tiling_of(tokens)
        for count in (1, 2) if comm.device.type == "cpu" else range(1, usual.most_per_unit + 1):
            tiling = dataclasses.replace(usual, per_unit=count)
            options: dict[str, Any] = {"out": out, "method": FUSED, "tiling": tiling}
            fused[with_programs(CELLS, count)] = functools.partial(ops.gemv_all_reduce, comm, weight, x, **options)

    def as_called() -> torch.Tensor:
        return ops.gemv_all_reduce(comm, weight, x, out=out)

    one_shot = OneShot(comm, y)

    def through_torch() -> torch.Tensor:
        product(one_shot.input)
        return one_shot()

    unfused: dict[tuple[str, str], Run] = {
        (NCCL, "mm, process group"): through_group,
        (OWN, "mm, sidelane"): through_ours,
        (OWN, OWN_METHOD): lambda: ops.gemv_all_reduce(comm, weight, x, method=UNFUSED),
    }
    if comm.device.type == "cuda":
        unfused[SYMM_MEM, "mm, one_shot_all_reduce"] = through_torch
    return Case(
        "gemv_all_reduce",
        f"{rows}x{columns}, {tokens} tokens",
        lambda seed: fill(comm, x, seed),
        expected,
        {"mm": lambda: product(y)},
        {"process group": lambda: dist.all_reduce(y), "sidelane": lambda: comm.all_reduce(symmetric)},
        unfused,
        fused,
        {AS_CALLED: Auto(as_called, (rows, columns, tokens))},
        weight.nbytes,
    )


def makers_of(op: str) -> tuple[Callable[..., Case], ...]:
    """What make the cases of a shape of an operator."""
    if op in ROUTED:
        return tuple(functools.partial(MAKE[op], routing=routing) for routing in ROUTINGS)
    return (MAKE[op],)


MAKE: dict[str, Callable[..., Case]] = {
    "gemv_all_reduce": gemv,
    "all_reduce_rms_norm": norm_cases.rms_norm,
    "embedding_all_to_all": embedding_cases.embedding,
    "gemm_all_to_all": routed_cases.gemm,
    "all_to_all_gemm": dispatch_cases.gemm,
    **gemm_cases.MAKE,
}
"""Operators, and how to make a case of a shape."""
