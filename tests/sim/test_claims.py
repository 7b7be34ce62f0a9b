"""Claims: every one has a role, roles can not be cheated, and the issue's targets hold."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
import rich.console

from sidelane.cli.output import STDOUT
from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import NumberSource, Quantity
from sidelane_lab.model import claims_c3, claims_dma, claims_fused, claims_overlap
from sidelane_lab.model.claims import (
    POINTS,
    TOLERANCE,
    Check,
    Role,
    Verdict,
    cited_claims,
    error_of,
    judge,
    problems,
    published,
    with_ranges,
)
from sidelane_lab.model.claims_overlap import BLOCKS
from sidelane_lab.papers.claims import command
from sidelane_lab.papers.claims.sensitivity import draw_sensitivity, sensitivity_table, survival

MACHINE = named("mi300x8")


@pytest.fixture(scope="module")
def verdicts():
    found, wrong = command.evaluate(MACHINE)
    assert wrong == []
    return {verdict.claim_id: verdict for verdict in found}


def test_every_claim_of_the_papers_has_a_role_or_a_reason(verdicts):
    reasons, repeated = command.not_modelled(), command.given()
    assert set(published()) == set(verdicts) | set(reasons) | set(repeated)
    assert len(published()) == len(verdicts) + len(reasons) + len(repeated)
    assert all(reasons.values()) and all(repeated.values())


def test_every_miss_is_explained_and_nothing_else_is(verdicts):
    judged = [verdict for verdict in verdicts.values() if not verdict.incomparable]
    assert [v.claim_id for v in judged if not v.ok and not v.why] == []
    explained = {claim_id for family in command.FAMILIES for claim_id in family.MISSES}
    assert explained == {v.claim_id for v in judged if not v.ok}


def test_all_claims_have_one_tolerance(verdicts):
    """Factors of two had hidden three misses."""
    assert (TOLERANCE, POINTS) == (0.25, 8.0)
    for verdict in verdicts.values():
        if verdict.error is not None and verdict.role is not Role.INPUT and not verdict.incomparable:
            assert verdict.ok is (verdict.error <= (POINTS if verdict.points else TOLERANCE)), verdict
        assert verdict.points is ("ideal" in verdict.unit or verdict.claim_id in ("C3-SPRP-01", "C3-CU-08"))


def test_claims_are_counted_at_stricter_tolerances_and_where_nothing_is_said(verdicts):
    lines = command.counted(list(verdicts.values()))
    held_out = next(line for line in lines if line.startswith("held_out"))
    counts = [int(word) for word in re.findall(r"(\d+) at", held_out)]
    assert len(counts) == 3 and counts == sorted(counts, reverse=True) and counts[0] > counts[2]
    assert "not comparable: 18" in lines and "not spoken to: 20 of 174" in lines
    assert any(line.endswith("4: prior work") for line in lines)


def test_no_claim_is_a_constant_held_against_itself():
    """A machine without the claim's numbers must not meet it."""
    other = named("mi210x4")
    for family in (claims_c3, claims_dma):
        context = {claims_c3: claims_c3.C3Context, claims_dma: claims_dma.DmaContext}[family](other)
        inputs = [check for check in family.checks() if check.role is Role.INPUT]
        met = [check.claim_id for check in inputs if judge(check, context).ok]
        assert set(met) <= {"C3-HEU-05", "CC-08", "DM-ENG-01", "DM-ENG-02", "DM-ENG-03", "DM-ENG-04", "DM-ENG-06"}


def test_priority_is_compared_on_the_gpu_and_the_pair_of_the_claim(verdicts):
    """25.5% (cb-ar on A40) had been met by the maximum of any case on any machine."""
    context = claims_overlap.OverlapContext()
    values = context.of("reduction", ("A40",), BLOCKS[1:], "cb-ar")
    assert verdicts["RA-01"].predicted == max(values)
    assert verdicts["RA-02"].incomparable and not verdicts["RA-02"].ok


def test_a_trigger_of_half_a_microsecond_costs_claims():
    check = next(check for check in claims_dma.checks() if check.claim_id == "DM-PL-01")
    assert MACHINE.dma.trigger_us.high == 0.5
    slow = judge(check, claims_dma.DmaContext(MACHINE.with_value("dma.trigger_us", 0.5)))
    before = judge(check, claims_dma.DmaContext(MACHINE))
    found = survival("dma.trigger_us", "assumed", 0.5, True, [before], [slow])
    assert (found.met, found.of) == (int(slow.ok), 1) and before.ok
    assert found.lost == (() if slow.ok else ("DM-PL-01",))


