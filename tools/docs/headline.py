"""Tables of the README: what Sidelane and the others take, through which door, on which machine, and when."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from docs.measured import (
    AUTO,
    BROADCAST,
    EXCHANGE,
    GATHER,
    KIB,
    MIB,
    REDUCED,
    SCATTERED,
    Cells,
    Row,
    Where,
    best,
    geometric_mean,
    is_possible,
    load,
    ratios,
    rows_of,
    short,
    two,
)

MACHINES = {"h200x4": "four H200s", "h200x2": "two H200s"}
NEWEST = "h200x2/collectives-nccl-2.32.json"
GROUP, ENABLE, COMMUNICATOR = '`"sidelane"`', "`fsdp.enable`", "`Communicator`"
KERNELS, COPIES = "kernels", "copy engines"
NCCL_FSDP: Where = {"implementation": ("nccl", "nccl_ce")}
BY_NCCL = ("serial", "c3_base", "c3_sp", "priority", "c3_rp", "nccl_ce")
"""Ways of a pair that need nothing of Sidelane: order, priority, NCCL's CTAs and its copy engines."""
CLASSES = {"below 1 MB": (0, MIB), "1 to 32 MB": (MIB, 32 * MIB + 1), "above": (32 * MIB + 1, 1 << 60)}


def headline() -> Cells:
    """Return a line for each question of a user: one row of a file against the best of the other side there."""
    in_graph: Where = {"launch": "graph"}
    decode: Where = {**in_graph, "size": "llama-3.1-8b-x8"}
    vllm: Where = {"model": "llama-3.1-8b", "sequences": 8, "peers": "nvlink", "batch_invariant": False}
    fsdp: Where = {"model": "llama-70b-like", "batch": 1, "seq": 2048}
    long: Where = {"model": "llama-8b-like", "batch": 1, "seq": 8192}
    host: Where = {**in_graph, "size": "llama-3.1-8b-x1"}
    ddp: Where = {"program": "ddp", "model": "llama-3.1-8b", "batch": 1, "nccl": "2.28.9"}
    public: Where = {"program": "fsdp", "model": "llama-3.2-3b", "batch": 4, "nccl": "2.28.9"}
    of_pair: Where = {"gemm": "cb1", "bytes": 896 * MIB}

    def collective(kind: str, nbytes: int, in_place: bool) -> tuple[str, Where, Where]:
        place: Where = {**in_graph, "collective": kind, "bytes": nbytes, "tensors": 1, "in_place": in_place}
        return NEWEST, {**place, "implementation": ("nccl", "nccl_ce", "symm_mem")}, {**place, **AUTO}

    def pair(kind: str) -> tuple[str, Where, Where]:
        place: Where = {**of_pair, "collective": kind}
        return "h200x2/c3.json", {**place, "strategy": BY_NCCL}, {**place, "strategy": "auto"}

    def step(where: Where) -> tuple[str, Where, Where]:
        return "h200x2/fsdp-nccl-2.32.json", {**where, **NCCL_FSDP}, {**where, "implementation": "sidelane"}

    def client(where: Where, way: str) -> tuple[str, Where, Where]:
        return "h200x2/clients.json", {**where, "way": "nccl"}, {**where, "way": way}

    def token(file: str, where: Where) -> tuple[str, Where, Where]:
        return f"h200x2/{file}", {**where, "way": "nccl"}, {**where, "way": "group"}

    servers = "h200x2/servers.json", {**vllm, "implementation": "vllm"}, {**vllm, "implementation": "sidelane"}
    ms, us, token_ms = ("step_ms", "ms"), ("time_us", "us"), ("ms_per_token", "ms")
    lines: Sequence[tuple[str, str, str, tuple[str, Where, Where], tuple[str, str]]] = [
        ("token of Llama 3.1 8B, 8 sequences, CUDA graph", GROUP, KERNELS, token("e2e.json", decode), ms),
        ("the same in vLLM 0.26.0's layers, and vLLM's own kernel", "plug-in", KERNELS, servers, token_ms),
        ("its token, 1 sequence, without peer access", GROUP, KERNELS, token("no-peers-decode.json", host), ms),
        ("FSDP2 step, 4 layers of Llama 70B, 1 x 2048 tokens", ENABLE, COPIES, step(fsdp), ms),
        ("FSDP2 step, 4 layers of Llama 8B, 1 x 8192 tokens", ENABLE, COPIES, step(long), ms),
        ("FSDP2 step of Llama 3.2 3B, AdamW, 4 x 2048 tokens", ENABLE, COPIES, client(public, "enable"), ms),
        ("DDP step of Llama 3.1 8B, AdamW, 1 x 2048 tokens", GROUP, "NCCL", client(ddp, "group"), ms),
        ("GEMM 8192x8192x8192 and all-gather of 896 MB", COMMUNICATOR, COPIES, pair(GATHER), us),
        ("GEMM 8192x8192x8192 and all-to-all of 896 MB", COMMUNICATOR, COPIES, pair(EXCHANGE), us),
        ("all-reduce of 64 KB, CUDA graph", COMMUNICATOR, KERNELS, collective(REDUCED, 64 * KIB, True), us),
        ("all-to-all of 1 MB, CUDA graph", COMMUNICATOR, KERNELS, collective(EXCHANGE, MIB, False), us),
        ("reduce-scatter of 64 MB, CUDA graph", COMMUNICATOR, KERNELS, collective(SCATTERED, 64 * MIB, False), us),
        ("all-reduce of 256 MB, CUDA graph", COMMUNICATOR, KERNELS, collective(REDUCED, 256 * MIB, True), us),
    ]
    cells = [["what", "door", "moved by", "the other, at its best", "Sidelane", "times as fast", "measured"]]
    for what, door, by, (file, theirs, ours), (column, unit) in lines:
        found = best(rows_of(file), theirs, column), best(rows_of(file), ours, column)
        if found[0] is None or found[1] is None:
            raise ValueError(f"headline: {file} has no row of {theirs} or of {ours}")
        other, own = (f"{short(one)} {unit}" for one in found)
        cells.append([what, door, by, other, own, f"**{two(found[0] / found[1])}**", _run(file)])
    return cells


