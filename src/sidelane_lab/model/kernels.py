"""Collectives as kernels of the device model."""

from __future__ import annotations

import dataclasses

from sidelane.program import kernel
from sidelane.program.collective import REDUCING, Kind
from sidelane.program.ir import Engine, EngineKind
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import HostThreads, Machine, Topology
from sidelane_lab.model.collectives import (
    PUBLISHED_VARIANTS,
    REDUCE_UNITS,
    default_units,
    dma_run,
    executed_run,
    library_us,
    unit_speed,
)
from sidelane_lab.model.device import Gang
from sidelane_lab.sim import SimulatedRun

FLAGGED = 2
"""Bytes of a word and its flag in cells, next to those of the word (``device/flagged.py``)."""
DMA_TRAFFIC = 2.0
"""Bytes through memory for each byte that crosses a link: read once here, written once there."""


def library_gang(
    machine: Machine, kind: Kind, nbytes: int, *, units: int | None = None, reserved: bool = False, priority: int = 0
) -> Gang:
    """Return the vendor library's collective as a kernel.

    Args:
        machine: its ``library`` figures.
        kind: of collective.
        nbytes: as studies count it.
        units: workgroups; None: the library's default.
        reserved: units are set aside for it.
        priority: of its stream.
    """
    library = machine.library
    default = default_units(library, kind)
    count = default if units is None else min(units, default)  # more units than workgroups help nobody
    need = float(library.all_to_all_need if kind is Kind.ALL_TO_ALL else library.all_gather_need)
    alone = library_us(machine, kind, nbytes) * unit_speed(library, kind, default) / unit_speed(library, kind, count)
    traffic = library.all_to_all_traffic if kind is Kind.ALL_TO_ALL else library.traffic
    memory = wire_gbps(machine, kind, nbytes, alone) * traffic
    return Gang("collective", alone, memory, count, need, reserved=reserved, priority=priority)


def own_gang(
    machine: Machine,
    kind: Kind,
    nbytes: int,
    *,
    units: int | None = None,
    reserved: bool = False,
    priority: int = 0,
    captured: bool = False,
) -> Gang:
    """Sidelane's kernel. On all units it has so many workgroups that next to nothing of a GPU is left.

    Its protocol follows from the bytes from rank to rank, as that of kernels does (``program/kernel.py``); an
    all-reduce has one shot, which sends everything to all, or two, whichever is faster.

    Args:
        machine: with a section ``[kernels]``.
        kind: of collective.
        nbytes: as studies count it.
        units: that it has; None: as many as its workgroups.
        reserved: units are set aside for it.
        priority: of its stream.
        captured: a graph launches it, and not the host.

    Raises:
        ValueError: the description has no such section.
    """
    own = machine.kernels
    if own is None:
        text = "a description with a section [kernels]"
        raise ValueError(f"own_gang: kernels of {machine.name} (value=none, allowed={text})")
    blocks = kernel.MOST_BLOCKS if nbytes / machine.gpus >= kernel.LARGE_PART_BYTES else kernel.BLOCKS
    if machine.through_host:
        alone = host_kernel_us(machine, kind, nbytes) + (0.0 if captured else float(own.eager_us))
        count = min(kernel.HOST_BLOCKS, int(machine.gpu.units)) if units is None else min(units, kernel.HOST_BLOCKS)
        memory = wire_gbps(machine, kind, nbytes, alone) * DMA_TRAFFIC
        return Gang("collective", alone, memory, count, count, reserved=reserved, priority=priority)
    count = min(blocks, int(machine.gpu.units)) if units is None else min(units, blocks)
    need = float(own.all_reduce_need if kind is Kind.ALL_REDUCE else own.need)
    speeds = {Kind.ALL_REDUCE: own.all_reduce_gbps, Kind.REDUCE_SCATTER: own.reduce_scatter_gbps}
    share = (1 if machine.links.topology is Topology.MESH else machine.gpus - 1) / machine.gpus
    bytes_a_us = speeds.get(kind, own.gather_gbps) * 1e3 * min(1.0, count / need)
    whole, part = (share * machine.gpus, nbytes) if kind is Kind.ALL_REDUCE else (share, nbytes / machine.gpus)
    exchanged_us = whole * nbytes / bytes_a_us
    if part <= kernel.most_ll_bytes(machine.gpus):
        exchanged_us *= FLAGGED
    else:
        exchanged_us += float(own.parcels_us if part <= kernel.MOST_BLOCK_FLAG_BYTES else own.bulk_us)
    if kind is Kind.ALL_REDUCE:
        exchanged_us = min(exchanged_us, own.bulk_us + 2 * share * nbytes / bytes_a_us)
    alone = float(own.latency_us + exchanged_us + (0.0 if captured else own.eager_us))
    memory = wire_gbps(machine, kind, nbytes, alone) * own.traffic
    return Gang("collective", alone, memory, count, need, reserved=reserved, priority=priority)


def host_kernel_us(machine: Machine, kind: Kind, nbytes: int, ranks: int | None = None) -> float:
    """Return the time of Sidelane's kernel through host memory, in a graph (``kernels/ll.py``, ``through_host.py``).

    Every rank stores its part once, or one for each peer, and loads those of all peers in one shot. What ranks share is
    their host's memory and links of root complexes.

    Args:
        machine: with a section ``[host]``.
        kind: of collective.
        nbytes: as studies count it.
        ranks: number of ranks; None: one for each GPU.
    """
    host, ranks = machine.host, machine.gpus if ranks is None else ranks
    assert host is not None, "through host memory"
    part = nbytes if kind in (Kind.ALL_REDUCE, Kind.BROADCAST) else nbytes / ranks
    peers = max(1, ranks - 1)
    read = part if kind is Kind.BROADCAST else peers * part
    stored = read if kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER) else part
    root = min(ranks, int(host.root_gpus)) * read / host.root_gbps
    shared = max(root, ranks * (stored + read) / host.memory_gbps)
    if kind is not Kind.BROADCAST and part <= kernel.HOST_LL_BYTES // peers:
        return float(host.flagged_us + FLAGGED * max(read / host.flagged_gbps, shared) / 1e3)
    return float(host.kernel_us + max(read / host.kernel_gbps, shared) / 1e3)


