"""The cache of calls of a lane: all that this rank knows of a call that it has made before, under one key.

The key of a call has its arguments with the addresses of its tensors; where peers reach tensors, or split sizes of
peers count, it is followed by these. The key of a launch of the caller's own kernel begins with the kernel.

A second kind of key, the *shape*, has sizes instead of addresses, for training loops that allocate their tensors anew
in every step: the program of a call follows from the sizes, dtypes and kinds of memory of its tensors, and from their
overlap. If only the addresses are new, the call is not validated, agreed on or planned again. Only the addresses are
checked: they must be ordinary memory of this device, or symmetric memory at the same address as before, and large
enough.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from sidelane.choice import Choice
from sidelane.collectives.agreement import Agreement, Request
from sidelane.collectives.arguments import Arguments
from sidelane.collectives.plan import Plan
from sidelane.collectives.pool_offsets import Outcomes
from sidelane.execute.base import Addresses, Runnable
from sidelane.memory.posts import PostedCall
from sidelane.program.caching import BASE_BYTES, loaded_bytes, program_bytes
from sidelane.program.collective import Buffer

Key = tuple[Hashable, ...]
Requests = tuple[Request, ...]
"""One rank's view of a call: a request for each tensor, or for each pair."""

MOST_BYTES = 64 << 20
"""Bytes of all entries that are kept, and of the programs that these run, as ``caching`` estimates them."""

MOST_NEW = 64
"""Number of the newest entries, which are kept beyond that only if their call was repeated."""

MOST_SEEN = 4096
"""Number of keys in one half of the keys that were seen once (``CallCache.has_seen``)."""

UNIT = 16
"""Bytes of which the addresses of one shape differ by multiples: loaded programs depend on no larger alignment."""

_PLAIN = ((True, False), (True,))


class CallCache:
    """The entries of one lane: the ``MOST_NEW`` newest, and those of calls that came again, within ``MOST_BYTES``.

    Of these the oldest one that was not asked for meanwhile goes first. Calls of sizes that never repeat take the
    place of each other only.

    Attributes:
        keepers: functions to call when all entries become invalid, for objects that hold some prepared calls.
        nbytes: bytes of the kept entries.
    """

    def __init__(self) -> None:
        self.keepers: list[Callable[[], object]] = []
        self.nbytes = 0
        self._entries: dict[Key, CallEntry] = {}
        self._new: collections.deque[CallEntry] = collections.deque()
        self._admitted: collections.deque[CallEntry] = collections.deque()
        self._holders: collections.Counter[int] = collections.Counter()  # kept entries by the identity of their program
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()

    def __iter__(self) -> Iterator[CallEntry]:
        return iter(tuple(self._entries.values()))

    def get(self, key: Key) -> CallEntry | None:
        """Return the entry of a key; None if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_used = True
        return entry

    def entry(self, key: Key) -> CallEntry:
        """Return the entry of a key, a new one if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = CallEntry(key, is_used=self.has_seen(key))
            self._new.append(entry)
            if len(self._new) > MOST_NEW:
                self._admit(self._new.popleft())
        return entry

    def _admit(self, entry: CallEntry) -> None:
        """Keep an entry that was asked for since it was new, in place of others; forget any other one."""
        if not entry.is_used:
            del self._entries[entry.key]
            return
        entry.is_used = False
        entry.program = entry.held_program()
        entry.nbytes = BASE_BYTES if entry.program is None else loaded_bytes(entry.program)
        self._admitted.append(entry)
        self._count(entry, 1)
        while self.nbytes > MOST_BYTES and len(self._admitted) > 1:
            oldest = self._admitted.popleft()
            if oldest.is_used:
                oldest.is_used = False
                self._admitted.append(oldest)
            else:
                self._count(oldest, -1)
                del self._entries[oldest.key]

    def _count(self, entry: CallEntry, by: int) -> None:
        """Count the bytes of an entry, and those of its program if no other entry holds that."""
        self.nbytes += by * entry.nbytes
        if entry.program is not None:
            known, holders = id(entry.program), self._holders
            holders[known] += by
            if holders[known] == (by == 1):  # the first one, or none any more
                self.nbytes += by * program_bytes(entry.program)
            if not holders[known]:
                del holders[known]

    def prepared(self, key: Key) -> PreparedCall | None:
        """Return the call that was prepared under a key; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.prepared is None:
            return None
        entry.is_used = True
        return entry.prepared

    def has_seen(self, key: Key) -> bool:
        """Return True if this was asked of a key before, among the last ``MOST_SEEN`` keys at least."""
        value = hash(key)  # takes little memory; a collision only caches a call after its first time instead of second
        if value in self._seen or value in self._seen_before:
            return True
        if len(self._seen) >= MOST_SEEN:
            self._seen, self._seen_before = set(), self._seen
        self._seen.add(value)
        return False

    def forget_calls_of(self, owner: object) -> None:
        """Forget the entries whose keys begin with an object: launches of a kernel that was closed."""
        gone = [entry for entry in self if entry.key[0] is owner]
        for entry in gone:
            del self._entries[entry.key]
            if entry in self._new:
                self._new.remove(entry)
            else:
                self._admitted.remove(entry)
                self._count(entry, -1)

    def _forget_all(self) -> None:
        for kept in (self._entries, self._new, self._admitted, self._holders):
            kept.clear()
        self.nbytes = 0

    def clear(self) -> None:
        """Forget all entries: staging has moved, or the lane is closed."""
        self._forget_all()
        for forget in self.keepers:
            forget()


@dataclasses.dataclass(slots=True, eq=False)
class CallEntry:
    """All that is known of calls with one key; each attribute is None until it is known.

    Attributes:
        key: the key.
        planned: the plan of the call.
        compared: the result of the last posts, for a call for which the ranks exchange more than its signature.
        prepared: the call, loaded.
        shape: under the key of a shape, the program of the shape.
        is_used: it was asked for since it was new, or since it was found to be the oldest one.
        program, nbytes: of an entry that is kept, the program that it was found to hold, and its bytes without that.
    """

    key: Key
    planned: PlannedCall | None = None
    compared: ComparedCall | None = None
    prepared: PreparedCall | None = None
    shape: ShapeProgram | None = None
    is_used: bool = False
    program: Any = None
    nbytes: int = 0

    def held_program(self) -> Any:
        """Return the program that the calls of the entry run; None as long as there is none."""
        prepared = self.prepared or (self.compared and self.compared.prepared)
        if prepared:
            return prepared.loaded.program
        return None if self.shape is None else self.shape.plan.program


class PlannedCall(NamedTuple):
    """A checked call before this rank has read the posts of its peers.

    Attributes:
        requests: this rank's view of the call.
        agreement: the part that must be the same on all ranks, as far as it is known without posts of peers.
        signature: text that the ranks compare.
        exchanged: what else this rank posts in each call: split sizes, as text.
        compares: see ``PoolOffsets.compares``.
    """

    requests: Requests
    agreement: Agreement
    signature: str
    exchanged: str
    compares: bool


class ComparedCall(NamedTuple):
    """The result of the posts of all ranks. The same posts lead to the same result again.

    Attributes:
        posts: posts of all ranks.
        prepared: the call that ran.
        outcomes: see ``PoolOffsets.note``.
    """

    posts: Sequence[PostedCall]
    prepared: PreparedCall
    outcomes: Outcomes


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call ready to run.

    Attributes:
        loaded: its program, loaded at the addresses of its tensors.
        signature: text that the ranks compare.
        frozen: it is for a graph under capture.
        choice: candidate that runs it, and the reason.
    """

    loaded: Runnable
    signature: str
    frozen: bool
    choice: Choice


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeProgram:
    """The program that calls of one shape run.

    Attributes:
        plan: the plan of the calls.
        addresses: addresses at which it was loaded first.
        tensor_indices: pairs of a buffer in these addresses and the number of the tensor that it is.
        agreement: agreement of all ranks.
    """

    plan: Plan
    addresses: Addresses
    tensor_indices: tuple[tuple[tuple[int, str], int], ...]
    agreement: Agreement

    @property
    def signature(self) -> str:
        """Text that the ranks compare."""
        return self.agreement.text

    def at(self, addresses: Sequence[int]) -> Addresses:
        """Return the addresses of the program for tensors at other addresses."""
        moved = {buffer: addresses[tensor] for buffer, tensor in self.tensor_indices}
        return dataclasses.replace(self.addresses, buffers={**self.addresses.buffers, **moved})


