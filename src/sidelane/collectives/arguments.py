"""Validation of a call's tensors, and their translation into a request.

Shapes, dtypes, devices and overlaps are checked here only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sidelane.collectives.agreement import Request
from sidelane.collectives.pool_offsets import PoolOffsets
from sidelane.memory.heap import Region, SymmetricHeap
from sidelane.program import collective as define
from sidelane.program.collective import ELEMENT_BYTES, Buffer, ReduceOp, Reduction
from sidelane.program.resharding import Resharding, even_parts

SHARD_ALIGNMENT = 256
"""Bytes to which the shards of an all_reduce are rounded, so that engines and kernels work on aligned spans."""

EMPTY = Region(0, 0)


class Dimensions(NamedTuple):
    """The caller's arguments of an all_to_all from one dimension to another one, before they are checked.

    Attributes:
        scatter, gather: the dimensions.
        scattered, gathered: sizes of their parts, one for each rank; None for parts as equal as can be.
    """

    scatter: int
    gather: int
    scattered: tuple[int, ...] | None
    gathered: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Translates tensors into requests for one lane on one device.

    Attributes:
        rank, world_size: this process and its group.
        device: the only device whose tensors are accepted.
        heap: symmetric memory of the communicator, and of those that share it.
        pool_offsets: compares the offsets of tensors in pools.
    """

    rank: int
    world_size: int
    device: torch.device
    heap: SymmetricHeap
    pool_offsets: PoolOffsets = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pool_offsets", PoolOffsets(self.heap, self.world_size))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Request:
        """Check an all_gather: ``output`` must hold ``world_size`` times the elements of ``input``."""
        self._same_dtype("all_gather", output, input)
        self._holds_all("all_gather", "output", output, "input", input)
        output_region, input_region = self.regions("all_gather", output, input)
        in_place = self._in_place("all_gather", output_region, input_region, self.rank * input.nbytes)
        collective = define.all_gather([input.nbytes] * self.world_size, in_place=in_place)
        return Request(collective, input_region, output_region, input.dtype)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, copies_own: object = True, dims: Dimensions | None = None
    ) -> Request:
        """Check an all_to_all with equal splits: both tensors must hold ``world_size`` equal parts.

        With ``dims`` it is one from one dimension to another, of parts that may differ.
        """
        _check_own(copies_own)
        self._same_dtype("all_to_all", output, input)
        if dims is not None:
            return self._reshard(output, input, bool(copies_own), dims)
        if output.numel() != input.numel() or input.numel() % self.world_size:
            raise ValueError(
                f"all_to_all: input and output must hold the same number of elements, a multiple of {self.world_size} "
                f"(output={output.numel()}, input={input.numel()})"
            )
        part = input.nbytes // self.world_size
        output_region, input_region = self.regions("all_to_all", output, input)
        in_place = self._in_place("all_to_all", output_region, input_region, 0)
        counts = [[part] * self.world_size] * self.world_size
        collective = define.all_to_all(counts, in_place=in_place, copies_own=bool(copies_own))
        return Request(collective, input_region, output_region, input.dtype)

    def _reshard(self, output: torch.Tensor, input: torch.Tensor, copies_own: bool, dims: Dimensions) -> Request:
        """Check the dimensions and shapes of an all_to_all from one dimension to another one."""
        scatter_dim, gather_dim = _dimensions(output, input, dims)
        scattered = self._parts("input", dims.scattered, f"scatter_dim {scatter_dim}", input.shape[scatter_dim])
        gathered = self._parts("output", dims.gathered, f"gather_dim {gather_dim}", output.shape[gather_dim])
        whole = list(input.shape)
        whole[gather_dim] = output.shape[gather_dim]
        made = Resharding(tuple(whole), input.element_size(), scatter_dim, gather_dim, scattered, gathered)
        for name, tensor, buffer in (("input", input, Buffer.INPUT), ("output", output, Buffer.OUTPUT)):
            allowed = made.shape_of(self.rank, buffer)
            if tuple(tensor.shape) != allowed:
                raise ValueError(
                    f"all_to_all: shape of {name} (value={list(tensor.shape)} on rank {self.rank} of "
                    f"{self.world_size}, allowed={[*allowed]}); scatter_dim={scatter_dim} by {[*scattered]}, "
                    f"gather_dim={gather_dim} by {[*gathered]}, input={list(input.shape)}, output={list(output.shape)}"
                )
        output_region, input_region = self.regions("all_to_all", output, input)
        self._apart("all_to_all", output_region, input_region)
        # A rank without bytes has no offset to agree on: a tensor of which there is one counts as ordinary memory.
        if 0 in gathered:
            input_region = Region(input_region.address, input_region.nbytes)
        if 0 in scattered:
            output_region = Region(output_region.address, output_region.nbytes)
        collective = made.collective(copies_own=copies_own)
        return Request(collective, input_region, output_region, input.dtype, made)

    def _parts(self, name: str, given: Sequence[int] | None, dimension: str, total: int) -> tuple[int, ...]:
        """Return the sizes of the parts of a dimension of that length; None for parts as equal as can be."""
        if given is None:
            return even_parts(total, self.world_size)
        if len(given) != self.world_size or any(size < 0 for size in given) or sum(given) != total:
            raise ValueError(
                f"all_to_all: {name}_split_sizes must be {self.world_size} sizes that add up to {dimension} "
                f"(value={list(given)}, allowed sum={total})"
            )
        return tuple(given)

    def split_bytes(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        splits: Sequence[tuple[int, ...]],
        copies_own: object,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Check the split sizes of an uneven all_to_all (rows of dimension 0) and turn them into bytes."""
        _check_own(copies_own)
        self._same_dtype("all_to_all", *tensors)
        self._apart("all_to_all", *self.regions("all_to_all", *tensors))
        result = []
        for name, tensor, sizes in zip(("output", "input"), tensors, splits, strict=True):
            rows = tensor.shape[0] if tensor.dim() else 0
            row_bytes = tensor.nbytes // rows if rows else 0
            result.append(tuple(size * row_bytes for size in self._parts(name, sizes, "dimension 0", rows)))
        return result[0], result[1]

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: object) -> Request:
        """Check a reduce_scatter: ``input`` must hold ``world_size`` times the elements of ``output``."""
        self._same_dtype("reduce_scatter", output, input)
        self._holds_all("reduce_scatter", "input", input, "output", output)
        output_region, input_region = self.regions("reduce_scatter", output, input)
        in_place = self._in_place("reduce_scatter", input_region, output_region, self.rank * output.nbytes)
        reduction = self._reduction("reduce_scatter", op, input.dtype)
        collective = define.reduce_scatter([output.nbytes] * self.world_size, reduction, in_place=in_place)
        return Request(collective, input_region, output_region, input.dtype)

    def all_reduce(self, output: torch.Tensor, input: torch.Tensor, op: object) -> Request:
        """Check an all_reduce: both tensors must hold the same number of elements, which may be any number."""
        self._same_dtype("all_reduce", output, input)
        if output.numel() != input.numel():
            raise ValueError(
                f"all_reduce: output must hold the elements of input (output={output.numel()}, input={input.numel()})"
            )
        output_region, input_region = self.regions("all_reduce", output, input)
        in_place = self._in_place("all_reduce", output_region, input_region, 0)
        reduction = self._reduction("all_reduce", op, input.dtype)
        shards = aligned_shards(input.nbytes, self.world_size, SHARD_ALIGNMENT)
        return Request(
            define.all_reduce(shards, reduction, in_place=in_place), input_region, output_region, input.dtype
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Check a broadcast, which is in place: the root's bytes replace those of all other ranks."""
        (region,) = self.regions("broadcast", tensor)
        collective = define.broadcast(tensor.nbytes, self.world_size, root, in_place=True)
        return Request(collective, region, region, tensor.dtype)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int) -> Request:
        """Check a scatter: the root's ``input`` must hold ``world_size`` times the elements of ``output``."""
        return self._rooted("scatter", define.scatter, "input", input, "output", output, root)

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int) -> Request:
        """Check a gather: the root's ``output`` must hold ``world_size`` times the elements of ``input``."""
        return self._rooted("gather", define.gather, "output", output, "input", input, root)

    def _rooted(
        self,
        function: str,
        make: Callable[[list[int], int], define.Collective],
        name: str,
        whole: torch.Tensor | None,
        part_name: str,
        part: torch.Tensor,
        root: int,
    ) -> Request:
        """Check a call with the parts of all ranks (``whole``) on the root only."""
        check_tensors(function, part)
        collective = make([part.nbytes] * self.world_size, root)
        if (whole is not None) != (self.rank == root):
            given = "None" if whole is None else "a tensor"
            raise ValueError(
                f"{function}: {name} is passed by the root alone, rank {root} (value={given} on rank {self.rank})"
            )
        region = EMPTY
        if whole is not None:
            self._same_dtype(function, whole, part)
            self._holds_all(function, name, whole, part_name, part)
            (region,) = self.regions(function, whole)
        (part_region,) = self.regions(function, part)
        self._apart(function, region, part_region)
        output, input = (region, part_region) if name == "output" else (part_region, region)
        return Request(collective, input, output, part.dtype)

    def _holds_all(self, function: str, name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor) -> None:
        """Refuse a tensor that does not hold as many elements as the parts of all ranks together."""
        allowed = self.world_size * part.numel()
        if whole.numel() != allowed:
            raise ValueError(
                f"{function}: {name} must hold {self.world_size} times the elements of {part_name} "
                f"({name}={whole.numel()}, {part_name}={part.numel()}, allowed {name}={allowed})"
            )

    def regions(self, function: str, *tensors: torch.Tensor) -> tuple[Region, ...]:
        """Return the regions of tensors. Raises TypeError or ValueError for what no call accepts."""
        check_tensors(function, *tensors)
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise ValueError(f"{function}: layout (value={tensor.layout}, allowed=torch.strided)")
            if tensor.is_conj() or tensor.is_neg():
                raise ValueError(
                    f"{function}: a lazily conjugated or negated view (allowed=tensor.resolve_conj().resolve_neg())"
                )
            if tensor.device != self.device:
                raise ValueError(f"{function}: device (value={tensor.device}, allowed={self.device})")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{function}: tensors must be contiguous, as tensor.contiguous() makes them "
                    f"(strides={tensor.stride()}, shape={tuple(tensor.shape)})"
                )
        return tuple(self.locate(tensor) for tensor in tensors)

    def locate(self, tensor: torch.Tensor) -> Region:
        """Return the region of a contiguous tensor; in a pool it is symmetric once the ranks have compared offsets.

        Raises:
            ValueError: as ``SymmetricHeap.locate``.
        """
        region = self.heap.locate(tensor)
        if region.nbytes and self.heap.pool_at(region.address) is not None and not self.pool_offsets.alike(tensor):
            return Region(region.address, region.nbytes)
        return region

    def anchor(self, tensor: torch.Tensor, address: int, nbytes: int, dtype: torch.dtype) -> int | None:
        """Return the address of a symmetric tensor, 0 for ordinary memory; None if :meth:`regions` must check it.

        Args:
            tensor: contiguous, no negated or conjugated view, and in no pool.
            address: its address, not 0.
            nbytes: its size in bytes, not 0.
            dtype: its element type.
        """
        if tensor.device != self.device or tensor.layout is not torch.strided:
            return None
        if tensor.untyped_storage().nbytes() < tensor.storage_offset() * dtype.itemsize + nbytes:
            return None  # the storage is smaller than the shape requires
        return self.heap.anchor(address, nbytes)

    def _same_dtype(self, function: str, output: torch.Tensor, input: torch.Tensor) -> None:
        check_tensors(function, output, input)
        if output.dtype != input.dtype:
            raise TypeError(
                f"{function}: input and output must have one dtype (output={output.dtype}, input={input.dtype})"
            )

    def _in_place(self, function: str, whole: Region, part: Region, offset: int) -> bool:
        """Return True if ``part`` is exactly the bytes of ``whole`` at ``offset``; any other overlap is an error."""
        if not self.overlap(whole, part):
            return False
        if part.address == whole.address + offset:
            return True
        raise ValueError(
            f"{function}: input and output overlap, but not as an in-place call "
            f"(distance={part.address - whole.address} bytes, allowed={offset})"
        )

    def _apart(self, function: str, output: Region, input: Region) -> None:
        if self.overlap(output, input):
            raise ValueError(f"{function}: input and output must not overlap")

    @staticmethod
    def overlap(a: Region, b: Region) -> bool:
        """Return True if two regions share bytes."""
        return bool(a.nbytes and b.nbytes) and a.address < b.address + b.nbytes and b.address < a.address + a.nbytes

    @staticmethod
    def _reduction(function: str, given: object, dtype: torch.dtype) -> Reduction:
        op = op_name(given)
        name = str(dtype).removeprefix("torch.")
        if op not in tuple(ReduceOp):
            raise ValueError(f"{function}: op (value={given!r}, allowed={', '.join(ReduceOp)})")
        if name not in ELEMENT_BYTES:
            raise ValueError(f"{function}: dtype (value={name}, allowed={', '.join(ELEMENT_BYTES)})")
        return Reduction(ReduceOp(op), name)


