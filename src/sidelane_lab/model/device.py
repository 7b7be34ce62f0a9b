"""One GPU in virtual time: blocks of kernels on compute units, and what they share: units, memory, cache, clocks.

All GPUs of a node do the same, so one stands for all. A *tiled* kernel is a number of independent workgroups (blocks);
a *gang* is a collective, whose workgroups advance together and whose own time alone is known (from the library's
figures, or from its Program simulated on the DMA engines; then it holds no units). A block takes a whole unit, or what
its footprint says of registers, threads and shared memory. Units that hold the same are one class, so that a run has as
many events as it has waves of blocks.

Placement is discrete: there is room only when a block ends. Kernels are served in order, the higher priority first.
While a block of an earlier kernel waits, a later one gets ``late_share`` of its blocks. Where units do not drain for a
block that waits (``drains``), smaller blocks take the room first.

Between two events everything advances at rates that follow from what is resident:

    memory      what streams reach of it is shared fairly: nobody gets more than it asks for, and who asks for little
                gets that. A computation runs at what its operations and the bytes left to it allow (``blend``).
    cache       blocks of computations and of collectives slow each other in the cache that all units share.
    clocks      operations, and not bytes, are slower beside engines and beside the library's kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.blocks import BlockFootprint, most_blocks, occupancy, share_of_speed
from sidelane_lab.sim import Interval

TINY = 1e-9
COLLECTIVES_FIRST, COMPUTATIONS_FIRST = 1, 2
"""Values of ``interference.memory_first``."""
LEAST_ROOM = 1e-3
"""Share of the memory that the class which comes second has in any case, and GB/s that anybody has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiled:
    """A kernel of independent workgroups, a GEMM for example.

    Attributes:
        name: unique in a run.
        workgroups: number of them.
        compute_us: a workgroup's time if memory is no limit; with a footprint, with a unit to itself.
        traffic_bytes: a workgroup's bytes through the memory.
        limit: compute units that it may use; None: all.
        priority: the greater goes first; equals go in the order given.
        after: names of what must have ended before.
        cache_gain: share of the traffic that is saved once fewer units are in use.
        together: its workgroups count on running at the same time: none starts before there is room for all.
        fixed_us: a workgroup's time that neither operations nor bytes explain: its share of the kernel's launch.
        blend: how far operations and bytes that take as long hold each other up (``matmul.blend``).
        footprint: of a block; None: a whole unit.
        saturation: how many times the speed of a block that has a unit to itself the unit reaches, at most.
        cache_bytes: a block's bytes out of the cache that all units share.
        delay_us: from its turn until its blocks can be placed.
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
    blend: float = 0.0
    footprint: BlockFootprint | None = None
    saturation: float = 1.0
    cache_bytes: float = 0.0
    delay_us: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Gang:
    """A collective. Blocks that have a place progress.

    Attributes:
        name: unique in a run.
        alone_us: its time with nothing beside it and ``units`` workgroups.
        memory_gbps: that it moves through the memory system meanwhile.
        units: workgroups; 0 on DMA engines.
        need: workgroups beyond which it gains nothing.
        reserved: compute units are set aside for it, so that it waits for nobody.
        priority: as for tiled kernels.
        after: names of what must have ended before.
        part_of: name of the collective that this is a part of. Its parts were timed together, so that they do not get
            in each other's way once more.
        footprint: of a workgroup; None: a whole unit.
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
    footprint: BlockFootprint | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRun:
    """Outcome: when each kernel began to run and ended, and the timeline."""

    time_us: float
    began_us: dict[str, float]
    ended_us: dict[str, float]
    timeline: tuple[Interval, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _State:
    """A kernel on its way.

    Attributes:
        started, pending, resident: workgroups in all, without a place yet, and with one.
        left: share of a gang that is left.
        whole_us: time of a whole workgroup (tiled) or a whole collective (gang) at the present mixture.
    """

    kernel: Tiled | Gang
    pending: int
    ready_us: float
    tiled: bool
    started: int = 0
    left: float = 1.0
    resident: int = 0
    whole_us: float = math.inf


@dataclasses.dataclass(slots=True)
class _Units:
    """Units that hold the same blocks. ``held``: the kernel of each, and the share of its work that is left."""

    count: int
    held: list[tuple[_State, float]]

    def room(self, machine: Machine, footprint: BlockFootprint | None) -> int:
        """Return how many blocks more one of them has room for."""
        return most_blocks(machine, footprint, [state.kernel.footprint for state, _ in self.held])

    def block_us(self, state: _State) -> float:
        """Return the time of a whole block of a tiled kernel beside the others of its unit."""
        kernel = state.kernel
        if not isinstance(kernel, Tiled) or kernel.footprint is None:
            return state.whole_us
        return state.whole_us / share_of_speed(sum(other.tiled for other, _ in self.held), kernel.saturation)

    def advance(self, step: float) -> None:
        """Let time pass, and take out blocks that have ended."""
        held = [(s, left - step / self.block_us(s) if s.tiled else s.left) for s, left in self.held]
        for state, left in held:
            state.resident -= self.count * (left <= TINY)
        self.held = [(state, left if state.tiled else 1.0) for state, left in held if left > TINY]


def run_device(machine: Machine, kernels: Sequence[Tiled | Gang], *, record: bool = False) -> DeviceRun:
    """Run kernels that are launched together, in the order given.

    Args:
        machine: its GPU, its interference figures and, for footprints, its occupancy.
        kernels: in launch order; ``after`` holds one back.
        record: keep the timeline.

    Raises:
        ValueError: two of one name, an unknown name in ``after``, or a circle of them; a block that fits on no unit; a
            footprint on a machine without occupancy.
    """
    return _run(machine, tuple(kernels), record)


@remembered("gpu", "matmul.memory_efficiency", "interference", "occupancy", maxsize=8192)
def _run(machine: Machine, kernels: tuple[Tiled | Gang, ...], record: bool) -> DeviceRun:
    """Run kernels. Of a study's many calls most are repeated: GEMMs alone, pairs under one strategy after another."""
    names = [kernel.name for kernel in kernels]
    unknown = {name for kernel in kernels for name in kernel.after} - set(names)
    if len(set(names)) < len(names) or unknown:
        raise ValueError(f"run_device: names must be unique and known (value={names}, unknown={sorted(unknown)})")
    for kernel in kernels:
        if most_blocks(machine, kernel.footprint) < 1:
            raise ValueError(f"run_device: {kernel.name} (value={kernel.footprint}, allowed=what a compute unit has)")
    return _Device(machine, kernels, record).run()


class _Device:
    def __init__(self, machine: Machine, kernels: Sequence[Tiled | Gang], record: bool) -> None:
        self.machine, self.kernels, self.record = machine, kernels, record
        factors = machine.interference
        self.peak = float(machine.gpu.memory_gbps)
        self.reachable = float(machine.gpu.memory_gbps * machine.matmul.memory_efficiency)
        shares = any(map(_moves, kernels)) and any(isinstance(kernel, Tiled) for kernel in kernels)
        self.first = int(factors.memory_first) if shares else 0
        self.channels = float(factors.collective_channels) if shares else 0.0
        self.missing = [len(set(kernel.after)) for kernel in kernels]
        self.followers: dict[str, list[int]] = {}
        for place, kernel in enumerate(kernels):
            for name in set(kernel.after):
                self.followers.setdefault(name, []).append(place)
        self.ready = [place for place, count in enumerate(self.missing) if not count]
        self.active: list[_State] = []
        self.units = [_Units(int(machine.gpu.units), [])]
        self.alone: dict[tuple[_State, int], tuple[float, float]] = {}
        self.now = 0.0
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.timeline: list[Interval] = []

    def run(self) -> DeviceRun:
        while len(self.ended) < len(self.kernels):
            self._launch()
            self._place()
            if not self.active:
                waiting = [kernel.name for kernel in self.kernels if kernel.name not in self.ended]
                raise ValueError(f"run_device: nothing can start (value={waiting}, allowed=no circles)")
            self._step()
        return DeviceRun(self.now, self.began, self.ended, tuple(self.timeline))

    def _launch(self) -> None:
        for place in sorted(self.ready):
            kernel = self.kernels[place]
            tiled = isinstance(kernel, Tiled)
            count, delay = (kernel.workgroups, kernel.delay_us) if isinstance(kernel, Tiled) else (kernel.units, 0.0)
            self.active.append(_State(kernel, count, self.now + delay, tiled, count))
        if self.ready:
            self.active.sort(key=lambda state: -state.kernel.priority)  # stable: equals stay in launch order
        self.ready = []

    def _place(self) -> None:
        """Give room to workgroups: earlier kernels first, but a later one always gets its late share."""
        waiting = [state for state in self.active if state.pending and state.ready_us <= self.now + TINY]
        for state in [state for state in waiting if isinstance(state.kernel, Gang) and state.kernel.reserved]:
            self._put(state, state.pending)
            waiting.remove(state)
        crowded = [state for state in waiting if self._crowded_out(state, waiting)]
        for state in waiting[1:] if waiting and waiting[0].pending > self._room(waiting[0]) else ():
            sharing = state.kernel.footprint is not None
            if not (state.tiled if sharing else waiting[0].kernel.name not in self.began) and state not in crowded:
                self._put(state, int(self.machine.interference.late_share * state.started) - state.resident)
        for state in waiting:
            if state not in crowded:
                self._put(state, state.pending)
            if state.pending and (state.kernel.footprint is None or occupancy(self.machine).drains):
                return

    def _crowded_out(self, state: _State, waiting: Sequence[_State]) -> bool:
        """True if smaller blocks take the room of every one that ends before there is enough for this kernel's."""
        if state.kernel.footprint is None or state.tiled or occupancy(self.machine).drains:
            return False
        grids = {other.kernel.footprint for other in waiting if other.tiled}
        full = ([grid] * (most_blocks(self.machine, grid) - 1) for grid in grids)
        return any(most_blocks(self.machine, state.kernel.footprint, held) < 1 for held in full)

    def _room(self, state: _State) -> int:
        return sum(units.count * units.room(self.machine, state.kernel.footprint) for units in self.units)

    def _put(self, state: _State, most: int) -> None:
        kernel = state.kernel
        most = min(most, state.pending)
        if isinstance(kernel, Tiled) and kernel.limit is not None:
            most = min(most, kernel.limit - state.resident)
        if isinstance(kernel, Tiled) and kernel.together and min(most, self._room(state)) < state.pending:
            return
        while most > 0:
            fitting = [units for units in self.units if units.room(self.machine, kernel.footprint)]
            if not fitting:
                return
            chosen = min(fitting, key=lambda units: len(units.held))
            number = min(most, chosen.count)
            if number < chosen.count:
                self.units.append(_Units(chosen.count - number, chosen.held))
            chosen.count, chosen.held = number, [*chosen.held, (state, 1.0)]
            state.pending -= number
            state.resident += number
            most -= number

    def _step(self) -> None:
        """Advance to the next end of blocks or of a gang, or to a kernel's getting ready."""
        self._find_times()
        ends = [state.ready_us - self.now for state in self.active if state.ready_us > self.now + TINY]
        ends += [state.left * state.whole_us for state in self.active if not state.tiled]
        ends += [left * units.block_us(state) for units in self.units for state, left in units.held if state.tiled]
        step = min(ends, default=math.inf)
        if step == math.inf:
            raise ValueError(f"run_device: no unit for {[state.kernel.name for state in self.active]}")
        for state in self.active:
            if state.resident or not state.started:
                self.began.setdefault(state.kernel.name, self.now)
        if not self.record:
            step = self._skip_waves(step)
        if self.record:
            self._note(step)
        self.now += step
        for state in self.active:
            state.left -= 0.0 if state.tiled else step / state.whole_us
        for units in self.units:
            units.advance(step)
        self._retire()

    def _note(self, step: float) -> None:
        for state in self.active:
            if state.resident or step / state.whole_us > 0:
                label = f"{state.resident} workgroups" if state.resident else "on DMA engines"
                self.timeline.append(Interval("GPU", state.kernel.name, label, self.now, self.now + step))

    def _skip_waves(self, step: float) -> float:
        """Pass over waves of workgroups that are all alike: those of the one tiled kernel that runs, each of which
        takes the units that the one before it leaves, while gangs beside it go on. The sums are those of single steps.
        Return the step that is next then.
        """
        tiled = [state for state in self.active if state.tiled]
        if len(tiled) != 1 or step != tiled[0].whole_us or not tiled[0].pending:
            return step
        state, gangs = tiled[0], [gang for gang in self.active if not gang.tiled]
        kernel, most = state.kernel, state.resident
        assert isinstance(kernel, Tiled)
        free = sum(units.count for units in self.units if not units.held)
        if kernel.footprint is not None or kernel.together or (free and most != kernel.limit):
            return step
        if any(left != 1.0 for units in self.units for _, left in units.held):
            return step
        if any(gang.pending or gang.kernel.name not in self.began for gang in gangs):
            return step
        while state.pending >= most and all(gang.left - step / gang.whole_us > TINY for gang in gangs):
            for gang in gangs:
                gang.left -= step / gang.whole_us
            state.pending -= most
            self.now += step
        return min([step, *(gang.left * gang.whole_us for gang in gangs)])

    def _retire(self) -> None:
        """Take out what has ended, and join units that hold the same."""
        going = []
        for state in self.active:
            if (state.pending or state.resident) if state.tiled else state.left > TINY:
                going.append(state)
                continue
            self.ended[state.kernel.name] = self.now
            for place in self.followers.get(state.kernel.name, ()):
                self.missing[place] -= 1
                if not self.missing[place]:
                    self.ready.append(place)
        self.active = going
        known: dict[tuple[tuple[int, float], ...], _Units] = {}
        for units in self.units:
            key = tuple(sorted((id(state), round(left, 9)) for state, left in units.held))
            first = known.setdefault(key, units)
            if first is not units:
                first.count += units.count
        self.units = list(known.values())

    def _find_times(self) -> None:
        """Find the time that a whole workgroup or collective takes at the present mixture."""
        alone = [self._alone(state) for state in self.active]
        asked = [min(gbps, self.reachable) for _, gbps in alone]
        given, unused, beside = self._memory(asked)
        cache, clocks, memory = self._cache(asked), self._clocks(), float(self.machine.interference.memory)
        for place, (state, (time, _)) in enumerate(zip(self.active, alone, strict=True)):
            own = asked[place]
            soft = 1.0 + (memory * own * beside[place] / self.peak**2 if cache is None else cache)
            if isinstance(state.kernel, Tiled) and state.kernel.footprint is None and state.resident:
                left = max(given[place] + unused[place], LEAST_ROOM)
                state.whole_us = max(self._wave(state, state.kernel, left, clocks), time * soft)
            else:
                state.whole_us = time * max(soft, own / given[place] if own else 0.0)

    def _memory(self, asked: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
        """Return what each kernel gets of the memory, what is unused beside it, and what others ask for.

        Hardware could tell traffic of collectives from that of computations (ConCCL paper, VII-A1). With channels of
        their own, no class gets in the other's way. With a priority, one is served as if the other were not there.
        """
        every = range(len(asked))
        collectives, computations = ([i for i in every if self.active[i].tiled is tiled] for tiled in (False, True))
        pools = [(list(every), self.reachable)]
        if self.channels:
            pools = [
                (collectives, self.reachable * self.channels),
                (computations, self.reachable * (1 - self.channels)),
            ]
        elif self.first:
            first, second = (collectives, computations)[:: 1 if self.first == COLLECTIVES_FIRST else -1]
            left = self.reachable - sum(asked[i] for i in first)
            pools = [(first, self.reachable), (second, max(left, LEAST_ROOM * self.reachable))]
        given, unused, beside = ([0.0] * len(asked) for _ in range(3))
        seen: list[int] = []
        for places, room in pools:
            seen = places if self.channels else [*seen, *places]
            mine = _shared([asked[i] for i in places], [not self.active[i].started for i in places], room)
            for i, got in zip(places, mine, strict=True):
                given[i], unused[i] = got, room - sum(mine)
                beside[i] = sum(asked[j] for j in seen if j != i and not self._same_collective(i, j))
        return given, unused, beside

    def _same_collective(self, i: int, j: int) -> bool:
        a, b = self.active[i].kernel, self.active[j].kernel
        return isinstance(a, Gang) and isinstance(b, Gang) and bool(a.part_of) and a.part_of == b.part_of

    def _cache(self, asked: Sequence[float]) -> float | None:
        """Return the share by which blocks of computations and collectives slow each other in the units' cache.

        A unit's blocks, of whichever GEMM, slow each other by ``share_of_speed`` already. None: no block says what it
        takes of that cache.
        """
        grids = [(s, s.kernel.cache_bytes) for s in self.active if isinstance(s.kernel, Tiled) and s.kernel.cache_bytes]
        if not grids:
            return None
        whole = float(self.machine.gpu.units * occupancy(self.machine).unit_gbps)
        read = sum(self._rate(state) * nbytes for state, nbytes in grids) / 1e3
        moved = sum(own for state, own in zip(self.active, asked, strict=True) if not state.tiled)
        return float(occupancy(self.machine).cache) * read / whole * moved / whole

    def _rate(self, state: _State) -> float:
        """Return the blocks of a kernel with a footprint that end in a microsecond, if memory is no limit."""
        assert isinstance(state.kernel, Tiled)
        state.whole_us = state.kernel.compute_us
        return sum(u.count / u.block_us(state) for u in self.units for other, _ in u.held if other is state)

    def _clocks(self) -> float:
        """Return the factor by which operations are slower beside collectives: the clocks that power leaves."""
        gangs = [state for state in self.active if not state.tiled]
        engines = any(not state.started and _moves(state.kernel) for state in gangs)
        factors = self.machine.interference
        beside_kernels = any(state.resident for state in gangs)
        return (1.0 + factors.copies if engines else 1.0) * (1.0 + factors.kernels if beside_kernels else 1.0)

    def _alone(self, state: _State) -> tuple[float, float]:
        """Time of a workgroup or collective with its present units and memory to itself, and its GB/s then."""
        kernel, resident = state.kernel, state.resident
        if isinstance(kernel, Gang):
            speed = 1.0
            if kernel.units:
                full = min(1.0, kernel.units / kernel.need)
                speed = min(1.0, resident / kernel.need) / full
            return (kernel.alone_us / speed if speed else math.inf), kernel.memory_gbps * speed
        if not resident:
            return math.inf, 0.0
        if kernel.footprint is not None:
            return kernel.compute_us, self._rate(state) * kernel.traffic_bytes / 1e3
        found = self.alone.get((state, resident))
        if found is None:
            time = self._wave(state, kernel, self.reachable)
            found = self.alone[state, resident] = (time, resident * self._traffic(state, kernel) / time / 1e3)
        return found

    def _traffic(self, state: _State, kernel: Tiled) -> float:
        # The ConCCL paper, footnote 3: fewer workgroups in flight miss less; 8 units fewer are enough (VI-G).
        missing = self.machine.gpu.units - state.resident
        return kernel.traffic_bytes * (1.0 - kernel.cache_gain * min(1.0, missing / 8))

    def _wave(self, state: _State, kernel: Tiled, gbps: float, clocks: float = 1.0) -> float:
        """Return the time of workgroups that run at once.

        Bytes go faster where fewer workgroups ask for them, unless operations are what these wait for.
        """
        units, traffic = int(self.machine.gpu.units), self._traffic(state, kernel)
        all_us = min(kernel.workgroups, units) * traffic / 1e3
        bytes_us = all_us if kernel.compute_us >= all_us / self.reachable else state.resident * traffic / 1e3
        return blended_us(kernel.compute_us * clocks, bytes_us / gbps, kernel.blend) + kernel.fixed_us


def blended_us(operations_us: float, bytes_us: float, blend: float) -> float:
    """Time of operations that the bytes do not let run at their full speed, where bytes are not what counts anyway."""
    longer, shorter = max(operations_us, bytes_us), min(operations_us, bytes_us)
    return longer * (1 + blend * (math.hypot(1.0, shorter / longer) - 1)) if shorter and blend else longer


def _shared(asked: Sequence[float], engines: Sequence[bool], most: float) -> list[float]:
    """Return what each gets of a memory: engines what they ask for, up to an equal share, kernels a part of the rest.

    An engine has its requests queued; a kernel has so many in flight, and each takes longer where memory is full.
    """
    served = [min(own, most / len(asked)) if engine else 0.0 for own, engine in zip(asked, engines, strict=True)]
    wanted = sum(own for own, engine in zip(asked, engines, strict=True) if not engine)
    scale = min(1.0, (most - sum(served)) / wanted) if wanted else 1.0
    return [got if engine else own * scale for own, got, engine in zip(asked, served, engines, strict=True)]


def _moves(kernel: Tiled | Gang) -> bool:
    """Return whether a collective moves bytes; one that does not is a time that passes outside of the GPU."""
    return isinstance(kernel, Gang) and kernel.memory_gbps > 0
