"""What a storm is, and the calls that it makes: the same on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from sidelane.collectives.plan import AUTO
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.soak.described import Call, Form, Part, Spot
from sidelane_lab.soak.drawing import IN_PLACE, ITEM_BYTES, LISTED, MOVED

MODES: Mapping[str, bool | Literal["learn"]] = MappingProxyType({"off": False, "learn": "learn", "always": True})
"""Values of ``Config.map_memory``, by what ``--map-memory`` calls them."""

REDUCED, OPS = ("float32", "bfloat16", "int32"), ("sum", "max")
"""Of calls that reduce. A kernel is compiled for each of these, and that is not what a storm looks for."""

ALIKE = 4
"""Slots of one signature, as layers of a model have it."""

SLOT_BYTES = (1 << 20, 9 << 17)
"""From rank to rank, of tensors that come again: enough for ranks to learn from (``reaching.LEAST_BYTES``)."""

SIZES = ((0.55, 1, 4 << 10), (0.3, 4 << 10, 256 << 10), (0.12, 256 << 10, 2 << 20), (0.03, 8 << 20, 12 << 20))
"""Of tensors that are new: how often, from and to how many bytes from rank to rank. Memory of GPUs that is smaller than
a megabyte, that is smaller than ten, and larger lies in segments of three kinds."""

SHAPES, NEW_SHAPE = 24, 0.05
"""Calls of a season that come again on other tensors, and the share of those that no call was like before: to plan one
and prove it takes as long as hundreds of calls."""

CAPTURED_SHAPES = 6
"""Calls of a season that are captured, in graphs of one to three; and as many that fit into a pool."""

CAPTURED_BYTES = 64 << 10
"""From rank to rank, of those that fit."""

MOST_REDUCED_BYTES = 2 << 20
"""Of calls that reduce, for the sake of the numbers that go in, which are drawn on the host."""

CPU_MOST_BYTES = 1 << 18
"""The largest of them on CPU ranks, where bytes take time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Storm:
    """A part of a storm.

    Attributes:
        steps: calls to make, and check.
        map_memory: one of ``MODES``.
        expandable: torch's allocator makes expandable segments. GPUs only.
    """

    steps: int
    map_memory: str
    expandable: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"map_memory {self.map_memory}" + (", expandable segments" if self.expandable else "")


class StormDrawing:
    """Draws the calls of a storm.

    Args:
        draw: the storm's; the same on every rank.
        numbers: of its calls.
        world_size: ranks.
        on_cpu: the ranks are CPU ranks.
    """

    def __init__(self, draw: random.Random, numbers: Iterator[int], world_size: int, *, on_cpu: bool) -> None:
        self._draw, self._numbers, self._n, self._on_cpu = draw, numbers, world_size, on_cpu
        self._shapes: list[Call] = []
        self._captured: dict[bool, list[Call]] = {True: [], False: []}

    def slots(self) -> list[Call]:
        """Calls whose tensors come again: a model of layers that are alike, and one of each kind. Begins a season."""
        self._shapes.clear()
        for shapes in self._captured.values():
            shapes.clear()
        layer = self._part(Kind.ALL_GATHER, self._slot_bytes())
        found = [self._call(Form.ONE, (layer,), "b2b") for _ in range(ALIKE)]
        found += [self._call(Form.ONE, (self._part(kind, self._slot_bytes()),), self._variant(0.7)) for kind in Kind]
        gathered = tuple(self._part(Kind.ALL_GATHER, size) for size in (self._slot_bytes(), 1000, self._slot_bytes()))
        found.append(self._call(Form.LIST, gathered, "b2b"))
        self._draw.shuffle(found)
        return found

    def fresh(self) -> Call:
        """One on tensors that no call had before."""
        if len(self._shapes) < SHAPES or self._draw.random() < NEW_SHAPE:
            self._shapes.append(self._new())
            return self._shapes[-1]
        return self._draw.choice(self._shapes)

    def captured(self, *, fits: bool) -> tuple[Call, ...]:
        """Those of a graph. ``fits``: into a pool."""
        shapes, count = self._captured[fits], self._draw.choice((1, 1, 2, 3))
        while len(shapes) < CAPTURED_SHAPES:
            most = CAPTURED_BYTES if fits else None
            shapes.append(self._list(most) if self._draw.random() < 0.25 else self._one(most))
        return tuple(self._draw.sample(shapes, count))

    def _new(self) -> Call:
        draw = self._draw
        if draw.random() < 0.15:
            return self._list()
        if draw.random() < 0.08:
            return self._call(Form.ONE, (self._uneven(),), AUTO)
        return self._one()

    def _one(self, most: int | None = None) -> Call:
        part = self._part(self._draw.choice(tuple(Kind)), self._fresh_bytes(most))
        return self._call(Form.ONE, (part,), self._variant(0.2))

    def _list(self, most: int | None = None) -> Call:
        draw = self._draw
        kind, op, root = draw.choice(LISTED), draw.choice(OPS), draw.randrange(self._n)
        count = draw.choice((1, 2, 3, 5))
        parts = tuple(self._part(kind, self._fresh_bytes(most), op=op, root=root) for _ in range(count))
        return self._call(Form.LIST, parts, self._variant(0.2))

    def _call(self, form: Form, parts: tuple[Part, ...], variant: str) -> Call:
        return Call(next(self._numbers), form, parts, variant)

    def _variant(self, share: float) -> str:
        return "b2b" if self._draw.random() < share else AUTO

    def _slot_bytes(self) -> int:
        return self._draw.randrange(*SLOT_BYTES)

    def _fresh_bytes(self, most: int | None = None) -> int:
        draw = self._draw
        _, begin, end = draw.choices(SIZES, [share for share, _, _ in SIZES])[0]
        nbytes = draw.randrange(begin, end)
        nbytes = nbytes % CPU_MOST_BYTES if self._on_cpu else nbytes
        return nbytes if most is None else nbytes % most

    def _part(self, kind: Kind, nbytes: int, *, op: str = "", root: int | None = None) -> Part:
        draw = self._draw
        dtype = draw.choice(REDUCED if kind in REDUCING else MOVED)
        nbytes = min(nbytes, MOST_REDUCED_BYTES) if kind in REDUCING else nbytes
        count = -(-nbytes // ITEM_BYTES[dtype])
        in_place = kind is Kind.BROADCAST or (kind in IN_PLACE and draw.random() < 0.35)
        op = (op or draw.choice(OPS)) if kind in REDUCING else ""
        root = draw.randrange(self._n) if root is None else root
        return Part(kind, dtype, count, Spot(), None if in_place else Spot(), op, root, (), draw.choice((1, 1, 2, 3)))

    def _uneven(self) -> Part:
        draw, n = self._draw, self._n
        splits = tuple(tuple(draw.choice((0, 1, 1, 2, 5)) for _ in range(n)) for _ in range(n))
        return Part(Kind.ALL_TO_ALL, draw.choice(MOVED), draw.randrange(1, 4000), Spot(), Spot(), splits=splits)


def parts_of(steps: int, modes: tuple[str, ...], *, on_cpu: bool) -> list[Storm]:
    """A storm of so many steps, split over modes, and over both kinds of segments of GPUs.

    >>> [(part.steps, part.name) for part in parts_of(5, ("learn", "always"), on_cpu=True)]
    [(3, 'map_memory learn'), (2, 'map_memory always')]
    """
    kinds = list(itertools.product(modes, (False,) if on_cpu else (False, True)))
    share, rest = divmod(steps, len(kinds))
    return [Storm(share + (number < rest), mode, expandable) for number, (mode, expandable) in enumerate(kinds)]
