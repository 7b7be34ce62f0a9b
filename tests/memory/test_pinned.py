"""Host memory between GPUs: what its limits say, and what is left. The driver is made up, the memory is real."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cpu_calls import outcome
from made_up_gpus import FEATURES, made_up_gpus
from ranks import crew, shared_memory

from sidelane import Communicator, Config
from sidelane.collectives import backend_cuda
from sidelane.execute.cuda import DriverFeatures
from sidelane.memory import host_shared


class Runtime:
    """CUDA's runtime: registers host memory as long as it may."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 3 and address % os.sysconf("SC_PAGE_SIZE") == 0
        if nbytes + sum(self.registered.values()) > self.most_bytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


@contextlib.contextmanager
def host_gpus(most_bytes: int = 1 << 40) -> Iterator[Runtime]:
    runtime = Runtime(most_bytes)
    with made_up_gpus(), mock.patch("torch.cuda.cudart", return_value=runtime):
        yield runtime


def gathers(comm: Communicator, nbytes: int, variant: str = "b2b") -> None:
    output = torch.empty(comm.world_size * nbytes, dtype=torch.uint8)
    comm.all_gather(output, torch.full((nbytes,), comm.rank, dtype=torch.uint8), variant=variant)
    assert output.eq(torch.arange(comm.world_size, dtype=torch.uint8).repeat_interleave(nbytes)).all()


def uses_and_closes(group: dist.ProcessGroup) -> tuple[int, int, int]:
    def use() -> int:
        with Communicator(group, config=Config(peers="host")) as comm:
            for nbytes in (100, 3 << 20):
                gathers(comm, nbytes)
                gathers(comm, nbytes, "chunked")
            return len(runtime.registered)

    with host_gpus() as runtime:
        mapped = []
        for _ in range(2):
            while_open = use()
            backend_cuda.probe.reset_mock()  # type: ignore[attr-defined]  # it remembers its arguments
            gc.collect()
            mapped.append(len(shared_memory()))  # what the group keeps is mapped after the first
        return while_open, len(runtime.registered), mapped[1] - mapped[0]


def test_everything_is_given_back(pool: Any) -> None:
    shm = set(os.listdir("/dev/shm"))
    for while_open, after, left in pool.run(uses_and_closes, 2):
        assert while_open > 1 and after == left == 0
    assert not [name for name in set(os.listdir("/dev/shm")) - shm if "sidelane" in name]


def cannot_register(group: dist.ProcessGroup, limits: tuple[int, ...]) -> tuple[str, tuple[int, ...], str, int]:
    with host_gpus(limits[group.rank()]) as runtime:
        found = outcome(Communicator, group, config=Config(peers="host"))
        gc.collect()
        return *found, len(runtime.registered)


def test_memory_that_one_driver_does_not_pin_is_named_on_all_ranks(pool: Any) -> None:
    for name, _, text, left in pool.run(cannot_register, 3, (1 << 40, 1000, 1 << 40)):
        assert name == "UnavailableError" and not left
        assert "rank 1: cudaHostRegister of" in text and "ulimit -l" in text and "Config.peers" in text
        assert "rank 0:" not in text and "rank 2:" not in text


def goes_too_far(group: dist.ProcessGroup) -> list[tuple[str, tuple[int, ...], str]]:
    with host_gpus() as runtime, Communicator(group, config=Config(peers="host", memory_bytes=24 << 20)) as comm:
        gathers(comm, 1 << 20)
        found = [outcome(gathers, comm, 30 << 20) for _ in range(2)]
        gathers(comm, 1 << 20)
        gathers(comm, 30 << 20, "chunked")  # four slots of a piece
        assert sum(runtime.registered.values()) <= comm.world_size * (24 << 20) + (1 << 16)
        return found


def test_a_setting_bounds_the_memory(pool: Any) -> None:
    for found in pool.run(goes_too_far, 2):
        for name, _, text in found:
            assert name == "UnavailableError" and "Config.memory_bytes" in text and f"0..{24 << 20}" in text


def has_no_room(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...], str]:
    with host_gpus(), mock.patch.object(host_shared, "available_bytes", return_value=1000):
        return outcome(Communicator, group, config=Config(peers="host"))  # type: ignore[no-any-return]


def test_a_machine_or_a_container_without_room(pool: Any) -> None:
    for name, _, text in pool.run(has_no_room, 2):
        assert name == "UnavailableError" and "allowed=1..1000" in text


def has_other_addresses(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...], str]:
    features = DriverFeatures(FEATURES.cuda_version, 3, True, True, host_addresses=False)
    with host_gpus(), mock.patch.object(backend_cuda, "probe", return_value=features):
        return outcome(Communicator, group, config=Config(peers="host"))  # type: ignore[no-any-return]


def test_devices_with_addresses_of_their_own_are_refused(pool: Any) -> None:
    for name, _, text in pool.run(has_other_addresses, 2):
        assert name in ("UnavailableError", "PeerError") and "another address" in text


def dies(group: dist.ProcessGroup, variant: str) -> tuple[str, tuple[int, ...], str]:
    config = Config(peers="host", timeout_s=60)
    with host_gpus(), Communicator(group, config=config) as comm:
        for _ in range(3):
            gathers(comm, 4 << 20, variant)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome(gathers, comm, 4 << 20, variant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("variant", ["b2b", "chunked"])
def test_a_dead_rank_is_named_and_nothing_is_left(variant: str) -> None:
    before = set(os.listdir("/dev/shm"))
    with crew(3) as ranks:
        first, _, last = ranks.run(dies, 3, variant, dying=(1,))
    for name, at_fault, text in (first, last):
        assert (name, at_fault) == ("PeerError", (1,)) and "rank 1" in text, text
    assert not [entry for entry in set(os.listdir("/dev/shm")) - before if "sidelane" in entry]
