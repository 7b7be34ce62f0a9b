"""The board on which ranks post where tensors lie, with all ranks in one process."""

from __future__ import annotations

import pytest

from sidelane.collectives.learning import board as boards
from sidelane.collectives.learning.board import LAG, MOST_FREED, RING, WINDOW, LearningBoard, frontier


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LearningBoard]:
    """Boards of three ranks, which share memory."""
    memory = [bytearray(boards.PART_BYTES) for _ in range(3)]

    class Shared:
        world_size = 3

        def __init__(self, rank: int, nbytes: int) -> None:
            self.rank = rank

        def view(self, rank: int) -> memoryview:
            return memoryview(memory[rank])

    monkeypatch.setattr(boards, "SharedBytes", Shared)
    return [LearningBoard(rank) for rank in range(3)]  # type: ignore[arg-type]


def test_posts_are_those_of_all_ranks(made: list[LearningBoard]) -> None:
    for number in range(1, 3 * RING):
        said = [b"mine %d" % (number % 5), b"theirs" * (number % 3), b"the same"]
        for board, post in zip(made, said, strict=True):
            assert made[0].posts(number) is None, "not all of them have"
            assert board.post(bytes(post))
        for board in made:
            found = board.posts(number)
            assert found == tuple(said) and found[2] is board.posts(number)[2], "one object for what is the same"  # type: ignore[index]
            board.has_read(number)


def test_nothing_is_posted_over_what_is_not_read(made: list[LearningBoard]) -> None:
    for number in range(1, 3 * RING):
        for board in made[:2]:
            assert board.post(b"a post") == (number <= RING)
            board.has_read(number)
    for number in range(1, 2 * RING):
        made[2].post(b"another one")
        assert made[2].posts(number) == ((b"a post", b"a post", b"another one") if number <= RING else ())
        made[2].has_read(number)


def test_a_window_is_in_step_if_all_have_read_and_none_has_begun(made: list[LearningBoard]) -> None:
    window = LAG // WINDOW
    first = window * WINDOW + 1
    for number in range(1, first):
        for board in made:
            board.post(b"")
            board.has_read(min(number, frontier(window) - 1))
    made[0].judge(first - 1)
    assert made[1].verdict(window) is False, "not all have read what they would go by"
    for board in made:
        board.has_read(frontier(window))
    made[0].judge(first - 1)
    assert made[1].verdict(window) is True
    for _ in range(WINDOW + 1):
        made[1].post(b"")
    for board in made:
        board.has_read(frontier(window + 1))
    made[0].judge(first - 1)
    assert made[2].verdict(window + 1) is False, "it has begun without a verdict"
    made[0]._own.words[boards.VERDICTS_AT + window % boards.VERDICTS] = 4 * window + boards.IN_THE_MAKING
    assert made[2].verdict(window) is None


def test_freed_memory_is_told_until_all_have_taken_it(made: list[LearningBoard]) -> None:
    owner, peer, late = made
    names = [f"{number}" for number in range(MOST_FREED + 2)]
    told = owner.tell_freed(names)
    assert list(told) == names[:MOST_FREED] and not peer.tell_freed(())
    assert peer.take_freed() == [(0, name) for name in told] and peer.take_freed() == []
    assert not owner.tell_freed(names[MOST_FREED:]), "a rank has not taken the last list"
    assert len(late.take_freed()) == MOST_FREED
    assert list(owner.tell_freed(names[MOST_FREED:])) == names[MOST_FREED:]
    assert list(peer.tell_freed(["x"])) == ["x"]
    assert late.take_freed() == [(0, name) for name in names[MOST_FREED:]] + [(1, "x")]
    assert owner.take_freed() == [(1, "x")]
