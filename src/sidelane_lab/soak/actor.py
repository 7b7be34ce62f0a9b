"""Doing the steps of an episode on one rank."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError
from sidelane.session import Communicator, Session
from sidelane_lab.soak.ahead import Graphs, Handles
from sidelane_lab.soak.calls import Caller
from sidelane_lab.soak.episode import Episode
from sidelane_lab.soak.judge import Judge
from sidelane_lab.soak.memory import Memory
from sidelane_lab.soak.plan import MOST_GRAPHS
from sidelane_lab.soak.seat import Seat
from sidelane_lab.soak.steps import (
    Allocate,
    Barrier,
    Capture,
    Differ,
    Finish,
    Fire,
    Fork,
    Freeze,
    Once,
    Open,
    Overlap,
    Pause,
    Prepare,
    Refuse,
    Replay,
    Shut,
    Step,
    Stream,
)
from sidelane_lab.soak.storm.described import MODES
from sidelane_lab.soak.tally import Tally
from sidelane_lab.soak.values import Values

CHILD_S = 20.0
CYCLES_PER_S = 1.9e9
"""Of ``torch.cuda._sleep``."""


class _Stage:
    """A communicator with everything that this rank has for it."""

    def __init__(self, communicator: Communicator, step: Open, values: Values, judge: Judge, tally: Tally) -> None:
        self.communicator = communicator
        self.memory = Memory(communicator, step.block_bytes, values)
        self.caller = Caller(communicator, self.memory, judge, tally)
        self.handles = Handles(self.caller)
        self.graphs = Graphs(self.caller, MOST_GRAPHS)


class Actor:
    """Does steps on one rank, in one thread.

    Args:
        episode: whose.
        seat: of the rank.
        groups: process groups, by the number that the episode gives them; None where this rank is not in.
        stack: closes the communicators.
        session: of another actor of this rank, of which this one's first communicator is a lane; None: of its own.
    """

    def __init__(
        self,
        episode: Episode,
        seat: Seat,
        groups: Sequence[dist.ProcessGroup | None],
        stack: contextlib.ExitStack,
        session: Session | None = None,
    ) -> None:
        self._session = session
        self.episode, self.seat = episode, seat
        self.tally = Tally()
        self.judge = Judge(seat.device, self.tally.tell, self._finish_calls)
        self._groups, self._stack = groups, stack
        self._values = Values(seat.device)
        self._stages: dict[int, _Stage] = {}
        self._streams: list[torch.cuda.Stream] = []

    @property
    def first(self) -> Communicator:
        """The communicator of all ranks."""
        return self._stages[0].communicator

    def _finish_calls(self) -> None:
        """Wait on the host until all calls have ended, which says if one has failed."""
        for stage in self._stages.values():
            stage.communicator.synchronize()

    def do(self, step: Step) -> None:
        """One step; nothing on ranks that it does not concern."""
        match step:
            case Pause() | Freeze() | Stream():
                self._stall(step)
            case Fork():
                if step.rank == self.seat.rank and step.comm in self._stages:
                    self._fork(step)
            case Open():
                self._open(step)
            case Fire():
                self._fire(step)
            case _:
                stage = self._stages.get(step.comm)
                if stage is not None:
                    self._on(stage, step)

    def _on(self, stage: _Stage, step: Step) -> None:
        caller = stage.caller
        match step:
            case Once(in_turn=True):
                self._take_turns(functools.partial(caller.once, step.call, step.key))
            case Once():
                caller.once(step.call, step.key)
            case Overlap():
                caller.overlap(step)
            case Barrier():
                if step.synchronize:
                    stage.communicator.synchronize()
                else:
                    stage.communicator.barrier()
                    caller.count("barrier")
            case Allocate():
                stage.memory.allocate(step.nbytes)
                self.tally.allocations += caller.rank == 0
            case Prepare():
                stage.handles.prepare(step)
            case Finish():
                stage.handles.finish(step)
            case Capture():
                stage.graphs.capture(step)
            case Replay():
                stage.graphs.replay(step)
            case Refuse():
                other = self._stages.get(-1 if step.other is None else step.other)
                caller.refuse(step, None if other is None else other.memory.blocks[0])
            case Differ():
                caller.differ(step)
            case Shut():
                self._shut(stage, step.comm)
            case _:
                raise AssertionError(f"no such step: {step}")

    def _open(self, step: Open) -> None:
        group = self._groups[step.group]
        if group is None:
            return
        episode = self.episode
        mapped = episode.setting.map_memory
        config = Config(
            timeout_s=episode.timeout_s,
            debug=episode.debug,
            verify=episode.verify,
            profile="builtin",
            map_memory=None if mapped is None else MODES[mapped],
        )
        session = self.first.lane.session if step.is_lane else self._session if not step.comm else None
        if session is None:
            communicator = Communicator(group, device=self.seat.device, config=config)
        else:
            communicator = Communicator(session.lane())
        self._stack.enter_context(communicator)
        if step.first_call:
            _begin_at(communicator, group, step.first_call)
        self._stages[step.comm] = _Stage(communicator, step, self._values, self.judge, self.tally)
        self.tally.allocations += communicator.rank == 0

    def _shut(self, stage: _Stage, number: int) -> None:
        self.judge.settle()
        stage.graphs.clear()
        communicator = stage.communicator
        communicator.close()
        del self._stages[number]
        stage.caller.must_raise((CommunicatorClosedError,), communicator.barrier, "a call of a closed communicator")

    def _fire(self, step: Fire) -> None:
        """Also a call of another communicator while a handle is armed: some ranks may be in one of the two only."""
        stage, other = self._stages.get(step.comm), None if step.other is None else self._stages.get(step.other[0])

        def between() -> None:
            if other is not None and step.other is not None:
                other.caller.once(step.other[1], step.other[2])

        if stage is None:
            between()
        else:
            stage.handles.fire(step, between)

    def _stall(self, step: Pause | Freeze | Stream) -> None:
        if isinstance(step, Stream):
            self._change_stream(step.number)
        elif step.rank != self.seat.rank:
            return
        elif isinstance(step, Freeze):
            self.seat.freeze(step.seconds)
        elif step.on_stream:
            torch.cuda._sleep(int(step.seconds * CYCLES_PER_S))
        else:
            time.sleep(step.seconds)

    def _change_stream(self, number: int) -> None:
        if not self._streams:
            self._streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)

    def _take_turns(self, act: Callable[[], None]) -> None:
        """Have another thread do it, as backward passes do."""
        stream = None if self.seat.device.type == "cpu" else torch.cuda.current_stream()

        def run() -> None:
            if stream is not None:
                torch.cuda.set_device(self.seat.device)
            with torch.cuda.stream(stream):
                act()

        with concurrent.futures.ThreadPoolExecutor(1, "sidelane-soak-turn") as other:
            other.submit(run).result()

    def _fork(self, step: Fork) -> None:
        """A copy of this process ends in one way or another, and changes nothing for this one."""
        communicator = self._stages[step.comm].communicator
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if step.how == "calls":
                    try:
                        communicator.all_reduce(torch.ones(3))
                    except RuntimeError:
                        code = 0
                else:
                    if step.how == "closes":
                        communicator.close()
                    code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + CHILD_S
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(1e-3)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.tally.fail(f"a forked copy that {step.how} did not end within {CHILD_S:g} s")
        elif ended[1]:
            self.tally.fail(f"a forked copy that {step.how}: status {ended[1]}")

    def counted(self) -> Tally:
        """What was counted so far, comparisons included."""
        self.tally.compared_bytes, self.tally.wrong = self.judge.compared_bytes, self.judge.wrong
        return self.tally

    def clear(self) -> None:
        """Let go of everything that is no communicator."""
        for stage in self._stages.values():
            stage.graphs.clear()
        self._stages.clear()


def _begin_at(communicator: Communicator, group: dist.ProcessGroup, call: int) -> None:
    """Have the calls of a communicator that has made none begin with a number far off, where counters wrap.

    Hundreds of millions of calls would do the same. No user can, which is why it takes the communicator's own parts.
    """
    communicator.lane.preparer.renew(call - 1)
    dist.barrier(group)
    communicator._calls.count_from(call)
