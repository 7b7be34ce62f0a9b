"""A computation and collectives at once, by CPU ranks and on GPUs."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import default_stream, on_ranks
from sweeps import communicator

from sidelane import (
    Communicator,
    Config,
    Overlap,
    SidelaneError,
    begin_collective,
    choose_overlap,
    nano_batches,
    overlap,
)
from sidelane.c3.launch import unsupported_reason
from sidelane.c3.overlap import NAMES as WAYS
from sidelane.c3.overlap import ON_GPUS
from sidelane.c3.strategies import strategies
from sidelane.choice.key import key_here
from sidelane.choice.store import builtin_for
from sidelane.program.shape import Computation


def all_ways() -> tuple[str, ...]:
    """Names of the strategies that run on the default device."""
    device = torch.get_default_device()
    further = ON_GPUS if device.type == "cuda" else ()
    if torch.version.hip is not None:
        able = {strategy.name for strategy in strategies() if not unsupported_reason(strategy, device)}
        further = tuple(name for name in further if name in able)
    return WAYS + further


@on_ranks(1, long(2), 3, seed=3, rounds=40)
@on_ranks(gpu=True, seed=1, rounds=60)
def test_every_strategy(group: dist.ProcessGroup, seed: int, rounds: int) -> None:
    """Results of both, gradients through the computation, and what comes behind both."""
    draw = random.Random(seed)
    with communicator(group) as comm:
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


@on_ranks(2, parts=2)
def test_nano_batches_have_gradients(group: dist.ProcessGroup, parts: int) -> None:
    """Parts that take turns have the results and gradients of the whole batch, with a collective of each kind."""
    with communicator(group) as comm:
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


@on_ranks(3)
def test_computing_waits_for_nobody(group: dist.ProcessGroup) -> None:
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


TIMES = {name: (10.0 + number, 20.0) for number, name in enumerate(WAYS)}
TIMES |= {"collective_first": (12.0, 11.0), "priority": (1.0, 13.0)}
SLOW = {name: (10.0 + number,) * 2 for number, name in enumerate(WAYS)} | {"copy_engines": (10.0, 50.0)}


@on_ranks(2, times=TIMES, text="collective_first: collective_first 12 us, priority 13 us, copy_engines 20 us")
@on_ranks(gpu=True, times=SLOW, text="collective_first: collective_first 11 us")
def test_the_fastest_is_learned_from_the_slowest_rank(
    group: dist.ProcessGroup, times: dict[str, tuple[float, float]], text: str
) -> None:
    """A strategy is chosen by times that are made up: those of the last rank, and of the others."""
    with communicator(group) as comm:
        both = Overlap(comm, rounds=2)
        assert str(both) == "copy_engines: not decided yet"
        ran = []
        tensor = torch.empty(1000)
        for step in range(3 * len(WAYS) + 4):
            ran.append(both.strategy)
            tensor.fill_(step)
            computed, _ = both(lambda: step + 1, lambda comm: comm.all_reduce(tensor))  # noqa: B023
            assert computed == step + 1 and tensor.unique().tolist() == [comm.world_size * step]
            if step == 3 * len(WAYS) - 1:
                measured = both._clocks
                assert [len(clocks) for clocks in measured] == [2] * len(WAYS)
                for name, clocks in zip(WAYS, measured, strict=True):
                    for clock in clocks:
                        assert clock.us() > 0
                        clock.us = lambda name=name: times[name][comm.rank == comm.world_size - 1]  # type: ignore[method-assign]
        assert ran == list(WAYS) * 3 + ["copy_engines"] + ["collective_first"] * 3
        assert str(both).startswith(text) and both.times_us["serial"] == max(times["serial"])


@on_ranks(2, gpu=True)
def test_failures(group: dist.ProcessGroup) -> None:
    """Errors of both parts: what has begun has ended, and the next calls work."""
    told = []
    with communicator(group) as comm:
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
        for arguments in ({"strategies": ()}, {"rounds": 0}, {"rounds": 1.5}, {"strategies": ("fastest",)}):
            try:
                Overlap(comm, **arguments)  # type: ignore[arg-type]
            except ValueError as error:
                told.append(str(error))
        attempt(on=3)
        attempt()
    assert "strategy (value='fastest', allowed=copy_engines, collective_first," in told[0]
    assert "on (value=(), allowed=a Communicator" in told[1]
    assert "compute (value=[" in told[2] and "async_op (value=True" in told[3]
    assert told[4].startswith("RuntimeError") and "size" in told[4]
    assert "median" in told[5] and told[6].startswith("AttributeError")
    assert "rounds (value=()" in told[7] and "'fastest'" in told[10]
    assert all(f", {rounds}, allowed" in text for rounds, text in zip((0, 1.5), told[8:10], strict=True))
    assert told[11:] == ["ValueError: overlap: on (value=3, allowed=a Communicator)"]


@on_ranks(2)
def test_what_takes_units_is_not_for_cpus(group: dist.ProcessGroup) -> None:
    """Errors before anything runs."""
    unable = r"value='partition', allowed=copy_engines,.*no green contexts"
    with Communicator(group, device="cpu", config=Config(timeout_s=30)) as comm:
        with pytest.raises(ValueError, match=unable):
            overlap(_never, _never, comm, strategy="partition")
        with pytest.raises(ValueError, match=unable):
            Overlap(comm, strategies=("copy_engines", "partition"))
        with pytest.raises(ValueError, match=r"overlap: units \(value=8"):
            overlap(_never, _never, comm, strategy="copy_engines", units=8)


def _never(*comms: Any) -> None:
    raise AssertionError("nothing may run")


@on_ranks(2, gpu=True)
def test_auto_takes_engines_and_refuses_half_a_description(group: dist.ProcessGroup) -> None:
    """``auto`` and its refusals."""
    told: list[str] = []
    n = group.size()
    with communicator(group) as comm:
        product, whole = Computation(1000.0, (8192, 8192, 8192, "bfloat16")), comm.empty(n, 64)
        a = torch.ones(16, 16, requires_grad=True)
        for _ in range(2):
            whole.fill_(-1)
            c, _ = overlap(
                lambda: a @ a,
                lambda comm: comm.all_gather(whole, torch.full((64,), float(comm.rank))),
                comm,
                strategy="auto",
                computation=product,
                moves=("all_gather", 1 << 28),
            )
            assert whole[:, -1].tolist() == list(range(n)) and c.unique().tolist() == [16.0]
        told.append(choose_overlap(comm, product, [("all_gather", 1 << 28), ("reduce_scatter", 1 << 20)]).reason)
        for wrong in (("all_gather", 0), ("gather_all", 5), ("all_gather",), (), [("all_gather", 2.5)]):
            try:
                choose_overlap(comm, product, wrong)  # type: ignore[arg-type]
            except ValueError as error:
                told.append(str(error))
        both = {"strategy": "auto", "computation": product, "moves": ("all_gather", 64)}
        for wrong in (
            {"moves": ()},
            {"computation": None},
            {"units": 8},
            {"strategy": "serial"},
            {"computation": "compute"},
        ):
            try:
                overlap(lambda: None, lambda comm: None, comm, **{**both, **wrong})  # type: ignore[arg-type]
            except ValueError as error:
                told.append(str(error))
    assert told[0].startswith("copy_engines: copy engines")
    assert len(told) == 11 and all("moves (value=" in text for text in told[1:6])
    assert all("strategy auto takes computation and moves" in text and "(missing: " in text for text in told[6:9])
    assert "need strategy='auto'" in told[9] and "computation (value='compute'" in told[10]


@on_ranks(2, timeout_s=110)
def test_inside_of_compiled_code(group: dist.ProcessGroup) -> None:
    """Inside of what torch.compile has made."""
    with communicator(group) as comm:
        tensor, short = torch.empty(10), comm.computation(us=5.0)

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            y, _ = overlap(lambda: (2 * x).relu(), lambda comm: comm.all_reduce(tensor), comm)
            total = tensor.sum()
            seven, _ = overlap(
                lambda: 7 * y,
                lambda comm: comm.all_reduce(tensor),
                comm,
                strategy="auto",
                computation=short,
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


@on_ranks(gpu=default_stream, replays=5)
def test_in_graphs(group: dist.ProcessGroup, replays: int) -> None:
    """Every strategy, captured and replayed."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        whole, shard = comm.empty(n, 100_000), torch.empty(100_000)
        a = torch.empty(512, 512)
        for way in (*WAYS, *ON_GPUS):

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


