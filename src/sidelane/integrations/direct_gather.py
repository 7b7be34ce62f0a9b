"""Gather parameters of FSDP2 straight into the memory in which they are used.

FSDP2 gathers the shards of a layer into one flat buffer, rank by rank, and copies it out into each parameter, on the
stream of the computation. Here the buffer has the layout of the parameters, and becomes their memory::

    FSDP2     [rank 0: a b c][rank 1: a b c]  -> copy-out ->  [a: 0 1] [b: 0 1] [c: 0 1]
    straight  [a: 0 1][b: 0 1][c: 0 1]                        the same bytes

A parameter keeps its storage object, which autograd may have saved: after the gather the storage gets the memory of a
part of the buffer, and when FSDP2 frees the parameter, the part goes back to the ring of buffers.

torch has no hook for these steps. Two functions of its module are replaced while any model has this switched on, and
pass on all other calls; a method is replaced on each parameter.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from sidelane import forks
from sidelane.config import COMPUTE
from sidelane.errors import SidelaneError, UnavailableError
from sidelane.integrations.fsdp_group import FsdpGroup, RingPart, cut
from sidelane.memory.allocator import ALIGNMENT, rounded
from sidelane.memory.storage import exchange_memory, exchange_objection
from sidelane.program.collective import Kind

GATHER = (
    *("fsdp_params", "group", "async_op", "all_gather_copy_in_stream", "all_gather_stream", "device"),
    "all_gather_comm",
)
COPY_OUT, NEWER = ("all_gather_result", "fsdp_params", "group"), "all_gather_output_fn"  # the latter since torch 2.15
NO_ROOM = "no symmetric memory is left for the parameters"

FREEING = {
    *("itertools", "chain", "all_gather_outputs", "_unsharded_inner_tensors", "free_storage"),
    *("compiled_autograd_enabled", "_unsharded_param", "untyped_storage", "resize_", "free_all_gather_outputs"),
}
"""Names that FSDP2's freeing of a parameter uses: if a torch uses more, its method must not be replaced."""

RESULT = (
    *("all_gather_output", "all_gather_event", "all_gather_work", "param_all_gather_input_dtypes"),
    *("param_all_gather_input_numels", "all_gather_input_split_sizes"),
)


def objection() -> str | None:
    """Return the reason why this torch's FSDP2 cannot gather straight; None if it can."""
    found = exchange_objection()
    if found is not None:
        return found
    group, param = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam
    for name, wanted in (("foreach_all_gather", GATHER), ("foreach_all_gather_copy_out", COPY_OUT)):
        function: Any = getattr(_fsdp_param_group, name, None)
        if function is None or function not in (_OURS[name], getattr(_fsdp_collectives, name, None)):
            return f"something else has replaced {name}"
        if tuple(one for one in inspect.signature(_TORCHS.get(name, function)).parameters if one != NEWER) != wanted:
            return f"{name} of torch {torch.__version__} takes other arguments"
    if getattr(AllGatherResult, "_fields", ()) != RESULT:
        return f"AllGatherResult of torch {torch.__version__} has other fields"
    for method, used in (
        (group.unshard, "foreach_all_gather"),
        (group.wait_for_unshard, "foreach_all_gather_copy_out"),
        (param.to_sharded, "free_unsharded_param"),
        (param.free_unsharded_param, "free_storage"),
        (param.init_unsharded_param, "all_gather_outputs"),
    ):
        if used not in inspect.unwrap(method).__code__.co_names:
            return f"{method.__qualname__} of torch {torch.__version__} does not use {used}"
    more = sorted({*param.free_unsharded_param.__code__.co_names} - FREEING)
    return f"free_unsharded_param of torch {torch.__version__} uses {more[0]}" if more else None


def objection_to(params: Any) -> str | None:
    """Return the reason why the parameters of a group (torch's ``FSDPParamGroup``) are not gathered straight."""
    if getattr(params, f"_{NEWER}", None) is not getattr(_fsdp_collectives, f"_default_{NEWER}", None):
        return f"the group has an {NEWER} of its own"
    for param in params.fsdp_params:
        if param.fsdp_placement.dim:
            return f"a parameter is sharded along dimension {param.fsdp_placement.dim}"
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):  # an extension chooses the gathered tensors
            return "a parameter has an extension of its own for gathers"
    return None


