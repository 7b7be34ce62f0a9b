"""Sessions and lanes: a session holds the state that lanes of a process group share; a lane is an order of calls."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import config as settings
from sidelane import forks, log, metrics
from sidelane.choice.key import key_here
from sidelane.choice.store import InForce, builtin_digest, choice_of_rank
from sidelane.collectives.arguments import Arguments
from sidelane.collectives.backend import Backend
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import Calls
from sidelane.collectives.plan import Planner
from sidelane.collectives.prepare import Preparer
from sidelane.config import DEFAULT_TIMEOUT_S, Config
from sidelane.errors import CommunicatorClosedError, MismatchError, Page, PeerError, SidelaneError, see
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange, ranks_of
from sidelane.memory.heap import LaneMemory, SymmetricHeap
from sidelane.memory.release import give_back
from sidelane.modes import leaving_modes, untraced
from sidelane.program.collective import MAX_NODE_RANKS
from sidelane.session.entry import entry
from sidelane.sizes import format_bytes
from sidelane.version import VERSION


@functools.cache
def _warn_once(note: str) -> None:
    log.calls.warning("%s", note)


_numbers: dict[tuple[str, tuple[int, ...]], Iterator[int]] = collections.defaultdict(itertools.count)


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """Return the caller's device with its index; for None, the current GPU or else the CPU.

    Raises:
        ValueError: there is no executor for this device type, or this machine has no such device.
    """
    try:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):  # names that torch does not know
        raise ValueError(f"Communicator: device (value={device!r}, allowed=cpu, cuda, cuda:N)") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cpu, cuda)")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        has_none = torch.version.cuda is None and torch.version.hip is None
        why = "this torch was built without CUDA and ROCm" if has_none else "torch finds no GPU"
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cpu: {why})")
    if chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if chosen.index >= torch.cuda.device_count():
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cuda:0..{torch.cuda.device_count() - 1}, cpu)")
    return chosen


def make_backend(
    exchange: Exchange,
    device: torch.device,
    control: ControlBlock,
    timeout_s: float,
    *,
    like: Backend | None = None,
) -> Backend:
    """Make memory and executor for ``device``. Collective.

    Args:
        exchange: connection of the ranks.
        device: device of this rank.
        control: control block in which the ranks post their calls.
        timeout_s: time-out of calls in seconds.
        like: backend of the same ranks and device, whose probed features are taken over.
    """
    if device.type == "cpu":
        from sidelane.collectives.backend_cpu import CpuBackend

        return CpuBackend(exchange, control, timeout_s)
    from sidelane.collectives.backend_cuda import CudaBackend

    assert like is None or isinstance(like, CudaBackend)
    if torch.version.hip is not None:
        from sidelane.collectives.backend_hip import HipBackend

        return HipBackend(exchange, device, control, timeout_s, like=like)
    return CudaBackend(exchange, device, control, timeout_s, like=like)


def agree_on_profile(exchange: Exchange, device_type: str, setting: str | None) -> InForce:
    """Return the profile of rank 0 on every rank. Collective: one exchange of its text, or of what it is read from.

    Args:
        exchange: connection of the ranks.
        device_type: device type of the ranks' tensors.
        setting: ``Config.profile``; that of rank 0 counts.

    Raises:
        ValueError: on every rank, if the setting of rank 0 names a file that is missing or is not a profile, or if the
            ranks' packages have different tables.
        PeerError, PeerTimeoutError: a rank did not take part.
    """

    def own() -> tuple[str, str, str]:
        if exchange.rank:
            return "", "", builtin_digest()
        try:
            return choice_of_rank(setting, device_type, exchange.world_size), "", builtin_digest()
        except ValueError as error:
            return "", str(error), builtin_digest()

    (text, problem, _), *_ = found = exchange("the profile to choose by", own)
    if len({digest for _, _, digest in found}) > 1:
        problem = problem or "packages of the ranks with different tables of times (allowed=the same on every rank)"
    if problem:
        raise ValueError(f"Communicator: {problem}")
    return InForce.from_text(text)


@untraced
class Session:
    """The state that lanes share on this rank: device, settings, measured times and symmetric memory.

    Every rank of the group makes the session, and its lanes in the same order.

    Args:
        group: the control plane, of any backend; None for the default group. All its ranks must be on one machine.
        device: device of the tensors. None: the current CUDA device if there is one, else the CPU.
        config: settings; None for those in force (``sidelane.config``).

    Attributes:
        rank, world_size: this rank and the number of ranks in the group.
        ranks: the group's ranks in the default group; 0 to size - 1 if the group joins several worlds.
        name: name for observers of calls, the same on all ranks.
        device, config: device and settings in use.
        heap: the symmetric memory of all lanes.

    Raises:
        ValueError: the group has more than 16 ranks; or a device or setting does not exist, and then the other ranks
            raise PeerError with the reason.
        PeerTimeoutError: a rank of the group did not make the session in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | int | None = None,
        config: Config | None = None,
    ) -> None:
        chosen = group_for("Communicator", group)
        self.rank: int = chosen.rank()
        self.world_size: int = chosen.size()
        if self.world_size > MAX_NODE_RANKS:
            raise ValueError(
                f"Communicator: ranks of the group (value={self.world_size}, allowed=1..{MAX_NODE_RANKS}); a process "
                "group of the backend 'sidelane' may have more, and hands their calls to NCCL or Gloo"
            )
        self.ranks: tuple[int, ...] = ranks_of(chosen)
        # Numbered before anything can fail on one rank, so that a failed attempt counts on all of them.
        named, number = chosen.group_name, next(_numbers[chosen.group_name, self.ranks])
        whose = "" if chosen is dist.group.WORLD else f"group {named}, "
        self.name: str = f"communicator {number} of {whose}ranks {list(self.ranks)}"
        try:
            self.device: torch.device = choose_device(device)
            settings.start_observers()
            self.config: Config = settings.current() if config is None else config
            if not isinstance(self.config, Config):
                raise TypeError(f"Communicator: config (value={config!r}, allowed=a sidelane.Config, None)")
        except Exception as error:
            Exchange(chosen, DEFAULT_TIMEOUT_S).refuse(error)
            raise
        self._group = chosen
        self._making = forks.Mutex(lambda: ("Session.lane", "the making of a lane"))
        self._lanes: list[Lane] = []
        self._numbers = itertools.count()
        self._closed = False
        self._profile: InForce | None = None
        self.heap: SymmetricHeap = SymmetricHeap(owner=f"ranks {list(self.ranks)}")

    @leaving_modes
    def lane(self, name: str | None = None) -> Lane:
        """Make a lane. Collective: the same name on every rank, in the same order.

        Args:
            name: name in errors, unique in the session. None: its number.

        Raises:
            ValueError: there is a lane of that name.
            CommunicatorClosedError: the session was closed.
            MismatchError: another rank made another lane.
            UnavailableError: the ranks are on several machines, or the device lacks symmetric memory.
            PeerError, PeerTimeoutError: a rank failed, or did not come.
        """
        made = self._making.run(lambda: self._made(name))
        if self._closed:  # by another thread in the meantime
            made.close()
            raise CommunicatorClosedError("Session.lane: the session was closed")
        return made

    def _made(self, name: str | None) -> Lane:
        if self._closed:
            raise CommunicatorClosedError("Session.lane: the session was closed")
        number = next(self._numbers)  # before anything can fail on one rank, so that an attempt counts on all of them
        exchange = Exchange(self._group, self.config.timeout_s, warn_s=self.config.warn_s)
        made: Lane | None = None
        try:
            if any(lane.name == name for lane in self._lanes):
                raise ValueError(f"Session.lane: name (value={name!r}, allowed=another one for each lane)")
            if name is not None:
                exchange(f"lane {name!r}", lambda: None)
            made = Lane(self, f"lane {number}" if name is None else name, number, exchange)
            exchange("a lane that is made", lambda: None)  # a lane that any rank lacks is none
        except BaseException as error:
            if not isinstance(error, PeerError | MismatchError):  # which all ranks raise
                exchange.refuse(error)
            if made is not None:
                made.close()
            raise
        self._lanes.append(made)
        return made

    def close(self) -> None:
        """Close all lanes, and release the memory. Idempotent. Not a collective: peers may close later."""
        self._closed = True
        metrics.flush()
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
        if not any(lane.calls.forked for lane in lanes):  # in a forked copy the memory belongs to the parent
            self.heap.close()
            give_back()

    @property
    def backend(self) -> Backend | None:
        """The backend of the first lane, whose probed features hold for the others, too; None before the first lane."""
        return self._lanes[0].backend if self._lanes else None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The open lanes: a communicator that was closed on its own has closed its lane."""
        return tuple(lane for lane in self._lanes if not lane.calls.closed)

    def profile_of(self, exchange: Exchange) -> InForce:
        """Return the measured times to choose by, on which the ranks agree once."""
        if self._profile is None:
            self._profile = agree_on_profile(exchange, self.device.type, self.config.profile)
        return self._profile

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes:
            lane.leave(kind, error, trace)
        self.close()


def group_for(what: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the caller's group, or the default one for None.

    Args:
        what: name of the caller's function, for errors.
        group: the caller's argument.

    Raises:
        TypeError: it is no group.
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # from dist.new_group
    if group is not None and group != outside and not isinstance(group, dist.ProcessGroup):
        hint = ""
        if isinstance(group, str):
            hint = ": names of backends go to torch.distributed.init_process_group"
        elif callable(getattr(group, "get_group", None)):
            hint = ": a mesh has one for each dimension, mesh.get_group(0)"
        text = f"{what}: group (value={group!r}, allowed=a torch.distributed.ProcessGroup, None for the default one)"
        raise see(TypeError(text + hint), Page.ERRORS)
    if group is None and not dist.is_initialized():
        text = f"{what}: torch.distributed is not initialised (call torch.distributed.init_process_group first)"
        raise see(RuntimeError(text), Page.ERRORS)
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    if chosen == outside:
        raise see(ValueError(f"{what}: this process is not in the group"), Page.ERRORS)
    if chosen not in c10d._world.pg_map:
        text = f"{what}: the group was destroyed, or was not made by torch.distributed"
        raise see(ValueError(text), Page.ERRORS)
    return chosen


@untraced
class Lane:
    """An order of calls: calls of one lane follow each other, calls of two lanes do not wait for each other.

    Made by :meth:`Session.lane`. ``Communicator(lane)`` makes its collectives; tensors from ``empty`` of any lane are
    symmetric in all lanes of the session. Each lane has streams and threads of its own, and is used by one thread at a
    time. On GPUs the lanes of a process share hardware channels: their calls are *submitted* in one order, the same on
    every rank, though they do not run in it (docs/internals/failure.md, "Threads").

    Attributes:
        session: its session.
        name: its name in the session.
        control: control block in which the ranks post their calls.
        backend: memory and executor of the device.
        arguments: checks the tensors of callers.
        preparer: loads programs, and owns the memory that they share.
        calls: numbers and runs calls.
        path: the path that every call takes.
        profile: the measured times by which ``auto`` chooses.
        pools: number of pools that were made; the same on all ranks.
    """

    def __init__(self, session: Session, name: str, number: int, exchange: Exchange) -> None:
        self.session: Session = session
        self.name: str = name
        self.pools: int = 0
        config = session.config
        self.control = ControlBlock(exchange)
        try:
            self.backend = make_backend(exchange, session.device, self.control, config.timeout_s, like=session.backend)
            try:
                self._complete(exchange, number)
            except BaseException:
                self.backend.close()
                raise
        except BaseException as error:  # peers may wait where they look at the control block alone
            at_fault = error.ranks if isinstance(error, PeerError) else ()
            self.control.abort(f"rank {session.rank}: {type(error).__name__}: {error}", at_fault)
            self.control.close()
            raise

    def _complete(self, exchange: Exchange, number: int) -> None:
        session, config = self.session, self.session.config
        self.memory = LaneMemory(session.heap, self.backend.memory, number, session.world_size, config.memory_bytes)
        self.arguments = Arguments(session.rank, session.world_size, session.device, session.heap)
        self.profile = session.profile_of(exchange)
        planner = Planner(
            self.backend.executor.capabilities,
            verify_programs=config.verify,
            profile=self.profile.profile,
            abilities=self.backend.abilities,
            chosen_by=self.profile.where,
        )
        self.preparer = Preparer(session.rank, session.heap, self.backend, planner)
        self.calls = self._calls = Calls(
            *(self.control, self.backend, config, self.preparer.renew, session.heap.keep, session.ranks),
            session.name + (f", {self.name}" if number else ""),
        )
        self.control.world_ranks = session.ranks
        self.path = CallPath(self.calls, self.arguments, self.preparer)
        if log.calls.isEnabledFor(logging.INFO):
            self._log()
        if session.rank == 0 and not number:  # whose profile counts
            for note in self.profile.notes:
                _warn_once(note)

    def _log(self) -> None:
        session, config = self.session, self.session.config
        machine = key_here(session.device.type, session.world_size)
        versions = ", ".join(f"{name} {version}" for name, version in (("sidelane", VERSION), *machine.software))
        most = "what the device has" if config.memory_bytes is None else format_bytes(config.memory_bytes)
        log.calls.info(
            "rank %d of %d on %s: communicator of ranks %s, lane %r; it chooses by %s; a wait for a peer ends in %g s; "
            "%d x %s%s; %s; symmetric memory: %s for its calls, for tensors up to %s",
            *(session.rank, session.world_size, session.device, list(session.ranks), self.name),
            *(self.profile.where, config.timeout_s, machine.count, machine.device),
            *(machine.links and f", {machine.links}", versions, format_bytes(self.preparer.own_bytes), most),
        )

    @entry
    def agree(self, name: str, text: str) -> None:
        """Compare a text with the peers', as that of a new call. Collective.

        Args:
            name: name of what is compared, for errors.
            text: text that must be the same on all ranks.

        Raises:
            UnavailableError: inside a capture.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        self.path.agree(name, lambda: (None, text))

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time-out of waits for peers on this rank, including those of calls under way.

        Args:
            timeout_s: time-out in seconds, > 0.
        """
        self.calls.config = dataclasses.replace(self.calls.config, timeout_s=timeout_s)
        self.backend.set_timeout(timeout_s)

    def synchronize(self) -> None:
        """Block the host until every call of the lane has finished on this rank.

        Raises:
            PeerError, PeerTimeoutError: a peer failed.
        """
        self.calls.require_open()
        with self.calls.failing_for_good():
            self.backend.synchronize()

    def close(self) -> None:
        """Release threads and streams. Idempotent. Not a collective: peers may close later."""
        calls = self.calls
        if calls.closed or calls.forked:
            return
        for handle in list(calls.unfinished):
            with contextlib.suppress(SidelaneError):
                handle.close()
        calls.closed, calls.failure = True, None  # the frames of a failure would keep these objects alive
        if self.path.repeats is not None:
            self.path.repeats.forget()
        self.backend.close()
        self.preparer.close()
        self.memory.close()
        self.control.close()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close at the end of a ``with`` block."""
        calls = self.calls
        if error is not None:
            for handle in list(calls.unfinished):
                handle.__exit__(kind, error, trace)
        if isinstance(error, KeyboardInterrupt) and not calls.closed and calls.failure is None:
            # This rank and its peers may be in different calls, which none of them can complete.
            calls.fail(error)
        self.close()
