"""A rank of an episode as a process: what it sets up before it performs, and where its words go."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

from sidelane.cli.launch import HOST, end_with_parent
from sidelane_lab.soak import endings
from sidelane_lab.soak.endings import START_S
from sidelane_lab.soak.episode import Episode
from sidelane_lab.soak.performance import perform
from sidelane_lab.soak.seat import SHOWS_S, Seat

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "1"}
"""What has torch's allocator make expandable segments that peers can map."""


def rank_main(rank: int, episode: Episode, port: int, folder: str, line: connection.Connection) -> None:
    """What a process does.

    Args:
        rank: which.
        episode: its own part of which it performs.
        port: of the store at which the ranks meet.
        folder: of the episode; what it says on its standard streams goes there, and temporary files.
        line: to the parent.
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
    with _process_group(rank, episode, port) as device:
        line_seat = Seat(rank, episode.world_size, device, line, episode.patience_s)
        outcome = perform(episode, line_seat)
        line_seat.done(outcome)


@contextlib.contextmanager
def _process_group(rank: int, episode: Episode, port: int) -> Iterator[torch.device]:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    device = torch.device("cpu")
    if episode.setting.on_cpu:
        torch.set_num_threads(1)
    else:
        device = torch.device(episode.setting.device_type, rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=START_S)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=episode.world_size, timeout=timeout)
    yield device
    if episode.ending == endings.GOOD:  # else a rank may be gone that destroying would wait for
        dist.destroy_process_group()


def errors_of(folder: Path, rank: int) -> Path:
    """Where a rank's standard streams go."""
    return folder / f"rank-{rank}.txt"
