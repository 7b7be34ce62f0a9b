"""Lessons in C: what is asked before they are made, what is posted, and what peers have posted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from replay_host import Host, Question

from sidelane.memory.record import Record

RING, WINDOW, KEPT = 16, 4, 10
SLOT_BYTES, ROOM = 96, 64
POST = b"where it lies"


class Lessons:
    """What lessons need besides a host: two ranks with rings of posts, of which rank 0 is this one, and Python."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.memory = [bytearray(RING * SLOT_BYTES) for _ in range(2)]
        views = [[memoryview(each)[SLOT_BYTES * i : SLOT_BYTES * (i + 1)] for i in range(RING)] for each in self.memory]
        self.rings = [[Record(view) for view in of_rank] for of_rank in views]
        self.lesson, self.shown, self.read = (ctypes.c_uint64 * 2)(), ctypes.c_uint64(0), (ctypes.c_uint64 * 2)()
        self.begun: list[Any] = [None] * KEPT
        self.known: dict[bytes, bytes] = {}
        self.learning = SimpleNamespace(is_quiet=True)
        self.subject = SimpleNamespace(now=None, turn=0)
        self.entered: list[tuple[Any, bytes]] = []
        self.meanwhile: Callable[[], Any] = lambda: None
        host.replay.teach(*self.board())
        self.has_read(1000)

    def board(self) -> tuple[Any, ...]:
        address, own = ctypes.addressof, self.rings[0]
        return (
            *(address(self.lesson), address(self.shown), (address(self.read), address(self.read) + 8)),
            *(tuple(own), tuple(record.address for record in own)),
            tuple(record.address for ring in self.rings for record in ring),
            *(self.known, self.begun, WINDOW, self.enter, self),
        )

    def has_read(self, *lessons: int) -> None:
        self.read[:] = lessons * 2 if len(lessons) == 1 else lessons

    def enter(self, subject: Any, post: bytes) -> None:
        """C has Python begin a lesson."""
        assert self.host.lock.locked()
        self.entered.append((subject, post))
        self.begin(subject, post)
        self.meanwhile()

    def begin(self, subject: Any, post: bytes) -> None:
        """As Python begins a lesson."""
        lesson = self.lesson[0] + 1
        self.rings[0][lesson % RING].write(lesson, 0, post)
        self.lesson[0] = self.shown.value = lesson
        self.lesson[1] = 1
        self.begun[lesson % KEPT] = subject

    def remember(self, standing: Any = None, turn: Any = None, step: Any = "ran", post: bytes = POST) -> None:
        guards = ((self.learning, "is_quiet", True), (self.subject, "now", self.subject.now))
        lesson = guards, post, self.subject, turn is not None, standing
        self.host.remember((self.host.step(step),), turn=turn, lesson=lesson)

    def run(self, times: int = 1) -> list[Any]:
        return [self.host.run() for _ in range(times)]


@pytest.fixture
def lessons(host: Host) -> Lessons:
    made = Lessons(host)
    made.lesson[0] = WINDOW
    made.begin(made.subject, POST)
    made.lesson[1] = 0
    return made


def test_a_lesson_is_posted_and_its_call_made(lessons: Lessons) -> None:
    lessons.remember()
    assert lessons.run(2) == [True] * 2
    assert lessons.host.log == ["ran"] * 2
    assert (lessons.lesson[:], lessons.shown.value) == ([WINDOW + 3, 0], WINDOW + 3)
    for lesson in (WINDOW + 2, WINDOW + 3):
        record = lessons.rings[0][lesson % RING]
        assert record.read() == (lesson, 0, POST) and record.written is POST
        assert lessons.begun[lesson % KEPT] is lessons.subject
    assert (lessons.host.replay.lessons, lessons.host.replay.hits) == (2, 0)


def test_python_begins_the_first_lesson_of_each_window(lessons: Lessons) -> None:
    lessons.remember()
    assert lessons.run(3 * WINDOW) == [True] * 3 * WINDOW
    assert lessons.entered == [(lessons.subject, POST)] * 3
    assert lessons.lesson[:] == [4 * WINDOW + 1, 0]
    assert [lessons.rings[0][lesson % RING].number for lesson in range(6, 18)] == list(range(6, 18))


