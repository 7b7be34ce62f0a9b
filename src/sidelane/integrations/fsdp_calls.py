"""FSDP2 with Sidelane's collectives: it gathers the parameters and scatters the gradients.

FSDP2 lets a program replace two of its collectives (``FSDPModule.set_custom_all_gather`` and ``.._reduce_scatter``) and
the source of their buffers. Parameters are gathered in place into symmetric memory on one lane, next to the
computation, and stay there (``direct_gather.py``); gradients are reduced on another lane, so that neither waits for the
other.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from sidelane import config as settings
from sidelane.config import COMPUTE, Config
from sidelane.errors import Page, UnavailableError, explained, in_no_order, see
from sidelane.integrations import direct_gather
from sidelane.integrations.calls import GroupReduction, dtype_name
from sidelane.integrations.fsdp_group import FsdpGroup, calls_on, make_fsdp_group, make_lanes
from sidelane.integrations.ledger import SIDELANE
from sidelane.memory.allocator import MemoryUse
from sidelane.program.collective import ELEMENT_BYTES, Kind, ReduceOp

OTHER_GROUP = "another group than that of the shards"

TORCHS = (
    *(_fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter),
    *(_fsdp_collectives.ProcessGroupAllocAllGather, _fsdp_collectives.ProcessGroupAllocReduceScatter),
)
"""FSDP2's own collectives, by its own choice."""

BY_GROUP = "_sidelane"
"""Attribute of a parameter group: handle of what its Sidelane group has changed; None once the program has enabled it.

The communication context that all of a root module's parameter groups share has the attribute, too: calls by group.
"""


@explained(Page.FSDP)
def enable(model: nn.Module, *, config: Config | None = None, zero_copy: bool = True) -> EnabledFsdp:
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
        zero_copy: gather into the memory that parameters have while they are used, if that is
            possible; ``sidelane.report()`` gives the reason if not. Otherwise FSDP2 copies them out of a buffer.

    Returns:
        Handle of the change; :meth:`EnabledFsdp.disable` switches it off again.

    Raises:
        ValueError: FSDP2 shards nothing of the model, or this is on already.
        As :class:`sidelane.Communicator`.
    """
    shards = param_groups(model) if isinstance(model, nn.Module) else []
    if not shards:
        text = f"fsdp.enable: the model has no module that fully_shard was applied to (value={type(model).__name__})"
        raise see(ValueError(text), Page.FSDP)
    for shard in shards:
        if (by_group := vars(shard).get(BY_GROUP)) is not None:
            by_group.disable()
        setattr(shard, BY_GROUP, None)
    if any(isinstance(shard._all_gather_comm, Gather) for shard in shards):
        raise see(ValueError("fsdp.enable: it is on for this model: disable it first"), Page.FSDP)
    enabled, chosen = EnabledFsdp({}), settings.current() if config is None else config
    copies_out = direct_gather.objection() if zero_copy else "not asked for"
    try:
        for shard in shards:
            enabled._take(shard, chosen, copies_out)
    except BaseException:
        enabled.disable()
        raise
    return enabled


def enable_by_group(params: Any, group: Any) -> None:
    """Let Sidelane make the calls of a parameter group whose shards belong to a Sidelane group. Collective.

    They are those of :func:`enable`, with lanes that end with the group. FSDP2 knows the root module by now, which has
    a ring and buffers of its own. Nothing changes, on all ranks alike, if Sidelane makes no calls on such tensors, if
    the group is on several nodes, whose steps it makes by itself, or if the program has collectives of its own.

    Args:
        params: torch's ``FSDPParamGroup``.
        group: the group, a :class:`sidelane.integrations.process_group.SidelaneGroup`.
    """
    if BY_GROUP in vars(params) or not all(
        isinstance(each, TORCHS) for each in (params._all_gather_comm, params._reduce_scatter_comm)
    ):
        return
    config = group.config()
    try:
        group.communicator(params.device)
        if not group.fsdp_lanes:
            group.fsdp_lanes = make_lanes(group, params.device, config)
            group.at_end(group.fsdp_lanes[0].close)
            group.at_end(direct_gather.restore_functions)
    except UnavailableError:
        return
    by_group: dict[Any, FsdpGroup] = vars(params.comm_ctx).setdefault(BY_GROUP, {})
    if group not in by_group:
        by_group[group] = calls_on(group.fsdp_lanes, group, Counter())
        end = weakref.WeakMethod(by_group[group].close)  # it also drops the free buffers of a model that lives on
        group.at_end(lambda: None if (close := end()) is None else close())
    enabled = EnabledFsdp({group: by_group[group]})
    enabled._take(params, config, direct_gather.objection())
    setattr(params, BY_GROUP, enabled)
    params.set_allocate_memory_from_process_group = lambda enable: None  # its buffers are symmetric already
    enabled._undo.callback(vars(params).pop, "set_allocate_memory_from_process_group", None)


class EnabledFsdp:
    """Handle of a model whose collectives Sidelane makes; :func:`enable` returns it.

    Args:
        groups: calls of groups that exist already, and end by themselves.
    """

    def __init__(self, groups: dict[dist.ProcessGroup, FsdpGroup]) -> None:
        self._groups = groups
        self._counts = Counter[str]()
        self._undo = contextlib.ExitStack()

    @property
    def calls(self) -> int:
        """Number of collectives that Sidelane has made."""
        return self._counts[SIDELANE]

    @property
    def elsewhere(self) -> Mapping[str, int]:
        """Numbers of calls that the group's own backend has made, by kind and reason."""
        return Counter({why: calls for why, calls in self._counts.items() if why != SIDELANE})

    def memory(self) -> MemoryUse:
        """Return all symmetric memory: buffers, by size as many as FSDP2 uses at once, and that of calls (``own``)."""
        return MemoryUse.of_all(group.memory() for group in self._groups.values())

    def disable(self) -> None:
        """Restore the model's own collectives, and free the memory. Idempotent. No call may be under way."""
        self._groups.clear()
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

    def _take(self, params: Any, config: Config, copies_out: str | None) -> None:
        """Make the collectives of a parameter group.

        Args:
            params: torch's ``FSDPParamGroup``.
            config: settings.
            copies_out: reason why FSDP2 copies its parameters out of a buffer; None if it need not.
        """
        group = params.mesh_info.shard_process_group
        calls = self._groups.get(group)
        if calls is None:
            calls = self._groups[group] = make_fsdp_group(group, params.device, config, self._counts)
            self._undo.callback(calls.close)
        why = copies_out or calls.copies_out or direct_gather.objection_to(params)
        gather = Gather(calls, params, params._all_gather_comm, why)
        self._replace(params, "_all_gather_comm", gather)
        self._replace(params, "_reduce_scatter_comm", Scatter(calls, params._reduce_scatter_comm, config.deterministic))
        if gather.copies_out is None:
            gather.direct = direct_gather.DirectGather(params, calls)
            self._undo.callback(gather.direct.return_all)
            gather.direct.take_over()

    def _replace(self, params: Any, name: str, ours: Any) -> None:
        """Replace an attribute until :meth:`disable`. A value that the program sets meanwhile stays."""
        before = getattr(params, name)
        self._undo.callback(lambda: setattr(params, name, before) if getattr(params, name) is ours else None)
        setattr(params, name, ours)


