"""Files of predictions: their rows, and the numbers of the machine that they were made from."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_json
from sidelane_lab.machines.spec import Machine


def write_numbers(
    path: Path | None, study: str, machine: Machine, rows: Sequence[dict[str, Any]], others: Sequence[Machine] = ()
) -> list[Path]:
    """Write predictions with what they were made from, and return the file; nothing where there is none.

    Args:
        path: file, or ``written.STDOUT``; None writes none.
        study: its name in the file.
        machine: that is described.
        rows: an object each.
        others: machines that some rows are about instead.
    """
    if path is None:
        return []
    from sidelane_lab.harness import provenance  # which loads torch, while a prediction needs none

    numbers = machine.quantities()
    numbers |= {f"{other.name} {name}": quantity for other in others for name, quantity in other.quantities().items()}
    content = {
        "study": study,
        "machine": machine.name,
        "predicted": True,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": provenance.command_line(),
        "numbers": {name: [float(q), str(q.source), q.of] for name, q in numbers.items()},
        "rows": list(rows),
    }
    return [write_json(path, content)]


def write_report(
    json: Path | None, report: Path | None, study: str, machine: Machine, rows: Sequence[dict[str, Any]], name: str = ""
) -> list[Path]:
    """Write the same rows to a file and to a report's folder, where these are asked for.

    Returns:
        What was written, with the folder in place of the file in it.
    """
    written = write_numbers(json, study, machine, rows)
    if report is not None:
        write_numbers(report / f"{name or study}.json", study, machine, rows)
        written.append(report)
    return written
