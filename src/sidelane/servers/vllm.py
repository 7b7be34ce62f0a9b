"""vLLM with Sidelane: ``VLLM_PLUGINS=sidelane vllm serve ...`` (docs/guide/vllm.md).

vLLM calls :func:`register` in each of its processes. The function lets the platform name a subclass of its class of
communicators, which makes collectives by a :class:`sidelane.servers.group.ServerGroup`, and puts :func:`fuse` where
vLLM fuses all-reduces and norms. What Sidelane does not take is vLLM's, as before.
"""

# mypy: disable-error-code="misc, no-any-return, import-not-found, import-untyped"
# vLLM is not installed where types are checked.

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from sidelane.servers import setting
from sidelane.servers.group import ServerGroup, norm_operator, norm_shapes
from sidelane.servers.setting import NAME, line, misfit
from sidelane.version import VERSION

FITS = "0.22.0", "0.33.0"
"""Versions of vLLM that fit: the first and the last one whose classes the tests have been run with."""

LOG = logging.getLogger(f"vllm.{NAME}")
GIVEN_BACK_BYTES = 512 << 10
"""Bytes of a sum between two GPUs from which vLLM's own kernel is ahead, as results/h200x2/servers.json has it."""

_WITHOUT_COLLECTIVES = ("world", "pp")
_NAMED = "sidelane.servers.vllm.DeviceCommunicator"
_QUANTIZES = "RMSNormQuantFusionPass"
_given: dict[str, str] = {}


def register() -> None:
    """Replace what vLLM's processes take from their platform, if vLLM was asked to use Sidelane. Idempotent.

    It is the entry point ``sidelane`` of the group ``vllm.general_plugins``. It raises nothing: vLLM would not start.
    """
    setting.register("vllm", "VLLM_PLUGINS", _replace)


def _replace() -> None:
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.version import __version__ as version

    platform = type(current_platform)
    if platform.get_device_communicator_cls() == _NAMED:
        return
    device = "rocm" if current_platform.is_rocm() else current_platform.device_type
    if problem := misfit("vllm", version, device, FITS):
        LOG.warning(line("vllm", version, [], {"everything": problem}))
        return
    kept: dict[str, str] = {}
    _given["communicator"] = own = platform.get_device_communicator_cls()
    replaced = [own.rpartition(".")[2]]
    if envs.VLLM_BATCH_INVARIANT:
        kept["AllReduceFusionPass"] = "batch-invariant mode: the operator does not round the sum, which vLLM does"
    else:
        _install()
        replaced.append("AllReduceFusionPass")
    platform.get_device_communicator_cls = classmethod(lambda cls: _NAMED)
    platform.use_custom_op_collectives = classmethod(lambda cls: True)  # compiled code makes calls whole, on CPUs, too
    factors = envs.compile_factors
    envs.compile_factors = lambda: {**factors(), NAME: VERSION}  # key of the cache of compiled models
    setting.offer_deep_ep()
    _given["line"] = line("vllm", version, replaced, kept)
    _log()


def _log() -> None:
    """Write the line about what was replaced, once in a process: some set up vLLM's logger after its plug-ins."""
    if "line" in _given and LOG.isEnabledFor(logging.INFO):
        LOG.info(_given.pop("line"))


def __getattr__(name: str) -> Any:
    """Return ``DeviceCommunicator``, which vLLM looks up by its name: it is made when vLLM has been imported."""
    if name != "DeviceCommunicator" or not _given:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return device_communicator(resolve_obj_by_qualname(_given["communicator"]))


