"""The lanes, the buffers and the counts for FSDP2's calls of one process group, on one machine or several."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidelane.config import Config
from sidelane.integrations.buffers import FsdpBuffers
from sidelane.integrations.calls import dtype_name
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.integrations.nodes.groups import NodeRanks, exchanged_nodes
from sidelane.integrations.nodes.topology import FLAT, HIERARCHICAL, Nodes, choose_steps
from sidelane.memory.allocator import MemoryUse
from sidelane.memory.exchange import Exchange, ranks_of
from sidelane.memory.storage import storage_of
from sidelane.program.collective import Kind
from sidelane.session import Communicator

FsdpLane = Communicator | NodesCommunicator
LANES = ("gather", "scatter")


class Ring:
    """Symmetric buffers that parameters are gathered into, taken again when all of their parts were released.

    A free buffer must be free on all ranks, and all ranks must take the same one: otherwise one rank makes a new one,
    which is a collective, and another one does not, or a gather writes to memory that a peer does not read. The ranks
    do not communicate for that; they rely on program order: ranks train one model, so FSDP2 gathers and frees its
    layers in one order on all of them, and a buffer is free when FSDP2 frees its last parameter
    (``RingPart.release``), even if other references to it remain. The order of references would not be the same on all
    ranks: threads of other backends, and Python's collector of cycles, drop theirs at any time. So a buffer that is
    dropped with its model or its gather does not come back: it goes to the allocator, whose ranks compare what they
    have dropped.

    Args:
        allocate: function that returns a new buffer of so many bytes. Collective.
        device: device of the buffers.

    Attributes:
        behind_backward: a backward has freed parameters since the last one was taken.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self._allocate, self._handle = allocate, torch.get_device_module(device)
        self._free: deque[tuple[torch.Tensor, Any, int]] = deque()  # with the event of its last use, and its phase
        self._phase = 0
        self.behind_backward = False

    def take(self, nbytes: int, stream: Any, *, at_once: bool) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a buffer, ordered on ``stream`` behind its last use, and a function to call when it is free again.

        Args:
            nbytes: size of the buffer in bytes.
            stream: stream of its first use.
            at_once: accept a buffer that has become free since the last call. Its last use may run still: a gather that
                shall overlap with that use takes an older buffer, or a new one.

        Raises:
            UnavailableError: no memory is left, and nothing has been changed; on all ranks alike.
        """
        for number, (whole, event, phase) in enumerate(tuple(self._free)):
            if whole.nbytes == nbytes and (at_once or phase < self._phase):
                del self._free[number]
                stream.wait_event(event)
                break
        else:
            whole = self._allocate(nbytes)
        self._phase += 1
        return whole, lambda: self._came_back(whole)

    def clear(self) -> None:
        """Drop the free buffers."""
        self._free.clear()

    def _came_back(self, whole: torch.Tensor) -> None:
        # FSDP2 has just freed the parameters, on the stream that has computed with them.
        self._free.append((whole, self._handle.current_stream().record_event(), self._phase))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RingPart:
    """Memory of one parameter.

    Attributes:
        memory: bytes of the parameter, with a storage of their own.
        release: function that gives it back; its user calls it once.
    """

    memory: torch.Tensor
    release: Callable[[], None]

    @classmethod
    def empty(cls, device: torch.device) -> RingPart:
        """Return a part without memory, for a parameter without elements."""
        return cls(torch.empty(0, dtype=torch.uint8, device=device), lambda: None)


def cut(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], free: Callable[[], None]) -> list[RingPart]:
    """Cut a buffer into parts.

    Args:
        whole: the buffer.
        offsets: offset of each part in bytes.
        sizes: size of each part in bytes; 0 for parts without memory.
        free: function called when all parts were released. If some were dropped before, it is not called.
    """
    before_last = iter(range(1, sum(map(bool, sizes))))  # threads may take from it

    def release() -> None:
        if next(before_last, None) is None:
            free()

    return [
        RingPart(storage_of(whole, offset, nbytes, lambda: None), release) if nbytes else RingPart.empty(whole.device)
        for offset, nbytes in zip(offsets, sizes, strict=True)
    ]


class FsdpGroup:
    """FSDP2's calls of one group: two lanes, a ring of buffers, and counts.

    Args:
        group: group of the shards.
        device: device of the shards.
        counts: numbers of the model's calls in all of its groups: those of Sidelane by its name, those of the groups'
            own backends by kind and reason.
        lanes: lane that gathers, and the one that scatters; empty if the group's own backend makes all calls.
        allocate: function that returns bytes for the ring of buffers that become parameters, a collective; None for
            ordinary memory.
        buffers: pool of all other buffers; None for ordinary memory.
        nodes: nodes of the ranks, if there are several.
        end: functions that release the lanes.

    Attributes:
        group, device: see above.
        rank, world_size: number of this rank in the group, and number of its ranks.
        gather, scatter: lanes of the two collectives.
        copies_out: reason why parameters of any model are copied out of a buffer; None if they need not be.
        ring: ring of buffers that become parameters.
    """

    gather: FsdpLane
    scatter: FsdpLane

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        counts: Counter[str],
        lanes: Sequence[FsdpLane] = (),
        *,
        allocate: Callable[[int], torch.Tensor] | None = None,
        buffers: FsdpBuffers | None = None,
        nodes: Nodes | None = None,
        end: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.group, self.device, self.rank, self.world_size = group, device, group.rank(), group.size()
        self._counts, self._ranks = counts, ranks_of(group)
        self._ledger = Ledger(self._ranks)
        self._ledger.group = group.group_name
        self._lanes, self._buffers, self._nodes, self._end = lanes, buffers, nodes, end
        self.copies_out: str | None = None
        if lanes:
            self.gather, self.scatter = lanes
            if isinstance(self.gather, Communicator):
                self._ledger.peers = peers = self.gather.backend.peers
                self.copies_out = f"between GPUs is {peers}" if peers.through_host else None
        self.ring = Ring(allocate or functools.partial(torch.empty, dtype=torch.uint8, device=device), device)

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Return True if the ranks are those of ``group``: FSDP2 may have another one for gradients."""
        return group is self.group or ranks_of(group) == self._ranks

    def refusal(self, kind: Kind, nbytes: int) -> str:
        """Return the reason why the group's own backend makes a call of so many bytes; "" if Sidelane makes it."""
        choice = None if self._nodes is None else choose_steps(kind, nbytes, self._nodes, beside=True)
        return "" if choice is None or choice.name != FLAT else f"{FLAT}: {choice.reason}"

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer: for gathered parameters, which FSDP2 copies out, or for the gradients to reduce."""
        buffers = self._buffers
        return torch.empty(*size, dtype=dtype, device=self.device) if buffers is None else buffers.take(size, dtype)

    def memory(self) -> MemoryUse:
        """Return the symmetric memory of the lanes."""
        return MemoryUse.of_all(lane.memory() for lane in self._lanes)

    def close(self) -> None:
        """Release everything."""
        if self._buffers is not None:
            self._buffers.clear()
        self.ring.clear()
        for end in self._end:
            end()

    def made(self, kind: Kind, why: str, dtype: torch.dtype, nbytes: int) -> None:
        """Count a call that Sidelane makes."""
        self._counts[SIDELANE] += 1
        if self._nodes is not None:
            why = f"{HIERARCHICAL}: {choose_steps(kind, nbytes, self._nodes, beside=True).reason}; {why}"
        self._note(kind, dtype, SIDELANE, why, nbytes)

    def went_elsewhere(self, group: dist.ProcessGroup, kind: Kind, tensor: torch.Tensor, why: str) -> None:
        """Count a call that the backend of ``group`` makes, on a larger tensor of FSDP2's."""
        if self._buffers is not None:
            self._buffers.is_not_to_come_back(tensor)
        self._counts[f"{kind}: {why}"] += 1
        if (where := dist.get_backend(group)) != SIDELANE:  # a Sidelane group notes its calls itself
            self._note(kind, tensor.dtype, where, why, tensor.nbytes)

    def _note(self, kind: Kind, dtype: torch.dtype, where: str, why: str, nbytes: int) -> None:
        self._ledger.note((f"fsdp {kind}", dtype_name(dtype), self.device.type, where, why), "", nbytes)


