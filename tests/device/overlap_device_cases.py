"""What ranks execute in ``test_device_overlap``."""

from __future__ import annotations

from typing import Any

import overlap_cases
import pytest
import torch
import torch.distributed as dist
from device_context import Context

from sidelane import Communicator, Config, Overlap, SidelaneError, choose_overlap, overlap
from sidelane.program.shape import Computation


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too, on a stream that is not the legacy default one."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(overlap_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def in_graphs(context: Context, replays: int) -> None:
    """Every strategy, captured and replayed."""
    device, n, rank = context.device, context.world_size, context.rank
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        whole, shard = comm.empty(n, 100_000), torch.empty(100_000, device=device)
        a = torch.empty(512, 512, device=device)
        for way in (*overlap_cases.WAYS, *overlap_cases.PARTITIONED):

            def step() -> torch.Tensor:
                product, _ = overlap(lambda: a @ a, lambda comm: comm.all_gather(whole, shard), comm, strategy=way)  # noqa: B023
                return product.sum() + whole.sum()

            a.fill_(0), shard.fill_(0)
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = step()
            for replay in range(replays):
                a.fill_(1.0)
                shard.fill_(replay + rank)
                whole.fill_(-1)
                graph.replay()
                assert whole[:, -1].tolist() == [replay + peer for peer in range(n)], (way, replay)
                assert total.item() == 512**3 + 100_000 * (n * replay + sum(range(n))), (way, replay)


def large_reduction(context: Context) -> list[str]:
    """``auto`` beside a GEMM of known shape, eager and in a graph: with units of its own where times are known."""
    device = context.device
    with torch.cuda.stream(torch.cuda.Stream()), Communicator(device=device, config=Config(timeout_s=60)) as comm:
        product, a = (
            Computation(3000.0, (4096, 4096, 4096, "bfloat16")),
            torch.ones(4096, 4096, device=device).bfloat16(),
        )
        whole = torch.empty(1 << 27, dtype=torch.bfloat16, device=device)
        moves = ("all_reduce", whole.nbytes)

        def step() -> torch.Tensor:
            whole.fill_(1.0)
            c, _ = overlap(
                lambda: a @ a, lambda comm: comm.all_reduce(whole), comm, strategy="auto", beside=product, moves=moves
            )
            return torch.stack([c[0, 0], c[-1, -1], whole[0], whole[-1]])

        told = [str(choose_overlap(comm, product, moves).candidate)]
        expected = [4096.0] * 2 + [float(comm.world_size)] * 2
        for _ in range(3):
            assert step().tolist() == expected, told
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            told.append(str(choose_overlap(comm, product, moves).candidate))
            captured = step()
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert captured.tolist() == expected, told
    return told


def by_kernels(context: Context) -> list[str]:
    """Kernels move the bytes where a strategy says so."""
    device, told = context.device, []
    with torch.cuda.stream(torch.cuda.Stream()), Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        whole, part = torch.ones(n, 1 << 20, device=device), torch.empty(1 << 20, device=device)
        a = torch.ones(1024, 1024, device=device)
        for way in ("sm_priority", "sm_rp"):
            for _ in range(3):
                whole.fill_(rank + 1)
                product, _ = overlap(lambda: a @ a, lambda comm: comm.reduce_scatter(part, whole), comm, strategy=way)
                assert part.unique().tolist() == [n * (n + 1) / 2] and product.unique().tolist() == [1024.0], way
                assert comm.last_choice().candidate.variant == "one_shot", way
        overlap(lambda: None, lambda comm: comm.all_to_all(whole.clone(), whole), comm, strategy="sm_rp")
        told.append(comm.last_choice().candidate.variant)
        gathered = torch.empty(n, 1 << 20, device=device) if rank == 0 else None
        with pytest.raises(ValueError, match="sm_rp: there is no kernel for gather"):
            overlap(lambda: None, lambda comm: comm.gather(gathered, part, root=0), comm, strategy="sm_rp")
    return told


def partitions(context: Context) -> list[str]:
    """On a stream that is not the legacy default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return _partitions(context)


def _partitions(context: Context) -> list[str]:
    """Partitions of other sizes, learned sweeps, and gradients of a chain."""
    device, told = context.device, []
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        x, w = torch.randn(300, 200, device=device), torch.randn(200, 200, device=device, requires_grad=True)
        for step in range(40):
            name = overlap_cases.PARTITIONED[step % len(overlap_cases.PARTITIONED)]
            units = (None, 8, 16, 32, 64)[step // 4 % 5]
            whole, summed = comm.empty(n, 5000), torch.full((700,), float(step), device=device)

            def both(comm: Any) -> None:
                comm.all_gather(whole, torch.full((5000,), float(step + rank), device=device))  # noqa: B023
                comm.all_reduce(summed)  # noqa: B023

            def compute() -> torch.Tensor:
                h = (x * 2.0) @ w  # a temporary that only backward needs
                return (h.relu() @ w).sum()

            w.grad = None
            loss, _ = overlap(compute, both, comm, strategy=name, units=units)
            loss.backward()
            torch.full((300, 200), float("nan"), device=device)  # what may take memory that was given away too early
            plain = w.detach().clone().requires_grad_()
            (((x * 2.0) @ plain).relu() @ plain).sum().backward()
            torch.testing.assert_close(w.grad, plain.grad, rtol=1e-4, atol=1e-1)
            assert whole[:, -1].tolist() == [step + peer for peer in range(n)], (name, units)
            assert summed.unique().tolist() == [float(n * step)], (name, units)
        learned = Overlap(comm, strategies=("conccl", "c3_rp", "c3_sp_rp"), rounds=1)
        tensor = torch.ones(1000, device=device)
        for _ in range(2 * 9 + 1):
            learned(lambda: x @ w, lambda comm: comm.all_reduce(tensor, op="max"))
        told.append(str(learned))
        for name, units in (("c3_rp", 12345), ("c3_rp", 1)):
            try:
                overlap(lambda: None, lambda comm: None, comm, strategy=name, units=units)
            except SidelaneError as error:
                told.append(str(error))
    return told
