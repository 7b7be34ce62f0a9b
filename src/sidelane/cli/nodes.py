"""Commands for several nodes: ``sidelane explain --nodes`` and ``sidelane verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sidelane.cli.errors import plain_errors
from sidelane.cli.help import LABORATORY, Command, how, what, where
from sidelane.cli.output import json_option
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.parameters import ALL, NameChoice, given

STEPPED = tuple(kind.value for kind in Kind if kind not in (Kind.SCATTER, Kind.GATHER))
"""Names of collectives that have steps for several nodes."""


def sizes_of_nodes(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read ``2,3``: a node of two ranks, and one of three."""
    if value is None:
        return None
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError as problem:
        raise click.BadParameter(f"{value!r} (allowed=ranks of each node, such as 2,3)") from problem
    if min(found) < 1:
        raise click.BadParameter(f"{value!r} (allowed=1 rank and more on each node)")
    return found


@click.command(
    cls=Command,
    heading=LABORATORY,
    examples=(
        ("sidelane verify --nodes 2,3", "every collective on a node of two ranks and one of three"),
        ("sidelane verify --nodes 8,8 --collective all_reduce --pieces 8 --elements 1000", "one, more closely"),
    ),
)
@what(
    "--collective",
    "collectives",
    multiple=True,
    type=NameChoice([*STEPPED, ALL]),
    default=(ALL,),
    help="May be repeated.",
)
@what(
    "--elements",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 7, 64),
    help="Of each part; all of these together make a list. May be repeated.",
)
@how("--pieces", multiple=True, type=click.IntRange(min=1), default=(1, 3, 8), help="Cut into. May be repeated.")
@where("--nodes", metavar="N,N,...", callback=sizes_of_nodes, required=True, help="Ranks of each node, such as 2,3.")
@json_option
def verify(
    nodes: tuple[int, ...],
    collectives: tuple[str, ...],
    elements: tuple[int, ...],
    pieces: tuple[int, ...],
    json: Path | None,
) -> None:
    """Prove the plans of collectives among several nodes.

    All ranks' steps are carried out on the origins of elements: every element arrives, nobody waits for ever, and
    nothing is touched that a step between nodes under way uses. Programs within a node are proved whenever they are
    made.
    """
    with plain_errors():
        from sidelane.cli.output import write_json
        from sidelane.integrations.nodes.explain import nodes_of
        from sidelane.integrations.nodes.plan import objection
        from sidelane.integrations.nodes.verify import verify_plans
        from sidelane_lab.harness.table import Line, Table
        from sidelane_lab.harness.terminal import say, tables_console

        there = nodes_of(nodes)
        rows: list[dict[str, Any]] = []
        for name in STEPPED if ALL in collectives else dict.fromkeys(collectives):
            kind, steps = Kind(name), 0
            lists: list[tuple[int, ...]] = [(count,) for count in elements]
            why = objection(kind, there)
            if kind is not Kind.BROADCAST and len(elements) > 1:
                lists.append(elements)
            roots = range(len(there.of)) if kind is Kind.BROADCAST else (0,)
            cases = [] if why else [(counts, cut, root) for counts in lists for cut in pieces for root in roots]
            for counts, cut, root in cases:
                steps += verify_plans(kind, there, counts, cut, root)
            rows.append({"collective": name, "plans": len(cases) * len(there.of), "steps": steps, "why_none": why})
        if json is not None:
            write_json(json, {"nodes": list(nodes), "rows": rows})
        console = tables_console(json)
        lines = tuple(
            Line((row["collective"], str(row["plans"]), str(row["steps"]), row["why_none"] or "right")) for row in rows
        )
        console.print(Table(f"Plans for {there}", ("<collective", "plans", "steps", "<"), lines).to_rich())
        say(console, f"{sum(row['plans'] for row in rows)} plans are right")


def explain_nodes(
    kind: Kind, nodes: tuple[int, ...], *, nbytes: int, dtype: str, tensors: int | None, json: Path | None, **_: Any
) -> None:
    """Run ``sidelane explain --nodes``.

    Raises:
        ValueError: an option does not go with it.
    """
    allowed = ("collective", "nbytes", "nodes", "dtype", "tensors", "json")
    for option in click.get_current_context().command.params:
        if option.name not in allowed and given(option.name or ""):
            raise ValueError(f"{option.opts[0]} does not go with --nodes (allowed=--dtype, --tensors, --json)")

    from sidelane.cli.output import write_json
    from sidelane.integrations.nodes.explain import explain_nodes, nodes_of
    from sidelane_lab.harness.table import Line, Table
    from sidelane_lab.harness.terminal import say, tables_console

    there = nodes_of(nodes)
    found = explain_nodes(kind, there, nbytes, dtype, tensors or 1)
    if json is not None:
        write_json(json, found.to_dict())
    console = tables_console(json)
    many = f", {tensors} tensors" if tensors is not None else ""
    say(console, f"a process group takes {found.choice.name}: {found.choice.reason}", style="bold")
    say(console, f"{kind} of {format_bytes(nbytes)} among {len(there.of)} ranks, {dtype}{many}")
    say(console, f"on {there}, by the rules of process groups and fsdp.enable")
    if not found.steps:
        say(console, "one call of the group's own backend (NCCL or Gloo)")
        return
    console.print()
    lines = tuple(
        Line((step.where, step.what, format_bytes(step.nbytes) if step.nbytes else "-")) for step in found.steps
    )
    notes = (
        "node: Sidelane, rail: the group's own backend (NCCL or Gloo), rank: copies on the spot",
        f"scratch: {format_bytes(found.stays)} of symmetric memory, which stays; {format_bytes(found.scratch)} more",
    )
    console.print(Table(f"Steps of rank {found.rank}", ("<where", "<what", "bytes"), lines, notes, keys=2).to_rich())
