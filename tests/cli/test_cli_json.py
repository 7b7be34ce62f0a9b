"""``--json -`` of every command prints JSON to stdout and nothing else; ``--json FILE`` writes the same."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from marks import long

from sidelane import cli, flight_recorder

STUDY = {"study", "machine", "ranks", "commit", "command", "rows"}
PREDICTED = {"study", "machine", "predicted", "numbers", "rows"}
ON_CPUS = "--device cpu --ranks 2"

# What to type, and keys of the object, or of the first of a list of them.
RESULTS = Path(__file__).resolve().parents[2] / "results/h100x2/fused.json"
COMMANDS: dict[str, set[str]] = {
    "info --no-probe": {"machine", "software", "uses"},
    "info --versions": {"sidelane", "commit", "python", "torch", "driver", "rocm", "gpus", "os", "compiler"},
    "machines": {"name", "sources"},
    f"demo {ON_CPUS} --report REPORT": {"proof", "checked", "percent_of_ideal", "choices"},
    f"collective {ON_CPUS} --collective all_gather --variants b2b --max-bytes 1K --iterations 1 --warmup 0": STUDY,
    "nccl-tests all_gather -b 4K -e 4K -g 2 -n 1 -w 0": STUDY,
    f"ordinary {ON_CPUS} --part alone --collective all_gather --max-bytes 64K --repeats 1 --warmup 0": STUDY,
    f"layouts {ON_CPUS} --part alone --shape 1x8x4x8 --repeats 1 --warmup 0": STUDY,
    f"pg {ON_CPUS} --operations all_reduce --bytes 1K --repeats 1 --warmup 0 --no-first": STUDY,
    f"c3 256x256x256_4K {ON_CPUS} --collective all_gather --strategy serial --repeats 1 --warmup 0": STUDY,
    f"chain {ON_CPUS} --min-bytes 64K --max-bytes 64K --variants b2b --implementations dma": STUDY,
    f"phases {ON_CPUS} --operation copy --max-bytes 1K --calls 1 --warmup 1": STUDY,
    f"host {ON_CPUS} --bytes 1K --variants b2b --calls 2 --batches 2": STUDY,
    f"prelaunch {ON_CPUS} --collective all_gather --variants b2b --max-bytes 1K --repeats 1 --warmup 0": STUDY,
    f"fused {ON_CPUS} --ops gemv_all_reduce --repeats 1": STUDY,
    f"fsdp {ON_CPUS} --cases 8b:1x512 --layers 2 --implementations sidelane --repeats 1 --warmup 0": STUDY,
    f"clients {ON_CPUS} --programs ddp --rounds 1 --steps 1 --warmup 1": STUDY,
    f"e2e {ON_CPUS} --workloads decode --rounds 1 --steps 1": STUDY,
    "gemms --device cpu --models qwen-32b/4 --repeats 1 --warmup 0": STUDY,
    f"tune {ON_CPUS} --quick --seconds 1 --collective all_gather --output PROFILE": {"format", "key", "curves"},
    "explain all_gather 1.2G --machine h200x4": {"call", "takes", "candidates", "submitted", "notes"},
    "explain all_gather 64K --machine mi300x8 --packets": {"submitted", "packets"},
    "claims --no-ranges": {"id", "claimed", "predicted", "role"},
    "figure 003/6 --no-ranges": {"study", "machine", "commit", "command", "rows"},
    "pipeline --machine mi300x8": PREDICTED,
    "plan --model llama-8b-like --machine h200x2 --shard FSDP2": PREDICTED,
    "fused --machine mi210x4 --ops gemv_all_reduce --shape 8192,8192,1": PREDICTED,
    "e2e --machine h200x2 --workloads decode": PREDICTED,
    "power --machine mi300x8 --max-bytes 64M": PREDICTED,
    "c3 --machine mi300x8 cb1_896M": PREDICTED,
    "c3 --machine mi300x8": PREDICTED,
    "collective --machine mi300x8": PREDICTED,
    "phases --machine mi300x8 --max-bytes 1K": PREDICTED,
    "plan --trace STEP.json --machine mi300x8": PREDICTED,
    "recorder DUMP": {"ranks", "findings"},
    f"regress {RESULTS} {RESULTS}": {"study", "noise", "lost", "rows"},
}
KERNEL = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 0, "dur": 9, "args": {"stream": 7}}
SLOW = ("chain", "claims", "clients", "demo", "e2e", "fsdp", "fused --device", "gemms", "host", "layouts", "ordinary",
        "pg", "plan", "prelaunch", "tune")  # fmt: skip


def test_every_command_is_here() -> None:
    assert {line.split()[0] for line in COMMANDS} == set(cli.main.list_commands())


def keys(text: str) -> set[str]:
    content: Any = json.loads(text)
    return set(content[0] if isinstance(content, list) else content)


@pytest.mark.parametrize("line", [long(line) if line.startswith(SLOW) else line for line in COMMANDS])
def test_json_goes_to_stdout_alone(line: str, tmp_path: Path) -> None:
    if line.startswith("clients"):
        pytest.importorskip("transformers")
    (tmp_path / "STEP.json").write_text(json.dumps({"traceEvents": [KERNEL]}))
    (tmp_path / "DUMP").write_bytes(pickle.dumps(flight_recorder.FlightRecorder("", 1).content()))
    placed = ("DUMP", "REPORT", "PROFILE", "STEP.json")
    words = [str(tmp_path / word) if word in placed else word for word in line.split()]
    result = CliRunner().invoke(cli.main, [*words, "--json", "-"], prog_name="sidelane")
    assert result.exit_code == 0, result.stderr
    assert keys(result.stdout) >= COMMANDS[line]
    assert not Path("-").exists()


@pytest.mark.parametrize("line", ["machines", "info --no-probe", "pipeline --machine mi300x8"])
def test_a_file_has_the_same_and_tables_stay(line: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.json"
    result = CliRunner().invoke(cli.main, [*line.split(), "--json", str(path)], prog_name="sidelane")
    assert result.exit_code == 0, result.stderr
    assert keys(path.read_text(encoding="utf-8")) >= COMMANDS[line]
    assert not result.stdout.startswith(("{", "[")) and len(result.stdout.splitlines()) > 5
