"""Choice of a method for a fused operator: fused, split into parts for copy engines, or unfused; and of the order in
which a fused one computes.

The choice goes by measurements on this machine, else on one like it, else by a heuristic. ``choice.store.fused_times``
reads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sidelane.choice.fused_heuristic import ORDERS, expected_order, expected_us
from sidelane.choice.key import CPU
from sidelane.choice.selection import Selection, select
from sidelane.user_files import MOST_RANKS, flag_in, text_in, whole_in

FUSED, SPLIT, UNFUSED = "fused", "split", "unfused"
ORDERED = ("embedding_all_to_all",)
"""Names of operators whose order is chosen."""

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
        orders: microseconds of ``fused`` in each order, for an operator in ``ORDERED``.
        experts: number of experts of a rank, by which rows are separated. A file has it if there are several.
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
        for text in self.times:
            Method.parse(text)
        if not set(self.orders) <= set(ORDERS):
            raise ValueError(
                f"orders of a fused operator (value={', '.join(self.orders)}, allowed={', '.join(ORDERS)})"
            )

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object of the file, without fields at their defaults."""
        left_out = {"orders": {}, "experts": 1}
        return {name: value for name, value in dataclasses.asdict(self).items() if value != left_out.get(name)}

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> FusedTime:
        """Read the result of :meth:`to_dict`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: a field is missing, or is not of its kind.
        """
        text_in(row, "op"), flag_in(row, "captured")
        (
            whole_in(row, "world_size", MOST_RANKS),
            whole_in(row, "element_bytes"),
            whole_in({"experts": 1, **row}, "experts"),
        )
        sizes = tuple(whole_in({"sizes": size}, "sizes") for size in row["sizes"])
        return FusedTime(**{**row, "sizes": sizes})


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
    experts: int = 1,
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
        experts: number of experts of a rank; times with several do not apply to one, nor the other way round.
        guesses: without a measured time the heuristic decides; else the call is unfused, whether it may be or not.

    >>> times = {"fused": 20.0, "unfused": 15.0, "split/4": 12.0}
    >>> rows = (FusedTime("all_to_all_gemm", 2, False, (64, 64, 64), 2, times),)
    >>> str(choose_method({"own": rows}, "all_to_all_gemm", 2, (64, 100, 64)))
    'unfused: 15 us expected, next fused 20 us; measured at 64, 64, 64, eager, own'
    >>> choose_method({"own": rows}, "all_to_all_gemm", 2, (64, 100, 64), ways=(FUSED, SPLIT, UNFUSED)).candidate.pieces
    4
    >>> choose_method({"own": rows}, "gemv_all_reduce", 2, (64, 64, 1)).reason
    'rule of thumb: no time of a shape like 64, 64, 1 (sidelane fused --keep measures)'
    """
    for where, measured in tables.items():
        time = _nearest(measured, op, world_size, sizes, element_bytes, captured, experts)
        known = () if time is None else ((Method.parse(text), us) for text, us in time.times.items())
        legal = sorted((ways.index(method.name), method.pieces, us) for method, us in known if method.name in ways)
        if time is not None and legal:
            expected = ((Method(ways[number], pieces), us) for number, pieces, us in legal)
            return select(expected, basis=_basis(time, where))
    unknown = f"no time of a shape like {_shape(sizes, experts)} (sidelane fused --keep measures)"
    if not guesses:
        return Selection(Method(UNFUSED), f"kernels of fused operators have never run on such GPUs; {unknown}")
    basis = f"rule of thumb: {unknown}"
    guess = None
    if device_type != CPU:
        guess = expected_us(op, world_size, sizes, element_bytes or 2, captured=captured, experts=experts)
    if guess is None:
        return Selection(Method(ways[0]), basis)
    return select(((Method(way), us) for way, us in guess.items() if way in ways), basis=basis)


def choose_order(
    tables: FusedTimes,
    op: str,
    world_size: int,
    sizes: tuple[int, ...],
    *,
    element_bytes: int | None = None,
) -> Selection[str]:
    """Choose the order by the nearest measured shape, for all launches by times in graphs, which exclude the host's.

    Arguments are those of :func:`choose_method`; ``op`` is one of ``ORDERED``.

    >>> times = {"remote_first": 20.0, "oblivious": 15.0}
    >>> time = FusedTime("embedding_all_to_all", 2, True, (64, 64, 64), 2, {"fused": 15.0}, times)
    >>> str(choose_order({"own": [time]}, "embedding_all_to_all", 2, (64, 64, 64)))
    'oblivious: 15 us expected, next remote_first 20 us; measured at 64, 64, 64, in a graph, own'
    >>> choose_order({}, "embedding_all_to_all", 2, (64, 64, 2)).candidate
    'remote_first'
    """
    for where, measured in tables.items():
        known = [time for time in measured if time.orders]
        time = _nearest(known, op, world_size, sizes, element_bytes, captured=True)
        if time is not None:
            expected = ((order, time.orders[order]) for order in ORDERS if order in time.orders)
            return select(expected, basis=_basis(time, where))
    order, why = expected_order(world_size, sizes[-1])
    return Selection(order, f"rule of thumb: {why}")


def _basis(time: FusedTime, where: str) -> str:
    shape = _shape(time.sizes, time.experts)
    return f"measured at {shape}, {'in a graph' if time.captured else 'eager'}, {where}"


def _shape(sizes: tuple[int, ...], experts: int) -> str:
    """Return a shape in words.

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
