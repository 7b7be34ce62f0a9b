"""Rows of training steps, as tables and as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.cli.table import MISSING, Line, Table, grouped, notes_of, number, verdict
from sidelane_lab.harness.drawing import BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, save
from sidelane_lab.harness.rows import FlatRow
from sidelane_lab.harness.study import Picture

TRAINED_BY = (
    *("nccl", "gloo", "nccl_ce", "sidelane_ag", "sidelane", "sidelane_copies"),
    *("compute_only", "compute_only_straight"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class FsdpRow(FlatRow):
    """A training step of layers that FSDP2 shards, by who communicates.

    Attributes:
        model: whose layers they are like; on CPU ranks of smaller sizes.
        seq, batch: tokens of a sequence, and sequences of a rank.
        reduce_dtype: in which gradients are added; parameters are gathered in bfloat16.
        optimizer: the step has one (AdamW).
        implementation: ``nccl``, on CPUs ``gloo``; ``nccl_ce``: gathers by NCCL on copy engines; ``sidelane_ag``:
            gathers by Sidelane; ``sidelane``: gathers and scatters; ``sidelane_copies``: the same with parameters that
            are copied out of a buffer; ``compute_only``: collectives that move nothing; ``compute_only_straight``: and
            no copy-out.
        step_ms: median over rounds of the slowest rank; p10_ms and p90_ms likewise.
        exposed_ms: more than ``compute_only`` in the same round, median.
        recovered_percent: of the library's exposed time, in the same round, median.
        loss: mean over ranks; grad_norm: of the whole gradient. Of the step that was compared.
        peak_mb: most memory of a rank in a step: parameters, what the step allocates, and what this implementation
            keeps; null on CPUs, and where nothing is moved.
        correct: loss, gradient norm and gradients are the library's but for rounding; null where nothing is moved.
        note: why there is no time, or what to know about this one.
        gemm_ms, attention_ms, collective_ms, copy_in_ms, copy_out_ms, peer_copy_ms, other_ms: kernels of one step on
            all streams of the first rank, under a profiler; null without. Copies in are casts of shards and gradients
            that are packed; peer copies those of copy engines.
        first_gather_ms: of that step, until its first GEMM begins; last_scatter_ms: after its last one has ended.
        profiled_ms: all of that step. On the stream of the computation it is first_gather_ms, gemm_ms, attention_ms,
            stream_copy_in_ms, stream_copy_out_ms, stream_other_ms, waits_ms (for whatever comes from elsewhere) and
            last_scatter_ms.
        gemm_beside_ms: by how much GEMMs that run next to transfers take longer than the same ones of
            ``compute_only_straight``; gemm_apart_ms: the other GEMMs.
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


STEP_COLUMNS = (
    *("<implementation", "step\nms", "p10-p90\nms", "exposed\nms", "recovered\n%", "loss", "grad norm", "peak\nMB"),
    "<as the\nlibrary",
)
KERNEL_COLUMNS = (
    *("<implementation", "GEMM", "over\ncompute", "atten-\ntion", "collec-\ntives", "copies\nin", "copies\nout"),
    *("peer\ncopies", "other", "first\ngather", "last\nscatter"),
)
SHARE_COLUMNS = (
    *("<implementation", "all of\nit", "first\ngather", "copies\nin", "copies\nout", "GEMMs by\ntransfers"),
    *("other\nGEMMs", "atten-\ntion", "other", "waits", "last\nscatter"),
)
FLOOR, LEAST = "compute_only", "compute_only_straight"


