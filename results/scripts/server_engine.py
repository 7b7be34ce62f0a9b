"""Measure a server's whole engine in decoding, with or without Sidelane, on random weights: one row for each batch.

    VLLM_PLUGINS=none python results/scripts/server_engine.py vllm --out none.json
    VLLM_PLUGINS=sidelane python results/scripts/server_engine.py vllm --out sidelane.json

For ``sglang`` the variable is ``SGLANG_PLUGINS``. The model is a Llama with the shapes of 3.1 8B, or 3.2 3B
(``--model``), whose weights the server makes up; no tokenizer is needed, since prompts are numbers. ms_per_token is the
time of a step: the difference of two runs that differ by 96 tokens, the median of ms_of_rounds, without the first
round, in which the server meets the batch for the first time. Tokens of a batch are compared by their hash, which
``--out`` has, too; random weights are so small that sums hardly change a token. ``--profile`` prints what each kernel
takes of a step, and how long after the end of the kernel before it ends. Engines that are started at once, with
``--meet FOLDER --engines N``, wait for each other, and then measure in turns: none is alone in a clock or a cache that
the others do not have.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODELS = {"llama-3.1-8b": (32, 4096, 14336, 32), "llama-3.2-3b": (28, 3072, 8192, 24), "tiny": (2, 256, 512, 4)}
"""Layers, widths of the model and of its feed-forward layers, heads of queries; heads of keys are 8, or 2 of tiny."""

PROMPT, SHORT, LONG = 128, 8, 104

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""A function from prompts and a number of tokens to the tokens that an engine adds to each prompt, by greedy choice."""


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


def vllm_engine(folder: str, options: argparse.Namespace) -> tuple[str, Generate]:
    """Start vLLM's offline engine, and return its version and how it generates."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # the choice is greedy, FlashInfer need not be there
    from vllm import LLM, SamplingParams, __version__

    engine = LLM(
        folder,
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

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        asked = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        answers = engine.generate([{"prompt_token_ids": each} for each in prompts], asked, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return __version__, generate


def sglang_engine(folder: str, options: argparse.Namespace) -> tuple[str, Generate]:
    """Start SGLang's offline engine, and return its version and how it generates."""
    import sglang
    from sglang.version import __version__

    given = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tp_size": options.tensor_parallel_size,
        "context_length": 1024,
        "max_running_requests": max(options.sequences),
        "cuda_graph_bs_decode": options.sequences,
        "disable_prefill_cuda_graph": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 65536,
    }
    engine = sglang.Engine(model_path=folder, **{**given, **options.options})
    options.engine = engine

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        asked = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
        return [list(each["output_ids"]) for each in engine.generate(input_ids=prompts, sampling_params=asked)]

    return __version__, generate


def print_kernels(folder: Path, steps: int) -> None:
    """Print the kernels of a step in the first rank's trace: how many, and microseconds until each one's end."""
    trace = min(folder.glob("*.json.gz"), key=str)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = sorted((each["ts"], each["dur"], each["name"]) for each in events if each.get("cat") == "kernel")
    found: dict[str, list[tuple[float, float]]] = {}
    before = kernels[0][0]
    for began, took, name in kernels:
        found.setdefault(name, []).append((took, max(0.0, began + took - before)))
        before = max(before, began + took)
    for name, times in sorted(found.items(), key=lambda each: -sum(took for took, _ in each[1])):
        own, until = (sum(each) / len(times) for each in zip(*times, strict=True))
        print(f"{len(times) / steps:8.2f} a step {own:8.2f} us {until:8.2f} us from the end before  {name[:90]}")


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


def meet(folder: Path, engines: int, seconds: float = 100.0) -> None:
    """Wait until all engines are ready, or have ended and a file ``ready-`` was left in their place."""
    Path(folder, f"ready-{os.getpid()}").touch()
    until = time.monotonic() + seconds
    while len([*folder.glob("ready-*")]) < engines and time.monotonic() < until:
        time.sleep(0.01)


def main() -> None:
    """Make the engine, generate, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", choices=["vllm", "sglang"])
    parser.add_argument("--model", default="llama-3.1-8b", choices=[*MODELS])
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of the engine, in JSON")
    parser.add_argument("--meet", type=Path, help="folder that several engines share, which measure in turns")
    parser.add_argument("--engines", type=int, default=2, help="number of these engines")
    parser.add_argument("--profile", type=Path, help="folder for traces of SGLang's steps, whose kernels are printed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="server-engine-"))
    (folder / "config.json").write_text(json.dumps(config_of(options.model)))
    began = time.perf_counter()
    version, generate = {"vllm": vllm_engine, "sglang": sglang_engine}[options.server](str(folder), options)
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    if options.meet:
        meet(options.meet, options.engines)
    rows = []
    for sequences in options.sequences:
        prompts = [[(7 * at + 31 * i) % 1000 + 5 for at in range(PROMPT)] for i in range(sequences)]
        times: dict[int, list[float]] = {SHORT: [], LONG: []}
        for _ in range(options.rounds):
            with turn(options.meet):
                for tokens in SHORT, LONG:
                    started = time.perf_counter()
                    answers = generate(prompts, tokens)
                    times[tokens].append(time.perf_counter() - started)
        rounds = [round(1e3 * (b - a) / (LONG - SHORT), 4) for a, b in zip(*times.values(), strict=True)][1:]
        ms = statistics.median(rounds)
        plugins = os.environ.get(f"{options.server.upper()}_PLUGINS", "")
        rows.append(
            {
                "server": options.server,
                "study": "engine",
                "version": version,
                "model": options.model,
                "sequences": sequences,
                "implementation": "sidelane" if "sidelane" in plugins else options.server,
                "ms_per_token": round(ms, 4),
                "ms_of_rounds": rounds,
                "tokens_per_second": round(1e3 * sequences / ms, 1),
                "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
                "tokens_hash": hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:12],
                "commit": os.environ.get("SIDELANE_COMMIT", ""),
            }
        )
        print(rows[-1], flush=True)
        if options.out:
            about = {"study": "servers", "options": options.options, "command": " ".join(sys.argv), "rows": rows}
            options.out.write_text(json.dumps(about, indent=1))
        if options.profile:
            traces = options.profile / str(sequences)
            with turn(options.meet):
                options.engine.start_profile(output_dir=str(traces), activities=["GPU"])
                generate(prompts, LONG)
                options.engine.stop_profile()
            print_kernels(traces, LONG)


if __name__ == "__main__":
    main()
