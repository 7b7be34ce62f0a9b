"""Attention to parts of the context that is merged, by Triton's interpreter, unfused and on GPUs, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_ops import DTYPES, Draws, check_close, communicator, fused
from marks import long
from on_ranks import on_ranks
from torch import Tensor

from sidelane import Communicator, ops
from sidelane.errors import MismatchError, PeerError
from sidelane.ops import operator
from sidelane.ops.decode_context import CombineAttention

INF = math.inf
METHODS = "fused", "unfused"


def merged(partials: list[Tensor], lses: list[Tensor], base: float) -> tuple[Tensor, Tensor]:
    """The merge of all heads in float64: NaN and infinity as a logarithm say that there is nothing."""
    logarithms = torch.stack(lses).double() * math.log(base)
    logarithms[logarithms.isnan() | (logarithms == INF)] = -INF
    lse = torch.logsumexp(logarithms, 0)
    weights = (logarithms - lse.masked_fill(lse == -INF, 0)).exp()[..., None]
    rows = torch.stack(partials).double()
    return torch.where(weights > 0, rows, 0).mul(weights).sum(0), lse / math.log(base)


def compare(
    comm: Communicator, found: tuple[Tensor, Tensor], partials: list[Tensor], lses: list[Tensor], base: float = math.e
) -> None:
    """Compare results of this rank with those heads of the whole."""
    rows, lse = (tensor.tensor_split(comm.world_size, 1)[comm.rank] for tensor in merged(partials, lses, base))
    assert found[0].dtype == partials[0].dtype and found[0].shape == rows.shape
    check_close(found[0], rows, "rows")
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1].cpu().double(), lse, rtol=1e-5, atol=1e-5)


@on_ranks(1, 2, long(3), 4, long(8), interpreted=True, calls=12)
@on_ranks(gpu=fused, timeout_s=200, calls=120)
def test_random_shapes_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """Odd numbers of tokens, heads and elements, each dtype, ranks that are late, strided and empty logarithms."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = Draws(3 + n, rank)
        kept: list[tuple[Any, ...]] = []
        for call in range(calls):
            choice = draws.sizes.choice
            tokens, heads, size = choice((1, 2, 3, 5, 9)), n + choice((0, 1, 3, 8)), choice((2, 6, 34, 64, 128))
            dtype, base, method = choice(DTYPES), choice((math.e, 2)), choice((*METHODS, "auto"))
            partials = [draws.normal(tokens, heads, size).to(dtype) for _ in range(n)]
            lses = [draws.normal(tokens, heads) * 4 + 30 for _ in range(n)]
            for one in lses:  # also all ranks at some places
                one[draws.normal(tokens, heads) > 0.8] = choice((-INF, INF, math.nan))
            for one, of_rows in zip(partials, lses, strict=True):
                one[~of_rows.isfinite()] = choice((math.nan, 0.0))
            own = lses[rank].t().contiguous().t() if call % 2 else lses[rank]
            rows = partials[rank].to(device)
            if call % 4 == 1:
                rows = rows.transpose(0, 1).contiguous().transpose(0, 1)
            elif call % 4 == 2:  # in float16 at no multiple of 4 bytes
                rows = torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view(rows.shape)
            places: dict[str, Any] = {}
            if call % 3 == 0:
                mine = partials[0].tensor_split(n, 1)[rank].shape
                places = {"out": torch.empty(mine, dtype=dtype), "out_lse": torch.empty(mine[:2])}
            draws.late()
            found = ops.combine_attention(comm, rows, own.to(device), base=base, method=method, **places)
            assert not places or (found[0] is places["out"] and found[1] is places["out_lse"])
            kept.append((found, partials, lses, base))
        comm.synchronize()
        for one in kept:
            compare(comm, *one)


