"""Calls at new addresses between ranks: CPU ranks that take the path of GPUs, on tensors that are new each time."""

from __future__ import annotations

import collections
import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from checked_calls import CheckedCall
from fake_driver import FakeDriver
from made_up_gpus import made_up_gpus
from marks import long
from native_driver import NativeDriver
from new_address_cases import KINDS, LOADED, WORKED_OUT, derived, prepared
from on_ranks import everyones, on_ranks

from sidelane import Communicator, Config

STAGED = Config(timeout_s=30)
VARIANTS = pytest.mark.parametrize("variant", ["b2b", "pcpy"])


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


@on_ranks(2, seed=1)
@on_ranks(long(3), seed=2)
@on_ranks(long(4), seed=3)
@pytest.mark.parametrize("native", [False, True], ids=["Python", "C"])
def test_a_storm_of_new_tensors(group: dist.ProcessGroup, seed: int, native: bool) -> None:
    """Calls of all kinds, nearly all at new addresses."""
    steps, n = 400, dist.get_world_size(group)
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
        total = collections.Counter[str]()
        for said in everyones(group, {**found, "by C": comm.repeated_calls()}):
            total.update(said)
    assert total["at"] + total["by C"] > 100 * n, "many are moved"
    assert total["prepare"] < 300 * n
    assert (total["by C"] > 20 * n) == native, total


def same_shape(
    group: dist.ProcessGroup, kind: str, variant: str, *, native: bool, in_place: bool = False
) -> tuple[dict[str, int], int, int]:
    """Calls of one shape, each at addresses of its own; what they did behind the first few, and what is kept of it."""
    with made_up_gpus(driver=driver_of(native)) as driver, Communicator(group, config=STAGED) as comm:
        memory = Memory(comm, 1, aligned=True, keeps=1000)  # while all are kept, no address comes again
        for step in range(0, 4 * comm.world_size, comm.world_size):
            one_call(memory, kind, variant, 64, step, False, in_place)
        before, remembered, by_c = len(driver.events), prepared(comm), comm.repeated_calls()
        with derived(driver) as found:
            for step in range(0, 30 * comm.world_size, comm.world_size):
                one_call(memory, kind, variant, 64, step, False, in_place)
        found["by C"] = comm.repeated_calls() - by_c
        return dict(found), len(driver.events) - before, prepared(comm) - remembered


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@VARIANTS
def test_a_shape_is_worked_out_and_loaded_once(group: dist.ProcessGroup, kind: str, variant: str) -> None:
    said, events, remembered = same_shape(group, kind, variant, native=False)
    assert not said.keys() & (WORKED_OUT | LOADED), said
    assert said["at"] >= 20, "some addresses may come again"
    assert events == 0 and remembered <= 3, "and little is kept of it"


@on_ranks(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gather", "scatter")])
@VARIANTS
def test_a_known_shape_is_made_in_c(group: dist.ProcessGroup, kind: str, variant: str) -> None:
    assert same_shape(group, kind, variant, native=True)[0]["by C"] >= 20


@on_ranks(2)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_known_shape_in_place_is_made_in_c(group: dist.ProcessGroup, kind: str) -> None:
    assert same_shape(group, kind, "b2b", native=True, in_place=True)[0]["by C"] >= 20


MIXED = [
    *((kind, "b2b") for kind in ("all_gather", "all_to_all", "broadcast", "scatter")),
    *((kind, "striped") for kind in ("all_gather", "all_to_all")),
]


@on_ranks(2)
@pytest.mark.parametrize(("kind", "variant"), MIXED)
def test_symmetric_memory_is_another_shape(group: dist.ProcessGroup, kind: str, variant: str) -> None:
    """Calls of one size, some of them in symmetric memory, which is where it was."""
    with made_up_gpus(driver=NativeDriver()), Communicator(group, config=STAGED) as comm:
        memory = Memory(comm, 1, aligned=True, places=1)
        for step in range(60):
            one_call(memory, kind, variant, 64, step, step % 5 in (0, 3), False)
        assert comm.repeated_calls(), "compiled code made some"


@on_ranks(2)
def test_what_is_closed_is_in_no_circle(group: dist.ProcessGroup) -> None:
    """No collection is needed to let go of what a closed communicator had: one may come in a capture."""
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
        assert not any(reference() for reference in kept)
    finally:
        gc.enable()
