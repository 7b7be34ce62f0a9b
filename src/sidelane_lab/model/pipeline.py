"""Pipelined iterations of GEMM and collective, with occupancy and priority (overlap paper).

    compute  | G0 | G2 | ...          GEMMs of different iterations run side by side where there is room
             | G1 | G3 | ...
    comm          | C0 | C1 | C2 | C3 |

C(i) follows G(i) and C(i-1). How the GEMMs follow each other the paper does not say in so many words: it speaks of
one compute stream, and of GEMMs of different iterations that are scheduled before collectives. One stream is the first
reading, G(i+1) after G(i); it can not come below max(G, C) / (G + C) of the sequential time, and few blocks are then
the worst case. The other, in which they are independent, is the paper's Figure 2 (results/notes/model.md). Our study
(``studies.c3.occupancy``) has two streams, as drawn above: G(i) after G(i-2).
"""

from __future__ import annotations

import dataclasses

from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.blocks import BlockFootprint, most_blocks, occupancy
from sidelane_lab.model.device import DeviceRun, Gang, Tiled, run_device
from sidelane_lab.model.gemm import traffic_bytes
from sidelane_lab.model.kernels import library_gang
from sidelane_lab.pairs.spans import shared_share
from sidelane_lab.pairs.workload import Gemm

STAGES = 2
"""Tiles of each input that a block keeps in shared memory: one in use, one on its way."""
THREADS = 128
"""Threads of a GEMM's block."""
HOST_GAP_US = 20.0
"""Between two operations one after another, while the host sees the end of one and launches the next. Assumed; it is
nothing beside operations of milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a GEMM: a block computes ``m x n`` of the result in steps of ``k``, with some registers a thread."""

    m: int
    n: int
    k: int
    registers: int

    def shared_kb(self, dtype: str) -> float:
        """Shared memory that a block of it needs."""
        return STAGES * (self.m + self.n) * self.k * ELEMENT_BYTES[dtype] / 1024

    def footprint(self, dtype: str) -> BlockFootprint:
        """Return the room of a block of it on a compute unit."""
        return BlockFootprint(THREADS, THREADS * self.registers, self.shared_kb(dtype))


OPT1 = Tile(64, 64, 32, registers=72)
OPT2 = Tile(64, 64, 64, registers=106)
"""The paper's tiles. Registers are those of a Triton kernel with these tiles on an H100."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """Iterations to run.

    Attributes:
        gemm: of every iteration.
        collective: of every iteration.
        nbytes: of the collective.
        tile: of the GEMM.
        blocks: of the GEMM's grid; each computes an equal part of it.
        iterations: 2 or more.
        streams: of GEMMs, which take turns: G(i) waits for G(i - streams); 0: each has one of its own.
        asked_kb: shared memory that a block takes of a unit, if it asks for more than it needs; 0: what it needs.
    """

    gemm: Gemm
    collective: Kind
    nbytes: int
    tile: Tile
    blocks: int
    iterations: int = 10
    streams: int = 0
    asked_kb: float = 0.0

    def __post_init__(self) -> None:
        if self.streams < 0 or self.asked_kb < 0:
            raise ValueError(f"Pipeline: streams, asked_kb (value={self.streams}, {self.asked_kb}, allowed=0 or more)")
        if self.blocks < 1 or self.iterations < 2:
            raise ValueError(
                f"Pipeline: blocks, iterations (value={self.blocks}, {self.iterations}, allowed=1 or more, 2 or more)"
            )


def blocks_per_unit(machine: Machine, tile: Tile, dtype: str) -> int:
    """Blocks that a compute unit holds at once: as many as registers, threads, shared memory and places allow."""
    return most_blocks(machine, tile.footprint(dtype))


def run_pipeline(machine: Machine, pipeline: Pipeline, *, priority: bool, record: bool = False) -> DeviceRun:
    """Run the iterations overlapped. ``priority``: the collective's stream goes before the GEMM's."""
    kernels: list[Tiled | Gang] = []
    for i in range(pipeline.iterations):
        before = (f"G{i - pipeline.streams}",) if 0 < pipeline.streams <= i else ()
        kernels.append(_grid(machine, pipeline, f"G{i}", before))
    gang = library_gang(machine, pipeline.collective, pipeline.nbytes)
    limits = occupancy(machine)
    threads = int(limits.library_threads)
    footprint = BlockFootprint(threads, threads * int(limits.library_registers), float(limits.library_shared_kb))
    for i in range(pipeline.iterations):
        after = (f"G{i}", f"C{i - 1}") if i else (f"G{i}",)
        name, first = f"C{i}", int(priority)
        kernels.append(dataclasses.replace(gang, name=name, footprint=footprint, after=after, priority=first))
    return run_device(machine, kernels, record=record)


def sequential_us(machine: Machine, pipeline: Pipeline) -> float:
    """Return the time of the iterations one operation after another, with the host between them."""
    return pipeline.iterations * (sum(alone_us(machine, pipeline)) + 2 * HOST_GAP_US)


def alone_us(machine: Machine, pipeline: Pipeline) -> tuple[float, float]:
    """Return the times of a GEMM and of a collective alone."""
    gemm_us = run_device(machine, [_grid(machine, pipeline, "G", ())]).time_us
    return gemm_us, library_gang(machine, pipeline.collective, pipeline.nbytes).alone_us


def _grid(machine: Machine, pipeline: Pipeline, name: str, after: tuple[str, ...]) -> Tiled:
    """Return the GEMM of an iteration, whose blocks take what they ask for."""
    grid = grid_of(machine, pipeline.gemm, pipeline.tile, pipeline.blocks, name, after)
    footprint = pipeline.tile.footprint(pipeline.gemm.dtype)
    asked_kb = max(pipeline.asked_kb, footprint.shared_kb)
    return dataclasses.replace(grid, footprint=dataclasses.replace(footprint, shared_kb=asked_kb))


def overlap_rate(run: DeviceRun, iterations: int) -> float:
    """Return the share of the collectives' time during which a GEMM ran."""
    gemms, collectives = (
        [(run.began_us[f"{one}{i}"], run.ended_us[f"{one}{i}"]) for i in range(iterations)] for one in "GC"
    )
    return shared_share(collectives, gemms)


def grid_of(
    machine: Machine, gemm: Gemm, tile: Tile, blocks: int, name: str = "G", after: tuple[str, ...] = ()
) -> Tiled:
    """Return a GEMM of equal blocks, each of which goes over its part in tiles.

    A block waits ``step_us`` for the inputs of each step and then computes; so one alone leaves its unit idle most of
    the time, and many reach what the unit's operations or its bytes from the shared cache allow.
    """
    limits, gpu = occupancy(machine), machine.gpu
    loaded = (tile.m + tile.n) * tile.k * ELEMENT_BYTES[gemm.dtype]
    step_flops = 2 * tile.m * tile.n * tile.k
    full = min(
        gpu.peak_tflops * machine.matmul.efficiency * 1e6 / gpu.units,
        limits.unit_gbps * 1e3 * step_flops / loaded,
    )
    step_us = limits.step_us + step_flops / full
    block_us = gemm.flops / blocks / step_flops * step_us
    traffic = traffic_bytes(machine, gemm) / blocks
    return Tiled(
        name,
        blocks,
        block_us,
        traffic,
        after=after,
        footprint=tile.footprint(gemm.dtype),
        saturation=full * step_us / step_flops,
        cache_bytes=gemm.flops / blocks / step_flops * loaded,
        delay_us=float(machine.matmul.launch_us),
    )
