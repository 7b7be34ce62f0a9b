"""Cases of an all-reduce before a residual and a norm. Unfused, these two are one kernel: Triton's, or Inductor's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from sidelane import ops
from sidelane.choice.fused import FUSED, UNFUSED
from sidelane.collectives import Communicator
from sidelane.ops import rms_norm as norms
from sidelane.ops.alone import add_norm
from sidelane.ops.handle import power_of_two
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
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD

EPS = 1e-6

Norm = Callable[[torch.Tensor], torch.Tensor]


def rms_norm(comm: Communicator, tokens: int, hidden: int) -> Case:
    """With a residual."""
    dtype, on_gpu = dtype_of(comm), comm.device.type == "cuda"
    x, summed, in_place = (ordinary(comm, tokens, hidden) for _ in range(3))
    symmetric, total = comm.empty(tokens, hidden, dtype=dtype), comm.empty(tokens, hidden, dtype=dtype)
    residual, weight = ordinary(comm, tokens, hidden).fill_(0.5), ordinary(comm, hidden).fill_(1.5)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    one_shot = OneShot(comm, x)

    def added_then_normed(added: torch.Tensor) -> torch.Tensor:
        torch.add(added, residual, out=residual_out)
        return functional.rms_norm(residual_out, (hidden,), weight, EPS)

    def by_triton(added: torch.Tensor) -> torch.Tensor:
        return add_norm(added, residual, weight, EPS, residual_out, out)

    ways: dict[str, Norm] = {"add, norm": added_then_normed, "add+norm by Triton": by_triton}
    if on_gpu:
        compiled = torch.compile(_add_and_norm, dynamic=False)
        ways["add+norm by torch.compile"] = lambda added: compiled(added, residual, weight)[0]

    def refill(seed: int) -> None:
        fill(comm, x, seed)
        for copied in (symmetric, in_place):
            copied.copy_(x)
        if one_shot.is_made:
            one_shot.input.copy_(x)

    def through_group(norm: Norm) -> torch.Tensor:
        summed.copy_(x)  # for whoever still needs what was there
        dist.all_reduce(summed)
        return norm(summed)

    def through_group_in_place(norm: Norm) -> torch.Tensor:
        dist.all_reduce(in_place)  # call after call: values grow, which takes no time
        return norm(in_place)

    def through_ours(norm: Norm) -> torch.Tensor:
        comm.all_reduce(symmetric, output=total)
        return norm(total)

    def through_torch(norm: Norm) -> torch.Tensor:
        if not one_shot.is_made:
            one_shot.input.copy_(x)
        return norm(one_shot())

    def call(**options: Any) -> torch.Tensor:
        return ops.all_reduce_rms_norm(comm, x, residual, weight, eps=EPS, **options)[0]

    def expected() -> torch.Tensor:
        wide = x.double()
        dist.all_reduce(wide)
        return functional.rms_norm(wide + residual.double(), (hidden,), weight.double(), EPS)

    unfused: dict[tuple[str, str], Run] = {}
    for words, norm in ways.items():
        unfused[NCCL, f"copy, process group, {words}"] = functools.partial(through_group, norm)
        unfused[NCCL, f"process group in place, {words}"] = functools.partial(through_group_in_place, norm)
        unfused[OWN, f"sidelane, {words}"] = functools.partial(through_ours, norm)
        if on_gpu:
            unfused[SYMM_MEM, f"one_shot_all_reduce, {words}"] = functools.partial(through_torch, norm)
    unfused[OWN, OWN_METHOD] = functools.partial(call, method=UNFUSED)
    places = {"out": out, "residual_out": residual_out}
    return Case(
        "all_reduce_rms_norm",
        f"{tokens}x{hidden}",
        refill,
        expected,
        {words: functools.partial(norm, x) for words, norm in ways.items()},
        {
            "process group": lambda: dist.all_reduce(summed),
            "sidelane": lambda: comm.all_reduce(symmetric, output=total),
            **({"one_shot_all_reduce": one_shot} if on_gpu else {}),
        },
        unfused,
        {schedule: functools.partial(call, **places, schedule=schedule, method=FUSED) for schedule in norms.SCHEDULES},
        {AS_CALLED: Auto(functools.partial(call, **places), (power_of_two(tokens), hidden))},
    )


def _add_and_norm(
    added: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = added + residual
    return functional.rms_norm(total, weight.shape, weight, EPS), total
