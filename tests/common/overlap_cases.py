"""What ranks do with a computation and collectives at once: the same on CPU processes and GPUs."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidelane import (
    Communicator,
    Config,
    Overlap,
    begin_collective,
    choose_overlap,
    nano_batches,
    overlap,
)
from sidelane.c3.launch import unsupported_reason
from sidelane.c3.overlap import KERNELS, PARTITIONED
from sidelane.c3.overlap import NAMES as WAYS
from sidelane.c3.strategies import strategies
from sidelane.program.shape import Computation


def all_ways() -> tuple[str, ...]:
    """What runs on the default device."""
    device = torch.get_default_device()
    by_kernels = tuple(name for name in KERNELS if name.startswith("sm_"))
    further = PARTITIONED + by_kernels if device.type == "cuda" else ()
    if torch.version.hip is not None:
        able = {strategy.name for strategy in strategies() if not unsupported_reason(strategy, device)}
        further = tuple(name for name in further if name in able)
    return WAYS + further


def every_strategy(group: dist.ProcessGroup, seed: int, rounds: int) -> None:
    """Results of both, gradients through the computation, and what comes behind both."""
    draw = random.Random(seed)
    device = torch.get_default_device()
    with Communicator(group, device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        for step in range(rounds):
            size, way, symmetric = draw.choice((1, 1000, 300_000)), draw.choice(all_ways()), draw.random() < 0.5
            whole = comm.empty(n, size) if symmetric else torch.empty(n, size)
            summed = torch.empty(size)
            a, b = torch.randn(33, 65, requires_grad=True), torch.randn(65, 17)
            whole.fill_(-1)
            shard = torch.full((size,), float(step + rank))
            summed.fill_(step + rank)

            def gather_and_sum(comm: Any) -> str:
                comm.all_gather(whole, shard)  # noqa: B023
                comm.all_reduce(summed)  # noqa: B023
                return "told"

            product, told = overlap(lambda: a @ b, gather_and_sum, comm, strategy=way)  # noqa: B023
            after = whole.sum(0) + summed  # reads what both have left
            assert told == "told"
            total = n * step + sum(range(n))
            assert whole[:, -1].tolist() == [step + peer for peer in range(n)], (step, way)
            assert after.unique().tolist() == [2 * total], (step, way)
            torch.testing.assert_close(product, a.detach() @ b)
            product.sum().backward()
            torch.testing.assert_close(a.grad, b.sum(1).expand(33, 65))


def nano_batches_have_gradients(group: dist.ProcessGroup, parts: int) -> None:
    """Parts that take turns have the results and gradients of the whole batch, with a collective of each kind."""
    device = torch.get_default_device()
    with Communicator(group, device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank

        def exchange(tensor: torch.Tensor) -> Any:
            output = torch.empty_like(tensor)
            return output, comm.all_to_all(output, tensor, async_op=True)

        def gather(tensor: torch.Tensor) -> Any:
            output = tensor.new_empty(n, *tensor.shape)
            return output, comm.all_gather(output, tensor, async_op=True)

        def scatter(tensor: torch.Tensor) -> Any:
            output = tensor.new_empty(tensor.shape[1:])
            return output, comm.reduce_scatter(output, tensor, async_op=True)

        def forward(x: torch.Tensor) -> Any:
            for step in range(3):
                x = (yield begin_collective(exchange, x * (1 + rank + step))).sin()
            whole = yield begin_collective(gather, x, scatter)
            return (whole * torch.arange(1.0, n + 1).view(n, *[1] * x.dim())).sum(0)

        torch.manual_seed(rank)
        batch = torch.randn(n, 6 * parts, 5)
        found = []
        for count in (1, parts):
            halves = [half.clone().requires_grad_() for half in batch.chunk(count, dim=1)]
            results = nano_batches(map(forward, halves))
            torch.stack([result.square().sum() for result in results]).sum().backward()
            gradients = [half.grad for half in halves if half.grad is not None]
            found.append([torch.cat(each, dim=1) for each in (results, gradients)])
        torch.testing.assert_close(found[1], found[0])
        assert found[0][1].abs().sum() > 0


def computing_waits_for_nobody(group: dist.ProcessGroup) -> None:
    """Rank 0 computes before its peers have come: with a collective that blocks, it never would."""
    with Communicator(group, device="cpu", config=Config(timeout_s=20)) as comm:
        tensor = torch.empty(100)
        for way in WAYS:
            # The first call of a kind is agreed on.
            overlap(lambda: None, lambda comm: comm.all_reduce(tensor, variant="b2b"), comm, strategy=way)
            tensor.fill_(comm.rank)
            if comm.rank:
                dist.monitored_barrier(group, timedelta(seconds=20))
            overlap(
                lambda: dist.monitored_barrier(group, timedelta(seconds=20)) if comm.rank == 0 else None,
                lambda comm: comm.all_reduce(tensor, variant="b2b"),
                comm,
                strategy=way,
            )
            assert tensor[0] == sum(range(comm.world_size))


def learned(group: dist.ProcessGroup, times: dict[str, list[float]]) -> list[Any]:
    """A strategy is chosen by times that are made up, of each rank."""
    device = torch.get_default_device()
    with Communicator(group, device=device, config=Config(timeout_s=30)) as comm:
        both = Overlap(comm, rounds=2)
        before, ran = str(both), []
        tensor = torch.empty(1000)
        for step in range(3 * len(WAYS) + 4):
            ran.append(both.strategy)
            tensor.fill_(step)
            computed, _ = both(lambda: step + 1, lambda comm: comm.all_reduce(tensor))  # noqa: B023
            assert computed == step + 1 and tensor.unique().tolist() == [comm.world_size * step]
            if step == 3 * len(WAYS) - 1:
                real = [len(clocks) for clocks in both._clocks]
                for name, clocks in zip(WAYS, both._clocks, strict=True):
                    for clock in clocks:
                        assert clock.us() > 0
                        clock.us = lambda name=name: times[name][comm.rank]  # type: ignore[method-assign]
        return [before, real, ran, str(both), both.times_us]


def failures(group: dist.ProcessGroup) -> list[str]:
    """Errors of both parts: what has begun has ended, and the next calls work."""
    told = []
    device = torch.get_default_device()
    with Communicator(group, device=device, config=Config(timeout_s=30)) as comm:
        tensor = torch.empty(10)

        def attempt(**arguments: Any) -> None:
            defaults = {"compute": lambda: None, "collective": lambda comm: comm.all_reduce(tensor), "on": comm}
            tensor.fill_(1.0)
            try:
                overlap(**{**defaults, **arguments})
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
            else:
                assert tensor[0] == comm.world_size

        attempt()
        attempt(strategy="fastest")
        attempt(on=())
        attempt(compute=[lambda: None])
        attempt(collective=lambda comm: comm.all_reduce(tensor, async_op=True))
        attempt(compute=lambda: torch.ones(2) @ torch.ones(3))
        assert tensor[0] == comm.world_size, "the collective has ended"
        attempt(collective=lambda comm: comm.all_reduce(tensor, op="median"))
        attempt(collective=lambda comm: comm.no_such_thing())
        for arguments in ({"strategies": ()}, {"rounds": 0}, {"strategies": ("fastest",)}):
            try:
                Overlap(comm, **arguments)  # type: ignore[arg-type]
            except ValueError as error:
                told.append(str(error))
        attempt(on=3)
        attempt()
    return told


def units_on_a_cpu(group: dist.ProcessGroup) -> list[str]:
    """Errors before anything runs."""
    told = []
    with Communicator(group, device="cpu", config=Config(timeout_s=30)) as comm:
        for attempt in (
            lambda: overlap(_never, _never, comm, strategy="c3_rp"),
            lambda: Overlap(comm, strategies=("conccl", "c3_rp")),
            lambda: overlap(_never, _never, comm, strategy="conccl", units=8),
        ):
            try:
                attempt()
            except ValueError as error:
                told.append(str(error))
    return told


def _never(*comms: Any) -> None:
    raise AssertionError("nothing may run")


def chosen(group: dist.ProcessGroup) -> list[str]:
    """``auto`` and its refusals."""
    told: list[str] = []
    device, n = torch.get_default_device(), dist.get_world_size(group)
    with Communicator(group, device=device, config=Config(timeout_s=30)) as comm:
        product, whole = Computation(1000.0, (8192, 8192, 8192, "bfloat16")), comm.empty(n, 64)
        a = torch.ones(16, 16, requires_grad=True)
        for _ in range(2):
            whole.fill_(-1)
            c, _ = overlap(
                lambda: a @ a,
                lambda comm: comm.all_gather(whole, torch.full((64,), float(comm.rank))),
                comm,
                strategy="auto",
                beside=product,
                moves=("all_gather", 1 << 28),
            )
            assert whole[:, -1].tolist() == list(range(n)) and c.unique().tolist() == [16.0]
        told.append(choose_overlap(comm, product, [("all_gather", 1 << 28), ("reduce_scatter", 1 << 20)]).reason)
        for wrong in (("all_gather", 0), ("gather_all", 5), ("all_gather",), (), [("all_gather", 2.5)]):
            try:
                choose_overlap(comm, product, wrong)  # type: ignore[arg-type]
            except ValueError as error:
                told.append(str(error))
        both = {"strategy": "auto", "beside": product, "moves": ("all_gather", 64)}
        for wrong in ({"moves": ()}, {"beside": None}, {"units": 8}, {"strategy": "serial"}, {"beside": "compute"}):
            try:
                overlap(lambda: None, lambda comm: None, comm, **{**both, **wrong})  # type: ignore[arg-type]
            except ValueError as error:
                told.append(str(error))
    return told


def compiled(group: dist.ProcessGroup) -> None:
    """Inside of what torch.compile has made."""
    device = torch.get_default_device()
    with Communicator(group, device=device, config=Config(timeout_s=30)) as comm:
        tensor, short = torch.empty(10), comm.beside(us=5.0)

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            y, _ = overlap(lambda: (2 * x).relu(), lambda comm: comm.all_reduce(tensor), comm)
            total = tensor.sum()
            seven, _ = overlap(
                lambda: 7 * y,
                lambda comm: comm.all_reduce(tensor),
                comm,
                strategy="auto",
                beside=short,
                moves=("all_reduce", 40),
            )
            return seven / 7 + total

        for number in range(3):
            tensor.fill_(1.0)
            x = torch.full((4,), float(number), requires_grad=True)
            result = step(x)
            assert result.tolist() == [2.0 * number + 10 * comm.world_size] * 4
            result.sum().backward()
            assert x.grad is not None and x.grad.tolist() == [2.0 if number else 0.0] * 4
