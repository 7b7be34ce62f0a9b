"""Which tests for GPUs run on those of AMD."""

from __future__ import annotations

import ast
from pathlib import Path

import vendors

DEVICE = Path(__file__).resolve().parents[1] / "device"


def names_in(file: Path) -> set[str]:
    return {
        f"{file.stem}::{node.name}"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and (file.parent == DEVICE or any("gpu=" in ast.unparse(each) for each in node.decorator_list))
    }


def test_what_is_skipped_on_amd_gpus_is_there() -> None:
    every = set().union(*map(names_in, DEVICE.parent.rglob("test_*.py")))
    assert set(vendors.CUDA_ONLY) <= every | {name.partition("::")[0] for name in every}
    skipped = [name for name in every if reason(name, 2, is_amd=True)]
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
