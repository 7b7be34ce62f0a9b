"""What ranks on virtual nodes do with a Sidelane process group: every collective that has steps for several nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist

import sidelane
from sidelane import config
from sidelane.integrations import ledger
from sidelane.integrations.nodes import topology

REDUCED = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
MOVED = (*REDUCED, torch.uint8, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn)
LEAST_BYTES = 4 << 10
"""Bytes from which on calls of :func:`moves` and :func:`reduces` take steps: generators of numbers are slow."""
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


@contextlib.contextmanager
def on_nodes(members: dist.ProcessGroup, layout: Sequence[int]) -> Iterator[dist.ProcessGroup]:
    """A Sidelane group in front of ``members``, whose ranks stand where ``layout`` says."""
    world = [9] * dist.get_world_size()
    for rank, node in zip(dist.get_process_group_ranks(members), layout, strict=True):
        world[rank] = node
    settings = dataclasses.replace(config.current(), timeout_s=30, virtual_nodes=tuple(world), beside=config.COMPUTE)
    ledger.reset()
    with config.override(settings):
        group = sidelane.wrap(members)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def random(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on all ranks that give the same seed."""
    seeded = torch.Generator("cpu").manual_seed(seed)
    is_number = dtype in (*REDUCED, torch.uint8)
    count = numel * (1 if is_number or dtype == torch.bool else dtype.itemsize)
    made = torch.randint(0, 256, (count,), generator=seeded, device="cpu", dtype=torch.int32)
    if dtype == torch.bool:
        made = made > 100
    elif not is_number:
        made = made.to(torch.uint8).view(dtype)
    elif dtype.is_floating_point:
        made = made.sub(128).div(37).to(dtype)
    else:
        made = made.sub(128).to(dtype)
    return made.to(torch.get_default_device())


def same(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), what


def moves(group: dist.ProcessGroup, layout: Sequence[int], dtypes: Sequence[torch.dtype] = MOVED) -> None:
    """All-gather, all-to-all and broadcast: the bytes of every dtype, in place too, back to back."""
    with on_nodes(group, layout) as nodes, mock.patch.object(topology, "LEAST_BYTES", LEAST_BYTES):
        rank, size = nodes.rank(), nodes.size()
        for dtype in dtypes:
            n = 5_001 if dtype == torch.uint8 else 5_008 // dtype.itemsize  # of one size in bytes: proved once
            inputs = [random(n, dtype, other) for other in range(size)]
            output = random(size * n, dtype, 99)
            dist.all_gather_into_tensor(output, inputs[rank], nodes)
            same(output, torch.cat(inputs), dtype)
            output = random(size * n, dtype, 99)
            part = output.split(n)[rank].copy_(inputs[rank])
            dist.all_gather_into_tensor(output, part, nodes, async_op=True).wait()  # type: ignore[union-attr]
            same(output, torch.cat(inputs), (dtype, "in place"))
            listed = [torch.zeros_like(inputs[0]) for _ in inputs]
            dist.all_gather(listed, inputs[rank], nodes)
            same(torch.cat(listed), torch.cat(inputs), (dtype, "listed"))
            given = [random(size * n, dtype, 10 + other) for other in range(size)]
            output = random(size * n, dtype, 99)
            dist.all_to_all_single(output, given[rank], group=nodes)
            same(output, torch.cat([tensor.split(n)[rank] for tensor in given]), dtype)
            for root in (0, size - 1):
                told = inputs[rank].clone()
                dist.broadcast(told, group=nodes, group_src=root)
                same(told, inputs[root], (dtype, root))
        _ran(layout, {"all_gather_into_tensor", "all_gather", "broadcast", "all_to_all_single"})


def reduces(group: dist.ProcessGroup, layout: Sequence[int], dtypes: Sequence[torch.dtype] = REDUCED) -> None:
    """All-reduce and reduce-scatter, each operation and dtype, against sums in float64; in place too."""
    with on_nodes(group, layout) as nodes, mock.patch.object(topology, "LEAST_BYTES", LEAST_BYTES):
        rank, size = nodes.rank(), nodes.size()
        for dtype in dtypes:
            n = 6_003 // dtype.itemsize
            inputs = [random(size * n, dtype, other) for other in range(size)]
            for op in OPS:
                found = inputs[rank].clone()
                dist.all_reduce(found, op, nodes)
                _near(found, inputs, op, ("all_reduce", dtype, op))
                part = torch.empty_like(inputs[0][:n])
                dist.reduce_scatter_tensor(part, inputs[rank], op, nodes)
                _near(part, [given.split(n)[rank] for given in inputs], op, ("reduce_scatter", dtype, op))
                whole = inputs[rank].clone()
                dist.reduce_scatter_tensor(whole.split(n)[rank], whole, op, nodes)
                same(whole.split(n)[rank], part, ("in place", dtype, op))
        _ran(layout, {"all_reduce", "reduce_scatter_tensor"})


