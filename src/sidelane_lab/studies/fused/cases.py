"""Operators of the study of fused operators at one shape, and everything that does the same unfused.

Data are bfloat16 on GPUs. Shapes are those of the fused operators paper (section IV), or of decoders of today. What is
compared as ``symm_mem`` are operators of ``torch.ops.symm_mem``, on GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from sidelane import ops
from sidelane.choice.fused import FUSED, REMOTE_FIRST, ROUTED, SPLIT, UNFUSED
from sidelane.ops import rms_norm as norms
from sidelane.ops.gemv import tiling_of
from sidelane.ops.handle import power_of_two
from sidelane.session import Communicator
from sidelane_lab.baselines import candidate
from sidelane_lab.studies.fused import shapes
from sidelane_lab.studies.fused.case import (
    AS_CALLED,
    GROUP,
    NCCL,
    OURS,
    SYMM_MEM,
    AutoCall,
    OneShot,
    OperatorCase,
    Run,
    Step,
    fill,
    gathered_case,
    group_name,
    ordinary,
    reduced_case,
    summed,
    symmetric,
)
from sidelane_lab.studies.fused.embedding_cases import embedding
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD, in_parts, with_programs
from sidelane_lab.studies.fused.single_rank import add_norm

CELLS = "cells"
"""How a GEMV is fused, as rows have it."""

SWEPT = ((8192, 8192, 1), (8192, 8192, 16), (20, 16, 1))
"""Shapes of GEMVs at which programs on a unit are swept, on GPUs and on CPUs."""

EPS = 1e-6
PIECES = (1, 2, 4)
"""Pieces of a GEMM in parts, for each peer."""

ROUTED_PIECES = (*PIECES, 6)
ON_HOST, ON_DEVICE = 'method="auto", counts on the host', 'method="auto", counts on the device'
AS_ROWS_COME = "rows as they come"

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A product of rows, which it may write into the second tensor."""

Parts = list[tuple[slice, int]]
"""Rows, and the expert that has them."""


def gemv(comm: Communicator, rows: int, columns: int, tokens: int) -> OperatorCase:
    """Make a case of a GEMV and an all-reduce; ``columns`` are those of all ranks."""
    width = columns // comm.world_size
    weight, x = ordinary(comm, rows, width).normal_(), ordinary(comm, tokens, width)
    y, out = ordinary(comm, tokens, rows), ordinary(comm, tokens, rows)
    call = functools.partial(ops.gemv_all_reduce, comm, weight, x)
    fused: dict[str, Run] = {CELLS: functools.partial(call, out=out, method=FUSED)}
    if (rows, columns, tokens) in SWEPT:
        usual = tiling_of(tokens, rows)
        for count in (1, 2) if comm.device.type == "cpu" else range(1, usual.most_per_unit + 1):
            options: dict[str, Any] = {"method": FUSED, "tiling": dataclasses.replace(usual, per_unit=count)}
            fused[with_programs(CELLS, count)] = functools.partial(call, out=out, **options)
    one_shot = OneShot(comm, y)

    def product(output: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.T, out=output)

    def through_torch() -> torch.Tensor:
        product(one_shot.input)
        return one_shot()

    of_torch = {(SYMM_MEM, "mm, one_shot_all_reduce"): through_torch} if comm.device.type == "cuda" else {}
    return reduced_case(
        "gemv_all_reduce",
        f"{rows}x{columns}, {tokens} tokens",
        {"mm": product},
        {GROUP: (y, summed), OURS: (symmetric(comm, tokens, rows), functools.partial(_all_reduce, comm))},
        unfused={(OWN, OWN_METHOD): functools.partial(call, method=UNFUSED), **of_torch},
        refill=lambda seed: fill(comm, x, seed),
        expected=lambda: summed(x.double() @ weight.double().T),
        fused=fused,
        auto={AS_CALLED: AutoCall(functools.partial(call, out=out), (rows, columns, tokens))},
        read_bytes=weight.nbytes,
    )


