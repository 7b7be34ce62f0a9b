"""The examples run as their first lines say, on two CPU processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from as_torchrun import run_program
from marks import long

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALLER = {"overlap": ("--size", "512", "--mebibytes", "16", "--rounds", "3")}


@pytest.mark.long  # three interpreters import torch; run_program gives the others what torchrun does
def test_an_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES[0])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} of 2 on cpu" in done.stdout for rank in range(2))


@pytest.mark.parametrize(
    "example",
    [long(one) if one.stem == "process_group" else one for one in EXAMPLES],
    ids=lambda example: example.stem,
)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    assert "torchrun --nproc-per-node" in example.read_text().split('"""')[1]
    said = run_program(example, tmp_path, SMALLER.get(example.stem, ()))
    assert all(f"rank {rank} of 2 on cpu" in said for rank in range(2))


RING, ROWS, USERBUFFERS = (
    "examples/ring_attention.py",
    "results/scripts/rows_beside.py",
    "results/scripts/userbuffers.py",
)


@pytest.mark.parametrize(
    ("program", "arguments", "ranks", "line", "count"),
    [
        (RING, ("--tokens", "72"), 1, "results and gradients as with the whole sequence", 1),
        (RING, ("--tokens", "72"), 3, "results and gradients as with the whole sequence", 3),
        (ROWS, ("rows.json",), 3, " True ", 4),  # its ways
        (USERBUFFERS, ("userbuffers.json",), 2, '"correct": true', 4),  # two ways of two operators
    ],
)
def test_programs_among_any_number_of_ranks(
    program: str, arguments: tuple[str, ...], ranks: int, line: str, count: int, tmp_path: Path
) -> None:
    assert run_program(ROOT / program, tmp_path, arguments, ranks).count(line) == count


def test_the_profiler_counts_kernels_at_once_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    spans = (("sidelane:all_gather", "cpu_op", 0, 5), ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 10, 100))
    kernels = (("gemm", 0, 60), ("add", 20, 10), ("norm", 50, 20), ("late", 90, 10))
    events = [{"name": name, "cat": cat, "ts": ts, "dur": dur} for name, cat, ts, dur in spans]
    events += [{"name": name, "cat": "kernel", "ts": ts, "dur": dur} for name, ts, dur in kernels]
    said = importlib.import_module("profiler").summary(events)
    assert said.endswith("copies 100 us, 70% of them beside a kernel")


def test_the_profiler_makes_its_folder(tmp_path: Path) -> None:
    run_program(ROOT / "examples" / "profiler.py", tmp_path, ("not/there",))
    assert sorted(path.name for path in (tmp_path / "not" / "there").iterdir()) == ["trace-0.json", "trace-1.json"]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that reads the docs as tokens, on a rank whose broadcasts are to nobody."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda made: None)
    return importlib.import_module("parts.text")


def test_a_text_is_read_by_a_tokenizer_that_is_trained_on_it(text: ModuleType) -> None:
    pytest.importorskip("tokenizers")
    tokens, vocabulary, words = text.read("auto", 600)
    again, *_ = text.read("bpe", 600)
    as_bytes, *_ = text.read("bytes", 600)
    assert (tokens == again).all() and vocabulary == 600 and words.startswith("tokens: 600 byte pairs, ")
    assert int(tokens.max()) == 599 and int(tokens.min()) >= 0 and 1.5 * len(tokens) < len(as_bytes)


def test_without_the_tokenizers_package(text: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokens, vocabulary, words = text.read("auto", 600)
    pages = [page.read_bytes() for page in sorted((ROOT / "docs").rglob("*.md"))]
    assert bytes(tokens.tolist()) == b"\n".join(pages) and vocabulary == 256
    assert words == "tokens: bytes, since the package `tokenizers` is missing (pip install tokenizers)"
    with pytest.raises(SystemExit, match="--tokenizer bpe: .*\n.*pip install tokenizers") as refused:
        text.read("bpe", 600)

    def hears(made: list[Any]) -> None:
        made[0] = str(refused.value)

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", hears)
    with pytest.raises(SystemExit, match="pip install tokenizers"):
        text.read("bpe", 600)
