"""A storm in parts, one behind the other: how far it is, what each has shown, and the text that keeps it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import rich.console

from sidelane.cli import provenance
from sidelane.cli.launch import choose_target, under_torchrun
from sidelane.cli.output import write_text
from sidelane.cli.terminal import progress_console
from sidelane_lab.soak.episode import CPU, Episode, Setting
from sidelane_lab.soak.shown import shown
from sidelane_lab.soak.storm.described import Storm, parts_of
from sidelane_lab.soak.world import Verdict, run_episode

LEARNT_AND_ALWAYS = ("learn", "always")
"""What a storm is about, unless it is told."""

ABOUT = """\
Storms of ordinary tensors that come and go while peers reach them, with a call in each step (sidelane soak --storm):
new memory, frees, emptied caches, pools, tensors of slots that are replaced, memory that peers cannot map; on GPUs also
calls in graphs, replayed between steps. Every byte that a call wrote or read was compared, and bystanders: memory that
no call touches, where other memory has been. One line for each part and rank. bytes_missing: of memory, against those
behind the first of several seasons (communicators live for one); bytes_behind_season: against those behind the warm-up;
bytes_held: at the end, by holder; mapped: allocations of other ranks; stale: bystanders that have changed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StormOptions:
    """What to run.

    Attributes:
        steps: of all parts together.
        ranks: None takes all GPUs, or two CPU ranks.
        device: ``auto``, ``gpu`` or ``cpu``.
        map_memory: of one part; None: ``learn``, and ``always``, which on GPUs maps memory in captures as well.
        seed: of everything that is random.
        text: file for what it has shown; None writes none.
        quiet: say nothing.
    """

    steps: int
    ranks: int | None = None
    device: str = "auto"
    map_memory: str | None = None
    seed: int = 0
    text: Path | None = None
    quiet: bool = False


def main(options: StormOptions) -> int:
    """Run a storm; 1 if anything was not as it must be, else 0.

    Raises:
        ValueError: options that do not fit this machine.
    """
    if under_torchrun():
        raise ValueError("soak: it starts its own ranks, and ends them (allowed=without torchrun)")
    place = choose_target(options.ranks, options.device)
    ranks = place.world_size if options.ranks is not None or not place.on_cpu else 2
    modes = (options.map_memory,) if options.map_memory else LEARNT_AND_ALWAYS
    setting = Setting(CPU if place.on_cpu else place.device_type, (ranks,))
    console = None if options.quiet else progress_console()
    lines: list[str] = []
    failed, seconds = 0, 0.0
    parts = parts_of(options.steps, modes, on_cpu=place.on_cpu)
    for number, part in enumerate(parts):
        verdict = _run(part, options.seed, number, setting, console)
        failed += bool(verdict.failures)
        seconds += verdict.seconds
        lines += lines_of(part, verdict)
        if console is not None:
            for line in lines_of(part, verdict):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            for rank, text in verdict.failures:
                where = "" if rank is None else f", rank {rank}"
                console.print(f"{part.name}{where}: {text}", markup=False, highlight=False, soft_wrap=True)
        if options.text is not None:  # what there is, if a later part is broken off
            head = [ABOUT, *provenance.heading(), f"command:  {provenance.command_line()}"]
            result = f"{failed} parts failed" if failed else "every byte was right, nothing stale, nothing left"
            result += f", {number + 1} of {len(parts)} parts in {seconds:.0f} s"
            write_text(options.text, "\n".join([*head, f"result:   {result}", "", *lines, ""]))
    return 1 if failed else 0


def lines_of(part: Storm, verdict: Verdict) -> list[str]:
    """What a part has shown, by rank."""
    found = [f"{part.name}: {part.steps:,} steps in {verdict.seconds:.0f} s"]
    for rank, tally in sorted(verdict.by_rank.items()):
        counts = {"rank": rank, "calls": sum(verdict.tally.calls.values()), "wrong": tally.wrong - tally.noted["stale"]}
        counts |= {"errors": tally.errors, "compared_bytes": tally.compared_bytes, **tally.noted}
        found.append(json.dumps({name.replace(" ", "_").replace(",", ""): count for name, count in counts.items()}))
    return found


def _run(part: Storm, seed: int, number: int, setting: Setting, console: rich.console.Console | None) -> Verdict:
    heard = [0]

    def hear(calls: int) -> None:
        heard[0] = calls

    with shown(lambda: f"{part.name}: {heard[0]:,} of {part.steps:,} steps", console):
        return run_episode(Episode.of_storm(part, seed, number, setting), hear)
