"""Computation beside the library's collectives on the four machines of arXiv 2507.03114."""

from __future__ import annotations

import pytest

from sidelane_lab.model.layer import Step
from sidelane_lab.papers.slowdown import (
    CLAIMS,
    MODELS,
    SEQUENCE,
    TOKENS,
    SlowdownContext,
    all_bracketed,
    overlapped,
    platforms,
)

MACHINES = platforms()


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_more_tokens_have_less_communication_beside_them(name, model):
    found = [overlapped(MACHINES[name], Step(model, tokens, SEQUENCE)) for tokens in (*TOKENS, 1 << 16)]
    slower = [one.slower for one in found]
    assert slower == sorted(slower, reverse=True) and 0 < slower[-1] < 1.5
    shares = [one.communication for one in found]
    assert shares == sorted(shares, reverse=True)


def test_a_collective_that_leaves_memory_alone_slows_less():
    """What is left are the units that it takes: whole waves more, and element-wise kernels with fewer."""
    step, machine = Step(MODELS[0], 2048, SEQUENCE), MACHINES["MI210"]
    quiet = overlapped(machine.with_value("interference.memory", 0), step)
    assert 0 < quiet.slower < 0.6 * overlapped(machine, step).slower


def test_one_after_the_other_is_what_hiding_and_slowing_come_to():
    """Nobody hides more than there is: the sequence is longer by no more than the communication."""
    for machine in MACHINES.values():
        for model in MODELS:
            one = overlapped(machine, Step(model, 1024, SEQUENCE))
            assert -one.slower < one.sequence < 100 * one.communication


@pytest.mark.long
def test_the_published_mean_is_bracketed_on_all_four_and_a_bracket_can_fail():
    context = SlowdownContext()
    assert all_bracketed(18.9, context.slower)
    assert not all_bracketed(80.0, context.slower) and not all_bracketed(0.5, context.slower)
    assert not all_bracketed(10.2, context.sequence)
    for name, machine in MACHINES.items():
        most = max(overlapped(machine, Step(model, TOKENS[0], SEQUENCE)).slower for model in MODELS)
        assert context.slower[name][0] < most < context.slower[name][1]
    assert {check.claim_id for check in CLAIMS if check.incomparable} == {"CO-02", "CO-04"}
