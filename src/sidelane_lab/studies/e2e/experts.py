"""Experts in DeepEP's shape: tokens to the ranks of their experts, grouped products, and weighted sums back.

Ways, of which only the exchange differs. Places are known in advance, which favours the first three: their split sizes
are numbers of the host, so that without that knowledge they would wait for the device.

=================  =====================================================================================================
nccl               each token once a rank: index, ``all_to_all_single``, index; ``embedding_bag`` for weighted sums
nccl, our sums     the same, with the library's kernel for all rows that move on a rank
nccl, gathered     an all-gather of all tokens, and a reduce-scatter of sums; constant shapes
copies             "nccl, our sums", with the communicator's all-to-all
operators          ``dispatch_tokens`` and ``combine_tokens``
operators, routed  the same, with ``route_experts`` in each step
none               no tokens move between ranks: the products alone
=================  =====================================================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from sidelane import ops
from sidelane.ops.experts import ExpertRoutes, sum_rows
from sidelane.ops.rows import SCALED, dequantized_rows, quantized_rows
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import all_gather, reduce_scatter
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.kernels import own_gang
from sidelane_lab.model.split import ours_us
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared, moved_us

LAYER, DISPATCH, COMBINE, ROWS_THERE, ROWS_BACK = "layer", "dispatch", "combine", "rows there", "rows back"
"""Parts of a layer: a dispatch ends with a row for each expert of a token, and a combine begins there. "Rows there" and
"rows back" are what DeepEP calls dispatch and combine: one row of a token on each rank, and sums over ranks."""

SAMPLED = 16
"""Number of rows that are compared of those that have arrived, as ways have other places for them."""

ROOM = 128
"""Rows whose multiple an expert's room for rows is."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertSize:
    """Parameters of a layer of experts.

    Attributes:
        tokens: number of tokens of a rank.
        hidden: number of elements of a token.
        inner: number of hidden features of an expert.
        experts: number of experts of all ranks.
        top_k: number of experts of a token.
        part: the whole layer, or a part of it.
        float8: tokens travel to experts in float8 with scales, by all ways, made by the library's kernels.
        skew: exponent by which an expert's popularity falls with its number; 0 for none, as DeepEP's tests draw them.
    """

    tokens: int
    hidden: int = 7168
    inner: int = 2048
    experts: int = 256
    top_k: int = 8
    part: str = LAYER
    float8: bool = False
    skew: float = 0.0

    def wire_bytes(self, itemsize: int) -> int:
        """Return the bytes of a row on its way to experts."""
        return self.hidden + 4 * (self.hidden // SCALED) if self.float8 else self.hidden * itemsize


class RoutedTokens:
    """Tokens of one rank to experts and back, with places that are known in advance."""

    def __init__(self, size: ExpertSize, comm: Communicator, device: torch.device) -> None:
        n, rank = comm.world_size, comm.rank
        draw = torch.Generator(device).manual_seed(3)  # all ranks draw the tokens of all
        weights, self.of_all = draw_experts(size, n, draw)
        self.gates_of_all = (weights.log1p() + 1).softmax(-1)
        own = slice(rank * size.tokens, (rank + 1) * size.tokens)
        self.chosen, self.gates = self.of_all[own].contiguous(), self.gates_of_all[own].contiguous()
        self.each = size.experts // n
        self.comm, self.size, self.device = comm, size, device
        self.arriving = travelling(size, n, self.of_all)
        self.splits = self.arriving.sum(1).tolist()
        self.most_rows = -(-most_rows(size, n, self.of_all) // ROOM) * ROOM
        self.routes = self.route()

    def route(self) -> ExpertRoutes:
        """Find the places of this rank, with an all-gather."""
        return ops.route_experts(self.comm, self.chosen, self.gates, experts=self.each, most_rows=self.most_rows)


def draw_experts(size: ExpertSize, ranks: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the experts of all ranks' tokens. Returns weights and numbers of experts, [N * T, K]."""
    likes = torch.arange(1, size.experts + 1, device=draw.device).float().pow(-size.skew)
    shape = ranks * size.tokens, size.experts
    # The largest of exponential variates, each over its weight: draws without putting back.
    keys = likes / torch.empty(shape, device=draw.device).exponential_(generator=draw)
    weights, chosen = keys.topk(size.top_k)
    return weights, chosen


def travelling(size: ExpertSize, ranks: int, chosen: Tensor) -> Tensor:
    """Return the mask of the tokens of each rank that travel to another, [N, T, N]."""
    homes = chosen[:, :, None] // (size.experts // ranks)
    return (homes == torch.arange(ranks, device=chosen.device)).any(1).view(ranks, size.tokens, ranks)


def most_rows(size: ExpertSize, ranks: int, chosen: Tensor) -> int:
    """Return the rows of the experts of the rank that has the most."""
    homes = chosen // (size.experts // ranks)
    return max(int((homes == rank).sum()) for rank in range(ranks))


class Known:
    """Split sizes and indices of exchanges whose rows lie one after the other, without empty places."""

    def __init__(self, routed: RoutedTokens) -> None:
        rank, routes = routed.comm.rank, routed.routes
        self.sent, self.came = routed.splits[rank], [row[rank] for row in routed.splits]
        leaving = routes.leaving.flatten()
        is_sent, did_arrive = leaving >= 0, routed.arriving[:, :, rank].flatten()
        self.leaving = leaving[is_sent][:, None].contiguous()
        """Tokens in the order in which they leave."""
        self.did_arrive = did_arrive
        """Mask of the places at which tokens arrive."""
        places_sent, places_came = (mask.cumsum(0).int() - 1 for mask in (is_sent, did_arrive))
        total = int(routes.ends[-1])
        self.rows = places_came[routes.rows[:total].long()].contiguous()
        """Row that arrived, of each expert's row."""
        self.results = routes.results[did_arrive].contiguous()
        """Experts' rows of each row that arrived."""
        self.gates = routes.gates[did_arrive].contiguous()
        returned = routes.returned.long()
        self.returned = torch.where(returned >= 0, places_sent[returned.clamp(min=0)], -1).contiguous()
        """Rows that come back for each token."""
        self.bags_of_results = Bags(self.results, self.gates)
        self.bags_of_returned = Bags(self.returned)
        self.bags_of_all = Bags(routes.results, routes.gates)


class Bags:
    """Terms of sums for ``embedding_bag``, PyTorch's weighted sum of rows in one kernel."""

    def __init__(self, terms: Tensor, factors: Tensor | None = None) -> None:
        mask = terms >= 0
        self._terms = terms[mask].contiguous()
        self._offsets = functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(terms.dtype)
        self._factors = None if factors is None else factors[mask].contiguous()
        self._cast: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._factors is not None and self._cast is None:
            self._cast = self._factors.to(x.dtype)
        options: dict[str, Any] = {"mode": "sum", "per_sample_weights": self._cast, "include_last_offset": True}
        return functional.embedding_bag(self._terms, x, self._offsets, **options)


Step = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertWay:
    """Functions of a way.

    Attributes:
        dispatch: from tokens to rows of experts.
        combine: from results of experts to tokens.
        there: from tokens to some of the rows that arrive, once for each rank.
        back: from ``rows``, sums over the experts of a rank, to tokens.
        rows: rows that travel back, where this way has them.
    """

    dispatch: Step
    combine: Step
    there: Step
    back: Step
    rows: Tensor


def ways_of(routed: RoutedTokens, group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, ExpertWay]:
    """Return the ways by name; each has buffers of its own."""
    comm, size, routes = routed.comm, routed.size, routed.routes
    known = Known(routed)

    sent, arrived = sum(known.sent), sum(known.came)
    most = max(map(sum, (*routed.splits, *zip(*routed.splits, strict=True))))

    def pack(x: Tensor) -> Tensor:
        return quantized_rows(x) if size.float8 else x

    def copied(came: Tensor, rows: Tensor) -> Tensor:
        """Copy rows that arrived for each expert."""
        return dequantized_rows(came, rows, size.hidden, dtype) if size.float8 else sum_rows(came, rows)

    def indexed(came: Tensor, rows: Tensor) -> Tensor:
        """Do the same by PyTorch, which has nothing of the kind for float8."""
        return copied(came, rows) if size.float8 else came[rows.flatten()]

    packed = pack(torch.zeros(1, size.hidden, dtype=dtype, device=routed.device))
    came, gathered = (packed.new_empty(count, packed.shape[1]) for count in (arrived, len(routes.leaving)))
    back, returned = (
        torch.empty(count, size.hidden, dtype=dtype, device=routed.device) for count in (sent, size.tokens)
    )
    own_sent, own_came = (comm.empty(most, packed.shape[1], dtype=packed.dtype)[:count] for count in (sent, arrived))
    own_results, own_back = (comm.empty(most, size.hidden, dtype=dtype)[:count] for count in (arrived, sent))
    leaving, of_rows = known.leaving.flatten(), routes.rows[: len(known.rows)].contiguous()
    wire = torch.float8_e4m3fn if size.float8 else None

    def there(x: Tensor) -> Tensor:
        dist.all_to_all_single(came, x, known.came, known.sent, group=group)
        return came

    def again(x: Tensor) -> Tensor:
        dist.all_to_all_single(back, x, known.sent, known.came, group=group)
        return back

    def gather(x: Tensor) -> Tensor:
        all_gather(gathered, pack(x), group=group)
        return indexed(gathered, of_rows)

    def scatter(results: Tensor) -> Tensor:
        reduce_scatter(returned, known.bags_of_all(results), group=group)
        return returned

    def dispatch_routed(x: Tensor) -> Tensor:
        latest[0] = routed.route()
        return ops.dispatch_tokens(comm, x, latest[0], wire=wire)

    def sampled(came: Tensor, places: Tensor) -> Tensor:
        some = came[places]
        return some.view(torch.float8_e4m3fn)[:, : size.hidden].float() if size.float8 else some

    def rows_by_operator(x: Tensor, terms: Tensor) -> Tensor:
        return ops.all_to_all_rows(comm, x, routes.counts, most_rows=len(terms), terms=terms)

    # One row of each place: zeros where nobody has asked for the token.
    draw = torch.Generator(routed.device).manual_seed(40 + comm.rank)
    shape = len(routes.leaving), size.hidden
    padded = torch.empty(shape, dtype=dtype, device=routed.device).normal_(generator=draw)
    padded[~known.did_arrive] = 0
    compact = padded[known.did_arrive]
    in_place = torch.where(known.did_arrive, torch.arange(len(padded), device=routed.device, dtype=torch.int32), -1)[
        :, None
    ]
    places = known.did_arrive.nonzero()[:, 0]
    some = torch.arange(0, arrived, max(1, arrived // SAMPLED), device=routed.device)
    latest = [routes]

    def all_reduced(results: Tensor) -> Tensor:
        reduce_scatter(returned, results, group=group)
        return returned

    def back_by_copies(results: Tensor) -> Tensor:
        options: dict[str, Any] = {"output_split_sizes": known.sent, "input_split_sizes": known.came}
        comm.all_to_all(own_back, results, **options)
        return sum_rows(own_back, known.returned)

    def gather_rows(x: Tensor) -> Tensor:
        all_gather(gathered, pack(x), group=group)
        return sampled(gathered, places[some])

    def send_by_copies(x: Tensor) -> Tensor:
        sum_rows(pack(x), known.leaving, out=own_sent)
        options: dict[str, Any] = {"output_split_sizes": known.came, "input_split_sizes": known.sent}
        comm.all_to_all(own_came, own_sent, **options)
        return own_came

    operators = ExpertWay(
        lambda x: ops.dispatch_tokens(comm, x, routes, wire=wire),
        lambda results: ops.combine_tokens(comm, results, routes),
        lambda x: sampled(rows_by_operator(pack(x), routes.leaving), places[some]),
        lambda rows: sum_rows(rows_by_operator(rows, in_place), routes.returned),
        padded,
    )
    return {
        "nccl": ExpertWay(
            lambda x: indexed(there(pack(x)[leaving]), known.rows),
            lambda results: known.bags_of_returned(again(known.bags_of_results(results))),
            lambda x: sampled(there(pack(x)[leaving]), some),
            lambda rows: known.bags_of_returned(again(rows)),
            compact,
        ),
        "nccl, our sums": ExpertWay(
            lambda x: copied(there(sum_rows(pack(x), known.leaving)), known.rows),
            lambda results: sum_rows(again(sum_rows(results, known.results, known.gates)), known.returned),
            lambda x: sampled(there(sum_rows(pack(x), known.leaving)), some),
            lambda rows: sum_rows(again(rows), known.returned),
            compact,
        ),
        "nccl, gathered": ExpertWay(gather, scatter, gather_rows, all_reduced, padded),
        "copies": ExpertWay(
            lambda x: copied(send_by_copies(x), known.rows),
            lambda results: back_by_copies(sum_rows(results, known.results, known.gates, out=own_results)),
            lambda x: sampled(send_by_copies(x), some),
            back_by_copies,
            own_results.copy_(compact) if size.part == ROWS_BACK else own_results,
        ),
        "operators": operators,
        "operators, routed": dataclasses.replace(
            operators, dispatch=dispatch_routed, combine=lambda results: ops.combine_tokens(comm, results, latest[0])
        ),
    }


_TINY = ExpertSize(tokens=6, hidden=16, inner=8, experts=12, top_k=3, skew=0.5)
PARTS = LAYER, DISPATCH, COMBINE, ROWS_THERE, ROWS_BACK
SIZES = {
    "tiny": _TINY,
    "tiny, float8": dataclasses.replace(_TINY, float8=True),
    "tiny, rows there, float8": dataclasses.replace(_TINY, part=ROWS_THERE, float8=True),
    **{f"tiny, {part}": dataclasses.replace(_TINY, part=part) for part in PARTS[1:]},
    **{
        f"{tokens} tokens{'' if part == LAYER else f', {part}'}": ExpertSize(tokens, part=part)
        for tokens, part in itertools.product((128, 4096), PARTS)
    },
    **{
        f"{tokens} tokens, {part}, float8": ExpertSize(tokens, part=part, float8=True)
        for tokens, part in itertools.product((128, 4096), (DISPATCH, ROWS_THERE))
    },
    "4096 tokens, float8": ExpertSize(4096, float8=True),
    "4096 tokens, skewed": ExpertSize(4096, skew=0.5),
}
"""Parameters by name."""


def prepare(size: ExpertSize, group: dist.ProcessGroup, comm: Communicator, device: torch.device) -> Prepared:
    """Make the steps of a size; collective."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    routed = RoutedTokens(size, comm, device)
    draw = torch.Generator(device).manual_seed(10 + comm.rank)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=scale, generator=draw)

    x, total = values(size.tokens, size.hidden), int(routed.routes.ends[-1])
    results = values(len(routed.routes.rows), size.hidden)
    ways = ways_of(routed, group, dtype)
    steps: dict[str, Callable[[], Tensor]] = {}
    if size.part == LAYER:
        up = values(routed.each, 2 * size.inner, size.hidden, scale=size.hidden**-0.5)
        down = values(routed.each, size.hidden, size.inner, scale=size.inner**-0.5)

        def compute(rows: Tensor) -> Tensor:
            gate, other = functional.grouped_mm(rows, up.transpose(1, 2), offs=routed.routes.ends).chunk(2, -1)
            inner = functional.silu(gate) * other
            return functional.grouped_mm(inner, down.transpose(1, 2), offs=routed.routes.ends)

        def layer(way: ExpertWay) -> Tensor:
            return way.combine(compute(way.dispatch(x)))

        steps = {name: functools.partial(layer, way) for name, way in ways.items()}
        steps["none"] = lambda: compute(results)
    elif size.part == DISPATCH:
        steps = {name: functools.partial(lambda way: way.dispatch(x)[:total], way) for name, way in ways.items()}
    else:
        del ways["operators, routed"]  # which routes before it dispatches
        for name, way in ways.items():
            steps[name] = {
                COMBINE: lambda way=way: way.combine(results),
                ROWS_THERE: lambda way=way: way.there(x),
                ROWS_BACK: lambda way=way: way.back(way.rows),
            }[size.part]
    return Prepared(
        {name: torch.no_grad()(step) for name, step in steps.items()},
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
        units=comm.world_size * size.tokens,
        facts=facts_of(routed, dtype),
    )


def predicted_us(size: ExpertSize, machine: Machine) -> Mapping[str, float]:
    """See :class:`EndToEndWorkload`; other tokens are drawn than are measured. Of the kernels that find routes the
    model has none, and it takes those of PyTorch that sum rows for as fast as memory.
    """
    n = machine.gpus
    _, chosen = draw_experts(size, n, torch.Generator().manual_seed(3))
    counts, rows = travelling(size, n, chosen).sum(1), most_rows(size, n, chosen)
    sent, came = (int(counts.sum(dim).max()) for dim in (1, 0))
    apart = counts - counts.diag().diag()
    # Rows of an even exchange of which as many leave or reach a GPU.
    even = max(int(apart.sum(dim).max()) for dim in (0, 1)) * n // (n - 1)
    row, wire = size.hidden * torch.bfloat16.itemsize, size.wire_bytes(torch.bfloat16.itemsize)
    packing = moved_us(machine, size.tokens * (row + wire)) if size.float8 else 0.0

    def by_parts(there: float, copied_rows: int, summed_rows: int, back: float) -> float:
        """Return the time of the part: what travels, and the rows that are copied for experts and summed."""
        copy = moved_us(machine, copied_rows * wire + rows * row)
        total = moved_us(machine, rows * row + summed_rows * row)
        parts = {DISPATCH: packing + there + copy, COMBINE: total + back}
        parts |= {LAYER: sum(parts.values()), ROWS_THERE: packing + there, ROWS_BACK: back}
        return parts[size.part]

    def by_exchange(exchange_us: Callable[[Machine, Kind, int], float], gathers: bool = True) -> float:
        gathering = moved_us(machine, 2 * sent * wire) if gathers else 0.0
        there, back = (exchange_us(machine, Kind.ALL_TO_ALL, even * nbytes) for nbytes in (wire, row))
        return by_parts(gathering + there, came, came, back + moved_us(machine, (sent + size.tokens) * row))

    every = n * size.tokens
    found = {
        "nccl": by_exchange(library_us),
        "nccl, our sums": by_exchange(library_us),
        "nccl, gathered": by_parts(
            library_us(machine, Kind.ALL_GATHER, every * wire),
            *(came, every, library_us(machine, Kind.REDUCE_SCATTER, every * row)),
        ),
        "copies": by_exchange(ours_us),
    }
    if machine.kernels is not None:
        found["operators"] = by_exchange(lambda *call: own_gang(*call, captured=True).alone_us, gathers=False)
    return found


def facts_of(routed: RoutedTokens, dtype: torch.dtype) -> dict[str, float]:
    """Return bytes by which times become GB/s: those that leave a GPU, and all that arrive, as DeepEP counts them."""
    rank, size, splits = routed.comm.rank, routed.size, routed.splits
    row, wire = size.hidden * dtype.itemsize, size.wire_bytes(dtype.itemsize)
    leaving = sum(count for peer, count in enumerate(splits[rank]) if peer != rank)
    arriving = sum(line[rank] for line in splits)
    parameters = 3 * size.hidden * size.inner * routed.each
    return {
        "dispatch_leaving_bytes": leaving * wire,
        "dispatch_arriving_bytes": arriving * wire,
        "combine_leaving_bytes": (arriving - splits[rank][rank]) * row,
        "expert_rows": float(routed.routes.ends[-1]),
        "experts_of_a_rank": routed.each,
        "parameter_bytes": parameters * dtype.itemsize,
    }


WORKLOAD = EndToEndWorkload("experts", "tokens", SIZES, prepare, predicted_us)
