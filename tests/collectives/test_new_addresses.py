"""Calls at addresses that no call had before: what a shape says is not worked out again, and nothing passes unseen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from new_address_cases import WORKED_OUT, derived, prepared
from test_repeated_calls import Rank, gather, group, move_staging, rank

from sidelane import Communicator
from sidelane.collectives import call_cache
from sidelane.collectives.call_cache import ShapeProgram
from sidelane.execute.cuda import CudaExecutor
from sidelane.memory.allocator import SEGMENT_BYTES

__all__ = ["group", "rank"]  # fixtures

NBYTES = 64


def new_ones(count: int, nbytes: int = NBYTES, offset: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and inputs, none of them where one of the others is."""
    memory = torch.zeros(2 * count + 1, 256, dtype=torch.uint8)
    aligned = memory.flatten()[-memory.data_ptr() % 256 :][: 2 * count * 256].view(count, 2, 256)
    for output, input in aligned:
        yield output[offset : offset + nbytes], input[offset : offset + nbytes]


def shapes(rank: Rank) -> list[ShapeProgram]:
    """The shapes that are remembered."""
    return [entry.shape for entry in rank.comm.preparer.cache if entry.shape is not None]


@pytest.mark.parametrize("variant", ["b2b", "pcpy", "auto"])
def test_a_shape_is_worked_out_once(rank: Rank, variant: str) -> None:
    tensors = list(new_ones(40))
    gather(rank, *tensors[0], variant=variant)
    known = rank.comm.last_submitted(), rank.comm.last_choice()
    with derived() as found:
        for pair in tensors[1:]:
            gather(rank, *pair, variant=variant)
            assert (rank.comm.last_submitted(), rank.comm.last_choice()) == known
    assert not found.keys() & WORKED_OUT, found
    assert rank.comm.submitted().calls == 40 * known[0].counts.calls
    assert prepared(rank.comm) == 1, "addresses that do not come again are not remembered"


def test_what_comes_again_is_made_in_c(rank: Rank) -> None:
    tensors = list(new_ones(4))
    made = [gather(rank, *pair) for _ in range(4) for pair in tensors]
    # The first call of all is remembered at once, as are calls of other shapes; the others when they come again.
    assert made == [False] * 8 + [True] * 8


def test_shapes_are_told_apart(rank: Rank) -> None:
    draw = random.Random(1)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    for turn in range(300):
        first, nbytes = 8 * draw.randrange(2000), draw.choice((8, 24, 64, 4096))
        second = first if turn % 5 == 0 else first + 16384 + draw.choice((0, 1, 16))
        gather(rank, memory[second : second + nbytes], memory[first : first + nbytes])
        assert rank.comm.last_submitted().counts.local_copies == (first != second), "in place there is nothing to copy"


REFUSED = {
    "overlap": ("overlap", lambda a, b: (a[:32], a[16:48])),
    "not contiguous": ("contiguous", lambda a, b: (torch.zeros(NBYTES, 2, dtype=torch.uint8)[:, 0], b)),
    "another dtype": ("one dtype", lambda a, b: (a, b.view(torch.int8))),
    "another size": ("output must hold", lambda a, b: (a, b[:32])),
    "another device": ("device", lambda a, b: (a, torch.zeros(NBYTES, dtype=torch.uint8, device="meta"))),
    "no tensor": ("tensors expected", lambda a, b: (a, None)),
    "sparse": ("layout", lambda a, b: (a, torch.zeros(NBYTES, dtype=torch.uint8).to_sparse())),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_as_ever(rank: Rank, what: str) -> None:
    text, change = REFUSED[what]
    tensors = new_ones(5)
    for _ in range(3):
        gather(rank, *next(tensors))
    output, input = next(tensors)
    output.fill_(7)
    with pytest.raises((TypeError, ValueError), match=text):
        rank.comm.all_gather(*change(output, input), variant="b2b")
    assert output.eq(7).all()
    gather(rank, *next(tensors))


def test_a_tensor_whose_memory_was_taken_is_refused(rank: Rank) -> None:
    for pair in new_ones(3):
        gather(rank, *pair)
    shrunk = torch.zeros(4 * NBYTES, dtype=torch.uint8)
    view = shrunk[:NBYTES]
    shrunk.untyped_storage().resize_(NBYTES // 2)
    with pytest.raises(ValueError, match="no memory for its elements"):
        rank.comm.all_gather(view, torch.zeros(NBYTES, dtype=torch.uint8), variant="b2b")


def test_memory_of_another_communicator_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in new_ones(3):
        gather(rank, *pair)
    other = Communicator()
    foreign = other.empty(NBYTES, dtype=torch.uint8)
    for pair in new_ones(3):  # to have symmetric memory is another generation
        gather(rank, *pair)
    with pytest.raises(ValueError, match="symmetric memory of another communicator"):
        rank.comm.all_gather(foreign, torch.zeros(NBYTES, dtype=torch.uint8), variant="b2b")
    other.close()


def test_symmetric_memory_is_another_shape(rank: Rank) -> None:
    symmetric = rank.comm.empty(SEGMENT_BYTES // 2, dtype=torch.uint8)
    for turn, (output, input) in enumerate(new_ones(12)):
        gather(rank, symmetric[512 * turn :][:NBYTES] if turn % 2 else output, input)
        places = len(shapes(rank))
        assert places == 1 + (turn + 1) // 2, "each place of symmetric memory is one, as is all ordinary memory"


def test_shapes_go_when_staging_moves(rank: Rank) -> None:
    for pair in new_ones(3):
        gather(rank, *pair)
    (known,) = shapes(rank)
    move_staging(rank)
    assert known not in shapes(rank), "they know where it was"
    for pair in new_ones(3):
        gather(rank, *pair)


def test_few_things_are_kept_of_what_changes_for_ever(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_SEEN", 16)
    monkeypatch.setattr(call_cache, "MOST_NEW", 4)
    monkeypatch.setattr(call_cache, "MOST_BYTES", 30000)
    cache = rank.comm.preparer.cache
    for turn, (output, input) in enumerate(new_ones(200)):
        gather(rank, output[: 8 + 8 * (turn % 7)], input[: 8 + 8 * (turn % 7)])
        assert len(cache._seen) <= 16 and len(cache._seen_before) <= 16
        assert len(cache._entries) <= 4 + 7 and cache.nbytes <= 30000
    rank.finish()
    events = len(rank.driver.events)
    for output, input in new_ones(50):
        gather(rank, output, input)
    assert len(rank.driver.events) == events


def test_a_failure_behind_the_agreement_ends_the_communicator(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = new_ones(4)
    for _ in range(2):
        gather(rank, *next(tensors))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(CudaExecutor, "load", fail)
    with pytest.raises(OSError, match="no more memory"):
        rank.comm.all_gather(*next(tensors), variant="b2b")
    assert isinstance(rank.comm.calls.failure, OSError)
