"""One training step on a rank, and what it came to: loss, gradient norm, gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.model.transformer import Transformer
from sidelane_lab.studies.fsdp.cases import StepCase

EPSILON = 1e-5
ROTARY_BASE = 500_000.0


class Layer(nn.Module):
    """Attention with rotary positions, and a gated layer; both behind a norm. Seven matrices, as they are published."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        hidden, head = model.hidden, model.hidden // model.heads
        self.head = head
        self.norm, self.feed_norm = nn.RMSNorm(hidden, eps=EPSILON), nn.RMSNorm(hidden, eps=EPSILON)
        self.q = nn.Linear(hidden, model.heads * head, bias=False)
        self.k = nn.Linear(hidden, model.kv_heads * head, bias=False)
        self.v = nn.Linear(hidden, model.kv_heads * head, bias=False)
        self.out = nn.Linear(model.heads * head, hidden, bias=False)
        self.gate = nn.Linear(hidden, model.feed, bias=False)
        self.up = nn.Linear(hidden, model.feed, bias=False)
        self.down = nn.Linear(model.feed, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x``: [B, S, H]; ``cos``, ``sin``: [S, D]."""
        batch, seq, _ = x.shape
        normed = self.norm(x)
        q, k, v = (
            one(normed).view(batch, seq, -1, self.head).transpose(1, 2)  # [B, Q or K, S, D]
            for one in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        normed = self.feed_norm(x)
        fed: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + fed


class Layers(nn.Module):
    """Layers one behind the other. The root of what FSDP2 shards, without a parameter of its own."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Run all layers; see :meth:`Layer.forward`."""
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def sharded(model: Transformer, mesh: DeviceMesh, reduce_dtype: torch.dtype, device: torch.device, seed: int) -> Layers:
    """The layers on a rank: float32 shards of normal numbers, computed with in bfloat16.

    Args:
        model: sizes.
        mesh: of the ranks that share the parameters.
        reduce_dtype: in which gradients are added.
        device: of this rank.
        seed: of all ranks.
    """
    with torch.device("meta"):
        made = Layers(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in made.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(made, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    made.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + dist.get_rank())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            assert isinstance(parameter, DTensor)
            mean, spread = (1.0, 0.1) if "norm" in name else (0.0, parameter.shape[-1] ** -0.5)
            parameter.to_local().normal_(mean, spread, generator=generator)
    return made


def rotary(seq: int, head: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the positions, [S, D] each, in bfloat16."""
    speeds = ROTARY_BASE ** (-torch.arange(0, head, 2, device=device) / head)
    angles = torch.arange(seq, device=device)[:, None] * speeds
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().bfloat16(), both.sin().bfloat16()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


TOLERANCE = 1e-2
"""Largest difference of loss, norm and gradients: bfloat16 is added in another order, and attention adds in any."""

LEARNING_RATE = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of a step, the same on every rank.

    Attributes:
        loss: mean over ranks.
        grad_norm: of the whole gradient.
    """

    loss: float
    grad_norm: float

    @classmethod
    def of(cls, losses: Sequence[float], squares: Sequence[float]) -> StepOutcome:
        """Return the outcome of every rank's :meth:`Stepper.sums`."""
        return cls(sum(losses) / len(losses), math.sqrt(sum(squares)))

    def differs(self, wanted: StepOutcome) -> str | None:
        """Say what is not as in another step, or None."""
        for name in ("loss", "grad_norm"):
            got, other = getattr(self, name), getattr(wanted, name)
            # A loss is a sum of both signs, of a size of 1: it may come to nearly nothing.
            if not abs(got - other) <= TOLERANCE * max(1.0 if name == "loss" else 0.0, abs(other)):
                return f"{name} {got:.6g} differs from {other:.6g}"
        return None


class Stepper:
    """A model of a case with its data.

    The loss is a sum with random weights: unlike a mean of squares, it is another one with other parameters of the same
    distribution, so that a parameter in the wrong place shows.

    Args:
        case: sizes.
        rank: of this process.
        meter: of all ranks.
        reduce_dtype: in which gradients are added.
        optimizer: a step ends with AdamW's.
        seed: of parameters and data.
    """

    def __init__(
        self, case: StepCase, rank: Rank, meter: Meter, reduce_dtype: torch.dtype, *, optimizer: bool, seed: int
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._rank, self._meter, self._case = rank, meter, case
        mesh = DeviceMesh.from_group(world, rank.device.type)
        self.model = sharded(case.model, mesh, reduce_dtype, rank.device, seed)
        self._parameters = list(self.model.parameters())
        self._cos, self._sin = rotary(case.seq, case.model.hidden // case.model.heads, rank.device)
        self.refill(seed)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE) if optimizer else None
        self._loss = torch.zeros((), device=rank.device)

    def refill(self, seed: int) -> None:
        """Fresh data, other ones on each rank."""
        generator = torch.Generator(self._rank.device).manual_seed(seed * 1_000_003 + 500 + self._rank.rank)
        shape = (self._case.batch, self._case.seq, self._case.model.hidden)

        def normal() -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=self._rank.device)
            return made.normal_(generator=generator)

        # An embedding in front of the layers would want this gradient, too; and FSDP2 reduces the gradients of a layer
        # whose input wants none at the very end.
        self._x = normal().requires_grad_()
        self._weights = normal() / math.sqrt(math.prod(shape))

    def step(self, *, with_optimizer: bool = True) -> None:
        """Forward, backward and, if there is one, the optimizer; queued on the current stream."""
        self.forget()
        self._loss = (self.model(self._x, self._cos, self._sin) * self._weights).sum(dtype=torch.float32)
        self._loss.backward()
        if self._optimizer is not None and with_optimizer:
            self._optimizer.step()

    def forget(self) -> None:
        """Let go of gradients and of what the last step has saved."""
        self._loss = self._loss.detach()
        self._x.grad = None
        for parameter in self._parameters:
            parameter.grad = None

    def tried(self, what: str) -> None:
        """A step without the optimizer, to its end."""
        self.step(with_optimizer=False)
        self._meter.finish(what)

    def measured(self, what: str) -> float | None:
        """Make a step as :meth:`tried` does; return its MB next to what implementations keep; None on CPUs."""
        if self._rank.device.type == "cpu":
            self.tried(what)
            return None
        self.forget()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.tried(what)
        state = sum(_local(one).nbytes for one in self._parameters) * (1 if self._optimizer is None else 3)
        return (state + torch.cuda.max_memory_allocated() - before) / 1e6

    @torch.no_grad()
    def sums(self) -> tuple[float, float]:
        """Return this rank's loss of the last step, and the sum of squares of its gradients."""
        return float(self._loss), sum(float(gradient.float().square().sum()) for gradient in self._gradients())

    @torch.no_grad()
    def kept(self) -> list[torch.Tensor]:
        """Return copies of this rank's gradients of the last step."""
        return [gradient.to(torch.bfloat16, copy=True) for gradient in self._gradients()]

    @torch.no_grad()
    def apart(self, kept: Sequence[torch.Tensor]) -> tuple[float, float]:
        """Return the sum of squares of this rank's gradients less those that were kept, and of these."""
        pairs = list(zip(self._gradients(), kept, strict=True))
        apart = sum(float((one - other.to(one.dtype)).float().square().sum()) for one, other in pairs)
        return apart, sum(float(other.float().square().sum()) for _, other in pairs)

    @torch.no_grad()
    def move_rows(self, by: int) -> None:
        """Move the rows of every shard on: other parameters, and as they were after the opposite."""
        for parameter in self._parameters:
            local = _local(parameter)
            local.copy_(local.roll(by, 0))

    def _gradients(self) -> list[torch.Tensor]:
        found = []
        for parameter in self._parameters:
            assert parameter.grad is not None
            found.append(_local(parameter.grad))
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
