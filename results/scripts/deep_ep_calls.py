"""DeepEP's calls by Sidelane on GPUs: bytes first, then times in graphs by number of compute units, and their parts.

    torchrun --nproc-per-node 2 results/scripts/deep_ep_calls.py

Tokens of 7,168 elements with 8 of 256 experts each: 4,096 of a rank by ``dispatch`` and ``combine``, 128 by the
low-latency calls. Graphs of 5 or 20 calls, the median of five samples, the slowest rank. One GPU runs it, too, to see
that all of it works there.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidelane import deep_ep
from sidelane.ops.expert_slots import assign_slots, spread_float8, spread_rows
from sidelane.ops.experts import exchange_rows, sum_rows
from sidelane.ops.rows import float8_and_scales, quantized_rows

HIDDEN, K, EXPERTS, LINK_GBPS = 7168, 8, 256, 391
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
Calls = dict[str, Callable[[], Any]]


def say(text: str) -> None:
    """Print a line of rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def measure(calls: Calls, each: int) -> None:
    """Print the time of each call, in a graph of ``each`` of them; graphs are replayed in turns."""
    graphs, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=torch.cuda.current_stream()):
            for _ in range(each):
                call()
        graphs[name].replay()
    for _ in range(5):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end) * 1e3 / each / 2)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    for name, found in times.items():
        say(f"  {name:58s} {statistics.median(found):8.2f} us")