class DirectGather:
    """Gathers of one parameter group of FSDP2.

    Args:
        params: torch's ``FSDPParamGroup``.
        calls: calls of the group of the shards. They do not refer to this object: memory of a cycle would stay until
            Python collects cycles.
    """

    def __init__(self, params: Any, calls: FsdpGroup) -> None:
        self._params, self._calls, self._ring = params, calls, calls.ring
        self._leased: dict[Any, RingPart] = {}  # by parameter: the part that holds the parameter's own memory meanwhile

    @torch.no_grad()
    def gather(self, group: dist.ProcessGroup, async_op: bool, copy_in_stream: Any, stream: Any) -> Gathered | None:
        """Begin a gather, in place of torch's ``foreach_all_gather``.

        Returns:
            The gather; None, on all ranks alike, if FSDP2 shall gather by itself: smaller shards of another group,
            which ``reshard_after_forward=n`` leaves, parameters that have got an extension since, or without room for
            one more buffer.
        """
        params, device, calls = self._params.fsdp_params, self._params.device, self._calls
        if group is not calls.group or not self._params.is_sharded or objection_to(self._params):
            return None
        ranks = calls.world_size
        numels = [param._sharded_param_data.numel() for param in params]
        dtypes = [param.param_dtype or param._sharded_param_data.dtype for param in params]
        sizes = [numel * ranks * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
        if calls.refusal(Kind.ALL_GATHER, sum(sizes)):
            return None
        handle = torch.get_device_module(device)
        backward = self._params._training_state is TrainingState.PRE_BACKWARD
        # The first gather of a forward comes behind all of the backward before it, and behind the optimizer.
        at_once = backward or self._ring.behind_backward or copy_in_stream == handle.current_stream()
        self._ring.behind_backward = False
        with handle.stream(copy_in_stream):
            # On the device that computes, and flat.
            shards = [one.all_gather_inputs[0] if one.offload_to_cpu else one._sharded_param_data for one in params]
            try:
                parts = self._parts(sizes, copy_in_stream, at_once)
            except UnavailableError:
                return None  # FSDP2's own buffers are fewer, since it has them for a shorter time
            outputs = [part.memory.view(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
            own = [output.chunk(ranks)[calls.rank] if output.numel() else output for output in outputs]
            torch._foreach_copy_(own, shards)  # cast on the way
        stream.wait_stream(copy_in_stream)
        with handle.stream(stream):
            work = calls.gather.all_gather(outputs, own, async_op=async_op, beside=COMPUTE)
            event = stream.record_event()
        calls.made(Kind.ALL_GATHER, "straight into the parameters", dtypes[0], sum(sizes))
        gathered = Gathered(
            *(torch.empty(0, device=device), event, work),
            *([[dtype] for dtype in dtypes], [[numel] for numel in numels], numels),
        )
        gathered.direct, gathered.parts = self, parts
        return gathered

    def _parts(self, sizes: Sequence[int], stream: Any, at_once: bool) -> list[RingPart]:
        """Return a buffer cut into storages of so many bytes, which give it back together."""
        *offsets, end = itertools.accumulate((rounded(nbytes, ALIGNMENT) for nbytes in sizes), initial=0)
        if not end:
            return [RingPart.empty(self._params.device) for _ in sizes]
        whole, free = self._ring.take(end, stream, at_once=at_once)
        return cut(whole, offsets, sizes, free)

    def take_over(self) -> None:
        """Replace torch's freeing of the parameters, so that it returns ring memory."""
        replace_functions(self)
        for param in self._params.fsdp_params:
            param.free_unsharded_param = functools.partial(self._free, param)

    @torch.no_grad()
    def return_all(self) -> None:
        """Restore torch's functions. Parameters in use get ordinary memory with the same contents."""
        if self._params._all_gather_result is not None:
            try:
                self._params.wait_for_unshard()
            except SidelaneError:  # the gather has failed, and its error was raised
                self._params._all_gather_result = None
        for param in self._params.fsdp_params:
            copy = param.all_gather_outputs[0].clone() if param in self._leased else None
            self._take_back(param)
            if copy is not None:
                exchange_memory(param.all_gather_outputs[0].untyped_storage(), copy.untyped_storage())
            vars(param).pop("free_unsharded_param", None)
        restore_functions(self)

    def lease(self, param: Any, part: RingPart) -> None:
        """Give the storage of a parameter the memory of a gather."""
        self._take_back(param)
        storage = param.all_gather_outputs[0].untyped_storage()
        if storage.size():  # torch has filled it now, or in a gather of its own
            storage.resize_(0)
        exchange_memory(storage, part.memory.untyped_storage())
        self._leased[param] = part

    def _take_back(self, param: Any) -> None:
        part = self._leased.pop(param, None)
        if part is not None:
            exchange_memory(param.all_gather_outputs[0].untyped_storage(), part.memory.untyped_storage())
            part.release()

    def _free(self, param: Any) -> None:
        self._take_back(param)
        self._ring.behind_backward |= self._params._training_state is TrainingState.POST_BACKWARD
        type(param).free_unsharded_param(param)


class Gathered(AllGatherResult):
    """Result of a gather, which torch keeps between its begin and its end.

    Attributes:
        direct: maker of the gather.
        parts: memory of the parameters, until they have it.
    """

    direct: DirectGather
    parts: list[RingPart]

    @torch.no_grad()
    def hand_over(self, params: Sequence[Any], ranks: int) -> None:
        """Order the caller after the gather, and give parameters their memory: ``foreach_all_gather_copy_out``."""
        device = self.all_gather_output.device
        if self.all_gather_event is not None:
            torch.get_device_module(device).current_stream().wait_event(self.all_gather_event)
        if self.all_gather_work is not None:
            self.all_gather_work.wait()
        for param, part, numels, dtypes in zip(
            *(params, self.parts, self.param_all_gather_input_numels, self.param_all_gather_input_dtypes), strict=True
        ):
            param.init_all_gather_outputs(numels, dtypes, ranks, device)
            self.direct.lease(param, part)
        self.parts.clear()


def _foreach_all_gather(
    fsdp_params: list[Any],
    group: dist.ProcessGroup,
    async_op: bool,
    all_gather_copy_in_stream: Any,
    all_gather_stream: Any,
    device: torch.device,
    all_gather_comm: Any,
) -> AllGatherResult | None:
    direct: DirectGather | None = getattr(all_gather_comm, "direct", None)
    if direct is not None:
        gathered = direct.gather(group, async_op, all_gather_copy_in_stream, all_gather_stream)
        if gathered is not None:
            return gathered
    return _TORCHS["foreach_all_gather"](  # type: ignore[no-any-return]
        fsdp_params, group, async_op, all_gather_copy_in_stream, all_gather_stream, device, all_gather_comm
    )


def _foreach_all_gather_copy_out(
    all_gather_result: AllGatherResult, fsdp_params: list[Any], group: dist.ProcessGroup, **newer: Any
) -> None:
    if isinstance(all_gather_result, Gathered):
        all_gather_result.hand_over(fsdp_params, group.size())
    else:
        _TORCHS["foreach_all_gather_copy_out"](all_gather_result, fsdp_params, group, **newer)


_OURS: dict[str, Callable[..., Any]] = {
    "foreach_all_gather": _foreach_all_gather,
    "foreach_all_gather_copy_out": _foreach_all_gather_copy_out,
}
_TORCHS: dict[str, Callable[..., Any]] = {}
_users: weakref.WeakSet[DirectGather] = weakref.WeakSet()
_changing = forks.lock()


def replace_functions(user: DirectGather) -> None:
    """Replace the two functions of torch by those here, until :func:`restore_functions`."""
    with _changing:
        _users.add(user)
        if not _TORCHS:
            for name, ours in _OURS.items():
                _TORCHS[name] = getattr(_fsdp_param_group, name)
                setattr(_fsdp_param_group, name, ours)


def restore_functions(user: DirectGather | None = None) -> None:
    """Restore torch's own functions when no user, but for the given one, needs ours any more. Idempotent."""
    with _changing:
        if user is not None:
            _users.discard(user)
        if not _users:
            while _TORCHS:
                setattr(_fsdp_param_group, *_TORCHS.popitem())
