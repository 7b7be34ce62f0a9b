"""Events and bytes in motion over shared resources, with max-min fair sharing, in virtual time.

A *flow* is a number of bytes and a weight for every resource that it uses: a broadcast takes 2 from its engine for each
byte of its source. Rates are max-min fair on the flows' own progress. Only what a change can reach is computed again: a
resource whose flows could not fill it, whatever the others do, binds nobody, and links no flow to another.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

Tag = TypeVar("Tag")
EPSILON = 1e-9
FULL = 1 + EPSILON
"""Share of its capacity beyond which a resource is crowded."""

MOST_GROUPS = 1 << 14
"""Groups of flows whose rates are kept."""


class Flow(Generic[Tag]):
    """One flow. ``tag`` is the owner's; ``rate`` in bytes a microsecond; ``route`` the number of its weights."""

    __slots__ = ("ceiling", "rate", "remaining", "route", "since", "tag", "version", "weights")

    def __init__(
        self, nbytes: float, weights: Mapping[int, float], route: int, tag: Tag, ceiling: float, now: float
    ) -> None:
        self.remaining = float(nbytes)
        self.weights = weights
        self.route = route
        self.tag = tag
        self.ceiling = ceiling
        self.rate = 0.0
        self.since = now
        self.version = 0


class FlowNetwork(Generic[Tag]):
    """Resources and the flows on them.

    Args:
        capacities: bytes a microsecond of each resource.
    """

    def __init__(self, capacities: list[float]) -> None:
        self._capacities = capacities
        self._users: list[dict[Flow[Tag], float]] = [{} for _ in capacities]
        self._wanted = [0.0] * len(capacities)  # what the flows of a resource would take if nothing else held them
        self._crowded = [False] * len(capacities)  # resources that those flows could fill
        self._stale: dict[Flow[Tag], None] = {}
        self._ends: list[tuple[float, int, int, Flow[Tag]]] = []
        self._count = 0
        self._routes: dict[tuple[tuple[int, float], ...], int] = {}
        self._rates: dict[tuple[int, ...], dict[int, float]] = {}

    def start(self, nbytes: float, weights: Mapping[int, float], tag: Tag, now: float) -> None:
        """Add a flow at time ``now``. It ends, by ``pop_ended``, when its bytes have passed."""
        capacities, crowded = self._capacities, self._crowded
        ceiling = min([capacities[r] / w for r, w in weights.items()], default=float("inf"))
        route = self._routes.setdefault(tuple(weights.items()), len(self._routes))
        flow = Flow(nbytes, weights, route, tag, ceiling, now)
        self._stale[flow] = None
        for resource, weight in weights.items():
            users = self._users[resource]
            users[flow] = weight
            wanted = self._wanted[resource] = self._wanted[resource] + ceiling * weight
            is_crowded = wanted > capacities[resource] * FULL
            if is_crowded or crowded[resource]:
                crowded[resource] = is_crowded
                self._stale.update(dict.fromkeys(users))

    def next_end(self, now: float) -> float:
        """When the next flow ends if none is added; infinity without flows."""
        self._settle(now)
        while self._ends:
            end, _, version, flow = self._ends[0]
            if version == flow.version:
                return end
            heapq.heappop(self._ends)
        return float("inf")

    def pop_ended(self, now: float) -> list[Tag]:
        """Remove the flows that end at ``now``, in the order in which they were started."""
        ended: list[Flow[Tag]] = []
        while self.next_end_is_due(now):
            flow = heapq.heappop(self._ends)[3]
            flow.version += 1
            ended.append(flow)
        for flow in ended:
            ceiling = flow.ceiling
            for resource, weight in flow.weights.items():
                users = self._users[resource]
                del users[flow]
                # No rounding is left behind the last one.
                wanted = self._wanted[resource] = self._wanted[resource] - ceiling * weight if users else 0.0
                if self._crowded[resource]:
                    self._crowded[resource] = wanted > self._capacities[resource] * FULL
                    self._stale.update(dict.fromkeys(users))
        for flow in ended:
            self._stale.pop(flow, None)
        return [flow.tag for flow in ended]

    def next_end_is_due(self, now: float) -> bool:
        """True if a flow ends at or before ``now`` with the rates as they were last settled."""
        while self._ends and self._ends[0][2] != self._ends[0][3].version:
            heapq.heappop(self._ends)
        return bool(self._ends) and self._ends[0][0] <= now + EPSILON

    def _settle(self, now: float) -> None:
        """Compute the rates that the changes since the last call have touched."""
        if not self._stale:
            return
        group = self._reachable()
        self._stale.clear()
        rates = self._rates_of(group)
        for flow in group:
            rate = rates[flow.route]
            if rate == flow.rate:
                continue  # it ends when it was to end
            flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            flow.version += 1
            self._count += 1
            end = now + flow.remaining / rate if rate > 0 else float("inf")
            heapq.heappush(self._ends, (end, self._count, flow.version, flow))

    def _reachable(self) -> dict[Flow[Tag], None]:
        group = dict(self._stale)
        waiting = list(group)
        seen: set[int] = set()
        while waiting:
            for resource in waiting.pop().weights:
                if self._crowded[resource] and resource not in seen:
                    seen.add(resource)
                    new = [flow for flow in self._users[resource] if flow not in group]
                    group.update(dict.fromkeys(new))
                    waiting.extend(new)
        return group

    def _rates_of(self, group: Mapping[Flow[Tag], None]) -> dict[int, float]:
        """Return the rates of a group by route. Flows of one route have the same, and the routes decide which resources
        are crowded: so a group whose routes have come before has the rates that they had.
        """
        routes = tuple(sorted([flow.route for flow in group]))
        found = self._rates.get(routes)
        if found is None:
            if len(self._rates) >= MOST_GROUPS:
                self._rates.clear()
            found = self._rates[routes] = {flow.route: rate for flow, rate in self._fair_rates(group).items()}
        return found

    def _fair_rates(self, group: Mapping[Flow[Tag], None]) -> dict[Flow[Tag], float]:
        """Progressive filling: all flows grow together; those on the resource that fills first stop there."""
        rates: dict[Flow[Tag], float] = {}
        left: dict[int, float] = {}
        weight_on: dict[int, float] = {}
        is_crowded, capacities, growing = self._crowded, self._capacities, []
        for flow in group:
            is_held = False
            for resource, weight in flow.weights.items():
                if is_crowded[resource]:
                    is_held = True
                    if resource in left:
                        weight_on[resource] += weight
                    else:
                        left[resource], weight_on[resource] = capacities[resource], weight
            if is_held:
                growing.append(flow)
            else:
                rates[flow] = flow.ceiling
        least_ceiling = min([flow.ceiling for flow in growing], default=0.0)
        while growing:
            level = min([left[r] / weight for r, weight in weight_on.items() if weight > EPSILON])
            most = level * FULL
            # A flow whose own ceiling is below the level stops there, and leaves the rest to the others.
            stopped = [flow for flow in growing if flow.ceiling <= most] if least_ceiling <= most else []
            is_limited = bool(stopped)
            if not is_limited:
                full = {r for r, weight in weight_on.items() if weight > EPSILON and left[r] / weight <= most}
                stopped = [flow for flow in growing if not full.isdisjoint(flow.weights)]
            for flow in stopped:
                rate = rates[flow] = flow.ceiling if is_limited else level
                for resource, weight in flow.weights.items():
                    if resource in left:
                        rest = left[resource] - rate * weight
                        left[resource] = rest if rest > 0.0 else 0.0
                        weight_on[resource] -= weight
            growing = [flow for flow in growing if flow not in rates]
        return rates


