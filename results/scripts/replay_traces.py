"""Public traces replayed, and the time that a long one takes: ``python results/scripts/replay_traces.py CLONES FILE``.

The traces are other projects', so that none is here. ``CLONES`` has a git repository of each at ``owner/name``, bare or
not; a trace is read from the commit that is named. Seconds are of the machine at hand; all else is the same everywhere.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_json
from sidelane_lab.harness import provenance
from sidelane_lab.machines.load import named
from sidelane_lab.traces.chakra import write_chakra
from sidelane_lab.traces.command import STRATEGIES, flat, read_trace
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode
from sidelane_lab.traces.replay import kept_collectives, replay

MACHINES = ("h100x8", "h100x8x2")
"""Names of the machines on which traces are replayed."""
LONG = 100_000
"""Number of nodes of the trace whose replay is timed."""
LAYER = 8
"""Number of computations of a layer of it, behind which its gradients are added up."""


@dataclasses.dataclass(frozen=True, slots=True)
class PublicTrace:
    """A public trace: its repository, the commit, the file, and in an archive the member; and what it is of."""

    repository: str
    commit: str
    path: str
    of: str
    member: str = ""

    def write(self, clones: Path, folder: Path) -> Path:
        """Write the trace into a folder, under its own name.

        Raises:
            subprocess.CalledProcessError: the clone has no such commit or file.
        """
        command = ["git", "-C", str(clones / self.repository), "show", f"{self.commit}:{self.path}"]
        content = subprocess.run(command, check=True, capture_output=True).stdout
        if self.member:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                found = archive.extractfile(self.member)
                assert found is not None, "a member that is no file"
                content = found.read()
        path = folder / Path(self.member or self.path).name
        path.write_bytes(content)
        return path


CHAKRA, CHAKRA_COMMIT = "mlcommons/chakra", "21585d8f2d65603d791d2121e3d4632351120262"
ASTRA, ASTRA_COMMIT = "astra-sim/astra-sim", "518bd513ae110428cd62eb60efc0f3993fd53c70"
HTA, HTA_COMMIT = "facebookresearch/HolisticTraceAnalysis", "f4d0062c382f42bd8a74838bcdad1916c7d5d2da"
DATA = "tests/data"
SAMPLES = (
    PublicTrace(
        *(CHAKRA, CHAKRA_COMMIT, f"{DATA}/feeder_tests_trace.tar.gz"),
        of="data-parallel training of a convolutional network, converted from PyTorch",
        member="tests/data/chakra.0.et",
    ),
    PublicTrace(
        *(ASTRA, ASTRA_COMMIT, "examples/workload/microbenchmarks/all_reduce/8npus_1MB/all_reduce.0.et"),
        of="one all-reduce among eight",
    ),
    PublicTrace(
        *(HTA, HTA_COMMIT, f"{DATA}/nccl_parser_config/nccl_data.json.gz"),
        of="data-parallel training on two A100s, PyTorch's profiler, with the collectives' sizes",
    ),
    PublicTrace(
        *(HTA, HTA_COMMIT, f"{DATA}/trace_diff/control/control.json.gz"),
        of="DLRM on eight A100s, PyTorch's profiler, older than the collectives' sizes",
    ),
    PublicTrace(
        *(HTA, HTA_COMMIT, f"{DATA}/negative_queue_length_values_check/rank0.json.gz"),
        of="recommendation training with all-to-alls, PyTorch's profiler, older than the collectives' sizes",
    ),
)


def replayed(sample: PublicTrace, path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine and strategy under which a trace is replayed."""
    begun = time.perf_counter()
    trace = read_trace(path)
    read_s = time.perf_counter() - begun
    known = {
        "trace": path.name,
        "of": sample.of,
        "repository": sample.repository,
        "commit": sample.commit,
        "path": sample.path,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "nodes": len(trace.nodes),
        "collectives": sum(node.kind is NodeKind.COLLECTIVE and not node.on_host for node in trace.nodes),
        "kept_collectives": kept_collectives(trace),
        "read_s": round(read_s, 2),
    }
    for machine in map(named, MACHINES):
        begun = time.perf_counter()
        found = replay(machine, trace, STRATEGIES)
        took = {"machine": machine.name, "replays_s": round(time.perf_counter() - begun, 2)}
        yield from ({**known, **took, **flat(one)} for one in found)


def long_trace(count: int = LONG) -> TraceGraph:
    """Return a trace of so many nodes: layers of computations, each launched, and an all-reduce behind each layer."""
    nodes: list[TraceNode] = []
    launched: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    for ident in range(count):
        place = ident % (2 * LAYER + 1)
        if place == 2 * LAYER:
            nbytes = (1 + ident % 64) << 20
            reduced = TraceNode(ident, "all_reduce", NodeKind.COLLECTIVE, computed, lane="20", nbytes=nbytes)
            nodes.append(dataclasses.replace(reduced, collective="all_reduce"))
        elif place % 2:
            took = 5.0 + ident % 397
            nodes.append(TraceNode(ident, "computation", NodeKind.COMPUTE, (*launched, *computed), took, lane="7"))
            computed = (ident,)
        else:
            nodes.append(TraceNode(ident, "launch", NodeKind.COMPUTE, launched, 4.0, on_host=True, lane="1"))
            launched = (ident,)
    return TraceGraph(f"{count} nodes", tuple(nodes))


def timed(folder: Path, count: int = LONG) -> dict[str, Any]:
    """Return the row of a long trace: seconds to read it, and to replay it under three strategies."""
    path = write_chakra(folder / "long.et", long_trace(count).nodes)
    begun = time.perf_counter()
    trace = read_trace(path)
    read = time.perf_counter()
    replay(named(MACHINES[0]), trace, STRATEGIES)
    seconds = {"read_s": round(read - begun, 2), "replays_s": round(time.perf_counter() - read, 2)}
    return {"trace": path.name, "of": "made for this: long_trace()", "nodes": count, "machine": MACHINES[0], **seconds}


def record(clones: Path, path: Path) -> None:
    """Write what was replayed, and with what."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for sample in SAMPLES for row in replayed(sample, sample.write(clones, Path(folder)))]
        rows.append(timed(Path(folder)))
    content = {
        "study": "traces",
        "predicted": True,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": f"python results/scripts/replay_traces.py CLONES {path}",
        "processor": provenance.processor_name(),
        "software": provenance.software_versions(),
        "rows": rows,
    }
    write_json(path, content)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python results/scripts/replay_traces.py CLONES FILE")
    record(Path(sys.argv[1]), Path(sys.argv[2]))
