"""Choice of a method for a fused operator: fused, split into parts for copy engines, or unfused.

The choice goes by measurements on this machine, else on one like it (``choice.store.fused_times`` reads them), else by
a heuristic: times of a GEMM and a collective by method, and ``fused`` for other operators.

The heuristic's figures are those of an H200, rounded (results/h200x1, results/h200x2). Only their ratios count: the
time of a product next to that of a byte between GPUs, and how much slower tiles of Triton are than the library's::

    unfused    product, then the collective
    fused      the longer one of both; products in rounds of tiles at 0.8 of the library's rate, or 0.6
    split      the longer one of both, and the travel of the last part; each part reads the weight and is a call
    split, with an all-reduce, whose kernels take units from the product: some of the all-reduce is hidden
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sidelane.choice.key import CPU
from sidelane.choice.selection import Selection, select
from sidelane.user_files import MOST_RANKS, flag_in, text_in, whole_in

FUSED, SPLIT, UNFUSED = "fused", "split", "unfused"
REMOTE_FIRST, OBLIVIOUS = "remote_first", "oblivious"
ORDERS = (REMOTE_FIRST, OBLIVIOUS)
"""Orders of work: first for the peers, which wait (the fused operators paper, section III.A), or by number."""

ROUTED = "gemm_all_to_all", "all_to_all_gemm"
"""Operators whose weight may be of several experts a rank."""

GEMV = "gemv_all_reduce"
"""Operator whose times are interpolated between measured shapes: tiles of few rows leave units idle."""

WITHOUT_KERNEL = "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"
"""Operators that are split or unfused: fused kernels took longer at every shape (results/notes/kernels.md)."""

FLOPS_PER_US = {2: 700e6, 4: 50e6}
"""Rate of a product in operations a microsecond, by bytes of an element."""

UNITS, TILE, TILE_SPEED = 132, (128, 256), 0.8
DISPATCH_SPEED = 0.6
"""Relative rate of ``all_to_all_gemm``, whose tiles wait for their rows (0.5 to 0.68: results/h100x2/fused.json)."""

MEMORY_BYTES_PER_US = 4e6
LINK_BYTES_PER_US = 350e3
SPLIT_SPEED, PIECES = 0.95, 4
"""Relative rate of a product in parts, and the default number of pieces for each peer."""

ROW_PARTS, HIDDEN, ROW_PART_US = 2, 0.2, 30.0
"""Default number of parts of rows before all-reduces, share of all of these that products hide, and microseconds that a
further part costs (results/h200x2/gemm-all-reduce.txt)."""

GEMV_US, GEMV_SUM_US, GEMV_BYTES_PER_US = 5.5, 10.0, 4.3e6
"""Microseconds that a fused GEMV takes beside its stream of weights, and those of a product and an all-reduce of its
sums; rate of that stream where blocks fill the GPU (results/h200x2/gemv-grid.txt)."""

GEMV_MARGIN, GEMV_FEW_TOKENS = 1.08, 8
"""Factor on the time of a fused GEMV between measured shapes, of more tokens than the second or of several tokens and
more than ``GEMV_FEW_ROWS``: times of cuBLAS's kernels jump by 12% there, and ours are hardly ahead."""

GEMV_TILE_ROWS, GEMV_FEW_ROWS, GEMV_ALONE = 16, 4096, 0.65
"""Number of rows of a tile, twice as many for several tokens and more rows than the second; rate of a block of several
tokens that is alone on a compute unit, relative to that of the unit."""

CALL_US, PART_US = 5.0, 2.7
"""Microseconds of a separate collective, and of a part in a graph (results/h200x2/probes.txt)."""

EAGER_US = {"fused": 110.0, "split": 300.0, "unfused": 60.0}
"""Smallest time of an eager call in microseconds, which the host takes."""