@on_ranks(2, 3, interpreted=True, tokens=3, context=17)
@on_ranks(gpu=fused, tokens=64, context=4099)
def test_the_context_of_all_ranks(group: dist.ProcessGroup, tokens: int, context: int) -> None:
    """Attention to parts of the keys and values on each rank, merged: that to all of them on one rank."""
    with communicator(group) as comm:
        draws, heads, size = Draws(2, comm.rank), 7, 32
        query, keys, values = (draws.normal(heads, rows, size).double() for rows in (tokens, context, context))
        whole = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        key, value = (tensor.tensor_split(comm.world_size, 1)[comm.rank] for tensor in (keys, values))
        products = query @ key.transpose(1, 2) / size**0.5
        lse, partial = products.logsumexp(-1).t(), (products.softmax(-1) @ value).transpose(0, 1)
        for method in METHODS:
            given = partial.float().contiguous().to(comm.device), lse.float().to(comm.device)
            found, _ = ops.combine_attention(comm, *given, method=method)
            check_close(found, whole.transpose(0, 1).tensor_split(comm.world_size, 1)[comm.rank], method)


@on_ranks(2, interpreted=True)
@on_ranks(gpu=fused)
def test_results_in_the_memory_of_what_is_given(group: dist.ProcessGroup) -> None:
    """A token's result lies where its heads, or others, lay; the same bits every time."""
    with communicator(group) as comm:
        n, heads, size = comm.world_size, 4 * comm.world_size, 64
        draws = Draws(9, comm.rank)
        partials = [draws.normal(1, heads, size) for _ in range(n)]
        lses = [draws.normal(1, heads) for _ in range(n)]
        found = []
        for first in (4 * comm.rank, 0, 2):
            given, lse = (one[comm.rank].to(comm.device, copy=True) for one in (partials, lses))
            places = {"out": given[:, first : first + 4], "out_lse": lse[:, first : first + 4]}
            result = ops.combine_attention(comm, given, lse, method="fused", **places)
            comm.synchronize()
            compare(comm, result, partials, lses)
            found.append([one.clone() for one in result])
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))


@on_ranks(2, interpreted=True)
def test_rows_that_are_no_whole_words(group: dist.ProcessGroup) -> None:
    """Rows of an odd number of bytes, and of too many, are sent unfused by auto, and refused fused."""
    with communicator(group) as comm:
        for tokens, size in ((2, 3), (1, 4100)):
            draws = Draws(size, comm.rank)
            partials = [draws.normal(tokens, 4, size).bfloat16() for _ in range(2)]
            lses = [draws.normal(tokens, 4) for _ in range(2)]
            compare(comm, ops.combine_attention(comm, partials[comm.rank], lses[comm.rank]), partials, lses)
            with pytest.raises(ValueError, match="bytes of a row of a fused call"):
                ops.combine_attention(comm, partials[comm.rank], lses[comm.rank], method="fused")
        chosen = ops.explain(comm, "combine_attention", 64, 256, 1024)
        assert "unfused: fused takes up to 8388608 elements" in chosen


@on_ranks(2, interpreted=True)
def test_what_is_refused_on_one_rank_is_told_to_the_others(group: dist.ProcessGroup) -> None:
    """Wrong arguments of the last rank, each of which moves nothing; then a call goes well."""
    with communicator(group) as comm:
        rows, lse = torch.zeros(2, 4, 8), torch.zeros(2, 4)
        wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
            (rows.double(), lse, {}, "dtype of partial"),
            (rows[0], lse, {}, "dimensions of partial (value=2, allowed=3)"),
            (
                rows[:, :1].contiguous(),
                lse[:, :1],
                {},
                "heads, and elements of a head (value=1, 8, allowed=2 and more, 1)",
            ),
            (rows[:0], lse[:0], {}, "tokens (value=0, allowed=1..4096)"),
            (rows, lse.half(), {}, "dtype of lse"),
            (rows, lse[:, :3], {}, "shape of lse (value=(2, 3), allowed=(2, 4))"),
            (rows, lse, {"base": 1}, "base (value=1, allowed=a number above 1"),
            (rows, lse, {"out": torch.zeros(2, 4, 8)}, "shape of out (value=(2, 4, 8), allowed=(2, 2, 8))"),
            (rows, lse, {"out_lse": torch.zeros(2, 2).t()}, "strides of out_lse (value=(1, 2), allowed=(2, 1))"),
            (rows, lse, {"method": "split"}, "method (value='split', allowed=auto, fused, unfused)"),
        ]
        for given, of_rows, options, text in wrong:
            with pytest.raises((ValueError, TypeError, PeerError, MismatchError)) as caught:
                if comm.rank == comm.world_size - 1:
                    ops.combine_attention(comm, given, of_rows, **options)
                ops.combine_attention(comm, rows, lse)
                comm.synchronize()
            assert text in str(caught.value), (text, str(caught.value))
        result, of_result = ops.combine_attention(comm, rows, lse)
        comm.synchronize()
        assert not result.any() and torch.allclose(of_result, torch.tensor(2.0).log())


