"""vLLM's callers of DeepEP, high throughput and low latency, in bfloat16 and in float8, with Sidelane as ``deep_ep``.

``gloo`` computes the layer of experts on each rank alone, without any exchange.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from client import GPUS, RANK, RANKS

if not GPUS:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_DIST_IDENT": "experts"}

import torch
from expert_layer import EACH, MOST, compare_steps, drawn, factor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

HIDDEN = 2048
"""The least that vLLM's caller for low latency takes."""


def callers() -> dict[str, Any]:
    """Return vLLM's objects that call DeepEP, by name, each with the configuration of its quantization."""
    from sidelane import deep_ep

    deep_ep.install()
    from vllm.distributed.device_communicators.all2all import DeepEPHTAll2AllManager, DeepEPLLAll2AllManager
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    group = parallel_state.get_world_group().cpu_group
    sizes = {"max_num_tokens_per_dp_rank": MOST, "token_hidden_size": HIDDEN, "num_ep_ranks": RANKS}
    sizes |= {"num_global_experts": RANKS * EACH, "num_local_experts": EACH}
    one = torch.ones(EACH, 1, 1)
    plain = config.FUSED_MOE_UNQUANTIZED_CONFIG
    blocks = config.fp8_w8a8_moe_quant_config(one, one, block_shape=[128, 128])
    if not GPUS:  # vLLM's own way without a kernel
        quantize = QuantFP8(static=False, group_shape=GroupShape(1, 128))

        def native(x: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
            return quantize.forward_native(x)

        deepep_ht.moe_kernel_quantize_input = native
    many, few = DeepEPHTAll2AllManager(group), DeepEPLLAll2AllManager(group)
    found: dict[str, Any] = {}
    for name, settings in (("bfloat16", plain), ("float8", blocks)):
        caller = deepep_ht.DeepEPHTPrepareAndFinalize(many.get_handle({}), RANKS, RANKS, RANK * EACH)
        found[f"high throughput, {name}"] = caller, settings
        is_float8 = name == "float8"
        caller = deepep_ll.DeepEPLLPrepareAndFinalize(few.get_handle(sizes), MOST, RANKS, use_fp8_dispatch=is_float8)
        found[f"low latency, {name}"] = caller, settings
    return found


def layer(caller: Any, settings: Any, step: int) -> torch.Tensor:
    """Let vLLM's object prepare, multiply by the factors of the experts, and let it finalize."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )

    x, chosen, gates = drawn(step, HIDDEN)
    experts = RANKS * EACH
    rows, scales, counts, there, weights = caller.prepare(x, gates, chosen, experts, None, False, settings)
    if scales is not None:
        rows = (rows.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).bfloat16()
    own = torch.arange(RANK * EACH, (RANK + 1) * EACH)
    if there is None:  # in slots
        is_there = torch.arange(rows.shape[1]) < counts.expert_num_tokens[:, None]
        results = torch.where(is_there[..., None], rows * factor(own)[:, None, None].bfloat16(), float("nan"))
        reduce = TopKWeightAndReduceDelegate()
    else:
        is_own = (there[..., None] == own).any(-1)
        assert counts.expert_num_tokens.tolist() == [int((there == one).sum()) for one in own.tolist()]
        results = rows * (torch.where(is_own, weights, 0) * factor(there)).sum(1, keepdim=True).bfloat16()
        reduce = TopKWeightAndReduceNoOP()
    y = torch.empty_like(x)
    caller.finalize(y, results.bfloat16(), gates, chosen, False, reduce)
    return y


def main() -> None:
    config = VllmConfig()
    config.parallel_config.data_parallel_size = 1
    with set_current_vllm_config(config), torch.inference_mode():
        parallel_state.init_distributed_environment(backend="nccl" if GPUS else "gloo")
        parallel_state.initialize_model_parallel(RANKS)
        compare_steps(callers, lambda found, step: layer(*found, step), HIDDEN)


if __name__ == "__main__":
    sys.exit(main())
