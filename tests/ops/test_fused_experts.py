"""Rows to experts and back beside GEMMs, by Triton's interpreter and on GPUs, against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_ops import DTYPES, TILES, Draws, check_all, check_close, communicator, draws_of, fused, noting
from marks import long
from on_ranks import on_ranks

import sidelane
from sidelane import Communicator, ops
from sidelane.choice.fused import SPLIT, Method
from sidelane.choice.selection import Selection
from sidelane.errors import UnavailableError
from sidelane.ops import dispatch_gemm, gemm, operands, operator, pipelined_gemm
from sidelane.ops.handle import cached_object
from sidelane.ops.pipelined_gemm import MOST_TABLES, RoutedParts
from sidelane.program.pieces import SPLIT_GEMM

MOST_FUNCTIONS = 45
"""Largest number of Python functions of a cached call (issue 66)."""

SIZES = (0, 1, 5, 13, 16, 40)
Counts = list[list[list[int]]]
KINDS = (
    *((torch.bfloat16, 16, 24), (torch.bfloat16, 13, 8), (torch.bfloat16, 3, 5)),
    *((torch.float16, 16, 8), (torch.float32, 40, 20)),
)
"""dtype, K, H."""


@on_ranks(long(2), long(3), interpreted=True, calls=8)
@on_ranks(3, interpreted=True, calls=2)
@on_ranks(gpu=fused, timeout_s=240, calls=60)
def test_gemm_all_to_all_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """Skewed routing, nothing at all for some, rows that stay; outputs that peers write while others are late."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = draws_of(comm)
        compared: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            dtype = draws.sizes.choice(DTYPES)
            columns, depth = draws.sizes.choice((5, 16, 20)), draws.sizes.choice((3, 16, 40))
            counts = [[draws.sizes.choice((0, 1, 7, 18, 70)) for _ in range(n)] for _ in range(n)]
            xs = [draws.normal(sum(row) + number % 2, depth).to(dtype) for row in counts]
            weights = [draws.normal(columns, depth).to(dtype) for _ in range(n)]
            products = [x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True)]
            parts = [
                products[peer][sum(counts[peer][:rank]) : sum(counts[peer][: rank + 1])]  # what is for this rank
                for peer in range(n)
            ]
            expected = torch.cat(parts)
            x, weight = xs[rank].to(device), weights[rank].to(device)
            table = torch.tensor(counts, dtype=draws.sizes.choice((torch.int32, torch.int64)), device=device)
            draws.late()
            result = ops.gemm_all_to_all(comm, x, weight, table, most_rows=70 * n, tiles=TILES)
            compared.append((result[: len(expected)].clone(), expected))
            if number % 3 == 2:  # rows that overlap in memory, which the library does not take
                x, xs = x[:1].expand(x.shape), [one[:1].expand(one.shape) for one in xs]
                products = [one.double() @ part.double().T for one, part in zip(xs, weights, strict=True)]
                firsts = [(sum(row[:rank]), sum(row[: rank + 1])) for row in counts]
                parts = [one[first:stop] for one, (first, stop) in zip(products, firsts, strict=True)]
                expected = torch.cat(parts)
            by_engines = ops.gemm_all_to_all(
                comm, x, weight, counts, most_rows=70 * n, method="split", pieces=1 + number % 3
            )
            compared.append((by_engines[: len(expected)].clone(), expected))
            if number < 2:  # as they are, and back
                x = xs[rank].to(device)
                rows = [part[sum(row[:rank]) : sum(row[: rank + 1])] for part, row in zip(xs, counts, strict=True)]
                came = ops.all_to_all_rows(comm, x, table, most_rows=70 * n)
                compared.append((came[: len(expected)].clone(), torch.cat(rows).double()))
                back = ops.all_to_all_rows(comm, came.clone(), table.T.contiguous(), most_rows=70 * n)
                sent = sum(counts[rank])
                compared.append((back[:sent].clone(), xs[rank][:sent].double()))
            if number == 1:
                for method in ("auto", "fused", "split", "unfused"):
                    given = table if method == "unfused" else counts
                    x = xs[rank].to(device)
                    result = ops.gemm_all_to_all(comm, x, weight, given, most_rows=70 * n, tiles=TILES, method=method)
                    compared.append((result[: len(expected)].clone(), expected))
        check_all(comm, compared)


