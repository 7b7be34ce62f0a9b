"""Steps of public programs, predicted from a trace of NCCL's before Sidelane's were looked at, and compared with these.

    python results/scripts/plans.py predict FOLDER    # writes results/h200x2/plans.json from traces and NCCL's rows
    python results/scripts/plans.py compare FOLDER    # adds Sidelane's steps, and the exposed time of both

``FOLDER`` has the traces and result files of one run (T-clients.json, T-e2e.json). A step by Sidelane is predicted as
NCCL's without the profiler, less what the plan saves; exposed time is what the plan says that collectives add.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_json
from sidelane_lab.harness import provenance
from sidelane_lab.machines.load import find
from sidelane_lab.traces.kineto import read_kineto
from sidelane_lab.traces.strategies import plan_trace

OUT = Path("results/h200x2/plans.json")
PROGRAMS = {
    "fsdp-llama-3.2-1b": ("clients", "fsdp", "llama-3.2-1b", "eager", "nccl", "enable"),
    "fsdp-qwen3-1.7b": ("clients", "fsdp", "qwen3-1.7b", "eager", "nccl", "enable"),
    "tensor-llama-3.2-1b": ("clients", "tensor", "llama-3.2-1b", "graph", "nccl", "group"),
    "tensor-qwen3-1.7b": ("clients", "tensor", "qwen3-1.7b", "graph", "nccl", "group"),
    "megatron-llama-3.2-1b": ("clients", "megatron", "llama-3.2-1b", "eager", "nccl", "group"),
    "experts-4096-tokens": ("e2e", "experts", "4096 tokens", "eager", "nccl, our sums", "copies"),
    "experts-128-tokens": ("e2e", "experts", "128 tokens", "eager", "nccl, our sums", "copies"),
}
"""By name of a trace: the study, its program and model, the launch, and the ways that are compared."""


def row_of(folder: Path, name: str, way: str) -> dict[str, Any] | None:
    """Return a way's row of a program; None if it was not measured."""
    study, program, model, launch, *_ = PROGRAMS[name]
    path = folder / f"T-{study}.json"
    names = ("program", "model") if study == "clients" else ("workload", "size")
    for row in json.loads(path.read_text())["rows"] if path.is_file() else ():
        if [row[key] for key in (*names, "launch", "way")] == [program, model, launch, way] and row["step_ms"]:
            return dict(row)
    return None


def predicted(folder: Path, name: str) -> dict[str, Any]:
    """Predict a program from its trace."""
    path = folder / f"trace-{name}.json.gz"
    *_, launch, library, ours = PROGRAMS[name]
    plan = plan_trace(find("h200x2"), read_kineto(path))
    step_ms = (row_of(folder, name, library) or {}).get("step_ms")
    saved_ms = (plan.library_us - plan.best_us) / 1e3
    return {
        "program": name,
        "trace_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "launch": launch,
        "ways": [library, ours],
        "recorded_ms": plan.library_us / 1e3,
        "library_ms": step_ms,
        "predicted_ms": (step_ms or plan.library_us / 1e3) - saved_ms,
        "predicted_library_exposed_ms": plan.exposed_us / 1e3,
        "predicted_exposed_ms": (plan.best_us - plan.silent_us) / 1e3,
        "takes": {
            f"{len(one.calls)} {one.kind} of {one.nbytes}": way
            for one, way in zip(plan.operations, plan.chosen, strict=True)
        },
    }


def compared(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Add what was measured to a prediction."""
    library, ours = (row_of(folder, row["program"], way) for way in row["ways"])
    found: dict[str, float] = {}
    if ours is not None:
        found = {"measured_ms": ours["step_ms"], "off_percent": 100 * (row["predicted_ms"] / ours["step_ms"] - 1)}
        if row["library_ms"]:
            predicted_ms, saved_ms = (row["library_ms"] - ms for ms in (row["predicted_ms"], ours["step_ms"]))
            found |= {"predicted_saved_ms": predicted_ms, "measured_saved_ms": saved_ms}
            found["saved_off_percent"] = 100 * (predicted_ms / saved_ms - 1)
    for name, measured in (("library_exposed", library), ("exposed", ours)):
        exposed = (measured or {}).get("exposed_ms")
        if exposed:
            off = row[f"predicted_{name}_ms"] - exposed
            found |= {f"measured_{name}_ms": exposed, f"{name}_off_percent": 100 * off / exposed}
    return row | found


def main(command: str, folder: Path) -> None:
    """Write the predictions of a run, or add what was measured."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if command == "predict":
        names = [name for name in PROGRAMS if (folder / f"trace-{name}.json.gz").is_file()]
        about = {"study": "plans", "machine": "h200x2", "device": "NVIDIA H200", "gpus": 2, "ranks": 2, "date": now}
        about |= {"commit": provenance.commit(), "command": "python results/scripts/plans.py predict FOLDER"}
        content = about | {"rows": [predicted(folder, name) for name in names]}
    else:
        content = json.loads(OUT.read_text())
        content |= {"compared": now, "rows": [compared(folder, row) for row in content["rows"]]}
    write_json(OUT, content)
    for row in content["rows"]:
        print({name: value for name, value in row.items() if name not in ("takes", "trace_sha256")})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
