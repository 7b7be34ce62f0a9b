"""Calls of fused operators that are refused."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_ops import TILES, communicator, fused
from on_ranks import everyones, on_ranks

from sidelane import Communicator, ops
from sidelane.errors import SidelaneError

Calls = tuple[list[Callable[[], Any]], Callable[[], Any]]
"""Wrong ones, and one that is right."""


def gemv_calls(comm: Communicator) -> Calls:
    weight, x = torch.ones(20, 8), torch.ones(3, 8)
    small = weight.to(torch.float8_e5m2)
    wrong = [
        {"x": torch.ones(3, 7)},
        {"x": torch.ones(17, 8)},
        {"x": x.half()},
        {"weight": [1]},
        {"weight": torch.ones(8, 20).T},
        {"out": torch.ones(20, 3)},
        {"method": "best"},
        {"weight": torch.ones(20, 8, dtype=torch.int32)},
        {"scale": torch.ones(1)},
        {"weight": small, "scale": torch.ones(2)},
        {"weight": small, "scale": torch.ones(20).half()},
        {"weight": small, "x": x.to(small.dtype)},
        {"weight": weight.to(torch.float8_e4m3fnuz)},
        *({"tiling": tiling} for tiling in ("large", [16, 512])),
    ]
    return changed(ops.gemv_all_reduce, wrong, comm=comm, weight=weight, x=x)


def rms_norm_calls(comm: Communicator) -> Calls:
    x, weight, narrow = torch.ones(3, 8), torch.ones(8), torch.ones(3, 8).to(torch.float8_e4m3fn)
    wrong = [
        {"x": torch.ones(513, 8)},
        {"x": torch.ones(8)},
        {"x": torch.ones(3, 8, dtype=torch.int64)},
        {"x": torch.ones(3, 7).half(), "weight": torch.ones(7).half()},
        {"x": torch.ones(25, dtype=torch.float16)[1:].view(3, 8), "weight": weight.half()},  # at an odd address
        {"x": torch.ones(8, 3).T},
        {"x": torch.ones(1, 16384), "weight": torch.ones(16384)},
        {"residual": torch.ones(3, 7)},
        {"residual": torch.ones(3, 8).half()},
        {"weight": torch.ones(7)},
        {"out": torch.ones(2, 8)},
        {"quantized": torch.ones(3, 8), "scale": torch.ones(1)},
        {"quantized": narrow},
        {"quantized": narrow, "scale": torch.ones(3)},
        {"scale": torch.ones(1)},
        *({"eps": eps} for eps in (None, "little")),
    ]
    return changed(ops.all_reduce_rms_norm, wrong, comm=comm, x=x, residual=None, weight=weight)


def embedding_calls(comm: Communicator) -> Calls:
    indices = torch.tensor([0, 4, 3, 5])
    wrong = [
        {"tables": []},
        {"tables": [torch.ones(5, 4), torch.ones(6, 3)]},
        {"tables": [torch.ones(5, 4), torch.ones(6, 4).half()]},
        {"tables": [torch.ones(4, 5).T, torch.ones(6, 4)]},
        {"indices": indices.float()},
        {"indices": torch.tensor([0, 5, 3, 5])},
        {"offsets": torch.arange(4)},
        {"offsets": torch.tensor([0, 2, 1, 3, 4])},
        {"offsets": torch.tensor([0, 1, 2, 3, 5])},
        {"mode": "max"},
        {"order": "last"},
        {"indices": indices[:2], "offsets": torch.arange(3)},
        {"mode": "mean", "per_sample_weights": torch.ones(4)},
        {"per_sample_weights": torch.ones(3)},
    ]
    right = {"tables": [torch.ones(5, 4), torch.ones(6, 4)], "indices": indices, "offsets": torch.arange(5)}
    return changed(ops.embedding_all_to_all, wrong, comm=comm, **right)


def wrong_exchanges(comm: Communicator) -> Calls:
    """Give wrong calls of gemm_all_to_all, and of what moves rows as they are."""
    n = comm.world_size
    wrong, right = refused_by(comm, ops.gemm_all_to_all)
    others = torch.ones(2 * n, 0), torch.ones(2 * n, 8).int(), torch.ones(8, 2 * n).T
    rows = {"comm": comm, "counts": torch.full((n, n), 2), "most_rows": 2 * n}
    more, _ = changed(ops.all_to_all_rows, [{"x": x} for x in others], **rows)
    return wrong + more, right


def wrong_dispatches(comm: Communicator) -> Calls:
    return refused_by(comm, ops.all_to_all_gemm)


def wrong_splits(comm: Communicator) -> Calls:
    return refused_in_parts(comm, ops.gemm_all_to_all)


def wrong_split_dispatches(comm: Communicator) -> Calls:
    return refused_in_parts(comm, ops.all_to_all_gemm)


def refused_by(comm: Communicator, op: Callable[..., torch.Tensor]) -> Calls:
    """Give calls that both operators which exchange rows refuse."""
    n = comm.world_size
    several = torch.ones(2, 4, 8)
    wrong = [
        {"x": torch.ones(2 * n, 7)},
        {"x": torch.ones(2 * n, 8).half()},
        {"x": torch.ones(8, 2 * n).T},
        {"weight": torch.ones(4)},
        {"weight": torch.ones(4, 8, dtype=torch.int32)},
        {"counts": [[2] * n] * (n - 1) + [[2]]},
        *({"counts": [[rows] * n] * n} for rows in (3, -1)),
        {"counts": [2] * n},
        {"counts": None},
        {"counts": torch.full((n, n + 1), 2)},
        {"counts": torch.full((n, n), 2.0)},
        *({"counts": torch.full((n, n), rows)} for rows in (3, -1)),
        *({"method": method} for method in ("split", "best")),
        *({"tiles": tiles} for tiles in ("large", [128, 256])),
        {"weight": several},
        {"weight": several, "counts": torch.ones(n, n, 3).long()},
        {"weight": several, "counts": [[[1, 1]] * n] * n, "method": "split"},
        {"weight": torch.ones(65, 4, 8), "counts": torch.zeros(n, n, 65).long()},
        {"most_rows": 0},
    ]
    right = {"x": torch.ones(2 * n, 8), "weight": torch.ones(4, 8), "counts": torch.full((n, n), 2)}
    return changed(op, wrong, comm=comm, **right, most_rows=2 * n, tiles=TILES)


def refused_in_parts(comm: Communicator, op: Callable[..., torch.Tensor]) -> Calls:
    """Give calls that both refuse where copy engines move the rows in parts."""
    n = comm.world_size
    wrong = [
        {"x": torch.ones(2 * n, 7)},
        {"x": torch.ones(2 * n, 8).half()},
        {"x": torch.ones(8, 2 * n).T},
        {"weight": torch.ones(4, 8, dtype=torch.int32)},
        {"counts": [[2] * n] * (n + 1)},
        {"counts": [[2] * n] * (n - 1) + [[2] * (n - 1)]},
        *({"counts": [[rows] * n] * n} for rows in (3, -1)),
        {"most_rows": 0},
        *({"pieces": pieces} for pieces in (0, 65)),
        *({"pieces": 2, "method": method} for method in ("auto", "fused", "unfused")),
    ]
    right = {"x": torch.ones(2 * n, 8), "weight": torch.ones(4, 8), "counts": [[2] * n] * n}
    return changed(op, wrong, comm=comm, **right, most_rows=2 * n, method="split")


def wrong_gathers(comm: Communicator) -> Calls:
    ways = {"method": "auto"}, {"method": "split"}
    wrong = [
        *({"x": x, **way} for x in (torch.ones(5, 7), torch.ones(5, 8).half(), torch.ones(0, 8)) for way in ways),
        {"x": torch.ones(8, 5).T},
        {"weight": torch.ones(4)},
        {"weight": torch.ones(4, 16)[:, ::2]},
        {"gathered": torch.ones(5, 8)},
        {"method": "fused"},
        *({"method": "split", "pieces": pieces} for pieces in (0, 65)),
        {"pieces": 2},
    ]
    return changed(ops.all_gather_gemm, wrong, comm=comm, x=torch.ones(5, 8), weight=torch.ones(4, 8))


def wrong_reductions(comm: Communicator) -> Calls:
    n = comm.world_size
    right = {"comm": comm, "x": torch.ones(2 * n, 8), "weight": torch.ones(4, 8)}
    of_both = [
        *({"x": torch.ones(2 * n, 7), "method": method} for method in ("auto", "split")),
        {"method": "fused"},
        {"method": "split", "pieces": 0},
        {"method": "unfused", "pieces": 2},
    ]
    wrong = [
        {"x": torch.ones(2 * n + 1, 8)},
        {"x": torch.ones(2 * n, 8).half()},
        {"x": torch.ones(8, 2 * n).T},
        {"x": torch.ones(0, 8)},
        {"weight": [1]},
        {"weight": torch.ones(4, 8, dtype=torch.int32)},
    ]
    calls, call = changed(ops.gemm_reduce_scatter, wrong + of_both, **right)
    return calls + changed(ops.gemm_all_reduce, of_both, **right)[0], call


def wrong_tokens(comm: Communicator) -> Calls:
    n = comm.world_size
    x, counts = torch.ones(4, 8), torch.ones(n, n, dtype=torch.int64)
    terms, factors = torch.zeros(n, 2, dtype=torch.int64), torch.ones(n, 2)
    chosen, gates = terms[:1], factors[:1]
    rows = [
        {"terms": None},
        {"terms": terms.float(), "factors": None},
        {"terms": terms[0], "factors": None},
        {"terms": terms.T.contiguous().T if n > 1 else terms[:, :0], "factors": None},
        {"terms": terms + len(x), "factors": None},
        {"factors": factors.double()},
        {"factors": factors[:, :1].contiguous()},
    ]
    routings = [{"chosen": chosen.float()}, {"gates": gates[:, :1]}, {"experts": 0}, {"most_rows": 0}]
    routes = ops.route_experts(comm, chosen, gates, experts=2)
    wrong, right = changed(
        ops.all_to_all_rows, rows, comm=comm, x=x, counts=counts, most_rows=n, terms=terms, factors=factors
    )
    wrong += changed(ops.route_experts, routings, comm=comm, chosen=chosen, gates=gates, experts=2)[0]
    wrong += [
        lambda: ops.dispatch_tokens(comm, x, routes),
        lambda: ops.dispatch_tokens(comm, x[:1], routes, wire=torch.float8_e5m2),
        lambda: ops.combine_tokens(comm, x[:1], routes),
        lambda: ops.combine_tokens(comm, torch.ones(len(routes.rows) + 1, 8), routes),
    ]
    return wrong, right


def changed(op: Callable[..., Any], wrong: Sequence[dict[str, Any]], **right: Any) -> Calls:
    """Return calls with arguments changed, and the one that is right."""
    return [functools.partial(op, **{**right, **change}) for change in wrong], functools.partial(op, **right)


REFUSED = (
    *(gemv_calls, rms_norm_calls, embedding_calls, wrong_exchanges, wrong_splits, wrong_reductions, wrong_gathers),
    *(wrong_dispatches, wrong_split_dispatches, wrong_tokens),
)


@on_ranks(2, interpreted=True)
@on_ranks(gpu=fused)
@pytest.mark.parametrize("calls", REFUSED)
def test_what_is_refused(group: dist.ProcessGroup, calls: Callable[[Communicator], Calls]) -> None:
    """On the last rank, which makes them, and on its peers, with the reason; then a right call."""
    found: list[str] = []
    with communicator(group, debug=True) as comm:
        wrong, right = calls(comm)
        for call in wrong:
            try:
                (call if comm.rank == comm.world_size - 1 else right)()
                found.append("nothing")
            except (TypeError, ValueError, SidelaneError) as error:
                found.append(f"{type(error).__name__}: {error}")
        right()
        comm.synchronize()
    named = r"\(value=" if comm.device.type == "cpu" else "value=|allowed="
    *others, own = everyones(group, found)
    assert all(line.startswith(("ValueError", "TypeError")) and re.search(named, line) for line in own), own
    for line, reason in zip(itertools.chain(*others), own * len(others), strict=True):
        assert line.startswith("PeerError") and reason in line, (line, reason)