def rms_norm(comm: Communicator, tokens: int, hidden: int) -> OperatorCase:
    """Make a case of an all-reduce before a residual and a norm. Unfused these are one kernel: Triton's, Inductor's."""
    on_gpu = comm.device.type == "cuda"
    x, total_of_group, in_place = (ordinary(comm, tokens, hidden) for _ in range(3))
    own, total = symmetric(comm, tokens, hidden), symmetric(comm, tokens, hidden)
    residual, weight = ordinary(comm, tokens, hidden).fill_(0.5), ordinary(comm, hidden).fill_(1.5)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    one_shot = OneShot(comm, x)

    def added_then_normed(added: torch.Tensor) -> torch.Tensor:
        torch.add(added, residual, out=residual_out)
        return functional.rms_norm(residual_out, (hidden,), weight, EPS)

    ways: dict[str, Step] = {
        "add, norm": added_then_normed,
        "add+norm by Triton": lambda added: add_norm(added, residual, weight, EPS, residual_out, out),
    }
    if on_gpu:
        compiled = torch.compile(_add_and_norm, dynamic=False)
        ways["add+norm by torch.compile"] = lambda added: compiled(added, residual, weight)[0]

    def refill(seed: int) -> None:
        fill(comm, x, seed)
        for copied in (own, in_place, *((one_shot.input,) if one_shot.is_made else ())):
            copied.copy_(x)

    def through_ours(source: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(source, output=total)
        return total

    def through_torch(norm: Step) -> torch.Tensor:
        if not one_shot.is_made:
            one_shot.input.copy_(x)
        return norm(one_shot())

    def call(**options: Any) -> torch.Tensor:
        return ops.all_reduce_rms_norm(comm, x, residual, weight, eps=EPS, **options)[0]

    def expected() -> torch.Tensor:
        wide = summed(x.double()) + residual.double()
        return functional.rms_norm(wide, (hidden,), weight.double(), EPS)

    places = {"out": out, "residual_out": residual_out}
    unfused: dict[tuple[str, str], Run] = {(OWN, OWN_METHOD): functools.partial(call, method=UNFUSED)}
    if on_gpu:
        for words, norm in ways.items():
            unfused[SYMM_MEM, f"one_shot_all_reduce, {words}"] = functools.partial(through_torch, norm)
    return gathered_case(
        "all_reduce_rms_norm",
        f"{tokens}x{hidden}",
        ways,
        {
            # For whoever still needs what was there; and call after call in place, where values grow for no time.
            (NCCL, "copy, process group"): (x, lambda source: summed(total_of_group.copy_(source))),
            (NCCL, "process group in place"): (in_place, summed),
            OURS: (own, through_ours),
        },
        x,
        unfused=unfused,
        refill=refill,
        expected=expected,
        collective={
            "process group": lambda: summed(total_of_group),
            "sidelane": lambda: through_ours(own),
            **({"one_shot_all_reduce": one_shot} if on_gpu else {}),
        },
        fused={name: functools.partial(call, **places, schedule=name, method=FUSED) for name in norms.SCHEDULES},
        auto={AS_CALLED: AutoCall(functools.partial(call, **places), (power_of_two(tokens), hidden))},
    )


def gemm_reduce_scatter(comm: Communicator, rows: int, depth: int, columns: int) -> OperatorCase:
    """Make a case of a GEMM and a reduce-scatter; ``depth`` is a rank's."""
    n = comm.world_size
    out, own_out = ordinary(comm, rows // n, columns), symmetric(comm, rows // n, columns)

    def through_group(source: torch.Tensor) -> torch.Tensor:
        candidate.reduce_scatter(out, source)
        return out

    def through_ours(source: torch.Tensor) -> torch.Tensor:
        comm.reduce_scatter(own_out, source)
        return own_out

    def of_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        group = group_name(comm)  # first: the operators come with PyTorch's symmetric memory
        found: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.T, "sum", 0, group)
        return found

    calls = (ops.gemm_reduce_scatter, of_torch, "fused_matmul_reduce_scatter")
    moves = through_group, through_ours
    return _reduced_gemm(comm, (rows, depth, columns), calls, moves, lambda total: total.chunk(n)[comm.rank])


def gemm_all_reduce(comm: Communicator, rows: int, depth: int, columns: int) -> OperatorCase:
    """Make a case of a GEMM and an all-reduce; ``depth`` is a rank's."""
    calls = (ops.gemm_all_reduce, None, "")
    moves = summed, functools.partial(_all_reduce, comm)
    return _reduced_gemm(comm, (rows, depth, columns), calls, moves, lambda total: total)


def _reduced_gemm(comm: Communicator, shape: tuple[int, int, int], calls: tuple[Any, Any, str],
                  moves: tuple[Step, Step], own_part: Step) -> OperatorCase:  # fmt: skip
    """Make a case of an operator and PyTorch's, with the sum's part that is this rank's."""
    rows, depth, columns = shape
    call, of_torch, named = calls
    x, weight = ordinary(comm, rows, depth), ordinary(comm, columns, depth).normal_()
    unfused = {(OWN, OWN_METHOD): functools.partial(call, comm, x, weight, method=UNFUSED)}
    if of_torch is not None and comm.device.type == "cuda":
        unfused[SYMM_MEM, named] = functools.partial(of_torch, x, weight)
    return reduced_case(
        call.__name__,
        f"{rows}x{depth}x{columns} a rank",
        {"mm": lambda output: torch.mm(x, weight.T, out=output)},
        {GROUP: (ordinary(comm, rows, columns), moves[0]), OURS: (symmetric(comm, rows, columns), moves[1])},
        unfused=unfused,
        refill=lambda seed: fill(comm, x, seed),
        expected=lambda: own_part(summed(x.double() @ weight.double().T)),
        fused=_in_parts(call, comm, x, weight),
        auto={AS_CALLED: AutoCall(functools.partial(call, comm, x, weight), shape)},
    )


def all_gather_gemm(comm: Communicator, rows: int, depth: int, columns: int) -> OperatorCase:
    """Make a case of an all-gather and a GEMM; ``rows`` and ``columns`` are a rank's."""
    n = comm.world_size
    x, weight = ordinary(comm, rows, depth), ordinary(comm, columns, depth).normal_()
    gathered, own_gathered = ordinary(comm, n * rows, depth), symmetric(comm, n * rows, depth)
    own_x, y = symmetric(comm, rows, depth), ordinary(comm, n * rows, columns)

    def refill(seed: int) -> None:
        fill(comm, x, seed)
        own_x.copy_(x)

    def through_group(source: torch.Tensor, into: torch.Tensor = gathered) -> torch.Tensor:
        candidate.all_gather(into, source)
        return into

    def through_ours(source: torch.Tensor) -> torch.Tensor:
        comm.all_gather(own_gathered, source)
        return own_gathered

    def of_torch() -> torch.Tensor:
        group = group_name(comm)
        call = torch.ops.symm_mem.fused_all_gather_matmul
        found: list[torch.Tensor] = call(x, [weight.T], 0, group, return_A=False)[1]
        return found[0]

    def expected() -> torch.Tensor:
        wide = torch.empty(n * rows, depth, dtype=torch.float64, device=comm.device)
        return through_group(x.double(), wide) @ weight.double().T

    unfused: dict[tuple[str, str], Run] = {
        (OWN, OWN_METHOD): functools.partial(ops.all_gather_gemm, comm, x, weight, method=UNFUSED)
    }
    if comm.device.type == "cuda":
        unfused[SYMM_MEM, "fused_all_gather_matmul"] = of_torch
    return gathered_case(
        "all_gather_gemm",
        f"{rows}x{depth}x{columns} a rank",
        {"mm": lambda source: torch.mm(source, weight.T, out=y)},
        {GROUP: (x, through_group), OURS: (own_x, through_ours)},
        gathered,
        unfused=unfused,
        refill=refill,
        expected=expected,
        fused=_in_parts(ops.all_gather_gemm, comm, x, weight),
        auto={AS_CALLED: AutoCall(functools.partial(ops.all_gather_gemm, comm, x, weight), (rows, depth, columns))},
    )


class RoutedRows:
    """Rows that go to and come from each rank, and the products of those that lie here.

    Args:
        comm: the ranks.
        rows: most rows of a rank.
        routing: one of ``ROUTINGS``: half of the rows for one peer in turn, as many for each, or several experts.
        back: rows go to the experts, the other way than that of a combine, and are multiplied where they came.
    """

    def __init__(self, comm: Communicator, rows: int, routing: str, *, back: bool) -> None:
        n, rank = comm.world_size, comm.rank
        self.has_experts = routing == shapes.EXPERTS
        if self.has_experts:
            counts = [[list(part) for part in row] for row in shapes.by_top_k(rows, n, experts_of(comm))]
            counts = [list(column) for column in zip(*counts, strict=True)] if back else counts
        else:
            spread = {shapes.HALF: shapes.half_for_one, shapes.EVENLY: shapes.evenly}[routing](rows, n)
            counts = [[[count] for count in row] for row in spread]
        self.each = len(counts[0][0])
        self.plain = [list(map(sum, row)) for row in counts]
        self.table = torch.tensor(counts if self.has_experts else self.plain, device=comm.device)
        self.sent, self.came = self.plain[rank], [row[rank] for row in self.plain]
        self.parts = by_expert([row[rank] for row in counts] if back else counts[rank])
        self.words = f"{self.each} {shapes.EXPERTS}" if self.has_experts else routing

    def products(self, weight: torch.Tensor) -> dict[str, Product]:
        """Return what multiplies rows with their experts' weights [E, H, K], into an output or one of its own.

        Of several experts that is a product for each expert and peer, and on GPUs one grouped product, whose weights
        lie there once for each peer.
        """
        if not self.has_experts:
            return {"mm": lambda rows, output: torch.mm(rows, weight[0].T, out=output)}

        def one_by_one(rows: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            for part, expert in self.parts:
                torch.mm(rows[part], weight[expert].T, out=output[part])
            return output

        found: dict[str, Product] = {"a mm an expert and peer": one_by_one}
        if weight.device.type == "cuda":
            grouped = grouped_by(weight, self.parts)
            found["grouped mm"] = lambda rows, output: grouped(rows)
        return found

    def exact(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the products in float64."""
        return torch.cat([rows[part].double() @ weight[expert].double().T for part, expert in self.parts])

    def through_group(self, source: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Send rows by the process group."""
        dist.all_to_all_single(output, source, self.came, self.sent)
        return output

    def through_ours(self, comm: Communicator, output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Send rows by Sidelane."""
        output, source = output[: sum(self.came)], source[: sum(self.sent)]
        comm.all_to_all(output, source, output_split_sizes=self.came, input_split_sizes=self.sent)
        return output


def gemm_all_to_all(
    comm: Communicator, rows: int, depth: int, columns: int, *, routing: str = shapes.HALF
) -> OperatorCase:
    """Make a case of a GEMM whose rows go to their tokens' ranks; at most ``rows`` of each."""
    way = RoutedRows(comm, rows, routing, back=False)
    sent, came = sum(way.sent), sum(way.came)
    x, weight = ordinary(comm, sent, depth), ordinary(comm, way.each, columns, depth).normal_()
    y, out = ordinary(comm, sent, columns), ordinary(comm, came, columns)
    own_sent, own_out = (symmetric(comm, rows, columns) for _ in range(2))

    def call(by: Any, **options: Any) -> torch.Tensor:
        given = weight if way.has_experts else weight[0]
        return ops.gemm_all_to_all(comm, x, given, by, most_rows=rows, **options)[:came]

    def split(pieces: int) -> torch.Tensor:
        return call(way.plain, method=SPLIT, pieces=pieces)

    def expected() -> torch.Tensor:
        here = torch.empty(came, columns, dtype=torch.float64, device=comm.device)
        return way.through_group(way.exact(x, weight), here)

    def from_x(product: Product) -> Step:
        return lambda output: product(x, output)

    fused: dict[str, Run] = {REMOTE_FIRST: functools.partial(call, way.table, method=FUSED)}
    return reduced_case(
        "gemm_all_to_all",
        f"{rows}x{depth}x{columns} a rank, {way.words}",
        {name: from_x(product) for name, product in way.products(weight).items()},
        {
            GROUP: (y, lambda source: way.through_group(source, out)),
            OURS: (own_sent[:sent], functools.partial(way.through_ours, comm, own_out)),
        },
        unfused=_routed_unfused(call, way),
        refill=lambda seed: fill(comm, x, seed),
        expected=expected,
        fused=fused | ({} if way.has_experts else {in_parts(n): functools.partial(split, n) for n in ROUTED_PIECES}),
        auto=_routed_auto(call, way, (rows, depth, columns)),
    )


def all_to_all_gemm(
    comm: Communicator, rows: int, depth: int, columns: int, *, routing: str = shapes.HALF
) -> OperatorCase:
    """Make a case of a GEMM of rows that come from their tokens' ranks; at most ``rows`` of each."""
    way = RoutedRows(comm, rows, routing, back=True)
    sent, came = sum(way.sent), sum(way.came)
    x, weight = ordinary(comm, sent, depth), ordinary(comm, way.each, columns, depth).normal_()
    gathered, y = ordinary(comm, came, depth), ordinary(comm, came, columns)
    own_x, own_gathered = (symmetric(comm, rows, depth) for _ in range(2))

    def refill(seed: int) -> None:
        fill(comm, x, seed)
        own_x[:sent].copy_(x)

    def call(by: Any, **options: Any) -> torch.Tensor:
        given = weight if way.has_experts else weight[0]
        return ops.all_to_all_gemm(comm, x, given, by, most_rows=rows, **options)[:came]

    def split(pieces: int) -> torch.Tensor:
        return call(way.plain, method=SPLIT, pieces=pieces)

    def expected() -> torch.Tensor:
        wide = torch.empty(came, depth, dtype=torch.float64, device=comm.device)
        return way.exact(way.through_group(x.double(), wide), weight)

    def into_y(product: Product) -> Step:
        return lambda source: product(source, y)

    fused: dict[str, Run] = {AS_ROWS_COME: functools.partial(call, way.table, method=FUSED)}
    return gathered_case(
        "all_to_all_gemm",
        f"{rows}x{depth}x{columns} a rank, {way.words}",
        {name: into_y(product) for name, product in way.products(weight).items()},
        {
            GROUP: (x, lambda source: way.through_group(source, gathered)),
            OURS: (own_x[:sent], functools.partial(way.through_ours, comm, own_gathered)),
        },
        gathered,
        unfused=_routed_unfused(call, way),
        refill=refill,
        expected=expected,
        fused=fused | ({} if way.has_experts else {in_parts(n): functools.partial(split, n) for n in ROUTED_PIECES}),
        auto=_routed_auto(call, way, (rows, depth, columns)),
    )


def _routed_unfused(call: Callable[..., torch.Tensor], way: RoutedRows) -> dict[tuple[str, str], Run]:
    """Return the operator's own method; with several experts it has none that leaves the counts on the device."""
    return {} if way.has_experts else {(OWN, OWN_METHOD): functools.partial(call, way.table, method=UNFUSED)}


def _routed_auto(call: Callable[..., torch.Tensor], way: RoutedRows, sizes: tuple[int, ...]) -> dict[str, AutoCall]:
    without = (SPLIT, UNFUSED) if way.has_experts else (SPLIT,)
    on_device = {ON_DEVICE: AutoCall(functools.partial(call, way.table), sizes, without)}
    return on_device if way.has_experts else {ON_HOST: AutoCall(functools.partial(call, way.plain), sizes), **on_device}


def experts_of(comm: Communicator) -> int:
    """Return the number of experts of a rank."""
    return shapes.EXPERTS_OF_A_RANK if comm.device.type != "cpu" else 2


def by_expert(counts: Sequence[Sequence[int]]) -> Parts:
    """Return rows that lie by rank and then by expert; ``counts``: of each expert, for each rank. None is empty.

    >>> by_expert([[2, 0], [1, 3]])
    [(slice(0, 2, None), 0), (slice(2, 3, None), 0), (slice(3, 6, None), 1)]
    """
    ends = itertools.pairwise(itertools.accumulate(itertools.chain.from_iterable(counts), initial=0))
    parts = [(slice(first, stop), at % len(counts[0])) for at, (first, stop) in enumerate(ends)]
    return [(part, expert) for part, expert in parts if part.start < part.stop]


def grouped_by(weight: torch.Tensor, parts: Parts) -> Step:
    """Return the library's grouped product, of weights [E, H, K]. GPUs only."""
    stops = [part.stop for part, _ in parts]
    weights = torch.stack([weight[expert] for _, expert in parts])  # once for each group of rows
    groups = torch.tensor(stops, dtype=torch.int32, device=weight.device)
    return lambda x: torch._grouped_mm(x, weights.transpose(-2, -1), offs=groups)


def _add_and_norm(
    added: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = added + residual
    return functional.rms_norm(total, weight.shape, weight, EPS), total


def _all_reduce(comm: Communicator, source: torch.Tensor) -> torch.Tensor:
    comm.all_reduce(source)
    return source


def _in_parts(call: Callable[..., torch.Tensor], *operands: Any) -> dict[str, Run]:
    return {in_parts(pieces): functools.partial(call, *operands, method=SPLIT, pieces=pieces) for pieces in PIECES}


MAKE: dict[str, Callable[..., OperatorCase]] = {
    "gemv_all_reduce": gemv,
    "all_reduce_rms_norm": rms_norm,
    "embedding_all_to_all": embedding,
    "gemm_all_to_all": gemm_all_to_all,
    "all_to_all_gemm": all_to_all_gemm,
    "gemm_reduce_scatter": gemm_reduce_scatter,
    "gemm_all_reduce": gemm_all_reduce,
    "all_gather_gemm": all_gather_gemm,
}
"""Operators, and how to make a case of a shape."""


def makers_of(op: str) -> tuple[Callable[..., OperatorCase], ...]:
    """Return what makes the cases of a shape of an operator."""
    if op in ROUTED:
        return tuple(functools.partial(MAKE[op], routing=routing) for routing in shapes.ROUTINGS)
    return (MAKE[op],)
