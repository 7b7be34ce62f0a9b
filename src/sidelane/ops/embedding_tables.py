"""Embedding tables on all ranks: the tables and samples of each rank, and checks of the arguments."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sidelane.choice.fused import ORDERS
from sidelane.errors import Page, UnavailableError, in_no_order
from sidelane.memory.storage import persistent
from sidelane.ops.handle import FLOATS, cached_object, check_choice, check_tensor, power_of_two
from sidelane.ops.operator import AUTO
from sidelane.program.collective import split_evenly
from sidelane.session import Communicator

NAME = "embedding_all_to_all"
MODES = SUM, MEAN = "sum", "mean"
MOST_DIM = 1024
MOST_BAGS = 1 << 30
MOST_CHECKED = 64
"""Largest number of table lists that are remembered."""

WARP_BYTES = 1024
"""Bytes of a row that a warp loads at once. Shorter rows belong to a warp each, whose threads keep their own sums:
threads that exchange sums in the loop took 2.5 times as long (results/notes/kernels.md)."""
MOST_WARPS = 8
SUMS = 64
"""Sums of a thread: the number of elements that it loads at a time."""
MOST_ROWS = 8
UNIT_WARPS = 16
"""Warps of all programs on a compute unit: its registers suffice for so many, with 128 for each thread."""


def threads_of(dim: int, element_bytes: int) -> tuple[int, int]:
    """Return the warps of a program, and the rows that they load at a time, for rows of so many elements."""
    lanes = power_of_two(dim)
    warps = min(MOST_WARPS, max(1, lanes * element_bytes // WARP_BYTES))
    each = max(1, lanes // (32 * warps))
    return warps, min(MOST_ROWS, max(1, SUMS // each))


class EmbeddingTables:
    """Tables of this rank, next to those of its peers, and a batch. Collective.

    Args:
        comm: communicator of the ranks.
        tables: tables of this rank, [rows, D] each.
        batch: number of samples of all ranks.

    Attributes:
        counts: number of tables of each rank.
        samples: number of samples of each rank: ``batch // N``, and one more if ``rank < batch % N``.
        width: number of elements of a row of the output.
        are_aligned: rows of all ranks' tables are multiples of 16 bytes.
        addresses: addresses of this rank's tables, int64 on the device.
    """

    def __init__(self, comm: Communicator, tables: Sequence[torch.Tensor], batch: int) -> None:
        n, device = comm.world_size, comm.device
        self.comm, self.tables, self.batch = comm, tuple(tables), batch
        self.dim, self.dtype = tables[0].shape[1], tables[0].dtype
        own = [len(tables), all(table.data_ptr() % 16 == 0 for table in tables)]
        of_all = torch.empty(n, 2, dtype=torch.int64, device=device)
        comm.all_gather(of_all, torch.tensor(own, dtype=torch.int64, device=device))
        comm.synchronize()
        self.counts: tuple[int, ...] = tuple(of_all[:, 0].tolist())
        self.are_aligned = bool(of_all[:, 1].all()) and self.dim * self.dtype.itemsize % 16 == 0
        self.samples = split_evenly(batch, n)
        self.width = sum(self.counts) * self.dim
        addresses = torch.tensor([table.data_ptr() for table in tables], dtype=torch.int64, device="cpu")
        self.addresses = persistent(device, lambda: addresses.to(device))

    @property
    def output_shape(self) -> tuple[int, int]:
        """Shape of the output for this rank's samples."""
        return self.samples[self.comm.rank], self.width

    @classmethod
    def cached(cls, comm: Communicator, tables: Sequence[torch.Tensor], batch: int) -> EmbeddingTables:
        """Return this communicator's tables; all ranks make them together if they are new."""
        key = NAME, batch, *checked(comm, tables).key
        return cached_object(comm, key, lambda: cls(comm, tables, batch))


class CheckedTables(NamedTuple):
    """Tables that were checked to be of one kind.

    Attributes:
        tables: the tensors, kept so that no other tensor can get the identity of one.
        addresses, shapes: addresses and shapes of the tables.
        key: key by which lists of tables are compared.
        identity: object that stands for the key in the cache of calls (``ops.operator``); it takes no time to compare.
    """

    tables: tuple[torch.Tensor, ...]
    addresses: list[int]
    shapes: list[torch.Size]
    key: tuple[object, ...]
    identity: object

    def are(self, tables: Sequence[torch.Tensor]) -> bool:
        """Return True if these are the same tensors, with the same memory behind each."""
        return (
            len(tables) == len(self.tables)
            and all(map(operator.is_, tables, self.tables))
            and list(map(torch.Tensor.data_ptr, self.tables)) == self.addresses
            and list(map(_shape_of, self.tables)) == self.shapes
        )


_shape_of = operator.attrgetter("shape")


