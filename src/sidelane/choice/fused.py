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

GEMV, GEMV_TILE_ROWS = "gemv_all_reduce", 16
"""Name of the operator, and number of rows of a tile for one token; twice as many for several (``ops.gemv``)."""

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

GEMV_US, GEMV_SUM_US, GEMV_BYTES_PER_US = 3.4, 5.0, 4.2e6
"""Microseconds that a fused GEMV takes beside its stream of weights, and those of a product and an all-reduce of its
sums; rate of that stream where blocks fill the GPU (results/h200x2/fused.json)."""

GEMV_SUMS_BYTES_PER_US = 100e3
"""Rate of an all-reduce of few bytes (8192 x 8192, 1 and 16 tokens)."""

ALIKE_FILL = 1.1
"""Largest factor between the shares of a GPU that blocks of two GEMVs fill, for one to say what the other takes."""

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
    alike = [time for time in times if (time.op, time.world_size, len(time.sizes)) == (op, world_size, len(sizes))]
    alike = [time for time in alike if element_bytes in (None, time.element_bytes)]
    alike = [time for time in alike if time.captured == captured] or alike
    distant = [(_distances(time.sizes, sizes), time) for time in alike]
    close = [(distances, time) for distances, time in distant if max(distances) <= math.log(FARTHEST)]
    if op == GEMV:
        close = [(distances, time) for distances, time in close if _are_gemvs_alike(time.sizes, sizes)]
    return min(close, key=lambda found: (sum(found[0]), found[1].sizes))[1] if close else None


def gemv_fill(sizes: tuple[int, ...]) -> float:
    """Return the share of the compute units of an H200 that have a tile of rows of a GEMV.

    >>> gemv_fill((8192, 8192, 1)), round(gemv_fill((2560, 9728, 4)), 2)
    (1.0, 0.61)
    """
    rows, _, tokens = sizes
    return min(1.0, -(-rows // (GEMV_TILE_ROWS if tokens == 1 else 2 * GEMV_TILE_ROWS)) / UNITS)


def _are_gemvs_alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if both are of one token, or both are dots, and they fill about as much of a GPU."""
    fills = gemv_fill(one), gemv_fill(other)
    return (one[2] == 1) == (other[2] == 1) and max(fills) <= ALIKE_FILL * min(fills)


def _distances(one: tuple[int, ...], other: tuple[int, ...]) -> list[float]:
    return [abs(math.log(first / max(1, second))) for first, second in zip(one, other, strict=True)]


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
        sums = GEMV_SUM_US + rows * columns * 2 / GEMV_SUMS_BYTES_PER_US
        found = {"fused": GEMV_US + stream / gemv_fill(sizes), "unfused": stream + sums}
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
