"""PyTorch's operators on symmetric memory as baselines, with the operators played by sums of made-up peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Here, and not by whichever test comes first: importing it looks operators up in torch.ops, which tests replace.
import torch.distributed._symmetric_memory as symm_mem

from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane_lab.baselines.baselines_symm_mem import OPERATORS, SymmetricMemoryOperators
from sidelane_lab.baselines.candidate import Entrant, ReadyCall, candidates_of
from sidelane_lab.baselines.reference import KINDS, Case, fill_input
from sidelane_lab.baselines.roster import Roster
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.collectives import CollectiveOptions, CollectiveRow, measure_case

CPU = torch.device("cpu")
RANKS, NBYTES = 4, 256
OUT, IN = False, True


class Alone:
    """A meter of one rank."""

    def attempt(self, step: Callable[[], str | None]) -> str | None:
        try:
            error = step()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        return None if error is None else f"rank 0: {error}"


class Torch:
    """``torch.ops.symm_mem`` for one of four ranks; the others have the inputs of ``seed``."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        self.case, self.seed = case, seed
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in {found.name for found in OPERATORS.values()}:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return getattr(Operators, name)(self, *arguments)

        return call

    def summed(self, mine: torch.Tensor) -> torch.Tensor:
        total = mine.clone()
        for rank in set(range(RANKS)) - {self.case.rank}:
            theirs = torch.empty_like(mine)
            fill_input(Case(self.case.kind, NBYTES, self.case.dtype, rank, RANKS, CPU), theirs, self.seed)
            total += theirs
        return total

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(RANKS)[self.case.rank]


