"""Profiles: measured times of a machine, with interpolation: of collectives, and of fused operators.

A profile is a JSON object. Its key says on what hardware and software it was measured (``choice.key``).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from sidelane.choice.candidate import Candidate
from sidelane.choice.fused import FusedTime
from sidelane.choice.key import MachineKey
from sidelane.program.collective import REDUCING, Kind
from sidelane.program.shape import CallShape
from sidelane.user_files import MOST_RANKS, flag_in, json_of, number_in, text_in, whole_in

T = TypeVar("T")

FORMAT = 1
"""Number of the file's format: it changes with the file's keys or their meaning. Other formats are not used."""

_LEAST_US, _MOST_US = 1e-9, 1e15
"""Bounds of a time in microseconds, so that interpolated times are numbers, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Times of one candidate over sizes.

    Attributes:
        kind: kind of the collective.
        world_size: number of ranks that took part.
        dtype: dtype of the elements.
        in_place: input and output shared memory (both symmetric).
        captured: measured as part of a graph; otherwise eager, the host's time included.
        candidate: candidate that ran.
        times: (bytes, microseconds), by growing bytes; bytes as in ``sidelane.program.shape.CallShape``.
    """

    kind: Kind
    world_size: int
    dtype: str
    in_place: bool
    captured: bool
    candidate: Candidate
    times: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [nbytes for nbytes, _ in self.times]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"Curve: sizes must grow, from 1 byte on (value={sizes})")
        if not all(_LEAST_US <= us <= _MOST_US for _, us in self.times):
            raise ValueError(
                f"Curve: times must be positive (value={[us for _, us in self.times]}, allowed={_LEAST_US}..{_MOST_US})"
            )

    def at(self, nbytes: int) -> float:
        """Return the microseconds for a size.

        Between two measured sizes, time follows a power of the size. Below the smallest it is constant (latency); above
        the largest a byte takes its average time between the smallest and the largest (bandwidth), so that a small
        latency does not pass for a high bandwidth.

        >>> times = ((100, 10.0), (400, 20.0))
        >>> curve = Curve(Kind.ALL_GATHER, 4, "int32", False, False, Candidate("dma", "b2b"), times)
        >>> curve.at(10), round(curve.at(200), 1), round(curve.at(800), 1)
        (10.0, 14.1, 33.3)
        """
        sizes = [size for size, _ in self.times]
        above = bisect.bisect_left(sizes, nbytes)
        if above == 0:
            return self.times[0][1]
        low_bytes, low_us = self.times[above - 1]
        if above == len(sizes):
            first_bytes, first_us = self.times[0]
            if low_us <= first_us:  # one size, or nothing but latency
                return low_us * nbytes / low_bytes
            return low_us + (nbytes - low_bytes) * (low_us - first_us) / (low_bytes - first_bytes)
        high_bytes, high_us = self.times[above]
        share = math.log(nbytes / low_bytes) / math.log(high_bytes / low_bytes)
        return low_us * math.pow(high_us / low_us, share)


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measured times of a machine.

    Attributes:
        machine: short name (``h200x4``, ``cpu``).
        key: hardware and software of the measurement.
        date: UTC, ISO 8601.
        command: command that measures it again.
        curves: measured times of collectives.
        operators: measured times of fused operators.
    """

    machine: str
    key: MachineKey
    date: str
    command: str
    curves: tuple[Curve, ...]
    operators: tuple[FusedTime, ...] = ()

    def comparable(self, call: CallShape) -> tuple[Curve, ...]:
        """Return the curves for a call: of its collective and, as near as was measured, of its way to be called."""
        found = tuple(curve for curve in self.curves if curve.kind is call.kind)
        if not found:
            return ()
        ranks = min({curve.world_size for curve in found}, key=lambda n: (abs(math.log(n / call.world_size)), n))
        found = tuple(curve for curve in found if curve.world_size == ranks)
        found = _prefer(found, "captured", call.captured)
        found = _prefer(found, "in_place", call.in_place)
        return _prefer(found, "dtype", call.dtype if call.kind in REDUCING else found[0].dtype)

    def to_text(self) -> str:
        """Return the JSON of the file, a line for each curve and each time of an operator."""
        head = {
            "format": FORMAT,
            "machine": self.machine,
            "key": self.key.to_dict(),
            "date": self.date,
            "command": self.command,
        }
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        rows: dict[str, list[dict[str, Any]]] = {
            "curves": [
                {
                    "collective": str(curve.kind),
                    "ranks": curve.world_size,
                    "dtype": curve.dtype,
                    "in_place": curve.in_place,
                    "captured": curve.captured,
                    **dataclasses.asdict(curve.candidate),
                    "times": [[nbytes, float(f"{us:.4g}")] for nbytes, us in curve.times],
                }
                for curve in self.curves
            ]
        }
        if self.operators:
            rows["operators"] = [time.to_dict() for time in self.operators]
        lists = (f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows[name]) + "\n ]" for name in rows)
        return "\n".join(["{", *lines, ",\n".join(lists), "}", ""])


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Profile:
    """Read a profile.

    Raises:
        ValueError: the text is no profile, or is of another format; the error says what is wrong.
    """
    try:
        content = json_of(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format (value={content['format']!r}, allowed={FORMAT})")
        # Cached graphs were a variant once.
        rows = [row for row in content["curves"] if not (isinstance(row, dict) and row.get("launch") == "graph")]
        curves = _read_rows("curves", rows, _curve_of)
        # Calls of several experts a rank had times of their own once.
        rows = [row for row in content.get("operators", ()) if not (isinstance(row, dict) and "experts" in row)]
        operators = _read_rows("operators", rows, FusedTime.from_dict)
        key = MachineKey.from_dict(content["key"])
        names = (text_in(content, name) for name in ("machine", "date", "command"))
        machine, date, command = names
        return Profile(machine, key, date, command, curves, operators)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise ValueError(f"not a profile: {type(problem).__name__}: {problem}") from problem


def _prefer(curves: tuple[Curve, ...], name: str, value: object) -> tuple[Curve, ...]:
    """Return the curves whose ``name`` is ``value``; if there is none, all that share the first one's."""
    same = tuple(curve for curve in curves if getattr(curve, name) == value)
    return same or tuple(curve for curve in curves if getattr(curve, name) == getattr(curves[0], name))


def _read_rows(name: str, rows: Iterable[Any], read: Callable[[Any], T]) -> tuple[T, ...]:
    """Read the rows of a list of the file; an error names the row."""
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(read(row))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
            raise ValueError(f"{name}[{number}]: {type(problem).__name__}: {problem}") from problem
    return tuple(found)


def _curve_of(row: Mapping[str, Any]) -> Curve:
    names = [field.name for field in dataclasses.fields(Candidate)]
    return Curve(
        kind=Kind(row["collective"]),
        world_size=whole_in(row, "ranks", MOST_RANKS),
        dtype=text_in(row, "dtype"),
        in_place=flag_in(row, "in_place"),
        captured=flag_in(row, "captured"),
        candidate=Candidate(**{name: text_in(row, name) for name in names}),
        times=tuple(_point(nbytes, us) for nbytes, us in row["times"]),
    )


def _point(nbytes: object, us: object) -> tuple[int, float]:
    if type(nbytes) is int and nbytes < 1 << 63 and type(us) is float:  # nearly always; curves check the rest
        return nbytes, us
    return whole_in({"bytes": nbytes}, "bytes"), number_in({"us": us}, "us")
