"""The choice of a way for a fused operator: fused, split into parts for copy engines, or unfused; and of the order in
which a fused one computes.

By what was measured on this machine, else on one like it, else by thumb. Measured times are a JSON object: the user's
file, which ``sidelane fused --keep`` writes, and tables of this package.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sidelane.choice import store
from sidelane.choice.fused_heuristic import expected_us
from sidelane.choice.fused_order import ORDERS, expected_order
from sidelane.choice.key import CPU, Key
from sidelane.config import BUILTIN
from sidelane.user_files import MOST_RANKS, flag_in, json_of, text_in, whole_in

FORMAT = 2
FUSED, SPLIT, UNFUSED = "fused", "split", "unfused"
ORDERED = ("embedding_all_to_all",)
"""Operators whose order is chosen."""

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
        element_bytes: of the weight, the tables or the rows.
        times: microseconds, as a call of the operator has them: of ``fused``, of ``unfused``, and of ``split/2`` with
            two pieces.
        orders: microseconds of ``fused`` in each order, of an operator that is in ``ORDERED``.
        experts: of a rank, that rows are taken apart by. A file has them where they are several.
    """

    op: str
    world_size: int
    captured: bool
    sizes: tuple[int, ...]
    element_bytes: int
    times: Mapping[str, float]
    orders: Mapping[str, float] = dataclasses.field(default_factory=dict)
    experts: int = 1

    def __post_init__(self) -> None:
        every = (*self.times.values(), *self.orders.values())
        if not all(math.isfinite(us) and us > 0 for us in every) or min(*self.sizes, self.experts) < 1:
            raise ValueError(f"FusedTime: times and sizes must be positive (value={self})")
        for way in self.times:
            _parts(way)
        if not set(self.orders) <= set(ORDERS):
            raise ValueError(
                f"orders of a fused operator (value={', '.join(self.orders)}, allowed={', '.join(ORDERS)})"
            )

    def to_dict(self) -> dict[str, object]:
        """For a file; without what there is none of."""
        left_out = {"orders": {}, "experts": 1}
        return {name: value for name, value in dataclasses.asdict(self).items() if value != left_out.get(name)}


@dataclasses.dataclass(frozen=True, slots=True)
class FusedTable:
    """Times of one machine.

    Attributes:
        key: of the machine.
        times: of shapes.
        where: which table it is, in words.
    """

    key: Key
    times: tuple[FusedTime, ...]
    where: str

    def to_text(self) -> str:
        """The JSON of the file, a line for each time."""
        lines = ",\n".join(f"  {json.dumps(time.to_dict())}" for time in self.times)
        return f'{{\n "format": {FORMAT},\n "key": {json.dumps(self.key.to_dict())},\n "times": [\n{lines}\n ]\n}}\n'

    @staticmethod
    def parse(text: str, where: str) -> FusedTable:
        """Read such a file.

        Raises:
            ValueError: it is none.
        """
        try:
            content = json_of(text)
            if content["format"] != FORMAT:
                raise ValueError(f"format (value={content['format']!r}, allowed={FORMAT})")
            times = tuple(_time_of(number, row) for number, row in enumerate(content["times"]))
            return FusedTable(Key.from_dict(content["key"]), times, where)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
            raise ValueError(f"{where}: not times of fused operators: {type(problem).__name__}: {problem}") from problem


@dataclasses.dataclass(frozen=True, slots=True)
class MethodChoice:
    """Which way, and why.

    Attributes:
        method: ``fused``, ``split`` or ``unfused``.
        reason: in words.
        pieces: of a split one, for each peer; 0 where the operator may take its own number.
    """

    method: str
    reason: str
    pieces: int = 0


