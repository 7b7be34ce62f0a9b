"""Megatron-core's own callers of DeepEP, forward and backward, with Sidelane as ``deep_ep``.

``gloo`` computes the layer of experts on each rank alone, without any exchange.
"""

from __future__ import annotations

import os
import sys

from client import BACKEND, GPUS, RANK, RANKS, finish, sums

if not GPUS:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from expert_layer import EACH, TOKENS, drawn, factor

HIDDEN = 256


def exchanged(x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, is_async: bool) -> torch.Tensor:
    """Let Megatron-core send tokens, multiply by the factors of the experts, and let it combine."""
    from megatron.core.transformer.moe.fused_a2a import fused_combine, fused_dispatch

    group, options = dist.group.WORLD, {"async_finish": is_async, "allocate_on_comm_stream": is_async}
    rows, there, weights, counts, handle = fused_dispatch(x, chosen, gates, RANKS * EACH, group, **options)
    assert counts.tolist() == [int((there == one).sum()) for one in range(EACH)]
    factors = torch.where(there >= 0, weights * factor(there + RANK * EACH), 0)
    return fused_combine(rows * factors.sum(1, keepdim=True).bfloat16(), group, handle, **options)[0]


def main() -> None:
    dist.init_process_group("nccl" if GPUS else "gloo")
    if BACKEND != "gloo":
        from sidelane import deep_ep

        deep_ep.install()
    values: list[float] = []
    for is_async in (False, True):
        for step in range(len(TOKENS)):
            x, chosen, gates = drawn(step, HIDDEN)
            x.requires_grad_()
            gates.requires_grad_()
            alone = x * (gates * factor(chosen)).sum(1, keepdim=True).bfloat16()
            y = alone if BACKEND == "gloo" else exchanged(x, chosen, gates, is_async)
            assert torch.equal(y, alone), step
            y.sum().backward()
            values += sums(part for part in (y, x.grad, gates.grad) if part is not None)
    row = {"where": "sidelane", "operation": "fused_dispatch, fused_combine", "why": "", "calls": 2 * len(TOKENS)}
    finish(values, [row] if BACKEND != "gloo" else [])


if __name__ == "__main__":
    sys.exit(main())
