"""Tables of the other studies: chains, phases, host, power, C3, the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from docs.measured import (
    AUTO,
    EAGER,
    EXCHANGE,
    GATHER,
    GIB,
    GRAPH,
    IN,
    KIB,
    LABELS,
    MIB,
    NCCL,
    OUT,
    RESULTS,
    Cells,
    Where,
    best,
    geometric_mean,
    percent_words,
    ratio,
    rows_of,
    short,
    size,
    two,
    whole,
)
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.files import read_results
from sidelane_lab.papers.measurements import PairReadings


def chains(machine: str) -> Cells:
    """Return NCCL's best over Sidelane's, for a GEMM, an all-gather and a GEMM."""
    rows = rows_of(f"{machine}/chain.json")
    sizes = [MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
    engines: Where = {"implementation": "dma"}
    cells = [["", *map(size, sizes)]]
    for label, place, ours in (
        ("out of place, eager; graph", OUT, AUTO),
        ("in place, eager; graph", IN, AUTO),
        ("copy engines alone, out of place", OUT, engines),
    ):
        where = [{"bytes": nbytes, **place} for nbytes in sizes]
        cells.append(
            [label, *("; ".join(ratio(rows, {**w, **launch}, NCCL, ours) for launch in (EAGER, GRAPH)) for w in where)]
        )
    return cells


def host(machine: str) -> Cells:
    """Return the host's microseconds for a call of 1 KB on symmetric tensors."""
    rows = [row for row in rows_of(f"{machine}/host.json") if row["bytes"] == KIB]
    calls: dict[str, Where] = {
        "`auto` (`one_shot`)": {**AUTO, "symmetric": True},
        "`b2b`": {"implementation": "dma", "variant": "b2b", "operation": GATHER, "symmetric": True},
        "`trigger()`": {"operation": "trigger", "symmetric": True},
        "`trigger_from_host()`": {"operation": "trigger_from_host", "symmetric": True},
        "NCCL": {"implementation": "nccl", "variant": ""},
        "NCCL, symmetric windows": {"implementation": "nccl", "variant": "window"},
        "NCCL, copy engines": {"implementation": "nccl_ce"},
        "`_low_contention_all_gather`": {"implementation": "symm_mem"},
    }
    cells = [["", "median", "best"]]
    for label, where in calls.items():
        calls_of_driver = best(rows, where, "driver_calls")
        if calls_of_driver and calls_of_driver > 1:
            label += f" ({calls_of_driver:.0f} driver calls)"
        cells.append([label, *(short(best(rows, where, column)) for column in ("host_us", "best_us"))])
    return cells


def energies(kinds: Sequence[str]) -> Cells:
    """Millijoules of all GPUs for one call in a graph; the least of each line is bold."""
    rows = rows_of("h200x4/power.json")
    columns: dict[str, Where] = {
        "copy engines (`b2b`)": {"implementation": "dma", "variant": "b2b"},
        "kernel": {"implementation": "sm", "variant": ("one_shot", "two_shot")},
        "narrow kernel (10 SMs)": {"implementation": "sm", "variant": ("one_shot_narrow", "two_shot_narrow")},
        "NCCL kernels": {"implementation": "nccl", "variant": ""},
        "NCCL symmetric windows": {"implementation": "nccl", "variant": "window"},
        "NCCL copy engines": {"implementation": "nccl_ce"},
        "PyTorch, the best": {"implementation": "symm_mem"},
    }
    cells = [["", *columns]]
    for kind in kinds:
        for nbytes in (64 * MIB, 256 * MIB, GIB):
            for place in (OUT, IN):
                where = {"collective": kind, "bytes": nbytes, **place}
                found = [best(rows, {**where, **column}, "energy_mj") for column in columns.values()]
                known = [one for one in found if one is not None]
                if known:
                    label = f"{LABELS[kind]}, {size(nbytes)}, {'in' if place == IN else 'out of'} place"
                    cells.append([label, *(f"**{one:.0f}**" if one == min(known) else whole(one) for one in found)])
    used = [column for column in range(len(cells[0])) if not column or any(line[column] for line in cells[1:])]
    return [[line[column] for column in used] for line in cells]


