"""Between the rows of ``sidelane tune --study c3`` and what follows from them (``c3.isolated``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sidelane.bench.report.table import grouped
from sidelane.bench.results.files import read
from sidelane.bench.results.rows import IsolatedRow
from sidelane.c3.isolated import CollectiveTimes, GemmTimes, Isolated
from sidelane.c3.workload import TABLE_I, Gemm, parse_gemm
from sidelane.choice.key import key_here
from sidelane.choice.store import name_of
from sidelane.config import profile_folder
from sidelane.program.collective import Kind

GEMM, COLLECTIVE, MEMORY, BESIDE = "gemm", "collective", "memory", "beside"

Key = tuple[object, ...]


def key_of(row: IsolatedRow) -> Key:
    """What was measured; a file has one row of each."""
    sizes = (row.m, row.n, row.k, row.dtype, row.collective, row.bytes)
    return row.what, *sizes, row.implementation, row.variant, row.means, row.units


def gemm_of(row: IsolatedRow) -> Gemm:
    """The GEMM of a row, by its name in the table if it has these sizes, divided or not."""
    plain = Gemm(row.m, row.n, row.k, row.dtype)
    tag, _, divisor = row.gemm.partition("/")
    if tag not in TABLE_I:
        return plain
    named = parse_gemm(tag, row.dtype).scaled(int(divisor or 1))
    return named if (named.m, named.n, named.k) == (row.m, row.n, row.k) else plain


def isolated_of(rows: Sequence[IsolatedRow]) -> Isolated:
    """What was measured as curves.

    Raises:
        ValueError: no GEMM, or nothing of the memory, was measured.
    """
    timed = [row for row in rows if row.time_us is not None]
    gemms = tuple(_gemms([row for row in timed if row.what == GEMM]))
    memory = max((row.gbps for row in timed if row.what == MEMORY and row.gbps), default=0.0)
    if not gemms or not memory:
        raise ValueError("isolated_of: rows (value=none of a GEMM, or none of the memory; sidelane tune --study c3)")
    tflops = max(curve.gemm.flops / curve.times_us[0] / 1e6 for curve in gemms)
    return Isolated(tflops, memory, gemms, tuple(_collectives([row for row in timed if row.what == COLLECTIVE])))


def isolated_file(device_type: str, ranks: int) -> Path:
    """The user's file of this machine."""
    return profile_folder() / f"{name_of(key_here(device_type, ranks))}-c3.json"


def isolated_times(path: Path | None, device_type: str, ranks: int) -> Isolated | None:
    """What is in a file of isolated times; None: the user's of this machine, which need not be there.

    Raises:
        ValueError: there is no such file, it is another one, or says too little.
    """
    if path is None:
        path = isolated_file(device_type, ranks)
        if not path.exists():
            return None
    elif not path.exists():
        raise ValueError(f"isolated times: no such file (value={str(path)!r}, allowed=of sidelane tune --study c3)")
    return isolated_of([row for row in read(path).rows if isinstance(row, IsolatedRow)])


def _gemms(rows: Sequence[IsolatedRow]) -> Iterable[GemmTimes]:
    for (*_, means), same in grouped(rows, lambda row: (row.m, row.n, row.k, row.dtype, row.means), ordered=False):
        times = {row.units: row.time_us for row in same if row.time_us is not None}
        if 0 in times:
            yield GemmTimes(gemm_of(same[0]), str(means), same[0].device_units, times)


def _collectives(rows: Sequence[IsolatedRow]) -> Iterable[CollectiveTimes]:
    by = grouped(rows, lambda row: (row.collective, row.bytes, row.implementation), ordered=False)
    for (collective, nbytes, implementation), same in by:
        times: dict[int, float] = {}
        for row in same:  # of several variants the fastest
            if row.time_us is not None:
                times[row.units] = min(row.time_us, times.get(row.units, row.time_us))
        if 0 in times:
            yield CollectiveTimes(Kind(collective), int(nbytes), str(implementation), times)
