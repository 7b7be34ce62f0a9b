"""What ranks do with tensors in pools; on CPUs and on GPUs."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from expected import any_bytes, close, numbers, reduced, same_bytes

import sidelane
from sidelane import Communicator, Config, MismatchError, PeerError

POOLS = Config(timeout_s=30)
KINDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast")
BYTES = 96 << 20
"""torch takes memory of GPUs in parts of 20 MiB."""


def _communicator(group: dist.ProcessGroup, config: Config = POOLS) -> Communicator:
    return Communicator(group, device=torch.get_default_device(), config=config)


def staging(comm: Communicator) -> int:
    return comm.lane.preparer._staging.nbytes + comm.lane.preparer._kernel_staging.nbytes


def results_of_operations(group: dist.ProcessGroup) -> list[Any]:
    """Collectives on what operations return; what the communicator says of each, before and after the first call."""
    said: list[Any] = []
    with _communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        pool = sidelane.pool(comm, BYTES)
        expected = torch.arange(5000.0) + torch.arange(n)[:, None]
        with pool:
            input = torch.arange(5000.0) + rank
            output = torch.empty(n, 5000)
        said.append(str(comm.reach(output)))
        for variant in ("auto", "auto", "pcpy", "b2b"):
            output.fill_(-1)
            comm.all_gather(output, input, variant=variant)
            assert torch.equal(output, expected), variant
        said.append(str(comm.reach(output)))
        with pool:
            total = (input * 2).relu() + 1
        comm.all_reduce(total)
        assert torch.equal(total, n * (2 * torch.arange(5000.0) + 1) + n * (n - 1))
        said.append(str(comm.reach(total)))
        assert str(comm.reach(torch.zeros(4))).startswith("staged"), "what is made outside lies outside"
        assert comm.place(output) is not None and len(comm.peers(output)) == n
        said.append(staging(comm))
    return said


def covered(group: dist.ProcessGroup) -> dict[str, bool]:
    """Whether what torch makes in many ways lies in the pool."""
    found: dict[str, bool] = {}
    with _communicator(group) as comm:
        heap, pool = comm.lane.session.heap, sidelane.pool(comm, BYTES)

        def note(name: str, tensor: torch.Tensor | None) -> None:
            assert tensor is not None
            found[name] = heap.pool_at(tensor.data_ptr()) is not None

        outside = torch.randn(64, 64, requires_grad=True)
        layer = torch.nn.Linear(64, 64)
        with pool:
            note("empty", torch.empty(100))
            note("values", torch.tensor([1.0, 2.0]))
            note("strided", torch.empty_strided((3, 4), (1, 3)))
            note("matmul", outside @ outside)
            note("view", (outside @ outside).t()[1:, 2:])
            out = torch.empty(0)
            torch.add(outside.detach(), 1.0, out=out)
            note("out", out)
            values, places = outside.detach().sort()
            note("first of two", values), note("second of two", places)
            note("one of a list", outside.detach().split(3)[0].clone())
            note("chunk", torch.ones(30).chunk(3)[2])
            hidden = layer(outside)
            note("hidden", hidden)
            assert hidden.requires_grad
            hidden.square().sum().backward()
            note("gradient", layer.weight.grad)
            note("parameter", torch.nn.Parameter(torch.zeros(8)))
            note("bfloat16", outside.detach().bfloat16())
            note("clone", torch.ones(3, 5).t().clone())
            assert torch.equal(torch.ones(3, 5).cumsum(0).t().clone(), torch.ones(3, 5).cumsum(0).t())
            with torch.inference_mode():
                note("inference", outside @ outside)
            note("given", outside), note("in place", outside.detach().add_(1))
        note("after", outside @ outside)
        weight = layer.weight.grad
        assert weight is not None
        expected = torch.autograd.grad(layer(outside).square().sum(), layer.weight)[0]
        assert torch.allclose(weight, expected, rtol=1e-4, atol=1e-4)
    return found


def storm(group: dist.ProcessGroup, seed: int, calls: int, drift: int) -> tuple[int, int, int]:
    """Calls on tensors that come and go, at other places on some ranks once in ``drift`` tensors: how many of the calls
    found a tensor symmetric and mapped, and the bytes of staging."""
    draw, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank(group))
    kept: list[torch.Tensor] = []
    moved: list[torch.Tensor] = []
    symmetric = mapped = 0
    with _communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        pool = sidelane.pool(comm, BYTES)
        for number in range(calls):
            kind, size = draw.choice(KINDS), draw.choice((1, 33, 5000, 70_000))
            reduces = kind in ("reduce_scatter", "all_reduce")
            dtype = torch.float32 if reduces else draw.choice((torch.uint8, torch.bfloat16, torch.float32))
            whole = kind in ("all_to_all", "reduce_scatter")
            fill = numbers if reduces else any_bytes
            given = [fill(seed + number, peer, size * n if whole else size, dtype) for peer in range(n)]
            if drift and own.randrange(drift) == 0:
                with pool:
                    moved.append(torch.empty(own.randrange(1, 3000)))
            if len(moved) > 5:
                del moved[own.randrange(5)]
            with pool:
                input = given[rank].clone()
                output = torch.empty(size * n if kind == "all_gather" else size if kind != "all_to_all" else size * n)
                output = output.to(dtype).contiguous().clone()
            for _ in range(draw.choice((1, 1, 2))):
                _check(comm, kind, output, input, given, reduces)
            says = comm.reach(output if kind not in ("all_reduce", "broadcast") else input).how
            symmetric += says == "symmetric"
            mapped += says == "mapped"
            kept.append(output)
            if len(kept) > 6:
                del kept[draw.randrange(6)]
            del input, output
        return symmetric, mapped, staging(comm)


def _check(
    comm: Communicator,
    kind: str,
    output: torch.Tensor,
    input: torch.Tensor,
    given: list[torch.Tensor],
    reduces: bool,
) -> None:
    n, rank = comm.world_size, comm.rank
    match kind:
        case "all_gather":
            output.zero_()
            comm.all_gather(output, input)
            assert same_bytes(output, torch.cat(given)), kind
        case "all_to_all":
            output.zero_()
            comm.all_to_all(output, input)
            assert same_bytes(output, torch.cat([each.chunk(n)[rank] for each in given])), kind
        case "reduce_scatter":
            comm.reduce_scatter(output, input)
            assert close(output, reduced([each.chunk(n)[rank] for each in given], "sum"), given), kind
        case "all_reduce":
            input.copy_(given[rank])
            comm.all_reduce(input)
            assert close(input, reduced(given, "sum"), given), kind
        case "broadcast":
            input.copy_(given[rank])
            comm.broadcast(input, root=1)
            assert same_bytes(input, given[1]), kind
