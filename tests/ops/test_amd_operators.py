"""Fused operators on AMD GPUs: the choice on the stand-in for the HIP runtime, and their kernels for gfx942.

Launches on the stand-in are only noted.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
from choices import keep
from fused_ops import check_close
from hip_world import LDS_BYTES, hip_gpus
from on_ranks import on_ranks
from ranks import RankPool
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from sidelane import Communicator, Config, ops
from sidelane.choice.fused import FUSED, FusedTime
from sidelane.choice.key import key_here
from sidelane.errors import UnavailableError
from sidelane.execute.cuda import kernel_call
from sidelane.execute.cuda.kernel_call import CudaKernelCall
from sidelane.ops import experts, gemv, operator, rms_norm, rows
from sidelane.ops.gemm import TileSizes
from sidelane.program.kernel import KernelCall

Launch = tuple[str, str, list[Any], dict[str, Any]]
"""Module and name of a kernel, its arguments with dtypes in place of tensors, and its options."""

DTYPE = torch.bfloat16
TOO_MANY_STAGES = 7
KERNEL = "_gemm_all_to_all"  # which also sends rows to a product, or behind one


class NotedLaunch(kernel_call.CudaKernelCall):
    """A launch that is noted, and does nothing."""

    noted: list[Launch]

    def __init__(self, executor: Any, call: Any, *, compiles: bool) -> None:
        self.program = call
        self._packed = None
        function = getattr(call.kernel, "fn", call.kernel)
        kinds = [one.dtype if isinstance(one, torch.Tensor) else one for one in call.arguments]
        if call.options.get("num_stages") == TOO_MANY_STAGES:  # what the driver's limit makes of it
            raise OutOfResources(98304, LDS_BYTES, "shared memory")
        self.noted.append((function.__module__, function.__name__, kinds, dict(call.options)))

    def run(self, epoch: int, place: Any) -> None: ...


@contextlib.contextmanager
def amd_ranks(group: dist.ProcessGroup, **settings: Any) -> Iterator[tuple[Communicator, list[Launch], Any]]:
    """A communicator on AMD GPUs that are the stand-in, its noted launches, and the stand-in's driver."""
    launches: list[Launch] = []
    with (
        mock.patch.object(NotedLaunch, "noted", launches, create=True),
        mock.patch.object(kernel_call, "CudaKernelCall", NotedLaunch),
        mock.patch.object(torch.version, "hip", "6.4.43484"),
        mock.patch.object(gemv, "shared_bytes_of", lambda device, per_unit: LDS_BYTES // per_unit),
        mock.patch.object(rms_norm, "slices_of_a_program", return_value=1),
        mock.patch.object(rms_norm, "programs_of", lambda comm, needed, per_unit: needed),
        hip_gpus() as driver,
        Communicator(group, config=Config(**settings)) as comm,
    ):
        yield comm, launches, driver


def factors(rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` of a rank, and the weight of all."""
    x, weight = (torch.randn(*shape, generator=torch.Generator().manual_seed(rank * k)) for k, shape in
                 ((1, (16 * n, 64)), (0, (128, 64))))  # fmt: skip
    return x.to(DTYPE), weight.to(DTYPE)


def calls_of(comm: Communicator) -> dict[str, Callable[..., torch.Tensor]]:
    """Return a call of each operator; arguments are those of the method."""
    n, rank = comm.world_size, comm.rank
    tables = [torch.ones(10, 64, dtype=DTYPE) for _ in range(2)]
    indices, offsets = torch.arange(8 * n * 2) % 10, torch.arange(8 * n + 1) * 2
    even = [[16] * n] * n
    x, weight = factors(rank, n)
    residual, ones = torch.ones(4, 1024, dtype=DTYPE), torch.ones(1024, dtype=DTYPE)
    heads = torch.ones(3, n + 1, 128, dtype=DTYPE)
    return {
        "gemv_all_reduce": lambda **how: ops.gemv_all_reduce(comm, weight, x[rank], **how),
        "all_reduce_rms_norm": lambda **how: ops.all_reduce_rms_norm(comm, residual, None, ones, **how)[0],
        "embedding_all_to_all": lambda **how: ops.embedding_all_to_all(comm, tables, indices, offsets, **how),
        "gemm_all_to_all": lambda **how: ops.gemm_all_to_all(comm, x, weight, even, most_rows=16 * n, **how),
        "all_to_all_gemm": lambda **how: ops.all_to_all_gemm(comm, x, weight, even, most_rows=16 * n, **how),
        "gemm_reduce_scatter": lambda **how: ops.gemm_reduce_scatter(comm, x, weight, **how),
        "gemm_all_reduce": lambda **how: ops.gemm_all_reduce(comm, x, weight, **how),
        "all_gather_gemm": lambda **how: ops.all_gather_gemm(comm, x, weight, **how),
        "combine_attention": lambda **how: ops.combine_attention(comm, heads, heads[..., 0].float(), **how)[0],
    }


LAUNCHES = 15
"""Number of launches that ``launch`` makes, of 8 kernels."""

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


@on_ranks(2)
def test_auto_is_unfused_until_it_is_measured(group: dist.ProcessGroup) -> None:
    """Return the reason of ``auto`` for each operator without a measurement, and the kernels that its call launched."""
    with amd_ranks(group) as (comm, launches, _):
        n, sizes = comm.world_size, {"all_reduce_rms_norm": (4, 1024)}
        for op, call in calls_of(comm).items():
            before = len(launches)
            result = call()
            told = ops.explain(comm, op, *sizes.get(op, (64, 64, 64)))
            assert told.startswith(f"{op}: unfused: kernels of fused operators have never run on such GPUs; no time of")
            kernels = [name for _, name, *_ in launches[before:]]
            assert kernels == ([KERNEL] if op in ("gemm_all_to_all", "all_to_all_gemm") else []), op
            if op == "all_gather_gemm":  # without a sum: the stand-in adds integers only
                rows = torch.cat([factors(rank, n)[0] for rank in range(n)])
                check_close(result, rows.double() @ factors(0, n)[1].double().T, op)


@on_ranks(2)
def test_auto_is_fused_once_rank_0_has_measured_that_it_is_faster(group: dist.ProcessGroup) -> None:
    op, n = "gemm_all_to_all", dist.get_world_size(group)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", folder)
        if dist.get_rank(group) == 0:
            keep(key_here("cpu", n), [FusedTime(op, n, False, (16 * n, 64, 128), 2, {"fused": 1.0, "unfused": 2.0})])
        with amd_ranks(group) as (comm, launches, _):
            calls = calls_of(comm)
            calls[op](), calls["gemv_all_reduce"]()
            assert [(name, kinds[4]) for _, name, kinds, _ in launches] == [(KERNEL, torch.bfloat16)]


@on_ranks(2)
def test_calls_that_only_a_kernel_can_run_are_refused_on_every_rank(group: dist.ProcessGroup) -> None:
    """In a graph, and of several experts."""
    refused = r", on GPUs that have never run its kernel \(value=auto, allowed=fused\)"
    in_graph = pytest.raises(UnavailableError, match="^embedding_all_to_all: method inside of a capture" + refused)
    of_experts = pytest.raises(
        UnavailableError, match="^gemm_all_to_all: method of a call with such arguments" + refused
    )
    with amd_ranks(group) as (comm, launches, _):
        call = calls_of(comm)["embedding_all_to_all"]
        call()
        with mock.patch.object(operator, "is_captured", return_value=True), in_graph:
            call()
        n = comm.world_size
        experts, counts = torch.ones(2, 64, 64, dtype=DTYPE), torch.ones(n, n, 2, dtype=torch.int32)
        rows = torch.ones(2 * n, 64, dtype=DTYPE)
        with of_experts:
            ops.gemm_all_to_all(comm, rows, experts, counts, most_rows=2 * n)
        assert not launches


@on_ranks(2)
def test_tiles_without_room_are_refused_on_every_rank(group: dist.ProcessGroup) -> None:
    """Calls go on behind them."""
    needed = r"\): out of resource: shared memory, Required: 98304, Hardware"
    with amd_ranks(group) as (comm, launches, _):
        calls = calls_of(comm)
        for op in ("gemm_all_to_all", "all_to_all_gemm"):
            words = (
                rf"^{op}: Triton cannot make the kernel, try other tile sizes \(value=TileSizes\(rows=128,.*{needed}"
            )
            with pytest.raises(UnavailableError, match=words):
                calls[op](method="fused", tiles=TileSizes(stages=TOO_MANY_STAGES))
        assert not launches


def launch(group: dist.ProcessGroup) -> list[Launch]:
    """Return the launches of all fused operators that are asked for by name."""
    with amd_ranks(group) as (comm, launches, _):
        n = comm.world_size
        for op, call in calls_of(comm).items():
            if FUSED in operator.OPERATORS[op].methods:
                call(method="fused")
        some, ones = torch.ones(16, 512, dtype=DTYPE), torch.ones(512, dtype=DTYPE)
        ops.gemv_all_reduce(comm, torch.ones(64, 512, dtype=DTYPE), some, method="fused")
        ops.gemv_all_reduce(comm, torch.ones(64, 512), some.float(), method="fused")
        narrow = torch.ones(64, 512).to(torch.float8_e4m3fn)
        ops.gemv_all_reduce(comm, narrow, some[0], scale=torch.ones(64), method="fused")
        ops.all_reduce_rms_norm(comm, some, some, ones, schedule="pushed", method="fused")
        quantized = {"quantized": torch.empty(16, 512, dtype=narrow.dtype), "scale": torch.ones(16, 1)}
        ops.all_reduce_rms_norm(comm, some, some, ones, schedule="cells", method="fused", **quantized)
        ops.gemm_all_to_all(comm, some.float(), torch.ones(64, 512), [[1] * n] * n, most_rows=16, method="fused")
        tables, bags = [torch.ones(10, 64)], (torch.arange(8 * n) % 10, torch.arange(8 * n + 1))
        ops.embedding_all_to_all_backward(comm, torch.ones(8, 64 * n), tables, *bags)
        counts, terms = torch.ones(n, n, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
        ops.all_to_all_rows(comm, some, counts, most_rows=16)
        ops.all_to_all_rows(comm, some, counts, most_rows=8, terms=terms, factors=torch.ones(4, 2))
        return launches


@pytest.fixture(scope="module")
def launches(pool: RankPool) -> list[Launch]:
    return pool.run(launch, 2)[0]


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


@pytest.mark.parametrize("number", range(LAUNCHES))
def test_every_fused_kernel_compiles_as_it_is_launched(launches: list[Launch], gfx942: None, number: int) -> None:
    launch = launches[number]
    compiled = made(launch)
    text, threads = compiled.asm["amdgcn"], 64 * compiled.metadata.num_warps
    assert compiled.asm["hsaco"].startswith(b"\x7fELF") and threads <= 1024
    assert compiled.metadata.shared <= LDS_BYTES, launch
    (registers,) = re.findall(r"\.vgpr_count: +(\d+)", text)
    (spilled,) = re.findall(r"\.vgpr_spill_count: +(\d+)", text)
    assert int(spilled) <= MOST_SPILLED, launch
    waves = launch[3].get("waves_per_eu")
    assert not waves or int(registers) <= VECTOR_REGISTERS // waves, "all programs have to fit at the same time"


def test_every_fused_kernel_is_launched(launches: list[Launch]) -> None:
    names = [name for _, name, *_ in launches]
    assert len(names) == LAUNCHES and len({*names}) == 8, names
    assert sum("waves_per_eu" in options for *_, options in launches) == 8


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
        (
            experts.KERNEL,
            "*bf16 *bf16 *i32 *fp32 *bf16 *i32 i32 i32 i32 i32",
            {"TERMS": 8, "ROWS": 16, "COLS": experts.COLS},
            4,
        ),
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
