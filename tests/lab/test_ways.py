"""Ways that are compared: what each notes of the library's choice."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.ways import Way


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
