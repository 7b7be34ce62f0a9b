"""Every table that the tool prints, on terminals from 40 to 200 columns: nothing is cut, least of all a number."""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import rich.console
from marks import long

from sidelane.choice.store import InForce, builtin
from sidelane.cli import info
from sidelane.cli.output import STDOUT
from sidelane.program.collective import Kind
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.cli.fused import FusedOptions
from sidelane_lab.explain import call as explain
from sidelane_lab.explain import nodes
from sidelane_lab.harness import study as files
from sidelane_lab.harness import terminal
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.model import layer, training
from sidelane_lab.model import plan as sim_plan
from sidelane_lab.model.nodes import nodes_times
from sidelane_lab.model.study import TABLE_II
from sidelane_lab.papers import command as claims
from sidelane_lab.papers import overlap, predictions
from sidelane_lab.papers.command import Survival, sensitivity_table
from sidelane_lab.papers.figure_command import FIGURES, list_table, summary_table
from sidelane_lab.papers.figures import ClaimPredictions
from sidelane_lab.papers.results import compare
from sidelane_lab.studies import demo, machine_list
from sidelane_lab.studies.c3.occupancy_predict import predict as predict_pipelines
from sidelane_lab.studies.c3.occupancy_rows import occupancy_tables
from sidelane_lab.studies.c3.prediction import predicted_rows as predicted_c3
from sidelane_lab.studies.collectives import CollectiveOptions, collective_tables, predicted_rows
from sidelane_lab.studies.fused.predict import predict as predict_fused
from sidelane_lab.studies.fused.rows import fused_tables
from sidelane_lab.studies.fused.shapes import ON_GPUS
from sidelane_lab.studies.tune.command import changes_table
from sidelane_lab.traces.command import operations_table
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode
from sidelane_lab.traces.strategies import plan_trace

WIDTHS = (40, 80, 200)
RESULTS = Path(__file__).resolve().parents[2] / "results"
STUDIES = (
    "collectives",
    "lists",
    "c3",
    "phases",
    "power",
    "chain",
    "host",
    "ordinary",
    "process-group",
    "fsdp-profile",
)
# Of each study one file.
RECORDED = [
    next(path for folder in ("h200x4", "h200x2") if (path := RESULTS / folder / f"{study}.json").exists())
    for study in STUDIES
]


def printed(table: Table, width: int) -> str:
    console = rich.console.Console(file=io.StringIO(), width=width)
    console.print(table.to_rich())
    return console.file.getvalue()


def numbers(texts: list[str]) -> Counter[str]:
    return Counter(word for text in texts for word in text.split() if any(map(str.isdigit, word)))


