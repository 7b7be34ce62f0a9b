"""From an episode to its steps: the same on every rank, drawn as they go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from sidelane.choice import Abilities
from sidelane.program.ir import RENEWAL_CALLS
from sidelane_lab.soak.described import Call, Form
from sidelane_lab.soak.drawing import Drawing
from sidelane_lab.soak.episode import Episode
from sidelane_lab.soak.mistakes import MISTAKES
from sidelane_lab.soak.steps import (
    Allocate,
    Barrier,
    Capture,
    Differ,
    Finish,
    Fire,
    Fork,
    Freeze,
    Once,
    Open,
    Overlap,
    Pause,
    Prepare,
    Refuse,
    Replay,
    Shut,
    Step,
    Stream,
    calls_in,
)

MOST_KNOWN, MOST_COMMUNICATORS, MOST_HANDLES, MOST_GRAPHS, MOST_CAPTURES, MOST_BLOCKS = 48, 3, 3, 4, 24, 12


class _Channel:
    """What the plan knows of a communicator."""

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
        episode: whose.
        abilities: of its communicators, the same on all ranks; asked when the first has been made.
        lane: which of its threads it is for; None for the only one.
    """

    def __init__(self, episode: Episode, abilities: Callable[[], Abilities], lane: int | None = None) -> None:
        self._episode, self._abilities = episode, abilities
        self._draw = random.Random(f"sidelane soak {episode.seed} {episode.number} steps {lane}")
        self._numbers, self._names = itertools.count(1), itertools.count()
        self._channels: dict[int, _Channel] = {}
        self._in_window = False
        on_cpu = episode.setting.on_cpu
        everyone = lane is None
        self._table: list[tuple[float, Callable[[_Channel], Step | None]]] = [
            (70.0, self._known),
            (5.0 if on_cpu and episode.world_size <= 4 else 2.0 if on_cpu else 3.0, self._new),
            (2.0, self._overlap),
            (2.0, self._barrier),
            (0.2, self._allocate),
            (0.4, self._prepare),
            (5.0, self._fire),
            (0.15, self._finish),
            (1.5, self._refuse),
            (0.6, self._differ),
            (1.0, self._pause),
            *([(0.2, self._shut), (0.3, self._open)] * everyone),
            *([(0.02, self._freeze)] * everyone),
            *([(0.03, self._fork)] * (everyone and on_cpu)),
            # While one thread captures, the others may not do whatever they like.
            *([(0.4, self._capture), (7.0, self._replay), (1.0, self._stream)] * (everyone and not on_cpu)),
        ]
        # What allocates or closes is on its own in the end: the rest is what hits a rank at any time.
        self._last: list[tuple[float, Callable[[_Channel], Step | None]]] = [
            (70.0, self._known),
            (8.0, self._new),
            (6.0, self._overlap),
            (3.0, self._barrier),
            (2.0, self._allocate),
            (6.0, self._fire),
            *([] if on_cpu else [(6.0, self._replay)]),
        ]

    def beginning(self) -> Iterator[Step]:
        """The first communicator."""
        yield self._opened(0)

    def body(self) -> Iterator[Step]:
        """What lies between the beginning and the end: at least as many calls as the episode has."""
        made = 0
        share = self._episode.lanes or 1
        while made < self._episode.calls // share:
            step = self._drawn(self._table, self._any_channel())
            made += calls_in(step)
            yield step

    def window(self) -> Iterator[Step]:
        """Calls of the first communicator, which all ranks are in, without an end."""
        self._in_window = True
        self._channels = {0: self._channels[0]}  # who fails in another one names who failed in this one
        while True:
            yield self._drawn(self._last, self._channels[0])

    def opening(self) -> Open:
        """One more communicator of all ranks."""
        return Open(1000, 0, 64 << 10)

    def another(self) -> tuple[Step, Step]:
        """Two known calls of different kinds or sizes, each on its own: the culprit makes the second."""
        channel = self._channels[0]
        calls = []
        for dtype in ("float32", "int32"):
            call = channel.drawing.call(Form.ONE)
            while call.parts[0].dtype != dtype or call.parts[0].count < 2 or call.parts[0].splits:
                call = channel.drawing.call(Form.ONE)
            calls.append(call)
        first, second = (Once(0, call, self._key()) for call in calls)
        return first, second

    def _drawn(self, table: list[tuple[float, Callable[[_Channel], Step | None]]], channel: _Channel) -> Step:
        makers = [make for _, make in table]
        make = self._draw.choices(makers, [weight for weight, _ in table])[0]
        return make(channel) or self._known(channel)

    def _any_channel(self) -> _Channel:
        if len(self._channels) == 1 or self._draw.random() < 0.6:
            return self._channels[0]
        return self._draw.choice(list(self._channels.values()))

    def _key(self) -> int:
        return self._draw.getrandbits(62)

    def _opened(self, group: int) -> Open:
        number, members = next(self._names), self._episode.groups[group]
        on_cpu = self._episode.setting.on_cpu
        nbytes = self._draw.choice((192 << 10, 192 << 10, 1 << 20) if on_cpu else (1 << 20, 16 << 20))
        large = 3 << 20 if on_cpu else 12 << 20
        drawing = Drawing(self._draw, self._numbers, len(members), self._abilities, nbytes, large)
        is_lane = bool(number) and not group and self._draw.random() < 0.5
        self._channels[number] = _Channel(number, members, drawing, is_lane=is_lane)
        late = self._draw.random() < 0.1
        first = RENEWAL_CALLS * self._draw.choice((1, 31, 32, 33, 64)) - self._draw.randrange(2, 200) if late else 0
        return Open(number, group, nbytes, first, is_lane)

    def _open(self, _: _Channel) -> Step | None:
        if len(self._channels) >= MOST_COMMUNICATORS:
            return None
        return self._opened(self._draw.randrange(len(self._episode.groups)))

    def _shut(self, channel: _Channel) -> Step | None:
        if not channel.number:
            return None
        del self._channels[channel.number]
        return Shut(channel.number)

    def _known(self, channel: _Channel) -> Step:
        if len(channel.known) < 4:
            return self._new(channel)
        in_turn = not self._in_window and self._draw.random() < 0.005
        return Once(channel.number, self._draw.choice(channel.known), self._key(), in_turn)

    def _new(self, channel: _Channel) -> Step:
        call = channel.drawing.call()
        if len(channel.known) >= MOST_KNOWN:
            channel.known[self._draw.randrange(MOST_KNOWN)] = call
        else:
            channel.known.append(call)
        return Once(channel.number, call, self._key())

    def _overlap(self, channel: _Channel) -> Step | None:
        chosen: list[Call] = []
        for _ in range(self._draw.randrange(2, 7)):
            call = self._draw.choice(channel.known) if channel.known else None
            if call is not None and not any(call.overlaps(other) for other in chosen):
                chosen.append(call)
        if not chosen:
            return None
        return Overlap(channel.number, tuple((call, self._key()) for call in chosen), self._draw.random() < 0.4)

    def _barrier(self, channel: _Channel) -> Step:
        return Barrier(channel.number, synchronize=self._draw.random() < 0.3)

    def _allocate(self, channel: _Channel) -> Step | None:
        if channel.blocks >= MOST_BLOCKS:
            return None
        channel.blocks += 1
        nbytes = self._draw.choice((1, self._draw.randrange(1, 1000), self._draw.randrange(1000, 60_000)))
        channel.drawing.add_block(nbytes)
        return Allocate(channel.number, nbytes)

    def _prepare(self, channel: _Channel) -> Step | None:
        if len(channel.handles) >= MOST_HANDLES:
            return None
        number, host = next(self._names), self._draw.random() < 0.5
        call = channel.drawing.held()
        channel.handles[number] = (call, host)
        return Prepare(channel.number, number, call, host)

    def _fire(self, channel: _Channel) -> Step | None:
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
            other = (another.number, draw.choice(another.known), self._key())
        from_host, early = host and draw.random() < 0.6, draw.random() < 0.3
        return Fire(channel.number, number, call, self._key(), from_host, early, draw.random() < 0.1, other)

    def _finish(self, channel: _Channel) -> Step | None:
        if not channel.handles:
            return None
        number = self._draw.choice(list(channel.handles))
        call, _ = channel.handles.pop(number)
        return Finish(channel.number, number, call, self._key(), armed=self._draw.random() < 0.4)

    def _refuse(self, channel: _Channel) -> Step | None:
        draw, n = self._draw, len(channel.members)
        others = [
            each.number
            for each in self._channels.values()
            if each is not channel
            and set(each.members) >= set(channel.members)
            and not (each.is_lane and channel.is_lane)  # who share memory
        ]
        names = [name for name, mistake in MISTAKES.items() if others or not mistake.needs_other]
        name = draw.choice(names)
        mistake = MISTAKES[name]
        call = channel.drawing.unheard(draw.choice(mistake.kinds), mistake.dtype)
        if call is None:
            return None
        culprit = draw.randrange(n) if mistake.alone and draw.random() < 0.6 else None
        if culprit is not None and mistake.on_root:
            culprit = call.parts[0].root
        other = draw.choice(others) if others else None
        return Refuse(channel.number, name, culprit, call, self._key(), other)

    def _differ(self, channel: _Channel) -> Step | None:
        draw, n = self._draw, len(channel.members)
        kinds = MISTAKES["strided"].kinds
        calls = [channel.drawing.unheard(draw.choice(kinds)) for _ in range(2)]
        if n == 1 or calls[0] is None or calls[1] is None:
            return None
        return Differ(channel.number, draw.randrange(n), calls[0], calls[1], self._key())

    def _pause(self, _: _Channel) -> Step:
        draw = self._draw
        longest = 0.3 if draw.random() < 0.02 else 0.02
        on_stream = not self._episode.setting.on_cpu and draw.random() < 0.8
        return Pause(draw.randrange(self._episode.world_size), longest * draw.random() ** 2, on_stream)

    def _freeze(self, _: _Channel) -> Step:
        return Freeze(self._draw.randrange(self._episode.world_size), 0.05 + 0.3 * self._draw.random())

    def _fork(self, channel: _Channel) -> Step:
        how = self._draw.choice(("ends", "closes", "calls"))
        return Fork(channel.members[0], channel.number, how)

    def _capture(self, channel: _Channel) -> Step | None:
        if channel.captures >= MOST_CAPTURES:
            return None
        channel.captures += 1
        calls: list[Call] = []
        for _ in range(self._draw.randrange(1, 5)):
            call = channel.drawing.captured()
            if not any(call.overlaps(other) for other in calls):
                calls.append(call)
        if len(channel.graphs) >= MOST_GRAPHS:
            del channel.graphs[next(iter(channel.graphs))]
        number = next(self._names)
        channel.graphs[number] = tuple(calls)
        return Capture(channel.number, number, tuple(calls), self._key())

    def _replay(self, channel: _Channel) -> Step | None:
        if not channel.graphs:
            return None
        number = self._draw.choice(list(channel.graphs))
        keys = tuple(self._key() for _ in range(self._draw.choice((1, 2, 5, 12))))
        return Replay(channel.number, number, channel.graphs[number], keys)

    def _stream(self, _: _Channel) -> Step:
        return Stream(self._draw.randrange(3))
