"""Predictions of whole workloads, and ``sidelane e2e --machine``, which prints them or compares them with a file.

Each workload says how long its ways' transfers take (``EndToEndWorkload.predicted_us``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import statistics
from collections.abc import Sequence

from sidelane_lab.cli.e2e import EndToEndOptions
from sidelane_lab.harness import study as files
from sidelane_lab.harness.options import require_all
from sidelane_lab.harness.table import Line, Table, grouped
from sidelane_lab.harness.terminal import say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import write_numbers
from sidelane_lab.machines.spec import Machine
from sidelane_lab.studies.clients.cases import TINY
from sidelane_lab.studies.e2e.rows import WorkloadRow, step_tables
from sidelane_lab.studies.e2e.workload import EndToEndWorkload
from sidelane_lab.studies.steps import GRAPH


def workloads(names: Sequence[str]) -> list[EndToEndWorkload]:
    """Return the workloads of these names, whose modules are called like them."""
    return [importlib.import_module(f"sidelane_lab.studies.e2e.{name}").WORKLOAD for name in names]


def sizes_of(workload: EndToEndWorkload, chosen: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Return the sizes of a workload that are measured: the chosen ones, else on CPU ranks those that are tiny, and on
    GPUs all others.
    """
    return [size for size in workload.sizes if (size in chosen if chosen else size.startswith(TINY) == on_cpu)]


def cases_of(options: EndToEndOptions, *, on_cpu: bool) -> list[tuple[EndToEndWorkload, str]]:
    """Return workloads and sizes of some options. Raises ValueError: no such size."""
    found = workloads(options.workloads)
    require_all("e2e", "sizes", options.cases, sorted({size for one in found for size in one.sizes}))
    return [(one, size) for one in found for size in sizes_of(one, options.cases, on_cpu=on_cpu)]


@functools.cache
def predicted_ms(workload: str, size: str, machine: Machine) -> dict[str, float]:
    """Return by how much a step of each way is predicted to be longer than "none", in milliseconds; of sizes without
    "none", how long it is. Nothing of ways that are not modelled, and of machines without figures of kernels.

    >>> found = predicted_ms("decode", "llama-3.1-8b-x1", find("h200x2"))
    >>> {way: round(time, 2) for way, time in found.items()}
    {'nccl': 0.44, 'group': 0.18, 'operators': 0.08}
    """
    (found,) = workloads([workload])
    if machine.nodes > 1 or machine.gpus < 2 or machine.fused is None or size not in found.sizes:
        return {}
    return {way: time / 1e3 for way, time in found.predicted_us(found.sizes[size], machine).items()}


def with_predictions(rows: Sequence[WorkloadRow], machine: Machine) -> list[WorkloadRow]:
    """Return rows with what is predicted for a machine, in place of predictions that they had."""
    return [
        dataclasses.replace(row, predicted_ms=predicted_ms(row.workload, row.size, machine).get(row.way))
        for row in rows
    ]


def main(name: str, options: EndToEndOptions) -> None:
    """Print predictions for a machine; with a file, that file's rows with predictions beside them, and errors.

    Raises:
        ValueError: no such machine, size or result file; a machine of several nodes, or one whose description has no
            figures of kernels that compute and send.
    """
    machine = find(name)
    machine.refuse_nodes("e2e")
    if machine.fused is None or machine.gpus < 2:
        raise ValueError(f"e2e: --machine (value={name}, allowed=several GPUs, with a section [fused])")
    console = tables_console(options.json)
    if options.results is not None:
        results = files.read(options.results)
        rows = [row for row in results.rows if isinstance(row, WorkloadRow) and row.workload in options.workloads]
        rows = [row for row in rows if not options.cases or row.size in options.cases]
        if not rows:
            raise ValueError(f"e2e: --results (value={options.results}, allowed=a file of sidelane e2e with such rows)")
        rows = with_predictions(rows, dataclasses.replace(machine, gpus=results.ranks))
        for table in (*step_tables(rows), *error_tables(rows)):
            console.print(table.to_rich())
        if options.json is not None:
            say_written([files.write(options.json, dataclasses.replace(results, rows=tuple(rows)))])
        return
    found = [
        {"workload": workload.name, "size": size, "way": way, "predicted_ms": time}
        for workload, size in cases_of(options, on_cpu=False)
        for way, time in predicted_ms(workload.name, size, machine).items()
    ]
    lines = [Line((*map(str, names), f"{time:.3f}")) for *names, time in map(dict.values, found)]
    notes = ("more than a step without communication; of parts of a layer, the part",)
    title = f"whole workloads on {machine.gpus} of {machine.title}: what is predicted to be exposed"
    console.print(Table(title, ("<workload", "<size", "<way", "ms"), tuple(lines), notes, keys=3).to_rich())
    say_written(write_numbers(options.json, "e2e_predicted", machine, found))


def error_tables(rows: Sequence[WorkloadRow]) -> list[Table]:
    """Return errors in graphs by workload and way, as shares of the step: the median, and the worst with its size."""
    captured = [row for row in rows if row.launch == GRAPH and row.off_percent is not None]
    lines = []
    for (workload, way), alike in grouped(captured, lambda row: (row.workload, row.way), ordered=False):
        worst = max(alike, key=lambda row: abs(row.off_percent or 0))
        median = statistics.median(abs(row.off_percent or 0) for row in alike)
        lines.append(Line((workload, way, str(len(alike)), f"{median:.1f}", f"{worst.off_percent:+.1f}", worst.size)))
    columns = ("<workload", "<way", "rows", "median\n%", "worst\n%", "<at")
    notes = ("captured in graphs; percent of the step; nothing was fitted to these rows",)
    return [Table("errors of predictions", columns, tuple(lines), notes, keys=2)] if lines else []
