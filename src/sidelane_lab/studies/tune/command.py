"""``sidelane tune``: measure the ways to run each collective on this machine, and keep what was found for ``auto``.

The machinery is that of ``sidelane collective``: interleaved rounds, the slowest rank's time, and outputs that are
compared with a reference before and after. Sizes come in passes, wide steps first and what lies between them after: a
study that runs out of time has covered everything, only less finely.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sidelane.choice import Abilities, Candidate, Curve, Profile, choose
from sidelane.choice.candidate import DMA, IMPLEMENTATIONS, SM, everything, find
from sidelane.choice.key import CPU, HOST_MEMORY, SOFTWARE, MachineKey, key_here
from sidelane.choice.store import InForce, in_force, read_profile, user_file
from sidelane.cli.help import CHOOSE
from sidelane.cli.output import write_text
from sidelane.config import BUILTIN
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane.program.shape import CallShape
from sidelane.sizes import format_bytes
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.help import HOW, OUTPUT, output, what
from sidelane_lab.harness.options import StudyOptions, command, kinds, option, run, size_list, values_of, word
from sidelane_lab.harness.parameters import ALL, KINDS, given, refuse_unwritable, required
from sidelane_lab.harness.study import Results, read
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.pairs.workload import GEMM_DTYPES, parse_gemm
from sidelane_lab.studies.collectives import CollectiveOptions, CollectiveRow, measure_case

if TYPE_CHECKING:
    from sidelane_lab.baselines.reference import Case
    from sidelane_lab.harness.launch import Rank
    from sidelane_lab.harness.running import Sender

OUTPUT_FILE: dict[str, Any] = {
    "group": OUTPUT,
    "type": Written(),
    "metavar": "FILE",
    "show_default": "where every communicator of this user finds it",
}
SECONDS: dict[str, Any] = {
    "group": HOW,
    "type": click.FloatRange(min=1),
    "show_default": "75 on GPUs, 150 on CPUs; 240 and 60 with --study c3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions(CollectiveOptions):
    """Measure how each collective runs best on this machine, and keep it for `auto`.

    Every candidate, eager and in graphs, in and out of place, 1K to 256M (16M on CPUs); outputs are checked before and
    after they are timed. Says which choices change.
    """

    examples = (
        ("sidelane tune", "measure this machine, and keep the times for every communicator"),
        ("sidelane tune --quick --collective all_gather", "one collective, roughly"),
        ("sidelane tune --study c3", "GEMMs and collectives alone, by the compute units that they have"),
        ("sidelane tune --from-results collectives.json --output mine.json", "from what was measured already"),
    )

    collectives: tuple[Kind, ...] = kinds(
        tuple(map(Kind, KINDS)), KINDS, "May be repeated. A profile keeps what it had of the others.", every=ALL
    )
    dtype: str = word("--dtype", tuple(ELEMENT_BYTES), "bfloat16", "Type of the elements.")
    quick: bool = option(
        *("--quick", False, "Wide steps between the sizes, few rounds: half a minute on GPUs."), group=HOW, is_flag=True
    )
    budget_s: float | None = option("--seconds", None, "Time for measuring; what is left out is named.", **SECONDS)
    output: Path | None = option("--output", None, "Keep the profile here.", **OUTPUT_FILE)
    # These are no options of the command: a profile needs them all.
    sizes: tuple[int, ...] = ()
    tensors: int = 1
    variants: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    repeats: int = 7
    warmup: int = 2
    profile: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        CollectiveOptions.__post_init__(self)
        if self.tensors != 1:
            raise ValueError(f"TuneOptions: tensors (value={self.tensors}, allowed=1: no choice is made by lists)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsolatedOptions(StudyOptions):
    """Measure GEMMs and collectives alone, by the compute units that they have."""

    study = "isolated"

    gemms: tuple[str, ...] = option(
        "--gemm",
        (),
        "With --study c3: as in sidelane c3. May be repeated.",
        convert=lambda texts: tuple(text.replace(",", "x") for text in texts),
        multiple=True,
    )
    sizes: tuple[int, ...] = size_list(
        "--bytes", "With --study c3. May be repeated.", gpus=("64K", "1M", "16M", "128M", "896M"), cpus=("4K", "1M")
    )
    fresh: bool = option(
        *("--fresh", False, "With --study c3: measure again what the file has."), group=HOW, is_flag=True
    )
    counters: bool = option(
        *("--counters", False, "With --study c3: count bytes of memory instead, with Nsight Compute (ncu)."),
        group=HOW,
        is_flag=True,
    )
    budget_s: float | None = option("--seconds", None, "Time for measuring; what is left out is named.", **SECONDS)
    output: Path | None = option("--output", None, "Keep the profile here.", **OUTPUT_FILE)
    dtype: str = word("--dtype", GEMM_DTYPES, "bfloat16", "Type of the elements.")
    collectives: tuple[Kind, ...] = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    warmup: int = 2
    repeats: int = 5
    timeout_s: float = 600.0
    done: frozenset[Any] = frozenset()  # keys of rows that the file has: the study fills them in

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        for text in self.gemms:
            parse_gemm(text, self.dtype)


COLLECTIVES, C3 = "collectives", "c3"


def _tune(study: str, from_results: Path | None, **parameters: Any) -> None:
    if study == C3:
        if from_results is not None or given("quick"):
            raise ValueError("--from-results, --quick: not with --study c3")
        values, chosen = values_of(IsolatedOptions, parameters), parameters["collectives"]
        if ALL not in chosen:
            values["collectives"] = tuple(map(Kind, chosen))
        run(IsolatedOptions(**values))
        return
    if any(map(given, ("gemms", "sizes", "fresh", "counters", "report"))):
        raise ValueError("--gemm, --bytes, --fresh, --counters, --report: only with --study c3")
    options = TuneOptions(**values_of(TuneOptions, parameters))
    if from_results is None:
        main(options)
    elif options.output is None:
        raise ValueError("--from-results needs --output: it says nothing about this machine")
    else:
        make_profile(from_results, options.output, options.json)


tune = command(
    "tune",
    _tune,
    (TuneOptions, IsolatedOptions),
    heading=CHOOSE,
    besides=(
        what(
            "--study",
            type=click.Choice((COLLECTIVES, C3)),
            default=COLLECTIVES,
            help="c3: GEMMs and collectives alone, by their compute units; goes on where an earlier run stopped. Has a "
            "file of its own (<machine>-c3.json).",
        ),
        output(
            "--from-results",
            type=click.Path(dir_okay=False, exists=True, path_type=Path),
            metavar="FILE",
            help="Do not measure: take the times of this file of `sidelane collective --json`; needs --output.",
        ),
    ),
)


COLUMNS = ("<collective", "<call", "bytes", "<before", "<now", "us", "instead of")


def changes_table(before: InForce, after: Profile, curves: Sequence[Curve]) -> Table:
    """A line for each way to call a collective and each measured size at which the choice differs.

    Args:
        before: what was in force.
        after: the new profile.
        curves: what was measured: where to look for changes, and what this machine has.
    """
    calls = sorted({call for curve in curves for call in _calls(curve)}, key=_order)
    made = tuple(dict.fromkeys(curve.candidate.implementation for curve in curves))
    abilities = Abilities(made, captures=True, through_host=after.key.links == HOST_MEMORY)
    lines = []
    for call in calls:
        old, new = (choose(profile, call, abilities) for profile in (before.profile, after))
        if old.candidate == new.candidate:
            continue
        times = dict(new.table)
        place = "in place" if call.in_place else "out of place"
        cells = (str(call.kind), f"{place}, {'graph' if call.captured else 'eager'}", format_bytes(call.nbytes))
        figures = (_shown(times.get(new.candidate)), _shown(times.get(old.candidate)))
        lines.append(Line((*cells, str(old.candidate), str(new.candidate), *figures)))
    notes = (
        f"{len(calls) - len(lines)} of {len(calls)} choices stay as they are; before: {before.where}",
        "us: measured now; instead of: what the choice before would take now",
    )
    return Table("What auto will do differently", COLUMNS, tuple(lines), notes, keys=3)


def _calls(curve: Curve) -> Sequence[CallShape]:
    return [
        CallShape(curve.kind, curve.world_size, nbytes, curve.dtype, curve.in_place, captured=curve.captured)
        for nbytes, _ in curve.times
    ]


def _order(call: CallShape) -> tuple[str, bool, bool, int]:
    return str(call.kind), call.in_place, call.captured, call.nbytes


def _shown(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.3g}" if time_us < 100 else f"{time_us:.0f}"


Way = tuple[Kind, str, bool, bool, Candidate]


def curves_of(rows: Iterable[CollectiveRow], world_size: int) -> tuple[Curve, ...]:
    """The times of Sidelane's own collectives, in the order of the rows.

    Rows without a time are left out, and those of other libraries, of ``auto``, of prelaunched programs and of lists:
    ``auto`` expects of a list what one tensor of all its bytes takes.

    Args:
        rows: of one run.
        world_size: ranks that took part.
    """
    found: dict[Way, dict[int, float]] = {}
    for row in rows:
        if row.implementation not in IMPLEMENTATIONS or row.time_us is None or row.tensors > 1:
            continue
        kind = Kind(row.collective)
        candidate = find(kind, row.variant)
        if candidate is not None and candidate.implementation == row.implementation:
            way = (kind, row.dtype, row.in_place, row.launch == "graph", candidate)
            found.setdefault(way, {})[row.bytes] = float(f"{row.time_us:.4g}")  # as the file has it
    return tuple(
        Curve(kind, world_size, dtype, in_place, captured, candidate, tuple(sorted(times.items())))
        for (kind, dtype, in_place, captured, candidate), times in found.items()
    )


def profile_of(results: Results) -> Profile:
    """The profile that a result file holds: how the built-in tables are made.

    Raises:
        ValueError: the file has no times of Sidelane's collectives.
    """
    curves = curves_of((row for row in results.rows if isinstance(row, CollectiveRow)), results.ranks)
    if not curves:
        raise ValueError(
            f"profile_of: no times of dma or sm with one tensor a call (value=results of {results.study} on "
            f"{results.machine}, allowed=a file of sidelane collective --json)"
        )
    versions = results.software
    software = tuple(sorted((name, versions[name]) for name in SOFTWARE if name in versions))
    key = (
        MachineKey(CPU, results.device.partition(",")[0], 0, software=software)
        if results.on_cpu
        else MachineKey("cuda", results.device, results.gpus, software=software)
    )
    return Profile(results.machine, key, results.date, results.command, curves)


def replacing(before: Sequence[Curve], measured: Sequence[Curve]) -> tuple[Curve, ...]:
    """Return the new curves, and those of before that are of other collectives or world sizes."""
    new = {(curve.kind, curve.world_size) for curve in measured}
    return (*(curve for curve in before if (curve.kind, curve.world_size) not in new), *measured)


SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = {"cpu": 16 << 20, "gpu": 256 << 20}
BUDGET_S = {"cpu": 150.0, "gpu": 75.0}
QUICK_S = {"cpu": 45.0, "gpu": 30.0}
"""Seconds for measuring. Ranks need about ten more to start, and what has begun is finished."""

SETUP_S = 120.0
"""On top of the budget, before the whole is given up as hanging."""


def main(options: TuneOptions) -> Profile | None:
    """Measure, keep the profile, and say what it changes.

    Returns:
        The profile; None on the other ranks under torchrun.

    Raises:
        RankFailedError: a rank failed; the profile is as it was.
        SidelaneError: an output was wrong. The profile is kept without it.
        ValueError: options do not fit this machine, or nothing could be measured.
    """
    from sidelane.machine import local
    from sidelane_lab.harness import provenance, running
    from sidelane_lab.harness.launch import choose_target
    from sidelane_lab.harness.terminal import progress_console, say, tables_console

    place = choose_target(options.ranks, options.device)
    where = "cpu" if place.on_cpu else "gpu"
    seconds = options.budget_s or (QUICK_S if options.quick else BUDGET_S)[where]
    options = dataclasses.replace(
        options,
        budget_s=seconds,
        timeout_s=seconds + SETUP_S,
        sizes=options.sizes or tuple(itertools.chain(*passes(LARGEST_BYTES[where], quick=options.quick))),
        repeats=3 if options.quick else options.repeats,
        warmup=1 if options.quick else options.warmup,
        # By their names, so that nothing is measured that is no candidate.
        variants=options.variants or tuple({found.variant: None for kind in Kind for found in everything(kind)}),
    )
    progress = None if options.quiet else progress_console()
    peers = local.peers_here(place.device_type)
    key = key_here(place.device_type, place.world_size).between(peers)
    path = options.output or required("tune", user_file(key), "--output, ")
    refuse_unwritable("tune", path)
    follower = running.StudyFollower(CollectiveRow, progress)
    if not running.follow(follower, _measure, options, place, "tuning"):
        return None
    curves = curves_of(follower.rows, place.world_size)
    if not curves:
        raise ValueError("tune: nothing could be measured; the notes above say why")
    previous = _previous(path, key)
    before = in_force(BUILTIN, key, peers) if previous is None else InForce(previous, str(path))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    fresh = Profile(key.short_name, key, now, options.command or provenance.command_line(), ())
    # Of the profile that was in the file only what this run did not measure, and only if it is of the same machine.
    profile = dataclasses.replace(fresh, curves=replacing((previous or fresh).curves, curves))
    write_text(path, profile.to_text())
    if options.json is not None:
        write_text(options.json, profile.to_text())
    if progress is not None:
        tables_console(options.json).print(changes_table(before, profile, curves).to_rich())
        wrong = [row for row in follower.rows if row.time_us is None]
        for row in wrong:
            say(progress, f"left out: {row.collective} {row.implementation} {row.variant}: {row.note}")
        progress.print(f"kept: {path}", markup=False, soft_wrap=True)
    running.require_right("tune", follower.rows)
    return profile


def make_profile(file: Path, output: Path, json: Path | None = None) -> Profile:
    """Make a profile from a result file of ``sidelane collective`` instead of measuring: the built-in tables are such.

    Args:
        file: with the times.
        output: file of the profile.
        json: another file for it, or ``written.STDOUT``; None writes none.

    Raises:
        ValueError: the file is no result file, or has no times of Sidelane's collectives.
    """
    from sidelane_lab.harness.terminal import progress_console, say

    profile = profile_of(read(file))
    write_text(output, profile.to_text())
    if json is not None:
        write_text(json, profile.to_text())
    say(progress_console(), f"{len(profile.curves)} curves of {profile.machine}: {output}")
    return profile


def _previous(path: Path, key: MachineKey) -> Profile | None:
    """Return what a file has of the same machine and software."""
    try:
        found = read_profile(path)
    except ValueError:
        return None
    return found if found is not None and found.key == key else None


def passes(largest: int, *, quick: bool) -> list[tuple[int, ...]]:
    """Powers of 4 from 1 KB to ``largest``: every other one, then those between them (not if it has to be quick).

    >>> passes(1 << 20, quick=False)
    [(1024, 16384, 262144), (4096, 65536, 1048576)]
    """
    sizes = [SMALLEST_BYTES * 4**power for power in range(16) if SMALLEST_BYTES * 4**power <= largest]
    return [tuple(sizes[0::2]), *([] if quick else [tuple(sizes[1::2])])]


def _measure(rank: Rank, options: TuneOptions, sender: Sender) -> Iterator[CollectiveRow]:
    """Make the rows. Collective."""
    import torch

    from sidelane_lab.baselines.reference import Case, rounded_bytes
    from sidelane_lab.baselines.roster import make_roster

    sizes = list(dict.fromkeys(rounded_bytes(nbytes, rank.world_size) for nbytes in options.sizes))
    cases = [
        Case.on(rank, kind, nbytes, getattr(torch, options.dtype)) for nbytes in sizes for kind in options.collectives
    ]
    sender.steps = len(cases)
    wanted = (DMA,) if rank.device.type == "cpu" else (DMA, SM)
    roster = make_roster(rank, wanted=wanted, timeout_s=options.step_s)
    roster.reserve_for(cases, sender.note)
    seeds = itertools.count(options.seed + 1)
    assert options.budget_s is not None

    def over(left: Sequence[Case]) -> None:
        sizes_left = ", ".join(format_bytes(size) for size in sorted({case.nbytes for case in left}))
        count = f"{len(left)} of {len(cases)}"
        sender.note(f"{options.budget_s:g} s are over: {count} steps are left out, of sizes {sizes_left}")

    for case in roster.meter.within(cases, options.budget_s, over):
        sender.step(f"{case.kind} {format_bytes(case.nbytes)}")
        yield from measure_case(roster, case, options, seeds)
    roster.close()
