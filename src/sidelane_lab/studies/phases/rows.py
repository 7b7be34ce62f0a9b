"""Rows of the study of phases."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.rows import LAUNCHES, MODEL, FlatRow

PREDICTED = "predicted"
SOURCES = ("measured", PREDICTED)


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
