"""Each command of the CPU executor on its own: bytes, flags, reductions, and what it refuses to load."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from worlds import LocalWorld, reduced, torch_dtype

from sidelane.errors import PeerTimeoutError
from sidelane.execute.base import Addresses
from sidelane.execute.cpu import CpuExecutor
from sidelane.program import ir
from sidelane.program.collective import ELEMENT_BYTES, Buffer, ReduceOp, Reduction, Span, all_to_all

DMA, COMPUTE = ir.Engine(ir.EngineKind.DMA), ir.Engine(ir.EngineKind.COMPUTE)
BIG = (8 << 20) + 3  # more than one piece of a copy


def single(
    nbytes: int, *commands: ir.Command, staging_bytes: int = 0, engine: ir.Engine = DMA, flags: int = 8
) -> ir.Program:
    """One rank, one queue. The collective only gives the buffers their size."""
    collective = all_to_all([[nbytes]])
    return ir.Program(collective, "by hand", (ir.Queue(0, engine, commands),), (staging_bytes,), flag_count=flags)


def place(buffer: Buffer, offset: int, nbytes: int) -> Span:
    return Span(0, buffer, offset, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 4097, BIG])
def test_copy_broadcast_and_swap_move_every_byte_and_no_other(nbytes: int) -> None:
    # input: [src | a], output: [x, x, dst | dst | dst, x], staging: [b]
    src, a = place(Buffer.INPUT, 0, nbytes), place(Buffer.INPUT, nbytes, nbytes)
    dsts = [place(Buffer.OUTPUT, 2 + i * nbytes, nbytes) for i in range(3)]
    b = place(Buffer.STAGING, 0, nbytes)
    commands = (ir.Copy(dsts[0], src), ir.Broadcast((dsts[1], dsts[2]), src), ir.Swap(a, b))
    program = single(3 * nbytes + 3, *commands, staging_bytes=nbytes)
    with LocalWorld(1) as world:
        loaded = world.load(program)
        memory = {buffer: loaded.memory[0, buffer] for buffer in Buffer}
        for epoch in (1, 2):
            before = {buffer: tensor.random_(0, 256).clone() for buffer, tensor in memory.items()}
            loaded.run(epoch)
            expected = {buffer: tensor.clone() for buffer, tensor in before.items()}
            for dst in dsts:
                expected[Buffer.OUTPUT][dst.offset : dst.end] = before[Buffer.INPUT][:nbytes]
            expected[Buffer.INPUT][a.offset : a.end] = before[Buffer.STAGING]
            expected[Buffer.STAGING][:] = before[Buffer.INPUT][a.offset : a.end]
            for buffer in Buffer:
                assert torch.equal(memory[buffer], expected[buffer]), buffer


def test_stamps_are_in_the_order_of_the_queue() -> None:
    nbytes = 1 << 20
    copy = ir.Copy(place(Buffer.OUTPUT, 0, nbytes), place(Buffer.INPUT, 0, nbytes))
    with LocalWorld(1) as world:
        loaded = world.load(single(nbytes, ir.Stamp(3), copy, ir.Stamp(0), ir.Stamp(1)))
        stamps = []
        for epoch in (1, 2):
            (pending,) = loaded.start(epoch)
            pending.wait()
            assert set(pending.stamps) == {0, 1, 3}
            stamps += [pending.stamps[3], pending.stamps[0], pending.stamps[1]]
    assert stamps == sorted(stamps)
    assert stamps[0] < stamps[1]


@pytest.mark.parametrize(
    ("held", "comparison", "value", "epoch", "passes"),
    [
        (5, ir.Comparison.GE, ir.EPOCH, 5, True),
        (6, ir.Comparison.GE, ir.EPOCH, 5, True),
        (4, ir.Comparison.GE, ir.EPOCH, 5, False),
        (6, ir.Comparison.EQ, ir.EPOCH, 5, False),
        (5, ir.Comparison.EQ, ir.EPOCH, 5, True),
        (11, ir.Comparison.GE, ir.Value(1, 2), 5, True),
        (10, ir.Comparison.GE, ir.Value(1, 2), 5, False),
        # 32 bits: values wrap around, and "at least" looks at the sign of the difference.
        (0xFFFFFFFF, ir.Comparison.GE, ir.EPOCH, 0xFFFFFFFE, True),
        (3, ir.Comparison.GE, ir.EPOCH, 0xFFFFFFFE, True),
        (0xFFFFFFFE, ir.Comparison.GE, ir.EPOCH, 2**32 + 3, False),
        (3, ir.Comparison.EQ, ir.EPOCH, 2**32 + 3, True),
        (0x80000005, ir.Comparison.GE, ir.EPOCH, 5, False),
        (0x80000004, ir.Comparison.GE, ir.EPOCH, 0x80000003, True),
    ],
)
def test_waits_compare_32_bits(held: int, comparison: ir.Comparison, value: ir.Value, epoch: int, passes: bool) -> None:
    with LocalWorld(1, timeout_s=10 if passes else 0.05) as world:
        loaded = world.load(single(1, ir.Wait(ir.Flag(0, 2), value, comparison)))
        world.flags[0][2] = held - 2**32 if held >= 2**31 else held
        if passes:
            loaded.run(epoch)
        else:
            with pytest.raises(PeerTimeoutError):
                loaded.run(epoch)


def test_signals_write_32_bits_and_no_neighbour() -> None:
    with LocalWorld(1) as world:
        loaded = world.load(single(1, ir.Signal(ir.Flag(0, 1), ir.EPOCH), ir.Signal(ir.Flag(0, 3), ir.Value(7))))
        loaded.run(2**32 + 9)
        assert world.flags[0][:5].tolist() == [0, 9, 0, 7, 0]
        loaded.run(2**33 - 1)
        assert world.flags[0][:5].tolist() == [0, -1, 0, 7, 0]


def values(dtype: torch.dtype, count: int, sources: int) -> torch.Tensor:
    """Random elements of full width: floats with fractions, integers whose sums wrap around."""
    if dtype.is_floating_point:
        return (torch.randn(sources, count) * 8).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (sources, count), dtype=dtype)


def run_reduce(reduction: Reduction, inputs: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """Reduce the rows of ``inputs`` with the executor; the result is written over row 1, or beside the inputs."""
    sources, nbytes = len(inputs), inputs[0].nbytes
    srcs = tuple(place(Buffer.STAGING, i * nbytes, nbytes) for i in range(sources))
    dst = srcs[1] if in_place else place(Buffer.OUTPUT, 0, nbytes)
    program = single(nbytes, ir.Reduce(dst, srcs, reduction), staging_bytes=sources * nbytes, engine=COMPUTE)
    with LocalWorld(1) as world:
        loaded = world.load(program)
        loaded.memory[0, Buffer.STAGING].copy_(inputs.view(-1).view(torch.uint8))
        loaded.run(1)
        return loaded.memory[0, dst.buffer][dst.offset : dst.end].view(inputs.dtype).clone()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("dtype", "op"), list(itertools.product(ELEMENT_BYTES, ReduceOp)))
def test_reduce(dtype: str, op: ReduceOp, in_place: bool) -> None:
    reduction = Reduction(op, dtype)
    sources, count = 5, 70_001  # three pieces, the last one odd
    inputs = values(torch_dtype(reduction), count, sources)
    found = run_reduce(reduction, inputs, in_place=in_place)
    if not torch_dtype(reduction).is_floating_point:
        # Modulo 2**width, as Python's own integers say it.
        expected = [reduce_integers(column, op, inputs.dtype) for column in inputs[:, :500].T.tolist()]
        assert found[:500].tolist() == expected
        assert torch.equal(found.view(torch.uint8), reduced([row.view(torch.uint8) for row in inputs], reduction))
        return
    exact = inputs.double()
    reference = {
        ReduceOp.SUM: exact.sum(0),
        ReduceOp.AVG: exact.sum(0) / sources,
        ReduceOp.MIN: exact.amin(0),
        ReduceOp.MAX: exact.amax(0),
    }[op]
    # Half a unit in the last place of the result (one rounding), plus what float32 loses while it adds.
    last_place = torch.finfo(inputs.dtype).eps * reference.abs()
    lost = sources * torch.finfo(torch.float32).eps * exact.abs().sum(0)
    assert bool(((found.double() - reference).abs() <= 0.5 * last_place + lost).all())
    # And bit for bit: float32, in the order of the sources.
    total = inputs[0].float()
    for row in inputs[1:]:
        total = {ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum}.get(op, torch.add)(total, row.float())
    total = total / sources if op is ReduceOp.AVG else total
    assert torch.equal(found, total.to(inputs.dtype))


def reduce_integers(column: list[int], op: ReduceOp, dtype: torch.dtype) -> int:
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (min if op is ReduceOp.MIN else max)(column)
    half = torch.iinfo(dtype).max + 1
    total = (sum(column) + half) % (2 * half) - half
    quotient = abs(total) // len(column)
    return total if op is ReduceOp.SUM else quotient if total >= 0 else -quotient


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reduce_keeps_what_is_special_about_floats(dtype: str) -> None:
    nan, inf = math.nan, math.inf
    inputs = torch.tensor([[nan, 1, inf, -inf, 2], [1, nan, -inf, 3, 5]]).to(getattr(torch, dtype))
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        assert run_reduce(Reduction(op, dtype), inputs).isnan().tolist() == [True, True, False, False, False]
    assert run_reduce(Reduction(ReduceOp.MIN, dtype), inputs)[2:].tolist() == [-inf, -inf, 2]
    assert run_reduce(Reduction(ReduceOp.SUM, dtype), inputs).isnan().tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(("dtype", "small"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_reduce_rounds_once(dtype: str, small: float) -> None:
    """1 + small is 1 in the narrow type; two smalls together are not lost when the sum is kept in float32."""
    inputs = torch.tensor([[1.0], [small], [small]]).to(getattr(torch, dtype))
    assert inputs[0] + inputs[1] == 1
    assert run_reduce(Reduction(ReduceOp.SUM, dtype), inputs).item() == 1 + 2 * small


def test_integer_averages_truncate_toward_zero() -> None:
    inputs = torch.tensor([[7, -7, 1, -1, 2**31 - 1], [0, 0, 0, 0, 1]], dtype=torch.int32)
    assert run_reduce(Reduction(ReduceOp.AVG, "int32"), inputs).tolist() == [3, -3, 0, 0, -(2**30)]


def test_reduce_of_nothing_and_of_one_source() -> None:
    reduction = Reduction(ReduceOp.AVG, "float16")
    assert run_reduce(reduction, torch.empty(2, 0, dtype=torch.float16)).tolist() == []
    assert run_reduce(reduction, torch.tensor([[1.5, -2]], dtype=torch.float16)).tolist() == [1.5, -2]


FOUR, SIX = place(Buffer.INPUT, 0, 4), place(Buffer.OUTPUT, 0, 6)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (ir.Signal(ir.Flag(0, 0), ir.EPOCH, ir.SignalOp.ADD), r"add to a flag atomically \(value=add, allowed=set\)"),
        (ir.Signal(ir.Flag(0, 8), ir.EPOCH), r"no such flag \(value=8, allowed=0..7\)"),
        (ir.Wait(ir.Flag(1, 0), ir.EPOCH), r"waits on a flag of another rank \(value=1, allowed=0\)"),
        (ir.Copy(SIX, FOUR), r"differ in size \(value=\[4, 6\] bytes\)"),
        (ir.Swap(SIX, FOUR), "differ in size"),
        (ir.Broadcast((FOUR, SIX), FOUR), "differ in size"),
        (ir.Copy(place(Buffer.OUTPUT, 30, 4), FOUR), r"out of bounds \(value=output@0\[30:34\], allowed=0..32\)"),
        (ir.Reduce(SIX, (SIX, SIX), Reduction(ReduceOp.SUM, "float32")), r"not whole elements \(value=6 bytes"),
        (ir.Reduce(SIX, (), Reduction(ReduceOp.SUM, "float32")), "nothing to reduce"),
        (ir.Copy(place(Buffer.STAGING, 0, 4), FOUR), "no address for the staging of rank 0"),
        (ir.Copy(Span(-1, Buffer.OUTPUT, 0, 4), FOUR), r"no such rank \(value=-1, allowed=0..0\)"),
        (ir.Signal(ir.Flag(1, 0), ir.EPOCH), r"no such rank \(value=1, allowed=0..0\)"),
    ],
)
def test_load_refuses_what_it_cannot_run(command: ir.Command, text: str) -> None:
    program = single(32, ir.Stamp(0), command, staging_bytes=4)
    with LocalWorld(1) as world:
        memory = torch.zeros(64, dtype=torch.uint8)
        addresses = Addresses(
            {(0, Buffer.INPUT): memory.data_ptr(), (0, Buffer.OUTPUT): memory.data_ptr() + 32}, (memory.data_ptr(),)
        )
        with pytest.raises(ValueError, match=f"CpuExecutor.load: rank 0 dma:0 command 1 .*{text}"):
            world.executors[0].load(program, addresses)


def test_load_refuses_two_queues_on_an_engine_and_missing_flag_memory() -> None:
    queue = ir.Queue(0, DMA, (ir.Stamp(0),))
    program = ir.Program(all_to_all([[4]]), "by hand", (queue, queue), (0,), 0)
    with LocalWorld(1) as world:
        with pytest.raises(ValueError, match="two queues on one engine"):
            world.load(program)
        with pytest.raises(ValueError, match=r"flag memories \(value=0, allowed=1\)"):
            world.executors[0].load(program, Addresses({}, ()))


def test_capabilities_say_what_runs_natively() -> None:
    with LocalWorld(1) as world:
        executor: CpuExecutor = world.executors[0]
        assert executor.capabilities.moves == {ir.Copy, ir.Broadcast, ir.Swap}
        assert executor.capabilities.device_type == "cpu"
