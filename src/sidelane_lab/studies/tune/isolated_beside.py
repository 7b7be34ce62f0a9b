"""One operation next to several of another, timed by itself: a GEMM next to traffic, and traffic next to GEMMs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from sidelane.c3.lanes import Lanes


def next_to(
    timed: Callable[[], object],
    other: Callable[[], object],
    times: int,
    gemm_is_timed: bool,
    lanes: Lanes | None,
    worker: ThreadPoolExecutor,
) -> Callable[[], float]:
    """Run one next to ``times`` of the other, on the current device.

    Args:
        timed: the one.
        other: the other.
        times: enough for the one to have company until its end.
        gemm_is_timed: the one is the GEMM, which on a CPU runs on ``worker``; ranks must not wait for peers on two
            threads.
        lanes: streams; None on a CPU.
        worker: a thread.

    Returns:
        What reads how long the one took, in microseconds, once the current stream has ended.
    """
    if lanes is None:
        first = worker.submit(_timed, timed if gemm_is_timed else _repeated(other, times))
        second = _timed(_repeated(other, times) if gemm_is_timed else timed)
        took = first.result() if gemm_is_timed else second
        first.result()
        return lambda: took
    caller = torch.cuda.current_stream()
    mine, theirs = (lanes.gemm, lanes.collective) if gemm_is_timed else (lanes.collective, lanes.gemm)
    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for lane in (mine, theirs):
        lane.wait_stream(caller)
    with torch.cuda.stream(theirs):
        other()
        begun = torch.cuda.Event()
        begun.record(theirs)
        _repeated(other, times)()
    mine.wait_event(begun)  # one of the others has ended, the next is under way
    with torch.cuda.stream(mine):
        before.record(mine)
        timed()
        behind.record(mine)
    for lane in (mine, theirs):
        caller.wait_stream(lane)
    return lambda: 1e3 * float(before.elapsed_time(behind))


def _repeated(operation: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            operation()

    return run


def _timed(operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    operation()
    return 1e6 * (time.perf_counter() - begin)
