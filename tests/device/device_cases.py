"""Programs and their buffers in the tests of executors on GPUs."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from device_context import Context
from expected import in_rank_order
from started import start

from sidelane.execute.vendor import make_driver
from sidelane.memory.heap import SymmetricBlock
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import Buffer, Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, lower

MEGABYTE = 1 << 20


class Setting:
    """The buffers of one program on this rank. Buffers that peers touch are symmetric, the others ordinary."""

    def __init__(self, context: Context, program: Program, misalign: int = 0) -> None:
        self.context, self.program, self.collective = context, program, program.collective
        self.tensors: dict[Buffer, torch.Tensor] = {}
        self.buffers: dict[tuple[int, Buffer], int] = {}
        remote = program.remote_buffers()
        for buffer in Buffer:
            largest = max(program.buffer_bytes(rank, buffer) for rank in range(context.world_size))
            own = program.buffer_bytes(context.rank, buffer)
            if buffer in remote or buffer is Buffer.STAGING:
                tensor, addresses = context.carve(largest, 0 if buffer is Buffer.STAGING else misalign)
                self.buffers.update({(rank, buffer): address for rank, address in enumerate(addresses)})
                self.tensors[buffer] = tensor[:own]
            else:
                whole = torch.empty(own + misalign + 16, dtype=torch.uint8, device=context.device)
                self.tensors[buffer] = whole[misalign : misalign + own]
                self.buffers[context.rank, buffer] = whole.data_ptr() + misalign

    def view(self, span: define.Span) -> torch.Tensor:
        return self.tensors[span.buffer][span.offset : span.end]

    def input(self) -> torch.Tensor:
        rank = self.context.rank
        return self.view(self.collective.input_span(rank, 0, self.collective.input_bytes(rank)))

    def output(self) -> torch.Tensor:
        rank = self.context.rank
        return self.view(self.collective.output_span(rank, 0, self.collective.output_bytes(rank)))

    def fill(self, seed: int) -> torch.Tensor:
        """Poison everything, put random numbers in the input; this rank's expected output, made by torch."""
        for tensor in self.tensors.values():
            tensor.fill_(0xA5)
        ranks = range(self.context.world_size)
        inputs = [random_input(self.collective, rank, seed, self.context.device) for rank in ranks]
        self.input().copy_(inputs[self.context.rank])
        expected = expected_output(self.collective, inputs, self.context.rank, self.output())
        torch.cuda.current_stream().synchronize()  # not all streams: an armed program waits on some
        return expected

    def check(self, expected: torch.Tensor, what: str) -> None:
        got = self.output()
        if not torch.equal(got, expected):
            wrong = (got != expected).nonzero().flatten()
            count = f"{len(wrong)} of {len(got)} bytes are wrong, first at {wrong[:8].tolist()}"
            raise AssertionError(f"rank {self.context.rank}: {what}: {count}")


def random_input(collective: Collective, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """The same numbers on every GPU of one kind: each rank makes those of all."""
    generator = torch.Generator(device).manual_seed(1000 * seed + rank)
    nbytes = collective.input_bytes(rank)
    on = {"generator": generator, "device": device}
    if collective.reduction is None:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, **on)
    dtype = getattr(torch, collective.reduction.dtype)
    count = nbytes // dtype.itemsize
    if dtype.is_floating_point:
        return (100 * torch.randn(count, **on)).to(dtype).view(torch.uint8)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (count,), dtype=dtype, **on).view(torch.uint8)


def expected_output(
    collective: Collective, inputs: Sequence[torch.Tensor], rank: int, before: torch.Tensor
) -> torch.Tensor:
    """What the collective defines; bytes that it does not define stay as they were before."""
    if collective.reduction is not None:
        dtype = getattr(torch, collective.reduction.dtype)
        whole = in_rank_order([each.view(dtype) for each in inputs], collective.reduction.op)
        if collective.kind is Kind.ALL_REDUCE:
            return whole.view(torch.uint8)
        start = sum(collective.counts[0][:rank])
        return whole.view(torch.uint8)[start : start + collective.counts[0][rank]]
    output = before.clone()
    for chunk in collective.chunks():
        if chunk.dst_rank == rank:
            part = inputs[chunk.src_rank][chunk.src_offset : chunk.src_offset + chunk.nbytes]
            output[chunk.dst_offset : chunk.dst_offset + chunk.nbytes] = part
    return output


