"""``sidelane explain`` and ``sidelane collective`` with a machine of several nodes: predicted times of its plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from sidelane.cli.output import write_json
from sidelane.integrations.nodes.topology import FLAT, HIERARCHICAL, Nodes, NodesChoice, choose_steps
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.parameters import given
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress_console, say, say_written, tables_console
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.node_steps import (
    IN_PLACE,
    Copies,
    ElementSpan,
    Far,
    Join,
    Near,
    NodeBroadcast,
    NodePlan,
    Step,
    make_plan,
    nodes_of,
    pieces_of,
    rail_of,
)
from sidelane_lab.model.nodes import KINDS, NodesTimes, nodes_times

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
class ExplainedStep:
    """A step of a rank.

    Attributes:
        where: place of the step: a node or a rail.
        what: description of the step.
        nbytes: bytes of this rank's side; 0 for none.
    """

    where: str
    what: str
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Explained:
    """Result of :func:`explain_nodes`.

    Attributes:
        nodes: nodes of the ranks.
        choice: chosen way of the call, with the reason.
        pieces: number of pieces of the call.
        rank: rank whose steps are listed; the first of the first node.
        steps: steps in their order; none if the call goes flat.
        stays: bytes of scratch in symmetric memory that later calls use again.
        scratch: bytes of other scratch.
    """

    nodes: Nodes
    choice: NodesChoice
    pieces: int
    rank: int
    steps: tuple[ExplainedStep, ...]
    stays: int
    scratch: int

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as one JSON object."""
        return {
            "nodes": [len(ranks) for ranks in self.nodes.members],
            "takes": self.choice.name,
            "reason": self.choice.reason,
            "pieces": self.pieces,
            "rank": self.rank,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "scratch_that_stays_bytes": self.stays,
            "scratch_bytes": self.scratch,
        }


