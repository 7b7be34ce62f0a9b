"""Functions that some clients lack for CPU ranks. On GPUs they do nothing: there the clients run as they are."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from client import BACKEND, GPUS
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode


def torchtitan_on_cpus() -> None:
    """Give torchtitan a device, an attention with a backward on CPUs, and for Gloo sums instead of PREMUL_SUM."""
    if GPUS:
        return
    if not hasattr(dist, "set_timeout"):  # torch 2.14 has it
        dist.set_timeout = lambda timeout, group=None: dist.distributed_c10d._set_pg_timeout(timeout, group)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0
    torch.cpu.get_device_name = lambda device=None: "CPU"
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1)
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    from torch.nn.attention.flex_attention import create_mask
    from torchtitan.models.common.attention import FlexAttention

    def forward(
        self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, enable_gqa: bool = False, **_: Any
    ) -> Any:
        lengths = (q_BLNH.shape[1], k_BLNH.shape[1])
        mask = create_mask(attention_masks.mask_mod, len(q_BLNH), 1, *lengths, device="cpu")
        heads = [tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH)]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=enable_gqa).transpose(1, 2)

    FlexAttention.forward = forward
    if BACKEND == "gloo":  # Sidelane takes the operation as it is
        set_factor = FSDPModule.set_gradient_divide_factor

        def set_factor_and_sum(self: Any, factor: float) -> None:
            self.set_force_sum_reduction_for_comms(True)
            set_factor(self, factor)

        FSDPModule.set_gradient_divide_factor = set_factor_and_sum


def deepspeed_on_cpus() -> None:
    """Keep DeepSpeed from compiling an operator of shared memory between CPU ranks, which training does not use."""
    if not GPUS:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)


def accelerate_fsdp2_on_cpus() -> None:
    """Let accelerate take CPU ranks for GPUs: it turns FSDP on for devices only."""
    if not GPUS:
        from accelerate.state import DistributedType, PartialState

        PartialState._prepare_backend = lambda self, cpu=False, dp=False, backend=None: (
            backend,
            DistributedType.MULTI_GPU,
        )
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


class OnCpus(TorchFunctionMode):
    """A call that asks for a GPU's memory gets the CPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return function(*args, **(given | {"device": "cpu"} if str(given.get("device")).startswith("cuda") else given))


class NoStream:
    """Stand-in for a stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return NoStream


def megatron_on_cpus() -> None:
    """Let Megatron-core train between CPU ranks: it takes memory, streams and random states of GPUs alone."""
    if GPUS:
        return
    OnCpus().__enter__()
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = NoStream
    cuda.stream = contextlib.nullcontext
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = lambda given, as_numpy=False, **_: given.numpy() if as_numpy else given
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    type_of = tensor.type
    tensor.type = lambda self, *given: type_of(self, *given) if given else f"torch.cuda.{type_of(self).split('.')[-1]}"
