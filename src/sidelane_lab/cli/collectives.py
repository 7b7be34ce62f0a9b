"""The commands that measure collectives: ``collective``, ``phases``, ``power``, ``chain``, ``host``, ``fused``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sidelane.cli.help import MEASURE
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane_lab.harness.help import HOW, OUTPUT, WHAT
from sidelane_lab.harness.options import (
    LAUNCHES,
    MACHINE_NAME,
    MOST_TENSORS,
    StudyOptions,
    count,
    file_read,
    folder,
    implementations,
    kinds,
    launches,
    loaded,
    names,
    option,
    places,
    size_span,
    study_command,
    word,
)
from sidelane_lab.harness.parameters import ALL, KINDS, shapes
from sidelane_lab.pairs.workload import TABLE_I


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveOptions(StudyOptions):
    """Time every implementation of a collective at every size, and check what it makes.

    With --tensors: calls with lists, next to separate calls one behind the other (variants that end with "separate").
    A size is then that of all tensors together.

    With --machine: predict the DMA collectives paper's study (all_gather and all_to_all, 1K to 4G) for a machine that
    need not be here.
    """

    study = "collectives"
    examples = (
        ("sidelane collective", "both collectives that move bytes, at every size"),
        (
            "sidelane collective --collective all_reduce --max-bytes 64M --report out",
            "another one up to 64 MiB, and a page with pictures",
        ),
        ("sidelane collective --tensors 8 --json -", "lists of eight tensors, as JSON"),
        ("sidelane collective --machine mi300x8", "predict the papers' study for eight MI300X"),
    )

    collectives: tuple[Kind, ...] = kinds((Kind.ALL_GATHER, Kind.ALL_TO_ALL), KINDS, every=ALL)
    sizes: tuple[int, ...] = size_span(gpus=("1K", "4G"), cpus=("1K", "16M"))
    tensors: int = count(
        "--tensors",
        1,
        "Spread each size over a list of that many tensors: in one call, and in a call each.",
        group=WHAT,
    )
    dtype: str = word("--dtype", tuple(ELEMENT_BYTES), "bfloat16", "Type of the elements.")
    variants: tuple[str, ...] = names(
        "--variants",
        (),
        "Variants of Sidelane's: pcpy, bcst, swap, b2b, ...",
        shown="all",
    )
    launches: tuple[str, ...] = launches()
    places: tuple[str, ...] = places()
    repeats: int = count("--iterations", 15, "Measured rounds; of short eager calls on GPUs four times as many.")
    warmup: int = count("--warmup", 3, "Rounds before them.", 0)
    profile: bool = option(
        "--profile/--no-profile", True, "On GPUs: look which implementations launched kernels.", group=HOW
    )
    implementations: tuple[str, ...] = implementations()

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        if not 1 <= self.tensors <= MOST_TENSORS:
            raise ValueError(f"CollectiveOptions: tensors (value={self.tensors}, allowed=1..{MOST_TENSORS})")


PHASED = ("copy", "copies", "all_gather", "all_gather_in_place", "all_to_all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhasesOptions(StudyOptions):
    """Show where a transfer and a collective spend their time: control, schedule, copy, sync.

    Measured by time stamps around the copies and by the host's clock, one call at a time, next to what the simulator
    predicts for the same programs. With --machine: predicted only, for a machine that need not be here.
    """

    study = "phases"
    examples = (
        ("sidelane phases --operation copy", "where a single transfer spends its time"),
        ("sidelane phases --operation all_gather --variants b2b,pcpy", "two variants of a collective"),
        ("sidelane phases --machine h200x4 --max-bytes 1M", "predicted, for four H200s"),
    )

    # The study says why something else is none, so this has no choices.
    operations: tuple[str, ...] = option(
        "--operation",
        PHASED,
        f"May be repeated. One of: {', '.join(PHASED)}.",
        some=True,
        multiple=True,
        metavar="NAME",
        show_default="all",
    )
    sizes: tuple[int, ...] = size_span(gpus=("1K", "1G"), cpus=("1K", "4M"))
    variants: tuple[str, ...] = names(
        "--variants", ("b2b",), "pcpy, bcst, swap, b2b, striped, b2b+prelaunch, ...", some=True
    )
    launches: tuple[str, ...] = launches()
    calls: int = count("--calls", 31, "Measured calls of each.")
    warmup: int = count("--warmup", 4, "Calls before them.")
    predict: str = option(
        "--predict", "", "Machine to predict beside what is measured.", type=MACHINE_NAME, show_default=False
    )

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        if self.warmup < 1:
            raise ValueError(f"PhasesOptions: warmup (value={self.warmup}, allowed=1 and more)")


SETTLE_S = 0.15
"""Seconds at the beginning of a run that do not count: power follows load with a delay, and readings follow power."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerOptions(StudyOptions):
    """Measure power and energy of collectives, by the GPUs' counters.

    With --machine: predict them for a machine that need not be here: as the DMA collectives paper ran its variants, and
    reductions as Sidelane runs them on copy engines; with --gemm next to a GEMM, as `sidelane c3` has it.
    """

    study = "power"
    examples = (
        ("sidelane power --min-bytes 1G", "watts and energy at one size"),
        ("sidelane power --collective all_reduce --machine mi300x8", "predicted, for eight MI300X"),
        ("sidelane power --gemm cb1 --machine h200x4", "predicted, next to a GEMM under each strategy"),
    )

    collectives: tuple[Kind, ...] = kinds((Kind.ALL_GATHER, Kind.ALL_TO_ALL), KINDS)
    gemms: tuple[str, ...] = option(
        "--gemm",
        (),
        f"Next to it, predicted, with --machine: {', '.join(TABLE_I)} (ConCCL paper's Table I), or m,n,k. May be "
        "repeated.",
        multiple=True,
        predicted=True,
    )
    sizes: tuple[int, ...] = size_span(gpus=("64M", "1G"))
    variants: tuple[str, ...] = names(
        "--variants",
        ("b2b",),
        "Of Sidelane's copy engines: pcpy, striped, ...; reductions have b2b and pcpy. Kernels all take part.",
    )
    launch: str = word("--launch", LAUNCHES, "graph", "Call by call, or in a CUDA graph.")
    places: tuple[str, ...] = places()
    seconds: float = option("--seconds", 0.7, "Seconds that each implementation runs in a round.", group=HOW)
    rounds: int = count("--rounds", 2, "Rounds over all implementations.")
    implementations: tuple[str, ...] = implementations()
    idle_s: float = 1.5

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        if self.seconds <= 2 * SETTLE_S or self.idle_s < SETTLE_S:
            raise ValueError(
                f"PowerOptions: seconds and idle_s (value={self.seconds}, {self.idle_s}, "
                f"allowed=more than {2 * SETTLE_S}, {SETTLE_S} and more)"
            )


