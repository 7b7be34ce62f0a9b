"""Answers to questions that every rank can find again on its own, remembered on a communicator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from sidelane.session.communicator import Communicator

MOST_ANSWERS = 1 << 12
"""Largest number of answers that are remembered; layouts that change with every call would be too many."""


def lookup(comm: Communicator, question: Hashable) -> Any:
    """Return the answer to a question; None if it is new, or None itself."""
    answers = comm.cache.get(lookup)
    if answers is None or question is None:
        return None
    try:
        return answers.get(question)
    except TypeError:  # a part of another type, such as a list: checks refuse it
        return None


def remember(comm: Communicator, question: Hashable, answer: object) -> None:
    """Remember an answer that this rank can find again on its own, unless the question is None."""
    if question is None:
        return
    answers = comm.cache.setdefault(lookup, {})
    if len(answers) >= MOST_ANSWERS:
        answers.clear()
    answers[question] = answer
