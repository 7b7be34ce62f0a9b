"""The result file of a study: what was measured, by which command, on what.

One JSON object a study: ``study, machine, gpus, device, ranks, date, commit, command, software, rows``.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidelane.cli import provenance
from sidelane.cli.output import write_json
from sidelane.machine.inventory import machine_name
from sidelane.user_files import json_of, text_of
from sidelane_lab.harness.results.rows.every import ROWS, Row
from sidelane_lab.harness.results.rows.flat import require


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """A study's file. Make it with :func:`collect`, which looks up what the machine is.

    Attributes:
        study: one of ``ROWS``.
        machine: short name, as the folders under ``results/`` have it (``h200x4``, ``cpu``).
        gpus: number of GPUs that took part; 0 when ranks were CPU processes.
        device: full name of the GPU or processor.
        ranks: processes that took part.
        date: UTC, ISO 8601.
        commit: of the code that ran, with ``-dirty`` when files differed from it; ``unknown`` outside a checkout.
        command: what to type to run it again.
        software: versions, by name.
        rows: the study's rows, of one type.
    """

    study: str
    machine: str
    gpus: int
    device: str
    ranks: int
    date: str
    commit: str
    command: str
    software: dict[str, str]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        require("Results", "study", self.study, tuple(ROWS))
        wrong = {type(row).__name__ for row in self.rows if type(row) is not ROWS[self.study]}
        if wrong:
            raise ValueError(f"Results: rows of {self.study} (value={wrong}, allowed={ROWS[self.study].__name__})")

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "rows": [row.to_dict() for row in self.rows]}

    @property
    def on_cpu(self) -> bool:
        return self.gpus == 0


def collect(study: str, rows: Sequence[Row], *, device_type: str, ranks: int, command: str = "") -> Results:
    """Put rows together with what this machine and this installation are. Call it in the parent or on one rank.

    Args:
        study: one of ``ROWS``.
        rows: what was measured.
        device_type: of the ranks' tensors: ``cpu`` or the accelerator's name in torch.
        ranks: processes that took part.
        command: what to type to run it again; empty takes this process's command line.
    """
    on_cpu = device_type == "cpu"
    device, count = (provenance.processor_name(), 0) if on_cpu else provenance.accelerator_name()
    return Results(
        study=study,
        machine="cpu" if on_cpu else machine_name(device, count),
        gpus=0 if on_cpu else ranks,
        device=device,
        ranks=ranks,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=provenance.commit(),
        command=command or provenance.command_line(),
        software=provenance.software_versions(),
        rows=tuple(rows),
    )


def write(path: str | os.PathLike[str], results: Results) -> Path:
    """Write the file whole or not at all, making its folder; or to stdout (``written.STDOUT``)."""
    return write_json(path, results.to_dict(), allow_nan=False)


def read(path: str | os.PathLike[str]) -> Results:
    """Read a file back, checking keys and values.

    Raises:
        ValueError: it is not a result file; the text names the file and what is wrong.
    """
    try:
        content = json_of(text_of(path))
        row_type = ROWS[content["study"]]
        rows = [row_type.from_dict(row) for row in content.pop("rows")]
        return Results(**content, rows=tuple(rows))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
        raise ValueError(f"read: not a result file (value={os.fspath(path)!r}): {problem}") from problem
