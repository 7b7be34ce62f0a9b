"""A session: what the lanes of one process group share on this rank. A lane: an order of calls of its own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane import forks
from sidelane.choice.store import InForce
from sidelane.collectives.arguments import Arguments
from sidelane.collectives.backend import Backend
from sidelane.collectives.bound import BoundProgram, bind_program
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import Calls
from sidelane.collectives.devices import choose_device, make_backend
from sidelane.collectives.entry import entry
from sidelane.collectives.heap import LaneMemory, SymmetricHeap
from sidelane.collectives.learning.board import LearningBoard
from sidelane.collectives.own_kernel import OwnKernel, Peers, load_kernel
from sidelane.collectives.plan import Planner
from sidelane.collectives.prepare import Preparer
from sidelane.collectives.profile import agree_on_profile
from sidelane.collectives.untraced import untraced
from sidelane.config import DEFAULT_TIMEOUT_S, LEARN, Config
from sidelane.errors import CommunicatorClosedError, Page, SidelaneError, see
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.memory.giving_back import give_back
from sidelane.modes import leaving_modes
from sidelane.program.collective import MAX_NODE_RANKS
from sidelane.program.ir import Program


@untraced
class Session:
    """What lanes share on this rank: device, settings, measured times and symmetric memory.

    Every rank of the group makes the session, and its lanes in the same order.

    Args:
        group: the control plane, of any backend; None for the default group. All its ranks must be on one machine.
        device: where the tensors are. None: the current CUDA device where there is one, else the CPU.
        config: settings; None for those in force (``sidelane.config``).

    Attributes:
        rank, world_size: in the group.
        ranks: of the group, as the default group numbers them.
        device, config: as they were chosen.
        heap: the symmetric memory of all lanes.

    Raises:
        ValueError: more than 16 ranks. A device or a setting that there is not; the other ranks raise PeerError and say
            which.
        PeerTimeoutError: a rank of the group did not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | int | None = None,
        config: Config | None = None,
    ) -> None:
        chosen = group_for("Communicator", group)
        self.rank: int = dist.get_rank(chosen)
        self.world_size: int = dist.get_world_size(chosen)
        if self.world_size > MAX_NODE_RANKS:
            raise ValueError(f"Communicator: ranks of the group (value={self.world_size}, allowed=1..{MAX_NODE_RANKS})")
        try:
            self.device = choose_device(device)
            self.config = settings.current() if config is None else config
            if not isinstance(self.config, Config):
                raise TypeError(f"Communicator: config (value={config!r}, allowed=a sidelane.Config, None)")
        except Exception as error:
            Exchange(chosen, DEFAULT_TIMEOUT_S).refuse(error)
            raise
        self._group = chosen
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(chosen))
        self._making = forks.Turn(lambda: ("Session.lane", "the making of a lane"))
        self._lanes: list[Lane] = []
        self._closed = False
        self._profile: InForce | None = None
        self.heap = SymmetricHeap(owner=f"ranks {list(self.ranks)}")

    @leaving_modes
    def lane(self, name: str | None = None) -> Lane:
        """Make a lane. Collective: the same name on every rank, in the same order.

        Args:
            name: for people; of this session's lanes, each has its own. None: its number.

        Raises:
            ValueError: there is a lane of that name.
            CommunicatorClosedError: the session was closed.
            MismatchError: another rank made another lane.
            UnavailableError: the ranks are on several machines, or the device lacks symmetric memory.
            PeerError, PeerTimeoutError: a rank failed, or did not come.
        """
        made = self._making.run(lambda: self._made(name))
        if self._closed:  # meanwhile, by another thread
            made.close()
            raise CommunicatorClosedError("Session.lane: the session was closed")
        return made

    def _made(self, name: str | None) -> Lane:
        if self._closed:
            raise CommunicatorClosedError("Session.lane: the session was closed")
        number = len(self._lanes)
        if any(lane.name == name for lane in self._lanes):
            raise ValueError(f"Session.lane: name (value={name!r}, allowed=another one for each lane)")
        exchange = Exchange(self._group, self.config.timeout_s)
        if name is not None:
            exchange(f"lane {name!r}", lambda: None)
        try:
            made = Lane(self, f"lane {number}" if name is None else name, number, exchange)
        except Exception as error:
            if not isinstance(error, SidelaneError):  # which the others have, too, or hear of
                exchange.refuse(error)
            raise
        self._lanes.append(made)
        return made

    def close(self) -> None:
        """Close all lanes, and let go of the memory. Idempotent. Not a collective: peers may close later."""
        self._closed = True
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
        if not any(lane.calls.forked for lane in lanes):  # of which the memory is the parent's
            self.heap.close()
            give_back()

    @property
    def backend(self) -> Backend | None:
        """Of the first lane: what was found out about the device holds for the others, too."""
        return self._lanes[0].backend if self._lanes else None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Those that there are."""
        return tuple(self._lanes)

    def profile_of(self, exchange: Exchange) -> InForce:
        """The measured times to choose by, on which the ranks agree once."""
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
    """The group that a caller passed, or the default one.

    Args:
        what: is called.
        group: as it was passed.

    Raises:
        TypeError: it is something else.
        RuntimeError: there are no groups yet.
        ValueError: this process is not in it.
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
    if not dist.is_initialized():
        text = f"{what}: torch.distributed is not initialised (call torch.distributed.init_process_group first)"
        raise see(RuntimeError(text), Page.ERRORS)
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    if chosen == outside or dist.get_rank(chosen) < 0:
        raise see(ValueError(f"{what}: this process is not in the group"), Page.ERRORS)
    return chosen


