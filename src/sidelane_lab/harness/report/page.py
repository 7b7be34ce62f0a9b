"""A study for readers: tables on the terminal, and a folder with one page, pictures and the figures themselves.

The page ``index.html`` holds everything it shows, so that it can be sent as one file; ``report.md`` says the same in
Markdown, with the pictures next to it.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

import rich.console

from sidelane.cli.table import Table
from sidelane_lab.harness.report.drawing import Picture
from sidelane_lab.harness.report.pictures import draw
from sidelane_lab.harness.report.tables import tables_of
from sidelane_lab.harness.results import files as result_files
from sidelane_lab.harness.results.files import Results
from sidelane_lab.studies.c3.tables import too_few_cores

TITLES = {
    "collectives": "Collectives by size and implementation",
    "c3": "Computation and communication side by side",
    "occupancy": "Pipelined iterations by the shape of the GEMM",
    "heuristics": "Heuristics against the best of a sweep",
    "isolated": "GEMMs and collectives alone",
    "phases": "Where one transfer and one collective spend their time",
    "power": "Power and energy of collectives",
    "chain": "From a GEMM to a collective and back",
    "host": "What a call takes the host",
    "fused": "Fused operators",
    "gemms": "GEMMs of language models, alone",
    "fsdp": "Training steps with FSDP2, by who communicates",
    "soak": "Random calls, with faults among them",
    "ordinary": "Collectives on ordinary memory",
    "process_group": "Calls of torch.distributed, by the process group",
}
LEGENDS = {
    "collectives": "Times are medians over rounds of the slowest rank; bus bandwidth is defined as in nccl-tests. "
    "The fastest of each size is bold. Every output was compared with a reference in the same run.",
    "c3": "speedup = (GEMM alone + best collective alone) / together; ideal = the same sum / the longer of the two; "
    "% of ideal = 100 (speedup - 1) / (ideal - 1). The best collective is the fastest of every implementation "
    "measured; '% of ideal (library)' takes NCCL's (Gloo's on CPUs) in its place, as the papers do.",
    "occupancy": "Iterations of a GEMM and a collective: the collective of one next to the GEMMs of the following. "
    "normalised = overlapped / sequential, both in the same shape; overlap rate: share of the collectives' time during "
    "which a GEMM ran, by time stamps of the device. resident: blocks of the GEMM that a compute unit holds. Medians "
    "over rounds of the slowest rank; the least time of each pair is bold.",
    "heuristics": "launch_order: who of a GEMM and a collective is first, by workgroups; launch_order_3: of three "
    "kernels; partition: units for the collective, by look-up tables; spared: units that a GEMM beside copy engines "
    "does without; auto: the strategy, over all. Right: within half a percent of the best of the sweep. Reasons are in "
    "the file.",
    "isolated": "Times over that with all compute units, by the units that a GEMM does without or a collective has; "
    "split: green contexts, which shut the others off; target, carve_out: what cuBLAS and torch are asked for; grid: a "
    "Triton GEMM with fewer blocks; threads: of a CPU rank. Medians over rounds of the slowest rank.",
    "phases": "control: the host submits; schedule: until the first byte may move, entry handshake included; copy: "
    "until the last byte has arrived, own chunk included; sync: exit handshake, and until the host knows. With one "
    "handshake, that is schedule, and 'slot' the part of copy in front of it. Medians of "
    "single calls of the slowest rank; 'no stamps' is the whole call without looking, 'host' what the call takes the "
    "host. Definitions: docs/lab/phases.md.",
    "power": "Collectives back to back; watts by the GPUs' energy counters, 'read/count' is the mean of power readings "
    "over that. The least energy of each size is bold. Method: docs/lab/power.md.",
    "chain": "A producer GEMM, an all-gather of what it made, a consumer GEMM, on one stream; 'between' is the chain "
    "less both GEMMs alone. Medians over rounds of the slowest rank; the fastest of each size is bold. "
    "Prelaunched: the copies are armed ahead of the producer and fired behind it. The first table has the fastest of "
    "NCCL (Gloo on CPUs) over that of Sidelane, bold where ours is ahead; launched alike, but prelaunched calls "
    "against eager ones. Ours is the best of more ways than theirs; 'auto' is the one that nobody picked afterwards.",
    "host": "Microseconds from the begin of a repeated call until it returns, behind a device that spins, so that no "
    "call waits for it. Medians over batches of calls of the slowest rank; 'best' is the fastest batch of any rank. A "
    "trigger fires a prelaunched call, which was armed before, uncounted. The least of each size is bold.",
    "fused": "An operator in one kernel, and the same unfused: with the process group's collective (NCCL, on CPUs "
    "Gloo), and with Sidelane's. Medians over rounds of the slowest rank; the fastest of each shape is bold. bound: "
    "the longer of the computation and the collective alone. Outputs were compared with float64, before and after.",
    "gemms": "A linear layer of a model, alone: the vendor's GEMM in a graph of calls that each have matrices of their "
    "own, more than the last-level cache holds. GB/s: the fewest bytes that it can move over its time.",
    "fsdp": "A forward and a backward through layers that FSDP2 shards. exposed: a step less one whose collectives "
    "move nothing (compute_only), in the same round; recovered: of the exposed time of NCCL (Gloo on CPUs). Medians "
    "over rounds of the slowest rank; the least of each case is bold. Loss, gradient norm and gradients were compared "
    "with those of NCCL. compute_only still copies shards in and parameters out; compute_only_straight copies none "
    "out. Where the rest goes (with --profile): the stream of the computation in one step of the first rank, less that "
    "of compute_only_straight; GEMMs by transfers run next to a collective or a copy between peers for half of their "
    "time and more; waits are pauses of the stream.",
    "soak": "A call counts once for all of its ranks, each of which compared every byte that it must get, what lies "
    "around it, and what it must not touch. Refusals: wrong calls of one rank or all, and calls that differed between "
    "ranks. Endings but 'good' are faults, of which every other rank must hear in time, and of whose they are.",
    "process_group": "The same program on the group of NCCL (Gloo on CPUs) and on Sidelane's. learned: ordinary ones, "
    "with map_memory=learn; pooled: made in a sidelane.pool. Times of GPUs are the device's, medians over rounds of "
    "the slowest rank; the fastest is bold. host: until a repeated call returns, behind a device that spins. async: "
    "waited for at once; graph: calls of one CUDA graph. First use: from making the group to the end of its first "
    "calls, and from a sharded model to the end of its first step, with an NCCL (Gloo) that is warm.",
    "ordinary": "Sidelane's auto on tensors that peers reach in different ways, and NCCL (Gloo on CPUs) on ordinary "
    "ones. Medians over rounds of the slowest rank; the fastest is bold. 'library over it': the library's time over "
    "that of the line. Next to a GEMM the collective is released first, on its own stream; % of ideal is the strict "
    "one of the C3 study, with the fastest collective of the table. Tensors that change: rotating, eight pairs in "
    "turn; missed, a call at another address behind calls that went ahead; new_address, in one segment; new_segment, "
    "memory that no peer has seen. host: until a call returns, with an idle device; on CPUs a call returns when it is "
    "done. The notes are what Communicator.last_choice says.",
}
CPU_WARNING = (
    "Ranks were CPU processes: real bytes through shared memory, moved by one thread for each engine. "
    "These figures show that the machinery works. They do not predict what GPUs do."
)
PAGE = "index.html"
"""What to open in the folder of a report."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1180px; margin: 2em auto; padding: 0 1em }
h1 { margin-bottom: 0 } h2 { margin-top: 2em; border-bottom: 1px solid #bbb }
h3 { margin: 1.6em 0 .4em; font-size: 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th { border-bottom: 1px solid #444 } th, td { padding: .15em .7em; text-align: right } .l { text-align: left }
tr.best td { font-weight: 600; background: #e8f1f8 } tr.rule td { border-bottom: 1px solid #ccc }
.warn { background: #fff3d6; padding: .6em 1em } .about td { text-align: left } img { max-width: 100%; margin: .6em 0 }
code { background: #f2f2f2; padding: .1em .3em } .note { color: #555; font-size: 13px }
"""


def show(results: Results, console: rich.console.Console) -> None:
    """Print the tables of a study."""
    for table in tables_of(results):
        console.print(table.to_rich())
    console.print(LEGENDS[results.study], style="dim")
    if results.on_cpu:
        console.print(_warning(results), style="yellow")


def write(directory: str | Path, studies: Results | Sequence[Results], further: Sequence[Picture] = ()) -> Path:
    """Write the report of one or more studies.

    Args:
        directory: made if need be; files of earlier reports that carry the same names are replaced.
        studies: at least one, of different names.
        further: pictures of the last of them that lie there already.

    Returns:
        The page, ``directory/index.html``.

    Raises:
        ValueError: no study, or two of one name.
    """
    chosen = [studies] if isinstance(studies, Results) else list(studies)
    names = [results.study for results in chosen]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"report.write: studies of different names are needed, at least one (value={names})")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    page, text = [], []
    for results in chosen:
        result_files.write(folder / f"{results.study}.json", results)
        pictures, tables = draw(results, folder), tables_of(results)
        pictures += further if results is chosen[-1] else ()
        page.append(_html_section(results, tables, pictures, folder))
        text.append(_markdown_section(results, tables, pictures))
    (folder / "report.md").write_text("# Sidelane report\n\n" + "\n".join(text), encoding="utf-8")
    index = folder / PAGE
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Sidelane report</title><style>{STYLE}</style>"
    index.write_text(f"{head}<h1>Sidelane report</h1>{''.join(page)}</html>\n", encoding="utf-8")
    return index


def _warning(results: Results) -> str:
    """What readers must know about figures from CPU processes."""
    return " ".join(filter(None, (CPU_WARNING, too_few_cores(results))))


def _about(results: Results) -> list[tuple[str, str]]:
    where = "CPU processes" if results.on_cpu else "GPUs"
    return [
        ("machine", f"{results.machine}: {results.device}"),
        ("ranks", f"{results.ranks} {where}"),
        ("command", results.command),
        ("date", results.date),
        ("commit", results.commit),
        ("software", ", ".join(f"{name} {version}" for name, version in results.software.items())),
    ]


def _html_section(results: Results, tables: Sequence[Table], pictures: Sequence[Picture], folder: Path) -> str:
    about = "".join(
        f"<tr><td>{html.escape(name)}</td><td>"
        + (f"<code>{html.escape(value)}</code>" if name == "command" else html.escape(value))
        + "</td></tr>"
        for name, value in _about(results)
    )
    warning = f"<p class=warn>{html.escape(_warning(results))}</p>" if results.on_cpu else ""
    images = "".join(
        f'<img alt="{html.escape(picture.text)}" src="data:image/svg+xml;base64,{inline(folder, picture)}">'
        for picture in pictures
    )
    return (
        f"<h2>{html.escape(TITLES[results.study])}</h2><table class=about>{about}</table>{warning}{images}"
        f"<p class=note>{html.escape(LEGENDS[results.study])}</p>{''.join(table.to_html() for table in tables)}"
    )


def inline(folder: Path, picture: Picture) -> str:
    """The picture as base64, for a page that holds all it shows."""
    return base64.b64encode((folder / f"{picture.name}.svg").read_bytes()).decode()


def _markdown_section(results: Results, tables: Sequence[Table], pictures: Sequence[Picture]) -> str:
    about = "\n".join(f"- {name}: {f'`{value}`' if name == 'command' else value}" for name, value in _about(results))
    warning = [f"> {_warning(results)}"] if results.on_cpu else []
    images = [f"![{picture.text}]({picture.name}.png)" for picture in pictures]
    parts = [f"## {TITLES[results.study]}", about, *warning, *images, LEGENDS[results.study]]
    return "\n\n".join([*parts, *(table.to_markdown() for table in tables)]) + "\n"
