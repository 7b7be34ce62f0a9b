"""The cost of collectives where the caller's tensors are ordinary memory, next to symmetric memory and to NCCL.

Two parts: collectives alone, and beside a GEMM (``beside``). The ways that are compared are in ``memory_ways``; all of
a case take turns round by round in one process, the slowest rank counts, and outputs are compared before and behind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.options import StudyOptions, count, kinds, option, size_span, study_command, words
from sidelane_lab.harness.parameters import say_rounding
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.study import OF_LIBRARY, Study
from sidelane_lab.harness.table import Table, grouped
from sidelane_lab.harness.ways import Rounds, WayOutcome, outcome
from sidelane_lab.pairs.workload import parse_workload
from sidelane_lab.studies.c3.rows import TOGETHER_COLUMNS, alone_words, lost_percent, pair_words, too_few_cores
from sidelane_lab.studies.collectives import CollectiveRow, bus_gbps, calls_per_sample, hides_launches, way_to_call

if TYPE_CHECKING:
    from sidelane_lab.baselines.candidate import Entrant
    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.harness.launch import Rank
    from sidelane_lab.harness.measure import Meter
    from sidelane_lab.harness.running import Sender
    from sidelane_lab.pairs.workload import Workload
    from sidelane_lab.studies.memory_ways import OrdinaryCall, Way

COLLECTIVES = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
ALONE, BESIDE = PARTS = ("alone", "beside")


def read_pairs(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Read pairs, each once. Rounded sizes are reported on stderr."""
    say_rounding(*(pair.rpartition("_")[2] for pair in value))
    return tuple(dict.fromkeys(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrdinaryOptions(StudyOptions):
    """Measure what collectives cost where the caller's tensors are ordinary memory.

    Sidelane's auto on tensors in symmetric memory and on ordinary ones, which are staged, and NCCL (on CPUs Gloo):
    alone, and beside a GEMM.
    """

    study = "ordinary"
    examples = (
        ("sidelane ordinary --json ordinary.json", "all of it, as JSON too"),
        ("sidelane ordinary --part alone --collective all_gather --max-bytes 64M", "one collective by itself"),
        ("sidelane ordinary --part beside --pair 8192x8192x8192_330M", "beside one GEMM"),
    )

    parts: tuple[str, ...] = words(
        "--part",
        PARTS,
        PARTS,
        "Collectives alone, or beside a GEMM (beside). May be repeated.",
        some=True,
        show_default="all",
    )
    collectives: tuple[Kind, ...] = kinds(
        COLLECTIVES,
        tuple(map(str, COLLECTIVES)),
        "May be repeated. Beside a GEMM run all_gather and all_to_all.",
        show_default="all",
    )
    sizes: tuple[int, ...] = size_span(gpus=("16M", "1G"), cpus=("64K", "4M"))
    pairs: tuple[str, ...] = option(
        "--pair",
        (),
        "A GEMM and a size, such as cb1_896M. May be repeated. On CPUs all of it is divided, as in sidelane c3.",
        multiple=True,
        metavar="PAIR",
        show_default="8192x8192x8192 with 97M, 330M and 1.2G; on CPUs with 97M",
        callback=read_pairs,
    )
    warmup: int = count("--warmup", 2, "Rounds before the measured ones.", 0)
    repeats: int = count("--repeats", 9, "Measured rounds.")

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        for pair in self.pairs:
            parse_workload(pair)


ordinary = study_command("ordinary", OrdinaryOptions)


REACHES = ("symmetric", "learned", "mapped", "staged", "")
"""``learned`` and ``mapped`` are in files of before 29 November 2026."""


@dataclasses.dataclass(frozen=True, slots=True)
class OrdinaryRow(CollectiveRow):
    """A collective on tensors in some kind of memory: alone, or beside a GEMM, which the row names then.

    Attributes:
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` have ordinary tensors.
        variant: variant that ``auto`` chose; in rows with ``host_us``, how tensors changed from call to call.
        time_us: time of a call, or of both together beside a GEMM, median over the rounds of the slowest rank.
        bus_gbps: bus bandwidth; null beside a GEMM.
        note: reason of the last choice (``Communicator.last_choice``), or why there is no time.
        reach: way in which peers reach the tensors: ``symmetric`` or ``staged``; empty for a library.
        gemm: GEMM that ran beside it; empty if it ran alone.
        m: rows of that GEMM; null if there is none.
        n: columns of that GEMM; null if there is none.
        k: depth of that GEMM; null if there is none.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same call, with the hint that a computation runs beside it, in the same rounds.
        best_comm_us: fastest isolated time of the call, of all implementations and kinds of memory.
        speedup, ideal, percent_of_ideal, percent_least, percent_most: as in :class:`C3Row`.
        host_us: host time of a call on tensors that changed, from its begin until it returned, with an idle device and
            all hosts at once, in files of before 29 November 2026.
    """

    allowed = (*CollectiveRow.allowed, ("reach", REACHES))
    figures = ("time_us",)

    reach: str = ""
    gemm: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    gemm_us: float | None = None
    comm_us: float | None = None
    best_comm_us: float | None = None
    speedup: float | None = None
    ideal: float | None = None
    percent_of_ideal: float | None = None
    percent_least: float | None = None
    percent_most: float | None = None
    host_us: float | None = None

    def __post_init__(self) -> None:
        CollectiveRow.__post_init__(self)
        if self.gemm and self.time_us is not None and self.speedup is None:
            raise ValueError("OrdinaryRow: beside a GEMM, time_us goes with a speedup (value=None)")


MOVING = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
"""Collectives that run beside a GEMM: copy engines move bytes, and add none."""

GEMM_DTYPE = "bfloat16"
PAIRS = {"cpu": ("8192x8192x8192_97M",), "cuda": tuple(f"8192x8192x8192_{size}" for size in ("97M", "330M", "1.2G"))}
"""Pairs where nobody says."""


def _measure(rank: Rank, options: OrdinaryOptions, sender: Sender) -> Iterator[OrdinaryRow]:
    """Make the rows. Collective."""
    import torch

    from sidelane_lab.baselines.reference import cases_of
    from sidelane_lab.baselines.roster import make_meter
    from sidelane_lab.studies.c3.bench import case_of, scaled_workload
    from sidelane_lab.studies.memory_ways import make_ways

    device_type, kinds = rank.device.type, options.collectives
    if device_type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    alone = cases_of(rank, options, sender, kinds if ALONE in options.parts else ())
    pairs = [
        scaled_workload(text, kind, GEMM_DTYPE, rank)
        for kind in kinds
        if BESIDE in options.parts and kind in MOVING
        for text in options.pairs or PAIRS[device_type]
    ]
    if not alone and not pairs:
        return
    sender.steps = len(alone) + len(pairs)
    beside = [(workload, case_of(rank, workload)) for workload in pairs]
    roster, ways = make_ways(rank, make_meter(rank, options.step_s), options.step_s)
    roster.reserve_for([*alone, *(case for _, case in beside)], sender.note)
    ways = {name: way for name, way in ways.items() if name in roster.implementations}
    seeds = itertools.count(options.seed + 1)
    for case in alone:
        sender.step(f"{case.kind} {format_bytes(case.nbytes)}")
        yield from alone_rows(roster.meter, ways, options, case, seeds)
    for workload, case in beside:
        sender.step(workload.name)
        yield from beside_rows(roster.meter, ways, options, workload, case, seeds)
    roster.close()


def alone_rows(
    meter: Meter, ways: Mapping[str, Way], options: OrdinaryOptions, case: Case, seeds: Iterator[int]
) -> Iterator[OrdinaryRow]:
    """Measure every way in and out of place. Collective."""
    from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US
    from sidelane_lab.studies.memory_ways import PLACES, OrdinaryCall

    calls = calls_per_sample(case.kind, case.nbytes, case.device.type)

    def timed(ready: dict[Entrant, OrdinaryCall]) -> dict[Entrant, Rounds]:
        jobs = {
            candidate: call.job(HIDDEN_LAUNCH_US if hides_launches(case, candidate) else 0.0)
            for candidate, call in ready.items()
        }
        return meter.in_turns(jobs, options)

    candidates = candidates_for(ways, case, PLACES[case.kind])
    makers = {key: functools.partial(OrdinaryCall, key, case, way, calls) for key, way in candidates.items()}
    for one in meter.compare(makers, seeds, timed):
        yield row_of(case, candidates[one.key], one, one.way, in_place=one.key.in_place)


def beside_rows(
    meter: Meter,
    ways: Mapping[str, Way],
    options: OrdinaryOptions,
    workload: Workload,
    case: Case,
    seeds: Iterator[int],
) -> Iterator[OrdinaryRow]:
    """Measure every way alone and beside a GEMM, as the strategy ``conccl`` has it. Collective."""
    from sidelane_lab.pairs.beside import compare_beside
    from sidelane_lab.pairs.pair import pair_streams
    from sidelane_lab.studies.memory_ways import OrdinaryCall

    gemm, beside = workload.gemm, {name: way.next_to_computation() for name, way in ways.items()}
    candidates = candidates_for(beside, case, (False,))
    makers = {key: functools.partial(OrdinaryCall, key, case, way) for key, way in candidates.items()}
    for one, columns in compare_beside(meter, makers, gemm, pair_streams(case.device), seeds, options):
        columns |= {"gemm": gemm.name, **{name: getattr(gemm, name) for name in "mnk"}}
        yield row_of(case, candidates[one.key], one, None if one.way is None else one.way.call, **columns)


def candidates_for(ways: Mapping[str, Way], case: Case, places: tuple[bool, ...]) -> dict[Entrant, Way]:
    """Return what can be run of a case, out of place and in place as ``places`` says."""
    from sidelane_lab.baselines.candidate import Entrant

    return {
        Entrant(way.name, variant, in_place): way
        for way in ways.values()
        for in_place in places
        for variant in way.variants(case.kind, in_place)
    }


def _with_late(said: str, rounds: Rounds | None) -> str:
    """Say in how many rounds some host had not queued everything when the clock started, too."""
    late = 0 if rounds is None else rounds.late
    return "; ".join(filter(None, (said, f"the host was late in {late} rounds" if late else "")))


def row_of(
    case: Case, way: Way, found: WayOutcome[Any, Any], call: OrdinaryCall | None, *, in_place: bool = False, **more: Any
) -> OrdinaryRow:
    """Make a row of a collective.

    Args:
        case: what it did.
        way: how.
        found: its outcome.
        call: what ran; None where nothing did.
        in_place: input and output share memory.
        more: columns of what was next to it.
    """
    variant, reason = ("", "") if call is None or found.problem is not None else call.said
    columns = outcome(found.rounds, found.problem, _with_late(reason, found.rounds))
    median, beside = columns["time_us"], "gemm" in more
    return OrdinaryRow(
        collective=case.kind,
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=in_place,
        launch="eager",
        implementation=way.name,
        variant=variant,
        prelaunch=False,
        bus_gbps=None if median is None or beside else bus_gbps(case.kind, case.nbytes, case.world_size, median),
        energy_mj=None,
        reach=way.reach,
        **columns,
        **more,
    )


def _over(row: OrdinaryRow, same: Sequence[OrdinaryRow]) -> str:
    """Return the library's time over that of a row; more than 1: the row is faster."""
    theirs = [one.time_us for one in same if one.implementation in OF_LIBRARY and one.time_us is not None]
    if row.implementation in OF_LIBRARY or not theirs or not row.time_us:
        return ""
    return f"{min(theirs) / row.time_us:.3f}"


ALONE_COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<tensors": "reach",
    "<variant": "variant",
    "time\nus": "time_us",
    "p10-p90\nus": spread,
    "bus\nGB/s": "bus_gbps",
    "library\nover it": _over,
    "<correct": "correct",
}
PAIR_COLUMNS: Mapping[str, Cell] = {
    "<implementation": "implementation",
    "<tensors": "reach",
    "<variant": "variant",
    "alone\nus": "comm_us",
    **TOGETHER_COLUMNS,
    "<correct": "correct",
}


def ordinary_tables(rows: Sequence[OrdinaryRow]) -> list[Table]:
    """Alone: one table a way to call. Beside a GEMM: one a pair. The best is set off."""
    alone, pairs = ([row for row in rows if bool(row.gemm) is paired] for paired in (False, True))
    tables = [
        table_of(way, alike, ALONE_COLUMNS, by=lambda row: row.bytes, keys=3, noted=_is_noted)
        for way, alike in grouped(alone, way_to_call, ordered=False)
    ]
    for _, alike in grouped(pairs, lambda row: (row.gemm, row.collective, row.bytes)):
        first = next((row for row in alike if row.gemm_us is not None), alike[0])
        title = f"{pair_words(first)}: {alone_words(first)}"
        tables.append(table_of(title, alike, PAIR_COLUMNS, keys=2, value=lost_percent, noted=_is_noted))
    return tables


def _is_noted(row: OrdinaryRow) -> bool:
    """Show why there is no time; the file has the rest."""
    return row.time_us is None


STUDY = Study(
    name="ordinary",
    title="Collectives on ordinary memory",
    legend=(
        "Sidelane's auto on tensors that peers reach in different ways, and NCCL (Gloo on CPUs) on ordinary ones. "
        "Medians over rounds of the slowest rank; the fastest is bold. 'library over it': the library's time over "
        "that of the line. Beside a GEMM the collective is released first, on its own stream; % of ideal is the "
        "strict one of the C3 study, with the fastest collective of the table."
    ),
    row=OrdinaryRow,
    tables=ordinary_tables,
    warning=too_few_cores,
    measure=_measure,
    progress="ordinary memory",
)
