"""Predictions held against this project's own measurements: files of ``results/<machine>``.

From ``c3.json`` the model is given the isolated times alone, of the GEMM and of the collective as the strategy runs it,
and predicts what both take together. From ``collectives.json`` it is given nothing: the description says it all. The
rows of that file that the description was fitted to (``fitted_to``) are not called predictions. ``power.json``: see
``claims/power.py``; ``fsdp.json``: ``claims/steps.py``; ``occupancy.json``: ``claims/occupancy.py``; ``chain.json``:
``claims/chains.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from sidelane.c3.strategies import strategies
from sidelane.c3.strategy import Means, Mover, Strategy
from sidelane.c3.workload import Gemm
from sidelane.program.builders import variants
from sidelane.program.collective import REDUCING, Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness import study as result_files
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import Role, Verdict, with_ranges
from sidelane_lab.model.device import run_device
from sidelane_lab.model.executed import executed_run
from sidelane_lab.model.gemm import gemm_kernel, gemm_us, is_memory_bound
from sidelane_lab.model.kernels import dma_gangs, library_gang, own_chunk_gang, own_gang
from sidelane_lab.model.published import default_units, library_us
from sidelane_lab.model.strategies import arrange, objection, orders
from sidelane_lab.papers.claims.chains import judge_chains
from sidelane_lab.papers.claims.gemms import gemm_times, judge_gemms, judge_layers
from sidelane_lab.papers.claims.occupancy import judge_occupancy
from sidelane_lab.papers.claims.power import judge_power
from sidelane_lab.papers.claims.steps import judge_steps
from sidelane_lab.papers.claims.verdicts import AT_LEAST, judge, judge_ends, nearest, with_summary
from sidelane_lab.studies.c3.rows import C3Row
from sidelane_lab.studies.collectives import CollectiveRow

C3_MEDIAN, C3_WORST = 0.03, 0.10
COLLECTIVE_MEDIAN, COLLECTIVE_WORST, WINNERS = 0.07, 0.25, 0.95
"""Targets of the whole (issue 25). The last: how often the faster of copy engines and NCCL is foretold."""
SMALLEST = 64 << 10
"""Bytes from which collective times are compared (issue 25)."""
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
SMALL, LARGE = 64 << 10, 256 << 20
"""Bytes up to which latency decides, and from which bandwidth does: ``fit_machine`` uses these rows."""
OUT_OF_PLACE = "out of place"
FIRST_COMPARED = ("h200x4", "h200x2")
AGAIN = "c3-strategies"
"""Has the GEMMs of ``c3.json`` once more: as rows alone they would count twice."""
SET_APART = ("cb1_896M", "cb3_896M")
"""Pairs of ``h200x2/isolated.json``, to which interference among two was fitted: their rows are no predictions."""
DISTURBED = 0.05
"""Share of a time by which queues that share an engine must matter for both times to be predicted."""
LIBRARY_ENGINES = "nccl_ce"
"""NCCL on copy engines. Its rows had been looked at when they were first predicted."""
SEEN = ("striped",)
"""Variants that a rule went in for after their rows had been compared: flags between a rank's engines are a graph's
dependencies (``model.executed.dependencies``)."""


def compare(
    machine: Machine, folder: Path, *, ranges: bool = False, progress: Callable[[str], None] | None = None
) -> list[Verdict]:
    """Hold predictions against every row of the machine's result files that the model speaks to.

    Args:
        machine: the description of what was measured on.
        folder: with a file of ``JUDGES``: ``c3.json``, ``collectives.json``, ``occupancy.json`` and others.
        ranges: predict over the plausible values of the machine's numbers as well.
        progress: told what is being done.

    Returns:
        A verdict for each row, and for each file the median and the worst error.

    Raises:
        ValueError: neither file is there, or one is no result file.
    """
    verdicts: list[Verdict] = []
    found = False
    alone: list[object] = []
    for study, judge_rows in JUDGES.items():
        path = folder / f"{study}.json"
        if path.is_file():
            found = True
            rows = result_files.read(path).rows
            alone += rows if study != AGAIN else ()
            verdicts += judge_rows(machine, rows)
    role = Role.FITTED if fitted_from(machine, "chain.json") else Role.HELD_OUT
    verdicts += judge_gemms(machine, gemm_times(alone, machine.gpus), role)
    layers = layers_file(machine, folder)
    if layers.is_file():
        found = True
        source = f"results/{layers.parent.name}/{layers.name}"
        fitted = any(source in quantity.of for quantity in machine.quantities().values())
        verdicts += judge_layers(machine, result_files.read(layers).rows, fitted=fitted)
    if not found:
        files = ", ".join(f"{study}.json" for study in JUDGES)
        allowed = f"--results with a folder {folder.name} of any of {files}"
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


def layers_file(machine: Machine, folder: Path) -> Path:
    """Where GEMMs alone were measured, which takes one such GPU: ``h200x1/gemms.json`` beside ``h200x4``."""
    return folder.parent / re.sub(r"x\d+$", "x1", machine.name) / "gemms.json"


def role_problems(machine: Machine) -> list[str]:
    """Numbers of a description that were taken from runs side by side: one line each; empty when all is well.

    A C3 file may only give a GEMM's time alone.
    """
    return [
        f"{path}: taken from {quantity.of}, which holds C3 times that are predictions (allowed=[matmul] alone)"
        for path, quantity in machine.quantities().items()
        if re.search(r"\bc3(-\w+)?\.json", quantity.of) and not path.startswith("matmul.")
    ]


def fitted_from(machine: Machine, file: str) -> bool:
    """True if numbers of the description were fitted to a file of the machine's own results."""
    return any(f"results/{machine.name}/{file}" in quantity.of for quantity in machine.quantities().values())


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
    if row.collective in REDUCING:
        return row.variant == "b2b"
    large = row.bytes >= LARGE and row.variant in ("b2b", "pcpy")
    return row.bytes <= SMALL or large


