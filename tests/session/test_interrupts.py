"""Ctrl-C in one rank: wherever it hits, that rank stops, the others hear of it, and nothing hangs or is left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import interrupted_program
import pytest
import torch
import torch.distributed as dist
from ranks import crew

from interpreter import Interpreter
from sidelane import Communicator, Config, PeerError

INTERRUPTED = "rank 0 was interrupted"


def communicator(group: dist.ProcessGroup) -> Communicator:
    """One with a time-out so long that whoever waited for it would fail the test."""
    return Communicator(group, device="cpu", config=Config(timeout_s=1000))


def interrupted(group: dist.ProcessGroup, async_op: bool) -> tuple[str, str]:
    """In the wait for a peer that has not come yet."""
    comm = communicator(group)
    out, shard = comm.empty(5 * comm.world_size), torch.empty(5)
    comm.all_gather(out, shard)
    if comm.rank == 2:  # keeps the others waiting until one of them is interrupted
        dist.barrier(group)
    if comm.rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        work = comm.all_gather(out, shard, async_op=async_op and comm.rank != 2)
        if work is not None:
            work.wait()
    except (KeyboardInterrupt, PeerError) as error:
        comm.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sidelane")]
        if comm.rank != 2:
            dist.barrier(group)
        return type(error).__name__, str(error)
    raise AssertionError("no error was raised")


@pytest.mark.parametrize("async_op", [False, True])
def test_ctrl_c_stops_the_call_and_tells_the_peers(async_op: bool) -> None:
    with crew(3) as ranks:
        results = ranks.run(interrupted, 3, async_op)
    assert results[0][0] == "KeyboardInterrupt"
    assert results[1][0] == "PeerError" and "rank 0" in results[1][1]
    assert results[2][0] == "PeerError" and "rank 0" in results[2][1]


def interrupted_at(group: dist.ProcessGroup, where: str) -> tuple[str, str]:
    """Ctrl-C hits rank 0 between two lines: after the ranks have agreed on a call, before it has begun."""
    comm = communicator(group)
    n = comm.world_size
    out, shard = comm.empty(5 * n), torch.empty(5)  # no staging: allocating would wait in the process group

    def hit(*_: Any) -> None:
        raise KeyboardInterrupt

    if comm.rank == 0:
        preparer = comm.preparer
        owner: Any = {"get": preparer.cache, "plan": preparer.planner, "post_call": comm.control}[where]
        setattr(owner, where, hit)
    splits = [1] * n
    calls = (
        (lambda: comm.all_gather(out, shard))
        if where != "plan"
        else lambda: comm.all_to_all(out[:n], shard[:n], output_split_sizes=splits, input_split_sizes=splits)
    )
    try:
        calls()
    except (KeyboardInterrupt, PeerError) as error:
        return type(error).__name__, str(error)
    finally:
        comm.close()
    raise AssertionError("no error was raised")


@pytest.mark.parametrize("where", ["get", "plan", "post_call"])
def test_ctrl_c_before_the_call_has_begun(where: str) -> None:
    with crew(2) as ranks:
        results = ranks.run(interrupted_at, 2, where)
    assert results[0][0] == "KeyboardInterrupt"
    assert results[1][0] == "PeerError" and INTERRUPTED in results[1][1]


def interrupted_elsewhere(group: dist.ProcessGroup) -> tuple[str, str]:
    """Ctrl-C hits rank 0 in its own work, while a call of its waits for rank 1 and rank 1 waits in the next one."""
    try:
        with communicator(group) as comm:
            out, shard = torch.empty(5 * comm.world_size), torch.empty(5)
            comm.all_gather(out, shard)
            work = comm.all_gather(out, shard, async_op=True)
            assert work is not None
            if comm.rank == 0:
                comm.all_gather(out, shard, async_op=True)
                raise KeyboardInterrupt
            work.wait()
            comm.all_gather(out, shard)
            comm.all_gather(out, shard)
    except (KeyboardInterrupt, PeerError) as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error was raised")


def test_ctrl_c_outside_of_calls_ends_the_block_at_once() -> None:
    with crew(2) as ranks:
        results = ranks.run(interrupted_elsewhere, 2)
    assert results[0][0] == "KeyboardInterrupt"
    assert results[1][0] == "PeerError" and "rank 0" in results[1][1]


def test_ctrl_c_ends_all_processes_of_a_program(interpreter: Interpreter, tmp_path: Path) -> None:
    """One that catches nothing, interrupted from outside in one process."""
    before = interrupted_program.shared_memory()
    errors = interrupted_program.run(interpreter, 3, "cpu", tmp_path)
    assert "KeyboardInterrupt" in errors[0]
    assert all("PeerError" in error and "rank 0 was interrupted" in error for error in errors[1:]), errors
    assert interrupted_program.shared_memory() <= before
