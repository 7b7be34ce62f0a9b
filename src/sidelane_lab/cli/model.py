"""The commands that only predict: ``sidelane machines``, ``claims``, ``pipeline``, ``plan`` and ``replay``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sidelane.cli.help import LABORATORY, LOOK, PREDICT
from sidelane.cli.output import plain_errors
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.help import GroupedCommand, how, json_option, output, what, where
from sidelane_lab.harness.options import MACHINE_NAME, loaded
from sidelane_lab.harness.parameters import VERSIONS, NameChoice, given, report_option

DEMO_MACHINE = "mi300x8"

DLRM = "dlrm"
PLANNED = ("llama-8b-like", "llama-70b-like")
"""Models of `sidelane plan`: ``MODELS`` of ``sidelane_lab.model.layer``, which would take a while to load for help."""
SHORT = {name.removesuffix("-like"): name for name in PLANNED}
SHORT |= {name.removeprefix("llama-"): full for name, full in SHORT.items()}
"""Shorter names of them: llama-70b, and 70b."""


@click.command(
    cls=GroupedCommand,
    heading=LOOK,
    examples=(
        ("sidelane machines", "names for --machine"),
        ("sidelane machines --json -", "the same as a list of objects"),
    ),
)
@json_option
def machines(json: Path | None) -> None:
    """List the machines that can be predicted, and where their numbers come from."""
    with plain_errors():
        loaded("studies.machine_list").main(json)


@click.command(
    cls=GroupedCommand,
    heading=LABORATORY,
    examples=(
        ("sidelane claims --no-ranges", "every published figure, in seconds"),
        ("sidelane claims --machine h200x4 --no-ranges", "what was measured on four H200s, in a checkout"),
        ("sidelane claims --measured", "what papers claim beside what was measured here, in a checkout"),
    ),
)
@where("--machine", type=MACHINE_NAME, default=DEMO_MACHINE, help="mi300x8 is the papers' machine; others: measured.")
@where(
    "--results",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    default=Path("results"),
    help="With a folder of measurements for each machine.",
)
@what("--version", type=click.Choice(VERSIONS), default="000", help="Version of the ConCCL paper.")
@how(
    "--ranges/--no-ranges",
    default=None,
    show_default="with them, except with --json and no --report",
    help="Also predict over the plausible values of the machine's numbers: a minute on two processors instead of "
    "seconds, some minutes with --machine of a measured one.",
)
@what(
    "--measured",
    is_flag=True,
    help="Predict nothing: print what result files say of each claim, or why they say nothing.",
)
@json_option
@report_option
def claims(
    machine: str,
    json: Path | None,
    results: Path,
    version: str,
    report: Path | None,
    ranges: bool | None,
    measured: bool,
) -> None:
    """Compare predictions with every figure that papers publish, or with your measurements.

    The exit code is 1 if a claim has no role, or if a number was fitted to a held-out claim. Wrong predictions are
    shown, not punished.
    """
    with plain_errors():
        if measured:
            if wrong := [name for name in ("version", "report", "ranges") if given(name)]:
                raise ValueError(f"--{wrong[0]} does not go with --measured (allowed=--machine, --results, --json)")
            where = results / machine if given("machine") else results
            if not where.exists():
                raise ValueError(f"--results (value={str(where)!r}, allowed=a result file, or results/ of a checkout)")
            loaded("papers.command").show_measured((where,), json)
            return
        command = loaded("papers.command")
        with_ranges = (json is None or report is not None) if ranges is None else ranges
        sys.exit(command.main(command.ClaimsOptions(machine, json, results, version, report, with_ranges)))


@click.command(
    cls=GroupedCommand,
    heading=LABORATORY,
    examples=(
        ("sidelane figure", "all figures and tables, and who predicts and measures each"),
        ("sidelane figure dma/13", "the DMA collectives paper's figure 13"),
        ("sidelane figure conccl/T2 --machine h200x4", "a table, predicted for four H200s"),
        ("sidelane figure conccl/8 --results c3.json", "beside a file of one's own"),
        ("sidelane figure --all --report out", "a page of all, in a minute"),
    ),
)
@click.argument("numbers", nargs=-1, metavar="[PAPER/FIGURE]...")
@what("--all", "everything", is_flag=True, help="All figures and tables.")
@what("--version", type=click.Choice(VERSIONS), default=None, help="Version of the ConCCL paper.")
@where(
    "--machine",
    type=MACHINE_NAME,
    show_default="the paper's own",
    help="Predict for this one: of `sidelane machines`, or a TOML or JSON file.",
)
@where(
    "--results",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    show_default="results",
    help="Result file, or a folder of them; may be repeated.",
)
@how(
    "--ranges/--no-ranges",
    default=None,
    show_default="with them for one figure",
    help="Also predict over the plausible values of the machine's numbers: up to a minute a figure.",
)
@json_option
@output(
    "--report",
    type=Written(is_folder=True),
    metavar="FOLDER",
    show_default="figures, with --json none",
    help="Write the pictures here, and a page.",
)
def figure(
    numbers: tuple[str, ...],
    everything: bool,
    version: str | None,
    machine: str | None,
    results: tuple[Path, ...],
    ranges: bool | None,
    json: Path | None,
    report: Path | None,
) -> None:
    """Draw a paper's figure: published, predicted and measured values in one picture.

    Its numbers are printed. PAPER/FIGURE is conccl/8 for figure 8 of the ConCCL paper, dma/T1 for a table of the DMA
    collectives paper; other papers are fused and overlap. 000/8 is the same by number (docs/papers.md). Where one
    of the three sources is missing, a line says why. Without a number, all are listed.
    """
    with plain_errors():
        command = loaded("papers.figure_command")
        with_ranges = (len(numbers) == 1 and json is None) if ranges is None else ranges
        asked = (numbers, everything, machine, results, version or "", with_ranges, json, report)
        command.main(command.FigureOptions(*asked))


@click.command(
    cls=GroupedCommand,
    heading=LABORATORY,
    examples=(("sidelane pipeline --machine mi300x8", "iterations that overlap, on eight MI300X"),),
)
@where("--machine", required=True, type=MACHINE_NAME, help="One of `sidelane machines`, or a TOML or JSON file.")
@json_option
@report_option
def pipeline(machine: str, json: Path | None, report: Path | None) -> None:
    """Predict iterations of a GEMM and a collective that overlap.

    By tile, number of thread blocks and priority, as the overlap paper measured them.
    """
    with plain_errors():
        loaded("papers.overlap").main(machine, report, json)


@click.command(
    cls=GroupedCommand,
    heading=PREDICT,
    examples=(
        ("sidelane plan --model 70b --machine h100x8", "I train 70 B with FSDP2 on eight H100s"),
        ("sidelane plan --model 8b --machine 2xh100x8", "8 B on my two nodes of eight"),
        ("sidelane plan --model 8b --machine h200x4 --tokens 4096", "one sequence a rank"),
        ("sidelane plan --model llama-8b --nodes 2..128", "FSDP2 and HSDP on nodes of eight H100s"),
        ("sidelane plan --model dlrm --nodes 128 --report out", "fused embeddings on 128 nodes of one MI210"),
    ),
)
@where(
    "--machine",
    type=MACHINE_NAME,
    default=None,
    show_default="with --nodes h100x8x2, of dlrm mi210x1x128",
    help="One of `sidelane machines`, or a TOML or JSON file.",
)
@where(
    "--nodes",
    metavar="N",
    default="",
    show_default="the machine's",
    help="So many nodes of the machine instead: 16, or 2,8,32, or 2..128 for powers of two.",
)
@what("--model", required=True, type=NameChoice((*SHORT, *PLANNED, DLRM)), help="Model whose layers are trained.")
@what("--fsdp", is_flag=True, help="On several nodes: only shards over all ranks, no HSDP.")
@what("--tokens", type=int, default=8192, help="Tokens of a rank in a step.")
@what("--sequence", type=int, default=4096, help="Length of a sequence in tokens.")
@what(
    "--recompute/--no-recompute",
    default=None,
    show_default="where the step would not fit",
    help="Keep only the inputs of layers, and compute layers again in the backward pass.",
)
@what("--layers", type=int, default=None, show_default="the model's", help="Number of layers.")
@json_option
@report_option
def plan(
    machine: str | None,
    nodes: str,
    model: str,
    fsdp: bool,
    tokens: int,
    sequence: int,
    layers: int | None,
    recompute: bool | None,
    json: Path | None,
    report: Path | None,
) -> None:
    """Predict a training step: memory, tokens a second, exposed communication, and the line to write.

    The answer comes first: the memory of a GPU (weights, gradients, Adam, activations; an estimate) and what would fit,
    tokens a second with Sidelane and with the vendor's library, the communication that stays exposed, and the line of
    code. A table of ways to communicate follows: the library's kernels; these on compute units of their own;
    all-gathers on copy engines, or reduce-scatters, too; out of buffers, as FSDP2 does it, or straight into the
    parameters, as Sidelane does. On several nodes with shards among all ranks, and with all shards on each node (HSDP).

    Of dlrm: a pass with embeddings fused with their all-to-all, and not, over what the fused operators paper leaves
    open, next to its 21%.
    """
    with plain_errors():
        if model == DLRM:
            for name in ("fsdp", "tokens", "sequence", "layers", "recompute"):
                if given(name):
                    raise ValueError(f"--{name} goes with a Llama, not with --model {DLRM}")
            study = loaded("papers.dlrm")
            study.main(machine or study.MACHINE, nodes, report, json)
            return
        planning = loaded("model.plan")
        if machine is None and not nodes:
            raise ValueError("plan: --machine or --nodes is needed (value=neither, allowed=--machine h100x8, ...)")
        whose = SHORT.get(model, model)
        asked = (machine or planning.MACHINE, whose, tokens, sequence, layers, fsdp, json, nodes, report, recompute)
        planning.main(planning.PlanOptions(*asked))


@click.command(
    cls=GroupedCommand,
    heading=PREDICT,
    examples=(
        ("sidelane replay rank.0.et --machine mi300x8", "serial, beside with kernels, beside with copy engines"),
        ("sidelane replay step.json --machine h200x4 --strategy conccl", "a PyTorch profile"),
    ),
)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@where("--machine", required=True, type=MACHINE_NAME, help="One of `sidelane machines`, or a TOML or JSON file.")
@what(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    show_default="serial, c3_base and conccl",
    help="May be repeated.",
)
@output(
    "--write",
    type=Written(),
    metavar="FILE",
    help="Write the run under the last strategy here, as a trace of Chakra.",
)
@output(
    "--write-recorded",
    type=Written(),
    metavar="FILE",
    help="Write TRACE as it was recorded here, as a trace of Chakra: a PyTorch profile for other simulators.",
)
@json_option
def replay(
    trace: Path,
    machine: str,
    strategies: tuple[str, ...],
    write: Path | None,
    write_recorded: Path | None,
    json: Path | None,
) -> None:
    """Replay a recorded step on a described machine, by strategy.

    TRACE is a Chakra execution trace of one rank, or with .json or .json.gz a trace of PyTorch's profiler. A trace that
    is cut, whose nodes wait for each other in a circle or for missing ones, or whose times and sizes no step has, is
    refused with the node's name.
    """
    with plain_errors():
        command = loaded("traces.command")
        command.main(command.ReplayOptions(trace, machine, strategies, write, write_recorded, json))
