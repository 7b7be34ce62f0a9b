"""Cases of fused operators on the stand-in for the HIP runtime, where launches of kernels are only noted."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from choices import keep
from fused_ops import check_close
from hip_world import LDS_BYTES, hip_gpus
from triton.runtime.errors import OutOfResources

from sidelane import Communicator, Config, ops
from sidelane.choice.fused import FUSED, FusedTime
from sidelane.choice.key import key_here
from sidelane.errors import UnavailableError
from sidelane.execute.cuda import kernel_call
from sidelane.ops import gemv, operator, rms_norm
from sidelane.ops.gemm import TileSizes

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
    return {
        "gemv_all_reduce": lambda **how: ops.gemv_all_reduce(comm, weight, x[rank], **how),
        "all_reduce_rms_norm": lambda **how: ops.all_reduce_rms_norm(comm, residual, None, ones, **how)[0],
        "embedding_all_to_all": lambda **how: ops.embedding_all_to_all(comm, tables, indices, offsets, **how),
        "gemm_all_to_all": lambda **how: ops.gemm_all_to_all(comm, x, weight, even, most_rows=16 * n, **how),
        "all_to_all_gemm": lambda **how: ops.all_to_all_gemm(comm, x, weight, even, most_rows=16 * n, **how),
        "gemm_reduce_scatter": lambda **how: ops.gemm_reduce_scatter(comm, x, weight, **how),
        "gemm_all_reduce": lambda **how: ops.gemm_all_reduce(comm, x, weight, **how),
        "all_gather_gemm": lambda **how: ops.all_gather_gemm(comm, x, weight, **how),
    }


def choose(group: dist.ProcessGroup) -> dict[str, tuple[str, list[str]]]:
    """Return what ``auto`` says of each operator without a measurement, and the kernels that its call launched."""
    found = {}
    with amd_ranks(group) as (comm, launches, _):
        n, sizes = comm.world_size, {"all_reduce_rms_norm": (4, 1024)}
        for op, call in calls_of(comm).items():
            before = len(launches)
            result = call()
            told = ops.explain(comm, op, *sizes.get(op, (64, 64, 64)))
            found[op] = told, [name for _, name, *_ in launches[before:]]
            if op == "all_gather_gemm":  # without a sum: the stand-in adds integers only
                rows = torch.cat([factors(rank, n)[0] for rank in range(n)])
                check_close(result, rows.double() @ factors(0, n)[1].double().T, op)
    return found


def choose_by_measurement(group: dist.ProcessGroup) -> list[str]:
    """Return the kernels of calls by ``auto`` once rank 0 has measured that a fused one is faster."""
    op, n = "gemm_all_to_all", dist.get_world_size(group)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", folder)
        if dist.get_rank(group) == 0:
            keep(key_here("cpu", n), [FusedTime(op, n, False, (16 * n, 64, 128), 2, {"fused": 1.0, "unfused": 2.0})])
        with amd_ranks(group) as (comm, launches, _):
            calls = calls_of(comm)
            calls[op](), calls["gemv_all_reduce"]()
            return [f"{name} weight={kinds[4]}" for _, name, kinds, _ in launches]


def capture(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the errors of calls that only a kernel could run, in a graph and of several experts."""
    errors = []
    with amd_ranks(group) as (comm, launches, _):
        call = calls_of(comm)["embedding_all_to_all"]
        call()
        with mock.patch.object(operator, "is_captured", return_value=True), pytest.raises(UnavailableError) as error:
            call()
        errors.append(str(error.value))
        n = comm.world_size
        experts, counts = torch.ones(2, 64, 64, dtype=DTYPE), torch.ones(n, n, 2, dtype=torch.int32)
        rows = torch.ones(2 * n, 64, dtype=DTYPE)
        with pytest.raises(UnavailableError) as error:
            ops.gemm_all_to_all(comm, rows, experts, counts, most_rows=2 * n)
        errors.append(str(error.value))
        assert not launches
    return tuple(errors)


def refuse(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the errors of tiles that a GPU has no room for; calls go on behind them."""
    errors = []
    with amd_ranks(group) as (comm, launches, _):
        calls = calls_of(comm)
        for op in ("gemm_all_to_all", "all_to_all_gemm"):
            with pytest.raises(UnavailableError) as error:
                calls[op](method="fused", tiles=TileSizes(stages=TOO_MANY_STAGES))
            errors.append(str(error.value))
        assert not launches
    return tuple(errors)


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
