"""The study of collectives: every implementation and variant over sizes, each checked before it is timed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sidelane.cli.help import MEASURE
from sidelane.program.builders import variants
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.help import HOW, WHAT
from sidelane_lab.harness.options import (
    LAUNCHES,
    MOST_TENSORS,
    WRITTEN,
    StudyOptions,
    count,
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
from sidelane_lab.harness.parameters import ALL, KINDS
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.study import (
    AS_GOOD,
    IMPLEMENTATIONS,
    MODEL,
    OF_LIBRARY,
    PRELAUNCHED,
    SEPARATE,
    Allowed,
    FlatRow,
    Picture,
    Results,
    Study,
)
from sidelane_lab.harness.table import (
    MISSING,
    Line,
    Table,
    grouped,
    number,
    place_of,
)
from sidelane_lab.harness.ways import Job, Problem, Rounds, outcome

if TYPE_CHECKING:
    from sidelane_lab.baselines.candidate import Entrant, Implementation, ReadyCall
    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.baselines.roster import Roster
    from sidelane_lab.harness.launch import LaunchTarget, Rank
    from sidelane_lab.harness.measure import Meter
    from sidelane_lab.harness.running import Sender
    from sidelane_lab.machines.spec import Machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveOptions(StudyOptions):
    """Time every implementation of a collective at every size, and check what it makes.

    With --tensors: calls with lists, and separate calls one after the other (variants that end with "separate").
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


def _predict(machine: str, options: CollectiveOptions) -> None:
    loaded("papers.predictions").collective_main(machine, options)


collective = study_command("collective", CollectiveOptions, _predict, WRITTEN, MEASURE)


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveRow(FlatRow):
    """One line of a table like that of nccl-tests.

    Attributes:
        bytes: gathered size for an all_gather, the whole local buffer for the others.
        variant: algorithm within the implementation (``pcpy``, ``b2b``, ...; empty where there is one only). With
            ``separate`` or ``+separate``: a call for each tensor of the list, one after the other, instead of one call
            (NCCL: one group of calls) with all of them.
        time_us: time of all calls for the bytes, median over the rounds of the slowest rank.
        bus_gbps: bus bandwidth as nccl-tests defines it (:func:`bus_gbps`).
        energy_mj: energy of all GPUs for one call; None when it was not measured.
        correct: True if outputs agreed with a reference in this run; None when it could not run.
        note: reason why there is no time, or a remark.
        tensors: number of tensors that share the bytes: 1 where a call takes one tensor, as in files without this key;
            otherwise the tensors of a list.
    """

    allowed: ClassVar[Allowed] = (("launch", (*LAUNCHES, MODEL)), ("implementation", IMPLEMENTATIONS))
    figures: ClassVar[tuple[str, ...]] = ("time_us", "bus_gbps")

    collective: str
    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    prelaunch: bool
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    bus_gbps: float | None
    energy_mj: float | None
    correct: bool | None
    note: str = ""
    tensors: int = 1

    def __post_init__(self) -> None:
        FlatRow.__post_init__(self)
        if self.bytes < 0:
            raise ValueError(f"CollectiveRow: bytes must not be negative (value={self.bytes})")
        if self.tensors < 1:
            raise ValueError(f"CollectiveRow: tensors (value={self.tensors}, allowed=1 and more)")

    @property
    def separate(self) -> bool:
        """A list, in a call for each tensor."""
        return self.variant.rpartition("+")[2] == SEPARATE


def bus_gbps(collective: str, nbytes: int, ranks: int, time_us: float) -> float:
    """Bus bandwidth as nccl-tests defines it (its PERFORMANCE.md): comparable over collectives and numbers of ranks.

    >>> bus_gbps("all_gather", 4_000_000_000, 4, 10_000.0)
    300.0
    """
    shares = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    return nbytes / (time_us * 1e3) * shares.get(collective, (ranks - 1) / ranks)


def variant_of(row: CollectiveRow) -> str:
    """Return the name of a row's variant, which says whether it is prelaunched."""
    return row.variant + (PRELAUNCHED if row.prelaunch and "prelaunch" not in row.variant else "")