def test_what_python_and_c_post_by_turns(lessons: Lessons) -> None:
    lessons.remember()
    for lesson in range(WINDOW + 2, 8 * WINDOW):
        if lesson % 3 and lesson % WINDOW != 1:
            lessons.begin(lessons.subject, b"something else")
        else:
            assert lessons.run() == [True]
        record = lessons.rings[0][lesson % RING]
        assert (found := record.read()) is not None and found[0] == lesson
        assert found[2] == (b"something else" if lesson % 3 and lesson % WINDOW != 1 else POST)


ENTERED: dict[str, Callable[[Lessons], Any]] = {
    "it goes ahead from now on": lambda lessons: setattr(lessons.subject, "now", (1,)),
    "there is no use in it": lambda lessons: setattr(lessons.subject, "now", False),
    "there are news": lambda lessons: setattr(lessons.learning, "is_quiet", False),
    "it is forgotten": lambda lessons: lessons.host.replay.forget(),
    "a rank has failed": lambda lessons: setattr(lessons.host.state, "failure", OSError()),
}


@pytest.mark.parametrize("what", ENTERED)
def test_a_lesson_that_has_begun_is_left_to_python_to_make(lessons: Lessons, what: str) -> None:
    lessons.remember()
    assert lessons.run(WINDOW - 1) == [True] * (WINDOW - 1)
    lessons.meanwhile = lambda: ENTERED[what](lessons)
    assert lessons.run() == [None]
    assert lessons.lesson[:] == [2 * WINDOW + 1, 1], "it has begun, and its call is not made"
    assert len(lessons.host.log) == WINDOW - 1 and next(lessons.host.numbers) == WINDOW, "no number was taken"


def test_an_error_while_a_lesson_begins(lessons: Lessons) -> None:
    def fail() -> None:
        raise OSError("planted")

    lessons.remember()
    lessons.run(WINDOW - 1)
    lessons.meanwhile = fail
    with pytest.raises(OSError, match="planted"):
        lessons.run()
    assert not lessons.host.lock.locked() and next(lessons.host.numbers) == WINDOW


@pytest.mark.parametrize("rank", [0, 1])
def test_there_must_be_room_for_the_post(lessons: Lessons, rank: int) -> None:
    lessons.remember()
    lessons.lesson[0] = 100 + WINDOW + 1
    lessons.read[rank] = lessons.lesson[0] + 1 - RING - 1
    assert lessons.run() == [None]
    assert lessons.lesson[0] == 100 + WINDOW + 1 and next(lessons.host.numbers) == 1, "nothing was done"
    lessons.read[rank] += 1
    assert lessons.run() == [True]


