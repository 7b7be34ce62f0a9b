"""Inputs, references and meters of the studies, between real processes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane.program.collective import Kind
from sidelane_lab.baselines.baselines_cpu import Gloo
from sidelane_lab.baselines.candidate import Entrant, Implementation, ReadyCall, Tensors, candidates_of, views
from sidelane_lab.baselines.reference import KINDS, Case, cases_of, fill_input, output_error, poison, rounded_bytes
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Job, Rounds
from sidelane_lab.studies.collectives import HOST_ROUNDS, CollectiveOptions, hides_launches, time_candidates

CPU = torch.device("cpu")
LAUNCHES = ("eager", "graph")


def case_of(
    kind: Kind, rank: int = 0, world_size: int = 3, nbytes: int = 3 * 160, dtype: torch.dtype = torch.int32
) -> Case:
    return Case(kind, nbytes, dtype, rank, world_size, CPU)


def inputs_of(kind: Kind, seed: int, world_size: int = 3) -> list[torch.Tensor]:
    tensors = []
    for rank in range(world_size):
        case = case_of(kind, rank, world_size)
        tensors.append(torch.zeros(case.input_bytes, dtype=torch.uint8))
        fill_input(case, tensors[-1].view(case.dtype), seed)
    return tensors


def outputs_of(kind: Kind, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the collective means, written down once more and differently."""
    n = len(inputs)
    parts = [tensor.chunk(n) for tensor in inputs]
    match kind:
        case Kind.ALL_GATHER:
            return [torch.cat(inputs)] * n
        case Kind.ALL_TO_ALL:
            return [torch.cat([parts[i][j] for i in range(n)]) for j in range(n)]
        case Kind.BROADCAST:
            return [inputs[0]] * n
    total = torch.stack([tensor.view(torch.int32) for tensor in inputs]).sum(dim=0, dtype=torch.int32).view(torch.uint8)
    return list(total.chunk(n)) if kind is Kind.REDUCE_SCATTER else [total] * n


def test_an_own_part_that_is_left_must_not_have_come() -> None:
    inputs = inputs_of(Kind.ALL_TO_ALL, seed=7)
    for rank, output in enumerate(outputs_of(Kind.ALL_TO_ALL, inputs)):
        case = case_of(Kind.ALL_TO_ALL, rank)
        assert "output bytes are wrong" in (output_error(case, output.clone(), 7, own_part_left=True) or "")
        left = output.clone()
        poison(left.chunk(3)[rank])
        assert output_error(case, left, 7, own_part_left=True) is None
        left.chunk(3)[(rank + 1) % 3][5] ^= 1
        assert "1 of" in (output_error(case, left, 7, own_part_left=True) or "")


