"""FSDP2 whose collectives Sidelane makes, between CPU processes and on GPUs, against Gloo and NCCL."""

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    CONFIG,
    ON_NCCL,
    OPTIONS,
    Model,
    build,
    by_nccl,
    collectives_of,
    let_go_late,
    mesh_of,
    on_nodes,
    train,
)
from marks import long
from on_ranks import everyones, on_ranks
from ranks import crew
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.optim.swa_utils import AveragedModel

from sidelane import Communicator, Config, PeerError, fsdp
from sidelane.integrations import calls, direct_gather, fsdp_calls, fsdp_group
from sidelane.integrations.fsdp_group import Ring
from sidelane.integrations.nodes import topology

ON_TWO = pytest.param(
    by_nccl, marks=pytest.mark.skipif(torch.cuda.device_count() != 2, reason="its operations are those of two ranks")
)


@on_ranks(long(2), 3, steps=2)
@on_ranks(gpu=ON_NCCL, timeout_s=150, steps=3)
def test_loss_and_gradients_are_those_of_the_group(group: dist.ProcessGroup, steps: int) -> None:
    """With and without."""
    mesh, two = mesh_of(group), dist.get_world_size(group) == 2
    for name, options in OPTIONS.items():
        if not two and name not in ("resharded", "mixed precision"):
            continue
        for accumulate in (1, 2) if not options else (1,):
            wanted = list(train(build(mesh, **options), group, steps, accumulate=accumulate))
            model = build(mesh, **options)
            with fsdp.enable(model, config=CONFIG) as enabled:
                got = list(train(model, group, steps, accumulate=accumulate))
                assert enabled.calls > 10 and enabled.memory().reserved > 0 and not enabled.elsewhere, name
            coarse = "bfloat16" in name or "mixed" in name
            for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
                # Two values have one sum; of more the order of the ranks is ours, and rounds otherwise.
                exact = two and not coarse
                rtol, atol = (0.0, 0.0) if exact else (2e-2, 2e-3) if coarse else (1e-4, 1e-6)
                where = f"{name} {number}"
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=functools.partial(_told, where))


def _told(where: str, text: str) -> str:
    return f"{where}: {text}"


@on_ranks(long(2), long(3))
@on_ranks(gpu=ON_NCCL, timeout_s=120)
def test_a_hundred_steps_are_those_of_the_group(group: dist.ProcessGroup) -> None:
    """Losses of all steps and parameters behind them, with and without."""
    mesh, both, steps = mesh_of(group), [], 100
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
                assert not enabled.elsewhere and enabled.calls >= 5 * steps
        both.append((torch.stack(told), *(parameter.full_tensor().detach() for parameter in model.parameters())))
    # Two values have one sum; of more the order of the ranks is ours, and the rounding goes on from step to step.
    close = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size(group) == 2 else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, **close)
    losses = both[1][0].tolist()
    assert losses[-1] < 0.7 * losses[0], "it learns"


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


@on_ranks(2)
@on_ranks(gpu=ON_TWO, timeout_s=120)
def test_what_else_fsdp2_can_be_told(group: dist.ProcessGroup) -> None:
    """Each with its operation: average, sum, a sum that FSDP2 divides before; and compiled blocks."""
    told, mesh = {}, mesh_of(group)
    for name, (options, switch, operations) in SWITCHES.items():  # in one order on all ranks, as a set has none
        if name == "a group for gradients" and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
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
    assert told["kept after backward"] < told["sums"], "the second part of a step gathers nothing"
    if mesh.device_type == "cpu":
        assert everyones(group, told) == [told] * 2


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
}
"""Ways in which programs keep a model."""


@on_ranks(2, ways=[*KEEPERS][::2])
@on_ranks(2, ways=[*KEEPERS][1::2])
@on_ranks(gpu=ON_NCCL, ways=[*KEEPERS], timeout_s=150)
def test_what_keeps_a_model_ends_as_without(group: dist.ProcessGroup, ways: Sequence[str]) -> None:
    """A model is copied and saved as without Sidelane, while it is on and afterwards. The handle cannot be."""
    _ends_as_without(group, {name: KEEPERS[name] for name in ways})
    with fsdp.enable(build(mesh_of(group)), config=CONFIG) as handle:
        for keep in (copy.deepcopy, copy.copy, pickle.dumps, _saved):
            with pytest.raises(TypeError, match="allowed=the handle itself"):
                keep(handle)