def make_programs(kind: str, world_size: int, scale: int) -> Iterator[tuple[Program, str]]:
    """Every variant and transport of a collective, for shards of odd sizes around ``scale`` bytes; and names."""
    shards = [scale + 3 * rank for rank in range(world_size)]
    holes = [0 if rank == 1 else scale for rank in range(world_size)]
    counts = [[scale + (3 * i + j) % 7 if (i + j) % 5 else 0 for j in range(world_size)] for i in range(world_size)]
    even = [[scale] * world_size] * world_size
    total = Reduction(ReduceOp.SUM, "int32")
    aligned = [4 * (scale // 4 + rank) for rank in range(world_size)]
    collectives = {
        "all_gather": [define.all_gather(shards), define.all_gather(holes), define.all_gather(shards, in_place=True)],
        "all_to_all": [define.all_to_all(counts), define.all_to_all(even), define.all_to_all(even, in_place=True)],
        "broadcast": [define.broadcast(scale, world_size, 1, in_place=True), define.broadcast(scale, world_size, 0)],
        "scatter": [define.scatter(shards, 1)],
        "gather": [define.gather(shards, 0)],
        "reduce_scatter": [
            define.reduce_scatter(aligned, total),
            define.reduce_scatter(aligned, total, in_place=True),
        ],
        "all_reduce": [define.all_reduce(aligned, total), define.all_reduce(aligned, total, in_place=True)],
    }
    for collective in collectives[kind]:
        transports = [Transport.PUSH] if collective.reduction is not None else list(Transport)
        for variant, transport in itertools.product(variants(collective.kind), transports):
            with contextlib.suppress(ValueError):  # builders refuse what does not exist
                yield lower(build(collective, variant, transport), {Copy}), f"{collective} {variant} {transport}"


# --- cases ------------------------------------------------------------------------------------------------------------


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(1e-3)


def eager_and_graph(context: Context, kind: str, scale: int, misalign: int) -> int:
    """Every program of a kind: twice eager on a stream, then three replays of a graph."""
    count = 0
    for program, name in make_programs(kind, context.world_size, scale):
        context.used = 0
        setting = Setting(context, program, misalign)
        with torch.cuda.stream(context.stream):
            loaded = context.main.load(program, setting.buffers)
            for repeat in range(2):
                expected = setting.fill(count + repeat)
                pending = start(loaded, context.main.next_epoch(), context.stream)
                pending.wait()
                setting.check(expected, f"{name}, eager {repeat}")
            capture_and_replay(context, setting, freeze(program), name)
        count += 1
        dist.barrier()  # the next program uses the same bytes of the arena
    return count


def capture_and_replay(context: Context, setting: Setting, program: Program, name: str, replays: int = 3) -> None:
    graph = torch.cuda.CUDAGraph()
    epoch = context.main.next_epoch()
    with torch.cuda.graph(graph, stream=context.stream):
        # Loaded inside the capture, as a communicator does at the first call with new tensors.
        loaded = context.main.load(program, setting.buffers, frozen=True)
        assert start(loaded, epoch, context.stream).done()
    for replay in range(replays):
        expected = setting.fill(100 + replay)
        graph.replay()
        finished = torch.cuda.Event()
        finished.record()
        wait_for(finished.query, 20.0, f"{name}: the end of replay {replay}")
        setting.check(expected, f"{name}, replay {replay}")


def check_block(block: SymmetricBlock, group: dist.ProcessGroup) -> None:
    """Zeroed, and every rank reaches every block."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    assert block.addresses[rank] == block.tensor.data_ptr()
    assert not block.tensor.any()
    dist.barrier(group)
    driver = make_driver(block.tensor.device)
    stream = driver.create_stream()
    own = torch.full((1,), rank + 1, dtype=torch.uint8, device=block.tensor.device)
    torch.cuda.synchronize()
    peer = (rank + 1) % world_size
    driver.submit([driver.bind_copy(block.addresses[peer] + block.tensor.numel() - 1, own.data_ptr(), 1, stream)])
    wait_for(lambda: driver.is_idle(stream), 5.0, "a copy to a peer")
    driver.destroy_stream(stream)
    dist.barrier(group)
    assert block.tensor[-1].item() == (rank - 1) % world_size + 1
