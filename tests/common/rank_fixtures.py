from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Crew, RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks that all tests share."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Crew]:
    """Processes that interpret kernels; this one does not, nor does anybody whom it starts later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        found = Crew(4)
    yield found
    found.close()
