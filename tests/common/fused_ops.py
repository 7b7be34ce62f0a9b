"""What ranks do with fused operators in tests, under Triton's interpreter or on GPUs: against float64, with late ranks.

A rank's tensors are on its default device, which the processes for GPUs set. All ranks draw the same sizes and inputs,
so that each knows what the others have.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from expected import same_bytes
from programs_at_once import programs_at_once
from triton.runtime.errors import OutOfResources

from sidelane import Communicator, Config, ops
from sidelane.errors import PeerError, SidelaneError
from sidelane.ops import gemv, rms_norm
from sidelane.ops.gemv import GemvAllReduce, Tiling
from sidelane.ops.handle import FLOAT8S, INTERPRETED
from sidelane.ops.rms_norm import AllReduceRmsNorm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Calls = tuple[list[Callable[[], Any]], Callable[[], Any]]
"""Wrong ones, and one that is right."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of an element, next to the largest one: the last place of the dtype, twice."""


class Draws:
    """Sizes and inputs that all ranks draw alike, and the rank that is late, which each draws for itself."""

    def __init__(self, seed: int, rank: int) -> None:
        self.sizes, self._late = random.Random(seed), random.Random(100 * seed + rank)
        self._values = torch.Generator("cpu").manual_seed(seed)

    def late(self) -> None:
        """Be late at random."""
        time.sleep(0.02 * self._late.random() * (self._late.random() < 0.3))

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, on the CPU."""
        return torch.randn(*shape, generator=self._values, device="cpu")


def check_close(found: torch.Tensor, expected: torch.Tensor, where: object, *, scale: float | None = None) -> None:
    """Compare with float64, next to ``scale`` or the largest element."""
    if scale is None:
        scale = max(1e-3, float(expected.abs().max())) if expected.numel() else 1.0
    error = (found.double().cpu() - expected.cpu()).abs().max().item() / scale if expected.numel() else 0.0
    assert error <= TOLERANCE[found.dtype], (where, error)


def check_all(
    comm: Communicator, compared: Sequence[tuple[torch.Tensor, torch.Tensor]], *, scale: float | None = None
) -> None:
    """Compare all that was kept with float64, once the calls have ended."""
    comm.synchronize()
    for number, (result, expected) in enumerate(compared):
        assert result.shape == expected.shape, number
        check_close(result, expected, number, scale=scale)


def noting(call: Callable[..., Any], word: str, seen: list[str]) -> Callable[..., Any]:
    """Make a call that also writes down a word."""

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(word)
        return call(*arguments, **options)

    return noted


@contextlib.contextmanager
def communicator(group: dist.ProcessGroup, *, debug: bool = False) -> Iterator[Communicator]:
    """One that is patient: CPU ranks interpret kernels."""
    config = Config(timeout_s=60, debug=debug)
    with Communicator(group, device=torch.get_default_device(), config=config) as comm:
        yield comm


def gemv_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Random shapes and dtypes; outputs of all kinds; who is late changes."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        draws = Draws(seed, rank)
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
    return len(compared)


def gemv_of_8_bits(group: dist.ProcessGroup, seed: int) -> int:
    """Every finite value of both dtypes; a scale of the tensor, of each row, and none; dots and sums."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = Draws(seed, rank)
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
    return len(compared)


def default_tilings(group: dist.ProcessGroup, whole: tuple[int, int], odd: tuple[int, int]) -> int:
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
    return len(compared)


def gemvs_of_rows_far_apart(group: dist.ProcessGroup) -> list[float]:
    """The last tokens of long sequences: the ninth row lies behind 2**31 elements, in memory that is hardly there."""
    apart, tokens, hardly = (1 << 28) + 64, 9, getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 2 * apart * tokens, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | hardly)
    x = torch.frombuffer(memory, dtype=torch.float16).view(tokens, apart)[:, :32]
    x.copy_(torch.arange(tokens)[:, None])
    with communicator(group) as comm:
        weight = torch.ones(16, 32, dtype=x.dtype)
        return ops.gemv_all_reduce(comm, weight, x, tiling=Tiling(16, 32, 1, 1), method="fused")[:, 0].tolist()


def gemvs_in_place(group: dist.ProcessGroup) -> int:
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
    return len(compared)


def gemvs_without_columns(group: dist.ProcessGroup) -> int:
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
    return len(compared)


def large_norms(group: dist.ProcessGroup, sizes: Sequence[tuple[int, int]]) -> set[str]:
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
    return schedules


def tilings_that_do_not_compile(group: dist.ProcessGroup) -> list[str]:
    """What a caller is told where Triton cannot make a kernel, and where something else is wrong."""
    told = []
    with communicator(group) as comm:
        handle = GemvAllReduce(comm, 20, 1, torch.float32)
        for error in (
            RuntimeError("PassManager::run failed"),
            OutOfResources(300000, 232448, "shared memory"),
            RuntimeError("a launch of a kernel, which was closed"),
        ):
            with mock.patch.object(handle._kernel, "launch", side_effect=error):
                try:
                    handle.run(None, torch.ones(20, 8), torch.ones(8), None, None)
                except Exception as found:
                    told.append(f"{type(found).__name__}: {found}")
    return told


def rms_norm_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Random shapes and dtypes, with a residual and without, in place and not."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        draws = Draws(seed, rank)
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
    return len(compared) // 2


def norms_of_one_row(group: dist.ProcessGroup) -> int:
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
    return len(compared)


