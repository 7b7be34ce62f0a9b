"""Programs of GEMMs in parts (``ops.split_gemm`` and its siblings): what travels, and which part of it when.

to all        every part waits for its trigger, and goes to its rank in turn: turn t to the t-th rank behind
one part      of these, as a program of its own: for graphs, where nobody fires triggers, and for rows that go first
from all      a turn is a program: every rank sends a part of its rows to the t-th rank behind it
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from sidelane.program.collective import Span, split_evenly
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait

SPLIT_GEMM, SPLIT_GATHER = "split_gemm_all_to_all", "split_all_gather_gemm"
SPLIT_DISPATCH = "split_all_to_all_gemm"
"""Names of the operators; the first two of the programs' contracts, too."""


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

    def came(rank: int, source: int) -> Flag:
        return Flag(rank, most + n + source)

    for rank in range(n):
        sources = [(rank - turn) % n for turn in range(1, n)]
        commands: list[Command] = [Signal(ready(source, rank), EPOCH) for source in sources if table[source][rank]]
        met: set[int] = set()
        leaving = _leaving(table, rank, pieces)
        last = {to: number for number, to, _ in leaving}
        for trigger, (number, to, rows) in enumerate(leaving):
            nbytes = (rows.stop - rows.start) * row_bytes
            sent = Span(rank, "sent", rows.start * row_bytes, nbytes)
            computed = Span(rank, "computed", rows.start * row_bytes, nbytes)
            output = Span(to, "output", _there(table, rank, to, rows).start * row_bytes, nbytes)
            if to not in met:
                commands.append(Wait(ready(rank, to), EPOCH))
                met.add(to)
            commands += [Wait(Flag(rank, trigger), EPOCH), Copy(output, sent)]
            if number == last[to]:
                commands.append(Signal(came(to, rank), EPOCH))
            fires = (Copy(sent, computed), Signal(Flag(rank, trigger), EPOCH))
            queues.append(Queue(rank, Engine(EngineKind.CALLER, trigger), fires))
            results += [Result(sent, (computed,)), Result(output, (computed,))]
        commands += [Wait(came(rank, source), EPOCH) for source in sources if table[source][rank]]
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
    sizes = {name: [most_rows * row_bytes] * n for name in ("computed", "sent", "output")}
    contract = Contract.of(SPLIT_GEMM, sizes, results, computed=("computed",))
    return Program(contract, "pieces", tuple(queues), (0,) * n, most + 2 * n)


def numbers_of(table: Sequence[Sequence[int]], pieces: int) -> list[int]:
    """Numbers of the parts that any rank has, in their order: turn by turn, piece by piece."""
    return sorted({number for rank in range(len(table)) for number, _, _ in _leaving(table, rank, pieces)})


def rows_of(table: Sequence[Sequence[int]], rank: int, pieces: int, number: int) -> slice | None:
    """Rows of ``x`` in a part that leaves a rank; None if the rank has no such part."""
    return next((part for which, _, part in _leaving(table, rank, pieces) if which == number), None)


def rows_coming(table: Sequence[Sequence[int]], rank: int, pieces: int, number: int) -> slice | None:
    """Where in the output of a rank the rows of a part come; None if nobody sends it such a part.

    >>> table = ((1, 2), (3, 0))
    >>> [rows_of(table, 1, 2, number) for number in (0, 1)], [rows_coming(table, 0, 2, number) for number in (0, 1)]
    ([slice(0, 2, None), slice(2, 3, None)], [slice(1, 3, None), slice(3, 4, None)])
    """
    source = (rank - (number // pieces + 1)) % len(table)
    rows = rows_of(table, source, pieces, number)
    return None if rows is None else _there(table, source, rank, rows)


def part_program(table: Sequence[Sequence[int]], pieces: int, number: int, row_bytes: int, most_rows: int) -> Program:
    """One part of every rank goes from ``sent`` into the output of its rank, once that has no more use for it.

    Arguments as of :func:`split_program`; ``number`` is one of :func:`numbers_of`.
    """
    turn = number // pieces + 1

    def copy(rank: int) -> Copy | None:
        rows, to = rows_of(table, rank, pieces, number), (rank + turn) % len(table)
        if rows is None:
            return None
        nbytes, place = (rows.stop - rows.start) * row_bytes, _there(table, rank, to, rows).start * row_bytes
        return Copy(Span(to, "output", place, nbytes), Span(rank, "sent", rows.start * row_bytes, nbytes))

    sizes = dict.fromkeys(("sent", "output"), most_rows * row_bytes)
    return _turn(f"part {number} of {SPLIT_GEMM}", turn, sizes, list(map(copy, range(len(table)))))


def _there(table: Sequence[Sequence[int]], rank: int, to: int, rows: slice) -> slice:
    """Rows of a rank's ``x`` that are for another one, among those of the output there."""
    first = sum(row[to] for row in table[:rank]) - sum(table[rank][:to])
    return slice(first + rows.start, first + rows.stop)


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

    def copy(rank: int) -> Copy:
        begin, nbytes = (rank * rows + part.start) * row_bytes, (part.stop - part.start) * row_bytes
        return Copy(Span((rank + turn) % world_size, "rows", begin, nbytes), Span(rank, "rows", begin, nbytes))

    sizes = {"rows": world_size * rows * row_bytes}
    return _turn(f"turn {turn} of {SPLIT_GATHER}", turn, sizes, list(map(copy, range(world_size))))


def _turn(name: str, turn: int, sizes: Mapping[str, int], copies: Sequence[Copy | None]) -> Program:
    """A copy of each rank, or none, to the ``turn``-th rank behind it, once that says that it has no more use for what
    is there; ``sizes``: bytes of the buffers of every rank.
    """
    n, ready, came = len(copies), 0, 1
    queues = []
    for rank, copy in enumerate(copies):
        source, to = (rank - turn) % n, (rank + turn) % n
        comes = copies[source] is not None
        commands: list[Command] = [Signal(Flag(source, ready), EPOCH)] if comes else []
        if copy is not None:
            commands += [Wait(Flag(rank, ready), EPOCH), copy, Signal(Flag(to, came), EPOCH)]
        if comes:
            commands.append(Wait(Flag(rank, came), EPOCH))
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
    results = [Result(copy.dst, (copy.src,)) for copy in copies if copy is not None]
    contract = Contract.of(name, {buffer: [nbytes] * n for buffer, nbytes in sizes.items()}, results)
    return Program(contract, "pieces", tuple(queues), (0,) * n, 2)
