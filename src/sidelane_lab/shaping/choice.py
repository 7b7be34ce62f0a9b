"""Choice of a GEMM's shape, and of a priority, for pipelined iterations (overlap paper), with a reason."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sidelane.program.collective import Kind
from sidelane.user_files import json_of
from sidelane_lab.harness.files import text_of

LEAST_SAVED = 0.01
"""Share of the time that shaping must save: below it a kernel that is slower alone is not worth it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shaping:
    """Way to run the iterations, and its time.

    Attributes:
        shape: name of the GEMM's shape.
        blocks: number of blocks of its grid.
        resident: number of blocks that a compute unit holds; 0 if it is not known.
        limited: fewer blocks than fit, by more shared memory than they need, or fewer blocks than tiles.
        priority: the collectives' stream goes before the GEMMs'.
        time_us: time of the overlapped iterations in microseconds.
    """

    shape: str
    blocks: int
    resident: int
    limited: bool
    priority: bool
    time_us: float

    def __str__(self) -> str:
        parts = [self.shape, f"{self.blocks} blocks"]
        parts += [f"{self.resident} resident"] if self.resident else []
        return ", ".join(parts + (["priority"] if self.priority else []))


@dataclasses.dataclass(frozen=True, slots=True)
class ShapingChoice:
    """Chosen way, the share of the time that it saves (0.2: 20%), and the reason."""

    shaping: Shaping
    saved: float
    reason: str


def choose(measured: Sequence[Shaping]) -> ShapingChoice:
    """Return the fastest way, unless the fastest that shapes nothing is as good.

    Args:
        measured: at least one without limits and without priority, with which the others are compared.

    Raises:
        ValueError: there is none.

    >>> usual = Shaping("tuned", 2048, 1, False, False, 70.0)
    >>> choose([usual, Shaping("opt1", 16384, 2, True, True, 56.0)]).reason
    'opt1, 16384 blocks, 2 resident, priority: 56 us, 20.0% less than tuned, 2048 blocks, 1 resident (70 us)'
    >>> choose([usual, Shaping("opt1", 16384, 2, True, True, 69.9)]).reason
    'tuned, 2048 blocks, 1 resident: 70 us; shaping and priority save 0.1% (opt1, 16384 blocks, 2 resident, priority)'
    """
    plain = [one for one in measured if not one.limited and not one.priority]
    if not plain:
        raise ValueError(f"choose: measured (value={[str(one) for one in measured]}, allowed=one that shapes nothing)")
    base, best = (min(some, key=lambda one: one.time_us) for some in (plain, measured))
    saved = 1 - best.time_us / base.time_us
    if saved < LEAST_SAVED:
        reason = f"{base}: {base.time_us:.0f} us"
        return ShapingChoice(
            base, 0.0, reason + ("" if best is base else f"; shaping and priority save {100 * saved:.1f}% ({best})")
        )
    than = f"{100 * saved:.1f}% less than {base} ({base.time_us:.0f} us)"
    return ShapingChoice(best, saved, f"{best}: {best.time_us:.0f} us, {than}")


class ShapingRow(Protocol):
    """A row of ``sidelane c3 --study occupancy``; see ``bench.results.rows.pairs.OccupancyRow``."""

    @property
    def shape(self) -> str: ...
    @property
    def grid(self) -> str: ...
    @property
    def blocks(self) -> int: ...
    @property
    def resident(self) -> int: ...
    @property
    def priority(self) -> bool: ...
    @property
    def time_us(self) -> float | None: ...


def shaping_of(row: ShapingRow, rows: Sequence[ShapingRow]) -> Shaping:
    """Return a row as a way to choose from; ``rows``: all of its pair, which tell how many blocks fit a unit."""
    most = max(other.resident for other in rows if other.shape == row.shape)
    limited = row.grid != "data-parallel" or row.resident < most
    return Shaping(row.shape, row.blocks, row.resident, limited, row.priority, row.time_us or 0.0)


def choose_shaping(file: str | Path, gemm: tuple[int, int, int], collective: Kind | str) -> ShapingChoice:
    """Return the shape, the occupancy and the priority that were fastest for pipelined iterations on this machine.

    Args:
        file: file of ``sidelane c3 --study occupancy --json``.
        gemm: m, n and k of a GEMM that was measured there.
        collective: collective of its iterations.

    Raises:
        ValueError: the file cannot be read, has another format, or has no times of such a pair.
    """
    kind = str(Kind(collective))
    try:
        content = json_of(text_of(file))
        if content["study"] != "occupancy":
            raise ValueError(f"study (value={content['study']!r:.100})")
        timed = [row for row in content["rows"] if row["time_us"] is not None and row["correct"]]
        alike = [
            row
            for row in timed
            if (row["m"], row["n"], row["k"], row["collective"]) == (*gemm, kind) and not row["in_order"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        text = f"choose_shaping: file (value={str(file)!r}, allowed=of sidelane c3 --study occupancy): {problem!r}"
        raise ValueError(text) from problem
    if not alike:
        there = sorted({f"{row['m']}x{row['n']}x{row['k']} with {row['collective']}" for row in timed})
        asked = f"{'x'.join(map(str, gemm))} with {kind}"
        raise ValueError(f"choose_shaping: gemm, collective (value={asked}, allowed={', '.join(there)}; {file})")
    rows = [types.SimpleNamespace(**row) for row in alike]
    return choose([shaping_of(row, rows) for row in rows])
