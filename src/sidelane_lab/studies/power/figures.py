"""From watts and times to energy, and from a study of power to the energies of another study's rows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from sidelane_lab.harness.study import Results
from sidelane_lab.studies.collectives import CollectiveRow
from sidelane_lab.studies.power.rows import PowerRow

SPREAD_PERCENT = 10.0
"""Rounds that differ by more are worth a note."""

SAME_TIME_PERCENT = 15.0
"""A row of another study takes an energy from here only if both took that much the same time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One implementation in one round.

    Attributes:
        time_us: of a call, the slowest rank's.
        counted_w: by each rank's energy counter; None where it has none.
        sampled_w: by each rank's power readings.
    """

    time_us: float
    counted_w: tuple[float | None, ...]
    sampled_w: tuple[float, ...]

    @property
    def watts(self) -> tuple[float, ...]:
        """The better of both for each rank: what was counted, or else what was read."""
        pairs = zip(self.counted_w, self.sampled_w, strict=True)
        return tuple(sampled if counted is None else counted for counted, sampled in pairs)

    @property
    def energy_mj(self) -> float:
        """Of all GPUs for one call: a GPU that waits for the slowest one draws power, too."""
        return sum(self.watts) * self.time_us / 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a row, as :class:`sidelane_lab.studies.power.rows.PowerRow` has them."""

    time_us: float
    watts: float
    watts_sampled: float
    energy_mj: float
    energy_above_idle_mj: float
    counters_agree_percent: float | None
    note: str


def figures_of(points: Sequence[Point], idle_w: Sequence[float]) -> Figures:
    """Means over rounds and ranks.

    Args:
        points: at least one; a round each.
        idle_w: of each rank's GPU.
    """
    energies = [point.energy_mj for point in points]
    idle_mj = [sum(idle_w) * point.time_us / 1e3 for point in points]
    watts = statistics.fmean(statistics.fmean(point.watts) for point in points)
    sampled = statistics.fmean(statistics.fmean(point.sampled_w) for point in points)
    counted = all(watt is not None for point in points for watt in point.counted_w)
    notes = [] if counted else ["not every GPU's energy counter moved: its power readings stand in"]
    spread = 100.0 * (max(energies) / min(energies) - 1.0) if min(energies) > 0 else 0.0
    if spread > SPREAD_PERCENT:
        notes.append(f"energy differs by {spread:.0f}% between rounds")
    return Figures(
        time_us=statistics.fmean(point.time_us for point in points),
        watts=watts,
        watts_sampled=sampled,
        energy_mj=statistics.fmean(energies),
        energy_above_idle_mj=statistics.fmean(e - i for e, i in zip(energies, idle_mj, strict=True)),
        counters_agree_percent=100.0 * sampled / watts if counted and watts > 0 else None,
        note="; ".join(notes),
    )


def with_energy(collectives: Results, power: Results) -> Results:
    """A study of collectives with ``energy_mj`` filled in where the same was measured in a study of power.

    A row keeps None where nothing was measured, where its launch differs, or where its time does: energy is power times
    time, and one number must not stand for two.

    Raises:
        ValueError: other studies, or other machines.
    """
    if (collectives.study, power.study) != ("collectives", "power"):
        given = f"value={collectives.study}, {power.study}"
        raise ValueError(f"with_energy: studies ({given}, allowed=collectives, power)")
    if (collectives.machine, collectives.ranks) != (power.machine, power.ranks):
        given = f"value={collectives.machine} with {collectives.ranks} ranks"
        raise ValueError(f"with_energy: another machine ({given}, allowed={power.machine} with {power.ranks})")
    known = {_key(row): row for row in power.rows if isinstance(row, PowerRow) and row.energy_mj is not None}
    rows = [_filled(row, known.get(_key(row))) for row in collectives.rows if isinstance(row, CollectiveRow)]
    return dataclasses.replace(collectives, rows=tuple(rows))


def _key(row: CollectiveRow | PowerRow) -> tuple[object, ...]:
    return row.collective, row.bytes, row.implementation, row.variant, row.in_place, row.launch


def _filled(row: CollectiveRow, found: PowerRow | None) -> CollectiveRow:
    if found is None or row.tensors > 1 or row.time_us is None or found.time_us is None:  # it measures no lists
        return row
    if abs(found.time_us / row.time_us - 1.0) * 100 > SAME_TIME_PERCENT:
        return row
    return dataclasses.replace(row, energy_mj=found.energy_mj)
