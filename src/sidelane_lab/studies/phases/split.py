"""From what two clocks saw of a call to its phases, which add up to its time (definitions: results/notes/phases.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from sidelane.program.ir import Program
from sidelane_lab.machines.spec import HostThreads, Machine
from sidelane_lab.sim import simulate
from sidelane_lab.studies.phases.stamp import StampMark, slots_of, times_of


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One call on one rank, in microseconds.

    Attributes:
        host_us: host clock: from the call until it returned.
        total_us: host clock: from the call until the host knows that everything has finished.
        entry_us, copy_us, exit_us: clock of the stamps: from ``BEGIN`` to ``FIRST``, to ``LAST``, to ``END``.
        notify_us: from ``END`` until the host knows.
    """

    host_us: float
    total_us: float
    entry_us: float = 0.0
    copy_us: float = 0.0
    exit_us: float = 0.0
    notify_us: float = 0.0

    @staticmethod
    def stamped(
        host_us: float, total_us: float, stamps: Mapping[int, float], *, known_us: float | None, notify_us: float = 0.0
    ) -> Sample:
        """Make a call with stamps.

        Args:
            host_us: the attribute.
            total_us: the attribute.
            stamps: times by slot, on whatever clock.
            known_us: when the host knew, if the stamps are on the host's clock; ``notify_us`` follows from it.
            notify_us: measured elsewhere, if they are not.
        """
        marks = times_of(stamps)
        notify_us = notify_us if known_us is None else known_us - marks[StampMark.END]
        return Sample(host_us, total_us, *_spans(marks), notify_us=notify_us)

    def values(self) -> tuple[float, ...]:
        """The fields in their order, to be sent."""
        return dataclasses.astuple(self)


FIELDS = len(dataclasses.fields(Sample))


@dataclasses.dataclass(frozen=True, slots=True)
class Phases:
    """Phases of one call in microseconds; the first four add up to ``total_us``.

    Attributes:
        control_us: the host submits, as far as that delays the first byte.
        schedule_us: from there until the first byte may move; ``entry_us`` of it is the entry handshake.
        copy_us: from there until the last byte has arrived, own chunk included.
        sync_us: until the host knows that all is done; ``exit_us`` of it is the exit handshake.
        host_us: of the whole call, whatever it delays.
    """

    control_us: float
    schedule_us: float
    copy_us: float
    sync_us: float
    total_us: float
    entry_us: float
    exit_us: float
    host_us: float


def split(sample: Sample) -> Phases:
    """Split the time of a call.

    What the stamps do not cover lies before the first or behind the last one. ``notify_us`` says how much lies behind;
    the rest came before the first byte. Of that, control takes what the host's call takes, and schedule what is left:
    none if the host was still submitting when the first byte moved.
    """
    sync = sample.exit_us + sample.notify_us
    before = max(0.0, sample.total_us - sample.copy_us - sync)
    control = min(sample.host_us, before)
    return Phases(
        control_us=control,
        schedule_us=before - control,
        copy_us=sample.copy_us,
        sync_us=sync,
        total_us=max(sample.total_us, sample.copy_us + sync),
        entry_us=sample.entry_us,
        exit_us=sample.exit_us,
        host_us=sample.host_us,
    )


def slowest(calls: np.ndarray, in_step: np.ndarray) -> Sample:
    """The typical call: of every call the rank that took longest, then the one with the median total (the mean of two).

    Its fields add up. Medians of each field alone do not: on a busy machine the entry handshake came out longer than
    all that it is a part of.

    Args:
        calls: ``[ranks, calls, fields of Sample]``; NaN where a rank has no part.
        in_step: ``[calls]``, false for calls that some rank began too late. Those are left out unless more than half
            are, in which case nothing else is there to go by.
    """
    kept = calls[:, in_step] if in_step.mean() >= 0.5 else calls
    totals = np.where(np.isnan(kept[:, :, 1]), -np.inf, kept[:, :, 1])
    chosen = kept[totals.argmax(axis=0), np.arange(kept.shape[1])]
    order = chosen[:, 1].argsort()
    middle = chosen[order[(len(chosen) - 1) // 2 : len(chosen) // 2 + 1]]
    return Sample(*(float(value) for value in middle.mean(axis=0)))


def predict(program: Program, machine: Machine) -> Phases:
    """Phases of the rank that ends last, in virtual time.

    Args:
        program: with stamps, which take no time there.
        machine: where.

    Raises:
        ValueError: the machine has too few GPUs, or no rank copies anything.
    """
    run = simulate(program, machine, record=True)
    by_rank = {
        rank: times_of({slot: run.stamps[rank, slot] for slot in slots_of(program, rank)})
        for rank in range(program.world_size)
        if slots_of(program, rank)
    }
    if not by_rank:
        raise ValueError(f"predict: nobody copies anything (value={program.collective})")
    rank = max(by_rank, key=lambda each: by_rank[each][StampMark.END])
    marks = by_rank[rank]
    thread = machine.node_of(rank) if machine.dma.host is HostThreads.NODE else rank
    busy = [
        (interval.start_us, interval.end_us)
        for interval in run.timeline
        if interval.group == "host" and interval.lane == f"thread {thread}" and interval.label != "doorbell"
    ]
    first, (entry_us, copy_us, exit_us) = marks[StampMark.FIRST], _spans(marks)
    control = sum(min(end, first) - start for start, end in busy if start < first)
    return Phases(
        control_us=control,
        schedule_us=marks[StampMark.LAST] - copy_us - control,
        copy_us=copy_us,
        sync_us=run.time_us - marks[StampMark.LAST],
        total_us=run.time_us,
        host_us=sum(end - start for start, end in busy),
        entry_us=entry_us,
        exit_us=exit_us,
    )


def _spans(marks: Mapping[StampMark, float]) -> tuple[float, float, float]:
    """Return the times between the marks of a rank: entry, copy and exit, as :class:`Sample` has them."""
    begin, first, last, end = (
        marks[mark] for mark in (StampMark.BEGIN, StampMark.FIRST, StampMark.LAST, StampMark.END)
    )
    return first - begin, last - first, end - last