def _near(found: torch.Tensor, inputs: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType, what: object) -> None:
    """Within a rounding for each addition, of a number as large as any sum on the way."""
    dtype = found.dtype
    wide = torch.stack([given.to(torch.float64) for given in inputs])
    wanted = {
        dist.ReduceOp.SUM: lambda: wide.sum(0),
        dist.ReduceOp.AVG: lambda: wide.mean(0),
        dist.ReduceOp.MIN: lambda: wide.amin(0),
        dist.ReduceOp.MAX: lambda: wide.amax(0),
    }[op]()
    if not dtype.is_floating_point:
        assert torch.equal(found, wanted.trunc().to(dtype)), what
        return
    scale = wide.abs().sum(0) / (len(inputs) if op == dist.ReduceOp.AVG else 1)
    limit = scale * torch.finfo(dtype).eps * (0 if op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX) else 4)
    assert ((found.to(torch.float64) - wanted).abs() <= limit).all(), what


def _ran(layout: Sequence[int], operations: set[str]) -> None:
    """All of it took steps, and the report has the reason; but on nodes of several sizes all of it went flat."""
    rows = sidelane.report().rows
    is_even = len({list(layout).count(node) for node in layout}) == 1
    assert {row.operation for row in rows} == operations
    assert {row.where for row in rows} == {"sidelane" if is_even else "gloo"}, rows
    if is_even:
        assert all(row.why.startswith("hierarchical: ") for row in rows), rows
    else:
        assert all(row.why.endswith("no steps for nodes of several sizes") for row in rows), rows


def in_pieces(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
    """Calls of several MiB, whose far steps run beside near ones; an average, and asynchronous calls together."""
    with on_nodes(group, layout) as nodes:
        rank, size = nodes.rank(), nodes.size()
        n = (9 << 20) // 4 + 5
        inputs = [random(n, torch.float32, other) for other in range(size)]
        summed = inputs[rank].clone()
        gathered = torch.zeros(size * 1_000_001)
        works = [
            dist.all_reduce(summed, dist.ReduceOp.AVG, nodes, async_op=True),
            dist.all_gather_into_tensor(gathered, inputs[rank][:1_000_001], nodes, async_op=True),
        ]
        part, told = torch.empty(n // size), inputs[rank].clone()
        dist.reduce_scatter_tensor(part, inputs[rank][: n // size * size], group=nodes)
        dist.broadcast(told, group=nodes, group_src=1)
        for work in works:
            assert work is not None and work.wait()
        _near(summed, inputs, dist.ReduceOp.AVG, "average")
        _near(part, [given[: n // size * size].chunk(size)[rank] for given in inputs], dist.ReduceOp.SUM, "scattered")
        same(gathered, torch.cat([given[:1_000_001] for given in inputs]), "gathered")
        same(told, inputs[1], "told")
        whys = [row.why for row in sidelane.report().rows if row.where == "sidelane"]
        assert any("pieces: 2" in why for why in whys), whys


def listed(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
    """Several tensors in one call: pieces reach over them, and cut the larger ones."""
    with on_nodes(group, layout) as nodes:
        rank, size = nodes.rank(), nodes.size()
        counts = (7, 40_001, 0, 20_000, 3)
        inputs = [
            [random(n * size, torch.float32, 10 * other + t) for t, n in enumerate(counts)] for other in range(size)
        ]
        with mock.patch.object(topology, "PIECE_BYTES", 80 << 10):
            outputs = [torch.empty(n * size) for n in counts]
            shards = [tensor[:n].contiguous() for tensor, n in zip(inputs[rank], counts, strict=True)]
            nodes.allgather_into_tensor_coalesced(outputs, shards).wait()
            for t, n in enumerate(counts):
                same(outputs[t], torch.cat([inputs[other][t][:n] for other in range(size)]), ("gathered", t))
            parts = [torch.empty(n) for n in counts]
            nodes.reduce_scatter_tensor_coalesced(parts, inputs[rank]).wait()
            summed = [tensor.clone() for tensor in inputs[rank]]
            nodes.allreduce_coalesced(summed).wait()
        for t, n in enumerate(counts):
            given = [inputs[other][t] for other in range(size)]
            _near(summed[t], given, dist.ReduceOp.SUM, ("summed", t))
            _near(parts[t], [tensor[rank * n : (rank + 1) * n] for tensor in given], dist.ReduceOp.SUM, ("parts", t))
        assert all("pieces: " in row.why and row.where == "sidelane" for row in sidelane.report().rows)
