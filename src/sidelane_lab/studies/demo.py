"""``sidelane demo`` without GPUs: six short acts on the terminal, and one page with all of them and with pictures.

The few measured figures beside predictions travel with the package in ``papers/data/measured.json``.
``python tests/lab/test_demo.py`` makes that file from ``results/``, and a test compares it with them.
"""

from __future__ import annotations

import dataclasses
import html
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.cli.output import write_json
from sidelane.config import BUILTIN, COMPUTE, NOTHING, Config
from sidelane.errors import Page, ProgramError, SidelaneError
from sidelane.program.builders import build
from sidelane.program.collective import Kind, all_gather
from sidelane.program.ir import Program, Wait
from sidelane.program.verify import Verification, verify
from sidelane.session import Communicator
from sidelane.sizes import format_bytes
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.cli.explain import ExplainOptions
from sidelane_lab.explain.call import explain
from sidelane_lab.harness.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    RC,
    STYLES,
    label_ends,
    save,
    size_axis,
)
from sidelane_lab.harness.launch import Rank, run_ranks
from sidelane_lab.harness.report import STYLE, inline
from sidelane_lab.harness.study import Picture
from sidelane_lab.harness.table import Line, Table, grouped
from sidelane_lab.harness.terminal import progress_console, say, tables_console
from sidelane_lab.machines.load import named
from sidelane_lab.model.panels import draw_timeline
from sidelane_lab.model.strategies import predict
from sidelane_lab.model.study import TABLE_II, percent_of_means
from sidelane_lab.pairs.workload import Workload, parse_gemm, parse_workload
from sidelane_lab.studies.c3.prediction import predicted_rows

RANKS = 4
SHARD_BYTES = 1024
COUNTS = (1, 1000, 100_000)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
ROUNDS = 4
CHOICE_BYTES = (64 << 10, 16 << 20, 1 << 30)
CHOICE_MACHINE = "h200x4"
NEXT = (
    ("sidelane c3 --machine h200x4", "every pair of the paper's study, predicted; --report FOLDER draws it"),
    ("sidelane explain all_gather 16M --machine h200x4 --commands", "what one call would do, command by command"),
    ("torchrun --nproc-per-node 2 examples/own_program.py", "a program of your own, proved and run (in a checkout)"),
)
OVERLAP_NOTE = (
    "100: both at once take as long as the longer of the two alone, by the fastest collective that was measured. 0: as "
    "long as one after the other. Below 0: longer than that. The paper's own column counts by RCCL's collective. On "
    "H200 the tensors are in symmetric memory, and NCCL's priority and partitions were not measured. Eight pairs of a "
    "GEMM and a collective of 512 and 896 MiB on H200, thirty on MI300X."
)

PREDICTED, MEASURED_LIKE = "mi300x8", "h200x4"
PAPER = {"c3_base": 21.0, "c3_sp": 42.0, "conccl": 66.0, "conccl_rp": 72.0}
"""Percent of ideal in the ConCCL paper, sections IV-C, V-A, VI-D and VI-F, on eight MI300X.

The paper takes RCCL's collective for its ideal, which the model has 2 to 6% slower there than the fastest one.
"""

NAMES = {
    "c3_base": "NCCL / RCCL kernels,\nlaunched second",
    "c3_sp": "the same,\nlaunched first",
    "nccl_ce": "NCCL on\ncopy engines",
    "conccl": "Sidelane\n(copy engines)",
    "conccl_rp": "Sidelane, GEMM\non fewer units",
    "auto": "Sidelane\n(its choice)",
}
LINES = {"nccl": "NCCL at its best", "symm_mem": "PyTorch symmetric memory", "auto": "Sidelane"}
SHOWN_PAIR = "cb1_896M"


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """A program and its proof, and what the proof says when a command is left out.

    Attributes:
        program: a right one, with its ``verification``, and the ``seconds`` that this took.
        left_out: the command that the wrong one lacks, in words.
        refusal: the first thing that is wrong with the wrong one.
    """

    program: Program
    verification: Verification
    seconds: float
    left_out: str
    refusal: str


