"""``sidelane fused --machine``: the study's rows on a machine one does not have.

With the same work everywhere, what its peers wait for first makes all ranks end together; in the order of ranks, the
first one's results come last. Kernels that read memory are predicted by the number of workgroups on a unit, too
(Figures 13 and 14 of the fused operators paper). With ``--results`` predictions are held against a file of measured
operators (``papers/operator_results.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sidelane.choice.fused import FUSED
from sidelane.execute.timeline import write_chrome_trace
from sidelane_lab.cli.fused import FUSED_OPS, FusedOptions
from sidelane_lab.harness.study import MODEL
from sidelane_lab.machines.ranges import ends, variations
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.operators import (
    ORDERS,
    REMOTE_FIRST,
    SECTIONS,
    AllReduceNorm,
    DispatchGemm,
    Embedding,
    FusedTimes,
    GatherGemm,
    GemmReduce,
    Gemv,
    OperatorModel,
    TiledGemm,
    UnfusedTimes,
    predict_fused,
    predict_unfused,
)
from sidelane_lab.model.panels import draw_timeline
from sidelane_lab.model.split import chain_us, split_us
from sidelane_lab.model.symmetry import predict_symmetric
from sidelane_lab.model.workgroups import resident
from sidelane_lab.studies.fused.rows import FusedRow, in_parts, sizes_of, with_programs
from sidelane_lab.studies.fused.shapes import MEANING, ON_GPUS, half_for_one

PIECES = (1, 2, 4)
"""Parts for each peer, as the study that measures has them."""
BYTES = 2
"""Bytes of an element: the study that measures takes bfloat16."""
OCCUPANCIES = (0.25, 0.5, 0.75, 0.875, 1.0)
SYMMETRIC = (Embedding.name, TiledGemm.name)
"""Operators among more nodes, or nodes of more GPUs, than can be simulated rank by rank."""
MOST_ALONE = 8
"""Number of nodes of one GPU up to which every rank is simulated."""
STANDS_FOR_ALL = "one rank stands for all, which send to all peers in turn (model/symmetry.py)"


def predict(machine: Machine, options: FusedOptions) -> list[FusedRow]:
    """Return the rows of every operator at every shape, fused and unfused.

    Raises:
        ValueError: a machine without figures of fused operators, or options that fit neither the operator nor the
            machine.
    """
    _require(machine, options)
    rows: list[FusedRow] = []
    for op in options.ops or (SYMMETRIC if among_many(machine) else FUSED_OPS):
        for place, shape in enumerate(options.shapes or ON_GPUS[op]):
            ways = operators_of(op, shape, machine.world_size, even=among_many(machine))
            rows += _ShapeModel(machine, ways).rows(is_first=place == 0)
    return rows


def compared_rows(machine: Machine, operators: Sequence[OperatorModel]) -> list[FusedRow]:
    """Return two rows for each of some operators: unfused, and fused with what its peers wait for first."""
    rows = []
    for operator in operators:
        model = _ShapeModel(machine, [(operator, "")])
        fused_us = model.predicted(machine, operator).fused.time_us
        rows += [model.row("unfused_nccl", "", model.unfused[""].unfused_us), model.row(FUSED, REMOTE_FIRST, fused_us)]
    return rows


def _require(machine: Machine, options: FusedOptions) -> None:
    """Refuse options that do not fit together, and operators that are not modelled on a machine."""
    if options.shapes and len(options.ops) != 1:
        raise ValueError(f"fused: --shape (value={len(options.ops)} operators, allowed=with --ops and one of them)")
    meaning = MEANING[options.ops[0]] if options.shapes else ()
    for shape in options.shapes:
        if len(shape) != len(meaning) or min(shape) < 1:
            text = ",".join(map(str, shape))
            raise ValueError(f"fused: --shape (value={text}, allowed={', '.join(meaning)}: each 1 or more)")
    if not among_many(machine):
        return
    where = f"on {machine.name}, where one rank stands for all"
    others = [op for op in options.ops if op not in SYMMETRIC]
    if others:
        raise ValueError(f"fused: --ops (value={', '.join(others)}, allowed={', '.join(SYMMETRIC)} {where})")


def among_many(machine: Machine) -> bool:
    """Return whether one rank stands for all: nodes of several GPUs, or more nodes than are simulated one by one."""
    return machine.nodes > 1 and (machine.gpus > 1 or machine.nodes > MOST_ALONE)


def operators_of(op: str, shape: tuple[int, ...], ranks: int, *, even: bool = False) -> list[tuple[OperatorModel, str]]:
    """Return an operator among so many ranks in every way in which it is measured unfused, and what that is made of.

    Args:
        op: name of the operator.
        shape: its sizes, as the study that measures has them.
        ranks: number of ranks.
        even: as many rows go to each rank; False: half of an exchange's go to one.
    """
    if op == Embedding.name:
        batch, tables, pooling = shape
        ways = ((False, "a kernel a table"), (True, "one kernel"))
        return [(Embedding(batch, tables, pooling, element_bytes=BYTES, at_once=way), words) for way, words in ways]
    if op == Gemv.name:
        return [(Gemv(*shape), "GEMV")]
    if op == AllReduceNorm.name:
        return [(AllReduceNorm(shape[0], shape[1]), "addition, norm")]
    rows, depth, columns = shape
    counts = () if even else half_for_one(rows, ranks)
    gemms = (
        TiledGemm(rows, depth, columns, counts=counts),
        *(() if even else (DispatchGemm(rows, depth, columns, counts),)),
        GatherGemm(rows, depth, columns),
        GemmReduce(rows, depth, columns),
        GemmReduce(rows, depth, columns, gathers=True),
    )
    return [(made, "the library's GEMM") for made in gemms if made.name == op]


class _ShapeModel:
    """An operator at a shape on a machine.

    Args:
        machine: that is described.
        ways: the operator in every way in which it is computed unfused, and what that is made of.
    """

    def __init__(self, machine: Machine, ways: Sequence[tuple[OperatorModel, str]]) -> None:
        self.machine, self.ways, self.is_many = machine, ways, among_many(machine)
        self.operator = self.ways[0][0]  # fused, all ways are one kernel
        self.predicted: Callable[..., FusedTimes] = predict_symmetric if self.is_many else predict_fused
        unfused = self.predicted if self.is_many else predict_unfused
        self.unfused: dict[str, UnfusedTimes] = {words: unfused(machine, made) for made, words in self.ways}
        self.compute_us = min(times.compute_us for times in self.unfused.values())
        self.comm_us = min(times.collective_us for times in self.unfused.values())

    def rows(self, *, is_first: bool) -> Iterator[FusedRow]:
        """Yield all rows. ``is_first``: the shape is the first of its operator, predicted by occupancy as well."""
        yield from self._alone()
        yield from self._unfused()
        if self.operator.has_kernel:
            yield from self._fused(STANDS_FOR_ALL if is_first else "")
        if self.machine.nodes == 1:
            yield from self._in_parts()
        if is_first and not self.is_many and isinstance(self.operator, Embedding | Gemv):
            for share in OCCUPANCIES:
                schedule = with_programs(REMOTE_FIRST, resident(self.machine, share) // int(self.machine.gpu.units))
                yield self.row(FUSED, schedule, time_at(self.machine, self.operator, share))

    def _alone(self) -> Iterator[FusedRow]:
        for words, times in self.unfused.items():
            yield self.row("compute", words, times.compute_us)
        yield self.row("collective", "library", self.comm_us)

    def _unfused(self) -> Iterator[FusedRow]:
        """Yield each way with how much less time the fused kernel takes, and the same on copy engines."""
        for made, words in self.ways:
            low = high = None
            if self.operator.has_kernel:
                varied = [self.predicted(one.machine, made).lower_percent for one in variations(self.machine, SECTIONS)]
                low, high = ends(self.predicted(self.machine, made).lower_percent, varied)
            time_us = self.unfused[words].unfused_us
            yield self.row("unfused_nccl", words, time_us, low_percent=low, high_percent=high)
        for made, words in self.ways if self.machine.nodes == 1 else ():
            if (chain := chain_us(self.machine, made)) is not None:
                yield self.row("unfused_sidelane", words, chain)

    def _fused(self, note: str) -> Iterator[FusedRow]:
        if self.is_many:
            yield self.row(FUSED, REMOTE_FIRST, self.predicted(self.machine, self.operator).fused.time_us, note=note)
            return
        for order in ORDERS:
            ended = self.predicted(self.machine, self.operator, order).fused.ended_us
            yield self.row(FUSED, order, max(ended), skew_us=max(ended) - min(ended) if len(ended) > 1 else None)

    def _in_parts(self) -> Iterator[FusedRow]:
        for pieces in PIECES:
            if (time_us := split_us(self.machine, self.operator, pieces)) is not None:
                yield self.row(FUSED, in_parts(pieces), time_us)

    def row(self, implementation: str, schedule: str, time_us: float, **others: Any) -> FusedRow:
        """Return a row of the operator with these columns, and ``others``."""
        what = {"op": self.operator.name, "shape": str(self.operator)}
        alone = {"compute_us": self.compute_us, "comm_us": self.comm_us, "bound_us": max(self.compute_us, self.comm_us)}
        unknown = dict.fromkeys(("p10_us", "p90_us", "max_rel_err", "correct"))
        columns: dict[str, Any] = {**what, "implementation": implementation, "schedule": schedule, **alone, **unknown}
        return FusedRow(launch=MODEL, time_us=time_us, **columns, **others)


def time_at(machine: Machine, operator: OperatorModel, occupancy: float) -> float:
    """Return microseconds of the fused kernel at an occupancy."""
    return predict_fused(machine, operator, occupancy=occupancy).fused.time_us


def draw(machine: Machine, rows: Sequence[FusedRow], folder: Path) -> None:
    """Draw a timeline of a kernel in each order."""
    kernels = [] if among_many(machine) else [row for row in rows if row.schedule in ORDERS]
    for order in ORDERS if kernels else ():
        # The first embedding, if there is one: what its order changes can be seen.
        traced = min(kernels, key=lambda row: row.op != Embedding.name)
        operator, _ = operators_of(traced.op, sizes_of(traced.op, traced.shape), machine.world_size)[0]
        timeline = predict_fused(machine, operator, order, record=True).fused.timeline
        write_chrome_trace(folder / f"timeline-fused-{order}.trace.json", timeline)
        draw_timeline(timeline, f"{traced.op}, {order}, {machine.title}", folder, f"timeline-fused-{order}")
