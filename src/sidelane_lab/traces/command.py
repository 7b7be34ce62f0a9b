"""The command ``sidelane replay``: a recorded step on a described machine, by strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidelane.c3.strategies import named
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress_console, say, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import write_numbers
from sidelane_lab.machines.spec import Machine
from sidelane_lab.traces.chakra import read_chakra, write_chakra
from sidelane_lab.traces.graph import TraceGraph
from sidelane_lab.traces.kineto import read_kineto
from sidelane_lab.traces.replay import CLASSES, Replay, kept_collectives, replay

STRATEGIES = ("serial", "c3_base", "conccl")
"""Strategies without ``--strategy``: one after the other, beside each other with kernels, and with copy engines."""
LONGEST = 5
"""Number of nodes of the critical path that ``--json`` writes."""
WORTH = 0.01
"""Share of a step below which the command calls two strategies alike."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of ``sidelane replay``.

    Attributes:
        trace: a file of Chakra, or with .json or .json.gz one of PyTorch's profiler.
        machine: in the catalogue, or a file.
        strategies: names; none: ``STRATEGIES``.
        write: file for the run under the last strategy, as a trace of Chakra.
        write_recorded: file for the trace as it was recorded, as one of Chakra.
        json: file for the numbers, or ``written.STDOUT``.
    """

    trace: Path
    machine: str
    strategies: tuple[str, ...] = ()
    write: Path | None = None
    write_recorded: Path | None = None
    json: Path | None = None


def main(options: ReplayOptions) -> None:
    """Print what a trace takes under each strategy, and what copy engines would give it.

    Raises:
        OSError: the trace can not be read.
        ValueError: no such machine or strategy, or a trace that can not run; the message names the node.
    """
    machine, trace = find(options.machine), read_trace(options.trace)
    console = tables_console(options.json)
    with progress_console().status(f"replaying {len(trace.nodes)} nodes"):
        found = replay(machine, trace, tuple(dict.fromkeys(options.strategies)) or STRATEGIES)
    console.print(replay_table(machine, trace, found).to_rich())
    for line in advice(found):
        say(console, line)
    rows = [{"trace": options.trace.name, "nodes": len(trace.nodes), **flat(one)} for one in found]
    written = write_numbers(options.json, "replay", machine, rows)
    if options.write is not None:
        written.append(write_chakra(options.write, found[-1].nodes))
    if options.write_recorded is not None:
        written.append(write_chakra(options.write_recorded, trace.nodes))
    say_written(written)


def read_trace(path: Path) -> TraceGraph:
    """Read a trace of PyTorch's profiler (``.json``, ``.json.gz``), or one of Chakra (any other name)."""
    return read_kineto(path) if path.name.endswith((".json", ".json.gz")) else read_chakra(path)


def replay_table(machine: Machine, trace: TraceGraph, found: Sequence[Replay]) -> Table:
    """Milliseconds of the trace by strategy: of the whole, its computation, its collectives, its critical path."""
    lines = [
        Line(
            (
                f"{one.strategy}, {one.units} units" if one.units else one.strategy,
                *map(_ms, (one.time_us, one.compute_us, one.communication_us, one.exposed_us)),
                *(_ms(one.critical_us[name]) for name in CLASSES),
            )
        )
        for one in found
    ]
    title = f"{Path(trace.source).name}, {len(trace.nodes)} nodes, on {machine.title}: predicted, ms"
    notes: tuple[str, ...] = (
        "computation and CPU: as recorded, on whatever machine that was; collectives: as described for this machine",
        "every collective is among all GPUs of this machine, whose ranks do the same at the same time",
        "exposed: more than the trace takes if collectives take no time",
        "last three columns: the critical path, by what runs on it",
    )
    if other := sorted({node.ranks for node in trace.nodes} - {0, machine.world_size}):
        notes = (*notes, f"recorded among {', '.join(map(str, other))} ranks, replayed among {machine.world_size}")
    if kept := kept_collectives(trace):
        notes = (*notes, f"{kept} collectives keep their recorded time: their bytes or their kind are not in the trace")
    columns = ("<strategy", "step", "compute", "collectives\nalone", "exposed", *(f"path:\n{one}" for one in CLASSES))
    return Table(title, columns, tuple(lines), notes)


def advice(found: Sequence[Replay]) -> list[str]:
    """Say what the fastest strategy saves over the first, and what copy engines save over kernels beside."""
    first, best = found[0], min(found, key=lambda one: one.time_us)
    if not first.communication_us:
        return ["The trace has no collective that takes time: strategies make no difference."]
    lines = [_saving(best, first)] if best is not first else []
    beside = [one for one in found if named(one.strategy).concurrent]
    kernels = [one for one in beside if named(one.strategy).mover.takes_units]
    engines = [one for one in beside if one not in kernels]
    if kernels and engines:
        line = _saving(*(min(ones, key=lambda one: one.time_us) for ones in (engines, kernels)))
        lines += [line] if line not in lines else []
    return lines


def _saving(one: Replay, other: Replay) -> str:
    saved_us = other.time_us - one.time_us
    if abs(saved_us) < WORTH * other.time_us:
        return f"{one.strategy} instead of {other.strategy}: less than 1% of the step."
    words = "less" if saved_us > 0 else "more"
    share = 100 * abs(saved_us) / other.time_us
    return f"{one.strategy} instead of {other.strategy}: {_ms(abs(saved_us))} ms {words} ({share:.0f}%)."


def flat(one: Replay) -> dict[str, Any]:
    """Return the object that ``--json`` writes, with the nodes of the critical path that take longest in this run."""
    fields = ("strategy", "units", "time_us", "compute_us", "communication_us", "exposed_us", "critical_us")
    took_us = {node.ident: node.duration_us for node in one.nodes}
    longest = sorted(one.path, key=lambda node: -took_us[node.ident])[:LONGEST]
    rows = [{"node": node.ident, "name": node.name, "us": took_us[node.ident]} for node in longest]
    return {name: getattr(one, name) for name in fields} | {"longest": rows}


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f}" if us < 1e4 else f"{us / 1e3:.1f}"
