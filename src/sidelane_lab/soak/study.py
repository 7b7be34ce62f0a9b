"""A campaign: episode after episode, added up, written down after each, and gone on with where it stopped."""

from __future__ import annotations

import dataclasses
import datetime
import time
from pathlib import Path
from typing import Any

import rich.console

from sidelane.cli import provenance
from sidelane.cli.launch import LaunchTarget, choose_target, under_torchrun
from sidelane.cli.output import STDOUT
from sidelane.cli.terminal import progress_console, tables_console
from sidelane_lab.harness import report
from sidelane_lab.harness import study as result_files
from sidelane_lab.harness.study import Results, Study, collect
from sidelane_lab.soak.episode import CALLS, CPU, SIZES, Episode, Setting
from sidelane_lab.soak.rows import SOAKED, SoakRow, soak_tables
from sidelane_lab.soak.shown import shown
from sidelane_lab.soak.tally import shortened
from sidelane_lab.soak.world import Verdict, run_episode

MOST_FAILED = 20
"""Failed episodes with which a campaign ends: there is enough to look at."""

MOST_NOTES, MOST_NOTE = 6, 4000
"""Of a file, which is to be read: everything is counted, and the first are told."""

ON_GPUS = 8000
"""Calls of an episode on GPUs, where starting one takes seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """What to run.

    Attributes:
        ranks: of every episode; None draws 1 to 8 on CPUs, and takes all GPUs.
        device: ``auto``, ``gpu`` or ``cpu`` (see ``launch.choose_target``).
        calls: end behind the episode with which there are as many; None: no matter how many.
        minutes: end behind the episode that begins last within them; None: no matter how long.
        seed: of everything that is random.
        episode: run this one alone; None runs all from the first on.
        map_memory: of the communicators: ``off``, ``learn``, ``always``; None: what they have by themselves.
        episode_calls: of an episode of two ranks (more ranks of a CPU make fewer); None: what suits the device.
        json: file for the summary, or ``written.STDOUT``; None writes none.
        resume: go on behind what the file holds.
        command: what to type to run it again; empty takes this process's command line.
        quiet: neither progress nor tables.
    """

    ranks: int | None = None
    device: str = "auto"
    calls: int | None = None
    minutes: float | None = None
    seed: int = 0
    episode: int | None = None
    map_memory: str | None = None
    episode_calls: int | None = None
    json: Path | None = None
    resume: bool = False
    command: str = ""
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.episode is not None and (self.resume or self.json not in (None, STDOUT) or self.calls or self.minutes):
            raise ValueError(
                "soak: one episode is run alone (allowed=without --resume, --json FILE, --calls, --minutes)"
            )
        if self.resume and self.json in (None, STDOUT):
            raise ValueError("soak: --resume goes on with a file (allowed=with --json FILE)")
        if self.resume and self.map_memory is not None:
            raise ValueError(
                "soak: --resume goes on with what communicators do by themselves (allowed=no --map-memory)"
            )
        for name in ("ranks", "calls", "minutes", "episode_calls"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"soak: {name} (value={value}, allowed=above 0)")


def main(options: SoakOptions) -> int:
    """Run a campaign, or one episode of it; 1 if anything was not as it must be, else 0.

    Raises:
        ValueError: options that do not fit this machine, or a file that is not of this campaign.
    """
    if under_torchrun():
        raise ValueError("soak: it starts its own ranks, and ends them (allowed=without torchrun)")
    place = choose_target(options.ranks, options.device)
    campaign = Campaign(options, place)
    try:
        with shown(campaign.line, None if options.quiet else progress_console()):
            campaign.run()
    finally:  # at Ctrl-C, too
        if options.json == STDOUT and campaign.rows():
            result_files.write(STDOUT, campaign.results())
        if not options.quiet and campaign.rows():
            console = tables_console(options.json)
            report.show(campaign.results(), console)
            for row in campaign.rows():
                if row.note:
                    _tell(row, options, console)
    return 1 if campaign.failed else 0


class Campaign:
    """What has been run of a campaign.

    Args:
        options: what to run.
        place: where.

    Attributes:
        failed: episodes with anything wrong, those of earlier runs included.
        heard: calls that the episode under way has counted so far.
        episode: under way.
    """

    def __init__(self, options: SoakOptions, place: LaunchTarget) -> None:
        self._options, self._place = options, place
        sizes = tuple(SIZES) if place.on_cpu and options.ranks is None else (place.world_size,)
        calls = options.episode_calls or (CALLS if place.on_cpu else ON_GPUS)
        self._setting = Setting(CPU if place.on_cpu else place.device_type, sizes, calls, options.map_memory)
        self._kinds: dict[tuple[str, int], SoakRow] = {}
        self._notes: list[SoakRow] = []
        self.failed = self.heard = 0
        self.episode: Episode | None = None
        self._frame: Results | None = None
        self._file = None if options.json == STDOUT else options.json
        if options.resume and self._file is not None and self._file.exists():
            self._take_up(result_files.read(self._file))

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self._kinds.values())

    @property
    def episodes(self) -> int:
        return sum(row.episodes for row in self._kinds.values())

    def line(self) -> str:
        """How far it has come."""
        episode = self.episode
        now = "" if episode is None else f": {episode.world_size} ranks, {episode.ending}"
        bad = f", {self.failed} failed" if self.failed else ""
        return f"{self.calls + self.heard:,} calls, episode {self.episodes}{now}{bad}"

    def run(self) -> None:
        """Episode after episode, until there is enough."""
        options = self._options
        if options.episode is not None:
            self.add(self._perform(options.episode))
            return
        until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        while not (
            (options.calls is not None and self.calls >= options.calls)
            or (until is not None and time.monotonic() >= until)
            or self.failed >= MOST_FAILED
        ):
            self.add(self._perform(self.episodes))
            if self._file is not None:
                result_files.write(self._file, self.results())

    def add(self, verdict: Verdict) -> None:
        """Count an episode."""
        episode = verdict.episode
        kind = (episode.ending, episode.world_size)
        row = self._kinds.get(kind) or _empty(episode)
        tally = verdict.tally
        self._kinds[kind] = dataclasses.replace(
            row,
            episodes=row.episodes + 1,
            failed=row.failed + bool(verdict.failures),
            seconds=row.seconds + verdict.seconds,
            calls=row.calls + tally.calls.total(),
            refusals=row.refusals + tally.refusals,
            allocations=row.allocations + tally.allocations,
            compared_bytes=row.compared_bytes + tally.compared_bytes,
            wrong=row.wrong + tally.wrong,
            errors=row.errors + tally.errors,
            leftovers=row.leftovers + verdict.leftovers,
            **{name: getattr(row, name) + tally.calls[name] for name in SOAKED},
        )
        self.failed += bool(verdict.failures)
        for rank, text in verdict.failures[: max(0, MOST_NOTES - len(self._notes))]:
            note = shortened(text, MOST_NOTE)
            self._notes.append(dataclasses.replace(_empty(episode), episode=episode.number, rank=rank, note=note))

    def rows(self) -> list[SoakRow]:
        """One for each kind of episode, then what was not as it must be."""
        return [*(self._kinds[kind] for kind in sorted(self._kinds)), *self._notes]

    def results(self) -> Results:
        """The summary as a result file has it."""
        rows = self.rows()
        if self._frame is None:  # which asks git, and much else, what is the same for all episodes
            kind = self._place.device_type
            self._frame = collect("soak", rows, device_type=kind, ranks=0, command=self._options.command)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        most = max((row.ranks for row in rows), default=self._place.world_size)
        return dataclasses.replace(
            self._frame, rows=tuple(rows), date=now, ranks=most, gpus=0 if self._place.on_cpu else most
        )

    def _perform(self, number: int) -> Verdict:
        self.episode, self.heard = Episode.draw(self._options.seed, number, self._setting), 0

        def heard(calls: int) -> None:
            self.heard = calls

        return run_episode(self.episode, heard)

    def _take_up(self, results: Results) -> None:
        rows = [row for row in results.rows if isinstance(row, SoakRow)]
        where = self._file
        commit = provenance.commit()
        found = {(row.seed, row.episode_calls, results.on_cpu) for row in rows}
        mine = (self._options.seed, self._setting.calls, self._place.on_cpu)
        if not found <= {mine} or len(rows) < len(results.rows):
            raise ValueError(
                f"soak: --resume: another campaign (value={where}, allowed=a file of --seed {mine[0]}, --episode-calls "
                f"{mine[1]}, on {'CPU ranks' if mine[2] else 'GPUs'})"
            )
        if results.commit != commit:
            raise ValueError(f"soak: --resume: {where} is of another commit (value={results.commit}, allowed={commit})")
        for row in rows:
            if row.note:
                self._notes.append(row)
            else:
                self._kinds[row.ending, row.ranks] = row
        self.failed = sum(row.failed for row in self._kinds.values())


def _tell(row: SoakRow, options: SoakOptions, console: rich.console.Console) -> None:
    """What was not as it must be, in full, and how to see it again."""
    asked = ("ranks", options.ranks), ("device", options.device), ("map-memory", options.map_memory)
    more = [f"--{name} {value}" for name, value in asked if value]
    more += [f"--episode-calls {options.episode_calls}"] * bool(options.episode_calls)
    where = "" if row.rank is None else f", rank {row.rank}"
    console.print(f"\nepisode {row.episode}{where}:\n{row.note}", markup=False, highlight=False)
    again = " ".join(["sidelane soak", f"--seed {row.seed} --episode {row.episode}", *more])
    console.print(f"again: {again}", markup=False, highlight=False, style="bold")


def _empty(episode: Episode) -> SoakRow:
    zeros: dict[str, Any] = dict.fromkeys((*SOAKED, "calls", "refusals", "allocations", "compared_bytes"), 0)
    return SoakRow(
        ending=episode.ending,
        ranks=episode.world_size,
        seed=episode.seed,
        episode_calls=episode.setting.calls,
        episodes=0,
        failed=0,
        seconds=0.0,
        wrong=0,
        errors=0,
        leftovers=0,
        **zeros,
    )


STUDY = Study(
    name="soak",
    title="Random calls, with faults among them",
    legend=(
        "A call counts once for all of its ranks, each of which compared every byte that it must get, what lies "
        "around it, and what it must not touch. Refusals: wrong calls of one rank or all, and calls that differed "
        "between ranks. Endings but 'good' are faults, of which every other rank must hear in time, and of whose "
        "they are."
    ),
    row=SoakRow,
    tables=soak_tables,
)
