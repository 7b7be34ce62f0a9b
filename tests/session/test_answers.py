"""Answers that a communicator remembers."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from on_ranks import on_ranks

from sidelane import Communicator, Config
from sidelane.session import answers
from sidelane.session.answers import lookup, remember


@on_ranks(1)
def test_few_answers_are_remembered(group: dist.ProcessGroup) -> None:
    with Communicator(group, config=Config(timeout_s=30)) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "MOST_ANSWERS", 3)
        assert lookup(comm, "first") is None
        for number, question in enumerate(("first", "second", None, "third")):
            remember(comm, question, number)
        assert [lookup(comm, question) for question in ("first", "second", "third", None)] == [0, 1, 3, None]
        assert lookup(comm, ["unhashable"]) is None  # type: ignore[arg-type]
        remember(comm, "fourth", 4)
        assert [lookup(comm, question) for question in ("first", "fourth")] == [None, 4], "room was made"
