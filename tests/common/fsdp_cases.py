"""Models that FSDP2 trains with Sidelane and without: the same on CPU processes and GPUs."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from sidelane import Communicator, Config, PeerError, fsdp
from sidelane.integrations import direct_gather, fsdp_group

CONFIG = Config(timeout_s=60)


class Block(nn.Module):
    """Two layers and a norm, of sizes that nothing divides."""

    def __init__(self, width: int, *, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width, bias=False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, width)
        self.blocks = nn.ModuleList(Block(width, recompute=recompute) for _ in range(layers))
        self.out = nn.Linear(width, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def build(mesh: DeviceMesh, *, recompute: bool = False, **options: Any) -> Model:
    """The same model on every rank, with a shard of it on each."""
    torch.manual_seed(7)
    model = Model(11, 3, recompute=recompute)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: Model, group: dist.ProcessGroup, steps: int, *, accumulate: int = 1) -> Iterator[torch.Tensor]:
    """The loss of every step, then the gradients of the last one, whole."""
    rank, generator = dist.get_rank(group), torch.Generator(device=torch.get_default_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for part in range(accumulate):
            generator.manual_seed(1000 * step + 10 * part + rank)
            tokens = torch.randint(0, 37, (4, 9), generator=generator)
            model.set_requires_gradient_sync(part == accumulate - 1)  # type: ignore[attr-defined]
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1).flatten())
            loss.backward()
            yield loss.detach()
        if step + 1 < steps:
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad.full_tensor()


OPTIONS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bfloat16 sums": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "recomputed": {"recompute": True},
}


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, torch.get_default_device().type)


def as_without(group: dist.ProcessGroup, steps: int) -> dict[str, tuple[int, int, dict[str, int]]]:
    """Loss and gradients, with and without; collectives made, bytes reserved, and what went elsewhere."""
    told = {}
    mesh, two = mesh_of(group), dist.get_world_size(group) == 2
    for name, options in OPTIONS.items():
        if not two and name not in ("resharded", "mixed precision"):
            continue
        for accumulate in (1, 2) if not options else (1,):
            wanted = list(train(build(mesh, **options), group, steps, accumulate=accumulate))
            model = build(mesh, **options)
            with fsdp.enable(model, config=CONFIG) as enabled:
                got = list(train(model, group, steps, accumulate=accumulate))
                told[name] = (
                    enabled.calls,
                    enabled.memory().reserved,
                    dict(enabled.elsewhere),
                )
            coarse = "bfloat16" in name or "mixed" in name
            for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
                # Two values have one sum; of more the order of the ranks is ours, and rounds otherwise.
                exact = two and not coarse
                rtol, atol = (0.0, 0.0) if exact else (2e-2, 2e-3) if coarse else (1e-4, 1e-6)
                where = f"{name} {number}"
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=functools.partial(_told, where))
    return told


def curves(group: dist.ProcessGroup, steps: int) -> tuple[int, float, float]:
    """Losses of all steps and parameters behind them, with and without; calls, the first loss and the last."""
    mesh, both, calls = mesh_of(group), [], 0
    for on in (False, True):
        torch.manual_seed(5)
        model: Any = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        generator = torch.Generator(device=torch.get_default_device()).manual_seed(dist.get_rank(group))
        given, wanted = torch.randn(6, 7, generator=generator), torch.randn(6, 5, generator=generator)
        optimizer, told = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        with fsdp.enable(model, config=CONFIG) if on else contextlib.nullcontext() as enabled:
            for _ in range(steps):
                loss = (model(given) - wanted).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                told.append(loss.detach())
            if enabled is not None:
                assert not enabled.elsewhere
                calls = enabled.calls
        both.append((torch.stack(told), *(parameter.full_tensor().detach() for parameter in model.parameters())))
    # Two values have one sum; of more the order of the ranks is ours, and the rounding goes on from step to step.
    close = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size(group) == 2 else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, **close)
    losses = both[1][0].tolist()
    return calls, losses[0], losses[-1]


def _on_all(method: str, *arguments: Any) -> Callable[[Model], None]:
    """A switch of FSDP2 that every module has by itself, or for all below it."""

    def switch(model: Model) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, method)(*arguments)

    return switch


def _keep(model: Any) -> None:
    """Parameters stay gathered between the parts of a step."""
    told = model.set_requires_gradient_sync

    def tell(is_last: bool) -> None:
        told(is_last)
        model.set_reshard_after_backward(is_last)

    model.set_requires_gradient_sync = tell


def _separate(model: Any) -> None:
    """A group for gradients. torch names it by how many groups a rank has, and ranks of a pool have more and fewer."""
    name = f"gradients:{next(_numbers)}"
    with mock.patch.object(distributed_c10d, "_process_group_name", return_value=name):
        model.set_separate_reduce_scatter_group(True)


_numbers = itertools.count()


def _compile(model: Model) -> None:
    model.blocks[0].compile(backend="aot_eager")


SWITCHES: dict[str, tuple[dict[str, Any], Callable[[Model], None], set[str]]] = {
    "sums": ({}, _on_all("set_force_sum_reduction_for_comms", True), {"sum"}),
    "a factor that is the ranks": ({}, _on_all("set_gradient_divide_factor", 2.0), {"avg"}),
    "float16": ({"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}, lambda model: None, {"sum"}),
    "kept after backward": ({}, _keep, {"avg"}),
    "asynchronous": ({}, _on_all("_set_unshard_async_op", True), {"avg"}),
    "a group for gradients": ({}, _separate, {"avg"}),
    "compiled": ({}, _compile, {"avg"}),
}
"""Options, what is switched, and the operations of its reductions, for two ranks."""


def switched(group: dist.ProcessGroup) -> dict[str, int]:
    """What else FSDP2 can be told: loss and gradients, with and without; collectives made."""
    told, mesh = {}, mesh_of(group)
    for name, (options, switch, operations) in SWITCHES.items():
        if not hasattr(FSDPModule, "set_separate_reduce_scatter_group") and "group" in name:
            continue  # torch before 2.13
        both = []
        for on in (False, True):
            model = build(mesh, **options)
            if on or switch is not _compile:
                switch(model)
            with fsdp.enable(model, config=CONFIG) if on else contextlib.nullcontext() as enabled:
                if enabled is not None:
                    scatter: Any = next(iter(enabled._groups.values())).scatter
                    scatter.reduce_scatter = mock.Mock(wraps=scatter.reduce_scatter)
                both.append(list(train(model, group, 1, accumulate=2)))
                if enabled is not None:
                    assert not enabled.elsewhere, name
                    assert {call.kwargs["op"] for call in scatter.reduce_scatter.call_args_list} == operations, name
                    told[name] = enabled.calls
        coarse = {"rtol": 2e-2, "atol": 2e-3} if "float16" in name else {}
        for number, (one, other) in enumerate(zip(*both, strict=True)):
            torch.testing.assert_close(one, other, **coarse, msg=functools.partial(_told, f"{name} {number}"))
    return told


def _told(where: str, text: str) -> str:
    return f"{where}: {text}"


def prefetched(group: dist.ProcessGroup, seed: int) -> int:
    """Explicit prefetching, asynchronous unsharding, and evaluation between the steps; bytes reserved at the end."""
    draw, mesh = random.Random(seed), mesh_of(group)
    plain, model = build(mesh), build(mesh)
    blocks = list(model.blocks)
    for before, behind in itertools.pairwise(blocks):
        before.set_modules_to_forward_prefetch([behind])
        behind.set_modules_to_backward_prefetch([before])
    reserved = []
    with fsdp.enable(model, config=CONFIG) as enabled:
        for step in range(6):
            if draw.random() < 0.5:
                works = [block.unshard(async_op=True) for block in blocks]
                for work in works:
                    if work is not None:
                        work.wait()
            torch.manual_seed(step)
            tokens = torch.randint(0, 37, (2, 5))
            with torch.no_grad():
                assert torch.equal(model(tokens), plain(tokens)), step
            for each in (model, plain):
                each.zero_grad()
                each(tokens).square().mean().backward()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())
            gc.collect()
            reserved.append(enabled.memory().reserved)
        assert reserved[-1] == reserved[2], "it does not grow"
    return reserved[-1]


class Exchanges:
    """All-to-alls as between experts, on a lane of the user's: begun whenever a rank likes, in one order of their own.

    Attributes:
        pending: begun, and not waited for.
        order: a letter for each call of this rank, of any lane: x, g for a gather, s for a scatter.
    """

    def __init__(self, comm: Communicator, draw: random.Random) -> None:
        self._comm, self._draw, self._number = comm, draw, 0
        self.pending: list[tuple[int, torch.Tensor, Any]] = []
        self.order = ""
        for _ in self.SIZES:  # new calls are compared on the spot, for which all ranks come to them
            self.begin()
            self.finish()
        self.order, self.left = "", 0

    SIZES = (5, 3000)

    def begin(self) -> None:
        size, n, rank = self.SIZES[self._number % len(self.SIZES)], self._comm.world_size, self._comm.rank
        where = self._comm.device  # the default device is not that of the thread that runs backward
        output, given = torch.empty(n, size, device=where), torch.empty(n, size, device=where)
        for peer in range(n):
            given[peer] = self._token(rank, peer)
        self.pending.append((self._number, output, self._comm.all_to_all(output, given, async_op=True)))
        self._number += 1
        self.order += "x"

    def perhaps(self, *_: Any) -> None:
        """Begin one of those that are left of this step, or leave it for later: each rank as it likes."""
        if self.left and self._draw.random() < 0.5:
            self.left -= 1
            self.begin()

    def finish(self) -> None:
        """Wait for all, in any order; every element is what the peer has sent in that exchange."""
        self._draw.shuffle(self.pending)
        for number, output, work in self.pending:
            work.wait()
            for peer, row in enumerate(output):
                assert row.eq(self._token(peer, self._comm.rank, number)).all(), (number, peer)
        self.pending.clear()

    def _token(self, source: int, to: int, number: int | None = None) -> int:
        return 100 * (self._number if number is None else number) + 10 * source + to


def beside_exchanges(group: dist.ProcessGroup, seed: int, steps: int) -> tuple[str, int, int]:
    """Gathers ahead, scatters and exchanges of the user's together; the calls of this rank, and how many scatters
    were made while an exchange was under way, and while a gather was."""
    mesh, device = mesh_of(group), torch.get_default_device()
    plain, model = build(mesh), build(mesh)
    draw = random.Random(100 * seed + dist.get_rank(group))
    beside = {"x": 0, "g": 0}
    with Communicator(group, device=device, config=CONFIG) as experts, fsdp.enable(model, config=CONFIG) as enabled:
        exchanges = Exchanges(experts, draw)
        link: Any = next(iter(enabled._groups.values()))
        gather, scatter = link.gather.all_gather, link.scatter.reduce_scatter

        def gathers(*given: Any, **options: Any) -> Any:
            exchanges.perhaps()
            exchanges.order += "g"
            return gather(*given, **options)

        def scatters(*given: Any, **options: Any) -> Any:
            exchanges.perhaps()
            exchanges.order += "s"
            beside["x"] += bool(exchanges.pending)
            beside["g"] += any(params._all_gather_result is not None for params in fsdp._param_groups(model))
            return scatter(*given, **options)

        link.gather.all_gather, link.scatter.reduce_scatter = gathers, scatters
        blocks = list(model.blocks)
        for before, behind in itertools.pairwise(blocks):
            before.set_modules_to_forward_prefetch([behind])
            behind.set_modules_to_backward_prefetch([before])
        _on_all("_set_unshard_async_op", True)(model)
        for block in blocks:
            block.register_forward_hook(exchanges.perhaps)
        for step in range(steps):
            exchanges.left = 4
            torch.manual_seed(step + 10 * dist.get_rank(group))
            tokens = torch.randint(0, 37, (2, 5))
            for each in (plain, model):
                each.zero_grad()
                each(tokens).square().mean().backward()
            while exchanges.left:
                exchanges.left -= 1
                exchanges.begin()
            exchanges.finish()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())
    return exchanges.order, beside["x"], beside["g"]


def let_go_late(model: Model) -> None:
    """Have other backends keep the tensors of their calls, as Gloo's threads do for a moment behind ``wait``."""
    kept: list[Any] = []

    def keeping(call: Any) -> Any:
        def keeps(*arguments: Any) -> Any:
            kept.append(arguments)
            return call(*arguments)

        return keeps

    for params in fsdp._param_groups(model):
        for comm in (params._all_gather_comm, params._reduce_scatter_comm):
            comm._own = keeping(comm._own)


