"""Tables of whole workloads, from end-to-end studies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from docs.measured import Cells, Row, rows_of, short, whole

OPERATORS, NONE = "operators", "none"
FUSED = {OPERATORS, "operators, routed", "gemv", "ring", NONE}
"""Ways that are fused or have a layout, and the one without communication; all others are unfused."""

NAMES = {"nccl": "NCCL", "group": "group", "gemv": "GEMV", "ring": "ring", "operators, routed": "routed in each step"}
DEEP_EP = {"rows there": "dispatch", "rows back": "combine"}
"""Parts of a layer of experts, by what DeepEP calls them."""

BEST = "best unfused"


def _rows(machine: str, workload: str) -> list[Row]:
    return [row for row in rows_of(f"{machine}/e2e.json") if row["workload"] == workload]


def _by_way(rows: Sequence[Row], size: str, launch: str) -> dict[str, Row]:
    return {row["way"]: row for row in rows if (row["size"], row["launch"]) == (size, launch)}


def _best(ways: dict[str, Row]) -> Row:
    """Return the fastest of the ways that fuse nothing."""
    return min((row for way, row in ways.items() if way not in FUSED), key=lambda row: row["step_ms"])


def _whole_sizes(rows: Sequence[Row]) -> list[str]:
    """Sizes that are a whole step, which have a way without communication."""
    return list(dict.fromkeys(row["size"] for row in rows if row["way"] == NONE))


def steps(machine: str, workload: str, ways: Sequence[str]) -> Cells:
    """Milliseconds of a step by some ways and by the best unfused one, and what is exposed."""
    rows = _rows(machine, workload)
    shown = [way for way in ways if way != OPERATORS]
    cells = [["", "", *(NAMES[way] for way in shown), BEST, OPERATORS, NONE, "exposed, NCCL", OPERATORS, "recovered"]]
    for launch in ("graph", "eager"):
        for size in _whole_sizes(rows):
            there = _by_way(rows, size, launch)
            best, fused = _best(there), there[OPERATORS]
            times = [there[way]["step_ms"] if way in there else None for way in shown]
            times += [best["step_ms"], fused["step_ms"]]
            least = min(time for time in times if time is not None)
            marked = [f"**{_ms(time)}**" if time == least else _ms(time) for time in times]
            marked[-2] += "" if best["way"] in shown else f" ({best['way']})"
            exposed = [f"{row['exposed_percent']:.1f}%" for row in (there["nccl"], fused)]
            recovered = "more than all" if fused["recovered_percent"] > 100 else f"{whole(fused['recovered_percent'])}%"
            cells.append([size, launch, *marked, _ms(there[NONE]["step_ms"]), *exposed, recovered])
    return cells


def _ms(time: float | None) -> str:
    """Milliseconds; four digits of many, which differ by little."""
    return short(time) if time is None or time < 100 else f"{time:.1f}"


def halves(machine: str, launch: str = "graph") -> Cells:
    """Milliseconds of an MLP with the whole batch and with two halves that take turns."""
    rows = _rows(machine, "mlp")
    ways = {"nccl": "NCCL", "nccl, halves": "NCCL, halves", "copies": "Sidelane", "copies, halves": "Sidelane, halves"}
    cells = [["tokens of a batch", *ways.values(), "nothing communicated"]]
    for size in _whole_sizes(rows):
        there = _by_way(rows, size, launch)
        times = [there[way]["step_ms"] for way in ways]
        marked = [f"**{_ms(time)}**" if time == min(times) else _ms(time) for time in times]
        cells.append([size.replace(" tokens", ""), *marked, _ms(there[NONE]["step_ms"])])
    return cells


def deep_ep(machine: str, launch: str = "graph") -> Cells:
    """Microseconds of DeepEP's dispatch and combine, and gigabytes a second that leave a GPU and that arrive."""
    rows = _rows(machine, "experts")
    cells = [["", "tokens", "", "us", "GB/s out", "GB/s in all", "NCCL, us", f"{BEST}, us"]]
    for part, name in DEEP_EP.items():
        for tokens in (128, 4096):
            for end, kind in (("", "bf16"), (", float8", "fp8")):
                there = _by_way(rows, f"{tokens} tokens, {part}{end}", launch)
                if not there:
                    continue
                row, best = there[OPERATORS], _best(there)
                facts, us = row["facts"], 1e3 * row["step_ms"]
                back = part == "rows back"
                out = facts["combine_leaving_bytes" if back else "dispatch_leaving_bytes"]
                every = facts["dispatch_arriving_bytes"]  # as many rows come back
                line = [name, str(tokens), kind, short(us), whole(out / us / 1e3), whole(every / us / 1e3)]
                others = (1e3 * one["step_ms"] for one in (there["nccl"], best))
                cells.append([*line, *map(short, others)])
                cells[-1][-1] += f" ({best['way']})"
    return cells