FUSED_OPS = (
    *("gemv_all_reduce", "all_reduce_rms_norm", "embedding_all_to_all", "gemm_all_to_all", "all_to_all_gemm"),
    *("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedOptions(StudyOptions):
    """Measure fused operators next to the same computation and a collective, one after the other.

    With --machine: predict them for a machine that need not be here. Several nodes: of one GPU each (mi210x1x2).
    """

    study = "fused"
    examples = (
        ("sidelane fused", "every operator, at the shapes of the study"),
        ("sidelane fused --device cpu --ops gemv_all_reduce", "check one on CPU ranks"),
        ("sidelane fused --timeline traces", "and write what each workgroup did, and when"),
        ("sidelane fused --machine mi210x4", "predict them for four MI210"),
        ("sidelane fused --machine h200x4 --ops embedding_all_to_all --shape 2048,128,20", "a shape of your own"),
        ("sidelane fused --machine h100x4 --results results/h100x1/fused.json", "how far predictions are off"),
    )

    ops: tuple[str, ...] = names("--ops", (), "Operators.", allowed=FUSED_OPS, shown="all")
    shapes: tuple[tuple[int, ...], ...] = option(
        "--shape",
        (),
        "With --machine and one operator: GEMV rows, columns of all ranks, tokens; embedding batch, tables of a rank, "
        "pooling; GEMM rows of a rank, depth, columns. May be repeated.",
        predicted=True,
        multiple=True,
        metavar="N,N,...",
        callback=shapes,
    )
    repeats: int = count("--repeats", 21, "Rounds that are measured.")
    timeline: Path | None = folder(
        "--timeline",
        "Write a Perfetto trace, a picture of the workgroups and one of ranks' skew of each operator's first shape.",
    )
    keep: bool = option(
        "--keep",
        False,
        'Keep the times for this user: method="auto" of the operators goes by them.',
        group=OUTPUT,
        is_flag=True,
    )
    occupancy: float | None = option(
        "--occupancy",
        None,
        "With --machine: of fused kernels, up to 1.",
        group=HOW,
        predicted=True,
        type=float,
        show_default="all",
    )
    results: Path | None = file_read(
        "--results",
        "A file of sidelane fused. With --machine: hold predictions against it. With --keep: keep its times.",
        group=OUTPUT,
    )
    late_us: float = option(
        "--late", 0, "With --machine: the last rank begins so many us later.", group=HOW, predicted=True, type=float
    )
    implementations: tuple[str, ...] = implementations()
    warmup: int = 3


def _collective(machine: str, options: CollectiveOptions) -> None:
    loaded("papers.predictions").collective_main(machine, options)


def _power(machine: str, options: PowerOptions) -> None:
    loaded("studies.power.predict").main(machine, options)


def _fused(machine: str, options: FusedOptions) -> None:
    loaded("papers.operator_results").main(machine, options)


SIZES = ("min_bytes", "max_bytes", "factor")
WRITTEN = ("json", "report")

collective = study_command("collective", CollectiveOptions, _collective, WRITTEN, MEASURE)
phases = study_command("phases", PhasesOptions, beside=("operations", *SIZES, "variants", *WRITTEN))
power = study_command("power", PowerOptions, _power, ("gemms", "collectives", *SIZES, *WRITTEN))
fused = study_command("fused", FusedOptions, _fused, ("ops", "shapes", "occupancy", "late_us", "results", *WRITTEN))
