"""Links: the two lanes and the buffers for FSDP2's calls of one group."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidelane.collectives.allocator import MemoryUse
from sidelane.config import Config
from sidelane.integrations.buffers import FsdpBuffers
from sidelane.integrations.direct_gather import Gathers, Tensors
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.integrations.ring import Ring
from sidelane.memory.exchange import ranks_of
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside
from sidelane.session import Communicator, Session


class Scatters(Protocol):
    """Reduce-scatter of a lane, as a communicator has it."""

    def reduce_scatter(
        self, output: Tensors, input: Tensors, *, op: str, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.reduce_scatter``."""
        ...


class Link(abc.ABC):
    """Lanes and buffers for FSDP2's calls of a group.

    Args:
        group: group of the shards.
        device: device of the shards.

    Attributes:
        gather, scatter: lanes of the two collectives.
        ring: ring of buffers that become parameters.
    """

    gather: Gathers
    scatter: Scatters
    ring: Ring

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._ranks = ranks_of(group)
        self._ledger = Ledger(self._ranks)
        self._ledger.group = group.group_name

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Return True if the ranks are those of ``group``: FSDP2 may have another one for gradients."""
        return group is self.group or ranks_of(group) == self._ranks

    @abc.abstractmethod
    def refusal(self, kind: Kind, nbytes: int) -> str:
        """Return the reason why the group's own backend makes a call of so many bytes; "" if Sidelane makes it."""

    @abc.abstractmethod
    def reason(self, kind: Kind, nbytes: int) -> str:
        """Return text that precedes all other reasons in the report; "" for none."""

    @abc.abstractmethod
    def gathered_into(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer for gathered parameters, from which FSDP2 copies them out."""

    @abc.abstractmethod
    def scattered_from(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer for the gradients to reduce."""

    @abc.abstractmethod
    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        """Keep a tensor out of the pool, because another backend holds it."""

    @abc.abstractmethod
    def memory(self) -> MemoryUse:
        """Return the symmetric memory of its lanes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything."""

    def note(self, kind: Kind, dtype: torch.dtype, why: str, nbytes: int, where: str = SIDELANE) -> None:
        """Count one more call for the report."""
        if where == SIDELANE:
            why = f"{self.reason(kind, nbytes)}{why}"
        self._ledger.note((f"fsdp {kind}", name_of(dtype), self.device.type, where, why), "", nbytes)


class MachineLink(Link):
    """Link of a group on one machine."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, config: Config | None) -> None:
        super().__init__(group, device)
        self._session = Session(group, device=device, config=config)
        try:
            gather, scatter = (Communicator(self._session.lane(f"fsdp {name}")) for name in ("gather", "scatter"))
        except BaseException:
            self._session.close()
            raise
        self._gather = self.gather = gather
        self._scatter = self.scatter = scatter
        self.ring = Ring(functools.partial(gather.empty, dtype=torch.uint8), self._session.device)
        self._buffers = FsdpBuffers(gather)

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


def name_of(dtype: Any) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
