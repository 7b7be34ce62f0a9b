"""Where a graph of aten operators adds a residual to what a collective gave, and normalises the sum by RMS.

What is found has float32 between the addition and the last rounding, as :func:`sidelane.ops.all_reduce_rms_norm` has;
16-bit values may be rounded once more in front of the weight, which the fused operator leaves out::

    total = came [+ residual] -> float32 -> pow 2 -> mean of a row -> + eps -> rsqrt
    result = total * rsqrt [-> dtype] * weight -> dtype

Where nothing has taken it apart, as on GPUs without Inductor, the norm is one operator of aten.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node

_aten = torch.ops.aten
_TO_DTYPE = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)
_ADD = (_aten.add.Tensor, _aten.add.Scalar)


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """One that was found.

    Attributes:
        residual: what is added, None for nothing.
        weight: what is multiplied by, of a row.
        eps: what the mean of squares gets.
        total: the sum that is normalised, which others may use.
        result: of the norm.
        between: nodes between both, last first, used by nobody else.
    """

    residual: Node | None
    weight: Node
    eps: float
    total: Node
    result: Node
    between: tuple[Node, ...]


def norm_behind(came: Node) -> Norm | None:
    """The norm of ``came``, the result of a collective, with a residual or without; None if there is none."""
    found = _norm_of(came, None)
    total = _only(came, _aten.add.Tensor)
    if found is not None or total is None or total.kwargs:
        return found
    others = [part for part in total.all_input_nodes if part is not came]
    alike = len(others) == 1 and _kind(others[0]) == _kind(came) == _kind(total)
    return _norm_of(total, others[0]) if alike else None


def _norm_of(total: Node, residual: Node | None) -> Norm | None:
    dtype, width = _dtype(total), total.meta["val"].shape[-1]
    whole = _whole_norm(total, residual, (torch.Size([width]), dtype))
    if whole is not None:
        return whole
    wides = [total] if dtype == torch.float32 else [user for user in total.users if _converts(user, torch.float32)]
    for wide in wides:
        squares = [user for user in wide.users if user.target is _aten.pow.Tensor_Scalar and user.args[1] == 2]
        for square in squares:
            mean = _only(square, _aten.mean.dim)
            shifted = None if mean is None or not _is_of_rows(mean) else _only(mean, *_ADD)
            scale = None if shifted is None or shifted.kwargs else _only(shifted, _aten.rsqrt.default)
            normal = None if scale is None else _only(scale, _aten.mul.Tensor)
            if mean is None or shifted is None or scale is None or normal is None:
                continue
            eps = shifted.args[1]
            if not isinstance(eps, float) or set(normal.all_input_nodes) != {wide, scale}:
                continue
            if wide is not total and set(wide.users) != {square, normal}:
                continue
            between, last = [scale, shifted, mean, square], normal
            if wide is not total:
                between.append(wide)
            rounded = _rounded(last, dtype)
            if rounded is not None:
                between.insert(0, last)
                last = rounded
            scaled = _only(last, _aten.mul.Tensor)
            weights = [] if scaled is None else [part for part in scaled.all_input_nodes if part is not last]
            if scaled is None or len(weights) != 1 or _kind(weights[0]) != (torch.Size([width]), dtype):
                continue
            between.insert(0, last)
            last = scaled
            if _dtype(last) != dtype:
                rounded = _rounded(last, dtype)
                if rounded is None:
                    continue
                between.insert(0, last)
                last = rounded
            return Norm(residual, weights[0], eps, total, last, tuple(between))
    return None


def _whole_norm(total: Node, residual: Node | None, weighted: tuple[torch.Size, torch.dtype]) -> Norm | None:
    """The norm as one operator whose second result, for gradients, nobody uses; by a weight of such a kind."""
    for user in total.users:
        if user.target is not _aten._fused_rms_norm.default or user.args[0] is not total:
            continue
        given: tuple[Any, ...] = user.args
        _, shape, weight, eps = given
        result = _only(user, operator.getitem)
        if result is None or result.args[1] != 0 or list(shape) != list(weighted[0]):
            continue
        if isinstance(weight, Node) and _kind(weight) == weighted and isinstance(eps, float):
            return Norm(residual, weight, eps, total, result, (user,))
    return None


def _rounded(node: Node, dtype: torch.dtype) -> Node | None:
    user = _only(node, *_TO_DTYPE)
    return user if user is not None and dtype != torch.float32 and _converts(user, dtype) else None


def _only(node: Node, *targets: object) -> Node | None:
    """Its user, if that is the only one and such a call."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target in targets else None


def _converts(node: Node, dtype: torch.dtype) -> bool:
    return node.target in _TO_DTYPE and _dtype(node) == dtype and "memory_format" not in node.kwargs


def _is_of_rows(mean: Node) -> bool:
    source = mean.args[0]
    assert isinstance(source, Node)
    return list(mean.args[1:]) in ([[-1], True], [[source.meta["val"].dim() - 1], True]) and not mean.kwargs


def _kind(node: Node) -> tuple[torch.Size, torch.dtype]:
    value = node.meta["val"]
    return value.shape, value.dtype


def _dtype(node: Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found
