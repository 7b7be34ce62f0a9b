"""The command ``sidelane c3``: a GEMM next to a collective, measured or predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sidelane.c3.strategies import named
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.cli.help import MEASURE
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.help import HOW, WHAT, what
from sidelane_lab.harness.options import (
    Declared,
    Decorator,
    StudyOptions,
    command,
    count,
    declared,
    declared_field,
    file_read,
    implementations,
    kinds,
    loaded,
    machine_option,
    names,
    option,
    require_file_to_resume,
    run,
    shared,
    values_of,
    word,
)
from sidelane_lab.harness.parameters import (
    KINDS,
    VERSIONS,
    given,
    refuse_beside_machine,
    say_rounding,
    size,
)
from sidelane_lab.pairs.workload import GEMM_DTYPES, MEMORY_KERNELS, TABLE_I, ComputeKind, parse_gemm, parse_workload
from sidelane_lab.shaping.shape import SHAPES

if TYPE_CHECKING:
    from sidelane_lab.pairs.isolated import Isolated

STRATEGIES = tuple(strategy.name for strategy in all_strategies())
TILES = tuple(SHAPES)
NAMES = (
    "nccl, nccl_ce (NCCL on copy engines), symm_mem (PyTorch's symmetric memory), "
    "gloo, dma (Sidelane on copy engines), dma_left (without own parts), sm (Sidelane's kernels)"
)
"""Implementations that run beside a GEMM."""

Key = tuple[object, ...]
"""The values that two rows of one thing have in common."""


class StrategyName(click.Choice[str]):
    """Type of a strategy's name; codes of result files stand for names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name that is meant."""
        names = {one.code: one.name for one in all_strategies()}
        return super().convert(names.get(str(value), value), param, ctx)


def _workloads() -> Any:
    """Declare pairs: as they are written, or of every GEMM and every size."""

    def decorators(name: str) -> Sequence[Decorator]:
        kernels = ", ".join(MEMORY_KERNELS)
        gemms = f"{', '.join(TABLE_I)} (paper's Table I), m,n,k, or {kernels} (which read a lot). May be repeated."
        sizes = (
            "Bytes of the collective, with --gemm, such as 1.2G. May be repeated. On CPUs, GEMM and bytes are divided "
            "by 2, 4, 8, ..., until a core takes some tens of ms for the GEMM; the table has the sizes that ran."
        )
        return (
            click.argument("pairs", nargs=-1),
            what("--gemm", "gemms", multiple=True, help=gemms),
            what("--bytes", "sizes", multiple=True, metavar="SIZE", callback=size, help=sizes),
            what(
                "--pairs-by-class",
                "by_class",
                metavar="NAME_OR_FILE",
                help="Pairs of every class, compute- and memory-bound: bytes by the predicted times of that machine.",
            ),
        )

    def read(parameters: Mapping[str, Any], name: str) -> tuple[str, ...]:
        written = parameters["pairs"]
        pairs = (*written, *pairs_of(parameters["gemms"], parameters["sizes"]))
        if parameters["by_class"] is not None:
            by_class = loaded("model.pair_classes").pairs_by_class(loaded("machines.load").find(parameters["by_class"]))
            for pair in by_class:
                click.echo(f"note: {pair}", err=True)
            pairs += tuple(pair.name for pair in by_class)
        for pair in pairs:
            parse_workload(pair)
        say_rounding(*(pair.rpartition("_")[2] for pair in written))
        return pairs or PairOptions.workloads

    return declared_field(("cb1_896M",), Declared(decorators=decorators, read=read))