COLLECTIVE_COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<variant": lambda row, _: variant_of(row),
    "time\nus": "time_us",
    "p10-p90\nus": spread,
    "bus\nGB/s": "bus_gbps",
    "energy\nmJ": "energy_mj",
    "<correct": "correct",
}
LIST_COLUMNS: tuple[str, ...] = (
    *("bytes", "<launch", "list\nus", "separate\nus", "saves\n%", "<fastest of\nthe library", "us", "ratio"),
)


def collective_tables(rows: Sequence[CollectiveRow]) -> list[Table]:
    """One table for each way to call a collective, ordered by size as in nccl-tests; each size's fastest is set off.

    Lists of tensors have one before these that holds them against separate calls and against the library. Predicted
    rows have one for each collective, with a column for each way.
    """
    predicted = [row for row in rows if row.launch == MODEL]
    if predicted:
        return [_predicted_table(alike) for _, alike in grouped(predicted, lambda row: row.collective, ordered=False)]
    listed = [row for row in rows if row.tensors > 1]
    calls = grouped(listed, lambda row: (row.collective, row.dtype, row.in_place, row.tensors))
    tables = [_list_summary(alike) for _, alike in calls]
    for _, alike in grouped(rows, lambda row: (row.collective, row.dtype, row.in_place, row.launch, row.tensors)):
        title = way_to_call(alike[0])
        tables.append(table_of(title, alike, COLLECTIVE_COLUMNS, by=lambda row: row.bytes, ordered=True, keys=3))
    return tables


def _predicted_table(rows: Sequence[CollectiveRow]) -> Table:
    """Show the time of the library and of every variant by size; the fastest is starred."""
    sizes = grouped(rows, lambda row: row.bytes)
    lines = []
    for nbytes, same in sizes:
        us = {(row.implementation, row.variant, row.prelaunch): row.time_us or 0.0 for row in same}
        cells = [f"{one:.1f}" + ("*" if one == min(us.values()) else " ") for one in us.values()]
        # Of copy engines the fastest, but not prelaunched where that saves less than 2%.
        best = min((row for row in same if row.implementation == "dma"), key=lambda row: row.time_us or 0.0)
        plain = us["dma", best.variant, False] <= (best.time_us or 0.0) * AS_GOOD
        lines.append(Line((format_bytes(nbytes), *cells, best.variant if plain else variant_of(best))))
    names = [variant_of(row).replace(PRELAUNCHED, "\n+pre-\nlaunch") or "library" for row in sizes[0][1]]
    title = f"{rows[0].collective}: time in us, predicted (* fastest)"
    return Table(title, ("bytes", *names, "<DMA to take"), tuple(lines))


def _list_summary(rows: Sequence[CollectiveRow]) -> Table:
    """Show what a list saves: ``auto`` in one call and in a call for each tensor, and the library's best."""
    lines = []
    for (nbytes, launch), same in grouped(rows, lambda row: (row.bytes, row.launch)):
        timed = [row for row in same if row.time_us is not None]
        auto = {row.separate: row.time_us for row in timed if row.implementation == "auto"}
        theirs = min(
            (row for row in timed if row.implementation in OF_LIBRARY), key=lambda row: row.time_us or 0.0, default=None
        )
        one, each, other = auto.get(False), auto.get(True), None if theirs is None else theirs.time_us
        saves = f"{100 * (1 - one / each):.0f}" if one and each else MISSING
        ratio = f"{other / one:.3f}" if one and other else MISSING
        name = f"{theirs.implementation} {theirs.variant}".rstrip() if theirs else ""
        cells = (format_bytes(nbytes), launch, number(one), number(each), saves, name, number(other), ratio)
        lines.append(Line(cells, best=bool(one and one <= min(each or one, other or one))))
    first = rows[0]
    title = f"{first.collective}, {first.dtype}, {place_of(first.in_place)}, lists of {first.tensors} tensors"
    note = (
        "list, separate: auto, in one call and in a call for each tensor; ratio: the library's time over that of list"
    )
    return Table(f"{title} against separate calls", LIST_COLUMNS, tuple(lines), (note,), keys=2)


def way_to_call(row: CollectiveRow) -> str:
    """Say what rows of one table and one picture have in common."""
    listed = f", lists of {row.tensors} tensors" if row.tensors > 1 else ""
    return f"{row.collective}, {row.dtype}, {place_of(row.in_place)}, {row.launch}{listed}"