def predict_together(machine: Machine, row: C3Row) -> tuple[float, ...]:
    """What a strategy takes, from the isolated times of its row; nothing if the model does not speak to it.

    Returns:
        Microseconds; twice where either of the two may come first, see ``model.strategies.orders``.
    """
    if row.gemm_us is None or row.comm_us is None or row.collective not in tuple(KINDS):
        return ()
    kind, strategy = Kind(row.collective), _strategy(row)
    if strategy is None or (strategy.mover is Mover.SM and machine.kernels is None):
        return ()  # the description does not say what our kernels take
    if not strategy.concurrent:
        return (row.gemm_us + row.comm_us,)
    if strategy.mover is Mover.LIBRARY_DMA and kind in REDUCING:
        return ()
    shape, split = Gemm(row.m, row.n, row.k, row.dtype), strategy.partition
    if split is not None and (objection(strategy, machine) or (split.units is None and not row.units)):
        return ()  # files of another version do not say how many units were taken
    taken = 0 if split is None else split.taken(row.units, is_memory_bound(machine, shape))
    gemm = gemm_kernel(machine, shape, limit=int(machine.gpu.units) - taken if taken else None)
    scale = row.gemm_us / gemm_us(machine, shape)
    computation = dataclasses.replace(
        gemm,
        compute_us=gemm.compute_us * scale,
        traffic_bytes=gemm.traffic_bytes * scale,
        fixed_us=gemm.fixed_us * scale,
    )
    on_units = strategy.mover.takes_units
    made = own_gang if strategy.mover is Mover.SM else library_gang
    gangs = (made(machine, kind, row.bytes),) if on_units else dma_gangs(machine, kind, row.bytes)
    units = gangs[0].units if made is own_gang else _library_units(machine, kind, row)
    longer = row.comm_us / run_device(machine, gangs).time_us
    if on_units:
        on_own = taken > 0 and split is not None and split.means is Means.SPLIT
        gang = made(machine, kind, row.bytes, units=taken, reserved=True) if on_own else gangs[0]
        gangs = (gang if on_own else dataclasses.replace(gang, units=units, need=min(gang.need, units)),)
    gangs = tuple(
        dataclasses.replace(gang, alone_us=gang.alone_us * longer, memory_gbps=gang.memory_gbps / longer)
        for gang in gangs
    )
    copies_own = not on_units and strategy.mover.as_asked and OUT_OF_PLACE in row.note
    own = own_chunk_gang(machine, kind, row.bytes) if copies_own else None
    if own is not None and strategy.mover is Mover.LIBRARY_DMA:
        # NCCL queues the own chunk with the others: what waits for the GEMM holds up all.
        gangs, own = (dataclasses.replace(gangs[0], after=(computation.name,)), *gangs[1:]), None
    if on_units:
        return tuple(
            run_device(machine, launched).time_us for launched in orders(machine, strategy, computation, gangs)
        )
    kernels = arrange(strategy, computation, gangs)
    return (run_device(machine, kernels if own is None else [*kernels, own]).time_us,)


