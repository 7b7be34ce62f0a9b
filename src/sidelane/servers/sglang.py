"""SGLang with Sidelane: ``SGLANG_PLUGINS=sidelane python -m sglang.launch_server ...`` (docs/guide/sglang.md).

SGLang calls :func:`register` in each of its processes, and then applies the hooks that it has registered: a
:class:`sidelane.servers.group.ServerGroup` makes the reduce-scatters and all-gathers of DP attention. It takes the
place of a group's custom all-reduce, and makes the all-reduces with a norm, where SGLang does not have its faster
kernel. What Sidelane does not take is SGLang's, as before.
"""

# mypy: disable-error-code="misc, import-not-found, import-untyped"
# SGLang is not installed where types are checked.

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from sidelane.ops.rms_norm import MOST_TOKENS
from sidelane.servers import setting
from sidelane.servers.group import SUMMED, Norms, ServerGroup, norm_operator
from sidelane.servers.setting import line, misfit

FITS = "0.5.12", "0.5.15"
"""Versions that fit ``tests/clients/server_contracts.py``; the engine of the last one was run, too."""

LOG = logging.getLogger("sglang.sidelane")

_STATE = "sglang.srt.distributed.parallel_state"
_CUSTOM = "sglang.srt.distributed.device_communicators.custom_all_reduce"
_ROW_BYTES = 16 << 10  # of 8,192 numbers: SGLang asks with a number of tokens alone
_CALLS = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
_FUSED = "flashinfer_allreduce_residual_rmsnorm"
_FASTER = "CustomAllReduceV2"
"""SGLang's kernel for GPUs with NVLink, with which a token takes less time: results/h200x2/engines.json."""

_WITH_FASTER = (
    (_CALLS[0], "SGLang's kernel is faster"),
    (_FUSED, "SGLang's kernel is faster"),
    (_CALLS[2], "NCCL's makes graphs faster; with DP attention it is Sidelane's"),
)

_WEIGHTS = (
    ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin"),  # 0.5.12
    ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager"),
)
made: list[ServerGroup] = []
"""Objects of this process, one for each group of ranks."""


def register() -> None:
    """Register hooks for what Sidelane replaces, if SGLang was asked to use Sidelane.

    It is the entry point ``sidelane`` of the group ``sglang.srt.plugins``. It raises nothing.
    """
    setting.register("sglang", "SGLANG_PLUGINS", _replace)