@on_ranks(2, 3, interpreted=True)
@on_ranks(gpu=fused)
def test_other_numbers_of_tokens_on_a_rank_are_told_to_all(group: dist.ProcessGroup) -> None:
    """The calls were made before on all ranks, so that nothing else is compared."""
    for method in METHODS:
        with communicator(group) as comm:
            given = [(torch.zeros(tokens, 8, 8), torch.zeros(tokens, 8)) for tokens in (3, 4)]
            for one in (*given, given[0]):
                ops.combine_attention(comm, *one, method=method)
            comm.synchronize()
            with pytest.raises((MismatchError, PeerError), match=r"combine_attention: \(4, 8, 8\)"):
                ops.combine_attention(comm, *given[comm.rank == 1], method=method)
                comm.synchronize()


@on_ranks(2)
def test_auto_is_unfused_if_a_rank_has_no_interpreter(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "INTERPRETED", comm.rank == 0)
        partials, lses = Draws(1, comm.rank).normal(2, 3, 4, 8).unbind(), Draws(2, comm.rank).normal(2, 3, 4).unbind()
        compare(comm, ops.combine_attention(comm, partials[comm.rank], lses[comm.rank]), list(partials), list(lses))


@on_ranks(gpu=True, replays=20)
def test_in_graphs(group: dist.ProcessGroup, replays: int) -> None:
    """A chain of calls in a graph, replayed with new numbers, and calls between the replays."""
    with communicator(group) as comm:
        n, draws = comm.world_size, Draws(4, comm.rank)
        shapes = [(1, 32, 128, torch.bfloat16), (64, 128, 128, torch.bfloat16), (5, 33, 512, torch.float16)]
        given = [(torch.empty(t, h, d, dtype=dtype), torch.empty(t, h)) for t, h, d, dtype in shapes]

        def step() -> list[tuple[Tensor, Tensor]]:
            return [ops.combine_attention(comm, *one, method="fused") for one in given for _ in range(3)]

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        for replay in range(replays):
            wholes = []
            for (rows, lse), (tokens, heads, size, dtype) in zip(given, shapes, strict=True):
                partials = [draws.normal(tokens, heads, size).to(dtype) for _ in range(n)]
                lses = [draws.normal(tokens, heads) for _ in range(n)]
                rows.copy_(partials[comm.rank]), lse.copy_(lses[comm.rank])
                wholes.append((partials, lses))
            if replay % 3 == 2:
                found = step()
            else:
                graph.replay()
                found = captured
            torch.cuda.synchronize()
            for number, one in enumerate(found):
                compare(comm, one, *wholes[number // 3])


@on_ranks(2, interpreted=True)
def test_a_handle_takes_fewer_tokens(group: dist.ProcessGroup) -> None:
    """A handle of eight tokens runs calls of one to eight of them, with odd and even generations."""
    with communicator(group) as comm:
        handle, draws = CombineAttention(comm, 8, 5, 6, torch.float32), Draws(1, comm.rank)
        for tokens in (8, 1, 3, 8):
            partials = [draws.normal(tokens, 5, 6) for _ in range(2)]
            lses = [draws.normal(tokens, 5) for _ in range(2)]
            draws.late()
            found = handle.run(None, partials[comm.rank], lses[comm.rank], None, None, math.e)
            comm.synchronize()
            compare(comm, found, partials, lses)
