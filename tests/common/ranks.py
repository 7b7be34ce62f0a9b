"""Processes for tests: a pool of ranks that lives for a whole session, and single crews for tests that kill some.

A function that ranks execute is a top-level function of a module; it gets the process group first, then the arguments,
and what it returns is pickled. The first error of a rank is raised in the test with the rank's own traceback. Whoever
does not answer in time is killed.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sidelane_lab.harness.processes import environment, rank_context, take_over

POOL_RANKS = 8
START_S = 100.0  # eight imports of torch, on two cores that may do the same for another worker
JOIN_S = 10.0
GROUPS_OF_A_CASE = 1000
"""Fewer than that does a case make."""


class RankError(AssertionError):
    """A rank raised; the text is its traceback. ``error`` is the exception itself where it could be pickled."""

    def __init__(self, rank: int, error: BaseException | None, trace: str) -> None:
        self.rank, self.error = rank, error
        super().__init__(f"rank {rank}:\n{trace}")


class Crew:
    """``world_size`` worker processes with a Gloo process group among all of them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="sidelane-test-")
        store = os.path.join(self._folder.name, "store")
        context, inherited = rank_context(), environment()
        self._pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, store, there, inherited), name=f"rank-{rank}"
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        self._groups: set[tuple[int, ...]] = set()
        self._numbers = itertools.count(1)
        self.ready = False

    def run(
        self,
        function: Callable[..., Any],
        ranks: int | Sequence[int] | None = None,
        *args: Any,
        timeout_s: float = 120.0,
        dying: Sequence[int] = (),
    ) -> list[Any]:
        """Execute ``function(group, *args)`` on ``ranks`` and return what each returned.

        Args:
            ranks: global ranks, or a number n for the first n; all by default. The group consists of them.
            timeout_s: for all of it, after the workers have started.
            dying: ranks that are expected to die; their result is their exit code.
        """
        members = tuple(range(self.world_size) if ranks is None else range(ranks) if isinstance(ranks, int) else ranks)
        if not self.ready:
            self._collect(range(self.world_size), START_S, ())
            self.ready = True
        if members not in self._groups:
            # Every rank makes every group.
            self._send(range(self.world_size), (None, members, (), next(self._numbers)))
            self._collect(range(self.world_size), START_S, ())
            self._groups.add(members)
        self._send(members, (function, members, args, next(self._numbers)))
        return self._collect(members, timeout_s, dying)

    def close(self) -> None:
        """End the workers; kill those that do not end."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + JOIN_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(JOIN_S)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the workers at once."""
        for process in self.processes:
            process.kill()
        self.close()

    def _send(self, ranks: Sequence[int], task: tuple[Any, ...]) -> None:
        for rank in ranks:
            self._pipes[rank].send(task)

    def _collect(self, members: Sequence[int], timeout_s: float, dying: Sequence[int]) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[tuple[float, RankError]] = []
        while len(results) < len(members):
            waiting = {self._pipes[rank]: rank for rank in members if rank not in results}
            readable = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not readable:
                self._dump(waiting.values())
                if failures:
                    raise min(failures, key=lambda failure: failure[0])[1]
                raise AssertionError(f"ranks {sorted(waiting.values())} did not answer within {timeout_s} s")
            for pipe in readable:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    when, error, trace, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(JOIN_S)
                    code = self.processes[rank].exitcode
                    results[rank] = code
                    if rank not in dying:
                        failures.append((time.monotonic(), RankError(rank, None, f"died with exit code {code}")))
                    continue
                results[rank] = value
                if trace:
                    failures.append((when, RankError(rank, error, trace)))
        if failures:  # the first in time: the others are its consequences, as a rule
            raise min(failures, key=lambda failure: failure[0])[1]
        return [results[rank] for rank in members]

    def _dump(self, ranks: Any) -> None:
        """Let those that hang show where, on stderr, before they are killed."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)


class RankPool:
    """A crew of 8 that is started on first use, reused by every test, and replaced after an error."""

    def __init__(self) -> None:
        self._crew: Crew | None = None

    def run(
        self, function: Callable[..., Any], ranks: int | Sequence[int], *args: Any, timeout_s: float = 120
    ) -> list[Any]:
        """See :meth:`Crew.run`."""
        if self._crew is None:
            self._crew = Crew(POOL_RANKS)
        try:
            return self._crew.run(function, ranks, *args, timeout_s=timeout_s)
        except BaseException:
            # Nobody knows where the other ranks stand: start afresh.
            self._crew.kill()
            self._crew = None
            raise

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None


@contextlib.contextmanager
def crew(world_size: int) -> Iterator[Crew]:
    """Processes of a test's own, which it may kill."""
    own = Crew(world_size)
    try:
        yield own
    finally:
        own.kill()


def shared_memory() -> list[str]:
    """What this process has mapped and open of Sidelane's shared memory (Linux), one line for each."""
    with open("/proc/self/maps") as maps:
        lines = [line.strip() for line in maps if "memfd:sidelane" in line]
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{entry}")
            if "memfd:sidelane" in target:
                lines.append(f"descriptor {entry}: inode {os.stat(f'/proc/self/fd/{entry}').st_ino}")
    return lines


def _serve(
    rank: int,
    world_size: int,
    store: str,
    pipe: multiprocessing.connection.Connection,
    inherited: dict[str, str],
) -> None:
    import torch
    import torch.distributed as dist

    take_over(inherited)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        pipe.send((time.monotonic(), None, "", None))
        while (task := pipe.recv()) is not None:
            function, members, args, number = task
            # torch names groups by how many a rank has made, and cases of some ranks alone have made some.
            dist.distributed_c10d._world.group_count = GROUPS_OF_A_CASE * number
            try:
                if function is None:
                    groups[members] = dist.new_group(list(members))
                    reply = (0.0, None, "", None)
                else:
                    reply = (0.0, None, "", function(groups[members], *args))
            except BaseException as error:
                reply = (time.monotonic(), error, traceback.format_exc(), None)
            try:
                pipe.send(reply)
            except Exception:  # an exception or a result that cannot be pickled
                text = reply[2] or f"cannot pickle what the function returned:\n{traceback.format_exc()}"
                pipe.send((time.monotonic(), None, text, None))
            del function, args, task, reply
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
