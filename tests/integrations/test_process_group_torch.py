"""What PyTorch makes of a process group, by CPU ranks and on GPUs: compiled code, DTensor, DDP, FSDP, profiles."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import tempfile
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from fsdp_models import collectives_of
from marks import long
from on_ranks import default_stream, on_ranks
from process_groups import data, ended, on_cpu, sidelane_group
from torch.distributed.device_mesh import DeviceMesh

import sidelane
from sidelane import fsdp
from sidelane.integrations import calls, ledger
from sidelane.integrations.process_group import SidelaneGroup


@on_ranks(2, gpu=default_stream)
def test_functional_collectives(group: dist.ProcessGroup) -> None:
    with sidelane_group(group) as ours:
        rank, size = ours.rank(), ours.size()

        def everything(each_group: dist.ProcessGroup) -> list[torch.Tensor]:
            given = data(size * 6, torch.float32, rank).view(size * 2, 3)
            found = [
                functional.all_reduce(given, "sum", each_group),
                functional.all_reduce(given, "max", each_group),
                functional.all_gather_tensor(given, 1, each_group),
                functional.reduce_scatter_tensor(given, "sum", 0, each_group),
                functional.broadcast(given, size - 1, each_group),
                functional.all_to_all_single(given, [2] * size, [2] * size, each_group),
                *functional.all_gather_into_tensor_coalesced([given, given + 1], each_group),
                *functional.reduce_scatter_tensor_coalesced([given, given + 1], "sum", [0, 0], each_group),
            ]
            return [each.wait() if isinstance(each, functional.AsyncCollectiveTensor) else each for each in found]

        for one, other in zip(on_cpu(lambda: everything(group)), everything(ours), strict=True):
            assert torch.equal(one, other.cpu())
        weight = data(6, torch.float32, rank).requires_grad_()
        (functional.all_gather_tensor_autograd(weight, 0, ours) * 2).sum().backward()
        assert weight.grad is not None and weight.grad.eq(2 * size).all()


@on_ranks(2, gpu=default_stream)
def test_compiled_functions(group: dist.ProcessGroup) -> None:
    """A compiled function with collectives in it; the back end is the one without a C++ compiler."""
    with sidelane_group(group) as ours:
        size, name = ours.size(), ours.group_name

        def step(x: torch.Tensor) -> torch.Tensor:
            gathered = functional.all_gather_tensor(x * 2, 0, name)
            return functional.all_reduce(gathered + 1, "sum", name) * 3

        def in_place(x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            dist.all_reduce(doubled, group=ours)
            return doubled + 1

        x = data(8, torch.float32, ours.rank())
        assert torch.equal(torch.compile(in_place, backend="aot_eager")(x), in_place(x))
        assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))
        assert size * 8 == step(x).numel()
        grads = []
        for each_group in (group, ours):  # their reducer calls them from within what is compiled
            torch.manual_seed(4)
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 3), process_group=each_group)
            whole = torch.compile(net, backend="aot_eager")
            for _ in range(2):
                whole(x.view(1, 8)).square().sum().backward()
            grads.append([parameter.grad for parameter in net.parameters()])
        torch.testing.assert_close(*grads)


@on_ranks(long(2), backend="aot_eager")
@on_ranks(long(2), backend="inductor", timeout_s=200)  # which compiles C++
def test_compiled_functions_are_as_gloos(group: dist.ProcessGroup, backend: str) -> None:
    """What the compiler traces of a group in C++, and no more: the same graphs and breaks, and the same results."""
    from torch._dynamo.utils import counters

    peer, each_group = group.rank() ^ 1, group

    def broadcast(x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, 1, group=each_group)
        dist.barrier(each_group)
        return x + 1

    def asynchronous(x: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(x, group=each_group, async_op=True)
        y = x.new_ones(8) * 2
        assert work is not None
        work.wait()
        then = work.get_future().then(lambda done: done.value()[0] * 2)
        return y + then.wait()

    def lists(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x, group=each_group)
        if torch.__version__ >= "2.13":  # Gloo of torch 2.11 has none
            dist.all_to_all(list(parts[1].chunk(2)), list(parts[0].chunk(2)), group=each_group)
        return parts[0] + parts[1]

    def pairs(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.zeros_like(x), torch.empty_like(x)
        if peer:
            dist.send(x, peer, each_group)
        else:
            dist.recv(y, peer, each_group)
        works = [dist.isend(y, peer, each_group), dist.irecv(z, peer, each_group)]
        operations = [dist.P2POp(dist.isend, x, peer, each_group), dist.P2POp(dist.irecv, x + 1, peer, each_group)]
        for work in (*works, *dist.batch_isend_irecv(operations)):
            assert work is not None
            work.wait()
        return y + z

    def trains(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    for function in (broadcast, asynchronous, lists, pairs, trains) if backend == "aot_eager" else (broadcast, trains):
        found = []
        with sidelane_group(group) as ours:
            for each_group in (group, ours):
                torch._dynamo.reset()
                counters.clear()
                torch.manual_seed(0)
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=each_group)

                def step(x: torch.Tensor) -> torch.Tensor:
                    made = function(x)  # noqa: B023
                    if made.requires_grad:
                        made.backward()
                    return made.detach()

                whole = torch.compile(step, backend=backend)
                results = [whole(data(8, torch.float32, group.rank())) for _ in range(2)]
                gradients = [each.grad for each in model.parameters()]
                graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
                found.append((results + gradients, graphs))
        (expected, gloos), (results, graphs) = found
        assert graphs == gloos, function
        for one, other in zip(results, expected, strict=True):
            assert one is other is None or torch.allclose(one, other), function


@on_ranks(2, gpu=default_stream)
def test_distributed_tensors(group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with sidelane_group(group) as ours:
        mesh = DeviceMesh.from_group(ours, torch.get_default_device().type)
        full = torch.arange(60.0).view(10, 6)
        split = distribute_tensor(full, mesh, [Shard(0)])
        assert torch.equal(split.redistribute(mesh, [Shard(1)]).full_tensor(), full)
        assert torch.equal(split.redistribute(mesh, [Replicate()]).to_local(), full)
        right = distribute_tensor(full.T.contiguous(), mesh, [Shard(0)])
        product = distribute_tensor(full, mesh, [Shard(1)]) @ right
        assert torch.allclose(product.full_tensor(), full @ full.T)
        assert {row.where for row in sidelane.report().rows if row.operation != "barrier"} == {"sidelane"}


def model() -> torch.nn.Module:
    device = torch.get_default_device()
    with torch.device("cpu"):
        torch.manual_seed(0)
        sizes = (13, 32, 31, 5)
        layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(device)


def losses_of(net: torch.nn.Module, group: dist.ProcessGroup) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(20):
        generator = torch.Generator("cpu").manual_seed(100 * step + group.rank())
        x = torch.randn(8, 13, generator=generator, device="cpu").to(torch.get_default_device())
        loss = (net(x) - x[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach().clone()
        dist.all_reduce(told, group=group)
        losses.append(told.item())
    return losses


@on_ranks(2)
def test_a_profiler_shows_calls_by_name(group: dist.ProcessGroup) -> None:
    """A profiler shows calls by name, and with shapes what other groups' calls say of themselves."""
    with sidelane_group(group) as ours, torch.profiler.profile(record_shapes=True) as profiler:
        size, ranks = ours.size(), str(dist.get_process_group_ranks(ours))
        dist.all_reduce(torch.ones(3), group=ours)
        work = dist.all_gather_into_tensor(torch.empty(size), torch.ones(1), ours, async_op=True)
        assert work is not None
        work.wait()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    found = {event["name"]: event["args"] for event in events if str(event.get("name")).startswith("sidelane:")}
    assert set(found) == {"sidelane:all_reduce", "sidelane:all_gather_into_tensor"}
    for name, read, written in (("all_reduce", 3, 3), ("all_gather_into_tensor", 1, size)):
        said = found[f"sidelane:{name}"]
        assert (said["Collective name"], said["dtype"], said["Group size"]) == (name, "Float", size)
        assert (said["In msg nelems"], said["Out msg nelems"]) == (read, written)
        assert said["Process Group Ranks"] == ranks and [written] in said["Input Dims"]


