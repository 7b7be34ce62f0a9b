"""What ranks do with GEMMs of several experts a rank in tests, above all unfused; see ``fused_ops``."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choices import keep
from fused_modules import there_and_back
from fused_ops import Draws, check_close, communicator, noting

from sidelane import Communicator, ops
from sidelane.choice.fused import UNFUSED, FusedTime, Method
from sidelane.choice.key import key_here
from sidelane.choice.selection import Selection
from sidelane.ops import dispatch_gemm, expert_products, gemm, operands, operator
from sidelane.ops.gemm import TileSizes

TILES = TileSizes(16, 16, 16, 1, 1, group=2)
SIZES = (0, 1, 5, 13, 16, 40)
Counts = list[list[list[int]]]
KINDS = (
    *((torch.bfloat16, 16, 24), (torch.bfloat16, 13, 8), (torch.bfloat16, 3, 5)),
    *((torch.float16, 16, 8), (torch.float32, 40, 20)),
)
"""dtype, K, H: the first one has a grouped product, and the second one behind rows that travel."""


def pieces(counts: Counts, rank: int) -> Iterator[tuple[int, int, slice]]:
    """Of the rows that a rank sends: to whom, which number among the experts there, and where they are."""
    each = len(counts[0][0])
    ends = itertools.accumulate(itertools.chain.from_iterable(counts[rank]), initial=0)
    for group, (first, stop) in enumerate(itertools.pairwise(ends)):
        yield group // each, group % each, slice(first, stop)


def dispatched(xs: list[torch.Tensor], weights: torch.Tensor, counts: Counts, rank: int) -> torch.Tensor:
    """float64: what all_to_all_gemm gives a rank; ``weights`` [N, E, H, K]."""
    return products(xs, [weights[rank]] * len(xs), counts, rank)


def combined(xs: list[torch.Tensor], weights: torch.Tensor, counts: Counts, rank: int) -> torch.Tensor:
    """The same of gemm_all_to_all."""
    return products(xs, list(weights), counts, rank)


def products(xs: list[torch.Tensor], by_sender: list[torch.Tensor], counts: Counts, rank: int) -> torch.Tensor:
    """float64: the rows that come to a rank, each sender's by weights of its own, [E, H, K]."""
    parts = [torch.empty(0, by_sender[0].shape[1], dtype=torch.float64, device="cpu")]
    for sender, (x, weights) in enumerate(zip(xs, by_sender, strict=True)):
        for peer, expert, rows in pieces(counts, sender):
            if peer == rank:
                parts.append(x[rows].double() @ weights[expert].double().T)
    return torch.cat(parts)


OPERATORS: tuple[tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]], ...] = (
    (ops.all_to_all_gemm, dispatched),
    (ops.gemm_all_to_all, combined),
)


def back_to_back(group: dist.ProcessGroup, seed: int, calls: int, first: int = 0) -> int:
    """Skewed routing, nothing at all for some, one expert and several, weights that lie apart; every way, counts on the
    device and on the host, and rows that there is no room for. ``first``: number of the first call."""
    with communicator(group) as comm:
        draws, kept, done = Draws(seed, comm.rank), list[tuple[object, torch.Tensor, torch.Tensor]](), 0
        for number in range(first, first + calls):
            dtype, depth, columns = KINDS[number % len(KINDS)]
            for name, result, wanted in one_shape(comm, draws, number, dtype, depth, columns):
                kept.append(((number, dtype, name), result[: len(wanted)].clone(), wanted))
                done += 1
        comm.synchronize()
        for where, result, wanted in kept:
            assert len(result) == len(wanted), where
            check_close(result, wanted, where)
    return done


