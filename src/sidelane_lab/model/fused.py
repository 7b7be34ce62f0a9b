"""Kernels that compute and send, one a rank, in virtual time.

A kernel has a fixed number of workgroups, which go over the work in its order, a round at a time. The end of the last
workgroup of a slice raises its flag, and the slice's bytes flow to their rank. A rank ends when its own work is done
and all that is sent to it has come:

    rank 0    | slices for 1 | own slices | wait |      remote_first: what peers wait for, then what stays
    0 to 1       | slices that are whole ...|
    rank 1    | slices for 0 | own slices | wait |

Stores hold their workgroups back while the link has a round waiting; the network takes slices without that, for
``put_us`` of the workgroup that hands it over. An all-reduce adds a second flow: results, to all. A gather sends before
it computes: some workgroups are busy with that, the others begin with what needs nobody.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from sidelane_lab.machines.network import Resource, way_between
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.workgroups import fused_figures
from sidelane_lab.sim import Interval
from sidelane_lab.sim.flows import VirtualTime

MOST_STEPS = 128
"""Events of a kernel: more rounds than that are joined, so that time does not grow with the batch."""
ROUNDING = 1e-9
"""Share of what a rank gets from another that may be missing when all of it has come: sums of many parts."""

Pair = tuple[int, int]
"""Sender and receiver."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelWork:
    """Workgroups that are alike.

    Attributes:
        workgroups: number of them.
        sends: (rank, bytes of each workgroup) for every rank that gets some of it.
        needs: rank from which all must have come before; None, or the rank itself: nobody.
    """

    workgroups: int
    sends: tuple[tuple[int, float], ...]
    needs: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FusedKernel:
    """The kernel of one rank.

    Attributes:
        works: in order.
        resident: workgroups at once.
        round_us: time of a workgroup with so many resident.
        slice_workgroups: whose results travel together.
        puts: the network is called, once a slice; False: workgroups store what they compute.
        start_us: when the rank begins.
        reduce_us: of all that has come, once it has; then its results go to all.
        result_bytes: of those, to each peer; 0: none go.
        first_shares: bytes that go to each rank before anything is computed; none: nothing does.
        senders: workgroups that send those, one part each, and hold a place until they have gone.
    """

    works: tuple[KernelWork, ...]
    resident: int
    round_us: Callable[[int], float]
    slice_workgroups: int = 1
    puts: bool = False
    start_us: float = 0.0
    reduce_us: float = 0.0
    result_bytes: float = 0.0
    first_shares: tuple[float, ...] = ()
    senders: int = 0

    def first_to(self, rank: int) -> float:
        """Return the bytes that go to a peer before anything is computed."""
        return self.first_shares[rank] if self.first_shares else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class FusedRun:
    """Outcome. ``computed_us``: when a rank's own work was done; ``ended_us``: when it had everything."""

    computed_us: tuple[float, ...]
    ended_us: tuple[float, ...]
    timeline: tuple[Interval, ...]

    @property
    def time_us(self) -> float:
        """Until the last rank has ended."""
        return max(self.ended_us)


def run_fused(machine: Machine, kernels: Sequence[FusedKernel], *, record: bool = False) -> FusedRun:
    """Run a kernel on every rank.

    Args:
        machine: its links, network and flags.
        kernels: by rank.
        record: keep the timeline.

    Raises:
        ValueError: not as many kernels as ranks, or a network that the machine does not have.
    """
    if len(kernels) != machine.world_size:
        raise ValueError(f"run_fused: kernels (value={len(kernels)}, allowed={machine.world_size}, one a rank)")
    return _Ranks(machine, kernels, record).run()


@dataclasses.dataclass(slots=True)
class _Rank:
    """A rank on its way.

    Attributes:
        steps: of its work, that are left.
        next: the one that waits for what it needs.
        first: peers to which what is sent first is on its way.
        sending: what the present one releases, by rank.
        held: its stores wait for a link.
        owed: bytes that it gets, by their sender: of the work, and of results.
        missing: those that have not come yet.
        came_us: when the last bytes came.
        reducing: it has its work behind it, and adds or has added.
        busy: it computes.
        computed_us, ended_us: as in :class:`FusedRun`.
    """

    steps: Iterator[_Step]
    owed: tuple[dict[int, float], dict[int, float]]
    missing: tuple[dict[int, float], dict[int, float]]
    sending: dict[int, float] = dataclasses.field(default_factory=dict)
    next: _Step | None = None
    first: set[int] = dataclasses.field(default_factory=set)
    held: bool = False
    came_us: float = 0.0
    reducing: bool = False
    busy: bool = True
    computed_us: float = 0.0
    ended_us: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """Rounds of a kernel: their time, what they release by rank, and the ranks that they need."""

    duration_us: float
    released: dict[int, float]
    needs: frozenset[int]


