"""The input of a collective and the output that it must have, without running one.

Inputs are random bytes that follow from a seed, the source rank and the chunk. Every rank can regenerate what its peers
were given, so the reference depends on no collective.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.options import MOST_TENSORS

if TYPE_CHECKING:
    from sidelane_lab.harness.running import Sender

KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.BROADCAST)
UNSHARED = (Kind.ALL_REDUCE, Kind.BROADCAST)
"""Collectives whose buffers are not cut into shares of ranks."""
ROOT = 0
POISON = 0xA5
BLOCK_BYTES = 64 << 20  # references are made and compared in blocks, so that checking needs no buffer of its own
GRANULE_BYTES = 16

ANY_SIZE = frozenset(("auto", "gloo", "nccl"))
"""Implementations that take any number of elements; kernels of others move whole granules of each rank's share."""

APART_BYTES = 512
"""The tensors of a list begin at multiples of it, as do those that torch's allocator gives."""


@dataclasses.dataclass(frozen=True, slots=True)
class ListSpot:
    """Which tensor of a list it is, and where it begins in an implementation's buffers, in bytes."""

    number: int
    output_at: int
    input_at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One collective of one size on this rank.

    Attributes:
        nbytes: gathered size of an all_gather, size of the whole local buffer for the others; of a list, of all tensors
            together.
        sizes: of the tensors of a list, which add up to ``nbytes``; empty for a single tensor.
        spot: of one tensor of a list (:attr:`parts` makes them); None for all else.
        step: bytes of which ``nbytes`` is a multiple, for a single tensor; 0: whole granules of each rank's share.
    """

    kind: Kind
    nbytes: int
    dtype: torch.dtype
    rank: int
    world_size: int
    device: torch.device
    sizes: tuple[int, ...] = ()
    spot: ListSpot | None = None
    step: int = 0

    @classmethod
    def on(
        cls,
        rank: Rank,
        kind: Kind,
        nbytes: int,
        dtype: torch.dtype = torch.bfloat16,
        sizes: tuple[int, ...] = (),
        step: int = 0,
    ) -> Case:
        """Make the case of a rank."""
        return cls(kind, nbytes, dtype, rank.rank, rank.world_size, rank.device, sizes, step=step)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Case: kind (value={self.kind}, allowed={', '.join(KINDS)})")
        # Kernels of other libraries move whole granules of a single tensor; a list may hold anything.
        granule = GRANULE_BYTES if not self.sizes and self.spot is None else self.dtype.itemsize
        step = self.step or self.world_size * granule
        if any(nbytes < 1 or nbytes % step for nbytes in (self.nbytes, *self.sizes)):
            given = ", ".join(map(str, self.sizes or (self.nbytes,)))
            raise ValueError(f"Case: nbytes (value={given}, allowed=multiples of {step})")
        if self.sizes and (sum(self.sizes) != self.nbytes or len(self.sizes) > MOST_TENSORS):
            raise ValueError(
                f"Case: sizes (value={len(self.sizes)} of {sum(self.sizes)} bytes, "
                f"allowed=up to {MOST_TENSORS} of {self.nbytes} bytes)"
            )

    @property
    def tensors(self) -> int:
        """That the bytes are spread over; 1 for a single one."""
        return len(self.sizes) or 1

    @property
    def parts(self) -> tuple[Case, ...]:
        """A case for each tensor, one behind the other in the buffers; of a single tensor itself."""
        if not self.sizes:
            return (self,)
        parts: list[Case] = []
        output_at = input_at = 0
        for number, nbytes in enumerate(self.sizes):
            spot = ListSpot(number, output_at, input_at)
            parts.append(dataclasses.replace(self, nbytes=nbytes, sizes=(), spot=spot))
            output_at += _apart(parts[-1].output_bytes)
            input_at += _apart(parts[-1].input_bytes)
        return tuple(parts)

    @property
    def output_at(self) -> int:
        return 0 if self.spot is None else self.spot.output_at

    @property
    def input_at(self) -> int:
        return 0 if self.spot is None else self.spot.input_at

    @property
    def output_room(self) -> int:
        """Bytes of the buffer that holds the outputs."""
        last = self.parts[-1]
        return last.output_at + last.output_bytes

    @property
    def input_room(self) -> int:
        """Bytes of the buffer that holds the inputs."""
        last = self.parts[-1]
        return last.input_at + last.input_bytes

    @property
    def shard_bytes(self) -> int:
        return self.nbytes // self.world_size

    @property
    def output_bytes(self) -> int:
        return self.shard_bytes if self.kind is Kind.REDUCE_SCATTER else self.nbytes

    @property
    def input_bytes(self) -> int:
        return self.shard_bytes if self.kind is Kind.ALL_GATHER else self.nbytes


def rounded_bytes(nbytes: int, world_size: int, tensors: int = 1) -> int:
    """The nearest size from ``nbytes`` up that every collective here can have, shared by ``tensors`` of one size.

    >>> rounded_bytes(1000, 3), rounded_bytes(1000, 3, tensors=8)
    (1008, 1152)
    """
    step = world_size * GRANULE_BYTES * tensors
    return max(step, -(-nbytes // step) * step)


def cases_of(
    rank: Rank,
    options: Any,
    sender: Sender,
    kinds: Sequence[Kind],
    dtype: torch.dtype = torch.bfloat16,
    tensors: int = 1,
    *,
    any_size: bool = False,
) -> list[Case]:
    """Make the cases of a study, a step each: every collective at every size that its options ask for.

    Args:
        rank: of this process.
        options: of the study, with ``sizes``.
        sender: says which sizes are rounded.
        kinds: collectives.
        dtype: of the elements.
        tensors: number of tensors that share each size.
        any_size: round to whole elements, for :data:`ANY_SIZE`: every size where ranks have no shares, and otherwise
            sizes below a granule a rank. Larger shares are whole granules, as in nccl-tests.
    """
    shared = not {*kinds} <= {*UNSHARED}
    step = dtype.itemsize * (rank.world_size if shared else 1) if any_size else 0

    def rounded(nbytes: int) -> int:
        is_whole = not step or (shared and nbytes > rank.world_size * GRANULE_BYTES)
        return rounded_bytes(nbytes, rank.world_size, tensors) if is_whole else -(-nbytes // step) * step

    sizes = sender.rounded(options.sizes_on(rank.device.type), rounded)
    sender.steps = len(kinds) * len(sizes)
    return [
        Case.on(rank, kind, nbytes, dtype, (nbytes // tensors,) * tensors if tensors > 1 else (), step)
        for kind in kinds
        for nbytes in sizes
    ]


def fill_input(case: Case, input: torch.Tensor, seed: int) -> None:
    """Put this rank's random bytes for ``seed`` into ``input`` (1-d). Where a rank has no input, nothing is written."""
    elements = input.view(torch.uint8)
    for part, offset, nbytes in _input_parts(case):
        for begin, block in _blocks(elements[offset : offset + nbytes]):
            _generate(block, case, seed, part, begin)


