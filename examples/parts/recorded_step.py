"""Write a trace as PyTorch's profiler does, of a predicted step, to try ``sidelane plan --trace`` without a GPU.

    python examples/parts/recorded_step.py step.json
    sidelane plan --trace step.json

The step is one of six layers of a Llama 3.1 8B under FSDP2 with NCCL, on two H200s.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import run_device
from sidelane_lab.model.gangs import library_gangs
from sidelane_lab.model.layer import ELEMENT, Step
from sidelane_lab.model.training import ordinary, step_kernels, sustained
from sidelane_lab.model.transformer import preset

KINDS = {"AG": Kind.ALL_GATHER, "RS": Kind.REDUCE_SCATTER}
STREAMS = {"AG": 20, "RS": 24}


def trace_of(machine: Machine, step: Step) -> dict[str, Any]:
    """Return the content of the file: the GPU, the number of ranks, and when each kernel ran."""
    there, ranks = ordinary(sustained(machine)), machine.gpus
    nbytes = step.gathered * ELEMENT
    gangs = tuple((kind, library_gangs(there, kind, nbytes, priority=1)) for kind in KINDS.values())
    kernels = step_kernels(there, step, step.model.layers, gangs, straight=False)
    ran = run_device(there, kernels)
    events = []
    for one in kernels:
        label, *rest = one.name.split()
        name, args = f"{label[0]} {''.join(rest)}", {"device": 0, "stream": STREAMS.get(label, 7), "grid": [132, 1, 1]}
        if label in KINDS:  # as of the profiler's: elements of this rank's input
            name = f"ncclDevKernel_{label}"
            count = nbytes // ELEMENT // (ranks if label == "AG" else 1)
            args |= {"Collective name": KINDS[label], "In msg nelems": count, "dtype": "BFloat16", "Group size": ranks}
        begin, end = ran.began_us[one.name], ran.ended_us[one.name]
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": 1_000 + begin, "dur": end - begin, "args": args})
    return {
        "deviceProperties": [{"id": 0, "name": machine.title.partition(" x ")[2]}],
        "distributedInfo": {"backend": "nccl", "world_size": ranks},
        "traceEvents": events,
    }


if __name__ == "__main__":
    llama = dataclasses.replace(preset("llama-3.1-8b"), layers=6)
    Path(sys.argv[1]).write_text(json.dumps(trace_of(named("h200x2"), Step(llama, 4096, 4096))), encoding="utf-8")
