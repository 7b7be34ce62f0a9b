"""GEMM to collective and back (DMA collectives paper, 4.3 and Figure 16): producer, all-gather, consumer.

    producer GEMM writes this rank's shard -> all-gather -> consumer GEMM reads everyone's

All three are handed to one stream. The end of the producer releases the copies, and their end the consumer, by flags on
the device; no host stands in between. Eager and as one graph, for every implementation, next to both GEMMs alone; and
with Sidelane's copies prelaunched, which a graph cannot hold (docs/internals/prelaunch.md):

    host      arm(): copies, signals   produce()   trigger()         consume()
    stream    ........................ GEMM ------ write | wait done . GEMM
    engines   wait trigger ............................. copies, signals . done
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from sidelane.program.collective import Kind
from sidelane.session.prelaunch import prelaunchable
from sidelane.sizes import format_bytes
from sidelane_lab.baselines.candidate import (
    CALLS_AHEAD,
    HIDDEN_LAUNCH_US,
    Entrant,
    Implementation,
    ReadyCall,
    candidates_of,
    captured,
)
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import OwnDma, Roster, applicable, check_asked, make_roster
from sidelane_lab.cli.collectives import PRELAUNCHED, ChainOptions
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.measure import Job, Meter, Problem, Rounds, WayComparison, outcome
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.report import Cell, tables_by, text_of
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import IMPLEMENTATIONS, OF_LIBRARY, FlatRow, Study
from sidelane_lab.harness.table import MISSING, Line, Table, grouped, number
from sidelane_lab.studies.chain.ways import CALLS, WIDTH, Chain, Gemms, PrelaunchedChain

ALONE = Entrant("", "GEMMs alone")
ALONE_AS_GRAPH = dataclasses.replace(ALONE, launch="graph")


@dataclasses.dataclass(frozen=True, slots=True)
class ChainRow(FlatRow):
    """A GEMM, an all-gather of what it made and a GEMM that reads what was gathered, one behind the other.

    Attributes:
        bytes: gathered size.
        launch: eager or graph; ``prelaunched`` where the all-gather was submitted ahead of the producer, and fired
            behind it by one write (docs/internals/prelaunch.md).
        gemms_us: time of both GEMMs with nothing between them, launched as the chain is (``prelaunched``: eager).
        time_us: time of the chain, median over the rounds of the slowest rank.
        correct: True if the consumer's output agreed with a reference in this run; None when it could not run.
        note: reason why there is no time, or a remark.
    """

    allowed = (("launch", (*LAUNCHES, PRELAUNCHED)), ("implementation", IMPLEMENTATIONS))
    figures = ("time_us",)

    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    gemms_us: float
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    correct: bool | None
    note: str = ""


def _check(options: ChainOptions, place: LaunchTarget) -> None:
    """Refuse names that are not known on this kind of device."""
    names = {name: getattr(options, name) for name in ("implementations", "variants", "launches")}
    check_asked(place.device_type, (Kind.ALL_GATHER,), **names)


def _measure(rank: Rank, options: ChainOptions, sender: Sender) -> Iterator[ChainRow]:
    """Make the rows. Collective."""
    dtype = torch.float32 if rank.device.type == "cpu" else torch.bfloat16
    step = rank.world_size * WIDTH * dtype.itemsize

    def rounded(nbytes: int) -> int:
        return -(-nbytes // step) * step

    sizes = sender.rounded(options.sizes_on(rank.device.type), rounded)
    sender.steps = len(sizes)
    roster = make_roster(rank, wanted=options.implementations, timeout_s=options.step_s)
    cases = [Case.on(rank, Kind.ALL_GATHER, size, dtype) for size in sizes]
    roster.reserve_for(cases, sender.note)
    seeds = itertools.count(options.seed + 1)
    for case in cases:
        sender.step(f"chain over an all-gather of {format_bytes(case.nbytes)}")
        yield from measure_case(roster, case, options, seeds)
    roster.close()


def measure_case(roster: Roster, case: Case, options: ChainOptions, seeds: Iterator[int]) -> Iterator[ChainRow]:
    """Measure all that takes part at one size. Collective.

    Args:
        roster: what takes part; its buffers hold the case.
        case: an all_gather of whole rows of ``WIDTH`` elements.
        options: of the study.
        seeds: gives seeds, the same on every rank.

    Yields:
        Rows, the same on every rank.
    """
    meter, found = roster.meter, WayComparison[Entrant, Chain]()

    def check(candidate: Entrant, chain: Chain) -> Problem | None:
        problem = _checked(meter, gemms, chain.sample, candidate, next(seeds))
        chain.release()
        return problem

    with meter.on_stream():
        gemms = Gemms(case, meter)
        for implementation in roster.implementations.values():
            for candidate in _candidates(implementation, options):
                chain = _chain(gemms, ReadyCall(candidate, case, implementation), implementation)
                if chain.collective.tensors.output is None:
                    continue
                problem = _prepare(meter, gemms, chain, candidate.launch == "graph", seeds)
                found.add(candidate, problem or chain)
                if problem is not None:
                    chain.release()
        jobs = {ALONE: Job(gemms.alone, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)}
        if any(candidate.launch == "graph" for candidate in found.ready):
            graph = captured(gemms.alone, CALLS)
            jobs[ALONE_AS_GRAPH] = Job(graph.replay, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
        jobs |= {candidate: chain.job() for candidate, chain in found.ready.items()}
        found.rounds = timed = meter.rounds(jobs, warmup=options.warmup, repeats=options.repeats)
        found.check_again(check)
    for candidate, ran, rounds, problem in found:
        alone = timed.get(ALONE_AS_GRAPH, timed[ALONE]) if candidate.launch == "graph" else timed[ALONE]
        variant = candidate.variant if ran is None else ran.collective.variant
        yield _row(case, candidate, variant, rounds, alone, problem)


def _candidates(implementation: Implementation, options: ChainOptions) -> list[Entrant]:
    """Every way in which an implementation can run the chain."""
    found = candidates_of(implementation, Kind.ALL_GATHER, only=options.variants, launches=options.launches)
    if isinstance(implementation, OwnDma) and (not options.launches or PRELAUNCHED in options.launches):
        comm = implementation.communicator
        found += [
            Entrant(implementation.name, variant, in_place, PRELAUNCHED)
            for in_place in (False, True)
            for variant in prelaunchable(applicable(Kind.ALL_GATHER, comm.world_size, comm.abilities))
            if not options.variants or variant in options.variants
        ]
    return found


def _chain(gemms: Gemms, collective: ReadyCall, implementation: Implementation) -> Chain:
    if isinstance(implementation, OwnDma) and collective.candidate.launch == PRELAUNCHED:
        return PrelaunchedChain(gemms, collective, implementation.communicator)
    return Chain(gemms, collective)


def _prepare(meter: Meter, gemms: Gemms, chain: Chain, as_graph: bool, seeds: Iterator[int]) -> Problem | None:
    candidate = chain.collective.candidate
    for step in chain.preparation():
        refused = meter.attempt(step)
        if refused is not None:
            return Problem(f"{step.__name__}: {refused}")
    problem = _checked(meter, gemms, chain.run, candidate, next(seeds))
    if problem is None and as_graph:
        refused = meter.attempt(chain.capture)
        problem = None if refused is None else Problem(f"capture: {refused}")
    chain.collective.settle()
    return problem


def _checked(meter: Meter, gemms: Gemms, run: Callable[[], None], candidate: Entrant, seed: int) -> Problem | None:
    """Run on a fresh input and compare. Collective."""

    def step() -> None:
        gemms.refill(seed + 1000 * meter.rank)
        run()

    def compare() -> str | None:
        expected = gemms.expected()
        meter.finish("the reference")
        # One product in two shapes may be summed in another order.
        return None if torch.allclose(gemms.y, expected, rtol=2e-2, atol=2e-2) else "the consumer's output is wrong"

    return meter.check(str(candidate), step, compare)


def _row(
    case: Case,
    candidate: Entrant,
    variant: str,
    rounds: Rounds | None,
    alone: Rounds,
    problem: Problem | None,
) -> ChainRow:
    return ChainRow(
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=candidate.in_place,
        launch=candidate.launch,
        implementation=candidate.implementation,
        variant=variant,
        gemms_us=alone.median_us,
        **outcome(rounds, problem),
    )


COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<variant": "variant",
    "<place": lambda row, _: "in" if row.in_place else "out",
    "chain\nus": "time_us",
    "GEMMs\nalone us": "gemms_us",
    "between\nus": lambda row, _: number(None if row.time_us is None else row.time_us - row.gemms_us),
    "<correct": "correct",
}
BEST_COLUMNS = (
    *("bytes", "<launch", "<fastest of\nSidelane", "us", "auto\nus", "<fastest of\nthe library", "us", "ratio"),
)
OWN = ("dma", "sm", "auto")


def chain_tables(rows: Sequence[ChainRow]) -> list[Table]:
    """Make a table of Sidelane's best against the library's, then one for each way to launch."""
    return [
        *([_chain_summary(rows)] if rows else []),
        *tables_by(
            rows,
            lambda row: row.launch,
            lambda row: f"GEMM, all_gather, GEMM, {row.dtype}, {row.launch}",
            COLUMNS,
            keys=4,
            groups=lambda row: row.bytes,
            least=lambda row: row.time_us,
            ordered=True,
        ),
    ]


def _chain_summary(rows: Sequence[ChainRow]) -> Table:
    """The fastest of both sides, size by size. Libraries have no prelaunched calls: there it is their eager one."""

    def fastest(nbytes: int, launch: str, names: Collection[str]) -> ChainRow | None:
        found = [row for row in rows if (row.bytes, row.launch) == (nbytes, launch) and row.implementation in names]
        return min((row for row in found if row.time_us), key=lambda row: row.time_us or 0.0, default=None)

    lines = []
    for (nbytes, launch), _ in grouped(rows, lambda row: (row.bytes, row.launch)):
        ours, auto = fastest(nbytes, launch, OWN), fastest(nbytes, launch, ("auto",))
        theirs = fastest(nbytes, "eager" if launch == PRELAUNCHED else launch, OF_LIBRARY)
        us = [number(row.time_us if row else None) for row in (ours, auto, theirs)]
        # On our side without the implementation: the variant tells it.
        named = [[text_of(row, (), cell) for cell in COLUMNS.values()] if row else [] for row in (ours, theirs)]
        names = [" ".join(filter(None, each[first:4])) for each, first in zip(named, (2, 1), strict=True)]
        ratio = theirs.time_us / ours.time_us if theirs and theirs.time_us and ours and ours.time_us else None
        cells = (format_bytes(nbytes), launch, names[0], us[0], us[1], names[1], us[2])
        lines.append(Line((*cells, MISSING if ratio is None else f"{ratio:.3f}"), best=ratio is not None and ratio > 1))
    return Table(f"GEMM, all_gather, GEMM, {rows[0].dtype}: the fastest", BEST_COLUMNS, tuple(lines), keys=2)


STUDY = Study(
    name="chain",
    title="From a GEMM to a collective and back",
    legend=(
        "A producer GEMM, an all-gather of what it made, a consumer GEMM, on one stream; 'between' is the chain "
        "less both GEMMs alone. Medians over rounds of the slowest rank; the fastest of each size is bold. "
        "Prelaunched: the copies are armed ahead of the producer and fired behind it. The first table has the "
        "fastest of NCCL (Gloo on CPUs) over that of Sidelane, bold where ours is ahead; launched alike, but "
        "prelaunched calls against eager ones. Ours is the best of more ways than theirs; 'auto' is the one that "
        "nobody picked afterwards."
    ),
    row=ChainRow,
    tables=chain_tables,
    measure=_measure,
    check=_check,
    progress="producer, all-gather, consumer",
)
