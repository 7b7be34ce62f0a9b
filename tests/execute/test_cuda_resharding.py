"""All-to-alls with a layout on the CUDA executor: the calls that it submits, and the bytes that arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_world import FLAGS, MakeWorld, world_of
from hip_world import hip_world

from sidelane.collectives.prepare import pieces_of
from sidelane.execute.base import Addresses
from sidelane.execute.boxes import Box
from sidelane.execute.cuda.bind import MOST_PITCH, accepted
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build_batch
from sidelane.program.collective import Buffer
from sidelane.program.ir import Copy, Program
from sidelane.program.resharding import Resharding
from sidelane.program.transform import freeze, lower
from sidelane.program.verify import verify

ULYSSES = Resharding((2, 8, 8, 16), 2, 2, 1, (4, 4), (4, 4))
BACK = Resharding((2, 8, 8, 16), 2, 1, 2, (4, 4), (4, 4))
ONE = Resharding((1, 8, 8, 16), 2, 2, 1, (4, 4), (4, 4))
UNEVEN = Resharding((2, 7, 3, 16), 2, 2, 1, (2, 1), (3, 4))


def program_of(layouts: list[Resharding], transport: Transport, variant: str = "b2b") -> Program:
    batch = Batch("all_to_all", 2, tuple(layout.collective(copies_own=True) for layout in layouts))
    program = lower(build_batch(batch, variant, [transport] * len(layouts)), {Copy})
    verify(program)
    return program


class Resharded:
    """A program loaded on two ranks, with the calls that its plan is bound to."""

    def __init__(self, world: Any, layouts: list[Resharding], program: Program, *, frozen: bool = False) -> None:
        self.world, self.layouts, self.calls = world, layouts, []
        both = (Buffer.INPUT, Buffer.OUTPUT)
        self.tensors = [
            {
                (rank, buffer): np.zeros((*layout.shape_of(rank, buffer), layout.element_bytes), np.uint8)
                for rank in range(2)
                for buffer in both
            }
            for layout in layouts
        ]
        self.staging = [np.zeros(max(1, nbytes), np.uint8) for nbytes in program.staging_bytes]
        places = [{key: array.ctypes.data for key, array in tensors.items()} for tensors in self.tensors]
        pieces = pieces_of(program.collective, places, layouts)
        offset = 4 * FLAGS if frozen else 0
        addresses = Addresses(
            {(rank, Buffer.STAGING): array.ctypes.data for rank, array in enumerate(self.staging)},
            tuple(flags.ctypes.data + offset for flags in world.flags),
            pieces=pieces,
        )
        for driver in world.drivers:
            self._watch(driver)
        self.ranks = [executor.load(program, addresses, captured=frozen) for executor in world.executors]
        self.graphs = world.captured(lambda: world.start(self.ranks)) if frozen else []

    def _watch(self, driver: Any) -> None:
        """Note the copies that a driver prepares: what they are, and their sizes and distances."""
        planes, rows, copy, copies = driver.bind_planes, driver.bind_rows, driver.bind_copy, driver.bind_copies

        def bind_planes(box: Box, stream: int) -> Any:
            self.calls.append(("planes", box.width, box.rows, box.pitches, box.planes, box.distances))
            return planes(box, stream)

        def bind_rows(dst: int, src: int, pitches: tuple[int, int], nbytes: int, count: int, stream: int) -> Any:
            self.calls.append(("rows", nbytes, count, pitches))
            return rows(dst, src, pitches, nbytes, count, stream)

        def bind_copy(dst: int, src: int, nbytes: int, stream: int) -> Any:
            self.calls.append(("copy", nbytes))
            return copy(dst, src, nbytes, stream)

        def bind_copies(given: list[tuple[int, int, int]], stream: int) -> Any:
            self.calls.append(("copies", *(nbytes for _, _, nbytes in given)))
            return copies(given, stream)

        driver.bind_planes, driver.bind_rows = bind_planes, bind_rows
        driver.bind_copy, driver.bind_copies = bind_copy, bind_copies

    def run_checked(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        for tensors in self.tensors:
            for array in tensors.values():
                array[...] = draw.integers(0, 256, array.shape)
        if self.graphs:
            self.world.replay(self.graphs)
        else:
            self.world.start(self.ranks)
            self.world.synchronize()
        for layout, tensors in zip(self.layouts, self.tensors, strict=True):
            for rank in range(2):
                first = sum(layout.scattered[:rank])
                part = slice(first, first + layout.scattered[rank])
                index = (*[slice(None)] * layout.scatter_dim, part)
                want = np.concatenate([tensors[r, Buffer.INPUT][index] for r in range(2)], layout.gather_dim)
                assert np.array_equal(tensors[rank, Buffer.OUTPUT], want)


def calls_of(layouts: list[Resharding], transport: Transport) -> list[Any]:
    with world_of(2) as world:
        found = Resharded(world, layouts, program_of(layouts, transport))
        found.run_checked(1)
        return found.calls


def test_planes_where_both_sides_lie_in_rows() -> None:
    # Rows of 4 heads out of 8; planes for the batch: 4 positions out of 8 there.
    assert calls_of([ULYSSES], Transport.PUSH) == [("planes", 128, 4, (128, 256), 2, (1024, 1024))] * 4
    assert calls_of([BACK], Transport.PUSH) == [("planes", 128, 4, (256, 128), 2, (1024, 1024))] * 4


def test_rows_where_one_side_is_contiguous() -> None:
    assert calls_of([ONE], Transport.PUSH) == [("rows", 128, 4, (128, 256))] * 4


def test_into_staging_and_out_of_it_rows_differ() -> None:
    assert sorted(calls_of([ULYSSES], Transport.STAGED)) == sorted(
        [("planes", 128, 4, (128, 256), 2, (1024, 1024))] * 2  # own parts
        + [("rows", 128, 8, (128, 256))] * 2
        + [("rows", 512, 2, (1024, 512))] * 2
    )


def test_three_tensors_have_three_copies_a_rank() -> None:
    found = calls_of([ULYSSES, ONE, BACK], Transport.PUSH)
    assert len(found) == 12
    assert found.count(("rows", 128, 4, (128, 256))) == 4


@pytest.mark.parametrize("make", [world_of, hip_world])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("transport", [Transport.PUSH, Transport.PULL, Transport.STAGED])
def test_bytes_arrive(transport: Transport, frozen: bool, make: MakeWorld) -> None:
    layouts = [ULYSSES, UNEVEN, BACK]
    program = program_of(layouts, transport)
    with make(2) as world:
        resharded = Resharded(world, layouts, freeze(program) if frozen else program, frozen=frozen)
        for seed in range(3):
            resharded.run_checked(seed)


def test_what_the_driver_does_not_accept_is_cut() -> None:
    far = MOST_PITCH + 1
    assert list(accepted(Box(0, 0, 8, 2, (8, 16), 2, (16, 64)))) == [Box(0, 0, 8, 2, (8, 16), 2, (16, 64))]
    assert list(accepted(Box(0, 0, 8, 2, (8, 16), 2, (20, 64)))) == [
        Box(0, 0, 8, 2, (8, 16)),
        Box(20, 64, 8, 2, (8, 16)),
    ]
    assert list(accepted(Box(0, 5, 8, 2, (8, far)))) == [Box(0, 5, 8), Box(8, 5 + far, 8)]
