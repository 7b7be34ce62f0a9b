"""The pool has everything, a sample of the campaign finds nothing, and finds out a verify that overlooks something."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from attack import campaign, report
from attack.__main__ import main
from attack.campaign import Effort, Tally, attack
from attack.edits import places
from attack.interpreter import failure
from attack.known import KNOWN
from attack.messages import messages
from attack.mutations import DISORDERS, MISTAKES, mutants
from attack.programs import FORMS, LISTED, program
from attack.sequences import sequence
from attack.sums import sums
from attack.variations import variation
from sidelane.program.batch import Batch
from sidelane.program.collective import ELEMENT_BYTES, Kind, ReduceOp
from sidelane.program.contract import Contract
from sidelane.program.ir import Broadcast, Program, Reduce, Swap
from sidelane.program.verify import check, contents
from sidelane.program.verify.flags import FlagStates
from sidelane.program.verify.races import Accesses

LIGHT = Effort(right=5, accepted=10, refused=40)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_the_pool_has_everything() -> None:
    rng = random.Random(0)
    seen: Counter[object] = Counter()
    for _ in range(1500):
        for drawn in sequence(rng):
            batch = isinstance(drawn.collective, Batch)
            seen.update([drawn.world_size, "batch" if batch else "single", drawn.variant.partition("+")[0]])
            seen.update(drawn.variant.split("+")[1:])
            seen.update(type(command) for queue in drawn.queues for command in queue.commands)
            if isinstance(drawn.collective, Contract):
                continue
            parts = drawn.collective.parts if isinstance(drawn.collective, Batch) else [drawn.collective]
            seen.update((part.kind, part.in_place) for part in parts)
            seen.update((part.reduction.op, part.reduction.dtype) for part in parts if part.reduction)
    variants = {"b2b", "pcpy", "bcst", "swap", "striped", "relay", "alternating", "own"}
    places_of = {(kind, place) for kind in Kind for place in (False, True)} - {
        (Kind.SCATTER, True),
        (Kind.GATHER, True),
    }
    reductions = {(op, dtype) for op in ReduceOp for dtype in ELEMENT_BYTES}
    forms = {"frozen", "prelaunch", "stamped", "opening"}
    expected = {*range(1, 9), "batch", "single", Broadcast, Swap, Reduce, *variants, *places_of, *reductions, *forms}
    assert not expected - set(seen)
    assert set(LISTED) <= set(Kind)
    assert {word for form in FORMS for word in form.split()} == {"plain", "stamped", "prelaunched", "held", "frozen"}


def test_every_mistake_can_be_made() -> None:
    rng = random.Random(0)
    made: Counter[str] = Counter()
    for _ in range(250):
        programs = sequence(rng)
        chosen = next((p for p in programs if next(places(p, object), None)), None)
        if chosen is None:
            continue
        for name, mistake in MISTAKES.items():
            made[name] += mistake(chosen, rng) is not None
        for name, disorder in DISORDERS.items():
            made[name] += bool(disorder(programs, rng)) and len(programs) > 1
        names, wrong = mutants(programs, rng)
        assert all(isinstance(p, Program) for p in wrong)
        assert 1 <= len(names) <= 3
    assert all(made[name] > 5 for name in (*MISTAKES, *DISORDERS)), made


def test_a_mistake_in_a_program_is_made_wherever_it_stands() -> None:
    one, other = (program(random.Random(seed), 2, "plain") for seed in (1, 2))
    rng = random.Random(0)
    for _ in range(50):
        names, (first, second, *rest) = mutants((one, other, one), rng)
        if set(names) <= set(MISTAKES):
            assert rest == [first]
            assert first is one or second is other


@pytest.mark.parametrize("draw", [messages, sums])
def test_what_is_made_up_is_right_and_wrong(draw: Callable[[random.Random], Program]) -> None:
    found = Counter(failure([draw(random.Random(seed))] * 4, range(20)) is None for seed in range(60))
    assert min(found[True], found[False]) > 12


def test_variations_stay_right() -> None:
    rng = random.Random(0)
    for _ in range(40):
        programs = sequence(rng)
        changed = variation(programs, rng)
        assert len({id(p) for p in changed}) == len({id(p) for p in programs})
        assert failure(changed * 2, range(3)) is None


@pytest.mark.parametrize("name", KNOWN)
def test_verify_has_none_of_the_holes_that_it_had(name: str) -> None:
    """What fails is refused. What is right is accepted, but for a flag that one program adds to and another sets."""
    known = KNOWN[name]
    lines = campaign.refused(known.make())
    assert bool(lines) == (bool(known.shows) or name == "a counter that is also set"), lines
    assert not any("deadlock" in line for line in lines)


# --- the campaign -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_sample_of_the_campaign() -> None:
    total = Tally()
    for number in range(45):
        total.add(attack(18, number, LIGHT))
    assert not total.findings, "\n".join(line for found in total.findings for line in report.described(found))
    assert sum(total.accepted.values()) > 50
    assert sum(total.refused.values()) > 100


def test_cases_depend_on_their_seed_and_number_alone() -> None:
    one, other = attack(1, 2, LIGHT), attack(1, 2, LIGHT)
    assert one == other
    assert one != attack(1, 3, LIGHT)


def test_what_verify_overlooks_is_found_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(campaign, "refused", lambda programs, rounds=None: ())
    output = tmp_path / "attack.json"
    command = ["--seed", "4", "--cases", "3", "--jobs", "1", "--seconds", "60", "--output", str(output)]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert 'again: make attack SEED=4 ATTACK="--case ' in text
    written = json.loads(output.read_text())
    assert written["seed"] == 4
    assert written["cases"] == 3
    found = written["findings"]
    assert found
    assert all(line in text for line in found[0]["listing"])
    assert main(["--seed", "4", "--case", str(found[0]["case"]), "--jobs", "1"]) == 1
    again = capsys.readouterr().out
    assert all(line in again for line in found[0]["listing"])
    assert "steps:" in again


PROOFS = {
    "structure": (check, "check_structure", lambda program: []),
    "values": (check, "check_values", lambda layout: []),
    "deadlocks": (check, "check_progress", lambda order: []),
    "lost signals": (FlagStates, "violations", lambda flags: []),
    "races": (Accesses, "describe", lambda accesses: []),
    "bytes": (check, "check_provenance", lambda order: []),
    "order of sums": (contents, "_is_exact", lambda reduction: True),
    "roundings": (contents, "_goes_on", lambda reduction, is_first: True),
}


@pytest.mark.parametrize("proof", PROOFS)
def test_a_verify_without_one_of_its_proofs_is_found_out(proof: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PROOFS[proof])
    findings = (found for number in range(100) for found in attack(1, number, LIGHT).findings)
    assert next(findings, None)


def test_a_verify_that_refuses_or_stumbles_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "refused", lambda programs, rounds=None: ("race on nothing",))
    assert {found.failure for found in attack(4, 1, LIGHT).findings} == {"refused: race on nothing"}

    def stumbling(programs: object, rounds: int | None = None) -> tuple[str, ...]:
        raise IndexError

    monkeypatch.setattr(campaign, "refused", stumbling)
    assert any(found.failure == "verify raised IndexError()" for found in attack(4, 1, LIGHT).findings)
