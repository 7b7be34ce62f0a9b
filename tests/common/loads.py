"""What ranks execute in the tests of programs of one's own: the same functions for CPU processes and for GPUs.

A rank's tensors are on its default device, which the processes for GPUs set.
"""

from __future__ import annotations

import contextlib
import itertools
import random

import torch

from sidelane import Communicator
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import (
    Collective,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Value, Wait
from sidelane.session.bound_program import BoundProgram

POISON = 0xA5
INTS = Reduction(ReduceOp.SUM, "int32")


def definitions(n: int, rng: random.Random) -> list[Collective]:
    """Every kind once or twice, of uneven sizes."""
    uneven = [rng.randrange(0, 3000) for _ in range(n)]
    words = [4 * rng.randrange(0, 900) for _ in range(n)]
    matrix = [[rng.randrange(0, 700) for _ in range(n)] for _ in range(n)]
    root = rng.randrange(n)
    return [
        all_gather(uneven),
        all_gather([rng.randrange(1, 5000)] * n, in_place=True),
        all_to_all(matrix),
        all_to_all([[rng.randrange(1, 999)] * n] * n, in_place=True),
        broadcast(rng.randrange(1, 9000), n, root, in_place=rng.random() < 0.5),
        scatter(uneven, root),
        gather(uneven, root),
        reduce_scatter(words, INTS),
        all_reduce(words, INTS, in_place=rng.random() < 0.5),
    ]


class Case:
    """A program of one's own on this rank, with tensors that are filled and compared by its contract alone."""

    def __init__(self, comm: Communicator, program: Program) -> None:
        assert isinstance(program.collective, Contract)
        self.comm, self.contract = comm, program.collective
        remote = program.remote_buffers()
        self.tensors: dict[str, torch.Tensor] = {}
        for name in self.contract.names:
            sizes = [self.contract.buffer_bytes(rank, name) for rank in range(comm.world_size)]
            if name in remote:
                self.tensors[name] = comm.empty(max(sizes), dtype=torch.uint8)
            elif sizes[comm.rank]:
                self.tensors[name] = torch.empty(sizes[comm.rank] + 3, dtype=torch.uint8)  # more is fine
        self.run: BoundProgram = comm.load(program, self.tensors)

    def fill(self, seed: int) -> None:
        """Give every buffer of this rank new bytes."""
        for name, tensor in self.tensors.items():
            tensor.fill_(POISON)
            size = self.contract.buffer_bytes(self.comm.rank, name)
            tensor[:size].copy_(_bytes(self.contract, self.comm.rank, name, seed))

    def check(self, seed: int) -> None:
        """Compare every byte with what the contract says, what nobody may touch included."""
        for name, tensor in self.tensors.items():
            size = self.contract.buffer_bytes(self.comm.rank, name)
            want = _bytes(self.contract, self.comm.rank, name, seed).clone()
            for result in self.contract.results:
                if (result.dst.rank, result.dst.buffer) == (self.comm.rank, name):
                    want[result.dst.offset : result.dst.end] = _combined(self.contract, result, seed)
            found = tensor.cpu()
            if name not in self.contract.scratch:
                assert torch.equal(found[:size], want), (str(self.run), name, seed)
            assert found[size:].eq(POISON).all(), (str(self.run), name)


def built(collective: Collective, rng: random.Random) -> Program:
    """By any variant and transport that there is for it."""
    ways = list(itertools.product(variants(collective.kind), [Transport.PUSH, Transport.PULL, Transport.STAGED]))
    rng.shuffle(ways)
    for variant, transport in ways:
        with contextlib.suppress(ValueError):
            return build(collective, variant, transport)
    raise AssertionError(collective)


def _bytes(contract: Contract, rank: int, name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * rank + contract.names.index(name))
    size = contract.buffer_bytes(rank, name)
    return torch.randint(0, 250, (size,), dtype=torch.uint8, generator=generator, device="cpu")


def _combined(contract: Contract, result: Result, seed: int) -> torch.Tensor:
    sources = [_bytes(contract, src.rank, src.buffer, seed)[src.offset : src.end] for src in result.srcs]
    if result.reduction is None:
        return sources[0]
    total = sum(source.clone().view(torch.int32).to(torch.int64) for source in sources)
    assert isinstance(total, torch.Tensor)
    return total.to(torch.int32).view(torch.uint8)


def handover(n: int, nbytes: int = 4000, *, slope: int = 1) -> Program:
    """Each rank hands the middle of its cache to the next one, whose inbox must be free: signals of a slope."""
    value = Value(0, slope)
    flag = [Flag(rank, 0) for rank in range(n)], [Flag(rank, 1) for rank in range(n)]
    queues, results = [], []
    for rank in range(n):
        peer, before = (rank + 1) % n, (rank - 1) % n
        src, dst = Span(rank, "cache", 64, nbytes), Span(peer, "inbox", 16, nbytes)
        results.append(Result(dst, (src,)))
        commands: tuple[Command, ...] = (
            *(Signal(flag[0][before], value), Wait(flag[0][rank], value)),
            *(Copy(dst, src), Signal(flag[1][peer], value), Wait(flag[1][rank], value)),
        )
        queues.append(Queue(rank, Engine(EngineKind.DMA), commands))
    sizes = {"cache": (nbytes + 100,) * n, "inbox": (nbytes + 32,) * n}
    return Program(Contract.of("handover", sizes, results), "push", tuple(queues), (0,) * n, 2)
