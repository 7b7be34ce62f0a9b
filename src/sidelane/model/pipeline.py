"""Pipelined iterations of GEMM and collective on two streams, with occupancy and priority (overlap paper).

    compute  | G0 | G1 | G2 | G3 |
    comm          | C0 | C1 | C2 | C3 |

C(i) follows G(i) and C(i-1); G(i+1) follows G(i). A tile of the GEMM takes shared memory, which says how many of its
blocks a compute unit holds, and so whether a block of the collective finds room beside them.
"""

from __future__ import annotations

import dataclasses

from sidelane.c3.workload import Gemm
from sidelane.machine.spec import Machine
from sidelane.model.device import DeviceRun, Gang, Tiled, run_device
from sidelane.model.kernels import library_gang
from sidelane.program.collective import ELEMENT_BYTES, Kind

STAGES = 2
"""Tiles of each input that a block keeps in shared memory: one in use, one on its way."""
COLLECTIVE_SHARE = 0.25
"""Of a compute unit's room, for a block of the vendor library's collective. Assumed: they are light (overlap paper,
3.1)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a GEMM: a block computes ``m x n`` of the result in steps of ``k``."""

    m: int
    n: int
    k: int

    def shared_kb(self, dtype: str) -> float:
        """Shared memory that a block of it needs."""
        return STAGES * (self.m + self.n) * self.k * ELEMENT_BYTES[dtype] / 1024


OPT1 = Tile(64, 64, 32)
OPT2 = Tile(64, 64, 64)


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
    """

    gemm: Gemm
    collective: Kind
    nbytes: int
    tile: Tile
    blocks: int
    iterations: int = 10

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.iterations < 2:
            raise ValueError(
                f"Pipeline: blocks, iterations (value={self.blocks}, {self.iterations}, allowed=1 or more, 2 or more)"
            )


def blocks_per_unit(machine: Machine, tile: Tile, dtype: str) -> int:
    """Blocks that a compute unit holds at once: as many as shared memory and the hardware's limit allow."""
    return max(1, min(int(machine.gpu.shared_kb // tile.shared_kb(dtype)), int(machine.gpu.blocks_per_unit)))


def run_pipeline(machine: Machine, pipeline: Pipeline, *, priority: bool, record: bool = False) -> DeviceRun:
    """Run the iterations overlapped. ``priority``: the collective's stream goes before the GEMM's."""
    kernels: list[Tiled | Gang] = []
    gang = library_gang(machine, pipeline.collective, pipeline.nbytes)
    for i in range(pipeline.iterations):
        before = (f"G{i - 1}",) if i else ()
        kernels.append(_gemm(machine, pipeline, f"G{i}", before))
    for i in range(pipeline.iterations):
        after = (f"G{i}", f"C{i - 1}") if i else (f"G{i}",)
        kernels.append(
            dataclasses.replace(gang, name=f"C{i}", after=after, share=COLLECTIVE_SHARE, priority=int(priority))
        )
    return run_device(machine, kernels, record=record)


def sequential_us(machine: Machine, pipeline: Pipeline) -> float:
    """Time of the iterations one operation after another."""
    gemm = run_device(machine, [_gemm(machine, pipeline, "G", ())]).time_us
    return pipeline.iterations * (gemm + library_gang(machine, pipeline.collective, pipeline.nbytes).alone_us)


def overlap_rate(run: DeviceRun, iterations: int) -> float:
    """Share of the collectives' time during which a GEMM ran."""
    gemms = [(run.began_us[f"G{i}"], run.ended_us[f"G{i}"]) for i in range(iterations)]
    total = shared = 0.0
    for i in range(iterations):
        start, end = run.began_us[f"C{i}"], run.ended_us[f"C{i}"]
        total += end - start
        shared += sum(max(0.0, min(end, b) - max(start, a)) for a, b in gemms)
    return shared / total


def _gemm(machine: Machine, pipeline: Pipeline, name: str, after: tuple[str, ...]) -> Tiled:
    gemm, gpu, matmul = pipeline.gemm, machine.gpu, machine.matmul
    resident = blocks_per_unit(machine, pipeline.tile, gemm.dtype)
    unit_flops_us = gpu.peak_tflops * matmul.efficiency * 1e6 / gpu.units
    bound = gemm.tag.startswith("mb")
    traffic = gemm.flops / (matmul.bound_intensity if bound else matmul.intensity)
    # A unit's blocks share its throughput evenly, whether or not all of their places are taken.
    compute = gemm.flops / pipeline.blocks / (unit_flops_us / resident)
    return Tiled(name, pipeline.blocks, compute, traffic / pipeline.blocks, 1 / resident, after=after)