class _Ranks:
    def __init__(self, machine: Machine, kernels: Sequence[FusedKernel], record: bool) -> None:
        self.kernels, self.record = kernels, record
        self.fabric = _Fabric(machine)
        self.time: VirtualTime[Pair] = VirtualTime(self.fabric.capacities, self._passed, ends_first=True)
        self.queued: dict[Pair, float] = {}
        self.flowing: dict[Pair, tuple[float, float]] = {}
        put_us = float(fused_figures(machine).put_us)
        self.ranks = [
            _Rank(_steps(kernel, rank, put_us), _owed(kernels, rank), _owed(kernels, rank))
            for rank, kernel in enumerate(kernels)
        ]
        self.timeline: list[Interval] = []

    def run(self) -> FusedRun:
        for rank, kernel in enumerate(self.kernels):
            self.time.at(kernel.start_us, self._begin, rank)
        while any(state.ended_us is None for state in self.ranks):
            is_going = self.time.step()
            assert is_going, "a rank waits for what nobody sends"
        ends = tuple(float(state.ended_us or 0.0) for state in self.ranks)
        return FusedRun(tuple(state.computed_us for state in self.ranks), ends, tuple(self.timeline))

    def _passed(self, pairs: Sequence[Pair]) -> None:
        """Take in what has come; what ends together has ended before anybody goes on."""
        for pair in pairs:
            self._came(pair)
        for source, rank in pairs:
            self._wake(source)
            self._wake(rank)
            self._settle(rank)

    def _begin(self, rank: int) -> None:
        """Send what goes first, and compute."""
        state, kernel = self.ranks[rank], self.kernels[rank]
        state.first = {peer for peer in range(len(self.kernels)) if peer != rank and kernel.first_to(peer)}
        for peer in sorted(state.first):
            self._send((rank, peer), kernel.first_to(peer))
        self._compute(rank)

    def _compute(self, rank: int) -> None:
        """Begin the next step of a rank's work, or find that it has none."""
        state = self.ranks[rank]
        if state.next is None:
            state.next = next(state.steps, None)
        step, kernel = state.next, self.kernels[rank]
        if step is None:
            state.held = False  # or what came next would let it end before it has added
            self._stop(rank)
            return
        free = kernel.resident - (kernel.senders if state.first else 0)
        state.held = free <= 0 or any(state.missing[0][source] for source in step.needs)
        if state.held:
            return  # until more has come, or has gone
        state.next, state.sending = None, step.released
        duration = step.duration_us * kernel.resident / free
        label = "remote work" if any(peer != rank for peer in state.sending) else "own work"
        self._occupy(rank, label, self.time.now, duration, self._step_ended)

    def _occupy(self, rank: int, label: str, start_us: float, duration_us: float, ended: Callable[[int], None]) -> None:
        self.time.at(start_us + duration_us, ended, rank)
        if self.record:
            interval = Interval(f"rank {rank}", "workgroups", label, start_us, start_us + duration_us)
            self.timeline.append(interval)

    def _step_ended(self, rank: int) -> None:
        state = self.ranks[rank]
        for peer, nbytes in state.sending.items():
            self._send((rank, peer), nbytes)
        if not self.kernels[rank].puts and self._waiting(rank):
            state.held = True
        else:
            self._compute(rank)

    def _reduced(self, rank: int) -> None:
        for peer in range(len(self.ranks)):
            self._send((rank, peer), self.kernels[rank].result_bytes)
        self._stop(rank)

    def _stop(self, rank: int) -> None:
        state = self.ranks[rank]
        state.busy, state.computed_us = False, self.time.now
        self._settle(rank)

    def _waiting(self, rank: int) -> bool:
        return any(source == rank for source, _ in self.queued)

    def _send(self, pair: Pair, nbytes: float) -> None:
        """Send the bytes of a pair in their order: what is sent while some are on their way goes behind them."""
        if pair[0] == pair[1] or not nbytes:
            return
        if pair in self.flowing:
            self.queued[pair] = self.queued.get(pair, 0.0) + nbytes
            return
        self.flowing[pair] = (nbytes, self.time.now)
        self.time.start(nbytes, self.fabric.weights[pair], pair)

    def _came(self, pair: Pair) -> None:
        source, rank = pair
        nbytes, began = self.flowing.pop(pair)
        state = self.ranks[rank]
        for owed, missing in zip(state.owed, state.missing, strict=True):
            part = min(nbytes, missing[source])
            nbytes -= part
            left = missing[source] - part
            missing[source] = left if left > ROUNDING * owed[source] else 0.0
        state.came_us = self.time.now + self.fabric.latency_us[pair]
        if self.record:
            self.timeline.append(Interval(f"rank {source}", f"to rank {rank}", "bytes", began, self.time.now))
        waiting = self.queued.pop(pair, 0.0)
        if waiting:
            self._send(pair, waiting)
        self.ranks[source].first.discard(rank)

    def _wake(self, rank: int) -> None:
        """Let a rank whose stores or whose work were held go on, if it can."""
        if self.ranks[rank].held and (self.kernels[rank].puts or not self._waiting(rank)):
            self._compute(rank)

    def _settle(self, rank: int) -> None:
        """Let a rank that has computed and got everything reduce, or end."""
        state, kernel = self.ranks[rank], self.kernels[rank]
        if state.busy or any(state.missing[state.reducing].values()):
            return
        ready = max(state.computed_us, state.came_us)
        if (kernel.reduce_us or kernel.result_bytes) and not state.reducing:
            state.reducing = state.busy = True
            self._occupy(rank, "adds", ready, kernel.reduce_us, self._reduced)
        else:
            state.ended_us = ready