FARTHEST = 4.0
"""Largest factor between a size of a call and a measured one that counts as near."""


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """One way to run a fused operator.

    Attributes:
        name: ``fused``, ``split`` or ``unfused``.
        pieces: number of pieces of a split one, for each peer; 0 for the operator's default.
    """

    name: str
    pieces: int = 0

    @staticmethod
    def parse(text: str) -> Method:
        """Read a name in a file.

        >>> str(Method.parse("split/2")), Method.parse("fused")
        ('split in 2 pieces', Method(name='fused', pieces=0))
        """
        name, _, pieces = text.partition("/")
        if name not in (FUSED, SPLIT, UNFUSED) or bool(pieces) != (name == SPLIT):
            raise ValueError(f"way of a fused operator (value={text!r}, allowed={FUSED}, {UNFUSED}, {SPLIT}/<pieces>)")
        return Method(name, int(pieces or 0))

    def __str__(self) -> str:
        return self.name + (f" in {self.pieces} pieces" if self.pieces > 1 else "")


@dataclasses.dataclass(frozen=True, slots=True)
class FusedTime:
    """Measured times of one operator at one shape.

    Attributes:
        op: name of the operator.
        world_size: number of ranks.
        captured: measured in a graph; otherwise eager.
        sizes: sizes of the shape, in the order of the operator's list (``ops.operator``); 1 and more.
        element_bytes: size of an element of the weight, the tables or the rows in bytes.
        times: microseconds by method, as in a call of the operator: of ``fused``, of ``unfused``, and of ``split/2``
            with two pieces.
    """

    op: str
    world_size: int
    captured: bool
    sizes: tuple[int, ...]
    element_bytes: int
    times: Mapping[str, float]

    def __post_init__(self) -> None:
        if not all(math.isfinite(us) and us > 0 for us in self.times.values()) or min(self.sizes) < 1:
            raise ValueError(f"FusedTime: times and sizes must be positive (value={self})")
        for text in self.times:
            Method.parse(text)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object of the file."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> FusedTime:
        """Read the result of :meth:`to_dict`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: a field is missing, or is not of its kind.
        """
        sizes = tuple(whole_in({"sizes": size}, "sizes") for size in row["sizes"])
        ranks, element_bytes = whole_in(row, "world_size", MOST_RANKS), whole_in(row, "element_bytes")
        return FusedTime(text_in(row, "op"), ranks, flag_in(row, "captured"), sizes, element_bytes, row["times"])


FusedTimes = Mapping[str, Sequence[FusedTime]]
"""Type of tables of measured times, by their names; the first one that has a shape decides."""


def choose_method(
    tables: FusedTimes,
    op: str,
    world_size: int,
    sizes: tuple[int, ...],
    *,
    ways: Sequence[str] = (FUSED, UNFUSED),
    element_bytes: int | None = None,
    captured: bool = False,
    device_type: str = "cuda",
    guesses: bool = True,
) -> Selection[Method]:
    """Choose the method by the nearest measured shape. Deterministic: equal arguments give the same on all ranks.

    Args:
        tables: tables by name, in order; the first one that has a shape like this one decides.
        op: name of the operator.
        world_size: number of ranks.
        sizes: sizes of the call.
        ways: names of the legal methods of the call, fused first.
        element_bytes: size of an element of the call in bytes; None for any.
        captured: the call is in a graph.
        device_type: type of the device; on CPU ranks a call without measurements takes the first of ``ways``, for
            tests.
        guesses: without a measured time the heuristic decides; else the call is unfused, whether it may be or not.

    >>> times = {"fused": 20.0, "unfused": 15.0, "split/4": 12.0}
    >>> rows = (FusedTime("all_to_all_gemm", 2, False, (64, 64, 64), 2, times),)
    >>> str(choose_method({"own": rows}, "all_to_all_gemm", 2, (64, 100, 64)))
    'unfused: 15 us expected, next fused 20 us; measured at 64, 64, 64, eager, own'
    >>> choose_method({"own": rows}, "all_to_all_gemm", 2, (64, 100, 64), ways=(FUSED, SPLIT, UNFUSED)).candidate.pieces
    4
    >>> choose_method({"own": rows}, "all_reduce_rms_norm", 2, (64, 64)).reason
    'rule of thumb: no time of a shape like 64, 64 (sidelane fused --keep measures)'
    """
    for where, measured in tables.items():
        time = _nearest(measured, op, world_size, sizes, element_bytes, captured)
        known = () if time is None else ((Method.parse(text), us) for text, us in time.times.items())
        legal = sorted((ways.index(method.name), method.pieces, us) for method, us in known if method.name in ways)
        if time is not None and legal:
            expected = ((Method(ways[number], pieces), us) for number, pieces, us in legal)
            launch = "in a graph" if time.captured else "eager"
            return select(expected, basis=f"measured at {_shape(time.sizes)}, {launch}, {where}")
    unknown = f"no time of a shape like {_shape(sizes)} (sidelane fused --keep measures)"
    if not guesses:
        return Selection(Method(UNFUSED), f"kernels of fused operators have never run on such GPUs; {unknown}")
    basis = f"rule of thumb: {unknown}"
    guess = None
    if device_type != CPU:
        guess = expected_us(op, world_size, sizes, element_bytes or 2, captured=captured)
    if guess is None:
        return Selection(Method(ways[0]), basis)
    return select(((Method(way), us) for way, us in guess.items() if way in ways), basis=basis)


