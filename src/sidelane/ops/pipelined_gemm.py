"""GEMMs whose rows travel in parts beside the product of the next part: methods ``split`` and ``unfused``.

==================  ==========================================================  =======================================
operator            unfused                                                     split
==================  ==========================================================  =======================================
gemm_all_to_all     ``y = x @ weight.T``; all-to-all by counts                  ``MovedParts.send``
gemm_reduce_scatter ``y = x @ weight.T``; reduce-scatter of its rows            ``MovedParts.send``, then a sum
all_to_all_gemm     all-to-all by counts; ``came @ weight.T``                   ``MovedParts.receive``
all_gather_gemm     all-gather of rows; ``gathered @ weight.T``                 ``MovedParts.receive``
gemm_all_reduce     ``y = x @ weight.T``; all-reduce                            an all-reduce for each part of the rows
==================  ==========================================================  =======================================

No compute unit moves data, and the vendor's GEMM computes, which is faster than any of Triton's
(results/notes/kernels.md). The price: parts are smaller, and the host has to know the counts; a graph keeps those
of its capture.

``MovedParts.send``, two ranks, two pieces; the rows that stay come last, and are computed in place::

    compute      rows for 1, first half | second half     | rows for 0
    copy engine                         | first half -> 1 | second half -> 1

All copies are one program, which waits with the engines from the begin on; each finished part releases its own copy
(``sidelane.program.transform``), in a graph as a dependency of its copy.

``MovedParts.receive``; the product of a part waits for its arrival, and the first part needs no copy::

    compute      rows that stay           | first half of 1 | second half of 1
    copy engine  first half | second half |

Turn t takes the rows for, or from, the t-th next rank, so that every rank sends to one and receives from one other.

Parts before an all-reduce are rows, and an asynchronous all-reduce of each runs beside the product of the next one::

    compute       first rows | next rows            | last rows           |
    all-reduce               | of the first rows    | of the next rows    | of the last rows
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

import torch

from sidelane.choice.fused import FUSED, PIECES, ROW_PARTS, SPLIT, UNFUSED
from sidelane.config import COMPUTE, NOTHING
from sidelane.ops.handle import BufferLock, buffer_lock, cached_object, is_captured, power_of_two
from sidelane.ops.operands import Routed, apart_from, check_operands
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall
from sidelane.program.pieces import (
    SPLIT_GEMM,
    arriving_program,
    coming,
    gathering_program,
    going,
    row_parts,
    row_slices,
    split_program,
)
from sidelane.session import BoundProgram, Communicator

MOST_TABLES = 8
"""Largest number of routings whose programs a shape keeps; an older one is proved and bound again."""

MOST_SHAPES = 8
"""Largest number of shapes of an unfused operator that have a buffer in symmetric memory. Buffers stay, as graphs may
hold them; the communicator copies the rows of further shapes."""

METHODS = SPLIT, UNFUSED
SIZES = "rows", "columns of x", "columns of the result"
SCATTER = FusedOperator("gemm_reduce_scatter", SIZES, METHODS, METHODS, PIECES, has_sum=True, split_adds_in_order=False)
ALL = FusedOperator("gemm_all_reduce", SIZES, METHODS, METHODS, ROW_PARTS, has_sum=True)
GATHER = FusedOperator("all_gather_gemm", ("rows of a rank", *SIZES[1:]), METHODS, METHODS, pieces=1)

CountTable = tuple[tuple[int, ...], ...]
"""Number of rows from rank i to rank j in row i, column j."""


@dataclasses.dataclass(slots=True)
class MovedParts:
    """Parts of a product, and the bound program that moves them.

    Attributes:
        program: program of all parts.
        rows: rows of ``x`` of each part that leaves, or rows of the result of each that arrives, in the order of this
            rank's triggers or arrivals.
        buffer: rows that the program moves.
        stays: rows of ``x`` that stay on this rank, and their place in the result; both empty if there are none.
        in_a_graph: a graph holds the program, so that it must stay.
        loaded: layouts of x and weight whose products of these parts have been loaded.
        views: rows of the buffer that the products write or read, a tensor for each part.
    """

    program: BoundProgram
    rows: Sequence[slice]
    buffer: torch.Tensor
    stays: tuple[slice, slice]
    in_a_graph: bool = False
    loaded: set[Hashable] = dataclasses.field(default_factory=set)
    views: tuple[torch.Tensor, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.views = tuple(self.buffer[part] for part in self.rows)

    def send(self, x: torch.Tensor, output: torch.Tensor, transposed: torch.Tensor) -> None:
        """Compute rows of ``x`` part by part, and send each part as soon as it is computed.

        Args:
            x: all rows.
            output: result of this rank, into which the peers' rows arrive; the rows that stay are computed there.
            transposed: the transposed weight.
        """
        work = self.program(async_op=True)
        for number, (rows, computed) in enumerate(zip(self.rows, self.views, strict=True)):
            torch.mm(x[rows], transposed, out=computed)
            self.program.trigger(number)
        self._compute_what_stays(x, output, transposed)
        assert work is not None
        work.wait()

    def receive(self, x: torch.Tensor, output: torch.Tensor, transposed: torch.Tensor) -> None:
        """Compute rows part by part, each as soon as it arrives, after the rows of ``x`` that stay.

        Args:
            x: rows of this rank.
            output: result of all parts.
            transposed: the transposed weight.
        """
        work = self.program(async_op=True)
        self._compute_what_stays(x, output, transposed)
        for number, (rows, came) in enumerate(zip(self.rows, self.views, strict=True)):
            self.program.wait_for_arrival(number)
            torch.mm(came, transposed, out=output[rows])
        assert work is not None
        work.wait()

    def _compute_what_stays(self, x: torch.Tensor, output: torch.Tensor, transposed: torch.Tensor) -> None:
        rows, place = self.stays
        if rows.stop > rows.start:
            torch.mm(x[rows], transposed, out=output[place])


class RoutedParts:
    """Buffers of a GEMM whose rows travel by counts, for some sizes, and programs for its last counts. Collective.

    Args:
        comm: communicator of the ranks.
        name: ``SPLIT_GEMM``, which computes and then sends, or ``SPLIT_DISPATCH``, which receives and then computes.
        most_rows: largest number of rows that any rank sends or gets.
        width: number of columns of the rows that travel.
        dtype: dtype of the rows: float32, float16 or bfloat16.
    """

    def __init__(self, comm: Communicator, name: str, most_rows: int, width: int, dtype: torch.dtype) -> None:
        self.comm, self.name, self._most_rows = comm, name, most_rows
        self.sent, self.came = (comm.empty(most_rows, width, dtype=dtype) for _ in range(2))
        self.lock = buffer_lock(comm)
        self.known: dict[tuple[CountTable, int], MovedParts] = {}
        self._loaded: set[Hashable] = set()

    def parts(self, table: CountTable, pieces: int) -> MovedParts:
        """Return the parts of such counts; all ranks make their program together if they are new."""
        key = table, pieces
        found = self.known.pop(key, None)
        if found is None:
            rank, row_bytes = self.comm.rank, self.came.shape[1] * self.came.element_size()
            sends = self.name == SPLIT_GEMM
            make, rows_of = (split_program, going) if sends else (arriving_program, coming)
            buffers = {"sent": self.sent, "output" if sends else "came": self.came}
            program = self.comm.load(make(table, pieces, row_bytes, self._most_rows), buffers)
            first, place, stay = sum(table[rank][:rank]), sum(row[rank] for row in table[:rank]), table[rank][rank]
            stays = slice(first, first + stay), slice(place, place + stay)
            found = MovedParts(program, rows_of(table, rank, pieces), self.sent if sends else self.came, stays)
            # Programs that graphs hold stay.
            loose = [known for known, parts in self.known.items() if not parts.in_a_graph]
            if len(loose) >= MOST_TABLES:
                self.known.pop(loose[0]).program.close()
        self.known[key] = found  # the latest comes last
        return found

    def run(self, x: torch.Tensor, weight: torch.Tensor, table: CountTable, pieces: int) -> torch.Tensor:
        """Run the operator on checked arguments, with the lock of the buffers and without gradients."""
        parts = self.parts(table, pieces)
        captured = is_captured(self.comm)
        parts.in_a_graph |= captured
        if self.name == SPLIT_GEMM:
            x, weight = _for_the_library(apart_from(self.came, x)), _for_the_library(weight)
            transposed = weight.t()
            if not captured:
                self._load(x, weight, transposed, parts)
            parts.send(x, self.came, transposed)
            return self.came
        output = x.new_empty(self._most_rows, weight.shape[0])
        first = parts.stays[0]
        for rows in (slice(0, first.start), slice(first.stop, sum(table[self.comm.rank]))):
            self.sent[rows] = x[rows]
        parts.receive(x, output, weight.t())
        return output

    def _load(self, x: torch.Tensor, weight: torch.Tensor, transposed: torch.Tensor, parts: MovedParts) -> None:
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
        if layout in parts.loaded:
            return
        for part in (x[rows] for rows in parts.rows):
            laid_out = [(tensor.shape, tensor.stride(), tensor.data_ptr() % 16) for tensor in (part, weight)]
            key = (*laid_out, settings, stream)
            if key not in self._loaded:
                torch.mm(part, transposed)
                self._loaded.add(key)
        parts.loaded.add(layout)


def _for_the_library(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix that the library's GEMM reads in place, without a copy that has to be allocated."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return matrix if (across == 1 and down >= columns) or (down == 1 and across >= rows) else matrix.contiguous()


def routed_methods(
    comm: Communicator,
    name: str,
    routed: Routed,
    most_rows: int,
    width: int,
    dtype: torch.dtype,
    method: str,
    make: Mapping[str, Callable[[int], CachedLaunch]],
) -> dict[str, Callable[[int], CachedLaunch]]:
    """Return the methods of a GEMM whose rows travel by counts: the given ones, and ``split``.

    Args:
        comm: communicator of the ranks.
        name: ``SPLIT_GEMM`` or ``SPLIT_DISPATCH``.
        routed: counts of the call.
        most_rows: number of rows of the result.
        width: number of columns of the rows that travel.
        dtype: dtype of these rows.
        method: the caller's ``method``. With ``auto`` a graph takes another method for counts that no earlier call had.
        make: the other methods.
    """

    def split(pieces: int) -> CachedLaunch:
        table = routed.table
        sizes = most_of(table, most_rows), width, dtype
        if method == AUTO:
            other = make[FUSED if comm.abilities.kernels_have_run else UNFUSED](0)
            there: RoutedParts | None = comm.cache.get((name, *sizes))
            if is_captured(comm) and (there is None or (table, pieces) not in there.known):
                return other
        moved = cached_object(comm, (name, *sizes), lambda: RoutedParts(comm, name, *sizes))
        moved.parts(table, pieces)

        def launch(x: torch.Tensor, weight: torch.Tensor, counts: object) -> torch.Tensor:
            with torch.no_grad(), moved.lock:
                return moved.run(x, weight, table, pieces)[:most_rows]

        return launch

    return {**make, SPLIT: split}


def most_of(table: CountTable, most_rows: int) -> int:
    """Return the rows of buffers for any rank's sent or received rows: few shapes, whatever the counts.

    >>> most_of(((3, 30), (2, 3)), 10), most_of(((3, 3), (2, 3)), 10)
    (64, 10)
    """
    return max(most_rows, power_of_two(max(map(sum, (*table, *zip(*table, strict=True))))))


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeBuffer:
    """A buffer of a shape in symmetric memory. ``values``: [rows, columns]. ``lock``: lock of its users."""

    values: torch.Tensor
    lock: BufferLock

    @classmethod
    def of(cls, comm: Communicator, rows: int, columns: int, dtype: torch.dtype) -> ShapeBuffer:
        """Allocate a buffer. Collective."""
        return cls(comm.empty(rows, columns, dtype=dtype), buffer_lock(comm))

    @classmethod
    def if_there_is_room(
        cls, comm: Communicator, op: FusedOperator, rows: int, columns: int, dtype: torch.dtype
    ) -> ShapeBuffer | None:
        """Return an unfused operator's buffer of a shape; None if it has none. Collective if the shape is new: shapes
        come in the same order on all ranks, so all have the same buffers.
        """
        buffers = cast("dict[Hashable, ShapeBuffer]", cached_object(comm, (ShapeBuffer, op.name), dict))
        shape = rows, columns, dtype
        if shape not in buffers and len(buffers) < MOST_SHAPES and not is_captured(comm):
            with torch.inference_mode(False):
                buffers[shape] = cls.of(comm, rows, columns, dtype)
        return buffers.get(shape)


def gemm_reduce_scatter(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, method: str = AUTO, pieces: int | None = None
) -> torch.Tensor:
    """Compute ``x @ weight.T`` and add its rows up, each rank its share. A call of the communicator.

    The first call of a shape makes its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        x: columns of this rank, [M, K]; M is a multiple of the ranks, K the same on all.
        weight: columns of this rank, [H, K], of x's dtype: float32, float16 or bfloat16.
        method: ``split``, which sends each part of the product as it is computed, and adds the ranks' parts up in
            float32, rounded once more; ``unfused``, a product and then a collective; or ``auto``: the faster one
            (``ops.explain`` names it, with the reason).
        pieces: number of pieces of the rows for each peer with ``split``, the same on all ranks: more of them begin to
            travel earlier, and are smaller to compute. None for the measured number, or a default.

    Returns:
        Rows of this rank, [M / N, H].

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    return _reduced(SCATTER, _scatter_in_parts, _scatter_unfused, comm, x, weight, method, pieces)