def prove(ranks: int = 2) -> Proof:
    """Prove an all-gather, then try it without the wait for the peer's output to be free."""
    program = build(all_gather([SHARD_BYTES] * ranks), "b2b")
    began = time.perf_counter()
    verification = verify(program)
    seconds = time.perf_counter() - began
    first = program.queues[0]
    index = next(index for index, command in enumerate(first.commands) if isinstance(command, Wait))
    mistaken = dataclasses.replace(first, commands=(*first.commands[:index], *first.commands[index + 1 :]))
    wrong = dataclasses.replace(program, queues=(mistaken, *program.queues[1:]))
    try:
        verify(wrong)
    except ProgramError as error:
        refusal = next(line for line in error.violations if "race" in line)
    else:
        raise AssertionError("verify accepts a program without its handshake")
    left_out = f"rank {first.rank} {first.engine}, command {index}"
    return Proof(program, verification, seconds, left_out, refusal)


@dataclasses.dataclass(slots=True)
class CollectiveCheck:
    """The calls of one collective on rank 0, the bytes that were compared, and the outputs that were wrong."""

    name: str
    calls: int = 0
    nbytes: int = 0
    wrong: int = 0
    seconds: float = 0.0

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Count an output."""
        self.nbytes += found.nbytes
        self.wrong += not torch.equal(found, expected)


def check(rank: Rank) -> list[CollectiveCheck]:
    """Make all calls on one rank. Ranks' values differ by rank, round and element, and are small: sums are exact."""
    found: dict[str, CollectiveCheck] = {}
    with Communicator(device=rank.device, config=Config(timeout_s=60, profile=BUILTIN)) as comm:
        n, me = comm.world_size, comm.rank
        for number, (dtype, count) in enumerate((dtype, count) for dtype in DTYPES for count in COUNTS):
            for seed in range(number, number + ROUNDS):
                root = seed % n
                shards = [_values(of, count, seed, dtype) for of in range(n)]
                whole = [_values(of, n * count, seed, dtype) for of in range(n)]
                total = torch.stack(whole).sum(0).to(dtype)
                own = slice(me * count, (me + 1) * count)
                output, part = torch.empty(n * count, dtype=dtype), torch.empty(count, dtype=dtype)
                sent, given = whole[me].clone(), whole[me] if me == root else None
                # What to call, where the result is to be, and what it must be; None where this rank gets none.
                cases: dict[str, tuple[Callable[[], object], torch.Tensor, torch.Tensor | None]] = {
                    "all_gather": (partial(comm.all_gather, output, shards[me]), output, torch.cat(shards)),
                    "all_to_all": (
                        partial(comm.all_to_all, output, whole[me]),
                        output,
                        torch.cat([data[own] for data in whole]),
                    ),
                    "reduce_scatter": (partial(comm.reduce_scatter, part, whole[me]), part, total[own]),
                    "all_reduce": (partial(comm.all_reduce, whole[me], output=output), output, total),
                    "broadcast": (partial(comm.broadcast, sent, root=root), sent, whole[root]),
                    "scatter": (partial(comm.scatter, part, given, root=root), part, whole[root][own]),
                    "gather": (
                        partial(comm.gather, output if me == root else None, shards[me], root=root),
                        output,
                        torch.cat(shards) if me == root else None,
                    ),
                }
                for name, (call, target, expected) in cases.items():
                    row = found.setdefault(name, CollectiveCheck(name))
                    began = time.perf_counter()
                    call()
                    row.calls += 1
                    if expected is not None:
                        row.compare(target, expected)
                    row.seconds += time.perf_counter() - began
        wrong = torch.tensor([row.wrong for row in found.values()])
        comm.all_reduce(wrong)
    for row, count in zip(found.values(), wrong.tolist(), strict=True):
        row.wrong = int(count)
    return list(found.values())


def _values(of: int, length: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(length) * 7 + 11 * of + seed) % 13).to(dtype)


