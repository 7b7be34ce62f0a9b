"""What ranks do in tests of the compiler pass: patterns that it replaces, and those that it leaves alone."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from functorch.compile import min_cut_rematerialization_partition
from fused_ops import check_close, communicator
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from sidelane import Communicator
from sidelane.ops import library
from sidelane_fusion import LOGGER, Fusion, operators


def replaced(group: dist.ProcessGroup) -> int:
    """What the pass replaces and what it leaves alone, with gradients, against the program that is not compiled."""
    with communicator(group) as comm:
        n, name = comm.world_size, group

        def patterns(x: Any, weight: Any, up: Any) -> Any:
            few = funcol.all_reduce(x[:3] @ weight.t(), "sum", name)
            many = funcol.all_reduce(x @ weight.t(), "sum", name)
            part = funcol.reduce_scatter_tensor(x @ weight.t(), "sum", 0, name)
            return few, many, part, funcol.all_gather_tensor(x, 0, name) @ up.t()

        def exchanged(x: Any, weight: Any, up: Any) -> Any:
            plain = funcol.all_to_all_single(x @ weight.t(), None, None, name)
            high = (x @ up.t()).view(n, -1, 5)
            return plain, funcol.all_to_all_single(high, [1] * n, [1] * n, name) * 2

        def uneven(x: Any, weight: Any, up: Any) -> Any:
            sizes = [len(x) // n + 2 * (to == comm.rank) for to in range(n)]
            product = torch.cat([x, x[:2]]) @ weight.t()
            kept = x @ up.t()
            few = funcol.all_to_all_single(product, sizes, sizes, name)
            return few, kept, funcol.all_to_all_single(kept, None, None, name)

        def average(x: Any, weight: Any, up: Any) -> Any:
            return (funcol.all_reduce(x @ weight.t(), "avg", name),)

        def columns(x: Any, weight: Any, up: Any) -> Any:
            return funcol.all_gather_tensor(x, 1, name) @ up.repeat(1, n).t(), funcol.reduce_scatter_tensor(
                x @ weight.t(), "sum", 1, name
            )

        def twice(x: Any, weight: Any, up: Any) -> Any:
            product, rows = x @ weight.t(), funcol.all_gather_tensor(x, 0, name)
            return product, funcol.all_reduce(product, "sum", name), rows, rows @ up.t()

        def wide(x: Any, weight: Any, up: Any) -> Any:
            return (funcol.all_reduce(x.double() @ weight.double().t(), "sum", name),)

        all_four = ["row_parallel_linear", "gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm"]
        torch.manual_seed(comm.rank)
        values = torch.randn(18 * n, 8), torch.randn(2 * n, 8), torch.randn(5, 8)
        some = (patterns, all_four), (exchanged, ["gemm_all_to_all_evenly"] * 2), (twice, ["all_gather_gemm_and_rows"])
        for call, expected in (*some, *((other, []) for other in (uneven, average, columns, wide))):
            if call is average and dist.get_backend(group) == "gloo":
                pass_only(comm, group, call, values)
                continue
            fusion = Fusion(comm, group)
            whole = call is not columns  # torch 2.11 does not trace how columns are put together
            run = torch.compile(call, backend=fusion.backend, fullgraph=whole, dynamic=False)
            found, wanted = run(*values), call(*values)
            for one, other in zip(found, wanted, strict=True):
                check_close(one.float(), other.double(), call.__name__)
            assert fusion.replaced == expected, (call.__name__, fusion.replaced)
        gradients = []
        fusion = Fusion(comm, group)
        trained = torch.compile(sharded(name), backend=fusion.backend, fullgraph=True, dynamic=False)
        for run in (sharded(name), trained):
            leaves = [value.clone().requires_grad_() for value in (values[0], values[2], torch.ones(8, 5))]
            run(*leaves).square().sum().backward()
            gradients.append([leaf.grad for leaf in leaves])
        for one, other in zip(*gradients, strict=True):
            check_close(one, other.double(), "gradient")
        assert "gemm_reduce_scatter" in fusion.replaced
    return 7


def checked(group: dist.ProcessGroup) -> int:
    """PyTorch's own checks of the pass' operators: schema and fake results."""
    with communicator(group) as comm:
        number, x, weight = library.number_of(comm), torch.randn(2 * comm.world_size, 8), torch.randn(20, 8)
        for operator in (operators.all_gather_gemm_and_rows, operators.gemm_all_to_all_evenly):
            torch.library.opcheck(operator, (number, x, weight))
    return 2


def norms(group: dist.ProcessGroup) -> int:
    """All-reduces in front of norms, with what must stay, against the program that is not compiled."""
    with communicator(group) as comm:

        def plain(x: Any, residual: Any, weight: Any) -> Any:
            total = funcol.all_reduce(x, "sum", group) + residual
            return nn.functional.rms_norm(total, weight.shape, weight, 1e-5), total

        def by_hand(x: Any, residual: Any, weight: Any) -> Any:
            total = residual + funcol.all_reduce(x, "sum", group)
            wide = total.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            return weight * wide.to(total.dtype), total * 2

        def alone(x: Any, residual: Any, weight: Any) -> Any:
            return (nn.functional.rms_norm(funcol.all_reduce(x, "sum", group), weight.shape, weight, 1e-5),)

        def whole(x: Any, residual: Any, weight: Any) -> Any:  # as on GPUs without Inductor
            total = funcol.all_reduce(x, "sum", group) + residual
            return torch.ops.aten._fused_rms_norm(total, list(weight.shape), weight, 1e-5)[0], total

        def whole_and_scale(x: Any, residual: Any, weight: Any) -> Any:  # the second result, as gradients need it
            total = funcol.all_reduce(x, "sum", group) + residual
            normal, scale = torch.ops.aten._fused_rms_norm(total, list(weight.shape), weight, 1e-5)
            return normal, scale.to(x.dtype)

        def kept(x: Any, residual: Any, weight: Any) -> Any:  # what is normalised is a result, too
            total = funcol.all_reduce(x, "sum", group) + residual
            normal = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5)
            return normal * weight, normal

        def scaled(x: Any, residual: Any, weight: Any) -> Any:  # the residual is multiplied
            total = torch.add(funcol.all_reduce(x, "sum", group), residual, alpha=2)
            return (nn.functional.rms_norm(total, weight.shape, weight, 1e-5),)

        def twice(x: Any, residual: Any, weight: Any) -> Any:  # the sum of the ranks is a result, too
            came = funcol.all_reduce(x, "sum", group)
            return nn.functional.rms_norm(came + residual, weight.shape, weight, 1e-5), came

        def spread(x: Any, residual: Any, weight: Any) -> Any:  # over columns of the batch
            total = funcol.all_reduce(x, "sum", group) + residual
            return (total * torch.rsqrt(total.pow(2).mean(0, keepdim=True) + 1e-5) * weight,)

        fused, others = (plain, by_hand, alone, whole, whole_and_scale), (kept, scaled, twice, spread)
        cases = [*((call, 1) for call in fused), *((call, 0) for call in others)]
        for dtype, some in ((torch.float32, cases), (torch.bfloat16, cases[: len(fused) + 1])):
            torch.manual_seed(comm.rank)
            x = torch.randn(2, 3, 8).to(dtype)
            torch.manual_seed(7)
            values = x, torch.randn(2, 3, 8).to(dtype), torch.randn(8).to(dtype)
            for call, count in some:
                fusion = Fusion(comm, group)
                run = torch.compile(call, backend=fusion.backend, fullgraph=True, dynamic=False)
                for one, other in zip(run(*values), call(*(value.double() for value in values)), strict=True):
                    assert one.dtype == dtype and one.shape == other.shape
                    check_close(one, other, (call.__name__, dtype))
                assert fusion.replaced == ["all_reduce_rms_norm"] * count, (call.__name__, dtype, fusion.replaced)
        trained(comm, group, plain)
    return len(cases)


class Told(logging.Handler):
    """What the pass logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(comm: Communicator, group: dist.ProcessGroup, call: Any) -> None:
    """Gradients of a norm behind Inductor's partitioner, which keeps the reciprocal root; else more, and it stays."""
    values, logger = (torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8)), logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG)
    gradients = []
    for count in (None, 1, 0):
        fusion, told = Fusion(comm, group), Told()
        logger.addHandler(told)

        def compiler(module: Any, _: Any, fusion: Fusion = fusion) -> Any:
            fusion(module.graph)
            module.recompile()
            return module

        both = {"fw_compiler": compiler, "bw_compiler": compiler, "partition_fn": min_cut_rematerialization_partition}
        run, backend = call, aot_autograd(**both) if count else fusion.backend
        if count is not None:
            run = torch.compile(call, fullgraph=True, dynamic=False, backend=backend)
        leaves = [value.clone().requires_grad_(number > 0) for number, value in enumerate(values)]
        y, total = run(*leaves)
        ((y * y.detach()).sum() + 3 * total.sum()).backward()
        gradients.append([leaf.grad for leaf in leaves[1:]])  # nothing comes back through this collective
        logger.removeHandler(told)
        if count == 0 and torch.__version__ < "2.13" and fusion.replaced:
            continue  # the partitioner of torch 2.11 keeps no more than the other one
        assert fusion.replaced == ["all_reduce_rms_norm"] * (count or 0), (fusion.replaced, told.lines)
        assert count != 0 or any("what is normalised is kept" in line for line in told.lines), told.lines
    for found in gradients[1:]:
        for one, other in zip(found, gradients[0], strict=True):
            check_close(one, other.double(), "gradients")


