"""Nano-batches: a tensor-parallel MLP whose batch is computed whole, or in two halves that take turns.

Every layer ends with a sum over the ranks, on which its next layer depends: with the whole batch nothing can hide it.

===============  =======================================================================================================
nccl             the whole batch
nccl, halves     two halves in turn (``sidelane.nano_batches``), their sums by the library
copies           the whole batch, by the communicator next to a computation
copies, halves   two halves in turn, their sums by the communicator
none             the whole batch, of which nothing is summed
===============  =======================================================================================================

Training has the backward pass, too, in which the same sums are made of gradients, and no optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from sidelane.c3.nano_batches import Started, begin_collective, nano_batches
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import Gang, Tiled, run_device
from sidelane_lab.model.gangs import engine_gangs, library_gangs, named_gangs
from sidelane_lab.model.gemm import gemm_kernel
from sidelane_lab.model.layer import COPY_SHARE
from sidelane_lab.model.training import BESIDE_COPIES
from sidelane_lab.pairs.workload import Gemm
from sidelane_lab.studies.clients.cases import MODELS, TINY, ClientModel
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared
from sidelane_lab.studies.steps import NONE

TRAINING = ", training"
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

HALVES = 2

Sum = Callable[[torch.Tensor, torch.Tensor], Started]
"""Start of a sum over the ranks: a buffer for what is added and for the result, and a tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class MlpSize:
    """Layers of a model, without attention and gates."""

    model: ClientModel
    tokens: int
    layers: int = 8
    training: bool = False

    @property
    def sums(self) -> int:
        """Number of sums of the whole batch in a step."""
        return self.layers * (2 if self.training else 1)


