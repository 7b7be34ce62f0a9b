"""Campaigns: episode after episode, added up, shown, and written down after each."""

from __future__ import annotations

import argparse
import collections
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sidelane.cli.output import write_text
from sidelane_lab.harness import provenance
from sidelane_lab.harness.launch import LaunchTarget, choose_target, under_torchrun
from soak.episode import CALLS, CPU, SIZES, Episode, Setting
from soak.judge import Tally, shortened
from soak.world import Verdict, run_episode

MOST_FAILED = 20
"""Failed episodes with which a campaign ends: there is enough to look at."""

MOST_NOTES, MOST_NOTE, SHOWN_EVERY_S = 6, 4000, 30.0

COLUMNS = ("episodes", "failed", "calls", "calls/s", "refusals", "wrong", "errors", "left")

ABOUT = """\
Random calls, with faults among them (make soak). A call counts once for all of its ranks, each of which compared every
byte that it must get, those around it, and those that it must not touch. Refusals: wrong calls of one rank or all, and
calls that differed between ranks. Endings but 'good' are faults, of which every other rank must hear in time, and which
rank's they are. lists and batches count whole calls, replayed the calls in each replay of a graph. In episodes of other
sizes most calls have sizes that never come again, and the memory of a rank must level off; in those of two worlds the
group of all ranks joins worlds in which they have other numbers; on the made-up driver, which may refuse a call, CPU
ranks take the path of GPUs. Late ranks come seconds late to a call, or to the making of a communicator.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, or one episode of it."""
    parser = argparse.ArgumentParser(
        prog="make soak SOAK=",
        description="Random calls in processes of their own, every byte checked: some episodes end well, in others a "
        "rank is killed, stopped, interrupted ..., of which the others must hear.",
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto", help="auto takes two GPUs or more")
    parser.add_argument("--ranks", type=_positive, help="processes; 1 to 8 by chance on CPUs, or every GPU")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same calls")
    parser.add_argument("--calls", type=_positive, help="end when so many have been made")
    parser.add_argument("--minutes", type=float, help="end after so long; 1 without --calls and --episode")
    parser.add_argument("--episode", type=int, help="run this episode of the campaign alone")
    parser.add_argument("--episode-calls", type=_positive, help="of an episode of two ranks; part of what a seed means")
    parser.add_argument("--text", type=Path, help="write what was found to a file")
    options = parser.parse_args(arguments)
    if under_torchrun():
        parser.error("soak starts its own ranks, and ends them (allowed=without torchrun)")
    try:
        place = choose_target(options.ranks, options.device)
    except ValueError as error:
        parser.error(str(error))
    return campaign(options, place)


def campaign(options: argparse.Namespace, place: LaunchTarget) -> int:
    """Run episode after episode until there is enough; 1 if anything was not as it must be, else 0."""
    sizes = tuple(SIZES) if place.on_cpu and options.ranks is None else (place.world_size,)
    calls = options.episode_calls or (CALLS if place.on_cpu else 2 * CALLS)
    setting = Setting(CPU if place.on_cpu else place.device_type, sizes, calls)
    minutes = options.minutes or (None if options.calls else 1.0)
    until = None if minutes is None else time.monotonic() + 60 * minutes
    account = Account(options)
    first = options.episode or 0
    try:
        for number in itertools.count(first):
            episode = Episode.draw(options.seed, number, setting)
            account.add(run_episode(episode, _shown(account, episode)))
            if options.text is not None:
                write_text(options.text, "\n".join([ABOUT, *_heading(), *account.lines(), ""]))
            enough = options.calls is not None and account.tally.calls.total() >= options.calls
            late = until is not None and time.monotonic() >= until
            if enough or late or options.episode is not None or account.failed >= MOST_FAILED:
                break
    finally:  # at Ctrl-C, too
        print("\n".join(account.lines()))
    return 1 if account.failed else 0


class Account:
    """The counts of a campaign's episodes, by ending and by number of ranks, and what was not as it must be."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._sums: dict[tuple[int, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._notes: list[str] = []
        self.tally = Tally()

    @property
    def failed(self) -> int:
        return self._sums[4, "all"]["failed"]

    def add(self, verdict: Verdict) -> None:
        """Count an episode."""
        episode, tally = verdict.episode, verdict.tally
        counts = {"episodes": 1, "failed": int(bool(verdict.failures)), "calls": tally.calls.total()}
        counts |= {"refusals": tally.refusals, "wrong": tally.wrong, "errors": tally.errors}
        counts |= {"left": verdict.leftovers, "seconds": verdict.seconds}  # type: ignore[dict-item]
        for row in ((1, episode.ending), (2, episode.kind), (3, f"{episode.world_size} ranks"), (4, "all")):
            self._sums[row].update(counts)
        self.tally.add(tally)
        for rank, text in verdict.failures[: max(0, MOST_NOTES - len(self._notes))]:
            where = "" if rank is None else f", rank {rank}"
            again = f"again: make soak SOAK='{self._again(episode)}'"
            self._notes.append(f"episode {episode.number}{where}:\n{shortened(text, MOST_NOTE)}\n{again}")

    def lines(self) -> list[str]:
        """Return a table, the calls by kind, and what was not as it must be."""
        found = [f"{'':16}" + "".join(f"{column:>10}" for column in COLUMNS)]
        for (_, name), sums in sorted(self._sums.items()):
            sums = collections.Counter(sums)
            sums["calls/s"] = round(sums["calls"] / max(sums["seconds"], 1e-9))
            found.append(f"{name:16}" + "".join(f"{sums[column]:>10,}" for column in COLUMNS))
        found += ["", ", ".join(f"{kind} {calls:,}" for kind, calls in sorted(self.tally.calls.items()))]
        found += [", ".join(f"{name} {count:,}" for name, count in sorted(self.tally.noted.items()))]
        found += [f"{self.tally.compared_bytes / 1e9:.1f} GB compared, {self.tally.allocations:,} allocations"]
        return [*found, *(f"\n{note}" for note in self._notes)]

    def _again(self, episode: Episode) -> str:
        given = {"seed": episode.seed, "episode": episode.number}
        given |= {name: getattr(self._options, name) for name in ("ranks", "device", "episode_calls")}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None)


def _heading() -> list[str]:
    given = provenance.command_line().partition(" ")[2]
    return [*provenance.heading(), f"command:  make soak SOAK={shlex.quote(given)}"]


def _shown(account: Account, episode: Episode) -> Callable[[int], None]:
    """Return what shows, now and then, how far a campaign has come."""
    next_at = [time.monotonic() + SHOWN_EVERY_S]

    def show(calls: int) -> None:
        if time.monotonic() >= next_at[0]:
            next_at[0] += SHOWN_EVERY_S
            done = account.tally.calls.total() + calls
            print(f"{done:,} calls, episode {episode.number}: {episode.ending}", file=sys.stderr, flush=True)

    return show


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 (value={value})")
    return value
