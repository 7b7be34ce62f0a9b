"""Three kernels at once, in every order of their launches: a pair, and a GEMM of a quarter of the pair's (VII-B1).

On a GPU each has a stream of its own. The second waits for an event that the first records just before its operation,
and so on, as in ``pairs.run``; so the order is kept, and nobody waits for anybody's end. On a CPU a GEMM is a call: the
collective begins in its turn, and goes on beside those behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sidelane_lab.pairs.run import CollectiveRun, GemmRun, check_launch
from sidelane_lab.pairs.workload import Gemm, Workload

GEMM, SMALL = "gemm", "small gemm"
"""Names of the two computations; the collective has that of its kind."""

Orders = Mapping[tuple[str, ...], float]
"""Microseconds by names, in the order of launches."""

_Operation = Callable[[], Callable[[], None] | None]


def small_of(gemm: Gemm) -> Gemm:
    """The third kernel: half of the rows and half of the columns."""
    return dataclasses.replace(gemm, m=max(1, gemm.m // 2), n=max(1, gemm.n // 2), tag="", divisor=1)


def orders_of(
    workload: Workload, run: CollectiveRun, instruments: Any, device: torch.device, seeds: Iterator[int]
) -> Orders:
    """Measure all six. Collective: all ranks make the same call.

    Args:
        workload: the pair.
        run: its collective.
        instruments: as in ``pairs.run.run_workload``.
        device: of this rank.
        seeds: of the inputs.

    Returns:
        Medians; of an order whose results were wrong on some rank, none.
    """
    with instruments.on_stream():
        gemms = {GEMM: GemmRun(workload.gemm, device), SMALL: GemmRun(small_of(workload.gemm), device)}
        for gemm in gemms.values():
            gemm.fill(next(seeds))
        instruments.finish("the GEMMs' inputs")
        operations: dict[str, _Operation] = {name: gemm.run for name, gemm in gemms.items()}
        operations[str(workload.collective)] = run.start
        streams = {name: torch.cuda.Stream(device) for name in operations} if device.type == "cuda" else {}
        launches = {}
        for order in itertools.permutations(operations):
            launch = functools.partial(_launch, [(operations[name], streams.get(name)) for name in order])
            label = " > ".join(order)
            if check_launch(instruments, label, launch, run, gemms.values(), next(seeds)) is None:
                launches[label] = launch
        times = instruments.time(launches) if launches else {}
    return {tuple(label.split(" > ")): statistics.median(series) for label, series in times.items()}


def _launch(operations: Sequence[tuple[_Operation, torch.cuda.Stream | None]]) -> None:
    waits = []
    caller = begun = None
    for operation, stream in operations:
        if stream is None:
            waits.append(operation())
            continue
        if begun is None:
            caller = torch.cuda.current_stream()
            begun = torch.cuda.Event()
            begun.record(caller)
        stream.wait_event(begun)
        begun = torch.cuda.Event()
        begun.record(stream)
        with torch.cuda.stream(stream):
            operation()
    for wait in waits:
        if wait is not None:
            wait()
    for _, stream in operations:
        if stream is not None and caller is not None:
            caller.wait_stream(stream)
