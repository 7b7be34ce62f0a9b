"""From an agreed call to its program, where staging cannot be allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from sidelane.choice.store import builtin
from sidelane.collectives import plan as plans
from sidelane.collectives.agreement import Agreement, CallPart
from sidelane.collectives.plan import AUTO, CallProgram, Planner, staging_bytes
from sidelane.execute.base import Capabilities
from sidelane.program import collective as define
from sidelane.program.collective import ReduceOp, Reduction
from sidelane.program.ir import MOVES, Program
from sidelane.program.transform import freeze

MB = 1 << 20


def takes_at_most(nbytes: int) -> Callable[[CallProgram], bool]:
    return lambda program: staging_bytes(program) <= nbytes


@pytest.fixture
def planner() -> Planner:
    return Planner(Capabilities(frozenset(MOVES), "cuda"), profile=builtin("h200x2"), chosen_by="a table")


def captured(size: int, variant: str = AUTO) -> Agreement:
    collective = define.all_reduce([size // 2] * 2, Reduction(ReduceOp.SUM, "bfloat16"))
    return Agreement((CallPart(collective, "bfloat16", (0, 0), (0, size)),), variant, frozen=True)


@pytest.mark.parametrize(("room", "variant"), [(0, "two_shot"), (32 * MB - 1, "two_shot"), (32 * MB, "two_shot_push")])
def test_a_capture_takes_the_best_that_staging_has_room_for(planner: Planner, room: int, variant: str):
    call = captured(64 * MB)
    assert planner.choice(call).candidate.variant == "two_shot_push"
    plan = planner.plan_that_fits(call, takes_at_most(room))
    program, choice = plan.program, plan.choice
    assert program.variant == choice.candidate.variant == variant
    assert ("needs staging that is not there" in choice.reason) == (variant != "two_shot_push")
    assert choice.table == planner.choice(call).table
    assert str(choice) == f"all_reduce of 64M by a kernel ({variant}): {choice.reason}" + "; by a table" * (
        room >= 32 * MB
    )


def test_the_next_capture_may_have_room(planner: Planner):
    call = captured(64 * MB)
    assert planner.plan_that_fits(call, takes_at_most(0)).choice.candidate.variant == "two_shot"
    assert planner.plan_that_fits(call, takes_at_most(64 * MB)).choice.candidate.variant == "two_shot_push"


def test_what_the_caller_named_is_not_replaced(planner: Planner):
    plan = planner.plan_that_fits(captured(64 * MB, "two_shot_push"), takes_at_most(0))
    program, choice = plan.program, plan.choice
    assert program.variant == choice.candidate.variant == "two_shot_push"
    assert str(choice) == "all_reduce of 64M by a kernel (two_shot_push): the caller asked for it"


def test_where_nothing_fits_the_choice_stands(planner: Planner):
    """Whoever allocates says what is missing."""
    plan = planner.plan_that_fits(captured(64 * MB), lambda program: False)
    program, choice = plan.program, plan.choice
    assert program.variant == choice.candidate.variant == "two_shot_push"


def test_flags_come_back_in_captured_calls_alone(planner: Planner):
    call = captured(MB, "b2b")
    frozen, eager = (planner.plan(dataclasses.replace(call, frozen=frozen)).program for frozen in (True, False))
    assert isinstance(frozen, Program) and isinstance(eager, Program)
    assert frozen == freeze(eager) != eager


def test_plans_go_when_their_room_is_needed(planner: Planner, monkeypatch: pytest.MonkeyPatch):
    """The oldest first; what is forgotten leaves room, also where it was never planned."""
    first, *others = (captured(size * MB, "b2b") for size in (1, 2, 3, 4))
    planner.forget(first)
    room = 3 * plans.program_bytes(planner.plan(first).program)
    monkeypatch.setattr(plans, "MOST_PROGRAM_BYTES", room)
    planner.forget(first)
    for call in others:
        planner.plan(call)
    assert [planner.known(call) for call in (first, *others)] == [False, True, True, True]
    planner.plan(first)
    assert [planner.known(call) for call in (first, *others)] == [True, False, True, True]
