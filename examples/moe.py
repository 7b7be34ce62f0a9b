"""Train a layer of experts that lie on different ranks: on one rank, by all-to-alls of a process group, by operators.

The router likes some experts more than others. A token travels once to each rank that has any of its experts, and comes
back as one row, the sum of their results times their gates. No host waits for the routing: a CUDA graph holds a step.

torchrun --nproc-per-node 2 examples/moe.py        (--tokens, --dim, --hidden, --experts, --top-k; CPU ranks in small)
"""

import argparse
import copy
import os
import time
from collections.abc import Callable

import torch

gpu = torch.cuda.is_available()
if not gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch.distributed as dist
from parts.rates import INTERPRETED
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

from sidelane import Communicator, ops

BATCHES = 3  # in turn, the first time round without a graph

Layer = Callable[["Moe", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Type of a way from tokens, their experts and their gates to the layer's result."""


class Moe(nn.Module):
    """A router, which all ranks have, and some of the experts: rank 0 has the first ones."""

    def __init__(self, sizes: argparse.Namespace, experts: slice, device: torch.device) -> None:
        super().__init__()
        dtype = torch.bfloat16 if gpu else torch.float32
        draw = torch.Generator(device).manual_seed(0)  # the whole layer on every rank, of which each keeps its part

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=device) * shape[-1] ** -0.5

        everyone, dim, hidden = sizes.experts, sizes.dim, sizes.hidden
        self.router = nn.Parameter(weights(everyone, dim))
        self.up = nn.Parameter(weights(everyone, 2 * hidden, dim)[experts].to(dtype))
        self.down = nn.Parameter(weights(everyone, dim, hidden)[experts].to(dtype))
        self.liked = -0.5 * torch.arange(1, everyone + 1, device=device).log()  # the first experts most
        self.k, self.dtype = sizes.top_k, dtype

    def forward(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        gates, chosen = (x @ self.router.T + self.liked).softmax(-1).topk(self.k)
        return x + layer(self, x.to(self.dtype), chosen, gates / gates.sum(-1, keepdim=True)).float()

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Results of rows by expert; those of an expert end where ``ends`` says, which only the device need know."""
        gate, up = functional.grouped_mm(rows, self.up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return functional.grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)


def on_one_rank(moe: Moe, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """The reference: each expert in turn, all of them here."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for number in range(len(moe.up)):
        token, choice = (chosen == number).nonzero(as_tuple=True)
        gate, up = (x[token] @ moe.up[number].T).chunk(2, dim=-1)
        result = (functional.silu(gate) * up) @ moe.down[number].T
        y = y.index_add(0, token, result.float() * gates[token, choice][:, None])
    return y


def by_group(moe: Moe, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """A row for each token and expert, there and back by a process group; the host waits for the numbers of rows."""
    ranks, each, flat = dist.get_world_size(), len(moe.up), chosen.flatten()
    order = flat.argsort(stable=True)  # by rank, and there by expert
    sent = flat.bincount(minlength=ranks * each)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    leaves, comes = (counts.view(ranks, each).sum(1).tolist() for counts in (sent, came))
    rows = all_to_all_single_autograd(x[order // moe.k], comes, leaves, dist.group.WORLD)
    expert = torch.arange(ranks * each, device=x.device).remainder(each).repeat_interleave(came)
    by_expert = expert.argsort(stable=True)
    ends = expert.bincount(minlength=each).cumsum(0).int()
    results = moe.compute(rows[by_expert], ends)[by_expert.argsort()]
    back = all_to_all_single_autograd(results, leaves, comes, dist.group.WORLD)[order.argsort()]
    return (back.view(*chosen.shape, -1).float() * gates[..., None]).sum(1)


def by_operators(comm: Communicator) -> Layer:
    """The same by Sidelane."""

    def layer(moe: Moe, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        routes = ops.route_experts(comm, chosen, gates, experts=len(moe.up))
        results = moe.compute(ops.dispatch_tokens(comm, x, routes), routes.ends)
        return ops.combine_tokens(comm, results, routes)

    return layer


def train(
    moe: Moe, layer: Layer, reduce: Callable[[torch.Tensor], object], sizes: argparse.Namespace, captures: bool
) -> tuple[float, list[float]]:
    """Tokens a second of all ranks after the first steps, and the mean loss of all ranks at each step."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), moe.router.device
    draw = torch.Generator(device).manual_seed(1 + rank)
    batches = torch.randn(BATCHES, sizes.tokens, sizes.dim, generator=draw, device=device)
    x = torch.empty_like(batches[0])
    whole = list(moe.parameters()) if len(moe.up) == sizes.experts else [moe.router]  # what every rank has
    graph: torch.cuda.CUDAGraph | None = None
    loss, losses = torch.zeros((), device=device), []

    def step() -> None:
        moe.zero_grad(set_to_none=False)
        found = (moe(x, layer) - x.roll(1, dims=1)).square().sum() / (ranks * x.numel())
        found.backward()
        loss.copy_(found.detach())
        for parameter in whole:
            reduce(parameter.grad)
        with torch.no_grad():
            for parameter in moe.parameters():
                parameter.sub_(parameter.grad, alpha=0.05 * sizes.dim)

    began = 0.0
    for number in range(BATCHES + sizes.steps):
        if number == BATCHES:
            if captures:
                graph = torch.cuda.CUDAGraph()
                options = {"stream": torch.cuda.current_stream(), "capture_error_mode": "thread_local"}  # NCCL's asks
                with torch.cuda.graph(graph, **options):
                    step()  # is not run here
            torch.cuda.synchronize() if gpu else None
            began = time.perf_counter()
        x.copy_(batches[number % BATCHES])
        graph.replay() if graph else step()
        losses.append(loss.clone())
    torch.cuda.synchronize() if gpu else None
    speed = sizes.steps * ranks * sizes.tokens / (time.perf_counter() - began)
    every = torch.stack(losses)
    dist.all_reduce(every)
    return speed, every.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, on_gpu, on_cpu in (
        *(("tokens", 4096, 12), ("dim", 2048, 16), ("hidden", 1024, 8)),  # tokens of a rank
        *(("experts", 64, 8), ("top-k", 8, 3), ("steps", 21, 3)),  # experts of all ranks
    ):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    sizes = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # processes that share cores
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if sizes.experts % ranks:
        raise SystemExit(f"--experts (value={sizes.experts}, allowed=multiples of {ranks}, the ranks)")
    each = sizes.experts // ranks
    own = Moe(sizes, slice(rank * each, (rank + 1) * each), device)
    _, wanted = train(Moe(sizes, slice(None), device), on_one_rank, dist.all_reduce, sizes, False)
    plain, same = train(copy.deepcopy(own), by_group, dist.all_reduce, sizes, False)
    torch.testing.assert_close(same, wanted, rtol=1e-2 if gpu else 1e-4, atol=1e-5)
    stream = torch.cuda.Stream() if gpu else None
    with torch.cuda.stream(stream), Communicator(device=device) as comm:
        fused, same = train(own, by_operators(comm), comm.all_reduce, sizes, gpu)
        comm.synchronize()
    torch.testing.assert_close(same, wanted, rtol=1e-2 if gpu else 1e-4, atol=1e-5)
    first, last = (sum(some) / BATCHES for some in (same[:BATCHES], same[-BATCHES:]))
    print(f"rank {rank} of {ranks} on {device}: loss {first:.3f} to {last:.3f}, the same as on one rank")
    if rank == 0:
        if not gpu:
            print(INTERPRETED)
        print(f"tokens a second: {plain:.0f} with torch.distributed, {fused:.0f} with Sidelane's operators")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
