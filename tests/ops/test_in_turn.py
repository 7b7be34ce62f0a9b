"""Uses of an operator's buffers on several streams, with streams that only write down what they are told."""

from __future__ import annotations

import dataclasses

import pytest

from sidelane.ops.handle import BufferLock


@dataclasses.dataclass
class Stream:
    handle: int
    capture: int
    log: list[str]

    def record_event(self) -> str:
        self.log.append(f"{self.handle} recorded")
        return f"end {self.log.count(f'{self.handle} recorded')} of {self.handle}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.handle} waits for {event}")


class World:
    """Streams of a device, of which one is the caller's."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = {handle: Stream(handle, 0, self.log) for handle in (1, 2, 3)}
        self.now = self.streams[1]
        self.turns = BufferLock(
            lambda: (self.now.handle, bool(self.now.capture)),
            lambda place: self.streams[place[0]].capture,
            lambda: self.now,
        )

    def use(self, handle: int) -> list[str]:
        """Use the buffers on a stream. Returns what streams are told for it, with the use itself."""
        begin, self.now = len(self.log), self.streams[handle]
        with self.turns:
            self.log.append(f"{handle} uses")
        return self.log[begin:]

    def capture(self, number: int, *handles: int) -> None:
        for handle in handles:
            self.streams[handle].capture = number


def test_one_stream_is_told_nothing() -> None:
    world = World()
    assert [world.use(2) for _ in range(3)] == [["2 uses"]] * 3


def test_another_stream_waits_for_the_end_of_the_use_before() -> None:
    world = World()
    world.use(1)
    assert world.use(2) == ["1 recorded", "2 waits for end 1 of 1", "2 uses", "2 recorded"]
    world.log.append("2 goes on with other things")  # for which nobody waits
    assert world.use(3) == ["3 waits for end 1 of 2", "3 uses", "3 recorded"]
    assert world.use(3) == ["3 uses", "3 recorded"]
    assert world.use(1) == ["1 waits for end 2 of 3", "1 uses", "1 recorded"]


def test_a_use_that_fails_is_waited_for() -> None:
    world = World()
    world.use(1)
    world.now = world.streams[2]
    with pytest.raises(ValueError, match="halfway"), world.turns:
        raise ValueError("halfway")
    assert world.use(1) == ["1 waits for end 1 of 2", "1 uses", "1 recorded"]


def test_captures_take_turns_among_themselves() -> None:
    world = World()
    world.use(1)
    world.capture(7, 2, 3)
    assert world.use(2) == ["2 uses"]  # nothing outside can be waited for
    assert world.use(3) == ["2 recorded", "3 waits for end 1 of 2", "3 uses", "3 recorded"]
    assert world.use(1) == ["1 uses", "1 recorded"]  # eager, as the use before the last
    assert world.use(2) == ["2 waits for end 1 of 3", "2 uses", "2 recorded"]
    world.streams[4] = Stream(4, 0, world.log)
    assert world.use(4) == ["4 waits for end 1 of 1", "4 uses", "4 recorded"]
    assert world.use(3) == ["3 waits for end 2 of 2", "3 uses", "3 recorded"]  # of the graph still
    world.now = world.streams[2]
    with pytest.raises(ValueError, match="halfway"), world.turns:
        raise ValueError("halfway")
    assert world.log[-1] == "2 waits for end 2 of 3"  # and nothing is recorded in a graph that will not be
    world.capture(8, 2, 3)
    assert world.use(3) == ["3 uses", "3 recorded"]  # of another graph
    assert world.use(2) == ["2 waits for end 3 of 3", "2 uses", "2 recorded"]
    world.capture(0, 2, 3)
    assert world.use(3) == ["3 waits for end 1 of 4", "3 uses", "3 recorded"]


def test_a_stream_that_is_recorded_by_now_is_not_waited_for() -> None:
    world = World()
    world.use(1)
    world.capture(7, 1)
    assert world.use(2) == ["2 uses", "2 recorded"]