def one_shape(
    comm: Communicator, draws: Draws, number: int, dtype: torch.dtype, depth: int, columns: int
) -> Iterator[tuple[object, torch.Tensor, torch.Tensor]]:
    n, rank, device, each = comm.world_size, comm.rank, comm.device, draws.sizes.choice((1, 2, 3, 5))
    counts = [[[draws.sizes.choice(SIZES) for _ in range(each)] for _ in range(n)] for _ in range(n)]
    if number % 3 == 1:
        counts[-1] = [[0] * each for _ in range(n)]  # a rank has no rows at all
    xs = [draws.normal(sum(map(sum, row)) + number % 2, depth).to(dtype) for row in counts]
    weights = draws.normal(n, each, columns, depth).to(dtype)
    x, weight = xs[rank].to(device), weights[rank].to(device)
    if number % 2:  # rows that lie apart, in memory whose rows do not begin at multiples of 16 bytes
        x, weight = (torch.cat([part, part[..., :1]], dim=-1)[..., :depth] for part in (x, weight))
    most, kind = 40 * n * each, draws.sizes.choice((torch.int32, torch.int64))
    table = torch.tensor(counts, dtype=kind, device=device)
    unfused: tuple[Any, ...]
    for op, oracle in OPERATORS:
        widths = (columns,) if op is ops.gemm_all_to_all else (depth, columns)
        if device.type != "cpu" and not expert_products.has_grouped_product(device, dtype, *widths):
            unfused = (counts,)  # or the host would have to wait
        else:
            unfused = table, counts
        wanted = oracle(xs, weights, counts, rank)
        for method in ("unfused", "fused", "auto"):
            for given in unfused if method == "unfused" else (table, counts):
                draws.late()
                found = op(comm, x, weight, given, most_rows=most, tiles=TILES, method=method)
                yield (op.__name__, method, type(given)), found.clone(), wanted
        room = 1 + max(sum(map(sum, column)) for column in zip(*counts, strict=True)) // 2
        for given in unfused:
            found = op(comm, x, weight, given, most_rows=room, tiles=TILES, method="unfused")
            yield (op.__name__, "left out", type(given)), found.clone(), wanted[:room]


def depths_that_differ(group: dist.ProcessGroup) -> int:
    """Rows that travel behind the product may have had any number of columns on each rank."""
    with communicator(group) as comm:
        n, rank, draws = comm.world_size, comm.rank, Draws(4, comm.rank)
        counts = [[[3 + sender, 2 * to] for to in range(n)] for sender in range(n)]
        xs = [draws.normal(sum(map(sum, row)), 16 + 3 * at).bfloat16() for at, row in enumerate(counts)]
        weights = [draws.normal(2, 8, 16 + 3 * at).bfloat16() for at in range(n)]
        parts = [
            x[rows].double() @ weights[sender][expert].double().T
            for sender, x in enumerate(xs)
            for peer, expert, rows in pieces(counts, sender)
            if peer == rank
        ]
        given = xs[rank].to(comm.device), weights[rank].to(comm.device), torch.tensor(counts, device=comm.device)
        wanted = torch.cat(parts)
        for method in ("unfused", "auto", "fused"):
            found = ops.gemm_all_to_all(comm, *given, most_rows=20 * n, method=method)[: len(wanted)].clone()
            comm.synchronize()
            check_close(found, wanted, method)
    return len(wanted)


def with_a_mistake(group: dist.ProcessGroup, mistake: str) -> list[str]:
    """What is wrong with the unfused way, by operator, if a part of it errs."""
    told: list[str] = []
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        groups = expert_products.ExpertGroups
        if mistake == "in order":
            patch.setattr(groups, "in_order", lambda self, rows: rows.clone())
        elif mistake == "moved":
            made = groups.__init__

            def as_sent(self: Any, counts: torch.Tensor, *rest: Any, **options: Any) -> None:
                made(self, counts, *rest, **options)
                by_rank = counts.flatten(1) if options["are_sent"] else counts.transpose(0, 1).flatten(1)
                starts = (by_rank.cumsum(1) - by_rank).view(counts.shape).int()
                self.moved = (starts if options["are_sent"] else starts.transpose(0, 1)).contiguous()

            patch.setattr(groups, "__init__", as_sent)
        elif mistake == "stops":
            product = groups.product
            patch.setattr(groups, "product", lambda self, *given: (self._stops.sub_(1), product(self, *given))[1])
        n, draws = comm.world_size, Draws(3, comm.rank)
        counts = [[[1 + sender, 4, 2 + to] for to in range(n)] for sender in range(n)]
        xs = [draws.normal(sum(map(sum, row)), 16).bfloat16() for row in counts]
        weights = draws.normal(n, 3, 8, 16).bfloat16()
        given = xs[comm.rank], weights[comm.rank], torch.tensor(counts)
        for op, oracle in OPERATORS:
            wanted = oracle(xs, weights, counts, comm.rank)
            found = op(comm, *given, most_rows=20 * n, method="unfused")[: len(wanted)].clone()
            comm.synchronize()
            try:
                check_close(found, wanted, "wrong")
                told.append("right")
            except AssertionError as problem:
                told.append(str(problem.args[0])[1:8])
    return told