def explain_nodes(kind: Kind, nodes: Nodes, nbytes: int, dtype: str) -> Explained:
    """Explain a call without making it; a broadcast is from rank 0.

    Args:
        kind: one of :data:`KINDS`.
        nodes: nodes of the ranks.
        nbytes: gathered bytes of an all_gather, the local buffer of the others; rounded up to whole elements, and to as
            many for each rank.
        dtype: dtype of reduced elements; elements that only move are bytes.
    """
    rank, choice = 0, choose_steps(kind, nbytes, nodes)
    pieces = pieces_of(choice, nbytes)
    if choice.name != HIERARCHICAL:
        return Explained(nodes, choice, pieces, rank, (), 0, 0)
    item = ELEMENT_BYTES[dtype]
    elements = -(-nbytes // ((1 if kind in IN_PLACE else len(nodes.of)) * item))
    count, item = (elements, item) if kind in REDUCING else (elements * item, 1)
    plan = make_plan(kind, nodes, rank, (count,), pieces)
    stays = sum(plan.sizes[name] for name in plan.sent) * item
    scratch = sum(plan.sizes.values()) * item - stays
    return Explained(nodes, choice, pieces, rank, tuple(_told(plan, nodes, rank, item)), stays, scratch)


def _told(plan: NodePlan, nodes: Nodes, rank: int, item: int) -> Iterator[ExplainedStep]:
    node, place = nodes.coordinates(rank)
    near, rail = f"node {node}", f"rail {place}"
    begun = 0
    for step in plan.steps:
        if isinstance(step, Far):
            what = f"begin {step.kind} {begun} of ranks {_named(rail_of(nodes, place))}"
            yield ExplainedStep(rail, what, step.input.count * item)
            begun += 1
        elif isinstance(step, Join):
            yield ExplainedStep(rail, f"wait for {step.number}")
        else:
            yield ExplainedStep("rank" if isinstance(step, Copies) else near, *_near(step, nodes.members[node], item))


def _near(step: Step, own: Sequence[int], item: int) -> tuple[str, int]:
    if isinstance(step, Copies):
        return f"copy {_counted([span for span, _ in step.pairs])}", sum(span.count for span, _ in step.pairs) * item
    if isinstance(step, NodeBroadcast):
        roots = sorted({root for root, _ in step.parts})
        text = (
            f"broadcast {_counted([span for _, span in step.parts])} of ranks {_named([own[root] for root in roots])}"
        )
        return text, sum(span.count for _, span in step.parts) * item
    assert isinstance(step, Near)
    return f"{step.kind} of ranks {_named(own)}", step.input.count * item


def _counted(spans: Sequence[ElementSpan]) -> str:
    return f"{len(spans)} part{'s' * (len(spans) > 1)}"


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def explain_on(machine: Machine, kind: Kind, nbytes: int, dtype: str, json: Path | None) -> None:
    """Explain a call among all GPUs of several nodes, with the predicted time of every step.

    Raises:
        ValueError: an option that does not go with several nodes, or a collective that is not modelled.
    """
    allowed = ("kind", "collective", "nbytes", "machine", "dtype", "json")
    for option in click.get_current_context().command.params:
        if option.name not in allowed and given(option.name or ""):
            text = "allowed=--dtype, --json: what crosses nodes is modelled for calls of all ranks, alone and eager"
            raise ValueError(f"{option.opts[0]} does not go with the nodes of {machine.name} ({text})")
    times = nodes_times(machine, kind, nbytes)
    nodes = nodes_of([machine.gpus] * machine.nodes)
    explained = explain_nodes(kind, nodes, nbytes, dtype)
    # Below the bound of the choice the group takes no steps, and none are shown.
    timed = list(zip(explained.steps, times.steps, strict=True)) if explained.steps else []
    if json is not None:
        steps = [{**dataclasses.asdict(step), "begin_us": when.begin_us, "end_us": when.end_us} for step, when in timed]
        write_json(
            json,
            {
                **explained.to_dict(),
                "machine": machine.name,
                "status": str(machine.runs),
                **predicted(times),
                "steps": steps,
            },
        )
    console = tables_console(json)
    words = (f"{name.removesuffix('_us')} {us:.4g} us" for name, us in predicted(times).items() if us is not None)
    say(console, f"a process group takes {times.choice.name}: {', '.join(words)} ({machine.runs})", style="bold")
    library_us = min(us for us in (times.flat_us, times.tree_us) if us is not None)
    slower = times.choice.name != FLAT and times_as_fast(times.hierarchical_us, library_us)
    if slower:
        say(console, f"Keep the vendor's library for this call: {slower} times as fast, as predicted.", style="bold")
    say(console, f"{kind} of {format_bytes(nbytes)} among {len(nodes.of)} ranks, {dtype}")
    say(console, f"on {machine.title}, {machine.links.network}, by the rules of process groups and fsdp.enable")
    say(console, f"why {times.choice.name}: {times.choice.reason}")
    if timed:
        lines = tuple(
            Line(
                (
                    *(step.where, step.what, format_bytes(step.nbytes) if step.nbytes else "-"),
                    *(f"{when.begin_us:.1f}", f"{when.end_us:.1f}"),
                )
            )
            for step, when in timed
        )
        columns = ("<where", "<what", "bytes", "begin\nus", "end\nus")
        console.print()
        title = f"Steps of rank {explained.rank}, predicted"
        console.print(Table(title, columns, lines, (NOTE,), keys=2).to_rich())
    else:
        say(console, f"note: {NOTE}")


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
            choice = {"takes": times.choice.name, "pieces": pieces_of(times.choice, nbytes)}
            numbers.append({"collective": str(kind), "bytes": nbytes, **choice, **predicted(times)})
    say_written(write_report(json, report, "nodes_predicted", machine, numbers))


def sizes_table(machine: Machine, kind: Kind, rows: Sequence[tuple[int, NodesTimes]]) -> Table:
    """Make a table of time by size; the faster way is starred."""
    lines = []
    for nbytes, times in rows:
        ways = (times.flat_us, times.tree_us, times.hierarchical_us)
        fastest = min(us for us in ways if us is not None)
        cells = ["-" if us is None else f"{us:.1f}" + ("*" if us == fastest else " ") for us in ways]
        pieces = "" if times.choice.name == FLAT else f" in {pieces_of(times.choice, nbytes)}"
        lines.append(Line((format_bytes(nbytes), *cells, f"{times.floor_us:.1f}", times.choice.name + pieces)))
    columns = ("bytes", "flat", "tree", "hierarchical", "floor", "<a process group takes")
    title = f"{kind} on {machine.title}: time in us, predicted (* faster)"
    return Table(title, columns, tuple(lines), (NOTE,))
