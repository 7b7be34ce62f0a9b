"""Programs in pieces through staging: proved for every collective, number of ranks and slots, and bounded in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from marks import long

from sidelane.execute.cuda.release import READ_CAPACITY
from sidelane.program import collective as define
from sidelane.program.batch import Batch
from sidelane.program.builders.chunked import MOST_FLAGS, SLOTS, chunked
from sidelane.program.collective import Buffer, Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import Copy, EngineKind, Reduce, reads, writes
from sidelane.program.verify import verify

SUM = Reduction(ReduceOp.SUM, "int32")
PIECE = 16384


def collectives(n: int, nbytes: int) -> Iterator[Collective]:
    uneven, whole = [nbytes + 36 * rank for rank in range(n)], nbytes // 4 * 4
    yield define.all_gather([nbytes] * n)
    yield define.broadcast(nbytes, n, root=n - 1)
    yield define.scatter(uneven, root=n // 2)
    yield define.gather(uneven, root=0)
    yield define.all_to_all([[uneven[(i + j) % n] for j in range(n)] for i in range(n)])
    for in_place in (False, True):
        yield define.all_gather(uneven, in_place=in_place)
        yield define.all_to_all([[nbytes] * n] * n, in_place=in_place)
        yield define.reduce_scatter([whole + 4 * rank for rank in range(n)], SUM, in_place=in_place)
        yield define.all_reduce([max(0, whole - 400 * rank) for rank in range(n)], SUM, in_place=in_place)


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4, long(5), long(7), 8])
def test_every_collective_is_proved(n: int, slots: int) -> None:
    for nbytes in (0, 1, 1000, 70000) if n < 5 else (1000, 40000):
        made = tuple(collectives(n, nbytes))
        moving = tuple(part for part in made if not (part.in_place and part.kind is Kind.ALL_TO_ALL))
        for definition in (*made, Batch("batch", n, made), Batch("batch", n, moving)):
            verify(chunked(definition, piece_bytes=PIECE, slots=slots))


@pytest.mark.parametrize("n", [2, 3, 8, long(16)])
def test_a_large_call_takes_little_staging_and_few_flags(n: int) -> None:
    assert MOST_FLAGS < READ_CAPACITY
    for nbytes in (1 << 20, 8 << 30):
        part = nbytes // n // 4 * 4
        for definition in (
            define.all_gather([part] * n),
            define.all_to_all([[part] * n] * n),
            define.broadcast(nbytes, n, 0),
            define.all_reduce([part] * n, SUM),
            Batch("batch", n, tuple(collectives(n, part))[: 13 - n // 16]),  # 13 among 16 ranks take 514 flags
        ):
            program = chunked(definition)
            assert program.flag_count <= READ_CAPACITY
            in_place = isinstance(definition, Batch)
            assert in_place or max(program.staging_bytes) <= max(4 * SLOTS << 20, nbytes // 2)


def test_one_engine_goes_out_and_another_one_in() -> None:
    program = chunked(define.all_reduce([4 << 20] * 2, SUM))
    for queue in program.queues:
        moves = [command for command in queue.commands if isinstance(command, Copy | Reduce)]
        for move in moves:
            outward = all(span.rank == queue.rank and span.buffer == Buffer.STAGING for span in writes(move))
            inward = any(span.rank != queue.rank and span.buffer == Buffer.STAGING for span in reads(move))
            assert (outward, inward) == ((True, False) if str(queue.engine) == "dma:0" else (False, True))
        assert len(moves) > 3, "it is in pieces"
    assert {queue.engine.kind for queue in program.queues} == {EngineKind.DMA, EngineKind.COMPUTE}
