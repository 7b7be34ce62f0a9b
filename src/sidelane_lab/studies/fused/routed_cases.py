"""Cases of a GEMM whose rows go to their tokens' ranks, by several routings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sidelane import ops
from sidelane.choice.fused import FUSED, SPLIT, UNFUSED
from sidelane.choice.fused_order import ORDERS
from sidelane.collectives import Communicator
from sidelane_lab.studies.fused.case import NCCL, Auto, Case, Run, dtype_of, fill, ordinary
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD, in_parts
from sidelane_lab.studies.fused.shapes import EVENLY, EXPERTS, EXPERTS_OF_A_RANK, HALF, by_top_k, evenly, half_for_one

ON_HOST, ON_DEVICE = 'method="auto", counts on the host', 'method="auto", counts on the device'
PIECES = (1, 2, 4, 6)

Parts = list[tuple[slice, int]]
"""Rows, and the expert that has them."""


def gemm(comm: Communicator, rows: int, depth: int, columns: int, *, routing: str = HALF) -> Case:
    """``rows`` of this rank, for one expert.

    ``routing``: half of them for one peer in turn, skewed, as much for each rank; or as many for each; or of several
    experts, see :func:`experts`.
    """
    if routing == EXPERTS:
        return experts(comm, rows, depth, columns)
    n, rank, dtype = comm.world_size, comm.rank, dtype_of(comm)
    counts = [list(row) for row in {HALF: half_for_one, EVENLY: evenly}[routing](rows, n)]
    table = torch.tensor(counts, device=comm.device)
    sent_rows, came_rows = counts[rank], [row[rank] for row in counts]
    x, weight = ordinary(comm, rows, depth), ordinary(comm, columns, depth).normal_()
    y, out = ordinary(comm, rows, columns), ordinary(comm, rows, columns)
    own_sent, own_out = (comm.empty(rows, columns, dtype=dtype) for _ in range(2))

    def through_group() -> torch.Tensor:
        dist.all_to_all_single(out, torch.mm(x, weight.T, out=y), came_rows, sent_rows)
        return out

    def exchange() -> None:
        comm.all_to_all(own_out, own_sent, output_split_sizes=came_rows, input_split_sizes=sent_rows)

    def through_ours() -> torch.Tensor:
        torch.mm(x, weight.T, out=own_sent)
        exchange()
        return own_out

    def expected() -> torch.Tensor:
        wide = x.double() @ weight.double().T
        came = torch.empty_like(wide)
        dist.all_to_all_single(came, wide, came_rows, sent_rows)
        return came

    def call(given: object, **options: str) -> torch.Tensor:
        return ops.gemm_all_to_all(comm, x, weight, given, most_rows=rows, **options)  # type: ignore[arg-type]

    def split(pieces: int) -> torch.Tensor:
        return ops.split_gemm_all_to_all(comm, x, weight, counts, most_rows=rows, pieces=pieces)

    return Case(
        "gemm_all_to_all",
        f"{rows}x{depth}x{columns} a rank, {routing}",
        lambda seed: fill(comm, x, seed),
        expected,
        {"mm": lambda: torch.mm(x, weight.T, out=y)},
        {"process group": lambda: dist.all_to_all_single(out, y, came_rows, sent_rows), "sidelane": exchange},
        {
            (NCCL, "mm, process group"): through_group,
            (OWN, "mm, sidelane"): through_ours,
            (OWN, OWN_METHOD): functools.partial(call, table, method=UNFUSED),
        },
        {
            **{order: functools.partial(call, table, order=order, method=FUSED) for order in ORDERS},
            **{in_parts(pieces): functools.partial(split, pieces) for pieces in PIECES},
        },
        {
            ON_HOST: Auto(functools.partial(call, counts), (rows, depth, columns)),
            ON_DEVICE: Auto(functools.partial(call, table), (rows, depth, columns), (SPLIT,)),
        },
    )


def experts(comm: Communicator, rows: int, depth: int, columns: int) -> Case:
    """Several experts a rank, each with as many rows for a peer as its tokens' routing gives.

    Unfused there is what the operator has, with counts on the device; and with counts on the host a product for each
    expert and peer, or on GPUs one grouped product, whose weights lie there once for each peer.
    """
    n, rank, dtype, device = comm.world_size, comm.rank, dtype_of(comm), comm.device
    counts = by_top_k(rows, n, experts_of(comm))
    table = torch.tensor(counts, device=device)
    sent_rows, came_rows = list(map(sum, counts[rank])), [sum(row[rank]) for row in counts]
    sent, came = sum(sent_rows), sum(came_rows)
    each = len(counts[0][0])
    x, weight = ordinary(comm, sent, depth), ordinary(comm, each, columns, depth).normal_()
    y, out = ordinary(comm, sent, columns), ordinary(comm, came, columns)
    own_sent, own_out = (comm.empty(rows, columns, dtype=dtype) for _ in range(2))
    parts = by_expert(counts[rank])

    def one_by_one(output: torch.Tensor) -> torch.Tensor:
        for part, expert in parts:
            torch.mm(x[part], weight[expert].T, out=output[part])
        return output

    def through_group() -> torch.Tensor:
        dist.all_to_all_single(out, one_by_one(y), came_rows, sent_rows)
        return out

    def exchange(given: torch.Tensor = own_sent) -> torch.Tensor:
        own = own_out[:came]
        comm.all_to_all(own, given[:sent], output_split_sizes=came_rows, input_split_sizes=sent_rows)
        return own

    def through_ours() -> torch.Tensor:
        one_by_one(own_sent[:sent])
        return exchange()

    def call(**options: str) -> torch.Tensor:
        found = ops.gemm_all_to_all(comm, x, weight, table, most_rows=rows, **options)  # type: ignore[arg-type]
        return found[:came]

    def expected() -> torch.Tensor:
        wide = torch.empty(sent, columns, dtype=torch.float64, device=device)
        for part, expert in parts:
            wide[part] = x[part].double() @ weight[expert].double().T
        here = torch.empty(came, columns, dtype=torch.float64, device=device)
        dist.all_to_all_single(here, wide, came_rows, sent_rows)
        return here

    compute: dict[str, Run] = {"a mm an expert and peer": lambda: one_by_one(y)}
    unfused: dict[tuple[str, str], Run] = {
        (NCCL, "a mm an expert and peer, process group"): through_group,
        (OWN, "a mm an expert and peer, sidelane"): through_ours,
    }
    if device.type == "cuda":
        grouped = functools.partial(grouped_by(weight, parts), x)

        def grouped_through_group() -> torch.Tensor:
            dist.all_to_all_single(out, grouped(), came_rows, sent_rows)
            return out

        compute["grouped mm"] = grouped
        unfused[NCCL, "grouped mm, process group"] = grouped_through_group
        unfused[OWN, "grouped mm, sidelane"] = lambda: exchange(grouped())
    unfused[OWN, OWN_METHOD] = functools.partial(call, method=UNFUSED)
    return Case(
        "gemm_all_to_all",
        f"{rows}x{depth}x{columns} a rank, {each} {EXPERTS}",
        lambda seed: fill(comm, x, seed),
        expected,
        {**compute},
        {"process group": lambda: dist.all_to_all_single(out, y, came_rows, sent_rows), "sidelane": exchange},
        unfused,
        {order: functools.partial(call, order=order, method=FUSED) for order in ORDERS},
        {ON_DEVICE: Auto(call, (rows, depth, columns), (SPLIT,), each)},
    )


def experts_of(comm: Communicator) -> int:
    """Of a rank."""
    return EXPERTS_OF_A_RANK if comm.device.type != "cpu" else 2


def by_expert(counts: Sequence[Sequence[int]]) -> Parts:
    """Rows that lie by rank and then by expert; ``counts``: of each expert, for each rank. None is empty.

    >>> by_expert([[2, 0], [1, 3]])
    [(slice(0, 2, None), 0), (slice(2, 3, None), 0), (slice(3, 6, None), 1)]
    """
    ends = itertools.pairwise(itertools.accumulate(itertools.chain.from_iterable(counts), initial=0))
    parts = [(slice(first, stop), at % len(counts[0])) for at, (first, stop) in enumerate(ends)]
    return [(part, expert) for part, expert in parts if part.start < part.stop]


def grouped_by(weight: torch.Tensor, parts: Parts) -> Callable[[torch.Tensor], torch.Tensor]:
    """The library's grouped product, of weights [E, H, K]. GPUs only."""
    stops = [part.stop for part, _ in parts]
    weights = torch.stack([weight[expert] for _, expert in parts])  # once for each group of rows
    groups = torch.tensor(stops, dtype=torch.int32, device=weight.device)
    return lambda x: torch._grouped_mm(x, weights.transpose(-2, -1), offs=groups)
