"""GEMMs and collectives as kernels of the device model."""

from __future__ import annotations

import math

from sidelane.c3.workload import Gemm
from sidelane.machine.spec import Machine, Topology
from sidelane.model.device import Gang, Tiled, run_device
from sidelane.model.published import default_units, dma_run, library_us, unit_speed
from sidelane.program.collective import Kind

DMA_TRAFFIC = 2.0
"""Bytes through memory for each byte that crosses a link: read once here, written once there."""


def gemm_kernel(machine: Machine, gemm: Gemm, *, limit: int | None = None, name: str = "gemm") -> Tiled:
    """A GEMM of the vendor's library.

    Args:
        machine: its ``matmul`` figures.
        gemm: those tagged ``mb`` do ``bound_intensity`` operations a byte, all others ``intensity``.
        limit: compute units that it may use.
        name: of the kernel.
    """
    matmul, gpu = machine.matmul, machine.gpu
    tiles = math.ceil(gemm.m / matmul.tile_m) * math.ceil(gemm.n / matmul.tile_n)
    memory_bound = gemm.tag.startswith("mb")
    flops_us = gpu.peak_tflops * matmul.efficiency * 1e6 / gpu.units  # operations a microsecond of one unit
    # A tile at the edge takes as long as a whole one.
    tile_flops = 2.0 * matmul.tile_m * matmul.tile_n * gemm.k
    traffic = tile_flops / (matmul.bound_intensity if memory_bound else matmul.intensity)
    workgroups, share = tiles, 1.0
    if matmul.persistent:
        workgroups = min(tiles, int(gpu.units if limit is None else limit))
        # Tiles are dealt out in equal parts; a fraction stands for kernels that also split the last tiles.
        tile_flops, traffic = tile_flops * tiles / workgroups, traffic * tiles / workgroups
    gain = float(matmul.cache_gain) if memory_bound else 0.0
    together = bool(matmul.persistent)
    return Tiled(name, workgroups, tile_flops / flops_us, traffic, share, limit, cache_gain=gain, together=together)


def gemm_us(machine: Machine, gemm: Gemm, units: int | None = None) -> float:
    """Time of a GEMM alone, with all compute units or some."""
    return run_device(machine, [gemm_kernel(machine, gemm, limit=units)]).time_us


def library_gang(
    machine: Machine, kind: Kind, nbytes: int, *, units: int | None = None, reserved: bool = False, priority: int = 0
) -> Gang:
    """The vendor library's collective as a kernel.

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


def dma_gang(
    machine: Machine, kind: Kind, nbytes: int, variant: str | None = None, *, write_back: bool = False
) -> Gang:
    """The collective on DMA engines through the vendor's runtime: its Program is simulated to learn what it takes
    alone.

    Args:
        machine: its ``dma`` figures.
        kind: of collective.
        nbytes: as studies count it.
        variant: of the DMA collectives paper; None: the faster of an engine for each peer and one engine for all.
        write_back: kernels' caches are written back first. The two versions of the ConCCL paper disagree on whether an
            MI300X needs that (VII-B2): the one with ConCCL in its title says no.
    """
    reached = machine.with_value("dma.engine_gbps", machine.dma.engine_gbps * machine.dma.runtime_share)
    variants = ("pcpy", "b2b") if variant is None else (variant,)
    alone = min(dma_run(reached, kind, nbytes, name).time_us for name in variants)
    memory = wire_gbps(machine, kind, nbytes, alone) * DMA_TRAFFIC
    flush_us = machine.gpu.l2_mb / machine.gpu.memory_gbps * 1e3 if write_back else 0.0
    return Gang("collective", alone + flush_us, memory)


def own_chunk_gang(machine: Machine, kind: Kind, nbytes: int, *, after: str = "gemm") -> Gang | None:
    """The copy of the caller's own chunk where it has to wait for the end of a GEMM (``interference.local_waits``).

    Args:
        machine: one node of it.
        kind: of collective.
        nbytes: as studies count it; input and output are different buffers.
        after: name of the GEMM.

    Returns:
        None where such a copy waits for nothing, and so ends long before its peers' bytes have come.
    """
    if not machine.interference.local_waits or kind is Kind.ALL_REDUCE:
        return None
    gbps = float(machine.dma.local_gbps)
    return Gang("own chunk", nbytes / machine.gpus / gbps / 1e3, 2 * gbps, after=(after,))


def wire_gbps(machine: Machine, kind: Kind, nbytes: int, time_us: float) -> float:
    """Bytes that a GPU sends to its peers, by time."""
    ranks = machine.gpus
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    return rounds * nbytes * (ranks - 1) / ranks / time_us / 1e3


def wire_peak_gbps(machine: Machine) -> float:
    """Bytes a GPU can send to its peers at once."""
    peers = machine.gpus - 1 if machine.links.topology is Topology.MESH else 1
    return peers * machine.links.usable_gbps
