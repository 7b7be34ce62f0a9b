"""A rank on a GPU, as the tests of ``on_ranks`` get it: memory that its peers reach, and executors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from vendors import IS_AMD

from sidelane.execute.base import Addresses
from sidelane.execute.cuda import CudaExecutor, CudaProgram, DriverFeatures, probe
from sidelane.execute.hip import HipDriver, HipExecutor, probe_graphs
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.torch_symm import TorchSymmetricMemory
from sidelane.program.collective import Buffer
from sidelane.program.ir import Program

FLAGS = 1024  # in each of the two regions
ARENA_BYTES = 64 << 20


class Context:
    """One rank: its executor, flags and an arena of symmetric memory that cases carve up alike on every rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cuda", rank % torch.cuda.device_count())  # one for all, where there is but one
        self.group = dist.group.WORLD
        assert self.group is not None
        exchange = Exchange(self.group, 60.0)
        self.memory = TorchSymmetricMemory(exchange, self.device, timeout_s=60.0)
        self.features = find_features(exchange, self.device, self.memory)
        self.arena = self.memory.allocate(ARENA_BYTES)
        self.parties: dict[str, Party] = {"main": Party(self)}
        self.stream = torch.cuda.Stream()
        self.used = 0

    @property
    def main(self) -> Party:
        return self.parties["main"]

    def carve(self, nbytes: int, misalign: int = 0) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Symmetric bytes at ``misalign`` behind a 256-byte boundary, and their address on each rank."""
        start = self.used + misalign
        self.used = -(-(start + nbytes) // 256) * 256
        assert self.used <= ARENA_BYTES, "the arena is too small for this case"
        return self.arena.tensor[start : start + nbytes], tuple(base + start for base in self.arena.addresses)


def find_features(exchange: Exchange, device: torch.device, memory: TorchSymmetricMemory) -> DriverFeatures:
    if IS_AMD:
        return probe_graphs(device, probe(exchange, device, memory, HipDriver), exchange, HipDriver)
    return probe(exchange, device, memory)


class Party:
    """An executor with flags and a control block of its own, as a communicator has."""

    def __init__(self, context: Context, *, timeout_s: float = 30.0, **features: Any) -> None:
        self.context = context
        self.control = ControlBlock(Exchange(context.group, 60.0))
        self.flags: SymmetricBlock = context.memory.allocate(2 * FLAGS * 4)
        found = dataclasses.replace(context.features, **features)
        arguments = context.rank, context.device, self.control, timeout_s, found
        if IS_AMD:
            self.executor: CudaExecutor = HipExecutor(*arguments, driver=HipDriver(context.device))
        else:
            self.executor = CudaExecutor(*arguments)
        self.epoch = 0

    def load(self, program: Program, buffers: dict[tuple[int, Buffer], int], *, frozen: bool = False) -> CudaProgram:
        assert program.flag_count <= FLAGS
        offset = 4 * FLAGS if frozen else 0
        addresses = Addresses(buffers, tuple(base + offset for base in self.flags.addresses))
        return self.executor.load(program, addresses, captured=frozen)

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def close(self) -> None:
        self.executor.close()
        self.control.close()