def _run(file: str) -> str:
    """Link a file, with its date, Sidelane's version and NCCL's."""
    of = load(file)
    return f"[{of['date'][5:10]}, {of['software']['sidelane']}, NCCL {of['software']['nccl']}](results/{file})"


def over_all_sizes() -> Cells:
    """Return geometric means of times as fast, by size class."""
    cells = [["times as fast as the best of NCCL and PyTorch", *CLASSES, "all", "slower by 2%", "measured"]]
    lists = [row for row in rows_of("h200x4/lists.json") if row["collective"] != BROADCAST]
    files: Sequence[tuple[str, str, list[Row], str | None]] = [
        ("in CUDA graphs, two H200s", NEWEST, rows_of(NEWEST), "graph"),
        ("eager, two H200s", NEWEST, rows_of(NEWEST), "eager"),
        ("in CUDA graphs, four", "h200x4/collectives.json", rows_of("h200x4/collectives.json"), "graph"),
        ("eager, four", "h200x4/collectives.json", rows_of("h200x4/collectives.json"), "eager"),
        (
            "broadcasts, four",
            "h200x4/broadcasts.json",
            [row for row in rows_of("h200x4/broadcasts.json") if row["tensors"] == 1],
            None,
        ),
        ("lists of eight tensors, four", "h200x4/lists.json", lists, None),
    ]
    for what, file, rows, launch in files:
        points = {key: value for key, value in ratios(rows).items() if launch in (None, key[3])}
        means = []
        for least, most in [*CLASSES.values(), (0, 1 << 60)]:
            values = [value for key, value in points.items() if least <= key[1] < most]
            means.append(two(geometric_mean(values)) if values else "")
        slower = sum(value < 0.98 for value in points.values())
        cells.append([what, *means[:-1], f"**{means[-1]}**", f"{slower} of {len(points)}", _run(file)])
    return cells


def beside_a_gemm() -> Cells:
    """Return percents of ideal over all pairs of two files: their mean, the worst and the best."""
    cells = [["percent of ideal beside a GEMM", "pairs", "NCCL, its best setting for each pair", "`auto`", "measured"]]
    for file in ("h200x2/c3.json", "h200x4/c3.json"):
        rows = [row for row in rows_of(file) if is_possible(row)]
        for kind, name in ((GATHER, "all-gather"), (EXCHANGE, "all-to-all")):
            pairs: dict[tuple[Any, ...], dict[str, float]] = {}
            for row in rows:
                if row["collective"] == kind:
                    ways = pairs.setdefault((row["gemm"], row["bytes"]), {})
                    ways[row["strategy"]] = max(row["percent_of_ideal"], ways.get(row["strategy"], -1e9))
            both = [ways for ways in pairs.values() if {"auto", "nccl_ce"} <= ways.keys()]
            nccl = [max(value for way, value in ways.items() if way in BY_NCCL) for ways in both]
            machine = MACHINES[file.partition("/")[0]]
            words = _spread(nccl), f"**{_spread([ways['auto'] for ways in both])}**"
            cells.append([f"{name}, {machine}", str(len(both)), *words, _run(file)])
    return cells


def _spread(percents: Sequence[float]) -> str:
    return f"{statistics.mean(percents):.0f} ({min(percents):.0f} to {max(percents):.0f})"
