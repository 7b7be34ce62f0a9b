"""Rows of one call looked at closely: its phases, what it draws, what it takes the host, and between two GEMMs."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.results.rows.flat import IMPLEMENTATIONS, LAUNCHES, FlatRow

PRELAUNCHED = "prelaunched"
MODEL = "model"
LIBRARY = "library"
PREDICTED = "predicted"
SOURCES = ("measured", PREDICTED)
HOST_OPERATIONS = ("all_gather", "trigger", "trigger_from_host")


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseRow(FlatRow):
    """Where one transfer or one collective spends its time, in microseconds (definitions: docs/lab/phases.md).

    Attributes:
        operation: ``copy``, ``copies``, ``all_gather``, ``all_gather_in_place`` or ``all_to_all``.
        bytes: of each copy of a transfer; of a collective as in :class:`CollectiveRow`.
        launch: eager or graph; ``model`` where a description of a machine does not tell them apart.
        source: ``measured`` or ``predicted``.
        control_us, schedule_us, copy_us, sync_us: the phases; they add up to ``total_us``.
        total_us: from the call until the host knows, with the stamps that the phases need.
        total_unstamped_us: the same without any stamp.
        host_us: of the call without stamps: until it returns.
        entry_us, exit_us: the handshakes, parts of ``schedule_us`` and ``sync_us``.
        correct: outputs were compared with a reference in this run; None when nothing ran.
        note: why there is no time, or what to know about this one.
        stage_us: of ``copy_us``: the copy into the rank's own slot (``alternating``); 0 where there is none.
    """

    allowed = (("launch", (*LAUNCHES, MODEL)), ("source", SOURCES))
    figures = ("control_us", "schedule_us", "copy_us", "sync_us", "total_us", "total_unstamped_us")

    operation: str
    variant: str
    bytes: int
    launch: str
    source: str
    control_us: float | None
    schedule_us: float | None
    copy_us: float | None
    sync_us: float | None
    total_us: float | None
    total_unstamped_us: float | None
    host_us: float | None
    entry_us: float | None
    exit_us: float | None
    correct: bool | None = None
    note: str = ""
    stage_us: float | None = None


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


@dataclasses.dataclass(frozen=True, slots=True)
class ChainRow(FlatRow):
    """A GEMM, an all-gather of what it made and a GEMM that reads what was gathered, one behind the other.

    Attributes:
        bytes: gathered size.
        launch: eager or graph; ``prelaunched`` where the all-gather was submitted ahead of the producer, and fired
            behind it by one write (docs/internals/prelaunch.md).
        gemms_us: both GEMMs with nothing between them, launched as the chain is (``prelaunched``: eager).
        time_us: of the chain, median over the rounds of the slowest rank's time; p10_us and p90_us likewise.
        correct: the consumer's output was compared with a reference in this run; None when it could not run.
        note: why there is no time, or what to know about this one.
    """

    allowed = (("launch", (*LAUNCHES, PRELAUNCHED)), ("implementation", IMPLEMENTATIONS))
    figures = ("time_us",)

    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    gemms_us: float
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    correct: bool | None
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class HostRow(FlatRow):
    """What a call takes the host: from its begin until it returns, while the device is busy with something else.

    Attributes:
        operation: ``all_gather``, or what fires a prelaunched one: ``trigger``, ``trigger_from_host``.
        bytes: gathered size.
        symmetric: the tensors lie in symmetric memory (of NCCL: in its symmetric windows).
        driver_calls: to the driver in one call, of Sidelane's own; null for others.
        host_us: median over the batches of the slowest rank; p10_us and p90_us likewise.
        best_us: fastest batch of any rank.
        correct: outputs were compared with a reference in this run; None when it could not run.
        note: why there is no time, or what to know about this one.
    """

    allowed = (("operation", HOST_OPERATIONS), ("implementation", IMPLEMENTATIONS))
    figures = ("host_us",)

    operation: str
    bytes: int
    implementation: str
    variant: str
    symmetric: bool
    driver_calls: int | None
    host_us: float | None
    p10_us: float | None
    p90_us: float | None
    best_us: float | None
    correct: bool | None
    note: str = ""
