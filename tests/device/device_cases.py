"""What the ranks of a pool run: executor-level cases, each a function of the rank's context."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from device_context import Context, Party
from expected import in_rank_order
from started import start

from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.release import FlagRescue
from sidelane.execute.cuda.trigger import CudaTrigger
from sidelane.execute.vendor import make_driver
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.torch_symm import TorchSymmetricMemory
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import Buffer, Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import EPOCH, Copy, Program
from sidelane.program.transform import freeze, held_by, hold, lower
from sidelane_lab.sim.prelaunch import prelaunch

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


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(1e-3)


def peer_error(action: Callable[[], object]) -> PeerError:
    """The PeerError that ``action`` must raise."""
    try:
        action()
    except PeerError as error:
        return error
    raise AssertionError("no PeerError was raised")


# --- cases ------------------------------------------------------------------------------------------------------------


def report_features(context: Context) -> list[str]:
    return context.features.lines()


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


def prelaunched(context: Context) -> None:
    shards = [MEGABYTE + 3 * rank for rank in range(context.world_size)]
    for collective in (define.all_gather(shards, in_place=True), define.all_gather(shards)):
        for variant, ahead in itertools.product(("pcpy", "b2b"), (prelaunch, hold)):
            context.used = 0
            program = ahead(build(collective, variant))
            setting = Setting(context, program)
            with torch.cuda.stream(context.stream):
                setting.fill(0)  # its kernels are loaded now: an armed call would hold that up
                loaded = context.main.load(program, setting.buffers)
                executor, flag, own = context.main.executor, held_by(program, context.rank), context.stream.cuda_stream
                assert flag is not None
                trigger = CudaTrigger(executor, [(loaded.addresses.flag(flag), EPOCH)], program.variant)
                for repeat in range(3):
                    epoch = context.main.next_epoch()
                    loaded.run(epoch, (executor.held_stream(), False))
                    expected = setting.fill(repeat)
                    trigger.fire(epoch, (own, False))
                    executor.order(executor.held_stream(), own)
                    context.stream.synchronize()
                    setting.check(expected, f"{program.variant}, {repeat}")
                if ahead is prelaunch:  # queues of a graph cannot share a trigger
                    capture_and_replay(context, setting, freeze(program), program.variant)
            dist.barrier()


def default_stream(context: Context) -> None:
    """On the legacy default stream the collective is ordered with the work before and after it."""
    context.used = 0
    nbytes = 4 * MEGABYTE
    program = build(define.all_gather([nbytes] * context.world_size), "b2b")
    setting = Setting(context, program)
    loaded = context.main.load(program, setting.buffers)
    current = torch.cuda.current_stream()
    assert current.cuda_stream == 0
    for repeat in range(5):
        expected = setting.fill(repeat)
        scratch = setting.input().clone()
        setting.input().zero_()
        torch.cuda._sleep(5_000_000)
        setting.input().copy_(scratch)  # only a collective behind this sees the input
        start(loaded, context.main.next_epoch(), current)
        after = setting.output().clone()  # only a copy behind the collective sees the output
        setting.output().zero_()
        context.main.executor.synchronize()
        assert torch.equal(after, expected), f"rank {context.rank}, repeat {repeat}"
        dist.barrier()


def thousand_with_delays(context: Context, invocations: int) -> None:
    """Back to back without a host in between; inputs change every time; random ranks are late."""
    context.used = 0
    rank, world_size, count = context.rank, context.world_size, 4099
    gather = build(define.all_gather([4 * count] * world_size), "b2b")
    exchange = build(define.all_to_all([[4 * count] * world_size] * world_size), "pcpy", Transport.PULL)
    reduce = build(define.all_reduce([4 * count] * world_size, Reduction(ReduceOp.SUM, "int32")), "b2b")
    settings = [Setting(context, program) for program in (gather, exchange, reduce)]
    loaded = [
        context.main.load(program, setting.buffers)
        for program, setting in zip((gather, exchange, reduce), settings, strict=True)
    ]
    random = torch.Generator().manual_seed(99 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device=context.device)
    # Rank r's input in step s, as int32: its index + 1000 r + s.
    ramps = [torch.arange(s.input().numel() // 4, dtype=torch.int32, device=context.device) for s in settings]
    own = ramps[0]
    wanted = [
        torch.cat([own + 1000 * peer for peer in range(world_size)]),
        torch.cat([ramps[1][rank * count : (rank + 1) * count] + 1000 * peer for peer in range(world_size)]),
        ramps[2] * world_size + 1000 * sum(range(world_size)),
    ]
    torch.cuda.synchronize()
    with torch.cuda.stream(context.stream):
        for step in range(invocations):
            which = step % 3
            setting = settings[which]
            if torch.rand((), generator=random) < 0.1:
                torch.cuda._sleep(int(torch.randint(10_000, 2_000_000, (), generator=random)))
            setting.input().view(torch.int32).copy_(ramps[which] + (1000 * rank + step))
            setting.output().fill_(0x5A)
            start(loaded[which], context.main.next_epoch(), context.stream)
            shift = step * world_size if which == 2 else step
            wrong += (setting.output().view(torch.int32) != wanted[which] + shift).sum()
        context.main.executor.synchronize()
        assert wrong.item() == 0, f"rank {rank}: {wrong.item()} wrong elements"


def two_parties(context: Context) -> None:
    """Two executors, each on a stream of its own, interleaved without a host in between."""
    context.used = 0
    second = context.parties.setdefault("second", Party(context))
    count = 65_537
    program = build(define.all_gather([4 * count] * context.world_size, in_place=True), "b2b")
    streams = [context.stream, torch.cuda.Stream()]
    parties = [context.main, second]
    settings = [Setting(context, program) for _ in parties]
    loaded = [party.load(program, setting.buffers) for party, setting in zip(parties, settings, strict=True)]
    wrong = [torch.zeros((), dtype=torch.int64, device=context.device) for _ in parties]
    torch.cuda.synchronize()
    for step in range(100):
        for which, (party, setting) in enumerate(zip(parties, settings, strict=True)):
            with torch.cuda.stream(streams[which]):
                setting.input().view(torch.int32).fill_(1000 * step + 10 * which + context.rank)
                start(loaded[which], party.next_epoch(), streams[which])
                shards = setting.output().view(torch.int32).view(context.world_size, count)
                for peer in range(context.world_size):
                    wrong[which] += (shards[peer] != 1000 * step + 10 * which + peer).sum()
    for party in parties:
        party.executor.synchronize()
    torch.cuda.synchronize()
    assert [count.item() for count in wrong] == [0, 0], f"rank {context.rank}: {wrong} wrong elements"


def signals_as_copies(context: Context) -> None:
    """The fallback for drivers that do not write to peers."""
    party = context.parties.setdefault("copies", Party(context, peer_writes=False))
    main = context.parties["main"]
    context.parties["main"] = party
    try:
        eager_and_graph(context, "all_gather", 5003, 0)
        eager_and_graph(context, "reduce_scatter", 4096, 0)
    finally:
        context.parties["main"] = main


def reductions(context: Context) -> None:
    """Every operation and dtype, aligned and not, bit for bit."""
    for dtype, op in itertools.product(define.ELEMENT_BYTES, ReduceOp):
        element = define.ELEMENT_BYTES[dtype]
        for elements, misalign in ((1, 0), (5000, 0), (70_001, element)):
            context.used = 0
            shards = [element * (elements + rank) for rank in range(context.world_size)]
            program = build(define.reduce_scatter(shards, Reduction(op, dtype)), "b2b")
            setting = Setting(context, program, misalign)
            with torch.cuda.stream(context.stream):
                loaded = context.main.load(program, setting.buffers)
                expected = setting.fill(elements)
                start(loaded, context.main.next_epoch(), context.stream).wait()
                setting.check(expected, f"{op} {dtype} {elements} elements at {misalign}")
            dist.barrier()


def nan_spreads(context: Context) -> None:
    context.used = 0
    world_size = context.world_size
    for op in ReduceOp:
        program = build(define.all_reduce([4 * 64] * world_size, Reduction(op, "float32")), "b2b")
        setting = Setting(context, program)
        with torch.cuda.stream(context.stream):
            setting.input().view(torch.float32).fill_(1.0)
            setting.input().view(torch.float32)[context.rank] = float("nan")
            start(context.main.load(program, setting.buffers), context.main.next_epoch(), context.stream).wait()
            found = setting.output().view(torch.float32).isnan().nonzero().flatten().tolist()
        assert found == list(range(world_size)), f"{op}: NaN at {found}"
        dist.barrier()


def kernels_of_moving_collectives(context: Context) -> list[str]:
    """Names of kernels that ran on this rank's GPU while moving collectives did."""
    from torch.profiler import ProfilerActivity, profile

    context.used = 0
    loaded = []
    for program in (
        build(define.all_gather([MEGABYTE] * context.world_size), "b2b"),
        build(define.all_gather([MEGABYTE] * context.world_size, in_place=True), "pcpy"),
        build(define.all_to_all([[MEGABYTE // 4] * context.world_size] * context.world_size), "b2b", Transport.STAGED),
    ):
        setting = Setting(context, program)
        loaded.append((context.main.load(program, setting.buffers), setting))
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for program, _ in loaded:
            start(program, context.main.next_epoch(), context.stream)
        context.main.executor.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorded.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    # A batch of copies is one event: two of them, single copies by pcpy, own parts, and what was staged.
    assert len(copies) >= context.world_size + 4, f"the profiler saw {len(copies)} copies"
    return sorted({event["name"] for event in events if event.get("cat") == "kernel"})


def absent_peer(context: Context, timeout_s: float) -> str:
    """The last rank does not call; the others must say so and their streams must drain."""
    context.used = 0
    party = Party(context, timeout_s=timeout_s)
    program = build(define.all_gather([MEGABYTE] * context.world_size), "b2b")
    setting = Setting(context, program)
    loaded = party.load(program, setting.buffers)
    last = context.world_size - 1
    start(loaded, party.next_epoch(), context.stream).wait()
    message = ""
    if context.rank != last:
        party.control.begin(2, "test")
        error = peer_error(start(loaded, party.next_epoch(), context.stream).wait)
        assert isinstance(error, PeerTimeoutError)
        assert error.ranks == (last,), f"names {error.ranks}: {error}"
        message = str(error)
        drained = torch.cuda.Event()
        drained.record(context.stream)
        wait_for(drained.query, 5.0, "draining")
        peer_error(lambda: start(loaded, party.next_epoch(), context.stream))
    dist.barrier()
    party.close()
    return message


def absent_from_replay(context: Context, timeout_s: float) -> str:
    """The last rank does not replay its graph."""
    context.used = 0
    party = Party(context, timeout_s=timeout_s)
    program = freeze(build(define.all_gather([MEGABYTE] * context.world_size), "b2b"))
    setting = Setting(context, program)
    loaded = party.load(program, setting.buffers, frozen=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=context.stream):
        start(loaded, party.next_epoch(), context.stream)
    last = context.world_size - 1
    message = ""
    with torch.cuda.stream(context.stream):
        for _ in range(1 if context.rank == last else 3):
            graph.replay()
        drained = torch.cuda.Event()
        drained.record()
    if context.rank != last:
        wait_for(drained.query, timeout_s + 10.0, "draining the replays")
        error = peer_error(party.executor.check)
        assert last in error.ranks, f"names {error.ranks}: {error}"
        message = str(error)
    dist.barrier()
    party.close()
    return message


def wait_for_a_dead_peer(context: Context, victim: int) -> str:
    """The victim sleeps until it is killed; the others call. The time-out is far away: the death must be noticed."""
    context.used = 0
    party = Party(context, timeout_s=600.0)
    program = build(define.all_gather([MEGABYTE] * context.world_size), "b2b")
    setting = Setting(context, program)
    loaded = party.load(program, setting.buffers)
    start(loaded, party.next_epoch(), context.stream).wait()
    dist.barrier()
    if context.rank == victim:
        time.sleep(1000)
    error = peer_error(start(loaded, party.next_epoch(), context.stream).wait)
    drained = torch.cuda.Event()
    drained.record(context.stream)
    wait_for(drained.query, 5.0, "draining")
    assert error.ranks == (victim,), f"names {error.ranks}: {error}"
    return str(error)


def refused_half_way(context: Context, number: int) -> None:
    """The driver refuses a call in the middle of a submission, and the rank closes at once: its stream drains."""
    context.used = 0
    party = Party(context)
    program = build(define.all_gather([MEGABYTE] * context.world_size), "b2b")
    loaded = party.load(program, Setting(context, program).buffers)
    driver, numbers = party.executor.driver, itertools.count()
    real = driver.submit

    def submit(calls: Iterable[Bound]) -> None:
        for call in calls:
            if next(numbers) == number:
                raise DriverError("CUDA_ERROR_UNKNOWN", "a call")
            real([call])

    dist.barrier()
    with mock.patch.object(driver, "submit", submit), contextlib.suppress(PeerError, DriverError):
        start(loaded, party.next_epoch(), context.stream)
    drained = torch.cuda.Event()
    drained.record(context.stream)
    party.close()
    wait_for(drained.query, 5.0, "draining")
    dist.barrier()


def words_outlive_their_owner(context: Context) -> None:
    """Words that a stream has yet to write are not handed out again, though nobody refers to them any more."""
    driver, stream = make_driver(context.device), make_driver(context.device).create_stream()
    gate = driver.host_words(1)
    host, (device, owner) = driver.host_words(5000), driver.device_words(5000)
    dropped = {host.address, device}
    ops = driver.memory_ops()
    ops.wait(gate.address, 1, equal=False)
    for address in dropped:
        ops.write(address, 7)
    driver.submit([driver.bind_memory_ops(ops, stream)])
    del host, owner
    others = [(driver.host_words(5000), driver.device_words(5000)) for _ in range(4)]
    gate.array[0] = 1
    wait_for(lambda: driver.is_idle(stream), 5.0, "two writes")
    assert not dropped & {address for words, (there, _) in others for address in (words.address, there)}
    assert not any(words.array.any() or there.any() for words, (_, there) in others)
    driver.destroy_stream(stream)


def release_passes_stuck_streams(context: Context, streams: int) -> None:
    """Stuck waits on many streams of ordinary and of highest priority."""
    driver = make_driver(context.device)
    words, owner = driver.device_words(streams)
    rescue = FlagRescue(driver)
    collective = define.all_gather([0])
    stuck = [driver.create_stream(urgent=index % 2 == 0) for index in range(streams)]
    for index, stream in enumerate(stuck):
        ops = driver.memory_ops()
        ops.wait(words + 4 * index, 7, equal=False)
        driver.submit([driver.bind_memory_ops(ops, stream)])
    time.sleep(0.05)
    assert not any(map(driver.is_idle, stuck))
    rescue.register(Program(collective, "test", (), (0,), streams), 0, Addresses({}, (words,)))
    rescue.release(7)
    wait_for(lambda: all(map(driver.is_idle, stuck)), 10.0, "the release of stuck streams")
    for stream in stuck:
        driver.destroy_stream(stream)
    rescue.close()
    del owner


def sub_groups(context: Context) -> None:
    """Groups of which a rank has more than its peers: their exchanges are counted apart."""
    pairs = [(0, 1), (1, context.world_size - 1)] if context.world_size > 2 else [(0, 1)]
    for pair in pairs:
        group = dist.new_group(list(pair))
        if context.rank in pair:
            memory = TorchSymmetricMemory(Exchange(group, 20.0), context.device, timeout_s=20.0)
            check_block(memory.allocate(3 * MEGABYTE + 5), group)
            memory.close()
    check_block(context.memory.allocate(1), context.group)
    check_block(context.memory.allocate(MEGABYTE), context.group)


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
