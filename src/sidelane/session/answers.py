"""Answers of choosers on a communicator: what rank 0 has measured, on all ranks, and the choices made before."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from sidelane.errors import UnavailableError, visible
from sidelane.session.communicator import Communicator

T = TypeVar("T")

MOST_ANSWERS = 1 << 12
"""Largest number of answers that are remembered; layouts that change with every call would be too many."""


def measured_by_rank_0(comm: Communicator, name: str, read: Callable[[], str], parse: Callable[[str], T]) -> T:
    """Return what rank 0 has measured, by which all ranks choose alike. Collective, the first time for a name.

    Args:
        comm: communicator of the ranks.
        name: name of the chooser, for errors.
        read: function that returns rank 0's text.
        parse: function that returns the content of a text.

    Raises:
        ValueError: rank 0's text cannot be read or parsed; on all ranks alike.
        UnavailableError: the text was not sent yet, and a graph is being captured.
    """
    key = measured_by_rank_0, name
    if key not in comm.kept:
        if comm.lane.backend.place()[1]:
            raise UnavailableError(f"{name}: auto while a graph is captured (allowed=after an eager call, or explain)")
        text = problem = ""
        if comm.rank == 0:
            try:
                text = read()
            except ValueError as error:
                problem = str(error)
        text, problem = json.loads(_sent_by_rank_0(comm, json.dumps([text, problem]).encode()))
        if problem:
            raise ValueError(visible(f"{name}: {problem}"))
        comm.kept[key] = parse(text)
    found: T = comm.kept[key]
    return found


def recall(comm: Communicator, question: Hashable) -> Any:
    """Return the answer to a question; None if it is new, or None itself."""
    answers = comm.kept.get(recall)
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
    answers = comm.kept.setdefault(recall, {})
    if len(answers) >= MOST_ANSWERS:
        answers.clear()
    answers[question] = answer


def _sent_by_rank_0(comm: Communicator, content: bytes) -> bytes:
    length = torch.tensor([len(content)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, root=0)
    comm.synchronize()
    words = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    if comm.rank == 0:
        words.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    words = words.to(comm.device)
    comm.broadcast(words, root=0)
    comm.synchronize()
    return bytes(words.cpu().tolist())
