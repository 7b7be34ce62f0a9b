"""A rank of an episode as a process, from its start until nothing is left of the episode."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

from sidelane.cli.launch import HOST, end_with_parent
from soak import endings, leftovers
from soak.actor import Actor
from soak.endings import START_S, Seen
from soak.episode import Episode
from soak.finale import Finale, RaisedError
from soak.judge import Tally
from soak.plan import Plan
from soak.seat import SHOWS_S, Outcome, Seat
from soak.storm import play

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "1"}
"""Environment in which torch's allocator makes expandable segments that peers can map."""


def rank_main(rank: int, episode: Episode, port: int, folder: str, line: connection.Connection) -> None:
    """Be the process of a rank.

    Args:
        rank: its number.
        episode: the episode, its own part of which it performs.
        port: the port of the store at which the ranks meet.
        folder: where its standard streams and temporary files go.
        line: the line to the parent.
    """
    os.setsid()  # the terminal's Ctrl-C is for the parent, and what a rank starts can be found
    errors = os.open(errors_of(Path(folder), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(errors, descriptor)
    os.close(errors)
    os.environ["TMPDIR"], tempfile.tempdir = str(Path(folder) / "tmp"), None
    if episode.storm is not None and episode.storm.expandable:
        os.environ.update(EXPANDABLE)  # before torch looks, at its first allocation
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()
    faulthandler.dump_traceback_later(episode.patience_s - SHOWS_S)  # begun anew by each beat
    gc.freeze()  # what was imported stays: nobody need look at it again
    device = torch.device("cpu")
    if episode.setting.on_cpu:
        torch.set_num_threads(1)
    else:
        device = torch.device(episode.setting.device_type, rank)
        torch.cuda.set_device(device)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    timeout = timedelta(seconds=START_S)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=episode.world_size, timeout=timeout)
    seat = Seat(rank, episode.world_size, device, line, episode.patience_s)
    seat.done(perform(episode, seat))
    if episode.ending == endings.GOOD:  # else a rank may be gone that destroying would wait for
        dist.destroy_process_group()


def errors_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's standard streams."""
    return folder / f"rank-{rank}.txt"


class _LeftError(Exception):
    """Leaves the block of the communicators, as the error of a failed call does in a program."""


def perform(episode: Episode, seat: Seat) -> Outcome:
    """Do everything that a rank does.

    Raises:
        RaisedError: the episode has this rank end by it.
    """
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
    for ranks in episode.groups[1:]:
        group = dist.new_group(list(ranks))
        groups.append(group if dist.get_rank() in ranks else None)
    tally, seen = Tally(), None
    try:
        if episode.storm is not None:
            play(episode.storm, episode.seed, episode.timeout_s, seat, tally)
        else:
            seen = _calls(episode, seat, groups, tally)
    except KeyboardInterrupt:
        seen = Seen("KeyboardInterrupt", (), "", time.monotonic())
    except RaisedError:
        if episode.ending == endings.UNCAUGHT:
            raise
    except Exception:
        text = traceback.format_exc()
        sys.stderr.write(text)  # the process may abort before it has said anything
        sys.stderr.flush()
        tally.fail(text)
    outcome = Outcome(seat.rank, tally, seen)
    gc.collect()  # errors hold frames, and frames hold tensors
    outcome.leftovers = leftovers.of_this_process()
    return outcome


def _calls(episode: Episode, seat: Seat, groups: Sequence[dist.ProcessGroup | None], tally: Tally) -> Seen | None:
    """Make all calls, and play the end."""
    seen: Seen | None = None
    with contextlib.suppress(_LeftError), contextlib.ExitStack() as stack:
        actor = Actor(episode, seat, groups, stack)
        stack.callback(lambda: tally.add(actor.counted()))  # whatever happens
        plan = Plan(episode, lambda: actor.first.abilities)
        for step in itertools.chain(plan.beginning(), plan.body()):
            actor.do(step)
            seat.beat(actor.tally.calls.total())
        actor.judge.settle()
        seen = Finale(actor, plan, stack).play()
        actor.judge.settle()
        actor.clear()
        if seen is not None and (episode.number + seat.rank) % 2:
            raise _LeftError
    return seen
