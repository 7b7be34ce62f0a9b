"""Every table that is made from results/, by the name that its page gives it.

A page holds a table between two comments::

    <!-- table: broadcasts-h200x4 -->
    ...
    <!-- end of table -->

What stands between them is written by ``python tools/make_docs.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from docs.measured import (
    COPY_ENGINES,
    GIB,
    KERNELS,
    KIB,
    MIB,
    NCCL,
    OTHERS,
    Row,
    Where,
    best,
    each,
    geometric_mean,
    ratios,
    rows_of,
    short,
    size,
    two,
)

Cells = list[list[str]]

EAGER: Where = {"launch": "eager"}
GRAPH: Where = {"launch": "graph"}
IN: Where = {"in_place": True}
OUT: Where = {"in_place": False}
GATHER, EXCHANGE = "all_gather", "all_to_all"
SCATTERED, REDUCED, BROADCAST = "reduce_scatter", "all_reduce", "broadcast"
AUTO: Where = {"implementation": "auto"}
ONE_CALL: Where = {"variant": ("one_shot", "two_shot", "b2b", "b2b+graph", "striped", "alternating")}
SEPARATE = tuple(f"{name}+separate" for name in ("one_shot", "two_shot", "b2b", "b2b+graph", "striped", "alternating"))
SIZES_OF_LISTS = [64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB, 256 * MIB]
GROUP: Where = {"implementation": ("nccl", "nccl_ce"), "variant": ("", "window")}

LABELS = {
    GATHER: "all-gather",
    EXCHANGE: "all-to-all",
    SCATTERED: "reduce-scatter",
    REDUCED: "all-reduce",
    BROADCAST: "broadcast",
}


def geometric_means(machine: str) -> Cells:
    """``auto`` against the best of NCCL and PyTorch, over every way to call that was measured."""
    broadcasts = rows_of(f"{machine}/broadcasts.json")
    # Broadcasts are measured by themselves (tools/measure_node.py): those that stand with other lists are older.
    of_lists = [row for row in rows_of(f"{machine}/lists.json") if row["collective"] != BROADCAST]
    kinds = {
        "all-gather, all-to-all, reduce-scatter, all-reduce": ratios(rows_of(f"{machine}/collectives.json")),
        "broadcast in place": ratios(row for row in broadcasts if row["tensors"] == 1),
        "lists of eight tensors, all five": ratios([*of_lists, *(row for row in broadcasts if row["tensors"] > 1)]),
    }
    cells = [["", "eager", "in graphs", "all"]]
    for label, points in kinds.items():
        means = [geometric_mean(points.values())]
        means[:0] = [geometric_mean(v for k, v in points.items() if k[3] == launch) for launch in ("eager", "graph")]
        cells.append([f"{label}: {len(points)} points", two(means[0]), two(means[1]), f"**{two(means[2])}**"])
    return cells


def by_implementation() -> Cells:
    """The best of each implementation in some calls among four H200s."""
    rows = rows_of("h200x4/collectives.json", "h200x4/broadcasts.json")
    columns: dict[str, Where] = {
        "Sidelane, best on copy engines": COPY_ENGINES,
        "Sidelane, kernel (`one_shot`, `two_shot`)": KERNELS,
        "NCCL kernels": {"implementation": "nccl", "variant": ""},
        "NCCL symmetric windows": {"implementation": "nccl", "variant": "window"},
        "NCCL copy engines": {"implementation": "nccl_ce"},
        "PyTorch symmetric memory": {"implementation": "symm_mem"},
    }
    calls = [
        (GATHER, GIB, OUT, EAGER),
        (GATHER, GIB, IN, EAGER),
        (EXCHANGE, GIB, OUT, EAGER),
        (GATHER, 256 * MIB, OUT, EAGER),
        (GATHER, 64 * MIB, OUT, EAGER),
        (GATHER, 64 * MIB, IN, EAGER),
        (SCATTERED, GIB, OUT, GRAPH),
        (SCATTERED, 64 * MIB, OUT, GRAPH),
        (SCATTERED, 4 * MIB, OUT, GRAPH),
        (REDUCED, GIB, IN, GRAPH),
        (REDUCED, 64 * MIB, IN, GRAPH),
        (REDUCED, 4 * MIB, IN, GRAPH),
        (BROADCAST, GIB, IN, EAGER),
        (BROADCAST, 64 * MIB, IN, EAGER),
        (BROADCAST, 64 * KIB, IN, GRAPH),
        (GATHER, 16 * MIB, OUT, GRAPH),
        (GATHER, MIB, OUT, GRAPH),
        (GATHER, 64 * KIB, OUT, GRAPH),
        (EXCHANGE, 64 * KIB, OUT, GRAPH),
        (GATHER, 64 * KIB, OUT, EAGER),
        (EXCHANGE, MIB, OUT, EAGER),
        (SCATTERED, 64 * KIB, OUT, EAGER),
    ]
    cells = [["", *columns]]
    for kind, nbytes, place, launch in calls:
        where = {"collective": kind, "bytes": nbytes, "tensors": 1, **place, **launch}
        times = [best(rows, {**where, **column}) for column in columns.values()]
        least = min(time for time in times if time is not None)
        shown = [f"**{short(time)}**" if time == least else short(time) for time in times]
        label = LABELS[kind] + ", " + size(nbytes).replace("B", "iB")
        if kind in (GATHER, REDUCED):
            label += ", in place" if place == IN else ", out of place"
        cells.append([label + (", in a graph" if launch == GRAPH else ""), *shown])
    return cells


def large_ratios() -> Cells:
    """NCCL's best over ours where copy engines matter, eager and in a graph."""
    rows = rows_of("h200x4/collectives.json")
    sizes = [64 * MIB, 256 * MIB, GIB]
    calls = [(GATHER, OUT), (GATHER, IN), (EXCHANGE, OUT), (SCATTERED, OUT), (REDUCED, IN)]
    cells = [["eager / graph", *map(size, sizes)]]
    for name, ours in (("copy engines: ", COPY_ENGINES), ("kernels: ", KERNELS)):
        for number, (kind, place) in enumerate(calls):
            line = [("" if number else name) + LABELS[kind] + (" in place" if place == IN else " out of place")]
            for nbytes in sizes:
                where = {"collective": kind, "bytes": nbytes, **place}
                line.append(" / ".join(_ratio(rows, {**where, **launch}, NCCL, ours) for launch in (EAGER, GRAPH)))
            cells.append(line)
    return cells


