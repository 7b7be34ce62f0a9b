"""Cases on several processes, for a given time."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.queues import Queue

from attack.campaign import Tally, attack

_JOIN_S = 20.0


def tallies(seed: int, jobs: int, seconds: float, cases: int | None) -> Iterator[Tally]:
    """What each case gives, in the order in which they end.

    Args:
        seed: of the campaign.
        jobs: processes; 1 for none but this one.
        seconds: after which no further case begins.
        cases: how many at most; None for any number.

    Raises:
        RuntimeError: a case could not be run, which is a defect of the attack.
    """
    deadline = time.monotonic() + seconds
    if jobs == 1:
        yield from _cases(seed, 0, 1, deadline, cases)
        return
    context = multiprocessing.get_context("spawn")
    results: Queue[Tally | str | None] = context.Queue()
    workers = [
        context.Process(target=_work, args=(results, seed, first, jobs, seconds, cases), daemon=True)
        for first in range(jobs)
    ]
    try:
        for worker in workers:
            worker.start()
        running = jobs
        while running:
            try:
                result = results.get(timeout=1)
            except queue.Empty:
                if not any(worker.is_alive() for worker in workers) and results.empty():
                    raise RuntimeError("attack: a process has died") from None
                continue
            if isinstance(result, str):
                raise RuntimeError(result)
            if result is None:
                running -= 1
            else:
                yield result
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(_JOIN_S)


def _cases(seed: int, first: int, step: int, deadline: float, cases: int | None) -> Iterator[Tally]:
    numbers = itertools.count(first, step) if cases is None else range(first, cases, step)
    for number in numbers:
        if time.monotonic() > deadline:
            return
        try:
            yield attack(seed, number)
        except Exception as error:
            raise RuntimeError(f"attack: case {number} of seed {seed} could not be run") from error


def _work(
    results: Queue[Tally | str | None], seed: int, first: int, step: int, seconds: float, cases: int | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends everybody
    try:
        for tally in _cases(seed, first, step, time.monotonic() + seconds, cases):
            results.put(tally)
        results.put(None)
    except RuntimeError:
        results.put(traceback.format_exc())