def main(report: Path, ranks: int | None = None, json: Path | None = None) -> None:
    """Show everything, and write ``report/index.html``.

    Args:
        report: folder of the page.
        ranks: processes that exchange real bytes.
        json: file for the figures, or ``written.STDOUT``; None writes none.
    """
    console, progress, began = tables_console(json), progress_console(), time.perf_counter()
    console.print("\n[bold]1. A collective is a program.[/] Two ranks gather, each by its copy engines:\n")
    proof = prove()
    console.print(str(proof.program), highlight=False, markup=False)
    console.print(f"\n{proof_text(proof)}\n")
    told, refusal = mistake_text(proof).split("\n")
    console.print("[bold]2. A mistake is refused.[/]", told)
    say(console, refusal.strip(), indent=2)
    console.print()
    count = RANKS if ranks is None else ranks
    console.print(f"[bold]3. Real bytes.[/] Every collective between {count} processes of this machine, checked:")
    with progress.status("starting processes"):
        checked = run_ranks(check, count)
    assert checked is not None
    console.print(checked_table(checked, count).to_rich())
    with progress.status("simulating, drawing"):
        data = measured()
        pictures = draw(data, report)
        percents = overlap_percents(data)
    console.print("[bold]4. On GPUs.[/] What communication costs beside a GEMM that needs all compute units:")
    choices = choices_of()
    tables = [overlap_table(data, *percents), choice_table(choices)]
    console.print(tables[0].to_rich())
    console.print("[bold]5. Sidelane chooses.[/] What it takes for an all-gather of each size, by measured times:")
    console.print(tables[1].to_rich())
    page = write(report, proof, [checked_table(checked, count), *tables], pictures, data)
    console.print(f"[bold]6. All of it on one page:[/] {page}   ({time.perf_counter() - began:.0f} s)\n")
    for command, what in NEXT:
        say(console, command, indent=2)
        say(console, what, indent=6, style="dim")
    if json is not None:
        write_json(json, figures_of(proof, checked, percents, choices))
    if wrong := [row.name for row in checked if row.wrong]:
        raise SidelaneError(f"demo: rows are WRONG: {', '.join(wrong)}", page=Page.COMMANDS)


