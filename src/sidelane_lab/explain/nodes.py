"""``sidelane explain`` and ``sidelane collective`` with a machine of several nodes: predicted times of its plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from sidelane.cli.output import write_json
from sidelane.config import NOTHING
from sidelane.integrations.nodes.topology import FLAT, HIERARCHICAL, Nodes
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Kind
from sidelane.sizes import format_bytes
from sidelane_lab.cli.explain import ExplainOptions
from sidelane_lab.harness.parameters import given
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress_console, say, say_written, tables_console
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model import node_steps
from sidelane_lab.model.nodes import KINDS, NodesTimes, TimedStep, nodes_times

SIZES = tuple(1 << power for power in range(12, 31, 2))
"""Bytes of the collectives in the tables of ``sidelane collective``."""

WORTH_SAYING = 1.05
"""Ratio of times from which the vendor's library is recommended; predictions are not more exact."""

NOTE = (
    "simulated; hierarchical: in steps, by Sidelane within a node and by the vendor's library between nodes; flat: one "
    "call of the library, by rings among all ranks, or its exchange; tree: by its double binary tree, of a broadcast a "
    "binary one; floor: one latency, and what a node must send or receive by all of its NICs. "
    "Not modelled: steps within a node by kernels, which start sooner than copy engines; what the library's steps "
    "within a node take beside their bytes; ranks that come late"
)


@dataclasses.dataclass(frozen=True, slots=True)
class ExplainedPlan:
    """The plan of rank 0 in bytes.

    Attributes:
        steps: objects of ``--json``, with the bytes of this rank's side (0 for none), and microseconds.
        stays: bytes of scratch in symmetric memory, which stay.
        scratch: bytes of other scratch.
    """

    steps: tuple[dict[str, Any], ...] = ()
    stays: int = 0
    scratch: int = 0


