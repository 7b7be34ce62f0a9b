"""Rows of the result file: of kernels, and of planted mistakes. The file, the table, and what is bad."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sanitizer import jobs
from sanitizer.cases import RANKS, Case
from sanitizer.jobs import Job, Outcome
from sanitizer.places import Imagined, set_up
from sanitizer.planted import INITCHECK, MEMCHECK, PLANTED, RACECHECK, SYNCCHECK, TOOLS
from sidelane.machine.inventory import machine_name
from sidelane_lab.harness import provenance

Row = dict[str, Any]

LIMITS = {
    "all": "Ranks share one GPU: nothing crosses a link. No tool judges flags between ranks (whether a signal releases "
    "and a wait acquires what it must, at the scope of the system), the order in which stores become visible, or what "
    "only happens when ranks are far apart in time: a planted push whose signal orders nothing passes all four.",
    MEMCHECK: "Sees bounds and alignment of allocations: each tensor, staging, table and arena is one of its own, with "
    "guards behind it, so a byte too far is seen; from one slot of an arena into the next is not.",
    RACECHECK: "Looks at shared memory only: races in global memory, within a GPU or between ranks, it does not see.",
    SYNCCHECK: "Sees threads of a warp that part at a barrier, not whole warps that do.",
    INITCHECK: "Sees loads of bytes that nobody has written since they were allocated, not loads of bytes of an "
    "earlier call; arenas are zeroed but for slots of block flags, as they must be.",
}

NOT_FOUND, NOT_RUN = "NOT FOUND", "NOT RUN to its end"


def identify(case: Case) -> Row:
    """Columns that say which case it is; the kernel is the one that the project chooses."""
    kernel = set_up(case, Imagined()).launches[0].kernel.__name__.lstrip("_")
    variant = f"{case.kind} {case.variant}".strip()
    return {"kernel": kernel, "variant": variant, "ranks": case.ranks, "dtype": case.dtype, "bytes": case.nbytes}


def concerns(name: str, tool: str) -> bool:
    """A planted mistake that a tool must find, or cannot."""
    return tool in (*PLANTED[name].found_by, *PLANTED[name].blind)


def row_of_planted(job: Job, outcome: Outcome) -> Row:
    """A mistake made on purpose: ``planted`` is its variant."""
    mistake, errors = PLANTED[job.planted], outcome.report.errors
    found = bool(errors or outcome.report.first)
    if errors is None and not found:
        verdict = NOT_RUN
    elif job.tool in mistake.found_by:
        verdict = "found, as it must be" if found else NOT_FOUND
    else:
        verdict = (
            "found, though the tool was not known to" if found else "not seen, as expected: the tool cannot judge it"
        )
    told = outcome.trouble.partition(":")[0]
    return {
        "kernel": mistake.kernel.lstrip("_"),
        "variant": "planted",
        "ranks": 0,
        "dtype": "",
        "bytes": 0,
        "tool": job.tool,
        "errors": errors,
        "first_error": outcome.report.first,
        "seconds": round(outcome.seconds, 3),
        "note": "; ".join(word for word in (mistake.what, verdict, told) if word),
    }


def is_bad(row: Row) -> bool:
    """An error of a kernel, a case that did not end, or a planted mistake that was not found or not run."""
    if row["variant"] == "planted":
        return NOT_FOUND in row["note"] or NOT_RUN in row["note"]
    return bool(row["errors"] or row["errors"] is None or row["seconds"] is None or "wrong result" in row["note"])


def write(path: Path, rows: Sequence[Row]) -> None:
    """A file like those of other studies (``sidelane_lab.harness.study``), with what its rows cannot say."""
    device, _ = provenance.accelerator_name()
    said = subprocess.run([jobs.find_sanitizer(), "--version"], capture_output=True, text=True, check=False, timeout=30)
    version = re.search(r"Version (\S+)", said.stdout)
    content = {
        "study": "sanitizer",
        "machine": machine_name(device, 1),
        "gpus": 1,
        "device": device,
        "ranks": max(RANKS),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": provenance.command_line(),
        "software": {**provenance.software_versions(), jobs.SANITIZER: version[1] if version else said.stdout.strip()},
        "limits": LIMITS,
        "rows": sorted(rows, key=lambda row: (row["tool"], row["variant"] != "planted", row["kernel"], row["ranks"])),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """Cases, and errors where there are some, of each kernel under each tool; planted mistakes; what is bad."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["variant"] != "planted":
            found[row["kernel"], row["tool"]].append(row)
    lines = [f"{'kernel':24}" + "".join(f"{tool:>12}" for tool in TOOLS)]
    for kernel in sorted({kernel for kernel, _ in found}):
        cells = []
        for tool in TOOLS:
            of_both = found[kernel, tool]
            bad = sum(is_bad(row) for row in of_both)
            cells.append(f"{len(of_both)} ok" if not bad else f"{bad} of {len(of_both)} BAD")
        lines.append(f"{kernel:24}" + "".join(f"{cell:>12}" for cell in cells))
    lines += [""] + [
        f"{row['tool']:10} {row['errors']!s:>5} {row['note']}" for row in rows if row["variant"] == "planted"
    ]
    bad_rows = [row for row in rows if is_bad(row) and row["variant"] != "planted"]
    return "\n".join(lines + [json.dumps(row) for row in bad_rows[:20]])