def figures_of(
    proof: Proof,
    checked: Sequence[CollectiveCheck],
    percents: Sequence[dict[str, float]],
    choices: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return what the demo shows, as one JSON object."""
    names = ("mi300x8_predicted", "h200x4_measured", "h200x4_predicted")
    return {
        "study": "demo",
        "proof": {"commands": proof.verification.commands, "seconds": proof.seconds, "refused": proof.refusal},
        "checked": [dataclasses.asdict(row) for row in checked],
        "percent_of_ideal": {"mi300x8_paper": PAPER, **dict(zip(names, percents, strict=True))},
        "choices": list(choices),
    }


def proof_text(proof: Proof) -> str:
    """Say what was proved."""
    verification = proof.verification
    return (
        f"Proved in {1e3 * proof.seconds:.1f} ms: {verification.commands} commands, back to back, by ranks that run "
        "ahead of each other: no race, no deadlock, every byte of every output."
    )


def mistake_text(proof: Proof) -> str:
    """Say what the proof says without a command."""
    return f"Without {proof.left_out}, the wait for the peer's output to be free, verify says:\n  {proof.refusal}"


def checked_table(rows: Sequence[CollectiveCheck], ranks: int) -> Table:
    """Make a table of the calls."""
    lines = [
        Line((row.name, str(row.calls), f"{row.nbytes / 1e6:.1f}", str(row.wrong), f"{row.seconds:.2f}"))
        for row in rows
    ]
    title = f"Calls among {ranks} CPU processes"
    note = "float32, bfloat16 and int64, of 1 to 100,000 elements a rank, on rank 0; wrong: on all ranks"
    return Table(title, ("<collective", "calls", "MB compared", "wrong", "s"), tuple(lines), (note,))


def overlap_table(
    data: dict[str, Any], predicted: dict[str, float], found: dict[str, float], again: dict[str, float]
) -> Table:
    """Make a table of percents of ideal, predicted and measured."""
    lines = []
    for strategy, name in NAMES.items():
        cells = [predicted.get(strategy), PAPER.get(strategy), again.get(strategy), found.get(strategy)]
        shown = ("" if value is None else f"{value:.0f}" for value in cells)
        lines.append(Line((name.replace("\n", " "), *shown), best=strategy == "auto"))
    machines = ("8 MI300X\npredicted", "8 MI300X\npaper", "4 H200\npredicted", "4 H200\nmeasured")
    columns = ("<how the bytes travel", *machines)
    source = data["overlap_source"]
    notes = (OVERLAP_NOTE, f"Measured: {source['file']}, {source['date']}, commit {source['commit']}.")
    return Table("Percent of ideal", columns, tuple(lines), notes)


def choices_of() -> list[dict[str, Any]]:
    """Return what a call takes by itself, by size and by what runs beside it."""
    chosen = []
    for nbytes in CHOICE_BYTES:
        for beside in (NOTHING, COMPUTE):
            asked = ExplainOptions(
                kind=Kind.ALL_GATHER, nbytes=nbytes, machine=CHOICE_MACHINE, beside=beside, captured=True
            )
            choice = explain(asked).choice
            taken = {"implementation": choice.candidate.implementation, "variant": choice.candidate.variant}
            chosen.append({"bytes": nbytes, "beside": beside, **taken, "expected_us": choice.table[0][1]})
    return chosen


def choice_table(choices: Sequence[dict[str, Any]]) -> Table:
    """Make a table of what is taken, in words."""
    lines = []
    for choice in choices:
        beside = "nothing" if choice["beside"] == NOTHING else "a GEMM"
        how = "a kernel" if choice["implementation"] == "sm" else "copy engines"
        time_us = "" if choice["expected_us"] is None else f"{choice['expected_us']:.1f}"
        lines.append(Line((format_bytes(choice["bytes"]), beside, how, choice["variant"], time_us)))
    columns = ("bytes", "<beside it", "<runs on", "<variant", "us\nexpected")
    note = "by times that were measured on four H200s; `sidelane tune` measures yours"
    return Table("all_gather in a CUDA graph on four H200s", columns, tuple(lines), (note,), keys=2)


def write(
    folder: Path, proof: Proof, tables: Sequence[Table], pictures: Sequence[Picture], data: dict[str, Any]
) -> Path:
    """Write the page, which holds everything it shows."""
    checked, overlap, choice = tables
    images = {
        picture.name: f'<img alt="{html.escape(picture.text)}" '
        f'src="data:image/svg+xml;base64,{inline(folder, picture)}">'
        for picture in pictures
    }
    source = data["gather_source"]
    commands = "".join(f"<li><code>{html.escape(c)}</code><br>{html.escape(what)}</li>" for c, what in NEXT)
    parts = [
        "<h1>Sidelane</h1><p>Multi-GPU communication that disappears behind computation: on the GPUs' copy engines, "
        "with no compute units at all.</p>",
        f"<h2>How much disappears</h2>{images['overlap']}{overlap.to_html()}",
        "<h2>Why</h2><p>A collective that runs as a kernel takes compute units, caches and its turn from the GEMM. "
        f"Copy engines take none.</p>{images['timeline-c3_base']}{images['timeline-conccl']}",
        f"<h2>Alone, too</h2>{images['all-gather']}<p class=note>{html.escape(source['file'])}, {source['date']}, "
        f"commit {source['commit']}.</p>{choice.to_html()}",
        "<h2>Why trust it</h2><p>A collective is a program: which engine of which rank does what, in which order. It "
        f"is proved before it runs. Two ranks gather:</p><pre>{html.escape(str(proof.program))}</pre>"
        f"<p>{html.escape(proof_text(proof))}</p><p>{html.escape(mistake_text(proof))}</p>{checked.to_html()}",
        f"<h2>Try next</h2><ul>{commands}</ul>",
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Sidelane</title><style>{STYLE}</style>"
    index = folder / "index.html"
    index.write_text(f"{head}{''.join(parts)}</html>\n", encoding="utf-8")
    return index


def measured() -> dict[str, Any]:
    """Read ``overlaps`` and ``gathers``, and where each is from: ``overlap_source``, ``gather_source``."""
    data = json.loads(files("sidelane_lab.papers.data").joinpath("measured.json").read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def draw(data: dict[str, Any], folder: Path) -> list[Picture]:
    """Draw all into a folder, which is made if need be."""
    with mpl.rc_context(RC):
        pictures = [_overlap(data, folder), _gathers(data, folder)]
    return [*pictures, *_timelines(folder)]


def overlap_percents(data: dict[str, Any]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return mean percents of ideal by strategy: predicted for MI300X, measured and predicted for H200."""
    pairs = predicted_rows(named(PREDICTED), C3Options(workloads=tuple(TABLE_II), strategies=tuple(PAPER)))
    predicted = {}
    for strategy, alike in grouped(pairs, lambda row: row.strategy, ordered=False):
        speedups, ideals = ([getattr(row, name) or 0.0 for row in alike] for name in ("speedup", "ideal"))
        predicted[strategy] = 100 * percent_of_means(speedups) / percent_of_means(ideals)
    found: dict[str, list[float]] = {}
    again: dict[str, list[float]] = {}
    machine = named(MEASURED_LIKE)
    for gemm, kind, nbytes, strategy, percent in data["overlaps"]:
        found.setdefault(strategy, []).append(percent)
        if strategy in ("c3_base", "conccl"):
            predicted_too = predict(machine, Workload(parse_gemm(gemm), Kind(kind), nbytes), strategy).percent
            assert predicted_too is not None, "the pairs that were measured have something to gain"
            again.setdefault(strategy, []).append(predicted_too)
    return (
        predicted,
        {strategy: statistics.fmean(values) for strategy, values in found.items()},
        {strategy: statistics.fmean(values) for strategy, values in again.items()},
    )


def _overlap(data: dict[str, Any], folder: Path) -> Picture:
    predicted, measured, again = overlap_percents(data)
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, predicted, PAPER, "Predicted for 8 x MI300X", "measured in the paper")
    _bars(right, measured, again, f"Measured on {data['overlap_source']['machine']}", "predicted by the model")
    left.set_ylabel("percent of ideal")
    title = "How much of a collective disappears behind a GEMM"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    text = "Mean percent of ideal by strategy, for eight MI300X as predicted and four H200 as measured."
    return save(figure, "overlap", title, text, folder)


