"""Measure vLLM's whole engine in decoding, with or without Sidelane, on random weights: one row for each batch.

    VLLM_PLUGINS=none python results/scripts/vllm_engine.py --out none.json
    VLLM_PLUGINS=sidelane python results/scripts/vllm_engine.py --out sidelane.json

The model is a Llama with the shapes of 3.1 8B, or 3.2 3B (``--model``), whose weights vLLM makes up; no tokenizer is
needed, since prompts are numbers. ms_per_token is the time of a step: the difference of two runs that differ by 96
tokens, the best of several. Tokens of the first batch are compared by their hash, which ``--out`` has, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, __version__

MODELS = {"llama-3.1-8b": (32, 4096, 14336, 32), "llama-3.2-3b": (28, 3072, 8192, 24), "tiny": (2, 256, 512, 4)}
"""Layers, widths of the model and of its feed-forward layers, heads of queries; heads of keys are 8, or 2 of tiny."""

PROMPT, SHORT, LONG = 128, 8, 104


def config_of(model: str) -> dict[str, Any]:
    """Return the configuration of a model, as transformers reads it."""
    layers, hidden, inner, heads = MODELS[model]
    shapes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "head_dim": 128}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": min(8, max(2, heads // 2))}
    rest = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    return {**rest, **shapes, **heads_of, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}


def main() -> None:
    """Make the engine, generate, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", choices=[*MODELS])
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of vllm.LLM, in JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vllm-engine-"))
    (folder / "config.json").write_text(json.dumps(config_of(options.model)))
    began = time.perf_counter()
    engine = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=1024,
        max_num_seqs=max(options.sequences),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        disable_log_stats=True,
        **{"compilation_config": {"cudagraph_capture_sizes": options.sequences}, **options.options},
    )
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    rows = []
    for sequences in options.sequences:
        prompts = [
            {"prompt_token_ids": [(7 * at + 31 * i) % 1000 + 5 for at in range(PROMPT)]} for i in range(sequences)
        ]
        best: dict[int, float] = {}
        for tokens in [SHORT, LONG] * options.rounds:
            asked = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
            started = time.perf_counter()
            answers = engine.generate(prompts, asked, use_tqdm=False)
            took = time.perf_counter() - started
            best[tokens] = min(best.get(tokens, took), took)
        ms = 1e3 * (best[LONG] - best[SHORT]) / (LONG - SHORT)
        text = json.dumps([list(answer.outputs[0].token_ids) for answer in answers])
        rows.append(
            {
                "server": "vllm",
                "study": "engine",
                "version": __version__,
                "model": options.model,
                "sequences": sequences,
                "implementation": "vllm" if "sidelane" not in os.environ.get("VLLM_PLUGINS", "") else "sidelane",
                "ms_per_token": round(ms, 4),
                "tokens_per_second": round(1e3 * sequences / ms, 1),
                "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
                "tokens_hash": hashlib.sha256(text.encode()).hexdigest()[:12],
            }
        )
        print(rows[-1], flush=True)
    if options.out:
        options.out.write_text(json.dumps({"study": "servers", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
