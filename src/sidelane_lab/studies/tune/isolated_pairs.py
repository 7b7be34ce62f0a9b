"""A GEMM and a collective under every strategy, for the shares of ``c3.expected`` (``sidelane tune --study c3``).

For each mover of bytes the call that is fastest alone, as ``c3.run`` takes it for sweeps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from sidelane.c3.lanes import DevicePartitions, Lanes, shares
from sidelane.c3.measured_curves import SERIAL
from sidelane.c3.strategies import strategies
from sidelane.c3.strategy import Strategy
from sidelane.c3.workload import Gemm
from sidelane_lab.baselines.candidate import Prepared
from sidelane_lab.pairs.product import GemmRun
from sidelane_lab.pairs.run import Pairs, Workers


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A row of a pair: a strategy by a call, and its time or why there is none.

    ``alone_us``: of the collective, where it was measured with it.
    """

    strategy: str
    run: Prepared | None
    units: int = 0
    time_us: float | None = None
    alone_us: float | None = None
    note: str = ""


class Meter(Protocol):
    """How ranks agree (``bench.running.measure.Meter``)."""

    def attempt(self, step: Callable[[], str | None] | Callable[[], None]) -> str | None: ...

    def finish(self, what: str) -> None: ...


def pair_figures(
    shape: Gemm,
    runs: Sequence[Prepared],
    meter: Meter,
    times_of: Callable[[Mapping[str, Callable[[], object]]], Mapping[str, float]],
    seeds: Iterator[int],
    device: torch.device,
    lanes: Lanes | None,
    partitions: DevicePartitions | None,
    no_partitions: str,
) -> Iterator[Figure]:
    """Measure a pair. Collective: all ranks make the same call.

    Args:
        shape: of the GEMM.
        runs: calls of the collective that are right, the fastest of an implementation first.
        meter: see there.
        times_of: median microseconds of each, of the slowest rank.
        seeds: of the inputs.
        device: of this rank.
        lanes: as in ``c3.run.run_workload``.
        partitions: likewise.
        no_partitions: likewise.
    """
    gemm = GemmRun(shape, device)
    by_mover: dict[str, Prepared] = {}
    for run in runs:
        by_mover.setdefault(run.implementation, run)
    with Workers() as workers:
        pairs = Pairs(gemm, lanes, workers, partitions)
        launches: dict[str, Callable[[], object]] = {}
        places: dict[str, Figure] = {}
        for run in by_mover.values():
            launches[f"alone {run.label}"] = functools.partial(_alone, run)
        for strategy, run in _of_movers(by_mover):
            refused = _refused(strategy, meter, partitions, no_partitions)
            if refused:
                yield Figure(strategy.name, run, note=refused)
                continue
            for units in _units(strategy, partitions):
                label = f"{strategy.name} {run.label} {units}"
                launch = pairs.launch(strategy, run, units)
                wrong = meter.attempt(functools.partial(_try, launch, run, gemm, next(seeds), meter, label))
                if wrong:
                    yield Figure(strategy.name, run, units, note=wrong)
                else:
                    launches[label], places[label] = launch, Figure(strategy.name, run, units)
        times = times_of(launches)
    for label, place in places.items():
        assert place.run is not None
        alone_us = times[f"alone {place.run.label}"] if place.strategy == SERIAL else None
        yield dataclasses.replace(place, time_us=times[label], alone_us=alone_us)


def _of_movers(by_mover: Mapping[str, Prepared]) -> Iterator[tuple[Strategy, Prepared]]:
    """Every strategy with its call; one after the other with each of them, which the others are held against."""
    for strategy in strategies():
        if not strategy.concurrent:
            yield from ((strategy, run) for run in by_mover.values())
        elif (name := strategy.implementation(by_mover)) is not None:
            yield strategy, by_mover[name]


def _refused(strategy: Strategy, meter: Meter, partitions: DevicePartitions | None, no_partitions: str) -> str:
    if strategy.partition is None:
        return ""
    if partitions is None:
        return no_partitions
    return meter.attempt(functools.partial(partitions.objection, strategy.partition)) or ""


def _units(strategy: Strategy, partitions: DevicePartitions | None) -> tuple[int, ...]:
    if strategy.partition is None or partitions is None:
        return (0,)
    return shares(strategy.partition, partitions.units, memory_bound=True)


def _alone(run: Prepared) -> None:
    run.start()()


def _try(launch: Callable[[], None], run: Prepared, gemm: GemmRun, seed: int, meter: Meter, label: str) -> str | None:
    """Run once; what is wrong with the results."""
    run.fill(seed)
    gemm.fill(seed)
    launch()
    meter.finish(label)
    return run.error(seed) or gemm.error()
