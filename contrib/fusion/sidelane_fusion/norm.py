"""Search for RMS norms in graphs of aten operators: a residual is added to a collective's result and normalised.

Matches have float32 between the addition and the last rounding, as :func:`sidelane.ops.all_reduce_rms_norm` has;
16-bit values may be rounded once more in front of the weight, which the fused operator leaves out::

    total = came [+ residual] -> float32 -> pow 2 -> mean of a row -> + eps -> rsqrt
    result = total * rsqrt [-> dtype] * weight -> dtype

If no decomposition has run, as on GPUs without Inductor, the norm is one operator of aten.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Graph, Node

from sidelane_fusion.graph import call, require

_aten = torch.ops.aten
_TO_DTYPE = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)
_ADD = (_aten.add.Tensor, _aten.add.Scalar)


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """A norm that was found.

    Attributes:
        residual: tensor that is added; None for none.
        weight: factors of a row.
        eps: number added to the mean of squares.
        total: sum that is normalised, which other nodes may use.
        result: result of the norm.
        between: nodes between both, last first. Gradients may need the reciprocal root, which then stays, of the total.
        scale: reciprocal root if it is a second result of the norm, and needed.
    """

    residual: Node | None
    weight: Node
    eps: float
    total: Node
    result: Node
    between: tuple[Node, ...]
    scale: Node | None = None

    def take_out(self, graph: Graph) -> None:
        """Erase unused nodes, once the users of total and result have new inputs."""
        if self.scale is not None:
            with graph.inserting_before(self.scale):
                norm: Any = self.scale.args[0]  # the scale is its second result
                wide: Node = norm.args[0]
                if _dtype(wide) != torch.float32:
                    wide = call(graph, torch.ops.prims.convert_element_type.default, wide, torch.float32)
                mean = call(graph, _aten.mean.dim, call(graph, _aten.pow.Tensor_Scalar, wide, 2), [-1], True)
                scale = call(graph, _aten.rsqrt.default, call(graph, _aten.add.Tensor, mean, self.eps))
                if _dtype(scale) != _dtype(self.scale):
                    scale = call(graph, torch.ops.prims.convert_element_type.default, scale, _dtype(self.scale))
            self.scale.replace_all_uses_with(scale)
            graph.erase_node(self.scale)
        for one in (self.result, *self.between):
            if not one.users:
                graph.erase_node(one)


def norm_behind(came: Node) -> Norm | None:
    """Return the norm of ``came``, the result of a collective, with a residual or without; None if there is none.

    Raises:
        UnfitError: there is one, but other nodes need more than its total and reciprocal root.
    """
    found = _norm_of(came, None)
    total = _one(came, _aten.add.Tensor)
    if found is not None or total is None or total.kwargs:
        return found
    others = [part for part in total.all_input_nodes if part is not came]
    alike = len(others) == 1 and kind_of(others[0]) == kind_of(came) == kind_of(total)
    found = _norm_of(total, others[0]) if alike else None
    require(
        found is None or len(came.users) == 1, "the sum of the ranks is kept beside the residual, say for gradients"
    )
    return found


def _norm_of(total: Node, residual: Node | None) -> Norm | None:
    dtype, width = _dtype(total), total.meta["val"].shape[-1]
    whole = _whole_norm(total, residual, (torch.Size([width]), dtype))
    if whole is not None:
        return whole
    wides = [total] if dtype == torch.float32 else [user for user in total.users if _converts(user, torch.float32)]
    for wide in wides:
        squares = [user for user in wide.users if user.target is _aten.pow.Tensor_Scalar and user.args[1] == 2]
        for square in squares:
            found = _norm_of_squares(total, residual, wide, square)
            if found is not None:
                return found
    return None


def _norm_of_squares(total: Node, residual: Node | None, wide: Node, square: Node) -> Norm | None:
    """Return the norm that begins with the squares of a sum in 32 bits; None if it is another pattern."""
    dtype, width = _dtype(total), total.meta["val"].shape[-1]
    mean = _one(square, _aten.mean.dim)
    shifted = None if mean is None or not _is_of_rows(mean) else _one(mean, *_ADD)
    scale = None if shifted is None or shifted.kwargs else _one(shifted, _aten.rsqrt.default)
    if mean is None or shifted is None or scale is None or not isinstance(shifted.args[1], float):
        return None
    normals = [one for one in scale.users if one.target is _aten.mul.Tensor]
    normals = [one for one in normals if set(one.all_input_nodes) == {wide, scale}]
    if len(normals) != 1:
        return None
    (last,) = normals
    between = [scale, shifted, mean, square] if wide is total else [scale, shifted, mean, square, wide]
    require(len(last.users) == 1, "what is normalised is kept, say for gradients")
    rounded = _rounded(last, dtype)
    if rounded is not None:
        between.insert(0, last)
        last = rounded
        require(len(last.users) == 1, "what is normalised is kept, say for gradients")
    scaled = _only(last, _aten.mul.Tensor)
    weights = [] if scaled is None else [part for part in scaled.all_input_nodes if part is not last]
    if scaled is None or len(weights) != 1 or kind_of(weights[0]) != (torch.Size([width]), dtype):
        return None
    between.insert(0, last)
    last = scaled
    if _dtype(last) != dtype:
        rounded = _rounded(last, dtype)
        if rounded is None:
            return None
        between.insert(0, last)
        last = rounded
    return Norm(residual, weights[0], shifted.args[1], total, last, tuple(between))


def _whole_norm(total: Node, residual: Node | None, weighted: tuple[torch.Size, torch.dtype]) -> Norm | None:
    """Return the norm as one operator, with a weight of the given shape and dtype; None if there is none."""
    for user in total.users:
        if user.target is not _aten._fused_rms_norm.default or user.args[0] is not total:
            continue
        given: tuple[Any, ...] = user.args
        _, shape, weight, eps = given
        results = {one.args[1]: one for one in user.users}
        if len(results) != len(user.users) or 0 not in results or list(shape) != list(weighted[0]):
            continue
        if isinstance(weight, Node) and kind_of(weight) == weighted and isinstance(eps, float):
            return Norm(residual, weight, eps, total, results[0], (user,), results.get(1))
    return None


def _rounded(node: Node, dtype: torch.dtype) -> Node | None:
    user = _only(node, *_TO_DTYPE)
    return user if user is not None and dtype != torch.float32 and _converts(user, dtype) else None


def _one(node: Node, *targets: object) -> Node | None:
    """Return the only user that is such a call, whatever other users there are; None if it is not unique."""
    found = [user for user in node.users if user.target in targets]
    return found[0] if len(found) == 1 else None


def _only(node: Node, *targets: object) -> Node | None:
    """Return the user if it is the only one and such a call; otherwise None."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target in targets else None


def _converts(node: Node, dtype: torch.dtype) -> bool:
    return node.target in _TO_DTYPE and _dtype(node) == dtype and "memory_format" not in node.kwargs


def _is_of_rows(mean: Node) -> bool:
    source = mean.args[0]
    assert isinstance(source, Node)
    return list(mean.args[1:]) in ([[-1], True], [[source.meta["val"].dim() - 1], True]) and not mean.kwargs


def kind_of(node: Node) -> tuple[torch.Size, torch.dtype]:
    """Return shape and dtype of a node's value."""
    value = node.meta["val"]
    return value.shape, value.dtype


def _dtype(node: Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found
