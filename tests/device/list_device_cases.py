"""What ranks execute in the tests of calls with lists on GPUs (``test_device_lists``)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import list_cases
import pytest
import torch
import torch.distributed as dist
from device_cases import Context
from list_cases import MOVING, REDUCING, Case

from sidelane import Communicator, Config
from sidelane.choice.candidate import SM, everything, takes_one_tensor
from sidelane.execute.submitted import Counts
from sidelane.program.collective import Kind

KERNELS = (*MOVING, *REDUCING)
SMALL, LARGE = (0, 1, 7, 257, 5003), (300_001, 262_144)


def run(context: Context, name: str, *args: Any, stream: bool = False) -> Any:
    """One of the cases that CPU ranks run too, on the legacy default stream or on another one."""
    group = dist.group.WORLD
    torch.set_default_device(context.device)
    try:
        if not stream:
            return getattr(list_cases, name)(group, *args)
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(list_cases, name)(group, *args)
    finally:
        torch.set_default_device(None)


def run_on_stream(context: Context, name: str, *args: Any) -> Any:
    return run(context, name, *args, stream=True)


def by_kernels(context: Context, seed: int) -> int:
    """Every kernel that takes lists, on few and on many bytes, each call made three times; then back to back."""
    device = context.device
    torch.set_default_device(device)
    made = 0
    try:
        with Communicator(device=device, config=Config(timeout_s=30)) as comm, torch.cuda.stream(torch.cuda.Stream()):
            rng = random.Random(seed)
            for kind, sizes, symmetric in itertools.product(KERNELS, (SMALL, SMALL + LARGE), (None, True)):
                variants = [v.variant for v in everything(kind) if v.implementation == SM and not takes_one_tensor(v)]
                case = Case(comm, kind, rng, rng.randint(2, 6), symmetric, sizes, alike=True)
                for variant, again in itertools.product(variants, range(3)):
                    case.fill(again)
                    before = comm.submitted()
                    case.call(variant=variant)
                    case.check(variant, again)
                    made += 1
                    moved = any(size for size, *_ in case.drawn)
                    assert comm.submitted().kernels - before.kernels == int(moved)
                    assert comm.submitted().peer_copies == before.peer_copies
            long = Case(comm, Kind.ALL_GATHER, rng, 300, sizes=(1, 24, 4096), symmetric=False)
            long.fill(0)
            for _ in range(50):  # nobody waits for anybody on the host
                long.call(variant="one_shot")
            long.check("many tensors")
            with pytest.raises(ValueError, match="one collective, reduction and root"):
                comm.all_reduce([torch.zeros(3), torch.zeros(3, dtype=torch.int32)], variant="one_shot")
            comm.all_reduce(mixed := [torch.ones(3), torch.ones(3, dtype=torch.int32)])
            assert [tensor.tolist() for tensor in mixed] == [[comm.world_size] * 3] * 2
        return made
    finally:
        torch.set_default_device(None)


def captured(context: Context, seed: int, replays: int) -> None:
    """Lists of every kind and a batch of all kinds in one graph, replayed with fresh inputs and eager calls between."""
    device = context.device
    torch.set_default_device(device)
    try:
        with Communicator(device=device, config=Config(timeout_s=30)) as comm:
            rng = random.Random(seed)
            cases = [Case(comm, kind, rng, 4) for kind in (*MOVING, *REDUCING)]
            for symmetric in (None, True):
                cases += [Case(comm, kind, rng, 4, symmetric, SMALL + LARGE, alike=True) for kind in KERNELS]
            together = [Case(comm, kind, rng, 2) for kind in (*MOVING, *REDUCING)]
            single, own = torch.empty(comm.world_size, dtype=torch.int64), torch.full((1,), comm.rank)

            def fill(again: int) -> None:
                for case in (*cases, *together):
                    case.fill(again)
                torch.cuda.synchronize()

            def make() -> None:
                for case in cases:
                    case.call()
                comm.all_gather(single, own)
                with comm.batch() as batch:
                    for case in together:
                        case.call(batch)

            def check(*told: object) -> None:
                for case in (*cases, *together):
                    case.check(*told)

            fill(0)
            make()  # staging cannot be allocated while a graph is captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                make()
            for number in range(replays):
                fill(number)
                if (number + comm.rank) % 5 == 0:
                    torch.cuda._sleep(3_000_000)
                graph.replay()
                check("replay", number)
                if number % 3 == 0:
                    fill(number + 1000)
                    make()
                    check("eager", number)
            for _ in range(50):  # back to back, nobody waits for anybody on the host
                graph.replay()
            torch.cuda.synchronize()
            comm.synchronize()
    finally:
        torch.set_default_device(None)


def submitted(context: Context, count: int) -> tuple[Counts, Counts]:
    """What one tensor and a list of them give to the engines, in place in symmetric memory."""
    device = context.device
    with Communicator(device=device, config=Config(timeout_s=30)) as comm, torch.cuda.stream(torch.cuda.Stream(device)):
        n, rank, size = comm.world_size, comm.rank, 4096
        outputs = [comm.empty(n * size) for _ in range(count)]
        inputs = [output[rank * size : (rank + 1) * size] for output in outputs]
        found = []
        for out, given in ((outputs[0], inputs[0]), (outputs, inputs)):
            for index, tensor in enumerate(inputs):
                tensor.fill_(100 * rank + index)
            comm.all_gather(out, given, variant="b2b")
            found.append(comm.last_submitted().counts)
        for index, output in enumerate(outputs):
            right = torch.arange(n, device=device).mul(100).add(index).repeat_interleave(size)
            assert output.eq(right).all()
        return found[0], found[1]


def dropped(context: Context) -> None:
    """Tensors that nobody holds during asynchronous calls."""
    device = context.device
    torch.set_default_device(device)
    try:
        with Communicator(device=device, config=Config(timeout_s=30)) as comm:
            n, rank = comm.world_size, comm.rank
            kept = []
            for number in range(30):
                outputs = [torch.empty(n * 70_000) for _ in range(3)]
                inputs = [torch.full((70_000,), float(number + rank + k)) for k in range(3)]
                kept.append((number, outputs, comm.all_gather(outputs, inputs, async_op=True)))
                del inputs
                torch.full((3 * 70_000,), -1.0)  # would land in the memory of the inputs
                while len(kept) > 3:
                    then, outputs, work = kept.pop(0)
                    work.wait()
                    for k, output in enumerate(outputs):
                        right = torch.arange(n).add(then + k).repeat_interleave(70_000)
                        assert output.eq(right).all()
            comm.synchronize()
    finally:
        torch.set_default_device(None)
