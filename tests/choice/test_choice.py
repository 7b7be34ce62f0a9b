"""The pick and its reason."""

from __future__ import annotations

import dataclasses

import pytest
from choices import B2B, BCST, CROSSING, ONE_SHOT, PCPY, calls_of_all_kinds, curve, gather, profile

from sidelane.choice import Abilities, Candidate, candidates, choose
from sidelane.choice.candidate import DMA, SM
from sidelane.choice.profile import parse
from sidelane.choice.store import builtin
from sidelane.config import COMPUTE
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape, Computation


def test_the_fastest_is_taken_and_the_reason_says_how_fast():
    small, large = choose(CROSSING, gather(1024)), choose(CROSSING, gather(1 << 20))
    assert (small.candidate, large.candidate) == (ONE_SHOT, B2B)
    assert "5 us expected, next dma b2b 20 us" in small.reason
    assert [candidate for candidate, _ in large.table[:2]] == [B2B, PCPY]
    assert (BCST, None) in large.table[2:], "what was not measured comes last"
    assert dict(large.table)[ONE_SHOT] is not None, "slower, but known"
    assert choose(CROSSING, gather(1024, beside=COMPUTE)).candidate == ONE_SHOT
    assert choose(CROSSING, gather(16 << 20, beside=COMPUTE)).candidate == B2B
    assert choose(CROSSING, gather(1024), Abilities()).candidate == B2B


def test_a_choice_from_other_measurements_says_so():
    reason = choose(
        CROSSING, dataclasses.replace(gather(in_place=True, captured=True, symmetric=False), world_size=8)
    ).reason
    assert "measured with 4 ranks, out of place, eager, on symmetric memory" in reason
    assert "measured" not in choose(CROSSING, gather()).reason
    assert "measured" not in choose(CROSSING, gather(dtype="float32")).reason, "bytes are bytes where nothing is added"
    added = profile(curve(ONE_SHOT, (1 << 10, 5.0), kind=Kind.REDUCE_SCATTER))
    call = dataclasses.replace(gather(dtype="float32"), kind=Kind.REDUCE_SCATTER)
    assert f"; measured with {added.curves[0].dtype}" in choose(added, call).reason


def test_a_kernel_that_has_to_stage_its_input_takes_that_much_longer():
    measured = profile(
        curve(ONE_SHOT, (1 << 28, 600.0), kind=Kind.REDUCE_SCATTER),
        curve(B2B, (1 << 28, 700.0), kind=Kind.REDUCE_SCATTER),
    )
    call = CallShape(Kind.REDUCE_SCATTER, 4, 1 << 28)
    assert choose(measured, call).candidate == ONE_SHOT
    ordinary = choose(measured, dataclasses.replace(call, symmetric=False))
    assert ordinary.candidate == B2B
    assert dict(ordinary.table)[ONE_SHOT] == pytest.approx(600 + 170, abs=1)


def test_small_reductions_stage_nothing_in_one_shot():
    two_shot = Candidate(SM, "two_shot")
    measured = profile(*(curve(found, (1024, 10.0), kind=Kind.ALL_REDUCE) for found in (ONE_SHOT, two_shot)))
    for nbytes, in_place, one_shot_us in ((1024, False, 10.0), (1 << 20, True, 10240.0), (1 << 20, False, 10242.7)):
        call = CallShape(Kind.ALL_REDUCE, 4, nbytes, in_place=in_place, symmetric=False)
        times = dict(choose(measured, call).table)
        assert times[ONE_SHOT] == pytest.approx(one_shot_us, rel=1e-4)
        assert times[two_shot] == pytest.approx(10 * nbytes / 1024 + 5 + nbytes / 1.6e6)


def test_ties_go_to_the_copy_engines():
    tied = profile(curve(ONE_SHOT, (1024, 5.0)), curve(B2B, (1024, 5.0)))
    assert choose(tied, gather(1024)).candidate == B2B


