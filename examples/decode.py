"""Decode with a model that is spread over the ranks (tensor parallel), by NCCL or Gloo and by a fused operator.

Each half of a layer ends with a sum over the ranks, a residual and a norm: three calls, or one kernel.

torchrun --nproc-per-node 2 examples/decode.py        (--dim, --layers, --tokens; CPU ranks by Triton's interpreter)
"""

import argparse
import os
import time

import torch

gpu = torch.cuda.is_available()
if not gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch.distributed as dist
from torch.nn import functional

from sidelane import Communicator, ops

BATCH, HEAD, VOCABULARY = 2, 16 if not gpu else 128, 256


class Shard:
    """This rank's heads and hidden features of every layer; embedding, norms and the last layer are whole."""

    def __init__(self, dim: int, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        draw = torch.Generator(device).manual_seed(0)  # the whole model on every rank, of which each keeps its part

        def weights(rows: int, columns: int, cut: int | None = None) -> torch.Tensor:
            whole = torch.randn(rows, columns, generator=draw, device=device) * columns**-0.5
            return (whole if cut is None else whole.chunk(ranks, dim=cut)[rank]).to(dtype).contiguous()

        self.embed, self.out = weights(VOCABULARY, dim), weights(VOCABULARY, dim)
        self.norm = torch.ones(dim, device=device, dtype=dtype)
        self.layers = [
            (
                [weights(dim, dim, 0) for _ in "qkv"],
                weights(dim, dim, 1),
                weights(4 * dim, dim, 0),
                weights(dim, 4 * dim, 1),
            )
            for _ in range(layers)
        ]


def decode(shard: Shard, tokens: int, sum_and_norm) -> tuple[torch.Tensor, float]:
    """Tokens [BATCH, tokens], each the likeliest one, and tokens a second."""
    token = torch.arange(BATCH, device=shard.embed.device)
    caches: list[list[torch.Tensor]] = [[] for _ in shard.layers]
    found, began = [], 0.0
    for step in range(tokens):
        if step == 1:  # the first one makes what it needs
            if gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
        residual = shard.embed[token]
        x = functional.rms_norm(residual, shard.norm.shape, shard.norm, 1e-6)
        for (qkv, out, up, down), cache in zip(shard.layers, caches, strict=True):
            q, k, v = ((x @ weight.T).view(BATCH, -1, 1, HEAD) for weight in qkv)
            if cache:
                k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
            cache[:] = k, v
            attended = functional.scaled_dot_product_attention(q, k, v).reshape(BATCH, -1)
            x, residual = sum_and_norm(attended @ out.T, residual, shard.norm)
            x, residual = sum_and_norm(functional.silu(x @ up.T) @ down.T, residual, shard.norm)
        token = (x @ shard.out.T).argmax(dim=-1)
        found.append(token)
    result = torch.stack(found, dim=1).cpu()
    return result, BATCH * (tokens - 1) / (time.perf_counter() - began)


def in_three_calls(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dist.all_reduce(x)
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, 1e-6), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, on_gpu, on_cpu in (("dim", 4096, 64), ("layers", 16, 2), ("tokens", 128, 4)):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    sizes = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # processes that share cores
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = Shard(sizes.dim, sizes.layers, device, torch.bfloat16 if gpu else torch.float32)
    with torch.no_grad(), Communicator(device=device) as comm:
        ways = {
            "without Sidelane": in_three_calls,
            "with": lambda x, residual, weight: ops.all_reduce_rms_norm(comm, x, residual, weight),
        }
        done = {name: decode(shard, sizes.tokens, way) for name, way in ways.items()}
        alike = (done["with"][0] == done["without Sidelane"][0]).float().mean().item()
        comm.synchronize()
    assert gpu or alike == 1  # bfloat16 sums are rounded otherwise, and a close second may win
    print(f"rank {rank} of {world_size} on {device}: {alike:.0%} of the tokens are the same both ways")
    if rank == 0:
        print("tokens a second: " + ", ".join(f"{rate:.0f} {name}" for name, (_, rate) in done.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
