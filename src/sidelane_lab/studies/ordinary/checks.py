"""What all parts of the study do before and behind a time: run once on fresh bytes, compare, and say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Problem, Rounds, outcome
from sidelane_lab.studies.collectives.rows import bus_gbps
from sidelane_lab.studies.ordinary.rows import OrdinaryRow
from sidelane_lab.studies.ordinary.ways import Way


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
    columns = outcome(Rounds(tuple(times_us)) if times_us else None, problem, said)
    median = columns["time_us"]
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
        bus_gbps=rate,
        energy_mj=None,
        reach=way.reach,
        **columns,
        **more,
    )
