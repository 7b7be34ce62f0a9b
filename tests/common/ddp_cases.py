"""Models that DDP trains with Sidelane and without: the same on CPU processes and GPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sidelane
from sidelane import Config, ddp

CONFIG = Config(timeout_s=60)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views of buckets": {"gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 100, "static_graph": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "unused": {"find_unused_parameters": True},
    "frozen": {"frozen": True},
    "autocast": {"autocast": True},
}


class Layers(nn.Sequential):
    """Layers of which one is not always used, where that is asked for."""

    def __init__(self, skips: bool, autocast: bool) -> None:
        super().__init__(nn.Linear(17, 131), nn.GELU(), nn.Linear(131, 131), nn.GELU(), nn.Linear(131, 5))
        self.skips, self.autocast, self.calls = skips, autocast, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            for number, layer in enumerate(self):
                if not (self.skips and number == 2 and self.calls % 3 == 2):
                    x = layer(x)
        return x


def build(
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    autocast: bool = False,
    **options: Any,
) -> DistributedDataParallel:
    """The same model on every rank; several buckets, of sizes that nothing divides."""
    torch.manual_seed(3)
    layers = Layers(options.get("find_unused_parameters", False), autocast).to(dtype)
    if frozen:
        layers[0].requires_grad_(False)
    return DistributedDataParallel(layers, process_group=group, **{"bucket_cap_mb": 0.02} | options)


def train(model: DistributedDataParallel, group: dist.ProcessGroup, steps: int) -> Iterator[torch.Tensor]:
    """The loss of every step, of which every other one accumulates, then the gradients of the last one."""
    optimizer, dtype = torch.optim.SGD(model.parameters(), lr=0.1), next(model.parameters()).dtype
    for step in range(steps):
        for part in range(1 + step % 2):
            torch.manual_seed(100 * step + 10 * part + dist.get_rank(group))
            with model.no_sync() if step % 2 > part else _nothing():
                loss = model(torch.randn(6, 17).to(dtype)).square().mean()
                loss.backward()
            yield loss.detach()
        if step + 1 < steps:
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            yield parameter.grad


def as_without(group: dist.ProcessGroup, steps: int) -> dict[str, int]:
    """Loss and gradients, with and without; buckets averaged."""
    told = {}
    for name, options in OPTIONS.items():
        wanted = [each.clone() for each in train(build(group, **options), group, steps)]
        model = build(group, **options)
        with ddp.enable(model, config=CONFIG) as enabled:
            got = [each.clone() for each in train(model, group, steps)]
            told[name] = enabled.calls
        rtol, atol = (5e-2, 1e-2) if name in ("bfloat16", "autocast") else (1e-5, 1e-7)
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            torch.testing.assert_close(
                one, other, rtol=rtol, atol=atol, msg=functools.partial(_told, f"{name} {number}")
            )
        for one in got[-4:]:  # the same on all ranks, to the bit
            other = one.clone()
            dist.broadcast(other, dist.get_global_rank(group, 0), group=group)
            assert torch.equal(one, other), name
    return told


def curves(group: dist.ProcessGroup, steps: int) -> tuple[int, float, float]:
    """Losses of all steps and parameters behind them, with and without; buckets, the first loss and the last."""
    both, calls = [], 0
    for on in (False, True):
        model = build(group)
        generator = torch.Generator(device=torch.get_default_device()).manual_seed(dist.get_rank(group))
        given, wanted = torch.randn(6, 17, generator=generator), torch.randn(6, 5, generator=generator)
        optimizer, told = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        with ddp.enable(model, config=CONFIG) if on else contextlib.nullcontext() as enabled:
            for _ in range(steps):
                loss = (model(given) - wanted).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                told.append(loss.detach())
            calls = enabled.calls if enabled is not None else 0
        both.append((torch.stack(told), *(parameter.detach() for parameter in model.parameters())))
    # Two values have one sum; of more the order of the ranks is ours, and the rounding goes on from step to step.
    close = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size(group) == 2 else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, **close)
    losses = both[1][0].tolist()
    return calls, losses[0], losses[-1]


def elsewhere(group: dist.ProcessGroup) -> dict[str, tuple[int, set[tuple[str, str]]]]:
    """What the group's own backend gets: calls of Sidelane, and what the report says."""
    told = {}
    sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
    for name, model, given in (
        ("float64", nn.Linear(4, 3, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)),
        ("sparse", sparse, torch.tensor([[1, 2], [3, 1]])),
    ):
        sidelane.integrations.ledger.reset()
        wrapped = DistributedDataParallel(model, process_group=group)
        with ddp.enable(wrapped, config=CONFIG) as enabled:
            for _ in range(2):
                wrapped(given * (1 + dist.get_rank(group))).sum().backward()
            rows = [row for row in sidelane.report().rows if row.operation == ddp.OPERATION]
            told[name] = enabled.calls, {(row.where, row.why) for row in rows}
    return told


