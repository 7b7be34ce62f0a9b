"""Numbers of a machine's description from isolated measurements: ``collectives.json`` and ``c3.json`` of a folder.

Only runs of one thing alone are used: collectives by size, and the GEMM's own time. What two things take together is
left for ``sidelane claims --machine`` to predict. The result is text to put into the machine's TOML file.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from sidelane.bench import results as result_files
from sidelane.bench.claims_results import predict_alone
from sidelane.bench.results import C3Row, CollectiveRow
from sidelane.c3.workload import Gemm
from sidelane.machine.spec import Machine, Quantity, Source, Topology
from sidelane.model.kernels import gemm_us
from sidelane.program.collective import Kind

LIBRARY = {Kind.ALL_GATHER: "all_gather", Kind.ALL_TO_ALL: "all_to_all", Kind.ALL_REDUCE: "all_reduce"}
DMA_LATENCIES = ("dma.fetch_us", "dma.copy_us", "dma.next_copy_us", "dma.signal_us", "dma.wait_us")
SMALL, LARGE = 64 << 10, 256 << 20
"""Bytes up to which latency decides, and from which bandwidth does."""
SPREAD = 0.05
"""Plausible range of a measured number, as a share of it, where the rows show no wider one."""


def main(machine: Machine, folder: Path) -> str:
    """Fit what the files of a folder allow.

    Returns:
        TOML: sections with the numbers that were found.

    Raises:
        ValueError: there is no file, or one is no result file.
    """
    files = [folder / f"{study}.json" for study in ("collectives", "c3")]
    present = [path for path in files if path.is_file()]
    if not present:
        raise ValueError(
            f"fit_machine: no measurements (value={folder}, allowed=a folder with collectives.json, c3.json)"
        )
    fitted: dict[str, Quantity] = {}
    for path in present:
        rows = result_files.read(path).rows
        source = f"results/{machine.name}/{path.name}"
        fitted |= fit_collectives(machine, [row for row in rows if isinstance(row, CollectiveRow)], source)
        fitted |= fit_gemm(machine, [row for row in rows if isinstance(row, C3Row)], source)
    return to_toml(fitted)


def fit_collectives(machine: Machine, rows: Sequence[CollectiveRow], source: str) -> dict[str, Quantity]:
    """Latencies and bandwidths from graph launches: of the library by collective, and of one DMA queue a rank."""
    usable = [row for row in rows if row.launch == "graph" and row.time_us and not row.prelaunch]
    fitted: dict[str, Quantity] = {}
    for kind, name in LIBRARY.items():
        library = [row for row in usable if row.implementation == "nccl" and row.collective == kind]
        small, large = _times(library, 0, SMALL), [row for row in library if row.bytes >= LARGE]
        if small and large:
            latency = min(small)
            gbps = [_link_bytes(machine, kind, row.bytes) / ((row.time_us or 0.0) - latency) / 1e3 for row in large]
            fitted[f"library.{name}_us"] = _quantity([latency, *small], latency, source)
            fitted[f"library.{name}_gbps"] = _quantity(gbps, statistics.median(gbps), source)
    queues = [
        r
        for r in usable
        if (r.implementation, r.variant, r.collective) == ("dma", "b2b", Kind.ALL_GATHER) and r.in_place
    ]
    large = [row for row in queues if row.bytes >= LARGE]
    if large:
        bandwidths = [row.bytes * (machine.gpus - 1) / machine.gpus / (row.time_us or 0.0) / 1e3 for row in large]
        best = max(bandwidths)
        fitted["dma.engine_gbps"] = fitted["links.usable_gbps"] = _quantity(bandwidths, best, source)
    small_rows = [row for row in queues if row.bytes <= SMALL]
    if small_rows:
        # One scale for all steps of a handshake: their sum is what small sizes show.
        ratios = [(row.time_us or 0.0) / (predict_alone(machine, row) or 1.0) for row in small_rows]
        known = machine.quantities()
        for path in DMA_LATENCIES:
            values = [ratio * known[path] for ratio in ratios]
            fitted[path] = _quantity(values, statistics.median(values), source)
    return fitted


def fit_gemm(machine: Machine, rows: Sequence[C3Row], source: str) -> dict[str, Quantity]:
    """Efficiency of GEMMs alone: the median over shapes of what the rows' isolated times say."""
    times = {(r.m, r.n, r.k, r.dtype): r.gemm_us for r in rows if r.gemm_us is not None}
    if not times:
        return {}
    efficiency = machine.matmul.efficiency
    values = [gemm_us(machine, Gemm(*shape)) / time * efficiency for shape, time in times.items()]
    return {"matmul.efficiency": _quantity(values, statistics.median(values), source)}


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


def _times(rows: Sequence[CollectiveRow], least: int, most: int) -> list[float]:
    return [row.time_us for row in rows if row.time_us is not None and least <= row.bytes <= most]


def _link_bytes(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Bytes over one link (mesh) or port (switch), one direction."""
    share = (1 if machine.links.topology is Topology.MESH else machine.gpus - 1) / machine.gpus
    return (2 if kind is Kind.ALL_REDUCE else 1) * share * nbytes


def _quantity(values: Sequence[float], value: float, source: str) -> Quantity:
    low, high = min([*values, value * (1 - SPREAD)]), max([*values, value * (1 + SPREAD)])
    # Rounded outwards, so that the rounded value lies inside.
    return Quantity(
        float(f"{value:.4g}"), Source.MEASURED, source, float(f"{low * 0.999:.4g}"), float(f"{high * 1.001:.4g}")
    )
