"""Options of studies: what a field of a class makes of a command, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sidelane.program.collective import Kind
from sidelane_lab.cli.c3 import C3Options, OccupancyOptions
from sidelane_lab.cli.fsdp import FsdpOptions
from sidelane_lab.cli.fused import FusedOptions
from sidelane_lab.harness import running
from sidelane_lab.harness.options import (
    MOST_TENSORS,
    StudyOptions,
    count,
    either,
    kinds,
    names,
    size_list,
    size_span,
    study_command,
)
from sidelane_lab.studies.chain import ChainOptions
from sidelane_lab.studies.collectives import CollectiveOptions
from sidelane_lab.studies.gemms import GemmOptions
from sidelane_lab.studies.ordinary import OrdinaryOptions
from sidelane_lab.studies.phases.rows import PhasesOptions
from sidelane_lab.studies.power.rows import PowerOptions
from sidelane_lab.studies.process_group import GroupOptions
from sidelane_lab.studies.tune.command import IsolatedOptions, TuneOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(StudyOptions):
    """Sample something."""

    collectives: tuple[Kind, ...] = kinds((Kind.ALL_GATHER,), ("all_gather", "broadcast"), every="all")
    sizes: tuple[int, ...] = size_span(gpus=("1M", "64M"), cpus=("1K", "20K"))
    changing: tuple[int, ...] = size_list("--changing", "Sizes.", gpus=("1M", "4M"), cpus=("1K",))
    variants: tuple[str, ...] = names("--variants", ("b2b",), "Variants.", allowed=("b2b", "pcpy"), some=True)
    launches: tuple[str, ...] = either("--launch", ("eager", "graph"), "Launches.")
    calls: int = count("--calls", 4, "Calls.")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    options: list[Any] = []
    monkeypatch.setattr(running, "run", options.append)
    return options


def test_fields_are_read_from_options(seen: list[Any], tmp_path: Path) -> None:
    command = study_command("sample", SampleOptions)
    line = (
        "--collective broadcast --collective broadcast --changing 2K --changing 1M --variants pcpy,b2b --launch graph"
    )
    line += f" --calls 7 --device cpu --min-bytes 4K --factor 2 --json {tmp_path / 'x.json'}"
    assert CliRunner().invoke(command, line.split()).exit_code == 0
    (options,) = seen
    assert (options.collectives, options.sizes) == ((Kind.BROADCAST,), (4096, 8192, 16384))
    assert (options.changing, options.variants) == ((2048, 1 << 20), ("pcpy", "b2b"))
    assert (options.launches, options.calls, options.json) == (("graph",), 7, tmp_path / "x.json")
    assert CliRunner().invoke(command, ["--collective", "all", "--min-bytes", "1M", "--device", "cpu"]).exit_code == 0
    assert (seen[1].collectives, seen[1].sizes) == ((Kind.ALL_GATHER, Kind.BROADCAST), (1 << 20,))
    shown = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=200).output.split())
    assert "Sample something." in shown and "[default: 64M on GPUs, 20K on CPUs]" in shown
    assert "[default: 1M and 4M on GPUs, 1K on CPUs]" in shown


def test_sizes_follow_the_device() -> None:
    options = SampleOptions()
    assert options.sizes_on("cuda") == (1 << 20, 4 << 20, 16 << 20, 64 << 20)
    assert options.sizes_on("cpu") == (1024, 4096, 16384)
    assert (options.sizes_on("cuda", "changing"), options.sizes_on("cpu", "changing")) == ((1 << 20, 4 << 20), (1024,))
    assert SampleOptions(sizes=(5,)).sizes_on("cuda") == (5,)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"collectives": (Kind.SCATTER,)}, "collectives (value=scatter, allowed=all_gather, broadcast)"),
        ({"collectives": ()}, "at least one of collectives is needed"),
        ({"variants": ("circle",)}, "variants (value=circle, allowed=b2b, pcpy)"),
        ({"launches": ("lazy",)}, "launches (value=lazy, allowed=eager, graph)"),
        ({"calls": 0}, "calls (value=0, allowed=1 and more)"),
        ({"sizes": (0,)}, "sizes (value=(0,), allowed=1 and more)"),
        ({"timeout_s": 0.0}, "time-outs must be positive"),
    ],
)
def test_options_check_themselves(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        SampleOptions(**wrong)
    assert str(refused.value).startswith("SampleOptions: ") and reason in str(refused.value)


WRONG: dict[type[StudyOptions], tuple[tuple[dict[str, Any], str], ...]] = {
    CollectiveOptions: (
        ({"collectives": (Kind.SCATTER,)}, "collectives (value=scatter"),
        ({"dtype": "int8"}, "dtype (value=int8"),
        ({"places": ("left",)}, "places (value=left, allowed=in, out)"),
        ({"repeats": 0}, "repeats (value=0, allowed=1 and more)"),
        ({"tensors": 0}, "tensors (value=0, allowed=1..1024)"),
        ({"tensors": MOST_TENSORS + 1}, "tensors (value=1025, allowed=1..1024)"),
    ),
    TuneOptions: (({"tensors": 2}, "tensors (value=2, allowed=1"),),
    IsolatedOptions: (
        ({"gemms": ("cb9",)}, "cb9"),
        ({"dtype": "int8"}, "dtype (value=int8"),
        ({"budget_s": 0.0}, "budget_s (value=0.0, allowed=more than 0)"),
    ),
    C3Options: (
        ({"workloads": ()}, "workloads"),
        ({"workloads": ("cb9_1M",)}, "cb9"),
        ({"strategies": ("c3",)}, "value='c3'"),
        ({"dtype": "int32"}, "dtype (value=int32"),
        ({"resume": True}, "resume (value=True, allowed=with a file that json names)"),
    ),
    OccupancyOptions: (
        ({"shapes": ("opt3",)}, "shapes (value=opt3, allowed=opt1"),
        ({"blocks": (-1,)}, "blocks (value=(-1,), allowed=1 or more, 0 for one a tile)"),
    ),
    ChainOptions: (({"launches": ("lazy",)}, "launches (value=lazy, allowed=eager, graph, prelaunched)"),),
    FusedOptions: (({"ops": ("gemm",)}, "ops (value=gemm, allowed=gemv_all_reduce"),),
    PhasesOptions: (
        ({"operations": ()}, "at least one of operations"),
        ({"operations": ("move",)}, "value='move', allowed=copy, copies"),
        ({"variants": ("circle",)}, "variants: (value=circle"),
        ({"warmup": 0}, "warmup (value=0, allowed=1 and more)"),
        ({"predict": "mi300"}, "'mi300': say how many"),
    ),
    PowerOptions: (
        ({"collectives": ()}, "at least one of collectives"),
        ({"launch": "lazy"}, "launch (value=lazy, allowed=eager, graph)"),
        ({"seconds": 0.3}, "seconds and idle_s (value=0.3"),
        ({"rounds": 0}, "rounds (value=0, allowed=1 and more)"),
        ({"idle_s": 0.0}, "seconds and idle_s (value=0.7, 0.0"),
    ),
    OrdinaryOptions: (
        ({"collectives": (Kind.BROADCAST,)}, "collectives (value=broadcast, allowed=all_gather, all_to_all"),
        ({"parts": ("together",)}, "parts (value=together, allowed=alone, beside)"),
        ({"pairs": ("8192_97M",)}, "not a GEMM"),
    ),
    GroupOptions: (
        ({"operations": ("reduce",)}, "operations (value=reduce, allowed=all_reduce, "),
        ({"implementations": ("nccl",)}, "implementations (value=nccl, allowed=gloo, sidelane)"),
    ),
    FsdpOptions: (
        *(({"cases": (case,)}, "allowed=8b or 70b and sequences x tokens") for case in ("7b:1x4096", "8b:4096")),
        ({"cases": ("8b:0x4096",)}, "as in 8b:2x4096"),
        ({"reduce_dtype": "int8"}, "reduce_dtype (value=int8, allowed=bfloat16, float32)"),
        ({"implementations": ("nccl_ce",)}, "implementations (value=nccl_ce, allowed=gloo, sidelane_ag"),
    ),
    GemmOptions: (
        ({"models": ("llama",)}, "models (value=llama, allowed=llama-8b, "),
        ({"ranks": 2}, "ranks (value=2, allowed=1"),
    ),
}


@pytest.mark.parametrize(
    ("options", "wrong", "reason"), [(options, *case) for options, cases in WRONG.items() for case in cases]
)
def test_wrong_options_are_refused_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, options: type[StudyOptions], wrong: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(running, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(ValueError) as refused:
        running.run(options(**{"device": "cpu", "quiet": True, **wrong}))
    assert reason in str(refused.value)