def in_two_dimensions(group: dist.ProcessGroup) -> dict[str, int]:
    """HSDP on two times two ranks, and a number for ``reshard_after_forward``."""
    device = torch.get_default_device()
    assert dist.get_world_size() == dist.get_world_size(group) == 4
    both = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    wanted = list(train(build(both), group, 3))
    model = build(both)
    with fsdp.enable(model, config=CONFIG) as enabled:
        got = list(train(model, group, 3))
        assert enabled.calls > 0 and not enabled.elsewhere
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    mesh = mesh_of(group)
    wanted = list(train(build(mesh, reshard_after_forward=2), group, 3))
    model = build(mesh, reshard_after_forward=2)
    with fsdp.enable(model, config=CONFIG) as enabled:
        if dist.get_rank(group) % 2:
            let_go_late(model)
        got = list(train(model, group, 3))
        elsewhere = dict(enabled.elsewhere)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    return elsewhere


def with_a_factor(group: dist.ProcessGroup) -> set[str]:
    """Gradients that the group's backend adds, as if Sidelane could not; a sum stands for its. What went there."""
    model = build(mesh_of(group))
    _on_all("set_gradient_divide_factor", 3.0)(model)
    refused = mock.patch.object(fsdp.GroupReduction, "of", return_value=fsdp.GroupReduction("premul_sum"))
    with refused, fsdp.enable(model, config=Config(timeout_s=10)) as enabled:
        for params in fsdp._param_groups(model):
            comm = params._reduce_scatter_comm
            comm._own = lambda output, input, group, op, async_op: dist.reduce_scatter_tensor(
                output, input, group=group, async_op=async_op
            )
        if dist.get_rank(group) % 2:
            let_go_late(model)
        list(train(model, group, 3))
        return set(enabled.elsewhere)


