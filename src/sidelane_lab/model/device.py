"""One GPU in virtual time: kernels that compete for compute units, and collectives beside them.

All GPUs of a node do the same, so one stands for all. A *tiled* kernel is a number of workgroups that run in waves
over the units it may use; a *gang* is a collective, whose workgroups advance together and whose own time alone is
known (from the library's figures, or from its Program simulated on the DMA engines; then it holds no units).

Placement is discrete: a unit is free only when a workgroup ends. Between two such events everything advances at a
rate that follows from what is resident: memory that is full is shared, and memory that is not full interferes softly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane_lab.machines.spec import Machine
from sidelane_lab.sim import Interval

TINY = 1e-9

COLLECTIVES_FIRST, COMPUTATIONS_FIRST = 1, 2
"""Values of ``interference.memory_first``."""

LEAST_ROOM = 1e-3
"""Share of the memory that the class which comes second has in any case."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiled:
    """A kernel of independent workgroups, a GEMM for example.

    Attributes:
        name: unique in a run.
        workgroups: number of them.
        compute_us: a workgroup's time if memory is no limit.
        traffic_bytes: a workgroup's bytes through the memory system.
        limit: compute units that it may use; None: all.
        priority: the greater goes first; equals go in the order given.
        after: names of what must have ended before.
        cache_gain: share of the traffic that is saved once fewer units are in use.
        together: its workgroups count on running at the same time: none starts before there is room for all.
        fixed_us: a workgroup's time that neither operations nor bytes explain: its share of the kernel's launch.
    """

    name: str
    workgroups: int
    compute_us: float
    traffic_bytes: float
    limit: int | None = None
    priority: int = 0
    after: tuple[str, ...] = ()
    cache_gain: float = 0.0
    together: bool = False
    fixed_us: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Gang:
    """A collective.

    Attributes:
        name: unique in a run.
        alone_us: its time with nothing beside it and ``units`` workgroups.
        memory_gbps: that it moves through the memory system meanwhile.
        units: workgroups, one a compute unit; 0 on DMA engines.
        need: units beyond which it gains nothing.
        reserved: compute units are set aside for it, so that it waits for nobody.
        priority: as for tiled kernels.
        after: names of what must have ended before.
        part_of: name of the collective that this is a part of. Its parts were timed together, so that they do not get
            in each other's way once more.
    """

    name: str
    alone_us: float
    memory_gbps: float
    units: int = 0
    need: float = 1.0
    reserved: bool = False
    priority: int = 0
    after: tuple[str, ...] = ()
    part_of: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRun:
    """Outcome: when each kernel began to run and ended, and the timeline."""

    time_us: float
    began_us: dict[str, float]
    ended_us: dict[str, float]
    timeline: tuple[Interval, ...]


@dataclasses.dataclass(slots=True)
class _State:
    """A kernel on its way. ``batches``: [workgroups, share of their work left], placed together.

    Attributes:
        tiled: the kernel is no gang.
        started: workgroups that it has in all.
        resident: workgroups that have a unit now.
        alone: for a number of resident workgroups, time and GB/s with the memory to themselves.
    """

    kernel: Tiled | Gang
    tiled: bool
    started: int
    pending: int
    batches: list[list[float]]
    left: float = 1.0
    began: float | None = None
    resident: int = 0
    alone: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)


def run_device(machine: Machine, kernels: Sequence[Tiled | Gang], *, record: bool = False) -> DeviceRun:
    """Run kernels that are launched together, in the order given.

    Args:
        machine: its GPU and its interference figures.
        kernels: in launch order; ``after`` holds one back.
        record: keep the timeline.

    Raises:
        ValueError: two of one name, an unknown name in ``after``, or a circle of them.
    """
    names = [kernel.name for kernel in kernels]
    unknown = {name for kernel in kernels for name in kernel.after} - set(names)
    if len(set(names)) < len(names) or unknown:
        raise ValueError(f"run_device: names must be unique and known (value={names}, unknown={sorted(unknown)})")
    return _Device(machine, kernels, record).run()