def _library_units(machine: Machine, kind: Kind, row: C3Row) -> int:
    """Of the library's kernels in a row: its note may name their CTAs; without windows gathers are exchanges, too."""
    if named_ctas := re.search(r"\bctas(\d+)\b", row.note):
        return int(named_ctas[1])
    return default_units(machine.library, kind if "window" in row.note else Kind.ALL_TO_ALL)


def _strategy(row: C3Row) -> Strategy | None:
    """None for ``auto``, and for what another version had."""
    return next((strategy for strategy in strategies() if strategy.name == row.strategy), None)


def role_of(machine: Machine, row: C3Row) -> Role:
    """What a C3 row is to the model, which is given its isolated times.

    A serial one is their sum. That a copy of the own chunk waits for the GEMM is a rule that went in after the first
    rows of h200x4 had been compared; that NCCL takes turns with a GEMM or runs beside it, by chance, after those of
    h200x2.
    """
    strategy = _strategy(row)
    if strategy is not None and not strategy.concurrent:
        return Role.INPUT
    if machine.name == "h200x2" and f"{row.gemm}_{format_bytes(row.bytes)}" in SET_APART:
        return Role.FITTED
    on_units = strategy is not None and strategy.mover.takes_units
    rules = on_units or (OUT_OF_PLACE in row.note and machine.name == "h200x4")
    return Role.SEEN if rules and machine.name in FIRST_COMPARED else Role.HELD_OUT


def predict_alone(machine: Machine, row: CollectiveRow) -> float | None:
    """What a collective takes alone; None if the model does not speak to it."""
    if row.collective not in tuple(KINDS) or row.launch != "graph" or row.tensors > 1:
        return None
    kind = Kind(row.collective)
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return library_us(machine, kind, row.bytes)
    if row.implementation == LIBRARY_ENGINES and kind not in REDUCING:
        return _library_on_engines_us(machine, row)
    if row.implementation != "dma" or row.variant not in variants(kind) or row.prelaunch:
        return None
    return executed_run(machine, kind, row.bytes, row.variant, row.in_place).time_us


def _library_on_engines_us(machine: Machine, row: CollectiveRow) -> float:
    """NCCL's copies: those of one engine for all peers, and the own chunk behind them, not beside."""
    moved = executed_run(machine, Kind.ALL_GATHER, row.bytes, "b2b", True).time_us
    if row.in_place:
        return moved
    return moved + float(machine.dma.copy_us) + row.bytes / machine.gpus / (float(machine.dma.local_gbps) * 1e3)


def predict_ends(machine: Machine, row: CollectiveRow) -> tuple[float, ...]:
    """The same, what to plan with first; twice where a GPU's queues share an engine, which ranks may do in step.

    Out of step two GPUs often send to one port while another idles, and 0.59 to 0.64 of a link is left; in step each
    has a port for itself. One program does either, from run to run (docs/lab/model.md).
    """
    alone = predict_alone(machine, row)
    if alone is None or row.implementation != "dma" or machine.gpus <= 2 or float(machine.dma.shared_queues) == 1:
        return () if alone is None else (alone,)
    in_step = predict_alone(machine.with_value("dma.shared_queues", 1), row)
    return (alone,) if in_step is None or in_step > (1 - DISTURBED) * alone else (alone, in_step)