def drawn(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the experts of all ranks' tokens, the tokens and the gates, alike on all ranks."""
    draw = torch.Generator().manual_seed(5)
    chosen = torch.rand(dist.get_world_size(), tokens, EXPERTS, generator=draw).topk(K).indices
    x = torch.randn(*chosen.shape[:2], HIDDEN, generator=draw).bfloat16()
    return chosen.to(DEVICE), x.to(DEVICE), torch.rand(chosen.shape, generator=draw).to(DEVICE)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def close_float8(values: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether scales are those that are wanted, or the next number, and values times scales are the nearest."""
    places = (scales.contiguous().view(torch.int32) - wanted.contiguous().view(torch.int32)).abs()
    scale = scales.repeat_interleave(128, 1)[:, : x.shape[1]]
    off = (values.float() * scale - x.float()).abs() / scale
    exponent = (x.float() / scale).abs().clamp(min=2.0**-6).log2().floor()
    return bool((places <= 1).all() and (off <= (0.5 + 1e-4) * torch.exp2(exponent - 3)).all())


def high_throughput(buffer: deep_ep.Buffer, tokens: int = 4096) -> None:
    """Check and time ``dispatch`` and ``combine`` by a handle."""
    chosen, xs, gates = drawn(tokens)
    n, rank, comm = buffer.group_size, buffer.rank, buffer.comm
    x, own = xs[rank], chosen[rank]
    names = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank"
    layout = dict(zip(names, buffer.get_dispatch_layout(own, EXPERTS), strict=False))
    small = float8_and_scales(x)
    rows, *_, handle, _ = buffer.dispatch(x, topk_idx=own, topk_weights=gates[rank], **layout)
    (values, scales), *_ = buffer.dispatch(small, handle=handle)
    y = buffer.combine(rows, handle)[0]
    goes = (chosen[..., None] // (EXPERTS // n) == torch.arange(n, device=DEVICE)).any(2)
    came = xs[goes[..., rank]]
    wanted = float8_and_scales(came)
    sums = (x.float() * goes[rank].sum(1, keepdim=True)).bfloat16()
    right = same(rows, came), same(values, wanted[0]) and same(scales, wanted[1]), same(y, sums)
    away = int(goes[rank].sum() - goes[rank, :, rank].sum())
    say(f"{tokens} tokens, right in bfloat16, in float8 and back: {right}; {away} rows leave")
    for name, width in (("bfloat16", 2 * HIDDEN), ("float8 with scales", HIDDEN + 4 * HIDDEN // 128)):
        say(f"  floor in {name}: {away * width / LINK_GBPS / 1e3:.1f} us at {LINK_GBPS} GB/s")
    calls: Calls = {}
    for units in (132, 128, 100, 64, 32, 24, 16):
        config = deep_ep.Config(units)
        calls[f"dispatch, bfloat16, {units} SMs"] = lambda c=config: buffer.dispatch(x, handle=handle, config=c)
        calls[f"dispatch, float8, {units} SMs"] = lambda c=config: buffer.dispatch(small, handle=handle, config=c)
        calls[f"combine, bfloat16, {units} SMs"] = lambda c=config: buffer.combine(rows, handle, config=c)
    result, buffered = torch.empty_like(rows), torch.zeros_like(rows)
    calls["part: bfloat16 to the buffer"] = lambda: exchange_rows(
        comm, x, handle.counts, handle.most_rows, lambda came: came, terms=handle.leaving, units=128
    )
    calls["part: rows back, without own"] = lambda: exchange_rows(
        comm, rows, handle.counts_back, handle.most_rows, lambda came: came, terms=handle.back, units=128
    )
    calls["part: sums"] = lambda: sum_rows(buffered, handle.returned, own=(rows, handle.kept))
    calls["part: copy of half of the rows"] = lambda: result[: len(rows) // 2].copy_(buffered[: len(rows) // 2])
    calls["part: quantization"] = lambda: quantized_rows(x)
    measure(calls, 5)


def low_latency(buffer: deep_ep.Buffer, tokens: int = 128) -> None:
    """Check and time the low-latency calls. In float8 a scale may be a place off, and a value half a step of float8
    with it: kernels divide in another way than PyTorch does.
    """
    chosen, xs, gates = drawn(tokens)
    n, rank, comm = buffer.group_size, buffer.rank, buffer.comm
    x, own, gate, each = xs[rank], chosen[rank], gates[rank], EXPERTS // n
    rows, counts, handle, *_ = buffer.low_latency_dispatch(x, own, tokens, EXPERTS, use_fp8=False)
    (values, scales), *_ = buffer.low_latency_dispatch(x, own, tokens, EXPERTS)
    right = [True, True]
    for expert in range(each):
        came = xs[(chosen == rank * each + expert).any(-1)]
        wanted, count = float8_and_scales(came), int(counts[expert])
        right[0] &= count == len(came) and same(rows[expert, :count], came)
        right[1] &= close_float8(values[expert, :count], scales[expert, :count], came, wanted[1])
    y = buffer.low_latency_combine(rows, own, gate, handle)[0]
    wanted = x.double() * gate.double().sum(1, keepdim=True)
    off = float((y.double() - wanted).abs().max() / wanted.abs().max())
    say(f"{tokens} tokens, right in bfloat16 and in float8: {tuple(right)}; sums off by {off:.1e} of the largest")
    say(f"  floor in bfloat16: {tokens * 2 * HIDDEN / LINK_GBPS / 1e3:.1f} us; routing is part of every call")
    few = own.int()
    everyone = few.new_empty(n * tokens, K)
    comm.all_gather(everyone, few)
    _, leaving, returned, results = assign_slots(comm, few, everyone, each)
    slots = torch.full((n, n), tokens, dtype=torch.int32, device=DEVICE)
    packed, wide = quantized_rows(x), torch.zeros(n * tokens, HIDDEN, dtype=x.dtype, device=DEVICE)
    narrow = packed.new_zeros(n * tokens, packed.shape[1])

    def sends(part: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: exchange_rows(comm, part, slots, n * tokens, lambda c: c, terms=leaving, alike=(each, K))

    measure(
        {
            "low_latency_dispatch, bfloat16": lambda: buffer.low_latency_dispatch(
                x, own, tokens, EXPERTS, use_fp8=False
            ),
            "low_latency_dispatch, float8": lambda: buffer.low_latency_dispatch(x, own, tokens, EXPERTS),
            "low_latency_combine": lambda: buffer.low_latency_combine(rows, own, gate, handle),
            "part: all-gather of experts": lambda: comm.all_gather(everyone, few),
            "part: slots": lambda: assign_slots(comm, few, everyone, each),
            "part: quantization": lambda: quantized_rows(x),
            "part: rows there, bfloat16": sends(x),
            "part: rows there, float8": sends(packed),
            "part: to slots, bfloat16": lambda: spread_rows(wide, results, each),
            "part: to slots, float8": lambda: spread_float8(narrow, results, each, HIDDEN),
            "part: sums": lambda: sum_rows(wide, returned),
        },
        20,
    )


def main() -> None:
    """Measure both forms, each with a buffer of its own."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo")
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        for part in (high_throughput, low_latency):
            buffer = deep_ep.Buffer(dist.group.WORLD)
            part(buffer)
            say(f"  {buffer.comm.memory()}")
            dist.barrier()
            buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