def expert_parts(machine: str) -> Cells:
    """Microseconds of parts of a layer with all that is copied and summed on a rank."""
    rows = _rows(machine, "experts")
    ways = ("nccl", "nccl, our sums", "nccl, gathered", "copies", OPERATORS, "operators, routed")
    cells = [["", "", *(NAMES.get(way, way) for way in ways)]]
    parts = ("dispatch", "combine", "dispatch, float8")
    for launch in ("graph", "eager"):
        for size in (f"{tokens} tokens, {part}" for part in parts for tokens in (128, 4096)):
            there = _by_way(rows, size, launch)
            times = [1e3 * there[way]["step_ms"] if way in there else None for way in ways]
            least = min(time for time in times if time is not None)
            cells.append([size, launch, *(f"**{short(time)}**" if time == least else short(time) for time in times)])
    return cells


def exposed(machine: str) -> Cells:
    """Milliseconds that ways expose in graphs, predicted and measured."""
    cells = [["", "NCCL", "group", BEST, OPERATORS]]
    for workload in ("attention", "decode", "experts", "recommendation"):
        rows = _rows(machine, workload)
        for size in _whole_sizes(rows):
            there = _by_way(rows, size, "graph")
            shown = [there.get("nccl"), there.get("group"), _best(there), there.get(OPERATORS)]
            cells.append([f"{workload}, {size}", *(_predicted(row) for row in shown)])
    return cells


def _predicted(row: Row | None) -> str:
    guess = row and ("-" if row["predicted_ms"] is None else f"{row['predicted_ms']:.3g}")
    return f"{guess}, {row['exposed_ms']:.3g}" if row else ""


def errors(machine: str) -> Cells:
    """Errors of predictions in graphs by workload and way, of whole steps and of parts: medians in percent of the step
    and of what is exposed, and the worst in percent of the step."""
    cells = [["", "", "sizes", "median, of the step", "of what is exposed", "worst, of the step", "at"]]
    rows = [row for row in rows_of(f"{machine}/e2e.json") if row["launch"] == "graph" and row["step_ms"]]
    known = [row for row in rows if row["predicted_ms"] is not None]
    keys = dict.fromkeys((row["workload"], row["way"], row["exposed_ms"] is None) for row in known)
    for workload, way, is_part in sorted(keys, key=lambda key: (key[0], key[2])):
        of_step, of_exposed = [], []
        for row in known:
            if (row["workload"], row["way"], row["exposed_ms"] is None) == (workload, way, is_part):
                measured = row["step_ms" if is_part else "exposed_ms"]
                error = 100 * (row["predicted_ms"] - measured)
                of_step.append((error / row["step_ms"], row["size"]))
                of_exposed.append(abs(error / measured))
        worst, size = max(of_step, key=lambda one: abs(one[0]))
        medians = statistics.median(abs(one) for one, _ in of_step), statistics.median(of_exposed)
        shown = f"{medians[0]:.1f}%", f"{medians[1]:.0f}%", f"{worst:+.1f}%"
        cells.append([f"{workload}, parts" if is_part else workload, way, str(len(of_step)), *shown, size])
    return cells


def exposed_by_halves(machine: str) -> Cells:
    """Milliseconds of a step that communication adds, with the whole batch and with two halves that take turns."""
    ways = {"nccl": "NCCL", "nccl, halves": "NCCL, halves", "copies": "Sidelane", "copies, halves": "Sidelane, halves"}
    cells = [["tokens of a batch", "", *ways.values(), "Sidelane, halves, predicted"]]
    rows = _rows(machine, "mlp")
    for size in _whole_sizes(rows):
        for launch in ("graph", "eager"):
            there = _by_way(rows, size, launch)
            times = [_ms(there[way]["exposed_ms"]) for way in ways]
            cells.append([size.replace(" tokens", ""), launch, *times, _ms(there["copies, halves"]["predicted_ms"])])
    return cells