class CountedStream:
    """A side stream of the hook, as on GPUs: it runs jobs at once, and notes what is waited for."""

    def __init__(self) -> None:
        self.runs, self.waiting, self.joins = 0, 0, 0

    handle = 0

    def follow(self) -> None:
        """Compiled code makes no calls on CPU ranks."""

    def run(self, job: Callable[[], Any]) -> Any:
        self.runs, self.waiting = self.runs + 1, self.waiting + 1
        return job()

    def join(self) -> None:
        self.joins, self.waiting = self.joins + 1, 0


def waited_for(group: dist.ProcessGroup) -> list[tuple[int, int, int]]:
    """Averages on the side stream, those that nobody waits for behind backward, and waits, of three steps; whoever
    averages the last bucket."""
    told = []
    sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
    dense = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    for model in (sparse, dense):
        wrapped = DistributedDataParallel(model, process_group=group)
        with ddp.enable(wrapped, config=CONFIG) as enabled:
            side = CountedStream()
            enabled._side = side  # type: ignore[assignment]
            for _ in range(3):
                wrapped(torch.tensor([[1, 2], [3, dist.get_rank(group)]])).sum().backward()
                assert side.waiting == 0, "DDP reads averages behind backward"
            told.append((side.runs, side.waiting, side.joins))
    return told


def on_and_off(group: dist.ProcessGroup) -> list[str]:
    """What is refused; and a model that trains on after it is switched off."""
    wanted = list(train(build(group), group, 4))
    model, told = build(group), []
    enabled = ddp.enable(model, config=CONFIG)
    for wrong in (model, nn.Linear(2, 2)):
        try:
            ddp.enable(wrong, config=CONFIG)  # type: ignore[arg-type]
        except ValueError as error:
            told.append(str(error))
    losses = []
    for number, loss in enumerate(train(model, group, 4)):
        losses.append(loss)
        if number == 1:
            enabled.disable()
            enabled.disable()
    assert enabled.memory().reserved == 0
    torch.testing.assert_close(losses, wanted)
    return told


JOINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "views of buckets": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def joined(group: dist.ProcessGroup) -> list[str]:
    """Inputs that end earlier on some ranks: parameters behind them, with and without; and what is refused."""
    rank, told = dist.get_rank(group), []

    def made(options: dict[str, Any]) -> DistributedDataParallel:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(17, 41), nn.GELU(), nn.Linear(41, 5))
        if "find_unused_parameters" in options:
            layers.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.001, **options)

    def trained(on: bool, steps: int, options: dict[str, Any], **join: Any) -> list[torch.Tensor]:
        models = [made(options) for _ in range(2)]
        with contextlib.ExitStack() as stack:
            for model in models if on else ():
                stack.enter_context(ddp.enable(model, config=CONFIG))
            stack.enter_context(Join(models, **join))
            for step in range(steps):
                for model in models:
                    torch.manual_seed(10 * step + rank)
                    model(torch.randn(6, 17)).square().mean().backward()
                    torch.optim.SGD(model.parameters(), lr=0.1).step()
                    model.zero_grad()
        return [parameter.detach() for model in models for parameter in model.parameters()]

    for name, options in JOINED.items():
        both = [trained(on, 1 + rank, options) for on in (False, True)]
        torch.testing.assert_close(*both, rtol=0.0, atol=0.0, msg=functools.partial(_told, name))
    for steps in (2, 2 * rank):  # the second time one rank has no input at all
        try:
            trained(True, steps, {}, divide_by_initial_world_size=False)
        except ValueError as error:
            told.append(str(error))
    trained(True, 2, {}, divide_by_initial_world_size=False, enable=False)
    return told


def comes_to_nothing(group: dist.ProcessGroup) -> None:
    """What fails in the middle leaves the model without a hook, and the other way round."""
    model = build(group)
    with mock.patch.object(ddp, "Communicator", side_effect=KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
        ddp.enable(model, config=CONFIG)
        raise AssertionError("it is on")
    with ddp.enable(model, config=CONFIG) as enabled:
        list(train(model, group, 1))
        assert enabled.calls > 0
    model = build(group)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with contextlib.suppress(RuntimeError):
        ddp.enable(model, config=CONFIG)
        raise AssertionError("it has a hook")
    assert not model._comm_hooks
    list(train(model, group, 1))


def _nothing() -> Any:
    return torch.enable_grad()


def _told(where: str, text: str) -> str:
    return f"{where}: {text}"
