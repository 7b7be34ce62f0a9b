"""gemv_all_reduce: a row-parallel linear layer for few tokens, whose partial results leave as they are computed.

Equivalent: ``y = x @ weight.T; comm.all_reduce(y)`` (``reference.gemv_all_reduce``), with partial results in float32
that are rounded once.

Every rank adds up all partial results, and sums carry their own readiness (``gemv_cells.py``). By default, results
larger than ``CELLS_BYTES`` are a product and an all-reduce.

Legend: N ranks; M rows of the weight; K columns, this rank's; T tokens, TP lanes of them: 1, or 16 in dots; a tile is
ROWS rows of all tokens; COLS columns are loaded at a time. ``weight`` [M, K], ``x`` [T, K], ``scale`` [1] or [M],
``output`` [T, M].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from sidelane.choice.fused import FUSED, UNFUSED
from sidelane.ops import gemv_cells, reference
from sidelane.ops.gemv_tiling import CELLS_BYTES, MOST_TOKENS, Tiling, shared_bytes_of, tiling_of
from sidelane.ops.handle import (
    FLOAT8S,
    FLOATS,
    INTERPRETED,
    KernelHandle,
    check_tensor,
    check_tiles,
    kept,
    power_of_two,
    programs_of,
    refuse_tiles,
)
from sidelane.ops.operands import apart_from, check_neighbours
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall, ProblemSizes
from sidelane.ops.timeline import stamps_of
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

__all__ = ["MOST_TOKENS", "GemvAllReduce", "Tiling", "gemv_all_reduce"]

NAME = "gemv_all_reduce"
MOST_ROWS = 1 << 20
_PLACES = 2, 3, 4, 5
"""Places of output, weight, x and scale among the kernel's arguments behind the context."""


def _agreed(columns: Sequence[Sequence[int]]) -> ProblemSizes:
    return max(columns[0]), sum(columns[1]), max(columns[2])


def _too_large(sizes: ProblemSizes) -> str:
    is_large = 4 * sizes[0] * sizes[2] > CELLS_BYTES
    return f"fused takes up to {CELLS_BYTES // 4} elements of the result" if is_large else ""


OPERATOR = FusedOperator(
    NAME, ("rows", "columns of all ranks", "tokens"), has_sum=True, agreed=_agreed, too_large=_too_large
)


class GemvAllReduce(KernelHandle):
    """Flags and workspace of :func:`gemv_all_reduce` for one shape. Collective: alike on all ranks.

    Args:
        comm: communicator of the ranks.
        rows: number of rows of the weight, the same on all ranks.
        tokens: largest number of tokens of a call, 1 to 16.
        dtype: dtype of x and result: float32, float16 or bfloat16.
        weight_dtype: dtype of the weight: float8_e4m3fn or float8_e5m2; None is ``dtype``.
        tiling: tile sizes of the kernel; None takes the fastest ones on an H200.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        *,
        tiling: Tiling | None = None,
    ) -> None:
        self.weight_dtype = weight_dtype or dtype
        self.comm, self.rows, self.tokens, self.dtype = comm, rows, tokens, dtype
        self.tiling = tiling = tiling or tiling_of(tokens)
        self._padded = 1 if tokens == 1 else MOST_TOKENS
        tiles = -(-rows // tiling.rows)
        programs = programs_of(comm, tiles, tiling.per_unit)
        self._rows_each = -(-tiles // programs) * tiling.rows
        self._programs = -(-rows // self._rows_each)
        self._stages = tiling.stages_in(
            shared_bytes_of(comm.device, tiling.per_unit), self.weight_dtype.itemsize, dtype.itemsize, self._padded
        )
        self._cells = comm.empty(2 * comm.world_size * rows * self._padded, dtype=torch.int64)
        self._cells.zero_()
        self._kernel = comm.load_kernel(gemv_cells.KERNEL, flags=0)
        self._addresses = comm.peers(self._cells)  # now, as the first launch may be captured
        comm.barrier()  # all cells are 0 before any is written

    def run(
        self,
        again: RepeatedLaunch | None,
        weight: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the operator with checked arguments. ``again``: launch of calls with these layouts."""
        comm, tiling = self.comm, self.tiling
        if out is None:
            out = x.new_empty(self.rows) if x.dim() == 1 else x.new_empty(x.shape[0], self.rows)
        elif (other := apart_from(out, x)) is not x:
            x, again = other, None  # of another layout, maybe
        tensors = out, weight, x, scale
        if self._repeats(again, tensors):
            return out
        tokens = 1 if x.dim() == 1 else x.shape[0]
        stamps, stamped = stamps_of(comm, self._programs)
        try:
            self._kernel.launch(
                (self._programs,),
                self._addresses,
                self._cells,
                out,
                weight,
                x,
                scale,
                self.rows,
                weight.shape[1],
                weight.stride(0),
                x.stride(0) if x.dim() == 2 else 0,
                tokens,
                0 if scale is None or scale.numel() == 1 else 1,
                self._rows_each,
                stamps,
                self.rows % tiling.rows == 0 and weight.shape[1] % tiling.columns == 0 < weight.shape[1],  # EVEN, here
                again=None if again is None or stamps is not None else (again, tensors),
                alike=f"{tokens} tokens, {'no ' if scale is None else ''}scale{stamped}",
                **gemv_cells.constants_of(
                    tiling,
                    ranks=comm.world_size,
                    padded=self._padded,
                    wide=INTERPRETED or self.dtype == torch.float32,
                    stages=self._stages,
                ),
            )
        except Exception as error:
            refuse_tiles(error, NAME, tiling)
            raise
        return out


