"""Programs of GEMMs in parts (``ops.split_gemm``, ``ops.split_gather_gemm``): what travels, and which part of it when.

to all        every part waits for its trigger, and goes to its rank in turn: turn t to the t-th rank behind
one part      of these, as a program of its own, for graphs: nobody fires triggers there
from all      a turn is a program: every rank sends a part of its rows to the t-th rank behind it
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sidelane.program.collective import Span, split_evenly
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait

SPLIT_GEMM, SPLIT_GATHER = "split_gemm_all_to_all", "split_all_gather_gemm"
"""Names of the operators, and of the programs' contracts."""


def going(table: Sequence[Sequence[int]], rank: int, pieces: int) -> list[slice]:
    """Rows of ``x`` in each part that leaves a rank, in their order: by turn, then by piece; none is empty."""
    return [part for _, _, part in _leaving(table, rank, pieces)]


def split_program(table: Sequence[Sequence[int]], pieces: int, row_bytes: int, most_rows: int) -> Program:
    """Rows of ``sent`` go into the outputs of the ranks that they are for, each part when its trigger fires.

    Args:
        table: rows from rank i to rank j in row i, column j.
        pieces: of the rows for each peer.
        row_bytes: of a row of the result.
        most_rows: of both buffers.
    """
    n = len(table)
    most = (n - 1) * pieces
    queues: list[Queue] = []
    results: list[Result] = []

    def ready(rank: int, receiver: int) -> Flag:
        return Flag(rank, most + receiver)

    def came(rank: int, number: int) -> Flag:
        return Flag(rank, most + n + number)

    for rank in range(n):
        sources = [(rank - turn) % n for turn in range(1, n)]
        commands: list[Command] = [Signal(ready(source, rank), EPOCH) for source in sources if table[source][rank]]
        met: set[int] = set()
        for trigger, (number, to, rows) in enumerate(_leaving(table, rank, pieces)):
            nbytes = (rows.stop - rows.start) * row_bytes
            inside = rows.start - sum(table[rank][:to])
            sent = Span(rank, "sent", rows.start * row_bytes, nbytes)
            computed = Span(rank, "computed", rows.start * row_bytes, nbytes)
            place = (sum(row[to] for row in table[:rank]) + inside) * row_bytes
            output = Span(to, "output", place, nbytes)
            if to not in met:
                commands.append(Wait(ready(rank, to), EPOCH))
                met.add(to)
            commands += [Wait(Flag(rank, trigger), EPOCH), Copy(output, sent), Signal(came(to, number), EPOCH)]
            fires = (Copy(sent, computed), Signal(Flag(rank, trigger), EPOCH))
            queues.append(Queue(rank, Engine(EngineKind.CALLER, trigger), fires))
            results += [Result(sent, (computed,)), Result(output, (computed,))]
        for source in sources:
            commands += [
                Wait(came(rank, number), EPOCH) for number, to, _ in _leaving(table, source, pieces) if to == rank
            ]
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
    sizes = {name: [most_rows * row_bytes] * n for name in ("computed", "sent", "output")}
    contract = Contract.of(SPLIT_GEMM, sizes, results, computed=("computed",))
    return Program(contract, "pieces", tuple(queues), (0,) * n, 2 * most + n)


def numbers_of(table: Sequence[Sequence[int]], pieces: int) -> list[int]:
    """Numbers of the parts that any rank has, in their order: turn by turn, piece by piece."""
    return sorted({number for rank in range(len(table)) for number, _, _ in _leaving(table, rank, pieces)})


def rows_of(table: Sequence[Sequence[int]], rank: int, pieces: int, number: int) -> slice | None:
    """Rows of ``x`` in a part that leaves a rank; None if the rank has no such part."""
    return next((part for which, _, part in _leaving(table, rank, pieces) if which == number), None)


def part_program(table: Sequence[Sequence[int]], pieces: int, number: int, row_bytes: int, most_rows: int) -> Program:
    """One part of every rank goes from ``sent`` into the output of its rank, once that has no more use for it.

    Arguments as of :func:`split_program`; ``number`` is one of :func:`numbers_of`.
    """
    n, ready, came = len(table), 0, 1
    turn = number // pieces + 1
    queues, results = [], []
    for rank in range(n):
        source, to = (rank - turn) % n, (rank + turn) % n
        rows, comes = (rows_of(table, sender, pieces, number) for sender in (rank, source))
        commands: list[Command] = []
        if comes is not None:
            commands.append(Signal(Flag(source, ready), EPOCH))
        if rows is not None:
            nbytes = (rows.stop - rows.start) * row_bytes
            place = (sum(row[to] for row in table[:rank]) + rows.start - sum(table[rank][:to])) * row_bytes
            sent, output = Span(rank, "sent", rows.start * row_bytes, nbytes), Span(to, "output", place, nbytes)
            commands += [Wait(Flag(rank, ready), EPOCH), Copy(output, sent), Signal(Flag(to, came), EPOCH)]
            results.append(Result(output, (sent,)))
        if comes is not None:
            commands.append(Wait(Flag(rank, came), EPOCH))
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
    sizes = {name: [most_rows * row_bytes] * n for name in ("sent", "output")}
    contract = Contract.of(f"part {number} of {SPLIT_GEMM}", sizes, results)
    return Program(contract, "pieces", tuple(queues), (0,) * n, 2)


def _leaving(table: Sequence[Sequence[int]], rank: int, pieces: int) -> list[tuple[int, int, slice]]:
    """Number, receiver and rows of each part; the numbers of parts that would be empty are left out."""
    n = len(table)
    found = []
    for turn in range(1, n):
        to = (rank + turn) % n
        ends = itertools.accumulate(split_evenly(table[rank][to], pieces), initial=sum(table[rank][:to]))
        for piece, (first, stop) in enumerate(itertools.pairwise(ends)):
            if stop > first:
                found.append(((turn - 1) * pieces + piece, to, slice(first, stop)))
    return found


def parts_of(rows: int, pieces: int) -> list[slice]:
    """Rows in each part; none is empty."""
    ends = itertools.accumulate(split_evenly(rows, pieces), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]]


def turn_program(world_size: int, turn: int, rows: int, part: slice, row_bytes: int) -> Program:
    """A part of every rank's rows goes to the ``turn``-th rank behind it, once that has no more use for what is there.

    Args:
        world_size: ranks.
        turn: from 1.
        rows: of each rank, one after the other in the buffer ``rows`` of every rank.
        part: of the rows of a rank.
        row_bytes: of a row.
    """
    n, ready, came = world_size, 0, 1
    queues, results = [], []
    for rank in range(n):
        source, to = (rank - turn) % n, (rank + turn) % n
        begin, nbytes = (rank * rows + part.start) * row_bytes, (part.stop - part.start) * row_bytes
        src, dst = Span(rank, "rows", begin, nbytes), Span(to, "rows", begin, nbytes)
        commands = (
            *(Signal(Flag(source, ready), EPOCH), Wait(Flag(rank, ready), EPOCH)),
            *(Copy(dst, src), Signal(Flag(to, came), EPOCH), Wait(Flag(rank, came), EPOCH)),
        )
        queues.append(Queue(rank, Engine(EngineKind.DMA), commands))
        results.append(Result(dst, (src,)))
    contract = Contract.of(f"turn {turn} of {SPLIT_GATHER}", {"rows": [n * rows * row_bytes] * n}, results)
    return Program(contract, "pieces", tuple(queues), (0,) * n, 2)
