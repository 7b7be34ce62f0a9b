"""Rows of the study of training steps as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.cli.table import MISSING, Line, Table, grouped, notes_of, number, verdict
from sidelane_lab.studies.fsdp.rows import FsdpRow

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
