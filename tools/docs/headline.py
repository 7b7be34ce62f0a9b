"""Tables of the README: what Sidelane and NCCL take, with the machine, the size and NCCL's version."""

from __future__ import annotations

from docs import of_collectives
from docs.measured import (
    AUTO,
    EXCHANGE,
    GATHER,
    KIB,
    MIB,
    NCCL,
    REDUCED,
    SCATTERED,
    Cells,
    Where,
    best,
    is_possible,
    load,
    rows_of,
    short,
    size,
    two,
)

MACHINES = {"h200x4": "four H200s", "h200x2": "two H200s"}
Line = tuple[str, str, float, float, str, str]
"""What runs, its size, NCCL's time, Sidelane's, their unit, and the result file."""


def headline() -> Cells:
    """Times of NCCL at its fastest and of Sidelane.

    NCCL is the fastest of its kernels, on ordinary memory and in symmetric windows, and of its copy engines, where the
    file has them.
    """
    lines = [
        _collective(GATHER, "all-gather, eager call", 64 * KIB, {"launch": "eager", "in_place": False}),
        _collective(EXCHANGE, "all-to-all, in a CUDA graph", MIB, {"launch": "graph", "in_place": False}),
        _collective(REDUCED, "all-reduce, in a CUDA graph", 64 * KIB, {"launch": "graph", "in_place": True}),
        _collective(REDUCED, "all-reduce, in a CUDA graph", 256 * MIB, {"launch": "graph", "in_place": True}),
        _collective(SCATTERED, "reduce-scatter, in a CUDA graph", 64 * MIB, {"launch": "graph", "in_place": False}),
        _pair(GATHER, "all-gather", 896 * MIB),
        _pair(EXCHANGE, "all-to-all", 896 * MIB),
        _fsdp_step(),
        _decoding(),
        _client("fsdp", "enable", "llama-3.2-3b", 4, "FSDP2 step of Llama 3.2 3B, AdamW"),
        _client("ddp", "group", "llama-3.1-8b", 1, "DDP step of Llama 3.1 8B, AdamW"),
    ]
    versions = {str(load(file)["software"]["nccl"]) for *_, file in lines}
    assert len(versions) == 1, "the column names one version of NCCL"
    cells = [["what runs", "size", f"NCCL {versions.pop()}", "Sidelane", "times as fast", "measured on"]]
    for what, how_much, theirs, ours, unit, file in lines:
        machine = MACHINES[file.partition("/")[0]]
        times = (f"{short(theirs)} {unit}", f"{short(ours)} {unit}", f"**{two(theirs / ours)}**")
        cells.append([what, how_much, *times, f"[{machine}](results/{file})"])
    return cells


def over_all_sizes() -> Cells:
    """Geometric means over sizes, and percent of ideal over pairs."""
    machine = "h200x4"
    single, rooted, many, pairs = (
        f"[{name}](results/{machine}/{name})"
        for name in ("collectives.json", "broadcasts.json", "lists.json", "c3.json")
    )
    means = of_collectives.geometric_means(machine)
    newest, name = of_collectives.against_newest("h200x2"), of_collectives.NEWEST
    rows = rows_of(f"{machine}/c3.json")

    def range_of(*strategies: str) -> str:
        percents = [row["percent_of_ideal"] for row in rows if row["strategy"] in strategies and is_possible(row)]
        return f"{min(percents):.0f} to {max(percents):.0f}"

    others = f"NCCL kernels: {range_of('c3_base', 'c3_sp')}; NCCL on copy engines: {range_of('nccl_ce')}"
    return [
        ["times as fast as the best of NCCL and PyTorch, geometric mean", "", "file"],
        ["eager calls", f"**{means[1][1]}**", single],
        ["calls in CUDA graphs", f"**{means[1][2]}**", single],
        *(
            [f"{what}, two H200s, NCCL 2.32.3", line[-1], f"[{name}](results/h200x2/{name})"]
            for what, line in zip(("eager calls", "calls in CUDA graphs"), newest[1:], strict=True)
        ),
        ["broadcasts", means[2][3], rooted],
        ["eight tensors in one call", means[3][3], many],
        [f"percent of ideal next to a GEMM ({others})", f"**{range_of('conccl')}**", pairs],
    ]


def _collective(kind: str, what: str, nbytes: int, where: Where) -> Line:
    file = "h200x4/collectives.json"
    place = {"collective": kind, "bytes": nbytes, "tensors": 1, **where}
    return what, size(nbytes), *_both(file, {**place, **NCCL}, {**place, **AUTO}, "time_us"), "us", file


def _pair(kind: str, what: str, nbytes: int) -> Line:
    """Find a GEMM of 8192x8192x8192 next to a collective: NCCL's best strategy, one after the other among them."""
    file = "h200x4/c3.json"
    place: Where = {"gemm": "cb1", "collective": kind, "bytes": nbytes}
    strategies = ("serial", "c3_base", "c3_sp", "nccl_ce")
    times = _both(file, {**place, "strategy": strategies}, {**place, "strategy": "conccl"}, "time_us")
    return f"GEMM 8192x8192x8192 and {what} at once", size(nbytes), *times, "us", file


def _fsdp_step() -> Line:
    file = "h200x2/fsdp.json"
    place: Where = {"model": "llama-70b-like", "batch": 1, "seq": 2048}
    ours = {**place, "implementation": "sidelane"}
    times = _both(file, {**place, "implementation": ("nccl", "nccl_ce")}, ours, "step_ms")
    return "FSDP2 step, 4 layers like Llama 70B", "1 x 2048 tokens", *times, "ms", file


def _decoding() -> Line:
    file = "h200x2/e2e.json"
    place: Where = {"size": "llama-3.1-8b-x8", "launch": "graph"}
    times = _both(file, {**place, "way": "nccl"}, {**place, "way": "group"}, "step_ms")
    return "a token of Llama 3.1 8B, tensor parallel, in a CUDA graph", "8 sequences", *times, "ms", file


def _client(program: str, way: str, model: str, batch: int, what: str) -> Line:
    file = "h200x2/clients.json"
    place: Where = {"program": program, "model": model, "batch": batch, "nccl": load(file)["software"]["nccl"]}
    times = _both(file, {**place, "way": "nccl"}, {**place, "way": way}, "step_ms")
    return what, f"{batch} x 2048 tokens", *times, "ms", file


def _both(file: str, theirs: Where, ours: Where, column: str) -> tuple[float, float]:
    rows = rows_of(file)
    found = best(rows, theirs, column), best(rows, ours, column)
    if found[0] is None or found[1] is None:
        raise ValueError(f"headline: {file} has no row of {theirs} or of {ours}")
    return found[0], found[1]
