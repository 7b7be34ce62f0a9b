"""Where the tensors of a case lie, what its ranks launch, and what must come out. No device in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sanitizer.cases import LOCAL_REDUCE, Case
from sidelane.device.launch import Launch, LaunchSite
from sidelane.execute.base import Addresses, Pieces
from sidelane.execute.cuda import kernel_program, reduce
from sidelane.execute.cuda.tables import DeviceTable
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Kind, ReduceOp


class Memory(Protocol):
    """Who hands out memory: everything by itself, so that a byte too far is in nobody's.

    Attributes:
        shared_bytes: shared memory that a thread block may ask for.
    """

    shared_bytes: int

    def data(self, nbytes: int, misalignment: int) -> int:
        """Address of memory that nobody has written, so many bytes beyond a multiple of 256."""

    def arena(self, world_size: int) -> int:
        """Address of an arena (``device/layout.py``) before its first call."""

    def words(self) -> tuple[int, int]:
        """Addresses of status words, and of the counters of thread blocks before their first call."""

    def store_table(self, values: npt.NDArray[np.int64]) -> DeviceTable:
        """A table on the device."""


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory of one tensor, without what it has in common with others."""

    address: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Setup:
    """A case in memory.

    Attributes:
        launches: one for each rank.
        inputs: by rank and number of the tensor: what is to be filled.
        outputs: likewise, what is to be looked at.
        arenas: of the ranks.
    """

    launches: tuple[Launch, ...]
    inputs: Mapping[tuple[int, int], Room]
    outputs: Mapping[tuple[int, int], Room]
    arenas: tuple[int, ...] = ()


def set_up(case: Case, memory: Memory) -> Setup:
    """Place a case, and arrange its launches as the executor does."""
    if case.kind == LOCAL_REDUCE:
        return _set_up_local(case, memory)
    program, parts, n = case.program(), case.collectives(), case.ranks
    rooms: dict[tuple[int, str, int], Room] = {}
    for number, part in enumerate(parts):
        for rank in range(n):
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                nbytes = part.buffer_bytes(rank, buffer)
                if nbytes:
                    rooms[rank, buffer, number] = Room(memory.data(nbytes, case.misalignment(number)), nbytes)
    buffers: dict[tuple[int, str], int] = {}
    pieces: dict[tuple[int, str], Pieces] = {}
    for rank in range(n):
        if program.staging_bytes:
            buffers[rank, Buffer.STAGING] = memory.data(program.staging_bytes, 0)
        for buffer in (Buffer.INPUT, Buffer.OUTPUT):
            mine = [
                (number, rooms[rank, buffer, number]) for number in range(len(parts)) if (rank, buffer, number) in rooms
            ]
            if mine and isinstance(program.collective, Batch):
                starts = program.collective.starts(rank, buffer)
                rows = [(starts[number], room.nbytes, room.address) for number, room in mine]
                pieces[rank, buffer] = Pieces(*zip(*rows, strict=True))
            elif mine:
                buffers[rank, buffer] = mine[0][1].address
    addresses = Addresses(buffers, (), tuple(memory.arena(n) for _ in range(n)), pieces)
    launches: list[Launch] = []
    for rank in range(n):
        site = LaunchSite(rank, addresses.arenas, *memory.words(), program.blocks, memory.shared_bytes)
        launch = kernel_program.arrange(program, site, addresses, lambda values: memory.store_table(values).address)
        assert launch is not None, case
        launches.append(launch)
    inputs, outputs = {}, {}
    for number, part in enumerate(parts):
        for rank in range(n):
            if part.root is None or part.root == rank:
                span = part.input_span(rank, 0, part.input_bytes(rank))
                inputs[rank, number] = Room(rooms[rank, span.buffer, number].address + span.offset, span.nbytes)
            span = part.output_span(rank, 0, part.output_bytes(rank))
            outputs[rank, number] = Room(rooms[rank, span.buffer, number].address + span.offset, span.nbytes)
    return Setup(tuple(launches), inputs, outputs, addresses.arenas)


def _set_up_local(case: Case, memory: Memory) -> Setup:
    assert case.reduction is not None
    rooms = [Room(memory.data(case.nbytes, case.misalignment(0)), case.nbytes) for _ in range(case.ranks + 1)]
    sources = [room.address for room in rooms[1:]]
    launch = reduce.arrange(rooms[0].address, sources, case.nbytes, case.reduction, case.blocks)
    return Setup((launch,), {(rank, 0): room for rank, room in enumerate(rooms[1:])}, {(0, 0): rooms[0]})


# --- data -------------------------------------------------------------------------------------------------------------


def draw(case: Case, number: int, turn: int) -> list[torch.Tensor]:
    """Inputs of all ranks for tensor ``number``, other ones each turn. Every result is exact in every dtype."""
    generator = np.random.default_rng([number, turn, case.ranks])
    if case.kind == LOCAL_REDUCE:
        lengths = [case.counts[0]] * case.ranks
    else:
        part = case.collectives()[number]
        lengths = [part.input_bytes(rank) // case.element_bytes for rank in range(case.ranks)]
    if case.reduction is None:
        return [torch.from_numpy(generator.integers(0, 256, length, np.uint8)) for length in lengths]
    dtype = getattr(torch, case.dtype)
    # Multiples of the number of ranks, so that averages are whole numbers.
    return [
        torch.from_numpy(generator.integers(-8 // case.ranks, 8 // case.ranks + 1, length)).mul(case.ranks).to(dtype)
        for length in lengths
    ]


def wanted(case: Case, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What the output of a rank must be."""
    n = case.ranks
    if case.kind == LOCAL_REDUCE or case.kind == Kind.ALL_REDUCE:
        return _combined(inputs, case.op)
    match Kind(case.kind):
        case Kind.ALL_GATHER:
            return torch.cat(inputs)
        case Kind.ALL_TO_ALL:
            return torch.cat([tensor.chunk(n)[rank] for tensor in inputs])
        case Kind.BROADCAST:
            return inputs[case.root]
    return _combined([tensor.chunk(n)[rank] for tensor in inputs], case.op)


def _combined(tensors: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    stacked = torch.stack(tensors).to(torch.float64)
    results: dict[ReduceOp, Any] = {
        ReduceOp.SUM: lambda: stacked.sum(0),
        ReduceOp.AVG: lambda: stacked.sum(0) / len(tensors),
        ReduceOp.MIN: lambda: stacked.min(0).values,
        ReduceOp.MAX: lambda: stacked.max(0).values,
    }
    result: torch.Tensor = results[op]()
    return result.to(tensors[0].dtype)


class Imagined:
    """Memory that is not there: for compilers and tests, which look at addresses only."""

    shared_bytes = 227 << 10

    def __init__(self) -> None:
        self._next = 1 << 32

    def data(self, nbytes: int, misalignment: int) -> int:
        address = self._next + misalignment
        self._next += -(-(nbytes + misalignment) // 256) * 256
        return address

    def arena(self, world_size: int) -> int:
        return self.data(1 << 26, 0)

    def words(self) -> tuple[int, int]:
        return self.data(256, 0), self.data(1024, 0)

    def store_table(self, values: npt.NDArray[np.int64]) -> DeviceTable:
        return DeviceTable(self.data(values.nbytes, 0))
