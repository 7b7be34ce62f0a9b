"""The end of an episode on one rank: what the culprit does, and how the others hear of it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import torch

from sidelane.errors import CommunicatorClosedError, PeerError, SidelaneError
from sidelane_lab.soak import endings
from sidelane_lab.soak.actor import Actor
from sidelane_lab.soak.endings import ENDINGS, EXIT_CODE, SLACK_S, Told
from sidelane_lab.soak.plan import Plan

LOOK_EVERY = 16
"""Steps between two looks of a host at its GPU, which shows a failure in no call before."""

AT_ONCE_S = 5.0

_ACTED = (endings.ANOTHER_CALL, endings.TWO_THREADS)
"""The culprit has done what it does before the last calls."""


class RaisedError(Exception):
    """What a culprit raises out of the block of its communicators, or out of its process."""


class Finale:
    """One rank's part in the end.

    Args:
        actor: does the steps.
        plan: has them.
        stack: closes the communicators when its block ends.
    """

    def __init__(self, actor: Actor, plan: Plan, stack: contextlib.ExitStack) -> None:
        self._actor, self._plan, self._stack = actor, plan, stack
        self._seat, self._episode = actor.seat, actor.episode
        self._is_culprit = actor.seat.rank == actor.episode.culprit
        self._on_cpu = actor.seat.device.type == "cpu"

    def play(self) -> Told | None:
        """The end that the episode has; the error that this rank got.

        Raises:
            RaisedError, KeyboardInterrupt: on the culprit.
        """
        if self._episode.ending == endings.GOOD:
            return None
        try:
            self._prologue()
            self._last_calls()
        except SidelaneError as error:
            self._actor.judge.forget()
            told = Told(type(error).__name__, tuple(getattr(error, "ranks", ())), str(error), time.monotonic())
            self._see_that_it_is_over()
            return told
        return None

    def _prologue(self) -> None:
        """Behind this, every rank has made all calls of the body: the fault hits what comes from here on."""
        ending, actor = self._episode.ending, self._actor
        actor.first.barrier()
        actor.first.synchronize()
        if self._is_culprit:
            self._seat.counted(actor.counted())
        if ending == endings.ANOTHER_CALL:
            mine, another = self._plan.another()
            actor.do(mine)
            actor.do(another)
            if self._is_culprit:
                self._seat.fault()
            actor.do(another if self._is_culprit else mine)
        elif ending == endings.NEVER_MAKES:
            if self._is_culprit:
                self._seat.fault()
                self._seat.wait_for_the_others()
            else:
                actor.do(self._plan.opening())
        elif ending == endings.TWO_THREADS:
            if self._is_culprit:
                self._seat.fault()
                self._call_twice()
            time.sleep(0.6)
            actor.first.empty(1)

    def _last_calls(self) -> None:
        """Call until there is an error. The culprit does what it does, and calls on if it can."""
        episode = self._episode
        if episode.ending == endings.NEVER_MAKES:
            return
        left = random.Random(f"sidelane soak {episode.seed} {episode.number} fault").randrange(20)
        if self._is_culprit and episode.within_s is not None:
            timer = threading.Timer(episode.within_s, self._act)
            timer.name = "sidelane-soak-fault"
            timer.daemon = True
            timer.start()
        acts_between = self._is_culprit and episode.within_s is None and episode.ending not in _ACTED
        until = time.monotonic() + 2 * episode.timeout_s * ENDINGS[episode.ending].times_out + 2 * SLACK_S
        for number, step in enumerate(self._plan.window()):
            if acts_between and number == left:
                self._act()
                if episode.ending == endings.CLOSES:
                    return
            self._actor.do(step)
            if not self._on_cpu and number % LOOK_EVERY == 0:
                self._actor.first.synchronize()
            if time.monotonic() > until:
                return

    def _act(self) -> None:
        """What the culprit does; on its only thread, or on one that hits the other in the middle of a call."""
        acts: dict[str, Callable[[], None]] = {
            endings.KILLED: lambda: os.kill(os.getpid(), signal.SIGKILL),
            endings.STOPPED: lambda: os.kill(os.getpid(), signal.SIGSTOP),
            endings.CONTINUED: lambda: os.kill(os.getpid(), signal.SIGSTOP),
            endings.EXITS: lambda: os._exit(EXIT_CODE),
            endings.RAISES: self._raise,
            endings.UNCAUGHT: self._raise,
            endings.INTERRUPTED: self._interrupt,
            endings.CLOSES: self._actor.first.close,
            endings.NEVER_COMES: self._seat.wait_for_the_others,
        }
        self._seat.fault()
        acts[self._episode.ending]()

    def _raise(self) -> None:
        if self._episode.ending == endings.UNCAUGHT:
            self._stack.pop_all()  # nobody closes anything
        raise RaisedError(f"rank {self._seat.rank} has lost its way")

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            time.sleep(AT_ONCE_S)  # it comes here

    def _call_twice(self) -> None:
        """Call while another thread of this rank is in a call, which waits on the host: the others make it later."""
        found: list[str] = []

        def intrude() -> None:
            time.sleep(0.2)
            began = time.monotonic()
            try:
                self._actor.first.empty(1)
                found.append("no error was raised")
            except SidelaneError as error:
                found.append(f"{type(error).__name__}: {error}")
            except RuntimeError:
                if time.monotonic() - began > AT_ONCE_S:
                    found.append("it was not raised at once")

        thread = threading.Thread(target=intrude, name="sidelane-soak-intruder", daemon=True)
        thread.start()
        try:
            self._actor.first.empty(1)
        finally:
            thread.join(2 * SLACK_S)
            for text in [*found, *(["it hangs"] if thread.is_alive() else [])]:
                self._actor.tally.fail(f"a call of a second thread: {text} (allowed=RuntimeError)")

    def _see_that_it_is_over(self) -> None:
        """The communicator stays unusable, and a GPU's streams drain."""
        if self._episode.ending != endings.NEVER_MAKES:
            try:
                self._actor.first.barrier()
                self._actor.tally.fail("a call behind a failed one: no error was raised")
            except (CommunicatorClosedError, PeerError):
                pass
        if not self._on_cpu:
            torch.cuda.synchronize()
