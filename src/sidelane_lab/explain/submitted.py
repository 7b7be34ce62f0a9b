"""Explanations of what a rank submits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sidelane.execute.base import Addresses
from sidelane.execute.cuda import calls
from sidelane.execute.cuda.plan import plan_calls
from sidelane.program.collective import Buffer
from sidelane.program.ir import Flag, Program, Queue, describe
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.sizes import format_bytes
from sidelane_lab.machines.spec import Machine
from sidelane_lab.sdma import PacketQueue, QueueWords, encode, fit

CALLERS = "stream 0 (of the caller)"

HOW: Mapping[Protocol, str] = MappingProxyType(
    {
        Protocol.LL: "every 4 bytes with a flag of their own, into the peers' slots",
        Protocol.LL_ONCE: "every 4 bytes with a flag of their own, into a slot in host memory that all peers read",
        Protocol.BLOCK_FLAGS: "a part behind one flag, into a place of each peer that is for this rank alone",
        Protocol.RELAY: "another part to each peer, which passes it on to all others",
        Protocol.PUSH: "into the peers' outputs",
        Protocol.STAGE: "into the peers' staging, and from there into each output",
        Protocol.PULL: "out of the peers' staging",
        Protocol.REDUCE: "out of the peers' staging, and added up",
        Protocol.DIRECT: "out of the peers' inputs, and added up",
        Protocol.SEND: "into the staging of who adds them up",
        Protocol.HOST: "into the own staging in host memory by few blocks, out of the peers' by the others",
    }
)
"""In few words what ``Protocol`` says."""

SECOND_SHOT: Mapping[Protocol, str] = MappingProxyType(
    {
        Protocol.REDUCE: "; the results the same way",
        Protocol.DIRECT: "; the results into their outputs",
        Protocol.SEND: "; the results into the outputs",
    }
)


def launch_lines(program: KernelProgram) -> tuple[str, ...]:
    """Say what a kernel is, and how its bytes travel (docs/internals/protocols.md)."""
    how = HOW[program.protocol] + (SECOND_SHOT[program.protocol] if program.two_shot else "")
    staging = f", {format_bytes(program.staging_bytes)} of staging" if program.staging_bytes else ""
    return (
        f"launch the kernel {program.variant} on {program.blocks} thread blocks at most",
        f"how bytes travel ({program.protocol}): {how}",
        f"{format_bytes(program.part_bytes)} from rank to rank{staging}",
    )


def call_lines(program: Program, rank: int, captured: bool) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], str]:
    """List what the CUDA executor of a rank asks the driver for, by stream, and the same in numbers.

    Args:
        program: of the call.
        rank: whose.
        captured: into a graph.
    """
    plan = plan_calls(program, rank, captured=captured)
    streams = tuple(
        (
            f"stream {number}" if number else CALLERS,
            tuple(map(describe_call, plan.calls(number))),
        )
        for number in range(plan.streams)
    )
    return streams, str(calls.counts_of(plan, calls.Route.CAPTURE if captured else calls.Route.DIRECT))


def describe_call(call: calls.Call) -> str:
    """Describe a call in one line.

    >>> describe_call(calls.RecordEvent(2))
    'record event 2'
    """
    match call:
        case calls.MemOps(ops):
            return f"memory operations: {'; '.join(map(_operation, ops))}"
        case calls.Memcpy(dst, src, nbytes, within):
            return f"{'local' if within else 'peer'} copy of {nbytes} bytes, {_place(dst)} <- {_place(src)}"
        case calls.MemcpyBatch(copies):
            return f"{len(copies)} copies in one call: {'; '.join(map(describe_call, copies))}"
        case calls.MemcpyEveryOther(dst, src, nbytes, rows):
            return f"local copy of every other of {2 * rows} rows of {nbytes} bytes, {_place(dst)} <- {_place(src)}"
        case calls.LaunchReduce(dst, srcs, nbytes, reduction):
            return f"kernel: {reduction} of {len(srcs)} x {nbytes} bytes -> {_place(dst)}"
        case calls.RecordEvent(event):
            return f"record event {event}"
        case calls.WaitEvent(event):
            return f"wait for event {event}"
        case calls.RecordStamp(slot):
            return f"time stamp {slot}"


def _operation(op: calls.WriteValue | calls.WaitValue) -> str:
    if isinstance(op, calls.WaitValue):
        return f"wait {_place(op.flag)} {op.comparison} {op.value}"
    return f"write {_place(op.target)} = {op.value}"


def _place(place: calls.Operand | Flag | calls.SignalWord | calls.HostWord) -> str:
    match place:
        case calls.Operand(rank, buffer, offset):
            return f"{buffer}@{rank}+{offset}"
        case Flag(rank, index):
            return f"flag {index}@{rank}"
        case calls.SignalWord(index):
            return f"cell {index}"
        case _:
            return f"host word '{place}'"


GFX942 = ("MI300X", "MI325X")
"""Names of GPUs whose copy engines take the packets of ``execute/sdma``."""

MADE_UP = (
    "packets of gfx942, from public headers: never run on AMD hardware",
    "addresses are made up: those of rank r begin with r + 1; behind it 00 is the input, 01 the output, 02 staging, 03 "
    "the flags, 04 the rank's own words",
)
"""Notes on packets."""


def takes_packets(machine: Machine) -> bool:
    """Return True if the machine's copy engines take the packets of ``execute/sdma``."""
    return any(name in machine.title for name in GFX942)


def packet_queues(program: Program, rank: int) -> tuple[Program, tuple[PacketQueue, ...]]:
    """Encode a rank's queues of a program for made-up addresses; return the program that fits packets, too."""
    fitted = fit(program)
    ranks = range(program.world_size)
    buffers = {(peer, str(buffer)): _made_up(peer, place) for peer in ranks for place, buffer in enumerate(Buffer)}
    addresses = Addresses(buffers, tuple(_made_up(peer, 3) for peer in ranks))
    words = _made_up(rank, 4)
    return fitted, encode(fitted, rank, addresses, QueueWords(words, ended=words + 0x1000, stamps=words + 0x2000), 1)


def packet_lines(
    program: Program, rank: int, queues: tuple[PacketQueue, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """List the packets of each engine behind the commands that they serve; other queues have commands only."""
    encoded = {queue.engine: queue for queue in queues}
    return tuple(
        _packets_of(encoded[queue.engine], queue)
        if queue.engine in encoded
        else (f"engine {queue.engine}, which takes no packets", tuple(map(describe, queue.commands)))
        for queue in program.queues_of(rank)
    )


def _packets_of(encoded: PacketQueue, queue: Queue) -> tuple[str, tuple[str, ...]]:
    lines: list[str] = []
    offset, last = 0, -1
    for packet, index in zip(encoded.packets, encoded.commands, strict=True):
        number = len(queue.commands) if index is None else index
        if number != last:
            lines.append("end" if index is None else describe(queue.commands[index]))
        lines.append(f"    {offset:#06x}  {packet}")
        offset, last = offset + len(packet.to_bytes()), number
    return f"engine {queue.engine}: {len(encoded.packets)} packets, {offset} bytes", tuple(lines)


def _made_up(rank: int, place: int) -> int:
    return (rank + 1 << 40) + (place << 32)
