"""Numbers of a machine's description from isolated measurements: a folder's collectives, chains and C3 rows.

Only runs of one thing alone are used: collectives by size, and the GEMM's own time. What two things take together is
left for ``sidelane claims --machine`` to predict. The result is text to put into the machine's TOML file:

    python tools/fit_machine.py h200x4 results/h200x4
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.harness import study as result_files
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine, NumberSource, Quantity, Topology
from sidelane_lab.papers.results import LARGE, SMALL, GemmTime, fitted_to, gemm_times, layers_file, predict_gemms
from sidelane_lab.studies.collectives import CollectiveRow, predict_alone
from sidelane_lab.studies.gemms import FITTED, GemmRow

LIBRARY = {kind: str(kind) for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)}
MOVING = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
DMA_LATENCIES = (
    ("dma.doorbell_us",),
    ("dma.copy_us", "dma.next_copy_us"),
    ("dma.signal_us", "dma.wait_us"),
    ("dma.sync_us",),
)
"""One value for each entry: more numbers than small collectives tell apart would be invented."""
REDUCTIONS = (("dma.reduce_us",), ("dma.reduce_gbps",))
GEMM_NUMBERS = ("efficiency", "launch_us", "memory_efficiency", "ramp_k", "blend", "split_us")
"""In the order of how many shapes it takes to tell them apart."""
MANY = 20
STEPS = 25
LEAST = 1e-3
FloatArray = npt.NDArray[np.float64]
SPREAD = 0.05
"""Plausible range of a measured number, as a share of it, where the rows show no wider one."""


def main(machine: Machine, folder: Path) -> str:
    """Fit what the files of a folder allow.

    Returns:
        TOML: sections with the numbers that were found.

    Raises:
        ValueError: there is no file, or one is no result file.
    """
    layers = layers_file(machine, folder)
    files = [*(folder / f"{study}.json" for study in ("collectives", "chain", "c3")), layers]
    present = [path for path in files if path.is_file()]
    if not present:
        names = ", ".join([*(path.name for path in files[:-1]), f"../{layers.parent.name}/{layers.name}"])
        raise ValueError(f"fit_machine: no measurements (value={folder}, allowed=a folder with {names})")
    fitted: dict[str, Quantity] = {}
    alone: list[object] = []
    for path in present:
        rows = result_files.read(path).rows
        alone += rows
        source = f"results/{machine.name}/{path.name}"
        fitted |= fit_collectives(machine, [row for row in rows if isinstance(row, CollectiveRow)], source)
    first = [row for row in alone if isinstance(row, GemmRow) and row.model in FITTED]
    source = f"results/{machine.name}/" + " and ".join(path.name for path in present if path.name != "collectives.json")
    if first:  # far more shapes than chains and pairs have, and small ones
        source = f"results/{layers.parent.name}/{layers.name}"
    times = gemm_times(first or alone, machine.gpus)
    return to_toml(fitted | fit_gemm(machine, times, f"{source}, GEMMs alone"))


def fit_collectives(machine: Machine, rows: Sequence[CollectiveRow], source: str) -> dict[str, Quantity]:
    """Latencies and bandwidths from graph launches: of the library's kernels, and of DMA programs."""
    usable = [row for row in rows if fitted_to(row)]
    library = [row for row in usable if row.implementation == "nccl"]
    engines = [row for row in usable if row.implementation == "dma" and row.collective not in REDUCING]
    reductions = [row for row in usable if row.implementation == "dma" and row.collective in REDUCING]
    fitted = _fit_library(machine, library, source)
    bandwidths = _fit_engines(machine, engines, source)
    for path, value in bandwidths.items():
        machine = machine.with_value(path, value)
    small = [row for row in engines if row.bytes <= SMALL]
    for path in ("dma.doorbell_us", "dma.sync_us"):
        machine = machine.with_value(path, max(float(machine.quantities()[path]), 2.0))  # away from 0, a flat place
    latencies = _least_squares(machine, DMA_LATENCIES if small else (), small, source)
    for path, value in latencies.items():
        machine = machine.with_value(path, value)
    return fitted | bandwidths | latencies | _least_squares(machine, REDUCTIONS, reductions, source)


def _fit_library(machine: Machine, rows: Sequence[CollectiveRow], source: str) -> dict[str, Quantity]:
    """A latency and a bandwidth for each collective, and the two protocols that all share."""
    kinds = [kind for kind in LIBRARY if any(row.collective == kind for row in rows)]
    for kind in kinds:
        small = [row.time_us for row in rows if row.collective == kind and row.bytes <= SMALL and row.time_us]
        large = [row for row in rows if row.collective == kind and row.bytes >= LARGE]
        if small and large:
            gbps = [_link_bytes(machine, kind, row.bytes) / (row.time_us or 0.0) / 1e3 for row in large]
            machine = machine.with_value(f"library.{LIBRARY[kind]}_us", statistics.median(small))
            machine = machine.with_value(f"library.{LIBRARY[kind]}_gbps", max(gbps))
    paths = [(f"library.{LIBRARY[kind]}_{unit}",) for kind in kinds for unit in ("us", "gbps")]
    middle = any(SMALL < row.bytes < LARGE for row in rows)
    if middle:
        paths += [("library.bulk_us",), ("library.low_latency_share",)]
        # Anywhere between the ends: at them, one of the two protocols would never be taken.
        machine = machine.with_value("library.bulk_us", 20.0).with_value("library.low_latency_share", 0.5)
    return _least_squares(machine, paths, rows, source)