@functools.cache
def device_communicator(base: Any) -> Any:
    """Return the subclass of vLLM's ``CudaCommunicator`` or ``CpuCommunicator`` that makes collectives by Sidelane."""
    from vllm import envs

    class DeviceCommunicator(base):
        """vLLM's communicator of a group. A call that ``sidelane`` does not take is that of the base class.

        Attributes:
            sidelane: collectives by Sidelane; None for groups that only send and receive, or cannot be served.
        """

        sidelane: ServerGroup | None = None

        def __init__(self, cpu_group: Any, *args: Any, **options: Any) -> None:
            super().__init__(cpu_group, *args, **options)
            _log()
            if self.world_size == 1 or self.unique_name.partition(":")[0] in _WITHOUT_COLLECTIVES:
                return
            made = ServerGroup(cpu_group, self.device, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
            if made.comm is None:
                LOG.warning("Sidelane: group %s stays vLLM's: %s", self.unique_name, made.reason)
                return
            self.sidelane, theirs = made, getattr(self, "ca_comm", None)
            if theirs is not None and (theirs.disabled or self.world_size > 2 or made.comm.backend.peers.through_host):
                self.ca_comm = made

        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            theirs, served = getattr(self, "ca_comm", None), self.sidelane
            if input_.nbytes >= GIVEN_BACK_BYTES and theirs not in (None, served) and theirs.should_custom_ar(input_):
                served = None
            found = None if served is None else served.all_reduce(input_)
            if found is not None:
                return found
            own = input_ if input_.is_cuda else input_.clone()  # vLLM's for CPUs adds in place, operators must not
            return super().all_reduce(own)

        def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            found = None if self.sidelane is None else self.sidelane.all_gather(input_)
            if found is None:
                return super().all_gather(input_, dim)
            parts = found.view(self.world_size, *input_.shape).movedim(0, dim := dim % input_.dim())
            return parts.flatten(dim, dim + 1)

        def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
            inputs = [input_] if isinstance(input_, torch.Tensor) else input_
            if dim == 0 and self.sidelane is not None:
                found = [self.sidelane.all_gather(each, sizes=sizes) for each in inputs]
                if all(each is not None for each in found):
                    return found[0] if isinstance(input_, torch.Tensor) else found
            return super().all_gatherv(input_, dim, sizes)

        def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            found = self._reduced(input_, dim)
            return super().reduce_scatter(input_, dim) if found is None else found

        def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
            found = self._reduced(input_, dim, sizes)
            return super().reduce_scatterv(input_, dim, sizes) if found is None else found

        def reduce_scatterv_into_output(
            self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
        ) -> torch.Tensor:
            served = self.sidelane if dim == 0 else None
            found = None if served is None else served.reduce_scatter(input_.contiguous(), output, sizes)
            return super().reduce_scatterv_into_output(input_, output, dim, sizes) if found is None else output

        def _reduced(self, input_: torch.Tensor, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor | None:
            rows = input_.movedim(dim, 0).contiguous()
            found = None if self.sidelane is None else self.sidelane.reduce_scatter(rows, sizes=sizes)
            return None if found is None else found.movedim(0, dim).contiguous()

        def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
            found = None if self.sidelane is None else self.sidelane.broadcast(tensor, src)
            return super().broadcast(tensor, src) if found is None else found

        def suspend(self) -> None:
            super().suspend()
            if self.sidelane is not None and (why := self.sidelane.suspend()):
                LOG.warning("Sidelane: suspend of group %s: %s", self.unique_name, why)

        def resume(self) -> None:
            super().resume()
            if self.sidelane is not None and (why := self.sidelane.resume()):
                LOG.warning("Sidelane: resume of group %s: %s", self.unique_name, why)

        def destroy(self) -> None:
            super().destroy()
            if self.sidelane is not None:
                self.sidelane.close()

    return DeviceCommunicator


def group_norms(group: str) -> tuple[Any, Any]:
    """Return Sidelane's object of a group of vLLM, and vLLM's own sum and norm, by its kernels."""
    from vllm import _custom_ops
    from vllm.distributed.parallel_state import _groups

    communicator = _groups[group]().device_communicator

    def theirs(x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, scale: Any) -> Any:
        total = communicator.all_reduce(x)  # a new tensor
        if residual is not None:
            total += residual
        _custom_ops.rms_norm(y := torch.empty_like(total), total, weight, eps)
        if scale is None:
            return y, total, x.new_empty(0)
        return y, total, _custom_ops.scaled_fp8_quant(y.view(-1, y.shape[-1]), scale)[0].view(x.shape)

    return getattr(communicator, "sidelane", None), theirs


def fuse(graph: fx.Graph) -> int:
    """Make one call of each all-reduce with the norm behind it, and of the static quantization to FP8 behind that.

    ``graph`` is functionalized, with vLLM's operators. The number of all-reduces that were replaced is returned; they
    stay if their sum is read elsewhere, too, and a residual is added to it.
    """
    reduced = graph.find_nodes(op="call_function", target=torch.ops.vllm.all_reduce.default)
    return sum(_is_fused(graph, each) for each in reduced)


def _is_fused(graph: fx.Graph, reduced: fx.Node) -> bool:
    """Replace one all-reduce, and return whether it was."""
    targets = torch.ops.vllm_ir.fused_add_rms_norm.default, torch.ops.vllm_ir.rms_norm.default
    last = next((user for user in reduced.users if user.target in targets and user.args[0] is reduced), None)
    if last is None or any(user < last for user in reduced.users):
        return False
    given = _named(last)
    residual, weight = given.get("x_residual"), given["weight"]
    if weight is None or given["variance_size"] is not None or _dtype(weight) != _dtype(reduced):
        return False
    if residual is not None and len(reduced.users) > 1:
        return False
    old = [[last], [reduced]] if residual is None else [_parts(last, 0), _parts(last, 1)]
    quantized = [user for each in old[0] for user in each.users if _is_quantized(user, last)][:1]
    scale = quantized[0].kwargs["scale"] if quantized else None
    operands = reduced.args[0], residual, weight, given["epsilon"], _named(reduced)["group_name"], scale
    with graph.inserting_before(last):
        made = graph.call_function(norm_operator("vllm", group_norms), operands)
        made.meta["val"] = norm_shapes(reduced.meta["val"], scale)  # later passes read it
        new = [graph.call_function(getitem, (made, place)) for place in range(3)]
    old.append([node for each in quantized for node in _parts(each, 1)])
    for nodes, one, value in zip(old, new, made.meta["val"], strict=True):
        one.meta["val"] = value
        for node in nodes:
            node.replace_all_uses_with(one, delete_user_cb=lambda user: user is not last)
    graph.eliminate_dead_code()
    return True


def _named(node: Any) -> dict[str, Any]:
    """Return the arguments of a call of an operator by name, with their defaults."""
    arguments = node.target._schema.arguments
    given = dict(zip((each.name for each in arguments), node.args, strict=False))
    return {**{each.name: each.default_value for each in arguments}, **given, **node.kwargs}


def _parts(node: fx.Node, place: int) -> list[fx.Node]:
    """Return the nodes that are one of several results of ``node``."""
    return [user for user in node.users if user.target is getitem and user.args[1] == place]


def _is_quantized(node: Any, last: fx.Node) -> bool:
    """Return whether a node quantizes a norm to float8_e4m3fn by one scale, which is there before the norm."""
    made = getattr(torch.ops._C, "static_scaled_fp8_quant", None)
    is_static = made is not None and node.args == (made.default,) and "auto_functionalized" in str(node.target)
    if not is_static or list(node.kwargs.get("group_shape") or (-1, -1)) != [-1, -1]:
        return False
    scale = node.kwargs["scale"]
    is_one = scale.meta["val"].numel() == 1 and scale < last
    return is_one and _dtype(node.kwargs["result"]) == torch.float8_e4m3fn


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype


def _install() -> None:
    """Let vLLM's list of passes have :func:`fuse` in the place of its own pass, else before norms are quantized."""
    from vllm.compilation.passes import pass_manager

    class AllReduceNormPass(pass_manager.InductorPass):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def __call__(self, graph: fx.Graph) -> None:
            LOG.debug("Sidelane: %d all-reduces and norms of a graph are one call each", fuse(graph))

        def uuid(self) -> str:
            return f"{NAME} {VERSION}"

    configure = pass_manager.PostGradPassManager.configure

    @functools.wraps(configure)
    def configured(self: Any, config: Any) -> None:
        configure(self, config)
        names = [type(each).__name__ for each in self.passes]
        if AllReduceNormPass.__name__ not in names:
            place = names.index(_QUANTIZES) if _QUANTIZES in names else len(names)
            self.passes.insert(place, AllReduceNormPass(config))

    norm_operator("vllm", group_norms)  # compiled models in vLLM's cache name it
    pass_manager.PostGradPassManager.configure = configured
    pass_manager.AllReduceFusionPass = AllReduceNormPass
