"""The tool that runs tests under AddressSanitizer and UBSan finds what is planted, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import long

ROOT = Path(__file__).resolve().parents[2]
NATIVE = """
import ctypes, os, shlex, subprocess

def test_planted(tmp_path):
    (tmp_path / "planted.c").write_text({source!r})
    built = str(tmp_path / "planted.so")
    command = [*shlex.split(os.environ["CC"]), "-shared", "-fPIC", str(tmp_path / "planted.c"), "-o", built]
    subprocess.run(command, check=True)
    ctypes.CDLL(built).planted(1)
"""
MADE_UP = """
import sys
sys.path.append({common!r})
from fake_driver import FakeDriver, FakeHostWords

def test_planted():
    driver, words = FakeDriver(), FakeHostWords(5000)
    ops, stream, address = driver.memory_ops(), driver.create_stream(), words.address
    ops.write(address, 7)
    {drop}
    driver.submit([driver.bind_memory_ops(ops, stream)])
    driver.stop()
"""
COMMON = str(ROOT / "tests" / "common")
USES_FREED = "#include <stdlib.h>\nint planted(int n) { int *p = malloc(64); free(p); return p[n]; }"
OVERFLOWS = "int planted(int n) { return 2147483647 + n; }"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (NATIVE.format(source=USES_FREED), "heap-use-after-free"),
        long(NATIVE.format(source=OVERFLOWS), "AddressSanitizer: ILL"),
        long(MADE_UP.format(common=COMMON, drop="del words"), "heap-use-after-free"),
        long(MADE_UP.format(common=COMMON, drop=""), ""),
    ],
    ids=["native", "undefined", "driver", "nothing"],
)
def test_what_is_planted_is_found(tmp_path: Path, text: str, found: str) -> None:
    file, out = tmp_path / "test_planted.py", tmp_path / "out.txt"
    file.write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "asan.py"), "--out", str(out), str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == bool(found), done.stdout + done.stderr
    assert found in out.read_text()
    assert f"reports:  {int(bool(found))}\n" in out.read_text()
