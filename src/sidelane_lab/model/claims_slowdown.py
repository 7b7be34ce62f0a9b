"""What arXiv 2507.03114 claims of computation beside communication, as the model predicts it on its four machines.

Only its abstract is at hand. Means are bracketed by steps with little and with much communication; the slowdown by what
the numbers of the descriptions leave open, too. No number was taken from it; but which steps these are was settled with
predictions in view, so that the claims are "seen".
"""

from __future__ import annotations

import functools

from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import Check, Role
from sidelane_lab.model.slowdown import platforms, sequence_span, slower_span

Brackets = dict[str, list[float]]


class SlowdownContext:
    """Brackets of the four machines, made when first asked for. The machine given is not used."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine

    @functools.cached_property
    def slower(self) -> Brackets:
        """Percent that kernels take longer, least and most by GPU."""
        return {name: list(slower_span(machine)) for name, machine in platforms().items()}

    @functools.cached_property
    def sequence(self) -> Brackets:
        """Percent that a step takes longer one after the other, least and most by GPU."""
        return {name: list(sequence_span(machine)) for name, machine in platforms().items()}


def checks() -> list[Check[SlowdownContext]]:
    """Every claim of the abstract."""
    unknown = "the abstract does not say which model, batch and precision that is"
    seen = Role.SEEN
    return [
        Check("CO-01", seen, lambda c: c.slower, within=all_bracketed, miss=MISSES.get("CO-01", "")),
        Check("CO-02", seen, lambda c: _most(c.slower), incomparable=unknown),
        Check("CO-03", seen, lambda c: c.sequence, within=all_bracketed, miss=MISSES.get("CO-03", "")),
        Check("CO-04", seen, lambda c: _most(c.sequence), incomparable=unknown),
    ]


MISSES = {
    "CO-03": "overlap loses on an MI250: its dies have memory's interference from an MI300X, and a link to every other",
}
GIVEN: dict[str, str] = {}
NOT_MODELLED: dict[str, str] = {}


def all_bracketed(claimed: float, predicted: Brackets) -> bool:
    """True if a mean lies between the least and the most of every GPU."""
    return all(low <= claimed <= high for low, high in predicted.values())


def _most(predicted: Brackets) -> float:
    return max(high for _, high in predicted.values())