def broadcasts(machine: str) -> Cells:
    """Broadcasts in place: ``auto``, and NCCL's best."""
    rows = [row for row in rows_of(f"{machine}/broadcasts.json") if row["tensors"] == 1]
    sizes = [KIB << 2 * power for power in range(11)]
    cells = [["", *map(size, sizes)]]
    for label, launch in (("in a graph: `auto`; NCCL", GRAPH), ("eager: `auto`; NCCL", EAGER)):
        where = [{"bytes": nbytes, **launch} for nbytes in sizes]
        cells.append([label, *(each([{**one, **AUTO}, {**one, **NCCL}], rows) for one in where)])
    return cells


def small_copies() -> Cells:
    """Small calls on copy engines: ours, and NCCL's."""
    rows = rows_of("h200x4/collectives.json")
    sizes = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
    calls = [
        ("all-gather out of place: copy engines; NCCL's", GATHER, OUT),
        ("in place", GATHER, IN),
        ("all-to-all", EXCHANGE, OUT),
    ]
    cells = [["", *map(size, sizes)]]
    for label, kind, place in calls:
        where = [{"collective": kind, "bytes": nbytes, **place, **GRAPH} for nbytes in sizes]
        cells.append([label, *(each([{**w, **COPY_ENGINES}, {**w, "implementation": "nccl_ce"}], rows) for w in where)])
    return cells


def lists(machine: str) -> Cells:
    """Eight tensors in one call: ``auto``, and NCCL's best as a group."""
    calls = [(GATHER, OUT), (EXCHANGE, OUT), (SCATTERED, OUT), (REDUCED, IN), (BROADCAST, IN)]
    lines: dict[str, Where] = {"`auto`": {**AUTO, **ONE_CALL}, "NCCL's best, as a group": GROUP}
    others: dict[str, Where] = {
        "one call of copy engines": {"implementation": "dma", "prelaunch": False},
        "`auto` in a call for each tensor": {**AUTO, "variant": SEPARATE},
    }
    cells = [["eager; in a graph", *map(size, SIZES_OF_LISTS)]]
    for number, (kind, place) in enumerate(calls):
        rows = rows_of(f"{machine}/{'broadcasts' if kind == BROADCAST else 'lists'}.json")
        name = f"{LABELS[kind]} {'in' if place == IN else 'out of'} place: "
        for label, who in (lines if number else lines | others).items():
            places = [{"collective": kind, "bytes": nbytes, "tensors": 8, **place, **who} for nbytes in SIZES_OF_LISTS]
            cells.append([name + label, *(each([{**w, **launch} for launch in (EAGER, GRAPH)], rows) for w in places)])
            name = ""
    return cells