@on_ranks(2, gpu=default_stream)
def test_ddp_with_uneven_inputs(group: dist.ProcessGroup) -> None:
    """Ranks with unequal numbers of batches, whose gradients are divided by the number of those that still train."""
    device = torch.get_default_device()
    with sidelane_group(group) as ours:
        rank = ours.rank()
        torch.manual_seed(0)
        ids = None if device.type == "cpu" else [device]
        net = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(5, 5, bias=False), device_ids=ids, process_group=ours
        )
        given = torch.ones(1, 5)
        for by_all in (False, True):
            with net.join(divide_by_initial_world_size=by_all):
                for step in range(3 + 2 * rank):
                    net(given).sum().backward()
                    gc.collect()
                    taking_part = sum(step < 3 + 2 * peer for peer in range(ours.size()))
                    expected = taking_part / ours.size() if by_all else 1.0
                    gradient = next(net.parameters()).grad
                    assert gradient is not None
                    torch.testing.assert_close(gradient, torch.full((5, 5), expected))
                    net.zero_grad()


@on_ranks(2, gpu=default_stream)
def test_ddp_trains_as_with_gloo(group: dist.ProcessGroup) -> None:
    with sidelane_group(group) as ours:

        def losses(each_group: dist.ProcessGroup) -> list[float]:
            small = 1e-3  # MB a bucket: several of them
            return losses_of(
                torch.nn.parallel.DistributedDataParallel(model(), process_group=each_group, bucket_cap_mb=small),
                each_group,
            )

        expected, found = on_cpu(lambda: losses(group)), losses(ours)
        assert found[-1] < 0.7 * found[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        made = {row.operation: row for row in sidelane.report().rows if row.where == "sidelane"}
        assert made["all_reduce"].calls >= 40 and "broadcast" in made


@on_ranks(2)
def test_ddp_with_sparse_gradients(group: dist.ProcessGroup) -> None:
    with sidelane_group(group) as ours:
        table = torch.nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        net = torch.nn.parallel.DistributedDataParallel(table, process_group=ours)
        for _ in range(2):
            net.zero_grad()
            net(torch.tensor([[1, 2 + ours.rank()]])).sum().backward()
            assert table.weight.grad is not None and table.weight.grad.is_sparse
            assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 1, 0.5, 0.5, *[0] * 6]


