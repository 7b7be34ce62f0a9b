"""GEMMs of the vendor's library: operations, bytes and launch of a shape, smooth in all three of its dimensions.

A library has tiles of many sizes and splits long sums, so that no shape falls off an edge: a GEMM takes its operations
at the share of the peak that measured ones reach, or its bytes, whichever is longer, and a launch. Where both take
about as long they do not hide each other whole (``blend``); tiles begin and end (``ramp_k``); a result with few tiles
is split along k, and added up (``split_us``). How many bytes go through memory follows from how much of what runs at
once fits in the last-level cache:

    a wave of workgroups goes along a row of tiles     panels = (rows x tile_m + columns x tile_n) x k
    panels well below CACHED times the cache           ``intensity`` operations a byte: workgroups share what they read
    panels well above it                               ``bound_intensity``: they drift apart and read it again
"""

from __future__ import annotations

import functools
import math

from sidelane.program.collective import ELEMENT_BYTES
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import Tiled, run_device
from sidelane_lab.pairs.isolated import SPLIT, GemmTimes
from sidelane_lab.pairs.workload import Bound, ComputeKind, Gemm

CACHED = 2.0
"""Sizes of the last-level cache at which half of the sharing is lost: between the GEMMs that the ConCCL paper calls
compute-bound (up to 1.4) and its memory-bound ones (3.7 and more)."""
STEEPNESS = 8
"""How fast it is lost around there."""
LONG_SUM = 4096
"""Length of sums from which on few tiles are always split."""
WARP, BAG_WARPS = 32, 8192
"""Elements of a row that a warp of PyTorch's embedding bags sums up, and warps of its grid: 1024 blocks of 8 at any
size (ATen, EmbeddingBag.cu)."""


