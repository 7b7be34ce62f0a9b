"""vLLM's pass over a model's graph that makes each all-reduce and the norm behind it one call of Sidelane.

vLLM's own pass uses FlashInfer. This one takes its place in vLLM's list of passes, or a place in front of the pass that
fuses norms and quantizations. The operator that it inserts asks at each call whether Sidelane takes the tensors; if
not, vLLM's communicator and norm run one after the other.
"""

# mypy: disable-error-code="misc, no-any-return, import-not-found, import-untyped"
# vLLM is not installed where types are checked.

from __future__ import annotations

import functools
import logging
import operator
from typing import Any

import torch
from torch import fx

from sidelane.servers.setting import NAME
from sidelane.version import VERSION

QUANTIZES = "RMSNormQuantFusionPass"
"""Pass of vLLM that fuses a norm and the quantization behind it: all-reduces come before."""

_PLAIN, _FP8 = "all_reduce_rms_norm", "all_reduce_rms_norm_fp8"
_library = torch.library.Library("sidelane_servers", "DEF")


def _normalise(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rms_norm(total) * weight`` and ``total``, the sum over the ranks of ``group`` plus ``residual``."""
    return _normalised(x, residual, weight, eps, group, {})


def _normalise_fp8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, group: str, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of :func:`_normalise`, and the first one divided by ``scale``, as float8_e4m3fn."""
    quantized = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    given = {"quantized": quantized.view(-1, x.shape[-1]), "scale": scale.view(1)}
    y, total = _normalised(x, residual, weight, eps, group, given)
    if not given:
        from vllm import _custom_ops

        quantized = _custom_ops.scaled_fp8_quant(y.view(-1, y.shape[-1]), scale)[0].view(x.shape)
    return y, total, quantized


def _normalised(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: str,
    quantized: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm and sum; ``quantized`` is emptied if vLLM made them, which has not quantized."""
    from vllm.distributed.parallel_state import _groups

    communicator = _groups[group]().device_communicator
    sidelane = getattr(communicator, "sidelane", None)
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(rows.shape)
    found = None if sidelane is None else sidelane.all_reduce_rms_norm(rows, added, weight, eps, **quantized)
    if found is not None:
        return found[0].view(x.shape), found[1].view(x.shape)
    from vllm import ir

    quantized.clear()
    total = communicator.all_reduce(x)
    if residual is None:
        return ir.ops.rms_norm(total, weight, eps), total
    y, total = ir.ops.fused_add_rms_norm(total, residual, weight, eps)
    return y, total


def _shapes(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(x)


def _shapes_fp8(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return *_shapes(x), torch.empty_like(x, dtype=torch.float8_e4m3fn)


for _name, _made, _faked, _more, _quantized in (
    (_PLAIN, _normalise, _shapes, "", ""),
    (_FP8, _normalise_fp8, _shapes_fp8, ", Tensor scale", ", Tensor"),
):
    _given = f"Tensor x, Tensor? residual, Tensor weight, float eps, str group{_more}"
    _library.define(f"{_name}({_given}) -> (Tensor, Tensor{_quantized})")
    _library.impl(_name, _made, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sidelane_servers::{_name}", _faked, lib=_library)


def fuse(graph: fx.Graph) -> int:
    """Make one call of each all-reduce with the norm behind it, and of the static quantization to FP8 behind that.

    Args:
        graph: functionalized graph with vLLM's operators. All-reduces whose sum is read elsewhere, too, stay if a
            residual is added to it.

    Returns:
        Number of all-reduces that were replaced.
    """
    reduced = graph.find_nodes(op="call_function", target=torch.ops.vllm.all_reduce.default)
    return sum(_is_fused(graph, each) for each in reduced)


def _is_fused(graph: fx.Graph, reduced: fx.Node) -> bool:
    """Replace one all-reduce, and return whether it was."""
    targets = torch.ops.vllm_ir.fused_add_rms_norm.default, torch.ops.vllm_ir.rms_norm.default
    norm = next((user for user in reduced.users if user.target in targets and user.args[0] is reduced), None)
    if norm is None or any(user < norm for user in reduced.users):
        return False
    given = _named(norm)
    residual, weight = given.get("x_residual"), given["weight"]
    if weight is None or given["variance_size"] is not None or _dtype(weight) != _dtype(reduced):
        return False
    if residual is not None and len(reduced.users) > 1:
        return False
    normalised = [norm] if residual is None else _parts(norm, 0)
    totals = [reduced] if residual is None else _parts(norm, 1)
    quantized = [user for each in normalised for user in each.users if _is_quantized(user, norm)][:1]
    name, scales = (_FP8, [quantized[0].kwargs["scale"]]) if quantized else (_PLAIN, [])
    operands = reduced.args[0], residual, weight, given["epsilon"], _named(reduced)["group_name"], *scales
    with graph.inserting_before(norm):
        made = graph.call_function(getattr(torch.ops.sidelane_servers, name).default, operands)
        made.meta["val"] = (_shapes_fp8 if quantized else _shapes)(reduced.meta["val"])  # later passes read it
        new = [graph.call_function(operator.getitem, (made, place)) for place in range(2 + len(quantized))]
    old = [normalised, totals, *(_parts(each, 1) for each in quantized)]
    for place, (nodes, one) in enumerate(zip(old, new, strict=True)):
        one.meta["val"] = made.meta["val"][place]
        for node in nodes:
            node.replace_all_uses_with(one, delete_user_cb=lambda user: user is not norm)
    graph.eliminate_dead_code()
    return True


def _named(node: Any) -> dict[str, Any]:
    """Return the arguments of a call of an operator by name, with their defaults."""
    arguments = node.target._schema.arguments
    given = dict(zip((each.name for each in arguments), node.args, strict=False))
    return {**{each.name: each.default_value for each in arguments}, **given, **node.kwargs}


def _parts(node: fx.Node, place: int) -> list[fx.Node]:
    """Return the nodes that are one of several results of ``node``."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == place]


def _is_quantized(node: Any, norm: fx.Node) -> bool:
    """Return whether a node quantizes a norm to float8_e4m3fn by one scale, which is there before the norm."""
    made = getattr(torch.ops._C, "static_scaled_fp8_quant", None)
    is_static = made is not None and node.args == (made.default,) and "auto_functionalized" in str(node.target)
    if not is_static or list(node.kwargs.get("group_shape") or (-1, -1)) != [-1, -1]:
        return False
    scale = node.kwargs["scale"]
    is_one = scale.meta["val"].numel() == 1 and scale < norm
    return is_one and _dtype(node.kwargs["result"]) == torch.float8_e4m3fn


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype


def install() -> None:
    """Let vLLM's list of passes have the pass of this module, in the place of its own one."""
    from vllm.compilation.passes import pass_manager

    made = _pass_of(pass_manager.InductorPass)
    configure = pass_manager.PostGradPassManager.configure

    @functools.wraps(configure)
    def configured(self: Any, config: Any) -> None:
        configure(self, config)
        if not any(isinstance(each, made) for each in self.passes):
            names = [type(each).__name__ for each in self.passes]
            self.passes.insert(names.index(QUANTIZES) if QUANTIZES in names else len(names), made(config))

    pass_manager.PostGradPassManager.configure = configured
    pass_manager.AllReduceFusionPass = made


@functools.cache
def _pass_of(base: Any) -> Any:
    class AllReduceNormPass(base):
        """:func:`fuse` as a pass of vLLM, for all numbers of tokens."""

        def __init__(self, config: Any) -> None:
            super().__init__()

        def __call__(self, graph: fx.Graph) -> None:
            log = logging.getLogger(f"vllm.{NAME}")
            log.debug("Sidelane: %d all-reduces and norms of a graph are one call each", fuse(graph))

        def uuid(self) -> str:
            return f"{NAME} {VERSION}"

    return AllReduceNormPass