@on_ranks(2, gpu=default_stream)
def test_hooks_of_ddp(group: dist.ProcessGroup) -> None:
    """A communication hook makes calls of its own, and callbacks of their futures."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    with sidelane_group(group) as ours:

        def losses(each_group: dist.ProcessGroup) -> list[float]:
            net = torch.nn.parallel.DistributedDataParallel(model(), process_group=each_group, bucket_cap_mb=1e-3)
            net.register_comm_hook(each_group, fp16_compress_hook)
            return losses_of(net, each_group)

        torch.testing.assert_close(losses(ours), on_cpu(lambda: losses(group)), rtol=1e-2, atol=0)
        made = {(row.operation, row.dtype): row.where for row in sidelane.report().rows}
        assert made["all_reduce", "float16"] == "sidelane"


@on_ranks(2, gpu=default_stream)
def test_what_a_graph_cannot_hold_is_refused(group: dist.ProcessGroup) -> None:
    """What a graph would not hold is refused while one is captured; nothing of it has happened, and all goes on."""
    ours = sidelane.wrap(group)
    dispatcher, device = ours._dispatcher, torch.get_default_device()
    on_gpu = mock.Mock(device=torch.device("cuda"), dtype=torch.float32)
    on_gpu.numel.return_value = on_gpu.element_size.return_value = 4

    def refused(text: str, call: Callable[[], object]) -> None:
        with pytest.raises(sidelane.UnavailableError, match=f"not while a graph is captured: {text}"):
            call()

    def in_graph() -> None:
        host = torch.ones(3, device="cpu")
        refused("tensors of the CPU", lambda: dist.all_reduce(host, group=ours))
        refused("tensors of the CPU", lambda: dist.all_reduce(host, group=ours, async_op=True))
        refused("tensors of the CPU", lambda: dist.all_reduce(host.double(), group=ours))
        refused("tensors of the CPU", lambda: dist.send(host, group=ours, group_dst=(ours.rank() + 1) % 2))
        if device.type == "cuda":
            tensor = torch.ones(3)
            refused("the group's first call", lambda: dist.all_reduce(tensor, group=ours))
            if dispatcher.names["cuda"] == "gloo":
                refused("gloo makes it, on the host", lambda: dist.all_reduce(tensor.double(), group=ours))
            return
        call = calls.GroupCall(calls.ALL_REDUCE, [on_gpu], [], dist.AllreduceOptions(), ())
        call.refusal = ""  # the tensor is none
        refused("the group's first call", lambda: dispatcher._run(call, None))
        call.refusal = "product of float32"
        refused("gloo makes it, on the host .product of float32", lambda: dispatcher._run(call, None))

    try:
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                torch.ones(3).add_(1)
                in_graph()
        else:
            with (
                mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
                mock.patch.object(dispatcher, "_can_capture", True),
                mock.patch.dict(dispatcher.life.refusals, {"cuda": ""}),
                mock.patch.dict(dispatcher.names, {"cuda": "gloo"}),
            ):
                in_graph()
        assert not [row for row in sidelane.report().rows if row.group == ours.group_name]
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=ours)
        assert tensor.eq(ours.size()).all()
    finally:
        dist.destroy_process_group(ours)


def sharded(group: dist.ProcessGroup) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(), DeviceMesh.from_group(group, torch.get_default_device().type)
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@on_ranks(2, gpu=default_stream)
def test_fsdp_is_enabled_by_the_group_without_a_line(group: dist.ProcessGroup) -> None:
    """FSDP2 gathers straight into its parameters where its calls are Sidelane's: on GPUs. A request for the group's
    memory, ``enable`` and a second model on the group change nothing of that, and models go when they are dropped."""
    from torch.distributed.fsdp import FSDPModule

    from sidelane.integrations import torch_world

    def ask(net: torch.nn.Module) -> None:
        assert isinstance(net, FSDPModule)
        net.set_allocate_memory_from_process_group_for_comm(True)

    with mock.patch.object(torch_world, "FSDP_DEVICES", (torch.get_default_device().type,)):
        ledger.reset()
        ours = train_in_symmetric_memory(group, ask)
        rows = [row for row in sidelane.report().rows if row.operation != "all_reduce"]  # of the losses
        made = {(row.operation, row.where, row.why) for row in rows}
        gathered = ("fsdp all_gather", "sidelane", "straight into the parameters")
        assert made == {gathered, ("fsdp reduce_scatter", "sidelane", "in symmetric memory")}
        second = sharded(ours)
        expected = losses_of(second, ours)
        for _ in range(2):
            third = sharded(ours)
            with fsdp.enable(third) as enabled:
                torch.testing.assert_close(losses_of(third, ours), expected, rtol=0, atol=0)
                assert enabled.calls and not enabled.elsewhere
                with pytest.raises(ValueError, match="it is on for this model"):
                    fsdp.enable(third)
        dropped = [weakref.ref(module) for net in (second, third) for module in net.modules()]
        del second, third, enabled
        gc.collect()
        assert not any(one() for one in dropped)
        lanes = ours.fsdp_lanes
        assert lanes[0].memory().reserved
        dist.destroy_process_group(ours)
        assert sys.modules[torch_world.PARAM_GROUP].foreach_all_gather.__module__.startswith("torch.")  # as before
        with pytest.raises(sidelane.CommunicatorClosedError):
            lanes[0].barrier()


@on_ranks(2, gpu=default_stream)
def test_models_on_a_group_share_no_buffers(group: dist.ProcessGroup) -> None:
    """Models that are dropped gathered, as an evaluation leaves them, and that Python collects on one rank earlier than
    on the other leave nothing to later ones; then their memory is used again. The lanes have the group's time-outs, and
    ``disable`` leaves nothing of the group's."""
    from torch.distributed.fsdp import fully_shard

    from sidelane.integrations import torch_world
    from sidelane.integrations.fsdp_calls import param_groups

    device = torch.get_default_device()
    here = mock.patch.object(torch_world, "FSDP_DEVICES", (device.type,))
    with here, sidelane_group(group) as wrapped, torch.no_grad():
        ours = dist.split_group(wrapped, [list(range(group.size()))], timeout=timedelta(seconds=77))
        assert ours is not None
        x = torch.arange(26.0, device=device).view(2, 13)
        expected = model()(x)
        gc.collect()
        gc.disable()
        try:
            for _ in range(4):
                net, mesh = model(), DeviceMesh.from_group(ours, device.type)
                fully_shard(net[0], mesh=mesh)
                fully_shard(net, mesh=mesh)  # the root has parameters, which stay
                torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-5)
                del net
                if group.rank() == 0:
                    gc.collect()
        finally:
            gc.enable()
        timeouts = [lane.calls.config.timeout_s for lane in ours.fsdp_lanes]
        ours.set_timeout(timedelta(seconds=66))  # as torch's _set_pg_timeout
        assert timeouts == [77, 77] and [lane.calls.config.timeout_s for lane in ours.fsdp_lanes] == [66, 66]
        used = []
        for width in (1024, 16):
            layer = fully_shard(torch.nn.Linear(width, width), mesh=DeviceMesh.from_group(ours, device.type))
            layer(torch.ones(1, width))
            used.append(ours.fsdp_lanes[0].memory().used)
            (params,) = param_groups(layer)
            assert "set_allocate_memory_from_process_group" in vars(params)
            fsdp.enable(layer).disable()
            assert "set_allocate_memory_from_process_group" not in vars(params)
            del layer, params
            gc.collect()
            dist.barrier(ours)
        assert used[0] >= 1 << 22 > 1 << 14 >= used[1]
        dist.destroy_process_group(ours)