def c3(
    machine: str,
    strategies: Sequence[str] = ("c3_base", "c3_sp", "nccl_ce", "conccl", "auto"),
    file: str = "c3.json",
    heads: Sequence[str] = (),
) -> Cells:
    """Return percents of ideal next to a GEMM, by pair and strategy; ``heads``: names of these, in place of codes."""
    rows = rows_of(f"{machine}/{file}")
    cells = [["GEMM beside a collective", "class", *(f"`{name}`" for name in heads or strategies)]]
    for pair in dict.fromkeys((row["gemm"], row["collective"], row["bytes"], row["class"]) for row in rows):
        gemm, kind, nbytes, kind_of_pair = pair
        where = {"gemm": gemm, "collective": kind, "bytes": nbytes}
        found = [best(rows, {**where, "strategy": name}, "percent_of_ideal") for name in strategies]
        shown = [percent_words(one) for one in found]
        most = whole(max(one for one in found if one is not None))
        bold = [f"**{one}**" if one == most else one for one in shown]
        cells.append([f"{gemm}, {LABELS[kind]} of {nbytes / MIB:.0f} MiB", kind_of_pair, *bold])
    return cells


def prelaunched(machine: str) -> Cells:
    """Return microseconds from what begins a collective until its end."""
    rows = rows_of(f"{machine}/prelaunch.json")
    straight = {"variant": ("pcpy", "bcst", "b2b"), **OUT}
    ways = {
        "call in a graph": {**GRAPH, "trigger": "call"},
        "by the stream": {"trigger": "stream"},
        "by a kernel": {"trigger": "kernel"},
        "by the host": {"trigger": "host"},
    }
    cells = [["", "NCCL in a graph", *ways]]
    for kind, words, engines, sizes in (
        (GATHER, "", straight, (KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)),
        (EXCHANGE, "", straight, (KIB, MIB, 16 * MIB, 64 * MIB)),
        (EXCHANGE, " by swaps, in place", {"variant": "swap"}, (KIB, MIB, 16 * MIB, 64 * MIB)),
    ):
        for nbytes in sizes:
            where = {"collective": kind, "bytes": nbytes}
            line = [f"{LABELS[kind]}{words}, {size(nbytes)}"]
            line.append("" if words else short(best(rows, {**where, "implementation": "nccl", **GRAPH, **OUT})))
            found = [best(rows, {**where, "implementation": "dma", **engines, **way}) for way in ways.values()]
            cells.append(line + [short(one) for one in found])
    return cells


def fewer_units(machine: str) -> Cells:
    """Return what copy engines reach beside memory-bound computations that have all SMs, and fewer."""
    file = read_results(RESULTS / machine / "c3-classes.json")
    assert file is not None
    readings = PairReadings.of(file).part(bound="memory")
    counts = ("8", "16", "32", "64")
    cells = [["computation", "pairs", "`conccl`", "`conccl_rp`", *(f"{count} SMs fewer" for count in counts)]]
    words = {
        "64x57344x8192": "GEMM, 64 rows: 64 x 57344 x 8192",
        "128x16384x53248": "GEMM, 128 rows: 128 x 16384 x 53248",
        "bag": "embedding bags, 65,536 of 64 rows",
        "attend": "attention, 2,048 queries with 2,048 keys each",
        "add": "addition, 65536 x 8192",
    }
    parts = {
        name: {pair: found for pair, found in readings.rows.items() if pair[0] == gemm} for gemm, name in words.items()
    }
    for name, rows in {**parts, "all of these": readings.rows}.items():
        part = PairReadings(rows)
        slower: dict[str, list[float]] = {count: [] for count in counts}
        for found in rows.values():
            for swept in found["conccl_rp"]["sweep"].split(", "):
                count, time_us = swept.split()
                slower[count].append(float(time_us) / found["conccl"]["time_us"])
        percents = [whole(part.percent(strategy)) for strategy in ("conccl", "conccl_rp")]
        cells.append([name, str(len(rows)), *percents, *(two(geometric_mean(slower[count])) for count in counts)])
    paper = [whole(published()[claim]["value"]) for claim in ("CC-03", "CC-05")]
    return [*cells, ["MI300X, published, GEMMs of both bounds", "30", *paper, *("" for _ in counts)]]


def simulator() -> Cells:
    """Return the simulator's own times."""
    cells = [["ranks", "commands", "seconds", "us a command", "peak MB"]]
    for row in rows_of("simulator/scale.json"):
        per_command = row["seconds"] / row["commands"] * 1e6
        cells.append([str(row["ranks"]), f"{row['commands']:,}".replace(",", " "), f"{row['seconds']:.2g}"])
        cells[-1] += [
            f"{per_command:.1f}",
            f"{row['peak_mb']:.2g}" if row["peak_mb"] < 100 else f"{row['peak_mb']:.0f}",
        ]
    return cells
