"""The two lanes, the buffers and the counts for FSDP2's calls of one process group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from sidelane.collectives.allocator import MemoryUse
from sidelane.config import Config
from sidelane.integrations.buffers import FsdpBuffers
from sidelane.integrations.calls import name_of
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.integrations.ring import Ring
from sidelane.memory.exchange import ranks_of
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside
from sidelane.session import Communicator, Session

Tensors = torch.Tensor | Sequence[torch.Tensor]


class Gathers(Protocol):
    """A lane that gathers, as a communicator does."""

    rank: int
    world_size: int

    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.all_gather``."""
        ...


class Scatters(Protocol):
    """Reduce-scatter of a lane, as a communicator has it."""

    def reduce_scatter(
        self, output: Tensors, input: Tensors, *, op: str, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.reduce_scatter``."""
        ...


@dataclasses.dataclass(slots=True)
class Elsewhere:
    """Calls that the group's own backend has made.

    Attributes:
        what: kind of the call, and the reason.
        calls: number of calls.
    """

    what: str
    calls: int = 0


@dataclasses.dataclass(slots=True)
class FsdpCounts:
    """Counts of a model's collectives, in all of its groups.

    Attributes:
        calls: number of collectives that Sidelane has made.
        elsewhere: calls that the groups' own backends have made, by their reasons.
    """

    calls: int = 0
    elsewhere: dict[str, Elsewhere] = dataclasses.field(default_factory=dict)


class FsdpGroup:
    """FSDP2's calls of one group: two lanes, a ring of buffers, and counts. Other buffers are ordinary memory.

    Args:
        group: group of the shards.
        device: device of the shards.
        counts: counts of the model.

    Attributes:
        group, device: see above.
        gather, scatter: lanes of the two collectives.
        ring: ring of buffers that become parameters.
    """

    gather: Gathers
    scatter: Scatters
    ring: Ring

    def __init__(self, group: dist.ProcessGroup, device: torch.device, counts: FsdpCounts) -> None:
        self.group, self.device = group, device
        self._counts, self._ranks = counts, ranks_of(group)
        self._ledger = Ledger(self._ranks)
        self._ledger.group = group.group_name

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Return True if the ranks are those of ``group``: FSDP2 may have another one for gradients."""
        return group is self.group or ranks_of(group) == self._ranks

    def refusal(self, kind: Kind, nbytes: int) -> str:
        """Return the reason why the group's own backend makes a call of so many bytes; "" if Sidelane makes it."""
        return ""

    def reason(self, kind: Kind, nbytes: int) -> str:
        """Return text that precedes all other reasons in the report; "" for none."""
        return ""

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer: for gathered parameters, which FSDP2 copies out, or for the gradients to reduce."""
        return torch.empty(*size, dtype=dtype, device=self.device)

    def memory(self) -> MemoryUse:
        """Return the symmetric memory of the lanes."""
        raise NotImplementedError

    def close(self) -> None:
        """Release everything."""
        raise NotImplementedError

    def made(self, kind: Kind, why: str, dtype: torch.dtype, nbytes: int) -> None:
        """Count a call that Sidelane makes."""
        self._counts.calls += 1
        self._note(kind, dtype, SIDELANE, f"{self.reason(kind, nbytes)}{why}", nbytes)

    def went_elsewhere(self, group: dist.ProcessGroup, kind: Kind, tensor: torch.Tensor, why: str) -> None:
        """Count a call that the backend of ``group`` makes, on a larger tensor of FSDP2's."""
        what = f"{kind}: {why}"
        self._counts.elsewhere.setdefault(what, Elsewhere(what)).calls += 1
        if (where := dist.get_backend(group)) != SIDELANE:  # a Sidelane group notes its calls itself
            self._note(kind, tensor.dtype, where, why, tensor.nbytes)

    def _note(self, kind: Kind, dtype: torch.dtype, where: str, why: str, nbytes: int) -> None:
        self._ledger.note((f"fsdp {kind}", name_of(dtype), self.device.type, where, why), "", nbytes)


class MachineGroup(FsdpGroup):
    """Group on one machine, whose buffers are symmetric as long as there is room."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, config: Config | None, counts: FsdpCounts
    ) -> None:
        super().__init__(group, device, counts)
        self._session = Session(group, device=device, config=config)
        try:
            lanes = [Communicator(self._session.lane(f"fsdp {name}")) for name in ("gather", "scatter")]
        except BaseException:
            self._session.close()
            raise
        self.gather, self.scatter = self._lanes = lanes
        self.ring = Ring(functools.partial(lanes[0].empty, dtype=torch.uint8), self._session.device)
        self._buffers = FsdpBuffers(lanes[0])

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.take(size, dtype)

    def went_elsewhere(self, group: dist.ProcessGroup, kind: Kind, tensor: torch.Tensor, why: str) -> None:
        self._buffers.is_not_to_come_back(tensor)
        super().went_elsewhere(group, kind, tensor, why)

    def memory(self) -> MemoryUse:
        return MemoryUse.of_all(lane.memory() for lane in self._lanes)

    def close(self) -> None:
        self._buffers.clear()
        self.ring.clear()
        self._session.close()