def lists_by_kernels(machine: str) -> Cells:
    """Eight tensors in one call in a graph: NCCL's best as a group, and one kernel."""
    calls = [(GATHER, OUT), (EXCHANGE, OUT), (SCATTERED, OUT), (REDUCED, IN), (BROADCAST, IN)]
    cells = [["NCCL; kernel", *map(size, SIZES_OF_LISTS)]]
    for kind, place in calls:
        rows = rows_of(f"{machine}/{'broadcasts' if kind == BROADCAST else 'lists'}.json")
        where = [{"collective": kind, "bytes": nbytes, "tensors": 8, **place, **GRAPH} for nbytes in SIZES_OF_LISTS]
        name = f"{LABELS[kind]} {'in' if place == IN else 'out of'} place"
        cells.append([name, *(each([{**w, **GROUP}, {**w, **KERNELS}], rows) for w in where)])
    return cells


def one_handshake() -> Cells:
    """Phases of an all-gather out of place by two handshakes and by one, two H200s."""
    rows = rows_of("h200x2/phases.json")
    sizes = [KIB, 64 * KIB, MIB]
    cells = [["1 KB", "control", "copy (slot)", "sync", *(f"no stamps: {size(one)}" for one in sizes)]]
    for label, variant, launch in (
        ("`b2b` in a graph", "b2b", GRAPH),
        ("`alternating` in a graph", "alternating", GRAPH),
        ("the first of a graph (`+opening`)", "alternating+opening", GRAPH),
        ("`b2b` eager", "b2b", EAGER),
        ("`alternating` eager", "alternating", EAGER),
        ("`alternating+graph`", "alternating+graph", EAGER),
    ):
        where: Where = {"operation": GATHER, "variant": variant, "source": "measured", **launch}
        control, copy, slot, sync = (
            best(rows, {**where, "bytes": KIB}, column) for column in ("control_us", "copy_us", "stage_us", "sync_us")
        )
        line = [label, short(control), short(copy) + (f" ({short(slot)})" if slot else ""), short(sync)]
        cells.append(line + [short(best(rows, {**where, "bytes": one}, "total_unstamped_us")) for one in sizes])
    return cells


def chains(machine: str) -> Cells:
    """A GEMM, an all-gather, a GEMM: NCCL's best over ours."""
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
            [label, *("; ".join(_ratio(rows, {**w, **launch}, NCCL, ours) for launch in (EAGER, GRAPH)) for w in where)]
        )
    return cells


def kernel_times() -> Cells:
    """The best of the others, and ours by kernels, in graphs."""
    rows = [row for row in rows_of("h200x4/collectives.json", "h200x4/broadcasts.json") if row["tensors"] == 1]
    calls = [(GATHER, OUT), (EXCHANGE, OUT), (SCATTERED, OUT), (REDUCED, IN), (BROADCAST, IN)]
    cells = [["bytes", *(f"{LABELS[kind]}: {who}" for kind, _ in calls for who in ("others", "kernel"))]]
    for nbytes in (KIB << 2 * power for power in range(11)):
        line = [size(nbytes)]
        for kind, place in calls:
            where: Where = {"collective": kind, "bytes": nbytes, **place, **GRAPH}
            line += [short(best(rows, {**where, **side})) for side in (OTHERS, KERNELS)]
        cells.append(line)
    return cells


def two_shots() -> Cells:
    """All-reduces in place of two H200s, in graphs."""
    rows = rows_of("h200x2/collectives.json")
    sizes = [MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB]
    lines: dict[str, Where] = {
        "`two_shot`": {"implementation": "sm", "variant": "two_shot"},
        "`two_shot_push`": {"implementation": "sm", "variant": "two_shot_push"},
        "the best of NCCL and PyTorch": OTHERS,
    }
    cells = [["", *map(size, sizes)]]
    for label, who in lines.items():
        where = [{"collective": REDUCED, "bytes": nbytes, **IN, **GRAPH, **who} for nbytes in sizes]
        cells.append([label, *(short(best(rows, one)) for one in where)])
    return [*cells, ["the bytes alone, at 391 GB/s", *(short(nbytes / 391e3) for nbytes in sizes)]]


