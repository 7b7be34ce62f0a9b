"""Rows of the C3 study: what a pair took under each strategy, or why it has no times."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from sidelane.c3.isolated_times import Isolated
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.c3.strategy import percent_of_ideal
from sidelane.c3.workload import Workload
from sidelane.errors import UnavailableError
from sidelane.program.collective import ELEMENT_BYTES
from sidelane_lab.baselines.reference import Case
from sidelane_lab.pairs.outcome import Outcome, Result
from sidelane_lab.studies.c3.rows import C3Row

AUTO = "auto"
"""Strategy of the row that says what was picked."""

NOT_RUN = "not run: "
"""Begins the notes of rows of pairs that were left out."""

Key = tuple[object, ...]
"""What two rows of one thing have in common."""


def rows_of(outcome: Outcome, known: Isolated | None = None) -> list[C3Row]:
    """One row for each strategy in its best configuration, and one that says what ``auto`` picks.

    Args:
        outcome: of a pair.
        known: isolated times, by which the partition heuristic's choice is held against a sweep's.

    Raises:
        UnavailableError: no implementation of the collective works, so nothing can be compared.
    """
    if outcome.c3_class is None:
        reasons = "; ".join(f"{alone.label}: {alone.failure.text}" for alone in outcome.isolated if alone.failure)
        raise UnavailableError(f"{outcome.workload.name}: no implementation works: {reasons}")
    rows = [_row(outcome, result, known) for result in outcome.results]
    if outcome.choice is not None:
        picked = next(row for row in rows if row.strategy == outcome.choice.strategy)
        rows.append(
            dataclasses.replace(
                _with_units(picked, outcome),
                strategy=AUTO,
                chosen=picked.strategy,
                note=f"picked: {outcome.choice.reason}",
            )
        )
    return rows


def too_large(workload: Workload, case: Case, memory_bytes: float | None) -> str | None:
    """Why a pair does not fit into a device's memory, whoever moves the bytes; None: it may. Alike on all ranks.

    Every implementation has buffers of its own, so that a pair that passes may still have no room.
    """
    gemm = workload.gemm
    elements = gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n
    needed = elements * ELEMENT_BYTES[gemm.dtype] + case.output_bytes + case.input_bytes
    if memory_bytes is None or needed <= memory_bytes:
        return None
    return f"its buffers take {needed / 1e9:.0f} GB at least, and the device has {memory_bytes / 1e9:.0f}"


def rows_not_run(workload: Workload, reason: str, strategies: Sequence[str] = ()) -> list[C3Row]:
    """Rows of a pair without times, one for each strategy (all, if none is named): nothing is left out silently."""
    return [
        C3Row(
            **workload.columns,
            c3_class="",
            strategy=name,
            chosen="",
            gemm_us=None,
            comm_us=None,
            best_comm_us=None,
            time_us=None,
            speedup=None,
            ideal=None,
            percent_of_ideal=None,
            percent_of_ideal_nccl=None,
            note=f"{NOT_RUN}{reason}",
        )
        for name in strategies or [one.name for one in all_strategies()]
    ]


def key_of(workload: Workload, strategy: str) -> Key:
    """Of the row of a pair under a strategy."""
    return (*workload.columns.values(), strategy)


def key_of_row(row: C3Row) -> Key:
    """The same of a row."""
    return (row.gemm, row.m, row.n, row.k, row.dtype, row.collective, row.bytes, row.strategy)


def is_done(workload: Workload, strategies: Collection[str], done: Collection[Key]) -> bool:
    """Every strategy that was asked for has a row of the pair."""
    return all(key_of(workload, name) in done for name in strategies or [one.name for one in all_strategies()])


def _with_units(picked: C3Row, outcome: Outcome) -> C3Row:
    """The row of a swept strategy with the units that were chosen, which need not be the best."""
    assert outcome.choice is not None
    swept = next(dict(one.by_units) for one in outcome.results if one.strategy == picked.strategy)
    time_us, units = swept.get(outcome.choice.units), outcome.choice.units
    if units == picked.units or time_us is None or picked.time_us is None or picked.speedup is None:
        return picked
    gemm_us, best_us = outcome.gemm_us, outcome.best_comm_us or 0.0
    return dataclasses.replace(
        picked,
        units=units,
        time_us=time_us,
        speedup=picked.speedup * picked.time_us / time_us,
        percent_of_ideal=percent_of_ideal(gemm_us, best_us, time_us),
        percent_of_ideal_nccl=None,
    )


def _heuristic(outcome: Outcome, result: Result, known: Isolated | None) -> str:
    """What the partition heuristic would have chosen, what that costs, and why; empty where there was no sweep."""
    if known is None or len(result.by_units) < 2:
        return ""
    implementation = next(one.implementation for one in outcome.isolated if one.label == result.label)
    try:
        found = known.allocate(outcome.workload, implementation)
    except ValueError as problem:
        return f"; no heuristic: {problem}"
    times = dict(result.by_units)
    if found.units not in times:
        return f"; heuristic: {found.units} units, which were not tried ({found.reason})"
    loss = times[found.units] / min(times.values()) - 1
    return f"; heuristic: {found.units} units, {loss:.1%} behind the best ({found.reason})"


def _row(outcome: Outcome, result: Result, known: Isolated | None) -> C3Row:
    failure = result.failure
    assert outcome.c3_class is not None
    return C3Row(
        **outcome.workload.columns,
        c3_class=outcome.c3_class,
        strategy=result.strategy,
        chosen="",
        gemm_us=outcome.gemm_us,
        comm_us=result.comm_us,
        best_comm_us=outcome.best_comm_us,
        time_us=result.time_us,
        speedup=result.speedup,
        ideal=result.ideal,
        percent_of_ideal=result.percent_of_ideal,
        percent_of_ideal_nccl=result.percent_of_ideal_library,
        correct=True if failure is None else False if failure.wrong else None,
        note=result.label + _heuristic(outcome, result, known) if failure is None else failure.text,
        units=result.units,
        sweep=", ".join(f"{units} {time_us:.6g}" for units, time_us in result.by_units),
    )
