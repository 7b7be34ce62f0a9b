"""What all parts of the study do before and behind a time: run once on fresh bytes, compare, and say what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.collectives.rows import bus_gbps
from sidelane_lab.studies.ordinary.rows import OrdinaryRow
from sidelane_lab.studies.ordinary.ways import Way


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Why something has no time. ``wrong``: it ran, and its output was wrong."""

    text: str
    wrong: bool = False


def attempt(meter: Meter, what: str, step: Callable[[], object]) -> Problem | None:
    """Do something on all ranks and wait for the device. Collective.

    Args:
        meter: of this rank.
        what: for errors.
        step: what to do.

    Returns:
        What kept a rank from it.
    """

    def work() -> None:
        step()
        meter.finish(what)

    refused = meter.attempt(work)
    return None if refused is None else Problem(refused)


def check(meter: Meter, what: str, execute: Callable[[], object], compare: Callable[[], str | None]) -> Problem | None:
    """Execute and compare on all ranks, in two steps: a rank that could not run has nothing to compare. Collective.

    Args:
        meter: of this rank.
        what: for errors.
        execute: fills inputs, poisons outputs, and runs.
        compare: what is wrong with the outputs.
    """
    problem = attempt(meter, what, execute)
    if problem is not None:
        return problem
    wrong = meter.attempt(compare)
    return None if wrong is None else Problem(wrong, wrong=True)


def with_late(said: str, late: int) -> str:
    """What a call said, and in how many rounds some host had not queued everything when the clock started."""
    return "; ".join(filter(None, (said, f"the host was late in {late} rounds" if late else "")))


def row_of(
    case: Case,
    way: Way,
    variant: str,
    times_us: Sequence[float],
    problem: Problem | None,
    said: str,
    *,
    in_place: bool = False,
    **more: Any,
) -> OrdinaryRow:
    """A row of a collective.

    Args:
        case: what it did.
        way: how.
        variant: see ``OrdinaryRow``.
        times_us: of a call, one a round.
        problem: why there are none.
        said: why it ran as it did.
        in_place: input and output share memory.
        more: columns of what was next to it, or of the host.
    """
    p10, median, p90 = (None,) * 3 if problem or not times_us else np.percentile(times_us, (10, 50, 90)).tolist()
    rate = None
    if median is not None and "gemm" not in more:
        rate = bus_gbps(case.kind, case.nbytes, case.world_size, median)
    return OrdinaryRow(
        collective=case.kind,
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=in_place,
        launch="eager",
        implementation=way.name,
        variant=variant,
        prelaunch=False,
        time_us=median,
        p10_us=p10,
        p90_us=p90,
        bus_gbps=rate,
        energy_mj=None,
        correct=True if problem is None else False if problem.wrong else None,
        note=said if problem is None else problem.text,
        reach=way.reach,
        **more,
    )
