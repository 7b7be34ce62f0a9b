"""GEMVs whose results are summed, by Triton's interpreter and on GPUs, against float64."""

from __future__ import annotations

import itertools
import mmap
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fused_ops import DTYPES, Draws, check_all, check_close, communicator, draws_of, fused
from marks import long
from on_ranks import on_ranks
from triton.runtime.errors import OutOfResources

from sidelane import ops
from sidelane.errors import UnavailableError
from sidelane.ops import gemv
from sidelane.ops.gemv import GemvAllReduce, Tiling
from sidelane.ops.handle import FLOAT8S


@on_ranks(long(1), long(2), long(3), long(4), interpreted=True, calls=12)
@on_ranks(4, interpreted=True, calls=8)
@on_ranks(gpu=fused, timeout_s=240, calls=60)
def test_gemv_all_reduce_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """Random shapes and dtypes; outputs of all kinds; who is late changes."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        draws = draws_of(comm)
        tilings = {True: (Tiling(16, 32, 1, 1), Tiling(4, 16, 1, 2, 1, "")), False: (Tiling(16, 32, 1, 1),)}
        symmetric = {dtype: comm.empty(16 * 70, dtype=dtype) for dtype in DTYPES}
        shapes = [(draws.sizes.randrange(1, 70), draws.sizes.choice((1, 2, 3, 5, 16))) for _ in range(6)]
        compared: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            rows, tokens = draws.sizes.choice(shapes)
            columns = [draws.sizes.randrange(1, 50) for _ in range(n)]
            dtype, where = draws.sizes.choice(DTYPES), draws.sizes.randrange(3)
            tiling = draws.sizes.choice(tilings[tokens == 1])
            weights = [draws.normal(rows, width).to(dtype) for width in columns]
            xs = [draws.normal(tokens, width).to(dtype) for width in columns]
            expected = sum(x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True))
            assert isinstance(expected, torch.Tensor)
            weight, x = weights[rank].to(comm.device), xs[rank].to(comm.device)
            if number % 3 == 0:  # rows that lie apart
                weight = torch.cat([weight, weight], dim=1)[:, : columns[rank]]
            if tokens == 1 and number % 2:
                x, expected = x[0], expected[0]
            out = None
            if where:
                place = symmetric[dtype] if where == 1 else torch.empty(16 * 70, dtype=dtype)
                out = place[: expected.numel()].view(expected.shape)
            draws.late()
            result = ops.gemv_all_reduce(comm, weight, x, out=out, tiling=tiling)
            if where == 1:
                result = result.clone()  # the next call writes there
            compared.append((result, expected))
        check_all(comm, compared)
        weight, x = torch.ones(20, 8), torch.ones(3, 8)
        check_close(gemv.unfused_gemv(comm, weight, x), torch.full((3, 20), 8.0 * n).double(), "unfused")


@on_ranks(long(2), 3, interpreted=True)
def test_gemv_all_reduce_of_weights_of_8_bits(group: dist.ProcessGroup) -> None:
    """Every finite value of both dtypes; a scale of the tensor, of each row, and none; dots and sums."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = draws_of(comm)
        tiling = Tiling(16, 32, 1, 1)
        compared: list[tuple[torch.Tensor, torch.Tensor]] = []
        for kind, (tokens, shape), dtype in zip(
            (*FLOAT8S, *FLOAT8S), ((1, (1,)), (1, None), (3, (20,)), (3, ())), (*DTYPES, DTYPES[0]), strict=True
        ):
            every = torch.arange(256, dtype=torch.uint8, device="cpu").view(kind)
            finite = every.double().abs() < 500  # of e5m2, those that are no larger than those of e4m3
            values = every[finite].view(torch.uint8)
            weights = [values.roll(7 * peer)[torch.arange(20 * 16) % len(values)].view(kind) for peer in range(n)]
            weights = [weight.view(20, 16) for weight in weights]
            xs = [draws.normal(tokens, 16).to(dtype) for _ in range(n)]
            scales = [None if shape is None else draws.normal(*(shape or (1,))).view(shape) / 64 for _ in range(n)]
            parts = [x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True)]
            expected = sum(
                part if scale is None else part * scale.double() for part, scale in zip(parts, scales, strict=True)
            )
            assert isinstance(expected, torch.Tensor)
            scale = scales[rank]
            weight, x = weights[rank].to(device), xs[rank].to(device)
            options = {"scale": None if scale is None else scale.to(device)}
            draws.late()
            compared.append((ops.gemv_all_reduce(comm, weight, x, tiling=tiling, **options), expected))
            unfused = gemv.unfused_gemv(comm, weight, x, **options)
            assert (unfused.double().cpu() - expected).abs().max() < 3e-2 * expected.abs().max()
        check_all(comm, compared)