def dma_gangs(
    machine: Machine, kind: Kind, nbytes: int, variant: str | None = None, *, write_back: bool = False
) -> tuple[Gang, ...]:
    """The collective on DMA engines as gangs, in launch order: copies, and the kernels that add where it reduces.

    Its Program is simulated to learn what each takes alone.

    copies of piece 0 | copies of piece 1 |                        | copies of results
                      | reduction of 0    | ...  reduction of 1    |

    Args:
        machine: its ``dma`` figures.
        kind: all_gather, all_to_all, reduce_scatter or all_reduce.
        nbytes: as studies count it.
        variant: of the collective's builders; None: the faster of an engine for each peer and one engine for all.
        write_back: kernels' caches are written back first. The two versions of the ConCCL paper disagree on whether an
            MI300X needs that (VII-B2): the one with ConCCL in its title says no.
    """
    run = dma_collective(machine, kind, nbytes, variant, record=kind in REDUCING)
    flush_us = machine.gpu.l2_mb / machine.gpu.memory_gbps * 1e3 if write_back else 0.0
    memory = wire_gbps(machine, kind, nbytes, run.time_us) * DMA_TRAFFIC
    if kind not in REDUCING:
        return (Gang("collective", run.time_us + flush_us, memory),)
    spans = _reductions(run)
    units = min(REDUCE_UNITS, int(machine.gpu.units))
    adding = min(float(machine.dma.reduce_gbps), float(machine.gpu.memory_gbps))
    gangs: list[Gang] = []
    before: tuple[str, ...] = ()
    reached = -flush_us
    for number, (start, end) in enumerate(spans):
        gangs.append(Gang(f"copies {number}", start - reached, memory, after=before))
        follows = (f"copies {number}", *((f"reduction {number - 1}",) if number else ()))
        gangs.append(Gang(f"reduction {number}", end - start, adding, units, units, after=follows))
        before, reached = (f"copies {number}",), start
    gangs.append(Gang("collective", run.time_us - spans[-1][1], memory, after=(f"reduction {len(spans) - 1}",)))
    return tuple(dataclasses.replace(gang, part_of=str(kind)) for gang in gangs)


def dma_us(machine: Machine, kind: Kind, nbytes: int, variant: str | None = None) -> float:
    """Return the time of the collective on DMA engines alone."""
    return dma_collective(machine, kind, nbytes, variant).time_us


@remembered("gpu", "links", "dma", "host")
def dma_collective(
    machine: Machine, kind: Kind, nbytes: int, variant: str | None = None, *, record: bool = False
) -> SimulatedRun:
    """Simulate the collective that C3 runs on DMA engines, through the vendor's runtime.

    Where one host thread feeds the engines of a node, that is the ConCCL paper's: moves and nothing else. Everywhere
    else, and for collectives that reduce, it is Sidelane's own program, with its flags.
    """
    reached = machine.with_value("dma.engine_gbps", machine.dma.engine_gbps * machine.dma.runtime_share)
    usual = ("b2b", "chunked") if machine.through_host else ("pcpy", "b2b")
    variants = usual if variant is None else (variant,)
    if machine.dma.host is HostThreads.NODE and kind in PUBLISHED_VARIANTS:
        return min((dma_run(reached, kind, nbytes, name, record=record) for name in variants), key=lambda r: r.time_us)
    return min((executed_run(reached, kind, nbytes, name, record=record) for name in variants), key=lambda r: r.time_us)


def _reductions(run: SimulatedRun) -> list[tuple[float, float]]:
    """When the first rank's kernels add: start and end of each, one after another."""
    lane = str(Engine(EngineKind.COMPUTE))
    return sorted(
        (interval.start_us, interval.end_us)
        for interval in run.timeline
        if interval.group == "rank 0" and interval.lane == lane and interval.label.startswith("reduce")
    )


def own_chunk_gang(machine: Machine, kind: Kind, nbytes: int, *, after: str = "gemm") -> Gang | None:
    """The copy of the caller's own chunk where it has to wait for the end of a GEMM (``interference.local_waits``).

    Args:
        machine: described.
        kind: of collective.
        nbytes: as studies count it; input and output are different buffers.
        after: name of the GEMM.

    Returns:
        None where such a copy waits for nothing, and so ends long before its peers' bytes have come; and among several
        nodes, where steps have copies of their own.
    """
    if not machine.interference.local_waits or kind in REDUCING or machine.nodes > 1:
        return None
    gbps = float(machine.dma.local_gbps)
    return Gang("own chunk", nbytes / machine.gpus / gbps / 1e3, 2 * gbps, after=(after,))


def wire_gbps(machine: Machine, kind: Kind, nbytes: int, time_us: float) -> float:
    """Return the bytes that a GPU sends to its peers, by time."""
    ranks = machine.gpus
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    return rounds * nbytes * (ranks - 1) / ranks / time_us / 1e3


def wire_peak_gbps(machine: Machine) -> float:
    """Return the bytes a GPU can send to its peers at once."""
    peers = machine.gpus - 1 if machine.links.topology is Topology.MESH else 1
    return peers * machine.links.usable_gbps
