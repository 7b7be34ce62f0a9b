"""Time a DDP step of a public Llama by who averages the gradients: NCCL, ``ddp.enable``, Sidelane's group, nobody.

Run by hand on GPUs of one node, with transformers installed:

    torchrun --nproc-per-node 2 tests/device/ddp_step.py --model 1g --batch 1

Ways take turns in one process. It prints the median, fastest and slowest round of the slowest rank, and how long the
host takes for a backward pass: where that is nearly the whole step, the host is what limits it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import sidelane
from sidelane import ddp
from sidelane.integrations.registration import register

WAYS = ("nccl", "enable", "group", "none")
VOCABULARY = 32000
MODELS = {  # hidden, intermediate, layers, heads, key-value heads
    "0.5g": (1024, 4096, 24, 16, 16),
    "8layers": (2048, 5632, 8, 16, 16),
    "1g": (2048, 5632, 16, 32, 8),
}


def llama(name: str, device: torch.device) -> LlamaForCausalLM:
    hidden, intermediate, layers, heads, kv_heads = MODELS[name]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attn_implementation="sdpa",
        use_cache=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM(config).bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="1g")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    register()
    tokens = torch.randint(
        VOCABULARY,
        (options.batch, options.length),
        device=device,
        generator=torch.Generator(device).manual_seed(dist.get_rank()),
    )
    runs = {way: made(way, options, device) for way in options.ways.split(",")}
    times: dict[str, list[float]] = {way: [] for way in runs}
    backward: dict[str, list[float]] = {way: [] for way in runs}
    losses: dict[str, torch.Tensor] = {}

    def step(way: str) -> None:
        model, optimizer = runs[way]
        with model.no_sync() if way == "none" else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
            began = time.perf_counter()
            loss.backward()
            backward[way].append(1e3 * (time.perf_counter() - began))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[way] = loss.detach()

    for way in runs:
        for _ in range(6):
            step(way)
    order = list(runs)
    for number in range(options.rounds):
        turn = number % len(order)
        for way in order[turn:] + order[:turn]:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(options.steps):
                step(way)
            torch.cuda.synchronize()
            times[way].append(1e3 * (time.perf_counter() - began) / options.steps)
    for way, each in times.items():
        found = torch.tensor([statistics.median(each), min(each), max(each)], device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            median, least, most = found.tolist()
            print(
                f"{options.model} x {options.batch}  {way:8} {median:7.2f} ms a step ({least:.2f} to {most:.2f}); "
                f"the host in backward {statistics.median(backward[way]):.2f}; loss {losses[way].item():.6f}",
                flush=True,
            )
    if dist.get_rank() == 0:
        for row in sidelane.report().rows:
            if "all_reduce" in row.operation:
                print(f"    {row.operation} {row.calls} calls by {row.where}: {row.why}", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # what is timed has ended, and nothing is to be given back in order


def made(
    way: str, options: argparse.Namespace, device: torch.device
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    group = dist.new_group(backend="sidelane") if way == "group" else dist.group.WORLD
    model = DistributedDataParallel(
        llama(options.model, device), process_group=group, gradient_as_bucket_view=options.views
    )
    if way == "enable":
        ddp.enable(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


if __name__ == "__main__":
    main()
