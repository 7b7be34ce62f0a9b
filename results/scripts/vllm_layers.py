"""Measure a step of decoding by a Llama of vLLM's layers, for each way of vLLM to add between GPUs, and for Sidelane.

    torchrun --nproc-per-node 2 results/scripts/vllm_layers.py --out results/h200x2/servers.json
    VLLM_BATCH_INVARIANT=1 torchrun ... --out servers-invariant.json

vLLM must be importable: installed, or its Python files and the CUDA library of one version on PYTHONPATH. The layers
are vLLM's (linear layers, norms, activation, head), with random weights; the attention is torch's over a static cache,
and there is no rotary embedding, in all ways alike. Each way has a communicator of vLLM's class and a CUDA graph of the
step, by vLLM's own ``graph_capture``; all are replayed in turns in one process. The time is that of the slowest rank,
the median of the rounds. A way that fails, or whose numbers are not those of NCCL (``off``, the norm of the difference
in parts of the norm; the fused operator does not round the sum, so that 64 norms in a row differ by a few percent), is
a row without a time.

``nccl``: custom all-reduce and symmetric memory off. ``custom``, ``symm_mem``: one of them. ``vllm``: vLLM's defaults.
``sidelane``: the plug-in's communicator. ``sidelane_norm``: the same with the operator that the plug-in's pass inserts.
The model ``sums`` is 64 all-reduces of [sequences, 4096], each with the norm after it: what a size of sums takes. It is
measured for all powers of two up to the most sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_PLUGINS"] = "none"  # the ways make their communicators themselves

import torch
import torch.distributed as dist
import torch.nn.functional as F
import vllm
from torch import nn
from vllm import envs, ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from sidelane.servers.group import norm_operator
from sidelane.servers.vllm import device_communicator, group_norms
from sidelane_lab.harness import provenance

GPUS = torch.cuda.is_available()
MODELS = {
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128256),
    "tiny": (2, 256, 512, 4, 2, 512),
    "sums": (64, 4096),
}
"""Layers, widths of the model and of its feed-forward layers, heads of queries and of keys, vocabulary."""

SHOWN = ("model", "sequences", "implementation", "ms_per_token", "off", "batch_invariant", "peers", "note")
WIDTH, CONTEXT, EPS = 128, 512, 1e-5
DTYPE = torch.bfloat16
WAYS: dict[str, tuple[bool, dict[str, str]]] = {
    "nccl": (False, {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}),
    "custom": (True, {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}),
    "symm_mem": (False, {"VLLM_ALLREDUCE_USE_SYMM_MEM": "1", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}),
    "vllm": (not envs.VLLM_BATCH_INVARIANT, {}),  # vLLM switches its kernel off in the mode
    "sidelane": (True, {}),
    "sidelane_norm": (True, {}),
}
"""Ways: if their communicator has vLLM's custom all-reduce, and their variables."""


class Layer(nn.Module):
    """A layer of a Llama; both of its sums end in a norm, which :meth:`normalised` makes as the way does."""

    def __init__(self, hidden: int, inner: int, heads: int, keys: int) -> None:
        super().__init__()
        options = {"bias": False, "params_dtype": DTYPE}
        self.qkv = QKVParallelLinear(hidden, WIDTH, heads, keys, **options)
        self.out = RowParallelLinear(heads * WIDTH, hidden, reduce_results=False, **options)
        self.up = MergedColumnParallelLinear(hidden, [inner] * 2, **options)
        self.down = RowParallelLinear(inner, hidden, reduce_results=False, **options)
        self.activation = SiluAndMul()
        self.norms = nn.ModuleList(RMSNorm(hidden, EPS, dtype=DTYPE) for _ in range(2))

    def forward(self, x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor, fused: bool) -> Any:
        size = self.qkv.num_heads * WIDTH
        query, key, value = self.qkv(x)[0].split([size, *[self.qkv.num_kv_heads * WIDTH] * 2], -1)
        heads = [each.view(len(x), -1, 1, WIDTH) for each in (query, key, value)]
        cache[0, :, :, -1:], cache[1, :, :, -1:] = heads[1], heads[2]
        mixed = F.scaled_dot_product_attention(heads[0], cache[0], cache[1], enable_gqa=True)
        x, residual = normalised(self.out(mixed.reshape(len(x), size))[0], residual, self.norms[0], fused)
        return normalised(self.down(self.activation(self.up(x)[0]))[0], residual, self.norms[1], fused)


