"""Commands that predict alone: ``sidelane machines``, ``claims``, ``figure``, ``pipeline`` and ``plan``."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import click

from sidelane.cli.help import LABORATORY, LOOK, PREDICT
from sidelane.cli.output import plain_errors
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.help import WHAT, WHERE, GroupedCommand, how, json_option, output, what, where
from sidelane_lab.harness.options import (
    MACHINE_NAME,
    CommandOptions,
    command,
    count,
    loaded,
    option,
    shared,
    values_of,
    word,
)
from sidelane_lab.harness.parameters import VERSIONS, given, report_option, size


@click.command(
    cls=GroupedCommand,
    heading=LOOK,
    hints={"": "it takes no name, and lists all machines"},
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
@where("--machine", type=MACHINE_NAME, default="mi300x8", help="mi300x8 is the papers' machine; others: measured.")
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
        comparison = loaded("papers.command")
        with_ranges = (json is None or report is not None) if ranges is None else ranges
        sys.exit(comparison.main(comparison.ClaimsOptions(machine, json, results, version, report, with_ranges)))


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
    help="Also predict over the plausible values of the machine's numbers: 6 to 60 s of CPU a figure; 3 to 6 without.",
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
        drawing = loaded("papers.figure_command")
        with_ranges = (len(numbers) == 1 and json is None) if ranges is None else ranges
        asked = (numbers, everything, machine, results, version or "", with_ranges, json, report)
        drawing.main(drawing.FigureOptions(*asked))


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


SHARDINGS = ("all", "FSDP2", "HSDP", "DDP")
OPTIMIZERS = ("adamw", "adamw-8bit", "muon", "sgd-momentum", "sgd")


def _number(context: click.Context, flag: click.Parameter, value: Any) -> Any:
    if re.match("-|0+$", str(value).strip()):
        raise click.BadParameter(f"must be at least 1 (value={value})")
    return size(context, flag, value)


NUMBER: Any = {"callback": _number, "metavar": "N"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(CommandOptions):
    """Predict a training step, or serving: does it fit, how fast is it, what to write.

    The answer comes first: the memory of a GPU by part and what is left of it, or what would fit; the time of a step,
    tokens a second, the share of the GPUs' peak; the communication that stays exposed, with Sidelane and with the
    vendor's library; the line of code; how sure this is; what is not modelled. A table of the ways to shard and to
    communicate follows: the library's kernels, all-gathers on copy engines, or reduce-scatters, too; out of buffers, as
    FSDP2 does it, or straight into the parameters, as Sidelane does.

    MODEL is a preset (7B, "Llama 3.1 8B", Qwen3-32B, Mixtral-8x7B, DeepSeek-V3), a config.json of Hugging Face or its
    folder, or layers=32,hidden=4096,feed=14336,heads=32,kv_heads=8. Nothing is downloaded.

    With --trace the step is a recorded one: which collectives are exposed and which kernel waits, the change that gives
    most, a strategy for each operation.
    """

    examples = (
        ("sidelane plan --model 7B --machine 8xh100", "a 7B model with FSDP2 on eight H100s"),
        ("sidelane plan --model 70B --machine 2x8xh100 --tp 8", "70 B on two nodes, tensor parallel in each"),
        ("sidelane plan --model Mixtral-8x7B --machine 8xh200 --ep 8", "experts on all ranks"),
        ("sidelane plan --model ./config.json --machine DGX-H100", "my model, from its configuration"),
        ("sidelane plan --model Qwen3-32B --machine 2xh200 --serve", "serving"),
        ("sidelane plan --model 8b --nodes 2..128", "FSDP2, HSDP and DDP on nodes of eight H100s"),
        ("sidelane plan --trace step.json", "my own step, on the machine that it was recorded on"),
    )

    machine: str = option(
        *("--machine", "", 'Such as 8xh100, "8 x H100 SXM", DGX-H100, 2x8xh200, 256xmi300x, or a TOML or JSON file.'),
        group=WHERE,
        type=MACHINE_NAME,
        show_default="with --nodes h100x8x2, with --trace the recorded",
    )
    nodes: str = option(
        *("--nodes", "", "So many nodes of the machine instead: 16, or 2,8,32, or 2..128 for powers of two."),
        group=WHERE,
        metavar="N",
        show_default="the machine's",
    )
    model: str = option("--model", "", "Model that is trained or served.", show_default=False)
    trace: Path | None = option(
        *("--trace", None, "Trace of a step instead, of PyTorch's profiler on one rank (.json, .json.gz)."),
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        show_default=False,
    )
    serve: bool = option("--serve", False, "Plan serving: decoding and prefill, by tensor parallelism.", is_flag=True)
    tokens: int | None = option(
        *("--tokens", None, "Tokens of a rank in a pass; with --tp of the ranks that share layers."),
        show_default="about 8192, whole sequences",
        **NUMBER,
    )
    sequence: int = option("--sequence", 4096, "Length of a sequence in tokens.", default="4096", **NUMBER)
    shard: str = word("--shard", SHARDINGS, "all", "Only this way to shard.")
    tensor: int | None = option(
        *("--tp", None, "Ranks that share a layer (tensor and sequence parallel)."),
        type=click.IntRange(min=1),
        show_default="1; with --serve the best",
    )
    context: int = count("--cp", 1, "Ranks that share a sequence (context parallel).", group=WHAT)
    experts: int = count("--ep", 1, "Ranks that share the experts.", group=WHAT)
    accumulate: int = count(
        "--accumulate", 1, "Passes whose gradients are summed before the optimizer runs.", group=WHAT
    )
    optimizer: str = word("--optimizer", OPTIMIZERS, "adamw", "Optimizer.")
    dtype: str = word(
        *("--dtype", ("float32", "bfloat16", "fp8", "int4"), "float32"),
        "Of weights; served ones have the model's own, which is bfloat16 if it is not quantized.",
    )
    recompute: bool | None = option(
        *("--recompute/--no-recompute", None, "Keep only inputs of layers, and compute layers again for backward."),
        show_default="where the step would not fit",
    )
    layers: int | None = option(
        "--layers", None, "Number of layers.", type=click.IntRange(min=1), show_default="the model's"
    )
    batch: int | None = option(
        *("--batch", None, "Sequences of a rank, or of those of --cp, in a pass; with --serve those decoded at once."),
        show_default="by --tokens; with --serve 8",
        **NUMBER,
    )
    length: int = option("--context", 4096, "With --serve: tokens of each sequence.", default="4096", **NUMBER)
    json: Path | None = shared(json_option, None)
    report: Path | None = shared(report_option, None)

    @property
    def pass_tokens(self) -> int:
        """Tokens of a rank in a pass: of each sequence a part, where ranks share it."""
        sequences = self.batch or max(1, TOKENS * self.context // self.sequence)
        if not self.tokens and sequences * self.sequence % self.context:
            tokens = sequences * self.sequence
            raise ValueError(f"plan: --cp {self.context} does not divide the {tokens} tokens of whole sequences evenly")
        return self.tokens or sequences * self.sequence // self.context


TOKENS = 8192
"""Tokens of a rank in a pass, if nothing is said and sequences are not longer."""
COMMON = ("machine", "json")
SHARED = (*COMMON, "model", "layers", "tensor", "dtype", "batch", "report")
READ = {
    "--trace": ((*COMMON, "trace"), "a recorded step has its own", ("nodes", "report", "serve", "length", "recompute")),
    "--serve": (
        (*SHARED, "serve", "length"),
        "for the load of a server say --batch and --context",
        ("nodes", "shard", "context", "experts", "accumulate", "optimizer", "recompute"),
    ),
    "training": (
        (*SHARED, "nodes", "tokens", "sequence", "shard", "context", "experts", "accumulate", "optimizer", "recompute"),
        "for training say --sequence",
        (),
    ),
}
"""Options that each kind of plan reads, what to say instead of others, and others for which that is no answer."""
HINTS = {
    "": "options have names, such as --model 8B --machine 8xh100",
    **dict.fromkeys(("--gpus", "--gpu"), "GPUs are said with --machine 8xh100"),
    "--strategy": "ways to shard are said with --shard",
}
"""Answers to what people write instead of options; empty: to words without one."""


def _plan(**parameters: Any) -> None:
    options = PlanOptions(**values_of(PlanOptions, parameters))
    if bool(options.model) == (options.trace is not None):
        raise ValueError("plan: what? Say --model 8B, for example, or --trace step.json for a recorded step; not both")
    kind = "--trace" if options.trace else "--serve" if options.serve else "training"
    flags = {one.name: one.opts[0] for one in click.get_current_context().command.params}
    read, instead, apart = READ[kind]
    for name in (name for name in parameters if name not in read and given(name)):
        raise ValueError(f"plan: {flags[name]} is not for {kind}{f'; {instead}' * (name not in apart)}")
    if options.tokens and options.batch:
        raise ValueError("plan: --tokens and --batch: one of them says how large a pass is (tokens, or sequences)")
    if options.machine and not options.machine.endswith((".toml", ".json")):
        loaded("machines.load").named(options.machine)  # what takes a second to load is not needed to refuse a name
    loaded("model.plan" if options.trace is None else "traces.command").main(options)


plan = command("plan", _plan, (PlanOptions,), heading=PREDICT, hints=HINTS)
