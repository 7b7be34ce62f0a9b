"""Parameters that FSDP2 gathers straight into their memory, and others: between CPU processes and on GPUs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_models import CONFIG, ON_NCCL, STRAIGHT, build, mesh_of, on_nodes
from marks import long
from on_ranks import everyones, on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import sidelane
from sidelane import Config, fsdp
from sidelane.integrations import fsdp_calls, ledger
from sidelane.memory import storage


class CopiesOut(TorchDispatchMode):
    """Counts what FSDP2 copies out of gathered buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function is torch.ops.fsdp.split_with_sizes_copy.default
        return function(*args, **(kwargs or {}))


def whys() -> set[str]:
    """What the report says of FSDP2's gathers since the last time."""
    found = {row.why for row in sidelane.report().rows if row.operation == "fsdp all_gather"}
    ledger.reset()
    return found


class Mixture(nn.Module):
    """Frozen and tied parameters, one that most ranks have nothing of, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)
        self.other.weight = self.one.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.register_parameter("scale", nn.Parameter(torch.ones(1, 3)))
        # FSDP2 of torch before 2.13 shards no parameter of integers.
        whole = torch.int64 if torch.__version__ >= "2.13" else torch.float64
        self.register_parameter("counts", nn.Parameter(torch.arange(7, dtype=whole), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.one(x) + self.other(x)) * self.scale + self.counts.sum()


def extend(parameter: Any) -> None:
    """Let a parameter of one dimension say by itself what is gathered: its shard, padded."""
    local, rows = parameter._local_tensor, len(parameter)
    padding = local.new_zeros(-(-rows // parameter.device_mesh.size()) - len(local))

    def after(outputs: Any, _metadata: Any, _dtype: Any, *, out: torch.Tensor | None = None) -> Any:
        return (outputs[0][:rows].clone(), ()) if out is None else out.copy_(outputs[0][:rows])

    local.fsdp_pre_all_gather = lambda mesh: ((torch.cat((local, padding)),), None)
    local.fsdp_post_all_gather = after


@on_ranks(2, long(3))
@on_ranks(gpu=ON_NCCL, timeout_s=150)
def test_parameters_are_gathered_into_their_own_memory(group: dist.ProcessGroup) -> None:
    """Copies out, and what the report says, of each way to shard; values are those without Sidelane."""
    ledger.reset()
    mesh, told = mesh_of(group), {}
    ways: dict[str, Any] = {
        "mixture": lambda: fully_shard(Mixture(), mesh=mesh),
        "offloaded": lambda: fully_shard(Mixture(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "dimension 1": lambda: fully_shard(
            nn.Linear(2 * mesh.size(), 3), mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None
        ),
        "extension": lambda: fully_shard(Mixture(), mesh=mesh),
        "not asked for": lambda: fully_shard(Mixture(), mesh=mesh),
        "torch 2.11": lambda: fully_shard(Mixture(), mesh=mesh),
    }
    for name, make in ways.items():
        both = []
        for on in (False, True):
            torch.manual_seed(5)
            model = make()
            if name == "extension":
                extend(model.frozen.bias)
            asked, call = name != "not asked for", "no such call" if name == "torch 2.11" else storage.EXCHANGE
            with (
                mock.patch.object(storage, "EXCHANGE", call),
                fsdp.enable(model, config=CONFIG, zero_copy=asked) if on else contextlib.nullcontext(),
                CopiesOut() as copies,
            ):
                for step in range(3):
                    torch.manual_seed(step)
                    width = getattr(model, "in_features", 6)
                    with torch.inference_mode(step == 1):
                        loss = model(torch.randn(4, width)).square().sum()
                    if step != 1:
                        loss.backward()
            both.append([loss.detach(), *(p.grad.to_local() for p in model.parameters() if p.grad is not None)])
            if on:
                told[name] = copies.calls, whys()
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)
    assert told["mixture"] == told["offloaded"] == told["torch 2.11"] == (0, {STRAIGHT})
    reasons = {"dimension 1": "a parameter is sharded along dimension 1"}
    if mesh.device_type == "cpu":
        reasons |= {
            "extension": "a parameter has an extension of its own for gathers",
            "not asked for": "not asked for",
        }
    for name, reason in reasons.items():
        calls, why = told[name]
        assert calls > 0 and why == {f"copied out: {reason}"}


def mapped() -> int:
    """Bytes of Sidelane's shared memory that this process has, of all ranks."""
    return sum(
        int(high, 16) - int(low, 16)
        for low, _, high in (
            line.split()[0].partition("-")
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:sidelane" in line
        )
    )


