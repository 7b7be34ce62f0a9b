"""The steps of an episode on one rank: those of one communicator are its caller's, the others stand here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from fake_driver import FakeDriver

from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError
from sidelane.session import Communicator
from soak.caller import Caller
from soak.episode import Episode
from soak.judge import Judge, Tally
from soak.memory import Memory, Values
from soak.plan import Step
from soak.seat import Seat

CYCLES_PER_S = 1.9e9
"""Cycles of ``torch.cuda._sleep`` a second."""


class Actor:
    """Does steps on one rank, in one thread.

    Args:
        episode: says what communicators are like.
        seat: the rank's.
        groups: process groups, by the number that the episode gives them; None where this rank is not in.
        stack: closes the communicators.
        group: the process group of all ranks, which is Sidelane's; None: its steps are not drawn.
        driver: the driver that is made up, where it is one.
    """

    def __init__(
        self,
        episode: Episode,
        seat: Seat,
        groups: Sequence[dist.ProcessGroup | None],
        stack: contextlib.ExitStack,
        group: dist.ProcessGroup | None = None,
        driver: FakeDriver | None = None,
    ) -> None:
        self.episode, self.seat, self.group, self.driver = episode, seat, group, driver
        self.tally = Tally()
        self.judge = Judge(seat.device, self.tally.describe, self._finish_calls)
        self._groups, self._stack = groups, stack
        self._values = Values(seat.device)
        self._callers: dict[int, Caller] = {}
        self._streams: list[torch.cuda.Stream] = []
        self._own: dict[str, Callable[..., None]] = {
            "open": self.open,
            "shut": self._shut,
            "fire": self._fire,
            "refuse": self._refuse,
            "pause": self._pause,
            "freeze": self._freeze,
            "stream": self._stream,
            "late": self._late,
            "grouped": self._grouped,
        }

    @property
    def first(self) -> Communicator:
        """The communicator of all ranks."""
        return self._callers[0].communicator

    def do(self, step: Step) -> None:
        """Do one step; nothing on ranks that it does not concern."""
        try:
            if step.name in self._own:
                self._own[step.name](step.comm, **step.given)
            elif step.comm in self._callers:
                getattr(self._callers[step.comm], step.name)(**step.given)
        except Exception as error:
            error.add_note(f"in {step}")
            raise

    def counted(self) -> Tally:
        """Return what was counted so far, comparisons included."""
        self.tally.compared_bytes, self.tally.wrong = self.judge.compared_bytes, self.judge.wrong
        return self.tally

    def clear(self) -> None:
        """Let go of everything that is no communicator."""
        for caller in self._callers.values():
            caller.clear()
        self._callers.clear()

    def open(
        self, comm: int, group: int, block_bytes: int, is_lane: bool, late: tuple[int, float] | None = None
    ) -> None:
        """Make a communicator of the ranks in a group, and memory for its calls.

        Args:
            comm: its number.
            group: number of the group.
            block_bytes: size of its first block of symmetric memory, and of its ordinary memory.
            is_lane: it is a lane of the first communicator's session, and shares its memory.
            late: a rank that comes later than the others, by so many seconds.
        """
        if late is not None:
            self._late(comm, *late)
        ranks, episode = self._groups[group], self.episode
        if ranks is None:
            return
        config = Config(
            timeout_s=episode.timeout_s,
            debug=episode.debug,
            profile="builtin",
        )
        if is_lane:
            communicator = Communicator(self.first)
        else:
            communicator = Communicator(ranks, device=self.seat.device, config=config)
        self._stack.enter_context(communicator)
        memory = Memory(communicator, block_bytes, self._values)
        self._callers[comm] = Caller(communicator, memory, self.judge, self.tally)
        self.tally.allocations += communicator.rank == 0

    def _finish_calls(self) -> None:
        """Wait on the host until all calls have ended, which says if one has failed."""
        for caller in self._callers.values():
            caller.communicator.synchronize()

    def _shut(self, comm: int) -> None:
        """Close a communicator, and see that it takes no call any more."""
        if comm in self._callers:
            self.judge.settle()
            caller = self._callers.pop(comm)
            caller.clear()
            caller.communicator.close()
            barrier = caller.communicator.barrier
            caller.must_raise((CommunicatorClosedError,), barrier, "a call of a closed communicator")

    def _fire(self, comm: int, other: Step | None, **given: object) -> None:
        """Make another communicator's call too while a handle is armed: ranks may be in one of the two only."""

        def between() -> None:
            if other is not None:
                self.do(other)

        if comm in self._callers:
            self._callers[comm].fire(**given, between=between)  # type: ignore[arg-type]
        else:
            between()

    def _refuse(self, comm: int, other: int | None, **given: object) -> None:
        """Pass memory of a communicator that does not belong here."""
        if comm in self._callers:
            foreign = self._callers.get(-1 if other is None else other)
            block = None if foreign is None else foreign.memory.blocks[0]
            self._callers[comm].refuse(**given, foreign=block)  # type: ignore[arg-type]

    def _pause(self, comm: int, rank: int, seconds: float, on_stream: bool) -> None:
        """Have a rank of the world be late, on its host or on its stream."""
        if rank == self.seat.rank and on_stream:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))
        elif rank == self.seat.rank:
            time.sleep(seconds)

    def _late(self, comm: int, rank: int, seconds: float) -> None:
        """Have a rank of the world come seconds late."""
        self.tally.noted["late ranks"] += self.seat.rank == 0
        if rank == self.seat.rank:
            time.sleep(seconds)

    def _grouped(self, comm: int, name: str, size: int, root: int, key: int) -> None:
        """Make a call of the process group, and check it."""
        group, rank, n = self.group, self.seat.rank, self.seat.world_size
        assert group is not None
        everyone = [float(key + peer) for peer in range(n)]
        own, total = torch.full((size,), everyone[rank]), sum(everyone)
        found, expected = own, [total]
        if name == "all_reduce":
            dist.all_reduce(own, group=group)
        elif name == "broadcast":
            dist.broadcast(own, root, group=group)
            expected = [everyone[root]]
        elif name == "all_gather_into_tensor":
            found, expected = torch.empty(n * size), everyone
            dist.all_gather_into_tensor(found, own, group=group)
        elif name == "reduce_scatter_tensor":
            found = torch.empty(size)
            dist.reduce_scatter_tensor(found, own.repeat(n), group=group)
        elif name == "all_to_all_single":  # peers get as many rows as their number says, and one
            sizes = [1 + peer for peer in range(n)]
            found, expected = torch.empty(n * sizes[rank]), [one for one in everyone for _ in range(sizes[rank])]
            sent = torch.full((sum(sizes),), everyone[rank])
            dist.all_to_all_single(found, sent, [sizes[rank]] * n, sizes, group=group)
        else:
            objects: list[str] = [""] * n
            dist.all_gather_object(objects, f"{key} {rank}" + "." * size, group=group)
            found = torch.tensor([float(one == f"{key} {peer}" + "." * size) for peer, one in enumerate(objects)])
            expected = [1.0] * n
        wanted = torch.tensor(expected).repeat_interleave(len(found) // len(expected))
        self.judge.same(found.view(torch.uint8), wanted.view(torch.uint8), name, size, root, key)
        self.tally.calls["process group"] += rank == 0

    def end_group(self, *, aborts: bool = False) -> None:
        """Destroy the process group, while all ranks are there; else it aborts, of which they hear."""
        if self.group is not None:
            if aborts:
                self.group.abort()
            dist.destroy_process_group(self.group)
            self.group = None

    def _freeze(self, comm: int, rank: int, seconds: float) -> None:
        """Stop all threads of a rank for a while, shorter than the time-out."""
        if rank == self.seat.rank:
            self.seat.freeze(seconds)

    def _stream(self, comm: int, number: int) -> None:
        """Go on on another stream."""
        if not self._streams:
            self._streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