CHANGES: dict[str, Callable[[Lessons], Any]] = {
    "it goes ahead now": lambda lessons: setattr(lessons.subject, "now", (1,)),
    "there is no use in it": lambda lessons: setattr(lessons.subject, "now", False),
    "there are news": lambda lessons: setattr(lessons.learning, "is_quiet", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_state_is_another_call(lessons: Lessons, change: str) -> None:
    lessons.remember()
    assert lessons.run() == [True]
    CHANGES[change](lessons)
    assert lessons.run() == [False]
    assert lessons.lesson[0] == WINDOW + 2 and next(lessons.host.numbers) == 2


def test_memory_that_was_freed(lessons: Lessons) -> None:
    question = Question(lessons.host)
    lessons.remember(question.standing)
    assert lessons.run() == [True]
    question.number = 6
    assert lessons.run() == [False] and lessons.lesson[0] == WINDOW + 2
    question.number = 5
    assert lessons.run() == [True]


def test_memory_of_the_steps_and_of_the_post(lessons: Lessons) -> None:
    one, other = Question(lessons.host), Question(lessons.host)
    guards = ((lessons.learning, "is_quiet", True),)
    lessons.host.remember(standing=one.standing, lesson=(guards, POST, lessons.subject, False, other.standing))
    assert lessons.run() == [True] and (one.asked, other.asked) == (2, 2)
    other.number = 6
    assert lessons.run() == [False]


def test_what_is_forgotten_while_memory_is_asked_about(lessons: Lessons) -> None:
    question = Question(lessons.host, lessons.host.replay.forget)
    lessons.remember(question.standing)
    assert lessons.run() == [None]
    assert lessons.lesson[0] == WINDOW + 1 and next(lessons.host.numbers) == 1


def test_one_that_goes_ahead_and_a_staged_one_with_the_same_tensors(lessons: Lessons) -> None:
    subject, period = lessons.subject, ("a", "b")
    lessons.remember(step="staged")
    subject.now = period
    for turn in (0, 1):
        lessons.remember(turn=(subject, "turn", turn, 1 - turn), step=turn)
    assert lessons.run(3) == [True] * 3 and lessons.host.log == [0, 1, 0] and subject.turn == 1
    subject.now = None
    assert lessons.run(2) == [True] * 2 and lessons.host.log[3:] == ["staged"] * 2 and subject.turn == 1
    subject.now = period
    assert lessons.run() == [True] and lessons.host.log[-1] == 1
    assert (lessons.host.replay.lessons, lessons.host.replay.hits) == (6, 4)


def test_turns_may_change_with_a_window(lessons: Lessons) -> None:
    subject = lessons.subject
    subject.now = ("a", "b")
    for turn in (0, 1):
        lessons.remember(turn=(subject, "turn", turn, 1 - turn), step=turn)
    assert lessons.run(WINDOW - 1) == [True] * (WINDOW - 1)
    turn = subject.turn
    lessons.meanwhile = lambda: setattr(subject, "turn", 1 - turn)
    assert lessons.run() == [None] and lessons.lesson[1] == 1


# --- what peers have posted ------------------------------------------------------------------------------------------


def test_what_all_ranks_have_posted(lessons: Lessons) -> None:
    posts = lessons.host.replay.posts
    for lesson in range(1, 3 * RING):
        lessons.rings[0][lesson % RING].write(lesson, 0, b"mine")
        assert posts(lesson) is None, "not all of them have"
        said = b"theirs" * (lesson % 3)
        lessons.rings[1][lesson % RING].write(lesson, 0, said)
        found = posts(lesson)
        assert found == (b"mine", said)
        assert found[0] is lessons.known[b"mine"] and found[1] is lessons.known[said], "one object for what is the same"
        assert posts(lesson + RING) is None and (lesson <= RING or posts(lesson - RING) is None)


WHOLE: dict[str, Callable[[memoryview], Any]] = {
    "being written": lambda words: words.__setitem__(0, words[0] + 1),
    "another sequence": lambda words: words.__setitem__(0, words[0] + 2),
    "another number": lambda words: words.__setitem__(1, words[1] + 1),
    "another checksum": lambda words: words.__setitem__(slice(2, 4), memoryview(_tied(words, 1)).cast("B").cast("Q")),
    "a status": lambda words: words.__setitem__(slice(2, 4), memoryview(_tied(words, 1 << 56)).cast("B").cast("Q")),
    "too long": lambda words: words.__setitem__(slice(2, 4), memoryview(_tied(words, 1 << 50)).cast("B").cast("Q")),
    "another tie": lambda words: words.__setitem__(3, words[3] ^ 1),
    "another payload": lambda words: words.__setitem__(4, words[4] ^ 1),
    "blank": lambda words: words.__setitem__(0, 0),
}


def _tied(words: memoryview, change: int) -> Any:
    digest = words[2] ^ change
    return (ctypes.c_uint64 * 2)(digest, words[1] ^ digest)


@pytest.mark.parametrize("what", WHOLE)
def test_a_post_that_is_not_whole_is_for_python_to_read(lessons: Lessons, what: str) -> None:
    for ring in lessons.rings:
        ring[7].write(7, 0, b"it is long enough for a word")
    assert lessons.host.replay.posts(7) is not None
    WHOLE[what](memoryview(lessons.memory[1])[7 * SLOT_BYTES : 8 * SLOT_BYTES].cast("Q"))
    assert lessons.host.replay.posts(7) is None


WRONG: dict[str, tuple[int, Any]] = {
    "no records": (3, ()),
    "words of others": (4, (1,)),
    "fewer posts than there are": (5, (1,)),
    "no room": (7, []),
    "no windows": (8, 0),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_board_is_refused(module: Any, what: str) -> None:
    host = Host(module)
    made = Lessons(host)
    with pytest.raises(TypeError, match="once"):
        host.replay.teach(*made.board())
    other, (place, value) = Host(module), WRONG[what]
    board = list(made.board())
    board[place] = value
    with pytest.raises(ValueError, match="teach"):
        other.replay.teach(*board)
    guards = ((made.learning, "is_quiet", True),)
    with pytest.raises(ValueError, match="a board"):
        other.remember(lesson=(guards, POST, made.subject, False, None))
    with pytest.raises(TypeError, match="nobody learns"):
        other.replay.posts(1)
    with pytest.raises(ValueError, match="room"):
        host.remember(lesson=(guards, bytes(ROOM + 1), made.subject, False, None))
    with pytest.raises(TypeError, match="guard"):
        host.remember(lesson=(((1, 2),), POST, made.subject, False, None))
