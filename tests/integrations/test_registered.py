"""Memory of another allocator that the ranks have registered, with a driver whose memory is made up."""

from __future__ import annotations

import sys

import pytest
import registered_cases
from ranks import RankPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no sockets without a file elsewhere")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_calls_need_no_staging(pool: RankPool, n: int) -> None:
    for (how, staging, _), (how_behind, _, mapped) in pool.run(registered_cases.symmetric, n):
        assert (how, staging) == ("symmetric", 0)
        assert (how_behind, mapped) == ("staged", 0), "nothing of the peers' stays mapped"


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("sizes", "the ranks have other segments"),
        ("mapping", "rank 1: s"),
        ("exporting", "rank 1: it was made without file descriptors"),
    ],
)
def test_what_one_rank_cannot_do_is_staged_by_all(pool: RankPool, why: str, said: str) -> None:
    found = pool.run(registered_cases.refused, 2, why)
    assert found[0] == found[1] and found[0].startswith(said), found
