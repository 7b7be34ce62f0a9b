"""Predictions of a range: in order, the same by any number of processes, and nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time

import pytest

from sidelane.program.collective import Kind
from sidelane_lab.harness import terminal
from sidelane_lab.machines.load import named
from sidelane_lab.machines.ranges import Variation, predict_each, variations
from sidelane_lab.model.collectives import dma_run, published_program
from sidelane_lab.sim import simulate

MACHINE = named("mi300x8")
SOME = [*variations(MACHINE, ("dma", "links"))][:7]


def numbered(variation: Variation) -> tuple[str, float]:
    return variation.path, float(variation.machine.quantities()[variation.path]) / 3


@pytest.mark.parametrize("processors", [1, 2, 3, 50])
def test_predictions_come_in_order_whoever_makes_them(monkeypatch: pytest.MonkeyPatch, processors: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(processors))
    steps: list[str] = []
    before = set(multiprocessing.active_children())  # ranks of other tests
    assert [*predict_each(SOME, numbered, steps.append)] == [(one, numbered(one)) for one in SOME]
    assert steps[0] == f"1 of 7: {SOME[0].path} = {SOME[0].value:g}" and len(steps) == 7
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(("kind", "variant"), [(Kind.ALL_TO_ALL, "b2b"), (Kind.ALL_TO_ALL, "swap")])
@pytest.mark.parametrize("prelaunched", [False, True])
def test_what_is_remembered_goes_by_every_number_that_a_run_depends_on(kind: Kind, variant: str, prelaunched: bool):
    """Equal times of unlike machines would be those of the first."""
    program = published_program(kind, 1 << 16, MACHINE.gpus, variant, prelaunched)
    changed = [*variations(MACHINE, ("dma", "links", "gpu"))]
    times = [dma_run(one.machine, kind, 1 << 16, variant, prelaunched).time_us for one in changed]
    assert times == [simulate(program, one.machine).time_us for one in changed]


def test_what_a_prediction_raises_is_raised_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2))

    def refuse(variation: Variation) -> float:
        if variation is SOME[3]:
            raise ValueError("no such machine")
        return variation.value

    before = set(multiprocessing.active_children())
    found = predict_each(SOME, refuse)
    assert [next(found)[1] for _ in range(3)] == [one.value for one in SOME[:3]]
    with pytest.raises(ValueError, match="no such machine"):
        next(found)
    assert set(multiprocessing.active_children()) <= before
    with pytest.raises(RuntimeError, match="ended early"):
        [*predict_each(SOME, lambda variation: os._exit(1))]


def test_progress_is_said_in_a_pipe_every_few_seconds(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.setattr(terminal, "PIPED_PROGRESS_S", 0.05)
    before = threading.active_count()
    with terminal.progress("simulating") as update:
        said = ""
        for text in ("...", "[step 1]"):  # a step that says nothing is one as well
            if text != "...":
                update(text)
            end = time.monotonic() + 60
            while not re.search(rf"(?m)^simulating: {re.escape(text)} \(\d+ s\)$", said) and time.monotonic() < end:
                time.sleep(0.02)
                out, err = capfd.readouterr()
                said += err
                assert not out
            assert time.monotonic() < end, said
    assert threading.active_count() == before
