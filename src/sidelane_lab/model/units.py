"""Compute units one by one: which blocks find room beside which, and how fast a unit runs with what it holds.

Where ``device`` counts free units, this counts what a block needs on one: registers, shared memory, threads, a place.
Units that hold the same are one class, so that a run has as many events as it has waves of blocks.

Kernels that are ready are served in order, the higher priority first: a later one gets what the earlier ones leave
over, and as long as a block of an earlier one waits for room, only ``late_share`` of a collective's blocks. Where
units do not drain for a block that waits (``drains``), smaller ones take the room first. Blocks go to the unit that
holds the fewest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.blocks import BlockFootprint, Channels, Grid, has_room, most_blocks, occupancy, share_of_speed
from sidelane_lab.model.device import DeviceRun
from sidelane_lab.sim import Interval

TINY = 1e-9


def run_units(machine: Machine, kernels: Sequence[Grid | Channels], *, record: bool = False) -> DeviceRun:
    """Run kernels that are launched together, in the order given.

    Args:
        machine: its GPU, its occupancy and its interference figures.
        kernels: in launch order; ``after`` holds one back.
        record: keep the timeline.

    Raises:
        ValueError: the machine has no occupancy, a block that fits on no unit, or kernels that wait for each other
            or for a name that none has.
    """
    for kernel in kernels:
        if most_blocks(machine, kernel.footprint) < 1:
            raise ValueError(f"run_units: {kernel.name} (value={kernel.footprint}, allowed=what a compute unit has)")
    return _Units(machine, kernels, record).run()


@dataclasses.dataclass(slots=True)
class _State:
    """A kernel on its way."""

    kernel: Grid | Channels
    ready_us: float
    pending: int
    left: float = 1.0
    placed: int = 0


@dataclasses.dataclass(slots=True)
class _Class:
    """Units that hold the same. ``held``: (kernel, share of a block's work left) -> number on each of them."""

    count: int
    held: dict[tuple[str, float], int]

    def key(self) -> tuple[tuple[tuple[str, float], int], ...]:
        return tuple(sorted(self.held.items()))


class _Units:
    def __init__(self, machine: Machine, kernels: Sequence[Grid | Channels], record: bool) -> None:
        self.machine, self.record, self.now = machine, record, 0.0
        self.waiting = list(kernels)
        self.active: dict[str, _State] = {}
        self.classes = [_Class(int(machine.gpu.units), {})]
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.timeline: list[Interval] = []

    def run(self) -> DeviceRun:
        while self.waiting or self.active:
            self._launch()
            if not self.active:
                names = [kernel.name for kernel in self.waiting]
                raise ValueError(f"run_units: nothing can start (value={names}, allowed=no circles, known names)")
            self._place()
            self._step()
        return DeviceRun(self.now, self.began, self.ended, tuple(self.timeline))

    def _launch(self) -> None:
        for kernel in [k for k in self.waiting if all(name in self.ended for name in k.after)]:
            self.waiting.remove(kernel)
            self.active[kernel.name] = _State(kernel, self.now + kernel.delay_us, kernel.blocks)

    def _place(self) -> None:
        ready = [state for state in self.active.values() if state.pending and state.ready_us <= self.now + TINY]
        ready.sort(key=lambda state: (-state.kernel.priority, state.ready_us))  # stable: equals keep launch order
        for state in ready[1:]:
            if isinstance(state.kernel, Channels) and not self._crowded_out(state, ready):
                quota = int(self.machine.interference.late_share * state.kernel.blocks) - state.placed
                self._put(state, min(quota, state.pending))
        for state in ready:
            if not self._crowded_out(state, ready):
                self._put(state, state.pending)
            if state.pending and occupancy(self.machine).drains:
                return

    def _crowded_out(self, state: _State, ready: Sequence[_State]) -> bool:
        """True if smaller blocks take the room of every one that ends before there is enough for this kernel's."""
        if occupancy(self.machine).drains or not isinstance(state.kernel, Channels):
            return False
        grids = [other.kernel.footprint for other in ready if isinstance(other.kernel, Grid)]
        others = {grid: most_blocks(self.machine, grid) - 1 for grid in grids}
        return any(
            not has_room(self.machine, [(grid, number)], state.kernel.footprint) for grid, number in others.items()
        )

    def _put(self, state: _State, most: int) -> None:
        entry = (state.kernel.name, 1.0)
        while most > 0:
            fitting = [units for units in self.classes if self._fits(units, state.kernel.footprint)]
            if not fitting:
                return
            chosen = min(fitting, key=lambda units: sum(units.held.values()))
            number = min(most, chosen.count)
            if number < chosen.count:
                self.classes.append(_Class(chosen.count - number, dict(chosen.held)))
                chosen.count = number
            chosen.held[entry] = chosen.held.get(entry, 0) + 1
            state.pending -= number
            state.placed += number
            most -= number
            self.began.setdefault(state.kernel.name, self.now)

    def _fits(self, units: _Class, new: BlockFootprint) -> bool:
        held = [(self.active[name].kernel.footprint, number) for (name, _), number in units.held.items()]
        return has_room(self.machine, held, new)

    def _step(self) -> None:
        """Advance to the next end of blocks or of a collective, or to a kernel's getting ready."""
        alone = [self._alone(units) for units in self.classes]
        slow = self._slow(alone)
        ends = [
            left / (rate * slow)
            for units, rates in zip(self.classes, alone, strict=True)
            for (_, left), rate in zip(units.held, rates, strict=True)
            if rate
        ]
        shares = {name: self._progress(state) * slow for name, state in self.active.items()}
        ends += [self.active[name].left / share for name, share in shares.items() if share]
        ends += [s.ready_us - self.now for s in self.active.values() if s.ready_us > self.now + TINY]
        step = min(ends)  # a kernel that fits on an empty unit finds one at last, so that there is an end
        start, self.now = self.now, self.now + step
        if self.record:
            self.timeline += [
                Interval("GPU", name, f"{self._resident(name)} workgroups", start, self.now)
                for name in self.active
                if name in self.began
            ]
        for units, rates in zip(self.classes, alone, strict=True):
            held: dict[tuple[str, float], int] = {}
            for ((name, left), number), rate in zip(units.held.items(), rates, strict=True):
                rest = round(left - step * rate * slow, 9)
                if rest > TINY:
                    held[name, rest] = held.get((name, rest), 0) + number
            units.held = held
        for name, share in shares.items():
            self.active[name].left -= step * share
        self._retire()

    def _retire(self) -> None:
        for name, state in list(self.active.items()):
            whole = state.left <= TINY if isinstance(state.kernel, Channels) else not state.pending
            if whole and (isinstance(state.kernel, Channels) or not self._resident(name)):
                self.ended[name] = self.now
                del self.active[name]
        merged: dict[tuple[tuple[tuple[str, float], int], ...], _Class] = {}
        for units in self.classes:
            units.held = {entry: number for entry, number in units.held.items() if entry[0] in self.active}
            known = merged.setdefault(units.key(), units)
            if known is not units:
                known.count += units.count
        self.classes = list(merged.values())

    def _resident(self, name: str) -> int:
        return sum(u.count * number for u in self.classes for (held, _), number in u.held.items() if held == name)

    def _alone(self, units: _Class) -> list[float]:
        """Return the share of its work that each of a class's blocks does in a microsecond; 0: a channel."""
        grids = [self.active[name].kernel for name, _ in units.held]
        blocks = sum(number for kernel, number in zip(grids, units.held.values(), strict=True) if type(kernel) is Grid)
        return [
            share_of_speed(blocks, kernel.saturation) / kernel.block_us if isinstance(kernel, Grid) else 0.0
            for kernel in grids
        ]

    def _progress(self, state: _State) -> float:
        """Share of a collective that gets done in a microsecond, if memory is no limit; 0 for other kernels."""
        if not isinstance(state.kernel, Channels):
            return 0.0
        full = min(1.0, state.kernel.blocks / state.kernel.need)
        return min(1.0, state.placed / state.kernel.need) / full / state.kernel.alone_us

    def _slow(self, alone: Sequence[Sequence[float]]) -> float:
        """Return the share of their speed that all kernels keep beside what the others move.

        Memory that is full is shared in proportion. The cache that all units share slows before it is full.
        """
        gpu, limits = self.machine.gpu, occupancy(self.machine)
        memory = gpu.memory_gbps * self.machine.matmul.memory_efficiency * 1e3
        cache = gpu.units * limits.unit_gbps * 1e3
        rates = dict.fromkeys(self.active, 0.0)  # blocks, or the whole of a collective, done in a microsecond
        for units, each in zip(self.classes, alone, strict=True):
            for ((name, _), number), rate in zip(units.held.items(), each, strict=True):
                rates[name] += units.count * number * rate
        in_memory, in_cache = {}, {}
        for name, state in self.active.items():
            kernel = state.kernel
            if isinstance(kernel, Grid):
                in_memory[name] = rates[name] * kernel.traffic_bytes / memory
                in_cache[name] = rates[name] * kernel.cache_bytes / cache
            else:
                moved = self._progress(state) * kernel.alone_us * kernel.memory_gbps * 1e3
                in_memory[name], in_cache[name] = moved / memory, moved / cache
        full = max(1.0, sum(in_memory.values()))
        # A unit's blocks, of whichever GEMM, slow each other by ``share_of_speed`` already.
        grids = sum(use for name, use in in_cache.items() if isinstance(self.active[name].kernel, Grid))
        channels = sum(in_cache.values()) - grids
        slow = 1.0 + limits.cache * grids * channels
        return float(1.0 / max(slow, full))
