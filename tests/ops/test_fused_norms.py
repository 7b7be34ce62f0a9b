"""Sums that are normalised, by Triton's interpreter and on GPUs, against float64."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import same_bytes
from fused_ops import DTYPES, Draws, check_all, check_close, communicator, draws_of, fused, teams_of_programs
from marks import long
from on_ranks import on_ranks

from sidelane import Communicator, Config, ops
from sidelane.errors import PeerTimeoutError
from sidelane.ops import rms_norm
from sidelane.ops.handle import INTERPRETED
from sidelane.ops.rms_norm import AllReduceRmsNorm

UNFUSED: dict[str, Any] = {"method": "unfused"}


NORM_SCHEDULES: tuple[dict[str, Any], ...] = tuple(
    {"schedule": schedule, "method": "fused"} for schedule in ("cells", "pushed")
)


@on_ranks(2, long(4), interpreted=True, sizes=[(2, 128), (65, 8192)])
@on_ranks(
    gpu=fused,
    timeout_s=150,
    sizes=[(1, 8192), (6, 6144), (16, 8192), (3, 16384), (128, 8192), (512, 8192), (512, 16384)],
)
def test_large_norms(group: dist.ProcessGroup, sizes: Sequence[tuple[int, int]]) -> None:
    """The schedules that auto takes for these (tokens, hidden) in bfloat16, back to back and in turn with others."""
    schedules = set()
    with communicator(group) as comm:
        draws, device, dtype = Draws(5, comm.rank), comm.device, torch.bfloat16
        compared: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tokens, hidden in sizes:
            handle = AllReduceRmsNorm(comm, tokens, hidden, dtype)
            schedules.add(handle.schedule)
            for part in (tokens, max(1, tokens - 1), tokens):
                xs = [draws.normal(part, hidden).to(dtype) for _ in range(comm.world_size)]
                residual, weight = draws.normal(part, hidden).to(dtype), draws.normal(hidden).to(dtype)
                total = torch.stack(xs).double().sum(0) + residual.double()
                expected = total / (total.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
                draws.late()
                given = (one.to(device) for one in (xs[comm.rank], residual, weight))
                found = handle.run(None, *given, None, None, None, None, 1e-6)
                compared += zip(found, (expected, total), strict=True)
            comm.synchronize()
            for number, (result, wanted) in enumerate(compared):
                check_close(result, wanted, (tokens, hidden, number))
            compared.clear()
    assert schedules == {"cells", "pushed"} if device.type == "cpu" else "cells" in schedules


@on_ranks(long(1), long(2), long(3), long(4), interpreted=True, calls=16)
@on_ranks(1, 4, interpreted=True, calls=8)
@on_ranks(gpu=fused, timeout_s=240, calls=100)
def test_all_reduce_rms_norm_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """Random shapes and dtypes, with a residual and without, in place and not."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        draws = draws_of(comm)
        compared: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(calls):
            tokens, hidden = draws.sizes.choice((1, 2, 3, 5, 7)), 2 * draws.sizes.choice((1, 17, 40, 150))
            dtype, in_place = draws.sizes.choice(DTYPES), draws.sizes.random() < 0.5
            has_residual, eps = draws.sizes.random() < 0.7, draws.sizes.choice((1e-6, 1e-3))
            schedule = draws.sizes.choice(("auto", "cells", "pushed"))
            xs = [draws.normal(tokens, hidden).to(dtype) for _ in range(n)]
            residual, weight = draws.normal(tokens, hidden).to(dtype), draws.normal(hidden).to(dtype)
            total = torch.stack(xs).double().sum(0) + (residual.double() if has_residual else 0)
            expected = total / (total.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()
            device = comm.device
            x, before = xs[rank].to(device), residual.to(device) if has_residual else None
            draws.late()
            places: dict[str, Any] = {"out": x, "residual_out": before} if in_place else {}
            if in_place and draws.sizes.random() < 0.5:
                places = {"residual_out": x}
            compared += zip(
                ops.all_reduce_rms_norm(comm, x, before, weight.to(device), eps=eps, schedule=schedule, **places),
                (expected, total),
                strict=True,
            )
        check_all(comm, compared)
        x, weight = torch.full((2, 4), 1.0), torch.full((4,), 2.0)
        y, total = rms_norm.unfused_norm(comm, x, x, weight)
        check_close(total, torch.full((2, 4), n + 1.0).double(), "unfused")
        check_close(y, torch.full((2, 4), 2.0).double(), "unfused")


@on_ranks(2, interpreted=True)
def test_norms_of_one_row(group: dist.ProcessGroup) -> None:
    """One row alone whose stride is odd, as an input, and as an output that is like it."""
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []
    with communicator(group) as comm:
        for schedule in ("cells", "pushed"):
            x, quantized = (torch.ones(1, 9).to(dtype)[:, :8] for dtype in (torch.bfloat16, torch.float8_e4m3fn))
            options: dict[str, Any] = {"quantized": quantized, "scale": torch.ones(1), "method": "fused"}
            weight = torch.ones(8, dtype=torch.bfloat16)
            found = ops.all_reduce_rms_norm(comm, x, x, weight, schedule=schedule, **options)
            wide = torch.full((1, 8), comm.world_size + 1.0).double()
            compared += zip((*found, quantized.float()), (wide / wide, wide, wide / wide), strict=True)
        check_all(comm, compared)


@on_ranks(2, long(3), interpreted=True, sizes=[(1, 6), (5, 34), (2, 300)])
@on_ranks(gpu=fused, timeout_s=150, sizes=[(1, 8192), (3, 34), (16, 4096), (200, 8192)])
def test_norms_in_8_bits(group: dist.ProcessGroup, sizes: Sequence[tuple[int, int]]) -> None:
    """Norms in 8 bits, by both schedules and unfused, with a scale that is given and with one of each row."""
    with communicator(group) as comm:
        draws = Draws(3, comm.rank)
        for (tokens, hidden), dtype in itertools.product(sizes, DTYPES):
            xs = [draws.normal(tokens, hidden).to(dtype) for _ in range(comm.world_size)]
            weight = draws.normal(hidden).to(dtype)
            total = torch.stack(xs).double().sum(0)
            y = total / (total.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
            for by_row, options in itertools.product((False, True), (*NORM_SCHEDULES, UNFUSED)):
                narrow = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn)
                scale = torch.empty(tokens, 1) if by_row else torch.tensor(0.004)
                found, _ = ops.all_reduce_rms_norm(
                    comm, xs[comm.rank].to(comm.device), None, weight.to(comm.device),
                    quantized=narrow, scale=scale, **options,
                )  # fmt: skip
                check_close(found, y, (tokens, hidden, dtype, options))
                if by_row:
                    largest = y.abs().amax(1, keepdim=True) / 448
                    torch.testing.assert_close(scale.cpu().double(), largest, rtol=2e-2, atol=1e-12)
                wanted = (y / scale.cpu().double()).clamp(-448, 448)
                # A place of 3 bits, and what lies below the smallest number. The interpreter also halves what is
                # rounded up to the next power of two.
                written = [narrow.cpu().double() * factor for factor in ((1, 2) if INTERPRETED else (1,))]
                apart = torch.stack([(one - wanted).abs() for one in written]).amin(0)
                assert (apart <= wanted.abs() * 2**-3 + 2**-9).all(), (tokens, hidden, dtype, by_row, options)


@on_ranks(2, interpreted=True, every=False, timeout_s=170)
@on_ranks(long(3), interpreted=True, every=True, timeout_s=170)
def test_programs_that_share_a_row_wait_for_each_other(group: dist.ProcessGroup, every: bool) -> None:
    """Rows that several programs have, in place, are those of one program: a row for each program and several of them,
    of two to six slices, the last one shorter or not; in 8 bits, too. With every dtype, or dtypes in turn.
    """
    sizes = [(1, 300), (5, 270), (2, 768)][: 3 if every else 2]
    with communicator(group) as comm:
        draws = Draws(11, comm.rank)
        places = list(itertools.product(sizes, (False, True)))
        if every:
            cases = [(*place, dtype) for place in places for dtype in DTYPES]
        else:
            cases = [(*place, dtype) for place, dtype in zip(places, itertools.cycle(DTYPES), strict=False)]
        for (tokens, hidden), by_row, dtype in cases:
            xs = [draws.normal(tokens, hidden).to(dtype) for _ in range(comm.world_size)]
            residual, weight = draws.normal(tokens, hidden).to(dtype), draws.normal(hidden).to(dtype)
            found = []
            for schedule, alone in (("pushed", True), ("cells", True), ("cells", False)):
                narrow = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn)
                scale = torch.zeros(tokens, 1) if by_row else torch.tensor(0.004)
                x, before = xs[comm.rank].clone(), residual.clone()
                with contextlib.nullcontext() if alone else teams_of_programs(7):
                    handle = AllReduceRmsNorm(comm, tokens, hidden, dtype, schedule=schedule)
                    for again in range(2):  # of an even generation and an odd one
                        x.copy_(xs[comm.rank]), before.copy_(residual)
                        draws.late()
                        written = (x, before) if again else (None, x)
                        y, total = handle.run(None, x, before, weight, *written, narrow, scale, 1e-6)
                        comm.synchronize()
                        found.append([part.clone() for part in (y, total, narrow.view(torch.uint8), scale)])
            for other in found[1:]:
                assert all(map(same_bytes, other, found[0])), (tokens, hidden, dtype, by_row)


