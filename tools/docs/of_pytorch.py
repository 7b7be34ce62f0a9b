"""Tables of PyTorch programs: steps of FSDP2, collectives on ordinary memory, fused operators."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from docs.measured import LABELS, MIB, Cells, best, rows_of, short, size, whole

NAMES = {"llama-8b-like": "8B-like", "llama-70b-like": "70B-like"}
TRAINED_BY = {
    "nccl": "NCCL",
    "nccl_ce": "NCCL, copy engines",
    "sidelane_copies": "Sidelane, copied out",
    "sidelane": "Sidelane",
    "compute_only": "nothing communicated",
}
REACHED: dict[str, dict[str, object]] = {
    "symmetric": {"implementation": "auto", "reach": "symmetric"},
    "staged": {"implementation": "auto", "reach": "staged"},
    "NCCL": {"implementation": "nccl"},
}


def steps(machine: str, file: str = "fsdp.json") -> Cells:
    """Return milliseconds of a training step, and how much of what NCCL exposes comes back."""
    rows = rows_of(f"{machine}/{file}")
    cells = [["layers, tokens a GPU", *TRAINED_BY.values(), "recovered"]]
    for case in dict.fromkeys((row["model"], row["layers"], row["batch"], row["seq"]) for row in rows):
        where = dict(zip(("model", "layers", "batch", "seq"), case, strict=True))
        model, layers, batch, tokens = case
        times = [best(rows, {**where, "implementation": name}, "step_ms") for name in TRAINED_BY]
        least = min(one for one in times[:-1] if one is not None)
        shown = [f"**{short(one)}**" if one == least else short(one) for one in times]
        recovered = best(rows, {**where, "implementation": "sidelane"}, "recovered_percent")
        cells.append([f"{NAMES.get(model, model)} x {layers}, {batch} x {tokens}", *shown, f"{whole(recovered)}%"])
    return cells


def recovered(machine: str) -> float:
    """Return the mean share of the exposed time that comes back, in percent."""
    rows = rows_of(f"{machine}/fsdp.json")
    return float(statistics.mean(row["recovered_percent"] for row in rows if row["implementation"] == "sidelane"))


def alone(machine: str, kinds: Sequence[str]) -> Cells:
    """Return microseconds of a collective out of place, by how peers reach its tensors."""
    rows = [row for row in rows_of(f"{machine}/ordinary.json") if not row["gemm"] and row["host_us"] is None]
    cells = [["", *REACHED]]
    for kind in kinds:
        for nbytes in sorted({row["bytes"] for row in rows if row["collective"] == kind}):
            where = {"collective": kind, "bytes": nbytes, "in_place": kind == "all_reduce"}
            shown = [short(best(rows, {**where, **way})) for way in REACHED.values()]
            cells.append([f"{LABELS[kind]}, {size(nbytes)}", *shown])
    return cells


def beside(machine: str) -> Cells:
    """Return percents of ideal next to a GEMM, by how peers reach the tensors."""
    rows = [row for row in rows_of(f"{machine}/ordinary.json") if row["gemm"]]
    cells = [["", *REACHED]]
    for gemm, kind, nbytes in dict.fromkeys((row["gemm"], row["collective"], row["bytes"]) for row in rows):
        where = {"gemm": gemm, "collective": kind, "bytes": nbytes}
        shown = [whole(best(rows, {**where, **way}, "percent_of_ideal")) for way in REACHED.values()]
        cells.append([f"{gemm}, {LABELS[kind]} of {nbytes / MIB:.0f} MiB", *shown])
    return cells


def fused(machine: str) -> Cells:
    """Return microseconds of fused operators in graphs, and of the same unfused."""
    rows = [row for row in rows_of(f"{machine}/fused.json") if row["launch"] == "graph"]
    cells = [["operator, shape", "NCCL", "best unfused", "fused", "times over the best"]]
    for op, shape in dict.fromkeys((row["op"], row["shape"]) for row in rows):
        where = {"op": op, "shape": shape}
        library, unfused, ours = (
            best(rows, {**where, "implementation": name}) for name in ("unfused_nccl", "unfused_best", "fused")
        )
        if ours is None:
            continue
        gain = "" if unfused is None else f"{unfused / ours:.2f}"
        cells.append([f"`{op}`, {shape}", short(library), short(unfused), short(ours), gain])
    return cells
