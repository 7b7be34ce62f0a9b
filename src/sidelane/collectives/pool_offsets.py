"""Comparison of the offsets of tensors in pools: a tensor that all ranks have at one offset of a pool is symmetric.

In a pool (``session/pools.py``) each rank places tensors by itself, so no rank knows where those of its peers lie. In
the first call with a tensor each rank posts the offset of its storage and waits for the posts of its peers. All ranks
read the same posts, so they decide alike: a tensor at one offset is symmetric from then on, as long as its storage
lives; any other one is staged. Each rank remembers this by the storage and not by its address, so memory that is
allocated again at the same address is compared anew. ``docs/internals/reach.md`` says why this is safe.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sidelane.collectives.agreement import Request
from sidelane.memory.heap import SymmetricHeap
from sidelane.program.collective import REDUCING, Buffer

OFFSETS = " offsets "
"""Separator in a post between what the call itself exchanges and the offsets of its tensors in pools."""

BUFFERS = (Buffer.OUTPUT, Buffer.INPUT)

NOT_COMPARED = "its place in the pool has not been compared with the peers' yet"
"""Reason why a tensor is staged whose place the next synchronous call may compare."""

_SWEEP = 1024
"""Number of remembered storages at which deleted ones are removed for the first time."""

PostedOffset = tuple[str, int, int] | None
"""Name of a pool, offsets in bytes of a storage and of the tensor in it; None for a tensor that is not compared."""

Outcomes = tuple[str | None, ...]
"""Results of a comparison, by tensors or pairs and ``BUFFERS``: empty for a storage at one place on all ranks, else the
reason why it is staged; None for a tensor that some rank does not compare."""


PlacedStorage = tuple[StorageWeakRef, int] | None
"""A storage in a pool, and the address at which it begins; None for a tensor elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """The way in which peers reach a tensor.

    Attributes:
        how: ``symmetric`` or ``staged``.
        why: the reason, for ``staged``; else empty.
    """

    how: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


class PostedOffsets(NamedTuple):
    """The offsets that a rank posts with a call.

    Attributes:
        text: the offsets, for its peers.
        storages: storages of the compared tensors, in the order of :data:`Outcomes`.
    """

    text: str
    storages: tuple[torch.UntypedStorage | None, ...]


