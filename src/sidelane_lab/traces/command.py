"""``sidelane plan --trace``: which collectives of a recorded step are exposed and why, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sidelane_lab.cli.model import PlanOptions
from sidelane_lab.harness.table import MISSING, Line, Table
from sidelane_lab.harness.terminal import progress, say, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import write_numbers
from sidelane_lab.machines.spec import Machine, RunStatus
from sidelane_lab.model.serving import RUNS, assumed
from sidelane_lab.traces.graph import NodeKind, TraceGraph
from sidelane_lab.traces.kineto import read_kineto
from sidelane_lab.traces.strategies import (
    KERNELS,
    LIBRARY,
    STRAIGHT,
    STRATEGIES,
    WORTH,
    StepOperation,
    TracePlan,
    plan_trace,
    require_collectives,
)

SHOWN = 2
"""Operations that the answer names."""
HOST_SHARE = 0.2
"""Share of a step above which the answer says that the GPU waits for the host."""
SURE = "on two H200s five programs' steps were within 3.2%, their savings from 48% too small to 32% too large"
"""Words for what was compared, as docs/guide/start-planning.md has it."""
LONGEST_NAME = 40
"""Characters of a kernel's name at the most."""
WORDS = {LIBRARY: "the library", KERNELS: "Sidelane's kernels", STRAIGHT: "copy engines straight into the parameters"}
"""Words for strategies, where their names are none."""


def main(options: PlanOptions) -> None:
    """Print the answer for a recorded step, and a table of its operations.

    Raises:
        OSError: the trace can not be read.
        ValueError: no such machine, or a trace that can not be planned; the message says why.
    """
    assert options.trace is not None
    trace = read_kineto(options.trace)
    require_collectives(trace)
    recorded = recorded_machine(trace)
    machine = find(options.machine) if options.machine else recorded
    if machine is None:
        named = f"names {trace.device}, which is not described" if trace.device else "names no GPU"
        raise ValueError(
            f"plan: {trace.source} {named}: say --machine {trace.ranks or 8}xh100, or the nearest to yours"
        )
    console = tables_console(options.json)
    with progress(f"planning {len(trace.nodes)} nodes") as update:
        planned = plan_trace(machine, trace, update, is_same=recorded is not None and recorded.name == machine.name)
    for line in answer(planned):
        say(console, line, style="bold")
    if planned.operations:
        console.print()
        console.print(operations_table(planned).to_rich())
    say_written(write_numbers(options.json, "plan_trace", machine, rows(planned)))


def recorded_machine(trace: TraceGraph) -> Machine | None:
    """Return the machine on which a trace was recorded, if it is described."""
    try:
        return find(f"{trace.ranks} x {trace.device}") if trace.device and trace.ranks > 1 else None
    except ValueError:
        return None


def answer(planned: TracePlan) -> list[str]:
    """Say what is exposed and why, which change gives most, what all of them give, and what to write."""
    trace, step_us = planned.trace, planned.library_us
    calls = [one for one in trace.nodes if one.kind is NodeKind.COLLECTIVE and not one.on_host]
    known = {node.ident for one in planned.operations for node in one.calls} if not planned.is_same else set()
    moving_us = sum(one.duration_us for one in calls if one.ident not in known)
    moving_us += sum(len(one.calls) * one.times_us[LIBRARY] for one in planned.operations if known)
    where = f"as recorded on {planned.machine.title}" if planned.is_same else f"predicted on {planned.machine.title}"
    lines = [
        f"{trace.step} takes {_ms(step_us)} ms, {where}: {len(calls)} collectives take {_ms(moving_us)} ms, of which "
        f"{_ms(planned.exposed_us)} ms ({_percent(planned.exposed_us, step_us)}) are exposed."
    ]
    named = [
        f"{name_of(one)} {_ms(one.exposed_us)} ms ({_why(one)})"
        for one in sorted(planned.operations, key=lambda one: -one.exposed_us)[:SHOWN]
        if one.exposed_us
    ]
    lines += [f"Most exposed in the recording: {'; '.join(named)}."] * bool(named)
    if planned.host_us > HOST_SHARE * step_us:
        lines.append(
            f"The GPU waits {_ms(planned.host_us)} ms ({_percent(planned.host_us, step_us)}) for the host: capture the "
            "step in a CUDA graph, or compile it; collectives matter less."
        )
    if not planned.operations:
        lines.append("The trace has no bytes of collectives: record the step with PyTorch 2.2 or later.")
    elif planned.single is None:
        lines.append(f"No operation saves more than {WORTH:.2%} of the step with another strategy.")
    else:
        one, strategy, saved = planned.single
        lines.append(
            f"The single change that gives most: {name_of(one)} by {WORDS.get(strategy, strategy)}, "
            f"{_ms(saved)} ms ({_percent(saved, step_us)})."
        )
        lines.append(
            f"With the best strategy for each operation: {_ms(planned.best_us)} ms, "
            f"{_percent(step_us - planned.best_us, step_us)} less; {_ms(planned.best_us - planned.silent_us)} ms stay "
            "exposed."
        )
    lines.append(_to_write(planned))
    lines.append(
        f"How sure: {'; '.join((RUNS.get(planned.machine.runs, planned.machine.runs), *assumed(planned.machine)))}; "
        f"{SURE}; a step takes longer with the profiler than without it."
    )
    lacking = f", {planned.kept} collectives whose bytes the trace lacks (a warm-up before a CUDA graph has them)"
    left = lacking * (planned.kept > 0)
    return [*lines, f"Not modelled: peers that are late, what kernels move through memory{left}."]


