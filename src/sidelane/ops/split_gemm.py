"""split_gemm_all_to_all: the vendor's GEMM in parts, each on its way by copy engines while the next one is computed.

Equivalent: ``y = x @ weight.T``, then an all-to-all with split sizes (``reference.gemm_all_to_all``). No compute unit
moves data, and the library's GEMM computes, which is faster than any of Triton's (docs/lab/kernels.md). What is lost:
parts are smaller, and the host has to know how many rows go where; a graph keeps those of its capture.

Two ranks, two pieces; the rows that stay come last, and are computed where they belong::

    compute      rows for 1, first half | second half     | rows for 0
    copy engine                         | first half -> 1 | second half -> 1

All copies are one program, which waits with the engines from the begin on; each part that is finished releases its own
(``sidelane.program.transform.triggers``). Turn t takes the rows for the t-th rank behind this one, so that every rank
sends to one and receives from one other.

In a graph nobody fires triggers. There each part is a program of its own, captured behind what computes it, next to
what computes the following one. That takes a handshake a part, which the computation hides, and many launches, which a
graph does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch

from sidelane.collectives import BoundProgram, Communicator
from sidelane.ops.handle import FLOATS, check_tensor, is_captured, kept, telling_refusals
from sidelane.ops.operands import MOST_ELEMENTS
from sidelane.program.pieces import SPLIT_GEMM, going, numbers_of, part_program, rows_of, split_program

NAME = SPLIT_GEMM
MOST_PIECES, DEFAULT_PIECES = 64, 2
MOST_TABLES = 8
"""Routings that a communicator keeps programs for; an older one is proved and bound again."""

Counts = Sequence[Sequence[int]] | torch.Tensor
Table = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(slots=True)
class Routing:
    """Programs for one table and number of pieces.

    Attributes:
        whole: all parts, each behind its trigger.
        parts: each by itself, with this rank's rows in it, None where it has none; None until they are made.
        in_a_graph: a graph holds the parts, so that they must stay.
    """

    whole: BoundProgram
    parts: tuple[tuple[slice | None, BoundProgram], ...] | None = None
    in_a_graph: bool = False

    def close(self) -> None:
        for program in (self.whole, *(program for _, program in self.parts or ())):
            program.close()


class SplitGemmAllToAll:
    """Buffers of :func:`split_gemm_all_to_all` for some sizes, and programs for some routings. Collective.

    Args:
        comm: the ranks.
        most_rows: that any rank sends or gets.
        columns: H, of the result.
        dtype: of x, weight and result: float32, float16 or bfloat16.
    """

    def __init__(self, comm: Communicator, most_rows: int, columns: int, dtype: torch.dtype) -> None:
        self.comm, self._row_bytes, self._most_rows = comm, columns * dtype.itemsize, most_rows
        self._sent, self._output = (comm.empty(most_rows, columns, dtype=dtype) for _ in range(2))
        self.routings: dict[tuple[Table, int], Routing] = {}
        self._loaded: set[Hashable] = set()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, table: Table, pieces: int) -> torch.Tensor:
        """Run it. Arguments, result and errors as of :func:`split_gemm_all_to_all`."""
        captured = is_captured(self.comm)
        routing = self.routing(table, pieces, in_graphs=captured)
        x, weight = _for_the_library(x), _for_the_library(weight)
        if captured:
            routing.in_a_graph = True
            return self.part_by_part(x, weight, table, routing)
        parts = going(table, self.comm.rank, pieces)
        self._load(x, weight, parts)
        work = routing.whole(async_op=True)
        for number, rows in enumerate(parts):
            torch.mm(x[rows], weight.t(), out=self._sent[rows])
            routing.whole.trigger(number)
        self._compute_what_stays(x, weight, table)
        assert work is not None
        work.wait()
        return self._output

    def part_by_part(self, x: torch.Tensor, weight: torch.Tensor, table: Table, routing: Routing) -> torch.Tensor:
        """The same without triggers, as graphs need it."""
        assert routing.parts is not None
        under_way = []
        for rows, program in routing.parts:
            if rows is not None:
                torch.mm(x[rows], weight.t(), out=self._sent[rows])
            under_way.append(program(async_op=True))
        self._compute_what_stays(x, weight, table)
        for work in under_way:
            assert work is not None
            work.wait()
        return self._output

    def routing(self, table: Table, pieces: int, *, in_graphs: bool = False) -> Routing:
        """Programs for such counts, made by all ranks together where they are new. Those of graphs are made when counts
        come a second time, since routing that changes with every call would make many for nothing; or when asked for.
        """
        key = table, pieces
        buffers, sizes = {"sent": self._sent, "output": self._output}, (self._row_bytes, self._most_rows)
        found = self.routings.pop(key, None)
        again = found is not None
        if found is None:
            found = Routing(self.comm.load(split_program(table, pieces, *sizes), buffers))
            # What graphs hold stays with them.
            loose = [known for known, routing in self.routings.items() if not routing.in_a_graph]
            if len(loose) >= MOST_TABLES:
                self.routings.pop(loose[0]).close()
        self.routings[key] = found  # the latest comes last
        if found.parts is None and (again or in_graphs):
            found.parts = tuple(
                (
                    rows_of(table, self.comm.rank, pieces, number),
                    self.comm.load(part_program(table, pieces, number, *sizes), buffers),
                )
                for number in numbers_of(table, pieces)
            )
        return found

    def _compute_what_stays(self, x: torch.Tensor, weight: torch.Tensor, table: Table) -> None:
        rank = self.comm.rank
        first, place = sum(table[rank][:rank]), sum(row[rank] for row in table[:rank])
        if stays := table[rank][rank]:
            torch.mm(x[first : first + stays], weight.t(), out=self._output[place : place + stays])

    def _load(self, x: torch.Tensor, weight: torch.Tensor, parts: Sequence[slice]) -> None:
        """Compute parts of new sizes once: to load a kernel, or to allocate what it needs, may wait for the device,
        and so, once the program has begun, for triggers that would never come (docs/internals/prelaunch.md).
        """
        cuda = torch.backends.cuda.matmul
        settings = (
            cuda.allow_tf32,
            cuda.allow_fp16_reduced_precision_reduction,
            cuda.allow_bf16_reduced_precision_reduction,
        )
        stream = torch.cuda.current_stream().cuda_stream if x.device.type == "cuda" else 0
        for part in (x[rows] for rows in parts):
            laid_out = [(tensor.shape, tensor.stride(), tensor.data_ptr() % 16) for tensor in (part, weight)]
            key = (*laid_out, settings, stream)
            if key not in self._loaded:
                torch.mm(part, weight.t())
                self._loaded.add(key)


def split_gemm_all_to_all(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: Counts,
    *,
    most_rows: int,
    pieces: int = DEFAULT_PIECES,
) -> torch.Tensor:
    """``x @ weight.T`` whose rows go to the ranks that ``counts`` says, part by part. A call of the communicator.

    The first call of a shape allocates, and the first one with some counts proves and binds their program (some
    milliseconds), with all ranks, the second one those that graphs need; those of eight are kept, and of graphs.

    Args:
        comm: the ranks.
        x: rows for rank 0, for rank 1, and so on, [rows, K]. Ranks may have different numbers of rows; those beyond
            what ``counts`` says stay.
        weight: [H, K], of x's dtype: float32, float16 or bfloat16.
        counts: rows from rank i to rank j in row i, column j; on the host, since the copies are the host's. The same on
            all ranks.
        most_rows: that any rank sends or gets, the same on all ranks and in all calls of a shape.
        pieces: of the rows for each peer, the same on all ranks: more of them begin to travel earlier, and are smaller
            to compute.

    Returns:
        [most_rows, H]: rows from rank 0, from rank 1, and so on; behind them what was there. The next call of this
        shape writes it again.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has moved.
        UnavailableError: inside of a capture: a new shape, or counts that have not come twice.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, NAME):
        table = _checked(comm, x, weight, counts, most_rows, pieces)
    return handle_of(comm, most_rows, weight.shape[0], weight.dtype)(x, weight, table, pieces)


