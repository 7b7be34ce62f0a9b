"""Run one function on every rank: as processes of this machine, or as the processes that torchrun has started.

The parent keeps the rendezvous store, a pipe to every rank and a deadline. A rank that fails, dies or does not finish
ends all others, and the error carries its traceback. Ctrl-C ends all of them. Ranks that lose their parent end
themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sidelane import config
from sidelane.config import HOST as HOST_MEMORY
from sidelane.errors import PeerError, SidelaneError, last_line
from sidelane.machine import local
from sidelane.native import load_replays
from sidelane_lab.harness.processes import environment, rank_context, take_over

T = TypeVar("T")
HOST = "127.0.0.1"
GRACE_S = 5.0  # between SIGTERM to a rank, so that it can remove its shared memory, and SIGKILL
SETTLE_S = 0.5  # after the first failure: other ranks may be about to report a cause


class RankFailedError(SidelaneError):
    """A rank raised, died or did not finish in time.

    Attributes:
        rank: rank at fault. Of several it is one that died, else one that raised an error of its own, else one that
            received a peer's; the first of these.
        refused: text of the ``ValueError`` or ``TypeError`` with which it refused its arguments; else empty.
    """

    def __init__(self, message: str, rank: int, refused: str = "") -> None:
        self.rank = rank
        self.refused = refused
        super().__init__(message)


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """Description of a rank, the first argument of a rank's function; the default process group is initialised.

    Attributes:
        rank: number of this process in the default process group.
        world_size: ranks in that group.
        device: device of this rank's tensors; already the current device if it is an accelerator.
        say: function that shows a line of progress to the user. Only rank 0's are shown.
    """

    rank: int
    world_size: int
    device: torch.device
    say: Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchTarget:
    """Processes and devices of a run: ``world_size`` ranks on devices of ``device_type`` (``cpu``, ``cuda``, ...)."""

    device_type: str
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size (value={self.world_size}, allowed=1 or more)")
        count = local.device_type_and_count()[1]
        if not self.on_cpu and not under_torchrun() and self.world_size > count and not self.shares_devices:
            raise ValueError(f"fewer devices than ranks (value={self.world_size}, allowed=1..{count})")

    @property
    def on_cpu(self) -> bool:
        return self.device_type == "cpu"

    @property
    def shares_devices(self) -> bool:
        """True if ranks share devices, as they may where host memory is between them (``SIDELANE_PEERS=host``)."""
        count = 0 if self.on_cpu else local.device_type_and_count()[1]
        return 0 < count < self.world_size and config.current().peers == HOST_MEMORY


def choose_target(ranks: int | None = None, device: str = "auto", *, fewest: int = 2) -> LaunchTarget:
    """Choose the processes and devices of a study.

    Args:
        ranks: number of processes; None takes every accelerator, or 4 processes (2 on fewer than 4 cores) on the CPU.
        device: ``auto`` takes the accelerators if there are enough; ``gpu`` insists; ``cpu`` avoids them.
        fewest: number of accelerators that are enough.

    Raises:
        ValueError: the machine does not have that many devices.
    """
    if device not in ("auto", "gpu", "cpu"):
        raise ValueError(f"device (value={device!r}, allowed='auto', 'gpu' or 'cpu')")
    if under_torchrun():
        inherited = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, inherited):
            raise ValueError(f"ranks under torchrun (value={ranks}, allowed={inherited})")
        ranks = inherited
    accelerator, found = local.device_type_and_count()
    if device == "gpu" and not found:
        raise ValueError("device (value='gpu', allowed='auto' or 'cpu': this machine has no accelerator)")
    if device == "gpu" or (device == "auto" and found >= max(fewest, min(ranks or 1, 2))):
        return LaunchTarget(accelerator, ranks or found)
    return LaunchTarget("cpu", ranks or (4 if local.cores() >= 4 else 2))


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    *args: Any,
    device_type: str = "cpu",
    timeout_s: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> T | None:
    """Call ``function(rank, *args)`` on every rank and return rank 0's result.

    Args:
        function: function importable from its module; its first argument is a :class:`Rank`.
        world_size: number of ranks; under torchrun it must be torchrun's.
        args: arguments of every rank; they and the result travel as pickles.
        device_type: ``cpu`` (gloo), or the accelerator's name in torch (its own backend, and gloo for CPU tensors).
        timeout_s: seconds for the whole run; also the time-out of the process group.
        progress: function that receives rank 0's lines; None drops them.

    Returns:
        Rank 0's result. Under torchrun every other rank gets None.

    Raises:
        RankFailedError: a rank raised, died, or did not finish within ``timeout_s``.
        ValueError: there are fewer devices than ranks, which share none.
    """
    place = LaunchTarget(device_type, world_size)
    if under_torchrun():
        return _run_inherited(function, place, args, timeout_s, progress)
    store = store_on_loopback()
    with _processes(function, place, args, timeout_s, store.port) as ranks:
        result: T = _collect(ranks, timeout_s, progress or _say_nothing)
        return result


def store_on_loopback() -> dist.TCPStore:
    """Return a store for ranks of this machine: torch's own socket would listen on all interfaces."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((HOST, 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def under_torchrun() -> bool:
    """Return True if a launcher started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclasses.dataclass(slots=True)
class _Child:
    process: BaseProcess
    pipe: connection.Connection


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Failure:
    """Failure of a rank, ordered as causes are: one rank's end makes others fail, and their reports may arrive first.

    Attributes:
        reach: ``_DIED``; ``_RAISED`` an error of its own; or ``_TOLD`` of a failed peer, this one or another.
        at_s: time at which the rank had raised and cleaned up, on the clock that all processes share.
        rank: rank that failed.
        text: its traceback, or the end of its process in words.
    """

    reach: int
    at_s: float
    rank: int
    text: str


_DIED, _RAISED, _TOLD = range(3)


@contextlib.contextmanager
def _processes(
    function: Callable[..., Any], place: LaunchTarget, args: Sequence[Any], timeout_s: float, port: int
) -> Iterator[list[_Child]]:
    context, inherited = rank_context(), environment()
    children: list[_Child] = []
    try:
        for rank in range(place.world_size):
            ours, theirs = context.Pipe()
            job = (rank, place, port, timeout_s, function, tuple(args), theirs, inherited)
            process = context.Process(target=_child_main, args=job, name=f"sidelane-rank{rank}", daemon=True)
            process.start()
            theirs.close()
            children.append(_Child(process, ours))
        yield children
    finally:
        _end(children)


def _end(children: Sequence[_Child]) -> None:
    """End ranks by SIGTERM, a wait and SIGKILL, so that they remove their shared memory and none is left behind.

    A second Ctrl-C ends the waiting.
    """
    try:
        for child in children:
            if child.process.is_alive():
                child.process.terminate()
        deadline = time.monotonic() + GRACE_S
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join()
            child.pipe.close()


def _collect(children: Sequence[_Child], timeout_s: float, progress: Callable[[str], None]) -> Any:
    """Read the pipes until every rank has returned."""
    deadline = time.monotonic() + timeout_s
    running = {child.pipe: rank for rank, child in enumerate(children)}
    failures: list[_Failure] = []
    result: Any = None
    # Ranks that report without pause always leave something to read: the deadline is checked all the same.
    while running and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(running), timeout=left):
            assert isinstance(pipe, connection.Connection)
            rank = running[pipe]
            try:
                tag, payload = pipe.recv()
            except (EOFError, OSError):  # it ended between two messages, or in the middle of one
                children[rank].process.join(GRACE_S)
                exit_code = children[rank].process.exitcode
                tag, payload = "error", _Failure(_DIED, 0.0, rank, f"the process ended with exit code {exit_code}")
            if tag == "say":
                progress(payload)
                continue
            del running[pipe]
            if tag == "error":
                failures.append(payload)
                deadline = min(deadline, time.monotonic() + SETTLE_S)
            elif rank == 0:
                result = pickle.loads(payload)
    if failures:
        first, *others = sorted(failures)
        also = "".join(f"\nrank {other.rank} then failed too: {last_line(other.text)}" for other in others)
        kind, _, reason = last_line(first.text).partition(": ")
        refused = reason if kind in ("ValueError", "TypeError") else ""
        text = f"rank {first.rank} of {len(children)} failed:\n{first.text.rstrip()}{also}"
        raise RankFailedError(text, first.rank, refused)
    if running:
        late = sorted(running.values())
        names = ", ".join(map(str, late))
        raise RankFailedError(
            f"run_ranks: not finished within {timeout_s:g} s: rank(s) {names} (--timeout sets it)", late[0]
        )
    return result


def _child_main(
    rank: int,
    place: LaunchTarget,
    port: int,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pipe: connection.Connection,
    inherited: dict[str, str],
) -> None:
    take_over(inherited)
    # A terminal sends Ctrl-C to parent and ranks alike; only the parent reacts, and ends ranks by SIGTERM, which
    # becomes an exception here so that `finally` blocks run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_once)
    end_with_parent()
    try:
        # All ranks are on this machine: without this, gloo resolves its own address by the name service, and both
        # listen to other machines.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        if place.on_cpu:
            torch.set_num_threads(max(1, local.cores() // place.world_size))
        store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        with _process_group(place, rank, rank, timeout_s, store) as device:
            say = (lambda line: pipe.send(("say", line))) if rank == 0 else _say_nothing
            result = function(Rank(rank, place.world_size, device, say), *args)
        answer: tuple[str, _Failure | bytes] = ("result", pickle.dumps(result if rank == 0 else None))
    except Exception as error:
        reach = _TOLD if isinstance(error, PeerError) else _RAISED
        answer = ("error", _Failure(reach, time.monotonic(), rank, traceback.format_exc()))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing is left to clean up, and the exit is on its way
    pipe.send(answer)
    if answer[0] == "error":
        sys.exit(1)


def _exit_once(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


def _run_inherited(
    function: Callable[..., T],
    place: LaunchTarget,
    args: Sequence[Any],
    timeout_s: float,
    progress: Callable[[str], None] | None,
) -> T | None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != place.world_size:
        raise ValueError(
            f"run_ranks: world_size differs from torchrun's (value={place.world_size}, allowed={world_size})"
        )
    say = progress if progress is not None and rank == 0 else _say_nothing
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    with _process_group(place, rank, local_rank, timeout_s, None) as device:
        result = function(Rank(rank, world_size, device, say), *args)
    return result if rank == 0 else None


@contextlib.contextmanager
def _process_group(
    place: LaunchTarget, rank: int, local_rank: int, timeout_s: float, store: dist.Store | None
) -> Iterator[torch.device]:
    if place.on_cpu:
        device, backend = torch.device("cpu"), "gloo"
    else:
        module = torch.get_device_module(place.device_type)
        device = torch.device(place.device_type, local_rank % module.device_count())
        module.set_device(device)
        # NCCL refuses two ranks on one GPU.
        own = "gloo" if place.shares_devices else dist.get_default_backend_for_device(place.device_type)
        backend = f"cpu:gloo,{place.device_type}:{own}"
        load_replays()  # communicators would compile it beside their first calls, and a study would time both
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=None if place.on_cpu or place.shares_devices else device,
    )
    yield device
    # Not after a failure: destroying can wait for a collective that the failed rank will never join. The process ends.
    dist.destroy_process_group()


def _say_nothing(line: str) -> None:
    pass


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent has gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="sidelane-parent-watch", daemon=True).start()