def train_in_symmetric_memory(group: dist.ProcessGroup, ask: Callable[[torch.nn.Module], None]) -> Any:
    """A model on a Sidelane group, which is returned, loses what it loses on Gloo; all its buffers are symmetric."""
    with sidelane_group(group) as wrapped:
        # The ranks keep it, too: torch remembers what it does with a mesh by the ranks of that, whatever its group.
        ours = dist.split_group(wrapped, [list(range(group.size()))])
    assert ours is not None
    net, expected, symmetric = sharded(ours), on_cpu(lambda: losses_of(sharded(group), group)), []
    ask(net)
    kinds = ("all_gather", "reduce_scatter")
    made = {kind: getattr(sidelane.Communicator, kind) for kind in kinds}

    def noting(kind: str) -> Callable[..., Any]:
        def call(comm: sidelane.Communicator, output: Any, given: Any, **options: Any) -> Any:
            larger = output if kind == "all_gather" else given
            each = larger if isinstance(larger, list) else [larger]
            symmetric.append((kind, all(comm.heap.locate(one).symmetric for one in each if one.numel())))
            return made[kind](comm, output, given, **options)

        return call

    with contextlib.ExitStack() as patched:
        for kind in kinds:
            patched.enter_context(mock.patch.object(sidelane.Communicator, kind, noting(kind)))
        found = losses_of(net, ours)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert len(symmetric) > 10 and set(symmetric) == {(kind, True) for kind in kinds}, symmetric
    return ours


