"""Layouts of all-to-alls against torch's slices, and copies between rows against copies byte by byte."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from sidelane.collectives.prepare import pieces_of
from sidelane.execute.base import Addresses
from sidelane.execute.boxes import Box, boxes
from sidelane.execute.cpu import commands
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Span
from sidelane.program.resharding import Resharding, even_parts


def drawn(rng: random.Random, world_size: int) -> Resharding:
    count = rng.randint(2, 5)
    scatter_dim, gather_dim = rng.sample(range(count), 2)
    shape = [rng.choice((1, 2, 3)) for _ in range(count)]
    parts = [[rng.choice((0, 1, 2, 4)) for _ in range(world_size)] for _ in range(2)]
    if rng.random() < 0.6:
        parts = [list(even_parts(world_size * rng.randint(1, 3), world_size)) for _ in range(2)]
    shape[scatter_dim], shape[gather_dim] = map(sum, parts)
    sizes = map(tuple, parts)
    return Resharding(tuple(shape), rng.choice((1, 2, 8)), scatter_dim, gather_dim, *sizes)


def test_parts_are_split_as_torch_does() -> None:
    for total, n in itertools.product(range(20), range(1, 9)):
        assert even_parts(total, n) == tuple(map(len, torch.arange(total).tensor_split(n)))


def test_parts_lie_where_torch_slices_them() -> None:
    """So that the parts of a tensor hold each of its bytes once: the exchange of parts is one of tensors."""
    rng = random.Random(1)
    for _ in range(300):
        n = rng.randint(1, 4)
        layout = drawn(rng, n)
        for rank, buffer in itertools.product(range(n), (Buffer.INPUT, Buffer.OUTPUT)):
            shape = (*layout.shape_of(rank, buffer), layout.element_bytes)
            tensor = torch.arange(torch.Size(shape).numel()).view(shape)
            dim, sizes = (
                (layout.scatter_dim, layout.scattered)
                if buffer is Buffer.INPUT
                else (layout.gather_dim, layout.gathered)
            )
            want = torch.cat([part.flatten() for part in tensor.split(sizes, dim)])
            seen = []
            for part in layout.parts_at(rank, buffer):
                assert part.start == len(seen)
                rows = range(part.nbytes // part.width)
                seen += [part.origin + row * part.pitch + byte for row in rows for byte in range(part.width)]
            assert seen == want.tolist()
            collective = layout.collective(copies_own=True)
            assert collective.buffer_bytes(rank, buffer) == len(seen)


def test_boxes_copy_every_byte_to_its_place() -> None:
    """Any part of what goes from rank to rank, and to and from contiguous memory."""
    rng = random.Random(2)
    kinds: set[tuple[bool, bool]] = set()
    most = 0
    for _ in range(400):
        n = rng.randint(1, 3)
        layout = drawn(rng, n)
        batch = Batch("list", n, (layout.collective(copies_own=True),))
        base = {
            (rank, buffer): 10_000_000 * (2 * rank + (buffer is Buffer.OUTPUT) + 1)
            for rank in range(n)
            for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        }
        addresses = Addresses({(0, Buffer.STAGING): 500}, (), pieces=pieces_of(batch, [base], [layout]))
        for chunk in batch.parts[0].chunks():
            first = rng.choice((0, rng.randrange(chunk.nbytes)))
            nbytes = rng.choice((chunk.nbytes - first, rng.randint(1, chunk.nbytes - first)))
            src = Span(chunk.src_rank, Buffer.INPUT, chunk.src_offset + first, nbytes)
            dst = Span(chunk.dst_rank, Buffer.OUTPUT, chunk.dst_offset + first, nbytes)
            staged = Span(0, Buffer.STAGING, 7, nbytes)
            for to, from_ in ((dst, src), (staged, src), (dst, staged)):
                found = list(boxes(to, from_, addresses))
                kinds |= {(box.rows > 1, box.planes > 1) for box in found}
                most = max(most, len(found))
                want = {
                    addresses.find(to.rank, to.buffer, to.offset + k): addresses.find(
                        from_.rank, from_.buffer, from_.offset + k
                    )
                    for k in range(nbytes)
                }
                have = list(itertools.chain.from_iterable(map(moved, found)))
                assert len(have) == nbytes and dict(have) == want
    assert kinds == {(False, False), (True, False), (True, True)}
    assert most <= 7, "a run of rows has a beginning and an end"


def moved(box: Box) -> list[tuple[int, int]]:
    return [
        (box.dst + there, box.src + here)
        for plane, row, byte in itertools.product(range(box.planes), range(box.rows), range(box.width))
        for there, here in [[plane * box.distances[k] + row * box.pitches[k] + byte for k in (0, 1)]]
    ]


def test_large_boxes_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a failed invocation stops soon, whatever is large: planes, rows or their width."""
    monkeypatch.setattr(commands, "_COPY_BYTES", 64)
    for shape in ((3, 5, 7), (1, 9, 200), (40, 2, 3), (1, 1, 1000), (2, 1, 64), (1, 300, 1)):
        dst, src = np.zeros(shape, np.uint8), np.random.default_rng(1).integers(1, 256, shape, np.uint8)
        for to, from_ in commands._parts(dst, src):
            assert 0 < to.nbytes <= 64
            assert not to.any(), "no byte is copied twice"
            np.copyto(to, from_)
        assert np.array_equal(dst, src)


def test_a_layout_is_named() -> None:
    layout = Resharding((1, 5, 4), 2, 2, 1, (2, 2), (3, 2))
    assert str(layout) == "[1, 5, 4] from dimension 1 by [3, 2] to 2 by 2"
    assert np.prod(layout.shape) == 20
