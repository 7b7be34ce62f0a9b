"""Traces of pairs as files: for Chrome and Perfetto, and as pictures."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sidelane.c3.workload import Workload
from sidelane.cli.table import grouped
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import file_name
from sidelane_lab.harness.study import Picture
from sidelane_lab.pairs.spans import Trace
from sidelane_lab.papers.figures import draw_timeline
from sidelane_lab.sim import Interval, write_chrome_trace
from sidelane_lab.studies.c3.rows import C3Row


class Everyones(Protocol):
    """What all ranks have (``bench.running.measure.Meter``)."""

    def of_all_ranks(self, values: Sequence[float]) -> Sequence[Sequence[float]]: ...


def write_trace(folder: Path, workload: Workload, meter: Everyones, writes: bool, strategy: str, trace: Trace) -> None:
    """Write when the two parts of a pair ran on every rank, each rank from its own release on. Collective.

    Args:
        folder: made if need be.
        workload: the pair.
        meter: see there.
        writes: this rank does.
        strategy: name.
        trace: of this rank.
    """
    ends = [moment for span in (*trace.gemms, *trace.collectives) for moment in span]
    everyones = meter.of_all_ranks(ends)
    if not writes:
        return
    intervals = []
    for rank, (gemm_begins, gemm_ends, begins, ends_at) in enumerate(everyones):
        group = f"rank {rank}"
        intervals.append(Interval(group, "compute", f"GEMM {workload.gemm.name}", gemm_begins, gemm_ends))
        intervals.append(Interval(group, "communication", str(workload.collective), begins, ends_at))
    name = _name(workload.name, strategy)
    write_chrome_trace(folder / f"{name}.trace.json", intervals)
    draw_timeline(intervals, f"{workload.name} under {strategy}, measured", folder, name)


def traced(folder: Path, rows: Sequence[C3Row], page: Path) -> list[Picture]:
    """Pictures of the traces of each pair under the fastest and the slowest of its strategies, for a page.

    Args:
        folder: where :func:`write_trace` has left them; what it has not is left out.
        rows: of the study.
        page: folder of the page, to which they are copied; made if need be.
    """
    page.mkdir(parents=True, exist_ok=True)
    pictures = []
    for _, alike in grouped(rows, lambda row: (row.gemm, row.dtype, row.collective, row.bytes), ordered=False):
        times = {row.strategy: row.time_us for row in alike if row.time_us is not None and not row.chosen}
        pair = f"{alike[0].gemm}_{format_bytes(alike[0].bytes)} {alike[0].collective}"
        for strategy in dict.fromkeys(
            (min(times, key=times.__getitem__), max(times, key=times.__getitem__)) if times else ()
        ):
            name = _name(pair, strategy)
            files = [folder / f"{name}.{ending}" for ending in ("svg", "png")]
            if not all(file.exists() for file in files):
                continue
            for file in files:
                if file.parent.resolve() != page.resolve():
                    shutil.copy(file, page / file.name)
            text = f"When the GEMM and the collective of {pair} ran under {strategy}, on every rank."
            pictures.append(Picture(name, f"{pair} under {strategy}", text))
    return pictures


def _name(pair: str, strategy: str) -> str:
    return file_name(f"{pair} {strategy}")
