"""Ranks that die, or that do not come: their peers name them, in every kind of call, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import loads
import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, outcome
from marks import long
from ranks import RankPool, crew

from sidelane import Communicator


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


DEATHS = {make.__name__: make for make in (calls, a_handle, a_program)}
"""What ranks do; one of them dies where it yields."""


def dies(group: dist.ProcessGroup, what: str) -> tuple[str, tuple[int, ...], str]:
    with communicator(group, timeout_s=60) as comm:
        steps = DEATHS[what](comm)
        next(steps)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome(next, steps, None)


@pytest.mark.parametrize("what", DEATHS)
def test_a_dead_peer_is_named_and_nothing_is_left(what: str) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    with crew(3) as ranks:
        first, _, last = ranks.run(dies, 3, what, dying=(1,))
    for name, at_fault, text in (first, last):
        assert (name, at_fault) == ("PeerError", (1,)) and "rank 1" in text, text
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


CALLS: dict[str, Callable[[Communicator], Callable[[], object]]] = {
    "all_gather": gathers,
    "all_gather that is known": known,
    "empty": lambda comm: lambda: comm.empty(100),
    "all_gather that it never arms": lambda comm: fires(comm, arms=False),
    "all_gather that it never fires": lambda comm: fires(comm, arms=True),
    "all_gather that its host never fires": lambda comm: fires(comm, arms=True, from_host=True),
}
"""Calls that rank 1 makes when its peers have given up."""


def stays_away(group: dist.ProcessGroup, what: str) -> tuple[str, tuple[int, ...], str, float]:
    with communicator(group, timeout_s=2) as comm:
        call = CALLS[what](comm)
        if comm.rank == 1:
            dist.barrier(group)  # until the others have given up
        began = time.monotonic()
        found = outcome(call)
        waited_s = time.monotonic() - began
    if comm.rank != 1:
        dist.barrier(group)
    return *found, waited_s


@pytest.mark.parametrize("what", [long(what) if what.endswith("it never fires") else what for what in CALLS])
def test_a_rank_that_does_not_come_is_named_within_the_time_out(pool: RankPool, what: str) -> None:
    first, late, last = pool.run(stays_away, 3, what)
    for name, ranks, text, waited_s in (first, last):
        assert (name, ranks) == ("PeerTimeoutError", (1,)), text
        assert "rank 1" in text and what.split()[0] in text, text
        assert waited_s < 15, "a time-out of 2 s on a busy machine"
    assert late[0] == ("" if what.endswith("it never arms") else "PeerTimeoutError"), "it hears of that when it comes"
