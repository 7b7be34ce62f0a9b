"""From an episode to its steps: the same on every rank, drawn as they go."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from sidelane.choice import Abilities
from soak.calls import Call
from soak.drawing import Drawing
from soak.episode import MADE_UP, SIZED, Episode
from soak.mistakes import MISTAKES

MOST_KNOWN, MOST_COMMUNICATORS, MOST_HANDLES, MOST_GRAPHS, MOST_CAPTURES, MOST_BLOCKS = 48, 3, 3, 4, 24, 12

GROUPED = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "objects")
"""Calls of process groups, by their names in torch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One thing that all ranks do.

    Attributes:
        name: the method of ``Caller`` or ``Actor`` that does it.
        comm: number of the communicator that it concerns.
        given: the method's arguments.
        calls: calls that are made and checked; those that are refused do not count.
    """

    name: str
    comm: int
    given: dict[str, Any]
    calls: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name} on communicator {self.comm}: {', '.join(f'{key} {each}' for key, each in self.given.items())}"
        )


Maker = Callable[["Channel"], Step | None]


class Channel:
    """A communicator as the plan knows it."""

    def __init__(self, number: int, members: tuple[int, ...], drawing: Drawing, *, is_lane: bool) -> None:
        self.number, self.members, self.drawing = number, members, drawing
        self.is_lane = is_lane or not number
        self.known: list[Call] = []
        self.handles: dict[int, tuple[Call, bool]] = {}
        self.graphs: dict[int, tuple[Call, ...]] = {}
        self.captures = self.blocks = 0


class Plan:
    """The steps of an episode.

    Args:
        episode: says how many, for which ranks.
        abilities: returns those of its communicators, the same on all ranks, when the first has been made.
    """

    def __init__(self, episode: Episode, abilities: Callable[[], Abilities]) -> None:
        self._episode, self._abilities = episode, abilities
        self._draw = random.Random(f"sidelane soak {episode.seed} {episode.number} steps")
        self._numbers, self._names, self._sizes = itertools.count(1), itertools.count(), itertools.count(100)
        self._channels: dict[int, Channel] = {}
        on_cpu = episode.setting.on_cpu
        prepares = episode.kind != MADE_UP  # its calls have ended when they return
        self._table: list[tuple[float, Maker]] = [
            (70.0, self._known),
            (5.0 if on_cpu and episode.world_size <= 4 else 2.0 if on_cpu else 3.0, self._new),
            (90.0 if episode.kind == SIZED else 2.0, self._never_again),
            *([(4.0, self._grouped)] if on_cpu and prepares else []),
            (2.0, self._barrier),
            (0.2, self._allocate),
            *(
                [(2.0, self._overlap), (0.4, self._prepare), (5.0, self._fire), (0.15, self._finish)]
                if prepares
                else []
            ),
            (1.5, self._refuse),
            (0.6, self._differ),
            (1.0, self._pause),
            (0.03, self._late),
            (0.2, self._shut),
            (0.3, self._open),
            (0.03, self._freeze),
            *([] if on_cpu else [(0.4, self._capture), (7.0, self._replay), (1.0, self._stream)]),
        ]
        # Steps that allocate or close are on their own in the end: the rest is what a fault hits at any time.
        self._last: list[tuple[float, Maker]] = [
            (70.0, self._known),
            (8.0, self._new),
            (3.0, self._barrier),
            (2.0, self._allocate),
            *([(6.0, self._overlap), (6.0, self._fire)] if prepares else []),
            *([] if on_cpu else [(6.0, self._replay)]),
        ]

    def beginning(self) -> Iterator[Step]:
        """Draw the first communicator."""
        yield self._opened(0)

    def body(self) -> Iterator[Step]:
        """Draw what lies between the beginning and the end: at least as many calls as the episode has."""
        made = 0
        while made < self._episode.calls:
            step = self._drawn(self._table, self._any_channel())
            made += step.calls
            yield step

    def window(self) -> Iterator[Step]:
        """Draw calls of the first communicator, which all ranks are in, without an end."""
        self._channels = {0: self._channels[0]}  # who fails in another one names who failed in this one
        while True:
            yield self._drawn(self._last, self._channels[0])

    def _drawn(self, table: list[tuple[float, Maker]], channel: Channel) -> Step:
        makers = [make for _, make in table]
        make = self._draw.choices(makers, [weight for weight, _ in table])[0]
        return make(channel) or self._known(channel)

    def _any_channel(self) -> Channel:
        if len(self._channels) == 1 or self._draw.random() < 0.6:
            return self._channels[0]
        return self._draw.choice(list(self._channels.values()))

    def _key(self) -> int:
        return self._draw.getrandbits(62)

    def _opened(self, group: int) -> Step:
        number, members = next(self._names), self._episode.groups[group]
        on_cpu = self._episode.setting.on_cpu
        nbytes = self._draw.choice((192 << 10, 192 << 10, 1 << 20) if on_cpu else (1 << 20, 16 << 20))
        large = 3 << 20 if on_cpu else 12 << 20
        # The made-up driver adds up these only.
        reduced = {"reduced": ("int32",), "operations": ("sum",)} if self._episode.kind == MADE_UP else {}
        drawing = Drawing(self._draw, self._numbers, len(members), self._abilities, nbytes, large, **reduced)
        is_lane = bool(number) and not group and self._draw.random() < 0.5
        self._channels[number] = Channel(number, members, drawing, is_lane=is_lane)
        late = (self._draw.choice(members), self._late_s()) if self._draw.random() < 0.2 else None
        return Step("open", number, {"group": group, "block_bytes": nbytes, "is_lane": is_lane, "late": late})

    def _late_s(self) -> float:
        return 0.5 + 2.5 * self._draw.random() ** 2

    def _open(self, _: Channel) -> Step | None:
        if len(self._channels) >= MOST_COMMUNICATORS:
            return None
        return self._opened(self._draw.randrange(len(self._episode.groups)))

    def _shut(self, channel: Channel) -> Step | None:
        if not channel.number:
            return None
        del self._channels[channel.number]
        return Step("shut", channel.number, {})

    def _once(self, channel: Channel, call: Call) -> Step:
        return Step("once", channel.number, {"call": call, "key": self._key()}, calls=1)

    def _known(self, channel: Channel) -> Step:
        if len(channel.known) < 4:
            return self._new(channel)
        return self._once(channel, self._draw.choice(channel.known))

    def _new(self, channel: Channel) -> Step:
        call = channel.drawing.call()
        if len(channel.known) >= MOST_KNOWN:
            channel.known[self._draw.randrange(MOST_KNOWN)] = call
        else:
            channel.known.append(call)
        return self._once(channel, call)

    def _never_again(self, channel: Channel) -> Step:
        return self._once(channel, channel.drawing.never_again())

    def _overlap(self, channel: Channel) -> Step | None:
        chosen: list[Call] = []
        for _ in range(self._draw.randrange(2, 7)):
            call = self._draw.choice(channel.known) if channel.known else None
            if call is not None and not any(call.overlaps(other) for other in chosen):
                chosen.append(call)
        if not chosen:
            return None
        given = {"calls": [(call, self._key()) for call in chosen], "ends_blocking": self._draw.random() < 0.4}
        return Step("overlap", channel.number, given, len(chosen))

    def _barrier(self, channel: Channel) -> Step:
        synchronize = self._draw.random() < 0.3
        return Step("barrier", channel.number, {"synchronize": synchronize}, int(not synchronize))

    def _allocate(self, channel: Channel) -> Step | None:
        if channel.blocks >= MOST_BLOCKS:
            return None
        channel.blocks += 1
        nbytes = self._draw.choice((1, self._draw.randrange(1, 1000), self._draw.randrange(1000, 60_000)))
        channel.drawing.add_block(nbytes)
        return Step("allocate", channel.number, {"nbytes": nbytes})

    def _prepare(self, channel: Channel) -> Step | None:
        if len(channel.handles) >= MOST_HANDLES:
            return None
        number, host = next(self._names), self._draw.random() < 0.5
        call = channel.drawing.prepared()
        channel.handles[number] = (call, host)
        return Step("prepare", channel.number, {"handle": number, "call": call, "host_trigger": host})

    def _fire(self, channel: Channel) -> Step | None:
        if not channel.handles:
            return None
        draw = self._draw
        number = draw.choice(list(channel.handles))
        call, host = channel.handles[number]
        # A call that is new may wait for the device of a GPU, and so for the trigger.
        others = [each for each in self._channels.values() if each is not channel and each.known]
        other = None
        if others and self._episode.setting.on_cpu and draw.random() < 0.2:
            another = draw.choice(others)
            other = self._once(another, draw.choice(another.known))
        given = {
            "handle": number,
            "call": call,
            "key": self._key(),
            "from_host": host and draw.random() < 0.6,
            "early": draw.random() < 0.3,
            "misused": draw.random() < 0.1,
        }
        return Step("fire", channel.number, {**given, "other": other}, 1 if other is None else 2)

    def _finish(self, channel: Channel) -> Step | None:
        if not channel.handles:
            return None
        number = self._draw.choice(list(channel.handles))
        call, _ = channel.handles.pop(number)
        given = {"handle": number, "call": call, "key": self._key(), "armed": self._draw.random() < 0.4}
        return Step("finish", channel.number, given)

    def _refuse(self, channel: Channel) -> Step | None:
        draw, n = self._draw, len(channel.members)
        others = [
            each.number
            for each in self._channels.values()
            if each is not channel
            and set(each.members) >= set(channel.members)
            and not (each.is_lane and channel.is_lane)  # who share memory
        ]
        name = draw.choice([name for name, mistake in MISTAKES.items() if others or not mistake.needs_other])
        call = channel.drawing.unheard(draw.choice(MISTAKES[name].kinds))
        if call is None:
            return None
        culprit = draw.randrange(n) if draw.random() < 0.6 else None
        if culprit is not None and MISTAKES[name].on_root:
            culprit = call.parts[0].root
        other = draw.choice(others) if others else None
        given = {"mistake": name, "culprit": culprit, "call": call, "key": self._key(), "other": other}
        return Step("refuse", channel.number, given)

    def _differ(self, channel: Channel) -> Step | None:
        draw, n = self._draw, len(channel.members)
        call, another = (channel.drawing.unheard(draw.choice(MISTAKES["strided"].kinds)) for _ in range(2))
        if n == 1 or call is None or another is None:
            return None
        given = {"culprit": draw.randrange(n), "call": call, "another": another, "key": self._key()}
        return Step("differ", channel.number, given)

    def _pause(self, _: Channel) -> Step:
        draw = self._draw
        seconds = (0.3 if draw.random() < 0.02 else 0.02) * draw.random() ** 2
        on_stream = not self._episode.setting.on_cpu and draw.random() < 0.8
        rank = draw.randrange(self._episode.world_size)
        return Step("pause", 0, {"rank": rank, "seconds": seconds, "on_stream": on_stream})

    def _late(self, _: Channel) -> Step:
        """A rank comes seconds late to the next call, which its peers make."""
        rank = self._draw.randrange(self._episode.world_size)
        return Step("late", 0, {"rank": rank, "seconds": self._late_s()})

    def _grouped(self, _: Channel) -> Step:
        """A call of the process group of all ranks."""
        draw = self._draw
        size = 1 + draw.randrange(12) if draw.random() < 0.5 else next(self._sizes)
        root = draw.randrange(self._episode.world_size)
        return Step(
            "grouped", 0, {"name": draw.choice(GROUPED), "size": size, "root": root, "key": draw.randrange(99)}, 1
        )

    def _freeze(self, _: Channel) -> Step:
        seconds = 0.05 + 0.3 * self._draw.random()
        return Step("freeze", 0, {"rank": self._draw.randrange(self._episode.world_size), "seconds": seconds})

    def _capture(self, channel: Channel) -> Step | None:
        if channel.captures >= MOST_CAPTURES:
            return None
        channel.captures += 1
        calls: list[Call] = []
        for _ in range(self._draw.randrange(1, 5)):
            call = channel.drawing.captured()
            if not any(call.overlaps(other) for other in calls):
                calls.append(call)
        gone = next(iter(channel.graphs)) if len(channel.graphs) >= MOST_GRAPHS else None
        if gone is not None:
            del channel.graphs[gone]
        number = next(self._names)
        channel.graphs[number] = tuple(calls)
        given = {"graph": number, "calls": calls, "key": self._key(), "gone": gone}
        return Step("capture", channel.number, given, len(calls))

    def _replay(self, channel: Channel) -> Step | None:
        if not channel.graphs:
            return None
        number = self._draw.choice(list(channel.graphs))
        keys = [self._key() for _ in range(self._draw.choice((1, 2, 5, 12)))]
        return Step("replay", channel.number, {"graph": number, "keys": keys}, len(channel.graphs[number]) * len(keys))

    def _stream(self, _: Channel) -> Step:
        return Step("stream", 0, {"number": self._draw.randrange(3)})