def _shape(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _nearest(
    times: Iterable[FusedTime],
    op: str,
    world_size: int,
    sizes: tuple[int, ...],
    element_bytes: int | None,
    captured: bool,
) -> FusedTime | None:
    alike = [
        time
        for time in times
        if (time.op, time.world_size, len(time.sizes)) == (op, world_size, len(sizes))
        and element_bytes in (None, time.element_bytes)
    ]
    alike = [time for time in alike if time.captured == captured] or alike
    distant = [([abs(math.log(a / max(1, b))) for a, b in zip(time.sizes, sizes, strict=True)], time) for time in alike]
    close = [
        (distances, time)
        for distances, time in distant
        if max(distances) <= math.log(FARTHEST)
        and (op != GEMV or (time.sizes[2] == 1) == (sizes[2] == 1))  # several tokens are dots, in other tiles
    ]
    nearest = min(close, key=lambda found: (sum(found[0]), found[1].sizes))[1] if close else None
    return nearest if nearest is None or op != GEMV else _interpolated(nearest, [time for _, time in close], sizes)


def _interpolated(nearest: FusedTime, close: Sequence[FusedTime], sizes: tuple[int, ...]) -> FusedTime:
    """Return the times of a GEMV between measured ones of as many tokens as the nearest, or beyond the outermost: each
    is scaled by what arithmetic says of both shapes, and their mean is weighted by distance in rows and columns. Rows
    count for the methods that they have; what arithmetic says nothing about stays as in the nearest row. Of several
    tokens a kernel is ahead of the unfused way only if it is so by arithmetic too, and with many rows by a margin.

    >>> known = ((8192, 21.0), (24576, 53.0))
    >>> times = [FusedTime(GEMV, 2, True, (8192, size, 1), 2, {"fused": us}) for size, us in known]
    >>> 36 < _interpolated(times[0], times, (8192, 16384, 1)).times["fused"] < 38
    True
    """

    def expected(at: tuple[int, ...]) -> dict[str, float]:
        found = expected_us(GEMV, nearest.world_size, at, nearest.element_bytes, captured=True)
        assert found is not None
        return found

    here = expected((*sizes[:2], nearest.sizes[2]))
    found = {method: 0.0 if method in here else us for method, us in nearest.times.items()}
    for method in here.keys() & found:
        alike = [time for time in close if time.sizes[2] == nearest.sizes[2] and method in time.times]
        for row, share in _between(sizes[0], sorted({time.sizes[0] for time in alike})):
            same = {time.sizes[1]: time for time in alike if time.sizes[0] == row}
            for column, part in _between(sizes[1], sorted(same)):
                scale = here[method] / expected(same[column].sizes)[method]
                found[method] += share * part * same[column].times[method] * scale
    if sizes[2] > 1 and sizes[:2] != nearest.sizes[:2] and here.keys() <= found.keys():
        found[FUSED] = max(
            found[FUSED] * (GEMV_MARGIN if sizes[0] > GEMV_FEW_ROWS or sizes[2] > GEMV_FEW_TOKENS else 1.0),
            found[UNFUSED] * here[FUSED] / here[UNFUSED],
        )
    return dataclasses.replace(nearest, times={method: round(us, 2) for method, us in found.items()})


def _between(size: int, known: Sequence[int]) -> list[tuple[int, float]]:
    """Return the known sizes on both sides of one, with their shares in it; the first or last one alone beyond it."""
    low, high = (
        max((one for one in known if one <= size), default=known[0]),
        min((one for one in known if one >= size), default=known[-1]),
    )
    share = 0.0 if low == high else (size - low) / (high - low)
    return [(low, 1 - share), (high, share)] if share else [(low, 1.0)]


def gemv_rate(sizes: tuple[int, ...]) -> float:
    """Return the rate of a fused GEMV's stream of weights on an H200, relative to that of all units.

    >>> gemv_rate((8192, 8192, 1)), [round(gemv_rate((rows, 9728, 4)), 2) for rows in (1024, 2048, 2560, 4096)]
    (1.0, [0.32, 0.63, 0.61, 0.97])
    """
    rows, _, tokens = sizes
    tiles = -(-rows // (GEMV_TILE_ROWS if tokens == 1 or rows <= GEMV_FEW_ROWS else 2 * GEMV_TILE_ROWS))
    if tokens == 1:
        return min(1.0, 1.3 * tiles / UNITS)  # a block of one token that is alone on a unit has more than its share
    share = tiles / (-(-tiles // UNITS) * UNITS)
    return share * GEMV_ALONE if tiles <= UNITS else share


def expected_us(
    op: str, world_size: int, sizes: tuple[int, ...], element_bytes: int, *, captured: bool
) -> dict[str, float] | None:
    """Return microseconds by method of the operator, fused first; None for an operator that the heuristic does not
    cover.

    >>> expected_us("gemm_reduce_scatter", 2, (4096, 4096, 8192), 2, captured=False)
    {'split': 453.1, 'unfused': 493.6}
    >>> expected_us("gemm_all_reduce", 2, (64, 4096, 8192), 2, captured=True)["unfused"]
    25.2
    """
    if op not in (GEMV, *ROUTED, *WITHOUT_KERNEL):
        return None
    rows, depth, columns = sizes
    n = world_size
    if op == GEMV:
        stream = rows * depth / n * element_bytes / GEMV_BYTES_PER_US
        found = {"fused": GEMV_US + stream / gemv_rate(sizes), "unfused": GEMV_SUM_US + stream}
        return {way: round(us, 1) for way, us in found.items()}  # C repeats the launches of eager calls
    moved = rows * columns * (n - 1) / n
    if op == "gemm_all_reduce":
        moved *= 2
    elif op == "all_to_all_gemm":
        moved = rows * depth * (n - 1) / n
    elif op == "all_gather_gemm":
        moved = (n - 1) * rows * depth
        rows *= n
    rate = FLOPS_PER_US[4 if element_bytes >= 4 else 2]
    memory = element_bytes * (rows * depth + depth * columns + rows * columns) / MEMORY_BYTES_PER_US
    product = max(2 * rows * depth * columns / rate, memory)
    rounds = max(1.0, -(-rows // TILE[0]) * -(-columns // TILE[1]) / UNITS)
    if op != "all_to_all_gemm":  # its tiles are handed out as programs become free
        rounds = math.ceil(rounds)
    speed = DISPATCH_SPEED if op == "all_to_all_gemm" else TILE_SPEED
    in_tiles = max(rounds * 2 * TILE[0] * TILE[1] * depth / (rate * speed / UNITS), memory)
    beside = moved * element_bytes / LINK_BYTES_PER_US
    parts = PIECES * (n - 1)
    in_parts = max(product / SPLIT_SPEED, (parts + 1) * depth * columns * element_bytes / MEMORY_BYTES_PER_US)
    last = beside / max(1, parts) + CALL_US + PART_US * parts
    found = {
        "fused": max(in_tiles, beside),
        "split": max(in_parts, beside) + last,
        "unfused": product + beside + CALL_US,
    }
    if op == "gemm_all_reduce":
        found["split"] = product + (1 - HIDDEN) * beside + ROW_PART_US * (ROW_PARTS - 1)
    if op in WITHOUT_KERNEL:
        del found["fused"]
    return {way: round(us if captured else max(us, EAGER_US[way]), 1) for way, us in found.items()}
