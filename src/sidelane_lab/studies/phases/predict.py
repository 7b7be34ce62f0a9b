"""``sidelane phases --machine``: the phases of the same Programs on a machine that need not be here."""

from __future__ import annotations

import dataclasses

import matplotlib as mpl

from sidelane_lab.cli.collectives import PhasesOptions
from sidelane_lab.harness.drawing import RC
from sidelane_lab.harness.study import MODEL
from sidelane_lab.harness.terminal import say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.spec import Machine
from sidelane_lab.studies.phases.programs import Operation, operations
from sidelane_lab.studies.phases.rows import PREDICTED, PhaseRow, draw_phases, phase_tables
from sidelane_lab.studies.phases.split import Phases, predict


def main(machine_name: str, options: PhasesOptions) -> None:
    """Print, and write what the options ask for.

    Args:
        machine_name: in the catalogue, or a TOML or JSON file.
        options: operations, variants, sizes, and where to write.

    Raises:
        ValueError: no such machine, operation or variant.
    """
    machine = find(machine_name)
    console = tables_console(options.json)
    rows = predicted_rows(machine, options)
    console.print(f"Phases predicted for {machine.title}", style="bold")
    for table in phase_tables(rows):
        console.print(table.to_rich())
    numbers = [row.to_dict() for row in rows]
    files = write_report(options.json, options.report, "phases", machine, numbers, "phases_predicted")
    if options.report is not None:
        with mpl.rc_context(RC):
            draw_phases(rows, machine.title, options.report)
    say_written(files)


def predicted_rows(machine: Machine, options: PhasesOptions) -> list[PhaseRow]:
    """Return the rows of a machine that is described; raises as :func:`main`."""
    return [
        predicted_row(machine, operation, machine.gpus)
        for nbytes in options.sizes_on("cuda")
        for operation in operations(options.operations, options.variants, nbytes)
    ]


def predicted_row(machine: Machine, operation: Operation, ranks: int, note: str = "") -> PhaseRow:
    """Return the phases of an operation on a machine that is described.

    Raises:
        ValueError: the machine has fewer GPUs than there are ranks or several nodes, or the variant does not exist.
    """
    machine.refuse_nodes("phases, which are of copy engines in one node")
    phases = predict(operation.program(ranks, stamped=True), machine)
    return phase_row(operation, MODEL, PREDICTED, phases, note=note)


def phase_row(
    operation: Operation,
    launch: str,
    source: str,
    phases: Phases | None,
    *,
    correct: bool | None = None,
    note: str = "",
) -> PhaseRow:
    """A row whose time without stamps is its time."""
    names = [field.name for field in dataclasses.fields(Phases)]
    figures = {name: None if phases is None else getattr(phases, name) for name in names}
    return PhaseRow(
        operation=operation.name,
        variant=operation.variant,
        bytes=operation.nbytes,
        launch=launch,
        source=source,
        total_unstamped_us=figures["total_us"],
        correct=correct,
        note=note,
        **figures,
    )
