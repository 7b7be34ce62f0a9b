"""Peers that die or do not come: an error that names them, in time, and streams that drain."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import interrupted_program
import pytest
from device_pool import Pool, Ranks
from interrupted_program import shared_memory
from vendors import ONE_CHANNEL

from interpreter import Interpreter


def test_absent_peer(ranks: Ranks) -> None:
    messages = ranks.run("absent_peer", 2.0)
    last = ranks.world_size - 1
    for message in messages[:last]:
        assert f"rank {last}" in message and "queue dma:0" in message


def test_absent_from_a_replay(ranks: Ranks) -> None:
    messages = ranks.run("absent_from_replay", 2.0)
    assert all(messages[: ranks.world_size - 1])


def test_dead_peer(fresh_pool: type[Pool]) -> None:
    pool = fresh_pool()
    victim = len(pool.processes) - 1
    pool.begin("wait_for_a_dead_peer", victim)
    time.sleep(3.0)  # until the others hang in their call
    os.kill(pool.processes[victim].pid, signal.SIGKILL)
    answers = pool.finish(30.0, but=(victim,))
    assert len(answers) == victim
    for message in answers:
        assert f"rank {victim}" in message and "died" in message and "queue dma:0" in message


@pytest.mark.parametrize("where", ["synchronize", "first_call", "own_work"])
def test_ctrl_c_in_one_rank(fresh_pool: type[Pool], where: str) -> None:
    """While its call waits for a peer: its streams drain, the others hear of it. The time-out is far away."""
    pool = fresh_pool()
    before = shared_memory()
    results = pool.run("communicator_cases.interrupted", where, timeout_s=60.0)
    assert results[0][0] == "KeyboardInterrupt"
    for name, text, at_fault in results[1:]:
        assert name == "PeerError", text
        assert "rank 0 was interrupted" in text
        assert at_fault == (0,)
    pool.close()
    assert shared_memory() <= before


def test_ctrl_c_ends_all_processes_of_a_program(ranks: Ranks, interpreter: Interpreter, tmp_path: Path) -> None:
    """One that catches nothing, interrupted from outside in one process."""
    before = shared_memory()
    errors = interrupted_program.run(interpreter, ranks.world_size, "cuda", tmp_path)
    assert "KeyboardInterrupt" in errors[0]
    assert all("PeerError" in error and "rank 0 was interrupted" in error for error in errors[1:]), errors
    assert shared_memory() <= before


@pytest.mark.parametrize("streams", [5, 48])
def test_a_release_passes_stuck_streams(ranks: Ranks, streams: int) -> None:
    """Five leave channels free; 48 occupy all of them, so that only a second context gets through."""
    ranks.run("release_passes_stuck_streams", streams)


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_a_submission_that_is_refused_half_way(ranks: Ranks, number: int) -> None:
    ranks.run("refused_half_way", number)


def test_words_outlive_their_owner(ranks: Ranks) -> None:
    ranks.run("words_outlive_their_owner")


def test_absent_peer_with_one_hardware_channel(fresh_pool: type[Pool]) -> None:
    """Nothing of the stuck context gets through: neither the reading of flags nor their release."""
    pool = fresh_pool(environment=ONE_CHANNEL)
    messages = pool.run("absent_peer", 2.0)
    last = len(messages) - 1
    assert all(f"rank {last}" in message for message in messages[:last])