@on_ranks(gpu=True)
def test_cublas_leaves_units_to_a_large_reduction(group: dist.ProcessGroup) -> None:
    """``auto`` beside a GEMM of known shape, eager and in a graph: its sums get units where times are known."""
    with communicator(group, timeout_s=60) as comm:
        product, a = Computation(3000.0, (4096, 4096, 4096, "bfloat16")), torch.ones(4096, 4096).bfloat16()
        whole = torch.empty(1 << 27, dtype=torch.bfloat16)
        moves = ("all_reduce", whole.nbytes)

        def step() -> torch.Tensor:
            whole.fill_(1.0)
            c, _ = overlap(
                lambda: a @ a,
                lambda comm: comm.all_reduce(whole),
                comm,
                strategy="auto",
                computation=product,
                moves=moves,
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
        known = builtin_for(key_here("cuda", comm.world_size)) is not None
    assert told == 2 * ["copy_engines_sums with 4 units" if known else "copy_engines"], told


@on_ranks(gpu=True)
def test_kernels_move_the_bytes(group: dist.ProcessGroup) -> None:
    """Kernels move the bytes where a call says so."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        whole, part = torch.ones(n, 1 << 20), torch.empty(1 << 20)
        a = torch.ones(1024, 1024)
        for way in ("priority", "partition"):
            for _ in range(3):
                whole.fill_(rank + 1)
                scatter = lambda comm: comm.reduce_scatter(part, whole, variant="one_shot")  # noqa: E731
                product, _ = overlap(lambda: a @ a, scatter, comm, strategy=way)
                assert part.unique().tolist() == [n * (n + 1) / 2] and product.unique().tolist() == [1024.0], way
                assert comm.last_choice().candidate.variant == "one_shot", way


@on_ranks(gpu=True)
def test_partitions(group: dist.ProcessGroup) -> None:
    """Partitions of other sizes, learned sweeps, and gradients of a chain."""
    told = []
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        x, w = torch.randn(300, 200), torch.randn(200, 200, requires_grad=True)
        for step in range(40):
            name = ON_GPUS[step % len(ON_GPUS)]
            units = (None, 8, 16, 32, 64)[step // 4 % 5]
            whole, summed = comm.empty(n, 5000), torch.full((700,), float(step))

            def both(comm: Any) -> None:
                comm.all_gather(whole, torch.full((5000,), float(step + rank)))  # noqa: B023
                comm.all_reduce(summed)  # noqa: B023

            def compute() -> torch.Tensor:
                h = (x * 2.0) @ w  # a temporary that only backward needs
                return (h.relu() @ w).sum()

            w.grad = None
            loss, _ = overlap(compute, both, comm, strategy=name, units=units)
            loss.backward()
            torch.full((300, 200), float("nan"))  # what may take memory that was given away too early
            plain = w.detach().clone().requires_grad_()
            (((x * 2.0) @ plain).relu() @ plain).sum().backward()
            torch.testing.assert_close(w.grad, plain.grad, rtol=1e-4, atol=1e-1)
            assert whole[:, -1].tolist() == [step + peer for peer in range(n)], (name, units)
            assert summed.unique().tolist() == [float(n * step)], (name, units)
        learned = Overlap(comm, strategies=("copy_engines", "partition", "collective_first_partition"), rounds=1)
        tensor = torch.ones(1000)
        for _ in range(2 * 9 + 1):
            learned(lambda: x @ w, lambda comm: comm.all_reduce(tensor, op="max"))
        told.append(str(learned))
        for name, units in (("partition", 12345), ("partition", 1)):
            try:
                overlap(lambda: None, lambda comm: None, comm, strategy=name, units=units)
            except SidelaneError as error:
                told.append(str(error))
    assert "partition with 16 units" in told[0] and "collective_first_partition with 8 units" in told[0]
    assert len(told) == 3, "a GPU has no such parts, and says so"
