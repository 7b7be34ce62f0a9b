"""What FSDP2's calls of one group are made by: two lanes, and the buffers that FSDP2 has at a time."""

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
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside
from sidelane.session import Communicator, Session


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
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
