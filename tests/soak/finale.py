"""The end of an episode on one rank: the culprit acts, and the others hear of it."""

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
from soak import endings
from soak.actor import Actor
from soak.endings import ENDINGS, EXIT_CODE, SLACK_S, Seen
from soak.plan import Plan

LOOK_EVERY = 16
"""Steps between two looks of a host at its GPU, which shows a failure in no call before."""

AT_ONCE_S = 5.0
"""Seconds within which an error is raised at once."""


class RaisedError(Exception):
    """A culprit raises it out of the block of its communicators, or out of its process."""


class Finale:
    """One rank's part in the end.

    Args:
        actor: does the steps.
        plan: draws them.
        stack: closes the communicators when its block ends.
    """

    def __init__(self, actor: Actor, plan: Plan, stack: contextlib.ExitStack) -> None:
        self._actor, self._plan, self._stack = actor, plan, stack
        self._seat, self._episode = actor.seat, actor.episode
        self._is_culprit = actor.seat.rank == actor.episode.culprit
        self._on_cpu = actor.seat.device.type == "cpu"

    def play(self) -> Seen | None:
        """Play the end that the episode has, and return the error that this rank got.

        Raises:
            RaisedError, KeyboardInterrupt: on the culprit.
        """
        if self._episode.ending == endings.GOOD:
            return None
        actor = self._actor
        actor.first.barrier()
        actor.first.synchronize()  # all ranks have made all calls of the body: the fault hits what comes from here on
        if self._is_culprit:
            self._seat.counted(actor.counted())
        try:
            self._last_calls()
        except SidelaneError as error:
            actor.judge.forget()
            seen = Seen(type(error).__name__, tuple(getattr(error, "ranks", ())), str(error), time.monotonic())
            self._see_that_it_is_over()
            return seen
        return None

    def _last_calls(self) -> None:
        """Call until there is an error. The culprit does what it does, and calls on if it can."""
        episode = self._episode
        left = random.Random(f"sidelane soak {episode.seed} {episode.number} fault").randrange(20)
        if self._is_culprit and episode.within_s is not None:
            timer = threading.Timer(episode.within_s, self._act)
            timer.name = "sidelane-soak-fault"
            timer.daemon = True
            timer.start()
        acts_between = self._is_culprit and episode.within_s is None
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
        """Do what the culprit does; on its only thread, or on one that hits the other in the middle of a call."""
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
            endings.REFUSED: self._refuse,
        }
        self._seat.fault()
        acts[self._episode.ending]()

    def _refuse(self) -> None:
        """Have the driver refuse its next call."""
        assert self._actor.driver is not None
        self._actor.driver.fail_next = "CUDA_ERROR_OUT_OF_MEMORY"

    def _raise(self) -> None:
        if self._episode.ending == endings.UNCAUGHT:
            self._stack.pop_all()  # nobody closes anything
        raise RaisedError(f"rank {self._seat.rank} has lost its way")

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            time.sleep(AT_ONCE_S)  # it comes here

    def _see_that_it_is_over(self) -> None:
        """See that the communicator stays unusable, and that a GPU's streams drain."""
        try:
            self._actor.first.barrier()
            self._actor.tally.fail("a call behind a failed one: no error was raised")
        except (CommunicatorClosedError, PeerError):
            pass
        except SidelaneError as error:
            if self._episode.ending != endings.REFUSED or not self._is_culprit:
                raise
            if "could not submit it" not in str(error):
                self._actor.tally.fail(f"a call behind one that the driver refused: {error}")
        if not self._on_cpu:
            torch.cuda.synchronize()