def gemv_all_reduce(
    comm: Communicator,
    weight: torch.Tensor,
    x: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
    method: str = AUTO,
) -> torch.Tensor:
    """Compute ``y = x @ weight.T; comm.all_reduce(y)`` for few tokens, in one kernel. A call of the communicator.

    Partial results are float32, added up in the order of the ranks and rounded once. The first call of a shape makes
    its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        weight: columns of this rank, [M, K]; float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; rows may lie
            apart. K may differ by rank.
        x: columns of this rank of 1 to 16 tokens, [T, K] or [K], of the weight's dtype; with a weight of 8 bits
            float32, float16 or bfloat16.
        scale: factor of a weight of 8 bits: float32, of one element, or of one a row, [M]. None for 1. On all ranks or
            on none; its values are this rank's own.
        out: tensor for the result, contiguous. None makes one.
        tiling: tile sizes of the kernel; None takes the fastest ones on an H200.
        method: ``fused``, ``unfused``, or ``auto``: unfused if that was measured to be faster (``ops.explain``), or
            T * M is more than 131,072. Fused, ranks have 16 bytes of symmetric memory for each element and rank.

    Returns:
        Tensor [T, M] or [M], the same bits on every rank.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it; a tiling that Triton cannot
            compile.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        _check(comm, weight, x, scale, out)
        check_tiles(NAME, "tiling", tiling, Tiling)
        rows, columns = weight.shape
        tokens, dtypes = power_of_two(1 if x.dim() == 1 else x.shape[0]), (x.dtype, weight.dtype)
        key = (NAME, rows, tokens, *dtypes, tiling)

        def fused(pieces: int) -> CachedLaunch:
            handle = kept(comm, key, lambda: GemvAllReduce(comm, rows, tokens, *dtypes, tiling=tiling))
            return functools.partial(handle.run, RepeatedLaunch(_PLACES))

        make: dict[str, Callable[[int], CachedLaunch]] = {
            FUSED: fused,
            UNFUSED: lambda pieces: functools.partial(_unfused, comm),
        }
        return OperatorCall(key, (rows, columns, tokens), weight.element_size(), make)

    launch = OPERATOR.launch(comm, (tiling,), (weight, x, scale, out), check, method)
    found: torch.Tensor = launch(weight, x, scale, out)
    return found


def _unfused(
    comm: Communicator,
    weight: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    with torch.no_grad():  # as the kernel
        result = reference.gemv_all_reduce(comm, weight, x, scale=scale)
        return result if out is None else out.copy_(result)


def _check_sizes(rows: int, tokens: int) -> None:
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{NAME}: rows of the weight (value={rows}, allowed=1..{MOST_ROWS})")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{NAME}: tokens (value={tokens}, allowed=1..{MOST_TOKENS})")


def _check(comm: Communicator, weight: object, x: object, scale: object, out: object) -> None:
    weight = check_tensor(NAME, "weight", weight, comm.device, FLOATS + FLOAT8S, (2,))
    x = check_tensor(NAME, "x", x, comm.device, FLOATS if weight.dtype in FLOAT8S else (weight.dtype,), (1, 2))
    _check_sizes(weight.shape[0], 1 if x.dim() == 1 else x.shape[0])
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{NAME}: columns of x (value={x.shape[-1]}, allowed={weight.shape[1]}, those of the weight)")
    check_neighbours(NAME, weight=weight, x=x)
    if scale is not None:
        scale = check_tensor(NAME, "scale", scale, comm.device, (torch.float32,), (0, 1))
        if weight.dtype not in FLOAT8S:
            allowed = ", ".join(map(str, FLOAT8S))
            raise ValueError(f"{NAME}: scale of a weight (value={weight.dtype}, allowed={allowed})")
        if scale.numel() not in (1, weight.shape[0]) or not scale.is_contiguous():
            allowed = f"one element, or {weight.shape[0]}, contiguous"
            raise ValueError(f"{NAME}: shape of scale (value={tuple(scale.shape)}, allowed={allowed})")
    if out is not None:
        out = check_tensor(NAME, "out", out, comm.device, (x.dtype,), (x.dim(),))
        shape = (*x.shape[:-1], weight.shape[0])
        if out.shape != shape or not out.is_contiguous():
            raise ValueError(f"{NAME}: shape of out (value={tuple(out.shape)}, allowed={shape}, contiguous)")
