"""Time a forward pass of a public Llama under tensor parallelism by who makes the collectives, in four ways to run it.

Run by hand on GPUs of one node, with transformers installed; on CPU ranks it only shows that it works:

    PYTHONPATH=contrib/fusion torchrun --nproc-per-node 2 contrib/fusion/tensor_step.py

The makers are NCCL, a Sidelane group, and that group with the compiler pass ``Fusion``, which compiled programs alone
can have. All take turns in one process. It prints the median, fastest and slowest round of the slowest rank, and how
far the result is from that of NCCL's eager pass. A way that fails prints its error, and the others go on.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable

# A graph from a cache would say nothing of what was fused. Compiled kernels may come from theirs.
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import sidelane
from sidelane.integrations.registration import register
from sidelane_fusion import Fusion

GPUS = torch.cuda.is_available()
SHAPES = {"decode": (8, 1, 20), "prefill": (1, 2048, 4)}  # batch, length, passes of a round
WAYS = ("eager", "eager graph", "compiled", "compiled graph")  # and "compiled trees": graphs that torch makes itself
MAKERS = ("nccl", "group", "fusion")
PLAN = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel for name in ("gate", "up")},
    "model.layers.*.self_attn.o_proj": RowwiseParallel,
    "model.layers.*.mlp.down_proj": RowwiseParallel,
}
Run = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--makers", default=",".join(MAKERS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
    if GPUS:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if GPUS else "gloo", device_id=device if GPUS else None)
    register()
    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1 if not GPUS else torch.get_num_threads())
    agreement = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=120))
    ours = dist.new_group(backend="sidelane")
    groups = {"nccl": dist.group.WORLD, "group": ours, "fusion": ours}
    models = {group: llama(options, group, device) for group in dict.fromkeys(groups.values())}
    comm = sidelane.Communicator(ours, device=device)
    for shape in options.shapes.split(","):
        batch, length, passes = SHAPES[shape]
        words = torch.randint(32000, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
        runs: dict[tuple[str, str], Run] = {}
        for maker in options.makers.split(","):
            for way in options.ways.split(","):
                if (maker == "fusion" and "compiled" not in way) or (way.endswith(("graph", "trees")) and not GPUS):
                    continue
                compiled = runs.get((maker, "compiled")) if way == "compiled graph" else None
                began, fusion = time.perf_counter(), Fusion(comm, ours) if maker == "fusion" else None
                run = tried(
                    f"{shape} {maker} {way}",
                    agreement,
                    functools.partial(made, models[groups[maker]], words, way, fusion, compiled),
                )
                if run is not None:
                    runs[maker, way] = run
                    said = f" {dict(Counter(fusion.replaced))}" if fusion is not None and fusion.replaced else ""
                    tell(f"{shape}  {maker:6} {way}: ready in {time.perf_counter() - began:.0f} s{said}")
        measure(shape, runs, passes, options.rounds, agreement, device)
        runs.clear()
        torch._dynamo.reset()
    for row in sidelane.report().rows:
        tell(f"    {row.operation} {row.calls} calls by {row.where}: {row.why}")
    wait(device)
    dist.barrier(agreement)
    os._exit(0)  # what is timed has ended, and nothing is to be given back in order


def llama(options: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> LlamaForCausalLM:
    """Return the model on a group, with the same weights on each."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(2, options.hidden // 512),
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)
    # To DTensor, which keeps what it has found for a mesh, meshes of the same ranks and names are the same one.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"tensor_{group.group_name}",))
    return parallelize_module(model, mesh, {name: style() for name, style in PLAN.items()})


def made(model: LlamaForCausalLM, words: torch.Tensor, way: str, fusion: Fusion | None, compiled: Run | None) -> Run:
    """Return a pass of the model in one of the ways, warmed up."""
    call = model
    if "compiled" in way and compiled is None:
        options = {} if fusion is None else {"post_grad_custom_pre_pass": fusion}
        call = torch.compile(model, dynamic=False, options=options | {"triton.cudagraphs": way == "compiled trees"})

    def run() -> torch.Tensor:
        if way == "compiled trees":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return call(input_ids=words, use_cache=False, logits_to_keep=1).logits

    run = compiled or run
    for _ in range(4):
        run()
    if "graph" not in way:
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    for _ in range(4):
        replay()
    return replay


def measure(
    shape: str,
    runs: dict[tuple[str, str], Run],
    passes: int,
    rounds: int,
    agreement: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Time all ways in turns, and print them."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    order = list(runs)

    def timed(run: Run) -> float:
        dist.barrier(agreement)
        began = time.perf_counter()
        for _ in range(passes):
            run()
        wait(device)
        return 1e3 * (time.perf_counter() - began) / passes

    for number in range(rounds):
        turn = number % max(1, len(order))
        for key in order[turn:] + order[:turn]:
            if key not in runs:
                continue
            found = tried(f"{shape} {' '.join(key)}", agreement, functools.partial(timed, runs[key]))
            if found is None:
                runs.pop(key)
            else:
                times[key].append(found)
    results = {key: run().float() for key, run in runs.items()}
    wanted = results.get(("nccl", "eager"), next(iter(results.values()), None))
    for key, result in results.items():
        each = times[key]
        found = torch.tensor([statistics.median(each), min(each), max(each)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=agreement)
        far = ((result - wanted).abs().max() / wanted.abs().max()).item()
        tell(
            f"{shape}  {key[0]:6} {key[1]:14} {found[0]:8.3f} ms a pass ({found[1]:.3f} to {found[2]:.3f}); "
            f"largest difference {far:.1e} of the largest logit"
        )


def tried(what: str, agreement: dist.ProcessGroup, function: Callable[[], object]) -> object:
    """Return what a function returns on all ranks, or None after an error on any, which is printed."""
    result, failed = None, torch.zeros(1)
    try:
        result = function()
    except Exception:
        print(f"{what}: FAILED on rank {dist.get_rank()}\n{traceback.format_exc()[-1500:]}", flush=True)
        failed += 1
    dist.all_reduce(failed, group=agreement)
    return None if failed.item() else result


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tell(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
