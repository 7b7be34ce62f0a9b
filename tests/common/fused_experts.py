"""GEMMs of several experts a rank, as the ranks of tests make them; see ``fused_ops``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from fused_ops import Draws, check_close, communicator

from sidelane import Communicator, ops
from sidelane.errors import UnavailableError
from sidelane.ops.gemm import TileSizes

TILES = TileSizes(16, 16, 16, 1, 1, group=2)
SIZES = (0, 1, 5, 13, 16, 40)
Counts = list[list[list[int]]]
KINDS = (
    *((torch.bfloat16, 16, 24), (torch.bfloat16, 13, 8), (torch.bfloat16, 3, 5)),
    *((torch.float16, 16, 8), (torch.float32, 40, 20)),
)
"""dtype, K, H."""


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
    """Skewed routing, nothing at all for some, one expert and several, weights that lie apart; counts on the device and
    on the host, and rows that there is no room for. ``first``: number of the first call."""
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
    for op, oracle in OPERATORS:
        wanted = oracle(xs, weights, counts, rank)
        for method in ("fused", "auto"):
            for given in (table, counts):
                draws.late()
                found = op(comm, x, weight, given, most_rows=most, tiles=TILES, method=method)
                yield (op.__name__, method, type(given)), found.clone(), wanted
        room = 1 + max(sum(map(sum, column)) for column in zip(*counts, strict=True)) // 2
        for given in (table, counts):
            found = op(comm, x, weight, given, most_rows=room, tiles=TILES)
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
        for method in ("auto", "fused"):
            found = ops.gemm_all_to_all(comm, *given, most_rows=20 * n, method=method)[: len(wanted)].clone()
            comm.synchronize()
            check_close(found, wanted, method)
    return len(wanted)


def refused(group: dist.ProcessGroup) -> list[str]:
    """Return errors of calls that are not fused, and of ``auto`` on GPUs whose kernels have never run."""
    told: list[str] = []
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n = comm.world_size
        patch.setattr(comm, "refuse", lambda *_: None)  # each rank raises, and goes on
        x, weight, counts = torch.ones(4 * n, 8), torch.ones(2, 4, 8), torch.full((n, n, 2), 2)
        for op, _ in OPERATORS:
            for method in ("unfused", "split"):
                with pytest.raises(ValueError, match="method with several experts") as problem:
                    op(comm, x, weight, counts.tolist(), most_rows=4 * n, method=method)
                told.append(str(problem.value))
        patch.setattr(comm, "abilities", dataclasses.replace(comm.abilities, kernels_have_run=False))
        for op, _ in OPERATORS:
            with pytest.raises(UnavailableError, match="have never run its kernel") as unavailable:
                op(comm, x, weight, counts.tolist(), most_rows=4 * n)
            told.append(str(unavailable.value))
    return told
