"""``sidelane phases --machine``: the phases of the same Programs on a machine that need not be here."""

from __future__ import annotations

import dataclasses

from sidelane_lab.cli.collectives import PhasesOptions
from sidelane_lab.harness.study import MODEL
from sidelane_lab.machines.spec import Machine
from sidelane_lab.studies.phases.programs import Operation, operations
from sidelane_lab.studies.phases.rows import PREDICTED, PhaseRow
from sidelane_lab.studies.phases.split import Phases, predict


def predicted_rows(machine: Machine, options: PhasesOptions) -> list[PhaseRow]:
    """Return the rows of a machine that is described.

    Raises:
        ValueError: no such operation or variant, or the machine has several nodes.
    """
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
