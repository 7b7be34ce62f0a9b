"""vLLM's engine with a small Llama of random weights, split over the ranks: greedy tokens of eight requests, and of one
alone. vLLM takes Sidelane by its plug-in, so that ``gloo`` is vLLM as it is.

The variants: ``eager``, ``compiled`` by vLLM's own configuration for CPUs, and ``invariant``, its batch-invariant mode.
The kernels of that mode need a GPU, and torch's own take their place on CPUs; sums are compared bit by bit there.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from itertools import chain
from typing import Any

from client import BACKEND, GPUS, RANK, RANKS, finish

VARIANT = sys.argv[2] if len(sys.argv) > 2 else "eager"
os.environ["VLLM_PLUGINS"] = "sidelane" if BACKEND == "sidelane" else "none"
os.environ |= {"VLLM_BATCH_INVARIANT": str(int(VARIANT == "invariant")), "VLLM_NO_USAGE_STATS": "1"}
if not GPUS:
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def checkpoint(folder: str) -> str:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, initializer_range=0.3, **heads
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def calls() -> list[dict[str, Any]]:
    """Return the calls that Sidelane made for vLLM's tensor-parallel group, as rows of a report."""
    from vllm.distributed import get_tp_group

    served = getattr(get_tp_group().device_communicator, "sidelane", None)
    counts = {} if served is None else served.counts
    return [{"where": "sidelane", "operation": name, "why": "", "calls": count} for name, count in counts.items()]


def compare_batches() -> None:
    """Compare the sums of rows in batches of 1 to 64, through vLLM's group."""
    from vllm.distributed import get_tp_group

    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(RANK)).bfloat16()
    whole = get_tp_group().all_reduce(rows.clone())
    for batch in range(1, 65):
        assert torch.equal(get_tp_group().all_reduce(rows[:batch].clone()), whole[:batch]), batch


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.determinism import batch_invariant

    if not GPUS:
        batch_invariant.enable_batch_invariant_mode = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=checkpoint(folder),
            tensor_parallel_size=RANKS,
            distributed_executor_backend="external_launcher",
            skip_tokenizer_init=True,
            enforce_eager=VARIANT != "compiled",
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=64,
            seed=0,
        )
    draws = random.Random(0)
    prompts = [[draws.randrange(512) for _ in range(draws.randrange(4, 40))] for _ in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)

    def tokens(prompts: list[list[int]]) -> list[list[int]]:
        found = engine.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    together, alone = tokens(prompts), tokens(prompts[:1])
    if VARIANT == "invariant":
        assert alone == together[:1], "the tokens of a request depend on its batch"
        compare_batches()
    finish(chain(*together, *alone), calls())


if __name__ == "__main__":
    main()
