"""Traces of pairs as files: for Chrome and Perfetto, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sidelane.bench.report.drawing import file_name
from sidelane.bench.simulated.figures import draw_timeline
from sidelane.c3.spans import Trace
from sidelane.c3.workload import Workload
from sidelane.execute.sim import Interval, write_chrome_trace


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
    name = file_name(f"{workload.name} {strategy}")
    write_chrome_trace(folder / f"{name}.trace.json", intervals)
    draw_timeline(intervals, f"{workload.name} under {strategy}, measured", folder, name)