def by_a_factor(group: dist.ProcessGroup) -> set[str]:
    """A factor that gradients are divided by, as torchtitan sets one: loss and gradients; what went elsewhere.

    NCCL multiplies before it adds. Gloo cannot: FSDP2 divides before and behind a plain sum there, if it is told to.
    """
    elsewhere, mesh = set(), mesh_of(group)
    for factor in (1.0, 3.0):
        both = []
        for on in (False, True):
            model = build(mesh)
            _on_all("set_gradient_divide_factor", factor)(model)
            if not on and mesh.device_type == "cpu":
                _on_all("set_force_sum_reduction_for_comms", True)(model)
            with fsdp.enable(model, config=CONFIG) if on else contextlib.nullcontext() as enabled:
                both.append(list(train(model, group, 3)))
                if enabled is not None:
                    elsewhere |= set(enabled.elsewhere)
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)
    return elsewhere


def on_and_off(group: dist.ProcessGroup) -> list[str]:
    """What is refused; and a model that trains on after it is switched off."""
    mesh, told = mesh_of(group), []
    model = build(mesh)
    before = [(params._all_gather_comm, params._reduce_scatter_comm) for params in fsdp._param_groups(model)]
    enabled = fsdp.enable(model, config=CONFIG)
    for wrong in (model, nn.Linear(2, 2), None):
        try:
            fsdp.enable(wrong, config=CONFIG)
        except ValueError as error:
            told.append(str(error))
    list(train(model, group, 2))
    enabled.disable()
    enabled.disable()
    assert before == [(params._all_gather_comm, params._reduce_scatter_comm) for params in fsdp._param_groups(model)]
    wanted = list(train(build(mesh), group, 4))
    model = build(mesh)
    with fsdp.enable(model, config=CONFIG):
        got = []
        for number, loss in enumerate(train(model, group, 4)):
            got.append(loss)
            if number == 1:
                break
    with fsdp.enable(model, config=CONFIG):  # once more
        model(torch.zeros(1, 2, dtype=torch.int64))
    torch.testing.assert_close(got, wanted[:2])
    return told


