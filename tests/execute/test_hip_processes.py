"""The HIP executor in several processes, on the stand-in: memory mapped by IPC handles, the death of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from cuda_world import FLAGS
from hip_world import StandinDriver, hip_gpus
from marks import long
from on_ranks import everyones, on_ranks
from ranks import crew
from small_programs import programs
from worlds import fill, output_of

from sidelane import Communicator
from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda import DriverFeatures
from sidelane.execute.hip import HipExecutor
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.program.collective import Buffer
from sidelane.program.ir import Program
from sidelane.program.transform import freeze

ALLOCATION = 1 << 16


class HipRank:
    """One rank: its device memory, and that of its peers, mapped by their handles."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.driver = StandinDriver()
        self.control = ControlBlock(Exchange(group, 60.0))
        features = DriverFeatures("6.4", 16, stream_memory_ops=True, peer_writes=True)
        self.executor = HipExecutor(
            self.rank, self.driver.device, self.control, timeout_s, features, driver=self.driver
        )
        self.stream = self.driver.caller = self.driver.create_stream()
        self.own = {buffer: self.driver.array(ALLOCATION) for buffer in Buffer}
        self.flags = self.driver.array(8 * FLAGS)
        handles = {buffer: self.driver.export(array.ctypes.data) for buffer, array in self.own.items()}
        given: list = [None] * self.ranks
        dist.all_gather_object(given, (handles, self.driver.export(self.flags.ctypes.data)), group)
        self.buffers, flags = {}, []
        for rank, (theirs, word) in enumerate(given):
            is_own = rank == self.rank
            for buffer, handle in theirs.items():
                mine = self.own[buffer].ctypes.data
                self.buffers[rank, buffer] = mine if is_own else self.driver.open_exported(handle)
            flags.append(self.flags.ctypes.data if is_own else self.driver.open_exported(word))
        self.addresses = [Addresses(self.buffers, tuple(word + offset for word in flags)) for offset in (0, 4 * FLAGS)]
        self.epoch = 0

    def fill(self, program: Program, seed: int) -> np.ndarray:
        """Fill this rank's memory once nobody uses it, and return the output that is expected."""
        dist.barrier(self.group)  # some programs end on a rank while its peers still read its slots
        fill(
            program.collective,
            self.rank,
            seed,
            *map(torch.from_numpy, (self.own[Buffer.INPUT], self.own[Buffer.OUTPUT])),
        )
        return output_of(program.collective, self.rank, seed).numpy()

    def check(self, program: Program, expected: np.ndarray) -> None:
        span = program.collective.output_span(self.rank, 0, program.collective.output_bytes(self.rank))
        found = self.own[span.buffer][span.offset : span.end]
        assert np.array_equal(found, expected), f"rank {self.rank}: {program.variant}"

    def begin(self) -> int:
        self.epoch += 1
        dist.barrier(self.group)  # all have filled their memory
        return self.epoch


@on_ranks(2, long(4))
def test_ranks_in_processes_move_the_right_bytes(group: dist.ProcessGroup) -> None:
    rank, count = HipRank(group, 30.0), 0
    for seed, program in enumerate(programs(rank.ranks)[::3]):
        loaded = rank.executor.load(program, rank.addresses[0])
        for repeat in range(3):
            expected = rank.fill(program, 10 * seed + repeat)
            epoch = rank.begin()
            rank.control.begin(epoch, program.variant)
            loaded.run(epoch, (rank.stream, False))
            rank.executor.synchronize()
            rank.control.end(epoch)
            rank.check(program, expected)
            count += 1
    frozen = freeze(programs(rank.ranks)[0])
    loaded = rank.executor.load(frozen, rank.addresses[1], captured=True)
    graph = rank.driver.capture(rank.stream, lambda: loaded.run(rank.epoch + 1, (rank.stream, True)))
    for repeat in range(5):
        expected = rank.fill(frozen, 1000 + repeat)
        rank.begin()
        rank.driver.submit([rank.driver.bind_graph(graph, rank.stream)])
        rank.driver.runtime.call("hipStreamSynchronize", rank.stream)
        rank.check(frozen, expected)
    dist.barrier(group)
    rank.executor.close()
    assert count > 20


def lose_a_rank(group: dist.ProcessGroup) -> tuple[str, Sequence[int]] | None:
    rank = HipRank(group, 20.0)
    program = programs(rank.ranks)[0]
    loaded = rank.executor.load(program, rank.addresses[0])
    rank.begin()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.control.begin(rank.epoch, program.variant)
    loaded.run(rank.epoch, (rank.stream, False))
    try:
        rank.executor.synchronize()
    except PeerError as error:
        kind = "time-out" if isinstance(error, PeerTimeoutError) else "death"
        rank.executor.close()
        return kind, error.ranks
    raise AssertionError("a rank died, and nobody noticed")


def test_the_death_of_a_rank_is_noticed_before_the_time_out() -> None:
    with crew(3) as ranks:
        first, _, last = ranks.run(lose_a_rank, 3, dying=[1], timeout_s=60)
    assert first == last == ("death", (1,))


@on_ranks(2, 3)
def test_a_communicator_runs_on_the_stand_in(group: dist.ProcessGroup) -> None:
    """Calls on AMD GPUs, repeated, in lists and in a graph; all ranks take the same variants."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    taken = []
    with hip_gpus() as driver, Communicator(group) as comm:
        abilities = comm.calls.backend.abilities
        assert abilities.implementations == ("dma",) and abilities.captures
        for repeat in range(4):
            for count in (1, 7, 4096):
                own = torch.arange(count, dtype=torch.int32) + 1000 * rank + repeat
                every = [torch.arange(count, dtype=torch.int32) + 1000 * other + repeat for other in range(ranks)]
                gathered = torch.empty(ranks, count, dtype=torch.int32)
                comm.all_gather(gathered, own)
                assert torch.equal(gathered, torch.stack(every))
                taken.append(comm.last_choice().candidate.variant)
                given, received = torch.stack([own + 10 * other for other in range(ranks)]), torch.empty_like(gathered)
                comm.all_to_all(received, given)
                assert torch.equal(received, torch.stack([one + 10 * rank for one in every]))
                summed, part = own.clone(), torch.empty(count, dtype=torch.int32)
                comm.all_reduce(summed)
                assert torch.equal(summed, torch.stack(every).sum(0, dtype=torch.int32))
                comm.reduce_scatter(part, given)
                assert torch.equal(part, sum(one + 10 * rank for one in every))
                comm.broadcast(part, root=ranks - 1)
                comm.all_gather([gathered, received], [own, part])
                assert torch.equal(gathered, torch.stack(every))
        buffer = comm.empty(ranks, 512, dtype=torch.int32)
        comm.all_gather(buffer, buffer[rank])
        graph = driver.capture(driver.caller, lambda: comm.all_gather(buffer, buffer[rank]))
        for repeat in range(3):
            dist.barrier(group)
            buffer.fill_(-1)
            buffer[rank] = rank + 10 * repeat
            dist.barrier(group)
            driver.submit([driver.bind_graph(graph, driver.caller)])
            driver.runtime.call("hipStreamSynchronize", driver.caller)
            assert buffer[:, 0].tolist() == [other + 10 * repeat for other in range(ranks)]
        dist.barrier(group)
    assert everyones(group, taken) == [taken] * ranks
