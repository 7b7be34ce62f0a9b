"""``sidelane machines``: the catalogue, and where its numbers come from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_json
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import tables_console
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.machines.spec import Machine, NumberSource, RunStatus

SHORT_STATUS = {RunStatus.MEASURED: "measured", RunStatus.UNRUN: "should run", RunStatus.UNSUPPORTED: "cannot run"}
"""Words of the table for whether Sidelane has run on a machine."""


def main(json: Path | None = None) -> int:
    """Print every machine of the catalogue.

    Args:
        json: file for a list of objects, or ``written.STDOUT``; None writes none.

    Returns:
        0.
    """
    machines = [named(name) for name in machine_names()]
    if json is not None:
        write_json(json, [_flat(machine) for machine in machines])
    tables_console(json).print(machines_table(machines).to_rich())
    return 0


def machines_table(machines: list[Machine]) -> Table:
    """A line for each machine: what it is, and how many of its numbers have which source."""
    lines = []
    for machine in machines:
        row = _flat(machine)
        sources = row["sources"]
        known = sum(sources[source] for source in (NumberSource.DATASHEET, NumberSource.PAPER, NumberSource.MEASURED))
        network = (row["network"], f"{row['node_gbps']:g}") if machine.nodes > 1 else ("-", "-")
        gpus = (str(row["units"]), row["topology"], f"{row['link_gbps']:g}")
        cells = (row["name"], row["title"], SHORT_STATUS[machine.runs], *gpus, *network)
        lines.append(Line((*cells, str(known), str(sources[NumberSource.FITTED]), str(sources[NumberSource.ASSUMED]))))
    of_machines = ("<name", "<machine", "<run there", "units", "<links", "GB/s", "<network", "a node\nGB/s")
    columns = (*of_machines, "known", "fitted", "assumed")
    notes = (
        "--machine takes a name (also 8xH100, 2xh100x8, and h100x8x4 for any number of nodes), or a TOML or JSON file "
        "(docs/internals/model.md)",
        "run there: measured; should run: never run, but nothing speaks against it; cannot run: Sidelane has no way",
        "units: of a GPU; GB/s: DMA copies over a link or port, one direction; a node: all of its NICs, one direction; "
        "known: numbers from data sheets, papers and measurements",
    )
    return Table("Machines that can be predicted", columns, tuple(lines), notes)


def _flat(machine: Machine) -> dict[str, Any]:
    sources = Counter(quantity.source for quantity in machine.quantities().values())
    return {
        "name": machine.name,
        "title": machine.title,
        "gpus": machine.gpus,
        "units": int(machine.gpu.units),
        "topology": str(machine.links.topology),
        "link_gbps": float(machine.links.usable_gbps),
        "nodes": machine.nodes,
        "runs": str(machine.runs),
        "network": str(machine.links.network),
        "node_gbps": float(machine.links.network_gbps * machine.links.nics_per_gpu * machine.gpus),
        "sources": {str(source): sources[source] for source in NumberSource},
    }
