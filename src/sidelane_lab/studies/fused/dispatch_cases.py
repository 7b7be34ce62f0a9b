"""Cases of a GEMM of rows that come from their tokens' ranks, by the routings of ``routed_cases``, the other way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from sidelane import ops
from sidelane.choice.fused import FUSED, SPLIT, UNFUSED
from sidelane.collectives import Communicator
from sidelane.ops.auto import AUTO
from sidelane.ops.operands import Counts
from sidelane_lab.studies.fused.case import NCCL, Auto, Case, Run, dtype_of, fill, ordinary
from sidelane_lab.studies.fused.routed_cases import ON_DEVICE, ON_HOST, PIECES, by_expert, experts_of, grouped_by
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD, in_parts
from sidelane_lab.studies.fused.shapes import EVENLY, EXPERTS, HALF, by_top_k, evenly, half_for_one

AS_ROWS_COME = "rows as they come"


def gemm(comm: Communicator, rows: int, depth: int, columns: int, *, routing: str = HALF) -> Case:
    """``rows`` of this rank, for one expert each or, with ``EXPERTS``, for several. ``routing`` as of the combine."""
    n, rank, dtype, device = comm.world_size, comm.rank, dtype_of(comm), comm.device
    has_experts = routing == EXPERTS
    if has_experts:  # the other way round, as tokens have so many rows
        back = by_top_k(rows, n, experts_of(comm))
        counts = [[list(back[to][own]) for to in range(n)] for own in range(n)]
    else:
        counts = [[[count] for count in row] for row in {HALF: half_for_one, EVENLY: evenly}[routing](rows, n)]
    plain = [list(map(sum, row)) for row in counts]
    each = len(counts[0][0])
    table = torch.tensor(counts if has_experts else plain, device=device)
    sent_rows, came_rows = plain[rank], [row[rank] for row in plain]
    sent, came = sum(sent_rows), sum(came_rows)
    x = ordinary(comm, sent, depth)
    weight = ordinary(comm, each, columns, depth).normal_()
    given = weight if has_experts else weight[0]
    gathered, y = ordinary(comm, came, depth), ordinary(comm, came, columns)
    own_x, own_gathered = (comm.empty(rows, depth, dtype=dtype) for _ in range(2))
    parts = by_expert([counts[source][rank] for source in range(n)])

    def refill(seed: int) -> None:
        fill(comm, x, seed)
        own_x[:sent].copy_(x)

    def through_group() -> torch.Tensor:
        dist.all_to_all_single(gathered, x, came_rows, sent_rows)
        return gathered

    def through_ours() -> torch.Tensor:
        comm.all_to_all(own_gathered[:came], own_x[:sent], output_split_sizes=came_rows, input_split_sizes=sent_rows)
        return own_gathered[:came]

    def one_by_one(from_rows: torch.Tensor) -> torch.Tensor:
        for part, expert in parts:
            torch.mm(from_rows[part], weight[expert].T, out=y[part])
        return y

    def whole(from_rows: torch.Tensor) -> torch.Tensor:
        return torch.mm(from_rows, weight[0].T, out=y)

    def call(by: Counts, *, method: str = AUTO) -> torch.Tensor:
        found = ops.all_to_all_gemm(comm, x, given, by, most_rows=rows, method=method)
        return found[:came]

    def split(pieces: int) -> torch.Tensor:
        return ops.split_all_to_all_gemm(comm, x, given, plain, most_rows=rows, pieces=pieces)[:came]

    def expected() -> torch.Tensor:
        wide = torch.empty(came, depth, dtype=torch.float64, device=device)
        dist.all_to_all_single(wide, x.double(), came_rows, sent_rows)
        return torch.cat([wide[part] @ weight[expert].double().T for part, expert in parts])

    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"mm": whole}
    if has_experts:
        ways = {"a mm an expert and peer": one_by_one}
        if device.type == "cuda":
            ways["grouped mm"] = grouped_by(weight, parts)
    unfused: dict[tuple[str, str], Run] = {}

    def behind(moved: Run, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return product(moved())

    for name, product in ways.items():
        unfused[NCCL, f"process group, {name}"] = functools.partial(behind, through_group, product)
        unfused[OWN, f"sidelane, {name}"] = functools.partial(behind, through_ours, product)
    fused: dict[str, Run] = {AS_ROWS_COME: functools.partial(call, table, method=FUSED)}
    sizes = rows, depth, columns
    auto = {ON_DEVICE: Auto(functools.partial(call, table), sizes, (SPLIT,), each)}
    unfused[OWN, OWN_METHOD] = functools.partial(call, table, method=UNFUSED)
    if not has_experts:
        fused |= {in_parts(pieces): functools.partial(split, pieces) for pieces in PIECES}
        auto = {ON_HOST: Auto(functools.partial(call, plain), sizes), **auto}
    return Case(
        "all_to_all_gemm",
        f"{rows}x{depth}x{columns} a rank, {f'{each} {EXPERTS}' if has_experts else routing}",
        refill,
        expected,
        {name: functools.partial(product, gathered) for name, product in ways.items()},
        {"process group": through_group, "sidelane": through_ours},
        unfused,
        fused,
        auto,
    )
