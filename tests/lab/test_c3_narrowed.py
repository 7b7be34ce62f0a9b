"""What gets all rounds of a study: calls that a look does not show to be slower, and no launch twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from sidelane.c3.strategies import named
from sidelane_lab.pairs.comparison import WORTH, aliases_of, lasting, narrowed
from sidelane_lab.pairs.pair import PairLaunch


@dataclasses.dataclass(frozen=True)
class Call:
    label: str


FAST, NEAR, SLOW = Call("fast"), Call("near"), Call("slow")
LOOKED = {"fast": [100.0, 190.0], "near": [300.0, 100.0 * WORTH], "slow": [101.0 * WORTH, 500.0]}


class Looks:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def look(self, runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Sequence[float]]:
        self.asked += runs
        return {label: LOOKED[label.partition(" ")[2]] for label in runs}


def test_the_best_round_of_a_look_decides() -> None:
    assert lasting([("fast", "near", "slow"), ("slow",), ("unknown",)], LOOKED) == {"fast", "near", "slow"}
    assert lasting([("fast", "near", "slow")], LOOKED) == {"fast", "near"}


def test_only_what_has_rivals_is_looked_at() -> None:
    calls = [("c3_base", FAST, 0), ("c3_base", NEAR, 0), ("c3_base", SLOW, 0), ("c3_rp", SLOW, 8), ("c3_rp", FAST, 16)]
    planned = {f"{name}{units} {call.label}": (named(name), call, units) for name, call, units in calls}
    launches = {label: PairLaunch(label, lambda: None) for label in planned}
    looks = Looks()
    left = narrowed(planned, launches, looks)
    assert looks.asked == ["c3_base0 fast", "c3_base0 near", "c3_base0 slow"]
    assert list(left) == ["c3_base0 fast", "c3_base0 near", "c3_rp8 slow", "c3_rp16 fast"], (
        "numbers of units are no rivals"
    )
    del launches["c3_base0 fast"], launches["c3_base0 near"]
    assert narrowed(planned, launches, looks) == launches


def test_a_partition_of_nothing_is_the_same_launch() -> None:
    calls = [
        ("conccl", FAST, 0),
        ("conccl_rp", FAST, 0),
        ("conccl_rp", SLOW, 0),
        ("conccl_left", FAST, 0),
        ("sm_rp", FAST, 0),
    ]
    planned = {f"{name} {call.label}": (named(name), call, units) for name, call, units in calls}
    assert aliases_of(planned) == {"conccl_rp fast": "conccl fast"}, "another call, order or mover is another launch"
    assert not aliases_of({"conccl": (named("conccl"), FAST, 0), "conccl_rp": (named("conccl_rp"), FAST, 8)})
