"""What ranks execute in ``test_device_own_parts``."""

from __future__ import annotations

import itertools
from typing import Any

import own_part_cases
import torch
import torch.distributed as dist
from device_cases import Context
from own_part_cases import Exchange
from sweeps import communicator

from sidelane import Communicator


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too, on a stream that is not the legacy default one."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(own_part_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def in_graphs(context: Context, replays: int) -> None:
    """Captured and replayed, beside a computation and alone, with fresh bytes each time."""
    torch.set_default_device(context.device)
    try:
        with communicator(dist.group.WORLD) as comm:
            ways = itertools.product(("b2b", "striped", "auto"), (True, False))
            for number, (variant, symmetric) in enumerate(ways):
                case = Exchange(comm, number, 70_000 + number, torch.bfloat16, symmetric=symmetric)
                options = {"copy_own_part": False, "variant": variant, "beside": "compute" if number % 2 else None}
                comm.all_to_all(case.output, case.input, **options)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    comm.all_to_all(case.output, case.input, **options)
                for replay in range(replays):
                    case.fill(100 * replay + number)
                    graph.replay()
                    assert case.is_right(), (variant, symmetric, replay)
    finally:
        torch.set_default_device(None)


LARGE_BYTES = ((16 << 20) - 1, 16 << 20, (16 << 20) + 1, (40 << 20) + 77_777)
"""Of a part, around those from which on own parts are copied in rows."""


class LargeParts:
    """All-gathers or all-to-alls out of place of parts of so many bytes, fresh ones each time."""

    def __init__(self, comm: Communicator, nbytes: int, *, exchanges: bool, symmetric: bool, **options: Any) -> None:
        self.comm, self.nbytes, self.exchanges, self.options = comm, nbytes, exchanges, options
        self._make: Any = comm.empty if symmetric else torch.empty
        self.elsewhere()

    def elsewhere(self) -> None:
        """Lie at other addresses."""
        parts = self.comm.world_size if self.exchanges else 1
        sizes = parts * self.nbytes, self.comm.world_size * self.nbytes
        self.input, self.output = (self._make(size, dtype=torch.uint8) for size in sizes)

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.input.copy_(self._input_of(self.comm.rank))
        self.output.fill_(seed % 251)

    def once(self) -> None:
        call = self.comm.all_to_all if self.exchanges else self.comm.all_gather
        call(self.output, self.input, **self.options)

    def is_right(self) -> bool:
        place = self.comm.rank * self.exchanges
        parts = [self._input_of(rank)[place * self.nbytes :][: self.nbytes] for rank in range(self.comm.world_size)]
        return torch.equal(self.output, torch.cat(parts))

    def _input_of(self, rank: int) -> torch.Tensor:
        random = torch.Generator(self.input.device).manual_seed(1000 * self.seed + rank)
        return torch.randint(0, 256, self.input.shape, dtype=torch.uint8, generator=random)


def large_parts(context: Context) -> None:
    """In symmetric and in ordinary memory, eager and in a graph, with and without a computation next to them."""
    torch.set_default_device(context.device)
    try:
        with Communicator() as comm, torch.cuda.stream(torch.cuda.Stream()):
            ways = itertools.product(LARGE_BYTES, ("b2b", "striped"), (True, False), (None, "compute"))
            for number, (nbytes, variant, symmetric, beside) in enumerate(ways):
                exchanges = number % 2 == (number // 2) % 2
                case = LargeParts(
                    comm, nbytes, exchanges=exchanges, symmetric=symmetric, variant=variant, beside=beside
                )
                for turn in range(2):
                    case.fill(10 * number + turn)
                    case.once()
                    assert case.is_right(), (nbytes, variant, symmetric, beside, turn)
                kept = []
                for turn in range(2, 2 if symmetric else 6):
                    kept.append((case.input, case.output))
                    case.elsewhere()
                    case.fill(10 * number + turn)
                    case.once()
                    assert case.is_right(), (nbytes, variant, symmetric, beside, "at new addresses", turn)
                kept.clear()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    case.once()
                for turn in range(6, 8):
                    case.fill(10 * number + turn)
                    graph.replay()
                    assert case.is_right(), (nbytes, variant, symmetric, beside, "in a graph")
    finally:
        torch.set_default_device(None)