def _saved(value: object) -> int:
    written = io.BytesIO()
    torch.save(value, written)
    return len(written.getvalue())


def _unsharded(model: Any) -> tuple[int, bool]:
    """Parameters while they are whole, saved and copied; the copies are theirs, and stay."""
    block = model.blocks[0]
    block.unshard()
    weight, size = block.up.weight.detach().clone(), _saved(block.up.weight)
    copied = copy.deepcopy(list(block.parameters()))
    block.reshard()
    return size, torch.equal(copied[2], weight)


def _restored(model: Model) -> int:
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    return _saved(state)


def _by_compiled_autograd(model: Model) -> list[torch.Tensor]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True, optimize_ddp="python_reducer"):
        tokens = torch.arange(12).reshape(3, 4)
        torch.compile(model, backend="aot_eager")(tokens).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


KEEPERS: dict[str, Callable[[Model], object]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a model around it": lambda model: copy.deepcopy(nn.Sequential(model)),
    "averaged": AveragedModel,
    "saved": _saved,
    "saved in a model around it": lambda model: _saved(nn.Sequential(model)),
    "pickled": pickle.dumps,
    "state": _restored,
    "unsharded": _unsharded,
    "compiled autograd, Python's reducer": _by_compiled_autograd,
}
"""Ways in which programs keep a model, or compile its backward."""