def handle_of(comm: Communicator, most_rows: int, columns: int, dtype: torch.dtype) -> SplitGemmAllToAll:
    """What :func:`split_gemm_all_to_all` keeps for a shape, made by all ranks together where it is new."""
    return kept(comm, (NAME, most_rows, columns, dtype), lambda: SplitGemmAllToAll(comm, most_rows, columns, dtype))


def has_routing(
    comm: Communicator, most_rows: int, columns: int, dtype: torch.dtype, table: Table, pieces: int
) -> bool:
    """Whether a graph can hold a call with such counts: the ranks have made it before."""
    handle: SplitGemmAllToAll | None = comm.kept.get((NAME, most_rows, columns, dtype))
    routing = None if handle is None else handle.routings.get((table, pieces))
    return routing is not None and routing.parts is not None


def _for_the_library(matrix: torch.Tensor) -> torch.Tensor:
    """One that the library's GEMM reads as it lies, without a copy that has to be allocated."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return matrix if (across == 1 and down >= columns) or (down == 1 and across >= rows) else matrix.contiguous()


def check_pieces(name: str, pieces: int) -> None:
    """Refuse a number of pieces that there is not. Raises ValueError."""
    if not 1 <= pieces <= MOST_PIECES:
        raise ValueError(f"{name}: pieces (value={pieces}, allowed=1..{MOST_PIECES})")


def _checked(comm: Communicator, x: object, weight: object, counts: Counts, most_rows: int, pieces: int) -> Table:
    """The counts as numbers."""
    check_tensor(NAME, "weight", weight, comm.device, FLOATS, (2,))
    assert isinstance(weight, torch.Tensor)
    check_tensor(NAME, "x", x, comm.device, (weight.dtype,), (2,))
    assert isinstance(x, torch.Tensor)
    n = comm.world_size
    check_pieces(NAME, pieces)
    if most_rows < 1 or not weight.shape[0] or most_rows * weight.shape[0] > MOST_ELEMENTS:
        given, allowed = f"{most_rows}, {weight.shape[0]}", f"1 and more, {MOST_ELEMENTS} together"
        raise ValueError(f"{NAME}: most_rows, columns of the result (value={given}, allowed={allowed})")
    if x.shape[1] != weight.shape[1] or not x.shape[1]:
        raise ValueError(f"{NAME}: columns of x (value={x.shape[1]}, allowed={weight.shape[1]}, those of the weight)")
    if isinstance(counts, torch.Tensor) and counts.device.type != "cpu":
        raise ValueError(f"{NAME}: device of counts (value={counts.device}, allowed=cpu: the host has to know them)")
    table = tuple(tuple(int(count) for count in row) for row in counts)
    if [len(row) for row in table] != [n] * n:
        raise ValueError(f"{NAME}: rows of counts (value={[len(row) for row in table]}, allowed={[n] * n})")
    sends, gets = list(map(sum, table)), list(map(sum, zip(*table, strict=True)))
    if min(map(min, table)) < 0 or sends[comm.rank] > x.shape[0] or max(*sends, *gets) > most_rows:
        given = f"{sends[comm.rank]} sent of {x.shape[0]}, {max(*sends, *gets)} to or from a rank"
        raise ValueError(f"{NAME}: counts (value={given}, allowed=rows of x, up to {most_rows}, none negative)")
    return table