def refusals(group: dist.ProcessGroup, calls: Callable[[Communicator], Calls]) -> list[list[str]]:
    """For each wrong call, made by the last rank only, what each rank is told; then a call that is right."""
    told: list[str] = []
    with communicator(group, debug=True) as comm:
        wrong, right = calls(comm)
        for call in wrong:
            try:
                (call if comm.rank == comm.world_size - 1 else right)()
                told.append("nothing")
            except (TypeError, ValueError, SidelaneError) as error:
                told.append(f"{type(error).__name__}: {error}")
        right()
        comm.synchronize()
    return [told]


def gemv_calls(comm: Communicator) -> Calls:
    weight, x = torch.ones(20, 8), torch.ones(3, 8)
    small = weight.to(torch.float8_e5m2)

    def call(weight: Any = weight, x: Any = x, **options: Any) -> Callable[[], Any]:
        return lambda: ops.gemv_all_reduce(comm, weight, x, **options)

    wrong = [
        call(x=torch.ones(3, 7)),
        call(x=torch.ones(17, 8)),
        call(x=x.half()),
        call(weight=[1]),
        call(weight=torch.ones(8, 20).T),
        call(out=torch.ones(20, 3)),
        call(method="best"),
        call(weight=torch.ones(20, 8, dtype=torch.int32)),
        call(scale=torch.ones(1)),
        call(weight=small, scale=torch.ones(2)),
        call(weight=small, scale=torch.ones(20).half()),
        call(weight=small, x=x.to(small.dtype)),
        call(weight=weight.to(torch.float8_e4m3fnuz)),
        call(tiling="large"),
        call(tiling=[16, 512]),
    ]
    return wrong, call()


def rms_norm_calls(comm: Communicator) -> Calls:
    x, weight = torch.ones(3, 8), torch.ones(8)

    def call(x: Any = x, residual: Any = None, weight: Any = weight, **options: Any) -> Callable[[], Any]:
        return lambda: ops.all_reduce_rms_norm(comm, x, residual, weight, **options)

    odd = torch.ones(25, dtype=torch.float16)[1:].view(3, 8)
    wrong = [
        call(x=torch.ones(513, 8)),
        call(x=torch.ones(8)),
        call(x=torch.ones(3, 8, dtype=torch.int64)),
        call(x=torch.ones(3, 7).half(), weight=torch.ones(7).half()),
        call(x=odd, weight=weight.half()),
        call(x=torch.ones(8, 3).T),
        call(x=torch.ones(1, 16384), weight=torch.ones(16384)),
        call(residual=torch.ones(3, 7)),
        call(residual=torch.ones(3, 8).half()),
        call(weight=torch.ones(7)),
        call(out=torch.ones(2, 8)),
        call(quantized=torch.ones(3, 8), scale=torch.ones(1)),
        call(quantized=torch.ones(3, 8).to(torch.float8_e4m3fn)),
        call(quantized=torch.ones(3, 8).to(torch.float8_e4m3fn), scale=torch.ones(3)),
        call(scale=torch.ones(1)),
        *(call(eps=eps) for eps in (None, "little")),
    ]
    return wrong, call()


def quantized_norms(group: dist.ProcessGroup, sizes: Sequence[tuple[int, int]]) -> int:
    """Norms in 8 bits, by both schedules and unfused, with a scale that is given and with one of each row."""
    calls = 0
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
                calls += 1
    return calls


@contextlib.contextmanager
def teams_of_programs(programs: int) -> Iterator[None]:
    """Let CPU ranks do as GPUs do: a program has one slice of a row, and waits for those that have the others."""
    with (
        mock.patch.object(rms_norm, "slices_of_a_program", return_value=1),
        mock.patch.object(rms_norm, "programs_of", lambda comm, needed, per_unit: min(needed, programs)),
        programs_at_once(),
    ):
        yield


def norms_of_teams(group: dist.ProcessGroup, sizes: Sequence[tuple[int, int]], programs: int, every: bool) -> int:
    """Rows that several programs have, in place: as one program has them. Returns the number of calls.

    Every size with every dtype, or dtypes in turn.
    """
    calls = 0
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
                with contextlib.nullcontext() if alone else teams_of_programs(programs):
                    handle = AllReduceRmsNorm(comm, tokens, hidden, dtype, schedule=schedule)
                    for again in range(2):  # of an even generation and an odd one
                        x.copy_(xs[comm.rank]), before.copy_(residual)
                        draws.late()
                        written = (x, before) if again else (None, x)
                        y, total = handle.run(None, x, before, weight, *written, narrow, scale, 1e-6)
                        comm.synchronize()
                        found.append([part.clone() for part in (y, total, narrow.view(torch.uint8), scale)])
                        calls += not alone
            for other in found[1:]:
                assert all(map(same_bytes, other, found[0])), (tokens, hidden, dtype, by_row)
    return calls


def norm_without_a_slice(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
    """Half of a row comes, and the rest does not: the program of that half waits for another one, which waits for a
    peer. What is told, of two ranks.
    """
    comm = Communicator(group, config=Config(timeout_s=1))
    with teams_of_programs(2):
        handle = AllReduceRmsNorm(comm, 1, 256, torch.float32, schedule="cells")
        if comm.rank == 0:
            cells = handle._came[: 4 * 256].view(2, 2, 256)  # of even and odd generations, and of each sender
            cells[1, 1, :128] = 1 << 32
            try:
                handle.run(None, torch.ones(1, 256), None, torch.ones(256), None, None, None, None, 1e-6)
                comm.synchronize()
            except PeerError as error:
                return type(error).__name__, error.ranks
    return "nothing", ()


def norms_of_nan(group: dist.ProcessGroup) -> None:
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


UNFUSED: dict[str, Any] = {"method": "unfused"}
NORM_SCHEDULES: tuple[dict[str, Any], ...] = tuple(
    {"schedule": schedule, "method": "fused"} for schedule in ("cells", "pushed")
)
