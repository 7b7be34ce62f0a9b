"""Measure a machine with GPUs, all but c3 of what is published: studies in parts with time-outs, a file a study.

`make results RESULTS=folder` calls it. There are parts because GPUs are lent by the minute: what was measured is kept,
whatever becomes of the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidelane.bench.running.launch import choose_target

SIDELANE = str(Path(sys.executable).with_name("sidelane"))
BOTH_ENDS = ("all_gather", "all_to_all")
REDUCTIONS = ("reduce_scatter", "all_reduce")
ENDING_S = 15.0
TAIL_CHARACTERS = 1500


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of a study.

    Attributes:
        arguments: of ``sidelane``, all but ``--json``.
        timeout_s: after which it is ended.
    """

    arguments: tuple[str, ...]
    timeout_s: float


def collectives(kinds: Sequence[str], *options: str) -> tuple[str, ...]:
    """Arguments of ``sidelane collective`` for some kinds, without the pass that profiles."""
    return ("collective", *(word for kind in kinds for word in ("--collective", kind)), *options, "--no-profile")


LISTS = ("--tensors", "8", "--factor", "8", "--iterations", "7", "--min-bytes", "64K", "--max-bytes", "256M")

STUDIES: dict[str, tuple[Part, ...]] = {
    "collectives": (
        Part(collectives(BOTH_ENDS, "--factor", "2", "--max-bytes", "32M", "--iterations", "7"), 180),
        Part(collectives(BOTH_ENDS, "--min-bytes", "64M", "--iterations", "5"), 120),
        Part(collectives(REDUCTIONS, "--factor", "2", "--max-bytes", "32M", "--iterations", "9"), 180),
        Part(collectives(REDUCTIONS, "--min-bytes", "64M", "--iterations", "5"), 240),
    ),
    "lists": (Part(collectives((*BOTH_ENDS, *REDUCTIONS), *LISTS), 180),),
    # By themselves: NCCL 2.28 fails in groups of broadcasts behind groups of others (docs/lab/performance.md).
    "broadcasts": (
        Part(collectives(("broadcast",), "--factor", "4", "--max-bytes", "1G", "--iterations", "9"), 90),
        Part(collectives(("broadcast",), *LISTS), 60),
    ),
    "chain": (Part(("chain", "--max-bytes", "256M"), 120),),
    "fused": (Part(("fused",), 240),),
    "ordinary": (Part(("ordinary",), 180),),
    "process-group": (Part(("pg",), 120),),
    "fsdp": (
        Part(("fsdp", "--cases", "8b:1x4096,70b:1x2048"), 120),
        Part(("fsdp", "--cases", "8b:2x4096,8b:1x8192,70b:1x4096"), 150),
    ),
    "host": (Part(("host", "--batches", "30"), 90),),
    "phases": (
        Part(("phases", "--variants", "b2b"), 90),
        Part(("phases", "--variants", "alternating,alternating+graph,alternating+opening", "--max-bytes", "4M"), 90),
    ),
    "power": (
        Part(("power",), 180),
        Part(("power", *(w for kind in REDUCTIONS for w in ("--collective", kind)), "--variants", "b2b,pcpy"), 180),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the studies; 1 if any part did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no part that might end later")
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; default: all")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.studies if name not in STUDIES]
    if unknown:
        parser.error(f"STUDY (value={', '.join(unknown)}, allowed={', '.join(STUDIES)})")
    if choose_target().on_cpu:
        parser.error(
            "two GPUs are needed at least (without them: sidelane collective, host, phases ... measure CPU ranks)"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.seconds
    ended = [measure(name, STUDIES[name], given.out, deadline) for name in given.studies or STUDIES]
    return 0 if all(ended) else 1


def measure(name: str, parts: Sequence[Part], out: Path, deadline: float = float("inf")) -> bool:
    """Run the parts of a study and write what has come of them after each; True if all ended well.

    A study that is ended writes the rows until then: they are kept, too.

    Args:
        name: of the study, and of the file.
        parts: in order.
        out: folder.
        deadline: of ``time.monotonic``: a part that might end later is left out.
    """
    found: list[dict[str, Any]] = []
    ended_well = 0
    for number, part in enumerate(parts, 1):
        title = f"[{name} {number}/{len(parts)}]"
        if time.monotonic() + part.timeout_s > deadline:
            print(f"{title} left out: it may take {part.timeout_s:g} s, and there is less", flush=True)
            continue
        rows_file = out / f"{name}.part{number}.json"
        began = time.monotonic()
        problem = run([SIDELANE, *part.arguments, "--json", str(rows_file)], part.timeout_s)
        seconds = time.monotonic() - began
        written = rows_file.exists()
        if written:
            found.append(json.loads(rows_file.read_text()))
            (out / f"{name}.json").write_text(json.dumps(merge(found, name), indent=1) + "\n")
            print(f"{title} {len(found[-1]['rows'])} rows in {seconds:.0f} s", flush=True)
        if problem is not None or not written:
            print(f"{title} failed after {seconds:.0f} s: {problem or 'it wrote nothing'}", flush=True)
        else:
            ended_well += 1
        rows_file.unlink(missing_ok=True)
    return ended_well == len(parts)


def merge(found: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """One result of several: all rows, all commands, each of which ended with a file of its own.

    Raises:
        ValueError: they are not of one study, machine and commit.
    """
    first = found[0]
    for key in ("study", "machine", "ranks", "commit", "software"):
        if any(other.get(key) != first.get(key) for other in found):
            values = ", ".join(str(other.get(key)) for other in found)
            raise ValueError(f"merge: {key} of {name} (value={values}, allowed=the same everywhere)")
    commands = [" ".join([*each["command"].split()[:-1], f"{name}.json"]) for each in found]
    return {**found[-1], "command": "; ".join(commands), "rows": [row for each in found for row in each["rows"]]}


def run(command: Sequence[str], timeout_s: float) -> str | None:
    """Run a command and its children, and end them all at the time-out; what went wrong, with the end of its output."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return None if process.returncode == 0 else f"exit status {process.returncode}\n{output[-TAIL_CHARACTERS:]}"
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:g} s\n{_end(process)[-TAIL_CHARACTERS:]}"
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> str:
    for how in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            return process.communicate(timeout=ENDING_S)[0]
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return process.communicate()[0]


if __name__ == "__main__":
    sys.exit(main())
