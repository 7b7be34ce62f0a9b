"""``python -m attack``: what ``make attack`` runs. Exit status 1 if anything was found."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from attack import report
from attack.campaign import Tally, attack
from attack.workers import tallies


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, or one case of it."""
    options = _options(arguments)
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    print(f"[attack] seed {seed}", flush=True)
    begun = time.monotonic()
    if options.case is not None:
        total = attack(seed, options.case)
    else:
        total = _campaign(seed, options.jobs, options.seconds, options.cases)
    seconds = time.monotonic() - begun
    print("", report.progress(total, seconds), "", *report.table(total), sep="\n")
    for finding in total.findings:
        print("", "FINDING", *report.described(finding), sep="\n")
        if options.case is not None:
            print("  steps:", *(f"    {step}" for step in report.trace(finding)), sep="\n")
    if options.output:
        text = json.dumps(report.as_json(total, seed, seconds), indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")
    return 1 if total.findings else 0


def _campaign(seed: int, jobs: int, seconds: float, cases: int | None) -> Tally:
    total, begun, shown = Tally(), time.monotonic(), 0.0
    try:
        for tally in tallies(seed, jobs, seconds, cases):
            total.add(tally)
            now = time.monotonic()
            if now - shown > 0.5:
                shown = now
                print(f"\r{report.progress(total, now - begun)}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\n[attack] stopped", file=sys.stderr)
    print(file=sys.stderr)
    return total


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attack", description="Try to prove verify wrong.")
    parser.add_argument("--seconds", type=float, default=600, help="after which no further case begins")
    parser.add_argument("--seed", type=int, help="of all cases; another one each time if left out")
    parser.add_argument("--cases", type=int, help="how many at most")
    parser.add_argument("--case", type=int, help="run this one alone, and show each step of what fails")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--output", type=Path, help="file for the numbers and all findings, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
