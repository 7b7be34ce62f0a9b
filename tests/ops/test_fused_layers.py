"""Layers, and operators of PyTorch: gradients, compiled graphs and PyTorch's own checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_embeddings import autograd
from fused_ops import check_close, communicator, fused
from marks import long
from on_ranks import on_ranks
from torch import nn

from sidelane import Communicator, ops
from sidelane.ops import EmbeddingBagAllToAll, RowParallelLinear, experts, library


@on_ranks(2, interpreted=True, backend="aot_eager")
@on_ranks(gpu=fused, timeout_s=170, backend="aot_eager")
@on_ranks(gpu=fused, timeout_s=170, backend="inductor")
@pytest.mark.parametrize("step", ["linear", long("embedding"), "norm", "gemms", "reduced"])
def test_layers_are_trained_and_compiled_whole(group: dist.ProcessGroup, step: str, backend: str) -> None:
    """Without breaks of the graph; what a backend makes of the operators is a call."""
    STEPS[step](group, backend)


def linear(group: dist.ProcessGroup, backend: str) -> None:
    """Forward and gradients of few tokens and many, next to the whole layer, eager and compiled."""
    with communicator(group) as comm:
        torch.manual_seed(3)
        whole = nn.Linear(12, 20)
        layer = RowParallelLinear.from_linear(comm, whole)
        with torch.no_grad():
            whole.bias.copy_(torch.arange(20.0))
            assert layer.bias is not None
            layer.bias.copy_(whole.bias)
        for model in (layer, compiled(layer, backend)):
            for shape in ((2, 3), (1,), (5, 7)):
                x = torch.randn(*shape, 12)
                expected = whole(x)
                mine = x[..., layer.columns].clone().requires_grad_()
                result = model(mine)
                check_close(result.detach(), expected.detach().double(), shape)
                whole.zero_grad()
                layer.zero_grad()
                expected.square().sum().backward()
                result.square().sum().backward()
                assert whole.weight.grad is not None and mine.grad is not None and layer.weight.grad is not None
                grad = whole.weight.grad[:, layer.columns].double()
                check_close(layer.weight.grad, grad, shape)
                check_close(
                    mine.grad, (2 * expected.detach() @ whole.weight.detach())[..., layer.columns].double(), shape
                )
            with torch.autocast(comm.device.type, torch.bfloat16):
                given = ((3, torch.bfloat16), (20, torch.float32))
                for tokens, dtype in given if model is layer else given[:1]:  # each is compiled anew
                    x = torch.randn(tokens, 12)
                    expected, result = whole(x), model(x[:, layer.columns].to(dtype))
                    torch.testing.assert_close(result, expected, atol=0.05, rtol=0.02)  # of one dtype
                    layer.zero_grad()
                    result.sum().backward()
                    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32


def embedding(group: dist.ProcessGroup, backend: str) -> None:
    """A step of training against autograd in float64, eager and compiled, sums, means and weights."""
    with communicator(group) as comm:
        n, rank, dim, batch = comm.world_size, comm.rank, 4, 2 * comm.world_size + 1
        for mode, is_weighted in (("sum", False), ("mean", False), ("sum", True)):
            layer = EmbeddingBagAllToAll(comm, [5] * (1 + rank % 2), dim, mode=mode)
            tables = len(layer.tables)
            offsets = torch.arange(tables * batch + 1) * 3
            indices = torch.arange(3 * tables * batch) * 2 % 5
            model = compiled(layer, backend)
            wanted = None
            for run in (layer, model):
                weights = torch.arange(1.0, len(indices) + 1).requires_grad_() if is_weighted else None
                layer.zero_grad()
                result = run(indices, offsets, weights)
                (result * 2).sum().backward()
                assert wanted is None or torch.equal(result, wanted)
                wanted = result.detach()
                leaves = [table.detach() for table in layer.tables]
                grad = torch.full((batch, tables * dim), 2.0, dtype=torch.float64)
                expected = autograd(leaves, indices, offsets, mode, None if weights is None else weights.detach(), grad)
                found = [table.grad for table in layer.tables] + ([] if weights is None else [weights.grad])
                for part, other in zip(found, expected, strict=True):
                    assert part is not None
                    check_close(part, other, (mode, is_weighted))
            samples = batch // n + (rank < batch % n)
            assert wanted is not None and wanted.shape == (samples, layer.table_count * dim)


def norm(group: dist.ProcessGroup, backend: str) -> None:
    """Gradients of all_reduce_rms_norm against autograd in float64, eager and compiled."""
    with communicator(group) as comm:
        number = library.number_of(comm)

        def call(x: Any, residual: Any, weight: Any) -> Any:
            y, total = library.all_reduce_rms_norm(number, x, residual, weight, 1e-5)
            return (y * y.detach()).sum() + 3 * total.sum(), y

        for run in (call, torch.compile(call, backend=backend, fullgraph=True)):
            torch.manual_seed(1)
            leaves = [torch.randn(*size).requires_grad_() for size in ((3, 8), (3, 8), (8,))]
            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            loss, y = run(*leaves)
            loss.backward()
            total = wide[0] * comm.world_size + wide[1]
            expected = nn.functional.rms_norm(total, (8,), wide[2], 1e-5)
            check_close(y.detach(), expected.detach(), "norm")
            ((expected * expected.detach()).sum() + 3 * total.sum()).backward()
            for leaf, other, ranks in zip(leaves, wide, (comm.world_size, 1, 1), strict=True):
                assert leaf.grad is not None and other.grad is not None
                check_close(leaf.grad, other.grad / ranks, "norm")


def gemms(group: dist.ProcessGroup, backend: str) -> None:
    """A column-parallel layer and a row-parallel one behind it, rows spread between the layers, against float64."""
    with communicator(group) as comm:
        n, rank, number = comm.world_size, comm.rank, library.number_of(comm)

        def call(x: Any, up: Any, down: Any) -> Any:
            return library.gemm_reduce_scatter(number, library.all_gather_gemm(number, x, up).relu(), down)

        for run in (call, torch.compile(call, backend=backend, fullgraph=True)):
            torch.manual_seed(2)
            whole = [torch.randn(*size).requires_grad_() for size in ((3 * n, 8), (4 * n, 8), (6, 4 * n))]
            x, up, down = whole
            cut = [part.detach().clone() for part in (x.chunk(n)[rank], up.chunk(n)[rank], down.chunk(n, 1)[rank])]
            mine = [part.requires_grad_() for part in cut]
            wide = [part.detach().double().requires_grad_() for part in whole]
            expected = (wide[0] @ wide[1].T).relu() @ wide[2].T
            expected.square().sum().backward()
            result = run(*mine)
            check_close(result.detach(), expected.detach().chunk(n)[rank], "result")
            result.square().sum().backward()
            for number_of_part, (part, other) in enumerate(zip(mine, wide, strict=True)):
                assert part.grad is not None and other.grad is not None
                check_close(part.grad, other.grad.chunk(n, number_of_part // 2)[rank], number_of_part)


def reduced(group: dist.ProcessGroup, backend: str) -> None:
    """A row-parallel layer of many tokens, and of two communicators in turn, against float64.

    The second communicator makes its number a dynamic one, which fake implementations see as a SymInt.
    """
    with communicator(group) as comm, communicator(group) as other:
        n, rank = comm.world_size, comm.rank

        def call(number: int, x: Any, weight: Any) -> Any:
            return library.gemm_all_reduce(number, x, weight), library.all_gather_rows(number, x.detach())

        found = torch.compile(call, backend=backend, fullgraph=True, dynamic=None)
        wanted = [library.number_of(part) for part in (comm, other, comm)]
        for run in (call, found):
            for turn, number in enumerate(wanted):
                torch.manual_seed(turn)
                whole = [torch.randn(17 + turn, 4 * n).requires_grad_(), torch.randn(6, 4 * n).requires_grad_()]
                mine = [part.detach().chunk(n, 1)[rank].clone().requires_grad_() for part in whole]
                wide = [part.detach().double().requires_grad_() for part in whole]
                expected = wide[0] @ wide[1].T
                expected.square().sum().backward()
                result, rows = run(number, *mine)
                check_close(result.detach(), expected.detach(), (turn, "result"))
                assert torch.equal(rows, torch.cat(whole[0].detach().chunk(n, 1)))
                result.square().sum().backward()
                for part, wider in zip(mine, wide, strict=True):
                    assert part.grad is not None and wider.grad is not None
                    check_close(part.grad, wider.grad.chunk(n, 1)[rank], (turn, "gradient"))


STEPS = {step.__name__: step for step in (linear, embedding, norm, gemms, reduced)}


def compiled(layer: nn.Module, backend: str) -> Any:
    return torch.compile(layer, backend=backend, fullgraph=True)


class Overwritten:
    """A turn behind which all results of operators are overwritten, as a call on another stream would do at once.

    Args:
        comm: communicator of the operators.

    Attributes:
        over: number of turns that have ended.
    """

    over = 0

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        Overwritten.over += 1
        for made in list(self._comm.cache.values()):
            for name in ("_output", "_came", "_values"):
                if isinstance(result := getattr(made, name, None), torch.Tensor):
                    result.fill_(torch.nan)


@on_ranks(2, interpreted=True)
def test_results_of_operators_are_copied_in_turn(group: dist.ProcessGroup) -> None:
    """Operators of PyTorch return what stays when the turn of their buffers is over."""
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "buffer_lock", Overwritten, raising=False)
        n, number, made = comm.world_size, library.number_of(comm), torch.ops.sidelane
        x, weight, many = torch.ones(2 * n, 8), torch.ones(4, 8), torch.ones(20, 8)
        counts, offsets = torch.full((n, n), 2), torch.arange(2 * n + 1)
        found = [
            made.row_parallel_linear(number, many, weight) / n,
            made.gemm_all_reduce(number, many, weight) / n,
            made.embedding_all_to_all(number, [many], torch.zeros(2 * n).int(), offsets, None, "sum", n) * 8,
            made.gemm_all_to_all(number, x, weight, counts, 2 * n),
        ]
        comm.synchronize()
        assert [bool((result == 8).all()) for result in found] == [True] * len(found)
    assert Overwritten.over == len(found)


@on_ranks(2, interpreted=True)
def test_operators_without_gradients_name_their_replacement(group: dist.ProcessGroup) -> None:
    """Operators without gradients are refused where autograd follows; under no_grad they run."""
    with communicator(group) as comm:
        n, number = comm.world_size, library.number_of(comm)
        x, weight, counts = torch.ones(n, 8), torch.ones(4, 8, requires_grad=True), torch.ones(n, n).long()
        for call in (library.gemm_all_to_all, library.all_to_all_gemm):
            with torch.no_grad():
                assert bool((call(number, x, weight, counts, n) == 8).all())
            with pytest.raises(ValueError, match=r"allowed=torch.no_grad\(\)\): dispatch_tokens, combine_tokens"):
                call(number, x, weight, counts, n)


@on_ranks(2, interpreted=True)
def test_tables_have_gradients_of_rows(group: dist.ProcessGroup) -> None:
    """``sparse=True``: a step of training by gradients of rows is that of ``nn.EmbeddingBag``, also where compiled code
    leaves the layer to eager code; the gradient holds what was looked up, and is added up in the optimizer.
    """
    with communicator(group) as comm:
        rank, dim, batch = comm.rank, 4, 2 * comm.world_size + 1
        for mode, is_weighted in (("sum", False), ("mean", False), ("sum", True)):
            layer = EmbeddingBagAllToAll(comm, [5] * (1 + rank % 2), dim, mode=mode, sparse=True)
            tables = len(layer.tables)
            offsets = torch.arange(tables * batch + 1) * 3
            indices = torch.arange(3 * tables * batch) * 3 % 4  # the last row of each table is never looked up
            for run in (layer, torch.compile(layer, backend="aot_eager")):
                weights = torch.arange(1.0, len(indices) + 1).requires_grad_() if is_weighted else None
                whole = [nn.EmbeddingBag.from_pretrained(t.detach().clone(), freeze=False) for t in layer.tables]
                for number, one in enumerate(whole):
                    one.mode, one.sparse, one.include_last_offset = mode, False, True
                    bags = slice(3 * number * batch, 3 * (number + 1) * batch)
                    factors = None if weights is None else weights.detach()[bags]
                    (2 * one(indices[bags], offsets[: batch + 1], factors)).sum().backward()
                layer.zero_grad()
                (run(indices, offsets, weights) * 2).sum().backward()
                for table, one in zip(layer.tables, whole, strict=True):
                    assert table.grad is not None and table.grad.is_sparse and one.weight.grad is not None
                    assert table.grad.shape == table.shape and table.grad._nnz() == 3 * batch
                    assert set(table.grad.coalesce().indices()[0].tolist()) == {0, 1, 2, 3}
                    check_close(table.grad.to_dense(), one.weight.grad.double(), (mode, is_weighted))
                if weights is not None:
                    assert weights.grad is not None and not weights.grad.is_sparse
                for parameters in (layer.parameters(), [one.weight for one in whole]):
                    torch.optim.SGD(parameters, lr=0.1).step()
                for table, one in zip(layer.tables, whole, strict=True):
                    check_close(table.detach(), one.weight.detach().double(), "a step")


@pytest.mark.long
@on_ranks(2, interpreted=True)
def test_operators_of_pytorch_are_sound(group: dist.ProcessGroup) -> None:
    """PyTorch's own checks of an operator: schema, fake results, autograd."""
    with communicator(group) as comm:
        number = library.number_of(comm)
        batch = 2 * comm.world_size + 1
        x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
        n, scale = comm.world_size, torch.randn(8, requires_grad=True)
        even = torch.randn(2 * n, 8, requires_grad=True)
        routed = even.detach(), weight.detach()  # these have no gradients
        tables = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
        bags = (torch.arange(2 * batch) % 5, torch.arange(2 * batch + 1))
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (library.row_parallel_linear, (number, x, weight)),
            (library.all_reduce_rms_norm, (number, x, None, scale, 1e-5)),
            (library.embedding_all_to_all, (number, tables, *bags, None, "sum", 2 * comm.world_size)),
            (library.gemm_reduce_scatter, (number, even, weight)),
            (library.all_gather_gemm, (number, x, weight)),
            (library.gemm_all_reduce, (number, x, weight)),
            (library.gemm_all_to_all, (number, *routed, torch.ones(n, n).long(), 2 * n)),
            (library.all_to_all_gemm, (number, *routed, torch.ones(n, n).long(), 2 * n)),
        ]
        routes = ops.route_experts(comm, torch.arange(3)[:, None], x[:, :1].detach(), experts=2)
        places = [routes.leaving, routes.returned, routes.rows, routes.results, routes.counts]
        values, parts = torch.randn(len(routes.rows), 8, requires_grad=True), torch.randn(3 * n, 1)
        calls += [
            (experts.routing_of_all, (number, torch.ones(3, 1).int(), x[:, :1].detach().requires_grad_())),
            (experts.index_tokens, (number, torch.ones(3, 1).int(), torch.ones(3 * n, 1).int(), 2, 3)),
            (experts.own_sums, (number, parts.detach())),
            (experts.tokens_to_experts, (number, x, places, False, 2)),
            (experts.tokens_to_experts, (number, x, places, True, 2)),
            (experts.experts_to_tokens, (number, values.detach(), None, places, 2)),
            (experts.experts_to_tokens, (number, values, parts.requires_grad_(), places, 2)),
        ]
        for operator, arguments in calls:
            torch.library.opcheck(operator, arguments)