@pytest.mark.parametrize("kind", KINDS)
def test_reference_accepts_the_right_bytes_and_nothing_else(kind: Kind) -> None:
    inputs = inputs_of(kind, seed=7)
    for rank, output in enumerate(outputs_of(kind, inputs)):
        case = case_of(kind, rank)
        assert output_error(case, output.clone(), 7) is None
        assert output_error(case, output.clone(), 8) is not None  # other inputs
        for position in (0, output.numel() // 2, output.numel() - 1):
            broken = output.clone()
            broken[position] ^= 1
            assert "1 of" in (output_error(case, broken, 7) or "")
        poison(poisoned := output.clone())
        assert output_error(case, poisoned, 7) is not None


def test_inputs_differ_between_ranks_chunks_and_seeds() -> None:
    seeds = (1, 2, 257)  # a CPU's generator looks at 32 bits of a seed
    chunks = [chunk for seed in seeds for tensor in inputs_of(Kind.ALL_TO_ALL, seed) for chunk in tensor.chunk(3)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(chunks, 2))


def test_reduced_values_are_exact_in_every_order() -> None:
    case = Case(Kind.ALL_REDUCE, 16 * 64, torch.bfloat16, 0, 16, CPU)
    tensor = torch.zeros(512, dtype=torch.bfloat16)
    fill_input(case, tensor, 1)
    assert tensor.abs().max() <= 7  # 16 ranks: sums up to 112, and bfloat16 counts to 256
    assert torch.equal(tensor, tensor.round())


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_views_are_those_of_torch_distributed(kind: Kind) -> None:
    case = case_of(kind, rank=2)
    output, input = torch.zeros(480, dtype=torch.uint8), torch.zeros(480, dtype=torch.uint8)
    tensors = views(case, True, output, input)
    assert tensors.output is not None
    distance = tensors.input.data_ptr() - tensors.output.data_ptr()
    assert distance == {Kind.ALL_GATHER: 320, Kind.REDUCE_SCATTER: -320}.get(kind, 0)
    assert tensors.output.nbytes == case.output_bytes and tensors.input.nbytes == case.input_bytes
    apart = views(case, False, output, input)
    assert apart.output is not None
    assert (apart.output.data_ptr(), apart.input.data_ptr()) == (output.data_ptr(), input.data_ptr())


def test_sizes_are_rounded_up_to_what_every_collective_can_have() -> None:
    assert [rounded_bytes(size, 4) for size in (1, 64, 65, 1024)] == [64, 64, 128, 1024]
    with pytest.raises(ValueError, match="multiples of 48"):
        Case(Kind.ALL_GATHER, 100, torch.uint8, 0, 3, CPU)
    options = SimpleNamespace(sizes_on=lambda device: (3, 8, 16, 1000))
    sender: Any = SimpleNamespace(rounded=lambda asked, rounded: [rounded(nbytes) for nbytes in asked])
    for kind, sizes in ((Kind.ALL_REDUCE, [4, 8, 16, 1000]), (Kind.ALL_TO_ALL, [12, 12, 24, 1008])):
        rank: Any = SimpleNamespace(rank=0, world_size=3, device=CPU)
        cases = cases_of(rank, options, sender, (kind,), torch.float32, any_size=True)
        assert [case.nbytes for case in cases] == sizes
    with pytest.raises(ValueError, match="kind"):
        Case(Kind.SCATTER, 48, torch.uint8, 0, 3, CPU)


def test_candidates_are_every_variant_place_and_launch() -> None:
    class Library:
        name = "dma"
        launches = ("eager", "graph")

        def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
            return ("pcpy", "b2b", "swap") if not in_place else ("swap",)

    everything = candidates_of(Library(), Kind.ALL_TO_ALL)  # type: ignore[arg-type]
    assert len(everything) == (3 + 1) * 2
    kept = candidates_of(Library(), Kind.ALL_TO_ALL, only=("b2b", "swap"))  # type: ignore[arg-type]
    assert kept == [
        Entrant("dma", "b2b", False, "eager"),
        Entrant("dma", "b2b", False, "graph"),
        Entrant("dma", "swap", False, "eager"),
        Entrant("dma", "swap", False, "graph"),
        Entrant("dma", "swap", True, "eager"),
        Entrant("dma", "swap", True, "graph"),
    ]


@pytest.mark.parametrize(
    ("kind", "in_place", "repeatable"),
    [
        (Kind.ALL_GATHER, True, True),
        (Kind.ALL_TO_ALL, True, False),
        (Kind.ALL_TO_ALL, False, True),
        (Kind.ALL_REDUCE, True, False),
    ],
)
def test_what_overwrites_its_input_is_run_once_between_checks(kind: Kind, in_place: bool, repeatable: bool) -> None:
    gloo = Gloo()
    gloo.reserve(480, 480)
    assert ReadyCall(Entrant("gloo", in_place=in_place), case_of(kind), gloo).repeatable is repeatable


def test_rounds_have_a_median_and_a_spread() -> None:
    rounds = Rounds(tuple(float(value) for value in range(1, 12)))
    assert (rounds.p10_us, rounds.median_us, rounds.p90_us) == (2.0, 6.0, 10.0)


def gloo_is_right(group: dist.ProcessGroup) -> list[str]:
    """Every collective that Gloo has, checked as the studies do it."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gloo, errors = Gloo(group), []
    gloo.reserve(4096, 4096)
    for kind in KINDS:
        case = Case(kind, rounded_bytes(960, world_size), torch.float32, rank, world_size, CPU)
        for candidate in candidates_of(gloo, kind):
            prepared = ReadyCall(candidate, case, gloo)
            for seed in (1, 2):
                prepared.fill(seed)
                prepared.run()
                error = prepared.error(seed)
                if error is not None:
                    errors.append(f"{kind} {candidate}: {error}")
            prepared.fill(3)
            if prepared.error(3) is None and world_size > 1 and not (kind is Kind.BROADCAST and rank == 0):
                errors.append(f"{kind} {candidate}: accepted without a run")
    return errors


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gloo_passes_the_check_and_nothing_passes_without_running(pool: RankPool, world_size: int) -> None:
    assert pool.run(gloo_is_right, world_size) == [[]] * world_size


def meter_facts(group: dist.ProcessGroup) -> dict[str, Any]:
    meter = Meter(CPU, group=group)
    rank = dist.get_rank(group)
    runs: list[str] = []

    def fail_on_one() -> None:
        if rank == 1:
            raise OSError("no room")

    rounds = meter.rounds(
        {"a": Job(lambda: runs.append("a")), "b": Job(lambda: runs.append("b"), repeats=2, calls=2)},
        warmup=1,
        repeats=3,
    )
    return {
        "raised": meter.attempt(fail_on_one),
        "returned": meter.attempt(lambda: "bad bytes" if rank == 2 else None),
        "fine": meter.attempt(lambda: None),
        "nothing to say": meter.attempt(lambda: ""),
        "long": meter.agree("x" * 5000 if rank == 0 else None),
        "runs": "".join(runs),
        "times": [rounds[name].times_us for name in ("a", "b")],
    }


def test_meters_agree_and_interleave(pool: RankPool) -> None:
    facts = pool.run(meter_facts, 3)
    for found in facts:
        assert found["raised"] == "rank 1: OSError: no room" and found["returned"] == "rank 2: bad bytes"
        assert found["fine"] is None and found["nothing to say"] is None and found["long"].startswith("rank 0: xxx")
        # In every round each job, in an order that all ranks have; a sample of b runs it twice. Times: the slowest's.
        assert {found["runs"][at : at + 3] for at in range(0, 12, 3)} == {"abb", "bba"}
        assert all(found[name] == facts[0][name] for name in ("runs", "times")) and {*map(len, found["times"])} == {3}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_timed_on_a_device_is_the_call_alone(device: str) -> None:
    made: list[str] = []

    class Library(Implementation):
        name, launches = "library", ("eager",)

        def tensors(self, case: object, candidate: Entrant) -> Tensors:
            return Tensors(torch.empty(1), torch.empty(1))

        def bind(self, case: object, tensors: Tensors, variant: str) -> Callable[[], object]:
            return functools.partial(made.append, f"bound {variant}")

        def start(self, case: object, tensors: Tensors, variant: str) -> Callable[[], None]:
            return functools.partial(made.append, f"waited for {variant}")

    case: Any = SimpleNamespace(device=torch.device(device), sizes=())
    case.parts = (case,)
    library: Any = Library()
    job = ReadyCall(Entrant("library", "window"), case, library, calls=3).job()
    assert (job.repeats, job.calls) == (3, 3)
    job.run()
    assert made == [{"cuda": "bound window", "cpu": "waited for window"}[device]]


@pytest.mark.parametrize(
    ("device", "launch", "nbytes", "hidden"),
    [
        ("cuda", "eager", 48 << 14, False),
        ("cuda", "eager", 48 << 20, True),
        ("cuda", "graph", 480, True),
        ("cpu", "eager", 48 << 20, False),
    ],
)
def test_launches_are_no_part_of_graphs_and_of_what_takes_long(
    device: str, launch: str, nbytes: int, hidden: bool
) -> None:
    case = dataclasses.replace(case_of(Kind.ALL_GATHER, nbytes=nbytes), device=torch.device(device))
    assert hides_launches(case, Entrant("nccl", launch=launch)) == hidden


@pytest.mark.parametrize(
    ("device", "nbytes", "expected"),
    [
        ("cuda", 960, [({"graph"}, 5), ({"eager"}, 5 * HOST_ROUNDS)]),
        ("cuda", 480 << 20, [({"eager", "graph"}, 5)]),
        ("cpu", 960, [({"eager", "graph"}, 5)]),
    ],
)
def test_what_the_host_limits_is_sampled_more_often(
    device: str, nbytes: int, expected: list[tuple[set[str], int]]
) -> None:
    asked = []

    class Recorder:
        def rounds(self, jobs: dict[Entrant, Any], *, warmup: int, repeats: int) -> dict[Entrant, Rounds]:
            assert warmup == 2
            asked.append(({candidate.launch for candidate in jobs}, repeats))
            return {candidate: Rounds((float(len(asked)),)) for candidate in jobs}

    case = dataclasses.replace(case_of(Kind.ALL_GATHER, nbytes=nbytes), device=torch.device(device))
    meter: Any = Recorder()
    bound: Any = SimpleNamespace(job=lambda hidden_us: hidden_us)
    prepared = {Entrant("nccl", launch=launch): bound for launch in LAUNCHES}
    times = time_candidates(meter, prepared, case, CollectiveOptions(repeats=5, warmup=2))
    assert asked == expected and set(times) == set(prepared)
