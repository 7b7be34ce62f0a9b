"""The choice between a fused operator and the same unfused: by what was measured on this machine, or by thumb.

Measured times are a JSON object in a file of the user's, which ``sidelane fused --keep`` writes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

from sidelane.choice.key import Key
from sidelane.choice.store import name_of
from sidelane.config import BUILTIN, profile_folder

FORMAT = 1
FUSED, UNFUSED = "fused", "unfused"
FARTHEST = 4.0
"""Measured sizes that differ by more than this factor, in one of them, say nothing about a call."""


@dataclasses.dataclass(frozen=True, slots=True)
class FusedTime:
    """One operator at one shape.

    Attributes:
        op: its name.
        world_size: ranks.
        captured: in a graph; else eager.
        sizes: the numbers of the shape, as the operator's own list of them says; 1 and more.
        fused_us: the operator as a plain call has it.
        unfused_us: the fastest way without the operator.
    """

    op: str
    world_size: int
    captured: bool
    sizes: tuple[int, ...]
    fused_us: float
    unfused_us: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(us) and us > 0 for us in (self.fused_us, self.unfused_us)) or min(self.sizes) < 1:
            raise ValueError(f"FusedTime: times and sizes must be positive (value={self})")


@dataclasses.dataclass(frozen=True, slots=True)
class MethodChoice:
    """Which, and why."""

    method: str
    reason: str


def choose_method(
    times: Iterable[FusedTime], op: str, world_size: int, sizes: tuple[int, ...], *, captured: bool = False
) -> MethodChoice:
    """Choose by the nearest measured shape. Deterministic: what all ranks have alike gives the same on all.

    >>> times = [FusedTime("gemv_all_reduce", 2, False, (4096, 4096, 1), 20.0, 15.0)]
    >>> choose_method(times, "gemv_all_reduce", 2, (4096, 8192, 1)).method
    'unfused'
    >>> choose_method(times, "gemv_all_reduce", 2, (4096, 65536, 1)).reason
    'by thumb: no time of a shape like 4096, 65536, 1 (sidelane fused --keep measures)'
    """
    alike = [time for time in times if (time.op, time.world_size, len(time.sizes)) == (op, world_size, len(sizes))]
    alike = [time for time in alike if time.captured == captured] or alike
    near = [(distance, time) for time in alike if max(distance := _distances(time.sizes, sizes)) <= math.log(FARTHEST)]
    if not near:
        words = ", ".join(map(str, sizes))
        return MethodChoice(FUSED, f"by thumb: no time of a shape like {words} (sidelane fused --keep measures)")
    _, time = min(near, key=lambda found: (sum(found[0]), found[1].sizes))
    method = UNFUSED if time.unfused_us < time.fused_us else FUSED
    where = f"{', '.join(map(str, time.sizes))}, {'in a graph' if time.captured else 'eager'}"
    return MethodChoice(method, f"measured at {where}: fused {time.fused_us:.4g} us, unfused {time.unfused_us:.4g} us")


def _distances(one: tuple[int, ...], other: tuple[int, ...]) -> list[float]:
    return [abs(math.log(first / max(1, second))) for first, second in zip(one, other, strict=True)]


def user_file(key: Key) -> Path:
    """Where the times of a machine are kept, next to its profile."""
    return profile_folder() / f"fused-{name_of(key)}.json"


def to_text(key: Key, times: Iterable[FusedTime]) -> str:
    """The JSON of the file, a line for each time."""
    lines = ",\n".join(f"  {json.dumps(dataclasses.asdict(time))}" for time in times)
    return f'{{\n "format": {FORMAT},\n "key": {json.dumps(key.to_dict())},\n "times": [\n{lines}\n ]\n}}\n'


def parse(text: str) -> tuple[Key, tuple[FusedTime, ...]]:
    """Read such a file.

    Raises:
        ValueError: it is none.
    """
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format (value={content['format']!r}, allowed={FORMAT})")
        times = tuple(FusedTime(**{**time, "sizes": tuple(map(int, time["sizes"]))}) for time in content["times"])
        return Key.from_dict(content["key"]), times
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"not times of fused operators: {type(problem).__name__}: {problem}") from problem


def times_of(setting: str | None, key: Key) -> tuple[FusedTime, ...]:
    """The times of this machine. What is missing, wrong, or of another machine gives none.

    Args:
        setting: ``Config.profile``; ``builtin`` keeps to what the package has, which is nothing yet.
        key: of this machine.
    """
    if setting == BUILTIN:
        return ()
    try:
        measured, times = parse(user_file(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return () if measured.differences(key) else times


def keep(key: Key, times: Iterable[FusedTime]) -> Path:
    """Write the user's file of a machine; times of shapes that it has, too, are replaced, others stay."""
    path = user_file(key)
    found = {(t.op, t.world_size, t.captured, t.sizes): t for t in (*times_of(None, key), *times)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(to_text(key, found.values()), encoding="utf-8")
    temporary.replace(path)
    return path
