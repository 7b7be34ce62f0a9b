"""FSDP2 whose parameters are gathered, and gradients scattered, by Sidelane.

FSDP2 lets a program replace two of its collectives (``FSDPModule.set_custom_all_gather`` and ``.._reduce_scatter``) and
where their buffers come from. Parameters are gathered in place into symmetric memory on one lane, next to whatever is
computed, and stay there (``straight.py``); gradients are reduced on another lane, so that neither waits for the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from sidelane.collectives import Communicator, Session
from sidelane.collectives.arguments import op_name
from sidelane.collectives.pool import MemoryUse
from sidelane.config import COMPUTE, Config
from sidelane.errors import UnavailableError
from sidelane.integrations import straight
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.memory.storage import storage_of
from sidelane.program.collective import ELEMENT_BYTES, ReduceOp


def enable(model: nn.Module, *, config: Config | None = None, straight_into_parameters: bool = True) -> Enabled:
    """Let Sidelane gather the parameters and scatter the gradients of a model. Collective.

    Loss and gradients are those of the group's own backend, but for the order in which a sum of more than two ranks is
    rounded. What Sidelane does not do (a group other than the one that shards the parameters, as with a number for
    ``reshard_after_forward``; float64 gradients; a divide factor of one's own, which NCCL multiplies by before it adds)
    goes to the group's own backend; :attr:`Enabled.elsewhere` says what, and ``sidelane.report()``.

    Args:
        model: that ``fully_shard`` was applied to, or some of its modules.
        config: settings; None for those in force.
        straight_into_parameters: gather into the memory that parameters have while they are used, where that is
            possible; ``sidelane.report()`` says where not, and why. Otherwise FSDP2 copies them out of a buffer.

    Returns:
        What is switched on; :meth:`Enabled.disable` switches it off again.

    Raises:
        ValueError: nothing of the model is sharded by FSDP2, or this is on already.
        As :class:`sidelane.Session`.
    """
    shards = _param_groups(model)
    if not shards:
        raise ValueError("fsdp.enable: model (value=no module that fully_shard was applied to, allowed=one and more)")
    if any(isinstance(shard._all_gather_comm, Gather) for shard in shards):
        raise ValueError("fsdp.enable: it is on for this model (allowed=disable it first)")
    enabled = Enabled("not asked for" if not straight_into_parameters else straight.objection())
    try:
        for shard in shards:
            enabled._take(shard, config)
    except BaseException:
        enabled.disable()
        raise
    return enabled


@dataclasses.dataclass(slots=True)
class Elsewhere:
    """Calls that the group's own backend has made.

    Attributes:
        what: of a kind, and why.
        calls: how many.
    """

    what: str
    calls: int = 0


class Enabled:
    """What :func:`enable` has switched on.

    Attributes:
        calls: collectives that Sidelane has made.
        elsewhere: what the group's own backend has made, and why.
    """

    def __init__(self, copies_out: str | None) -> None:
        self._copies_out = copies_out  # why, where no parameter is gathered straight into its place
        self._links: dict[dist.ProcessGroup, _Link] = {}
        self._before: list[tuple[Any, Any, Any]] = []
        self.elsewhere: dict[str, Elsewhere] = {}
        self.calls = 0

    def memory(self) -> MemoryUse:
        """Symmetric memory that buffers take: what FSDP2 has in use at once, in each size that it uses."""
        uses = [link.gather.memory() for link in self._links.values()]
        return MemoryUse(sum(use.reserved for use in uses), sum(use.used for use in uses), None)

    def disable(self) -> None:
        """Give the model its own collectives back, and the memory. Idempotent. Nothing may be under way."""
        for params, gather, scatter in self._before:
            if params._all_gather_comm.straight is not None:
                params._all_gather_comm.straight.give_back()
            params._all_gather_comm, params._reduce_scatter_comm = gather, scatter
        self._before.clear()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *failure: object) -> None:
        self.disable()

    def _take(self, params: Any, config: Config | None) -> None:
        group, gather, scatter = (
            params.mesh_info.shard_process_group,
            params._all_gather_comm,
            params._reduce_scatter_comm,
        )
        link = self._links.get(group)
        if link is None:
            link = self._links[group] = _Link(group, params.device, config)
        self._before.append((params, gather, scatter))
        own = Gather(self, link, params, gather, self._copies_out)
        if self._copies_out is None:
            own.straight = straight.Straight(params, link.gather, link.ring, group, own.note)
            own.straight.take_over()
        params._all_gather_comm, params._reduce_scatter_comm = own, Scatter(self, link, scatter)

    def _went_elsewhere(self, link: _Link, group: dist.ProcessGroup, kind: str, tensor: torch.Tensor, why: str) -> None:
        what = f"{kind}: {why}"
        self.elsewhere.setdefault(what, Elsewhere(what)).calls += 1
        link.is_not_to_come_back(tensor)
        link.note(kind, tensor.dtype, dist.get_backend(group), why, tensor.nbytes)


class _Link:
    """The lanes of a group, and the buffers that FSDP2 has at a time."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, config: Config | None) -> None:
        self.group = group
        self.session = Session(group, device=device, config=config)
        self.gather = Communicator(self.session.lane("fsdp gather"))
        self.scatter = Communicator(self.session.lane("fsdp scatter"))
        self.ring = straight.Ring(lambda nbytes: self.gather.empty(nbytes, dtype=torch.uint8), self.session.device)
        self._free: dict[tuple[int, int], list[torch.Tensor]] = {}  # by stream and bytes
        self._lent: dict[int, bool] = {}  # by address: whether it comes back
        self._ledger = Ledger(dist.get_process_group_ranks(group))
        self._ledger.group = group.group_name

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A symmetric buffer, which comes back when its last view has gone. Collective where all of them are in use.

        Where there is no room for one it is ordinary memory, on all ranks alike, and calls stage it.

        FSDP2 takes and drops its buffers in one order on all ranks, and orders the stream on which it takes one behind
        the work on those that it has dropped, as torch's allocator wants it, too. So what is free is free on all; but
        for what other backends were given: their threads let go of it when they get to it (Gloo's some time after
        ``wait`` has returned), so that goes back to the pool, whose ranks compare what they have dropped.
        """
        nbytes = max(1, math.prod(size) * dtype.itemsize)
        cuda = self.session.device.type == "cuda"
        free = self._free.setdefault((torch.cuda.current_stream().cuda_stream if cuda else 0, nbytes), [])
        try:
            whole = free.pop(0) if free else self.gather.empty(nbytes, dtype=torch.uint8)
        except UnavailableError:
            return torch.empty(*size, dtype=dtype, device=self.session.device)
        self._lent[whole.data_ptr()] = True
        part = storage_of(whole, 0, nbytes, lambda: self._came_back(free, whole))
        return part[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)

    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        """Another backend was given this tensor."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._lent:
            self._lent[address] = False

    def _came_back(self, free: list[torch.Tensor], whole: torch.Tensor) -> None:
        if self._lent.pop(whole.data_ptr()):
            free.append(whole)

    def note(self, kind: str, dtype: torch.dtype, where: str, why: str, nbytes: int) -> None:
        """For the report: one more call."""
        self._ledger.note((f"fsdp {kind}", _name(dtype), self.session.device.type, where, why), "", nbytes)

    def close(self) -> None:
        self._free.clear()
        self.ring.clear()
        self.session.close()


class Gather(AllGather):
    """What FSDP2 gathers parameters by.

    Attributes:
        straight: does it without a copy-out, where that is possible.
    """

    def __init__(self, enabled: Enabled, link: _Link, params: Any, own: AllGather, copies_out: str | None) -> None:
        self._enabled, self._link, self._params, self._own, self._copies_out = enabled, link, params, own, copies_out
        self.straight: straight.Straight | None = None

    def note(self, dtype: torch.dtype, nbytes: int, why: str = "straight into the parameters") -> None:
        """For the report: one more gather."""
        self._enabled.calls += 1
        self._link.note("all_gather", dtype, SIDELANE, why, nbytes)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._params._all_gather_process_group is not self._link.group:  # whose backend takes any memory
            return torch.empty(*size, dtype=dtype, device=device)
        return self._link.allocate([int(length) for length in size], dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if group is not self._link.group:
            why = "another group than that of the shards"
            self._enabled._went_elsewhere(self._link, group, "all_gather", output_tensor, why)
            return self._own(output_tensor, input_tensor, group, async_op)
        reason = self._copies_out if self.straight is None else self.straight.objection() or straight.NO_ROOM
        self.note(output_tensor.dtype, output_tensor.nbytes, f"copied out: {reason}")
        return self._link.gather.all_gather(output_tensor, input_tensor, async_op=async_op, beside=COMPUTE)


class Scatter(ReduceScatter):
    """What FSDP2 reduces gradients by. Its input is symmetric; its output becomes the gradient, and is ordinary."""

    def __init__(self, enabled: Enabled, link: _Link, own: ReduceScatter) -> None:
        self._enabled, self._link, self._own = enabled, link, own
        self._input_numel: int | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel, given = math.prod(int(length) for length in size), self._input_numel
        is_output = given is not None and numel * self._link.session.world_size == given
        self._input_numel = None if is_output else numel
        if is_output or _name(dtype) not in ELEMENT_BYTES:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._link.allocate([int(length) for length in size], dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        name, dtype = op_name(op), _name(input_tensor.dtype)
        if group is not self._link.group or name not in tuple(ReduceOp) or dtype not in ELEMENT_BYTES:
            why = f"{name} of {dtype}"
            self._enabled._went_elsewhere(self._link, group, "reduce_scatter", input_tensor, why)
            return self._own(output_tensor, input_tensor, group, op, async_op)
        self._enabled.calls += 1
        self._link.note("reduce_scatter", input_tensor.dtype, SIDELANE, "in symmetric memory", input_tensor.nbytes)
        return self._link.scatter.reduce_scatter(
            output_tensor, input_tensor, op=name, async_op=async_op, beside=COMPUTE
        )


def _param_groups(model: nn.Module) -> list[Any]:
    """What FSDP2 shards together, of each of its modules."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and later
            found += [state._fsdp_param_group] if several is None else several
    return [params for params in found if params is not None and hasattr(params.mesh_info, "shard_process_group")]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
