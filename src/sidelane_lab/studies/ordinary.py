"""The cost of collectives where the caller's tensors are ordinary memory, next to symmetric memory and to NCCL.

Two parts: collectives alone (``alone``), and next to a GEMM (``pairs``). The ways that are compared are in
``memory_ways``; all of a case take turns round by round in one process, the slowest rank counts, and outputs are
compared before and behind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sidelane.c3.partitions import PairStreams
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US, Entrant, ReadyCall
from sidelane_lab.baselines.reference import Case, rounded_bytes
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.ordinary import ALONE, BESIDE, OrdinaryOptions
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import OF_LIBRARY, Picture, Results, Study
from sidelane_lab.harness.table import Table, grouped, place_of
from sidelane_lab.harness.ways import Rounds, WayOutcome, outcome
from sidelane_lab.pairs.beside import compare_beside
from sidelane_lab.pairs.pair import pair_streams
from sidelane_lab.pairs.workload import Workload
from sidelane_lab.studies.c3.bench import case_of, scaled_workload
from sidelane_lab.studies.c3.rows import TOGETHER_COLUMNS, alone_words, lost_percent, pair_words, too_few_cores
from sidelane_lab.studies.collectives import CollectiveRow, bus_gbps, calls_per_sample, hides_launches
from sidelane_lab.studies.memory_ways import PLACES, STAGED, SYMMETRIC, Way, make_ways

LEARNED, MAPPED = "learned", "mapped"
REACHES = (SYMMETRIC, LEARNED, MAPPED, STAGED, "")
CHANGES = ("repeated", "rotating", "missed", "new_address", "new_segment")
"""Tensors that change from call to call, in files of before 29 November 2026; so are ``LEARNED`` and ``MAPPED``."""


@dataclasses.dataclass(frozen=True, slots=True)
class OrdinaryRow(CollectiveRow):
    """A collective on tensors in some kind of memory: alone, or next to a GEMM, which the row names then.

    Attributes:
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` have ordinary tensors.
        variant: variant that ``auto`` chose; for tensors that change, how they do (:data:`CHANGES`).
        time_us: time of a call, or of both together next to a GEMM, median over the rounds of the slowest rank.
        bus_gbps: bus bandwidth; null next to a GEMM.
        note: reason of the last choice (``Communicator.last_choice``), or why there is no time.
        reach: way in which peers reach the tensors: ``symmetric`` or ``staged``; empty for a library.
        gemm: GEMM that ran beside it; empty if it ran alone.
        m: rows of that GEMM; null if there is none.
        n: columns of that GEMM; null if there is none.
        k: depth of that GEMM; null if there is none.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same call, which says that a computation runs next to it, in the same rounds.
        best_comm_us: fastest isolated time of the call, of all implementations and kinds of memory.
        speedup, ideal, percent_of_ideal: as in :class:`C3Row`.
        host_us: host time of a call on tensors that change, from its begin until it returns, with an idle device and
            all hosts at once; the median over the calls of the slowest rank.
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
    host_us: float | None = None

    def __post_init__(self) -> None:
        CollectiveRow.__post_init__(self)
        if self.gemm and self.time_us is not None and self.speedup is None:
            raise ValueError("OrdinaryRow: next to a GEMM, time_us goes with a speedup (value=None)")


MOVING = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
"""Collectives that run next to a GEMM: copy engines move bytes, and add none."""

GEMM_DTYPE = "bfloat16"
PAIRS = {"cpu": ("8192x8192x8192_97M",), "cuda": tuple(f"8192x8192x8192_{size}" for size in ("97M", "330M", "1.2G"))}
"""Pairs where nobody says."""


@dataclasses.dataclass(frozen=True)
class OrdinaryPlan:
    """Cases of a study, as this rank has them.

    Attributes:
        alone: cases.
        pairs: with the case of each.
    """

    alone: tuple[Case, ...]
    pairs: tuple[tuple[Workload, Case], ...]

    @property
    def reserved(self) -> tuple[Case, ...]:
        """The cases that need buffers that stay."""
        return (*self.alone, *(case for _, case in self.pairs))


def plan_of(rank: Rank, options: OrdinaryOptions) -> OrdinaryPlan:
    """All that the options ask for.

    Args:
        rank: of this process.
        options: of the study.
    """
    device, moving = rank.device, [kind for kind in options.collectives if kind in MOVING]

    def cases(kinds: Iterable[Kind], sizes: Iterable[int]) -> tuple[Case, ...]:
        rounded = sorted({rounded_bytes(size, rank.world_size) for size in sizes})
        return tuple(Case.on(rank, kind, size) for kind in kinds for size in rounded)

    asked = options.pairs or PAIRS[device.type]
    workloads = [
        scaled_workload(text, kind, dtype=GEMM_DTYPE, full_size=False, rank=rank) for kind in moving for text in asked
    ]
    return OrdinaryPlan(
        cases(options.collectives, options.sizes_on(device.type)) if ALONE in options.parts else (),
        tuple((one, case_of(rank, one)) for one in workloads) if BESIDE in options.parts else (),
    )


def _measure(rank: Rank, options: OrdinaryOptions, sender: Sender) -> Iterator[OrdinaryRow]:
    """Make the rows. Collective."""
    if rank.device.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    plan = plan_of(rank, options)
    sender.steps = len(plan.alone) + len(plan.pairs)
    rounded = functools.partial(rounded_bytes, world_size=rank.world_size)
    sender.rounded(options.sizes, rounded)
    roster, ways = make_ways(rank, make_meter(rank, options.step_s), options.step_s)
    if plan.reserved:
        roster.reserve(
            max(case.output_bytes for case in plan.reserved), max(case.input_bytes for case in plan.reserved)
        )
    ways = {name: way for name, way in ways.items() if name in roster.implementations}
    for name, reason in roster.unavailable.items():
        sender.note(f"{name} takes no part: {reason}")
    parts = Parts(roster.meter, ways, options, itertools.count(options.seed + 1))
    streams = pair_streams(rank.device)
    for case in plan.alone:
        sender.step(f"{case.kind} {format_bytes(case.nbytes)}")
        yield from parts.alone(case)
    for workload, case in plan.pairs:
        sender.step(workload.name)
        yield from parts.pair(workload, case, streams)
    roster.close()


class OrdinaryCall(ReadyCall):
    """A call on tensors that peers reach as its row says.

    Attributes:
        said: the variant that the last right call ran as, and why.
    """

    said = ("", "")

    def __init__(self, candidate: Entrant, case: Case, way: Way, calls: int = 1) -> None:
        super().__init__(candidate, case, way, calls)
        self._way = way

    def error(self, seed: int) -> str | None:
        return super().error(seed) or self._way.objection(self.tensors)

    def settle(self) -> None:
        self.said = self._way.said()


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts on this rank; every rank makes the same calls.

    Attributes:
        meter: of this rank.
        ways: what is compared, with buffers that are large enough.
        options: of the study.
        seeds: of random inputs.
    """

    meter: Meter
    ways: Mapping[str, Way]
    options: OrdinaryOptions
    seeds: Iterator[int]

    def alone(self, case: Case) -> Iterator[OrdinaryRow]:
        """Measure every way in and out of place. Collective."""
        calls = calls_per_sample(case.kind, case.nbytes, case.device.type)

        def timed(ready: dict[Entrant, OrdinaryCall]) -> dict[Entrant, Rounds]:
            jobs = {
                candidate: call.job(HIDDEN_LAUNCH_US if hides_launches(case, candidate) else 0.0)
                for candidate, call in ready.items()
            }
            return self.meter.in_turns(jobs, self.options)

        candidates = candidates_for(self.ways, case, PLACES[case.kind])
        makers = {key: functools.partial(OrdinaryCall, key, case, way, calls) for key, way in candidates.items()}
        for one in self.meter.compare(makers, self.seeds, timed):
            yield row_of(case, candidates[one.key], one, one.way, in_place=one.key.in_place)

    def pair(self, workload: Workload, case: Case, streams: PairStreams | None) -> Iterator[OrdinaryRow]:
        """Measure every way alone and next to a GEMM, as the strategy ``conccl`` has it. Collective.

        Args:
            workload: the pair.
            case: its collective.
            streams: streams, on an accelerator.
        """
        gemm, beside = workload.gemm, {name: way.next_to_computation() for name, way in self.ways.items()}
        candidates = candidates_for(beside, case, (False,))
        makers = {key: functools.partial(OrdinaryCall, key, case, way) for key, way in candidates.items()}
        for one, columns in compare_beside(self.meter, makers, gemm, streams, self.seeds, self.options):
            columns |= {"gemm": gemm.name, **{name: getattr(gemm, name) for name in "mnk"}}
            yield row_of(case, candidates[one.key], one, None if one.way is None else one.way.call, **columns)


def candidates_for(ways: Mapping[str, Way], case: Case, places: tuple[bool, ...]) -> dict[Entrant, Way]:
    """Return what can be run of a case, out of place and in place as ``places`` says."""
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


WHO: Mapping[str, Cell] = {"<implementation": "implementation", "<tensors": "reach"}
TIMES: Mapping[str, Cell] = {"time\nus": "time_us", "p10-p90\nus": spread}
LAST: Mapping[str, Cell] = {"library\nover it": _over, "<correct": "correct"}
ALONE_COLUMNS = {"bytes": "bytes", **WHO, "<variant": "variant", **TIMES, "bus\nGB/s": "bus_gbps", **LAST}
PAIR_COLUMNS = {**WHO, "<variant": "variant", "alone\nus": "comm_us", **TOGETHER_COLUMNS, "<correct": "correct"}
CHANGING_COLUMNS = {"<change": "variant", **WHO, **TIMES, "host\nus": "host_us", **LAST}


def is_changing(row: OrdinaryRow) -> bool:
    """True for rows of tensors that change."""
    return row.variant in CHANGES


def ordinary_tables(rows: Sequence[OrdinaryRow]) -> list[Table]:
    """Alone: one table a way to call. Next to a GEMM: one a pair. Changing tensors: one a size. The best is set off."""
    alone = [row for row in rows if not row.gemm and not is_changing(row)]
    pairs = [row for row in rows if row.gemm]
    changing = [row for row in rows if not row.gemm and is_changing(row)]
    tables = [
        table_of(way, alike, ALONE_COLUMNS, by=lambda row: row.bytes, keys=3, noted=_is_noted)
        for way, alike in grouped(alone, way_to_call, ordered=False)
    ]
    for _, alike in grouped(pairs, lambda row: (row.gemm, row.collective, row.bytes)):
        first = next((row for row in alike if row.gemm_us is not None), alike[0])
        title = f"{pair_words(first)}: {alone_words(first)}"
        tables.append(table_of(title, alike, PAIR_COLUMNS, keys=2, value=lost_percent, noted=_is_noted))
    for (kind, nbytes), alike in grouped(changing, lambda row: (row.collective, row.bytes)):
        title = f"{kind} of {format_bytes(nbytes)}, {alike[0].dtype}, on tensors that change from call to call"
        by: dict[str, Any] = {"by": lambda row: row.variant, "keys": 3, "noted": _is_noted}
        tables.append(table_of(title, alike, CHANGING_COLUMNS, **by))
    return tables


def way_to_call(row: OrdinaryRow) -> str:
    """Return what rows of one table and one picture have in common."""
    return f"{row.collective}, {row.dtype}, {place_of(row.in_place)}, {row.launch}"


def _is_noted(row: OrdinaryRow) -> bool:
    """Show why there is no time, and of mapped tensors how calls went; the file has the rest."""
    return row.time_us is None or row.reach in (LEARNED, MAPPED)


def draw_alone(rows: Sequence[OrdinaryRow], results: Results, folder: Path) -> list[Picture]:
    """Draw a picture for each way to call a collective that ran alone."""
    from sidelane_lab.harness.drawing import draw_sizes  # ranks do without what draws

    alone = [row for row in rows if row.time_us and not row.gemm and not is_changing(row)]
    ways = grouped(alone, way_to_call)
    return [draw_sizes(way, alike, results, folder, lambda row: row.reach) for way, alike in ways]


STUDY = Study(
    name="ordinary",
    title="Collectives on ordinary memory",
    legend=(
        "Sidelane's auto on tensors that peers reach in different ways, and NCCL (Gloo on CPUs) on ordinary ones. "
        "Medians over rounds of the slowest rank; the fastest is bold. 'library over it': the library's time over "
        "that of the line. Next to a GEMM the collective is released first, on its own stream; % of ideal is the "
        "strict one of the C3 study, with the fastest collective of the table. The notes are what "
        "Communicator.last_choice says."
    ),
    row=OrdinaryRow,
    tables=ordinary_tables,
    plots=draw_alone,
    warning=too_few_cores,
    measure=_measure,
    progress="ordinary memory",
)