def _line(row: CollectiveRow) -> str:
    """Return what separates the lines of one implementation: lists in a call, and in a call for each tensor."""
    return SEPARATE if row.separate else ""


def draw_ways(rows: Sequence[CollectiveRow], results: Results, folder: Path) -> list[Picture]:
    """A picture for each way to call a collective."""
    from sidelane_lab.harness.drawing import draw_sizes  # ranks do without what draws

    ways = grouped([row for row in rows if row.time_us], way_to_call)
    return [draw_sizes(way, alike, results, folder, _line) for way, alike in ways]


MOST_CALLS = 20
SAMPLE_US = {"cpu": 10_000.0, "gpu": 2_000.0}
"""Shortest time worth sampling; smaller operations are repeated until a sample takes about that long."""

FEW_ROUNDS_FROM_BYTES = 256 << 20
FEW_ROUNDS = 9
HOST_ROUNDS = 4
"""Times as many rounds of what is bound by the host of a GPU: twenty calls take it a quarter of a millisecond, and for
milliseconds it may be half as fast. With nine rounds the same kernel took 12.8 us by its name and 17.0 as the pick of
``auto`` (``results/h200x4/collectives.json``, 7876871: 8 KB)."""

PROFILED_BYTES = 16 << 20


def _check(options: CollectiveOptions, place: LaunchTarget) -> None:
    """Refuse names that are not known on this kind of device."""
    from sidelane_lab.baselines.roster import check_asked

    names = {name: getattr(options, name) for name in ("implementations", "variants", "launches")}
    check_asked(place.device_type, options.collectives, **names, listed=options.tensors > 1)


def calls_per_sample(kind: Kind, nbytes: int, device_type: str, tensors: int = 1) -> int:
    """Operations in a sample: as many as make it long enough to time, at most 20. Of lists as of separate calls.

    >>> [calls_per_sample(Kind.ALL_GATHER, size, "cuda") for size in (1 << 10, 64 << 20, 4 << 30)]
    [20, 14, 1]
    >>> calls_per_sample(Kind.ALL_GATHER, 1 << 10, "cuda", tensors=32)
    6
    """
    sample_us = SAMPLE_US["cpu" if device_type == "cpu" else "gpu"]
    return max(1, min(MOST_CALLS, round(sample_us / _expected_us(kind, nbytes, device_type, tensors))))


def _expected_us(kind: Kind, nbytes: int, device_type: str, calls: int = 1) -> float:
    """A rough time, only to size samples with: latency, and bytes at the pace of one engine or one core."""
    passes = 2 if kind is Kind.ALL_REDUCE else 1
    if device_type == "cpu":
        return 300.0 * calls + passes * nbytes / 1e3
    return 10.0 * calls + passes * nbytes / 500e3


def _measure(rank: Rank, options: CollectiveOptions, sender: Sender) -> Iterator[CollectiveRow]:
    """Make the rows. Collective."""
    import torch

    from sidelane_lab.baselines.reference import ANY_SIZE, cases_of
    from sidelane_lab.baselines.roster import make_roster

    any_size = options.tensors == 1 and {*options.implementations} <= ANY_SIZE and bool(options.implementations)
    roster = make_roster(rank, wanted=options.implementations, timeout_s=options.step_s, listed=options.tensors > 1)
    dtype = getattr(torch, options.dtype)
    cases = cases_of(rank, options, sender, options.collectives, dtype, options.tensors, any_size=any_size)
    roster.reserve_for(cases, sender.note)
    seeds = itertools.count(options.seed + 1)
    for case in cases:
        calls = calls_per_sample(case.kind, case.nbytes, rank.device.type, case.tensors)
        spread = f" in {case.tensors} tensors" if case.tensors > 1 else ""
        sender.step(f"{case.kind} {format_bytes(case.nbytes)}{spread}, {calls} call{'s' * (calls > 1)} a sample")
        absent = absent_rows(roster, case) if case.nbytes == cases[0].nbytes else []
        yield from itertools.chain(absent, measure_case(roster, case, options, seeds))
    if options.profile and roster.kernels_of is not None:
        for line in _kernels(roster, cases, options, next(seeds)):
            sender.note(line)
    roster.close()


