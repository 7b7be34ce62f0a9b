"""Steps of models, by who communicates: columns and parts that the studies ``fsdp``, ``clients`` and ``e2e`` share."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from sidelane.integrations.ledger import SIDELANE, ReportRow
from sidelane_lab.harness.launch import choose_target
from sidelane_lab.harness.running import rows_there, run_study
from sidelane_lab.harness.study import R, Results, Study
from sidelane_lab.harness.table import MISSING
from sidelane_lab.harness.ways import Rounds

GROUP, NONE = "group", "none"
"""Ways: a process group of Sidelane's, and no communication."""

EAGER, GRAPH = "eager", "graph"
FEWEST_ROUNDS = 4


def run_resumed(study: Study[R], options: Any, done: Callable[[R], Hashable]) -> Results | None:
    """Measure what the file does not have; it grows row by row, so that a study that is ended leaves what it has.

    Args:
        study: what to run.
        options: with ``resume`` and ``done``, which is filled in.
        done: what is not measured again, of a row that has a time.
    """
    place = choose_target(options.ranks, options.device)
    known = rows_there(study, options.json, place) if options.resume else ()
    found: Any = known
    options = dataclasses.replace(options, done=frozenset(done(row) for row in found if row.step_ms is not None))
    return run_study(study, options, place=place, known=known, grows=options.json)


def step_columns(times: Rounds | None, library: Rounds | None, floor: Rounds | None) -> dict[str, Any]:
    """Return the columns of a step that follow from its times, the library's, and those without communication."""
    return {
        "step_ms": None if times is None else times.median_us / 1e3,
        "fastest_ms": None if times is None else min(times.times_us) / 1e3,
        "slowest_ms": None if times is None else max(times.times_us) / 1e3,
        "rounds": 0 if times is None else len(times.times_us),
        "over_percent": None if times is None or library is None else over_percent(times, library),
        "exposed_ms": exposed_ms(times, floor),
        "recovered_percent": recovered_percent(times, library, floor),
    }


def over_percent(times: Rounds, others: Rounds) -> float:
    """Return by how many percent a step takes longer than another way's in the same round, median."""
    rounds = zip(times.times_us, others.times_us, strict=True)
    return statistics.median(100 * (one / other - 1) for one, other in rounds)


def exposed_ms(times: Rounds | None, floor: Rounds | None) -> float | None:
    """Return by how much steps take longer than those that communicate nothing; None without either."""
    if times is None or floor is None:
        return None
    pairs = zip(times.times_us, floor.times_us, strict=True)
    return statistics.median(one - least for one, least in pairs) / 1e3


def recovered_percent(times: Rounds | None, library: Rounds | None, floor: Rounds | None) -> float | None:
    """Return the percent of the library's exposed time; None where it has none."""
    if times is None or library is None or floor is None:
        return None
    rounds = zip(times.times_us, library.times_us, floor.times_us, strict=True)
    shares = [100 * (theirs - ours) / (theirs - least) for ours, theirs, least in rounds if theirs > least]
    return statistics.median(shares) if shares else None


def difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of a difference over the norm of the reference."""
    apart = torch.linalg.vector_norm(result.float() - reference.float(), dtype=torch.float64)
    return float(apart / torch.linalg.vector_norm(reference.float(), dtype=torch.float64).clamp_min(1e-30))


def calls_by_maker(rows: Iterable[ReportRow]) -> str:
    """Return who made which calls, and why, as one text."""
    found: Counter[str] = Counter()
    for row in rows:
        why = row.why.partition(":")[0] if row.where == SIDELANE else row.why
        found[f"{row.operation} by {row.where} ({why})"] += row.calls
    return "; ".join(f"{calls} {what}" for what, calls in found.items())


def makers_of(row: Any, rows: object) -> str:
    """Return the makers of the calls and how many each made, which a table has room for."""
    found: dict[str, int] = {}
    for calls, maker in re.findall(r"(\d+) \S.*? by (\w+) \(", row.made_by):
        found[maker] = found.get(maker, 0) + int(calls)
    return ", ".join(f"{maker} {calls}" for maker, calls in found.items())


def spread_ms(row: Any, rows: object) -> str:
    """Return the fastest and the slowest round of a row."""
    if row.fastest_ms is None or row.slowest_ms is None:
        return MISSING
    return f"{row.fastest_ms:.2f}-{row.slowest_ms:.2f}"


def loaded_nccl() -> str:
    """Return the version of the NCCL that this process has loaded: torch only knows the one that it was built with."""
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # it is a part of torch
        return ".".join(map(str, torch.cuda.nccl.version()))
    library.ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"
