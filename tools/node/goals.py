"""What the project asks of a node, next to what its files say: a line each."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.measured import geometric_mean, is_possible, ratios

SLOWEST, MEAN = 1.0, 1.35
HIDDEN_MEAN, HIDDEN_WORST = 90.0, 75.0
RECOVERED = 60.0


def goals(folder: Path) -> Iterator[str]:
    """Of the files that are there: ``auto`` against the libraries, what it hides behind GEMMs, FSDP2 steps, claims.

    Files in which nothing was measured of what is asked (CPU ranks have no graphs) give no line.
    """
    if points := ratios(rows_of(folder / "collectives.json")):
        graphs = {point: ratio for point, ratio in points.items() if point[3] == "graph"}
        if graphs:
            point, least = min(graphs.items(), key=lambda item: item[1])
            slower = sum(ratio < SLOWEST for ratio in graphs.values())
            where = f"{point[0]} of {point[1]} bytes {'in' if point[2] else 'out of'} place"
            yield _line(
                least >= SLOWEST,
                f"auto over the best of NCCL and PyTorch in graphs, slowest of {len(graphs)} points: {least:.2f} "
                f"({where}; {slower} below {SLOWEST:g})",
                f"{SLOWEST:.2f}",
            )
        mean = geometric_mean(points.values())
        yield _line(mean >= MEAN, f"geometric mean of all {len(points)} points: {mean:.2f}", f"{MEAN:g}")
    picked = [row for row in rows_of(folder / "c3.json") if row["strategy"] == "auto"]
    if hidden := [row["percent_of_ideal"] for row in picked if is_possible(row)]:
        mean = statistics.mean(hidden)
        yield _line(
            mean >= HIDDEN_MEAN,
            f"auto next to a GEMM, percent of ideal, mean of {len(hidden)} scenarios: {mean:.1f}",
            f"{HIDDEN_MEAN:g}",
        )
        yield _line(min(hidden) >= HIDDEN_WORST, f"at worst: {min(hidden):.1f}", f"{HIDDEN_WORST:g}")
    steps = [row for row in rows_of(folder / "fsdp.json") if row["implementation"] == "sidelane"]
    if recovered := [row["recovered_percent"] for row in steps if row["recovered_percent"] is not None]:
        least = min(recovered)
        yield _line(
            least >= RECOVERED,
            f"FSDP2 steps, percent recovered, least of {len(recovered)} cases: {least:.0f}",
            f"{RECOVERED:g}",
        )
    summaries = [row for row in rows_of(folder / "claims.json") if is_bound(row)]
    if summaries:
        missed = [f"{row['id']} {row['predicted']:.1f}" for row in summaries if not row["ok"]]
        text = f"bounds of predictions that were met: {len(summaries) - len(missed)} of {len(summaries)}"
        yield _line(not missed, text + (f" (not: {', '.join(missed)})" if missed else ""), "all")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; none if it is not there."""
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.exists() else []


def is_bound(row: dict[str, Any]) -> bool:
    """A claim about the errors of many (``bench.claims.verdicts``)."""
    return re.search(r"/(median|worst|winners)( of held out)?$", row["id"]) is not None


def _line(is_met: bool, text: str, asked: str) -> str:
    return f"{'met' if is_met else 'NOT MET'}: {text}, asked: {asked}"