@untraced
class Lane:
    """An order of calls: those of one lane follow each other on every rank, those of two do not wait for each other.

    Made by :meth:`Session.lane`. ``Communicator(lane)`` makes its collectives; tensors from ``empty`` of any lane are
    symmetric in all lanes of the session. Each lane has streams and threads of its own, and is used by one thread at a
    time. On GPUs the lanes of a process share hardware channels: their calls are *submitted* in one order, the same on
    every rank, though they do not run in it (docs/internals/failure.md, "Threads").

    Attributes:
        session: whose.
        name: as it was given.
        control: where the ranks tell each other.
        backend: what runs here.
        arguments: checks what callers pass.
        preparer: what programs share.
        calls: their numbers.
        peers: see ``Communicator.peers``.
        path: that they take.
        profile: the measured times that ``auto`` chooses by.
        pools: how many were made; the same on all ranks.
    """

    def __init__(self, session: Session, name: str, number: int, exchange: Exchange) -> None:
        self.session, self.name, self.pools = session, name, 0
        config = session.config
        self.control = ControlBlock(exchange)
        self.backend = make_backend(exchange, session.device, self.control, config.timeout_s, like=session.backend)
        self.memory = LaneMemory(session.heap, self.backend.memory, number, session.world_size, config.memory_bytes)
        self.arguments = Arguments(session.rank, session.world_size, session.device, session.heap)
        self.profile = session.profile_of(exchange)
        planner = Planner(
            self.backend.executor.capabilities,
            verify_programs=config.verify,
            profile=self.profile.profile,
            abilities=self.backend.abilities,
        )
        self.preparer = Preparer(session.rank, session.heap, self.backend, planner)
        self.calls = self._calls = Calls(self.control, self.backend, config, self.preparer.renew, session.heap.keep)
        self.peers = Peers(session.heap, self.arguments).of
        maps = config.map_memory == LEARN or (config.map_memory is True and not self.backend.hosts_meet)
        learns = session.world_size > 1 and maps
        board = LearningBoard(exchange) if learns else None
        self.path = CallPath(self.calls, self.arguments, self.preparer, board)

    @entry
    def load(self, program: Program, buffers: Mapping[str, torch.Tensor]) -> BoundProgram:
        """Prove a program of one's own and bind it to tensors. Collective; see ``Communicator.load``."""
        return bind_program(self.path, program, buffers)

    @entry
    def load_kernel(self, kernel: Any, *, flags: int) -> OwnKernel:
        """Give a Triton kernel of one's own flags. Collective; see ``Communicator.load_kernel``."""
        return load_kernel(self.path, kernel, flags)

    def set_timeout(self, timeout_s: float) -> None:
        """Let waits for peers take so long from now on, those of calls under way, too. Of this rank alone.

        Args:
            timeout_s: seconds, > 0.
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
        calls.closed, calls.failure = True, None  # the frames of a failure keep all of this
        if self.path.repeats is not None:
            self.path.repeats.forget()
        self.backend.close()
        self.preparer.close()
        if self.path.reach is not None:
            self.path.reach.close()
        if self.path.learning is not None:
            self.path.learning.close()
        self.memory.close()
        self.control.close()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close at the end of a ``with`` block."""
        calls = self.calls
        if error is not None:
            for handle in list(calls.unfinished):
                handle.__exit__(kind, error, trace)
        if isinstance(error, KeyboardInterrupt) and not calls.closed and calls.failure is None:
            # The peers may be in a call that this rank will not make, and it in one that they do not come to.
            calls.fail(error)
        self.close()
