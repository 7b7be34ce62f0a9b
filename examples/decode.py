"""Generate tokens with a Llama that is spread over the ranks (tensor parallel), by NCCL or Gloo, by a Sidelane group
and by Sidelane's operators.

Keys and values have a static cache, so that a step of decoding is one CUDA graph. Each half of a layer ends with a sum
over the ranks, a residual and a norm, which one operator does; in prefill, parts of the sum travel while the next ones
are computed.

torchrun --nproc-per-node 2 examples/decode.py        (--model, --batch, --prompt, --tokens, --top-k; CPU ranks: tiny)
"""

import argparse
import os
import time
from dataclasses import dataclass

import torch

gpu = torch.cuda.is_available()
if not gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch.distributed as dist
from parts.rates import INTERPRETED
from torch.nn import functional

from sidelane import Communicator, ops

EPS = 1e-5
fast = torch.compile if gpu else lambda function: function


@dataclass
class Config:
    """Sizes of a public model, as its ``config.json`` has them."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


CONFIGS = {
    "tiny": Config(64, 128, 2, 4, 2, 256),
    "llama-3.2-1b": Config(2048, 8192, 16, 32, 8, 128256),
    "llama-3.1-8b": Config(4096, 14336, 32, 32, 8, 128256),
}


class Llama:
    """This rank's heads, hidden features and part of the vocabulary; the embedding and the norm are whole."""

    def __init__(self, config: Config, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        draw = torch.Generator(device).manual_seed(0)  # the whole model on every rank, of which each keeps its part

        def weights(rows: int, columns: int, cut: int | None = None) -> torch.Tensor:
            whole = torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=columns**-0.5, generator=draw)
            return whole if cut is None else whole.chunk(ranks, dim=cut)[rank].contiguous()

        hidden, size = config.hidden, config.hidden // config.heads
        self.size, self.heads, self.kv_heads = size, config.heads // ranks, config.kv_heads // ranks
        self.embed, self.head = weights(config.vocabulary, hidden), weights(config.vocabulary, hidden, 0)
        self.norm = torch.ones(hidden, device=device, dtype=dtype)
        self.layers = [
            {
                "qkv": torch.cat([weights(n * size, hidden, 0) for n in (config.heads, *[config.kv_heads] * 2)]),
                "out": weights(hidden, hidden, 1),
                "gate_up": torch.cat([weights(config.intermediate, hidden, 0) for _ in range(2)]),
                "down": weights(hidden, config.intermediate, 1),
                "keys": torch.zeros(batch, self.kv_heads, length, size, device=device, dtype=dtype),
                "values": torch.zeros(batch, self.kv_heads, length, size, device=device, dtype=dtype),
            }
            for _ in range(config.layers)
        ]
        self.places = torch.arange(length, device=device)
        angles = self.places[:, None] * 500_000.0 ** (-torch.arange(size // 2, device=device) / (size // 2))
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, tokens: torch.Tensor, at: torch.Tensor, finish) -> torch.Tensor:
        """This rank's logits behind the last of ``tokens`` [batch, n], which stand at the places ``at`` [n].

        ``finish`` is the end of half a layer: project, sum over the ranks, add to the residual, norm.
        """
        batch, count = tokens.shape
        residual = self.embed[tokens].flatten(0, 1)
        x = functional.rms_norm(residual, self.norm.shape, self.norm, EPS)
        cos, sin = self.cos[at], self.sin[at]
        for layer in self.layers:
            heads = (x @ layer["qkv"].T).view(batch, count, -1, self.size).transpose(1, 2)
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            layer["keys"].index_copy_(2, at, k)
            layer["values"].index_copy_(2, at, v)
            if count > 1:
                attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:  # the heads that share keys and values are queries of one attention
                q, seen = q.reshape(batch, self.kv_heads, -1, self.size), self.places <= at
                attended = functional.scaled_dot_product_attention(
                    q, layer["keys"], layer["values"], attn_mask=seen[None, None, None].expand(*q.shape[:3], -1)
                ).reshape(batch, self.heads, 1, self.size)
            x, residual = finish(attended.transpose(1, 2).reshape(batch * count, -1), layer["out"], residual, self.norm)
            x, residual = finish(gated(x @ layer["gate_up"].T), layer["down"], residual, self.norm)
        return x.view(batch, count, -1)[:, -1] @ self.head.T


@fast
def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


@fast
def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@fast
def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, EPS), total


def by_group(group: dist.ProcessGroup):
    """The end of half a layer, and an all-gather, by torch.distributed."""

    def finish(x, weight, residual, norm):
        y = x @ weight.T
        dist.all_reduce(y, group=group)
        return add_norm(y, residual, norm)

    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
    return finish, lambda output, input: all_gather(output, input, group=group)


