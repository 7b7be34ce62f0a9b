"""All interleavings of the protocol for addresses that come again, and of protocols with a mistake."""

from __future__ import annotations

import pytest
from ahead_model import ALL, FREES, HAS_MORE, HAS_NEW_OUTPUT, KEEPS, MISTAKES, WrongError, explore


@pytest.mark.parametrize(
    ("ranks", "calls", "options", "least"),
    [
        (2, 2, ALL, 30_000),
        (2, 4, (KEEPS, FREES), 15_000),
        (2, 3, (KEEPS, HAS_NEW_OUTPUT), 10_000),
        (3, 2, (KEEPS, HAS_MORE), 10_000),
    ],
)
def test_no_order_of_steps_goes_wrong(ranks: int, calls: int, options: tuple[int, ...], least: int) -> None:
    assert explore(ranks, calls, options=options) > least


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    with pytest.raises(WrongError):
        explore(2, 2, mistake)
