"""Which tests of tests/device run on AMD GPUs."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

DEVICE = Path(__file__).resolve().parents[1] / "device"
SPEC = importlib.util.spec_from_file_location("vendors", DEVICE / "vendors.py")
assert SPEC is not None
assert SPEC.loader is not None
vendors = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(vendors)


def names_in(file: Path) -> set[str]:
    return {
        f"{file.stem}::{node.name}"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_what_is_skipped_on_amd_gpus_is_there() -> None:
    files = list(DEVICE.glob("test_*.py"))
    there = {file.stem for file in files}.union(*map(names_in, files))
    assert set(vendors.CUDA_ONLY) <= there
    skipped = [name for file in files for name in names_in(file) if reason(name, 2, is_amd=True)]
    every = [name for file in files for name in names_in(file)]
    assert len(skipped) < len(every) / 4, "most tests make sense on both vendors' GPUs"


def test_reasons() -> None:
    kernels, moving = "test_device_kernels::test_moving", "test_device_executor::test_moving"
    assert reason(kernels, 2, is_amd=True).startswith("communicators do not move bytes by kernels")
    assert reason("test_device_choice::any", 2, is_amd=True).startswith("ROCm makes each")
    assert reason("test_device_executor::test_moving_collectives_launch_no_kernel", 1, is_amd=True)
    assert not reason(moving, 2, is_amd=True) and not reason(kernels, 2, is_amd=False)
    assert reason(moving, 0, is_amd=True) == reason(moving, 0, is_amd=False) == "needs a GPU"


def reason(name: str, gpus: int, *, is_amd: bool) -> str:
    file, _, test = name.partition("::")
    return str(vendors.reason_to_skip(file, test, gpus, is_amd=is_amd))
