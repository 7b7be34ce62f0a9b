"""Compiler pass for torch.compile: it puts fused operators in place of GEMMs and collectives next to them.

It works on the graphs of aten operators that autograd has left, forward and backward apart, so that gradients stay as
they were: ``mm`` -> ``all_reduce``, ``mm`` -> ``reduce_scatter_tensor``, ``mm`` -> ``all_to_all_single`` of as many
rows for each rank, ``all_gather_into_tensor`` -> ``mm``, and ``all_reduce`` -> residual -> RMS norm, each with its
``wait_tensor``. Of a GEMM, an all-reduce and a norm, the last two
become one. Tensors of more dimensions are matrices of rows, also where another dimension than the first is scattered or
gathered (``graph``). What is not the same in every respect stays as it is.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node

from sidelane.log import UnfailingLogger
from sidelane.memory.exchange import ranks_of
from sidelane.ops import gemv, library, rms_norm
from sidelane.ops.handle import FLOATS
from sidelane.ops.operands import MOST_ELEMENTS
from sidelane.session import Communicator
from sidelane_fusion import operators as operators  # registers what only this pass puts in
from sidelane_fusion.graph import (
    VIEWS,
    Moved,
    UnfitError,
    call,
    cut_to_front,
    front_to_cut,
    moved_by,
    require,
    shaped,
    used_once,
)
from sidelane_fusion.norm import kind_of, norm_behind

LOGGER = "sidelane.fusion"
"""Name of the logger of replacements (INFO) and refusals (DEBUG)."""

logger = UnfailingLogger(logging.getLogger(LOGGER))

MOST_RANKS = 8
_aten = torch.ops.aten
_all_reduce = torch.ops._c10d_functional.all_reduce.default
_wait = torch.ops._c10d_functional.wait_tensor.default
_COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single")


class Fusion(CustomGraphPass):
    """Replacement of unfused patterns on a process group. Each replacement is logged (INFO), each refusal too (DEBUG).

    All ranks must compile the same program: a rank that fuses alone ends in a MismatchError. Use it as
    ``torch.compile(model, options={"post_grad_custom_pre_pass": fusion})`` or, without Inductor,
    ``torch.compile(model, backend=fusion.backend)``.

    Args:
        comm: communicator of the group's ranks, open for as long as compiled code runs.
        group: group of the collectives, of the same ranks in the same order; None is the default group.

    Raises:
        ValueError: the group has other ranks than the communicator, or another order of them.
    """

    def __init__(self, comm: Communicator, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        given, allowed = list(ranks_of(group)), list(comm.ranks)
        if given != allowed:
            raise ValueError(f"Fusion: ranks of the group (value={given}, allowed={allowed}, the communicator's)")
        self._comm, self._number, self._group = comm, library.number_of(comm), group.group_name
        self.replaced: list[str] = []
        """Operators that were put in, in the order of graphs; a graph from Inductor's caches adds none."""

    def uuid(self) -> Any:
        """Return the key of Inductor's caches: the code of the operators, and all that a graph holds of a communicator.

        Another process that finds the graph has a pass with the same number, which is that of its own communicator.
        """
        folders = Path(__file__).parent, Path(library.__file__).parent
        code = get_hash_for_files(tuple(sorted(str(path) for folder in folders for path in folder.glob("*.py"))))
        return code, self._number, self._group, tuple(self._comm.ranks), self._comm.device.type

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion:
        """Return the pass itself: Inductor copies its options, and a process group has no copy."""
        return self

    def __call__(self, graph: Graph) -> None:
        """Replace all matching patterns in a graph of aten operators."""
        for node in list(graph.nodes):
            if node.target is _aten.add.Tensor and self._join(graph, node):
                self.replaced.append(_COLLECTIVES[0])
        for node in list(graph.nodes):
            name = _collective_of(node)
            if name is None:
                continue
            others = {_COLLECTIVES[2]: self._gather, _COLLECTIVES[3]: self._exchange}
            tries = [others.get(name, functools.partial(self._reduce, name=name))]
            for attempt in (*([self._norm] if name == _COLLECTIVES[0] else []), *tries):
                try:
                    put = attempt(graph, node)
                except UnfitError as reason:
                    logger.debug("sidelane: %s stays %s: %s", node.name, name, reason)
                    continue
                if put is not None:
                    self.replaced.append(put)
                    logger.info("sidelane: %s becomes a part of %s", name, put)
                    break
        graph.lint()

    @property
    def backend(self) -> Callable[..., Any]:
        """Backend of torch.compile that runs this pass and nothing else."""

        def compiler(module: GraphModule, _: Any) -> Any:
            self(module.graph)
            module.recompile()
            return module

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)

    def _join(self, graph: Graph, total: Node) -> bool:
        """Replace two all-reduces whose results are added, as gradients of one input are, by one behind an addition."""
        waits = [one for one in total.all_input_nodes if one.target is _wait]
        nodes: list[Any] = [one.args[0] for one in waits]
        if len(nodes) != 2 or total.kwargs or any(_collective_of(node) != _COLLECTIVES[0] for node in nodes):
            return False
        (x, *how), (y, *other) = (node.args for node in nodes)
        try:
            require(how == other and how[0] == "sum", "other collectives")
            for node, wait in zip(nodes, waits, strict=True):
                self._of_the_group(node, how[1], [])
                used_once(wait, "the sum of the ranks")
            require(kind_of(x) == kind_of(y) == kind_of(total), "other shapes")
        except UnfitError as reason:
            logger.debug("sidelane: %s and %s stay two: %s", *nodes, reason)
            return False
        result = total
        with graph.inserting_before(total):
            for target, arguments in ((_aten.add.Tensor, (x, y)), (_all_reduce, how), (_wait, ())):
                given = arguments if result is total else (result, *arguments)
                result = graph.call_function(target, tuple(given))
                result.meta["val"] = total.meta["val"]
        total.replace_all_uses_with(result)
        for one in (total, *waits, *nodes):
            graph.erase_node(one)
        logger.info("sidelane: %s and %s become one", *nodes)
        return True

    def _reduce(self, graph: Graph, node: Node, *, name: str) -> str | None:
        is_scattered = name == _COLLECTIVES[1]
        given: tuple[Any, ...] = node.args
        product, kind, *sizes, group = given
        require(kind == "sum", f"it is {kind}, not a sum")
        wait = self._of_the_group(node, group, sizes)
        between: list[Node] = []
        moved = moved_by(product, self._comm.world_size) if is_scattered else None
        if moved is not None:
            require(moved.joined == 0, "what is scattered is put together otherwise")
            between, product = [*moved.nodes], moved.source
        product = product_in_front(node, product, between)
        x, weight = self._factors(product)
        rows, columns = product.meta["val"].shape
        if moved is not None:
            shape = list(moved.source.meta["val"].shape)
            require(moved.cut < len(shape) - 1 and shape[-1] == columns, "columns are scattered")
            with graph.inserting_before(product):
                x = cut_to_front(graph, x, shape, moved.cut, self._comm.world_size)
        if is_scattered:
            require(rows % self._comm.world_size == 0, "rows that the ranks do not divide")
            fused = "gemm_reduce_scatter"
        elif rows <= gemv.MOST_TOKENS and columns <= gemv.MOST_ROWS and weight.meta["val"].stride(0) == 1:
            fused = "row_parallel_linear"
        else:
            fused = "gemm_all_reduce"
        return self._put(graph, wait, fused, x, weight, (wait, node, *between, product))

    def _exchange(self, graph: Graph, node: Node) -> str:
        """Replace an all-to-all of equal parts: a rank's program does not contain the split sizes of others."""
        given: tuple[Any, ...] = node.args
        product, *splits, group = given
        wait = self._of_the_group(node, group, [])
        shape, n = product.meta["val"].shape, self._comm.world_size
        require(isinstance(shape[0], int) and shape[0] % n == 0, "parts that the ranks do not divide")
        require(all(list(sizes) == [shape[0] // n] * n for sizes in splits if sizes), "uneven split sizes")
        between: list[Node] = []
        product = product_in_front(node, product, between)
        x, weight = self._factors(product)
        require(product.meta["val"].shape[0] % n == 0, "rows that the ranks do not divide")
        require(weight.meta["val"].stride(0) == 1, "a weight would be copied first")
        return self._put(graph, wait, "gemm_all_to_all_evenly", x, weight, (wait, node, *between, product))

    def _norm(self, graph: Graph, node: Node) -> str | None:
        """Replace an all-reduce in front of a norm; return None if no norm is behind it."""
        given: tuple[Any, ...] = node.args
        x, kind, group = given
        if kind != "sum":
            return None
        wait = self._of_the_group(node, group, [])
        found = norm_behind(wait)
        if found is None:
            return None
        tensors = [x, *([] if found.residual is None else [found.residual]), found.weight]
        for tensor in tensors:
            value = tensor.meta["val"]
            self._check(value)
            require(value.is_contiguous() and value.storage_offset() * value.itemsize % 4 == 0, "a copy is needed")
        shape, width = x.meta["val"].shape, x.meta["val"].shape[-1]
        tokens, nbytes = x.meta["val"].numel() // width, width * x.meta["val"].itemsize
        require(tokens <= rms_norm.MOST_TOKENS, f"a norm of more than {rms_norm.MOST_TOKENS} tokens")
        require(not nbytes % 4 and nbytes <= rms_norm.MOST_ROW_BYTES, "a norm of rows that no block holds")
        order = {one: number for number, one in enumerate(graph.nodes)}
        require(all(order[one] < order[found.total] for one in tensors), "the weight is computed later")
        with graph.inserting_before(found.total):
            parts = [None if one is None else shaped(graph, one, [tokens, width]) for one in (x, found.residual)]
            arguments = (self._number, *parts, found.weight, found.eps)
            both = graph.call_function(torch.ops.sidelane.all_reduce_rms_norm.default, arguments)
            flat = x.meta["val"].new_empty(tokens, width)
            both.meta["val"] = flat, flat
            results = []
            for number in (0, 1):
                one = graph.call_function(operator.getitem, (both, number))
                one.meta["val"] = flat
                results.append(shaped(graph, one, list(shape)))
        found.result.replace_all_uses_with(results[0])
        found.total.replace_all_uses_with(results[1])
        found.take_out(graph)
        for one in dict.fromkeys((found.total, wait, node)):
            graph.erase_node(one)
        return "all_reduce_rms_norm"

    def _result_rows(self, fused: str, x: Node) -> int:
        rows, n = int(x.meta["val"].shape[0]), self._comm.world_size
        return rows // n if fused == "gemm_reduce_scatter" else rows

    def _gather(self, graph: Graph, node: Node) -> str:
        """Replace an all-gather and the first product of its rows, which others may need, too."""
        given: tuple[Any, ...] = node.args
        x, *sizes, group = given
        wait = self._of_the_group(node, group, sizes)
        moved = self._joined(wait)
        gathered = wait if moved is None else moved.result
        order = {one: number for number, one in enumerate(graph.nodes)}
        product, between = product_behind(gathered, order)
        matrix = between[0] if between else gathered
        _, weight = self._factors(product)
        rows, depth = matrix.meta["val"].shape
        columns, shape = product.meta["val"].shape[1], list(x.meta["val"].shape)
        require(rows * max(depth, columns) <= MOST_ELEMENTS, "too many elements")
        require(len(shape) == 2 or x.meta["val"].is_contiguous(), "what is gathered would be copied first")
        require(shape[-1] == depth, "columns are gathered")
        require(moved is None or moved.joined < len(shape) - 1, "columns are gathered")
        is_shared = any(len(one.users) > 1 for one in (gathered, *between))
        fused = "all_gather_gemm_and_rows" if is_shared else "all_gather_gemm"
        place = min(gathered.users, key=lambda one: order[one]) if is_shared else product
        given = weight.args
        turned = given[0] if weight.target is _aten.permute.default and given[1] == [1, 0] else None
        require(order[weight if turned is None else turned] < order[place], "the weight is computed later")
        with graph.inserting_before(place):
            x = shaped(graph, x, [rows // self._comm.world_size, depth])
            turned = call(graph, _aten.permute.default, weight, [1, 0]) if turned is None else turned
            put = graph.call_function(getattr(torch.ops.sidelane, fused).default, (self._number, x, turned))
            values = [matrix.meta["val"].new_empty(rows, width) for width in (columns, depth)]
            put.meta["val"] = tuple(values) if is_shared else values[0]
            results = [put]
            if is_shared:
                results = [graph.call_function(operator.getitem, (put, number)) for number in (0, 1)]
            for number, (old, value) in enumerate(zip((product, gathered)[: len(results)], values, strict=False)):
                results[number].meta["val"] = value if is_shared else put.meta["val"]
                if moved is not None:
                    results[number] = front_to_cut(graph, results[number], shape, moved.joined, self._comm.world_size)
                results[number] = shaped(graph, results[number], list(old.meta["val"].shape))
        product.replace_all_uses_with(results[0])
        if is_shared:
            gathered.replace_all_uses_with(results[1])
        moves = () if moved is None else moved.nodes
        for one in (product, *between, *moves, wait, node):
            if not one.users:
                graph.erase_node(one)
        return fused

    def _joined(self, wait: Node) -> Moved | None:
        """Return the move that joins the ranks' parts along another dimension than the first; None if there is none."""
        n = self._comm.world_size
        cats = {user for part in wait.users for user in (part, *part.users, *(u for v in part.users for u in v.users))}
        found = [moved for cat in cats if (moved := moved_by(cat, n)) is not None and moved.source is wait]
        if len(found) != 1 or any(user not in found[0].nodes for user in wait.users):
            return None
        require(found[0].cut == 0, "what is gathered is cut otherwise")
        return found[0]

    def _of_the_group(self, node: Node, group: object, sizes: list[Any]) -> Node:
        n = self._comm.world_size
        require(all(isinstance(size, int) for size in node.meta["val"].shape), "dynamic shapes")
        require(n <= MOST_RANKS, f"more than {MOST_RANKS} ranks")
        require(group == self._group and all(size == n for size in sizes), "another group")
        used_once(node, "the collective")
        wait = next(iter(node.users))
        require(wait.target is _wait, "nobody waits for it")
        return wait

    def _check(self, value: torch.Tensor) -> None:
        require(all(isinstance(size, int) for size in value.shape), "dynamic shapes")
        require(value.numel() > 0, "no elements")
        require(value.dtype in FLOATS, f"dtype {value.dtype}")
        require(value.device.type == self._comm.device.type, f"device {value.device}")

    def _factors(self, product: Node) -> tuple[Any, Any]:
        factors: tuple[Any, ...] = product.args
        for factor in (*factors, product):
            self._check(factor.meta["val"])
        x, weight = factors
        require(x.meta["val"].stride(1) == 1, "x would be copied first")
        require(1 in weight.meta["val"].stride(), "a weight would be copied first")
        return x, weight

    def _put(
        self,
        graph: Graph,
        last: Node,
        fused: str,
        x: Any,
        weight: Any,
        replaced: tuple[Node, ...],
    ) -> str:
        """Put the fused operator in."""
        overload = getattr(torch.ops.sidelane, fused).default
        with graph.inserting_before(last):
            rows = call(graph, _aten.permute.default, weight, [1, 0])
            put = graph.call_function(overload, (self._number, x, rows))
            put.meta["val"] = last.meta["val"].new_empty(self._result_rows(fused, x), weight.meta["val"].shape[1])
            put = shaped(graph, put, list(last.meta["val"].shape))
        last.replace_all_uses_with(put)
        for node in replaced:
            graph.erase_node(node)
        return fused


def _collective_of(node: Node) -> str | None:
    known = {getattr(torch.ops._c10d_functional, name).default: name for name in _COLLECTIVES}
    return known.get(node.target) if node.op == "call_function" else None


def product_behind(gathered: Node, order: dict[Node, int]) -> tuple[Node, list[Node]]:
    """Return the first matrix product of gathered rows, and the views between them, the last one first."""
    found: list[tuple[Node, list[Node]]] = []
    paths: list[list[Node]] = [[]]
    while paths:
        path = paths.pop()
        last = path[0] if path else gathered
        found += [(user, path) for user in last.users if user.target is _aten.mm.default and user.args[0] is last]
        paths += [[user, *path] for user in last.users if user.target in VIEWS]
    require(bool(found), "no mm behind")
    return min(found, key=lambda one: order[one[0]])


def product_in_front(node: Node, given: Any, between: list[Node]) -> Node:
    """Return the matrix product in front of a collective; views between them are appended to ``between``."""
    while isinstance(given, Node) and given.target in VIEWS:
        between.append(given)
        given = given.args[0]
    require(isinstance(given, Node) and given.target is _aten.mm.default, "no mm in front")
    users = {user for one in (*between, given) for user in one.users}
    require(users <= {node, *between}, "the product is used by others")
    rows, columns = given.meta["val"].shape
    require(rows * columns <= MOST_ELEMENTS, "too many elements")
    product: Node = given
    return product