def _kernels(roster: Roster, cases: Sequence[Case], options: CollectiveOptions, seed: int) -> Iterator[str]:
    """Which kernels each implementation launches, at the largest size up to 16 MiB of every kind. Collective."""
    from sidelane_lab.baselines.candidate import ReadyCall

    assert roster.kernels_of is not None
    find, meter = roster.kernels_of, roster.meter
    options = dataclasses.replace(options, launches=("eager",))
    for kind in options.collectives:
        sizes = [case for case in cases if case.kind is kind]
        case = max((c for c in sizes if c.nbytes <= PROFILED_BYTES), key=lambda c: c.nbytes, default=sizes[0])
        for implementation in roster.implementations.values():
            for candidate in wanted_candidates(implementation, case, options):
                prepared = ReadyCall(candidate, case, implementation)
                found: list[str] = []

                def step(prepared: ReadyCall = prepared, found: list[str] = found) -> None:
                    prepared.fill(seed)
                    meter.finish(prepared.label)
                    found += find(prepared.run)

                with meter.on_stream():
                    refused = meter.attempt(step)
                shown = ", ".join(name[:60] for name in found) or "none"
                yield f"kernels of {kind}, {candidate}: {shown if refused is None else f'not known: {refused}'}"


def absent_rows(roster: Roster, case: Case) -> list[CollectiveRow]:
    """One row for each implementation that belongs on this machine and cannot take part, with the reason."""
    from sidelane_lab.baselines.candidate import Entrant

    problems = {name: Problem(f"takes no part: {reason}") for name, reason in roster.unavailable.items()}
    return [_row(case, Entrant(name), None, problem) for name, problem in problems.items()]


def measure_case(
    roster: Roster, case: Case, options: CollectiveOptions, seeds: Iterator[int]
) -> Iterator[CollectiveRow]:
    """Prepare and check everything, time what is right, check once more, and make rows. Collective."""
    from sidelane_lab.baselines.candidate import ReadyCall

    calls = calls_per_sample(case.kind, case.nbytes, case.device.type, case.tensors)
    makers = {
        candidate: functools.partial(ReadyCall, candidate, case, implementation, calls)
        for implementation in roster.implementations.values()
        for candidate in wanted_candidates(implementation, case, options)
    }
    time = functools.partial(time_candidates, roster.meter, case=case, options=options)
    for one in roster.meter.compare(makers, seeds, time):
        variant = one.key.variant if one.way is None else one.way.variant
        yield dataclasses.replace(_row(case, one.key, one.rounds, one.problem), variant=variant)


def wanted_candidates(implementation: Implementation, case: Case, options: CollectiveOptions) -> list[Entrant]:
    """Every way to run a case that the options ask for."""
    from sidelane_lab.baselines.candidate import candidates_of

    listed = bool(case.sizes)
    find = functools.partial(candidates_of, implementation, case.kind, launches=options.launches, listed=listed)
    found = find(only=options.variants)
    return [c for c in found if not options.places or ("in" if c.in_place else "out") in options.places]


def time_candidates(
    meter: Meter, prepared: Mapping[Entrant, ReadyCall], case: Case, options: CollectiveOptions
) -> dict[Entrant, Rounds]:
    """Time them, interleaved; what the host limits apart from what the device does, and more often. Collective."""
    from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US

    by_device: dict[Entrant, Job] = {}
    by_host: dict[Entrant, Job] = {}
    for candidate, bound in prepared.items():
        if hides_launches(case, candidate):
            by_device[candidate] = bound.job(HIDDEN_LAUNCH_US)
        else:
            by_host[candidate] = bound.job(0.0)
    repeats = min(options.repeats, FEW_ROUNDS) if case.nbytes >= FEW_ROUNDS_FROM_BYTES else options.repeats
    times = meter.rounds(by_device, warmup=options.warmup, repeats=repeats) if by_device else {}
    if by_host:
        more = repeats if case.device.type == "cpu" else HOST_ROUNDS * repeats
        times |= meter.rounds(by_host, warmup=options.warmup, repeats=more)
    return times