def chosen(group: dist.ProcessGroup) -> list[list[str]]:
    """What auto takes by a table with and without experts, and what it says of it."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(Path(folder) / str(dist.get_rank(group))))
        n, sizes = dist.get_world_size(group), (32, 16, 8)
        if dist.get_rank(group) == 0:
            slow, fast = {"fused": 2.0, "unfused": 1.0}, {"fused": 1.0, "unfused": 2.0}
            times = [
                FusedTime(op.__name__, n, False, sizes, 2, given, {}, experts)
                for op, _ in OPERATORS
                for experts, given in ((1, fast), (2, slow), (16, fast))
            ]
            assert os.fspath(keep(key_here("cpu", n), times)).startswith(folder)
        told: list[list[str]] = []
        with communicator(group) as comm:
            for op, _ in OPERATORS:
                went: list[str] = []
                for experts in (None, 2, 16):
                    each = experts or 1
                    shape = (n, n) if experts is None else (n, n, each)
                    weight = torch.randn(*([] if experts is None else [each]), 8, 16).bfloat16()
                    counts = torch.ones(shape, dtype=torch.int64)
                    with pytest.MonkeyPatch.context() as inner:
                        inner.setattr(
                            expert_products.ExpertGroups,
                            "product",
                            noting(expert_products.ExpertGroups.product, "grouped", went),
                        )
                        op(comm, torch.randn(n * each, 16).bfloat16(), weight, counts, most_rows=32)
                    went.append(ops.explain(comm, op.__name__, *sizes, experts=each, dtype=torch.bfloat16))
                told.append(went)
    return told


def products_of_calls(group: dist.ProcessGroup) -> list[list[int]]:
    """Return the number of grouped products of calls with layouts of their own, by auto and by name."""
    found: list[list[int]] = []
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n, went = comm.world_size, list[str]()
        groups = expert_products.ExpertGroups
        patch.setattr(groups, "product", noting(groups.product, "grouped", went))
        patch.setattr(operator, "choose_method", lambda *_, **__: Selection(Method(UNFUSED), "a test"))
        weight, counts = torch.randn(2, 8, 16).bfloat16(), torch.ones(n, n, 2, dtype=torch.int64)
        for (op, _), method in itertools.product(OPERATORS, ("auto", UNFUSED)):
            made = []
            for rows in (2 * n, 2 * n, 3 * n):
                went.clear()
                op(comm, torch.randn(rows, 16).bfloat16(), weight, counts, most_rows=4 * n, method=method)
                made.append(len(went))
            found.append(made)
    return found


def refused(group: dist.ProcessGroup) -> list[str]:
    """Of counts that only a device has, without a grouped product: what is unfused is not there, and auto is fused."""
    told: list[str] = []
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n = comm.world_size
        patch.setattr(comm, "refuse", lambda *_: None)  # each rank raises, and goes on
        seen: list[tuple[str, ...]] = []

        def choose(*_: Any, ways: tuple[str, ...], **__: Any) -> Selection[Method]:
            seen.append(tuple(ways))
            return Selection(Method(ways[-1]), "a test")

        patch.setattr(operator, "choose_method", choose)
        x, weight, counts = torch.ones(4 * n, 8), torch.ones(2, 4, 8), torch.full((n, n, 2), 2)
        patch.setattr(operands, "on_the_host", lambda _: False)  # as of a GPU
        for op, _ in OPERATORS:
            assert op(comm, x, weight, counts, most_rows=4 * n, tiles=TILES)[:n].eq(8).all()
            with pytest.raises(ValueError, match="allowed=counts on the host, or bfloat16") as problem:
                op(comm, x, weight, counts, most_rows=4 * n, tiles=TILES, method=UNFUSED)
            told.append(str(problem.value))
            assert op(comm, x, weight, counts.tolist(), most_rows=4 * n, tiles=TILES).shape == (4 * n, 4)
        assert seen == [("fused",), ("fused",), ("fused", "unfused"), ("fused", "unfused")] * 2, seen
    return told


def layers(group: dist.ProcessGroup, backend: str) -> int:
    """Both layers of experts, trained, where auto takes what is unfused: by products of a group each."""
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "choose_method", lambda *_, **__: Selection(Method(UNFUSED), "a test"))
        went: list[str] = []
        for module in (gemm, dispatch_gemm):
            patch.setattr(module, "one_by_one", noting(module.one_by_one, "one by one", went))
        torch.manual_seed(8)
        n = comm.world_size
        there_and_back(comm, 2, backend, torch.randint(2 * n, (n, 5, 2), device="cpu"))
        return len(went)
