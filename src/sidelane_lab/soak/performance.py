"""An episode on one rank, from its first step until nothing is left of it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from sidelane_lab.soak import endings, leftovers
from sidelane_lab.soak.actor import Actor
from sidelane_lab.soak.endings import Told
from sidelane_lab.soak.episode import Episode
from sidelane_lab.soak.finale import Finale, RaisedError
from sidelane_lab.soak.plan import Plan
from sidelane_lab.soak.seat import Outcome, Seat
from sidelane_lab.soak.steps import Step
from sidelane_lab.soak.storm.play import play
from sidelane_lab.soak.tally import Tally
from sidelane_lab.soak.turns import Turns


class _LeftError(Exception):
    """Leaves the block of the communicators, as the error of a failed call does in a program."""


def perform(episode: Episode, seat: Seat) -> Outcome:
    """Do everything that a rank does.

    Raises:
        RaisedError: the episode has this rank end by it.
    """
    groups = _groups_of(episode)
    tally, told = Tally(), None
    try:
        if episode.storm is not None:
            play(episode.storm, episode.seed, episode.timeout_s, seat, tally)
        elif episode.lanes:
            _lanes(episode, seat, groups, tally)
        else:
            told = _alone(episode, seat, groups, tally)
    except KeyboardInterrupt:
        told = Told("KeyboardInterrupt", (), "", time.monotonic())
    except RaisedError:
        if episode.ending == endings.UNCAUGHT:
            raise
    except Exception:
        text = traceback.format_exc()
        sys.stderr.write(text)  # the process may abort before it has said anything
        sys.stderr.flush()
        tally.fail(text)
    outcome = Outcome(seat.rank, tally, told)
    gc.collect()  # errors hold frames, and frames hold tensors
    outcome.leftovers = leftovers.of_this_process()
    return outcome


def _alone(episode: Episode, seat: Seat, groups: Sequence[dist.ProcessGroup | None], tally: Tally) -> Told | None:
    """The main thread does it all."""
    told: Told | None = None
    with _recorded(tally) as actors, contextlib.suppress(_LeftError), contextlib.ExitStack() as stack:
        actor = Actor(episode, seat, groups, stack)
        actors.append(actor)
        plan = Plan(episode, lambda: actor.first.abilities)
        for step in itertools.chain(plan.beginning(), plan.body()):
            _do(actor, step)
            seat.beat(actor.tally.calls.total())
        actor.judge.settle()
        told = Finale(actor, plan, stack).play()
        actor.judge.settle()
        actor.clear()
        if told is not None and (episode.number + seat.rank) % 2:
            raise _LeftError
    return told


def _lanes(episode: Episode, seat: Seat, groups: Sequence[dist.ProcessGroup | None], tally: Tally) -> None:
    """Several threads, each with a communicator of its own of the same group; on GPUs they take turns."""
    errors: list[str] = []
    turns = None if seat.device.type == "cpu" else Turns(episode.lanes)
    with _recorded(tally) as actors, contextlib.ExitStack() as stack:
        bodies: list[Iterator[Step]] = []
        for lane in range(episode.lanes):  # made in one order on all ranks
            session = actors[0].first.lane.session if lane and episode.number % 2 else None
            actor = Actor(episode, seat, groups, stack, session)
            actors.append(actor)
            plan = Plan(episode, lambda actor=actor: actor.first.abilities, lane)  # type: ignore[misc]
            for step in plan.beginning():
                _do(actor, step)
                seat.beat(sum(each.tally.calls.total() for each in actors))
            actor.judge.settle()
            bodies.append(plan.body())

        def run(lane: int) -> None:
            actor = actors[lane]
            try:
                with _device_of(seat):
                    for step in bodies[lane]:
                        with contextlib.nullcontext() if turns is None else turns.take(lane):
                            _do(actor, step)
                    actor.judge.settle()
            except Exception:
                errors.append(traceback.format_exc())
            finally:
                if turns is not None:
                    turns.leave(lane)

        if seat.device.type != "cpu":
            torch.cuda.synchronize()  # the threads go on on streams of their own
        threads = [
            threading.Thread(target=run, args=(lane,), name=f"sidelane-soak-lane{lane}", daemon=True)
            for lane in range(episode.lanes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                seat.beat(sum(actor.tally.calls.total() for actor in actors))
        for actor in actors:
            actor.clear()
    for text in errors:
        tally.fail(text)


def _do(actor: Actor, step: Step) -> None:
    try:
        actor.do(step)
    except Exception as error:
        error.add_note(f"in {step}")
        raise


@contextlib.contextmanager
def _recorded(tally: Tally) -> Iterator[list[Actor]]:
    """Whatever happens, what the actors have counted is kept."""
    actors: list[Actor] = []
    try:
        yield actors
    finally:
        for actor in actors:
            tally.add(actor.counted())


@contextlib.contextmanager
def _device_of(seat: Seat) -> Iterator[None]:
    """What a thread of its own needs on a GPU: the device, and a stream that no other thread uses."""
    if seat.device.type == "cpu":
        yield
        return
    torch.cuda.set_device(seat.device)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def _groups_of(episode: Episode) -> list[dist.ProcessGroup | None]:
    """The process groups of an episode, where this rank is in them. Collective."""
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
    for ranks in episode.groups[1:]:
        group = dist.new_group(list(ranks))
        groups.append(group if dist.get_rank() in ranks else None)
    return groups
