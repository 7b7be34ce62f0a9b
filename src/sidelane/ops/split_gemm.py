"""split_gemm_all_to_all and split_all_to_all_gemm: the vendor's GEMM in parts that copy engines take, or bring.

Equivalent: ``y = x @ weight.T``, then an all-to-all with split sizes, or the all-to-all first (``reference``). No
compute unit moves data, and the library's GEMM computes, which is faster than any of Triton's (docs/lab/kernels.md).
The price: parts are smaller, and the host has to know the counts; a graph keeps those of its capture.

Computed and then sent, two ranks, two pieces; the rows that stay come last, and are computed in place::

    compute      rows for 1, first half | second half     | rows for 0
    copy engine                         | first half -> 1 | second half -> 1

All copies are one program, which waits with the engines from the begin on; each finished part releases its own copy
(``sidelane.program.transform.triggers``), in a graph as a dependency of its copy. Turn t takes the rows for the t-th
rank behind this one, so that every rank sends to one and receives from one other.

Sent and then computed; the product of a part waits for its arrival, and the first part needs no copy::

    compute      rows that stay           | first half of 1 | second half of 1
    copy engine  first half | second half |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, TypeVar

import torch

from sidelane.choice import fused_heuristic
from sidelane.choice.fused import FUSED, SPLIT, UNFUSED, Method
from sidelane.ops.auto import OperatorCall, agree
from sidelane.ops.buffer_turn import in_turn
from sidelane.ops.handle import is_captured, kept, power_of_two, telling_refusals
from sidelane.ops.operands import Routed, apart_from, check_most_rows, check_product
from sidelane.program.ir import Program
from sidelane.program.pieces import SPLIT_DISPATCH, SPLIT_GEMM, arriving_program, coming, going, split_program
from sidelane.session import BoundProgram, Communicator

MOST_PIECES, DEFAULT_PIECES = 64, fused_heuristic.PIECES
MOST_TABLES = 8
"""Largest number of routings whose programs a communicator keeps; an older one is proved and bound again."""

Counts = Sequence[Sequence[int]] | torch.Tensor
Table = tuple[tuple[int, ...], ...]
Maker = Callable[[Table, int, int, int], Program]


@dataclasses.dataclass(slots=True)
class Routing:
    """The program for one table and number of pieces, and all that a call would else derive from these again.

    Attributes:
        program: program of all parts.
        parts: rows of this rank's parts, in the order of its triggers or arrivals.
        views: these rows of the buffer that the products write or read, a tensor each.
        stays: rows of x that stay on this rank, and their place in the result; both empty if there are none.
        in_a_graph: a graph holds it, so that it must stay.
        loaded: layouts of x and weight whose products of these parts have been loaded.
    """

    program: BoundProgram
    parts: tuple[slice, ...]
    views: tuple[torch.Tensor, ...]
    stays: tuple[slice, slice]
    in_a_graph: bool = False
    loaded: set[Hashable] = dataclasses.field(default_factory=set)


class Routings:
    """Programs for some routings between two buffers of every rank.

    Args:
        comm: communicator of the ranks.
        make: function that makes the program of a table, pieces, bytes of a row and most rows (``program.pieces``).
        parts_of: function that returns this rank's parts of a table, pieces and rank, as rows of ``of_parts``.
        buffers: buffers of that program, by name, each [most_rows, columns] in symmetric memory.
        of_parts: name of the buffer whose rows are parts.
    """

    def __init__(
        self,
        comm: Communicator,
        make: Maker,
        parts_of: Callable[[Table, int, int], list[slice]],
        buffers: dict[str, torch.Tensor],
        of_parts: str,
    ) -> None:
        self._comm, self._make, self._parts_of, self._buffers = comm, make, parts_of, buffers
        self._of_parts = buffers[of_parts]
        self._sizes = self._of_parts.shape[1] * self._of_parts.element_size(), self._of_parts.shape[0]
        self.known: dict[tuple[Table, int], Routing] = {}

    def of(self, table: Table, pieces: int) -> Routing:
        """Return the program for such counts; all ranks make it together if they are new."""
        key = table, pieces
        found = self.known.pop(key, None)
        if found is None:
            program = self._comm.load(self._make(table, pieces, *self._sizes), self._buffers)
            rank = self._comm.rank
            parts = tuple(self._parts_of(table, rank, pieces))
            with torch.inference_mode(False), torch.no_grad():
                views = tuple(self._of_parts[rows] for rows in parts)
            first, place, stay = sum(table[rank][:rank]), sum(row[rank] for row in table[:rank]), table[rank][rank]
            found = Routing(program, parts, views, (slice(first, first + stay), slice(place, place + stay)))
            # Programs that graphs hold stay.
            loose = [known for known, routing in self.known.items() if not routing.in_a_graph]
            if len(loose) >= MOST_TABLES:
                self.known.pop(loose[0]).program.close()
        self.known[key] = found  # the latest comes last
        return found


class SplitByCounts:
    """Buffers of a GEMM in parts for some sizes, and programs for some routings. Collective.

    Args:
        comm: communicator of the ranks.
        most_rows: largest number of rows that any rank sends or gets.
        width: number of columns of the rows that travel.
        dtype: dtype of the rows: float32, float16 or bfloat16.
    """

    name: ClassVar[str]
    program: ClassVar[Maker]
    parts: ClassVar[Callable[[Table, int, int], list[slice]]]
    target: ClassVar[str]
    """Name of the program's buffer that receives the rows."""
    of_parts: ClassVar[str]
    """Name of the buffer whose rows are the parts of the products."""

    def __init__(self, comm: Communicator, most_rows: int, width: int, dtype: torch.dtype) -> None:
        self.comm, self._most_rows = comm, most_rows
        self._sent, self._came = (comm.empty(most_rows, width, dtype=dtype) for _ in range(2))
        buffers = {"sent": self._sent, self.target: self._came}
        self.routings = Routings(comm, type(self).program, type(self).parts, buffers, self.of_parts)
        self._in_turn = in_turn(comm)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, table: Table, pieces: int) -> torch.Tensor:
        """Run the operator, with the counts as numbers."""
        with torch.no_grad(), self._in_turn:
            routing = self.routings.of(table, pieces)
            routing.in_a_graph |= is_captured(self.comm)
            return self._run(x, weight, table, routing)

    def _run(self, x: torch.Tensor, weight: torch.Tensor, table: Table, routing: Routing) -> torch.Tensor:
        raise NotImplementedError


