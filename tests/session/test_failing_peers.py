"""Ranks that die, or that do not come: their peers name them, in every kind of call, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import loads
import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, outcome
from marks import long, needs_triton
from ranks import RankPool, crew
from worlds import Rig, holdings

from sidelane import Communicator
from sidelane.program.builders import build
from sidelane.program.collective import ReduceOp, Reduction, all_reduce, split_evenly

Ended = tuple[str, tuple[int, ...], str, list[str]]
"""Outcome of a call, and the memory and threads that are left after it."""


def gathers(comm: Communicator, *, symmetric: bool = True) -> Callable[[], object]:
    out, shard = (comm.empty if symmetric else torch.empty)(5 * comm.world_size), torch.full((5,), float(comm.rank))
    return lambda: comm.all_gather(out, shard)


def calls(comm: Communicator) -> Iterator[None]:
    call = gathers(comm)
    for _ in range(3):
        call()
    yield
    while True:
        call()


def a_handle(comm: Communicator) -> Iterator[None]:
    out, shard = comm.empty(5 * comm.world_size), torch.empty(5)
    with comm.prepare_all_gather(out, shard, variant="pcpy") as handle:
        for _ in range(3):
            handle.arm()
            handle.trigger()
        handle.arm()
        yield
        handle.trigger()


def a_program(comm: Communicator) -> Iterator[None]:
    case = loads.Case(comm, loads.handover(comm.world_size))
    case.run()
    comm.barrier()
    yield
    while True:
        case.run()


def communicators_in_turn(comm: Communicator) -> Iterator[None]:
    """Two that share memory: a call of each ends with the error."""
    one, other = (gathers(Communicator(comm, name=name)) for name in ("one", "other"))
    one()
    other()
    yield
    name, at_fault, text = outcome(until_it_fails, one)
    assert (name, at_fault) == ("PeerError", (1,)), text
    until_it_fails(other)


def until_it_fails(call: Callable[[], object]) -> None:
    while True:
        call()


def a_kernel(comm: Communicator) -> Iterator[None]:
    """A kernel of one's own, by Triton's interpreter."""
    from own_kernels import waits_for

    kernel = comm.load_kernel(waits_for, flags=2)
    yield
    kernel.launch((2,), 1, 1)
    comm.synchronize()


def dies(group: dist.ProcessGroup, make: Callable[[Communicator], Iterator[None]]) -> Ended:
    """Die where ``make`` yields."""
    before = holdings()
    with communicator(group, timeout_s=60) as comm:
        steps = make(comm)
        next(steps)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        found = outcome(next, steps, None)
    del comm, steps
    return *found, left_since(before)


def dies_half_way(group: dist.ProcessGroup, _: None) -> Ended:
    """Die in the middle of an invocation of the executor, with the engines of the rank half-way."""
    before = holdings()

    def die(queue: object, index: int) -> None:
        if rig.control.begun(1) == 3 and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    rig = Rig(group, timeout_s=60, delay=die if group.rank() == 1 else None)
    sizes = split_evenly(4000, rig.world_size, 4)
    loaded = rig.load(build(all_reduce(sizes, Reduction(ReduceOp.SUM, "int32")), "b2b"))
    for epoch in (1, 2):
        loaded.run_checked(epoch)
    found = outcome(loaded.run_checked, 3)
    rig.close()
    rig.__dict__.clear()
    del loaded
    return *found, left_since(before)


def left_since(before: list[str]) -> list[str]:
    gc.collect()
    return [line for line in holdings() if line not in before]


DEATHS = (calls, a_handle, a_program, communicators_in_turn, pytest.param(a_kernel, marks=needs_triton))
"""Use of a communicator by the ranks; one of them dies where it yields. None: use of an executor alone."""


@pytest.mark.parametrize("make", [*DEATHS, None])
def test_a_dead_peer_is_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with crew(3) as ranks:
        dying = dies_half_way if make is None else dies
        first, code, last = ranks.run(dying, 3, make, dying=(1,), timeout_s=40)  # long before the time-out of 60 s
    assert code == -signal.SIGKILL
    for name, at_fault, text, left in (first, last):
        assert (name, at_fault, left) == ("PeerError", (1,), []) and "rank 1 died in or before call" in text, text
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not [name for name in after - before if "sidelane" in name]


def known(comm: Communicator) -> Callable[[], object]:
    call = gathers(comm)
    call()
    return call


def fires(comm: Communicator, *, arms: bool, from_host: bool = False) -> Callable[[], object]:
    """``arms``: the late rank has armed its handle. Otherwise it does nothing at all."""
    handle: Any = comm.prepare_all_gather(torch.empty(4 * comm.world_size), torch.ones(4), host_trigger=from_host)
    if arms or comm.rank != 1:
        handle.arm()
    if from_host:
        return lambda: (handle.trigger_from_host(), handle.wait())
    return lambda: handle.trigger() if arms or comm.rank != 1 else None


def of_another(comm: Communicator) -> Callable[[], object]:
    return gathers(Communicator(comm, name="another"))


CALLS: dict[str, Callable[[Communicator], Callable[[], object]]] = {
    "all_gather": gathers,
    "all_gather that is known": known,
    "all_gather of what shares memory": of_another,
    "empty": lambda comm: lambda: comm.empty(100),
    "all_gather that it never arms": lambda comm: fires(comm, arms=False),
    "all_gather that it never fires": lambda comm: fires(comm, arms=True),
    "all_gather that its host never fires": lambda comm: fires(comm, arms=True, from_host=True),
}
"""Calls that rank 1 makes when its peers have given up."""

KNOWN = (
    r"all_gather\(3 ranks, 60 bytes, out of place\) pcpy, invocation \d: rank [02] queue dma:\d command \d "
    r"\(wait flag \d >= epoch\) waited [\d.]+ s; rank 1 \(pid \d+, alive, ended call \d\) has not come"
)
"""What the executor says, whose program waits for that rank."""


def stays_away(group: dist.ProcessGroup, what: str) -> tuple[str, tuple[int, ...], str, list[str], float]:
    before = holdings()
    with communicator(group, timeout_s=2) as comm:
        call = CALLS[what](comm)
        if comm.rank == 1:
            dist.barrier(group)  # until the others have given up
        began = time.monotonic()
        found = outcome(call)
        waited_s = time.monotonic() - began
    if comm.rank != 1:
        dist.barrier(group)
    del comm, call
    return *found, left_since(before), waited_s


@pytest.mark.parametrize("what", [long(what) if what.endswith("it never fires") else what for what in CALLS])
def test_a_rank_that_does_not_come_is_named_within_the_time_out(pool: RankPool, what: str) -> None:
    first, late, last = pool.run(stays_away, 3, what)
    state = KNOWN if what.endswith("known") else r"rank 1 \(pid \d+, alive"
    for name, ranks, text, left, waited_s in (first, last):
        assert (name, ranks, left) == ("PeerTimeoutError", (1,), []), text
        assert re.search(state, text) and what.split()[0] in text, text
        assert waited_s < 15, "a time-out of 2 s on a busy machine"
    hears = "" if what.endswith("it never arms") else "PeerTimeoutError"
    assert late[0] == hears and (not hears or "gave up" in late[2]), "it hears of that when it comes"
