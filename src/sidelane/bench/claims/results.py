"""Predictions held against this project's own measurements: files of ``results/<machine>``.

From ``c3.json`` the model is given the isolated times alone, of the GEMM and of the collective as the strategy runs it,
and predicts what both take together. From ``collectives.json`` it is given nothing: the description says it all. The
rows of that file that the description was fitted to (``fitted_to``) are not called predictions. ``power.json``: see
``claims_power``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from sidelane.bench.claims.power import judge_power
from sidelane.bench.claims.verdicts import judge, with_summary
from sidelane.bench.results import files as result_files
from sidelane.bench.results.rows import C3Row, CollectiveRow
from sidelane.c3.workload import Gemm
from sidelane.execute.sim import simulate
from sidelane.machine.spec import Machine
from sidelane.model.claims import Role, Verdict, with_ranges
from sidelane.model.device import Gang, Tiled, run_device
from sidelane.model.kernels import dma_gang, gemm_kernel, library_gang, own_chunk_gang
from sidelane.model.published import collective_of, library_us
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import Kind
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, lower
from sidelane.sizes import format_bytes

C3_MEDIAN, C3_WORST, COLLECTIVE_MEDIAN = 0.10, 0.20, 0.10
"""Errors that are still right (issue 3)."""
SMALLEST = 1 << 20
"""Bytes from which collective times are compared (issue 3)."""
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE)
SMALL, LARGE = 64 << 10, 256 << 20
"""Bytes up to which latency decides, and from which bandwidth does: ``fit_machine`` uses these rows."""
OUT_OF_PLACE = "out of place"
ON_ENGINES = ("conccl", "nccl_ce")
LIBRARY_STRATEGIES = ("c3_base", "c3_sp")


def compare(
    machine: Machine, folder: Path, *, ranges: bool = False, progress: Callable[[str], None] | None = None
) -> list[Verdict]:
    """Hold predictions against every row of the machine's result files that the model speaks to.

    Args:
        machine: the description of what was measured on.
        folder: with ``c3.json``, ``collectives.json`` or ``power.json``.
        ranges: predict over the plausible values of the machine's numbers as well.
        progress: told what is being done.

    Returns:
        A verdict for each row, and for each file the median and the worst error.

    Raises:
        ValueError: neither file is there, or one is no result file.
    """
    verdicts: list[Verdict] = []
    found = False
    for study, judge_rows in (("c3", _c3), ("collectives", _collectives), ("power", judge_power)):
        path = folder / f"{study}.json"
        if path.is_file():
            found = True
            verdicts += judge_rows(machine, result_files.read(path).rows)
    if not found:
        allowed = f"--results with a folder {folder.name} of c3.json, collectives.json or power.json"
        raise ValueError(f"claims: no measurements of {machine.name} (value={folder.resolve()}, allowed={allowed})")
    if not ranges:
        return verdicts
    variations = []
    for number, quantity in machine.quantities().items():
        for value in (quantity.low, quantity.high):
            if value is not None:
                if progress is not None:
                    progress(f"{number} = {value:g}")
                variations.append(compare(machine.with_value(number, value), folder))
    return [
        with_ranges(verdict, [varied[place].predicted for varied in variations])
        for place, verdict in enumerate(verdicts)
    ]


def role_problems(machine: Machine) -> list[str]:
    """Numbers of a description that were taken from runs side by side: one line each; empty when all is well.

    A C3 file may only give a GEMM's time alone.
    """
    return [
        f"{path}: taken from {quantity.of}, which holds C3 times that are predictions (allowed=[matmul] alone)"
        for path, quantity in machine.quantities().items()
        if quantity.of.endswith("c3.json") and not path.startswith("matmul.")
    ]


def fitted_to(row: CollectiveRow) -> bool:
    """True if ``fit_machine`` turns this row into numbers of the description."""
    if row.tensors > 1:
        return False
    if row.launch != "graph" or row.prelaunch or row.time_us is None or row.collective not in tuple(KINDS):
        return False
    if row.implementation == "nccl":
        return not row.variant
    if row.implementation != "dma" or row.variant not in variants(Kind(row.collective)):
        return False
    large = row.bytes >= LARGE and row.variant in ("b2b", "pcpy")
    return row.bytes <= SMALL or large


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
    own = None
    if row.strategy in ON_ENGINES and OUT_OF_PLACE in row.note:
        own = own_chunk_gang(machine, kind, row.bytes)
    if own is not None and row.strategy == "nccl_ce":
        # NCCL queues the own chunk with the others: what waits for the GEMM holds up all.
        collective = dataclasses.replace(collective, after=(computation.name,))
    kernels: list[Tiled | Gang] = [computation, collective]
    if row.strategy != "c3_base":
        kernels.reverse()
    if own is not None and row.strategy != "nccl_ce":
        kernels.append(own)
    return run_device(machine, kernels).time_us


def predict_alone(machine: Machine, row: CollectiveRow) -> float | None:
    """What a collective takes alone; None if the model does not speak to it."""
    if row.collective not in tuple(KINDS) or row.launch != "graph" or row.tensors > 1:
        return None
    kind = Kind(row.collective)
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return library_us(machine, kind, row.bytes)
    if row.implementation != "dma" or row.variant not in variants(kind) or row.prelaunch:
        return None
    return simulate(_executed(kind, row.bytes, machine.gpus, row.variant, row.in_place), machine).time_us


@functools.lru_cache(maxsize=256)
def _executed(kind: Kind, nbytes: int, ranks: int, variant: str, in_place: bool) -> Program:
    """The program that ran on the GPUs: copies only, and flags that a graph can replay."""
    collective = dataclasses.replace(collective_of(kind, nbytes, ranks), in_place=in_place)
    staged = in_place and kind is Kind.ALL_TO_ALL and variant != "swap"
    program = build(collective, variant, Transport.STAGED if staged else Transport.PUSH)
    return freeze(lower(program, {Copy}))


def _c3(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    measured = [row for row in rows if isinstance(row, C3Row) and row.time_us is not None]

    def name(row: C3Row) -> str:
        return f"{row.gemm}_{format_bytes(row.bytes)}/{row.collective}/{row.strategy}"

    judged = [
        judge(f"{machine.name}/c3/{name(r)}", r.time_us, predict_together(machine, r), C3_WORST) for r in measured
    ]
    return with_summary(f"{machine.name}/c3", judged, C3_MEDIAN, C3_WORST)


def _collectives(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    measured = [
        row for row in rows if isinstance(row, CollectiveRow) and row.time_us is not None and row.bytes >= SMALLEST
    ]

    def name(row: CollectiveRow) -> str:
        place = "in place" if row.in_place else "out of place"
        return f"{row.collective}/{format_bytes(row.bytes)}/{place}/{row.implementation} {row.variant}".strip()

    judged = [
        judge(
            f"{machine.name}/collectives/{name(r)}",
            r.time_us,
            predict_alone(machine, r),
            2 * COLLECTIVE_MEDIAN,
            Role.FITTED if fitted_to(r) else Role.HELD_OUT,
        )
        for r in measured
    ]
    return with_summary(f"{machine.name}/collectives", judged, COLLECTIVE_MEDIAN, None)
