"""Time training steps of Megatron-core's distributed optimizer by who communicates, in turns in one process.

Run by hand on two GPUs, with megatron-core 0.16.1 in the path:

    torchrun --nproc-per-node 2 tests/device/megatron_step.py --batch 2 --steps 23
    torchrun --nproc-per-node 2 tests/device/megatron_step.py --tensor 2 --sequence --ways nccl,sidelane
    torchrun --nproc-per-node 2 tests/device/megatron_step.py --experts 8 --ways nccl,sidelane,sidelane-ub-beside

A GPT in bfloat16, data parallel: gradients are reduced (reduce-scatter) behind backward, parameters gathered behind the
next forward. The part ``ub`` of a way is ``nccl_ub=True``: Megatron allocates buffers in a pool and registers it with
the group's backend. The part ``beside`` is ``SIDELANE_BESIDE=compute``. Each way has a model of its own.
``--tensor`` divides layers among ranks, ``--sequence`` their activations, too; ``--experts`` puts experts in the place
of each feed-forward layer, divided among all ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from typing import Any

import megatron.core.nccl_allocator as allocator
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import sidelane
from sidelane import config as settings
from sidelane.integrations.registration import register

VOCABULARY = 32000
WARM = 3
"""Turns that are not timed."""


class FlashAttention(torch.nn.Module):
    """Core attention by torch's own kernel: Megatron's local one makes the matrix of scores."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [S, B, A, D] to [B, A, S, D]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class Trained:
    """A model that one group trains, with the groups that Megatron has made for it."""

    def __init__(self, way: str, options: argparse.Namespace, device: torch.device) -> None:
        self.way, self.options, self.device = way, options, device
        backend, *parts = way.split("-")
        self.settings = dataclasses.replace(settings.current(), beside="compute" if "beside" in parts else "nothing")
        with settings.override(self.settings):
            self._make(backend, "ub" in parts)
        shard = dist.get_rank() // options.tensor  # ranks that divide a layer see the same tokens
        self.generator = torch.Generator(device=device).manual_seed(7 + shard)
        self.times: list[float] = []
        self.losses: list[float] = []

    def _make(self, backend: str, ub: bool) -> None:
        new_group, state, options = dist.new_group, vars(parallel_state), self.options
        before = {name: value for name, value in state.items() if name[0] == "_" and name.isupper()}
        dist.new_group = lambda *args, **named: new_group(*args, **{**named, "backend": backend})
        try:
            experts = dist.get_world_size() if options.experts else 1
            parallel_state.initialize_model_parallel(options.tensor, expert_model_parallel_size=experts)
        finally:
            dist.new_group = new_group
        model_parallel_cuda_manual_seed(123)
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=options.layers,
            tensor_model_parallel_size=options.tensor,
            sequence_parallel=options.sequence,
            num_moe_experts=options.experts or None,
            expert_model_parallel_size=experts,
            moe_token_dispatcher_type="alltoall",
            hidden_size=options.hidden,
            bf16=True,
            num_attention_heads=options.hidden // 128,
            ffn_hidden_size=options.hidden * 7 // 256 * 128,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            persist_layer_norm=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
        )
        layers = get_gpt_layer_local_spec(num_experts=options.experts or None, moe_grouped_gemm=False)
        layers.submodules.self_attention.submodules.core_attention = FlashAttention
        model = GPTModel(config, layers, VOCABULARY, options.seq, position_embedding_type="rope")
        wraps = DistributedDataParallelConfig(
            overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, nccl_ub=ub
        )
        began = time.perf_counter()
        self.model = DistributedDataParallel(config, wraps, model.to(self.device).bfloat16())
        torch.cuda.synchronize()
        self.wrapped_s = time.perf_counter() - began
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        )
        self.optimizer = get_megatron_optimizer(adam, [self.model], use_gloo_process_groups=False)
        self.groups = {name: state[name] for name in before}
        state.update(before)

    def turn(self) -> None:
        """Take two steps: the second one gathers what the first has changed."""
        vars(parallel_state).update(self.groups)
        batch, seq = self.options.batch, self.options.seq
        position = torch.arange(seq, device=self.device).expand(batch, -1)
        tokens = torch.randint(0, VOCABULARY, (batch, seq), device=self.device, generator=self.generator)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        with settings.override(self.settings):
            for _ in range(2):
                self.model.zero_grad_buffer()
                self.optimizer.zero_grad()
                loss = self.model(tokens, position, None, labels=tokens).float().mean()
                loss.backward()
                self.model.finish_grad_sync()
                self.optimizer.step()
        torch.cuda.synchronize()
        self.times.append(1e3 * (time.perf_counter() - began) / 2)
        self.losses.append(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="nccl,nccl-ub,sidelane,sidelane-beside,sidelane-ub,sidelane-ub-beside")
    parser.add_argument("--steps", type=int, default=23, help="turns of each way")
    parser.add_argument("--sequence", action="store_true")
    for name, number in {"layers": 8, "hidden": 2560, "seq": 2048, "batch": 2, "tensor": 1, "experts": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    register()
    # Megatron would compile an allocator of ncclMemAlloc, and turn NVLS on; torch's group has the same allocator.
    allocator._allocator = dist.group.WORLD._get_backend(device).mem_allocator
    allocator.init = lambda: None
    ways = [Trained(way, options, device) for way in options.ways.split(",")]
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 else lambda *_, **__: None
    parameters = sum(each.numel() for each in ways[0].model.parameters())
    say(f"{parameters / 1e9:.2f} G parameters, {options.batch} x {options.seq} tokens a rank, ways in turns")
    for number in range(options.steps):
        for way in ways[:: 1 if number % 2 else -1]:
            way.turn()
    slowest = torch.tensor([way.times[WARM:] for way in ways], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    for way, times in zip(ways, slowest, strict=True):
        ratio = (times / slowest[0]).median()
        say(f"{way.way:19}{times.median():7.1f} ms a step ({times.min():.1f} to {times.max():.1f}), ", end="")
        say(f"{ratio:.3f} of {ways[0].way} in the same turn; wrapped in {way.wrapped_s:.2f} s; ", end="")
        say(f"losses {' '.join(f'{loss:.7g}' for loss in way.losses[:6])}")
    say(f"memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB by torch's count")
    for row in sidelane.report().rows:
        say(f"    {row.operation} {row.calls} by {row.where}: {row.why}")
    dist.barrier()
    os._exit(0)  # groups of several models have no order to be destroyed in


if __name__ == "__main__":
    main()
