"""Rows of the study of power."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.rows import IMPLEMENTATIONS, LAUNCHES, MODEL, FlatRow

LIBRARY = "library"


@dataclasses.dataclass(frozen=True, slots=True)
class PowerRow(FlatRow):
    """What a collective draws, run back to back (method: docs/lab/power.md).

    Attributes:
        bytes: as in :class:`CollectiveRow`.
        implementation: as there; ``library`` in predictions.
        launch: eager or graph; ``model`` in predictions.
        time_us: of one call, the slowest rank's.
        watts: mean over the GPUs, by their energy counters.
        watts_sampled: the same by their power readings.
        idle_watts: before the study, with everything set up and nothing running.
        energy_mj: of all GPUs for one call: watts x GPUs x time.
        energy_above_idle_mj: what is left of it above ``idle_watts``.
        counters_agree_percent: 100 x watts_sampled / watts.
        correct: outputs were compared with a reference in this run; None when nothing ran.
        note: why there are no figures, or what to know about these.
    """

    allowed = (("launch", (*LAUNCHES, MODEL)), ("implementation", (*IMPLEMENTATIONS, LIBRARY)))
    figures = ("time_us", "watts", "energy_mj")

    collective: str
    bytes: int
    implementation: str
    variant: str
    in_place: bool
    launch: str
    time_us: float | None
    watts: float | None
    watts_sampled: float | None
    idle_watts: float | None
    energy_mj: float | None
    energy_above_idle_mj: float | None
    counters_agree_percent: float | None
    correct: bool | None = None
    note: str = ""