class Shape(NamedTuple):
    """A call, separated into its shape and its addresses.

    Attributes:
        key: cache key that all calls of the shape share.
        addresses: addresses of its tensors; 0 for a tensor that this rank does not have.
        distance: bytes from the first tensor to the second, if they overlap; else None.
        ordinary: the rank has all tensors, in ordinary memory; compiled code remembers only such shapes.
    """

    key: Key
    addresses: tuple[int, ...]
    distance: int | None
    ordinary: bool


def shape_of(arguments: Arguments, key: tuple[Hashable, ...], tensors: Sequence[Any]) -> Shape | None:
    """Return the shape of a call on single tensors, outside of captures; None if the call needs full validation.

    Args:
        arguments: translates tensors for the lane.
        key: cache key of the call, with the identities of the tensors last (``identities``).
        tensors: the caller's tensors.
    """
    identities = key[-1]
    assert isinstance(identities, tuple)
    parts = list(key[:-1])
    addresses: list[int] = []
    end, distance = 0, None  # of the first tensor
    ordinary = True
    for tensor, identity in zip(tensors, identities, strict=True):
        if tensor is None:
            parts.append(None)
            addresses.append(0)
            ordinary = False
            continue
        # Identities of contiguous tensors that are no negated or conjugated views end so.
        if not isinstance(identity, tuple) or identity[3:] not in _PLAIN:
            return None
        address, nbytes, dtype = identity[:3]
        anchor = arguments.anchor(tensor, address, nbytes, dtype) if address and nbytes else None
        if anchor is None:
            return None
        ordinary = ordinary and not anchor
        parts.append((nbytes, dtype, anchor or address % UNIT))
        if end and address < end and addresses[0] < address + nbytes:
            distance = address - addresses[0]
            parts.append(distance)
        addresses.append(address)
        end = address + nbytes
    return Shape(tuple(parts), tuple(addresses), distance, ordinary)


def tensor_indices(
    request: Request, rank: int, addresses: Sequence[int]
) -> tuple[tuple[tuple[int, str], int], ...] | None:
    """Return pairs of a program's buffer and the number of the tensor that it is; None if a buffer is no tensor."""
    found = []
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        region = request.region(buffer)
        if not region.nbytes or region.symmetric:
            continue
        if region.address not in addresses:
            return None
        found.append(((rank, str(buffer)), addresses.index(region.address)))
    return tuple(found)