@on_ranks(2, interpreted=True, whole=(32, 512), odd=(21, 70))
@on_ranks(gpu=fused, timeout_s=150, whole=(4096, 2048), odd=(1001, 515))
def test_gemvs_with_default_tilings(group: dist.ProcessGroup, whole: tuple[int, int], odd: tuple[int, int]) -> None:
    """GEMVs as they are cut by default: whole tiles and others (rows, columns), one token and several, all dtypes."""
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []
    with communicator(group) as comm:
        draws = Draws(7, comm.rank)
        for (rows, columns), tokens, dtype, kind in (
            *((whole, 1, dtype, None) for dtype in DTYPES),
            *((odd, 1, dtype, None) for dtype in DTYPES),
            *((whole, 16, dtype, None) for dtype in DTYPES),
            *((shape, tokens, torch.bfloat16, FLOAT8S[0]) for shape in (whole, odd) for tokens in (1, 16)),
            (odd, 9, torch.bfloat16, None),
        ):
            weights = [draws.normal(rows, columns).to(kind or dtype) for _ in range(comm.world_size)]
            xs = [draws.normal(tokens, columns).to(dtype) for _ in range(comm.world_size)]
            expected = sum(x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True))
            assert isinstance(expected, torch.Tensor)
            weight, x = weights[comm.rank].to(comm.device), xs[comm.rank].to(comm.device)
            for _ in range(2):
                draws.late()
                compared.append((ops.gemv_all_reduce(comm, weight, x, method="fused"), expected))
        check_all(comm, compared)


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is reserved when it is touched")
@on_ranks(2, interpreted=True)
def test_gemvs_of_rows_far_apart(group: dist.ProcessGroup) -> None:
    """The last tokens of long sequences: the ninth row lies behind 2**31 elements, in memory that is hardly there."""
    apart, tokens, hardly = (1 << 28) + 64, 9, getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 2 * apart * tokens, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | hardly)
    x = torch.frombuffer(memory, dtype=torch.float16).view(tokens, apart)[:, :32]
    x.copy_(torch.arange(tokens)[:, None])
    with communicator(group) as comm:
        weight = torch.ones(16, 32, dtype=x.dtype)
        found = ops.gemv_all_reduce(comm, weight, x, tiling=Tiling(16, 32, 1, 1), method="fused")[:, 0]
        assert found.tolist() == [64.0 * token for token in range(9)]


@on_ranks(2, interpreted=True)
def test_gemvs_in_place(group: dist.ProcessGroup) -> None:
    """Results in memory of ``x``: the same, or half of it, of rows that lie apart; again and again."""
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []
    with communicator(group) as comm:
        draws, rows = Draws(9, comm.rank), 64
        for tokens, columns, method in itertools.product((1, 3), (rows, 30), ("fused", "unfused")):
            weights, xs = draws.normal(comm.world_size, rows, columns), draws.normal(comm.world_size, tokens, columns)
            expected = torch.einsum("ntk,nmk->tm", xs.double(), weights.double())
            weight = weights[comm.rank].to(comm.device)
            for _ in range(1 if method == "unfused" else 2):
                memory = torch.zeros(tokens * rows, device=comm.device)
                x, out = memory.view(tokens, rows)[:, :columns], memory.view(tokens, rows)
                x.copy_(xs[comm.rank])
                options: dict[str, Any] = {"tiling": Tiling(16, 32, 1, 1), "method": method, "out": out}
                compared.append((ops.gemv_all_reduce(comm, weight, x, **options), expected))
        check_all(comm, compared)


@on_ranks(3, interpreted=True)
def test_gemvs_without_columns(group: dist.ProcessGroup) -> None:
    """On one rank or on all of them; dots and sums, also of weights of 8 bits."""
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []
    with communicator(group) as comm:
        n, tiling = comm.world_size, Tiling(16, 32, 1, 1)
        for number, (with_columns, tokens) in enumerate(itertools.product((1, 0), (1, 3))):
            dtype, kind = DTYPES[number % 3], (None, *FLOAT8S)[number % 3]
            columns = 32 if comm.rank < with_columns else 0
            weight = torch.ones(32, columns, dtype=dtype).to(kind or dtype)
            x = torch.ones(tokens, columns, dtype=dtype)
            expected = torch.full((tokens, 32), 32.0 * min(n, with_columns)).double()
            for method in ("fused", "unfused"):
                compared.append((ops.gemv_all_reduce(comm, weight, x, tiling=tiling, method=method), expected))
        check_all(comm, compared)


@on_ranks(2, interpreted=True)
def test_a_tiling_that_does_not_compile_is_named(group: dist.ProcessGroup) -> None:
    """What a caller is told where Triton cannot make a kernel, and where something else is wrong."""
    with communicator(group) as comm:
        handle = GemvAllReduce(comm, 20, 1, torch.float32)
        named = r"^gemv_all_reduce: Triton cannot make the kernel, try other tile sizes \(value=Tiling\(.*\): "
        for error, kind, words in (
            (RuntimeError("PassManager::run failed"), UnavailableError, named + "PassManager"),
            (OutOfResources(300000, 232448, "shared memory"), UnavailableError, named),
            (RuntimeError("a launch of a kernel, which was closed"), RuntimeError, "^a launch"),
        ):
            with (
                mock.patch.object(handle.kernel, "launch", side_effect=error),
                pytest.raises(kind, match=words) as found,
            ):
                handle.run(None, torch.ones(20, 8), torch.ones(8), None, None)
            assert type(found.value) is kind
