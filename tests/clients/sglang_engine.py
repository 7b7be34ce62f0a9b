"""SGLang's engine, with its scheduler and a worker for each rank, and a small model of random weights: greedy tokens of
eight requests. SGLang takes Sidelane by its plug-in, so that ``gloo`` is SGLang as it is.

The variants: ``norms`` is a Qwen3, whose all-reduces and norms SGLang fuses (here Sidelane alone does, in Triton's
interpreter); ``deterministic`` is a Llama in deterministic mode, whose attention kernels need a GPU: torch's own take
their place, and sums are compared bit by bit.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from client import BACKEND, GPUS, RANK, RANKS, finish

VARIANT = sys.argv[2] if len(sys.argv) > 2 else "norms"
WIDTH = 64

if not GPUS:
    # torchvision has no build for CPUs on the index: SGLang reads pictures with it, of which there are none.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def settings() -> None:
    """Set what the processes of SGLang inherit."""
    torchrun = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"
    for name in torchrun:  # the engine starts its workers itself
        os.environ.pop(name, None)
    os.environ["SGLANG_PLUGINS"] = "sidelane" if BACKEND == "sidelane" else "none"
    if not GPUS:
        cores = os.cpu_count() or 1
        os.environ |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(RANKS)),
        }
        os.environ["TRITON_INTERPRET"] = str(int(BACKEND == "sidelane" and VARIANT == "norms"))


def checkpoint(folder: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    sizes = {"vocab_size": 256, "hidden_size": WIDTH, "intermediate_size": 128, "max_position_embeddings": 512}
    options = {**heads, **sizes, "initializer_range": 0.2, "dtype": "float32"}
    if VARIANT == "norms":
        Qwen3ForCausalLM(Qwen3Config(**options)).save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(folder)
    return folder


def check(scheduler: Any, folder: str) -> None:
    """Compare calls of the worker's group with torch's, in batches of 1 to 64, and write what Sidelane has made."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    served = group.ca_comm if BACKEND == "sidelane" else None
    counts = {} if served is None else dict(served.counts)
    assert BACKEND != "sidelane" or counts.get("all_reduce", 0) > 0, counts
    if VARIANT == "norms" and served is not None:
        assert counts["all_reduce_rms_norm"] > 0, counts
    rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(group.rank_in_group)).bfloat16()
    rows = rows.to(group.device)
    everyone = [torch.empty_like(rows) for _ in range(group.world_size)]
    torch.distributed.all_gather(everyone, rows, group=group.device_group)
    total = torch.stack([each.float() for each in everyone]).sum(0).bfloat16()
    for batch in range(1, 65):
        assert torch.equal(group.all_reduce(rows[:batch].clone()), total[:batch]), batch
    mine = slice(group.rank_in_group * 32, (group.rank_in_group + 1) * 32)
    part, whole = torch.empty_like(rows[:32]), torch.empty_like(rows).repeat(2, 1)
    kernels = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)  # SGLang registers these operators for GPUs only
    torch.ops.sglang.reg_reduce_scatter_tensor.default.redispatch(kernels, part, rows.clone(), group.unique_name)
    torch.ops.sglang.reg_all_gather_into_tensor.default.redispatch(kernels, whole, rows, group.unique_name)
    assert torch.equal(part, total[mine]) and torch.equal(whole, torch.cat(everyone))
    if served is not None:
        assert served.counts["reduce_scatter"] == served.counts["all_gather"] == 1, served.counts
    if group.rank_in_group == 0:
        Path(folder, "counts.json").write_text(json.dumps(counts))


if __name__ == "__mp_main__":  # a process of SGLang: its engine calls methods of the schedulers by name
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.check = check
    if VARIANT == "deterministic":
        os.environ["SGLANG_ENABLE_DETERMINISTIC_INFERENCE"] = "1"  # the engine refuses this mode on CPUs


def main() -> None:
    if RANK:  # the engine starts the workers
        finish([])
        return
    settings()
    import sglang

    draws = random.Random(0)
    prompts = [[draws.randrange(256) for _ in range(draws.randrange(4, 40))] for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        engine = sglang.Engine(
            model_path=checkpoint(folder),
            skip_tokenizer_init=True,
            device="cuda" if GPUS else "cpu",
            tp_size=RANKS,
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_radix_cache=True,
            disable_overlap_schedule=True,
            max_total_tokens=4096,
            mem_fraction_static=0.3,
        )
        try:
            found = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 16})
            engine.collective_rpc("check", folder=folder)
            counts = json.loads(Path(folder, "counts.json").read_text())
        finally:
            engine.shutdown()
    rows = [{"where": "sidelane", "operation": name, "why": "", "calls": count} for name, count in counts.items()]
    finish(chain(*(each["output_ids"] for each in found)), rows)


if __name__ == "__main__":
    main()
