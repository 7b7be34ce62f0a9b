"""Watts of one GPU during a collective, by component, where its description has them (DMA collectives paper, 5.4).

The DMA collectives paper has no reductions. Those of the library are its kernels, and what is said of a hybrid follows
from its Program as a communicator runs it, with one figure more: the compute units that a reduction takes.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.collective import REDUCING, Kind
from sidelane.program.ir import MOVES, Engine, EngineKind, reads, writes
from sidelane_lab.machines.spec import Machine, Power
from sidelane_lab.model.executed import IN_PLACE, REDUCE_UNITS, executed_program
from sidelane_lab.model.kernels import library_gang, wire_gbps, wire_peak_gbps
from sidelane_lab.model.published import default_units, dma_run, published_program
from sidelane_lab.sim import simulate


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """Mean power over a collective.

    Attributes:
        compute_w: of the compute units, their idle power included.
        rest_w: of everything else.
        time_us: of the collective.
    """

    compute_w: float
    rest_w: float
    time_us: float

    @property
    def total_w(self) -> float:
        return self.compute_w + self.rest_w

    @property
    def energy_mj(self) -> float:
        """Of one GPU for one call."""
        return self.total_w * self.time_us / 1e3


def library_power(machine: Machine, kind: Kind, nbytes: int) -> Draw:
    """During the vendor library's kernel collective. A reduce_scatter is taken for an all_gather: as many bytes over
    the same links, with no figures of its own.

    Raises:
        ValueError: the machine's description has no power figures.
    """
    gang = library_gang(machine, kind, nbytes)
    busy = default_units(machine.library, kind) / machine.gpu.units
    wire = wire_gbps(machine, kind, nbytes, gang.alone_us)
    return _draw(machine, busy, gang.memory_gbps, wire, 0.0, gang.alone_us)


def dma_power(machine: Machine, kind: Kind, nbytes: int, variant: str, prelaunched: bool = False) -> Draw:
    """During a variant of the DMA collectives paper, from its Program: engines, and bytes read and written.

    Raises:
        ValueError: the machine's description has no power figures.
    """
    time = dma_run(machine, kind, nbytes, variant, prelaunched).time_us
    queues = published_program(kind, nbytes, machine.gpus, variant).queues
    commands = [command for queue in queues for command in queue.commands]
    moved = sum(span.nbytes for command in commands for span in (*reads(command), *writes(command)))
    memory = moved / machine.gpus / time / 1e3
    return _draw(machine, 0.0, memory, wire_gbps(machine, kind, nbytes, time), len(queues) / machine.gpus, time)


def hybrid_power(machine: Machine, kind: Kind, nbytes: int, variant: str) -> Draw:
    """During a reduction whose bytes travel on copy engines: an all_reduce in place, a reduce_scatter out of place.

    Args:
        machine: one node of it.
        kind: reduce_scatter or all_reduce.
        nbytes: of the local buffer.
        variant: ``b2b`` or ``pcpy``.

    Raises:
        ValueError: the machine's description has no power figures, or another kind or variant.
    """
    if kind not in REDUCING:
        raise ValueError(f"hybrid_power: kind (value={kind}, allowed={', '.join(REDUCING)})")
    program = executed_program(kind, nbytes, machine.gpus, variant, kind in IN_PLACE)
    run = simulate(program, machine, record=True)
    reducing = sum(
        interval.end_us - interval.start_us
        for interval in run.timeline
        if interval.lane == str(Engine(EngineKind.COMPUTE)) and interval.label.startswith("reduce")
    )
    busy = min(1.0, REDUCE_UNITS / machine.gpu.units) * reducing / machine.gpus / run.time_us
    commands = [command for queue in program.queues for command in queue.commands]
    touched = sum(span.nbytes for command in commands for span in (*reads(command), *writes(command)))
    engines = sum(any(isinstance(command, MOVES) for command in queue.commands) for queue in program.queues)
    memory, wire = touched / machine.gpus / run.time_us / 1e3, wire_gbps(machine, kind, nbytes, run.time_us)
    return _draw(machine, busy, memory, wire, engines / machine.gpus, run.time_us)


def _draw(machine: Machine, busy: float, memory_gbps: float, wire_gbps: float, engines: float, time_us: float) -> Draw:
    power = figures(machine)
    compute = power.compute_idle_w + power.compute_w * busy
    rest = power.idle_w - power.compute_idle_w
    rest += power.memory_w * min(1.0, memory_gbps / machine.gpu.memory_gbps)
    if wire_gbps > 0:
        rest += power.links_on_w + power.links_w * min(1.0, wire_gbps / wire_peak_gbps(machine))
    return Draw(compute, rest + power.engine_w * engines, time_us)


def figures(machine: Machine) -> Power:
    """A machine's power figures.

    Raises:
        ValueError: its description has none.
    """
    if machine.power is None:
        raise ValueError(f"power: {machine.name} has no power figures (value=None, allowed=a section [power])")
    return machine.power