@on_ranks(2, layers=6, layout=None)
@on_ranks(4, layers=4, layout=(0, 1, 1, 0))
@on_ranks(gpu=ON_NCCL, layers=8, layout=None)
def test_few_buffers_do_for_all_layers(group: dist.ProcessGroup, layers: int, layout: Sequence[int] | None) -> None:
    """Bytes of buffers of a model of many layers, with and without ``reshard_after_forward``.

    As the guide says: two of a gathered size, or all that stay gathered, and those of gradients: one, on GPUs two. On
    CPUs, what is reported is all that there is, but for a few pages by which ranks tell each other of calls.
    """
    ledger.reset()
    config, told, on_cpu = on_nodes(group, layout), {}, torch.get_default_device().type == "cpu"
    for reshard in (True, False):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))
        for layer in model:
            fully_shard(layer, mesh=mesh_of(group), reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh_of(group))
        gc.collect()
        before = mapped()
        with fsdp.enable(model, config=config) as enabled:
            for _ in range(3):
                model(torch.ones(2, 512)).sum().backward()
            memory, ranks = enabled.memory(), dist.get_world_size(group)
            told[reshard] = memory.used
            if config.virtual_nodes is not None:
                ranks //= len({config.virtual_nodes[rank] for rank in dist.get_process_group_ranks(group)})
            elsewhere = mapped() - before - ranks * (memory.reserved + memory.own)
            if on_cpu:
                assert 0 <= elsewhere < ranks << 20, (elsewhere, memory)
        assert all(why.endswith(STRAIGHT) for why in whys())
    layer = 512 * 512 * 4
    if on_cpu:
        assert told == {True: (2 + 1) * layer, False: (layers + 1) * layer}
    else:
        assert told[True] <= (2 + 2) * layer and told[False] <= (layers + 2) * layer, told


@on_ranks(2)
def test_buffers_are_free_when_fsdp2_frees_them_whoever_refers_to_them(group: dist.ProcessGroup) -> None:
    """Some ranks keep what was gathered, as threads may for a while; bytes in use, which are those of the others."""
    model, tokens, kept = build(mesh_of(group)), torch.full((2, 3), 4), []
    with fsdp.enable(model, config=Config(timeout_s=10)) as enabled:
        gather = next(iter(enabled._groups.values())).gather
        makes = gather.all_gather

        def keeping(outputs: Any, *arguments: Any, **options: Any) -> Any:
            if dist.get_rank(group) % 2:
                kept.append(outputs)
            return makes(outputs, *arguments, **options)

        gather.all_gather = keeping  # type: ignore[method-assign]
        for _ in range(4):
            model(tokens).square().sum().backward()
        assert len({*everyones(group, enabled.memory().used)}) == 1


@on_ranks(2)
def test_without_room_in_symmetric_memory_parameters_are_copied_out(group: dist.ProcessGroup) -> None:
    """Most layers of a model that stays gathered have no room in symmetric memory."""
    ledger.reset()
    got = []
    for on in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(5)))
        for layer in model:
            fully_shard(layer, mesh=mesh_of(group), reshard_after_forward=False)
        fully_shard(model, mesh=mesh_of(group))
        with fsdp.enable(model, config=Config(timeout_s=60, memory_bytes=4 << 20)) if on else contextlib.nullcontext():
            for _ in range(2):
                loss = model(torch.ones(2, 512)).square().sum()
                loss.backward()
        got.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    torch.testing.assert_close(*got)
    assert whys() == {STRAIGHT, "copied out: no symmetric memory is left for the parameters"}


@on_ranks(2)
def test_one_of_two_models_gives_it_back(group: dist.ProcessGroup) -> None:
    """Two models have it on; the one that keeps it does as before when the other one gives it back."""
    ledger.reset()
    first, second = build(mesh_of(group)), build(mesh_of(group))
    tokens = torch.full((2, 3), 4)
    wanted = first(tokens)
    with fsdp.enable(first, config=CONFIG):
        with fsdp.enable(second, config=CONFIG):
            assert torch.equal(first(tokens), wanted) and torch.equal(second(tokens), wanted)
        for model in (first, second):
            model(tokens).square().sum().backward()
    torch.testing.assert_close(*([p.grad.full_tensor() for p in each.parameters()] for each in (first, second)))
    assert whys() == {STRAIGHT}


@on_ranks(2)
@on_ranks(gpu=ON_NCCL)
def test_memory_that_is_in_use_is_given_back(group: dist.ProcessGroup) -> None:
    """Switched off between forward and backward: parameters are in use then, and autograd has saved them."""
    grads = []
    before = [getattr(_fsdp_param_group, name) for name in ("foreach_all_gather", "foreach_all_gather_copy_out")]
    for on in (False, True):
        model, tokens = build(mesh_of(group)), torch.full((2, 3), 4)
        if on:
            enabled = fsdp.enable(model, config=CONFIG)
        loss = model(tokens).square().sum()
        model.blocks[1].unshard(async_op=True)  # and this one is under way
        if on:
            enabled.disable()
            assert before == [
                getattr(_fsdp_param_group, name) for name in ("foreach_all_gather", "foreach_all_gather_copy_out")
            ]
            assert not any(
                "free_unsharded_param" in vars(p) for g in fsdp_calls.param_groups(model) for p in g.fsdp_params
            )
        loss.backward()
        model(tokens).square().sum().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(*grads)


@on_ranks(2)
def test_another_torch_is_left_alone(group: dist.ProcessGroup) -> None:
    """What FSDP2 of another torch would say: it looks otherwise."""
    ledger.reset()
    model, gather = build(mesh_of(group)), _fsdp_param_group.foreach_all_gather
    _fsdp_param_group.foreach_all_gather = lambda *args, **options: gather(*args, **options)
    try:
        with fsdp.enable(model, config=CONFIG):
            model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    finally:
        _fsdp_param_group.foreach_all_gather = gather
    assert whys() == {"copied out: something else has replaced foreach_all_gather"}