def gemm_all_reduce(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, method: str = AUTO, pieces: int | None = None
) -> torch.Tensor:
    """Compute ``y = x @ weight.T; comm.all_reduce(y)``, for more tokens than ``gemv_all_reduce`` takes.

    The first call of a shape makes its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        x: columns of this rank, [M, K]; K is the same on all ranks.
        weight: columns of this rank, [H, K], of x's dtype: float32, float16 or bfloat16.
        method: ``split``, ``unfused`` or ``auto``, see :func:`gemm_reduce_scatter`.
        pieces: largest number of parts of the rows with ``split``, the same on all ranks; None for the measured
            number, or a default.

    Returns:
        Tensor [M, H], the same bits on every rank. The next call of this shape overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    return _reduced(ALL, _reduce_in_parts, _reduce_unfused, comm, x, weight, method, pieces)


def all_gather_gemm(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    method: str = AUTO,
    pieces: int | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``all_gather(x) @ weight.T``. A call of the communicator.

    The first call of a shape makes its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        x: rows of this rank, [M, K]; neighbours in a row are neighbours in memory. As many on each rank.
        weight: rows of this rank, [H, K], of x's dtype: float32, float16 or bfloat16. As many on each rank.
        method: ``split``, which computes each part of the gathered rows when it arrives; ``unfused``, an all-gather and
            a product; or ``auto``: the faster one (``ops.explain`` names it, with the reason).
        pieces: number of pieces of the rows of each rank with ``split``, the same on all ranks. None for the measured
            number, or a default.
        gathered: tensor that takes ``all_gather(x)``, [N * M, K], contiguous and of x's dtype; None if nobody needs it.

    Returns:
        Rows of all ranks, [N * M, H].

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        check_operands(GATHER.name, comm, x, weight)
        if gathered is not None:
            given = list(gathered.shape), gathered.dtype, gathered.device, gathered.is_contiguous()
            allowed = [x.shape[0] * comm.world_size, x.shape[1]], x.dtype, x.device, True
            if given != allowed:
                raise ValueError(
                    f"{GATHER.name}: shape, dtype, device, contiguity of gathered (value={given}, allowed={allowed})"
                )
        sizes, dtype = (*x.shape, weight.shape[0]), weight.dtype
        shape = *x.shape, dtype
        make = {
            SPLIT: functools.partial(_gather_in_parts, comm, shape),
            UNFUSED: functools.partial(_gather_unfused, comm, shape, gathered is None),
        }
        return OperatorCall((*sizes, dtype), sizes, dtype.itemsize, make)

    launch = GATHER.launch(comm, (), (x, weight, gathered), check, method, pieces)
    found: torch.Tensor = launch(x, weight, gathered)
    return found


def _reduced(
    op: FusedOperator,
    in_parts: Callable[[Communicator, ProductShape, int], CachedLaunch],
    unfused: Callable[[Communicator, ProductShape, int], CachedLaunch],
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    method: str,
    pieces: int | None,
) -> torch.Tensor:
    def check() -> OperatorCall:
        check_operands(op.name, comm, x, weight, scatters=op is SCATTER)
        (rows, depth), columns, dtype = x.shape, weight.shape[0], weight.dtype
        shape = rows, columns, dtype
        make = {SPLIT: functools.partial(in_parts, comm, shape), UNFUSED: functools.partial(unfused, comm, shape)}
        return OperatorCall(shape, (rows, depth, columns), dtype.itemsize, make)

    found: torch.Tensor = op.launch(comm, (), (x, weight), check, method, pieces)(x, weight)
    return found


ProductShape = tuple[int, int, torch.dtype]
"""Rows and columns of an operator's buffer, and its dtype."""