def make_lanes(group: dist.ProcessGroup, device: torch.device, config: Config) -> list[Communicator]:
    """Make the two lanes of a group on one machine, for :func:`calls_on`. Collective."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Communicator(group, device=device, config=config, name=f"fsdp {LANES[0]}"))
        lanes = [first, *(Communicator(first, name=f"fsdp {name}") for name in LANES[1:])]
        stack.pop_all()
        return lanes


def calls_on(
    lanes: Sequence[Communicator],
    group: dist.ProcessGroup,
    counts: Counter[str],
    end: Sequence[Callable[[], None]] = (),
) -> FsdpGroup:
    """Make the calls of one model, with a ring and buffers of its own, on lanes that models may share.

    Memory that a dropped model leaves is used again behind what the current stream computes with it. The arguments are
    those of :class:`FsdpGroup`.
    """
    first = lanes[0]
    first.backend.note_stream()
    return FsdpGroup(
        *(group, first.device, counts, lanes),
        allocate=functools.partial(first.empty, dtype=torch.uint8),
        buffers=FsdpBuffers(first),
        end=end,
    )


def make_fsdp_group(group: dist.ProcessGroup, device: torch.device, config: Config, counts: Counter[str]) -> FsdpGroup:
    """Make the calls of a group; the ranks find out together whether the group spans machines.

    On one machine buffers are symmetric as long as there is room. On several, those of the ring are symmetric within
    each; gradients are reduced from ordinary memory, since the steps pack them anyway.
    """
    exchange = Exchange(group, config.timeout_s, warn_s=config.warn_s)
    nodes = exchanged_nodes(exchange, "fsdp.enable", config)
    with contextlib.ExitStack() as stack:
        if not nodes.spans:
            lanes = make_lanes(group, device, config)
            return calls_on(lanes, group, counts, end=[lanes[0].close])
        if choose_steps(Kind.ALL_GATHER, sys.maxsize, nodes, beside=True).name == FLAT:
            return FsdpGroup(group, device, counts, nodes=nodes)
        store = dist.PrefixStore(f"sidelane/fsdp/{exchange.name}/", exchange.store)
        ranks = NodeRanks(store, exchange.rank, nodes, exchange.liveness, config, f"{group.group_name}/fsdp")
        made = [
            stack.enter_context(contextlib.closing(NodesCommunicator(ranks.within(name), device))) for name in LANES
        ]
        stack.pop_all()
        end = [lane.close for lane in made]
        return FsdpGroup(group, device, counts, made, allocate=made[0].empty, nodes=nodes, end=end)
