"""The cache of calls: what goes first, and exchanges of sizes that come again."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane import Communicator, PeerError
from sidelane.collectives import call_cache
from sidelane.collectives.call_cache import CallCache
from sidelane.collectives.prepare import Preparer


def keys(cache: CallCache) -> list[object]:
    return [entry.key[0] for entry in cache]


def test_the_oldest_that_was_not_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_PLACES", 4)
    cache = CallCache()
    for number in range(4):
        cache.entry((number,))
    assert cache.get((0,)) is cache.entry((0,))
    cache.entry((4,))
    assert keys(cache) == [2, 3, 0, 4], "one that is used is as good as new, once"
    for number in range(5, 8):
        cache.entry((number,))
    assert keys(cache) == [4, 5, 6, 7]


def test_what_takes_more_places_makes_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_PLACES", 8)
    cache = CallCache()
    for number in range(8):
        cache.entry((number,))
    cache.entry(("list",), 6)
    assert keys(cache) == [6, 7, "list"]
    cache.entry(("larger than all",), 9)
    assert keys(cache) == ["larger than all"]
    cache.entry(("next",))
    assert keys(cache) == ["next"]


def test_all_goes_at_once_and_who_holds_some_is_told() -> None:
    cache, told = CallCache(), []
    cache.keepers.append(lambda: told.append("told"))
    owner = object()
    for number in range(3):
        cache.entry((owner, number), 8)
        cache.entry((number,))
    cache.forget_calls_of(owner)
    assert keys(cache) == [0, 1, 2]
    assert cache._taken == 3
    assert not told
    cache.clear()
    assert (keys(cache), cache._taken, told) == ([], 0, ["told"])


def exchange(comm: Communicator, counts: list[list[int]], output: torch.Tensor, input: torch.Tensor) -> None:
    """An all_to_all of ``counts[i][j]`` rows from rank i to rank j; each rank sends its own number."""
    sent, expected = counts[comm.rank], [row[comm.rank] for row in counts]
    output.fill_(-1)
    comm.all_to_all(output, input.fill_(comm.rank), input_split_sizes=sent, output_split_sizes=expected)
    rows = [float(peer) for peer in range(comm.world_size) for _ in range(expected[peer])]
    assert output[:, 0].tolist() == output[:, -1].tolist() == rows


def exchanges(group: dist.ProcessGroup, shared: bool) -> tuple[int, str]:
    """How often exchanges of sizes were prepared, and how one of other rows in the same bytes was refused."""
    found, prepare = [], Preparer.prepare

    def counted(*given: object, **named: object) -> object:
        found.append(given)
        return prepare(*given, **named)  # type: ignore[arg-type]

    with Communicator(group) as comm, mock.patch.object(Preparer, "prepare", counted):
        output, input = torch.empty(6, 4), torch.empty(6, 4)
        if shared:
            output.share_memory_()
            input.share_memory_()
        first, other = [[2, 2, 2], [2, 2, 2], [2, 2, 2]], [[2, 2, 2], [2, 1, 3], [2, 3, 1]]
        for counts in (first, first, first, other, other, first):  # rank 0 always does the same
            exchange(comm, counts, output, input)
        with pytest.raises((ValueError, PeerError)) as refused:
            comm.all_to_all(output.view(3, 8), input, output_split_sizes=[2, 2, 2], input_split_sizes=[2, 2, 2])
        exchange(comm, other, output, input)
    return len(found), str(refused.value)


@pytest.mark.parametrize("shared", [False, True])
def test_sizes_that_come_again_are_not_planned_again(pool: RankPool, shared: bool) -> None:
    results = pool.run(exchanges, 3, shared)
    assert [count for count, _ in results] == [2] * 3
    assert all("must be 3 sizes that add up to dimension 0" in text for _, text in results), results
