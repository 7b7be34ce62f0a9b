"""A rank of an episode as a process, from its start until nothing is left of the episode."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_driver import FakeDriver
from made_up_gpus import made_up_gpus
from torch.distributed import distributed_c10d as c10d

import sidelane
from sidelane.collectives import backend_cuda
from sidelane.collectives import plan as plans
from sidelane_lab.harness.launch import HOST, end_with_parent
from soak import endings, leftovers
from soak.actor import Actor
from soak.caller import Caller
from soak.endings import START_S, Seen
from soak.episode import MADE_UP, SIZED, Episode
from soak.finale import Finale, RaisedError
from soak.judge import Tally
from soak.plan import Plan
from soak.seat import SHOWS_S, Outcome, Seat


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
    worlds = episode.worlds or episode.groups[:1]
    number, world = next((number, ranks) for number, ranks in enumerate(worlds) if rank in ranks)
    own = dist.PrefixStore(f"world {number}", store)
    dist.init_process_group("gloo", store=own, rank=world.index(rank), world_size=len(world), timeout=timeout)
    seat = Seat(rank, episode.world_size, device, line, episode.patience_s)
    seat.done(perform(episode, seat, store))
    if episode.ending == endings.GOOD:  # else a rank may be gone that destroying would wait for
        dist.destroy_process_group()


def errors_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's standard streams."""
    return folder / f"rank-{rank}.txt"


MOST_GROWTH = 16 << 20
"""Bytes by which a process may grow in the second half of an episode whose sizes never come again."""


def _resident() -> int:
    """Return the bytes of this process that it shares with nobody; 0 where the system does not say."""
    gc.collect()
    with contextlib.suppress(OSError):
        found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) << 10 if found else 0
    return 0


@contextlib.contextmanager
def _made_up(episode: Episode) -> Iterator[FakeDriver | None]:
    """Have the communicators of an episode on a driver that is made up, if it is one of these.

    In one of other sizes, caches are full long before its second half: what grows then is none.
    """
    if episode.kind == SIZED:
        with mock.patch.object(plans, "MOST_PROGRAMS", 64):
            yield None
    elif episode.kind == MADE_UP:
        real_compare = Caller.compare

        def compare(self: Caller, *given: Any) -> None:  # nothing of torch's is in order with made-up streams
            self.communicator.synchronize()
            real_compare(self, *given)

        with (
            mock.patch.object(backend_cuda, "find_spec", return_value=None),  # no kernels
            mock.patch.object(Caller, "compare", compare),
            made_up_gpus() as driver,
        ):
            yield driver
            driver.synchronize()  # whatever was refused, no stream waits for ever
    else:
        yield None


class _LeftError(Exception):
    """Leaves the block of the communicators, as the error of a failed call does in a program."""


def joined(
    ranks: Sequence[int], rank: int, store: dist.Store, name: str, backend: str = "gloo", timeout_s: float = START_S
) -> dist.ProcessGroup | None:
    """Join a group whose ranks are in several worlds, as frameworks do: by the ranks' numbers, without a list."""
    if rank not in ranks:
        return None
    given = (len(ranks), ranks.index(rank), [], dist.Backend(backend), dist.PrefixStore(name, store))
    group, _ = c10d._new_process_group_helper(*given, group_name=name, timeout=timedelta(seconds=timeout_s))
    c10d._world.pg_group_ranks[group] = {number: number for number in range(len(ranks))}
    return group


def perform(episode: Episode, seat: Seat, store: dist.Store | None = None) -> Outcome:
    """Do everything that a rank does.

    Args:
        episode: the episode.
        seat: the rank's.
        store: where the ranks of all worlds meet; needed where there are several.

    Raises:
        RaisedError: the episode has this rank end by it.
    """
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
    whole: dist.ProcessGroup | None = None
    if episode.setting.on_cpu and episode.kind != MADE_UP:
        sidelane.register()
    if episode.worlds:
        assert store is not None
        join = functools.partial(joined, rank=seat.rank, store=store)
        groups = [join(ranks, name=f"joint {number}") for number, ranks in enumerate(episode.groups)]
        whole = join(episode.groups[0], name="joint", backend="sidelane", timeout_s=episode.timeout_s)
    else:
        for ranks in episode.groups[1:]:
            group = dist.new_group(list(ranks))
            groups.append(group if seat.rank in ranks else None)
        if episode.setting.on_cpu and episode.kind != MADE_UP:
            whole = dist.new_group(backend="sidelane", timeout=timedelta(seconds=episode.timeout_s))
    tally, seen = Tally(), None
    try:
        seen = _calls(episode, seat, groups, tally, whole)
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


def _calls(
    episode: Episode,
    seat: Seat,
    groups: Sequence[dist.ProcessGroup | None],
    tally: Tally,
    whole: dist.ProcessGroup | None,
) -> Seen | None:
    """Make all calls, and play the end."""
    seen: Seen | None = None
    with _made_up(episode) as driver, contextlib.suppress(_LeftError), contextlib.ExitStack() as stack:
        actor = Actor(episode, seat, groups, stack, whole, driver)
        stack.callback(actor.end_group, aborts=True)
        stack.callback(lambda: tally.add(actor.counted()))  # whatever happens
        plan = Plan(episode, lambda: actor.first.abilities)
        made, before = 0, 0
        for step in itertools.chain(plan.beginning(), plan.body()):
            actor.do(step)
            made += step.calls
            seat.beat(actor.tally.calls.total())
            if not before and made > episode.calls / 2:
                before = _resident()
        actor.judge.settle()
        actor.end_group()
        if episode.kind == SIZED:
            grown = _resident() - before
            tally.noted["MiB that ranks grew by in last halves of other sizes"] += max(0, grown) >> 20
            if grown > MOST_GROWTH:
                tally.fail(f"memory grew by {grown} bytes in the last half (allowed={MOST_GROWTH})")
        seen = Finale(actor, plan, stack).play()
        actor.judge.settle()
        actor.clear()
        if seen is not None and (episode.number + seat.rank) % 2:
            raise _LeftError
    return seen
