"""Operands of the GEMMs among fused operators, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.nn import functional

from sidelane.choice.fused import FUSED, SPLIT, UNFUSED
from sidelane.errors import UnavailableError
from sidelane.memory.storage import persistent
from sidelane.ops.handle import FLOATS, check_tensor, is_captured
from sidelane.ops.operator import AUTO
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

MOST_ELEMENTS = 1 << 40

MOST_EXPERTS = 64
"""Largest number of experts of a rank: a block holds their counts in registers."""

MOST_CACHED = 512
"""Largest number of counts of the host that a communicator keeps on the device: more than the shapes that are warmed up
before a capture."""

RowCounts = torch.Tensor | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
"""Type of counts: rows from rank i to rank j in row i, column j; with several experts a rank, one for each there."""


@dataclasses.dataclass(slots=True)
class HostCounts:
    """Counts of the host, and their copy on the device.

    Attributes:
        table: counts as numbers, in tuples.
        copy: tensor of the counts on the device.
        sent: number of rows that each rank sends.
        in_a_graph: a graph reads the copy, so that it must stay.
    """

    table: Any
    copy: torch.Tensor
    sent: list[int]
    in_a_graph: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """Checked counts of a call, and the methods that they allow.

    Attributes:
        host: counts of the host; None if they are on the device.
        experts: number of experts of a rank; None if the weight is a matrix.
        without: methods that ``auto`` does not take.
    """

    host: HostCounts | None
    experts: int | None
    without: tuple[str, ...]

    @property
    def table(self) -> Any:
        """Counts as numbers; None if they are on the device."""
        return None if self.host is None else self.host.table

    def on_device(self, counts: Any) -> torch.Tensor:
        """Return the counts of a call like this one on the device, for a kernel on the caller's stream."""
        if self.host is None:
            given: torch.Tensor = counts
            return given
        copy = self.host.copy
        if copy.is_cuda and not self.host.in_a_graph:  # newer counts may take its place while a kernel reads it
            copy.record_stream(torch.cuda.current_stream(copy.device))
        return copy

    def repeated_launch(self, indices: Sequence[int]) -> RepeatedLaunch | None:
        """Return a launch of calls like this one. None with counts of the host: each of them is another call, and the
        kernel finds the launch that they share by its other arguments.
        """
        return RepeatedLaunch(indices) if self.host is None else None


def check_operands(name: str, comm: Communicator, x: object, weight: object, *, scatters: bool = False) -> None:
    """Refuse matrices without a product, or with one that cannot be scattered. Raises ValueError or TypeError."""
    x, weight = check_product(name, comm, x, weight)
    rows, columns = x.shape[0], weight.shape[0]
    if rows < 1 or columns < 1 or rows * columns > MOST_ELEMENTS:
        allowed = f"1 and more, {MOST_ELEMENTS} together"
        raise ValueError(f"{name}: rows of x, columns of the result (value={rows}, {columns}, allowed={allowed})")
    if scatters and rows % comm.world_size:
        raise ValueError(f"{name}: rows of x (value={rows}, allowed=multiples of {comm.world_size}, the ranks)")
    check_neighbours(name, x=x, weight=weight if 1 in weight.shape or weight.stride(0) != 1 else weight.t())