def normalised(part: torch.Tensor, residual: torch.Tensor, norm: Any, fused: bool) -> Any:
    """Return the norm of the ranks' sum and the residual, and the residual that follows."""
    group = parallel_state.get_tp_group()
    if fused:
        operator = norm_operator("vllm", group_norms)
        return operator(part, residual, norm.weight, EPS, group.unique_name, None)[:2]
    return norm(group.all_reduce(part), residual)


class Decoder(nn.Module):
    """The layers, and the head, whose parts are gathered."""

    def __init__(self, layers: int, hidden: int, inner: int, heads: int, keys: int, words: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, inner, heads, keys) for _ in range(layers))
        self.head = ColumnParallelLinear(hidden, words, bias=False, gather_output=True, params_dtype=DTYPE)
        for each in self.modules():
            if isinstance(getattr(each, "weight", None), nn.Parameter) and each.weight.dim() == 2:
                nn.init.normal_(each.weight, std=0.02)
                if not GPUS:
                    each.cpu_linear = F.linear

    def forward(self, x: torch.Tensor, caches: torch.Tensor, fused: bool) -> torch.Tensor:
        residual = torch.zeros_like(x)
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, cache, fused)
        return self.head(x)[0]


class Sums(nn.Module):
    """All-reduces, each with the norm behind it."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(hidden, EPS, dtype=DTYPE) for _ in range(layers))

    def forward(self, x: torch.Tensor, _caches: torch.Tensor, fused: bool) -> torch.Tensor:
        residual, x = torch.zeros_like(x), x.clone()
        for norm in self.norms:
            x, residual = normalised(x, residual, norm, fused)
        return x


def communicators(names: list[str]) -> dict[str, Any]:
    """Make the communicator of each way for vLLM's tensor-parallel group; that of symmetric memory may be off."""
    group, found = parallel_state.get_tp_group(), {}
    base = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    for name in names:
        custom, variables = WAYS[name]
        before = {variable: os.environ.get(variable) for variable in variables}
        os.environ.update(variables, VLLM_DIST_IDENT=f"layers-{name}-{os.getppid()}")  # of memory between CPU ranks
        parallel_state._ENABLE_CUSTOM_ALL_REDUCE = custom
        made = device_communicator(base) if name.startswith("sidelane") else base
        if name == "sidelane_norm" and "sidelane" in found:
            found[name] = found["sidelane"]
        else:
            found[name] = made(
                cpu_group=group.cpu_group,
                device=group.device,
                device_group=group.device_group,
                unique_name=group.unique_name,
            )
        for variable, value in before.items():
            os.environ.pop(variable) if value is None else os.environ.update({variable: value})
    return found


def captured(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """Return the replay of a step in a CUDA graph, and its output; on CPUs the step itself."""
    if not GPUS:
        output = step()
        return lambda: output.copy_(step()), output
    graph = torch.cuda.CUDAGraph()
    with parallel_state.get_tp_group().graph_capture() as context:
        step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=context.stream):
            output = step()
    return graph.replay, output


def ms_of(replay: Callable[[], object], steps: int) -> float:
    """Return the milliseconds of a step, on the slowest rank."""
    group = parallel_state.get_tp_group()
    if not GPUS:
        import time

        began = time.perf_counter()
        replay()
        own = 1e3 * (time.perf_counter() - began)
    else:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier(group.cpu_group)
        begin.record()
        for _ in range(steps):
            replay()
        end.record()
        end.synchronize()
        own = begin.elapsed_time(end) / steps
    slowest = torch.tensor([own], dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.cpu_group)
    return float(slowest)


def decoder_of(model: str) -> nn.Module:
    """Make a model with random weights, on the device."""
    group, (layers, hidden, *rest) = parallel_state.get_tp_group(), MODELS[model]
    torch.manual_seed(1 + group.rank_in_group)
    with torch.device(group.device):
        return Decoder(layers, hidden, *rest) if rest else Sums(layers, hidden)


def why_off(name: str, communicator: Any) -> str:
    """Return why a way is not what its name says; an empty text if it is."""
    parts = {"symm_mem": "symm_mem_comm", "custom": "ca_comm", "sidelane": "sidelane", "sidelane_norm": "sidelane"}
    part = getattr(communicator, parts[name], None) if name in parts else communicator
    if part is None or getattr(part, "disabled", False):
        return f"it is off on this machine: {getattr(part, 'reason', '') or 'vLLM says why in its log'}"
    return str(getattr(part, "reason", "") or "") if name.startswith("sidelane") else ""