def _dimensions(output: torch.Tensor, input: torch.Tensor, dims: Dimensions) -> tuple[int, int]:
    """Return the dimensions of an exchange, counted from 0."""
    count = input.dim()
    if count != output.dim() or count < 2:
        raise ValueError(
            "all_to_all: with scatter_dim and gather_dim, tensors have the same number of dimensions, 2 or more "
            f"(input={list(input.shape)}, output={list(output.shape)})"
        )
    for name, dim in (("scatter_dim", dims.scatter), ("gather_dim", dims.gather)):
        if not -count <= dim < count:
            raise ValueError(f"all_to_all: {name} (value={dim}, allowed={-count}..{count - 1})")
    scatter_dim, gather_dim = dims.scatter % count, dims.gather % count
    if scatter_dim == gather_dim:
        raise ValueError(
            f"all_to_all: scatter_dim and gather_dim must be two dimensions (value={dims.scatter}, {dims.gather})"
        )
    return scatter_dim, gather_dim


def _check_own(copies_own: object) -> None:
    if not isinstance(copies_own, bool):
        raise TypeError(f"all_to_all: copy_own_part (value={copies_own}, allowed=True or False)")


def check_tensors(function: str, *tensors: object) -> None:
    """Refuse arguments that are not tensors.

    Raises:
        TypeError: an argument is no tensor; its type is named.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{function}: tensors expected (value={type(tensor).__name__}, allowed=torch.Tensor)")


def identities(tensors: Sequence[object]) -> Hashable:
    """Return all properties of a call's tensors that validation depends on.

    Every call comes here, and reading a property takes time: the common case of two ordinary tensors is written out.
    """
    if len(tensors) == 2:
        a, b = tensors
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            try:
                at_a, at_b = a.data_ptr(), b.data_ptr()
            except RuntimeError:  # one has no address
                at_a = at_b = 0
            dtype = a.dtype
            # If one dtype is complex and the other is not, validation refuses the call anyway.
            if at_a and at_b and not dtype.is_complex:
                return (
                    (at_a, a.nbytes, dtype, a.is_contiguous(), a.is_neg()),
                    (at_b, b.nbytes, b.dtype, b.is_contiguous(), b.is_neg()),
                )
    return tuple(map(identity, tensors))


def identity(tensor: object) -> Hashable:
    """Return all properties of one tensor that validation depends on."""
    if not isinstance(tensor, torch.Tensor):
        return str(type(tensor))
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # it has no address, such as a sparse tensor
        return str(type(tensor))
    dtype = tensor.dtype
    # Only complex tensors can be conjugated.
    ordinary = tensor.is_contiguous() and not tensor.is_neg() and not (dtype.is_complex and tensor.is_conj())
    if address:  # it tells the device, too
        return (address, tensor.nbytes, dtype, ordinary)
    return (address, tensor.nbytes, dtype, ordinary, tensor.device, tensor.layout)


def op_name(op: object) -> str:
    """Return the name of a reduction: ``sum`` for ``"sum"`` and for ``torch.distributed.ReduceOp.SUM``."""
    given = getattr(op, "op", op)  # PyTorch passes ReduceOp(ReduceOp.SUM), whose attribute op is ReduceOp.SUM
    return given if isinstance(given, str) else str(getattr(given, "name", given)).lower()


def aligned_shards(nbytes: int, world_size: int, alignment: int) -> tuple[int, ...]:
    """Split bytes into one shard per rank. All but the last non-empty shard are equal multiples of ``alignment``.

    >>> aligned_shards(1000, 4, 256)
    (256, 256, 256, 232)
    >>> aligned_shards(300, 4, 256)
    (256, 44, 0, 0)
    """
    shard = -(-nbytes // (world_size * alignment)) * alignment
    return tuple(max(0, min(shard, nbytes - rank * shard)) for rank in range(world_size))
