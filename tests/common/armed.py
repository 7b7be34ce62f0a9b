"""Prelaunched programs on all ranks of a world, armed and fired without a communicator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from cuda_world import World

from sidelane.collectives.backend_cuda import CudaBackend
from sidelane.execute.cuda.trigger import CUDA_CHANNELS, CudaTrigger
from sidelane.program.ir import EPOCH, Program
from sidelane.program.transform import held_by, hold, without_callers


class Armed:
    """A program on all ranks, each of which waits for its trigger on a stream of the executor."""

    def __init__(self, world: World, program: Program, ahead: Callable[[Program], Program] = hold) -> None:
        self.world, program = world, ahead(program)
        self.data = world.load(without_callers(program))
        self.triggers: list[CudaTrigger] = []
        self.addresses: list[int] = []
        for rank, loaded in enumerate(self.data.ranks):
            flag = held_by(program, rank)
            assert flag is not None
            self.addresses.append(loaded.addresses.flag(flag))
            backend = SimpleNamespace(executor=world.executors[rank], channels=CUDA_CHANNELS)
            self.triggers.append(CudaBackend.bind_trigger(backend, [(self.addresses[rank], EPOCH)], loaded))

    def _ranks(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.world.world_size) if ranks is None else ranks

    def arm(self, ranks: Sequence[int] | None = None) -> None:
        self.world.epoch += 1
        for rank in self._ranks(ranks):
            executor = self.world.executors[rank]
            executor.order(self.world.streams[rank].cuda_stream, executor.held_stream())
            self.data.ranks[rank].run(self.world.epoch, (executor.held_stream(), False))

    def fire(self, ranks: Sequence[int] | None = None, stream: int | None = None, *, follows: bool = True) -> None:
        for rank in self._ranks(ranks):
            handle = self.world.streams[rank].cuda_stream if stream is None else stream
            self.triggers[rank].fire(self.world.epoch, (handle, False), follows=follows)

    def fire_from_host(self, ranks: Sequence[int] | None = None) -> None:
        for rank in self._ranks(ranks):
            self.triggers[rank].fire_from_host(self.world.epoch)

    def follow(self, rank: int, *, fired: bool = True) -> None:
        """Let the caller's stream follow the end. Not ``fired``: a kernel of the stream fires."""
        caller = (self.world.streams[rank].cuda_stream, False)
        self.triggers[rank].follow(self.world.epoch, caller, fired=fired)

    def store(self, rank: int) -> Callable[[], None]:
        """Return the store of a kernel that fires."""
        address, epoch = self.addresses[rank], self.world.epoch

        def kernel() -> None:
            ctypes.c_uint32.from_address(address).value = epoch

        return kernel
