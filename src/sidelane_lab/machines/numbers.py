"""Predictions of a study for a described machine: tables, pictures, and files with the numbers they were made from."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_json
from sidelane_lab.harness import report
from sidelane_lab.harness.options import StudyOptions
from sidelane_lab.harness.study import Results, study_of
from sidelane_lab.harness.table import Table
from sidelane_lab.harness.terminal import progress_console, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine


def predict_study(
    machine_name: str,
    options: StudyOptions,
    *,
    tables: Callable[[Machine, Sequence[Any]], Sequence[Table]] | None = None,
    draw: Callable[[Machine, Sequence[Any], Path], object] | None = None,
) -> None:
    """Predict the study that the options are of: print its tables, and write what the options ask for.

    Args:
        machine_name: name in the catalogue, or a TOML or JSON file.
        options: options of the study, with where to write.
        tables: makes tables of rows for a machine, in place of the study's tables.
        draw: draws rows for a machine into the folder of a report, in place of the study's pictures.

    Raises:
        ValueError: no such machine, or the model does not speak to it or to these options.
    """
    study, machine, console = study_of(options.study), find(machine_name), tables_console(options.json)
    assert study.predict is not None, study.name
    with progress_console().status("simulating"):
        rows = study.predict(machine, options)
    console.print(f"{study.title}: predicted for {machine.title}", style="bold")
    for table in study.tables(rows) if tables is None else tables(machine, rows):
        console.print(table.to_rich())
    numbers = [row.to_dict() for row in rows]
    files = write_report(options.json, options.report, study.name, machine, numbers, f"{study.name}_predicted")
    if options.report is not None:
        with progress_console().status("drawing"):
            if draw is not None:
                draw(machine, rows, options.report)
            else:
                draw_rows(study.name, machine, rows, options.report)
    say_written(files)


def draw_rows(study: str, machine: Machine, rows: Sequence[Any], folder: Path) -> None:
    """Draw a study's pictures of predicted rows, as if they were of a file."""
    about = (study, machine.name, machine.world_size, machine.title)
    report.draw(Results(*about, ranks=0, date="", commit="", command="", software={}, rows=tuple(rows)), folder)


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