class ShardedMlp:
    """A rank's hidden features of every layer, and one input that all ranks have."""

    def __init__(self, size: MlpSize, device: torch.device, dtype: torch.dtype) -> None:
        model, ranks = size.model, dist.get_world_size()
        if model.feed % ranks:
            raise ValueError(f"mlp: ranks (value={ranks}, allowed=divisors of {model.feed} hidden features)")
        whole, own = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))

        def weights(*shape: int, fan_in: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=dtype, device=device).normal_(std=fan_in**-0.5, generator=own)
            return made.requires_grad_(size.training)

        features = model.feed // ranks
        self.layers = [
            (
                weights(features, model.hidden, fan_in=model.hidden),
                weights(model.hidden, features, fan_in=model.feed),
            )
            for _ in range(size.layers)
        ]
        self.x = torch.empty(size.tokens, model.hidden, dtype=dtype, device=device).normal_(generator=whole)
        self.share = 1 / ranks  # of the loss, since gradients are summed over the ranks, too

    def forward(self, x: torch.Tensor, buffer: torch.Tensor, start: Sum | None) -> Generator[Any, Any, torch.Tensor]:
        """Run the layers of a part of the batch; each sum is yielded."""
        for up, down in self.layers:
            part = functional.linear(functional.gelu(functional.linear(x, up)), down)
            if start is not None:
                part = yield begin_collective(functools.partial(start, buffer), part)
            x = x + part
        return x

    def step(self, start: Sum | None, parts: int, buffer: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Return the results of all parts, in training with the gradients of the first layer behind them."""
        with torch.set_grad_enabled(training):
            cut = zip(self.x.chunk(parts), buffer.chunk(parts, dim=1), strict=True)
            results = nano_batches(self.forward(x, room, start) for x, room in cut)
            if not training:
                return torch.cat(results)
            weights = [weight for layer in self.layers for weight in layer]
            loss = torch.stack([result.float().square().sum() for result in results]).sum() * self.share
            gradients = torch.autograd.grad(loss / self.x.numel(), weights)
        normed = [each.flatten() / each.norm() for each in (torch.cat(results).detach(), *gradients[:2])]
        return torch.cat(normed)


def prepare(size: MlpSize, group: dist.ProcessGroup, comm: Communicator, device: torch.device) -> Prepared:
    """Make the steps of one size. Collective."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    mlp = ShardedMlp(size, device, dtype)
    shape = 2, *mlp.x.shape  # what a rank adds, and the sums
    ordinary, symmetric = torch.empty(shape, dtype=dtype, device=device), comm.empty(*shape, dtype=dtype)

    def by_library(buffer: torch.Tensor, part: torch.Tensor) -> Started:
        buffer[1].copy_(part)
        return buffer[1], dist.all_reduce(buffer[1], group=group, async_op=True)

    def by_sidelane(buffer: torch.Tensor, part: torch.Tensor) -> Started:
        buffer[0].copy_(part)
        return buffer[1], comm.all_reduce(buffer[0], output=buffer[1], async_op=True, beside="compute")

    ways: dict[str, tuple[Sum | None, int, torch.Tensor]] = {
        "nccl": (by_library, 1, ordinary),
        "nccl, halves": (by_library, HALVES, ordinary),
        "copies": (by_sidelane, 1, symmetric),
        "copies, halves": (by_sidelane, HALVES, symmetric),
        NONE: (None, 1, ordinary),
    }
    return Prepared(
        steps={way: functools.partial(mlp.step, *parts, training=size.training) for way, parts in ways.items()},
        tolerance=TOLERANCES[dtype],
        units=size.tokens,
        facts={
            "layers": size.layers,
            "hidden": size.model.hidden,
            "intermediate": size.model.feed,
            "summed_bytes": size.sums * mlp.x.numel() * dtype.itemsize,
        },
    )


def predicted_us(size: MlpSize, machine: Machine) -> Mapping[str, float]:
    """See :class:`EndToEndWorkload`. GEMMs follow each other, a sum begins when its part has been copied, and the next
    layer of the part waits for it.
    """
    beside = machine.with_value("interference.copies", max(BESIDE_COPIES, float(machine.interference.copies)))
    alone_us = _step_us(size, machine, 1, None)
    movers: dict[str, Callable[..., tuple[Gang, ...]]] = {"nccl": library_gangs, "copies": engine_gangs}
    ways = {way + words: (of, parts) for way, of in movers.items() for words, parts in (("", 1), (", halves", HALVES))}
    return {way: _step_us(size, beside, parts, of) - alone_us for way, (of, parts) in ways.items()}


def _step_us(size: MlpSize, machine: Machine, parts: int, of: Callable[..., tuple[Gang, ...]] | None) -> float:
    tokens, features = size.tokens // parts, size.model.feed // machine.gpus
    gemms = Gemm(tokens, features, size.model.hidden), Gemm(tokens, size.model.hidden, features)
    nbytes, blocks = tokens * size.model.hidden * torch.bfloat16.itemsize, 64 * int(machine.gpu.units)
    gangs = () if of is None else of(machine, Kind.ALL_REDUCE, nbytes)
    kernels: list[Tiled | Gang] = []
    for turn in range(size.sums * parts):
        ended = kernels[-1 - len(gangs)].name if kernels else ""  # of the other part
        summed = f"sum {turn - parts}" if gangs and turn >= parts else ""
        after = tuple(filter(None, (ended, summed)))
        # A backward layer has gradients of inputs and of weights.
        for number, gemm in enumerate(gemms * (2 if turn >= size.layers * parts else 1)):
            kernels.append(dataclasses.replace(gemm_kernel(machine, gemm, name=f"gemm {turn} {number}"), after=after))
            after = (kernels[-1].name,)
        if gangs:
            kernels.append(Tiled(f"copy {turn}", blocks, 0.0, 2 * nbytes / COPY_SHARE / blocks, after=after))
            begun = (kernels[-1].name, *((f"sum {turn - 1}",) if turn else ()))
            first = bool(machine.interference.kernels)  # the library's kernels run beside GEMMs there
            kernels += [dataclasses.replace(one, priority=first) for one in named_gangs(gangs, f"sum {turn}", begun)]
    return run_device(machine, kernels).time_us


_LLAMA = MODELS["llama-3.1-8b"]
WORKLOAD = EndToEndWorkload(
    "mlp",
    "tokens",
    {
        TINY: MlpSize(MODELS[TINY], 8, 2),
        TINY + TRAINING: MlpSize(MODELS[TINY], 8, 2, training=True),
        **{f"{tokens} tokens": MlpSize(_LLAMA, tokens) for tokens in (2048, 8192, 16384)},
        **{f"{tokens} tokens{TRAINING}": MlpSize(_LLAMA, tokens, training=True) for tokens in (8192,)},
    },
    prepare,
    predicted_us,
)
