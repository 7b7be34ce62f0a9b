"""Cases that ranks execute in ``test_device_attention``."""

from __future__ import annotations

import functools
from typing import Any

import attention_cases
import torch
import torch.distributed as dist
from device_context import Context
from sweeps import communicator

from sidelane import Communicator, ops


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too, on a stream that is not the legacy default one."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(attention_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


SHAPES = (
    attention_cases.Shape(1, 4096, 8, 2, 128, is_causal=True, dtype=torch.bfloat16),
    attention_cases.Shape(2, 1021, 8, 8, 64, is_causal=True, dtype=torch.float16),
    attention_cases.Shape(1, 2048, 8, 8, 128, dtype=torch.bfloat16),
)


def captured(context: Context, replays: int) -> int:
    """Forward and backward eager, captured and replayed, with fresh numbers each time."""
    checked = 0
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()), communicator(dist.group.WORLD) as comm:
            for shape in SHAPES:
                own = ops.sequence_positions(shape.positions, comm.world_size, comm.rank)
                q, k, v, grad = (tensor[:, own].clone() for tensor in shape.whole(0))
                for tensor in (q, k, v):
                    tensor.requires_grad_()
                step = functools.partial(_step, comm, shape, q, k, v, grad)
                for _ in range(2):
                    step()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    results = step()
                for turn in range(replays):
                    whole = shape.whole(turn + 1)
                    with torch.no_grad():
                        for tensor, part in zip((q, k, v, grad), whole, strict=True):
                            tensor.copy_(part[:, own])
                    if turn % 2:
                        found = step()
                    else:
                        graph.replay()
                        found = results
                    for name, one, right in zip(("result", *"qkv"), found, shape.right(whole), strict=True):
                        assert attention_cases.is_close(one, right, own), (shape, name, turn)
                    checked += 1
    finally:
        torch.set_default_device(None)
    return checked


def _step(
    comm: Communicator,
    shape: attention_cases.Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the result, and the gradients of q, k and v."""
    options: dict[str, Any] = {"is_causal": shape.is_causal, "sequence_length": shape.positions}
    found = ops.sequence_parallel_attention(comm, q, k, v, **options)
    return [found.detach(), *torch.autograd.grad(found, (q, k, v), grad)]
