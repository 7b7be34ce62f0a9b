"""``sidelane demo`` without GPUs: six short acts on the terminal, and one page with all of them."""

from __future__ import annotations

import dataclasses
import html
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sidelane.cli.output import write_json
from sidelane.config import BUILTIN, COMPUTE, NOTHING, Config
from sidelane.errors import ProgramError
from sidelane.program.builders import build
from sidelane.program.collective import Kind, all_gather
from sidelane.program.ir import Program, Wait
from sidelane.program.verify import Verification, verify
from sidelane.session import Communicator
from sidelane.sizes import format_bytes
from sidelane_lab.cli.explain import ExplainOptions
from sidelane_lab.explain.call import explain
from sidelane_lab.harness.launch import Rank, run_ranks
from sidelane_lab.harness.report import STYLE, inline
from sidelane_lab.harness.study import Picture
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress_console, say, tables_console
from sidelane_lab.studies.demo import figures

RANKS = 4
SHARD_BYTES = 1024
COUNTS = (1, 1000, 100_000)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
ROUNDS = 4
CHOICE_BYTES = (64 << 10, 16 << 20, 1 << 30)
CHOICE_MACHINE = "h200x4"
NEXT = (
    ("sidelane c3 --machine mi300x8", "every pair of the paper's study, predicted; --report FOLDER draws it"),
    ("sidelane explain all_gather 16M --machine h200x4 --commands", "what one call would do, command by command"),
    ("torchrun --nproc-per-node 2 examples/own_program.py", "a program of your own, proved and run (in a checkout)"),
)
OVERLAP_NOTE = (
    "100: both at once take as long as the longer of the two alone, by the fastest collective that was measured. 0: as "
    "long as one after the other. Below 0: longer than that. The paper's own column counts by RCCL's collective. On "
    "H200 the tensors are in symmetric memory. Eight pairs of a GEMM and a collective of 512 and 896 MiB on H200, "
    "thirty on MI300X."
)


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
        data = figures.measured()
        pictures = figures.draw(data, report)
        percents = figures.overlap_percents(data)
    console.print("[bold]4. On GPUs.[/] What communication costs next to a GEMM that needs all compute units:")
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
        "percent_of_ideal": {"mi300x8_paper": figures.PAPER, **dict(zip(names, percents, strict=True))},
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
    for strategy, name in figures.NAMES.items():
        cells = [predicted.get(strategy), figures.PAPER.get(strategy), again.get(strategy), found.get(strategy)]
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
