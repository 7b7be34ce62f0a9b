"""From the shapes of the study that measures fused operators to what is predicted."""

from __future__ import annotations

from sidelane_lab.model.gemm_operators import DispatchGemm, GatherGemm, GemmReduce
from sidelane_lab.model.norm_operator import AllReduceNorm
from sidelane_lab.model.operators import Embedding, Gemv, Operator, TiledGemm
from sidelane_lab.studies.fused.shapes import half_for_one

BYTES = 2
"""Of an element: the study that measures takes bfloat16."""


def operators_of(op: str, shape: tuple[int, ...], ranks: int) -> list[tuple[Operator, str]]:
    """An operator among so many ranks, in every way in which it is measured unfused, and what that is made of."""
    if op == Embedding.name:
        batch, tables, pooling = shape
        ways = ((False, "a kernel a table"), (True, "one kernel"))
        return [(Embedding(batch, tables, pooling, element_bytes=BYTES, at_once=way), words) for way, words in ways]
    if op == Gemv.name:
        return [(Gemv(*shape), "GEMV")]
    if op == AllReduceNorm.name:
        return [(AllReduceNorm(shape[0], shape[1]), "addition, norm")]
    rows, depth, columns = shape
    if op == DispatchGemm.name:
        return [(DispatchGemm(rows, depth, columns, half_for_one(rows, ranks)), "the library's GEMM")]
    made: Operator = TiledGemm(rows, depth, columns, counts=half_for_one(rows, ranks))
    if op == GatherGemm.name:
        made = GatherGemm(rows, depth, columns, ranks)
    elif op != TiledGemm.name:
        made = GemmReduce(rows, depth, columns, gathers=op == "gemm_all_reduce")
    return [(made, "the library's GEMM")]