class Operators:
    """What each operator does, with the arguments of its schema."""

    @staticmethod
    def _low_contention_all_gather(torch_: Torch, tensor: torch.Tensor, group: str) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(RANKS)]
        for rank, part in enumerate(parts):
            fill_input(Case(Kind.ALL_GATHER, NBYTES, tensor.dtype, rank, RANKS, CPU), part, torch_.seed)
        parts[torch_.case.rank] = tensor
        return torch.cat(parts)

    @staticmethod
    def _low_contention_reduce_scatter(torch_: Torch, tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return torch_.own(torch_.summed(tensor)).clone()

    @staticmethod
    def one_shot_all_reduce_out(torch_: Torch, input: torch.Tensor, op: str, group: str, out: torch.Tensor) -> None:
        out.copy_(torch_.summed(input))

    @staticmethod
    def one_shot_all_reduce_copy_out(
        torch_: Torch, symm_buffer: torch.Tensor, local_input: torch.Tensor, op: str, group: str, out: torch.Tensor
    ) -> None:
        assert symm_buffer.data_ptr() != local_input.data_ptr()
        out.copy_(torch_.summed(symm_buffer.copy_(local_input)))

    @staticmethod
    def two_shot_all_reduce_(torch_: Torch, input: torch.Tensor, op: str, group: str) -> None:
        input.copy_(torch_.summed(input))

    @staticmethod
    def two_shot_all_reduce_out(torch_: Torch, input: torch.Tensor, op: str, group: str, output: torch.Tensor) -> None:
        whole = torch_.summed(input)
        torch_.own(input).copy_(torch_.own(whole))
        output.copy_(whole)

    @staticmethod
    def reduce_scatter_out(
        torch_: Torch, input: torch.Tensor, group: str, split_last_dim: bool, output: torch.Tensor
    ) -> None:
        assert not split_last_dim
        output.copy_(torch_.own(torch_.summed(input)))


def case_of(kind: Kind, rank: int = 1) -> Case:
    return Case(kind, NBYTES, torch.bfloat16, rank, RANKS, CPU)


def made(monkeypatch: pytest.MonkeyPatch, meter: Any = None, *, offset: int = 0) -> SymmetricMemoryOperators:
    def rendezvous(tensor: torch.Tensor, group: str) -> Any:
        return SimpleNamespace(rank=0, buffer_ptrs=[tensor.data_ptr() - offset])

    monkeypatch.setattr(symm_mem, "empty", torch.empty)
    monkeypatch.setattr(symm_mem, "rendezvous", rendezvous)
    implementation = SymmetricMemoryOperators(CPU, meter or Alone(), SimpleNamespace(group_name="all"))
    implementation.reserve(NBYTES, NBYTES)
    return implementation


def play(monkeypatch: pytest.MonkeyPatch, operators: Any) -> None:
    waiting = SimpleNamespace(wait_tensor=lambda tensor: tensor)
    monkeypatch.setattr(torch, "ops", SimpleNamespace(symm_mem=operators, _c10d_functional=waiting))


EVERY = [
    (Kind.ALL_GATHER, "", OUT),
    (Kind.REDUCE_SCATTER, "direct", OUT),
    (Kind.REDUCE_SCATTER, "low_contention", OUT),
    (Kind.REDUCE_SCATTER, "direct", IN),
    (Kind.ALL_REDUCE, "one_shot", OUT),
    (Kind.ALL_REDUCE, "two_shot_out", OUT),
    (Kind.ALL_REDUCE, "one_shot_copy", IN),
    (Kind.ALL_REDUCE, "two_shot", IN),
    (Kind.ALL_REDUCE, "two_shot_out", IN),
]


def test_which_candidates_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = made(monkeypatch)
    found = [(kind, c) for kind in KINDS for c in candidates_of(implementation, kind)]
    assert [(kind, c.variant, c.in_place) for kind, c in found if c.launch == "eager"] == EVERY
    assert len(found) == 2 * len(EVERY)  # and each in graphs
    assert not any("multimem" in operator.name for operator in OPERATORS.values())


@pytest.mark.parametrize(("kind", "variant", "in_place"), EVERY)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_output_that_is_checked_is_what_the_operator_made(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, variant: str, in_place: bool, rank: int
) -> None:
    operators = Torch(case_of(kind, rank))
    play(monkeypatch, operators)
    candidate = Entrant("symm_mem", variant, in_place)
    prepared = ReadyCall(candidate, operators.case, made(monkeypatch))
    prepared.fill(1)
    assert prepared.error(1) is not None
    prepared.run()
    assert prepared.error(1) is None
    if prepared.repeatable:
        prepared.run()
        assert prepared.error(1) is None


@pytest.mark.parametrize(("kind", "variant", "in_place"), EVERY)
def test_operators_get_arguments_of_their_schema_and_symmetric_inputs(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, variant: str, in_place: bool
) -> None:
    schema = getattr(torch.ops.symm_mem, OPERATORS[kind, variant].name).default._schema
    operators = Torch(case_of(kind))
    play(monkeypatch, operators)
    implementation = made(monkeypatch)
    ReadyCall(Entrant("symm_mem", variant, in_place), operators.case, implementation).run()
    [(_, arguments)] = operators.calls
    kinds = {"Tensor": torch.Tensor, "str": str, "bool": bool}
    assert [kinds[str(argument.type)] for argument in schema.arguments] == [type(a) for a in arguments]
    has_reduce_op = any(argument.name == "reduce_op" for argument in schema.arguments)
    assert [a for a in arguments if isinstance(a, str)] == (["sum"] if has_reduce_op else []) + ["all"]
    first = arguments[0]
    symmetric = implementation._symmetric
    assert symmetric is not None and first.data_ptr() == symmetric.data_ptr()
    assert first.storage_offset() == 0
    assert first.nbytes == operators.case.input_bytes


@pytest.mark.parametrize(("variant", "in_place"), [("two_shot_out", OUT), ("two_shot_out", IN), ("two_shot", IN)])
def test_what_overwrites_its_input_is_run_once_between_checks(
    monkeypatch: pytest.MonkeyPatch, variant: str, in_place: bool
) -> None:
    candidate = Entrant("symm_mem", variant, in_place)
    assert not ReadyCall(candidate, case_of(Kind.ALL_REDUCE), made(monkeypatch)).repeatable


def test_what_keeps_its_input_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReadyCall(Entrant("symm_mem", "one_shot"), case_of(Kind.ALL_REDUCE), made(monkeypatch)).repeatable


@pytest.fixture
def meter(process_group: None) -> Meter:
    return Meter(CPU)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def rows_of(
    implementation: SymmetricMemoryOperators, meter: Meter, case: Case
) -> dict[tuple[str, bool], CollectiveRow]:
    options = CollectiveOptions(launches=("eager",), repeats=1, warmup=0)
    roster = Roster(meter, {"symm_mem": implementation})
    return {(row.variant, row.in_place): row for row in measure_case(roster, case, options, iter([1] * 100))}


def test_a_missing_operator_is_a_note_of_its_row(monkeypatch: pytest.MonkeyPatch, meter: Meter) -> None:
    operators = Torch(case_of(Kind.ALL_REDUCE))
    older = SimpleNamespace(
        one_shot_all_reduce_out=operators.one_shot_all_reduce_out, two_shot_all_reduce_=operators.two_shot_all_reduce_
    )
    play(monkeypatch, older)
    rows = rows_of(made(monkeypatch, meter), meter, operators.case)
    assert {name for name, row in rows.items() if row.correct} == {("one_shot", OUT), ("two_shot", IN)}
    missing = rows["two_shot_out", OUT]
    assert (missing.time_us, missing.correct) == (None, None)
    assert "no torch.ops.symm_mem.two_shot_all_reduce_out" in missing.note


def test_a_refused_case_is_a_note_of_its_row(monkeypatch: pytest.MonkeyPatch, meter: Meter) -> None:
    operators = Torch(case_of(Kind.REDUCE_SCATTER))

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("Not implemented for world_size=3")

    operators.reduce_scatter_out = refuse
    play(monkeypatch, operators)
    rows = rows_of(made(monkeypatch, meter), meter, operators.case)
    assert rows["low_contention", OUT].correct
    assert "world_size=3" in rows["direct", OUT].note
    assert "world_size=3" in rows["direct", IN].note


def test_kernels_are_not_given_memory_that_they_would_look_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = made(monkeypatch, offset=512)
    play(monkeypatch, Torch(case_of(Kind.REDUCE_SCATTER)))
    with pytest.raises(UnavailableError, match="512 bytes behind"):
        ReadyCall(Entrant("symm_mem", "direct"), case_of(Kind.REDUCE_SCATTER), implementation).run()


def test_without_symmetric_memory_it_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no peer access")

    implementation = SymmetricMemoryOperators(CPU, Alone(), SimpleNamespace(group_name="all"))
    monkeypatch.setattr(symm_mem, "empty", refuse)
    with pytest.raises(UnavailableError, match="rank 0: RuntimeError: no peer access"):
        implementation.reserve(NBYTES, NBYTES)


def test_a_torch_that_knows_no_groups_is_told_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def rendezvous(tensor: torch.Tensor, group: str) -> Any:
        if not told:
            raise RuntimeError("get_group_info: no group info associated with the group name all")
        return SimpleNamespace(rank=0, buffer_ptrs=[tensor.data_ptr()])

    monkeypatch.setattr(symm_mem, "empty", torch.empty)
    monkeypatch.setattr(symm_mem, "rendezvous", rendezvous)
    monkeypatch.setattr(symm_mem, "enable_symm_mem_for_group", told.append)
    SymmetricMemoryOperators(CPU, Alone(), SimpleNamespace(group_name="all")).reserve(64, 64)
    assert told == ["all"]
