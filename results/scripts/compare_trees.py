"""Compare the collectives of this tree with those of another commit, in one run on one machine.

Both trees measure the same, in turns (this, the other, the other, this), since machines differ from hour to hour::

    git archive COMMIT src | tar x -C /tmp/before
    cp -r src/sidelane.egg-info /tmp/before/src  # its commands
    python results/scripts/compare_trees.py /tmp/before/src --name COMMIT --out results/h200x2/trees.txt

A figure of a tree is the median of its runs. Each group is the geometric mean of this tree's times over the other's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_text
from sidelane_lab.harness import provenance

HERE = Path(__file__).resolve().parents[2] / "src"
COLLECTIVES = (
    *("collective", "--collective", "all_gather", "--collective", "all_reduce", "--factor", "8"),
    *("--max-bytes", "1G", "--implementations", "dma,auto", "--variants", "b2b,pcpy", "--iterations", "9"),
    "--no-profile",
)
HOST = ("host", "--batches", "15", "--implementations", "dma,sm,auto", "--variants", "one_shot,b2b,striped")
ENTER = ("-c", "from sidelane.cli import main; main()")

Times = dict[tuple[str, ...], float]


def main() -> int:
    """Measure both trees in turns, and print or write how they compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder that holds the package `sidelane` of another commit")
    parser.add_argument("--name", default="the other tree", help="its commit")
    parser.add_argument("--out", type=Path, help="file for what was found")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of one command of one tree")
    parser.add_argument("--max-bytes", default="", help="another largest size")
    arguments = parser.parse_args()
    if not (arguments.other / "sidelane" / "__init__.py").exists():
        parser.error(f"OTHER (value={arguments.other}, allowed=a folder with sidelane/__init__.py)")
    larger = ("--max-bytes", arguments.max_bytes) if arguments.max_bytes else ()
    what = f"this tree's time over that of {arguments.name}; each measured twice, in turns"
    text = "\n".join([*provenance.heading(), f"command:  python results/scripts/compare_trees.py ({what})", ""])
    for command in ((*COLLECTIVES, *larger), HOST):
        found: dict[Path, list[Times]] = {HERE: [], arguments.other: []}
        for tree in (HERE, arguments.other, arguments.other, HERE):
            began = time.monotonic()
            rows = measured(tree, command, arguments.timeout)
            print(f"[{command[0]}] {tree}: {len(rows)} rows in {time.monotonic() - began:.0f} s", flush=True)
            found[tree].append(times_of(rows))
        text += f"\nsidelane {' '.join(command)}\n" + compared(*map(medians, found.values()))
        if arguments.out:  # after each: GPUs are lent by the minute
            write_text(arguments.out, text)
    print(text)
    return 0


def measured(tree: Path, command: tuple[str, ...], timeout_s: float) -> list[dict[str, Any]]:
    """Rows of one command of one tree; none if it failed or took too long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        environment = {**os.environ, "PYTHONPATH": str(tree), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        line = [sys.executable, *ENTER, *command, "--timeout", f"{timeout_s:g}", "--json", str(file)]
        try:
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=timeout_s + 15)
        except subprocess.TimeoutExpired:
            print(f"[{command[0]}] {tree}: ended after {timeout_s:g} s", flush=True)
            return []
        if done.returncode:
            print(f"[{command[0]}] {tree}: {(done.stdout + done.stderr)[-800:]}", flush=True)
        return json.loads(file.read_text())["rows"] if file.exists() else []


def times_of(rows: Iterable[Mapping[str, Any]]) -> Times:
    """Microseconds by group and case."""
    found: Times = {}
    for row in rows:
        time_us = row.get("time_us", row.get("host_us"))
        if not row.get("correct") or not time_us:
            continue
        group = f"{row['implementation']}, {row['launch']}" if "launch" in row else f"{row['implementation']}, host"
        # Copy engines by their best variant: what it is called may have changed.
        kind = row.get("collective") or row.get("operation")
        variant = "" if "launch" in row else str(row.get("variant", ""))
        key = (group, str(kind), str(row["bytes"]), str(row.get("in_place", "")), variant)
        found[key] = min(time_us, found.get(key, math.inf))
    return found


def medians(runs: Iterable[Times]) -> Times:
    """Return the median of each case over the runs that have it."""
    runs = [run for run in runs if run]
    keys = set().union(*runs) if runs else set()
    return {key: statistics.median(run[key] for run in runs if key in run) for key in keys}


def compared(here: Times, other: Times) -> str:
    """A table of groups, and of the cases that differ most."""
    both = sorted(set(here) & set(other))
    lines = []
    for group in sorted({key[0] for key in both}):
        keys = [key for key in both if key[0] == group]
        ratios = {key: here[key] / other[key] for key in keys}
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
        added = statistics.median(here[key] - other[key] for key in keys)
        lines.append(f"  {group:14} {len(keys):3} cases  {mean:.3f}   median difference {added:+.2f} us")
        for key in sorted(keys, key=lambda key: -abs(math.log(ratios[key])))[:3]:
            case = " ".join(word for word in key[1:] if word)
            lines.append(f"      {case:38} {other[key]:9.2f} -> {here[key]:9.2f} us")
    return "\n".join(lines or ["  nothing that both trees measured"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
