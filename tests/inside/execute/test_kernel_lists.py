"""Lists of tensors by one kernel, all but the kernels: what is chosen, and what is in the table."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from started import start
from test_kernel_programs import KB, MB, SUM, KernelDriver, Rank, needs_triton

from sidelane.execute.base import Addresses, Pieces
from sidelane.execute.cuda.driver import DriverError
from sidelane.program import collective as define
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Collective, ReduceOp, Reduction
from sidelane.program.kernel import MOST_LISTED, KernelProgram, Protocol, kernel_program


def batch_of(*parts: Collective) -> Batch:
    return Batch("list", parts[0].world_size if parts else 3, parts)


def program_of(*parts: Collective, variant: str = "one_shot", reads: bool = True, writes: bool = True) -> KernelProgram:
    return kernel_program(batch_of(*parts), variant, symmetric_input=reads, symmetric_output=writes)


def gathers(*sizes: int, in_place: bool = False) -> tuple[Collective, ...]:
    return tuple(define.all_gather([size] * 3, in_place=in_place) for size in sizes)


def exchanges(*sizes: int, in_place: bool = False) -> tuple[Collective, ...]:
    return tuple(define.all_to_all([[size] * 3] * 3, in_place=in_place) for size in sizes)


def scatters(*sizes: int) -> tuple[Collective, ...]:
    return tuple(define.reduce_scatter([size] * 3, SUM) for size in sizes)


def reduces(*sizes: int, in_place: bool = False) -> tuple[Collective, ...]:
    return tuple(define.all_reduce(define.split_evenly(size, 3, 4), SUM, in_place=in_place) for size in sizes)


def broadcasts(*sizes: int, root: int = 1) -> tuple[Collective, ...]:
    return tuple(define.broadcast(size, 3, root, in_place=True) for size in sizes)


@pytest.mark.parametrize(
    ("parts", "variant", "reads", "writes", "protocol", "staging"),
    [
        (gathers(KB, 3, 0), "one_shot", False, False, Protocol.BLOCK_FLAGS, 0),
        (gathers(*[4 * KB] * 128), "one_shot", True, True, Protocol.BLOCK_FLAGS, 0),
        (gathers(*[4 * KB] * 128, 1), "one_shot", True, True, Protocol.PUSH, 0),
        (gathers(*[4 * KB] * 128, 1), "one_shot", True, False, Protocol.PULL, 512 * KB + 16),
        (gathers(MB, KB, in_place=True), "one_shot", False, True, Protocol.PUSH, 0),
        (exchanges(MB, KB), "one_shot", False, True, Protocol.PUSH, 0),
        (exchanges(MB, KB), "one_shot", True, False, Protocol.PULL, 3 * (MB + KB)),
        ((*exchanges(MB), *exchanges(KB, in_place=True)), "one_shot", True, True, Protocol.PULL, 3 * (MB + KB)),
        (scatters(KB, 4), "one_shot", True, True, Protocol.BLOCK_FLAGS, 0),
        (scatters(MB, 4), "one_shot", True, False, Protocol.DIRECT, 0),
        (scatters(MB, 4), "one_shot", False, True, Protocol.REDUCE, 3 * (MB + 16)),
        (reduces(KB, 4), "one_shot", False, False, Protocol.BLOCK_FLAGS, 0),
        (reduces(KB, 4), "two_shot", False, False, Protocol.REDUCE, KB + 16),
        (reduces(MB, 4), "one_shot", True, False, Protocol.DIRECT, 0),
        (reduces(MB, 4, in_place=True), "one_shot", True, True, Protocol.REDUCE, MB + 16),
        (reduces(MB, 4, in_place=True), "two_shot", True, True, Protocol.DIRECT, 0),
        (reduces(MB, 4), "two_shot", True, False, Protocol.REDUCE, MB + 16),
        (broadcasts(KB, 3, 0), "one_shot", False, False, Protocol.BLOCK_FLAGS, 0),
        (broadcasts(MB, 3), "one_shot", True, True, Protocol.PUSH, 0),
        (broadcasts(MB, 3), "one_shot", False, False, Protocol.STAGE, MB + 16),
        ((), "one_shot", True, True, Protocol.BLOCK_FLAGS, 0),
    ],
)
def test_which_kernel(
    parts: tuple[Collective, ...], variant: str, reads: bool, writes: bool, protocol: Protocol, staging: int
) -> None:
    program = program_of(*parts, variant=variant, reads=reads, writes=writes)
    assert (program.protocol, program.staging_bytes) == (protocol, staging)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((*gathers(4), *exchanges(4)), "one collective, reduction and root .value=all_gather; all_to_all"),
        ((*scatters(4), define.reduce_scatter([4] * 3, Reduction(ReduceOp.MAX, "float32"))), "max float32"),
        ((*scatters(4), define.reduce_scatter([4] * 3, Reduction(ReduceOp.SUM, "int32"))), "sum int32"),
        (
            (*exchanges(4), define.all_to_all([[1, 2, 3]] * 3)),
            "equal parts for all ranks .value=parts that differ., in number 1",
        ),
        (gathers(*[4] * (MOST_LISTED + 1)), f"value={MOST_LISTED + 1}, allowed=..{MOST_LISTED}"),
        ((define.all_gather([4] * 9),), "value=9, allowed=1..8"),
        ((*broadcasts(4), *broadcasts(4, root=2)), "root .value=broadcast root 1; broadcast root 2"),
        ((define.broadcast(4, 3, 0),), "in place .value=out of place., in number 0"),
    ],
)
def test_what_kernels_refuse(parts: tuple[Collective, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        program_of(*parts)


class Made:
    """A list loaded by rank 0 of 3, with made-up addresses of every tensor of every rank."""

    def __init__(self, rank: Rank, program: KernelProgram, *, frozen: bool = False) -> None:
        self.program, batch = program, program.collective
        self.tensors = {
            (r, buffer): tuple(
                MB * (100 * (3 * number + r) + 50 * (buffer is Buffer.OUTPUT)) for number in range(len(batch.parts))
            )
            for r in range(3)
            for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        }
        pieces = {}
        for (r, buffer), places in self.tensors.items():
            rows = [
                (start, part.buffer_bytes(r, buffer), place)
                for start, part, place in zip(batch.starts(r, buffer), batch.parts, places, strict=True)
                if part.buffer_bytes(r, buffer)
            ]
            pieces[r, buffer] = Pieces(*zip(*rows, strict=True)) if rows else Pieces((), (), ())
        staging = {(r, Buffer.STAGING): MB * (r + 1) for r in range(3)}
        given = Addresses(staging, (), (64 * MB, 128 * MB, 192 * MB), pieces=pieces)
        self.loaded = rank.executor.load_kernel(program, given, frozen=frozen)

    def rows(self, arguments: tuple[int, ...]) -> tuple[int, list[list[int]]]:
        """Tiles, and the rows of the table that a kernel was launched with."""
        address, tiles = arguments[:2]
        ends = list((ctypes.c_int64 * 16).from_address(address))
        pieces = sum(end < 1 << 62 for end in ends)
        assert ends[pieces - 1] == tiles
        words = 8 + 8 * (self.program.protocol in (Protocol.PUSH, Protocol.DIRECT)) * (1 + self.program.two_shot)
        values = np.array((ctypes.c_int64 * (pieces * words)).from_address(address + 8 * 16))
        return tiles, values.reshape(pieces, words).tolist()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank(30.0)
    yield made
    made.executor.close()
    assert not made.driver.allocated
    made.driver.stop()


def launched(rank: Rank, made: Made) -> tuple[int, list[list[int]]]:
    seen: list[tuple[int, ...]] = []
    rank.driver.kernel = seen.append
    start(made.loaded, 1, rank.stream).wait()
    rank.driver.synchronize()
    return made.rows(seen[-1])


@needs_triton
def test_a_table_says_where_each_tensor_lies(rank: Rank) -> None:
    made = Made(rank, program_of(*exchanges(5000, 0, 64), reads=False, writes=False))
    ins, outs = made.tensors[0, Buffer.INPUT], made.tensors[0, Buffer.OUTPUT]
    tiles, rows = launched(rank, made)
    assert tiles == 2 + 1
    assert rows == [[ins[0], outs[0], 5000, 5000, 5000, 0, 0, 0], [ins[2], outs[2], 64, 64, 64, 5008, 1, 2]]


@needs_triton
def test_a_table_says_where_peers_have_their_tensors(rank: Rank) -> None:
    made = Made(rank, program_of(*gathers(MB, 16), writes=True))
    _, rows = launched(rank, made)
    # Rank 0 writes part 0 of every output, its own first.
    assert [row[8:11] for row in rows] == [
        [made.tensors[r, Buffer.OUTPUT][number] for r in range(3)] for number in (0, 1)
    ]
    made = Made(rank, program_of(*scatters(MB, 16)))
    _, rows = launched(rank, made)
    assert [row[8:11] for row in rows] == [
        [made.tensors[r, Buffer.INPUT][number] for r in range(3)] for number in (0, 1)
    ]
    made = Made(rank, program_of(*reduces(MB, 12, in_place=True), variant="two_shot"))
    _, rows = launched(rank, made)
    assert [row[6] for row in rows] == [1, 1], "whole tiles are aligned, whatever the end of a tensor is"
    for row, number in zip(rows, (0, 1), strict=True):
        there = [made.tensors[r, Buffer.OUTPUT][number] for r in range(3)]
        assert row[8:11] == row[16:19] == there
        assert row[11:16] == row[19:24] == [0] * 5


@needs_triton
def test_nothing_to_move_needs_no_table(rank: Rank) -> None:
    for parts in ((), gathers(0, 0)):
        start(Made(rank, program_of(*parts)).loaded, 1, rank.stream).wait()
    assert rank.driver.launched == [] and not rank.driver.allocated


@needs_triton
def test_tables_go_with_what_was_loaded(rank: Rank) -> None:
    gc.disable()  # nothing goes in circles
    try:
        for count in range(700):  # 2 KB each, more than a chunk in all
            made = Made(rank, program_of(*gathers(*[16 + count] * 15)))
            _, rows = launched(rank, made)
            assert rows[0][2] == 16 + count
            del made
    finally:
        gc.enable()
    assert len(rank.driver.allocated) == 1


@needs_triton
def test_an_executor_that_is_dropped_goes_at_once(rank: Rank) -> None:
    other = Rank(30.0)
    Made(other, program_of(*gathers(16)))
    gone = weakref.ref(other.executor)
    gc.disable()
    try:
        driver = other.driver
        del other
        assert gone() is None
    finally:
        gc.enable()
    driver.stop()


@needs_triton
def test_a_rank_without_memory_tells_its_peers(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: KernelDriver, nbytes: int) -> int:
        raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc")

    monkeypatch.setattr(KernelDriver, "allocate", refuse)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        Made(rank, program_of(*gathers(16)))
    assert rank.monitor.aborted
    with pytest.raises(Exception, match="could not submit it"):
        rank.executor.check()
    rank.driver.kernel = lambda arguments: None