def fsdp_tables(rows: Sequence[FsdpRow]) -> list[Table]:
    """One table a case, and one more of its kernels where they were profiled; the shortest step is set off."""
    tables = []
    for _, alike in grouped(rows, case_of, ordered=False):
        trained = [row.step_ms for row in alike if row.step_ms is not None and row.loss is not None]
        best = min(trained, default=None)
        lines = tuple(
            Line(_cells(row), best=best is not None and row.step_ms == best and row.loss is not None) for row in alike
        )
        notes = notes_of([(row.implementation, row.note) for row in alike])
        tables.append(Table(title_of(alike[0]), STEP_COLUMNS, lines, notes))
        profiled = [row for row in alike if row.gemm_ms is not None]
        if profiled:
            floor = next((row.gemm_ms for row in profiled if row.implementation == FLOOR), None)
            kernels = tuple(Line(_kernel_cells(row, floor)) for row in profiled)
            title = f"{title_of(alike[0])}: kernels of one step, ms on all streams of rank 0"
            tables.append(Table(title, KERNEL_COLUMNS, kernels))
        shares = _shares(profiled)
        if shares:
            title = f"{title_of(alike[0])}: where the rest goes, ms of that step on its stream over {LEAST}"
            tables.append(Table(title, SHARE_COLUMNS, shares))
    return tables


def case_of(row: FsdpRow) -> tuple[str, int, int, int, str, bool]:
    """What rows of one case have in common."""
    return row.model, row.layers, row.batch, row.seq, row.reduce_dtype, row.optimizer


def title_of(row: FsdpRow) -> str:
    """A case in words."""
    more = f", gradients in {row.reduce_dtype}" + (", with the optimizer" if row.optimizer else "")
    return f"{row.model}, {row.layers} layers, {row.batch}x{row.seq} tokens a rank{more}"


def _cells(row: FsdpRow) -> tuple[str, ...]:
    return (
        row.implementation,
        _ms(row.step_ms),
        "" if row.p10_ms is None or row.p90_ms is None else f"{_ms(row.p10_ms)}-{_ms(row.p90_ms)}",
        _ms(row.exposed_ms),
        MISSING if row.recovered_percent is None else f"{row.recovered_percent:.0f}",
        MISSING if row.loss is None else f"{row.loss:.5g}",
        MISSING if row.grad_norm is None else f"{row.grad_norm:.5g}",
        number(row.peak_mb),
        MISSING if row.correct is None and row.step_ms is not None else verdict(row.correct),
    )


def _kernel_cells(row: FsdpRow, floor_ms: float | None) -> tuple[str, ...]:
    slower = MISSING if not floor_ms or row.gemm_ms is None else f"{100 * (row.gemm_ms / floor_ms - 1):+.1f}%"
    rest = (
        *(row.attention_ms, row.collective_ms, row.copy_in_ms, row.copy_out_ms, row.peer_copy_ms, row.other_ms),
        *(row.first_gather_ms, row.last_scatter_ms),
    )
    return (row.implementation, _ms(row.gemm_ms), slower, *map(_ms, rest))


def _shares(rows: Sequence[FsdpRow]) -> tuple[Line, ...]:
    """What each has more than a step that neither communicates nor copies out; the parts add up to the whole."""
    least = next((row for row in rows if row.implementation == LEAST and row.profiled_ms is not None), None)
    if least is None:
        return ()
    lines = []
    for row in rows:
        if row is least or row.profiled_ms is None:
            continue
        names = ("profiled_ms", "first_gather_ms", "stream_copy_in_ms", "stream_copy_out_ms")
        more = [_difference(row, least, name) for name in names]
        more += [row.gemm_beside_ms, row.gemm_apart_ms]
        more += [_difference(row, least, n) for n in ("attention_ms", "stream_other_ms", "waits_ms", "last_scatter_ms")]
        lines.append(Line((row.implementation, *(MISSING if one is None else f"{one:+.2f}" for one in more))))
    return tuple(lines)


def _difference(row: FsdpRow, least: FsdpRow, name: str) -> float | None:
    one, other = getattr(row, name), getattr(least, name)
    return None if one is None or other is None else one - other


def _ms(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"


COLOURS = {
    "nccl": VERMILLION,
    "gloo": VERMILLION,
    "nccl_ce": ORANGE,
    "sidelane_ag": SKY,
    "sidelane": BLUE,
    "sidelane_copies": GREEN,
}
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
        axes.bar(0, 0, color=COLOURS[name], label=name)
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