def batches(group: dist.ProcessGroup) -> int:
    """Batch x sequence x hidden, cut and put together along either, by the pass alone and by Inductor, which must lower
    what is put in.
    """
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank

        def summed(x: Any, weight: Any) -> Any:
            return funcol.all_reduce(x @ weight.t(), "sum", group)

        def scattered(dim: int) -> Any:
            return lambda x, weight: funcol.reduce_scatter_tensor(x @ weight.t(), "sum", dim, group)

        def gathered(dim: int) -> Any:
            return lambda x, weight: funcol.all_gather_tensor(x, dim, group) @ weight.t()

        def two(x: Any, weight: Any) -> Any:  # what is gathered is needed twice
            rows = funcol.all_gather_tensor(x, 1, group)
            return rows @ weight.t() + rows.sum()

        def swapped(x: Any, weight: Any) -> Any:  # parts in another order than that of the ranks
            parts = (x @ weight.t()).chunk(n, 1)
            return funcol.reduce_scatter_tensor(torch.cat(parts[::-1]), "sum", 0, group)

        torch.manual_seed(rank)
        weight, several = torch.randn(2 * n, 8), (2 * n, 3 * n, 8)
        scatters, gathers = "gemm_reduce_scatter", "all_gather_gemm"
        cases: list[tuple[Any, tuple[int, ...], str]] = [
            *((scattered(dim), several, scatters) for dim in (0, 1)),
            (scattered(1), (1, 2 * n, 8), scatters),
            *((scattered(dim), (2, n, n, 8), scatters) for dim in (1, 2)),
            *((gathered(dim), several, gathers) for dim in (0, 1)),
            *((gathered(dim), (2, 3, 2, 8), gathers) for dim in (1, 2)),
            (gathered(1), (1, 5, 8), gathers),
            *((call, several, "") for call in (scattered(2), swapped)),
            (two, several, "all_gather_gemm_and_rows"),
            (summed, (2, 20, 8), "gemm_all_reduce"),
        ]
        if torch.__version__ < "2.13":  # its Dynamo does not look into gathers along other dimensions than the first
            cases = [case for number, case in enumerate(cases) if number not in range(6, 10) and case[0] is not two]
        gather = [case for case in cases if case[2] == gathers][:2][-1]
        for chosen, inductor in ((cases, False), ([gather, cases[-1]], True)):
            calls, xs = [call for call, _, _ in chosen], [torch.randn(*shape) for _, shape, _ in chosen]

            def run(calls: Any, xs: Any, weight: Any) -> Any:
                return [call(x, weight) for call, x in zip(calls, xs, strict=True)]

            fusion = Fusion(comm, group)
            how: Any = {"options": passing(fusion)} if inductor else {"backend": fusion.backend}
            given = functools.partial(run, calls)
            # Without fullgraph, as people call it: torch copies the options then, and with them the pass.
            found = torch.compile(given, fullgraph=not inductor, dynamic=False, **how)(xs, weight)
            for number, (one, other) in enumerate(zip(found, given(xs, weight), strict=True)):
                assert one.shape == other.shape and one.stride() == other.stride()
                check_close(one, other.double(), number)
            assert fusion.replaced == [name for _, _, name in chosen if name], fusion.replaced
    return len(cases)