@on_ranks(2, gpu=default_stream)
def test_the_group_lends_its_communicator(group: dist.ProcessGroup) -> None:
    """What is made in a pool of the group's communicator, its calls need not stage; and one call tells the memory."""
    device = torch.get_default_device()
    with sidelane_group(group) as ours:
        assert isinstance(ours, SidelaneGroup)
        comm = ours.communicator(device)
        assert comm is ours.communicator(device.type)
        before = comm.memory()
        with sidelane.pool(comm, 1 << 20):
            output, given = torch.zeros(3000 * ours.size()), torch.full((3000,), float(ours.rank() + 1))
            other = given + 1
        assert comm.memory().used > before.used
        for is_async in (False, True):
            output.zero_()
            ended(dist.all_gather_into_tensor(output, given, ours, is_async), is_async)
            assert output.view(ours.size(), -1)[:, 7].tolist() == [rank + 1 for rank in range(ours.size())]
            assert all(comm.heap.locate(one).symmetric for one in (output, given))
        preparer = comm.preparer
        with mock.patch.object(preparer, "prepare", side_effect=preparer.prepare) as prepare:
            for _ in range(3):  # on an input that nobody compares, since nobody else reads it
                dist.all_gather_into_tensor(output.zero_(), other, ours)
                assert output.view(ours.size(), -1)[:, 7].tolist() == [rank + 2 for rank in range(ours.size())]
        assert prepare.call_count == 1
        with pytest.raises(
            sidelane.UnavailableError, match="communicator: none for meta tensors of .*does not know meta"
        ):
            ours.communicator("meta")
        if not torch.cuda.is_available():
            assert comm is ours.communicator()
            with pytest.raises(sidelane.UnavailableError, match="communicator: none for cuda tensors of .*has no GPU"):
                ours.communicator("cuda")


