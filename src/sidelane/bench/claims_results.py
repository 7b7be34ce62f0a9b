"""Predictions held against this project's own measurements: ``results/<machine>/c3.json`` and ``collectives.json``.

From a C3 file the model is given the isolated times alone, of the GEMM and of the collective as the strategy runs it,
and predicts what both take together. From a collectives file it is given nothing: the description says it all.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from sidelane.bench import results as result_files
from sidelane.bench.results import C3Row, CollectiveRow
from sidelane.c3.workload import Gemm, format_bytes
from sidelane.execute.sim import simulate
from sidelane.machine.spec import Machine
from sidelane.model.claims import Role, Verdict, error_of
from sidelane.model.device import Gang, Tiled, run_device
from sidelane.model.kernels import dma_gang, gemm_kernel, library_gang
from sidelane.model.published import collective_of, library_us
from sidelane.program.build import build, variants
from sidelane.program.collective import Kind

C3_MEDIAN, C3_WORST, COLLECTIVE_MEDIAN = 0.10, 0.20, 0.10
"""Errors that are still right (issue 3)."""
SMALLEST = 1 << 20
"""Bytes from which collective times are compared (issue 3)."""
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE)
ON_ENGINES = ("conccl", "nccl_ce")
LIBRARY_STRATEGIES = ("c3_base", "c3_sp")


def compare(machine: Machine, folder: Path) -> list[Verdict]:
    """Hold predictions against every row of the machine's result files that the model speaks to.

    Args:
        machine: the description of what was measured on.
        folder: with ``c3.json`` or ``collectives.json``, or both.

    Returns:
        A verdict for each row, and for each file the median and the worst error.

    Raises:
        ValueError: neither file is there, or one is no result file.
    """
    verdicts: list[Verdict] = []
    found = False
    for study, judge_rows in (("c3", _c3), ("collectives", _collectives)):
        path = folder / f"{study}.json"
        if path.is_file():
            found = True
            verdicts += judge_rows(machine, result_files.read(path).rows)
    if not found:
        raise ValueError(f"claims: no measurements (value={folder}, allowed=a folder with c3.json or collectives.json)")
    return verdicts


def predict_together(machine: Machine, row: C3Row) -> float | None:
    """What a strategy takes, from the isolated times of its row; None if the model does not speak to it."""
    if row.gemm_us is None or row.comm_us is None or row.collective not in tuple(KINDS):
        return None
    kind = Kind(row.collective)
    if row.strategy == "serial":
        return row.gemm_us + row.comm_us
    gemm = gemm_kernel(machine, Gemm(row.m, row.n, row.k, row.dtype))
    scale = row.gemm_us / run_device(machine, [gemm]).time_us
    computation = dataclasses.replace(gemm, compute_us=gemm.compute_us * scale)
    gang: Gang
    if row.strategy in ON_ENGINES and kind is not Kind.ALL_REDUCE:
        gang = dma_gang(machine, kind, row.bytes)
    elif row.strategy in LIBRARY_STRATEGIES:
        gang = library_gang(machine, kind, row.bytes)
    else:
        return None
    collective = dataclasses.replace(
        gang, alone_us=row.comm_us, memory_gbps=gang.memory_gbps * gang.alone_us / row.comm_us
    )
    kernels: list[Tiled | Gang] = [computation, collective]
    if row.strategy != "c3_base":
        kernels.reverse()
    return run_device(machine, kernels).time_us


def predict_alone(machine: Machine, row: CollectiveRow) -> float | None:
    """What a collective takes alone; None if the model does not speak to it."""
    if row.collective not in tuple(KINDS) or row.launch != "graph":
        return None
    kind = Kind(row.collective)
    if row.implementation == "nccl":
        return library_us(machine, kind, row.bytes)
    if row.implementation != "dma" or row.variant not in variants(kind) or row.prelaunch:
        return None
    collective = collective_of(kind, row.bytes, machine.gpus)
    if row.in_place != collective.in_place and kind is not Kind.ALL_TO_ALL:
        collective = dataclasses.replace(collective, in_place=row.in_place)
    return simulate(build(collective, row.variant), machine).time_us


def _c3(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    measured = [row for row in rows if isinstance(row, C3Row) and row.time_us is not None]

    def name(row: C3Row) -> str:
        return f"{row.gemm}_{format_bytes(row.bytes)}/{row.collective}/{row.strategy}"

    judged = [
        _judge(f"{machine.name}/c3/{name(r)}", r.time_us, predict_together(machine, r), C3_WORST) for r in measured
    ]
    return _with_summary(f"{machine.name}/c3", judged, C3_MEDIAN, C3_WORST)


def _collectives(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    measured = [
        row for row in rows if isinstance(row, CollectiveRow) and row.time_us is not None and row.bytes >= SMALLEST
    ]

    def name(row: CollectiveRow) -> str:
        place = "in place" if row.in_place else "out of place"
        return f"{row.collective}/{format_bytes(row.bytes)}/{place}/{row.implementation} {row.variant}".strip()

    judged = [
        _judge(f"{machine.name}/collectives/{name(r)}", r.time_us, predict_alone(machine, r), 2 * COLLECTIVE_MEDIAN)
        for r in measured
    ]
    return _with_summary(f"{machine.name}/collectives", judged, COLLECTIVE_MEDIAN, None)


def _judge(claim_id: str, measured: float | None, predicted: float | None, tolerance: float) -> Verdict | None:
    if measured is None or predicted is None:
        return None
    error = error_of(measured, predicted)
    assert error is not None
    return Verdict(claim_id, "measured time", measured, predicted, "us", error, Role.HELD_OUT, error <= tolerance)


def _with_summary(name: str, judged: Sequence[Verdict | None], median: float, worst: float | None) -> list[Verdict]:
    verdicts = [verdict for verdict in judged if verdict is not None]
    errors = [verdict.error for verdict in verdicts if verdict.error is not None]
    if not errors:
        return []
    summaries: list[tuple[str, Callable[[Sequence[float]], float], float | None]] = [
        ("median", statistics.median, median),
        ("worst", max, worst),
    ]
    for word, measure, limit in summaries:
        error = measure(errors)
        if limit is not None:
            text = f"{word} error of {len(errors)} predictions, at most"
            row = Verdict(
                f"{name}/{word}", text, 100 * limit, 100 * error, "percent", None, Role.HELD_OUT, error <= limit
            )
            verdicts.append(row)
    return verdicts
