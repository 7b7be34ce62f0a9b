"""Collectives of one node alone: programs on copy engines, simulated, and the vendor library's kernels by formula.

Programs of the DMA collectives paper were started and watched by one host process, and nothing else orders them: the
handshakes between ranks that ours hold, and copies of the caller's own chunk, are taken out of the builders' programs.
Sidelane's communicator runs all: entries, exits, flags, own chunks and reductions. The comparison with our measurements
takes those, and so do the C3 strategies wherever a paper did not run another one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

from sidelane.choice.key import MachineKey
from sidelane.program.builders import Transport, algorithms, build
from sidelane.program.collective import (
    REDUCING,
    Collective,
    Kind,
    ReduceOp,
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from sidelane.program.ir import MOVES, Copy, EngineKind, Flag, Program, Signal, Wait
from sidelane.program.transform import flags_between_own_queues, freeze, lower
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import LibraryFigures, Machine, Topology
from sidelane_lab.sdma import fit
from sidelane_lab.sim import SimulatedRun, simulate
from sidelane_lab.sim.prelaunch import prelaunch

PUBLISHED_VARIANTS = {Kind.ALL_GATHER: ("pcpy", "bcst", "b2b"), Kind.ALL_TO_ALL: ("pcpy", "swap", "b2b")}
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
"""Collectives that are predicted alone."""
PREDICTED_VARIANTS = {
    **PUBLISHED_VARIANTS,
    **{kind: tuple(one.name for one in algorithms(kind) if not one.through_host) for kind in REDUCING},
}
"""Variants on copy engines whose watts are predicted. Of Sidelane's kernels, and of a broadcast, no model knows any."""
PCIE_GBPS = 64.0
"""Bandwidth up to which nothing but PCIe joins a machine's GPUs."""
REDUCE_UNITS = 32
"""Compute units that a reduction of a hybrid takes: the thread blocks that the CUDA executor gives it."""
IN_PLACE = (Kind.ALL_GATHER, Kind.ALL_REDUCE)
"""Collectives that C3 runs in place; the others have an output of their own."""


def bare(program: Program) -> Program:
    """Return the program's moves between ranks, without flags and without copies inside a rank."""
    queues = []
    for queue in program.queues:
        moves = tuple(command for command in queue.commands if isinstance(command, MOVES))
        if moves and queue.engine.kind is EngineKind.DMA:
            queues.append(dataclasses.replace(queue, commands=moves))
    return dataclasses.replace(program, queues=tuple(queues), flag_count=0)


