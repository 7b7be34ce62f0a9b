"""What was measured on H200s, of ``results/``: the few figures that the demo sets beside its predictions.

They travel with the package in ``papers/data/measured.json``. ``python -m sidelane_lab.studies.demo.measured results``
makes that file from the result files, and a test holds it to them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from sidelane.c3.workload import Workload, parse_gemm
from sidelane.program.collective import Kind

STRATEGIES = ("c3_base", "nccl_ce", "conccl", "auto")
IMPLEMENTATIONS = ("nccl", "symm_mem", "auto")
"""Of the all-gather by size: NCCL at its best, PyTorch's symmetric memory, and Sidelane's choice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where figures come from.

    Attributes:
        file: in the repository.
        machine: in words.
        date: of the run.
        commit: that ran.
    """

    file: str
    machine: str
    date: str
    commit: str


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Percent of ideal of one pair under one strategy, ideal being that of NCCL's collective, as in the papers."""

    workload: Workload
    strategy: str
    percent: float


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """All of it.

    Attributes:
        overlaps: next to GEMMs.
        overlap_source: where those come from.
        gathers: microseconds of an all-gather in a CUDA graph, by implementation and bytes.
        gather_source: likewise.
    """

    overlaps: tuple[Overlap, ...]
    overlap_source: Source
    gathers: dict[str, dict[int, float]]
    gather_source: Source


def measured() -> Measured:
    """Read the file of the package."""
    data = json.loads(files("sidelane_lab.papers.data").joinpath("measured.json").read_text(encoding="utf-8"))
    overlaps = tuple(
        Overlap(Workload(parse_gemm(gemm), Kind(kind), nbytes), strategy, percent)
        for gemm, kind, nbytes, strategy, percent in data["overlaps"]
    )
    gathers = {name: {int(nbytes): us for nbytes, us in times.items()} for name, times in data["gathers"].items()}
    return Measured(overlaps, Source(**data["overlap_source"]), gathers, Source(**data["gather_source"]))


def pick(results: Path) -> dict[str, Any]:
    """The figures, from the folder of result files."""
    c3, c3_source = _load(results, "h200x4/c3.json")
    collectives, source = _load(results, "h200x2/collectives.json")
    overlaps = [
        [row["gemm"], row["collective"], row["bytes"], row["strategy"], row["percent_of_ideal_nccl"]]
        for row in c3
        if row["strategy"] in STRATEGIES
    ]
    gathers: dict[str, dict[str, float]] = {name: {} for name in IMPLEMENTATIONS}
    for row in collectives:
        times = gathers.get(row["implementation"])
        chosen = row["collective"] == "all_gather" and row["launch"] == "graph" and not row["in_place"]
        if times is not None and chosen and row["tensors"] == 1:
            key = str(row["bytes"])
            times[key] = min(row["time_us"], times.get(key, row["time_us"]))
    return {"overlaps": overlaps, "overlap_source": c3_source, "gathers": gathers, "gather_source": source}


def _load(results: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    data = json.loads((results / name).read_text(encoding="utf-8"))
    machine = f"{data['gpus']} x {data['device']}"
    source = {"file": f"results/{name}", "machine": machine, "date": data["date"][:10], "commit": data["commit"]}
    return data["rows"], source


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "data" / "measured.json"
    target.write_text(json.dumps(pick(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