def choose_method(
    tables: Iterable[FusedTable],
    op: str,
    world_size: int,
    sizes: tuple[int, ...],
    *,
    ways: Sequence[str] = (FUSED, UNFUSED),
    element_bytes: int | None = None,
    captured: bool = False,
    device_type: str = "cuda",
    experts: int = 1,
) -> MethodChoice:
    """Choose by the nearest measured shape. Deterministic: what all ranks have alike gives the same on all.

    Args:
        tables: the first one that has a shape like this one decides.
        op: the operator.
        world_size: ranks.
        sizes: of the call.
        ways: that the call may go, fused first.
        element_bytes: of the call; None for any.
        captured: in a graph.
        device_type: on CPU ranks what was not measured goes the first of ``ways``, which tests most there.
        experts: of a rank; times with several say nothing about one, nor the other way round.

    >>> times = {"fused": 20.0, "unfused": 15.0, "split/4": 12.0}
    >>> time = FusedTime("all_to_all_gemm", 2, False, (64, 64, 64), 2, times)
    >>> table = FusedTable(Key("cuda", "some", 2), (time,), "own")
    >>> choose_method([table], "all_to_all_gemm", 2, (64, 100, 64)).method
    'unfused'
    >>> choose_method([table], "all_to_all_gemm", 2, (64, 100, 64), ways=(FUSED, SPLIT, UNFUSED)).pieces
    4
    >>> choose_method([table], "gemv_all_reduce", 2, (64, 64, 1)).reason
    'by thumb: no time of a shape like 64, 64, 1 (sidelane fused --keep measures)'
    """
    for table in tables:
        time = _nearest(table.times, op, world_size, sizes, element_bytes, captured, experts)
        found = {} if time is None else {way: us for way, us in time.times.items() if _parts(way)[0] in ways}
        if time is not None and found:
            best = min(found, key=lambda way: (found[way], ways.index(_parts(way)[0]), way))
            return MethodChoice(_parts(best)[0], _measured(time, table, found), _parts(best)[1])
    words = f"no time of a shape like {_shape(sizes, experts)} (sidelane fused --keep measures)"
    thumb = None
    if device_type != CPU:
        thumb = expected_us(op, world_size, sizes, element_bytes or 2, captured=captured, experts=experts)
    if thumb is None:
        return MethodChoice(ways[0], f"by thumb: {words}")
    expected = {way: us for way, us in thumb.items() if way in ways}
    return MethodChoice(min(expected, key=lambda way: expected[way]), f"by thumb: {_in_words(expected)}; {words}")


@dataclasses.dataclass(frozen=True, slots=True)
class OrderChoice:
    """Which order, and why.

    Attributes:
        order: ``remote_first`` or ``oblivious``.
        reason: in words.
    """

    order: str
    reason: str


def choose_order(
    tables: Iterable[FusedTable],
    op: str,
    world_size: int,
    sizes: tuple[int, ...],
    *,
    element_bytes: int | None = None,
) -> OrderChoice:
    """Choose by the nearest measured shape, for all launches by graphs, whose host has no part in the times.

    Arguments as of :func:`choose_method`; ``op`` is one of ``ORDERED``.

    >>> times = {"remote_first": 20.0, "oblivious": 15.0}
    >>> time = FusedTime("embedding_all_to_all", 2, True, (64, 64, 64), 2, {"fused": 15.0}, times)
    >>> table = FusedTable(Key("cuda", "some", 2), (time,), "own")
    >>> choose_order([table], "embedding_all_to_all", 2, (64, 64, 64)).reason
    'measured at 64, 64, 64, in a graph, own: remote_first 20 us, oblivious 15 us'
    >>> choose_order([], "embedding_all_to_all", 2, (64, 64, 2)).order
    'remote_first'
    """
    for table in tables:
        known = [time for time in table.times if time.orders]
        time = _nearest(known, op, world_size, sizes, element_bytes, captured=True)
        if time is not None:
            best = min(time.orders, key=lambda order: (time.orders[order], ORDERS.index(order)))
            return OrderChoice(best, _measured(time, table, time.orders))
    order, why = expected_order(world_size, sizes[-1])
    return OrderChoice(order, f"by thumb: {why}")


def _measured(time: FusedTime, table: FusedTable, found: Mapping[str, float]) -> str:
    where = f"{_shape(time.sizes, time.experts)}, {'in a graph' if time.captured else 'eager'}, {table.where}"
    return f"measured at {where}: {_in_words(found)}"


def _shape(sizes: tuple[int, ...], experts: int) -> str:
    """In words.

    >>> _shape((64, 32), 1), _shape((64, 32), 8)
    ('64, 32', '64, 32, 8 experts')
    """
    return ", ".join((*map(str, sizes), *([f"{experts} experts"] if experts > 1 else [])))