def hides_launches(case: Case, candidate: Entrant) -> bool:
    """True where the clock starts when the host is done.

    What takes long is bound by the device, however it is launched, and a graph is timed for what the device makes of
    it. Of a list each tensor must take that long: to hand over fewer calls is a part of what a list is for.
    """
    from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US

    expected_us = _expected_us(case.kind, case.nbytes // case.tensors, case.device.type)
    return case.device.type != "cpu" and (candidate.launch == "graph" or expected_us >= HIDDEN_LAUNCH_US)


def _row(case: Case, candidate: Entrant, rounds: Rounds | None, problem: Problem | None) -> CollectiveRow:
    columns = outcome(rounds, problem)
    time_us = columns["time_us"]
    return CollectiveRow(
        collective=case.kind,
        bytes=case.nbytes,
        dtype=str(case.dtype).removeprefix("torch."),
        in_place=candidate.in_place,
        launch=candidate.launch,
        implementation=candidate.implementation,
        variant=candidate.variant,
        prelaunch=False,
        bus_gbps=None if time_us is None else bus_gbps(case.kind, case.nbytes, case.world_size, time_us),
        energy_mj=None,
        tensors=case.tensors,
        **columns,
    )


def predicted_rows(machine: Machine, options: CollectiveOptions) -> list[CollectiveRow]:
    """Return the library's rows, and those of the DMA collectives paper's variants as that paper ran them."""
    from sidelane_lab.model.study import dma_study  # a measurement does not load the model

    study = dma_study(machine, options.sizes_on("cuda"))
    times = [("nccl", kind, "", False, nbytes, us) for (kind, nbytes), us in study.library_us.items()]
    times += [("dma", *key, us) for key, us in study.dma_us.items()]
    return [
        CollectiveRow(
            *(kind, nbytes, options.dtype, False, MODEL, implementation, variant, prelaunched),
            *(us, None, None, bus_gbps(kind, nbytes, machine.gpus, us), None, None),
        )
        for implementation, kind, variant, prelaunched, nbytes, us in times
        if kind in options.collectives
    ]


DISTURBED = 0.05
"""Share of a time by which queues that share an engine must matter for both times to be predicted."""
ENGINES = "nccl_ce"
"""NCCL on copy engines. Its rows had been looked at when they were first predicted."""


def predict_row(machine: Machine, row: CollectiveRow) -> tuple[float, ...]:
    """Predict times, what to plan with first; two where a GPU's queues share an engine, which ranks may do in step.

    Out of step two GPUs often send to one port while another idles, and 0.59 to 0.64 of a link is left; in step each
    has a port for itself. One program does either, from run to run (docs/lab/model.md).
    """
    alone = predict_alone(machine, row)
    if alone is None or row.implementation != "dma" or machine.gpus <= 2 or float(machine.dma.shared_queues) == 1:
        return () if alone is None else (alone,)
    in_step = predict_alone(machine.with_value("dma.shared_queues", 1), row)
    return (alone,) if in_step is None or in_step > (1 - DISTURBED) * alone else (alone, in_step)


def predict_alone(machine: Machine, row: CollectiveRow) -> float | None:
    """Predict a collective alone, what to plan with; None if the model does not speak to it."""
    from sidelane_lab.model.collectives import KINDS, executed_run, library_us

    if row.collective not in tuple(KINDS) or row.launch != "graph" or row.tensors > 1:
        return None
    kind = Kind(row.collective)
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return library_us(machine, kind, row.bytes)
    if row.implementation == ENGINES and kind not in REDUCING:
        moved = executed_run(machine, Kind.ALL_GATHER, row.bytes, "b2b", True).time_us
        own = float(machine.dma.copy_us) + row.bytes / machine.gpus / (float(machine.dma.local_gbps) * 1e3)
        return moved if row.in_place else moved + own  # one engine for all peers, and the own chunk behind them
    if row.implementation != "dma" or row.variant not in variants(kind) or row.prelaunch:
        return None
    return executed_run(machine, kind, row.bytes, row.variant, row.in_place).time_us


STUDY = Study(
    name="collectives",
    title="Collectives by size and implementation",
    legend=(
        "Times are medians over rounds of the slowest rank; bus bandwidth is defined as in nccl-tests. The fastest"
        " of each size is bold. Every output was compared with a reference in the same run. dma: Sidelane on copy"
        " engines; sm: Sidelane's kernels; auto: what Sidelane chooses."
    ),
    row=CollectiveRow,
    tables=collective_tables,
    plots=draw_ways,
    measure=_measure,
    predict=predicted_rows,
    predict_row=predict_row,
    check=_check,
    progress="collectives",
)
