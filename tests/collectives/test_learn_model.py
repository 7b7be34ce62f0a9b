"""All interleavings of the protocol by which ranks learn while no host waits, and of protocols with a mistake."""

from __future__ import annotations

import pytest
from device_model import FREES, HAS_MORE, HAS_NEW_OUTPUT, HAS_PRIVATE, KEEPS, WrongError
from learn_model import KEEPS_TO_ITSELF, LOOKS_AT_ONE, MISTAKES, OVERWRITES, USES_A_PART, USES_AT_ONCE, explore
from marks import long

NEW = (2, 4, (KEEPS,), False, True)
"""Nothing is known, and mapping may fail."""


@pytest.mark.parametrize(
    ("ranks", "calls", "options", "least"),
    [
        (2, 2, (KEEPS, FREES), 10_000),
        (2, 3, (KEEPS,), 10_000),
        long(2, 2, (KEEPS, HAS_MORE, HAS_PRIVATE, HAS_NEW_OUTPUT), 100_000),
        (3, 2, (KEEPS,), 10_000),
        long(2, 3, (KEEPS, FREES), 500_000),
    ],
)
def test_no_order_of_steps_goes_wrong(ranks: int, calls: int, options: tuple[int, ...], least: int) -> None:
    assert explore(ranks, calls, options=options) > least


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "least"),
    [((KEEPS, FREES), 10_000), ((KEEPS, FREES, HAS_PRIVATE), 200_000)],
)
def test_no_order_of_steps_goes_wrong_with_lists(options: tuple[int, ...], least: int) -> None:
    assert explore(2, 2, options=options, tensors=2) > least


@pytest.mark.long
def test_no_order_of_steps_goes_wrong_from_the_beginning() -> None:
    ranks, calls, options, learnt, may_fail = NEW
    assert explore(ranks, calls, options=options, learnt=learnt, may_fail=may_fail) > 1_000_000


TWO_CALLS, THREE_CALLS = ((2, calls, (KEEPS, FREES), True, False) for calls in (2, 3))
SHOWN_BY = {OVERWRITES: THREE_CALLS, USES_AT_ONCE: NEW, KEEPS_TO_ITSELF: NEW, USES_A_PART: NEW}
"""What shows a mistake for which two calls of what is known are not enough."""


@pytest.mark.parametrize("mistake", [long(one) if one == KEEPS_TO_ITSELF else one for one in MISTAKES])
def test_mistakes_are_found(mistake: str) -> None:
    ranks, calls, options, learnt, may_fail = SHOWN_BY.get(mistake, TWO_CALLS)
    tensors = 2 if mistake in (LOOKS_AT_ONE, USES_A_PART) else 1
    with pytest.raises(WrongError):
        explore(ranks, calls, mistake, options, learnt=learnt, may_fail=may_fail, tensors=tensors)
