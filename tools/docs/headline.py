"""Tables of the README: what Sidelane and the others take, through which entry point, on which machine, and when."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from docs import of_collectives
from docs.measured import (
    AUTO,
    EXCHANGE,
    GATHER,
    KIB,
    LABELS,
    MIB,
    REDUCED,
    Cells,
    Row,
    Where,
    best,
    fastest,
    is_possible,
    ratio,
    rows_of,
    run,
    short,
    size,
)

MACHINES = {"h200x4": "four H200s", "h200x2": "two H200s", "h100x2": "two H100s"}
NEWEST = of_collectives.NEWEST.removesuffix(".json")
GROUP, ENABLE, COMMUNICATOR = '`"sidelane"`', "`fsdp.enable`", "`Communicator`"
KERNELS, COPIES, BOTH = "kernels", "copy engines, 0 SMs", "copies, 0 SMs; sums: kernels"
SETTINGS = {
    "launch order": {"serial", "c3_base", "c3_sp"},
    "copy engines": {"nccl_ce"},
    "priority": {"priority"},
    "partitions": {"c3_rp", "c3_sp_rp", "c3_target"},
}
"""Strategies of a pair that need nothing of Sidelane, by the setting of NCCL or of its caller."""


MS, US = ("step_ms", "ms"), ("time_us", "us")
WAY: tuple[Where, Where] = {"way": ("nccl", "symm_mem")}, {"way": "group"}
STEP: tuple[Where, Where] = {"implementation": ("nccl", "nccl_ce")}, {"implementation": "sidelane"}
CALL: tuple[Where, Where] = {"implementation": ("nccl", "nccl_ce", "symm_mem")}, AUTO
PAIR: tuple[Where, Where] = {"strategy": tuple(set().union(*SETTINGS.values()))}, {"strategy": "auto"}
E2E, FSDP, CLIENTS, C3 = (f"h200x2/{name}.json" for name in ("e2e", "fsdp-nccl-2.32", "clients", "c3"))
Line = tuple[str, str, str, str, Where, tuple[Where, Where], tuple[str, str]]
"""Workload, entry point and mover of the bytes, in words ("": ``made_by`` of the row); file, columns of both sides
and of each; column, unit."""
LINES: list[Line] = [
    ("token of Llama 3.1 8B, 8 sequences, CUDA graph", GROUP, KERNELS, E2E,
     {"launch": "graph", "size": "llama-3.1-8b-x8"}, WAY, MS),
    *(
        (f"token of Llama 3.1 8B, {sequences} sequence{'s' * (sequences > 1)}, engine of {name}", "plug-in", KERNELS,
         "h200x2/engines.json", {"server": server, "sequences": sequences},
         ({"implementation": server}, {"implementation": "sidelane"}), ("ms_per_token", "ms"))
        for server, name, sequences in (("vllm", "vLLM 0.26.0", 1), ("vllm", "vLLM 0.26.0", 64))
    ),
    ("token of Llama 3.1 8B, 8 sequences, engine of SGLang 0.5.15 in deterministic mode, where it takes NCCL",
     "plug-in", KERNELS, "h200x2/engines.json",
     {"server": "sglang", "sequences": 8, "commit": "0b964bc4", "deterministic": True},
     ({"implementation": "sglang"}, {"implementation": "sidelane", "launched_ahead": True}), ("ms_per_token", "ms")),
    ("token of Llama 3.1 8B, 64 sequences, layers of vLLM 0.26.0 in batch-invariant mode, where vLLM takes NCCL",
     "plug-in", KERNELS, "h200x2/servers.json",
     {"model": "llama-3.1-8b", "sequences": 64, "peers": "nvlink", "batch_invariant": True},
     ({"implementation": ("nccl", "vllm")}, {"implementation": "sidelane"}), ("ms_per_token", "ms")),
    ("token of Llama 3.1 8B, 1 sequence, no peer access, CUDA graph", GROUP, KERNELS, "h200x2/no-peers-decode.json",
     {"launch": "graph", "size": "llama-3.1-8b-x1"}, WAY, MS),
    ("FSDP2, 4 layers of Llama 70B forward and backward, 1 x 2048 tokens", ENABLE, BOTH, FSDP,
     {"model": "llama-70b-like", "seq": 2048}, STEP, MS),
    ("FSDP2, 10 layers of Llama 8B forward and backward, 1 x 8192 tokens", ENABLE, BOTH, FSDP,
     {"model": "llama-8b-like", "seq": 8192}, STEP, MS),
    *(
        (f"FSDP2 step of Mistral 7B, {optimizer}, {batch} x 2048 tokens", ENABLE, BOTH, CLIENTS,
         {"program": "fsdp", "model": "mistral-7b", "batch": batch}, (WAY[0], {"way": "enable"}), MS)
        for batch, optimizer in ((1, "AdamW"), (4, "SGD"))
    ),
    ("DDP step of Llama 3.1 8B, AdamW, 1 x 2048 tokens", GROUP, "", CLIENTS,
     {"program": "ddp", "model": "llama-3.1-8b"}, WAY, MS),
    ("GEMM 8192x8192x8192 and all-gather of 896 MiB", COMMUNICATOR, COPIES, C3,
     {"gemm": "cb1", "bytes": 896 * MIB, "collective": GATHER}, PAIR, US),
    ("GEMM 8192x8192x8192 and all-to-all of 896 MiB", COMMUNICATOR, COPIES, C3,
     {"gemm": "cb1", "bytes": 896 * MIB, "collective": EXCHANGE}, PAIR, US),
    *(
        (f"{LABELS[kind]} of {size(nbytes)}, CUDA graph", COMMUNICATOR, KERNELS, f"h200x2/{of_collectives.NEWEST}",
         {"launch": "graph", "collective": kind, "bytes": nbytes, "in_place": kind == REDUCED}, CALL, US)
        for kind, nbytes in ((REDUCED, 64 * KIB), (EXCHANGE, MIB), (REDUCED, 256 * MIB))
    ),
]  # fmt: skip


def headline() -> Cells:
    """Return a line for each question of a user: one row of a file, and the best of the baseline there."""
    cells = [["what", "entry point", "moved by", "baseline", "Sidelane", "times as fast", "measured"]]
    for what, entry, by, file, where, sides, (column, unit) in LINES:
        both = [best(rows_of(file), {**where, **side}, column) for side in sides]
        assert all(both), f"{file} lacks a row of {where}"
        faster = f"**{ratio(rows_of(file), where, *sides, column)}**", run(file, {**where, **sides[1]}, column)
        by = by or movers(fastest(rows_of(file), {**where, **sides[1]}, column))
        theirs, ours = (f"{short(one)} {unit}" for one in both)
        cells.append(
            [what, entry, by, f"{theirs}{winner(rows_of(file), {**where, **sides[0]}, column)}", ours, *faster]
        )
    return cells


def winner(rows: list[Row], where: Where, column: str) -> str:
    """Return the name of the fastest row of a baseline in brackets, if there are several to choose from.

    >>> winner([{"way": "nccl", "us": 2}, {"way": "symm_mem", "us": 1}], {"way": ("nccl", "symm_mem")}, "us")
    ' (PyTorch)'
    """
    key = next((name for name, values in where.items() if isinstance(values, tuple)), "")
    row = fastest(rows, where, column) if key else None
    settings = {code: f"NCCL, {words}" for words, codes in SETTINGS.items() for code in codes}
    names = {**settings, "nccl": "NCCL", "nccl_ce": "NCCL, copy engines", "symm_mem": "PyTorch"}
    return f" ({names[row[key]]})" if row else ""


def movers(row: Row | None) -> str:
    """Return what moved the bytes of the calls that a row lists, in the words of this table.

    >>> movers({"made_by": "9 all_reduce by sidelane (b2b); 4 broadcast by sidelane (one_shot)"})
    'copies, 0 SMs; sums: kernels'
    >>> movers({"made_by": "9 all_reduce by nccl (sum of float64); 1 broadcast by sidelane (one_shot)"})
    'kernels and NCCL'
    """
    assert row is not None
    made = [call.partition(" by ")[2] for call in row["made_by"].split("; ")]
    by_kernels = any(one.startswith("sidelane") and "_shot" in one for one in made)
    by_copies = any(one.startswith("sidelane") and "_shot" not in one for one in made)
    ours = (BOTH if by_kernels else COPIES) if by_copies else KERNELS if by_kernels else ""
    return " and ".join(filter(None, (ours, "NCCL" * any(one.startswith("nccl") for one in made))))


def over_all_sizes() -> Cells:
    """Return geometric means of collectives, by machine, with each kind of call that loses somewhere."""
    cells: Cells = []
    for machine, *kinds in (
        ("h200x2", NEWEST, "broadcasts"),
        ("h200x4", *of_collectives.LISTS),
        ("h100x2", "collectives"),
    ):
        for kind in kinds:
            head, *lines = of_collectives.by_size(machine, kind)
            cells = cells or [[*head, "measured"]]
            cells += [[f"{one[0]}, {MACHINES[machine]}", *one[1:], run(f"{machine}/{kind}.json")] for one in lines]
    return cells


def beside_a_gemm() -> Cells:
    """Return percents of ideal over all pairs of two files: their mean, the worst and the best.

    NCCL has the best of its settings for each pair, in one column the two that are first, in another one all of them.
    What a file lacks is named there.
    """
    first, further = (" and ".join(names) for names in (list(SETTINGS)[:2], list(SETTINGS)[2:]))
    heads = f"NCCL, the best of {first}", f"also of {further}"
    cells = [["percent of ideal beside a GEMM", "pairs", *heads, "`auto`", "measured"]]
    for file in ("h200x2/c3.json", "h200x4/c3.json"):
        rows = [row for row in rows_of(file) if is_possible(row)]
        for kind in (GATHER, EXCHANGE):
            pairs: dict[tuple[Any, ...], dict[str, float]] = {}
            for row in rows:
                if row["collective"] == kind:
                    ways = pairs.setdefault((row["gemm"], row["bytes"]), {})
                    ways[row["strategy"]] = max(row["percent_of_ideal"], ways.get(row["strategy"], -1e9))
            both = [ways for ways in pairs.values() if {"auto", "nccl_ce"} <= ways.keys()]
            words = (
                _nccl(both, *list(SETTINGS)[:2]),
                _nccl(both, *SETTINGS),
                f"**{_spread([w['auto'] for w in both])}**",
            )
            cells.append([f"{LABELS[kind]}, {MACHINES[file.partition('/')[0]]}", str(len(both)), *words, run(file)])
    return cells


def _nccl(pairs: Sequence[dict[str, float]], *settings: str) -> str:
    """Return the best of some settings, or the names of those that a pair lacks."""
    if lacking := [name for name in settings if not all(ways.keys() & SETTINGS[name] for ways in pairs)]:
        return f"{', '.join(lacking)}: not measured"
    wanted = set().union(*(SETTINGS[name] for name in settings))
    return _spread([max(percent for way, percent in ways.items() if way in wanted) for ways in pairs])


def _spread(percents: Sequence[float]) -> str:
    return f"{statistics.mean(percents):.0f} ({min(percents):.0f} to {max(percents):.0f})"