@on_ranks(long(2), interpreted=True)
@on_ranks(gpu=fused, fresh=True, timeout_s=170)
def test_operators_run_with_reduced_overhead(group: dist.ProcessGroup) -> None:
    """``torch.compile(mode="reduce-overhead")``, on GPUs a graph, of operators that follow each other: replayed on new
    inputs it gives what eager calls give. Nothing but operators: there is nothing to compile for CPUs. GPUs have
    processes of the test's own, whose graphs end with them.
    """
    from torch._dynamo.utils import counters

    with communicator(group) as comm, torch.no_grad():
        n, number = comm.world_size, library.number_of(comm)
        torch.manual_seed(3)
        up, down, scale, counts = torch.randn(8, 8), torch.randn(8, 8), torch.rand(8), torch.full((n, n), 2)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = library.row_parallel_linear(number, x, up)
            y, total = library.all_reduce_rms_norm(number, y, x, scale, 1e-5)
            hidden = library.all_to_all_gemm(number, y, up, counts, 2 * n)
            back = library.gemm_all_to_all(number, hidden, down, counts, 2 * n)
            part = library.gemm_reduce_scatter(number, back, down)
            return total, back, part, library.all_gather_gemm(number, part, up)

        counters.clear()
        run = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        for seed in range(6):
            torch.manual_seed(10 * seed + comm.rank)
            x = torch.randn(2 * n, 8)
            if x.is_cuda:
                torch.compiler.cudagraph_mark_step_begin()
            found = [part.clone() for part in run(x)]
            for place, (one, other) in enumerate(zip(found, step(x), strict=True)):
                check_close(one, other.double(), (seed, place))
        assert not (x.is_cuda and counters["inductor"]["cudagraph_skips"]), counters["inductor"]
        comm.synchronize()
        torch._dynamo.reset()  # and with it graphs, which hold what the communicator is about to give back


@on_ranks(2, interpreted=True)
def test_a_layer_outlives_its_communicator(group: dist.ProcessGroup) -> None:
    """What a layer says whose communicator is gone."""
    with Communicator(group) as comm:
        layer = RowParallelLinear(comm, 4 * comm.world_size, 4)
    with pytest.raises(ValueError, match="no open communicator has this number"):
        layer(torch.ones(1, 4))
