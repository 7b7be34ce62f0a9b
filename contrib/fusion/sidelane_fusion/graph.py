"""Graph operations of the pass: refusals, and rows that a collective along another dimension moves.

A collective of two and more dimensions works on the first one. A tensor to scatter along another one is cut there and
joined along the first; a gathered one, the other way round::

    x [B, S, H] -> split along 1 -> cat along 0 [N B, S/N, H] -> reduce_scatter          parts of S
    x [B, S, H] -> all_gather [N B, S, H] -> split along 0 -> cat along 1 [B, N S, H]    all of S

So rows of a matrix change places. With a B of one, they do not.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten
VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


class UnfitError(Exception):
    """Reason why a pattern stays as it is."""


def require(condition: bool, reason: str) -> None:
    """Leave a pattern as it is unless a condition holds."""
    if not condition:
        raise UnfitError(reason)


def used_once(node: Node, what: str) -> None:
    """Leave a pattern as it is if other nodes need a part of it."""
    require(len(node.users) == 1, f"{what} is used {len(node.users)} times")


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Equal parts of one tensor along a dimension, put together along another one.

    Attributes:
        source: tensor that is cut.
        cut: dimension along which it is cut.
        joined: dimension along which the parts are joined.
        result: joined tensor.
        nodes: nodes of the pattern, users first.
    """

    source: Node
    cut: int
    joined: int
    result: Node
    nodes: tuple[Node, ...]


def moved_by(cat: Node, parts: int) -> Moved | None:
    """Return the move of a ``cat`` that joins all parts of one tensor, in their order, without other users."""
    if cat.target is not _aten.cat.default or cat.kwargs:
        return None
    given: tuple[Any, ...] = cat.args
    tensors, joined = given[0], given[1] if len(given) > 1 else 0
    if len(tensors) != parts or any(len(part.users) != 1 for part in tensors):
        return None
    places = [_place_of(part) for part in tensors]
    first = places[0]
    if first is None or len(set(tensors)) != parts:
        return None
    source, cut, _, size = first
    length = source.meta["val"].shape[cut]
    if length != size * parts or any(place != (source, cut, i * size, size) for i, place in enumerate(places)):
        return None
    splits = dict.fromkeys(part.args[0] for part in tensors if part.target is operator.getitem)
    if any(len(split.users) != parts for split in splits) or len(splits) > 1:
        return None
    dims = source.meta["val"].dim()
    return Moved(source, cut, joined % dims, cat, (cat, *tensors, *splits))


def _place_of(part: Node) -> tuple[Node, int, int, int] | None:
    """Return tensor, dimension, begin and length of a part."""
    given: tuple[Any, ...] = part.args
    source: Any = given[0]
    if part.target is operator.getitem and source.target is _aten.split.Tensor:
        whole: tuple[Any, ...] = source.args
        size = whole[1]
        if not isinstance(size, int) or source.kwargs:
            return None
        dim = _dim(whole[0], whole[2:])
        return whole[0], dim, size * given[1], int(part.meta["val"].shape[dim])
    if part.target is _aten.slice.Tensor and not part.kwargs:
        dim = _dim(source, given[1:2])
        begin, step = given[2] if len(given) > 2 else 0, given[4] if len(given) > 4 else 1
        if not isinstance(begin, int) or begin < 0 or step != 1:
            return None
        return source, dim, begin, int(part.meta["val"].shape[dim])
    return None


def _dim(source: Node, given: Any) -> int:
    return (given[0] if given else 0) % int(source.meta["val"].dim())


def shaped(graph: Graph, node: Node, shape: list[int]) -> Node:
    """Return ``node`` in another shape, copied if necessary."""
    value = node.meta["val"]
    return node if list(value.shape) == shape else call(graph, _aten.reshape.default, node, shape)


def cut_to_front(graph: Graph, x: Node, shape: list[int], cut: int, parts: int) -> Node:
    """Reorder rows [R, K], in the order of ``shape`` without its last dimension, by parts along ``cut``.

    Example: shape [2, 4, H], cut 1, 2 parts: rows 0 to 7 become 0, 1, 4, 5, 2, 3, 6, 7.
    """
    if math.prod(shape[:cut]) == 1:
        return x
    rows, width = x.meta["val"].shape
    before, after = shape[:cut], shape[cut + 1 : -1]
    wide = shaped(graph, x, [*before, parts, shape[cut] // parts, *after, width])
    order = [cut, *range(cut), *range(cut + 1, len(shape) + 1)]
    return shaped(graph, call(graph, _aten.permute.default, wide, order), [rows, width])


def front_to_cut(graph: Graph, y: Node, shape: list[int], cut: int, parts: int) -> Node:
    """Reorder back: rows of parts, each of ``shape`` without its last dimension, are joined along ``cut``."""
    if math.prod(shape[:cut]) == 1:
        return y
    rows, width = y.meta["val"].shape
    wide = shaped(graph, y, [parts, *shape[:-1], width])
    order = [*range(1, cut + 1), 0, *range(cut + 1, len(shape) + 1)]
    return shaped(graph, call(graph, _aten.permute.default, wide, order), [rows, width])


def call(graph: Graph, target: Any, *arguments: Any) -> Node:
    """Insert a call into the graph, with its result in ``meta``."""
    made = graph.call_function(target, arguments)
    values = [one.meta["val"] if isinstance(one, Node) else one for one in arguments]
    made.meta["val"] = target(*values)
    return made
