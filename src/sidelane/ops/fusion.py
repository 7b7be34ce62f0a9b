"""A pass of torch.compile that puts fused operators in place of GEMMs and collectives next to them.

It works on the graphs of aten operators that autograd has left, forward and backward apart, so that gradients are what
they were: ``mm`` -> ``all_reduce``, ``mm`` -> ``reduce_scatter_tensor``, ``all_gather_into_tensor`` -> ``mm``, and
``all_reduce`` -> residual -> RMS norm, each with its ``wait_tensor``. Of a GEMM, an all-reduce and a norm, the last two
become one. What is not the same in every respect stays as it is.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from sidelane.collectives import Communicator
from sidelane.ops import gemv, library, rms_norm
from sidelane.ops.fusion_norm import norm_behind
from sidelane.ops.handle import FLOATS
from sidelane.ops.operands import MOST_ELEMENTS

logger = logging.getLogger(__name__)

MOST_RANKS = 8
_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


class _Unfit(Exception):
    """Why a pattern stays as it is."""


class Fusion(CustomGraphPass):
    """Replace unfused patterns on a process group. Each replacement is logged (INFO), each refusal too (DEBUG).

    All ranks must compile the same program: a rank that fuses what another does not ends in a MismatchError. Use it as
    ``torch.compile(model, options={"post_grad_custom_pre_pass": fusion})`` or, without Inductor,
    ``torch.compile(model, backend=fusion.backend)``.

    Args:
        comm: the ranks of the group, open for as long as compiled code runs.
        group: whose collectives are replaced, of the same ranks in the same order; None is the default group.

    Raises:
        ValueError: the group has other ranks than the communicator, or another order of them.
    """

    def __init__(self, comm: Communicator, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        given, allowed = dist.get_process_group_ranks(group), list(comm.lane.session.ranks)
        if given != allowed:
            raise ValueError(f"Fusion: ranks of the group (value={given}, allowed={allowed}, the communicator's)")
        self._comm, self._number, self._group = comm, library.number_of(comm), group.group_name
        self.replaced: list[str] = []
        """Operators that were put in, in the order of graphs."""

    def uuid(self) -> Any:
        """None: compiled graphs have a communicator's number in them, which says nothing to another process."""
        return None

    def __call__(self, graph: Graph) -> None:
        """Replace what fits in a graph of aten operators."""
        for node in list(graph.nodes):
            name = _collective_of(node)
            if name is None:
                continue
            try:
                if name == _COLLECTIVES[2]:
                    put = self._gather(graph, node)
                else:
                    put = (name == _COLLECTIVES[0] and self._norm(graph, node)) or self._reduce(graph, node, name)
            except _Unfit as reason:
                logger.debug("sidelane: %s stays %s: %s", node.name, name, reason)
            else:
                self.replaced.append(put)
                logger.info("sidelane: %s becomes a part of %s", name, put)
        graph.lint()

    @property
    def backend(self) -> Callable[..., Any]:
        """A backend of torch.compile that does this and nothing else."""

        def compiler(module: GraphModule, _: Any) -> Any:
            self(module.graph)
            module.recompile()
            return module

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)

    def _reduce(self, graph: Graph, node: Node, name: str) -> str:
        is_scattered = name == _COLLECTIVES[1]
        given: tuple[Any, ...] = node.args
        product, kind, *sizes, group = given
        _require(kind == "sum", f"it is {kind}, not a sum")
        wait = self._of_the_group(node, group, sizes)
        views = []
        while not is_scattered and isinstance(product, Node) and product.target in _VIEWS:
            _used_once(product, "the product")
            views.append(product)
            product = product.args[0]
        _require(isinstance(product, Node) and product.target is _aten.mm.default, "no mm in front")
        _used_once(product, "the product")
        x, weight = self._factors(product)
        rows, columns = product.meta["val"].shape
        _require(rows * columns <= MOST_ELEMENTS, "too many elements")
        if is_scattered:
            _require(rows % self._comm.world_size == 0, "rows that the ranks do not divide")
            fused = "gemm_reduce_scatter"
        elif rows <= gemv.MOST_TOKENS and columns <= gemv.MOST_ROWS:
            fused = "row_parallel_linear"
        else:
            fused = "gemm_all_reduce"
        return self._put(graph, wait, fused, x, weight, (wait, node, *views, product))

    def _norm(self, graph: Graph, node: Node) -> str | None:
        """None if no norm is behind it."""
        given: tuple[Any, ...] = node.args
        x, kind, group = given
        wait = next(iter(node.users), None)
        found = None if wait is None else norm_behind(wait)
        if wait is None or found is None or kind != "sum":
            return None
        self._of_the_group(node, group, [])
        tensors = [x, *([] if found.residual is None else [found.residual]), found.weight]
        for tensor in tensors:
            value = tensor.meta["val"]
            self._check(value)
            _require(value.is_contiguous() and value.storage_offset() * value.itemsize % 4 == 0, "a copy is needed")
        shape, width = x.meta["val"].shape, x.meta["val"].shape[-1]
        tokens, nbytes = x.meta["val"].numel() // width, width * x.meta["val"].itemsize
        if tokens > rms_norm.MOST_TOKENS or nbytes % 4 or nbytes > rms_norm.MOST_ROW_BYTES:
            return None
        order = {one: number for number, one in enumerate(graph.nodes)}
        _require(all(order[one] < order[found.total] for one in tensors), "the weight is computed later")
        with graph.inserting_before(found.total):
            parts = [None if one is None else self._shaped(graph, one, [tokens, width]) for one in (x, found.residual)]
            arguments = (self._number, *parts, found.weight, found.eps)
            both = graph.call_function(torch.ops.sidelane.all_reduce_rms_norm.default, arguments)
            flat = x.meta["val"].new_empty(tokens, width)
            both.meta["val"] = flat, flat
            results = []
            for number in (0, 1):
                one = graph.call_function(operator.getitem, (both, number))
                one.meta["val"] = flat
                results.append(self._shaped(graph, one, list(shape)))
        found.result.replace_all_uses_with(results[0])
        for one in (found.result, *found.between):
            graph.erase_node(one)
        found.total.replace_all_uses_with(results[1])
        for one in dict.fromkeys((found.total, wait, node)):
            graph.erase_node(one)
        return "all_reduce_rms_norm"

    def _result_rows(self, fused: str, x: Node) -> int:
        rows, n = int(x.meta["val"].shape[0]), self._comm.world_size
        return rows * n if fused == "all_gather_gemm" else rows // n if fused == "gemm_reduce_scatter" else rows

    def _shaped(self, graph: Graph, node: Node, shape: list[int]) -> Node:
        if list(node.meta["val"].shape) == shape:
            return node
        made = graph.call_function(_aten.reshape.default, (node, shape))
        made.meta["val"] = node.meta["val"].reshape(shape)
        return made

    def _gather(self, graph: Graph, node: Node) -> str:
        given: tuple[Any, ...] = node.args
        x, *sizes, group = given
        wait = self._of_the_group(node, group, sizes)
        _used_once(wait, "what is gathered")
        product = next(iter(wait.users))
        _require(product.target is _aten.mm.default and product.args[0] is wait, "no mm behind")
        _, weight = self._factors(product)
        rows, depth = wait.meta["val"].shape
        _require(rows * max(depth, product.meta["val"].shape[1]) <= MOST_ELEMENTS, "too many elements")
        return self._put(graph, product, "all_gather_gemm", x, weight, (product, wait, node))

    def _of_the_group(self, node: Node, group: object, sizes: list[Any]) -> Node:
        n = self._comm.world_size
        _require(n <= MOST_RANKS, f"more than {MOST_RANKS} ranks")
        _require(group == self._group and all(size == n for size in sizes), "another group")
        _used_once(node, "the collective")
        wait = next(iter(node.users))
        _require(wait.target is torch.ops._c10d_functional.wait_tensor.default, "nobody waits for it")
        return wait

    def _check(self, value: torch.Tensor) -> None:
        _require(all(isinstance(size, int) for size in value.shape), "dynamic shapes")
        _require(value.numel() > 0, "no elements")
        _require(value.dtype in FLOATS, f"dtype {value.dtype}")
        _require(value.device.type == self._comm.device.type, f"device {value.device}")

    def _factors(self, product: Node) -> tuple[Any, Any]:
        factors: tuple[Any, ...] = product.args
        for factor in (*factors, product):
            self._check(factor.meta["val"])
        x, weight = factors
        is_in_rows = x.meta["val"].stride(1) == 1 and weight.meta["val"].stride(0) == 1
        _require(is_in_rows, "a factor would be copied first")
        return x, weight

    def _put(self, graph: Graph, last: Node, fused: str, x: Any, weight: Any, replaced: tuple[Node, ...]) -> str:
        overload = getattr(torch.ops.sidelane, fused).default
        with graph.inserting_before(last):
            rows = graph.call_function(_aten.permute.default, (weight, [1, 0]))
            rows.meta["val"] = weight.meta["val"].t()
            put = graph.call_function(overload, (self._number, x, rows))
            put.meta["val"] = last.meta["val"].new_empty(self._result_rows(fused, x), weight.meta["val"].shape[1])
            put = self._shaped(graph, put, list(last.meta["val"].shape))
        last.replace_all_uses_with(put)
        for node in replaced:
            graph.erase_node(node)
        return fused


def _collective_of(node: Node) -> str | None:
    known = {getattr(torch.ops._c10d_functional, name).default: name for name in _COLLECTIVES}
    return known.get(node.target) if node.op == "call_function" else None


def _used_once(node: Node, what: str) -> None:
    _require(len(node.users) == 1, f"{what} is used {len(node.users)} times")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _Unfit(reason)
