"""Candidates of a call, and what forbids them."""

from __future__ import annotations

import dataclasses

import pytest
from choices import B2B, BCST, ONE_SHOT, PCPY, calls_of_all_kinds, curve, gather, profile

from sidelane.choice import Abilities, Candidate, candidates, choose, illegal_reason
from sidelane.choice.candidate import (
    BESIDE_KERNEL_BYTES,
    BESIDE_KERNEL_KINDS,
    DMA,
    EVERYTHING,
    IMPLEMENTATIONS,
    SM,
    everything,
    find,
)
from sidelane.config import COMPUTE
from sidelane.program import collective as define
from sidelane.program.collective import REDUCING, Kind, ReduceOp, Reduction
from sidelane.program.shape import CallShape, Variant

PUSHED = Candidate(SM, "two_shot_push")


@pytest.mark.parametrize("kind", Kind)
def test_names_are_unique_and_lead_back(kind: Kind):
    found = everything(kind)
    assert len({candidate.variant for candidate in found}) == len(found)
    assert all(find(kind, candidate.variant) == candidate for candidate in found)
    assert find(kind, "no such") is None


def test_copy_engines_without_a_kernel_run_every_call():
    for call in calls_of_all_kinds():
        assert any(not candidate.launches_kernels for candidate in candidates(call)), call
        assert candidates(call, Abilities()), call


def test_a_narrow_kernel_that_was_not_measured_is_judged_by_the_wide_one():
    wide, narrow = Candidate(SM, "one_shot"), Candidate(SM, "one_shot_narrow")
    given = {"kind": Kind.REDUCE_SCATTER}
    slow = curve(B2B, (1024, 50.0), (1 << 20, 60.0), **given)
    measured = profile(curve(wide, (1024, 5.0), (1 << 20, 10.0), **given), slow)
    beside = CallShape(Kind.REDUCE_SCATTER, 4, 1024, beside=COMPUTE)
    assert choose(measured, beside).candidate == narrow
    measured = profile(*measured.curves, curve(narrow, (1024, 70.0), (1 << 20, 80.0), **given))
    assert choose(measured, beside).candidate == B2B, "its own times count"


def test_a_narrow_kernel_is_for_calls_beside_compute():
    wide, narrow = Candidate(SM, "one_shot"), Candidate(SM, "one_shot_narrow")
    given = {"kind": Kind.REDUCE_SCATTER}
    measured = profile(curve(wide, (1024, 5.0), **given), curve(narrow, (1024, 4.8), **given))
    call = CallShape(Kind.REDUCE_SCATTER, 4, 1024)
    assert choose(measured, call).candidate == wide, "it is the same kernel, and its time chance"
    assert "nothing runs beside" in illegal_reason(call, narrow)


def test_equals_go_by_preference():
    close = profile(curve(PCPY, (1024, 10.0)), curve(ONE_SHOT, (1024, 10.01)), curve(B2B, (1024, 10.04)))
    found = choose(close, gather(1024))
    assert (found.candidate, found.table[1][0]) == (B2B, PCPY)
    apart = profile(curve(PCPY, (1024, 10.0)), curve(B2B, (1024, 10.06)))
    assert choose(apart, gather(1024)).candidate == PCPY


def test_beside_compute_reductions_launch_kernels_on_few_units_and_small_moves_any():
    for call in calls_of_all_kinds():
        if call.beside == COMPUTE:
            kernels = [found.variant for found in candidates(call) if found.launches_kernels]
            small = call.kind in BESIDE_KERNEL_KINDS and not call.listed and call.nbytes <= BESIDE_KERNEL_BYTES
            assert all(small or (call.kind in REDUCING and Variant.of(name).narrow) for name in kernels), call
    assert ONE_SHOT in candidates(gather())
    assert ONE_SHOT in candidates(gather(BESIDE_KERNEL_BYTES, beside=COMPUTE))
    assert ONE_SHOT not in candidates(gather(BESIDE_KERNEL_BYTES + 4, beside=COMPUTE))
    reduction = CallShape(Kind.ALL_REDUCE, 4, 4096, beside=COMPUTE)
    assert [found.variant for found in candidates(reduction) if found.implementation == SM] == [
        "one_shot_narrow",
        "two_shot_narrow",
    ]


@pytest.mark.parametrize(
    ("call", "candidate", "reason"),
    [
        (gather(symmetric=False), BCST, "ordinary memory"),
        (CallShape(Kind.ALL_TO_ALL, 4, 4096, symmetric=False), Candidate(DMA, "swap"), "ordinary memory"),
        (CallShape(Kind.ALL_TO_ALL, 4, 4096, even=False), Candidate(DMA, "swap"), "equal counts"),
        (CallShape(Kind.ALL_TO_ALL, 4, 4096, even=False), ONE_SHOT, "equal counts"),
        (CallShape(Kind.ALL_GATHER, 16, 4096), ONE_SHOT, "ranks at most"),
        (gather(64 << 20, beside=COMPUTE), ONE_SHOT, "takes compute units"),
        (CallShape(Kind.ALL_REDUCE, 4, 4096, listed=True), PUSHED, "one tensor"),
        (CallShape(Kind.ALL_REDUCE, 4, 4096, symmetric=False), PUSHED, "in ordinary memory it is two_shot"),
        (gather(listed=True, mixed=True), ONE_SHOT, "every kind"),
        (gather(listed=True, even=False), ONE_SHOT, "equal counts"),
        (gather(listed=True, uniform=False), ONE_SHOT, "one dtype"),
        (gather(listed=True, tensors=4097), ONE_SHOT, "4096 tensors at most"),
        (gather(listed=True, mixed=True), BCST, "every kind"),
    ],
)
def test_what_is_not_legal_says_why(call: CallShape, candidate: Candidate, reason: str):
    assert reason in illegal_reason(call, candidate)
    assert candidate not in candidates(call)
    assert not illegal_reason(gather(), B2B)


def test_implementations_that_a_machine_lacks():
    assert {candidate.implementation for candidate in candidates(gather())} == set(IMPLEMENTATIONS)
    assert {candidate.implementation for candidate in candidates(gather(), Abilities())} == {DMA}
    assert "not available" in illegal_reason(gather(), ONE_SHOT, Abilities())
    host = dataclasses.replace(EVERYTHING, through_host=True)
    shots = [found.variant for found in candidates(CallShape(Kind.ALL_REDUCE, 2, 4096), host) if found.launches_kernels]
    assert shots == ["one_shot"], "the flags of two shots are slow in host memory"


def test_a_call_is_described_by_what_all_ranks_know():
    uneven = define.all_to_all([[1, 2, 3], [0, 4, 100], [7, 7, 7]])
    call = CallShape.of(uneven, "int32", symmetric=False, captured=True, beside=COMPUTE)
    assert (call.nbytes, call.even, call.world_size, call.captured) == (110, False, 3, True)
    reduced = define.all_reduce((512, 512, 40), Reduction(ReduceOp.SUM, "float32"), in_place=True)
    assert CallShape.of(reduced, "float32", symmetric=True, captured=False, beside="nothing").even
    assert (
        CallShape.of(define.all_gather([64] * 4), "int32", symmetric=True, captured=False, beside="nothing").nbytes
        == 256
    )
    with pytest.raises(ValueError, match="beside.*value='music', allowed=nothing, compute"):
        CallShape.of(uneven, "int32", symmetric=True, captured=False, beside="music")