def collective_of(kind: Kind, nbytes: int, ranks: int) -> Collective:
    """Return the collective of a size as studies count it: gathered bytes of an all_gather, the local buffer otherwise.

    Raises:
        ValueError: another kind than all_gather, all_to_all, reduce_scatter, all_reduce.
    """
    part = max(1, nbytes // ranks)
    whole = -(-part // 4) * 4  # of elements that are added
    if kind is Kind.ALL_GATHER:
        return all_gather([part] * ranks, in_place=True)
    if kind is Kind.ALL_TO_ALL:
        return all_to_all([[part] * ranks] * ranks)
    if kind is Kind.ALL_REDUCE:
        return all_reduce([whole] * ranks, Reduction(ReduceOp.SUM, "float32"))
    if kind is Kind.REDUCE_SCATTER:
        return reduce_scatter([whole] * ranks, Reduction(ReduceOp.SUM, "float32"))
    raise _unknown("collective_of", kind)


@functools.lru_cache(maxsize=1024)
def published_program(kind: Kind, nbytes: int, ranks: int, variant: str, prelaunched: bool = False) -> Program:
    """Return a variant of the DMA collectives paper, section 4.2, as that paper ran it: each move is one packet.

    Raises:
        ValueError: a collective that reduces. The DMA collectives paper has none, and its moves alone would not be one.
    """
    if kind not in PUBLISHED_VARIANTS:
        allowed = ", ".join(PUBLISHED_VARIANTS)
        raise ValueError(f"published_program: kind (value={kind}, allowed={allowed}; others: executed_program)")
    collective = collective_of(kind, nbytes, ranks)
    if variant == "swap":
        collective = dataclasses.replace(collective, in_place=True)
    program = fit(bare(build(collective, variant)))
    return prelaunch(program) if prelaunched else program


def dma_run(
    machine: Machine, kind: Kind, nbytes: int, variant: str, prelaunched: bool = False, *, record: bool = False
) -> SimulatedRun:
    """Simulate a variant of the DMA collectives paper on all GPUs of one node.

    Raises:
        ValueError: the machine has several nodes, or the DMA collectives paper has no such variant.
    """
    machine.refuse_nodes("dma_run")
    if record:
        return simulate(published_program(kind, nbytes, machine.gpus, variant, prelaunched), machine, record=True)
    return _PUBLISHED_ONCE[prelaunched](machine, kind, nbytes, variant, prelaunched)


def _published(machine: Machine, kind: Kind, nbytes: int, variant: str, prelaunched: bool) -> SimulatedRun:
    return simulate(published_program(kind, nbytes, machine.gpus, variant, prelaunched), machine)


_TIMES = ("dma.copy_us", "dma.next_copy_us", "dma.other_source_us", "dma.sync_us")
_RATES = ("gpu.memory_gbps", "links", "host", "dma.engine_gbps", "dma.shared_queues", "dma.swap_bytes")
_MOVES = ("dma.host", "dma.engines", *_RATES, *_TIMES)
_PUBLISHED_ONCE = {
    False: remembered(*_MOVES, "dma.control_us", "dma.doorbell_us", "dma.fetch_us", maxsize=4096)(_published),
    True: remembered(*_MOVES, "dma.trigger_us", "dma.wait_us", maxsize=4096)(_published),
}
"""Runs by the numbers that they depend on, by whether they are prelaunched: most others of ``dma`` are left."""


@functools.lru_cache(maxsize=512)
def executed_program(
    kind: Kind, nbytes: int, ranks: int, variant: str, in_place: bool, through_host: bool = False
) -> Program:
    """Return the program that runs on the GPUs: copies only, and flags that a graph can replay.

    Args:
        kind: all_gather, all_to_all, reduce_scatter or all_reduce.
        nbytes: gathered bytes of an all_gather, of the local buffer otherwise.
        ranks: of the node.
        variant: of the collective's builders.
        in_place: input and output are one buffer.
        through_host: GPUs reach each other through host memory, in which staging is.

    Raises:
        ValueError: another kind, or no such variant of it.
    """
    return program_of(dataclasses.replace(collective_of(kind, nbytes, ranks), in_place=in_place), variant, through_host)


def program_of(collective: Collective, variant: str, through_host: bool = False) -> Program:
    """Return the same of any collective. Raises ValueError: no such variant of it."""
    staged = collective.in_place and collective.kind is Kind.ALL_TO_ALL and variant != "swap"
    program = build(collective, variant, Transport.STAGED if staged or through_host else Transport.PUSH)
    return freeze(lower(program, {Copy}))


@functools.lru_cache(maxsize=512)
def dependencies(program: Program) -> frozenset[Flag]:
    """Flags between copy engines of one rank, which a graph has as dependencies of its nodes.

    Those of copies inside a GPU are dependencies as well; but such a branch begins and ends late, about as late as with
    a handover and flags of its own, and is left with them.
    """
    between: set[Flag] = set()
    for rank in range(program.world_size):
        own = set(flags_between_own_queues(program, rank))
        for queue in program.queues_of(rank):
            if queue.engine.kind is not EngineKind.DMA:
                own -= {command.flag for command in queue.commands if isinstance(command, Signal | Wait)}
        between |= own
    return frozenset(between)


def executed_run(
    machine: Machine, kind: Kind, nbytes: int, variant: str, in_place: bool | None = None, *, record: bool = False
) -> SimulatedRun:
    """Simulate such a program on all GPUs of one node. ``in_place``: None takes what C3 has for that collective.

    Raises:
        ValueError: the machine has several nodes, or there is no such program.
    """
    machine.refuse_nodes("executed_run")
    place = kind in IN_PLACE if in_place is None else in_place
    return (_executed if record else _executed_once)(machine, kind, nbytes, variant, place, record)


def _executed(machine: Machine, kind: Kind, nbytes: int, variant: str, in_place: bool, record: bool) -> SimulatedRun:
    program = executed_program(kind, nbytes, machine.gpus, variant, in_place, machine.through_host)
    return simulate(program, machine, edges=dependencies(program), record=record)


_executed_once = remembered("gpu", "links", "dma", "host", maxsize=4096)(_executed)


def library_us(machine: Machine, kind: Kind, nbytes: int, units: int | None = None) -> float:
    """Time of the vendor library's kernel collective: a latency, and bytes at the bandwidth that its units reach.

    The library takes the better of two protocols: one that starts at once and spends bandwidth on flags between the
    bytes, and one for bulk that starts later.

    Args:
        machine: one node of it.
        kind: all_gather, all_to_all, reduce_scatter or all_reduce.
        nbytes: gathered bytes, or of the local buffer.
        units: compute units that it may use; None: what it takes by default.

    Raises:
        ValueError: the machine has several nodes, or another kind.
    """
    machine.refuse_nodes("library_us")
    library, ranks = machine.library, machine.gpus
    if not hasattr(library, f"{kind}_us"):
        raise _unknown("library_us", kind)
    latency, gbps = (float(getattr(library, f"{kind}_{unit}")) for unit in ("us", "gbps"))
    # What crosses one link (mesh) or port (switch), one direction; an all_reduce moves everything twice.
    share = (1 if machine.links.topology is Topology.MESH else ranks - 1) / ranks
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    speed = 1.0 if units is None else unit_speed(library, kind, units)
    bytes_us = rounds * share * nbytes / (gbps * 1e3 * speed)
    # Whatever crosses a link is read from one memory and written to another.
    moved = 2 * rounds * (ranks - 1) / ranks * nbytes
    bytes_us = max(bytes_us, moved / (machine.gpu.memory_gbps * 1e3))
    return latency + min(bytes_us / library.low_latency_share, library.bulk_us + bytes_us)


def key_of(machine: Machine) -> MachineKey:
    """Return the key by which tables of measured times are found for a machine."""
    links = "none" if machine.links.peak_gbps <= PCIE_GBPS else ""
    return MachineKey("cuda", machine.title.partition(" x ")[2], machine.gpus, links)


def _unknown(where: str, kind: Kind) -> ValueError:
    allowed = "all_gather, all_to_all, reduce_scatter, all_reduce"
    return ValueError(f"{where}: kind (value={kind}, allowed={allowed})")


def unit_speed(library: LibraryFigures, kind: Kind, units: float) -> float:
    """Share of its full bandwidth that a collective reaches with some compute units (ConCCL paper, fig. 5 b, c)."""
    need = library.all_to_all_need if kind is Kind.ALL_TO_ALL else library.all_gather_need
    return min(1.0, units / need)


def default_units(library: LibraryFigures, kind: Kind) -> int:
    """Compute units that the library takes if nobody tells it otherwise; what reduces takes the more of the two."""
    gather, exchange = library.default_units, library.all_to_all_units
    if kind in REDUCING:
        return int(max(gather, exchange))
    return int(exchange if kind is Kind.ALL_TO_ALL else gather)


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
