"""The pool of symmetric memory: what ranks decide alike, whenever each of them drops what."""

from __future__ import annotations

import random

import pytest
import torch

from sidelane.memory import allocator
from sidelane.memory.storage import storage_of


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_drop_at_times_of_their_own_give_out_the_same_places(seed: int) -> None:
    """Each rank says what it has dropped with each allocation; nothing is given out that any rank still has."""
    draw = random.Random(seed)
    ranks = draw.randrange(1, 4)
    pools = [allocator.BlockAllocator(ranks) for _ in range(ranks)]
    held: list[dict[int, allocator.Range]] = [{} for _ in range(ranks)]
    unsaid: list[list[int]] = [[] for _ in range(ranks)]
    segments: list[int] = []
    for _ in range(400):
        nbytes = draw.choice((1, 100, 512, 4000, 100_000, 900_000))
        said = []
        for rank in range(ranks):
            for number in [number for number in held[rank] if draw.random() < 0.1]:
                del held[rank][number]
                unsaid[rank].append(number)
            unsaid[rank].sort()
            text, fits = allocator.as_text(unsaid[rank])
            said.append(text)
            del unsaid[rank][:fits]
        taken = []
        for pool in pools:
            for text in said:
                pool.drop(allocator.from_text(text))
            taken.append(pool.take(nbytes))
        if taken[0] is None:
            assert taken == [None] * ranks
            segments.append(allocator.rounded(nbytes, allocator.SEGMENT_BYTES))
            for pool in pools:
                pool.grow(len(segments) - 1, segments[-1])
            taken = [pool.take(nbytes) for pool in pools]
        assert taken == [taken[0]] * ranks and taken[0] is not None
        number, place = taken[0]
        assert (
            place.nbytes == allocator.rounded(nbytes, allocator.ALIGNMENT) and place.offset % allocator.ALIGNMENT == 0
        )
        for rank in range(ranks):
            assert not any(
                place.segment == other.segment
                and place.offset < other.offset + other.nbytes
                and other.offset < place.offset + place.nbytes
                for other in held[rank].values()
            )
            held[rank][number] = place
    assert pools[0].reserved == max(pools[0].reserved, pools[0].used) < 60 * allocator.SEGMENT_BYTES
    for rank in range(ranks):
        unsaid[rank] += held[rank]
    for pool in pools:
        for numbers in unsaid:
            pool.drop(numbers)
        assert pool.used == 0
        assert all(pool.take(nbytes) for nbytes in segments), "holes grow together"


def test_the_smallest_hole_is_taken_and_neighbours_grow_together() -> None:
    pool = allocator.BlockAllocator(1)
    pool.grow(0, 8 * 512)
    numbers = [pool.take(nbytes)[0] for nbytes in (512, 1024, 512, 512, 1536)]  # type: ignore[index]
    assert pool.take(1) is None and pool.used == pool.reserved == 8 * 512
    pool.drop([numbers[1]])
    pool.drop([numbers[3]])
    assert pool.take(10) == (5, allocator.Range(0, 2048, 512))
    pool.drop([numbers[2]])
    assert pool.take(1536) == (6, allocator.Range(0, 512, 1536))


def test_what_does_not_fit_into_a_text_is_said_next_time() -> None:
    numbers = list(range(0, 4000, 2))
    said: list[int] = []
    while numbers:
        text, fits = allocator.as_text(numbers)
        assert fits > 0 and len(text) <= allocator.MOST_TEXT
        said += allocator.from_text(text)
        del numbers[:fits]
    assert said == list(range(0, 4000, 2))
    assert allocator.as_text(range(10_000)) == ("0-9999", 10_000)


def test_a_storage_says_when_its_last_view_goes() -> None:
    whole, gone = torch.zeros(100, dtype=torch.uint8), []
    part = storage_of(whole, 20, 40, lambda: gone.append(True))
    view = part.view(torch.int32)[3:5]
    assert view.data_ptr() == whole.data_ptr() + 32 and part.untyped_storage().nbytes() == 40
    del part
    view.fill_(-1)
    assert whole[32:40].eq(255).all() and not whole[:32].any() and not gone
    del view
    assert gone == [True]