class PoolOffsets:
    """The comparisons of one lane.

    Args:
        heap: heap with the pools.
        world_size: number of ranks; one rank has no peers to compare with.
    """

    def __init__(self, heap: SymmetricHeap, world_size: int) -> None:
        self._heap, self._has_peers = heap, world_size > 1
        # The results, by address of the C++ StorageImpl, which is not reused while the weak reference exists.
        self._known: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._most = _SWEEP
        self._passed: set[int] = set()  # storages without a result of which compiled code knows calls

    def alike(self, tensor: torch.Tensor) -> bool:
        """Return True if the ranks have compared the storage of a tensor, and it lies at one offset on all of them."""
        return self._found(tensor) == ""

    def reasons(self, tensors: Sequence[torch.Tensor | None]) -> tuple[str | None, ...] | None:
        """Return for each tensor in a pool why it is staged ("" if it is not), None for others; None if none is."""
        found = tuple(
            None
            if not isinstance(tensor, torch.Tensor) or not tensor.nbytes or self._heap.pool_at(_address(tensor)) is None
            else self._reason(tensor)
            if self._has_peers
            else ""
            for tensor in tensors
        )
        return None if all(each is None for each in found) else found

    def why_staged(self, tensor: torch.Tensor) -> str:
        """Return the reason why a tensor outside of symmetric memory is staged."""
        if not self._has_peers:
            return "it has no peers"
        if self._heap.pool_at(tensor.data_ptr()) is None:
            return "it is ordinary memory (allowed=tensors of Communicator.empty, tensors of a sidelane.pool)"
        return self._reason(tensor)

    def storages(self, tensors: Sequence[torch.Tensor | None]) -> tuple[PlacedStorage, ...]:
        """Return the storages of tensors, for compiled code: until :meth:`note` is True, calls on them run alike.

        As long as a reference to a storage exists, no other storage has its ``_cdata``.
        """
        pooled = [
            None if each is None or self._heap.pool_at(each.data_ptr()) is None else each.untyped_storage()
            for each in tensors
        ]
        starts = {each._cdata: each.data_ptr() for each in pooled if each is not None}
        self._passed.update(key for key, start in starts.items() if self._known.get(key, (None, 0))[1] != start)
        return tuple(None if each is None else (StorageWeakRef(each), each.data_ptr()) for each in pooled)

    def _reason(self, tensor: torch.Tensor) -> str:
        found = self._found(tensor)
        return NOT_COMPARED if found is None else found

    def _found(self, tensor: torch.Tensor) -> str | None:
        """Return the result for the storage of a tensor (:data:`Outcomes`); None if there is none yet."""
        storage = tensor.untyped_storage()
        found = self._known.get(storage._cdata)
        # A storage that got other memory since (data_ptr differs) counts as another storage.
        return found[2] if found is not None and found[1] == storage.data_ptr() else None

    def posted(
        self, requests: Sequence[Request], tensors: Sequence[torch.Tensor | None], most_text: int
    ) -> PostedOffsets | None:
        """Return what this rank posts with a call; None if it has no tensor to compare.

        Args:
            requests: the rank's request for each tensor or pair.
            tensors: the caller's tensors.
            most_text: largest number of characters. The tensors of a call that would need more are staged.
        """
        found = self._to_compare(requests, tensors)
        if all(tensor is None for tensor in found):
            return None
        offsets: list[PostedOffset] = []
        for tensor in found:
            pool = None if tensor is None else self._heap.pool_at(tensor.data_ptr())
            if tensor is None or pool is None:
                offsets.append(None)
            else:
                storage = tensor.untyped_storage().data_ptr() - pool.start
                offsets.append((pool.name, storage, tensor.data_ptr() - pool.start))
        text = json.dumps(offsets, separators=(",", ":"))
        if len(text) > most_text:
            return None
        return PostedOffsets(text, tuple(None if tensor is None else tensor.untyped_storage() for tensor in found))

    def compares(self, requests: Sequence[Request], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Return True if a call has tensors in pools that the ranks must compare."""
        if not self._has_peers or not self._heap.pools:
            return False
        return any(tensor is not None for tensor in self._to_compare(requests, tensors))

    def compare(self, texts: Sequence[str], requests: Sequence[Request]) -> tuple[list[Request] | None, Outcomes]:
        """Compare the offsets that all ranks have posted for a call that they have agreed on.

        Args:
            texts: text of each rank; empty for a rank that compares nothing.
            requests: requests of this rank.

        Returns:
            The requests with the tensors that are symmetric, None if there are none; and the argument of :meth:`note`.
        """
        if not all(texts):
            return None, ()
        rows: list[list[PostedOffset]] = [json.loads(text) for text in texts]
        columns = list(zip(*rows, strict=True))
        outcomes = tuple(_outcome(column) for column in columns)
        is_symmetric = [
            outcome == "" and all(offset == column[0] for offset in column)
            for outcome, column in zip(outcomes, columns, strict=True)
        ]
        reached = [
            self._reached(request, is_symmetric[2 * number : 2 * number + 2]) for number, request in enumerate(requests)
        ]
        return reached if any(is_symmetric) else None, outcomes

    def note(self, posted: PostedOffsets, outcomes: Outcomes) -> bool:
        """Remember the results of a comparison by storage. Return True if compiled code knows calls on one of them: it
        then has to forget all of its calls.
        """
        if len(self._known) >= self._most:
            # Living storages are never forgotten: this rank would compare again, and its peers would not.
            self._known = {key: found for key, found in self._known.items() if not found[0].expired()}
            self._most = max(_SWEEP, 2 * len(self._known))
        for storage, outcome in zip(posted.storages, outcomes, strict=False):
            if storage is not None and outcome is not None:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), outcome
        if self._passed.isdisjoint(each._cdata for each in posted.storages if each is not None):
            return False
        self._passed.clear()
        return True

    def _to_compare(
        self, requests: Sequence[Request], tensors: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the tensor of each request and buffer that is in a pool, new to this lane, and reached by peers."""
        there = {
            # In an in-place call a rank's part may begin where the whole does, and it is the whole that is compared.
            tensor.data_ptr(): tensor
            for tensor in sorted((one for one in tensors if one is not None and one.nbytes), key=lambda one: one.nbytes)
        }
        found: list[torch.Tensor | None] = []
        for request in requests:
            for buffer in BUFFERS:
                region = request.region(buffer)
                tensor = there.get(region.address) if region.nbytes else None
                is_read = buffer is Buffer.OUTPUT or request.collective.kind in REDUCING
                is_new = (
                    tensor is not None
                    and (is_read or not request.output.symmetric)
                    and self._heap.pool_at(region.address) is not None
                    and self._found(tensor) is None
                )
                found.append(tensor if is_new else None)
        return found

    def _reached(self, request: Request, is_symmetric: Sequence[bool]) -> Request:
        """Return a request with the symmetric regions of its tensors, output first, where they are at one offset."""
        output, input = (
            self._heap.region_at(region) if is_symmetric else region
            for region, is_symmetric in zip(
                (request.region(Buffer.OUTPUT), request.region(Buffer.INPUT)), is_symmetric, strict=True
            )
        )
        if not request.collective.in_place:
            return dataclasses.replace(request, output=output, input=input)
        if request.whole is request.output:  # the other one is a part of it
            return dataclasses.replace(request, output=output)
        return dataclasses.replace(request, input=input)


def _outcome(column: Sequence[PostedOffset]) -> str | None:
    """Compare the offsets of one tensor's storage on all ranks. See :data:`Outcomes` for the result."""
    if any(offset is None for offset in column):
        return None
    storages = [(offset[0], offset[1]) for offset in column if offset is not None]
    for rank, storage in enumerate(storages):
        if storage != storages[0]:
            return f"it lies at {_words(storages[0])} on rank 0 and at {_words(storage)} on rank {rank}"
    return ""


def _words(storage: tuple[str, int]) -> str:
    return f"byte {storage[1]} of {storage[0]}"


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it has no address, such as a sparse tensor
        return 0