def gemm_kernel(machine: Machine, gemm: Gemm, *, limit: int | None = None, name: str = "gemm") -> Tiled:
    """Return a GEMM of the vendor's library as a kernel.

    Args:
        machine: its ``matmul`` figures.
        gemm: its shape decides, and nothing else.
        limit: compute units that it may use.
        name: of the kernel.
    """
    matmul, units = machine.matmul, int(machine.gpu.units)
    usable = units if limit is None else min(limit, units)
    tiles = math.ceil(gemm.m / matmul.tile_m) * math.ceil(gemm.n / matmul.tile_n)
    if gemm.operation is not ComputeKind.PRODUCT:
        tiles = 64 * units  # blocks enough for every unit, and short beside what runs with them
    loss = float(matmul.partition_loss) * max(0.0, 2 * usable / units - 1) if usable < units else 0.0
    operations_us = compute_us(machine, gemm) * (1 + loss) * (usable / units) ** matmul.partition_gain
    in_waves = gemm.operation is ComputeKind.PRODUCT and tiles > units and not is_memory_bound(machine, gemm)
    waves = began = 1
    if matmul.persistent:
        workgroups = spread = min(tiles, usable)
        operations_us *= units / usable
    elif in_waves:
        # A workgroup a tile, as many as the shape has. The time alone is smooth in the shape, but fewer units take
        # whole waves more, and the last wave leaves units free (ConCCL paper, Figure 5 a: 17 to 27% for 32 to 64).
        workgroups, spread = tiles, units
        waves, began = math.ceil(tiles / usable), math.ceil(tiles / units)
    elif tiles < units:
        # Few tiles are split along k, so that they are no slower for it. The library does that for all units, and in a
        # partition what finds no unit runs in a second wave.
        workgroups = spread = tiles * (units // tiles)
        operations_us = compute_us(machine, gemm)
    else:
        waves = began = max(1, round(tiles / usable))
        workgroups, spread = usable * waves, usable
        operations_us *= units / usable
    return Tiled(
        name,
        workgroups,
        operations_us / began,
        traffic_bytes(machine, gemm) / began / spread,
        limit=limit,
        # With fewer tiles than units nothing was taken from it: parts along k leave as many free as the shape has it.
        cache_gain=float(matmul.cache_gain) if tiles >= units and is_memory_bound(machine, gemm) else 0.0,
        together=bool(matmul.persistent),
        blend=float(matmul.blend),
        fixed_us=(matmul.launch_us + split_us(machine, gemm, usable)) / waves,
    )


def gemm_us(machine: Machine, gemm: Gemm, units: int | None = None) -> float:
    """Return the time of a GEMM alone, with all compute units or some."""
    return run_device(machine, [gemm_kernel(machine, gemm, limit=units)]).time_us


@functools.lru_cache(maxsize=1024)
def bound_of(machine: Machine, gemm: Gemm) -> Bound:
    """Return the limit of a GEMM by what the loss of half the units is predicted to cost, as of measured ones."""
    units = int(machine.gpu.units)
    times = {taken: gemm_us(machine, gemm, units - taken) for taken in (0, units // 2)}
    found = GemmTimes(gemm, SPLIT, units, times).bound()
    assert found is not None, "a time with fewer units is there"
    return found


def compute_us(machine: Machine, gemm: Gemm) -> float:
    """Return the time of its operations on all compute units; of embedding bags that of their rows."""
    if gemm.operation is ComputeKind.BAG:
        return bags_us(machine, gemm.m, gemm.n, gemm.k)
    if gemm.operation is not ComputeKind.PRODUCT:
        return 0.0  # its operations are hidden behind its bytes
    matmul, step = machine.matmul, int(machine.matmul.row_step)
    rows = math.ceil(gemm.m / step) * step
    flops = gemm.flops * rows / gemm.m * (1 + matmul.ramp_k / gemm.k)
    return flops / (machine.gpu.peak_tflops * matmul.efficiency * 1e6)


def bags_us(machine: Machine, bags: int, elements: int, rows: float) -> float:
    """Return the time of PyTorch's embedding bags by their rows, which a warp reads one after another; 0 if unknown.

    Args:
        machine: its figures of a row and of a bag (``fused``).
        bags: number of bags.
        elements: of a row, which several warps share.
        rows: of a bag.
    """
    if machine.fused is None:
        return 0.0
    rounds = math.ceil(bags * math.ceil(elements / WARP) / BAG_WARPS)
    return float(rounds * (rows * machine.fused.bag_row_us + machine.fused.bag_us))


def bytes_us(machine: Machine, gemm: Gemm) -> float:
    """Return the time of its bytes with the memory to itself."""
    return traffic_bytes(machine, gemm) / (machine.gpu.memory_gbps * machine.matmul.memory_efficiency * 1e3)


def split_us(machine: Machine, gemm: Gemm, units: int) -> float:
    """Time of adding up a result that is split along k: whole with one tile, nothing where tiles fill a quarter."""
    if gemm.operation is not ComputeKind.PRODUCT:
        return 0.0
    matmul = machine.matmul
    tiles = max(1.0, gemm.m / matmul.tile_m) * max(1.0, gemm.n / matmul.tile_n)
    return matmul.split_us * max(0.0, 1 - 4 * tiles / units) * min(1.0, gemm.k / LONG_SUM)


def traffic_bytes(machine: Machine, gemm: Gemm) -> float:
    """Return the bytes that it moves through memory: by its intensity, and no fewer than its matrices have."""
    if gemm.operation is not ComputeKind.PRODUCT:
        return float(gemm.nbytes)
    return max(gemm.flops / intensity(machine, gemm), float(gemm.nbytes))


def intensity(machine: Machine, gemm: Gemm) -> float:
    """Return the operations for each byte that goes through memory."""
    matmul = machine.matmul
    crowded = panel_bytes(machine, gemm) / max(machine.gpu.cache_mb * 1e6, 1.0)
    shared = 1.0 / (1.0 + (crowded / CACHED) ** STEEPNESS)
    return matmul.bound_intensity + max(0.0, matmul.intensity - matmul.bound_intensity) * shared


def panel_bytes(machine: Machine, gemm: Gemm) -> float:
    """Return the bytes of both inputs that the workgroups of one wave read, along a row of tiles."""
    matmul, units = machine.matmul, float(machine.gpu.units)
    across = min(gemm.n / matmul.tile_n, units)
    down = min(gemm.m / matmul.tile_m, units / max(across, 1.0))
    return (down * matmul.tile_m + across * matmul.tile_n) * gemm.k * ELEMENT_BYTES[gemm.dtype]


def is_memory_bound(machine: Machine, gemm: Gemm) -> bool:
    """True if its bytes take longer than its operations: so the model makes its kernel.

    What a GEMM counts as is :func:`bound_of`; both agree on all GEMMs of the ConCCL paper.
    """
    return bytes_us(machine, gemm) > compute_us(machine, gemm)