def test_sensitivity_is_a_table_and_a_picture(tmp_path):
    met, missed = (Verdict("CC-05", "", 1.0, 1.0, "", 0.0, Role.HELD_OUT, ok) for ok in (True, False))
    found = [
        survival("dma.trigger_us", "assumed", 0.05, False, [met], [met]),
        survival("dma.trigger_us", "assumed", 0.5, True, [met], [missed]),
        survival("dma.copy_us", "fitted", 2.4, False, [met], [met]),
        survival("dma.copy_us", "fitted", 4.4, True, [met], [met]),
    ]
    assert [one.met for one in found] == [1, 0, 1, 1] and found[1].lost == ("CC-05",)
    table = sensitivity_table(found, 1)
    assert [line.cells[0] for line in table.lines] == ["dma.trigger_us"]
    assert draw_sensitivity(found, 1, "x", tmp_path).is_file()


def test_all_fitted_claims_and_all_inputs_are_met(verdicts):
    told = (Role.INPUT, Role.FITTED)
    missed = [v.claim_id for v in verdicts.values() if v.role in told and not v.ok and not v.incomparable]
    assert missed == []


# The targets of issue 3 that are held out and met; docs/lab/model.md lists the claims that are missed.
@pytest.mark.parametrize(
    "claim_id",
    [
        "C3-BEST-01",
        "CC-05",
        "CC-07",
        "DM-BC-01",
        "DM-SW-01",
        "DM-BB-02",
        "DM-BB-03",
        "DM-PL-01",
        "DM-FIN-03",
    ],
)
def test_held_out_targets(verdicts, claim_id):
    assert verdicts[claim_id].role is Role.HELD_OUT
    assert verdicts[claim_id].ok, verdicts[claim_id]


def test_half_of_the_size_ranges_are_exact(verdicts):
    assert sum(v.ok for v in verdicts.values() if v.claim_id.startswith(("DM-T1", "DM-T2"))) >= 4


def test_a_held_out_claim_that_a_number_was_fitted_to_is_found():
    dma = dataclasses.replace(MACHINE.dma, trigger_us=Quantity(0.1, NumberSource.FITTED, "DM-PL-01"))
    found = problems(claims_dma.checks(), dataclasses.replace(MACHINE, dma=dma), {})
    assert any(line.startswith("DM-PL-01: held out, but dma.trigger_us was taken") for line in found)


def test_a_missing_role_and_a_fit_to_nothing_are_found():
    checks = [check for check in claims_c3.checks() if check.claim_id != "CC-05"]
    found = problems(checks, MACHINE, {})
    assert any(line.startswith("CC-05: has neither a role") for line in found)
    dma = dataclasses.replace(MACHINE.dma, trigger_us=Quantity(0.1, NumberSource.FITTED, "my eyes"))
    found = problems(checks, dataclasses.replace(MACHINE, dma=dma), {})
    assert "dma.trigger_us: fitted, and names no claim that it was fitted to" in found


def test_the_command_fails_when_roles_are_wrong(verdicts, monkeypatch, capsys):
    monkeypatch.setattr(command, "judge", lambda check, context: verdicts[check.claim_id])
    monkeypatch.setattr(command, "not_modelled", dict)
    assert command.main(command.Options(ranges=False)) == 1
    assert "has neither a role" in capsys.readouterr().err


def test_json_has_the_agreed_keys(verdicts, monkeypatch, capsys):
    monkeypatch.setattr(command, "judge", lambda check, context: verdicts[check.claim_id])
    assert command.main(command.Options(json=STDOUT, ranges=False)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"id", "claimed", "predicted", "unit", "error", "role", "ok"} <= set(rows[0])
    assert {row["role"] for row in rows} == {"input", "fitted", "seen", "held_out"}
    assert all(row["why"] for row in rows if not row["ok"]) and not all(row["comparable"] for row in rows)