def pairs_of(gemms: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    """Return every GEMM with every size, as the paper writes them.

    >>> pairs_of(("cb1", "512,512,2048"), (1024,))
    ['cb1_1K', '512x512x2048_1K']

    Raises:
        ValueError: one of the two is missing, or a GEMM is not one.
    """
    if bool(gemms) != bool(sizes):
        raise ValueError("--gemm and --bytes belong together (one of them is missing)")
    written = [parse_gemm(text.replace(",", "x")).name for text in gemms]
    return [f"{name}_{format_bytes(nbytes)}" for name in written for nbytes in sizes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions(StudyOptions):
    """GEMMs next to collectives."""

    workloads: tuple[str, ...] = _workloads()
    collectives: tuple[Kind, ...] = kinds((Kind.ALL_GATHER, Kind.ALL_TO_ALL), KINDS)
    dtype: str = word("--dtype", GEMM_DTYPES, "bfloat16", "On GPUs; CPUs take float32.")
    implementations: tuple[str, ...] = implementations(NAMES)
    warmup: int = count("--warmup", 6, "Rounds before the measured ones.", 0)
    repeats: int = count("--repeats", 9, "Measured rounds.")
    budget_s: float | None = option(
        "--budget",
        None,
        "Begin no further pair, with --study occupancy no further shape, after so much time.",
        group=HOW,
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        if not self.workloads:
            raise ValueError(f"{type(self).__name__}: at least one of workloads is needed (value=none)")
        for text in self.workloads:
            parse_workload(text, dtype=self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class C3Options(PairOptions):
    """Run a GEMM and a collective together, under every strategy.

    PAIRS are written as the ConCCL paper does: cb1_896M is its compute-bound GEMM 1 with 896 MiB, mb2_3.25G its
    memory-bound GEMM 2, and 4096x4096x4096_64M any other. --gemm and --bytes give the same, each GEMM with each size.
    --pairs-by-class h200x2 chooses pairs of every class for two H200s. Without any: cb1_896M.

    With --machine: predict them for a machine that need not be here; without any, the paper's whole study (with
    --report about a minute, for the plausible ranges). Pairs go with --collective, --strategy, --json and --report, the
    whole study with --version, --json and --report.

    Strategies: copy_engines is Sidelane on copy engines, nccl_copy_engines NCCL on copy engines. kernels_ begins those
    of Sidelane's kernels; the others have the library's: compute_first and collective_first say what is launched first,
    and partition gives the collective compute units of its own. Rows of pairs in files have the papers' codes, which
    --strategy takes, too; the heuristics' have names. docs/guide/overlap.md has all.
    """

    study = "c3"
    examples = (
        ("sidelane c3 cb1_896M", "measure one pair on the GPUs that are here"),
        ("sidelane c3 --gemm 8192,8192,8192 --bytes 1.2G", "a GEMM and a size of your own"),
        ("sidelane c3 cb1_896M --study occupancy", "iterations in a pipeline, by the shape of the GEMM"),
        ("sidelane c3 --pairs-by-class h200x2 --strategy copy_engines", "every class, by its bound"),
        ("sidelane c3 --study heuristics --machine mi300x8", "how often each heuristic is right there"),
        ("sidelane c3 --machine mi300x8", "predict the whole study for eight MI300X"),
        ("sidelane c3 --machine h200x4 --results c3.json --report out", "predicted and measured together"),
        ("sidelane c3 cb1_896M --machine h200x4 --json -", "predict one pair, as JSON"),
    )

    strategies: tuple[str, ...] = option(
        "--strategy",
        (),
        "May be repeated. With --machine, of pairs.",
        multiple=True,
        type=StrategyName(STRATEGIES),
        metavar="NAME",
        show_default="all",
    )
    # auto is what a caller gets who asks for none: on copy engines its choice, of kernels all that there are.
    variants: tuple[str, ...] = names(
        "--variants", ("auto",), "Variants of Sidelane's collectives; the best is reported."
    )
    isolated: Path | None = option(
        "--isolated",
        None,
        "File of `sidelane tune --study c3`, by which the partition heuristic chooses.",
        group=HOW,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        show_default="the user's of this machine, if there is one",
    )
    timeline: Path | None = option(
        "--timeline",
        None,
        "Write when GEMM and collective ran, for every pair and strategy: a Chrome trace (chrome://tracing, Perfetto) "
        "and a picture; with --report, the page has those of the fastest and the slowest strategy. Measured pairs.",
        type=Written(is_folder=True),
        metavar="DIR",
    )
    third: bool = option(
        "--third",
        False,
        "Also run each pair with a third kernel, in each order of launches. Measured pairs.",
        is_flag=True,
    )
    energy_s: float | None = option(
        "--energy",
        None,
        "Run each strategy for so many seconds more, and read the GPUs' energy counters: mean watts, and energy of a "
        "run of the pair. Measured pairs.",
        type=float,
        metavar="SECONDS",
    )
    resume: bool = option(
        "--resume", False, "Keep what --json has; measure pairs that lack a strategy there.", group=HOW, is_flag=True
    )
    known: Isolated | None = None  # isolated times and rows that are there: the study fills them in
    done: frozenset[Key] = frozenset()
    version: str = "000"  # of the ConCCL paper, of predictions of its whole study

    def __post_init__(self) -> None:
        PairOptions.__post_init__(self)
        codes = tuple(dict.fromkeys(named(name).code for name in self.strategies))
        object.__setattr__(self, "strategies", codes)
        require_file_to_resume(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OccupancyOptions(PairOptions):
    """Iterations in a pipeline, by the shape of the GEMM."""

    study = "occupancy"

    collectives: tuple[Kind, ...] = kinds((Kind.ALL_REDUCE, Kind.ALL_TO_ALL), KINDS)
    shapes: tuple[str, ...] = option(
        "--tile",
        TILES,
        "Tile of the GEMM, with --study occupancy.",
        convert=lambda chosen: chosen or TILES,
        allowed=TILES,
        some=True,
        default=(),
        multiple=True,
        type=click.Choice(TILES),
    )
    blocks: tuple[int, ...] = option(
        "--blocks",
        (),
        "Thread blocks of the GEMM's grid, with --study occupancy; 0: one for each tile. May be repeated.",
        multiple=True,
        type=click.IntRange(min=0),
    )
    iterations: int = count("--iterations", 6, "Iterations of a pipeline, with --study occupancy.", least=2, group=WHAT)
    warmup: int = 2
    repeats: int = 4

    def __post_init__(self) -> None:
        PairOptions.__post_init__(self)
        if any(parse_workload(text).gemm.operation is not ComputeKind.PRODUCT for text in self.workloads):
            raise ValueError(f"OccupancyOptions: workloads (value={self.workloads}, allowed=GEMMs)")
        if self.blocks and min(self.blocks) < 0:
            raise ValueError(f"OccupancyOptions: blocks (value={self.blocks}, allowed=1 or more, 0 for one a tile)")
        if self.iterations < 2:
            raise ValueError(f"OccupancyOptions: iterations (value={self.iterations}, allowed=2 or more)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeuristicsOptions(C3Options):
    """Heuristics' choices against the best of all strategies, measured, of a file, or on a described machine."""

    study = "heuristics"

    results: Path | None = file_read(
        "--results",
        "File of `sidelane c3 --json`, which --study heuristics judges instead of measuring, or which is compared with "
        "the predictions of --machine.",
    )
    machine: str | None = shared(machine_option, None)

    def __post_init__(self) -> None:
        C3Options.__post_init__(self)
        if self.results is not None and self.machine is not None:
            raise ValueError("HeuristicsOptions: results and machine (allowed=one of the two: measured, or predicted)")


PAIRS, OCCUPANCY, HEURISTICS = "pairs", "occupancy", "heuristics"
USUAL = ("collectives", "warmup", "repeats")
"""Parameters of which every study has its own defaults."""


def _c3(study: str, machine: str | None, version: str, results: Path | None, **parameters: Any) -> None:
    parameters |= {"machine": machine, "results": results}
    predicts = study == PAIRS and machine is not None
    if results is not None and study != HEURISTICS and not predicts:
        raise ValueError("--results goes with --study heuristics, or with --machine")
    if study != OCCUPANCY:
        _refuse(OCCUPANCY, *_own(OccupancyOptions))
    if study == HEURISTICS:
        _refuse(PAIRS, "resume")
        run(HeuristicsOptions(**values_of(HeuristicsOptions, parameters)))
    elif study == OCCUPANCY:
        if machine is not None:
            raise ValueError("--study occupancy measures; sidelane pipeline --machine predicts")
        _refuse(PAIRS, *_own(C3Options))
        values = values_of(OccupancyOptions, parameters)
        values |= {name: parameters[name] for name in ("warmup", "repeats")}
        run(OccupancyOptions(**{name: value for name, value in values.items() if name not in USUAL or given(name)}))
    elif machine is not None:
        _predict(machine, version, results, C3Options(**values_of(C3Options, parameters)))
    elif given("version"):
        raise ValueError("--version chooses between versions of the paper; it needs --machine")
    else:
        run(C3Options(**values_of(C3Options, parameters)))


def _own(options: type[PairOptions]) -> list[str]:
    """Return the fields that only these options have."""
    return [name for name in declared(options) if name not in declared(PairOptions)]


def _refuse(study: str, *names: str) -> None:
    """Refuse what belongs to another study.

    Raises:
        ValueError: the caller gave one of these parameters.
    """
    options = {option.name: option.opts[0] for option in click.get_current_context().command.params}
    for name in filter(given, names):
        raise ValueError(f"{options[name]} goes with --study {study}")


def _predict(machine: str, version: str, results: Path | None, options: C3Options) -> None:
    """Predict, as ``sidelane c3 --machine`` does. Without pairs: the whole study, which has its own collectives.

    Raises:
        ValueError: options that do not go together, or no such machine.
    """
    if results is not None:
        refuse_beside_machine("results", "json", "report")
        loaded("studies.c3.prediction").main(machine, results, options.report, options.json)
        return
    if any(map(given, ("pairs", "gemms", "sizes", "by_class"))):
        refuse_beside_machine("pairs", "gemms", "sizes", "by_class", "collectives", "strategies", "json", "report")
    else:
        refuse_beside_machine("version", "json", "report")
        options = dataclasses.replace(options, workloads=tuple(loaded("model.study").TABLE_II), version=version)
    loaded("papers.predictions").c3_main(machine, options)


c3 = command(
    "c3",
    _c3,
    (C3Options, OccupancyOptions, HeuristicsOptions),
    heading=MEASURE,
    besides=(
        what(
            "--study",
            type=click.Choice((PAIRS, OCCUPANCY, HEURISTICS)),
            default=PAIRS,
            help="occupancy: pipelined iterations, by the shape of a Triton GEMM and with priority (overlap paper); "
            "collectives are all_reduce and all_to_all then. heuristics: what each would choose for the pairs, against "
            "the best of all strategies.",
        ),
        what(
            "--version",
            type=click.Choice(VERSIONS),
            default="000",
            help="Version of the ConCCL paper (docs/internals/model.md), with --machine.",
        ),
    ),
)
