from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks that all tests share."""
    ranks = RankPool()
    yield ranks
    ranks.close()
