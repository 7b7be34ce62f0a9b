"""FSDP2 with Sidelane's collectives: it gathers the parameters and scatters the gradients.

FSDP2 lets a program replace two of its collectives (``FSDPModule.set_custom_all_gather`` and ``.._reduce_scatter``) and
the source of their buffers. Parameters are gathered in place into symmetric memory on one lane, next to the
computation, and stay there (``direct_gather.py``); gradients are reduced on another lane, so that neither waits for the
other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from sidelane import config as settings
from sidelane.collectives.allocator import MemoryUse
from sidelane.config import COMPUTE, Config
from sidelane.errors import Page, explained, in_no_order, see
from sidelane.integrations import direct_gather
from sidelane.integrations.calls import GroupReduction
from sidelane.integrations.ledger import SIDELANE
from sidelane.integrations.links import Link, MachineLink, name_of
from sidelane.integrations.nodes.groups import exchanged_nodes
from sidelane.integrations.nodes.link import NodesLink
from sidelane.memory.exchange import Exchange
from sidelane.program.collective import ELEMENT_BYTES, Kind, ReduceOp


@explained(Page.FSDP)
def enable(model: nn.Module, *, config: Config | None = None, straight_into_parameters: bool = True) -> EnabledFsdp:
    """Let Sidelane gather the parameters and scatter the gradients of a model. Collective.

    Loss and gradients are those of the group's own backend, but for the order in which a sum of more than two ranks is
    rounded. Calls that Sidelane does not make go to the group's own backend: those of a group other than the one that
    shards the parameters, as with a number for ``reshard_after_forward``, and float64 gradients.
    ``EnabledFsdp.elsewhere`` and ``sidelane.report()`` list them. A divide factor of the program's own is
    multiplied behind the sum. If shards are on several machines, Sidelane works within each, and the group's own
    backend between them.

    Args:
        model: model that ``fully_shard`` was applied to, or some of its modules.
        config: settings; None for those in force.
        straight_into_parameters: gather into the memory that parameters have while they are used, if that is
            possible; ``sidelane.report()`` gives the reason if not. Otherwise FSDP2 copies them out of a buffer.

    Returns:
        Handle of the change; :meth:`EnabledFsdp.disable` switches it off again.

    Raises:
        ValueError: FSDP2 shards nothing of the model, or this is on already.
        As :class:`sidelane.Session`.
    """
    shards = _param_groups(model) if isinstance(model, nn.Module) else []
    if not shards:
        text = "fsdp.enable: model (value=no module that fully_shard was applied to, allowed=one and more)"
        raise see(ValueError(text), Page.FSDP)
    if any(isinstance(shard._all_gather_comm, Gather) for shard in shards):
        raise see(ValueError("fsdp.enable: it is on for this model (allowed=disable it first)"), Page.FSDP)
    enabled = EnabledFsdp("not asked for" if not straight_into_parameters else direct_gather.objection())
    enabled.is_deterministic = (config or settings.current()).deterministic
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
        what: kind of the call, and the reason.
        calls: number of calls.
    """

    what: str
    calls: int = 0


class EnabledFsdp:
    """Handle of a model whose collectives Sidelane makes; :func:`enable` returns it.

    Attributes:
        calls: number of collectives that Sidelane has made.
        elsewhere: calls that the group's own backend has made, with the reasons.
        is_deterministic: no other backend may add gradients.
    """

    def __init__(self, copies_out: str | None) -> None:
        self._copies_out = copies_out  # reason why no parameter is gathered straight; None if that is possible
        self._links: dict[dist.ProcessGroup, Link] = {}
        self._undo = contextlib.ExitStack()
        self.elsewhere: dict[str, Elsewhere] = {}
        self.calls: int = 0
        self.is_deterministic: bool = False

    def memory(self) -> MemoryUse:
        """Return all symmetric memory: buffers, by size as many as FSDP2 uses at once, and that of calls (``own``)."""
        return MemoryUse.of_all(link.memory() for link in self._links.values())

    def disable(self) -> None:
        """Restore the model's own collectives, and free the memory. Idempotent. No call may be under way."""
        self._links.clear()
        self._undo.close()

    def __enter__(self) -> EnabledFsdp:
        return self

    def __reduce__(self) -> NoReturn:
        text = (
            "EnabledFsdp: the handle of a model (value=a copy or a pickle, allowed=the handle itself; save state dicts)"
        )
        raise see(TypeError(text), Page.FSDP)

    def __exit__(self, *failure: object) -> None:
        self.disable()

    def _take(self, params: Any, config: Config | None) -> None:
        group = params.mesh_info.shard_process_group
        link = self._links.get(group)
        if link is None:
            link = self._links[group] = _make_link(group, params.device, config)
            self._undo.callback(link.close)
        gather = Gather(self, link, params, params._all_gather_comm, self._copies_out)
        self._replace(params, "_all_gather_comm", gather)
        self._replace(params, "_reduce_scatter_comm", Scatter(self, link, params._reduce_scatter_comm))
        if self._copies_out is None:
            gather.straight = direct_gather.Straight(
                *(params, link.gather, link.ring, group),
                # Neither refers to the gather: memory of a cycle would stay until Python collects cycles.
                note=functools.partial(self._made, link, Kind.ALL_GATHER, "straight into the parameters"),
                refusal=functools.partial(link.refusal, Kind.ALL_GATHER),
            )
            self._undo.callback(gather.straight.give_back)
            gather.straight.take_over()

    def _replace(self, params: Any, name: str, ours: Any) -> None:
        """Replace an attribute until :meth:`disable`. A value that the program sets meanwhile stays."""
        before = getattr(params, name)
        self._undo.callback(lambda: setattr(params, name, before) if getattr(params, name) is ours else None)
        setattr(params, name, ours)

    def _made(self, link: Link, kind: Kind, why: str, dtype: torch.dtype, nbytes: int) -> None:
        self.calls += 1
        link.note(kind, dtype, why, nbytes)

    def _went_elsewhere(self, link: Link, group: dist.ProcessGroup, kind: Kind, tensor: torch.Tensor, why: str) -> None:
        what = f"{kind}: {why}"
        self.elsewhere.setdefault(what, Elsewhere(what)).calls += 1
        link.is_not_to_come_back(tensor)
        if (where := dist.get_backend(group)) != SIDELANE:  # a Sidelane group notes its calls itself
            link.note(kind, tensor.dtype, why, tensor.nbytes, where)