def _nearest(
    times: Iterable[FusedTime],
    op: str,
    world_size: int,
    sizes: tuple[int, ...],
    element_bytes: int | None,
    captured: bool,
    experts: int = 1,
) -> FusedTime | None:
    alike = [time for time in times if (time.op, time.world_size, len(time.sizes)) == (op, world_size, len(sizes))]
    alike = [time for time in alike if (time.experts > 1) == (experts > 1)]
    alike = [time for time in alike if element_bytes in (None, time.element_bytes)]
    alike = [time for time in alike if time.captured == captured] or alike
    wanted = *sizes, experts
    far = [(_distances((*time.sizes, time.experts), wanted), time) for time in alike]
    near = [(distances, time) for distances, time in far if max(distances) <= math.log(FARTHEST)]
    return min(near, key=lambda found: (sum(found[0]), found[1].sizes, found[1].experts))[1] if near else None


def _distances(one: tuple[int, ...], other: tuple[int, ...]) -> list[float]:
    return [abs(math.log(first / max(1, second))) for first, second in zip(one, other, strict=True)]


def _parts(way: str) -> tuple[str, int]:
    """Method and pieces.

    >>> _parts("split/2"), _parts("fused")
    (('split', 2), ('fused', 0))
    """
    method, _, pieces = way.partition("/")
    if method not in (FUSED, SPLIT, UNFUSED) or bool(pieces) != (method == SPLIT):
        raise ValueError(f"way of a fused operator (value={way!r}, allowed={FUSED}, {UNFUSED}, {SPLIT}/<pieces>)")
    return method, int(pieces or 0)


def _in_words(times: Mapping[str, float]) -> str:
    return ", ".join(f"{way} {us:.4g} us" for way, us in times.items())


def _time_of(number: int, row: Any) -> FusedTime:
    try:
        text_in(row, "op"), flag_in(row, "captured")
        (
            whole_in(row, "world_size", MOST_RANKS),
            whole_in(row, "element_bytes"),
            whole_in({"experts": 1, **row}, "experts"),
        )
        sizes = tuple(whole_in({"sizes": size}, "sizes") for size in row["sizes"])
        return FusedTime(**{**row, "sizes": sizes})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
        raise ValueError(f"times[{number}]: {type(problem).__name__}: {problem}") from problem


def user_file(key: Key) -> Path | None:
    """Where the times of a machine are kept, next to its profile; None without a home."""
    return store.user_file(key, "fused-{}.json")


def tables_of(setting: str | None, key: Key) -> tuple[FusedTable, ...]:
    """The tables to choose by on a machine: the user's, then those of this package for such GPUs.

    What is missing, wrong, or of another machine is left out.

    Args:
        setting: ``Config.profile``; ``builtin`` keeps to what the package has.
        key: of this machine.
    """
    return (*([] if setting == BUILTIN else _of_the_user(key)), *(table for table in builtin() if _alike(table, key)))


def _alike(table: FusedTable, key: Key) -> bool:
    return (table.key.device_type, table.key.device) == (key.device_type, key.device)


def _of_the_user(key: Key) -> Iterator[FusedTable]:
    path = user_file(key)
    if path is None:
        return
    try:
        found = FusedTable.parse(path.read_text(encoding="utf-8"), path.name)
    except (OSError, ValueError):
        return
    if not found.key.differences(key):
        yield found


@functools.cache
def builtin() -> tuple[FusedTable, ...]:
    """The tables of this package, by name."""
    folder = importlib.resources.files("sidelane.choice") / "builtin" / "fused"
    files = sorted(folder.iterdir(), key=lambda entry: entry.name)
    return tuple(
        FusedTable.parse(entry.read_text(encoding="utf-8"), f"built-in {entry.name.removesuffix('.json')}")
        for entry in files
        if entry.name.endswith(".json")
    )


def keep(key: Key, times: Iterable[FusedTime]) -> Path:
    """Write the user's file of a machine; times of shapes that it has, too, are replaced, others stay."""
    path = store.required("fused", user_file(key))
    before = [time for table in _of_the_user(key) for time in table.times]
    found = {(t.op, t.world_size, t.captured, t.sizes, t.element_bytes, t.experts): t for t in (*before, *times)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(FusedTable(key, tuple(found.values()), path.name).to_text(), encoding="utf-8")
    temporary.replace(path)
    return path