def _compute_what_stays(x: torch.Tensor, transposed: torch.Tensor, output: torch.Tensor, routing: Routing) -> None:
    rows, place = routing.stays
    if rows.stop > rows.start:
        torch.mm(x[rows], transposed, out=output[place])


class SplitGemmAllToAll(SplitByCounts):
    """Buffers and programs of :func:`split_gemm_all_to_all`."""

    name, program, parts, target, of_parts = SPLIT_GEMM, split_program, going, "output", "sent"

    def __init__(self, comm: Communicator, most_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(comm, most_rows, width, dtype)
        self._loaded: set[Hashable] = set()

    def _run(self, x: torch.Tensor, weight: torch.Tensor, table: Table, routing: Routing) -> torch.Tensor:
        x, weight = _for_the_library(apart_from(self._came, x)), _for_the_library(weight)
        transposed = weight.t()
        if not is_captured(self.comm):
            self._load(x, weight, transposed, routing)
        program = routing.program
        work = program(async_op=True)
        for number, (rows, computed) in enumerate(zip(routing.parts, routing.views, strict=True)):
            torch.mm(x[rows], transposed, out=computed)
            program.trigger(number)
        _compute_what_stays(x, transposed, self._came, routing)
        assert work is not None
        work.wait()
        return self._came

    def _load(self, x: torch.Tensor, weight: torch.Tensor, transposed: torch.Tensor, routing: Routing) -> None:
        """Compute parts of new sizes once: loading a kernel, or allocating its memory, may wait for the device, and so,
        once the program has begun, for triggers that would never come (docs/internals/prelaunch.md).
        """
        cuda = torch.backends.cuda.matmul
        settings = (
            cuda.allow_tf32,
            cuda.allow_fp16_reduced_precision_reduction,
            cuda.allow_bf16_reduced_precision_reduction,
        )
        stream = torch.cuda.current_stream().cuda_stream if x.device.type == "cuda" else 0
        of_matrices = [(matrix.shape[1], matrix.stride(), matrix.data_ptr() % 16) for matrix in (x, weight)]
        layout = (*of_matrices, settings, stream)
        if layout in routing.loaded:
            return
        for part in (x[rows] for rows in routing.parts):
            laid_out = [(tensor.shape, tensor.stride(), tensor.data_ptr() % 16) for tensor in (part, weight)]
            key = (*laid_out, settings, stream)
            if key not in self._loaded:
                torch.mm(part, transposed)
                self._loaded.add(key)
        routing.loaded.add(layout)


class SplitAllToAllGemm(SplitByCounts):
    """Buffers and programs of :func:`split_all_to_all_gemm`."""

    name, program, parts, target, of_parts = SPLIT_DISPATCH, arriving_program, coming, "came", "came"

    def _run(self, x: torch.Tensor, weight: torch.Tensor, table: Table, routing: Routing) -> torch.Tensor:
        sends, first = table[self.comm.rank], routing.stays[0]
        output = x.new_empty(self._most_rows, weight.shape[0])
        transposed = weight.t()
        for rows in (slice(0, first.start), slice(first.stop, sum(sends))):
            self._sent[rows] = x[rows]
        program = routing.program
        work = program(async_op=True)
        _compute_what_stays(x, transposed, output, routing)
        for number, (rows, came) in enumerate(zip(routing.parts, routing.views, strict=True)):
            program.wait_for_arrival(number)
            torch.mm(came, transposed, out=output[rows])
        assert work is not None
        work.wait()
        return output


def split_gemm_all_to_all(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: Counts,
    *,
    most_rows: int,
    pieces: int = DEFAULT_PIECES,
) -> torch.Tensor:
    """Compute ``x @ weight.T`` and send its rows to the ranks of ``counts``, part by part. A call of the communicator.

    The first call of a shape allocates, and the first one with some counts proves and binds their program (some
    milliseconds), with all ranks; the programs of the last eight counts are kept, and those of graphs.

    Args:
        comm: communicator of the ranks.
        x: rows for rank 0, for rank 1, and so on, [rows, K]. Ranks may have different numbers of rows; rows beyond the
            counts stay.
        weight: matrix [H, K], of x's dtype: float32, float16 or bfloat16.
        counts: number of rows from rank i to rank j in row i, column j; on the host, since the copies are the host's.
            The same on all ranks.
        most_rows: largest number of rows that any rank sends or gets, the same on all ranks and in all calls of a
            shape.
        pieces: number of pieces of the rows for each peer, the same on all ranks: more of them begin to travel earlier,
            and are smaller to compute.

    Returns:
        Tensor [most_rows, H]: rows from rank 0, from rank 1, and so on; the rows behind them are unchanged. The next
        call of this shape overwrites it: on another stream, make it wait for the readers of this one.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: inside of a capture: a new shape, or counts that no earlier call had.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, SPLIT_GEMM):
        table = checked(SPLIT_GEMM, comm, x, weight, counts, most_rows, pieces)
    return handle_of(SplitGemmAllToAll, comm, most_rows, weight.shape[0], weight.dtype)(x, weight, table, pieces)


def split_all_to_all_gemm(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: Counts,
    *,
    most_rows: int,
    pieces: int = DEFAULT_PIECES,
) -> torch.Tensor:
    """Send rows to the ranks of ``counts``, and compute ``came @ weight.T`` there, part by part on arrival. A call of
    the communicator.

    Arguments and errors are those of :func:`split_gemm_all_to_all`; rows of ``weight`` may differ between ranks in
    number.

    Returns:
        Tensor [most_rows, H]: results of rows from rank 0, from rank 1, and so on; the rows behind them are undefined.
    """
    with telling_refusals(comm, SPLIT_DISPATCH):
        table = checked(SPLIT_DISPATCH, comm, x, weight, counts, most_rows, pieces)
    return handle_of(SplitAllToAllGemm, comm, most_rows, weight.shape[1], weight.dtype)(x, weight, table, pieces)


S = TypeVar("S", bound=SplitByCounts)


def handle_of(kind: type[S], comm: Communicator, most_rows: int, width: int, dtype: torch.dtype) -> S:
    """Return the handle of an operator in parts for a shape; all ranks make it together if it is new."""
    return kept(comm, (kind.name, most_rows, width, dtype), lambda: kind(comm, most_rows, width, dtype))


def _for_the_library(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix that the library's GEMM reads in place, without a copy that has to be allocated."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return matrix if (across == 1 and down >= columns) or (down == 1 and across >= rows) else matrix.contiguous()


def routed_method(
    comm: Communicator,
    name: str,
    method: str,
    routed: Routed,
    kind: type[SplitByCounts],
    width: int,
    dtype: torch.dtype,
    call: OperatorCall,
) -> Method:
    """Return the method of a GEMM whose rows travel by counts, split in pieces or not; see :func:`auto.agree`.

    Args:
        comm: communicator of the ranks.
        name: name of the operator.
        method: the caller's ``method``.
        routed: counts of the call.
        kind: class of the operator in parts.
        width: number of columns of the rows that travel.
        dtype: dtype of these rows.
        call: properties of the call, with the functions of the fused method and the unfused one.
    """
    table, most_rows = routed.table, call.sizes[0]
    with_other_counts = FUSED if comm.abilities.kernels_have_run else UNFUSED

    def split(pieces: int) -> None:
        call.make[with_other_counts](0)  # for a graph
        handle_of(kind, comm, most_of(table, most_rows), width, dtype).routings.of(table, pieces or DEFAULT_PIECES)

    known = (call.key, routed.without, routed.experts)
    make = {**call.make, SPLIT: split}
    call = dataclasses.replace(call, key=known, make=make, without=routed.without, experts=routed.experts or 1)
    found = agree(comm, name, method, call)
    if found.name != SPLIT:
        return found
    pieces = found.pieces or DEFAULT_PIECES
    kept_as = kind.name, most_of(table, most_rows), width, dtype
    if method == SPLIT or not is_captured(comm) or suit_graphs(comm, kept_as, table, pieces):
        return Method(SPLIT, pieces)
    return Method(with_other_counts)


def suit_graphs(comm: Communicator, kept_as: Hashable, table: Table, pieces: int) -> bool:
    """Return True if a graph can hold a call with such counts: the ranks have made its resources."""
    handle = comm.kept.get(kept_as)
    return handle is not None and (table, pieces) in handle.routings.known


def most_of(table: Table, most_rows: int) -> int:
    """Return the rows of buffers for any rank's sent or received rows: few shapes, whatever the counts.

    >>> most_of(((3, 30), (2, 3)), 10), most_of(((3, 3), (2, 3)), 10)
    (64, 10)
    """
    return max(most_rows, power_of_two(max(map(sum, (*table, *zip(*table, strict=True))))))


def check_pieces(name: str, pieces: int) -> None:
    """Refuse an invalid number of pieces. Raises ValueError."""
    if not 1 <= pieces <= MOST_PIECES:
        raise ValueError(f"{name}: pieces (value={pieces}, allowed=1..{MOST_PIECES})")


def checked(
    name: str, comm: Communicator, x: object, weight: object, counts: Counts, most_rows: int, pieces: int
) -> Table:
    """Return the counts as numbers. Raises ValueError or TypeError for arguments that a GEMM in parts cannot take."""
    x, weight = check_product(name, comm, x, weight)
    n = comm.world_size
    check_pieces(name, pieces)
    for width in weight.shape:
        check_most_rows(name, most_rows, width)
    if isinstance(counts, torch.Tensor) and counts.device.type != "cpu":
        raise ValueError(f"{name}: device of counts (value={counts.device}, allowed=cpu: the host has to know them)")
    table = tuple(tuple(int(count) for count in row) for row in counts)
    if [len(row) for row in table] != [n] * n:
        raise ValueError(f"{name}: rows of counts (value={[len(row) for row in table]}, allowed={[n] * n})")
    sends, gets = list(map(sum, table)), list(map(sum, zip(*table, strict=True)))
    if min(map(min, table)) < 0 or sends[comm.rank] > x.shape[0] or max(*sends, *gets) > most_rows:
        given = f"{sends[comm.rank]} sent of {x.shape[0]}, {max(*sends, *gets)} to or from a rank"
        raise ValueError(f"{name}: counts (value={given}, allowed=rows of x, up to {most_rows}, none negative)")
    return table