@on_ranks(long(2))
@on_ranks(gpu=ON_NCCL, timeout_s=150)
def test_compiled_autograd_ends_as_without(group: dist.ProcessGroup) -> None:
    """With Python's reducer."""
    _ends_as_without(group, {"compiled autograd": _by_compiled_autograd})


def _ends_as_without(group: dist.ProcessGroup, keepers: Mapping[str, Callable[[Model], object]]) -> None:
    mesh = mesh_of(group)
    for name, keep in keepers.items():
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
        for other in outcomes[1:]:
            try:
                torch.testing.assert_close(other, outcomes[0], rtol=1e-5, atol=1e-7)
            except (AssertionError, ValueError, TypeError):
                assert outcomes[1:] == outcomes[:1] * 2, (name, outcomes)


@on_ranks(2)
@on_ranks(gpu=ON_NCCL)
def test_prefetching(group: dist.ProcessGroup) -> None:
    """Explicit prefetching, asynchronous unsharding, and evaluation between the steps."""
    draw, mesh = random.Random(1), mesh_of(group)
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
    assert mesh.device_type != "cpu" or len({*everyones(group, reserved[-1])}) == 1


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


@on_ranks(long(2), seed=1, steps=4)
@on_ranks(3, seed=2, steps=4)
@on_ranks(gpu=ON_NCCL, seed=1, steps=20)
def test_gathers_ahead_scatters_and_exchanges_of_the_users_together(
    group: dist.ProcessGroup, seed: int, steps: int
) -> None:
    """Ranks make the calls of each lane in one order, and those of several lanes in an order of their own."""
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
            beside["g"] += any(params._all_gather_result is not None for params in fsdp_calls.param_groups(model))
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
    on_cpu = mesh.device_type == "cpu"
    orders = everyones(group if on_cpu else dist.group.WORLD, exchanges.order)  # type: ignore[arg-type]
    assert len(set(orders)) == len(orders), "they make them in the same order"
    assert beside["x"] > (4 if on_cpu else 6), "scatters while an exchange was under way"
    if on_cpu:
        assert beside["g"] > 4, "scatters while a gather was under way"
        assert len({order.replace("x", "") for order in orders}) == 1
        assert {order.count("x") for order in orders} == {4 * steps}


@on_ranks(2)
def test_buffers_that_another_backend_has_had_are_free_on_no_rank_before_the_others(group: dist.ProcessGroup) -> None:
    """Gradients that the group's backend adds, as if Sidelane could not; a sum stands for its."""
    model = build(mesh_of(group))
    _on_all("set_gradient_divide_factor", 3.0)(model)
    refused = mock.patch.object(calls.GroupReduction, "of", return_value=calls.GroupReduction("premul_sum"))
    with refused, fsdp.enable(model, config=Config(timeout_s=10)) as enabled:
        for _, comm in collectives_of(model):
            comm.own = lambda output, input, group, op, async_op: dist.reduce_scatter_tensor(
                output, input, group=group, async_op=async_op
            )
        if dist.get_rank(group) % 2:
            let_go_late(model)
        list(train(model, group, 3))
        assert set(enabled.elsewhere) == {"reduce_scatter: premul_sum of float32"}


@on_ranks(2)
@on_ranks(gpu=ON_NCCL)
def test_a_factor_of_ones_own_is_multiplied_behind_a_sum(group: dist.ProcessGroup) -> None:
    """A factor that gradients are divided by, as torchtitan sets one: loss and gradients.

    NCCL multiplies before it adds. Gloo cannot: FSDP2 divides before and behind a plain sum there, if it is told to.
    """
    mesh = mesh_of(group)
    for factor in (1.0, 3.0):
        both = []
        for on in (False, True):
            model = build(mesh)
            _on_all("set_gradient_divide_factor", factor)(model)
            if not on and mesh.device_type == "cpu":
                _on_all("set_force_sum_reduction_for_comms", True)(model)
            with fsdp.enable(model, config=CONFIG) if on else contextlib.nullcontext() as enabled:
                both.append(list(train(model, group, 3)))
                assert enabled is None or not enabled.elsewhere
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)


