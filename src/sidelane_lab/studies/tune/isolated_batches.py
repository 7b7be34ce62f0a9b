"""What ``sidelane tune --study c3`` measures: a batch is compared in turns, and done or left as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Protocol

from sidelane.c3.measured_curves import BESIDE, COLLECTIVE, GEMM, MEMORY, PAIR
from sidelane.c3.strategy import Means
from sidelane.c3.workload import CPU_GEMM_FLOPS, Gemm, parse_gemm
from sidelane.choice.candidate import DMA
from sidelane.cli.launch import Rank
from sidelane.program.collective import Kind
from sidelane_lab.baselines.reference import rounded_bytes
from sidelane_lab.studies.tune.isolated_rows import Key

MEMORY_BYTES = {"cpu": 8 << 20, "gpu": 1 << 30}
TRAFFIC_BYTES = {"cpu": 1 << 20, "gpu": 256 << 20}
PAIR_BYTES = {"cpu": 8 << 20, "gpu": 896 << 20}
"""Of the collective next to a GEMM: enough for what is hidden to be seen."""
PAIRED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE)
"""Of the collectives, what runs next to GEMMs under every strategy: one that moves, one that also copies inside the
GPU, and one that reduces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Points that are measured in turns.

    Attributes:
        what: see ``IsolatedRow``.
        gemm: None without one.
        collective: None without one.
        nbytes: of the collective, the traffic or the memory.
        means: of a GEMM's units; of traffic, who makes it.
    """

    what: str
    gemm: Gemm | None = None
    collective: Kind | None = None
    nbytes: int = 0
    means: str = ""

    def __str__(self) -> str:
        names = (self.what, self.gemm and self.gemm.name, self.collective, str(self.nbytes or ""), self.means)
        return " ".join(str(name) for name in names if name)

    def is_done(self, keys: Collection[Key]) -> bool:
        """All of it is in a file: what was measured of it was so at once."""
        mine = (self.what, *sizes_of(self.gemm), str(self.collective or ""), self.nbytes)
        for what, m, n, k, _, collective, nbytes, implementation, _, means, _ in keys:
            same = (what, m, n, k, collective, nbytes) == mine
            if same and self.means in ("", implementation if self.what == BESIDE else means):
                return True
        return False


def batches_of(rank: Rank, options: Options) -> list[Batch]:
    """Everything; what runs next to GEMMs as soon as it can be judged, since a choice goes by that first."""
    where = "cpu" if rank.device.type == "cpu" else "gpu"
    gemms = [_sized(parse_gemm(text, options.dtype), rank, options) for text in options.gemms]
    batches = [Batch(MEMORY, nbytes=MEMORY_BYTES[where])]
    batches += [Batch(GEMM, gemm, means=means) for gemm in gemms for means in Means]
    if rank.world_size > 1:
        sizes = dict.fromkeys(rounded_bytes(nbytes, rank.world_size) for nbytes in options.sizes)
        paired = rounded_bytes(PAIR_BYTES[where], rank.world_size)
        alone = [Batch(COLLECTIVE, None, kind, nbytes) for kind in options.collectives for nbytes in sizes]
        kinds = [kind for kind in PAIRED if kind in options.collectives] or options.collectives
        batches += [one for one in alone if one.nbytes == paired]
        batches += [Batch(PAIR, gemm, kind, paired) for gemm in gemms for kind in kinds]
        batches += [one for one in alone if one.nbytes != paired]
    traffic = rounded_bytes(TRAFFIC_BYTES[where], rank.world_size)
    makers = [*(["host"] if where == "gpu" else ["copy"]), *([DMA] if rank.world_size > 1 else [])]
    batches += [Batch(BESIDE, gemm, nbytes=traffic, means=maker) for gemm in gemms for maker in makers]
    return batches


class Options(Protocol):
    """What measuring goes by (``isolated.IsolatedOptions``)."""

    @property
    def gemms(self) -> tuple[str, ...]: ...
    @property
    def collectives(self) -> tuple[Kind, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def full_size(self) -> bool: ...
    @property
    def warmup(self) -> int: ...
    @property
    def repeats(self) -> int: ...
    @property
    def seed(self) -> int: ...


def _sized(gemm: Gemm, rank: Rank, options: Options) -> Gemm:
    if rank.device.type != "cpu":
        return gemm
    divisor = 1
    while not options.full_size and gemm.scaled(divisor).flops > CPU_GEMM_FLOPS:
        divisor *= 2
    return dataclasses.replace(gemm.scaled(divisor), dtype="float32")


def sizes_of(gemm: Gemm | None) -> tuple[int, int, int]:
    """m, n and k; zeros without a GEMM."""
    return (0, 0, 0) if gemm is None else (gemm.m, gemm.n, gemm.k)
