"""DeepEP's calls by Sidelane, against a plain reference that knows the tokens of all ranks."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_ops import Draws, check_close, draws_of, fused
from marks import long
from on_ranks import on_ranks

from sidelane import deep_ep
from sidelane.errors import MismatchError, PeerError, UnavailableError

LAYOUT = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank"
"""Names of the results of ``get_dispatch_layout``."""


@contextmanager
def buffer_of(group: dist.ProcessGroup, **options: Any) -> Iterator[deep_ep.Buffer]:
    """A buffer on the device of the test."""
    buffer = deep_ep.Buffer(group, device=torch.get_default_device(), **options)
    try:
        yield buffer
    finally:
        buffer.destroy()


class Drawn:
    """Tokens of all ranks with their experts and gates, drawn alike on all ranks; the CPU has them.

    ``tokens``: for each rank, of which some may have none; ``experts``: [T, k], of which some are masked.
    """

    def __init__(self, draws: Draws, n: int, columns: int, dtype: torch.dtype, most: int) -> None:
        choice = draws.sizes.choice
        self.each, self.dtype = choice((1, 2, 3)), dtype
        self.experts = n * self.each
        self.k = min(choice((1, 2, 3)), self.experts)
        sizes = [choice((0, 1, most // 2, most)) for _ in range(n)]
        popular = choice((range(self.experts), range(self.each), range(self.experts - 1, self.experts)))
        self.x = [draws.normal(size, columns).to(dtype) for size in sizes]
        self.gates = [draws.normal(size, self.k) for size in sizes]
        self.chosen = [
            torch.tensor([self._experts(draws, popular) for _ in range(size)], dtype=torch.int64, device="cpu").view(
                size, self.k
            )
            for size in sizes
        ]

    def _experts(self, draws: Draws, popular: range) -> list[int]:
        some = draws.sizes.sample(list(popular), min(self.k, len(popular)))
        some += [-1] * (self.k - len(some))
        if draws.sizes.random() < 0.2:
            some[draws.sizes.randrange(self.k)] = -1
        draws.sizes.shuffle(some)
        return some

    def on(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, experts and gates of a rank, on its device."""
        return self.x[rank].to(device), self.chosen[rank].to(device), self.gates[rank].to(device)

    def arriving(self, rank: int) -> list[tuple[int, int]]:
        """Rank and number of each token that a rank gets, in their order."""
        return [
            (sender, token)
            for sender, chosen in enumerate(self.chosen)
            for token, row in enumerate(chosen.tolist())
            if any(expert >= 0 and expert // self.each == rank for expert in row)
        ]

    def homes(self, rank: int) -> torch.Tensor:
        """Number of ranks to which each token of a rank goes, [T, 1]."""
        rows = self.chosen[rank].tolist()
        counts = [[len({one // self.each for one in row if one >= 0})] for row in rows]
        return torch.tensor(counts, device="cpu").view(-1, 1)


def float8_and_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8 and the scale of each 128 elements, of which the largest becomes 448, part by part."""
    values, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), -(-x.shape[1] // 128)).float()
    for group, part in enumerate(x.float().split(128, 1)):
        largest = part.abs().max(1, keepdim=True).values.clamp(min=1e-4)
        values[:, 128 * group : 128 * group + part.shape[1]] = (part * (448 / largest)).to(torch.float8_e4m3fn)
        scales[:, group] = largest[:, 0] / 448
    return values, scales


def layout_of(buffer: deep_ep.Buffer, drawn: Drawn, chosen: torch.Tensor, **options: Any) -> dict[str, Any]:
    """The layout, checked, as arguments of ``dispatch``."""
    per_rank, none, per_expert, is_in, event = buffer.get_dispatch_layout(chosen, drawn.experts, **options)
    event.current_stream_wait()
    assert none is None and per_rank.dtype == per_expert.dtype == torch.int32 and is_in.dtype == torch.bool
    rows = chosen.tolist()
    expected = [[any(e >= 0 and e // drawn.each == r for e in row) for r in range(buffer.group_size)] for row in rows]
    assert is_in.tolist() == expected
    assert per_rank.tolist() == [sum(column) for column in zip(*expected, strict=True)] or not rows
    assert per_expert.tolist() == [sum(row.count(expert) for row in rows) for expert in range(drawn.experts)]
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in}


@on_ranks(1, 2, long(3), interpreted=True, calls=4, most=40)
@on_ranks(long(8), interpreted=True, timeout_s=300, calls=3, most=40)
@on_ranks(gpu=fused, timeout_s=240, calls=24, most=1500)
def test_tokens_are_dispatched_and_combined(group: dist.ProcessGroup, calls: int, most: int) -> None:
    """Any numbers of tokens, with and without float8, again by a handle, and back: bytes of a reference."""
    with buffer_of(group) as buffer:
        n, rank, draws, device = buffer.group_size, buffer.rank, draws_of(buffer.comm), buffer.comm.device
        for number in range(calls):
            dtype = (torch.bfloat16, torch.float32, torch.float16)[number % 3]
            drawn = Drawn(draws, n, *((8, dtype, 9), (130, dtype, 70), (600, dtype, most))[number % 3])
            x, chosen, gates = drawn.on(rank, device)
            is_async, is_quantized = draws.sizes.random() < 0.5, draws.sizes.random() < 0.5
            parts = [float8_and_scales(part) for part in drawn.x]
            given: Any = tuple(part.to(device) for part in parts[rank]) if is_quantized else x
            draws.late()
            options = {"async_finish": is_async, "previous_event": deep_ep.Buffer.capture()}
            layout = layout_of(buffer, drawn, chosen, **options)
            found, experts, weights, numbers, handle, event = buffer.dispatch(
                given, topk_idx=chosen, topk_weights=gates, expert_alignment=4, **layout, **options
            )
            few = deep_ep.Config(num_sms=draws.sizes.choice((1, 2, 64)))
            again, *nothing, other_event = buffer.dispatch(given, handle=handle, config=few, async_finish=is_async)
            assert nothing == [None] * 4 and handle is not None and experts is not None and weights is not None
            event.current_stream_wait()
            other_event.current_stream_wait()
            came = drawn.arriving(rank)
            for rows in (found, again):
                if is_quantized:
                    for index, part in enumerate(rows):
                        expected = [parts[sender][index][token] for sender, token in came]
                        assert part.is_contiguous() and part.dtype == given[index].dtype
                        assert torch.equal(bits(part), bits(torch.stack(expected)) if came else bits(part[:0]))
                else:
                    assert rows.is_contiguous() and len(rows) == len(came) and rows.dtype == dtype
                    for row, (sender, token) in zip(rows.cpu(), came, strict=True):
                        assert torch.equal(row, drawn.x[sender][token]), (number, sender, token)
            local = [[one - rank * drawn.each for one in drawn.chosen[s][t].tolist()] for s, t in came]
            local = [[one if 0 <= one < drawn.each else -1 for one in row] for row in local]
            assert experts.tolist() == local and experts.dtype == torch.int64
            counted = [sum(row.count(one) for row in local) for one in range(drawn.each)]
            assert numbers == [-(-count // 4) * 4 for count in counted]
            for row, (sender, token), own in zip(weights.cpu(), came, local, strict=True):
                wanted = torch.where(torch.tensor(own, device="cpu") >= 0, drawn.gates[sender][token], 0.0)
                assert torch.equal(row, wanted)
            results = torch.stack([drawn.x[s][t] for s, t in came]).to(device) if came else x[:0]
            y, sums, event = buffer.combine(results, handle, topk_weights=weights, async_finish=is_async, config=few)
            event.current_stream_wait()
            buffer.comm.synchronize()
            assert sums is not None and y.dtype == dtype
            check_close(y, drawn.x[rank].double() * drawn.homes(rank), number)
            masked = torch.where(drawn.chosen[rank] >= 0, drawn.gates[rank], 0.0)
            check_close(sums, masked.double(), number)
            assert torch.equal(buffer.combine(results, handle)[0], y)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, on the CPU."""
    return tensor.contiguous().cpu().view(torch.uint8)


@on_ranks(1, 2, long(3), interpreted=True, calls=4)
@on_ranks(long(8), interpreted=True, timeout_s=300, calls=3)
@on_ranks(gpu=fused, timeout_s=240, calls=40)
def test_tokens_go_to_slots_of_experts_and_back(group: dist.ProcessGroup, calls: int) -> None:
    """Low latency: rows, scales and numbers of each expert, and weighted sums, against a reference."""
    with buffer_of(group, low_latency_mode=True) as buffer:
        n, rank, draws, device = buffer.group_size, buffer.rank, draws_of(buffer.comm), buffer.comm.device
        for number in range(calls):
            dtype, columns, most = (torch.bfloat16, torch.float32)[number // 2 % 2], (8, 258)[number // 2 % 2], 6
            drawn = Drawn(draws, n, columns, dtype, most)
            x, chosen, gates = drawn.on(rank, device)
            is_quantized, is_async = number % 2 == 1, draws.sizes.random() < 0.5
            draws.late()
            rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, chosen, most, drawn.experts, use_fp8=is_quantized, async_finish=is_async,
                return_recv_hook=not is_async,
            )  # fmt: skip
            hook()
            event.current_stream_wait()
            buffer.comm.synchronize()
            assert counts.dtype == torch.int32
            values, scales = rows if is_quantized else (rows, None)
            assert values.shape == (drawn.each, n * most, columns) and values.is_contiguous()
            if scales is not None:
                assert scales.dtype == torch.float32 and scales.shape == (*values.shape[:2], -(-columns // 128))
                assert scales.stride(1) == 1 and values.dtype == torch.float8_e4m3fn
            results = torch.full((drawn.each, n * most, columns), float("nan"), dtype=dtype, device=device)
            for expert in range(drawn.each):
                own = rank * drawn.each + expert
                came = [
                    (s, t) for s, all_ in enumerate(drawn.chosen) for t, row in enumerate(all_.tolist()) if own in row
                ]
                assert counts[expert] == len(came)
                for slot, (sender, token) in enumerate(came):
                    wanted = drawn.x[sender][token]
                    if scales is None:
                        assert torch.equal(values[expert, slot].cpu(), wanted)
                    else:
                        small, scale = (part[0] for part in float8_and_scales(wanted[None]))
                        if device.type == "cpu":
                            assert torch.equal(bits(values[expert, slot]), bits(small))
                        # Quotients of a GPU's kernel may differ in the last place, and so may what is rounded.
                        torch.testing.assert_close(scales[expert, slot].cpu(), scale, rtol=1e-6, atol=0)
                        place = scale.repeat_interleave(128)[:columns]
                        wide = values[expert, slot].cpu().float() * place
                        torch.testing.assert_close(wide, wanted.float(), rtol=0.07, atol=float(place.max()) / 500)
                    results[expert, slot] = wanted.to(device) * (own + 1)
            out = torch.empty_like(x) if number % 2 else None
            y, event, hook = buffer.low_latency_combine(
                results, chosen, gates, handle, async_finish=is_async, return_recv_hook=not is_async, out=out
            )
            hook()
            event.current_stream_wait()
            buffer.comm.synchronize()
            assert out is None or y.data_ptr() == out.data_ptr()
            factor = torch.where(drawn.chosen[rank] >= 0, drawn.gates[rank] * (drawn.chosen[rank] + 1), 0.0)
            expected = drawn.x[rank].double() * factor.double().sum(1, keepdim=True)
            scale = float((drawn.x[rank].abs().amax(1, keepdim=True) * factor.abs().sum(1, keepdim=True)).max(
            )) if len(expected) else 1.0  # fmt: skip
            check_close(y, expected, number, scale=max(scale, 1e-3) * (2 if dtype == torch.bfloat16 else 1))


@on_ranks(gpu=fused, timeout_s=240)
def test_graphs_hold_calls_whose_routing_changes(group: dist.ProcessGroup) -> None:
    """Low latency with other experts in each replay, and a dispatch and a combine by a handle with other tokens."""
    with buffer_of(group) as buffer:
        n, most, columns = buffer.group_size, 8, 256
        draw = torch.Generator(buffer.comm.device).manual_seed(buffer.rank)
        x = torch.zeros(most, columns, dtype=torch.bfloat16)
        chosen, gates = torch.zeros(most, 2, dtype=torch.int64), torch.ones(most, 2)

        def fill() -> None:
            x.copy_(torch.randint(-4, 5, x.shape, generator=draw))
            chosen.copy_(torch.rand(most, 2 * n, generator=draw).topk(2).indices)

        def layer() -> torch.Tensor:
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, chosen, most, 2 * n, use_fp8=False)
            return buffer.low_latency_combine(rows, chosen, gates, handle)[0]

        fill()
        drawn = buffer.get_dispatch_layout(chosen, 2 * n)
        *_, handle, _ = buffer.dispatch(
            x, topk_idx=chosen, topk_weights=gates, **dict(zip(LAYOUT, drawn, strict=False))
        )
        homes = drawn[3].sum(1, keepdim=True)
        assert handle is not None

        def again() -> torch.Tensor:
            return buffer.combine(buffer.dispatch(x, handle=handle)[0], handle)[0]

        for call in (layer, again):
            call()
        buffer.comm.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            y, sums = layer(), again()
        for _ in range(5):
            graph.replay()
            buffer.comm.synchronize()
            torch.cuda.synchronize()
            assert torch.equal(y, 2 * x) and torch.equal(sums, homes * x)
            fill()
        graph.reset()


@on_ranks(2, interpreted=True)
@on_ranks(gpu=fused)
def test_a_handle_needs_no_more_than_the_dispatch_that_made_it(group: dist.ProcessGroup) -> None:
    """No memory: a graph captures the next dispatch at once. Tokens have an odd number of experts."""
    with buffer_of(group) as buffer:
        n, rank = buffer.group_size, buffer.rank
        xs, gates = torch.arange(n * 80.0).view(n, 5, 16), torch.rand(5, 3)
        chosen = torch.arange(15).view(5, 3) % (3 * n)
        options = dict(zip(LAYOUT, buffer.get_dispatch_layout(chosen, 3 * n), strict=False))
        for of in (lambda x: (x.bfloat16(),), float8_and_scales):
            given = of(xs[rank])
            x: Any = given if len(given) > 1 else given[0]
            found, experts, _, _, handle, _ = buffer.dispatch(x, topk_idx=chosen, topk_weights=gates, **options)
            used = buffer.comm.memory().used
            if gates.is_cuda:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    again = buffer.dispatch(x, handle=handle)[0]
                graph.replay()
            else:
                again = buffer.dispatch(x, handle=handle)[0]
            assert buffer.comm.memory().used == used and experts is not None
            assert experts.tolist() == [[0, 1, 2]] * len(experts)
            for part in range(len(given)):
                expected = torch.cat([of(each)[part][rank::n] for each in xs])
                for rows in (found, again):
                    assert torch.equal(bits(rows[part] if len(given) > 1 else rows), bits(expected))


class FilledLate(deep_ep.EventOverlap):
    """The end of work that gives columns of matrices their values: on a GPU on a stream of its own, and late."""

    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__()
        self.values, self.given = values, [torch.zeros_like(each.t().contiguous()).t() for each in values]
        if values[0].is_cuda:
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                self.fill()
            self.event = stream.record_event()

    def fill(self) -> None:
        torch._foreach_copy_(self.given, list(self.values))

    def current_stream_wait(self) -> None:
        super().current_stream_wait()
        if self.event is None:
            self.fill()


@on_ranks(2, interpreted=True)
@on_ranks(gpu=fused)
def test_tensors_are_read_behind_previous_event(group: dist.ProcessGroup) -> None:
    """Also those of which a copy is sent: columns of a matrix in place of rows."""
    with buffer_of(group) as buffer:
        n, rank = buffer.group_size, buffer.rank
        values, gates = torch.arange(24.0).view(3, 8), torch.rand(3, 2)
        chosen = torch.stack([torch.arange(3) % n, torch.full((3,), -1)], 1)
        layout = buffer.get_dispatch_layout(chosen, n)
        options: dict[str, Any] = {"topk_idx": chosen, "topk_weights": gates, **dict(zip(LAYOUT, layout, strict=False))}
        expected = torch.cat([values[rank::n]] * n)
        for is_async in (False, True):
            late = FilledLate(values.bfloat16())
            found, _, weights, _, handle, end = buffer.dispatch(
                late.given[0], previous_event=late, async_finish=is_async, **options
            )
            end.current_stream_wait()
            assert torch.equal(found.float(), expected) and weights is not None and handle is not None
            late = FilledLate(values.to(torch.float8_e4m3fn))
            (found, _), *_, end = buffer.dispatch(
                (late.given[0], torch.ones(3, 1)), handle, previous_event=late, async_finish=is_async
            )
            end.current_stream_wait()
            assert torch.equal(found.float(), expected.to(found.dtype).float())
            late = FilledLate(expected, weights)
            y, sums, end = buffer.combine(
                late.given[0], handle, late.given[1], previous_event=late, async_finish=is_async
            )
            end.current_stream_wait()
            assert torch.equal(y, values) and sums is not None and torch.equal(sums[:, 0], gates[:, 0])


@on_ranks(2)
def test_a_buffer_of_cpu_ranks_says_that_it_needs_the_interpreter(group: dist.ProcessGroup) -> None:
    with pytest.raises(UnavailableError, match=r"^Buffer: .* set TRITON_INTERPRET=1"):
        deep_ep.Buffer(group, device="cpu")


X = torch.zeros(3, 8)
CHOSEN = torch.tensor([[0, 1], [1, -1], [-1, -1]])
SLOTS = {"topk_idx": CHOSEN, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 2}
STATS = "cumulative_local_expert_recv_stats"
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (
        "get_dispatch_layout",
        {"topk_idx": CHOSEN.int(), "num_experts": 3},
        "num_experts (value=3, allowed=multiples of 2)",
    ),
    ("get_dispatch_layout", {"topk_idx": CHOSEN.float(), "num_experts": 2}, "dtype of topk_idx (value=torch.float32"),
    ("dispatch", {"x": X}, "num_tokens_per_rank (value=NoneType, allowed=a tensor)"),
    ("dispatch", {"x": X, "num_worst_tokens": 8}, "num_worst_tokens, which is not supported here (value=8"),
    ("dispatch", {"x": X, "handle": (1, 2)}, "handle (value=tuple, allowed=DispatchHandle"),
    ("dispatch", {"x": X, "config": 20}, "config (value=int, allowed=DeepEpConfig)"),
    ("dispatch", {"x": (X, X)}, "dtype of values of x (value=torch.float32"),
    ("dispatch", {"x": (X.to(torch.float8_e4m3fn), X[:2])}, "shapes of values and scales"),
    ("dispatch", {"x": X, "layout": (2, 3, 3), "topk_idx": CHOSEN}, "num_experts (value=3, allowed=multiples of 2)"),
    (
        "dispatch",
        {"x": X, "layout": (1, 2, 2), "topk_idx": CHOSEN, "topk_weights": X},
        "topk_idx and topk_weights (value=[(1,), (2, 2), (3, 2), (3, 8)], allowed=[(2,), (3, 2), (3, 2), (3, 2)])",
    ),
    ("combine", {"x": X, "handle": None}, "handle (value=NoneType, allowed=DispatchHandle)"),
    ("combine", {"x": X, "bias": X, "handle": None}, "bias, which is not supported here (value=Tensor"),
    (
        "low_latency_dispatch",
        {"x": X, **SLOTS, "use_ue8m0": True},
        "use_ue8m0, which is not supported here (value=True",
    ),
    (
        "low_latency_dispatch",
        {"x": X[:2], **SLOTS},
        "equal numbers of tokens of x and topk_idx (value=2, 3, allowed=0..4)",
    ),
    (
        "low_latency_dispatch",
        {"x": torch.zeros(3, 7), **SLOTS},
        "columns of x in float8 (value=7, allowed=multiples of 2)",
    ),
    ("low_latency_combine", {"x": X, "topk_idx": CHOSEN, "topk_weights": X, "handle": 1}, "handle (value=int"),
    ("low_latency_dispatch", {"x": X, **SLOTS, STATS: CHOSEN[0].int()}, f"{STATS}, which is not supported here"),
]


@on_ranks(2, interpreted=True)
@pytest.mark.parametrize("number", range(0, len(MISTAKES), 4))
def test_mistakes_are_refused_on_every_rank(group: dist.ProcessGroup, number: int) -> None:
    """By one rank, whose peer learns of it, before a byte moves; the calls after it are right."""
    with buffer_of(group) as buffer:
        layout_names = "num_tokens_per_rank", "num_tokens_per_expert"
        for call, arguments, message in MISTAKES[number : number + 4]:
            given = dict(arguments)
            if "layout" in given:
                *sizes, tokens = given.pop("layout")
                given |= {
                    name: torch.zeros(size, dtype=torch.int32) for name, size in zip(layout_names, sizes, strict=True)
                }
                given["is_token_in_rank"] = torch.zeros(tokens, 2, dtype=torch.bool)
            if buffer.rank == 0:
                with pytest.raises((ValueError, TypeError)) as caught:
                    getattr(buffer, call)(**given)
                assert str(caught.value).startswith(f"{call}: ") and message in str(caught.value), caught.value
            elif call != "get_dispatch_layout":
                with pytest.raises(PeerError, match=call):
                    buffer.low_latency_dispatch(X, CHOSEN, 4, 2)
        (rows, _), counts, *_ = buffer.low_latency_dispatch(X, CHOSEN, 4, 2)
        assert counts.tolist() == [4 if buffer.rank else 2] and rows.shape == (1, 8, 8)


@on_ranks(2, interpreted=True)
def test_ranks_that_differ_are_told_apart(group: dist.ProcessGroup) -> None:
    with buffer_of(group) as buffer, pytest.raises((MismatchError, PeerError), match="low_latency_dispatch"):
        buffer.low_latency_dispatch(X, CHOSEN, 4 + buffer.rank, 2)


def test_what_one_node_does_not_have_is_refused_without_ranks() -> None:
    with pytest.raises(ValueError, match=r"Buffer: enable_shrink, .* \(value=True, allowed=None, False, 0\)"):
        deep_ep.Buffer(None, enable_shrink=True)
    with pytest.raises(ValueError, match=r"Buffer: num_rdma_bytes .* \(value=64, allowed=0\)"):
        deep_ep.Buffer(None, 0, 64)
    for make in (lambda: deep_ep.Config(0), lambda: deep_ep.Buffer.set_num_sms(-1)):
        with pytest.raises(ValueError, match=r"num_sms \(value=-?[01], allowed=1\.\.\)"):
            make()


def test_settings_follow_the_number_of_compute_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", 24)
    for config in (deep_ep.Buffer.get_dispatch_config(2), deep_ep.Buffer.get_combine_config(3)):
        assert config.num_sms == 24 and config.get_rdma_buffer_size_hint(64, 2) == 0
        assert config.get_nvl_buffer_size_hint(64, 2) == 2 * 256 * 64
    deep_ep.Buffer.set_num_sms(32)
    assert deep_ep.Buffer.num_sms == 32 == deep_ep.Buffer.get_dispatch_config(2).num_sms
    # Of 2 * 4 rows: bfloat16, and float8 with one scale, whose places are multiples of 16 bytes.
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 128, 2, 8) == 8 * (256 + 128 + 16)
    assert deep_ep.Buffer.capture().event is None or torch.cuda.is_available()


def test_programs_import_it_by_deep_eps_name_once_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the module from which Megatron-core imports its events; classes are the same by either name."""
    for name in [*filter(re.compile(r"deep_ep(\..*)?").fullmatch, sys.modules), "deep_ep"]:
        monkeypatch.setitem(sys.modules, name, deep_ep)
        monkeypatch.delitem(sys.modules, name)
    assert importlib.util.find_spec("deep_ep") is None
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for _ in range(2):
        deep_ep.install()
    assert importlib.import_module("deep_ep") is deep_ep and importlib.util.find_spec("deep_ep") is not None
    utils, buffer = importlib.import_module("deep_ep.utils"), importlib.import_module("deep_ep.buffer")
    assert buffer.DeepEpBuffer is deep_ep.Buffer and utils.EventOverlap is deep_ep.EventOverlap
    event = utils.EventOverlap(utils.EventHandle())
    event.current_stream_wait()
    assert (event.event is not None) == torch.cuda.is_available()
    monkeypatch.setitem(sys.modules, "deep_ep", torch)
    with pytest.raises(RuntimeError, match="another module deep_ep is imported already"):
        deep_ep.install()
