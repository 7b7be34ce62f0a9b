"""What ranks execute in the tests of programs of one's own: the same functions for CPU processes and for GPUs.

A rank's tensors are on its default device, which the processes for GPUs set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from contracts import under_contract
from gather_rings import ring_of_gathers
from sweeps import communicator

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
from sidelane_lab.model.engine_add import reduce_on_engines

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


def engines_that_add(group: dist.ProcessGroup) -> None:
    """Programs whose copy engines reduce: an engine's thread adds between CPU processes."""
    words = [8 * (1 + rank) for rank in range(dist.get_world_size(group))]
    with communicator(group) as comm:
        for make, variant in itertools.product((reduce_scatter, all_reduce), ("b2b", "pcpy")):
            case = Case(comm, under_contract(reduce_on_engines(make(words, INTS), variant)))
            for seed in range(3):
                case.fill(seed)
                case.run()
                comm.synchronize()
                case.check(seed)
            case.run.close()


def calls_that_wait_for_nobody(group: dist.ProcessGroup) -> None:
    """A rank begins a call of its program before its peers do: posts of what all ranks know are not compared."""
    with communicator(group) as comm:
        case = Case(comm, under_contract(build(all_gather([8] * comm.world_size), "b2b")))
        case.fill(0)
        if comm.rank:
            dist.barrier(group)
        work = case.run(async_op=True)
        if not comm.rank:
            dist.barrier(group)
        work.wait()
        case.check(0)


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


def _built(collective: Collective, rng: random.Random) -> Program:
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


