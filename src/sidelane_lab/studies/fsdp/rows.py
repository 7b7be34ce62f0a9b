"""Rows of training steps, as tables and as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sidelane_lab.harness.drawing import COLOURS, GREY, plain_name, save
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import FlatRow, Picture
from sidelane_lab.harness.table import MISSING, Table, grouped, verdict

TRAINED_BY = (
    *("nccl", "gloo", "nccl_ce", "sidelane_ag", "sidelane", "sidelane_copies"),
    *("compute_only", "compute_only_straight"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class FsdpRow(FlatRow):
    """A training step of layers that FSDP2 shards, by who communicates.

    Attributes:
        model: model whose layers these are like; CPU ranks have smaller sizes.
        seq: tokens of a sequence.
        batch: sequences of a rank.
        reduce_dtype: dtype in which gradients are added; parameters are gathered in bfloat16.
        optimizer: True if the step has an optimizer (AdamW).
        implementation: ``nccl``, on CPUs ``gloo``; ``nccl_ce``: gathers by NCCL on copy engines; ``sidelane_ag``:
            gathers by Sidelane; ``sidelane``: gathers and scatters; ``sidelane_copies``: the same with parameters that
            are copied out of a buffer; ``compute_only``: collectives that move nothing; ``compute_only_straight``: and
            no copy-out.
        step_ms: time of a step, median over the rounds of the slowest rank.
        exposed_ms: time by which a step takes longer than ``compute_only`` in the same round, median.
        recovered_percent: share of the library's exposed time that comes back in the same round, median.
        loss: loss of the step that was compared, mean over ranks.
        grad_norm: norm of the whole gradient of that step.
        peak_mb: most memory of a rank in a step: parameters, what the step allocates, and what this implementation
            keeps; null on CPUs, and where nothing is moved.
        correct: True if loss, gradient norm and gradients are the library's but for rounding; null if nothing is moved.
        note: reason why there is no time, or a remark.
        gemm_ms: GEMMs of one step on all streams of the first rank, under a profiler, as all of the next six; null
            without.
        attention_ms: attention kernels.
        collective_ms: kernels of collectives.
        copy_in_ms: casts of shards and gradients that are packed.
        copy_out_ms: copies out of FSDP2's buffers.
        peer_copy_ms: copies to peers by copy engines.
        other_ms: all other kernels.
        first_gather_ms: time of that step until its first GEMM begins.
        last_scatter_ms: time of that step after its last GEMM has ended.
        profiled_ms: time of all of that step. On the stream of the computation it is first_gather_ms, gemm_ms,
            attention_ms, stream_copy_in_ms, stream_copy_out_ms, stream_other_ms, waits_ms (for work of other streams)
            and last_scatter_ms.
        gemm_beside_ms: time by which GEMMs that run beside transfers take longer than the same ones of
            ``compute_only_straight``.
        gemm_apart_ms: time by which the other GEMMs take longer.
    """

    allowed = (("implementation", TRAINED_BY),)
    figures = ("step_ms",)

    model: str
    layers: int
    seq: int
    batch: int
    reduce_dtype: str
    optimizer: bool
    implementation: str
    step_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    exposed_ms: float | None
    recovered_percent: float | None
    loss: float | None
    grad_norm: float | None
    peak_mb: float | None
    correct: bool | None
    note: str = ""
    gemm_ms: float | None = None
    attention_ms: float | None = None
    collective_ms: float | None = None
    copy_in_ms: float | None = None
    copy_out_ms: float | None = None
    peer_copy_ms: float | None = None
    other_ms: float | None = None
    first_gather_ms: float | None = None
    last_scatter_ms: float | None = None
    profiled_ms: float | None = None
    stream_copy_in_ms: float | None = None
    stream_copy_out_ms: float | None = None
    stream_other_ms: float | None = None
    waits_ms: float | None = None
    gemm_beside_ms: float | None = None
    gemm_apart_ms: float | None = None


FLOOR, LEAST = "compute_only", "compute_only_straight"


def _ms(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"


def _in_ms(name: str) -> Cell:
    return lambda row, _: _ms(getattr(row, name))


def _over(name: str) -> Cell:
    """Make the column of what a row has more than a step that neither communicates nor copies out."""

    def text(row: FsdpRow, rows: Sequence[FsdpRow]) -> str:
        least = next(one for one in rows if one.implementation == LEAST)
        mine, other = getattr(row, name), getattr(least, name)
        return MISSING if mine is None or other is None else f"{mine - other:+.2f}"

    return text


def _slower(row: FsdpRow, rows: Sequence[FsdpRow]) -> str:
    floor = next((one.gemm_ms for one in rows if one.implementation == FLOOR), None)
    return MISSING if not floor or row.gemm_ms is None else f"{100 * (row.gemm_ms / floor - 1):+.1f}%"


STEP_COLUMNS: Mapping[str, Cell] = {
    "<implementation": "implementation",
    "step\nms": _in_ms("step_ms"),
    "p10-p90\nms": lambda row, _: "" if row.p10_ms is None else f"{_ms(row.p10_ms)}-{_ms(row.p90_ms)}",
    "exposed\nms": _in_ms("exposed_ms"),
    "recovered\n%": "recovered_percent:.0f",
    "loss": "loss:.5g",
    "grad norm": "grad_norm:.5g",
    "peak\nMB": "peak_mb",
    "<as the\nlibrary": lambda row, _: MISSING if row.correct is None and row.step_ms else verdict(row.correct),
}
KERNEL_COLUMNS: Mapping[str, Cell] = {
    "<implementation": "implementation",
    "GEMM": _in_ms("gemm_ms"),
    "over\ncompute": _slower,
    "atten-\ntion": _in_ms("attention_ms"),
    "collec-\ntives": _in_ms("collective_ms"),
    "copies\nin": _in_ms("copy_in_ms"),
    "copies\nout": _in_ms("copy_out_ms"),
    "peer\ncopies": _in_ms("peer_copy_ms"),
    "other": _in_ms("other_ms"),
    "first\ngather": _in_ms("first_gather_ms"),
    "last\nscatter": _in_ms("last_scatter_ms"),
}
SHARE_COLUMNS: Mapping[str, Cell] = {
    "<implementation": "implementation",
    "all of\nit": _over("profiled_ms"),
    "first\ngather": _over("first_gather_ms"),
    "copies\nin": _over("stream_copy_in_ms"),
    "copies\nout": _over("stream_copy_out_ms"),
    "GEMMs by\ntransfers": "gemm_beside_ms:+.2f",
    "other\nGEMMs": "gemm_apart_ms:+.2f",
    "atten-\ntion": _over("attention_ms"),
    "other": _over("stream_other_ms"),
    "waits": _over("waits_ms"),
    "last\nscatter": _over("last_scatter_ms"),
}


def fsdp_tables(rows: Sequence[FsdpRow]) -> list[Table]:
    """Make a table a case, and two more where its kernels were profiled; the shortest step is set off."""
    tables = []
    none: dict[str, Any] = {"value": None, "noted": lambda row: False}
    for _, alike in grouped(rows, case_of, ordered=False):
        title = title_of(alike[0])
        trained = table_of(title, alike, STEP_COLUMNS, value=lambda row: None if row.loss is None else row.step_ms)
        tables.append(trained)
        profiled = [row for row in alike if row.gemm_ms is not None]
        if profiled:
            what = f"{title}: kernels of one step, ms on all streams of rank 0"
            tables.append(table_of(what, profiled, KERNEL_COLUMNS, **none))
        whole = [row for row in profiled if row.profiled_ms is not None]
        if len(whole) > 1 and any(row.implementation == LEAST for row in whole):
            what = f"{title}: where the rest goes, ms of that step on its stream over {LEAST}"
            tables.append(table_of(what, whole, SHARE_COLUMNS, shown=lambda row: row.implementation != LEAST, **none))
    return tables


def case_of(row: FsdpRow) -> tuple[str, int, int, int, str, bool]:
    """Return what rows of one case have in common."""
    return row.model, row.layers, row.batch, row.seq, row.reduce_dtype, row.optimizer


def title_of(row: FsdpRow) -> str:
    """Return a case in words."""
    more = f", gradients in {row.reduce_dtype}" + (", with the optimizer" if row.optimizer else "")
    return f"{row.model}, {row.layers} layers, {row.batch}x{row.seq} tokens a rank{more}"


WIDTH = 0.8
GAP = 2
"""Points between a bar and its number."""


def draw_steps(rows: Sequence[FsdpRow], where: str, directory: Path) -> list[Picture]:
    """One picture: exposed milliseconds of each case, a bar an implementation; none where nothing was exposed.

    Args:
        rows: of the study.
        where: ranks and machine, for the title.
        directory: for the files, made if need be.
    """
    timed = [row for row in rows if row.exposed_ms is not None and row.implementation in COLOURS]
    cases = grouped(timed, case_of, ordered=False)
    names = [name for name in COLOURS if any(row.implementation == name for row in timed)]
    if not cases or not names:
        return []
    figure = Figure(figsize=(max(7.0, 2 + 1.8 * len(cases)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = WIDTH / len(names)
    for place, name in enumerate(names):
        for at, (_, alike) in enumerate(cases):
            for row in alike:
                if row.implementation == name and row.exposed_ms is not None:
                    x = at + (place - (len(names) - 1) / 2) * width
                    axes.bar(x, row.exposed_ms, 0.92 * width, color=COLOURS[name])
                    above = row.exposed_ms >= 0
                    axes.annotate(
                        f"{row.exposed_ms:.3g}",
                        (x, row.exposed_ms),
                        (0, GAP if above else -GAP),
                        textcoords="offset points",
                        ha="center",
                        va="bottom" if above else "top",
                        fontsize=6,
                    )
        axes.bar(0, 0, color=COLOURS[name], label=plain_name(name))
    labels = [title_of(alike[0]).replace(", ", "\n") for _, alike in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.set_ylabel("exposed, ms (less is better)")
    axes.margins(y=0.08)
    title = f"Exposed communication of a training step, {where}"
    axes.set_title(title)
    figure.legend(ncols=len(names), fontsize=7, frameon=False, loc="outside lower center")
    text = f"{title}: {', '.join(names)} in {len(cases)} cases; figures are in the table."
    return [save(figure, "fsdp-exposed", title, text, directory)]