def sizes_of(
    tables: Sequence[torch.Tensor], batch: int, indices: torch.Tensor, offsets: torch.Tensor
) -> tuple[int, int, int]:
    """Return batch, tables and pooling, by which this rank's times are looked up."""
    return batch, len(tables), max(1, indices.numel() // max(1, offsets.numel() - 1))


def checked(comm: Communicator, tables: Sequence[torch.Tensor]) -> CheckedTables:
    """Refuse tables that are not of one kind; tables that were checked before are recognised: 64 of them take the host
    10 us then, 58 otherwise (results/cpu/probes.txt).

    Raises:
        TypeError, ValueError: the tables are not of one kind.
    """
    if not isinstance(tables, Sequence) or not tables:
        raise TypeError(f"{NAME}: tables must be a list of one tensor or more (value={type(tables).__name__})")
    before: dict[int, CheckedTables] = comm.cache.setdefault(checked, {})
    known = before.get(id(tables[0]))
    if known is None or not known.are(tables):
        check_tables(comm, tables)
        if len(before) >= MOST_CHECKED:
            before.clear()
        addresses, shapes = [table.data_ptr() for table in tables], [table.shape for table in tables]
        each = (part for address, shape in zip(addresses, shapes, strict=True) for part in (address, *shape))
        key = tables[0].dtype, *each
        identity = comm.cache.setdefault((checked, key), object())
        known = before[id(tables[0])] = CheckedTables(tuple(tables), addresses, shapes, key, identity)
    return known


def check_tables(comm: Communicator, tables: Sequence[torch.Tensor]) -> None:
    """Check each table by itself. Raises TypeError or ValueError."""
    for number, table in enumerate(tables):
        check_tensor(NAME, f"table {number}", table, comm.device, FLOATS, (2,))
        if (table.shape[1], table.dtype) != (tables[0].shape[1], tables[0].dtype):
            given, allowed = f"{table.shape[1]}, {table.dtype}", f"{tables[0].shape[1]}, {tables[0].dtype}"
            raise ValueError(f"{NAME}: dim and dtype of table {number} (value={given}, allowed={allowed})")
        if not table.is_contiguous():
            raise ValueError(f"{NAME}: strides of table {number} (value={table.stride()}, allowed=contiguous)")
    if not 1 <= tables[0].shape[1] <= MOST_DIM:
        raise ValueError(f"{NAME}: dim of the tables (value={tables[0].shape[1]}, allowed=1..{MOST_DIM})")


def words_of_tables(
    comm: Communicator,
    words: tuple[object, ...],
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
) -> tuple[object, ...] | None:
    """Return all on which checks and choice depend besides the layout of offsets, whatever the number of indices. None
    if an argument may be wrong, or if values are checked.
    """
    if comm.config.debug:
        return None
    try:
        known = checked(comm, tables)
        bags: tuple[object, ...] = indices.dtype, indices.device, indices.dim(), indices.is_contiguous()
        if weights is not None:
            alike = weights.shape == indices.shape and weights.is_contiguous()
            bags += weights.dtype, weights.device, alike
    except (AttributeError, TypeError, ValueError, RuntimeError):  # refused by checks, which tell the peers
        return None
    return (*words, known.identity, *bags)


def check_call(
    comm: Communicator,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: str,
    order: str = AUTO,
) -> tuple[int, tuple[object, ...]]:
    """Return the number of samples of all ranks, and the key of the tables and this number.

    With ``Config(debug=True)``, check every index on the host.

    Raises:
        TypeError, ValueError: tables, bags or sizes are invalid.
    """
    kind = checked(comm, tables).key
    check_choice(NAME, "mode", mode, MODES)
    check_choice(NAME, "order", order, (AUTO, *ORDERS))
    for what, tensor in (("indices", indices), ("offsets", offsets)):
        check_tensor(NAME, what, tensor, comm.device, (torch.int32, torch.int64), (1,))
        if not tensor.is_contiguous():
            raise ValueError(f"{NAME}: strides of {what} (value={tensor.stride()}, allowed=contiguous)")
    if weights is not None:
        check_tensor(NAME, "per_sample_weights", weights, comm.device, (tables[0].dtype, torch.float32), (1,))
        if mode != "sum" or weights.shape != indices.shape or not weights.is_contiguous():
            given, allowed = f"{tuple(weights.shape)}, mode {mode}", f"{tuple(indices.shape)}, contiguous, mode sum"
            raise ValueError(f"{NAME}: per_sample_weights (value={given}, allowed={allowed})")
    batch, rest = divmod(offsets.numel() - 1, len(tables))
    if rest or batch < 0:
        allowed = f"a multiple of {len(tables)}, and 1"
        raise ValueError(f"{NAME}: offsets (value={offsets.numel()}, allowed={allowed})")
    if batch < comm.world_size:
        raise ValueError(f"{NAME}: batch (value={batch}, allowed={comm.world_size} and more): each rank has a sample")
    if batch * len(tables) > MOST_BAGS:
        raise ValueError(f"{NAME}: tables x batch (value={len(tables)} x {batch}, allowed=1..{MOST_BAGS})")
    if comm.config.debug:
        _check_indices(tables, indices, offsets)
    return batch, (batch, *kind)


def _check_indices(tables: Sequence[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor) -> None:
    """Check indices and offsets by their values. Waits for the device."""
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] != indices.numel() or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"{NAME}: offsets (value={ends[0]}..{ends[-1]}, allowed=0..{indices.numel()}, not falling)")
    batch = (len(ends) - 1) // len(tables)
    for number, table in enumerate(tables):
        some = indices[ends[number * batch] : ends[(number + 1) * batch]]
        if some.numel() and not 0 <= int(some.min()) <= int(some.max()) < table.shape[0]:
            given = f"{int(some.min())}..{int(some.max())}"
            raise ValueError(f"{NAME}: indices of table {number} (value={given}, allowed=0..{table.shape[0] - 1})")


def refuse_atomics(comm: Communicator, what: str) -> None:
    """Refuse atomic additions of floats, whose order changes from run to run, where they may not be.

    ``torch.use_deterministic_algorithms(True)`` refuses them, too, or warns of them, as it does for PyTorch's own.

    Raises:
        UnavailableError: they may not be.
    """
    why = "dense gradients are added by atomic operations, in an order that changes (allowed=sparse=True)"
    if comm.config.deterministic:
        raise in_no_order(what, why)
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(f"{what}: {why}", stacklevel=3)
    elif torch.are_deterministic_algorithms_enabled():
        text = f"{what}: refused by torch.use_deterministic_algorithms(True): {why}"
        raise UnavailableError(text, page=Page.DETERMINISM)