def check_product(
    name: str, comm: Communicator, x: object, weight: object, dims: tuple[int, ...] = (2,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a product ``x @ weight.T`` as tensors. Raises ValueError or TypeError for others."""
    weight = check_tensor(name, "weight", weight, comm.device, FLOATS, dims)
    x = check_tensor(name, "x", x, comm.device, (weight.dtype,), (2,))
    if x.shape[1] != weight.shape[-1] or not x.shape[1]:
        raise ValueError(f"{name}: columns of x (value={x.shape[1]}, allowed={weight.shape[-1]})")
    return x, weight


def check_routed(
    name: str,
    comm: Communicator,
    x: object,
    weight: object,
    counts: RowCounts,
    most_rows: int,
    method: str,
) -> Routed:
    """Refuse arguments that a GEMM next to rows that travel by counts cannot take.

    Raises:
        ValueError, TypeError: an argument is wrong.
        UnavailableError: inside of a capture, counts of the host that no earlier call had.
    """
    host = None if is_on_device(comm, counts) else from_host(name, comm, counts)
    experts = experts_of(weight)
    if method == SPLIT and host is None:
        raise ValueError(f"{name}: method {SPLIT} needs counts on the host (value=on the device)")
    if experts is not None and method in (SPLIT, UNFUSED):  # at every measured shape the kernel is faster (decision 26)
        raise ValueError(f"{name}: method with several experts (value={method}, allowed={AUTO}, {FUSED})")
    check_rows(name, comm, x, counts if host is None else host.copy, most_rows, experts)
    x, weight = check_product(name, comm, x, weight, (2, 3))
    if host is not None and host.sent[comm.rank] > x.shape[0]:
        leaving, allowed = host.sent[comm.rank], f"up to {x.shape[0]}, those of x"
        raise ValueError(f"{name}: counts (value={leaving} rows sent, allowed={allowed})")
    if experts is not None and not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"{name}: experts of a rank (value={experts}, allowed=1..{MOST_EXPERTS})")
    check_most_rows(name, most_rows, weight.shape[-2])
    check_neighbours(name, weight=weight)
    without: tuple[str, ...] = (SPLIT,) if host is None else ()
    return Routed(host, experts, without if experts is None else (SPLIT, UNFUSED))


def experts_of(weight: object, counts: object = None) -> int | None:
    """Return the number of experts of a rank: the first dimension of the weight, or the last of the counts; None for a
    matrix.
    """
    of, dimension = (counts, -1) if weight is None else (weight, 0)
    return of.shape[dimension] if isinstance(of, torch.Tensor) and of.dim() == 3 else None


def is_on_device(comm: Communicator, counts: object) -> bool:
    """Return True for counts that only the device reads: a tensor, unless the ranks have GPUs and it is on the CPU."""
    return isinstance(counts, torch.Tensor) and (counts.device == comm.device or counts.device.type != "cpu")


def counts_in_words(comm: Communicator, counts: object) -> tuple[Hashable, object]:
    """Return counts as a key by their values, or as a tensor whose layout counts; both None for counts of other types,
    and for values that are checked each time.
    """
    if comm.config.debug:
        return None, None
    if is_on_device(comm, counts):
        return "on the device", counts
    return in_tuples(counts.tolist() if isinstance(counts, torch.Tensor) else counts), None


def in_tuples(counts: object) -> tuple[Any, ...] | None:
    """Return lists of numbers in tuples; None if a part is neither a list, nor a tuple, nor a number.

    >>> in_tuples([[1, 2], (3, 4)]), in_tuples([[1.0]])
    (((1, 2), (3, 4)), None)
    """
    if type(counts) not in (list, tuple):
        return None
    found: list[Any] = []
    for part in counts:  # type: ignore[attr-defined]
        found.append(part if type(part) is int else in_tuples(part))
    return None if None in found else tuple(found)


def from_host(name: str, comm: Communicator, counts: RowCounts) -> HostCounts:
    """Return counts of the host, of which the last ones are kept on the device."""
    try:
        there = torch.as_tensor(counts, device="cpu")
    except (ValueError, TypeError, RuntimeError) as problem:
        raise TypeError(f"{name}: counts (value={counts!r}, allowed=a tensor, or lists of numbers)") from problem
    if there.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: counts (value={counts!r}, allowed=whole numbers)")
    table = in_tuples(there.tolist())
    known: dict[Hashable, HostCounts] = comm.cache.setdefault(HostCounts, {})
    found = known.pop(table, None)
    captured = is_captured(comm)
    if found is None:
        if captured:  # nothing can be copied from here to there
            words = "counts of the host inside of a capture are those of an earlier call (value=new ones)"
            raise UnavailableError(f"{name}: {words}")
        loose = [key for key, one in known.items() if not one.in_a_graph]
        if len(loose) >= MOST_CACHED:
            del known[loose[0]]
        if there.dim() not in (2, 3) or (there < 0).any():
            raise ValueError(f"{name}: counts (value={counts!r}, allowed=numbers from 0 in 2 or 3 dimensions)")
        copy = persistent(comm.device, lambda: there.to(comm.device, copy=True))
        found = HostCounts(table, copy, there.flatten(1).sum(1).tolist())
    found.in_a_graph |= captured
    known[table] = found  # the latest comes last
    return found


def check_most_rows(name: str, most_rows: int, columns: int) -> None:
    """Refuse rows, or a result, of an invalid size. Raises ValueError."""
    if most_rows < 1 or columns < 1 or most_rows * columns > MOST_ELEMENTS:
        raise ValueError(
            f"{name}: most_rows, columns and their product (value={most_rows}, {columns}, {most_rows * columns}, "
            f"allowed=1..{MOST_ELEMENTS})"
        )


def check_rows(
    name: str,
    comm: Communicator,
    x: object,
    counts: object,
    most_rows: int,
    experts: int | None = None,
    *,
    sent: int | None = None,
) -> None:
    """Refuse rows and counts that cannot be sent. With ``experts`` of a rank, each has counts of its own. ``sent``:
    number of rows that may leave; None for those of ``x``.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """
    x = check_tensor(name, "x", x, comm.device, FLOATS, (2,))
    whole = torch.int32, torch.int64
    counts = check_tensor(name, "counts", counts, comm.device, whole, (2 if experts is None else 3,))
    check_most_rows(name, most_rows, x.shape[1])
    n = comm.world_size
    allowed = (n, n) if experts is None else (n, n, experts)
    if counts.shape != allowed or not counts.is_contiguous():
        raise ValueError(f"{name}: shape of counts (value={tuple(counts.shape)}, allowed={allowed}, contiguous)")
    check_neighbours(name, x=x)
    if comm.config.debug and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        table = counts.view(n, n, -1).sum(-1).tolist()
        sent, rows = sum(table[comm.rank]), x.shape[0] if sent is None else sent
        got = max(map(sum, zip(*table, strict=True)))
        if int(counts.min()) < 0 or sent > rows or got > most_rows:
            given, room = f"{sent} sent, {got} to one rank", f"up to {rows}, up to {most_rows}"
            raise ValueError(f"{name}: counts (value={given}, allowed={room}, none negative)")


def check_neighbours(name: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that are not contiguous in their last dimension. Raises ValueError."""
    for what, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            given = f"value={tensor.stride()}, allowed=1"
            raise ValueError(f"{name}: neighbours in a row of {what} lie apart ({given})")


def apart_from(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if it may be in the memory of the contiguous result, which is written while ``x`` is
    still read: a caller may pass on the result of the call before, where it lies.
    """
    behind = x.data_ptr() - result.data_ptr()
    if behind >= result.nbytes:
        return x
    elements = 1  # plainly, since every call of gemv_all_reduce with a tensor for the result comes here
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements += (size - 1) * stride
    return x if behind + elements * x.itemsize <= 0 else x.clone()


def in_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose neighbours in its last dimension are neighbours in memory, as kernels require.

    ``contiguous`` would return an expanded tensor of no elements as it is:

    >>> in_rows(torch.ones(1).expand(0, 3)).stride()
    (3, 1)
    """
    whole = torch.contiguous_format
    return matrix if matrix.shape[-1] <= 1 or matrix.stride(-1) == 1 else matrix.clone(memory_format=whole)


def in_rows_or_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose neighbours in a row, or in a column, are neighbours in memory; ``mm`` copies neither."""
    return matrix if matrix.stride(0) == 1 else in_rows(matrix)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``linear(x, weight)`` by ``mm``, for matrices: ``linear`` takes the host twice as long.

    Also under ``torch.autocast`` in the dtype of both, as the other methods of an operator do.
    """
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return product(x, weight)
    return torch.mm(x, weight.t()) if x.dim() == 2 else functional.linear(x, weight)
