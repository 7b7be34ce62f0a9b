"""Every address and handle that reaches the driver is a live one, whatever came before: a long walk, checked."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from marks import long

from sidelane.native.build import find_compiler

HERE = Path(__file__).resolve().parents[1] / "common"
needs_driver_api = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("triton") is None,
    reason="cuda-bindings or Triton is not installed",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver that checks."""
    folder = tmp_path_factory.mktemp("checker")
    compiler = find_compiler()
    assert compiler, "no C compiler"
    command = [
        *compiler,
        "-O1",
        "-shared",
        "-fPIC",
        str(HERE / "checking_driver.c"),
        "-o",
        str(folder / "libcuda.so.1"),
    ]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True, timeout=60)
    return folder


def walk(library: Path, seed: int, steps: int, sabotage: str = "none") -> tuple[dict[str, int], str]:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent.parent / "src", HERE.parent / "common"))),
    }
    command = [sys.executable, str(HERE / "address_walk.py"), str(seed), str(steps), sabotage]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


STEPS = {0: 600, 1: 2000}


@needs_driver_api
@pytest.mark.parametrize("seed", [0, long(1)])
def test_all_that_is_submitted_lies_where_it_may(library: Path, seed: int) -> None:
    found, errors = walk(library, seed, STEPS[seed])
    assert found["violations"] == 0, errors
    assert found["native"] > found["made"] // 2, "made by compiled code"
    assert found["moved"] > 10, "at addresses that are new"
    assert found["checks"] > 30 * STEPS[seed]
    assert found["refused"] < found["made"] // 10


@needs_driver_api
@pytest.mark.parametrize("sabotage", ["flags", long("events")])
def test_what_is_gone_is_noticed(library: Path, sabotage: str) -> None:
    found, errors = walk(library, 1, 600, sabotage)
    assert found["violations"] > 0
    assert "VIOLATION" in errors
