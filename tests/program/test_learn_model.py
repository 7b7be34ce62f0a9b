"""All interleavings of the protocol by which ranks learn while no host waits, and of protocols with a mistake."""

from __future__ import annotations

import pytest
from ahead_model import FREES, HAS_MORE, HAS_NEW_OUTPUT, HAS_PRIVATE, KEEPS, WrongError
from learn_model import MISTAKES, explore

NEW = (2, 4, (KEEPS,), False, True)
"""Nothing is known, and mapping may fail."""


@pytest.mark.parametrize(
    ("ranks", "calls", "options", "least"),
    [
        (2, 3, (KEEPS, FREES), 100_000),
        (2, 2, (KEEPS, HAS_MORE, HAS_PRIVATE, HAS_NEW_OUTPUT), 100_000),
        (3, 2, (KEEPS,), 10_000),
    ],
)
def test_no_order_of_steps_goes_wrong(ranks: int, calls: int, options: tuple[int, ...], least: int) -> None:
    assert explore(ranks, calls, options=options) > least


@pytest.mark.long
def test_no_order_of_steps_goes_wrong_from_the_beginning() -> None:
    ranks, calls, options, learnt, may_fail = NEW
    assert explore(ranks, calls, options=options, learnt=learnt, may_fail=may_fail) > 1_000_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    with pytest.raises(WrongError):
        for ranks, calls, options, learnt, may_fail in ((2, 3, (KEEPS, FREES), True, False), NEW):
            explore(ranks, calls, mistake, options, learnt=learnt, may_fail=may_fail)
