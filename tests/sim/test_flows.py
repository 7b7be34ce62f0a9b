"""Fair sharing: rates that anyone can work out by hand, and properties that hold for any mixture of flows."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidelane_lab.machines.load import named
from sidelane_lab.sim.flows import VirtualTime


def end_times(capacities, flows):
    """Run flows (start, bytes, weights) and return when each ends."""
    ends: dict[int, float] = {}
    time = VirtualTime(capacities, lambda ended: ends.update(dict.fromkeys(ended, time.now)))
    for index, (start, nbytes, weights) in enumerate(flows):
        time.at(start, time.start, nbytes, weights, index)
    while time.step():
        pass
    return [ends[index] for index in range(len(flows))]


def test_a_flow_alone_runs_at_its_narrowest_resource():
    assert end_times([100.0, 50.0], [(0.0, 1000.0, {0: 1.0, 1: 1.0})]) == pytest.approx([20.0])


def test_equal_flows_share_a_resource_and_speed_up_when_one_ends():
    # Both at 50 until 1000 of the first have passed (20 us); the second then has 1000 left at 100.
    assert end_times([100.0], [(0.0, 1000.0, {0: 1.0}), (0.0, 2000.0, {0: 1.0})]) == pytest.approx([20.0, 30.0])


def test_a_flow_held_elsewhere_leaves_its_share_to_others():
    # Flow 0 is held to 20 by resource 1; flow 1 gets the other 80 of resource 0.
    ends = end_times([100.0, 20.0], [(0.0, 200.0, {0: 1.0, 1: 1.0}), (0.0, 800.0, {0: 1.0})])
    assert ends == pytest.approx([10.0, 10.0])


def test_weights_count():
    # A broadcast writes each byte twice through its engine.
    assert end_times([100.0], [(0.0, 1000.0, {0: 2.0})]) == pytest.approx([20.0])


def test_a_late_flow_slows_the_one_that_runs():
    # 500 pass alone in 5 us, then both at 50.
    assert end_times([100.0], [(0.0, 1000.0, {0: 1.0}), (5.0, 500.0, {0: 1.0})]) == pytest.approx([15.0, 15.0])


flow = st.tuples(
    st.floats(0, 50),
    st.floats(1, 1e4),
    st.dictionaries(st.integers(0, 3), st.sampled_from([1.0, 2.0]), min_size=1, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(flow, min_size=1, max_size=8))
def test_no_resource_carries_more_than_it_can_and_none_idles_needlessly(flows):
    capacities = [100.0, 60.0, 40.0, 25.0]
    ends = end_times(capacities, flows)
    for resource, capacity in enumerate(capacities):
        used = [(s, e, n * w[resource]) for (s, n, w), e in zip(flows, ends, strict=True) if resource in w]
        if used:
            assert sum(load for _, _, load in used) <= capacity * (
                max(e for _, e, _ in used) - min(s for s, _, _ in used)
            ) * (1 + 1e-6)
    for (start, nbytes, weights), end in zip(flows, ends, strict=True):
        alone = max(nbytes * weight / capacities[r] for r, weight in weights.items())
        # At worst every other flow goes first.
        others = sum(max(n * x / capacities[r] for r, x in w.items()) for _, n, w in flows)
        assert alone * (1 - 1e-9) <= end - start <= others + 50 + 1e-6


def plain_end_times(capacities, flows):
    """The same by brute force: every rate anew at every event, over every resource."""
    left = {index: flow[1] for index, flow in enumerate(flows)}
    ends: dict[int, float] = {}
    now = 0.0
    while left:
        running = [i for i in left if flows[i][0] <= now]
        rates = dict.fromkeys(running, 0.0)
        growing, free = set(running), list(capacities)
        while growing:
            loads = [sum(flows[i][2].get(r, 0.0) for i in growing) for r in range(len(capacities))]
            step = min(free[r] / loads[r] for r in range(len(capacities)) if loads[r])
            for i in growing:
                rates[i] += step
            free = [f - step * load for f, load in zip(free, loads, strict=True)]
            full = {r for r, f in enumerate(free) if f <= 1e-9 * capacities[r]}
            growing = {i for i in growing if full.isdisjoint(flows[i][2])}
        starts = [flows[i][0] - now for i in left if flows[i][0] > now]
        step = min([left[i] / rates[i] for i in running] + starts)
        now += step
        for i in running:
            left[i] -= rates[i] * step
            if left[i] <= 1e-9 * flows[i][1]:
                ends[i] = now
                del left[i]
    return [ends[index] for index in range(len(flows))]


@settings(max_examples=150, deadline=None)
@given(st.lists(flow, min_size=1, max_size=10))
def test_computing_only_what_changed_gives_the_same_times(flows):
    capacities = [100.0, 60.0, 40.0, 25.0]
    assert end_times(capacities, flows) == pytest.approx(plain_end_times(capacities, flows), rel=1e-6, abs=1e-6)


def turns(offsets, slices=400):
    """Share of a port's speed that ranks reach whose engine serves one peer after the other, a slice at a time.

    A port divides itself evenly among those who send to it; ``offsets``: slices by which a rank begins later.
    """
    ranks = len(offsets)
    orders = [[(rank + turn) % ranks for turn in range(1, ranks)] for rank in range(ranks)]
    late, left, sent, now = list(offsets), [1.0] * ranks, [0] * ranks, 0.0
    while now < slices:
        going = [rank for rank in range(ranks) if late[rank] <= 1e-12]
        to = {rank: orders[rank][sent[rank] % (ranks - 1)] for rank in going}
        speed = {rank: 1 / list(to.values()).count(to[rank]) for rank in going}
        step = min([left[rank] / speed[rank] for rank in going] + [one for one in late if one > 1e-12])
        now += step
        for rank in range(ranks):
            if rank not in to:
                late[rank] -= step
                continue
            left[rank] -= speed[rank] * step
            if left[rank] < 1e-9:
                left[rank], sent[rank] = 1.0, sent[rank] + 1
    return min(sent) / now


def test_queues_that_share_an_engine_leave_what_the_description_says_unless_ranks_are_in_step():
    """Four that take turns among their peers lose two fifths if they begin at any time: ``dma.shared_queues`` as it was
    measured. In step they lose nothing, and begun a quarter of a copy after each other, a quarter.
    """
    assert turns([0.0] * 4) == pytest.approx(1, rel=0.01)
    draw = random.Random(1)
    usual = statistics.median(turns([0.0, *(draw.uniform(0, 2) for _ in range(3))]) for _ in range(100))
    assert float(named("h200x4").dma.shared_queues) == pytest.approx(usual, rel=0.05)
    assert turns([0.0, 0.25, 0.5, 0.75]) == pytest.approx(0.75, rel=0.01)


@pytest.mark.parametrize("ends_first", [False, True])
def test_flows_that_end_and_events_of_the_same_time_have_an_order(ends_first):
    happened: list[str] = []
    time = VirtualTime([1.0], happened.extend, ends_first=ends_first)
    time.start(10.0, {0: 1.0}, "flow")
    for name in ("event", "next event"):
        time.at(10.0, happened.append, name)
    while time.step():
        assert time.now == 10.0
    assert happened == (["flow", "event", "next event"] if ends_first else ["event", "next event", "flow"])
