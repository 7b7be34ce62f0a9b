"""Measure vLLM's whole engine in decoding, with or without Sidelane, on random weights: one row for each batch.

    VLLM_PLUGINS=none python results/scripts/vllm_engine.py --out none.json
    VLLM_PLUGINS=sidelane python results/scripts/vllm_engine.py --out sidelane.json

The model is a Llama with the shapes of 3.1 8B, or 3.2 3B (``--model``), whose weights vLLM makes up; no tokenizer is
needed, since prompts are numbers. ms_per_token is the time of a step: the difference of two runs that differ by 96
tokens, the best of several. Tokens of a batch are compared by their hash, which ``--out`` has, too. Two engines that
are started at once, with ``--meet FOLDER``, wait for each other, and then measure in turns: neither is alone in a clock
or a cache that the other one does not have.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """Have the GPUs alone, among the engines that share the folder; they alternate."""
    if folder is None:
        yield
        return
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    time.sleep(0.05)  # another engine, which waits for the lock, takes it


def meet(folder: Path, engines: int = 2, seconds: float = 100.0) -> None:
    """Wait until all engines are ready, or have ended and a file ``ready-`` was left in their place."""
    Path(folder, f"ready-{os.getpid()}").touch()
    until = time.monotonic() + seconds
    while len([*folder.glob("ready-*")]) < engines and time.monotonic() < until:
        time.sleep(0.01)


def calls(_worker: Any) -> dict[str, int]:
    """Return the calls that Sidelane has made for the tensor-parallel group of a worker, by method."""
    from vllm.distributed import get_tp_group

    served = getattr(get_tp_group().device_communicator, "sidelane", None)
    return {} if served is None else dict(served.counts)


def main() -> None:
    """Make the engine, generate, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", choices=[*MODELS])
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of vllm.LLM, in JSON")
    parser.add_argument("--meet", type=Path, help="folder that two engines share, which measure in turns")
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
    if options.meet:
        meet(options.meet)
    rows = []
    for sequences in options.sequences:
        prompts = [
            {"prompt_token_ids": [(7 * at + 31 * i) % 1000 + 5 for at in range(PROMPT)]} for i in range(sequences)
        ]
        best: dict[int, float] = {}
        for _ in range(options.rounds):
            with turn(options.meet):
                for tokens in SHORT, LONG:
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
            about = {"study": "servers", "options": options.options, "command": " ".join(sys.argv), "rows": rows}
            options.out.write_text(json.dumps(about, indent=1))
    with contextlib.suppress(Exception):  # vLLM serializes functions if VLLM_ALLOW_INSECURE_SERIALIZATION=1
        print("Sidelane's calls, those of a graph counted once:", engine.collective_rpc(calls), flush=True)


if __name__ == "__main__":
    main()