def _owed(kernels: Sequence[FusedKernel], rank: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return the bytes that a rank gets from each of the others: of their work, and of results."""
    sources = [source for source in range(len(kernels)) if source != rank]
    works = {
        source: kernels[source].first_to(rank)
        + sum(w.workgroups * b for w in kernels[source].works for peer, b in w.sends if peer == rank)
        for source in sources
    }
    return works, {source: kernels[source].result_bytes for source in sources}


class _Fabric:
    """Resources that bytes pass between each two ranks."""

    def __init__(self, machine: Machine) -> None:
        fused, ranks = fused_figures(machine), range(machine.world_size)
        self.weights: dict[Pair, dict[int, float]] = {}
        self.latency_us: dict[Pair, float] = {}
        self.capacities: list[float] = []
        index: dict[Resource, int] = {}

        def resource(key: Resource, gbps: float) -> int:
            if key not in index:
                index[key] = len(self.capacities)
                self.capacities.append(gbps * 1e3)
            return index[key]

        gbps = float(machine.links.usable_gbps * fused.store_share)
        for pair in itertools.permutations(ranks, 2):
            way = way_between(machine, *pair, gbps)
            self.weights[pair] = dict.fromkeys((resource(*passed) for passed in way.passes), 1.0)
            self.latency_us[pair] = float(fused.flag_us) + way.latency_us


def _steps(kernel: FusedKernel, source: int, put_us: float) -> Iterator[_Step]:
    """Return a kernel's rounds, joined where they are many.

    The last workgroup of a slice hands it to the network, and is the last of the next slice, too: a round that sends
    is as much longer (fused operators paper, IV-C, Figure 11).
    """
    rounds = math.ceil(sum(work.workgroups for work in kernel.works) / kernel.resident)
    joined = max(1, math.ceil(rounds / MOST_STEPS))
    room, taken, released, needs = joined * kernel.resident, 0, dict[int, float](), set[int]()
    times_us: dict[tuple[int, bool], float] = {}  # steps are alike but for a few

    def step() -> _Step:
        sends = len(released) > (source in released)
        time_us = times_us.get((taken, sends))
        if time_us is None:
            time_us = times_us[taken, sends] = _time_us(kernel, taken, put_us if sends else 0.0)
        return _Step(time_us, released, frozenset(needs))

    for work in kernel.works:
        left = work.workgroups
        part = 0  # of a slice, begun and not whole
        while left:
            count = min(left, room - taken)
            left, taken, part = left - count, taken + count, part + count
            if work.needs not in (None, source):
                needs.add(work.needs)
            whole = part if not left else part // kernel.slice_workgroups * kernel.slice_workgroups
            part -= whole
            for rank, nbytes in work.sends:
                if whole:
                    released[rank] = released.get(rank, 0.0) + whole * nbytes
            if taken == room:
                yield step()
                taken, released, needs = 0, {}, set()
    if taken:
        yield step()


def _time_us(kernel: FusedKernel, workgroups: int, put_us: float) -> float:
    whole, rest = divmod(workgroups, kernel.resident)
    time = whole * kernel.round_us(kernel.resident) + (kernel.round_us(rest) if rest else 0.0)
    return time + (math.ceil(workgroups / kernel.resident) * put_us if kernel.puts else 0.0)
