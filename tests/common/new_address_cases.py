"""What ranks do with tensors that are new at every call, on the path of GPUs."""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checked_calls import CheckedCall
from fake_driver import FakeDriver
from made_up_gpus import made_up_gpus
from native_driver import NativeDriver

from sidelane import Communicator, Config
from sidelane.collectives import call_forms, plan, prepare
from sidelane.collectives.arguments import Arguments
from sidelane.execute.cuda import CudaProgram, loaded

STAGED = Config(timeout_s=30)
KINDS = ("all_gather", "all_to_all", "broadcast", "gather", "scatter", "reduce_scatter", "all_reduce")

WORKED_OUT = {*KINDS, "check_variant", "choose", "verify", "prepare"}
"""What the first call of a shape does, and others of it do not."""

LOADED = {"Frame", "create_event", "memory_ops"}
"""Likewise, of what is loaded."""


@contextlib.contextmanager
def derived(driver: Any = None) -> Iterator[collections.Counter[str]]:
    """How often calls do what only the first of a shape has to."""
    found: collections.Counter[str] = collections.Counter()
    watched: list[tuple[Any, str]] = [(Arguments, kind) for kind in KINDS]
    watched += [(call_forms, "check_variant"), (plan, "choose"), (plan, "verify"), (prepare.Preparer, "prepare")]
    watched += [(loaded, "Frame"), (CudaProgram, "at")]
    watched += [(driver, "create_event"), (driver, "memory_ops")] if driver is not None else []
    with contextlib.ExitStack() as stack:
        for owner, name in watched:
            real = getattr(owner, name)

            def count(*given: Any, real: Any = real, name: str = name, **options: Any) -> Any:
                found[name] += 1
                return real(*given, **options)

            stack.enter_context(mock.patch.object(owner, name, count))
        yield found


class Memory:
    """Ordinary memory, and some that is symmetric: tensors in it come at one of some places, or anywhere."""

    def __init__(
        self, comm: Communicator, seed: int, *, aligned: bool = False, places: int | None = None, keeps: int = 50
    ) -> None:
        self.comm, self.aligned, self.places, self.keeps = comm, aligned, places, keeps
        self.alike, self.apart = random.Random(seed), random.Random(1000 * seed + comm.rank)
        self.symmetric = comm.empty(1 << 15, dtype=torch.int32)
        self.kept: list[torch.Tensor] = []

    def new(self, numel: int, *, symmetric: bool = False) -> torch.Tensor:
        """A tensor at a place of its own, mostly aligned; a symmetric one at one place of all ranks."""
        if symmetric:
            first = 64 * self.alike.randrange(self.places or (self.symmetric.numel() - numel) // 64)
            return self.symmetric[first : first + numel]
        offset = 0 if self.aligned or self.apart.random() < 0.8 else self.apart.randrange(16)
        made = torch.zeros(numel + offset, dtype=torch.int32)[offset:]
        self.kept.append(made)  # so that addresses seldom come again
        del self.kept[: max(0, len(self.kept) - self.keeps)]
        return made


def one_call(memory: Memory, kind: str, variant: str, size: int, step: int, symmetric: bool, in_place: bool) -> None:
    """A call on new tensors, checked."""
    made: list[torch.Tensor] = []

    def make(what: str, numel: int) -> torch.Tensor:
        is_symmetric = symmetric and kind not in ("gather", "reduce_scatter")
        is_symmetric &= what == "output" or kind == "all_reduce"
        found = memory.new(numel, symmetric=is_symmetric)
        while is_symmetric and any(abs(found.data_ptr() - each.data_ptr()) < found.nbytes for each in made):
            found = memory.new(numel, symmetric=True)
        made.append(found)
        return found

    root = step % memory.comm.world_size
    call = CheckedCall(memory.comm, kind, size, torch.int32, make, seed=step, root=root, in_place=in_place)
    call.run(variant=variant)


def driver_of(native: bool) -> FakeDriver:
    return NativeDriver() if native else FakeDriver()


def storm(group: dist.ProcessGroup, seed: int, steps: int, native: bool) -> dict[str, int]:
    """Calls of all kinds, nearly all at new addresses; what they did."""
    with (
        made_up_gpus(driver=driver_of(native)) as driver,
        Communicator(group, config=STAGED) as comm,
        derived(driver) as found,
    ):
        memory, draw = Memory(comm, seed), random.Random(seed)
        for step in range(steps):
            kind, size = draw.choice(KINDS), draw.choice((64, 500))
            symmetric, in_place = draw.random() < 0.2, draw.random() < 0.3
            variants = ["b2b", "pcpy"]
            if kind in ("all_gather", "all_to_all"):
                variants += ["striped"]
            one_call(memory, kind, draw.choice(variants), size, step, symmetric, in_place)
            if step == steps // 2:
                memory.new(1)
                comm.all_gather(torch.empty(comm.world_size << 20), torch.empty(1 << 20))  # staging moves
        return {**found, "by C": comm.repeated_calls()}


def prepared(comm: Communicator) -> int:
    """How many calls are remembered by their addresses."""
    return sum(entry.prepared is not None for entry in comm.preparer.cache)


def same_shape(
    group: dist.ProcessGroup, kind: str, variant: str, calls: int, native: bool, in_place: bool = False
) -> tuple[dict[str, int], int, int]:
    """Calls of one shape, each at addresses of its own; what they did behind the first few, and what is kept of it."""
    with made_up_gpus(driver=driver_of(native)) as driver, Communicator(group, config=STAGED) as comm:
        memory = Memory(comm, 1, aligned=True, keeps=1000)  # while all are kept, no address comes again
        for step in range(0, 4 * comm.world_size, comm.world_size):
            one_call(memory, kind, variant, 64, step, False, in_place)
        before, remembered, by_c = len(driver.events), prepared(comm), comm.repeated_calls()
        with derived(driver) as found:
            for step in range(0, calls * comm.world_size, comm.world_size):
                one_call(memory, kind, variant, 64, step, False, in_place)
        found["by C"] = comm.repeated_calls() - by_c
        return dict(found), len(driver.events) - before, prepared(comm) - remembered


def memories_in_turn(group: dist.ProcessGroup, kind: str, variant: str, calls: int) -> int:
    """Calls of one size, some of them in symmetric memory, which is where it was; how many compiled code made."""
    with made_up_gpus(driver=NativeDriver()), Communicator(group, config=STAGED) as comm:
        memory = Memory(comm, 1, aligned=True, places=1)
        for step in range(calls):
            one_call(memory, kind, variant, 64, step, step % 5 in (0, 3), False)
        return comm.repeated_calls()


def released_at_once(group: dist.ProcessGroup) -> bool:
    """True if no collection is needed to let go of what a closed communicator had: one may come in a capture."""
    gc.collect()
    gc.disable()
    try:
        with made_up_gpus(driver=NativeDriver()), Communicator(group, config=STAGED) as comm:
            symmetric = comm.empty(comm.world_size, 64)
            for _ in range(40):
                for variant in ("b2b", "striped", "auto"):
                    comm.all_gather(torch.empty(2000 * comm.world_size), torch.empty(2000), variant=variant)
                comm.all_gather(symmetric, torch.empty(64))
            kept = [weakref.ref(each) for each in (comm.path, comm.preparer, comm.backend.executor)]
        del comm, symmetric
        return not any(reference() for reference in kept)
    finally:
        gc.enable()
