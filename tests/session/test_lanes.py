"""Communicators that share memory, on CPUs: orders of calls that do not wait for each other, and misuse."""

from __future__ import annotations

import os
import signal

import lanes
import pytest
import torch
import torch.distributed as dist
from marks import long
from ranks import RankPool, crew

from sidelane import Communicator


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 1), long(4, 2)])
def test_lanes_of_one_thread(pool: RankPool, n: int, seed: int) -> None:
    pool.run(lanes.in_turn, n, seed, 60, timeout_s=100)


@pytest.mark.parametrize("n", [2, long(3)])
def test_a_lane_for_each_thread(pool: RankPool, n: int) -> None:
    pool.run(lanes.at_once, n, 60, timeout_s=100)


def test_a_lane_waits_for_no_other(pool: RankPool) -> None:
    pool.run(lanes.waits_for_nobody, 3)


def test_misuse(pool: RankPool) -> None:
    expected = [
        "ValueError: Communicator: name (value='one', allowed=another one for each communicator)",
        "ValueError: Communicator: a communicator that shares another one takes neither device nor config",
        "ValueError: Communicator: a communicator that shares another one takes neither device nor config",
        "MismatchError: exchange 1 of communicator",
        "CommunicatorClosedError",
        "CommunicatorClosedError: Communicator: the one that it would share memory with was closed",
        "CommunicatorClosedError",
    ]
    for texts in pool.run(lanes.mistakes, 3):
        assert len(texts) == len(expected)
        for text, words in zip(texts, expected, strict=True):
            assert text.startswith(words), texts


@pytest.mark.parametrize("where", lanes.FAILURES)
def test_a_rank_that_cannot_make_its_lane_tells_its_peers(pool: RankPool, where: str) -> None:
    own = {
        "name": "ValueError: Communicator: name (value='first'",
        "device": "UnavailableError: no device",
        "executor": "MemoryError: no executor",
        "memory": "UnavailableError: no memory",
        "choice": "ValueError: no choice",
        "path": "RuntimeError: no path",
        "interrupt": "KeyboardInterrupt",
    }[where]
    for rank, (text, took_s, threads) in enumerate(pool.run(lanes.failing_to_make, 3, where)):
        if rank == 1:
            assert text.startswith(own), text
        else:
            assert text.startswith("PeerError") and "rank 1" in text and own in text, text
        assert took_s < 5, "they do not wait for the time-out"
        assert threads == 0


def die(group: dist.ProcessGroup) -> list[str]:
    texts = []
    with lanes.first_lane(group, timeout_s=60) as made:
        comms = [Communicator(made, name=name) for name in "ab"]
        if comms[0].rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for comm in comms:
            try:
                while True:
                    comm.all_reduce(torch.ones(3))
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_a_dead_peer_is_named_in_every_lane() -> None:
    with crew(3) as ranks:
        first, _, last = ranks.run(die, dying=(1,))
    for text in (*first, *last):
        assert text.startswith("PeerError") and "rank 1" in text, text