def builders(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Programs of all builders under contracts, called at random next to each other and to collectives."""
    rng = random.Random(seed)
    with communicator(group) as comm:
        n = comm.world_size
        chosen = []
        for collective in definitions(n, rng):
            chosen.append(under_contract(_built(collective, rng)))
        cases = [Case(comm, program) for program in chosen]
        delays = random.Random(seed + 1 + comm.rank)
        shard, whole = torch.empty(77, dtype=torch.int32), torch.empty(77 * n, dtype=torch.int32)
        for call in range(calls):
            case = rng.choice(cases)
            case.fill(call)
            if delays.random() < 0.1:
                time.sleep(delays.random() * 0.003)
            work = case.run(async_op=rng.random() < 0.2)
            if work is not None:
                work.wait()
            if rng.random() < 0.3:
                comm.all_gather(whole, shard.fill_(call + comm.rank))
                assert whole.view(n, -1)[:, 5].tolist() == [call + rank for rank in range(n)]
            comm.synchronize()
            case.check(call)
            assert comm.last_choice() is not None
        for case in cases:
            case.run.close()
            case.run.close()
    return len(cases)


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


def handed_over(group: dist.ProcessGroup, calls: int, slope: int) -> None:
    """One that no collective is, back to back, on tensors of two sizes at once."""
    with communicator(group) as comm:
        cases = [Case(comm, handover(comm.world_size, nbytes, slope=slope)) for nbytes in (4000, 33)]
        for call in range(calls):
            for case in cases:
                case.fill(call)
            for case in cases[:: 1 - 2 * (call % 2)]:
                case.run()
            comm.synchronize()
            for case in cases:
                case.check(call)


def far_on(group: dist.ProcessGroup, numbers: Sequence[int], skip: Callable[[Communicator, int], None]) -> None:
    """Programs that are loaded after billions of calls, and such as have not been called for as many."""
    with communicator(group) as comm:
        cases = [Case(comm, handover(comm.world_size, slope=slope)) for slope in (1, 3)]
        for seed, number in enumerate(numbers):
            skip(comm, number)
            cases.append(Case(comm, handover(comm.world_size, slope=1 + seed % 2)))
            for again, case in itertools.product(range(2), cases):
                case.fill(10 * seed + again)
                if comm.rank == (seed + again) % comm.world_size:
                    time.sleep(0.01)
                case.run()
                comm.synchronize()
                case.check(10 * seed + again)


def mistakes(group: dist.ProcessGroup) -> list[str]:
    """Everything that is refused, on every rank alike, after which all goes on."""
    texts = []
    with communicator(group) as comm, communicator(group) as other:
        n = comm.world_size
        program = handover(n)
        cache, inbox = torch.empty(4100, dtype=torch.uint8), comm.empty(4032, dtype=torch.uint8)
        foreign, whole = other.empty(4032, dtype=torch.uint8), comm.empty(9000, dtype=torch.uint8)
        spoilt = dataclasses.replace(program, queues=(*program.queues[:-1], Queue(n - 1, Engine(EngineKind.DMA), ())))
        wrong: list[tuple[Any, Any]] = [
            ("handover", {}),
            (program, [cache, inbox]),
            (handover(n + 1), {"cache": cache, "inbox": inbox}),
            (program, {"cache": cache}),
            (program, {"cache": cache, "inbox": inbox, "outbox": cache}),
            (program, {"cache": cache[:-1], "inbox": inbox}),
            (program, {"cache": cache, "inbox": torch.empty(4032, dtype=torch.uint8)}),
            (program, {"cache": cache, "inbox": foreign}),
            (program, {"cache": torch.empty(8200, dtype=torch.uint8)[::2], "inbox": inbox}),
            (program, {"cache": cache, "inbox": "a string"}),
            (program, {"cache": whole[:4100], "inbox": whole[4000:8032]}),
            (spoilt, {"cache": cache, "inbox": inbox}),
        ]
        for given in wrong:
            try:
                comm.load(*given)
                texts.append("no error")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        case = Case(comm, program)
        case.fill(1)
        case.run()
        comm.synchronize()
        case.check(1)
        case.run.close()
        try:
            case.run()
        except RuntimeError as error:
            texts.append(f"{type(error).__name__}: {error}")
        comm.barrier()
    return texts


def different(group: dist.ProcessGroup) -> list[str]:
    """Ranks that load other programs, or put a buffer elsewhere: all hear of it, and go on."""
    texts = []
    with communicator(group) as comm:
        n, odd = comm.world_size, comm.rank == 1
        cache, inbox = torch.empty(4100, dtype=torch.uint8), comm.empty(8064, dtype=torch.uint8)
        for program, start in ((handover(n, 3999 if odd else 4000), 0), (handover(n), 32 if odd else 0)):
            try:
                comm.load(program, {"cache": cache, "inbox": inbox[start : start + 4032]})
                texts.append("no error")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        case = Case(comm, handover(n))
        case.fill(2)
        case.run()
        comm.synchronize()
        case.check(2)
    return texts


def gathers_in_a_ring(group: dist.ProcessGroup, nbytes: int) -> None:
    """Next to what reads them, with entries in a ring of two, and without in one of three, called back to back."""
    with communicator(group) as comm:
        n, gathers = comm.world_size, 6
        for slots, entries in ((2, True), (3, False)):
            program = ring_of_gathers(n, slots, nbytes, behind=2, entries=entries, rounds=gathers // slots)
            shards = torch.empty(gathers * nbytes, dtype=torch.uint8)
            used = [torch.full((gathers * n * nbytes,), POISON, dtype=torch.uint8) for _ in range(2)]
            runs = [comm.load(program, {"shards": shards, "used": one}) for one in used]
            for number in range(10):
                everyone = [
                    torch.randint(
                        256, shards.shape, generator=torch.Generator("cpu").manual_seed(n * number + rank), device="cpu"
                    )
                    for rank in range(n)
                ]
                shards.copy_(everyone[comm.rank])
                wanted = torch.stack([one.view(gathers, nbytes) for one in everyone], 1).flatten()
                for run in runs:
                    run()
                comm.synchronize()
                for one in used:
                    assert torch.equal(one.cpu(), wanted.to(torch.uint8)), (slots, number)
            for run in runs:
                run.close()


def contract_is_the_collectives(group: dist.ProcessGroup) -> None:
    """A built-in program may be loaded as it is, too, with the names that collectives have."""
    with communicator(group) as comm:
        n = comm.world_size
        program = build(all_gather([40] * n), "b2b")
        output, input = comm.empty(40 * n, dtype=torch.uint8), comm.empty(40, dtype=torch.uint8)
        run = comm.load(program, {"input": input, "output": output})
        for value in range(20):
            input.fill_(value + comm.rank)
            output.fill_(POISON)
            run()
            comm.synchronize()
            assert output.view(n, 40)[:, 7].tolist() == [value + rank for rank in range(n)]


def written_in_texts(group: dist.ProcessGroup) -> str:
    """Some ranks write texts and numpy's numbers, others members and plain ones: they load the same average. Bytes
    that there are not are refused, and all goes on.
    """
    with communicator(group) as comm:
        n, plain = comm.world_size, comm.rank % 2 == 0
        reduction = Reduction(ReduceOp.AVG, "float32") if plain else Reduction("avg", np.str_("float32"))  # type: ignore[arg-type]
        nbytes = 32 if plain else np.int64(32)
        program = build(all_reduce([nbytes] * n, reduction), "b2b")  # type: ignore[list-item]
        input, output = (comm.empty(8 * n, dtype=torch.float32) for _ in range(2))
        far = Copy(Span(0, "output", 0, 8), Span(n, "input", 0, 8))
        spoilt = dataclasses.replace(program, queues=[*program.queues, Queue(0, Engine("dma", 7), [far])])  # type: ignore[arg-type]
        try:
            comm.load(spoilt, {"input": input, "output": output})
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        run = comm.load(program, {"input": input, "output": output})
        input.copy_(torch.arange(8 * n) * (comm.rank + 1))
        run()
        comm.synchronize()
        total = input.cpu()
        dist.all_reduce(total, group=group)  # Gloo has no average
        assert torch.equal(output.cpu(), total / n)
    return text
