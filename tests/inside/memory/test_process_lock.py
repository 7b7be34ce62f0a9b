"""One rendezvous at a time in each process, whatever threads and communicators there are."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from sidelane.errors import PeerTimeoutError
from sidelane.memory import torch_symm
from sidelane.memory.exchange import Exchange
from sidelane.memory.release import deferred_bytes
from sidelane.memory.torch_symm import TorchSymmetricMemory, alone_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


def test_one_at_a_time() -> None:
    seen: list[str] = []

    def work(name: str) -> None:
        with alone_in((7, 5), 20.0):
            seen.append(name)
            time.sleep(0.02)
            seen.append(name)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[::2] == seen[1::2] and sorted(seen[::2]) == list("01234")


def test_who_does_not_let_go_is_named_and_what_was_taken_is_given_back() -> None:
    with alone_in((9,), 1.0):
        with alone_in((8, 10), 1.0):
            pass
        with pytest.raises(PeerTimeoutError, match="process 9"), alone_in((8, 9, 10), 0.05):
            pass
        with alone_in((8, 10), 1.0):
            pass


def test_a_process_that_dies_or_forks_keeps_nothing() -> None:
    ready, tells = os.pipe()
    child = os.fork()
    if child == 0:
        with alone_in((1,), 9.0):
            os.write(tells, b"!")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        with pytest.raises(PeerTimeoutError), alone_in((1,), 0.05):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tells)
    with alone_in((1,), 5.0):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with alone_in((1,), 5.0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Handle:
    """As torch's, of memory that nobody has."""

    def __init__(self, tensor: torch.Tensor, world_size: int) -> None:
        self.buffer_ptrs = [tensor.data_ptr()] * world_size


def meet(name: str, rank: int, pids: list[int]) -> list[str]:
    """What torch does with handles: a socket named by the process, to which peers send and from which it takes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.bind(f"\0sidelane-test/{os.getpid()}")
        mailbox.settimeout(20.0)
        for pid in pids:
            while pid != os.getpid():
                with contextlib.suppress(ConnectionRefusedError):
                    mailbox.sendto(name.encode(), f"\0sidelane-test/{pid}")
                    break
                time.sleep(1e-3)
        return [mailbox.recv(100).decode() for _ in pids[1:]]


@on_ranks(3)
def test_threads_with_a_communicator_each_do_not_take_each_others_handles(group: dist.ProcessGroup) -> None:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    pids: list[int] = [0] * n
    dist.all_gather_object(pids, os.getpid(), group)
    wrong: list[str] = []
    torch_symm.deferred_bytes = lambda tensor: tensor  # there is no device  # type: ignore[assignment]
    memories = [TorchSymmetricMemory(Exchange(group, 30.0), torch.device("cuda", 0), 30.0) for _ in range(3)]

    def work(number: int, memory: TorchSymmetricMemory) -> None:
        draw = random.Random(100 * rank + number)

        def rendezvous(tensor: torch.Tensor) -> Handle:
            others = meet(str(number), rank, pids)
            wrong.extend(f"{number} met {other}" for other in others if other != str(number))
            return Handle(tensor, n)

        memory._take = lambda nbytes: (torch.zeros(nbytes, dtype=torch.uint8), "")  # type: ignore[method-assign]
        memory._rendezvous = rendezvous  # type: ignore[method-assign]
        try:
            for _ in range(8):
                time.sleep(0.003 * draw.random())
                memory.allocate(8)
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(memories)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for memory in memories:
        memory.close()
    torch_symm.deferred_bytes = deferred_bytes
    assert not wrong


@on_ranks(2)
@pytest.mark.parametrize("compiles", [False, True])
def test_graphs_that_torch_compiles_hold_nothing_of_a_rendezvous(group: dist.ProcessGroup, compiles: bool) -> None:
    """Devices for which a rendezvous was made where no pool of a graph gets hold of what it keeps."""
    n, found = dist.get_world_size(group), []

    def persistent(device: torch.device, make: Callable[[], Handle]) -> Handle:
        found.append(device)
        return make()

    modules = {"torch._inductor.cudagraph_trees": mock.Mock()} if compiles else {}
    with (
        mock.patch.object(torch_symm, "deferred_bytes", lambda tensor: tensor),
        mock.patch.object(torch_symm, "persistent", persistent),
        mock.patch.dict(sys.modules, modules),
    ):
        if not compiles:
            sys.modules.pop("torch._inductor.cudagraph_trees", None)
        memory = TorchSymmetricMemory(Exchange(group, 30.0), torch.device("cuda", 0), 30.0)
        taken = torch.zeros(8, dtype=torch.uint8), ""
        with (
            mock.patch.object(memory, "_take", return_value=taken),
            mock.patch.object(memory, "_rendezvous", lambda tensor: Handle(tensor, n)),
        ):
            memory.allocate(8)
        memory.close()
    assert found == [torch.device("cuda", 0)] * compiles