def test_predictions_are_shown_whole_at_80_columns(verdicts):
    text = io.StringIO()
    command.show(list(verdicts.values()), rich.console.Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and not any("\u2026" in line for line in lines)
    joined = " ".join(" ".join(lines).split())
    for verdict in verdicts.values():
        assert f"{verdict.claim_id} {verdict.text.split()[0]}" in joined
    right = sum(verdict.ok for verdict in verdicts.values() if verdict.role is Role.HELD_OUT)
    assert any(line.startswith(f"held_out: {right} of ") for line in lines)
    assert joined.count(": NO") == sum(not v.ok and not v.incomparable for v in verdicts.values())


def test_other_machines_and_versions_are_refused():
    with pytest.raises(ValueError, match="no measurements"):
        command.main(command.Options(machine="a100x4"))
    with pytest.raises(ValueError, match="mi300x8"):
        command.evaluate(named("a100x4"))
    with pytest.raises(ValueError, match="allowed=000, 002"):
        command.Options(version="003")


def test_the_versions_of_the_conccl_paper_are_a_switch():
    check = next(check for check in claims_c3.checks() if check.claim_id == "CC-03")
    assert "--version" in claims_c3.GIVEN["C3-HW-08"]
    values = [judge(check, claims_c3.C3Context(MACHINE, version)).predicted for version in ("000", "002")]
    assert values[1] < values[0]


@pytest.mark.parametrize(
    ("claimed", "predicted", "points", "error"),
    [
        (2.0, 2.2, False, 0.1),
        ([10, 20], [11, 18], False, 0.1),
        ({"a": 4}, {"a": 5}, False, 0.25),
        (42, 45, True, 3.0),
        (0, 2, False, 2.0),
        ("b2b", "pcpy", False, None),
        (True, True, False, None),
        ({"a": 1}, {"b": 1}, False, None),
    ],
)
def test_errors(claimed, predicted, points, error):
    assert error_of(claimed, predicted, points=points) == (None if error is None else pytest.approx(error))


def test_ranges_add_independent_deviations():
    verdict = Verdict("x", "", 1.0, 10.0, "", 0.0, Role.HELD_OUT, True)
    ranged = with_ranges(verdict, [13.0, 14.0, 9.0])
    assert (ranged.low, ranged.high) == pytest.approx((9.0, 15.0))
    text = with_ranges(dataclasses.replace(verdict, predicted="b2b"), ["b2b"])
    assert text.low is None


def test_ranges_vary_every_uncertain_number():
    seen = []

    def context(machine):
        seen.append(machine)
        return machine

    check = Check("C3-HW-01", Role.INPUT, lambda machine: float(machine.dma.copy_us))
    family = command._Family(context, [check], frozenset({"dma"}))
    found = command._vary(MACHINE, [family], [float(MACHINE.dma.copy_us)])
    uncertain = [path for path, quantity in MACHINE.quantities().items() if quantity.uncertain]
    assert len(found[0]) == 2 * len(uncertain)
    assert len(seen) == 2 * sum(path.startswith("dma.") for path in uncertain)
    copy = MACHINE.dma.copy_us
    assert {min(found[0]), max(found[0])} == {copy.low, copy.high}


def test_ranges_of_claims_about_another_machine_vary_its_numbers():
    other, seen = named("mi210x4"), []

    def context(machine):
        seen.append(machine)
        return machine

    check = Check("FU-OCC-01", Role.INPUT, lambda machine: float(machine.fused.half_share))
    family = command._Family(context, [check], frozenset({"fused"}), other)
    found = command._vary(MACHINE, [family], [float(other.fused.half_share)])
    assert {machine.name for machine in seen} == {"mi210x4"}
    half = other.fused.half_share
    assert {min(found[0]), max(found[0])} == {half.low, half.high}


def test_numbers_of_another_machine_are_held_to_their_roles():
    other = named("mi210x4")
    fused = dataclasses.replace(other.fused, put_us=Quantity(2.0, NumberSource.FITTED, "FU-SKEW-01"))
    found = problems(claims_fused.checks(), MACHINE, {}, [dataclasses.replace(other, fused=fused)])
    assert "FU-SKEW-01: held out, but mi210x4 fused.put_us was taken from it" in found
    alone = problems(claims_fused.checks(), MACHINE, {})
    assert any(line.startswith("FU-OCC-02: fitted, but no number of mi300x8 names it") for line in alone)


def test_speedups_of_fused_operators_are_within_a_quarter(verdicts):
    """As the issue counts them: times unfused over fused. All shapes are what the text names, or usual ones."""
    for claim_id in ("EMB-01", "EMB-02", "EMB-03", "EMB-04", "GEMV-01", "GEMV-02", "GEMM-01", "GEMM-02"):
        verdict = verdicts[f"FU-{claim_id}"]
        published_speedup, predicted_speedup = (1 / (1 - lower / 100) for lower in (verdict.claimed, verdict.predicted))
        assert predicted_speedup == pytest.approx(published_speedup, rel=0.25), claim_id
        assert verdict.role is Role.HELD_OUT


def test_citations():
    assert cited_claims("CC-02: at par, and C3-T2") >= {"CC-02", "C3-T2-cb1-896M"}
    assert cited_claims("nothing") == set()
    assert "DM-PC-01" not in cited_claims("DM-PC-02 DM-PC-03")