class Gather(AllGather):
    """All-gather of parameters for FSDP2.

    Args:
        calls: calls of the group of the shards.
        params: torch's ``FSDPParamGroup``.
        own: FSDP2's own all-gather.
        copies_out: reason why FSDP2 copies these parameters out of a buffer; None if it need not.

    Attributes:
        copies_out: see above.
        direct: gathers without a copy-out; None if ``copies_out`` gives a reason.
    """

    def __init__(self, calls: FsdpGroup, params: Any, own: AllGather, copies_out: str | None) -> None:
        self._calls, self._params, self.own, self.copies_out = calls, params, own, copies_out
        self.direct: direct_gather.DirectGather | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        lengths = [int(length) for length in size]
        is_ours = self._params._all_gather_process_group is self._calls.group
        if not is_ours or self._calls.refusal(Kind.ALL_GATHER, math.prod(lengths) * dtype.itemsize):
            return torch.empty(*lengths, dtype=dtype, device=device)  # other backends take any memory
        return self._calls.allocate(lengths, dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        calls, nbytes = self._calls, output_tensor.nbytes
        why = calls.refusal(Kind.ALL_GATHER, nbytes) if group is calls.group else OTHER_GROUP
        if why:
            calls.went_elsewhere(group, Kind.ALL_GATHER, output_tensor, why)
            return self.own(output_tensor, input_tensor, group, async_op)
        why = self.copies_out or direct_gather.objection_to(self._params) or direct_gather.NO_ROOM
        calls.made(Kind.ALL_GATHER, f"copied out: {why}", output_tensor.dtype, nbytes)
        return calls.gather.all_gather(output_tensor, input_tensor, async_op=async_op, beside=COMPUTE)


class Scatter(ReduceScatter):
    """Reduce-scatter of FSDP2's gradients: its input is symmetric, its output ordinary, as it becomes the gradient.

    Args:
        calls: calls of the group of the shards.
        own: FSDP2's own reduce-scatter.
        is_deterministic: no other backend may add gradients.
    """

    def __init__(self, calls: FsdpGroup, own: ReduceScatter, is_deterministic: bool) -> None:
        self._calls, self.own, self._is_deterministic = calls, own, is_deterministic
        self._input_numel: int | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel, given = math.prod(int(length) for length in size), self._input_numel
        is_output = given is not None and numel * self._calls.world_size == given
        self._input_numel = None if is_output else numel
        if is_output or dtype_name(dtype) not in ELEMENT_BYTES:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._calls.allocate([int(length) for length in size], dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        calls, kind = self._calls, Kind.REDUCE_SCATTER
        reduction, dtype = GroupReduction.of(op, input_tensor.dtype), dtype_name(input_tensor.dtype)
        if not calls.is_of(group):
            why = OTHER_GROUP
        elif reduction.op not in tuple(ReduceOp) or dtype not in ELEMENT_BYTES:
            why = f"{reduction.op} of {dtype}"
        elif async_op and reduction.factor != 1:
            why = "asynchronous, and its result is to be multiplied"
        else:
            why = calls.refusal(kind, input_tensor.nbytes)
        if why:
            if self._is_deterministic and input_tensor.is_floating_point():
                raise in_no_order("fsdp reduce_scatter", f"{dist.get_backend(group)} would make it ({why})")
            calls.went_elsewhere(group, kind, input_tensor, why)
            return self.own(output_tensor, input_tensor, group, op, async_op)
        calls.made(kind, "in symmetric memory", input_tensor.dtype, input_tensor.nbytes)
        work = calls.scatter.reduce_scatter(
            output_tensor, input_tensor, op=reduction.op, async_op=async_op, beside=COMPUTE
        )
        reduction.finish([output_tensor])
        return work


def param_groups(model: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups. Modules given to it in one list share a group, which is here once."""
    found: dict[Any, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and later
            found |= dict.fromkeys([state._fsdp_param_group] if several is None else several)
    return [params for params in found if params is not None and hasattr(params.mesh_info, "shard_process_group")]
