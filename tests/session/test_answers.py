"""Rank 0's measurements on all ranks, and answers that a communicator remembers."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import RankPool

from sidelane import Communicator, Config, UnavailableError
from sidelane.session import answers
from sidelane.session.answers import measured_by_rank_0, recall, remember


def measured(group: dist.ProcessGroup) -> list[object]:
    """Texts and errors of rank 0, which alone reads; what a chooser has is not read again."""
    found: list[object] = []
    with Communicator(group, config=Config(timeout_s=30)) as comm:

        def read(text: str) -> str:
            assert comm.rank == 0, "others take what it sends"
            if not text:
                raise ValueError("no such file")
            return text

        def parse(text: str) -> list[int]:
            return [int(number) for number in text.split()]

        for text in ("", "one"):
            try:
                measured_by_rank_0(comm, "numbers", lambda text=text: read(text), parse)  # type: ignore[misc]
            except ValueError as error:
                found.append(str(error))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm.lane.backend, "place", lambda: (1, True))
            with pytest.raises(UnavailableError, match="numbers: auto while a graph is captured"):
                measured_by_rank_0(comm, "numbers", lambda: "1", parse)
        found.append(measured_by_rank_0(comm, "numbers", lambda: read("1 2"), parse))
        found.append(measured_by_rank_0(comm, "numbers", lambda: read("3"), parse))
        found.append(measured_by_rank_0(comm, "letters", lambda: read("é" * 1000), len))
    return found


def test_all_ranks_have_what_rank_0_has_measured(pool: RankPool) -> None:
    wrong = ["numbers: no such file", "invalid literal for int() with base 10: 'one'"]
    assert pool.run(measured, 3) == [[*wrong, [1, 2], [1, 2], 1000]] * 3


def memo(group: dist.ProcessGroup) -> None:
    with Communicator(group, config=Config(timeout_s=30)) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "MOST_ANSWERS", 3)
        assert recall(comm, "first") is None
        for number, question in enumerate(("first", "second", None, "third")):
            remember(comm, question, number)
        assert [recall(comm, question) for question in ("first", "second", "third", None)] == [0, 1, 3, None]
        assert recall(comm, ["unhashable"]) is None  # type: ignore[arg-type]
        remember(comm, "fourth", 4)
        assert [recall(comm, question) for question in ("first", "fourth")] == [None, 4], "room was made"


def test_few_answers_are_remembered(pool: RankPool) -> None:
    pool.run(memo, 1)
