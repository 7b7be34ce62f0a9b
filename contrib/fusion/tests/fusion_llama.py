"""A Llama as public ones are written, under tensor parallelism by DTensor, for tests of the compiler pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from fused_ops import check_close, communicator
from fusion_cases import passing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from sidelane_fusion import Fusion

HIDDEN, INNER, HEADS, WORDS, LAYERS = 32, 64, 4, 48, 2


class Norm(nn.Module):
    """RMS norm in float32 of a model of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each(x).view(*x.shape[:-1], -1, HIDDEN // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v)]
        came = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(came.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.attention, self.second, self.mlp = Norm(), Attention(bias), Norm(), Mlp(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Llama(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, HIDDEN), nn.ModuleList(Layer(bias) for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def llama(mesh: DeviceMesh, *, sequence: bool, bias: bool, dtype: torch.dtype) -> Llama:
    """Return the model, cut by columns and rows, with ``sequence`` also spread by tokens between its products."""
    torch.manual_seed(5)
    model = Llama(bias).to(dtype)
    rows: Any = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, Any] = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"))
    plan = {name: ColwiseParallel() for name in plan} | {"attention.o": rows, "mlp.down": rows}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        norm = SequenceParallel(use_local_output=True)
        plan |= {"attention": whole, "mlp": whole, "first": norm, "second": norm}
        cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"layers.0": cut, "norm": norm, "head": head})
    parallelize_module(model, mesh, {f"layers.*.{name}": style for name, style in plan.items()})
    return model


def run(model: Llama, call: Any, words: torch.Tensor, *, trains: bool) -> list[torch.Tensor]:
    """Return what a call of the model gives, or its loss and gradients."""
    if not trains:
        with torch.no_grad():
            return [call(words)]
    model.zero_grad()
    loss = functional.cross_entropy(call(words).flatten(0, 1).float(), words.flatten())
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)]


def trained_llama(group: dist.ProcessGroup, inductor: bool, cases: list[tuple[Any, ...]]) -> list[dict[str, int]]:
    """Which operators the pass puts in in each case: shape of the words, options of the model and of the compiler."""
    found = []
    with communicator(group) as comm:
        for shape, trains, sequence, bias, dtype, dynamic in cases:
            torch._dynamo.reset()
            mesh = DeviceMesh.from_group(group, comm.device.type)
            model = llama(mesh, sequence=sequence, bias=bias, dtype=dtype)
            words = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(1)).to(comm.device)
            wanted = run(model, model, words, trains=trains)
            fusion = Fusion(comm, group)
            how: Any = {"options": passing(fusion)} if inductor else {"backend": fusion.backend}
            call = torch.compile(model, dynamic=dynamic, **how)
            for _ in range(2):
                for number, (one, other) in enumerate(zip(run(model, call, words, trains=trains), wanted, strict=True)):
                    if dtype == torch.float32:
                        check_close(one, other.double(), (shape, number))
                    else:
                        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
            found.append(dict(Counter(fusion.replaced)))
    return found