def _replace() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu, is_cuda
    from sglang.version import __version__ as version

    device = "cuda" if is_cuda() else "cpu" if is_cpu() else "another one"
    if problem := misfit("sglang", version, device, FITS, parts=3):
        LOG.warning(line("sglang", version, [], {"everything": problem}))
        return
    # SGLang sets up the root at INFO: one line a process, unless SIDELANE_LOG asks.
    if (calls := logging.getLogger("sidelane")).level == logging.NOTSET:
        calls.setLevel(logging.WARNING)
    module, owner = next(where for where in _WEIGHTS if importlib.util.find_spec(where[0]))
    hooks: dict[str, Callable[..., Any]] = {  # they stand around the functions that are named
        f"{_CUSTOM}.dispatch_custom_allreduce": _dispatch,
        f"{_STATE}.set_custom_all_reduce": _enable,
        "sglang.srt.server_args.ServerArgs._handle_deterministic_inference": _restore,
        f"{_STATE}.GroupCoordinator.destroy": _destroy,
        # SGLang asks no custom all-reduce on CPUs; on GPUs the other one has sums that its kernel does not take.
        f"{_STATE}.GroupCoordinator.{('_all_reduce_in_place', 'all_reduce')[is_cpu()]}": _moves(_sum, SUMMED),
        f"{_STATE}.GroupCoordinator._reduce_scatter_tensor": _moves(ServerGroup.reduce_scatter, SUMMED),
        f"{_STATE}.GroupCoordinator._all_gather_into_tensor": _moves(ServerGroup.all_gather, None),
        "sglang.srt.layers.communicator.apply_flashinfer_allreduce_fusion": _fuses,
        f"sglang.srt.layers.flashinfer_comm_fusion.{_FUSED}": _norm,
        f"{module}.{owner}.release_memory_occupation": _with_memory("suspend"),
        f"{module}.{owner}.resume_memory_occupation": _with_memory("resume"),
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    setting.offer_deep_ep()


def _restore(original: Callable[..., None], arguments: Any) -> None:
    """Leave custom all-reduces on in deterministic mode, for which SGLang switches its own off, unless the user has."""
    before = arguments.disable_custom_all_reduce
    original(arguments)
    arguments.disable_custom_all_reduce = before


def _enable(original: Callable[..., None], enable: bool) -> None:
    if not enable:
        announce((), (("everything", "--disable-custom-all-reduce"),))
    original(enable)


def _dispatch(original: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Return what makes the object for a group's ``ca_comm``: Sidelane's, or SGLang's own if it is faster."""
    from sglang.srt.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_enabled
    from sglang.srt.environ import envs
    from sglang.srt.utils import is_cuda

    def make(group: Any, device: Any) -> Any:
        is_deterministic, served = bool(envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get()), None
        if not is_symmetric_memory_enabled():
            served = ServerGroup(group, device, batch_invariant=is_deterministic)
        if served is None or served.reason:
            announce((), (("everything", served.reason if served else "--enable-symm-mem"),))
            return served if is_deterministic else original(*args, **options)(group=group, device=device)
        made.append(served)
        own = original(*args, **options) if is_cuda() and not is_deterministic else None
        if own is not None and own.__name__ == _FASTER and not (theirs := own(group=group, device=device)).disabled:
            announce(_CALLS[1:2], _WITH_FASTER)
            theirs.sidelane = served
            return theirs
        replaced, kept = [*_CALLS, _FUSED], {}
        if not served.fuses():
            exact = "deterministic mode: the operator does not round the sum, which SGLang does"
            kept[replaced.pop()] = exact if is_deterministic else "no kernels for these ranks"
        announce(tuple(replaced), tuple(kept.items()))
        return served

    return make


@functools.cache
def announce(replaced: tuple[str, ...], kept: tuple[tuple[str, str], ...]) -> None:
    """Log what was replaced, and what stays with the reason, once in a process, which may have several groups."""
    from sglang.version import __version__ as version

    LOG.log(logging.INFO if replaced else logging.WARNING, line("sglang", version, replaced, dict(kept)))


def _of(group: Any, *, sums: bool = False) -> ServerGroup | None:
    """Return Sidelane's object of a group of SGLang; None if SGLang makes its calls, or its ``sums``."""
    found = group.ca_comm if sums else getattr(group.ca_comm, "sidelane", group.ca_comm)
    return found if isinstance(found, ServerGroup) and found.comm is not None else None


def _moves(call: Callable[..., Any], dtypes: Sequence[torch.dtype] | None) -> Callable[..., Any]:
    """Return the hook of a collective: ``call`` of Sidelane for these dtypes (None: any), with the input first.

    Gathers, which take any, stay SGLang's where its sums do, but for DP attention: in a graph without NCCL's gather of
    logits dependent kernels begin later, by more than Sidelane's gather saves (results/notes/e2e.md).
    """

    def hook(original: Callable[..., Any], group: Any, *tensors: torch.Tensor) -> Any:
        served = _of(
            group,
            sums=dtypes is None
            and not importlib.import_module("sglang.srt.layers.dp_attention").is_dp_attention_enabled(),
        )
        takes = served is not None and served.takes(*tensors, dtypes=dtypes)
        return original(group, *tensors) if not takes or (found := call(served, *reversed(tensors))) is None else found

    return hook


def _sum(served: ServerGroup, tensor: torch.Tensor) -> torch.Tensor | None:
    return served.all_reduce(tensor, tensor)


def _destroy(original: Callable[..., None], group: Any) -> None:
    """Release what Sidelane has made for a group that SGLang destroys."""
    if (served := getattr(group.ca_comm, "sidelane", group.ca_comm)) in made:
        made.remove(served)
        served.close()
    original(group)


def _groups() -> tuple[Any, Any]:
    """Return the groups of the sums behind attention and behind an MLP or experts."""
    from sglang.srt.distributed import parallel_state as state

    experts = state.get_moe_ep_group()
    return state.get_attn_tp_group(), experts if experts.world_size > 1 else state.get_moe_tp_group()


def _fuses(original: Callable[[int], bool], batch_size: int) -> bool:
    """Return whether sums are made together with norms: where FlashInfer was to make them, and by Sidelane."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.server_args import get_global_server_args

    is_off = getattr(get_global_server_args(), "enforce_disable_flashinfer_allreduce_fusion", False)
    if is_off or is_dp_attention_enabled() or not 0 < batch_size <= MOST_TOKENS:
        return original(batch_size)
    served = [(group.world_size, _of(group, sums=True)) for group in _groups()]
    return original(batch_size) or all(
        size == 1 or (each is not None and each.fuses(batch_size * _ROW_BYTES)) for size, each in served
    )


def _norm(original: Callable[..., Any], **given: Any) -> Any:
    from sglang.srt.layers.communicator import apply_flashinfer_allreduce_fusion as fuses

    x, weight, is_attention = given["input_tensor"], given["weight"], given.get("use_attn_tp_group", True)
    served = _of(_groups()[not is_attention], sums=True)
    if served is None or not (
        served.normalises(x, weight) or (served.fuses(len(x) * _ROW_BYTES) and not fuses.__wrapped__(len(x)))
    ):
        return original(**given)  # FlashInfer's
    group = "attention" if is_attention else "experts"
    return norm_operator("sglang", _group_norms)(x, given["residual"], weight, given.get("eps", 1e-6), group, None)[:2]


def _group_norms(name: str) -> tuple[ServerGroup | None, Callable[..., Norms]]:
    """Return Sidelane's object of the group behind attention or behind experts, and SGLang's own sum and a norm."""
    group = _groups()[name == "experts"]

    def theirs(x: Any, residual: Any, weight: torch.Tensor, eps: float, scale: None) -> Norms:
        total = group.all_reduce(x.clone()) + residual
        return functional.rms_norm(total, weight.shape, weight, eps), total, x.new_empty(0)

    return _of(group, sums=True), theirs


def _with_memory(name: str) -> Callable[..., Any]:
    """Return the hook that also releases or takes Sidelane's memory; the scheduler is idle on all ranks."""

    def hook(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        answer = original(*args, **options)
        for served in made:
            if why := getattr(served, name)():
                LOG.warning("Sidelane: %s of a group: %s", name, why)
        return answer

    return hook