class Gather(AllGather):
    """All-gather of parameters for FSDP2.

    Attributes:
        straight: gathers without a copy-out, if that is possible.
    """

    def __init__(self, enabled: EnabledFsdp, link: Link, params: Any, own: AllGather, copies_out: str | None) -> None:
        self._enabled, self._link, self._params, self._own, self._copies_out = enabled, link, params, own, copies_out
        self.straight: direct_gather.Straight | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        lengths = [int(length) for length in size]
        is_ours = self._params._all_gather_process_group is self._link.group
        if not is_ours or self._refusal(math.prod(lengths) * dtype.itemsize):  # other backends take any memory
            return torch.empty(*lengths, dtype=dtype, device=device)
        return self._link.gathered_into(lengths, dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_ours = group is self._link.group
        why = self._refusal(output_tensor.nbytes) if is_ours else "another group than that of the shards"
        if why:
            self._enabled._went_elsewhere(self._link, group, Kind.ALL_GATHER, output_tensor, why)
            return self._own(output_tensor, input_tensor, group, async_op)
        reason = self._copies_out if self.straight is None else self.straight.objection() or direct_gather.NO_ROOM
        why = f"copied out: {reason}"
        self._enabled._made(self._link, Kind.ALL_GATHER, why, output_tensor.dtype, output_tensor.nbytes)
        return self._link.gather.all_gather(output_tensor, input_tensor, async_op=async_op, beside=COMPUTE)

    def _refusal(self, nbytes: int) -> str:
        return self._link.refusal(Kind.ALL_GATHER, nbytes)


class Scatter(ReduceScatter):
    """Reduce-scatter of FSDP2's gradients: its input is symmetric, its output ordinary, as it becomes the gradient."""

    def __init__(self, enabled: EnabledFsdp, link: Link, own: ReduceScatter) -> None:
        self._enabled, self._link, self._own = enabled, link, own
        self._input_numel: int | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel, given = math.prod(int(length) for length in size), self._input_numel
        is_output = given is not None and numel * self._link.gather.world_size == given
        self._input_numel = None if is_output else numel
        if is_output or name_of(dtype) not in ELEMENT_BYTES:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._link.scattered_from([int(length) for length in size], dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        reduction, dtype = GroupReduction.of(op, input_tensor.dtype), name_of(input_tensor.dtype)
        if not self._link.is_of(group):
            why = "another group than that of the shards"
        elif reduction.op not in tuple(ReduceOp) or dtype not in ELEMENT_BYTES:
            why = f"{reduction.op} of {dtype}"
        elif async_op and reduction.factor != 1:
            why = "asynchronous, and its result is to be multiplied"
        else:
            why = self._link.refusal(Kind.REDUCE_SCATTER, input_tensor.nbytes)
        if why:
            if self._enabled.is_deterministic and input_tensor.is_floating_point():
                raise in_no_order("fsdp reduce_scatter", f"{dist.get_backend(group)} would make it ({why})")
            self._enabled._went_elsewhere(self._link, group, Kind.REDUCE_SCATTER, input_tensor, why)
            return self._own(output_tensor, input_tensor, group, op, async_op)
        why = "in symmetric memory"
        self._enabled._made(self._link, Kind.REDUCE_SCATTER, why, input_tensor.dtype, input_tensor.nbytes)
        work = self._link.scatter.reduce_scatter(
            output_tensor, input_tensor, op=reduction.op, async_op=async_op, beside=COMPUTE
        )
        reduction.finish([output_tensor])
        return work


def _make_link(group: dist.ProcessGroup, device: torch.device, config: Config | None) -> Link:
    """Make the link of a group; the ranks find out together whether the group spans machines."""
    chosen = settings.current() if config is None else config
    exchange = Exchange(group, chosen.timeout_s, warn_s=chosen.warn_s)
    nodes = exchanged_nodes(exchange, "fsdp.enable", chosen)
    if not nodes.spans:
        return MachineLink(group, device, config)
    store = dist.PrefixStore(f"sidelane/fsdp/{exchange.name}/", exchange.store)
    return NodesLink(group, device, chosen, store, nodes, exchange.liveness)


def _param_groups(model: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups. Modules given to it in one list share a group, which is here once."""
    found: dict[Any, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and later
            found |= dict.fromkeys([state._fsdp_param_group] if several is None else several)
    return [params for params in found if params is not None and hasattr(params.mesh_info, "shard_process_group")]