@on_ranks(2)
@on_ranks(gpu=ON_NCCL)
def test_on_and_off(group: dist.ProcessGroup) -> None:
    """Wrong arguments are refused, and a model goes on training after it is switched off."""
    mesh = mesh_of(group)
    model = build(mesh)
    before = collectives_of(model)
    enabled = fsdp.enable(model, config=CONFIG)
    no_module = "no module that fully_shard was applied to"
    for wrong, words in ((model, "it is on for this model"), (nn.Linear(2, 2), no_module), (None, no_module)):
        with pytest.raises(ValueError, match=words):
            fsdp.enable(wrong, config=CONFIG)
    list(train(model, group, 2))
    enabled.disable()
    enabled.disable()
    assert before == collectives_of(model)
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


@on_ranks(2, layout=None)
@on_ranks(long(4), layout=(0, 0, 1, 1))
@mock.patch.object(topology, "LEAST_BYTES", 1)
def test_all_that_was_taken_is_given_back_at_once(group: dist.ProcessGroup, layout: Sequence[int] | None) -> None:
    """Modules that share parameters, handles of a part, handles that never came to be: all is given back at once."""
    config, mesh, given = on_nodes(group, layout), mesh_of(group), torch.full((2, 5), 1.0 + dist.get_rank(group))

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

    gc.collect()
    gc.disable()
    try:
        held = _held()
        for maker in (_list, _without_parameters, _tied):
            model, wanted = made(maker), gradients(made(maker))
            before = collectives_of(model)
            with fsdp.enable(model, config=config) as enabled:
                torch.testing.assert_close(gradients(model), wanted)
                assert enabled.calls > 0 and not enabled.elsewhere, maker
            assert collectives_of(model) == before and _falls_to(held), maker
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
        assert collectives_of(model[1])[0][0] is custom, "which is not ours to take away"
        torch.testing.assert_close(gradients(model), wanted)
        assert _falls_to(held)

        before = collectives_of(model)
        of_a_machine = [(fsdp_group, "Communicator")] if layout is None else []
        for where, name in ((direct_gather.DirectGather, "take_over"), (fsdp_calls, "Scatter"), *of_a_machine):
            with mock.patch.object(where, name, _interrupted), contextlib.suppress(KeyboardInterrupt):
                fsdp.enable(model, config=config)
                raise AssertionError(name)
            assert collectives_of(model) == before and _falls_to(held), name
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


def test_a_rank_that_dies_is_named() -> None:
    with crew(3) as ranks:
        first, second, code = ranks.run(dies, None, dying=(2,))
    assert code == 3
    for text in (first, second):
        assert text.startswith("PeerError (2,)") and "died" in text, text


class Stream:
    """A stream of a GPU that only remembers."""

    def __init__(self) -> None:
        self.now, self.waited = 0, []  # type: int, list[int]

    def record_event(self) -> int:
        return self.now

    def wait_event(self, event: int) -> None:
        self.waited.append(event)


def test_gathers_do_not_wait_for_the_layer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs: a layer is gathered while the one before is computed, into memory that is no longer in use."""
    computing, gathering = Stream(), Stream()
    handle = type("Handle", (), {"current_stream": staticmethod(lambda: computing)})
    monkeypatch.setattr(torch, "get_device_module", lambda device: handle)
    made: list[int] = []
    ring = Ring(lambda nbytes: made.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8), torch.device("cpu"))
    for layer in range(6):  # forward: gather, compute, free
        _, free = ring.take(100, gathering, at_once=False)
        computing.now = layer
        assert gathering.waited == list(range(layer - 1)), "for those two before it, and not for the one before"
        free()
    assert made == [100, 100]
    gathering.waited.clear()
    held, free_held = ring.take(100, gathering, at_once=True)
    for layer in range(7, 12):  # backward: free, gather the one before, compute
        computing.now = layer
        following, free_following = ring.take(100, gathering, at_once=True)
        assert following is not held
        free_held()
        held, free_held = following, free_following
    assert made == [100, 100]
    ring.take(50, gathering, at_once=True)
    assert made == [100, 100, 50], "a size has buffers of its own"
