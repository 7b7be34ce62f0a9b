"""vLLM's layers in a graph that vLLM's passes rewrite: all-reduces of row-parallel layers, norms, quantization to FP8.

``gloo`` runs the layers one by one. ``sidelane`` does, too, and compiles them: each all-reduce and the norm behind it
are one call then. Triton's kernels are interpreted.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from client import BACKEND, GPUS, RANK, RANKS, finish

os.environ["VLLM_PLUGINS"] = "sidelane" if BACKEND == "sidelane" else "none"
if not GPUS:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_DIST_IDENT": "norms"}

import torch
from vllm import ir
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, PassConfig, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import parallel_state
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.plugins import load_general_plugins

HIDDEN, TOKENS, EPS = 128, (1, 5, 64, 600), 1e-6
TOLERANCE = 0.02
NEAR = 1.0 if GPUS else 0.85
"""Share of numbers in FP8 within a unit of their last place. Triton's interpreter drops carries: 31.25 becomes 16."""

QUANTIZE = "static_scaled_fp8_quant"


def quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x / scale`` by vLLM's operator."""
    result = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    torch.ops._C.static_scaled_fp8_quant(result, x, scale, [-1, -1])
    return result


def native(result: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, group_shape: object = None) -> None:
    most = torch.finfo(torch.float8_e4m3fn).max
    result.copy_((x.float() / scale).clamp(-most, most))


class Block(torch.nn.Module):
    """The end of an attention, and of a feed-forward layer that reads FP8; the first norm has no residual."""

    def __init__(self) -> None:
        super().__init__()
        options = {"bias": False, "input_is_parallel": True, "params_dtype": torch.bfloat16}
        self.layers = torch.nn.ModuleList(RowParallelLinear(HIDDEN, HIDDEN, **options) for _ in range(3))
        self.norms = torch.nn.ModuleList(RMSNorm(HIDDEN, EPS, dtype=torch.bfloat16) for _ in range(3))
        self.register_buffer("scale", torch.tensor([0.02]))
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=0.2)
            layer.cpu_linear = torch.nn.functional.linear  # vLLM's passes, which are for GPUs, do not know oneDNN's

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reduced = self.layers[0](x)[0]
        y, residual = self.norms[0](reduced), reduced
        part = y.chunk(RANKS, -1)[RANK].contiguous()
        y, residual = self.norms[1](self.layers[1](part)[0], residual)
        part = y.chunk(RANKS, -1)[RANK].contiguous()
        y, residual = self.norms[2](self.layers[2](part)[0], residual)
        return quantized(y, self.scale).float(), residual


def main() -> None:
    config = VllmConfig(compilation_config=CompilationConfig(pass_config=PassConfig(fuse_allreduce_rms=True)))
    load_general_plugins()
    if not GPUS:  # vLLM's build for CPUs has the name only
        library = torch.library.Library("clients", "DEF")
        library.define(f"{QUANTIZE}(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()")
        library.impl(QUANTIZE, native, "CompositeExplicitAutograd")
        torch.library.register_fake(f"clients::{QUANTIZE}", lambda *_: None, lib=library)
        setattr(torch.ops._C, QUANTIZE, getattr(torch.ops.clients, QUANTIZE))
    with set_current_vllm_config(config), torch.inference_mode():
        parallel_state.init_distributed_environment(backend="nccl" if GPUS else "gloo")
        parallel_state.initialize_model_parallel(RANKS)
        torch.manual_seed(RANK)
        block = Block()
        inputs = [torch.randn(tokens, HIDDEN // RANKS, dtype=torch.bfloat16) for tokens in TOKENS]
        plain = [block(x.clone()) for x in inputs]
        served = getattr(parallel_state.get_tp_group().device_communicator, "sidelane", None)
        if served is not None:
            compare(block, config, inputs, plain)
            fused = [tokens for tokens in TOKENS if tokens <= 512]  # the rest is vLLM's norm behind Sidelane's sum
            assert served.counts["all_reduce_rms_norm"] == 3 * len(fused), served.counts
            assert served.counts["all_reduce"] == 3 * (2 * len(TOKENS) - len(fused)), served.counts
            sleep(served)
    rows = [] if served is None else served.counts.items()
    made = [{"where": "sidelane", "operation": name, "why": "", "calls": count} for name, count in rows]
    finish((one.double().sum().item() for found in plain for one in found), made)


def sleep(served: Any) -> None:
    """Let vLLM suspend its communicators, add without Sidelane, and resume."""
    group, x = parallel_state.get_tp_group(), torch.full((3, 4), RANK + 1.0)
    before = served.counts["all_reduce"]
    for take in (parallel_state.suspend_device_comms, parallel_state.resume_device_comms):
        take()
        assert (served.memory_bytes() == 0) is (take is parallel_state.suspend_device_comms)
        assert group.all_reduce(x.clone()).eq(sum(range(1, RANKS + 1))).all()
    assert served.counts["all_reduce"] == before + 1, "the one after vLLM has resumed"


def compare(
    block: Block, config: VllmConfig, inputs: list[torch.Tensor], plain: list[tuple[torch.Tensor, ...]]
) -> None:
    """Compile the block with vLLM's passes, and compare what it returns."""
    manager = PostGradPassManager()
    manager.configure(config)
    passes = {"post_grad_custom_post_pass": manager, "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config)}
    options = {"enable_auto_functionalized_v2": False, "force_disable_caches": True, **passes}
    with pass_context(Range(1, 8192)), torch._inductor.config.patch(options), ir.enable_torch_wrap(True):
        compiled = torch.compile(block, fullgraph=True, dynamic=False)
        for x, wanted in zip(inputs, plain, strict=True):
            narrow, total = compiled(x.clone())
            wrong = (total - wanted[1]).abs().max() / wanted[1].abs().max()
            assert wrong < TOLERANCE, wrong
            near = torch.isclose(narrow, wanted[0], rtol=1 / 8, atol=1)
            assert near.float().mean() >= NEAR, near


if __name__ == "__main__":
    sys.exit(main())
