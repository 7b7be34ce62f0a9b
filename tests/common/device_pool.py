"""One process a GPU that runs test functions until it is closed. Starting CUDA takes seconds: tests share.

On a machine with one GPU two ranks share it: what they do is the same, but for the way that the bytes take, and for
time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch

from sidelane.native import load_replays
from sidelane_lab.harness.launch import HOST, store_on_loopback

START_S = 90.0
END_S = 10.0


def gpus() -> int:
    """GPUs of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def world_size() -> int:
    """Return the number of ranks in these tests: none needs more than four."""
    return max(2, min(4, gpus()))


Case = Callable[..., Any]
"""A function of a rank's ``Context`` and arguments."""


class Pool:
    """Ranks 0 to ``world_size - 1``, rank r on GPU r; all on one GPU where there is but one.

    Args:
        world_size: number of ranks.
        environment: variables that the ranks get on top of those of this process.
    """

    def __init__(self, world_size: int, *, environment: Mapping[str, str] | None = None) -> None:
        self.broken = False
        load_replays()  # compiled ahead, as for other ranks (conftest.py)
        spawn = multiprocessing.get_context("spawn")
        self._store = store_on_loopback()  # here, so that no other process can take the port before a rank does
        self._pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = spawn.Pipe()
            job = (rank, world_size, self._store.port, theirs, dict(environment or {}))
            process = spawn.Process(target=_rank_main, args=job, name=f"device-rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self._collect(dict(enumerate(self._pipes)), START_S, "start")

    def run(self, case: Case, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run a case on every rank; results by rank. A failure or a time-out ends the pool and fails the test."""
        self.begin(case, *args)
        return self.finish(timeout_s)

    def begin(self, case: Case, *args: Any) -> None:
        """Start a case on every rank."""
        self._case = getattr(case, "__qualname__", "a test")
        for pipe in self._pipes:
            pipe.send((case, args))

    def finish(self, timeout_s: float = 60.0, *, but: tuple[int, ...] = ()) -> list[Any]:
        """Wait for the case that was begun; ranks in ``but`` are expected to give no answer."""
        waited = {rank: pipe for rank, pipe in enumerate(self._pipes) if rank not in but}
        return self._collect(waited, timeout_s, self._case)

    def run_and_kill(self, victim: int, after_s: float, case: Case, *args: Any) -> list[Any]:
        """Run a case on every rank, one of which is killed on the way; results of the others."""
        self.begin(case, *args)
        time.sleep(after_s)
        os.kill(self.processes[victim].pid, signal.SIGKILL)
        return self.finish(30.0, but=(victim,))

    def close(self) -> None:
        """End all ranks: ask, wait, kill."""
        self.broken = True
        for pipe in self._pipes:
            pipe.close()  # a rank ends when its pipe does
        deadline = time.monotonic() + END_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(END_S)

    def _collect(self, pipes: dict[int, connection.Connection], timeout_s: float, case: str) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[str] = []
        open_pipes = dict(pipes)
        while open_pipes:
            ready = connection.wait(list(open_pipes.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.append(f"{case}: ranks {sorted(open_pipes)} gave no answer in time ({timeout_s} s at most)")
                break
            for rank, pipe in list(open_pipes.items()):
                if pipe not in ready:
                    continue
                del open_pipes[rank]
                try:
                    good, answer = pipe.recv()
                except EOFError:
                    self.processes[rank].join(END_S)
                    good, answer = False, f"the process ended (exit code {self.processes[rank].exitcode})"
                if good:
                    results[rank] = answer
                else:
                    failures.append(f"{case} on rank {rank}:\n{answer}")
                    deadline = min(deadline, time.monotonic() + 5)  # the others may be waiting for this one
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in sorted(results)]


class Ranks:
    """Hands out a pool of ranks; one that was broken by a test is replaced for the next."""

    def __init__(self, world_size: int, *, environment: Mapping[str, str] | None = None) -> None:
        self.world_size, self._environment = world_size, environment
        self._pool: Pool | None = None

    def run(self, case: Case, *args: object, timeout_s: float = 60.0) -> list:
        """Run a case on every rank; the results by rank."""
        if self._pool is None or self._pool.broken:
            self._pool = Pool(self.world_size, environment=self._environment)
        return self._pool.run(case, *args, timeout_s=timeout_s)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _rank_main(rank: int, world_size: int, port: int, pipe: connection.Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist
    from device_context import Context

    try:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        context = Context(rank, world_size)
        pipe.send((True, None))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, case(context, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    # Skips the destructors of torch and CUDA: after a test that broke something they can wait for what never comes.
    os._exit(0)