def _to_write(planned: TracePlan) -> str:
    taken = {name for name in planned.chosen if name != LIBRARY}
    if planned.machine.runs is RunStatus.UNSUPPORTED:
        return "Sidelane has never run on AMD GPUs: the plan says what copy engines could give."
    if STRAIGHT in taken:
        return "Write after fully_shard(model): from sidelane import fsdp; enabled = fsdp.enable(model)"
    if taken:
        return 'Write: import sidelane, and dist.new_group(backend="sidelane") for the group of these operations.'
    return "Leave the vendor's library."


def operations_table(planned: TracePlan) -> Table:
    """Make a table of the operations: milliseconds as recorded, microseconds of a call by strategy, what to take."""
    lines = []
    for one, strategy in zip(planned.operations, planned.chosen, strict=True):
        times = (f"{one.times_us[name]:.0f}" if name in one.times_us else MISSING for name in STRATEGIES[:-1])
        step = planned.modelled_us - min(one.steps_us.values(), default=planned.modelled_us)
        cells = (name_of(one), str(len(one.calls)), str(one.ranks), _ms(one.recorded_us), _ms(one.exposed_us), *times)
        lines.append(Line((*cells, _ms(max(0.0, step)), strategy, _why(one))))
    notes = [
        "recorded, exposed: sums of the calls, exposed: nothing else runs on this GPU; us: a call alone, predicted",
        "saves: of the step, by the best other strategy for this operation alone; takes: for the least step of all",
        "computations and the host: as recorded; beside collectives they are slower by what the recording says",
        "straight: on copy engines into FSDP2's parameters, without the copies out of its buffers",
    ]
    recorded = {one.ranks for one in planned.trace.nodes} - {0, planned.machine.world_size}
    if recorded and not planned.is_same:
        notes.append(f"recorded among {', '.join(map(str, sorted(recorded)))} ranks")
    title = f"{Path(planned.trace.source).name}, {planned.trace.step}, on {planned.machine.title}: operations"
    us = tuple(f"{name}\nus" for name in STRATEGIES[:-1])
    columns = (
        "<operation",
        "calls",
        "ranks",
        "recorded\nms",
        "exposed\nms",
        *us,
        "saves\nms",
        "<takes",
        "<waits for it",
    )
    return Table(title, columns, tuple(lines), tuple(notes), keys=1)


def rows(planned: TracePlan) -> list[dict[str, Any]]:
    """Return the objects that ``--json`` writes: the step, then its operations."""
    names = ("is_same", "library_us", "modelled_us", "best_us", "silent_us", "exposed_us", "host_us", "kept")
    step = {"trace": Path(planned.trace.source).name, "step": planned.trace.step}
    found: list[dict[str, Any]] = [step | {name: getattr(planned, name) for name in names}]
    for one, strategy in zip(planned.operations, planned.chosen, strict=True):
        of_it = {"kind": str(one.kind), "bytes": one.nbytes, "ranks": one.ranks, "calls": len(one.calls)}
        times = {"recorded_us": one.recorded_us, "exposed_us": one.exposed_us, "waiting": list(one.waiting)}
        found.append(of_it | times | {"times_us": one.times_us, "steps_us": one.steps_us, "takes": strategy})
    return found


def name_of(one: StepOperation) -> str:
    """Return words for an operation."""
    return f"{one.kind} of {one.nbytes / 2**20:.3g} MiB"


def _why(one: StepOperation) -> str:
    if not one.waiting:
        return "the host is late"
    plain = one.waiting[0].removeprefix("void ").replace("(anonymous namespace)::", "")
    name = plain.partition("(")[0].partition("<")[0].rpartition("::")[2].strip()
    return f"{name[:LONGEST_NAME]} waits"


def _percent(us: float, whole_us: float) -> str:
    return f"{100 * us / whole_us:.1f}%"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e4 else f"{us / 1e3:.1f}"
