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

from sidelane.execute.sim import Interval
from sidelane.machine.spec import Machine

TINY = 1e-9


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
    """A kernel on its way. ``batches``: [workgroups, share of their work left], placed together."""

    kernel: Tiled | Gang
    pending: int
    batches: list[list[float]]
    left: float = 1.0
    began: float | None = None

    @property
    def resident(self) -> int:
        return int(sum(batch[0] for batch in self.batches))


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
        self.machine = machine
        self.units = float(machine.gpu.units)
        self.waiting = list(kernels)
        self.active: list[_State] = []
        self.record = record
        self.now = 0.0
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.timeline: list[Interval] = []

    def run(self) -> DeviceRun:
        looked = -1
        while self.waiting or self.active:
            if looked < len(self.ended):  # nothing else lets a kernel begin
                looked = len(self.ended)
                self._launch()
            self._place()
            if not self.active:
                raise ValueError(f"run_device: nothing can start (value={[k.name for k in self.waiting]})")
            self._step()
        return DeviceRun(self.now, self.began, self.ended, tuple(self.timeline))

    def _launch(self) -> None:
        ready = [kernel for kernel in self.waiting if self.ended.keys() >= set(kernel.after)]
        for kernel in ready:
            self.waiting.remove(kernel)
            pending = kernel.workgroups if isinstance(kernel, Tiled) else kernel.units
            self.active.append(_State(kernel, pending, []))
        self.active.sort(key=lambda state: -state.kernel.priority)  # stable: equals stay in launch order

    def _place(self) -> None:
        """Give free units to workgroups: earlier kernels first, but a later one always gets its late share."""
        free = self.units - sum(state.resident for state in self.active)
        reserved = [s for s in self.active if isinstance(s.kernel, Gang) and s.kernel.reserved]
        ahead = next((s for s in self.active if s.pending and s not in reserved), None)
        late = [s for s in self.active if s.pending and s is not ahead and s not in reserved]
        for state in reserved:
            free -= self._put(state, free, state.pending)
        full = ahead is not None and ahead.pending > free
        for state in late:
            if full:
                started = state.kernel.workgroups if isinstance(state.kernel, Tiled) else state.kernel.units
                quota = int(self.machine.interference.late_share * started) - state.resident
                free -= self._put(state, free, quota if ahead is not None and ahead.began is not None else 0)
        if ahead is not None:
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
        state.batches.append([count, 1.0])
        return float(count)

    def _step(self) -> None:
        """Advance to the next end of a batch or of a gang."""
        times = self._times()
        for state in self.active:
            if state.began is None and (state.batches or not self._needs_units(state)):
                state.began = self.began[state.kernel.name] = self.now
        step = float("inf")
        for state, whole in zip(self.active, times, strict=True):
            if isinstance(state.kernel, Gang):
                step = min(step, state.left * whole)
            else:
                step = min([step, *(batch[1] * whole for batch in state.batches)])
        if step == float("inf"):
            raise ValueError(f"run_device: no unit for {[s.kernel.name for s in self.active]}")
        start, self.now = self.now, self.now + step
        for state, whole in zip(self.active, times, strict=True):
            done = step / whole if whole < float("inf") else 0.0
            if isinstance(state.kernel, Gang):
                state.left -= done
            for batch in state.batches:
                batch[1] -= done
            if self.record and (state.batches or (done > 0)):
                label = f"{state.resident} workgroups" if state.resident else "on DMA engines"
                self.timeline.append(Interval("GPU", state.kernel.name, label, start, self.now))
            self._retire(state)
        self.active = [state for state in self.active if state.kernel.name not in self.ended]

    def _retire(self, state: _State) -> None:
        if isinstance(state.kernel, Gang):
            finished = state.left <= TINY
        else:
            state.batches = [batch for batch in state.batches if batch[1] > TINY]
            finished = not state.pending and not state.batches
        if finished:
            self.ended[state.kernel.name] = self.now

    def _needs_units(self, state: _State) -> bool:
        return not isinstance(state.kernel, Gang) or state.kernel.units > 0

    def _times(self) -> list[float]:
        """Time that a whole workgroup (tiled) or a whole collective (gang) takes at the present mixture."""
        alone = [self._alone(state) for state in self.active]
        peak = float(self.machine.gpu.memory_gbps)
        use = [gbps / peak for _, gbps in alone]
        factors = self.machine.interference
        total = sum(use)
        times = []
        for state, (time, _), own in zip(self.active, alone, use, strict=True):
            others = total - own
            if isinstance(state.kernel, Gang) and state.kernel.part_of:
                others -= sum(u for s, u in zip(self.active, use, strict=True) if _beside(s.kernel, state.kernel))
            slow = 1.0 + factors.memory * own * others
            if isinstance(state.kernel, Tiled):
                gangs = [(s.kernel, s.resident) for s in self.active if isinstance(s.kernel, Gang)]
                if any(not gang.units for gang, _ in gangs):
                    slow *= 1.0 + factors.copies
                if any(resident for _, resident in gangs):
                    slow *= 1.0 + factors.kernels
            times.append(time * max(slow, own + others))
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
        reachable = self.machine.gpu.memory_gbps * self.machine.matmul.memory_efficiency * 1e3
        time = max(kernel.compute_us, resident * traffic / reachable) + kernel.fixed_us
        return time, resident * traffic / time / 1e3


def _beside(a: Tiled | Gang, b: Gang) -> bool:
    """Another part of the same collective."""
    return a is not b and isinstance(a, Gang) and a.part_of == b.part_of
