"""Functions that some clients lack for CPU ranks. On GPUs they do nothing: there the clients run as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from client import BACKEND, GPUS
from torch.distributed.fsdp import FSDPModule


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