def _scatter_in_parts(comm: Communicator, shape: ProductShape, pieces: int) -> CachedLaunch:
    (rows, columns, dtype), n = shape, comm.world_size
    table = ((rows // n,) * n,) * n
    moved = cached_object(comm, (SCATTER.name, *shape), lambda: RoutedParts(comm, SPLIT_GEMM, *shape))
    moved.parts(table, pieces)

    def launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), moved.lock:  # until the received parts have been added up
            came = moved.run(x, weight, table, pieces).view(n, rows // n, columns)
            return came.sum(0, dtype=dtype)  # which autocast would take for float32

    return launch


def _scatter_unfused(comm: Communicator, shape: ProductShape, pieces: int) -> CachedLaunch:
    buffer, rows = ShapeBuffer.if_there_is_room(comm, SCATTER, *shape), shape[0] // comm.world_size

    def launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), _lock_of(buffer):
            y = torch.mm(x, weight.t(), out=_values_of(buffer, x, shape))
            output = x.new_empty(rows, shape[1])
            comm.reduce_scatter(output, y)
            return output

    return launch


def _reduce_in_parts(comm: Communicator, shape: ProductShape, pieces: int) -> CachedLaunch:
    buffer = cached_object(comm, (ALL.name, *shape), lambda: ShapeBuffer.of(comm, *shape))
    *ahead, (last, values) = [(rows, buffer.values[rows]) for rows in row_parts(shape[0], pieces)]

    def launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), buffer.lock:
            x, transposed = apart_from(buffer.values, x), weight.t()
            works = []
            for rows, part in ahead:
                torch.mm(x[rows], transposed, out=part)
                works.append(comm.all_reduce(part, async_op=True, beside=COMPUTE))
            torch.mm(x[last], transposed, out=values)
            # It is asynchronous if others are: a call on another stream than the one before takes the host longer.
            works.append(comm.all_reduce(values, async_op=bool(ahead), beside=NOTHING))
            for work in works:
                if work is not None:
                    work.wait()
            return buffer.values

    return launch


