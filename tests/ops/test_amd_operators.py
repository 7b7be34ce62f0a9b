"""Fused operators on AMD GPUs: the choice on the stand-in for the HIP runtime, and their kernels for gfx942."""

from __future__ import annotations

import importlib
import importlib.util
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import RankPool

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import hip_operators
import torch
import triton
from hip_operators import KERNEL, Launch
from hip_world import LDS_BYTES
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from sidelane.execute.cuda.kernel_call import CudaKernelCall
from sidelane.ops import experts, rows
from sidelane.program.kernel import KernelCall

MOST_SPILLED = 2
"""Registers of a lane: next to nothing is spilled."""

VECTOR_REGISTERS = 512
"""Number of registers of a lane, which the wavefronts of a SIMD unit share."""


class MadeUpGpu:
    """An MI300X as Triton asks for it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def gfx942(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", MadeUpGpu())


def test_auto_is_unfused_until_it_is_measured(pool: RankPool) -> None:
    for found in pool.run(hip_operators.choose, 2):
        for op, (told, kernels) in found.items():
            assert told.startswith(f"{op}: unfused: kernels of fused operators have never run on such GPUs; no time of")
            assert kernels == ([KERNEL] if op in ("gemm_all_to_all", "all_to_all_gemm") else []), op
    expected = [f"{KERNEL} weight=torch.bfloat16"]
    assert pool.run(hip_operators.choose_by_measurement, 2) == [expected, expected]


def test_calls_that_only_a_kernel_can_run_are_refused_on_every_rank(pool: RankPool) -> None:
    in_graph, of_experts = (
        "embedding_all_to_all: method inside of a capture, on GPUs that have never run its kernel (value=auto, "
        "allowed=fused)",
        "gemm_all_to_all: method of a call with such arguments, on GPUs that have never run its kernel (value=auto, "
        "allowed=fused)",
    )
    assert pool.run(hip_operators.capture, 2) == [(in_graph, of_experts)] * 2


def test_tiles_without_room_are_refused_on_every_rank(pool: RankPool) -> None:
    for errors in pool.run(hip_operators.refuse, 2):
        for op, error in zip(("gemm_all_to_all", "all_to_all_gemm"), errors, strict=True):
            assert error.startswith(
                f"{op}: Triton cannot make the kernel, try other tile sizes (value=TileSizes(rows=128,"
            ), error
            assert "): out of resource: shared memory, Required: 98304, Hardware" in error, error


@pytest.fixture(scope="module")
def launches(pool: RankPool) -> list[Launch]:
    return pool.run(hip_operators.launch, 2)[0]


def made(launch: Launch) -> Any:
    module, name, arguments, options = launch
    return getattr(importlib.import_module(module), name).warmup(*arguments, grid=(1,), **options)


def test_a_kernel_without_room_is_refused_before_peers_wait(launches: list[Launch], gfx942: None) -> None:
    module, name, arguments, options = next(launch for launch in launches if launch[1] == KERNEL)
    kernel = getattr(importlib.import_module(module), name)
    call = KernelCall(kernel, name, (1,), tuple(arguments), {**options, "num_stages": 3}, 0)
    driver = SimpleNamespace(current=nullcontext, relaxed_capture=nullcontext, attribute=lambda name: LDS_BYTES)
    executor: Any = SimpleNamespace(driver=driver, ledger=SimpleNamespace(entry=lambda kind: None))
    with pytest.raises(OutOfResources, match=f"Hardware limit: {LDS_BYTES}"):
        CudaKernelCall(executor, call, compiles=True)


def test_every_fused_kernel_compiles_as_it_is_launched(launches: list[Launch], gfx942: None) -> None:
    names = [name for _, name, *_ in launches]
    assert len(names) == 14 and len({*names}) == 7, names
    for launch in launches:
        compiled = made(launch)
        text, threads = compiled.asm["amdgcn"], 64 * compiled.metadata.num_warps
        assert compiled.asm["hsaco"].startswith(b"\x7fELF") and threads <= 1024
        assert compiled.metadata.shared <= LDS_BYTES, launch
        (registers,) = re.findall(r"\.vgpr_count: +(\d+)", text)
        (spilled,) = re.findall(r"\.vgpr_spill_count: +(\d+)", text)
        assert int(spilled) <= MOST_SPILLED, launch
        waves = launch[3].get("waves_per_eu")
        assert not waves or int(registers) <= VECTOR_REGISTERS // waves, "all programs have to fit at the same time"
    assert sum("waves_per_eu" in options for *_, options in launches) == 7


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "kinds", "constants", "warps"),
    [
        (experts.ASSIGNING[0], "*i32 *i32 i32 i32", {"BLOCK": experts.BLOCK}, 8),
        (
            experts.ASSIGNING[1],
            "*i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32 i32",
            {"EP": 128, "BLOCK": experts.BLOCK},
            8,
        ),
        (
            experts.ASSIGNING[2],
            "*i32 *i32 *i32 i32 i32 i32 i32",
            {"KP": 8, "TOKENS": experts.TOKENS},
            4,
        ),
        (experts.KERNEL, "*bf16 *bf16 *i32 *fp32 i32 i32 i32", {"TERMS": 8, "ROWS": 16, "COLS": experts.COLS}, 4),
        (
            rows.QUANTIZE,
            "*bf16 *fp8 *fp32 i32 i32 i32 i32",
            {"GROUPS": 8, "SCALED": 128, "LARGEST": 448.0, "LEAST": 1e-4},
            4,
        ),
        (rows.DEQUANTIZE, "*fp8 *fp32 *bf16 *i32 i32 i32 i32", {"COLS": 1024, "SCALED": 128}, 4),
    ],
    ids=["count", "place", "leave", "sums", "quantize", "dequantize"],
)
def test_kernels_of_one_gpu_compile(
    kernel: Any, kinds: str, constants: dict[str, Any], warps: int, gfx942: None
) -> None:
    dtypes = {"*i32": torch.int32, "*bf16": torch.bfloat16, "*fp32": torch.float32, "*fp8": torch.float8_e4m3fn}
    arguments = [dtypes.get(kind, 7) for kind in kinds.split()]
    compiled = kernel.warmup(*arguments, grid=(1,), num_warps=warps, **constants)
    assert compiled.asm["hsaco"].startswith(b"\x7fELF") and compiled.metadata.shared <= LDS_BYTES
