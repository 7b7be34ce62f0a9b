"""All interleavings of the protocol for ordinary memory, and of protocols with a mistake."""

from __future__ import annotations

import pytest
from marks import long
from reach_model import MISTAKES, WrongError, explore


@pytest.mark.parametrize(("ranks", "calls", "may_fail"), [(2, 3, True), (3, 2, True), long(3, 3, False)])
def test_no_order_of_steps_goes_wrong(ranks: int, calls: int, may_fail: bool) -> None:
    assert explore(ranks, calls, may_fail=may_fail) > 1000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    with pytest.raises(WrongError):
        explore(2, 3, mistake)
