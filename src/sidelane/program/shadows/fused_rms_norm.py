"""Shadow of ``ops/rms_norm.py``: a cell is four bytes of data with a flag of their own. The norm itself is left out."""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.collective import Buffer, ReduceOp, Reduction, Span, all_reduce
from sidelane.program.ir import EPOCH, Command, Comparison, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.shadows.blocks import rotated
from sidelane.program.shadows.fused_gemv import added

SUM = Reduction(ReduceOp.SUM, "float32")
CELL = 4


def all_reduce_rms_norm(world_size: int, blocks: int, rows: int, words: int) -> tuple[Program, ...]:
    """Of even and of odd generations: rows go into cells of the others, and every rank adds up all of them.

    Args:
        world_size: ranks.
        blocks: of a grid.
        rows: tokens, of this launch and of the workspace.
        words: float32 of a row.
    """
    return tuple(_program(world_size, blocks, rows, words, parity) for parity in range(2))


def _program(n: int, blocks: int, rows: int, words: int, parity: int) -> Program:
    collective = all_reduce([CELL * rows * words] + [0] * (n - 1), SUM)

    def cell(sender: int, row: int, word: int) -> int:
        return ((parity * n + sender) * rows + row) * words + word

    def data(rank: int, sender: int, row: int, word: int) -> Span:
        return Span(rank, Buffer.STAGING, CELL * cell(sender, row, word), CELL)

    def commands(rank: int, block: int) -> Iterator[Command]:
        for row in range(block, rows, blocks):
            for peer in list(rotated(rank, n))[1:]:
                for word in range(words):
                    yield Copy(data(peer, rank, row, word), own(rank, row, word))
                    yield Signal(Flag(peer, cell(rank, row, word)), EPOCH)
        for row in range(block, rows, blocks):
            for sender in list(range(n)):
                for word in range(words) if sender != rank else ():
                    yield Wait(Flag(rank, cell(sender, row, word)), EPOCH, Comparison.EQ)
            for word in range(words):
                srcs = (
                    own(rank, row, word) if sender == rank else data(rank, sender, row, word) for sender in range(n)
                )
                yield from added(collective.output_span(rank, CELL * (row * words + word), CELL), tuple(srcs))

    def own(rank: int, row: int, word: int) -> Span:
        return collective.input_span(rank, CELL * (row * words + word), CELL)

    queues = tuple(
        Queue(rank, Engine(EngineKind.COMPUTE, block), tuple(commands(rank, block)))
        for rank in range(n)
        for block in range(blocks)
    )
    cells = 2 * n * rows * words
    return Program(collective, "all_reduce_rms_norm, in a kernel", queues, (CELL * cells,) * n, cells)