def test_nothing_measured_leaves_a_rule_of_thumb():
    small, large = choose(None, gather(1024)), choose(None, gather(64 << 20))
    assert (small.candidate, large.candidate) == (ONE_SHOT, B2B)
    assert "rule of thumb" in small.reason and "rule of thumb" in large.reason
    assert choose(None, gather(1024), Abilities()).candidate == B2B
    assert choose(None, gather(64 << 20), Abilities()).candidate == B2B
    assert choose(None, gather(1024, beside=COMPUTE)).candidate == ONE_SHOT
    assert choose(None, gather(64 << 20, beside=COMPUTE)).candidate == B2B
    assert "reduce_scatter was not measured" in choose(CROSSING, CallShape(Kind.REDUCE_SCATTER, 4, 64 << 20)).reason
    assert choose(CROSSING, CallShape(Kind.SCATTER, 4, 1 << 20)).candidate == B2B


def test_one_rank_alone():
    choice = choose(CROSSING, CallShape(Kind.ALL_GATHER, 1, 1024))
    assert choice.candidate.implementation == DMA
    assert "single rank" in choice.reason


def test_every_call_gets_the_same_legal_choice_every_time():
    for given in (None, CROSSING, builtin("h200x4")):
        read = parse(given.to_text()) if given else None
        for call in calls_of_all_kinds():
            choice = choose(given, call)
            assert choice.candidate in candidates(call)
            assert choice == choose(read, call), "as on another rank"


def beside(us: float, nbytes: int, **shares: float) -> CallShape:
    return gather(nbytes, beside=COMPUTE, computation=Computation(us, **shares))


def test_a_computation_of_known_time_is_weighed():
    """Kernels: 5 us and 50, of which nothing is hidden; copies: 20 and 25, which disappear behind what is longer."""
    short, long = choose(CROSSING, beside(2.0, 1024)), choose(CROSSING, beside(1000.0, 1024))
    assert (short.candidate, long.candidate) == (ONE_SHOT, B2B)
    assert short.reason == "7 us expected with compute of 2 us, next dma b2b 20 us"
    assert long.reason.startswith("1000 us expected with compute of 1000 us, next dma pcpy 1000 us")
    assert choose(CROSSING, beside(2.0, 1024, copies_hidden=0.0)).candidate == ONE_SHOT
    assert choose(CROSSING, beside(1000.0, 1024, copies_hidden=0.2, kernels_hidden=0.9)).candidate == ONE_SHOT
    assert choose(CROSSING, beside(2.0, 1 << 20)).candidate == B2B


def test_a_computation_that_nobody_can_weigh_is_one_that_wants_all_units():
    for known in (None, profile(curve(B2B, (1024, 20.0), (1 << 20, 25.0)))):
        call = beside(2.0, 1024)
        plain = choose(known, dataclasses.replace(call, computation=None))
        assert choose(known, call) == plain


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf")])
def test_a_computation_takes_time(us: float):
    with pytest.raises(ValueError, match=r"computation: us \(value="):
        Computation(us)


@pytest.mark.parametrize(
    ("kind", "ranks", "kernel", "engines"),
    [
        (Kind.ALL_REDUCE, 2, 32 << 20, 48 << 20),
        (Kind.ALL_REDUCE, 4, 5 << 20, 6 << 20),
        (Kind.ALL_GATHER, 2, 1024, 64 << 20),
        (Kind.ALL_TO_ALL, 2, 32 << 20, 64 << 20),
        (Kind.REDUCE_SCATTER, 8, 64 << 20, 1 << 30),
        (Kind.BROADCAST, 2, 64 << 20, 128 << 20),
    ],
)
def test_through_host_memory(kind: Kind, ranks: int, kernel: int, engines: int) -> None:
    """Times of GPUs that store into each other's memory count for nothing there."""
    host = Abilities((DMA, SM), captures=True, through_host=True)
    for tensors in (1, 8):
        small, large = (
            CallShape(kind, ranks, nbytes, symmetric=False, tensors=tensors) for nbytes in (kernel, engines)
        )
        assert (
            choose(None, small, host).candidate == ONE_SHOT
            and choose(None, large, host).candidate.implementation == DMA
        )
        assert choose(None, small, dataclasses.replace(host, implementations=(DMA,))).candidate.implementation == DMA
    beside = CallShape(kind, ranks, 256 << 20, symmetric=False, beside="compute")
    assert choose(None, beside, host).candidate.launches_kernels == (kind is Kind.REDUCE_SCATTER)
    measured = profile(curve(B2B, (1 << 10, 1.0), kind=kind), curve(ONE_SHOT, (1 << 10, 2.0), kind=kind))
    assert choose(measured, CallShape(kind, ranks, 1024, symmetric=False), host).candidate == B2B, "of this machine"