def host(machine: str) -> Cells:
    """What a call of 1 KB on symmetric tensors takes the host, microseconds."""
    rows = [row for row in rows_of(f"{machine}/host.json") if row["bytes"] == KIB]
    calls: dict[str, Where] = {
        "`auto` (`one_shot`)": {**AUTO, "symmetric": True},
        "`b2b`": {"implementation": "dma", "variant": "b2b", "operation": GATHER, "symmetric": True},
        "`b2b+graph`": {"implementation": "dma", "variant": "b2b+graph", "operation": GATHER, "symmetric": True},
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
                    label = (
                        f"{LABELS[kind]}, {size(nbytes).replace('B', 'iB')}, {'in' if place == IN else 'out of'} place"
                    )
                    cells.append([label, *(f"**{one:.0f}**" if one == min(known) else _whole(one) for one in found)])
    used = [column for column in range(len(cells[0])) if not column or any(line[column] for line in cells[1:])]
    return [[line[column] for column in used] for line in cells]


def c3() -> Cells:
    """Percent of the strict ideal next to a GEMM, by pair and strategy."""
    rows = rows_of("h200x4/c3.json")
    strategies = ("c3_base", "c3_sp", "nccl_ce", "conccl", "auto")
    cells = [["GEMM next to a collective", "class", *(f"`{name}`" for name in strategies)]]
    for pair in dict.fromkeys((row["gemm"], row["collective"], row["bytes"], row["class"]) for row in rows):
        gemm, kind, nbytes, kind_of_pair = pair
        where = {"gemm": gemm, "collective": kind, "bytes": nbytes}
        found = [best(rows, {**where, "strategy": name}, "percent_of_ideal") for name in strategies]
        shown = [_whole(one) for one in found]
        most = _whole(max(one for one in found if one is not None))
        cells.append([f"{gemm}, {LABELS[kind]} of {nbytes / MIB:.0f} MiB", kind_of_pair])
        cells[-1] += [f"**{one}**" if one == most else one for one in shown]
    return cells


def simulator() -> Cells:
    """How long the simulator takes."""
    cells = [["ranks", "commands", "seconds", "us a command", "peak MB"]]
    for row in rows_of("simulator/scale.json"):
        per_command = row["seconds"] / row["commands"] * 1e6
        cells.append([str(row["ranks"]), f"{row['commands']:,}".replace(",", " "), f"{row['seconds']:.2g}"])
        cells[-1] += [
            f"{per_command:.1f}",
            f"{row['peak_mb']:.2g}" if row["peak_mb"] < 100 else f"{row['peak_mb']:.0f}",
        ]
    return cells


def readme() -> Cells:
    """The table of the README."""
    four = geometric_means("h200x4")
    rows = rows_of("h200x4/c3.json")
    ours = [row["percent_of_ideal"] for row in rows if row["strategy"] == "conccl"]
    nccl = [row["percent_of_ideal"] for row in rows if row["strategy"] in ("c3_base", "c3_sp")]
    single, rooted, many, pairs = (
        f"[{name}](results/h200x4/{name})" for name in ("collectives.json", "broadcasts.json", "lists.json", "c3.json")
    )
    return [
        ["", "four H200s", ""],
        ["eager calls", four[1][1], single],
        ["in CUDA graphs", four[1][2], single],
        ["broadcasts", four[2][3].strip("*"), rooted],
        ["eight tensors in one call", four[3][3].strip("*"), many],
        [
            f"next to a GEMM: percent of ideal (NCCL's kernels: {min(nccl):.0f} to {max(nccl):.0f})",
            f"{min(ours):.0f} to {max(ours):.0f}",
            pairs,
        ],
    ]


TABLES: dict[str, Callable[[], Cells]] = {
    "readme": readme,
    "geometric-means-h200x4": lambda: geometric_means("h200x4"),
    "geometric-means-h200x2": lambda: geometric_means("h200x2"),
    "by-implementation-h200x4": by_implementation,
    "c3-h200x4": c3,
    "large-ratios-h200x4": large_ratios,
    "broadcasts-h200x4": lambda: broadcasts("h200x4"),
    "broadcasts-h200x2": lambda: broadcasts("h200x2"),
    "small-copies-h200x4": small_copies,
    "lists-h200x4": lambda: lists("h200x4"),
    "lists-h200x2": lambda: lists("h200x2"),
    "lists-by-kernels-h200x2": lambda: lists_by_kernels("h200x2"),
    "phases-h200x2": one_handshake,
    "chain-h200x4": lambda: chains("h200x4"),
    "kernel-times-h200x4": kernel_times,
    "two-shots-h200x2": two_shots,
    "host-h200x2": lambda: host("h200x2"),
    "host-h200x4": lambda: host("h200x4"),
    "energy-moving-h200x4": lambda: energies((GATHER, EXCHANGE)),
    "energy-reducing-h200x4": lambda: energies((SCATTERED, REDUCED)),
    "simulator": simulator,
}


def lines_of(name: str) -> list[str]:
    """A table in Markdown.

    Raises:
        ValueError: there is no table of that name.
    """
    if name not in TABLES:
        raise ValueError(f"table: name (value={name!r}, allowed={', '.join(TABLES)})")
    cells = TABLES[name]()
    lines = [re.sub(r"\|\s+(?=\|)", "| ", f"| {' | '.join(line)} |") for line in cells]
    return [lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]


def _ratio(rows: Sequence[Row], where: Where, theirs: Where, ours: Where) -> str:
    over, under = best(rows, {**where, **theirs}), best(rows, {**where, **ours})
    return two(over / under) if over is not None and under is not None else ""


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
