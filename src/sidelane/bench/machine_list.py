"""``sidelane machines``: the catalogue, and where its numbers come from."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import rich.console

from sidelane.bench.report.table import Line, Table
from sidelane.machine.load import machine_names, named
from sidelane.machine.spec import Machine, Source


def main(*, as_json: bool = False) -> int:
    """Print every machine of the catalogue.

    Args:
        as_json: a list of objects instead of the table.

    Returns:
        0.
    """
    machines = [named(name) for name in machine_names()]
    if as_json:
        sys.stdout.write(json.dumps([_flat(machine) for machine in machines], indent=1) + "\n")
        return 0
    rich.console.Console().print(machines_table(machines).to_rich())
    return 0


def machines_table(machines: list[Machine]) -> Table:
    """A line for each machine: what it is, and how many of its numbers have which source."""
    lines = []
    for machine in machines:
        row = _flat(machine)
        sources = row["sources"]
        known = sum(sources[source] for source in (Source.DATASHEET, Source.PAPER, Source.MEASURED))
        cells = (row["name"], row["title"], str(row["units"]), row["topology"], f"{row['link_gbps']:g}")
        lines.append(Line((*cells, str(known), str(sources[Source.FITTED]), str(sources[Source.ASSUMED]))))
    columns = ("<name", "<machine", "units", "<links", "GB/s", "known", "fitted", "assumed")
    note = (
        "--machine takes a name, or a TOML or JSON file (docs/internals/model.md). units: of a GPU; GB/s: DMA copies "
        "over a link or port, one direction; known: numbers from data sheets, papers and measurements"
    )
    return Table("Machines that can be predicted", columns, tuple(lines), (note,))


def _flat(machine: Machine) -> dict[str, Any]:
    sources = Counter(quantity.source for quantity in machine.quantities().values())
    return {
        "name": machine.name,
        "title": machine.title,
        "gpus": machine.gpus,
        "units": int(machine.gpu.units),
        "topology": str(machine.links.topology),
        "link_gbps": float(machine.links.usable_gbps),
        "sources": {str(source): sources[source] for source in Source},
    }