@on_ranks(2, gpu=default_stream)
def test_memory_of_one_group_is_staged_by_another(group: dist.ProcessGroup) -> None:
    """A tensor in the pool of one group is an argument of another's calls, as with memory that NCCL has registered."""
    with sidelane_group(group) as ours:
        other = dist.split_group(ours, [list(range(group.size()))])
        comm, size, rank = ours.communicator(torch.get_default_device()), group.size(), group.rank()
        with sidelane.pool(comm, 1 << 20):
            output, given = torch.zeros(3000 * size), torch.full((3000,), float(rank + 1))
        for step in range(4):
            for maker in (ours, other):
                given.fill_(rank + 10.0 * step + (maker is ours))
                dist.all_gather_into_tensor(output.zero_(), given, maker)
                expected = [peer + 10.0 * step + (maker is ours) for peer in range(size)]
                assert output.view(size, -1)[:, 2999].tolist() == expected, (step, maker is ours)
                total = given.clone()
                dist.all_reduce(total, group=maker, async_op=True).wait()  # type: ignore[union-attr]
                assert total[7] == sum(expected)
        assert comm.reach(output).how == "symmetric"
        assert other.communicator(torch.get_default_device()).reach(output).how == "staged"
        dist.destroy_process_group(other)


@on_ranks(2, gpu=default_stream)
def test_fsdp_trains_as_with_gloo(group: dist.ProcessGroup) -> None:
    with sidelane_group(group) as ours:
        expected, found = on_cpu(lambda: losses_of(sharded(group), group)), losses_of(sharded(ours), ours)
        assert found[-1] < 0.7 * found[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        made = {row.operation: row for row in sidelane.report().rows if row.where == "sidelane"}
        by_group = {"fsdp all_gather", "fsdp reduce_scatter"}  # on GPUs
        assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(made) or by_group <= set(made)
        assert not [row for row in sidelane.report().rows if row.where != "sidelane"]

        net = sharded(ours)
        with fsdp.enable(net) as enabled:
            torch.testing.assert_close(losses_of(net, ours), expected, rtol=1e-5, atol=0)
        assert enabled.calls and not enabled.elsewhere

        # What fsdp.enable hands on to the group is the group's to report, once, and by who has made it.
        refused = mock.patch.object(calls.GroupReduction, "of", return_value=calls.GroupReduction("none of ours"))
        with refused, fsdp.enable(net) as enabled:
            ledger.reset()
            _, scatter = collectives_of(net)[0]
            scatter(torch.zeros(2), torch.zeros(2 * ours.size()), ours, dist.ReduceOp.PRODUCT)
        assert enabled.elsewhere
        assert not [row for row in sidelane.report().rows if row.operation.startswith("fsdp reduce")]