def _fit_engines(machine: Machine, rows: Sequence[CollectiveRow], source: str) -> dict[str, Quantity]:
    """Bandwidths: of one queue a rank, of several that share an engine, of copies that stay inside."""
    fitted: dict[str, Quantity] = {}
    wire = (machine.gpus - 1) / machine.gpus / 1e3

    def gbps(variant: str, in_place: bool, kind: Kind) -> list[float]:
        alike = [r for r in rows if (r.variant, r.in_place, r.collective) == (variant, in_place, kind)]
        start = min((row.time_us for row in alike if row.bytes <= SMALL and row.time_us), default=0.0)
        return [row.bytes * wire / ((row.time_us or 0.0) - start) for row in alike if row.bytes >= LARGE]

    queues = gbps("b2b", True, Kind.ALL_GATHER)
    if not queues:
        return {}
    best = max(queues)
    fitted["dma.engine_gbps"] = fitted["links.usable_gbps"] = _quantity(queues, best, source)
    shared = [
        value / best
        for kind in MOVING
        for place in (False, True)
        for value in gbps("pcpy", place, kind)
        if not (place and kind is Kind.ALL_TO_ALL)
    ]  # (that one stages)
    if shared:
        fitted["dma.shared_queues"] = _quantity(shared, statistics.median(shared), source)
    direct, staged = gbps("b2b", False, Kind.ALL_TO_ALL), gbps("b2b", True, Kind.ALL_TO_ALL)
    inside = [1 / (1 / b - 1 / a) for a, b in zip(direct, staged, strict=False) if b < a]
    if inside:
        fitted["dma.local_gbps"] = _quantity(inside, statistics.median(inside), source)
    return fitted


def _least_squares(
    machine: Machine,
    paths: Sequence[tuple[str, ...]],
    rows: Sequence[Any],
    source: str,
    predict: Callable[[Machine, Any], float | None] = predict_alone,
) -> dict[str, Quantity]:
    """Choose numbers for the least sum of squared relative errors, by Gauss-Newton with differences.

    Args:
        machine: to start from.
        paths: numbers to choose; those of one entry have the same value.
        rows: measured; as many as numbers, or more.
        source: for the result.
        predict: microseconds of a row, which the row's ``time_us`` is held against.
    """
    if not paths or len(rows) < len(paths):
        return {}
    times = np.array([row.time_us for row in rows])

    def errors(values: FloatArray) -> FloatArray:
        changed = machine
        for same, value in zip(paths, values, strict=True):
            for path in same:
                changed = changed.with_value(path, float(value))
        predicted: FloatArray = np.array([predict(changed, row) for row in rows])
        relative: FloatArray = predicted / times - 1.0
        return relative

    known = machine.quantities()
    values = np.array([max(float(known[same[0]]), 0.1) for same in paths])
    now = errors(values)
    for _ in range(STEPS):
        slopes = np.empty((len(rows), len(paths)))
        for column in range(len(paths)):
            moved = values.copy()
            moved[column] *= 1.001
            slopes[:, column] = (errors(moved) - now) / 0.001
        # In units of the values themselves, and a little damped: protocols and queues switch, so slopes jump.
        step = np.linalg.lstsq(np.vstack([slopes, 0.01 * np.eye(len(paths))]), np.append(-now, np.zeros(len(paths))))[0]
        for shrink in (1.0, 0.5, 0.25, 0.1):
            tried = np.maximum(values * (1 + shrink * np.clip(step, -0.5, 1.0)), LEAST)
            then = errors(tried)
            if then @ then < now @ now:
                values, now = tried, then
                break
        else:
            break
    # Two standard errors of each number alone.
    typical = float(np.sqrt(now @ now / max(1, len(rows) - len(paths))))
    reach = 2 * typical / np.maximum(np.linalg.norm(slopes, axis=0), 1e-6)
    fitted: dict[str, Quantity] = {}
    for same, value, wide in zip(paths, values, reach, strict=True):
        ends = [value * (1 - min(wide, 0.9)), value * (1 + min(wide, 2.0))]
        fitted |= dict.fromkeys(same, _quantity(ends, float(value), source))
    return fitted


def fit_gemm(machine: Machine, times: Sequence[GemmTime], source: str) -> dict[str, Quantity]:
    """Efficiency of GEMMs alone, their launch, and the rest where there are shapes enough to tell them apart."""
    paths = [(f"matmul.{name}",) for name in GEMM_NUMBERS[: 1 if len(times) < 3 else 2 if len(times) < MANY else None]]
    return _least_squares(machine, paths, times, source, predict_gemms)


def to_toml(fitted: dict[str, Quantity]) -> str:
    """Sections of a machine's file."""
    lines: list[str] = []
    for section in dict.fromkeys(path.partition(".")[0] for path in fitted):
        lines.append(f"[{section}]")
        for path, number in fitted.items():
            if path.startswith(f"{section}."):
                source = f'source = "{number.source}", of = "{number.of}"'
                ends = f"low = {number.low:.4g}, high = {number.high:.4g}"
                lines.append(f"{path.partition('.')[2]} = {{ value = {number:.4g}, {source}, {ends} }}")
        lines.append("")
    return "\n".join(lines)


def _link_bytes(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Bytes over one link (mesh) or port (switch), one direction."""
    share = (1 if machine.links.topology is Topology.MESH else machine.gpus - 1) / machine.gpus
    return (2 if kind is Kind.ALL_REDUCE else 1) * share * nbytes


def _quantity(values: Sequence[float], value: float, source: str) -> Quantity:
    low, high = min([*values, value * (1 - SPREAD)]), max([*values, value * (1 + SPREAD)])
    # Rounded outwards, so that the rounded value lies inside.
    return Quantity(
        float(f"{value:.4g}"), NumberSource.MEASURED, source, float(f"{low * 0.999:.4g}"), float(f"{high * 1.001:.4g}")
    )


if __name__ == "__main__":
    print(main(find(sys.argv[1]), Path(sys.argv[2])))
