"""What FSDP2's calls of one group are made by: two lanes, and the buffers that FSDP2 has at a time."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidelane.collectives import Communicator, Session
from sidelane.collectives.pool import MemoryUse
from sidelane.config import Config
from sidelane.errors import UnavailableError
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.integrations.ring import Ring
from sidelane.integrations.straight import Gathers, Tensors
from sidelane.memory.storage import storage_of
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside


class Scatters(Protocol):
    """A lane's reduce-scatter, as a communicator has it."""

    def reduce_scatter(
        self, output: Tensors, input: Tensors, *, op: str, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.reduce_scatter``."""
        ...


class Link(abc.ABC):
    """Lanes and buffers of a group.

    Args:
        group: whose shards they are.
        device: of the shards.

    Attributes:
        gather, scatter: the lanes.
        ring: buffers that become parameters.
    """

    gather: Gathers
    scatter: Scatters
    ring: Ring

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._ranks = dist.get_process_group_ranks(group)
        self._ledger = Ledger(self._ranks)
        self._ledger.group = group.group_name

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """The ranks are those of ``group``: FSDP2 may have another one for gradients."""
        return group is self.group or dist.get_process_group_ranks(group) == self._ranks

    @abc.abstractmethod
    def refusal(self, kind: Kind, nbytes: int) -> str:
        """Why the group's own backend makes a call of so many gathered or scattered bytes; "" where we do."""

    @abc.abstractmethod
    def reason(self, kind: Kind, nbytes: int) -> str:
        """Words for the report that stand before all others; "" for none."""

    @abc.abstractmethod
    def gathered_into(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What parameters are gathered into, where they are copied out of it."""

    @abc.abstractmethod
    def scattered_from(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What gradients are reduced from."""

    @abc.abstractmethod
    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        """Another backend was given this tensor."""

    @abc.abstractmethod
    def memory(self) -> MemoryUse:
        """Symmetric memory that its lanes take."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def note(self, kind: Kind, dtype: torch.dtype, why: str, nbytes: int, where: str = SIDELANE) -> None:
        """For the report: one more call."""
        if where == SIDELANE:
            why = f"{self.reason(kind, nbytes)}{why}"
        self._ledger.note((f"fsdp {kind}", name_of(dtype), self.device.type, where, why), "", nbytes)


class MachineLink(Link):
    """Of a group on one machine."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, config: Config | None) -> None:
        super().__init__(group, device)
        self._session = Session(group, device=device, config=config)
        self._gather = self.gather = Communicator(self._session.lane("fsdp gather"))
        self._scatter = self.scatter = Communicator(self._session.lane("fsdp scatter"))
        self.ring = Ring(lambda nbytes: self._gather.empty(nbytes, dtype=torch.uint8), self._session.device)
        self._buffers = _Buffers(self._gather)

    def refusal(self, kind: Kind, nbytes: int) -> str:
        return ""

    def reason(self, kind: Kind, nbytes: int) -> str:
        return ""

    def gathered_into(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.take(size, dtype)

    def scattered_from(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.take(size, dtype)

    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        self._buffers.is_not_to_come_back(tensor)

    def memory(self) -> MemoryUse:
        return MemoryUse.of_all((self._gather.memory(), self._scatter.memory()))

    def close(self) -> None:
        self._buffers.clear()
        self.ring.clear()
        self._session.close()


class _Buffers:
    """Symmetric buffers that FSDP2 takes and drops, by stream and size."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._free: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._lent: dict[int, bool] = {}  # by address: whether it comes back

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A symmetric buffer, which comes back when its last view has gone. Collective where all of them are in use.

        Where there is no room for one it is ordinary memory, on all ranks alike, and calls stage it.

        FSDP2 takes and drops its buffers in one order on all ranks, and orders the stream on which it takes one behind
        the work on those that it has dropped, as torch's allocator wants it, too. So what is free is free on all; but
        for what other backends were given: their threads let go of it when they get to it (Gloo's some time after
        ``wait`` has returned), so that goes back to the pool, whose ranks compare what they have dropped.
        """
        nbytes = max(1, math.prod(size) * dtype.itemsize)
        cuda = self._comm.device.type == "cuda"
        free = self._free.setdefault((torch.cuda.current_stream().cuda_stream if cuda else 0, nbytes), [])
        try:
            whole = free.pop(0) if free else self._comm.empty(nbytes, dtype=torch.uint8)
        except UnavailableError:
            return torch.empty(*size, dtype=dtype, device=self._comm.device)
        self._lent[whole.data_ptr()] = True
        part = storage_of(whole, 0, nbytes, lambda: self._came_back(free, whole))
        return part[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)

    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        """Another backend was given this tensor."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._lent:
            self._lent[address] = False

    def clear(self) -> None:
        """Let go of what is free."""
        self._free.clear()

    def _came_back(self, free: list[torch.Tensor], whole: torch.Tensor) -> None:
        if self._lent.pop(whole.data_ptr()):
            free.append(whole)


def name_of(dtype: Any) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