def measure(
    model: str, decoder: nn.Module, sequences: int, made: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each way."""
    group, (layers, hidden, *rest) = parallel_state.get_tp_group(), MODELS[model]
    keys = max(1, rest[2] // group.world_size) if rest else 0
    caches = torch.randn(layers, 2, sequences, keys, CONTEXT, WIDTH, dtype=DTYPE, device=group.device)
    x = torch.zeros(sequences, hidden, dtype=DTYPE, device=group.device)
    ways, notes = {}, {name: why for name, each in made.items() if (why := why_off(name, each))}
    for name, communicator in made.items():
        if name in notes:
            continue
        group.device_communicator = communicator
        try:
            ways[name] = captured(lambda name=name: decoder(x, caches, name == "sidelane_norm"))
        except Exception as error:
            traceback.print_exc()
            notes[name] = f"{type(error).__name__}: {error}"
        failed = [None] * group.world_size
        dist.all_gather_object(failed, notes.get(name), group=group.cpu_group)
        if any(failed):
            ways.pop(name, None)
            notes.setdefault(name, next(filter(None, failed)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    off: dict[str, float] = {}
    for round_ in range(options.rounds):
        torch.manual_seed(round_)  # the same on all ranks
        x.normal_()
        order = random.Random(round_).sample(sorted(ways), len(ways))
        for name in order:
            group.device_communicator = made[name]
            times[name].append(ms_of(ways[name][0], options.steps))
        wanted = ways[next(iter(ways))][1].float()
        for name in order:
            off[name] = float((ways[name][1].float() - wanted).norm() / wanted.norm())
            if not off[name] < 0.05:
                notes[name] = f"wrong by {off[name]:.3f} of the numbers' norm"
    rows = []
    for name in made:
        ms = None if name in notes else round(statistics.median(times[name]), 5)
        rows.append(
            {
                "server": "vllm",
                "version": vllm.__version__,
                "model": model,
                "sequences": sequences,
                "implementation": name,
                "ms_per_token": ms,
                "tokens_per_second": ms and round(1e3 * sequences / ms, 1),
                "spread_ms": ms and round(max(times[name]) - min(times[name]), 5),
                "off": ms and round(off[name], 5),
                "peers": os.environ.get("SIDELANE_PEERS", "nvlink"),
                "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
                "note": notes.get(name, ""),
            }
        )
    return rows


def main() -> None:
    """Measure all models, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["llama-3.1-8b", "llama-3.2-3b"] if GPUS else ["tiny"])
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=[*WAYS], help="the first one is the reference")
    parser.add_argument("--rounds", type=int, default=15 if GPUS else 2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if GPUS:
        torch.cuda.set_device(rank)
    os.environ["VLLM_DIST_IDENT"] = f"layers-{os.getppid()}"
    rows: list[dict[str, Any]] = []
    device, count = provenance.accelerator_name() if GPUS else (provenance.processor_name(), 0)
    about = {"study": "servers", "device": device, "gpus": count, "ranks": ranks, "commit": provenance.commit()}
    about |= {"command": provenance.command_line(), "software": provenance.software_versions()}
    if envs.VLLM_BATCH_INVARIANT:  # as vLLM's workers begin; vLLM's norm does not become one call with the sum there
        options.ways = [name for name in options.ways if name != "sidelane_norm"]
        if GPUS:
            from vllm.model_executor.layers.batch_invariant import init_batch_invariance

            init_batch_invariance()
    config = VllmConfig(compilation_config={"mode": 0, "custom_ops": ["all" if GPUS else "none"]})
    with set_current_vllm_config(config), torch.inference_mode():
        for kernels in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm) if GPUS else ():
            kernels.set_default(["vllm_c", "native"])  # as without a compiler: vLLM's own kernels
        parallel_state.init_distributed_environment(local_rank=rank, backend="nccl" if GPUS else "gloo")
        parallel_state.initialize_model_parallel(ranks)
        made = communicators(options.ways)
        for model in options.models:
            decoder = decoder_of(model)
            doubled = [1 << at for at in range(max(options.sequences).bit_length())]  # sums decide which sizes go back
            for sequences in doubled if model == "sums" else options.sequences:
                try:
                    rows += measure(model, decoder, sequences, made, options)
                except Exception:
                    traceback.print_exc()
                    continue
                for row in rows[-len(made) :] if rank == 0 else ():
                    print(" ".join(f"{key}={row[key]}" for key in SHOWN), flush=True)
                if options.out and rank == 0:
                    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1))
            del decoder
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