@on_ranks(3, interpreted=True)
def test_results_are_passed_on_where_they_lie(group: dist.ProcessGroup) -> None:
    """Results that lie in memory of an operator, as rows of its next call of this shape: there and back."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        counts, unit = torch.full((n, n), 3, device=device), torch.eye(16, device=device)
        x = (100.0 * rank + torch.arange(3 * n, device=device))[:, None].repeat(1, 16)
        options: dict[str, Any] = {"most_rows": 3 * n}

        def tiled(given: torch.Tensor, method: str) -> torch.Tensor:
            table = counts.tolist()
            return ops.gemm_all_to_all(comm, given, unit, table, tiles=TILES, method=method, **options)

        ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda given: ops.all_to_all_rows(comm, given, counts, **options),
            *(functools.partial(tiled, method=method) for method in ("fused", "split", "unfused")),
        ]
        draws = Draws(n, rank)
        for number, way in itertools.product(range(2), ways):
            draws.late()
            came = way(x)
            draws.late()
            assert torch.equal(way(came), x), (number, ways.index(way))


@on_ranks(2, interpreted=True)
def test_results_stay_while_other_operators_run_unfused(group: dist.ProcessGroup) -> None:
    """Results of operators, while others of the same shape run unfused; what all_to_all_gemm does in turn."""
    seen: list[str] = []

    class Turn:
        """A turn that is written down."""

        def __enter__(self) -> None:
            seen.append("begin")

        def __exit__(self, *_: object) -> None:
            seen.append("end")

    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch_gemm, "buffer_lock", lambda _: Turn(), raising=False)
        patch.setattr(gemm.GemmAllToAll, "run", noting(gemm.GemmAllToAll.run, "exchange", seen))
        patch.setattr(torch, "mm", noting(torch.mm, "product", seen))
        n, device = comm.world_size, comm.device
        counts = [[3] * n] * n
        x, weight, options = torch.ones(3 * n, 16, device=device), torch.eye(16, device=device), {"most_rows": 3 * n}
        rows = ops.all_to_all_rows(comm, x, torch.tensor(counts, device=device), **options)
        products = ops.gemm_all_to_all(comm, 2 * x, weight, counts, method="unfused", **options)
        seen.clear()
        came = ops.all_to_all_gemm(comm, 3 * x, weight, counts, method="unfused", **options)
        comm.synchronize()
        assert [(each == number).all() for number, each in enumerate((rows, products, came), 1)] == [True] * 3
    assert seen == ["begin", "exchange", "product", "end"]


@on_ranks(3, interpreted=True)
def test_gemms_of_ranks_with_depths_of_their_own(group: dist.ProcessGroup) -> None:
    """Columns of ``x`` that differ between ranks, whole tiles of them or not; one expert and several."""
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []
    with communicator(group) as comm:
        n, depths = comm.world_size, (16, 24, 3)
        for method, several in (("fused", ()), ("split", ()), ("unfused", ()), ("fused", (2,))):
            counts = torch.full((n, n, *several), 2)
            rows, depth = int(counts[0].sum()), depths[comm.rank]
            x, weight = torch.ones(rows, depth), torch.ones(*several, 5, depth)
            options: dict[str, Any] = {"most_rows": rows, "tiles": TILES, "method": method}
            result = ops.gemm_all_to_all(comm, x, weight, counts.tolist(), **options)
            expected = torch.tensor(depths[:n]).repeat_interleave(rows // n)[:, None].expand(rows, 5).double()
            compared.append((result.clone(), expected))
        check_all(comm, compared)


@on_ranks(long(1), 2, long(4), interpreted=True, calls=3)
@on_ranks(gpu=fused, timeout_s=240, calls=40)
def test_all_to_all_gemm_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """Even and skewed routing, nothing at all for some, rows that stay; one expert and several; every way."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = draws_of(comm)
        compared: list[tuple[object, torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            dtype = draws.sizes.choice(DTYPES)
            columns, depth = draws.sizes.choice((5, 16, 20)), draws.sizes.choice((3, 16, 40))
            counts = [[draws.sizes.choice((0, 1, 7, 18, 40)) for _ in range(n)] for _ in range(n)]
            if number == 2:
                counts = [[17] * n] * n
            xs = [draws.normal(sum(row) + number % 2, depth).to(dtype) for row in counts]
            weight = [draws.normal(columns, depth).to(dtype) for _ in range(n)][rank]
            parts = [x[sum(row[:rank]) : sum(row[: rank + 1])] for x, row in zip(xs, counts, strict=True)]
            expected = torch.cat(parts).double() @ weight.double().T
            x, weight = xs[rank].to(device), weight.to(device)
            table = torch.tensor(counts, dtype=draws.sizes.choice((torch.int32, torch.int64)), device=device)
            if number % 3 == 0:  # rows that lie apart
                x, weight = (torch.cat([part, part], dim=1)[:, :depth] for part in (x, weight))
            draws.late()

            def keep(name: str, result: torch.Tensor, wanted: torch.Tensor = expected, number: int = number) -> None:
                compared.append(((number, name), result[: len(wanted)].clone(), wanted))

            options: dict[str, Any] = {"most_rows": 40 * n, "tiles": TILES}
            keep("fused", ops.all_to_all_gemm(comm, x, weight, table, **options))
            pieces = 1 + number % 3
            keep("split", ops.all_to_all_gemm(comm, x, weight, counts, most_rows=40 * n, method="split", pieces=pieces))
            if number < 2:
                for method in ("auto", "fused", "split", "unfused"):
                    keep(method, ops.all_to_all_gemm(comm, x, weight, counts, method=method, **options))
                keep("unfused", ops.all_to_all_gemm(comm, x, weight, table, method="unfused", **options))
            keep("experts", *to_experts(comm, draws, dtype, columns, depth))
            keep("left out", *left_out(comm, x, weight, counts, expected))
        comm.synchronize()
        for where, result, wanted in compared:
            assert len(result) == len(wanted), where
            check_close(result, wanted, where)


def to_experts(
    comm: Communicator, draws: Draws, dtype: torch.dtype, columns: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles that a tile of an expert needs may be one or two, of rows of other experts as well."""
    n, rank, device, each = comm.world_size, comm.rank, comm.device, draws.sizes.choice((1, 2, 3))
    sizes = (0, 1, 5, 13, 16, 21)
    counts = [[[draws.sizes.choice(sizes) for _ in range(each)] for _ in range(n)] for _ in range(n)]
    xs = [draws.normal(sum(map(sum, row)), depth).to(dtype) for row in counts]
    weights = draws.normal(n, each, columns, depth).to(dtype)
    wanted = [torch.empty(0, columns, dtype=torch.float64, device="cpu")]
    for x, row in zip(xs, counts, strict=True):
        ends = itertools.accumulate(row[rank], initial=sum(map(sum, row[:rank])))
        for expert, (first, stop) in enumerate(itertools.pairwise(ends)):
            wanted.append(x[first:stop].double() @ weights[rank, expert].double().T)
    given = xs[rank].to(device), weights[rank].to(device), torch.tensor(counts, device=device)
    draws.late()
    return ops.all_to_all_gemm(comm, *given, most_rows=21 * n * each, tiles=TILES), torch.cat(wanted)


def left_out(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, counts: list[list[int]], expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What there is no room for stays away, and what there is room for is right."""
    table = torch.tensor(counts, device=comm.device)
    most = 1 + max(sum(row) for row in zip(*counts, strict=True)) // 2
    return ops.all_to_all_gemm(comm, x, weight, table, most_rows=most, tiles=TILES), expected[:most]


@on_ranks(1, interpreted=True, first=2, calls=3)
@on_ranks(long(1), interpreted=True, first=0, calls=5)
@on_ranks(long(2), interpreted=True, first=2, calls=3)
@on_ranks(long(3), long(4), interpreted=True, first=0, calls=2)
@on_ranks(gpu=fused, timeout_s=170, first=0, calls=8)
def test_several_experts_by_every_way(group: dist.ProcessGroup, first: int, calls: int) -> None:
    """Skewed routing, nothing at all for some, one expert and several, weights that lie apart; counts on the device and
    on the host, and rows that there is no room for.

    Three ranks begin with the first kinds, two go on with the others: an interpreted call takes seconds. Alone the last
    three kinds do: depths and choices, below, are found with the first one, between ranks.
    """
    with communicator(group) as comm:
        draws, kept = draws_of(comm), list[tuple[object, torch.Tensor, torch.Tensor]]()
        for number in range(first, first + calls):
            dtype, depth, columns = KINDS[number % len(KINDS)]
            for name, result, wanted in one_shape(comm, draws, number, dtype, depth, columns):
                kept.append(((number, dtype, name), result[: len(wanted)].clone(), wanted))
        comm.synchronize()
        for where, result, wanted in kept:
            assert len(result) == len(wanted), where
            check_close(result, wanted, where)


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


def parts_sent(counts: Counts, rank: int) -> Iterator[tuple[int, int, slice]]:
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
        for peer, expert, rows in parts_sent(counts, sender):
            if peer == rank:
                parts.append(x[rows].double() @ weights[expert].double().T)
    return torch.cat(parts)


OPERATORS: tuple[tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]], ...] = (
    (ops.all_to_all_gemm, dispatched),
    (ops.gemm_all_to_all, combined),
)


@on_ranks(3, interpreted=True)
def test_experts_behind_depths_that_differ(group: dist.ProcessGroup) -> None:
    """Rows that travel behind the product may have had any number of columns on each rank."""
    with communicator(group) as comm:
        n, rank, draws = comm.world_size, comm.rank, Draws(4, comm.rank)
        counts = [[[3 + sender, 2 * to] for to in range(n)] for sender in range(n)]
        xs = [draws.normal(sum(map(sum, row)), 16 + 3 * at).bfloat16() for at, row in enumerate(counts)]
        weights = [draws.normal(2, 8, 16 + 3 * at).bfloat16() for at in range(n)]
        parts = [
            x[rows].double() @ weights[sender][expert].double().T
            for sender, x in enumerate(xs)
            for peer, expert, rows in parts_sent(counts, sender)
            if peer == rank
        ]
        given = xs[rank].to(comm.device), weights[rank].to(comm.device), torch.tensor(counts, device=comm.device)
        wanted = torch.cat(parts)
        for method in ("auto", "fused"):
            found = ops.gemm_all_to_all(comm, *given, most_rows=20 * n, method=method)[: len(wanted)].clone()
            comm.synchronize()
            check_close(found, wanted, method)


@on_ranks(2, interpreted=True)
def test_several_experts_are_always_fused(group: dist.ProcessGroup) -> None:
    """Calls that are not fused are refused, and ``auto`` on GPUs whose kernels have never run."""
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n = comm.world_size
        patch.setattr(comm, "refuse", lambda *_: None)  # each rank raises, and goes on
        x, weight, counts = torch.ones(4 * n, 8), torch.ones(2, 4, 8), torch.full((n, n, 2), 2)
        for op, _ in OPERATORS:
            for method in ("unfused", "split"):
                with pytest.raises(ValueError, match=r"method with several experts.*allowed=auto, fused\)"):
                    op(comm, x, weight, counts.tolist(), most_rows=4 * n, method=method)
        patch.setattr(comm, "abilities", dataclasses.replace(comm.abilities, kernels_have_run=False))
        for op, _ in OPERATORS:
            with pytest.raises(UnavailableError, match=r"have never run its kernel.*allowed=fused\)"):
                op(comm, x, weight, counts.tolist(), most_rows=4 * n)


@on_ranks(2, interpreted=True)
def test_counts_of_the_host_in_captures(group: dist.ProcessGroup) -> None:
    """As if a graph recorded: it takes counts of the host that came before, in parts where these are made, by the
    kernel where not, and no new ones; what it holds stays.
    """
    ways: list[str] = []
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n = comm.world_size
        patch.setattr(operator, "choose_method", lambda *_, **__: Selection(Method(SPLIT, 2), "a test"))
        patch.setattr(comm, "refuse", lambda *_: None)  # each rank raises, and goes on
        for where in (gemm.GemmAllToAll, dispatch_gemm.AllToAllGemm):
            patch.setattr(where, "run", noting(where.run, "fused", ways))
        patch.setattr(RoutedParts, "run", noting(RoutedParts.run, "split", ways))
        for number, op in enumerate((ops.gemm_all_to_all, ops.all_to_all_gemm)):
            first, second, third = ([[rows + number, 1] + [2] * (n - 2)] * n for rows in (3, 4, 5))
            x, weight = torch.randn(8 * n, 8), torch.randn(5, 8)
            run = functools.partial(as_if_captured, comm, op, x, weight)
            expected = [run(counts, method="fused") for counts in (first, second)]
            for counts, wanted in zip((first, second), expected, strict=True):
                check_close(run(counts), wanted.double(), "eager")  # the first one is made for graphs
                check_close(run(counts, captured=True), wanted.double(), "captured")
            run(third, method="unfused")
            run(third, captured=True)
            with pytest.raises(UnavailableError, match="value=new ones"):
                run([[1] * n] * n, captured=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(operands, "MOST_CACHED", 16)
                for rows in range(18):  # which only the device copy makes room for
                    operands.from_host("a test", comm, [[rows, 0] + [0] * (n - 2)] * n)
            check_close(run(second, captured=True), expected[1].double(), "kept")
            with pytest.raises(UnavailableError, match="value=new ones"):
                operands_in_a_capture(comm, [[0, 0] + [0] * (n - 2)] * n)
            ways.append("|")
        comm.synchronize()
    combine, dispatch = " ".join(ways).split(" | ")
    # What is unfused moves its rows by the kernel of the combine.
    assert combine == "fused fused split split split split fused fused split"
    assert dispatch == "fused fused split split split split fused fused split |"


def as_if_captured(
    comm: Communicator,
    op: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[list[int]],
    *,
    captured: bool = False,
    method: str = "auto",
) -> torch.Tensor:
    """What comes by a call that may believe that it is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (operator, operands, pipelined_gemm):
            patch.setattr(module, "is_captured", lambda _: captured)
        found = op(comm, x, weight, counts, most_rows=len(x), method=method)
    return found[: sum(row[comm.rank] for row in counts)].clone()


def operands_in_a_capture(comm: Communicator, counts: Any) -> None:
    """Counts that were there, and had to go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "is_captured", lambda _: True)
        operands.from_host("a test", comm, counts)


@on_ranks(2, interpreted=True)
def test_a_cached_call_takes_a_short_walk(group: dist.ProcessGroup) -> None:
    """Functions of Python that a cached call of each operator enters, by method, up to the backend of CPU ranks, which
    enters about 40 more to post and check a call; without the interpreted kernel.
    """
    sources = Path(sidelane.__file__).parent
    backend = "collectives/backend_cpu.py", "collectives/work.py"
    left_out = tuple(str(sources / room) for room in ("memory", "execute", "device", *backend))
    kernels = {name for module in (gemm, dispatch_gemm) for name, made in vars(module).items() if hasattr(made, "fn")}
    with communicator(group) as comm:
        n = comm.world_size
        x, weight, options = torch.ones(2 * n, 16), torch.ones(16, 16), {"most_rows": 2 * n, "tiles": TILES}
        calls: dict[str, Callable[[], object]] = {}
        for op, method in itertools.product((ops.gemm_all_to_all, ops.all_to_all_gemm), ("fused", "split", "auto")):
            call = functools.partial(op, comm, x, weight, [[2] * n] * n, method=method, **options)
            calls[f"{op.__name__} {method}"] = call
        for op in (ops.gemm_reduce_scatter, ops.gemm_all_reduce, ops.all_gather_gemm):
            calls[op.__name__] = functools.partial(op, comm, x, weight, method="split")
        for name, call in calls.items():
            for _ in range(3):
                call()
            entered: set[CodeType] = set()

            def note(frame: FrameType, event: str, _: object, entered: set[CodeType] = entered) -> None:
                path = frame.f_code.co_filename
                is_ours = path.startswith(str(sources)) and not path.startswith(left_out)
                if event == "call" and is_ours and frame.f_code.co_name not in kernels:
                    entered.add(frame.f_code)

            sys.setprofile(note)
            try:
                call()
            finally:
                sys.setprofile(None)
            assert len(entered) <= MOST_FUNCTIONS, (name, len(entered))


@on_ranks(2, interpreted=True)
def test_programs_that_a_graph_holds_stay(group: dist.ProcessGroup) -> None:
    """A graph can hold counts that came before; of others some are kept, and what the graph holds stays right."""
    with communicator(group) as comm:
        n, x, weight = comm.world_size, torch.ones(40, 8, device=comm.device), torch.eye(8, device=comm.device)
        tables = [tuple((rows,) * n for _ in range(n)) for rows in range(1, 14)]
        first, most = tables[0], 16 * n
        sizes, known = (most, 8, x.dtype), []
        parts = cached_object(comm, (SPLIT_GEMM, *sizes), lambda: RoutedParts(comm, SPLIT_GEMM, *sizes))

        def call(table: Any) -> torch.Tensor:
            came = ops.gemm_all_to_all(comm, x, weight, table, most_rows=most, method="split", pieces=4)
            return came[: sum(row[comm.rank] for row in table)]

        for _ in range(2):
            known.append((first, 4) in parts.known)
            call(first)
        parts.parts(first, 4).in_a_graph = True  # as a capture does
        for table in tables[1:]:
            call(table)
        parts.came.zero_()
        result = call(first)
        comm.synchronize()
        left = len(parts.known) - 1
        assert known == [False, True] and left == MOST_TABLES
        assert (first, 4) in parts.known and bool((result == 1).all())