class VirtualTime(Generic[Tag]):
    """Events, which are calls at a time, and flows, which end when their bytes have passed.

    Args:
        capacities: bytes a microsecond of each resource.
        passed: action for the tags of flows that end together, in the order in which they were started.
        ends_first: True if flows end before events of the same time; else the events come first, and change rates once.

    Attributes:
        now: virtual time in microseconds.
    """

    def __init__(
        self, capacities: Sequence[float], passed: Callable[[list[Tag]], None], *, ends_first: bool = False
    ) -> None:
        self.now, self._ends_first = 0.0, ends_first
        self._network: FlowNetwork[Tag] = FlowNetwork(list(capacities))
        self._passed = passed
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    def at(self, time_us: float, action: Callable[..., None], *arguments: object) -> None:
        """Call an action at a time, behind those of the same time that were given before."""
        self._count += 1
        heapq.heappush(self._events, (time_us, self._count, action, arguments))

    def start(self, nbytes: float, weights: Mapping[int, float], tag: Tag) -> None:
        """Let bytes pass from now on, with a weight for each resource that they use."""
        self._network.start(nbytes, weights, tag, self.now)

    def step(self) -> bool:
        """Go on to the next event or the next end of flows; False if there is none."""
        events, network = self._events, self._network
        time_us = events[0][0] if events else float("inf")
        end = network.next_end(self.now) if self._ends_first or time_us > self.now else self.now
        if time_us < end or (events and time_us == end and not self._ends_first):
            self.now, _, action, arguments = heapq.heappop(events)
            action(*arguments)
        elif end < float("inf"):
            self.now = end
            self._passed(network.pop_ended(end))
        else:
            return False
        return True