def check(table: Table, width: int) -> None:
    text = printed(table, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    cells = [cell for line in table.lines for cell in line.cells]
    lost = numbers(cells) - numbers([text])
    assert not lost, f"not whole at {width} columns: {dict(lost)}\n{text}"
    words = " ".join(text.split())
    assert table.title.split()[0] in words and all(" ".join(note.split()) in words for note in table.notes)


def widest(table: Table) -> Table:
    """Its first and its longest line, and of each column those with the longest cell and word: they make the widths."""
    kept = {0, max(range(len(table.lines)), key=lambda place: len("".join(table.lines[place].cells)))}
    for cells in zip(*(line.cells for line in table.lines), strict=True):
        words = [max(map(len, cell.split()), default=0) for cell in cells]
        kept |= {cells.index(max(cells, key=len)), words.index(max(words))}
    return dataclasses.replace(table, lines=tuple(table.lines[place] for place in sorted(kept)))


def wider(table: Table) -> Table:
    """A table whose numbers have a digit more than any that was measured."""
    lines = [
        dataclasses.replace(line, cells=tuple(re.sub(r"^(-?)(?=\d+(\.\d+)?$)", r"\g<1>8", cell) for cell in line.cells))
        for line in table.lines
    ]
    return dataclasses.replace(table, lines=tuple(lines))


def recorded(path: Path) -> list[Table]:
    return [wider(table) for table in tables_of(files.read(path))]


def predicted_pairs(workloads: tuple[str, ...] = ("cb1_896M",)) -> list[Table]:
    machine = named("mi300x8")
    return predictions.pair_tables(machine, predicted_c3(machine, C3Options(workloads=workloads)))


def predicted_study() -> list[Table]:
    return predicted_pairs(tuple(TABLE_II))


def predicted_sizes() -> list[Table]:
    options = CollectiveOptions(collectives=(Kind.ALL_GATHER,))
    return collective_tables(predicted_rows(named("mi300x8"), options))


def predicted_among_nodes() -> list[Table]:
    machine = named("h100x8x16")
    rows = [(nbytes, nodes_times(machine, Kind.ALL_REDUCE, nbytes)) for nbytes in nodes.SIZES[:7:3]]
    return [nodes.sizes_table(machine, Kind.ALL_REDUCE, rows)]


def of_the_demo() -> list[Table]:
    data = demo.measured()
    checked = [demo.CollectiveCheck("all_gather", 36, 123_456_789, 0, 12.3456)]
    return [
        demo.checked_table(checked, 4),
        demo.overlap_table(data, *demo.overlap_percents(data)),
        demo.choice_table(demo.choices_of()),
    ]


def of_tune() -> list[Table]:
    now, before = builtin("h200x4"), builtin("h200x2")
    assert now is not None and before is not None
    return [changes_table(InForce(before, "another table"), now, now.curves)]


def of_claims() -> list[Table]:
    return [claims.measured_table(compare(named("h200x4"), RESULTS / "h200x4", ranges=False))]


def of_figures() -> list[Table]:
    values = [FIGURES[number].evaluate([RESULTS]) for number in ("000/8", "000/T1", "003/13", "004/2")]
    predictions = ClaimPredictions()
    tables = [table for one in values for table in one.tables(predictions.of(one.figure.claims))]
    return [*tables, list_table(), summary_table(values)]


def of_trace() -> list[Table]:
    moved = {"collective": "reduce_scatter", "nbytes": 1_234_567_890, "ranks": 8}
    call = TraceNode(1, "ncclDevKernel_ReduceScatter", NodeKind.COLLECTIVE, (), 1e7, **moved)
    waits = TraceNode(2, "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel<int>()", after=(1,),
                      kind=NodeKind.COMPUTE, duration_us=1e6, start_us=1e7)  # fmt: skip
    return [operations_table(plan_trace(named("h100x8"), TraceGraph("pytorch_profile.json.gz", (call, waits))))]


def of_plan() -> list[Table]:
    step = layer.Step(layer.MODELS["llama-70b-like"], 8192, 4096)
    times = training.StepTimes(12_345_678.0, 10_345_678.0, 5_345_678.0)
    planned = [sim_plan.PlannedStep(sim_plan.FSDP, strategy, times) for strategy in training.STRATEGIES]
    among = [
        sim_plan.PlannedStep(sharding, strategy, times)
        for sharding in (sim_plan.FSDP, sim_plan.HSDP)
        for strategy in training.STRATEGIES
    ]
    machines = ((named("mi300x8x16"), among), (named("mi300x8"), planned))
    return [sim_plan.plan_table([sim_plan.TrainingPlan(machine, step, tuple(ways))]) for machine, ways in machines]


def of_fused() -> list[Table]:
    shapes = {op: shapes[-1] for op, shapes in ON_GPUS.items()} | {"embedding_all_to_all": (256, 64, 70)}
    asked = [FusedOptions(ops=(op,), shapes=(shape,)) for op, shape in shapes.items()]
    return fused_tables([row for options in asked for row in predict_fused(named("h200x4"), options)])


def of_sensitivity() -> list[Table]:
    ids = tuple(f"DM-FIN-0{i}" for i in range(4))
    ends = [Survival("interference.memory", "assumed", value, value > 6, 20, 42, ids) for value in (5.0, 7.5)]
    return [sensitivity_table(ends, 27)]


def of_explain() -> list[Table]:
    options = explain.ExplainOptions(kind=Kind.ALL_GATHER, nbytes=1 << 20, machine="h200x4", ordinary=True)
    return [explain.choice_table(explain.explain(options))]


MADE: dict[str, Callable[[], list[Table]]] = {
    **{f"{path.parent.name}/{path.name}": functools.partial(recorded, path) for path in RECORDED},
    "c3 --machine PAIR": predicted_pairs,
    "c3 --machine": predicted_study,
    "collective --machine": predicted_sizes,
    "collective --machine NODES": predicted_among_nodes,
    "pipeline": lambda: occupancy_tables(predict_pipelines(named("mi300x8"), overlap.ASKED)),
    "plan": of_plan,
    "plan --trace": of_trace,
    "fused --machine": of_fused,
    "claims, sensitivity": of_sensitivity,
    "machines": lambda: [machine_list.machines_table([named(name) for name in machine_names()])],
    "claims --machine": of_claims,
    "figure": of_figures,
    "demo": of_the_demo,
    "tune": of_tune,
    "explain": of_explain,
}


@pytest.mark.parametrize("name", [long(name) if name == "figure" else name for name in MADE])
def test_nothing_is_cut(name: str) -> None:
    tables = MADE[name]()
    assert tables
    for table in tables:
        shown = widest(table)
        for width in WIDTHS:
            check(shown, width)


WIDE = Table(
    "A table",
    ("bytes", "<variant", *(f"column\n{n}" for n in range(4)), "<what happened"),
    (Line(("1K", "b2b+prelaunch", "1.25", "10000.5", "3", "4", "nothing of any interest to anybody")),),
    keys=2,
)


def test_texts_are_folded_before_columns_are_moved() -> None:
    whole = printed(WIDE, 120)
    assert "nothing of any interest to anybody" in whole
    folded = printed(WIDE, 70)
    assert folded.count("b2b+prelaunch") == 1 and "nothing of any interest to anybody" not in folded


def test_columns_below_each_other_repeat_what_a_line_is_about() -> None:
    assert printed(WIDE, 45).count("b2b+prelaunch") == 2


def test_very_narrow_tables_are_paragraphs() -> None:
    lines = [line.rstrip() for line in printed(WIDE, 28).splitlines()]
    assert " 1K  b2b+prelaunch" in lines
    assert "    column 0: 1.25" in lines and "    column 1: 10000.5" in lines


def test_pipes_get_full_width_and_json_silences_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = Table("t", ("<name", "<text"), (Line(("a", "x " * 300)),))
    terminal.tables_console().print(wide.to_rich())
    assert ("x " * 300).rstrip() in capsys.readouterr().out
    terminal.tables_console(STDOUT).print(wide.to_rich())
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("COLUMNS", "60")
    terminal.tables_console().print(wide.to_rich())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


@pytest.mark.parametrize("width", WIDTHS)
def test_info_is_folded_between_words(width: int) -> None:
    console = rich.console.Console(file=io.StringIO(), width=width)
    found = info.look(probe=False)
    info.print_findings(found, console)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert not numbers([f"{found.machine.cores} cores"]) - numbers([text])
