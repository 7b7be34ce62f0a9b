"""Tokens that travel to their experts' ranks once, and back as sums, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fused_ops import DTYPES, TOLERANCE, Draws, check_close, communicator, draws_of, fused
from marks import long
from on_ranks import on_ranks

from sidelane import Communicator, ops
from sidelane.errors import MismatchError, PeerError
from sidelane.ops import library


@on_ranks(1, long(2), 3, interpreted=True, calls=4)
@on_ranks(gpu=fused, timeout_s=240, calls=40)
def test_rows_are_sums_of_rows(group: dist.ProcessGroup, calls: int) -> None:
    """Rows that are sums of rows, with factors and without, and bits of a row that is no number."""
    with communicator(group, debug=True) as comm:
        n, rank, draws, done = comm.world_size, comm.rank, draws_of(comm), 0
        for number in range(calls):
            dtype, columns, k = DTYPES[number % 3], draws.sizes.choice((5, 16, 300)), draws.sizes.choice((1, 2, 5))
            counts = [[draws.sizes.choice((0, 1, 7, 40)) for _ in range(n)] for _ in range(n)]
            xs = [draws.normal(11, columns).to(dtype) for _ in range(n)]
            terms = [torch.tensor([[draws.sizes.randrange(-4, 11) for _ in range(k)] for _ in range(sum(row) + 1)])
                     for row in counts]  # fmt: skip
            factors = [draws.normal(*part.shape) for part in terms] if number % 2 else None
            most = 40 * n
            kind = draws.sizes.choice((torch.int32, torch.int64))
            given = terms[rank].to(comm.device, kind), None if factors is None else factors[rank].to(comm.device)
            draws.late()
            found = ops.all_to_all_rows(comm, xs[rank].to(comm.device), torch.tensor(counts, device=comm.device),
                                        most_rows=most, terms=given[0], factors=given[1])  # fmt: skip
            came = found.clone()
            comm.synchronize()
            at = 0
            for sender in range(n):
                first = sum(counts[sender][:rank])
                for row in range(first, first + counts[sender][rank]):
                    own = [(one, factors[sender][row, c].double() if factors else 1.0)
                           for c, one in enumerate(terms[sender][row].tolist()) if one >= 0]  # fmt: skip
                    if own:
                        wanted = sum(xs[sender][one].double() * factor for one, factor in own)
                        assert isinstance(wanted, torch.Tensor)
                        check_close(came[at], wanted, (number, sender, row), scale=10.0)
                        done += 1
                    at += 1
        bits = torch.arange(-(2**15), 2**15, device=comm.device).short().view(-1, 256).view(torch.float16)
        counts = torch.full((n, n), len(bits) // n, device=comm.device)
        terms = torch.arange(len(bits), device=comm.device)[:, None]
        came = ops.all_to_all_rows(comm, bits, counts, most_rows=len(bits), terms=terms).clone()
        comm.synchronize()
        own = bits[rank * (len(bits) // n) : (rank + 1) * (len(bits) // n)].repeat(n, 1)
        assert torch.equal(came[: len(own)].view(torch.int16), own.view(torch.int16))
        none = -1 - terms  # any negative number stands for none
        again = ops.all_to_all_rows(comm, torch.zeros_like(bits), counts, most_rows=len(bits), terms=none).clone()
        comm.synchronize()
        assert torch.equal(again.view(torch.int16), came.view(torch.int16))
    assert done


def routings(draws: Draws, n: int, each: int) -> list[torch.Tensor]:
    """Experts of all ranks' tokens, [N, T, k]: evenly, for one rank's only, and hardly any."""
    found = []
    for tokens, k, experts in ((5, min(3, n * each), range(n * each)), (9, min(2, each), range(each)), (4, 1, (0, -1))):
        rows = [draws.sizes.sample(list(experts), k) for _ in range(n * tokens)]
        found.append(torch.tensor(rows, device="cpu").view(n, tokens, k))
    found[0][0, 1] = -1  # a token that nobody wants
    return found


@on_ranks(1, 2, interpreted=True, calls=1, backend=None)
@on_ranks(long(2), long(4), interpreted=True, calls=2, backend=None)
@on_ranks(long(3), interpreted=True, calls=3, backend=None)
@on_ranks(long(2), interpreted=True, calls=1, backend="aot_eager")
@on_ranks(gpu=fused, timeout_s=240, calls=20, backend=None)
@on_ranks(gpu=fused, timeout_s=170, calls=1, backend="aot_eager")
@on_ranks(gpu=fused, timeout_s=170, calls=1, backend="inductor")
def test_tokens_travel_once_and_come_back_as_sums(group: dist.ProcessGroup, calls: int, backend: str | None) -> None:
    """Forward and backward of experts behind a dispatch, before a combine, against float64 on one rank."""
    done = 0
    with communicator(group) as comm:
        n, draws = comm.world_size, draws_of(comm)
        library.number_of(comm)  # no compiler makes it
        for number in range(calls):
            each = (2, 3, 1)[number % 3]
            for chosen in routings(draws, n, each):
                dtype = DTYPES[(number + done) % 3]
                columns = (8, 13, 40)[number % 3]
                xs = draws.normal(*chosen.shape[:2], columns).to(dtype)
                gates = draws.normal(*chosen.shape)
                weights = draws.normal(n * each, columns)
                one_step(comm, chosen, xs, gates, weights, each, backend)
                done += 1


def one_step(
    comm: Communicator,
    chosen: torch.Tensor,
    xs: torch.Tensor,
    gates: torch.Tensor,
    weights: torch.Tensor,
    each: int,
    backend: str | None = None,
    most_rows: int | None = None,
) -> None:
    """Experts multiply elements by their weight and square them; those of a rank have room for ``most_rows``."""
    rank, device = comm.rank, comm.device
    has_room = chosen >= 0 if most_rows is None else with_room(chosen, each, most_rows)
    wide = [part.double().requires_grad_() for part in (xs, gates, weights)]
    hidden = (wide[0][:, :, None] * wide[2][chosen.clamp(min=0)]).square()
    expected = (hidden * wide[1][..., None] * has_room[..., None]).sum(2)
    expected.square().sum().backward()

    def call(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        routes = ops.route_experts(comm, own, gate, experts=each, most_rows=most_rows)
        rows = ops.dispatch_tokens(comm, x, routes)
        place = torch.arange(len(rows), device=device, dtype=torch.int32)
        expert = torch.searchsorted(routes.ends, place, right=True).clamp(max=each - 1)
        return ops.combine_tokens(comm, (rows * weight[expert]).square(), routes)

    run: Callable[..., torch.Tensor] = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    mine = [part.detach().clone().to(device).requires_grad_() for part in (xs[rank], gates[rank])]
    own = weights.view(-1, each, weights.shape[1])[rank].to(device, xs.dtype).requires_grad_()
    result = run(*mine, own, chosen[rank].to(device))
    result.float().square().sum().backward()
    comm.synchronize()
    wanted = [part.grad for part in wide]
    where = chosen.shape, xs.dtype
    for found, other in (
        (result.detach(), expected.detach()[rank]),
        (mine[0].grad, wanted[0][rank]),
        (mine[1].grad, wanted[1][rank]),
        (own.grad, wanted[2].view(-1, each, weights.shape[1])[rank]),
    ):
        # Roundings of four steps, and gates whose gradients are sums of results in the tokens' dtype.
        loose = 8 if found.dtype == xs.dtype else 8e3 if xs.dtype == torch.bfloat16 else 8e2
        largest = max(1e-3, float(other.abs().max()))
        check_close(found, other, where, scale=loose * largest)


@on_ranks(2, interpreted=True)
def test_places_are_those_of_the_worked_example(group: dist.ProcessGroup) -> None:
    """The example in the docstring of ``experts``, for two ranks."""
    with communicator(group) as comm:
        chosen = torch.tensor([[[1, 2]], [[2, 3]]][comm.rank], device=comm.device)
        routes = ops.route_experts(comm, chosen, torch.ones(1, 2, device=comm.device), experts=2)
        comm.synchronize()
        found = [part.tolist() for part in (routes.rows.flatten(), routes.ends, routes.results, routes.returned)]
        assert (
            found
            == (
                [[0, -1, -1, -1], [0, 1], [[0, -1], [-1, -1]], [[0, 1]]],
                [[0, 1, 1, -1], [2, 3], [[-1, 0], [1, 2]], [[-1, 1]]],
            )[comm.rank]
        )


@on_ranks(3, interpreted=True)
def test_tokens_without_room_are_left_out(group: dist.ProcessGroup) -> None:
    """Rows that experts have no room for, the last of the last experts, count as not chosen."""
    with communicator(group) as comm:
        n, device = comm.world_size, comm.device
        chosen = torch.zeros(4, 1, dtype=torch.int64, device=device)  # all tokens of all ranks, for the first expert
        gates = torch.ones(4, 1, device=device)
        routes = ops.route_experts(comm, chosen, gates, experts=2, most_rows=6)
        x = torch.ones(4, 3, device=device, requires_grad=True)
        y = ops.combine_tokens(comm, ops.dispatch_tokens(comm, x, routes), routes)
        y.sum().backward()
        comm.synchronize()
        kept = max(0, min(4, 6 - 4 * comm.rank))
        assert routes.ends.tolist() == ([min(6, 4 * n)] * 2 if comm.rank == 0 else [0, 0])
        assert x.grad is not None
        for found in (y.detach(), x.grad):
            assert found.sum(1).tolist() == [3.0] * kept + [0.0] * (4 - kept), found


def with_room(chosen: torch.Tensor, each: int, most_rows: int) -> torch.Tensor:
    """True where a token's expert has room for it: the first rows of each rank's experts, in their order."""
    has_room = chosen >= 0
    flat, of_all = has_room.view(-1), chosen.flatten()
    for first in range(0, len(chosen) * each, each):
        rows = torch.cat([(of_all == expert).nonzero()[:, 0] for expert in range(first, first + each)])
        flat[rows[most_rows:]] = False
    return has_room


@on_ranks(2, interpreted=True, calls=2)
@on_ranks(long(2), long(3), interpreted=True, calls=4)
@on_ranks(gpu=fused, timeout_s=240, calls=5)
def test_nothing_is_left_of_tokens_without_room(group: dist.ProcessGroup, calls: int) -> None:
    """Nothing of an earlier step is taken for results of experts without room: forward and backward, on two ranks.

    With two calls: tokens of one expert, and of two; with four of three, and each dtype, too.
    """
    with communicator(group) as comm:
        n, draws, device = comm.world_size, Draws(5, comm.rank), comm.device
        kinds = ((torch.bfloat16, 1), (torch.float32, 2), (torch.float32, 1), (torch.float16, 3))
        for dtype, k in itertools.islice(itertools.cycle(kinds), calls):
            tokens, each, columns = 6, 2, 8
            near = [*range(each), *range((n - 1) * each, n * each)]  # experts of the first rank and of the last one
            rows = [draws.sizes.sample(near, k) for _ in range(n * tokens)]
            chosen = torch.tensor(rows, device="cpu").view(n, tokens, k)
            most_rows = n * tokens * k // 5
            full = with_room(chosen, each, most_rows) < (chosen >= 0)
            for rank in (0, n - 1):
                its = chosen // each == rank
                assert ((full & its).any(-1) & ~(its & ~full).any(-1)).any(), "no token without any expert of a rank"
            routes = ops.route_experts(comm, chosen[comm.rank].to(device), torch.ones(tokens, k), experts=each)
            x = torch.full((tokens, columns), 100.0, dtype=dtype, requires_grad=True)
            y = ops.combine_tokens(comm, ops.dispatch_tokens(comm, x, routes), routes)
            (100 * y).sum().backward()  # so that the buffers of both ways hold what would be seen
            comm.synchronize()
            assert y.eq(100 * k).all()
            xs, weights = draws.normal(n, tokens, columns).to(dtype), draws.normal(n * each, columns)
            one_step(comm, chosen, xs, draws.normal(n, tokens, k), weights, each, most_rows=most_rows)


@on_ranks(2, interpreted=True)
@pytest.mark.parametrize("known", ["", "2", "12", "21", "213"])
def test_ranks_with_different_numbers_of_experts_are_told(group: dist.ProcessGroup, known: str) -> None:
    """Where both numbers are new, where one of them is, where both are known, and where no rank has its last one."""
    with communicator(group) as comm:
        chosen, gates = torch.arange(8).view(4, 2) % comm.world_size, torch.ones(4, 2)

        def call(experts: int) -> None:
            routes = ops.route_experts(comm, chosen, gates, experts=experts)
            ops.combine_tokens(comm, ops.dispatch_tokens(comm, torch.ones(4, 8), routes), routes)
            comm.synchronize()

        for experts in known:
            call(int(experts))
        with pytest.raises((MismatchError, PeerError), match="ranks made different calls"):
            call(2 - comm.rank % 2)


@on_ranks(2, interpreted=True)
@on_ranks(gpu=fused)
def test_tokens_travel_in_float8(group: dist.ProcessGroup) -> None:
    """Tokens that travel in float8 are those of torch, with a scale for each 128 elements, and so is what is made of
    them; gradients are those of tokens that travel as they are.
    """
    with communicator(group) as comm:
        n, device, draws = comm.world_size, comm.device, Draws(11, comm.rank)
        for columns, dtype in ((300, torch.bfloat16), (128, torch.float32), (5, torch.float16)):
            xs = draws.normal(n, 5, columns).to(dtype)
            xs[:, :, ::7] *= 30
            xs[0, 0], xs[0, 1, 0] = 0, torch.nan
            chosen = torch.tensor([draws.sizes.sample(range(2 * n), 2) for _ in range(5 * n)], device="cpu").view(
                n, 5, 2
            )
            gates = torch.ones(5, 2, device=device)
            routes = ops.route_experts(comm, chosen[comm.rank].to(device), gates, experts=2)
            x = xs[comm.rank].to(device).requires_grad_()
            rows = ops.dispatch_tokens(comm, x, routes, wire=torch.float8_e4m3fn)
            rows.sum().backward()
            plain = ops.dispatch_tokens(comm, quantized(x.detach().float()).to(dtype), routes)
            comm.synchronize()
            assert (
                torch.isclose(rows.detach(), plain, rtol=TOLERANCE[dtype], equal_nan=True).float().mean() > 0.999
            )  # others are next to a middle
            torch.testing.assert_close(rows.detach(), plain, rtol=0.15, atol=1e-2, equal_nan=True)
            assert x.grad is not None
            assert torch.equal(x.grad, torch.full_like(x, 2))
            assert rows[int(routes.ends[-1]) :].abs().sum() == 0


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Compare float32 tokens with what comes back from float8."""
    parts = []
    for part in x.split(128, dim=1):
        largest = part.abs().amax(1, keepdim=True).clamp(min=1e-4)
        parts.append((part * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448))
    return torch.cat(parts, dim=1)