@on_ranks(2, interpreted=True)
def test_a_program_that_waits_for_another_one_blames_nobody(group: dist.ProcessGroup) -> None:
    """Half of a row comes, and the rest does not: the program of that half waits for another one, which waits for a
    peer.
    """
    comm = Communicator(group, config=Config(timeout_s=1))
    with teams_of_programs(2):
        handle = AllReduceRmsNorm(comm, 1, 256, torch.float32, schedule="cells")
        if comm.rank == 0:
            cells = handle.came[: 4 * 256].view(2, 2, 256)  # of even and odd generations, and of each sender
            cells[1, 1, :128] = 1 << 32
            with pytest.raises(PeerTimeoutError) as error:
                handle.run(None, torch.ones(1, 256), None, torch.ones(256), None, None, None, None, 1e-6)
                comm.synchronize()
            assert error.value.ranks == (1,)


@on_ranks(2, interpreted=True)
@on_ranks(gpu=fused)
def test_a_nan_stays_visible_in_8_bits(group: dist.ProcessGroup) -> None:
    """A NaN in a row shows in all of its elements in 8 bits, and in a scale of its own; other rows have none."""
    with communicator(group) as comm:
        for dtype, by_row, options in itertools.product(DTYPES, (True, False), (*NORM_SCHEDULES, UNFUSED)):
            x, weight = torch.ones(4, 34, dtype=dtype), torch.ones(34, dtype=dtype)
            if comm.rank == comm.world_size - 1:
                x[1, 3], x[2, 33] = torch.nan, torch.inf
            narrow = torch.empty(4, 34, dtype=torch.float8_e4m3fn)
            scale = torch.empty(4, 1) if by_row else torch.tensor(0.5)
            for some in (weight, weight.where(torch.arange(34) != 5, torch.nan)):
                x, some = x.to(comm.device), some.to(comm.device)
                y, _ = ops.all_reduce_rms_norm(comm, x, None, some, quantized=narrow, scale=scale, **options)
                lost = y.isnan().any(1, keepdim=True) if by_row else y.isnan()
                assert torch.equal(narrow.float().isnan(), lost.expand_as(y)), (dtype, by_row, options)
                assert not by_row or torch.equal(scale.isnan(), lost)
                rows = [not row.isnan().any() for row in y]
                assert rows == ([True, False, False, True] if some is weight else [False] * 4)
        comm.synchronize()