def _plan_of(kind: Kind, nbytes: int, nodes: Nodes, dtype: str, times: NodesTimes) -> ExplainedPlan:
    """Return the plan of a call; without steps where the group takes none."""
    if times.choice.name != HIERARCHICAL:
        return ExplainedPlan()
    item = ELEMENT_BYTES[dtype]
    elements = -(-nbytes // ((1 if kind in node_steps.IN_PLACE else len(nodes.of)) * item))
    count, item = (elements, item) if kind in REDUCING else (elements * item, 1)
    plan = node_steps.make_plan(kind, nodes, 0, (count,), node_steps.pieces_of(times.choice, nbytes))
    stays = sum(plan.sizes[name] for name in plan.sent) * item
    return ExplainedPlan(
        tuple(_explained(plan, nodes, item, times.steps)), stays, sum(plan.sizes.values()) * item - stays
    )


def _explained(
    plan: node_steps.NodePlan, nodes: Nodes, item: int, timed: Sequence[TimedStep]
) -> Iterator[dict[str, Any]]:
    """Yield the steps of rank 0 with their times."""
    rail = node_steps.rail_of(nodes, 0)
    begun = 0
    for step, times in zip(plan.steps, timed, strict=True):
        where, count = "rail 0", 0
        if isinstance(step, node_steps.Far):
            what, count = f"begin {step.kind} {begun} of ranks {_named(rail)}", step.input.count
            begun += 1
        elif isinstance(step, node_steps.Join):
            what = f"wait for {step.number}"
        else:
            where = "rank" if isinstance(step, node_steps.Copies) else "node 0"
            what, count = _near(step, nodes.members[0])
        times_us = {"begin_us": times.begin_us, "end_us": times.end_us}
        yield {"where": where, "what": what, "nbytes": count * item, **times_us}


def _near(step: node_steps.Step, own: Sequence[int]) -> tuple[str, int]:
    """Return the description of a step within a node, and the elements of this rank's side."""
    if isinstance(step, node_steps.Copies):
        return f"copy {_counted(step.pairs)}", sum(span.count for span, _ in step.pairs)
    if isinstance(step, node_steps.NodeBroadcast):
        roots = _named([own[root] for root in sorted({root for root, _ in step.parts})])
        return f"broadcast {_counted(step.parts)} of ranks {roots}", sum(span.count for _, span in step.parts)
    assert isinstance(step, node_steps.Near)
    return f"{step.kind} of ranks {_named(own)}", step.input.count


def _counted(parts: Sequence[object]) -> str:
    return f"{len(parts)} part{'s' * (len(parts) > 1)}"


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def explain_on(machine: Machine, options: ExplainOptions) -> None:
    """Explain a call among all GPUs of several nodes, with the predicted time of every step.

    Raises:
        ValueError: an option that does not go with several nodes, or a collective that is not modelled.
    """
    kind, nbytes, dtype, json = options.kind, options.nbytes, options.dtype, options.json
    allowed = ("kind", "collective", "nbytes", "machine", "dtype", "json", "beside")
    for option in click.get_current_context().command.params:
        if option.name not in allowed and given(option.name or ""):
            text = "allowed=--dtype, --json, --beside: what crosses nodes is modelled for eager calls of all ranks"
            raise ValueError(f"{option.opts[0]} does not go with the nodes of {machine.name} ({text})")
    times = nodes_times(machine, kind, nbytes, options.beside != NOTHING)
    nodes, choice = node_steps.nodes_of([machine.gpus] * machine.nodes), times.choice
    plan = _plan_of(kind, nbytes, nodes, dtype, times)
    if json is not None:
        content = {
            "nodes": [len(ranks) for ranks in nodes.members],
            "takes": choice.name,
            "reason": choice.reason,
            "pieces": node_steps.pieces_of(choice, nbytes),
            "rank": 0,
            "steps": list(plan.steps),
            "scratch_that_stays_bytes": plan.stays,
            "scratch_bytes": plan.scratch,
            "machine": machine.name,
            "status": str(machine.runs),
        }
        write_json(json, content | predicted(times))
    console = tables_console(json)
    words = (f"{name.removesuffix('_us')} {us:.4g} us" for name, us in predicted(times).items() if us is not None)
    say(console, f"a process group takes {choice.name}: {', '.join(words)} ({machine.runs})", style="bold")
    library_us = min(us for us in (times.flat_us, times.tree_us) if us is not None)
    slower = choice.name != FLAT and times_as_fast(times.hierarchical_us, library_us)
    if slower:
        say(console, f"Keep the vendor's library for this call: {slower} times as fast, as predicted.", style="bold")
    say(console, f"{kind} of {format_bytes(nbytes)} among {len(nodes.of)} ranks, {dtype}")
    say(console, f"on {machine.title}, {machine.links.network}, by the rules of process groups and fsdp.enable")
    say(console, f"why {choice.name}: {choice.reason}")
    if not plan.steps:
        say(console, f"note: {NOTE}")
        return
    lines = []
    for step in plan.steps:
        moved = format_bytes(step["nbytes"]) if step["nbytes"] else "-"
        lines.append(Line((step["where"], step["what"], moved, f"{step['begin_us']:.1f}", f"{step['end_us']:.1f}")))
    columns = ("<where", "<what", "bytes", "begin\nus", "end\nus")
    console.print()
    console.print(Table("Steps of rank 0, predicted", columns, tuple(lines), (NOTE,), keys=2).to_rich())


def times_as_fast(ours_us: float | None, library_us: float | None) -> str:
    """Return how many times as fast the vendor's library is; empty if it is not by 5% and more, or nobody knows.

    >>> times_as_fast(30.0, 20.0), times_as_fast(20.0, 20.0), times_as_fast(None, 20.0)
    ('1.5', '', '')
    """
    if ours_us is None or library_us is None or ours_us < WORTH_SAYING * library_us:
        return ""
    return f"{ours_us / library_us:.1f}"


def predicted(times: NodesTimes) -> dict[str, float | None]:
    """Return the times of a file's row."""
    return {
        "hierarchical_us": times.hierarchical_us,
        "flat_us": times.flat_us,
        "tree_us": times.tree_us,
        "floor_us": times.floor_us,
    }


def predict_collectives(machine: Machine, report: Path | None, json: Path | None) -> None:
    """Predict every collective by size: what a process group takes, and the other ways."""
    console = tables_console(json)
    numbers = []
    for kind in KINDS:
        with progress_console().status(f"simulating {kind} among {machine.world_size} ranks"):
            rows = [(nbytes, nodes_times(machine, kind, nbytes)) for nbytes in SIZES]
        console.print(sizes_table(machine, kind, rows).to_rich())
        for nbytes, times in rows:
            choice = {"takes": times.choice.name, "pieces": node_steps.pieces_of(times.choice, nbytes)}
            numbers.append({"collective": str(kind), "bytes": nbytes, **choice, **predicted(times)})
    say_written(write_report(json, report, "nodes_predicted", machine, numbers))


def sizes_table(machine: Machine, kind: Kind, rows: Sequence[tuple[int, NodesTimes]]) -> Table:
    """Make a table of time by size; the faster way is starred."""
    lines = []
    for nbytes, times in rows:
        ways = (times.flat_us, times.tree_us, times.hierarchical_us)
        fastest = min(us for us in ways if us is not None)
        cells = ["-" if us is None else f"{us:.1f}" + ("*" if us == fastest else " ") for us in ways]
        pieces = "" if times.choice.name == FLAT else f" in {node_steps.pieces_of(times.choice, nbytes)}"
        lines.append(Line((format_bytes(nbytes), *cells, f"{times.floor_us:.1f}", times.choice.name + pieces)))
    columns = ("bytes", "flat", "tree", "hierarchical", "floor", "<a process group takes")
    title = f"{kind} on {machine.title}: time in us, predicted (* faster)"
    return Table(title, columns, tuple(lines), (NOTE,))