def kept(group: dist.ProcessGroup, compiled: bool = True) -> list[str]:
    """The names of what ends otherwise with Sidelane than without, while it is on or after it was; and the handle's."""
    mesh, wrong = mesh_of(group), []
    for name, keep in KEEPERS.items():
        if keep is _by_compiled_autograd and not compiled:
            continue
        outcomes: list[object] = []
        for how in ("without", "on", "off"):
            model = build(mesh)
            enabled = contextlib.nullcontext() if how == "without" else fsdp.enable(model, config=CONFIG)
            with enabled:
                list(train(model, group, 1))
                model.zero_grad()
                if how == "off":
                    enabled.disable()  # type: ignore[union-attr]
                try:
                    outcomes.append(keep(model))
                except Exception as error:
                    outcomes.append(f"{type(error).__name__}: {error}")
        try:
            for other in outcomes[1:]:
                torch.testing.assert_close(other, outcomes[0], rtol=1e-5, atol=1e-7)
        except (AssertionError, ValueError, TypeError):
            wrong += [f"{name}: {outcomes}"] if outcomes[1:] != outcomes[:1] * 2 else []
    with fsdp.enable(build(mesh), config=CONFIG) as handle:
        for keep in (copy.deepcopy, copy.copy, pickle.dumps, _saved):
            try:
                keep(handle)
            except TypeError as error:
                wrong += [] if "allowed=the handle itself" in str(error) else [str(error)]
    return wrong


