"""Ways that are compared: what each notes of the library's choice, and a failure on one rank of several."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane.errors import PeerTimeoutError
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Job, Rounds, Way


class Chosen(Way):
    """A call of a library that remembers its last choice, as a graph or not: a replay chooses nothing."""

    last = ""

    def __init__(self, label: str, *, as_graph: bool) -> None:
        self.label, self.as_graph = label, as_graph
        self.noted, self._captured = "", False

    def fill(self, seed: int) -> None: ...

    def run(self) -> None:
        if not self._captured:
            Chosen.last = self.label

    def error(self, seed: int) -> str | None:
        return None

    def capture(self) -> None:
        self.run()
        self._captured = True

    def settle(self) -> None:
        self.noted = Chosen.last


def notes(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    names = {"eager": False, "graph": True, "another": False, "another graph": True}
    made = {name: Chosen(name, as_graph=as_graph) for name, as_graph in names.items()}
    meter = Meter(torch.device("cpu"), group=group)
    makers = {name: (lambda way=way: way) for name, way in made.items()}
    found = meter.compare(makers, itertools.count(), lambda ready: {})
    return [(one.key, one.way.noted) for one in found if one.way is not None]


def test_a_graph_notes_the_choice_of_its_capture(pool: RankPool) -> None:
    for found in pool.run(notes, 1):
        assert [key for key, _ in found] == [noted for _, noted in found] and len(found) == 4


class Gathering(Way):
    """A way whose check reads numbers of all ranks, and whose rank 1 fails before it where it is to."""

    def __init__(self, label: str, meter: Meter, events: list[str]) -> None:
        self.label, self._meter, self._events = label, meter, events
        self.graphs = (Reset(events, label),)
        self.stepped("make")

    def stepped(self, step: str) -> None:
        if self.label == step and self._meter.rank == 1:
            raise RuntimeError(f"out of luck: {step}")

    def fill(self, seed: int) -> None: ...

    def run(self) -> None:
        self.stepped("run")
        refused = self._meter.attempt(lambda: self.stepped("inner step"))  # as windows do, which a way makes
        if refused is not None:
            raise ValueError(refused)

    def error(self, seed: int) -> str | None:
        self.stepped("error")
        ranks = [rank for (rank,) in self._meter.of_all_ranks([float(self._meter.rank)])]
        self.stepped("judgement")
        return None if ranks == [0, 1] else f"numbers of other calls: {ranks}"


class Reset:
    """A graph in the place of CUDA's."""

    def __init__(self, events: list[str], label: str) -> None:
        self._events, self._label = events, label

    def reset(self) -> None:
        self._events.append(self._label)


STEPS = ("right", "make", "run", "inner step", "error", "judgement", "right, too")


def failed_steps(group: dist.ProcessGroup, late: bool) -> tuple[dict[str, str | None], list[str]]:
    """Return the outcome of each way on this rank, and the graphs that were reset; ``late``: the rounds time out."""
    meter, events = Meter(torch.device("cpu"), group=group), list[str]()
    makers = {label: functools.partial(Gathering, label, meter, events) for label in STEPS}

    def timed(ready: dict[str, Gathering]) -> dict[str, Rounds]:
        if late:
            raise PeerTimeoutError("the device did not finish", ranks=[1])
        return meter.rounds({key: Job(way.run) for key, way in ready.items()}, warmup=0, repeats=1)

    try:
        found = meter.compare(makers, itertools.count(), timed)
    except PeerTimeoutError:
        return {}, events
    return {one.key: None if one.problem is None else one.problem.text for one in found}, events


def test_every_rank_names_the_step_that_failed_on_one_and_goes_on_with_the_next(pool: RankPool) -> None:
    said = {step: f"rank 1: RuntimeError: out of luck: {step}" for step in STEPS}
    said["inner step"] = f"rank 0: ValueError: {said['inner step']}"  # all ranks have heard of it, and raise
    for found, reset in pool.run(failed_steps, 2, False):
        assert found == said | {"right": None, "right, too": None}
        assert set(reset) >= set(STEPS) - {"make"}, "a way that is closed has no graph"


def test_graphs_go_before_a_time_out_reaches_whoever_closes_the_communicator(pool: RankPool) -> None:
    for found, reset in pool.run(failed_steps, 2, True):
        assert not found and {"right", "right, too"} <= set(reset)
