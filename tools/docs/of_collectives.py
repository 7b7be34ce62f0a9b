"""Tables of collectives: single tensors, lists, broadcasts, kernels."""

from __future__ import annotations

import itertools

from docs.measured import (
    AUTO,
    BROADCAST,
    COPY_ENGINES,
    EAGER,
    EXCHANGE,
    GATHER,
    GIB,
    GRAPH,
    IN,
    KERNELS,
    KIB,
    LABELS,
    MIB,
    NCCL,
    OTHERS,
    OUT,
    REDUCED,
    SCATTERED,
    Cells,
    Where,
    best,
    each,
    geometric_mean,
    ratio,
    ratios,
    rows_of,
    short,
    size,
    two,
)

MOVED_AND_REDUCED = (GATHER, EXCHANGE, SCATTERED, REDUCED)
NEWEST = "collectives-nccl-2.32.json"
WAYS = {"graph": "in CUDA graphs", "eager": "eager"}
LISTS = {"collectives": "", "broadcasts": "broadcasts, ", "lists": "lists of eight tensors, "}
ONE_CALL: Where = {"variant": ("one_shot", "two_shot", "b2b", "b2b+graph", "striped", "alternating")}
SEPARATE = tuple(f"{name}+separate" for name in ("one_shot", "two_shot", "b2b", "b2b+graph", "striped", "alternating"))
SIZES_OF_LISTS = [64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB, 256 * MIB]
GROUP: Where = {"implementation": ("nccl", "nccl_ce"), "variant": ("", "window")}


CLASSES = {
    "below 1 MiB": (0, MIB),
    "1 to 32 MiB": (MIB, 32 * MIB + 1),
    "above": (32 * MIB + 1, 1 << 60),
    "all": (0, 1 << 60),
}


def by_size(machine: str, *kinds: str) -> Cells:
    """Return geometric means, by size class, of how many times as fast ``auto`` is as the best of NCCL and PyTorch.

    Each way to call that was measured counts once. Kinds are names of files.
    """
    cells = [["times as fast", *CLASSES, "slower by 2%"]]
    for kind, launch in itertools.product(kinds, WAYS):
        points = ratios(rows_of(f"{machine}/{kind}.json"))
        if kind == "lists":  # broadcasts beside others are older: they are measured apart (tools/measure_node.py)
            points = {key: value for key, value in points.items() if key[0] != BROADCAST}
            points |= ratios(row for row in rows_of(f"{machine}/broadcasts.json") if row["tensors"] != 1)
        elif kind == "broadcasts":
            points = {key: value for key, value in points.items() if key[4] == 1}
        values = {key: value for key, value in points.items() if key[3] == launch}
        classes = [[v for k, v in values.items() if least <= k[1] < most] for least, most in CLASSES.values()]
        means = [two(geometric_mean(one)) if one else "" for one in classes]
        slower = f"{sum(value < 1 / 1.02 for value in values.values())} of {len(values)}"
        cells.append([f"{LISTS.get(kind, '')}{WAYS[launch]}", *means[:-1], f"**{means[-1]}**", slower])
    return cells


def against_newest(machine: str) -> Cells:
    """Return how many times as fast ``auto`` is as the best of NCCL 2.32.3 and PyTorch, by collective and launch."""
    points = ratios(rows_of(f"{machine}/{NEWEST}"))
    cells = [["", *(LABELS[kind] for kind in MOVED_AND_REDUCED), "all"]]
    for launch, label in (("eager", "eager"), ("graph", "in graphs")):
        found = {key: value for key, value in points.items() if key[3] == launch}
        means = [geometric_mean(v for k, v in found.items() if k[0] == kind) for kind in MOVED_AND_REDUCED]
        cells.append([f"{label}: {len(found)} points", *map(two, means), f"**{two(geometric_mean(found.values()))}**"])
    return cells


def newest_times(machine: str) -> Cells:
    """Return microseconds in graphs: Sidelane, NCCL 2.32.3 and PyTorch."""
    rows = rows_of(f"{machine}/{NEWEST}")
    sizes = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB, GIB]
    names: dict[str, Where] = {
        "`auto`": {"implementation": "auto"},
        "NCCL 2.32.3": {"implementation": ("nccl", "nccl_ce")},
        "PyTorch": {"implementation": "symm_mem"},
    }
    cells = [["", *map(size, sizes)]]
    for kind in MOVED_AND_REDUCED:
        place = "in place" if kind == REDUCED else "out of place"
        for name, one in names.items():
            where = {"collective": kind, "launch": "graph", "in_place": kind == REDUCED, **one}
            found = [best(rows, {**where, "bytes": nbytes}) for nbytes in sizes]
            if any(found):
                cells.append([f"{LABELS[kind]} {place}: {name}", *map(short, found)])
    return cells


def policies(machine: str) -> Cells:
    """Return microseconds of NCCL 2.32.3 in graphs, by the CTA policy of the call or of the communicator."""
    rows = rows_of(f"{machine}/nccl-policies.json")
    sizes = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB]
    ways: dict[str, Where] = {
        "windows": {"implementation": "nccl", "variant": "window"},
        "windows, `EFFICIENCY` for the call": {"implementation": "nccl", "variant": "window_efficiency"},
        "windows, `ZERO` for the call": {"implementation": "nccl", "variant": "window_zero"},
        "windows, `ZERO` for the communicator": {"implementation": "nccl_ce"},
        "Sidelane, `auto`": {"implementation": "auto"},
    }
    cells = [["", *map(size, sizes)]]
    for kind in (GATHER, EXCHANGE):
        for name, way in ways.items():
            where = {"collective": kind, "launch": "graph", "in_place": False, **way}
            cells.append(
                [f"{LABELS[kind]}: {name}", *(short(best(rows, {**where, "bytes": nbytes})) for nbytes in sizes)]
            )
    return cells


def by_implementation() -> Cells:
    """Return the best of each implementation in some calls among four H200s."""
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
        label = LABELS[kind] + ", " + size(nbytes)
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
                line.append(" / ".join(ratio(rows, {**where, **launch}, NCCL, ours) for launch in (EAGER, GRAPH)))
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


def relays() -> Cells:
    """Broadcasts in place on copy engines."""
    rows = [row for row in rows_of("h200x4/broadcasts.json") if row["tensors"] == 1]
    sizes = [16 * MIB, 64 * MIB, 256 * MIB, GIB]
    cells = [["eager; in a graph", *map(size, sizes)]]
    for label, variant in (("`b2b`: the root sends to each", "b2b"), ("`relay`: a chain", "relay")):
        where = [{"bytes": nbytes, "implementation": "dma", "variant": variant} for nbytes in sizes]
        cells.append([label, *(each([{**w, **launch} for launch in (EAGER, GRAPH)], rows) for w in where)])
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


def kernel_times() -> Cells:
    """Return the best of the others, and Sidelane's kernels, in graphs."""
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
    """Return all-reduces in place of two H200s, in graphs."""
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