def _reduce_unfused(comm: Communicator, shape: ProductShape, pieces: int) -> CachedLaunch:
    buffer = ShapeBuffer.if_there_is_room(comm, ALL, *shape)

    def launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), _lock_of(buffer):
            y = _values_of(buffer, x, shape)
            torch.mm(apart_from(y, x), weight.t(), out=y)
            comm.all_reduce(y)
            return y

    return launch


def _gather_in_parts(comm: Communicator, shape: ProductShape, pieces: int) -> CachedLaunch:
    (rows, depth, dtype), n, rank = shape, comm.world_size, comm.rank

    def make() -> tuple[ShapeBuffer, MovedParts]:
        buffer = ShapeBuffer.of(comm, n * rows, depth, dtype)
        program = comm.load(gathering_program(n, rows, pieces, depth * dtype.itemsize), {"rows": buffer.values})
        firsts = [((rank - turn) % n * rows, part) for turn in range(1, n) for part in row_slices(rows, pieces)]
        came = [slice(first + part.start, first + part.stop) for first, part in firsts]
        stays = slice(0, rows), slice(rank * rows, (rank + 1) * rows)
        return buffer, MovedParts(program, came, buffer.values, stays)

    buffer, parts = cached_object(comm, (GATHER.name, *shape, pieces), make)
    own = buffer.values[parts.stays[1]]

    def launch(x: torch.Tensor, weight: torch.Tensor, gathered: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad(), buffer.lock:
            output = x.new_empty(n * rows, weight.shape[0])
            own.copy_(x)
            parts.receive(x, output, weight.t())
            if gathered is not None:
                gathered.copy_(buffer.values)
            return output

    return launch


def _gather_unfused(comm: Communicator, shape: ProductShape, needs_buffer: bool, pieces: int) -> CachedLaunch:
    (rows, depth, dtype), n = shape, comm.world_size
    whole = n * rows, depth, dtype
    buffer = ShapeBuffer.if_there_is_room(comm, GATHER, *whole) if needs_buffer else None
    own = None if buffer is None else buffer.values[comm.rank * rows : (comm.rank + 1) * rows]

    def launch(x: torch.Tensor, weight: torch.Tensor, gathered: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad(), _lock_of(buffer):
            values = _values_of(buffer, x, whole) if gathered is None else gathered
            comm.all_gather(values, x.contiguous() if own is None else own.copy_(x))
            return torch.mm(values, weight.t(), out=x.new_empty(n * rows, weight.shape[0]))

    return launch


def _values_of(buffer: ShapeBuffer | None, x: torch.Tensor, shape: ProductShape) -> torch.Tensor:
    return x.new_empty(shape[:2]) if buffer is None else buffer.values


def _lock_of(buffer: ShapeBuffer | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if buffer is None else cast("contextlib.AbstractContextManager[None]", buffer.lock)
