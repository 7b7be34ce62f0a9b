"""Programs of GEMMs in parts (``ops.pipelined_gemm``): the parts that travel, and their order.

computed, then sent   every part waits for its trigger, and goes to its rank in turn: turn t to the t-th rank behind
sent, then computed   parts go in the same order; each one is an arrival, behind which it is read
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from sidelane.program.collective import Span, split_evenly
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait

SPLIT_GEMM, SPLIT_GATHER = "split_gemm_all_to_all", "split_all_gather_gemm"
SPLIT_DISPATCH = "split_all_to_all_gemm"
"""Names of the operators and of their programs' contracts."""

TILE_ROWS = 128
"""Number of rows of a tile of the library's GEMM, or a multiple of it."""


def going(table: Sequence[Sequence[int]], rank: int, pieces: int) -> list[slice]:
    """Return the rows of ``x`` in each part that leaves a rank, ordered by turn, then by piece; none is empty."""
    return [part for _, _, part in _leaving(table, rank, pieces)]


def split_program(table: Sequence[Sequence[int]], pieces: int, row_bytes: int, most_rows: int) -> Program:
    """Send rows of ``sent`` into the outputs of their receivers, each part when its trigger fires.

    Args:
        table: number of rows from rank i to rank j in row i, column j.
        pieces: number of pieces of the rows for each peer.
        row_bytes: size of a row of the result in bytes.
        most_rows: number of rows of both buffers.
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


def arriving_program(table: Sequence[Sequence[int]], pieces: int, row_bytes: int, most_rows: int) -> Program:
    """Send rows of ``sent`` into ``came`` of their receivers; each part is an arrival there.

    The arguments are those of :func:`split_program`.
    """
    copies = []
    for rank in range(len(table)):
        for number, to, rows in _leaving(table, rank, pieces):
            nbytes, place = (rows.stop - rows.start) * row_bytes, _there(table, rank, to, rows).start * row_bytes
            copies.append(
                (number, Copy(Span(to, "came", place, nbytes), Span(rank, "sent", rows.start * row_bytes, nbytes)))
            )
    sizes = dict.fromkeys(("sent", "came"), most_rows * row_bytes)
    return _arriving(SPLIT_DISPATCH, len(table), sizes, copies)


def coming(table: Sequence[Sequence[int]], rank: int, pieces: int) -> list[slice]:
    """Return the places in ``came`` of the parts that arrive at a rank, ordered by turn, then by piece."""
    n = len(table)
    found = []
    for turn in range(1, n):
        source = (rank - turn) % n
        parts = [rows for _, to, rows in _leaving(table, source, pieces) if to == rank]
        found += [_there(table, source, rank, rows) for rows in parts]
    return found


def _there(table: Sequence[Sequence[int]], rank: int, to: int, rows: slice) -> slice:
    """Return the place in the receiver's output of rows of a rank's ``x`` that are for it."""
    first = sum(row[to] for row in table[:rank]) - sum(table[rank][:to])
    return slice(first + rows.start, first + rows.stop)


def _leaving(table: Sequence[Sequence[int]], rank: int, pieces: int) -> list[tuple[int, int, slice]]:
    """Return number, receiver and rows of each part; the numbers of parts that would be empty are left out."""
    n = len(table)
    found = []
    for turn in range(1, n):
        to = (rank + turn) % n
        ends = itertools.accumulate(split_evenly(table[rank][to], pieces), initial=sum(table[rank][:to]))
        for piece, (first, stop) in enumerate(itertools.pairwise(ends)):
            if stop > first:
                found.append(((turn - 1) * pieces + piece, to, slice(first, stop)))
    return found


def row_slices(rows: int, pieces: int) -> list[slice]:
    """Return the rows of each part; none is empty."""
    ends = itertools.accumulate(split_evenly(rows, pieces), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]]


def gathering_program(world_size: int, rows: int, pieces: int, row_bytes: int) -> Program:
    """Send every rank's rows to all others, turn by turn; each part of a rank's rows is an arrival.

    Args:
        world_size: number of ranks.
        rows: number of rows of each rank, one rank after the other in the buffer ``rows`` of every rank.
        pieces: number of pieces of the rows of a rank.
        row_bytes: size of a row in bytes.
    """
    copies = []
    for rank, turn in itertools.product(range(world_size), range(1, world_size)):
        for piece, part in enumerate(row_slices(rows, pieces)):
            begin, nbytes = (rank * rows + part.start) * row_bytes, (part.stop - part.start) * row_bytes
            to = (rank + turn) % world_size
            copy = Copy(Span(to, "rows", begin, nbytes), Span(rank, "rows", begin, nbytes))
            copies.append(((turn - 1) * pieces + piece, copy))
    return _arriving(SPLIT_GATHER, world_size, {"rows": world_size * rows * row_bytes}, copies)


def _arriving(name: str, n: int, sizes: Mapping[str, int], copies: Sequence[tuple[int, Copy]]) -> Program:
    """Build a program of copies between ranks. A rank begins to send to another one once that one no longer uses the
    destination.

    Args:
        name: name of the contract.
        n: number of ranks.
        sizes: bytes of the buffers of every rank, by name.
        copies: copies with their numbers: a number is unique among the copies from a rank, and among those to a rank.
    """
    most = max((number for number, _ in copies), default=-1) + 1

    def ready(rank: int, receiver: int) -> Flag:
        return Flag(rank, receiver)

    def came(rank: int, number: int) -> Flag:
        return Flag(rank, n + number)

    def read(rank: int, number: int) -> Flag:
        return Flag(rank, n + most + number)

    queues: list[Queue] = []
    results: list[Result] = []
    for rank in range(n):
        leaving = sorted((one for one in copies if one[1].src.rank == rank), key=lambda one: one[0])
        coming = sorted((one for one in copies if one[1].dst.rank == rank), key=lambda one: one[0])
        sources = dict.fromkeys(copy.src.rank for _, copy in coming)
        sends: list[Command] = [Signal(ready(source, rank), EPOCH) for source in sources]
        met: set[int] = set()
        for number, copy in leaving:
            if copy.dst.rank not in met:
                sends.append(Wait(ready(rank, copy.dst.rank), EPOCH))
                met.add(copy.dst.rank)
            sends += [copy, Signal(came(copy.dst.rank, number), EPOCH)]
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(sends)))
        tells: list[Command] = []
        for arrival, (number, copy) in enumerate(coming):
            tells += [Wait(came(rank, number), EPOCH), Signal(read(rank, number), EPOCH)]
            use = Span(rank, "used", copy.dst.offset, copy.dst.nbytes)
            reads = (Wait(read(rank, number), EPOCH), Copy(use, copy.dst))
            queues.append(Queue(rank, Engine(EngineKind.CALLER, arrival), reads))
            results += [Result(copy.dst, (copy.src,)), Result(use, (copy.src,))]
        queues.append(Queue(rank, Engine(EngineKind.DMA, 1), tuple(tells)))
    buffers = {buffer: [nbytes] * n for buffer, nbytes in {**sizes, "used": max(sizes.values())}.items()}
    contract = Contract.of(name, buffers, results, used=("used",))
    return Program(contract, "pieces", tuple(queues), (0,) * n, n + 2 * most)


def row_parts(rows: int, pieces: int) -> list[slice]:
    """Return at most so many parts of rows of equal size, whole tiles of a GEMM if they are larger than one.

    >>> [(part.start, part.stop) for rows in (1000, 5) for part in row_parts(rows, 3)]
    [(0, 384), (384, 768), (768, 1000), (0, 2), (2, 4), (4, 5)]
    """
    size = -(-rows // pieces)
    if size > TILE_ROWS:
        size = -(-size // TILE_ROWS) * TILE_ROWS
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
