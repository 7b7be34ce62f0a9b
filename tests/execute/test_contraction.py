"""Every kernel is compiled with the same options, on every path: whether products and sums are contracted changes bits.

Triton compiles for an H100 here; nothing of a kernel runs. An environment asks for the opposite of what is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import own_kernels
import triton
from every_kernel import moving, reducing
from made_up_gpus import made_up_gpus
from made_up_launches import made_up_launches
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

import sidelane
import sidelane_lab
from sidelane import Communicator, Config, ops
from sidelane.device.language import COMPILE_OPTIONS
from sidelane.execute.cuda.kernel_launch import compile_for
from sidelane.ops.rows import dequantized_rows

LAUNCHERS = {  # the only files with launches by Triton's launcher, or with compilations
    "sidelane/device/triton_interpreter.py",
    "sidelane/execute/cuda/kernel_call.py",
    "sidelane/execute/cuda/kernel_launch.py",
}


LAUNCHES = re.compile(r"\[(\([^\]]*,\)|[\w.]*\bgrid)\]\(|\.warmup\(.*\bgrid=|\btriton\.compile\(")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each compilation adds whether it contracts."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    found: list[bool] = []
    parse = CUDABackend.parse_options

    def parsed(backend: CUDABackend, options: dict[str, Any]) -> Any:
        made = parse(backend, options)
        found.append(made.enable_fp_fusion)
        return made

    monkeypatch.setattr(CUDABackend, "parse_options", parsed)
    return found


@pytest.fixture
def comm() -> Iterator[Communicator]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            made_up_launches() as made,
            made_up_gpus(driver=made),
            Communicator(config=Config(profile="builtin")) as it,
        ):
            yield it
    finally:
        dist.destroy_process_group()


def test_the_environment_would_turn_it_off(compiled: list[bool]) -> None:
    CUDABackend(GPUTarget("cuda", 90, 32)).parse_options({})
    assert compiled == [False]


def test_kernels_of_collectives(compiled: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = GPUTarget("cuda", 90, 32), list[dict[str, Any]]()
    monkeypatch.setattr(triton, "compile", lambda source, target, options: asked.append(options))
    for launch in (*moving(0), *reducing(0)):
        compile_for(target, launch.kernel, launch.constants, launch.warps)
    assert len(asked) > 20 and all(COMPILE_OPTIONS.items() <= options.items() for options in asked)
    monkeypatch.undo()
    assert COMPILE_OPTIONS == {"enable_fp_fusion": True}


def test_kernels_of_operators_and_of_callers(compiled: list[bool], comm: Communicator) -> None:
    weight, x = torch.ones(96, 64, dtype=torch.bfloat16), torch.ones(2, 64, dtype=torch.bfloat16)
    for _ in range(4):  # by Triton's launcher, then by the driver, then by compiled code
        ops.gemv_all_reduce(comm, weight, x, method="fused")
    with comm.load_kernel(own_kernels.push_tiles, flags=8) as kernel:
        memory = comm.empty(64)
        for _ in range(3):
            kernel.launch((1,), comm.peers(memory), memory, 64, TILE=64)
        assert compiled and all(compiled)
        kernel.launch((1,), comm.peers(memory), memory, 64, TILE=64, enable_fp_fusion=False)
    assert not compiled[-1], "who asks for another kernel gets it"


def test_kernels_that_meet_no_peer(compiled: list[bool]) -> None:
    packed, rows = torch.zeros(2, 260, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int64)
    with made_up_launches() as made:
        made.launched = lambda *_: None  # type: ignore[method-assign]  # it reads the context of kernels that have one
        dequantized_rows(packed, rows, 256, torch.float32)
    assert compiled and all(compiled)


def test_no_other_file_compiles_or_launches() -> None:
    found = set()
    for package in (sidelane, sidelane_lab):
        folder = Path(package.__file__).parent
        for path in folder.rglob("*.py"):
            if LAUNCHES.search(path.read_text(encoding="utf-8")):
                found.add(str(path.relative_to(folder.parent)))
    assert found == LAUNCHERS


@pytest.mark.parametrize(
    "text", ["fire[(1,)](address)", "a.b[call.grid](*c)", "k[grid](x)", "k.warmup(*a, grid=b)", "triton.compile(s)"]
)
def test_what_launches_looks_like(text: str) -> None:
    assert LAUNCHES.search(text)
