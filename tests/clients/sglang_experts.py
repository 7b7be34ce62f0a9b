"""SGLang's own dispatcher for DeepEP, normal and low latency, in bfloat16 and in float8, with Sidelane as ``deep_ep``.

``gloo`` computes the layer of experts on each rank alone, without any exchange.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

from client import GPUS, RANK, RANKS

if not GPUS:
    os.environ |= {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}

import torch
import torch.distributed as dist
from expert_layer import EACH, MOST, K, compare_steps, drawn, factor

HIDDEN = 256
os.environ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(MOST)
if not GPUS:
    # torchvision has no build for CPUs on the index: SGLang reads pictures with it, of which there are none.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def dispatchers() -> dict[str, Any]:
    """Return SGLang's dispatchers by name."""
    from sidelane import deep_ep

    deep_ep.install()
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    deepep.deep_gemm_wrapper = SimpleNamespace(
        ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_SCALE_UE8M0=False, DEEPGEMM_BLACKWELL=False
    )
    if not GPUS:
        torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=2)
        deepep.sglang_per_token_group_quant_fp8 = lambda x, size, **_: in_float8(x, size)
    sizes = {"num_experts": RANKS * EACH, "num_local_experts": EACH, "hidden_size": HIDDEN, "router_topk": K}
    options = {**sizes, "permute_fusion": False, "params_dtype": torch.bfloat16}
    found = {}
    for name, made, more in (
        ("normal", "Normal", {"async_finish": True}),
        ("low latency", "LowLatency", {"return_recv_hook": True}),
    ):
        for is_float8 in (False, True):
            one = vars(deepep)[f"_DeepEPDispatcherImpl{made}"](
                group=dist.group.WORLD, deepep_mode=DeepEPMode.AUTO, **more, **options
            )
            one.use_fp8, one.use_nvfp4 = is_float8, False
            found[f"{name}, {'float8' if is_float8 else 'bfloat16'}"] = one
    return found


def in_float8(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales in place of SGLang's kernel."""
    parts = x.float().unflatten(1, (-1, size)) if len(x) else x.float().view(0, HIDDEN // size, size)
    scales = parts.abs().amax(-1) / 448
    return (parts / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def layer(dispatcher: Any, step: int) -> torch.Tensor:
    """Let SGLang's dispatcher send tokens, multiply by the factors of the experts, and let it combine."""
    x, chosen, gates = drawn(step, HIDDEN)
    routed = SimpleNamespace(topk_weights=gates, topk_ids=chosen)
    found = dispatcher.dispatch_b(*dispatcher.dispatch_a(x, routed))
    rows, scales = found.hidden_states, found.hidden_states_scale
    if scales is not None:
        rows = (rows.float().unflatten(-1, (HIDDEN // 128, 128)) * scales[..., None]).flatten(-2).bfloat16()
    own = torch.arange(EACH)
    if hasattr(found, "masked_m"):
        is_there = torch.arange(rows.shape[1]) < found.masked_m[:, None]
        factors = factor(own + RANK * EACH)[:, None, None].bfloat16()
        results = torch.where(is_there[..., None], rows * factors, float("nan"))
    else:
        there, weights = found.topk_ids, found.topk_weights
        counts = [-(-int((there == one).sum()) // 128) * 128 for one in own.tolist()]
        assert list(found.num_recv_tokens_per_expert) == counts
        factors = torch.where(there >= 0, weights * factor(there + RANK * EACH), 0)
        results = rows * factors.sum(1, keepdim=True).bfloat16()
    return dispatcher.combine_b(*dispatcher.combine_a(results, chosen, gates))


def main() -> None:
    dist.init_process_group("nccl" if GPUS else "gloo")
    compare_steps(dispatchers, layer, HIDDEN)


if __name__ == "__main__":
    sys.exit(main())
