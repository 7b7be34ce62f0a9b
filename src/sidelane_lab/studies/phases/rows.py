"""The command ``sidelane phases``: its options, and its rows as tables and as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from sidelane.program.collective import Kind
from sidelane_lab.harness.options import (
    LAUNCHES,
    MACHINE_NAME,
    SPAN,
    WRITTEN,
    StudyOptions,
    count,
    launches,
    names,
    option,
    size_span,
    study_command,
)
from sidelane_lab.harness.report import Cell, tables_by
from sidelane_lab.harness.study import MODEL, FlatRow
from sidelane_lab.harness.table import Table, number, verdict

if TYPE_CHECKING:
    pass

KIND_OF: Mapping[str, Kind] = MappingProxyType(
    {
        "copy": Kind.SCATTER,
        "copies": Kind.SCATTER,
        "all_gather": Kind.ALL_GATHER,
        "all_gather_in_place": Kind.ALL_GATHER,
        "all_to_all": Kind.ALL_TO_ALL,
    }
)
"""Operations that have phases, each with its collective."""

PHASED = tuple(KIND_OF)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhasesOptions(StudyOptions):
    """Show where a transfer and a collective spend their time: control, schedule, copy, sync.

    Measured by time stamps around the copies and by the host's clock, one call at a time, beside what the simulator
    predicts for the same programs. With --machine: predicted only, for a machine that need not be here.
    """

    study = "phases"
    examples = (
        ("sidelane phases --operation copy", "where a single transfer spends its time"),
        ("sidelane phases --operation all_gather --variants b2b,pcpy", "two variants of a collective"),
        ("sidelane phases --machine h200x4 --max-bytes 1M", "predicted, for four H200s"),
    )

    # The study says why something else is none, so this has no choices.
    operations: tuple[str, ...] = option(
        "--operation",
        PHASED,
        f"May be repeated. One of: {', '.join(PHASED)}.",
        some=True,
        multiple=True,
        metavar="NAME",
        show_default="all",
    )
    sizes: tuple[int, ...] = size_span(gpus=("1K", "1G"), cpus=("1K", "4M"))
    variants: tuple[str, ...] = names(
        "--variants", ("b2b",), "pcpy, bcst, swap, b2b, striped, b2b+prelaunch, ...", some=True
    )
    launches: tuple[str, ...] = launches()
    calls: int = count("--calls", 31, "Measured calls of each.")
    warmup: int = count("--warmup", 4, "Calls before them.")
    predict: str = option(
        "--predict", "", "Machine to predict beside what is measured.", type=MACHINE_NAME, show_default=False
    )

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        if self.warmup < 1:
            raise ValueError(f"PhasesOptions: warmup (value={self.warmup}, allowed=1 and more)")


phases = study_command("phases", PhasesOptions, beside=("operations", *SPAN, "variants", *WRITTEN))

PREDICTED = "predicted"
SOURCES = ("measured", PREDICTED)


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseRow(FlatRow):
    """Where one transfer or one collective spends its time, in microseconds (definitions: results/notes/phases.md).

    Attributes:
        operation: ``copy``, ``copies``, ``all_gather``, ``all_gather_in_place`` or ``all_to_all``.
        bytes: bytes of each copy of a transfer, or of a collective as in :class:`CollectiveRow`.
        launch: eager or graph; ``model`` where a description of a machine does not tell them apart.
        source: ``measured`` or ``predicted``.
        control_us: time in which the host submits, before the first byte.
        schedule_us: rest of the time before the first byte.
        copy_us: time of all copies of a rank.
        sync_us: time from the last copy until the host knows. The four phases add up to ``total_us``.
        total_us: time from the call until the host knows, with the stamps that the phases need.
        total_unstamped_us: time from the call until the host knows, without any stamp.
        host_us: time until a call without stamps returns.
        entry_us: time of the entry handshake, a part of ``schedule_us``.
        exit_us: time of the exit handshake, a part of ``sync_us``.
        correct: True if outputs agreed with a reference in this run; None when nothing ran.
        note: reason why there is no time, or a remark.
        stage_us: part of ``copy_us`` for the copy into the rank's own slot, in files that have ``alternating``; else
            null.
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


COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<launch": lambda row, _: PREDICTED if row.source == PREDICTED else row.launch,
    "control\nus": "control_us",
    "schedule\nus": "schedule_us",
    "copy\nus": "copy_us",
    "sync\nus": "sync_us",
    "total\nus": "total_us",
    "no stamps\nus": lambda row, _: "" if row.source == PREDICTED else number(row.total_unstamped_us),
    "host\nus": "host_us",
    "<correct": lambda row, _: "" if row.source == PREDICTED else verdict(row.correct),
}


def phase_tables(rows: Sequence[PhaseRow]) -> list[Table]:
    """Make one table an operation and variant: what was measured, and what is predicted, size by size."""
    return tables_by(rows, phase_title, phase_title, COLUMNS, keys=2, groups=lambda row: row.bytes)


def phase_title(row: PhaseRow) -> str:
    """Return what rows of one table and one picture have in common."""
    return f"{row.operation} {row.variant}"