def _c3(machine: Machine, rows: Sequence[object], study: str = "c3") -> list[Verdict]:
    measured = [row for row in rows if isinstance(row, C3Row) and row.time_us is not None]

    def name(row: C3Row) -> str:
        return f"{row.gemm}_{format_bytes(row.bytes)}/{row.collective}/{row.strategy}"

    judged = [
        judge_ends(f"{machine.name}/{study}/{name(r)}", r.time_us, predict_together(machine, r), role_of(machine, r))
        for r in measured
    ]
    return with_summary(f"{machine.name}/{study}", judged, C3_MEDIAN, C3_WORST)


def _seen(machine: Machine, row: CollectiveRow) -> bool:
    """Hops of NCCL's rings, and reductions of two inputs, were looked into after the rows of two GPUs were compared."""
    mended = row.implementation == "nccl" or row.collective in REDUCING
    if row.implementation == LIBRARY_ENGINES:
        return True
    return row.variant in SEEN or (machine.name == "h200x2" and mended)


def _collectives(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    measured = [
        row for row in rows if isinstance(row, CollectiveRow) and row.time_us is not None and row.bytes >= SMALLEST
    ]

    fitted = fitted_from(machine, "collectives.json")

    def name(row: CollectiveRow) -> str:
        place = "in place" if row.in_place else "out of place"
        return f"{row.collective}/{format_bytes(row.bytes)}/{place}/{row.implementation} {row.variant}".strip()

    def role(row: CollectiveRow, ends: Sequence[float]) -> Role:
        if fitted and fitted_to(row):
            return Role.FITTED
        return Role.SEEN if len(ends) > 1 or _seen(machine, row) else Role.HELD_OUT

    judged: list[Verdict | None] = []
    planned: list[float | None] = []
    for row in measured:
        ends = predict_ends(machine, row)
        told = nearest(row.time_us or 0.0, ends) if ends else None
        verdict = judge(f"{machine.name}/collectives/{name(row)}", row.time_us, told, role(row, ends))
        if verdict is not None and len(ends) > 1:
            verdict = dataclasses.replace(verdict, low=min(ends), high=max(ends))
        judged.append(verdict)
        planned.append(ends[0] if ends else None)
    whole = f"{machine.name}/collectives"
    found = with_summary(whole, judged, COLLECTIVE_MEDIAN, COLLECTIVE_WORST)
    winners = _winners(f"{whole}/winners", list(zip(measured, judged, planned, strict=True)))
    return [*found, winners] if winners is not None else found


def _winners(claim_id: str, rows: Sequence[tuple[CollectiveRow, Verdict | None, float | None]]) -> Verdict | None:
    """In how many cases the faster of copy engines and NCCL's kernels is foretold, by the times to plan with.

    None where no case has both.
    """
    cases: dict[tuple[str, int, bool], dict[str, list[Verdict]]] = {}
    for row, verdict, planned in rows:
        if verdict is not None and planned is not None:
            verdict = dataclasses.replace(verdict, predicted=planned)
            case = cases.setdefault((row.collective, row.bytes, row.in_place), {})
            case.setdefault(row.implementation, []).append(verdict)
    both = [case for case in cases.values() if {"dma", "nccl"} <= case.keys()]
    if not both:
        return None
    right = 0
    for case in both:
        engines, kernels = case["dma"], case["nccl"]
        measured = min(one.claimed for one in engines) < min(one.claimed for one in kernels)
        right += measured == (min(one.predicted for one in engines) < min(one.predicted for one in kernels))
    role = min((one.role for case in both for some in case.values() for one in some), key=list(Role).index)
    share = right / len(both)
    text = f"{AT_LEAST} of {len(both)} winners right"
    return Verdict(claim_id, text, 100 * WINNERS, 100 * share, "percent", None, role, share >= WINNERS)


JUDGES: dict[str, Callable[[Machine, Sequence[object]], list[Verdict]]] = {
    "c3": _c3,
    AGAIN: functools.partial(_c3, study=AGAIN),
    "collectives": _collectives,
    "occupancy": judge_occupancy,
    "power": judge_power,
    "chain": judge_chains,
    "fsdp": judge_steps,
}
"""By result file."""