def dies(group: dist.ProcessGroup) -> str:
    """The last rank ends in the middle of a step."""
    model = build(mesh_of(group))
    fsdp.enable(model, config=Config(timeout_s=1000))
    number, last = 0, dist.get_world_size(group) - 1
    try:
        for number, _ in enumerate(train(model, group, 100)):
            if number == 3 and dist.get_rank(group) == last:
                os._exit(3)
    except PeerError as error:
        return f"{type(error).__name__} {error.ranks}: {error}"
    return f"nothing in {number} steps"


def _list() -> tuple[nn.Module, list[Any]]:
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    return model, [[model[1], model[2]]]


def _without_parameters() -> tuple[nn.Module, list[Any]]:
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    return model, [model[1], [model[0], model[2]]]


def _tied() -> tuple[nn.Module, list[Any]]:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.GELU(), layer, nn.Linear(5, 3)), [layer]


def given_back(group: dist.ProcessGroup, config: Config = CONFIG) -> None:
    """Modules that share parameters, handles of a part, handles that never came to be: all is given back at once."""
    mesh, given = mesh_of(group), torch.full((2, 5), 1.0 + dist.get_rank(group))

    def made(maker: Callable[[], tuple[nn.Module, list[Any]]]) -> Any:
        torch.manual_seed(3)
        model, units = maker()
        for unit in units:
            fully_shard(unit, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def gradients(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        model(given).square().mean().backward()
        return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]

    def own(model: nn.Module) -> list[Any]:
        return [(params._all_gather_comm, params._reduce_scatter_comm) for params in fsdp._param_groups(model)]

    gc.collect()
    gc.disable()
    try:
        held = _held()
        for maker in (_list, _without_parameters, _tied):
            model, wanted = made(maker), gradients(made(maker))
            before = own(model)
            with fsdp.enable(model, config=config) as enabled:
                torch.testing.assert_close(gradients(model), wanted)
                assert enabled.calls > 0 and not enabled.elsewhere, maker
            assert own(model) == before and _falls_to(held), maker
            torch.testing.assert_close(gradients(model), wanted)

        model, wanted, custom = made(_list), gradients(made(_list)), DefaultAllGather()
        part = fsdp.enable(model[1], config=config)
        for whole in (model, model[2]):  # which has the parameters of model[1], too
            with contextlib.suppress(ValueError):
                fsdp.enable(whole, config=config)
                raise AssertionError("it is on for a part")
        torch.testing.assert_close(gradients(model), wanted)
        model[2].set_custom_all_gather(custom)
        part.disable()
        assert model[1]._get_fsdp_state()._fsdp_param_group._all_gather_comm is custom, "which is not ours to take away"
        torch.testing.assert_close(gradients(model), wanted)
        assert _falls_to(held)

        before = own(model)
        of_a_machine = [(fsdp_group, "Communicator")] if config is CONFIG else []
        for where, name in ((direct_gather.DirectGather, "take_over"), (fsdp, "Scatter"), *of_a_machine):
            with mock.patch.object(where, name, _interrupted), contextlib.suppress(KeyboardInterrupt):
                fsdp.enable(model, config=config)
                raise AssertionError(name)
            assert own(model) == before and _falls_to(held), name
        torch.testing.assert_close(gradients(model), wanted)
    finally:
        gc.enable()


def _interrupted(*args: Any, **options: Any) -> Any:
    if options.get("name") == "fsdp gather":  # the first of two
        return Communicator(*args, **options)
    raise KeyboardInterrupt


def _falls_to(held: int) -> bool:
    """Return True if no more is held than was, once threads that end by themselves have ended."""
    until = time.monotonic() + 5
    while _held() > held and time.monotonic() < until:
        time.sleep(0.01)
    return _held() <= held


def _held() -> int:
    """Pieces of shared memory of Sidelane's that this process has mapped; none of GPUs'."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:sidelane" in line for line in maps)