def by_operators(comm: Communicator):
    """The same by operators: one kernel for few tokens, a GEMM in parts for many."""

    def finish(x, weight, residual, norm):
        if len(x) <= (512 if x.is_cuda else 4):  # so that the few tokens of CPU ranks are many as well
            return ops.all_reduce_rms_norm(comm, x @ weight.T, residual, norm, eps=EPS)
        return add_norm(ops.gemm_all_reduce(comm, x, weight), residual, norm)

    return finish, comm.all_gather


def sample(logits: torch.Tensor, gather, top_k: int, noise: torch.Tensor) -> torch.Tensor:
    """One of the ``top_k`` likeliest tokens of all ranks for each sequence; all ranks draw the same ``noise``."""
    best, tokens = logits.float().topk(top_k, dim=-1)
    mine = torch.stack((best, (tokens + dist.get_rank() * logits.shape[1]).float()))
    every = mine.new_empty(dist.get_world_size() * 2, *mine.shape[1:])
    gather(every, mine)
    values, names = every.unflatten(0, (-1, 2)).transpose(0, 1).transpose(1, 2).flatten(2)  # [batch, ranks * top_k]
    best, places = values.topk(top_k, dim=-1)
    chosen = (best + noise).argmax(dim=-1, keepdim=True)
    return names.gather(1, places.gather(1, chosen)).long()


def generate(llama: Llama, prompt: torch.Tensor, count: int, top_k: int, way) -> tuple[torch.Tensor, float, float]:
    """Tokens [batch, count], seconds of prefill, and tokens a second of decoding."""
    finish, gather = way
    device, (batch, length) = prompt.device, prompt.shape
    uniform = torch.rand(count, batch, top_k, device=device, generator=torch.Generator(device).manual_seed(1))
    noise = -(-uniform.clamp_min(1e-20).log()).log() if top_k > 1 else torch.zeros_like(uniform)  # Gumbel's
    token, number = prompt[:, :1].clone(), torch.zeros(1, dtype=torch.long, device=device)
    found = torch.zeros(batch, count, dtype=torch.long, device=device)

    def choose(logits: torch.Tensor) -> None:
        token.copy_(sample(logits, gather, top_k, noise[number][0]))
        found.index_copy_(1, number, token)
        number.add_(1)

    def prefill() -> None:
        number.zero_()
        choose(llama(prompt, llama.places[:length], finish))

    def step() -> None:
        choose(llama(token, number + (length - 1), finish))

    for _ in range(2):  # what comes first makes what it needs
        prefill()
        step()
    if gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        step = graph.replay
    times = []
    for run, repeats in ((prefill, 1), (step, count - 1)):
        torch.cuda.synchronize() if gpu else None
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize() if gpu else None
        times.append(time.perf_counter() - began)
    return found.cpu(), times[0], batch * (count - 1) / times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, default="llama-3.1-8b" if gpu else "tiny")
    for name, on_gpu, on_cpu in (("batch", 8, 2), ("prompt", 512, 3), ("tokens", 128, 4), ("top-k", 1, 5)):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)  # top-k 1: greedy
    asked = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # processes that share cores
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world_size, config = dist.get_rank(), dist.get_world_size(), CONFIGS[asked.model]
    dtype = torch.bfloat16 if gpu else torch.float32
    with torch.no_grad(), Communicator(device=device) as comm:
        llama = Llama(config, asked.batch, asked.prompt + asked.tokens, device, dtype)
        draw = torch.Generator(device).manual_seed(2)
        prompt = torch.randint(config.vocabulary, (asked.batch, asked.prompt), device=device, generator=draw)
        ways = {
            "torch.distributed": by_group(dist.group.WORLD),
            "a Sidelane group": by_group(dist.new_group(backend="sidelane")),
            "operators": by_operators(comm),
        }
        done = {name: generate(llama, prompt, asked.tokens, asked.top_k, way) for name, way in ways.items()}
        comm.synchronize()
    first, *others = (tokens for tokens, *_ in done.values())
    alike = [(tokens == first).float().mean().item() for tokens in others]
    assert gpu or alike == [1, 1]  # bfloat16 sums are rounded otherwise, and a close second may win
    same = " and ".join(f"{share:.0%} by {name}" for share, name in zip(alike, list(ways)[1:], strict=True))
    print(f"rank {rank} of {world_size} on {device}: tokens that equal those of torch.distributed: {same}")
    if rank == 0:
        if not gpu:
            print(INTERPRETED)
        for name, (_, prefill_s, rate) in done.items():
            print(f"{name}: prefill {1e3 * prefill_s:.1f} ms, then {rate:.0f} tokens a second")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
