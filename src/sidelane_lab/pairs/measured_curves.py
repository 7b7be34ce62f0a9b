"""Curves from the file of ``sidelane tune --study c3``, for choices by it."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from sidelane.choice.key import key_here
from sidelane.choice.store import user_file
from sidelane.program.collective import Kind
from sidelane.user_files import bytes_of, json_of
from sidelane_lab.harness.files import text_of
from sidelane_lab.pairs.isolated_times import CollectiveTimes, GemmTimes, Isolated, PairTimes
from sidelane_lab.pairs.workload import GemmColumns, gemm_of

GEMM, COLLECTIVE, MEMORY, BESIDE, PAIR = "gemm", "collective", "memory", "beside", "pair"
SERIAL = "serial"
"""``means`` of the row of a pair with which the other rows of the pair are compared."""


class CurvePoint(GemmColumns, Protocol):
    """A row of the file, as ``sidelane tune --study c3`` writes it."""

    @property
    def what(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def implementation(self) -> str: ...
    @property
    def means(self) -> str: ...
    @property
    def units(self) -> int: ...
    @property
    def device_units(self) -> int: ...
    @property
    def time_us(self) -> float | None: ...
    @property
    def alone_us(self) -> float | None: ...
    @property
    def gbps(self) -> float | None: ...


def isolated_file(device_type: str, ranks: int) -> Path | None:
    """Return the user's file of this machine; None without a home."""
    return user_file(key_here(device_type, ranks), "{}-c3.json")


def isolated_text(path: Path | None) -> str:
    """Return the text of a user's file; "" if there is none that this user can read."""
    try:
        return "" if path is None else bytes_of(path).decode()
    except OSError:
        return ""
    except ValueError as problem:
        raise ValueError(f"{path}: cannot be read as text: {problem}") from problem


def isolated_times(path: Path | None, device_type: str, ranks: int) -> Isolated | None:
    """Return the contents of a file of isolated times; None: the user's of this machine, which need not exist.

    Raises:
        ValueError: there is no such file, it has another format, or lacks measurements.
    """
    if path is None:
        path = isolated_file(device_type, ranks)
        text = isolated_text(path)
        return parse_isolated(text, str(path)) if text else None
    if not path.exists():
        raise ValueError(f"isolated times: no such file (value={str(path)!r}, allowed=of sidelane tune --study c3)")
    return parse_isolated(text_of(path), str(path))


def parse_isolated(text: str, where: str) -> Isolated:
    """Return the contents of a file from its text.

    Args:
        text: text of the file.
        where: path of the file, for errors.

    Raises:
        ValueError: it has another format, or lacks measurements.
    """
    try:
        content = json_of(text)
        if content["study"] != "isolated":
            raise KeyError("study")
        return isolated_of([types.SimpleNamespace(**row) for row in content["rows"]])
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as problem:
        raise ValueError(
            f"isolated times: not such a file (value={where!r}, allowed=of sidelane tune --study c3): {problem!r}"
        ) from None


def isolated_of(rows: Sequence[CurvePoint]) -> Isolated:
    """Return the curves of measured rows.

    Raises:
        ValueError: rows of GEMMs or of the memory are missing.
    """
    timed = [row for row in rows if row.time_us is not None]
    gemms = tuple(_gemms([row for row in timed if row.what == GEMM]))
    memory = max((row.gbps for row in timed if row.what == MEMORY and row.gbps), default=0.0)
    if not gemms or not memory:
        raise ValueError("isolated_of: rows (value=none of a GEMM, or none of the memory; sidelane tune --study c3)")
    tflops = max(curve.gemm.flops / curve.times_us[0] / 1e6 for curve in gemms)
    collectives = tuple(_collectives([row for row in timed if row.what == COLLECTIVE]))
    return Isolated(tflops, memory, gemms, collectives, tuple(_pairs([row for row in timed if row.what == PAIR])))


def _gemms(rows: Sequence[CurvePoint]) -> Iterable[GemmTimes]:
    for (*_, means), same in _alike(rows, "m", "n", "k", "dtype", "means"):
        times = {row.units: row.time_us for row in same if row.time_us is not None}
        if 0 in times:
            yield GemmTimes(gemm_of(same[0]), str(means), same[0].device_units, times)


def _collectives(rows: Sequence[CurvePoint]) -> Iterable[CollectiveTimes]:
    for (collective, nbytes, implementation), same in _alike(rows, "collective", "bytes", "implementation"):
        times: dict[int, float] = {}
        for row in same:  # the fastest of several variants
            if row.time_us is not None:
                times[row.units] = min(row.time_us, times.get(row.units, row.time_us))
        if 0 in times:
            yield CollectiveTimes(Kind(collective), int(nbytes), str(implementation), times)


def _pairs(rows: Sequence[CurvePoint]) -> Iterable[PairTimes]:
    by = _alike(rows, "m", "n", "k", "dtype", "collective", "bytes", "implementation")
    for (*_, collective, nbytes, implementation), same in by:
        serial = next((row for row in same if row.means == SERIAL), None)
        if serial is None or serial.time_us is None or serial.alone_us is None:
            continue
        others = [row for row in same if row.means != SERIAL]
        times = {(row.means, row.units): row.time_us for row in others if row.time_us is not None}
        comm_us, serial_us = serial.alone_us, serial.time_us
        yield PairTimes(gemm_of(serial), Kind(collective), int(nbytes), str(implementation), comm_us, serial_us, times)


def _alike(rows: Sequence[CurvePoint], *names: str) -> Iterator[tuple[tuple[Any, ...], list[CurvePoint]]]:
    found: dict[tuple[Any, ...], list[CurvePoint]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return iter(found.items())