class _Device:
    def __init__(self, machine: Machine, kernels: Sequence[Tiled | Gang], record: bool) -> None:
        self.units = float(machine.gpu.units)
        self.peak = float(machine.gpu.memory_gbps)
        self.reachable = machine.gpu.memory_gbps * machine.matmul.memory_efficiency * 1e3
        factors = machine.interference
        self.late_share, self.memory = float(factors.late_share), float(factors.memory)
        self.beside_copies, self.beside_kernels = 1.0 + factors.copies, 1.0 + factors.kernels
        shares = any(map(_moves, kernels)) and any(isinstance(kernel, Tiled) for kernel in kernels)
        self.first = int(factors.memory_first) if shares else 0
        self.channels = float(factors.collective_channels) if shares else 0.0
        self.missing = [len(set(kernel.after)) for kernel in kernels]
        self.followers: dict[str, list[int]] = {}
        for place, kernel in enumerate(kernels):
            for name in set(kernel.after):
                self.followers.setdefault(name, []).append(place)
        self.kernels = kernels
        self.ready = [place for place, count in enumerate(self.missing) if not count]
        self.active: list[_State] = []
        self.record = record
        self.now = 0.0
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.timeline: list[Interval] = []

    def run(self) -> DeviceRun:
        while len(self.ended) < len(self.kernels):
            if self.ready:
                self._launch()
            self._place()
            if not self.active:
                waiting = [kernel.name for kernel in self.kernels if kernel.name not in self.ended]
                raise ValueError(f"run_device: nothing can start (value={waiting})")
            self._step()
        return DeviceRun(self.now, self.began, self.ended, tuple(self.timeline))

    def _launch(self) -> None:
        for place in sorted(self.ready):
            kernel = self.kernels[place]
            tiled = isinstance(kernel, Tiled)
            count = kernel.workgroups if isinstance(kernel, Tiled) else kernel.units
            self.active.append(_State(kernel, tiled, count, count, []))
        self.ready = []
        self.active.sort(key=lambda state: -state.kernel.priority)  # stable: equals stay in launch order

    def _place(self) -> None:
        """Give free units to workgroups: earlier kernels first, but a later one always gets its late share."""
        free = self.units
        reserved: list[_State] = []
        others: list[_State] = []
        for state in self.active:
            free -= state.resident
            if state.pending:
                on_own = isinstance(state.kernel, Gang) and state.kernel.reserved
                (reserved if on_own else others).append(state)
        for state in reserved:
            free -= self._put(state, free, state.pending)
        if not others:
            return
        ahead, *late = others
        full = ahead.pending > free
        if full:
            for state in late:
                quota = int(self.late_share * state.started) - state.resident
                free -= self._put(state, free, quota if ahead.began is not None else 0)
        free -= self._put(ahead, free, ahead.pending)
        if not full:
            for state in late:
                free -= self._put(state, free, state.pending)

    def _put(self, state: _State, free: float, most: int) -> float:
        kernel = state.kernel
        count = min(most, state.pending, int(free))
        if isinstance(kernel, Tiled) and kernel.limit is not None:
            count = min(count, kernel.limit - state.resident)
        if count <= 0 or (isinstance(kernel, Tiled) and kernel.together and count < state.pending):
            return 0.0
        state.pending -= count
        state.resident += count
        state.batches.append([count, 1.0])
        return float(count)

    def _step(self) -> None:
        """Advance to the next end of a batch or of a gang."""
        times = self._times()
        step = float("inf")
        for state, whole in zip(self.active, times, strict=True):
            if state.began is None and (state.batches or not self._needs_units(state)):
                state.began = self.began[state.kernel.name] = self.now
            batches = state.batches
            if not state.tiled:
                left = state.left
            elif len(batches) == 1:
                left = batches[0][1]
            else:
                left = min([batch[1] for batch in batches], default=whole)
            if left * whole < step:
                step = left * whole
        if step == float("inf"):
            raise ValueError(f"run_device: no unit for {[s.kernel.name for s in self.active]}")
        if not self.record:
            step = self._skip_waves(times, step)
        start, self.now = self.now, self.now + step
        going = []
        for state, whole in zip(self.active, times, strict=True):
            done = step / whole if whole < float("inf") else 0.0
            if not state.tiled:
                state.left -= done
            for batch in state.batches:
                batch[1] -= done
            if self.record and (state.batches or (done > 0)):
                label = f"{state.resident} workgroups" if state.resident else "on DMA engines"
                self.timeline.append(Interval("GPU", state.kernel.name, label, start, self.now))
            if not self._retire(state):
                going.append(state)
        self.active = going

    def _skip_waves(self, times: Sequence[float], step: float) -> float:
        """Pass over waves of workgroups that are all alike: those of the one tiled kernel that runs, each of which
        takes the units that the one before it leaves, while gangs beside it go on. The sums are those of single steps.
        Return the step that is next then.
        """
        tiled = [place for place, state in enumerate(self.active) if state.tiled]
        if len(tiled) != 1:
            return step
        state, whole = self.active[tiled[0]], times[tiled[0]]
        if step != whole or not state.pending:  # what is most often so
            return step
        gangs = [pair for pair in zip(self.active, times, strict=True) if pair[0] is not state]
        kernel = state.kernel
        assert isinstance(kernel, Tiled)
        free = int(self.units - sum(gang.resident for gang, _ in gangs))
        most = free if kernel.limit is None else min(free, kernel.limit)
        if state.batches != [[most, 1.0]] or kernel.together:
            return step
        if any(gang.pending or gang.began is None for gang, _ in gangs):
            return step
        while state.pending >= most and all(gang.left - step / time > TINY for gang, time in gangs):
            for gang, time in gangs:
                gang.left -= step / time
            state.pending -= most
            self.now += step
        return min([step, *(gang.left * time for gang, time in gangs)])

    def _retire(self, state: _State) -> bool:
        """Take out what has ended; True if that is all of it."""
        if state.tiled:
            going = [batch for batch in state.batches if batch[1] > TINY]
            if len(going) < len(state.batches):
                state.batches = going
                state.resident = int(sum([batch[0] for batch in going]))
            finished = not state.pending and not state.batches
        else:
            finished = state.left <= TINY
        if finished:
            self.ended[state.kernel.name] = self.now
            for place in self.followers.get(state.kernel.name, ()):
                self.missing[place] -= 1
                if not self.missing[place]:
                    self.ready.append(place)
        return finished

    def _needs_units(self, state: _State) -> bool:
        return state.tiled or state.started > 0

    def _times(self) -> list[float]:
        """Return the time that a whole workgroup (tiled) or a whole collective (gang) takes at the present mixture."""
        alone = []
        for state in self.active:
            known = state.alone.get(state.resident)
            if known is None:
                known = state.alone[state.resident] = self._alone(state)
            alone.append(known)
        peak = self.peak
        if self.channels or (self.first and len(alone) > 1):
            return self._times_by_class(alone)
        if len(alone) == 1:  # nothing beside it
            time, gbps = alone[0]
            return [time * max(1.0, gbps / peak)]
        use = [gbps / peak for _, gbps in alone]
        total = sum(use)
        clocks = self._clocks()
        times = []
        for state, (time, _), own in zip(self.active, alone, use, strict=True):
            others = total - own
            if isinstance(state.kernel, Gang) and state.kernel.part_of:
                others -= sum(u for s, u in zip(self.active, use, strict=True) if _beside(s.kernel, state.kernel))
            slow = 1.0 + self.memory * own * others
            if state.tiled:
                slow *= clocks
            times.append(time * max(slow, own + others))
        return times

    def _clocks(self) -> float:
        """Return the factor by which computations are slower beside collectives for other reasons than memory."""
        gangs = [state for state in self.active if not state.tiled]
        engines = any(not state.started and _moves(state.kernel) for state in gangs)
        kernels = any(state.resident for state in gangs)
        return (self.beside_copies if engines else 1.0) * (self.beside_kernels if kernels else 1.0)

    def _times_by_class(self, alone: Sequence[tuple[float, float]]) -> list[float]:
        """Return the same where hardware tells traffic of collectives from that of computations (ConCCL paper, VII-A1).

        With channels of their own, no class gets in the other's way, and none has more than its channels. With a
        priority, one class is served as if the other were not there, and the other has what is left.
        """
        use = [gbps / self.peak for _, gbps in alone]
        totals = {
            tiled: sum(own for state, own in zip(self.active, use, strict=True) if state.tiled is tiled)
            for tiled in (False, True)
        }
        first = self.first == COMPUTATIONS_FIRST  # the class that is served first: tiled, or not
        clocks = self._clocks()
        times = []
        for state, (time, _), own in zip(self.active, alone, use, strict=True):
            mine, other = totals[state.tiled], totals[not state.tiled]
            slow = 1.0 + self.memory * own * (mine - own)
            room = 1.0
            if self.channels:
                room = 1.0 - self.channels if state.tiled else self.channels
            elif state.tiled is not first:
                slow += self.memory * own * other
                room = max(1.0 - other, LEAST_ROOM)
            times.append(time * max(slow * (clocks if state.tiled else 1.0), mine / room))
        return times

    def _alone(self, state: _State) -> tuple[float, float]:
        """Time of a workgroup or collective with its present units and memory to itself, and its GB/s then."""
        kernel, resident = state.kernel, state.resident
        if isinstance(kernel, Gang):
            speed = 1.0
            if kernel.units:
                full = min(1.0, kernel.units / kernel.need)
                speed = min(1.0, resident / kernel.need) / full
            return (kernel.alone_us / speed if speed else float("inf")), kernel.memory_gbps * speed
        if not resident:
            return float("inf"), 0.0
        missing = self.units - resident
        # The ConCCL paper, footnote 3: fewer workgroups in flight miss less; 8 units fewer are enough (VI-G).
        traffic = kernel.traffic_bytes * (1.0 - kernel.cache_gain * min(1.0, missing / 8))
        time = max(kernel.compute_us, resident * traffic / self.reachable) + kernel.fixed_us
        return time, resident * traffic / time / 1e3


def _moves(kernel: Tiled | Gang) -> bool:
    """Return whether a collective moves bytes; one that does not is a time that passes outside of the GPU."""
    return isinstance(kernel, Gang) and kernel.memory_gbps > 0


def _beside(a: Tiled | Gang, b: Gang) -> bool:
    """Another part of the same collective."""
    return a is not b and isinstance(a, Gang) and a.part_of == b.part_of
