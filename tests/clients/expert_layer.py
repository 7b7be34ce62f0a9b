"""A layer of experts that both servers' callers of DeepEP compute: tokens, experts and gates, and its result alone.

Numbers are such that sums are exact, and that the largest of 128 elements is 448, so that float8 is exact, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from client import BACKEND, RANK, RANKS, finish

EACH, K, MOST = 2, 2, 6
TOKENS = ((3, 5, 0, 6), (0, 0, 1, 2), (6, 6, 6, 6))
"""Tokens of each rank, in each step."""


def drawn(step: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's tokens, experts and gates."""
    draw = torch.Generator().manual_seed(10 * step + RANK)
    tokens = TOKENS[step][RANK % len(TOKENS[step])]
    x = torch.randint(-1, 3, (tokens, hidden), generator=draw).bfloat16()
    x[:, ::128] = 448
    chosen = torch.rand(tokens, RANKS * EACH, generator=draw).topk(K).indices
    gates = 2.0 ** -torch.randint(1, 3, (tokens, K), generator=draw).float()
    return x, chosen, gates


def factor(experts: torch.Tensor) -> torch.Tensor:
    """Return the number by which an expert multiplies."""
    return 2.0 ** (experts % 3)


def alone(step: int, hidden: int) -> torch.Tensor:
    """Return the result of this rank's tokens."""
    x, chosen, gates = drawn(step, hidden)
    return x * (gates * factor(chosen)).sum(1, keepdim=True).bfloat16()


def compare_steps(
    callers: Callable[[], Mapping[str, Any]], layer: Callable[[Any, int], torch.Tensor], hidden: int
) -> None:
    """Run all steps of a layer by each of the callers of DeepEP, or alone for ``gloo``, and finish the client."""
    values, rows, steps = [], [], range(len(TOKENS))
    if BACKEND == "gloo":
        finish(alone(step, hidden).double().sum().item() for _ in range(4) for step in steps)
        return
    for name, caller in callers().items():
        for step in steps:
            y = layer(caller, step)
            assert torch.equal(y, alone(step, hidden)), (name, step)
            values.append(y.double().sum().item())
        rows.append({"where": "sidelane", "operation": name, "why": "", "calls": len(TOKENS)})
    finish(values, rows)