def passing(fusion: Fusion) -> dict[str, Any]:
    """Return options of torch.compile for a pass within Inductor; a graph from a cache would not say what is fused."""
    torch._functorch.config.enable_autograd_cache = False
    return {"post_grad_custom_pre_pass": fusion, "fx_graph_cache": False}


def cached(group: dist.ProcessGroup, folder: str, before: int) -> tuple[int, int, list[str]]:
    """A program by Inductor with its caches in a folder, behind ``before`` other communicators; what caches had."""
    from torch._dynamo.utils import counters

    def call(x: Any, weight: Any) -> Any:
        return funcol.all_reduce((x * 2) @ weight.t(), "sum", group).relu()

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{group.rank()}"
    with communicator(group) as first, communicator(group) as second:
        comm = (first, second)[before]
        numbers = [library.number_of(each) for each in (first, second)]
        assert numbers == [1, 2]  # of this process, which is new
        fusion = Fusion(comm, group)
        torch.manual_seed(comm.rank)
        values = torch.randn(3, 8), torch.randn(6, 8)
        options = {"post_grad_custom_pre_pass": fusion, "fx_graph_cache": True}
        check_close(torch.compile(call, options=options, dynamic=False)(*values), call(*values).double(), "cached")
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], fusion.replaced


def sharded(group: dist.ProcessGroup) -> Any:
    """A column-parallel layer and a row-parallel one, rows spread between the layers."""

    def call(x: Any, up: Any, down: Any) -> Any:
        inner = (funcol.all_gather_tensor_autograd(x, 0, group) @ up.t()).relu()
        return funcol.reduce_scatter_tensor_autograd(inner @ down.t(), "sum", 0, group)

    return call


def other_ranks(group: dist.ProcessGroup) -> str:
    """What rank 0 is told of a group in which another rank has the last one's place."""
    first, other = dist.new_group([0, 1]), dist.new_group([0, 2])  # by all ranks of the default group
    if dist.get_rank() > 1:
        return ""
    with Communicator(first) as comm:
        assert Fusion(comm, first).replaced == []
        if comm.rank == 0:
            assert (dist.get_world_size(other), dist.get_rank(other)) == (comm.world_size, comm.rank)
            try:
                Fusion(comm, other)
            except ValueError as error:
                return str(error)
    return "nothing"


def pass_only(comm: Communicator, group: dist.ProcessGroup, call: Any, values: Any) -> None:
    """A program that Gloo cannot run: the pass has nothing to replace in its graph."""
    fusion, graph = Fusion(comm, group), make_fx(call, tracing_mode="fake")(*values).graph
    fusion(graph)
    assert not fusion.replaced