def _bars(axes: Axes, bars: dict[str, float], dots: dict[str, float], title: str, dotted: str) -> None:
    order = [name for name in NAMES if name in bars]
    for place, name in enumerate(order):
        axes.bar(place, bars[name], 0.6, color=COLOURS.get(name, BLUE))
        above = max(bars[name], 0.0, *([dots[name]] if name in dots else []))
        axes.text(place, above + 4, f"{bars[name]:.0f}", ha="center", fontsize=9, fontweight="bold")
    marked = [place for place, name in enumerate(order) if name in dots]
    axes.plot(marked, [dots[order[place]] for place in marked], "D", color=BLACK, markersize=5, label=dotted)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.axhline(100, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(order)), [NAMES[name] for name in order], fontsize=8)
    axes.set_ylim(-25, 150)
    axes.set_title(title)
    axes.legend(fontsize=8, loc="upper left", frameon=False)


def _gathers(data: dict[str, Any], folder: Path) -> Picture:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    ends: list[tuple[float, float, str, str]] = []
    sizes: Sequence[int] = ()
    for index, (name, by_size) in enumerate(data["gathers"].items()):
        times = {int(nbytes): us for nbytes, us in by_size.items()}
        sizes = sorted(times)
        line, mark = STYLES[index]
        look: Any = {"linestyle": line, "marker": mark, "markersize": 4, "color": COLOURS[name], "linewidth": 1.5}
        axes.plot(sizes, [times[n] for n in sizes], **look)
        ends.append((sizes[0], times[sizes[0]], LINES[name], COLOURS[name]))
    axes.set_yscale("log")
    size_axis(axes, sizes)
    axes.set_ylabel("us, in a CUDA graph")
    axes.yaxis.set_label_position("right")
    title = f"all_gather by size, measured on {data['gather_source']['machine']}"
    axes.set_title(title)
    label_ends(axes, ends, "left")
    text = "Time of an all-gather by gathered size: NCCL, PyTorch's symmetric memory and Sidelane."
    return save(figure, "all-gather", title, text, folder)


def _timelines(folder: Path) -> list[Picture]:
    workload = parse_workload(SHOWN_PAIR)
    machine = named(PREDICTED)
    shown = {"c3_base": "the library's kernels", "conccl": "copy engines"}
    predicted = {strategy: predict(machine, workload, strategy, record=True) for strategy in shown}
    end_us = max(prediction.time_us for prediction in predicted.values())
    made = []
    for strategy, prediction in predicted.items():
        size, percent = format_bytes(workload.nbytes), f"{prediction.percent or 0:.0f}% of ideal"
        title = f"GEMM and all_gather of {size} with {shown[strategy]}: {percent}, predicted for MI300X"
        draw_timeline(prediction.timeline, title, folder, f"timeline-{strategy}", end_us=end_us)
        made.append(Picture(f"timeline-{strategy}", title, title))
    return made