def poison(tensor: torch.Tensor) -> None:
    """Overwrite an output, so that bytes which nobody writes are noticed."""
    tensor.view(torch.uint8).fill_(POISON)


def output_error(case: Case, output: torch.Tensor, seed: int, *, own_part_left: bool = False) -> str | None:
    """Say what is wrong with ``output`` (1-d) for the inputs of ``seed``; None if nothing is. Waits for the device.

    ``own_part_left``: what this rank sends to itself must not have arrived: poison must be there.
    """
    found = output.view(torch.uint8)
    wrong: list[tuple[int, torch.Tensor]] = []
    for sources, offset, nbytes in _output_parts(case):
        for begin, block in _blocks(found[offset : offset + nbytes]):
            expected = torch.empty_like(block)
            if own_part_left and sources[0][0] == case.rank:
                expected.fill_(POISON)
            else:
                _generate(expected, case, seed, sources[0], begin)
            for source in sources[1:]:
                term = torch.empty_like(block)
                _generate(term, case, seed, source, begin)
                expected.view(case.dtype).add_(term.view(case.dtype))
            wrong.append((offset + begin, (block != expected).sum()))
    counts = torch.stack([count for _, count in wrong]).tolist()
    if not any(counts):
        return None
    first = next(begin for (begin, _), count in zip(wrong, counts, strict=True) if count)
    return f"{int(sum(counts))} of {found.numel()} output bytes are wrong, the first at or behind {first}"


Part = tuple[int, int]
"""Bytes by name: (source rank, number of the chunk in its input). A seed and a part give the bytes."""


def _input_parts(case: Case) -> Iterator[tuple[Part, int, int]]:
    """Yield what this rank's input is made of: (part, offset, bytes)."""
    if case.kind is Kind.ALL_GATHER:
        yield (case.rank, 0), 0, case.shard_bytes
    elif case.kind is Kind.BROADCAST:
        if case.rank == ROOT:
            yield (ROOT, 0), 0, case.nbytes
    elif case.kind is Kind.ALL_REDUCE:
        yield (case.rank, 0), 0, case.nbytes
    else:
        for chunk in range(case.world_size):
            yield (case.rank, chunk), chunk * case.shard_bytes, case.shard_bytes


def _output_parts(case: Case) -> Iterator[tuple[list[Part], int, int]]:
    """Yield what this rank's output must be: (parts to add up, offset, bytes)."""
    everyone, shard = range(case.world_size), case.shard_bytes
    match case.kind:
        case Kind.ALL_GATHER:
            yield from (([(source, 0)], source * shard, shard) for source in everyone)
        case Kind.ALL_TO_ALL:
            yield from (([(source, case.rank)], source * shard, shard) for source in everyone)
        case Kind.BROADCAST:
            yield [(ROOT, 0)], 0, case.nbytes
        case Kind.REDUCE_SCATTER:
            yield [(source, case.rank) for source in everyone], 0, shard
        case _:
            yield [(source, 0) for source in everyone], 0, case.nbytes


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for begin in range(0, tensor.numel(), BLOCK_BYTES):
        yield begin, tensor[begin : begin + BLOCK_BYTES]


def _generate(block: torch.Tensor, case: Case, seed: int, part: Part, begin: int) -> None:
    """Fill a block of bytes with what ``part`` holds at ``begin``."""
    # Hashed, since a CPU's generator looks at 32 bits of its seed only.
    names = (seed, 0 if case.spot is None else case.spot.number, *part, begin // BLOCK_BYTES)
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    generator = torch.Generator(device=block.device).manual_seed(int.from_bytes(digest))
    if case.kind in REDUCING:
        # Small whole numbers: their sums are exact in every dtype, in whatever order a library adds them.
        elements = block.view(case.dtype)
        values = torch.randint(-7, 8, elements.shape, generator=generator, device=block.device, dtype=torch.int32)
        elements.copy_(values)
    else:
        block.view(torch.int64 if block.numel() % 8 == 0 else torch.uint8).random_(generator=generator)


def _apart(nbytes: int) -> int:
    return -(-nbytes // APART_BYTES) * APART_BYTES
