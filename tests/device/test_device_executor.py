"""Programs on GPUs: right bytes, eager and captured, in order with the caller's stream."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device_cases import MEGABYTE, Setting, capture_and_replay, check_block, eager_and_graph
from device_context import Context, Party
from on_ranks import everyones, on_ranks
from started import start
from vendors import ONE_CHANNEL

from sidelane.execute.cuda.trigger import CudaTrigger
from sidelane.memory.exchange import Exchange
from sidelane.memory.torch_symm import TorchSymmetricMemory
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build
from sidelane.program.collective import ReduceOp, Reduction
from sidelane.program.ir import EPOCH
from sidelane.program.transform import freeze, held_by, hold
from sidelane_lab.sim.prelaunch import prelaunch


@on_ranks(gpu=True)
def test_features_are_found_and_equal_on_all_ranks(context: Context) -> None:
    lines = context.features.lines()
    assert everyones(context.group, lines) == [lines] * context.world_size
    print("\n".join(lines))


@pytest.mark.parametrize(
    ("kind", "scale", "misalign"),
    [
        ("all_gather", 7, 1),
        ("all_gather", 1_048_579, 3),
        ("all_gather", 5_000_011, 1),  # more than what shares the caller's stream
        ("all_to_all", 7, 1),
        ("all_to_all", 1_048_579, 3),
        ("broadcast", 300_007, 1),
        ("broadcast", 20_000_003, 1),  # several rounds of a relay
        ("scatter", 300_007, 1),
        ("gather", 300_007, 1),
    ],
)
@on_ranks(gpu=True)
def test_moving(context: Context, kind: str, scale: int, misalign: int) -> None:
    assert eager_and_graph(context, kind, scale, misalign) > 0


@pytest.mark.parametrize(("scale", "misalign"), [(8, 4), (2_097_152, 0)])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@on_ranks(gpu=True)
def test_reducing(context: Context, kind: str, scale: int, misalign: int) -> None:
    assert eager_and_graph(context, kind, scale, misalign) > 0


@on_ranks(gpu=True, timeout_s=150)
def test_every_reduction(context: Context) -> None:
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


@on_ranks(gpu=True)
def test_nan_spreads_through_every_reduction(context: Context) -> None:
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


@on_ranks(gpu=True)
def test_prelaunched(context: Context) -> None:
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


@on_ranks(gpu=True)
def test_default_stream(context: Context) -> None:
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


@on_ranks(gpu=True, invocations=1000)
def test_a_thousand_back_to_back_with_random_delays(context: Context, invocations: int) -> None:
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


@on_ranks(gpu=True)
def test_two_executors_interleaved(context: Context) -> None:
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


@on_ranks(gpu=True, environment=ONE_CHANNEL)
def test_one_hardware_channel_is_enough(context: Context) -> None:
    eager_and_graph(context, "all_gather", 1_048_579, 0)
    eager_and_graph(context, "all_to_all", 1_048_579, 0)


@on_ranks(gpu=True)
def test_signals_as_copies(context: Context) -> None:
    """The fallback for drivers that do not write to peers."""
    party = context.parties.setdefault("copies", Party(context, peer_writes=False))
    main = context.parties["main"]
    context.parties["main"] = party
    try:
        eager_and_graph(context, "all_gather", 5003, 0)
        eager_and_graph(context, "reduce_scatter", 4096, 0)
    finally:
        context.parties["main"] = main


@on_ranks(gpu=True)
def test_sub_groups(context: Context) -> None:
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


@on_ranks(gpu=True)
def test_moving_collectives_launch_no_kernel(context: Context) -> None:
    """A profiler sees their copies, and no kernel."""
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
    assert not {event["name"] for event in events if event.get("cat") == "kernel"}
