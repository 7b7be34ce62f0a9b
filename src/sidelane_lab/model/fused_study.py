"""The fused operators paper's study: its operators at its shapes, on four MI210 and on two nodes of one.

Its figures' labels are lost in the text. What is known of the shapes, and what stands in for the rest, was written
down before anything was compared:

    embedding   batches and tables that the text names (256, 1024, 2048; 256 tables), and those between and below;
                dimension 256 (section IV), pooling 70 (Table II)
    GEMV        up to M = 64K (IV-B): widths H of transformers, the second layer of an MLP whose 4 H columns are spread
                over the ranks (Figure 3)
    GEMM        the second layer of an expert, from 4 H to H, for usual H and tokens; each row goes to two ranks
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence

from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.operators import (
    Embedding,
    FusedOperator,
    FusedTimes,
    Gemv,
    TiledGemm,
    predict_fused,
)

BATCHES, TABLES, POOLING = (256, 512, 1024, 2048), (64, 128, 256), 70
EMBEDDINGS = tuple(Embedding(batch, tables, POOLING) for batch in BATCHES for tables in TABLES)
PROFILED = Embedding(1024, 256, POOLING)
"""Whose time over occupancy is published (Figure 13)."""
GEMVS = tuple(Gemv(width, 4 * width) for width in (8192, 16384, 32768, 65536))
WIDTHS, TOKENS = (1024, 2048, 4096), (2048, 4096, 8192)
GEMMS = tuple(TiledGemm(tokens, 4 * h, h, copies=2, by_library=False) for h in WIDTHS for tokens in TOKENS)


def scale_out(machine: Machine) -> Machine:
    """Two nodes with one of a machine's GPUs each, joined by its network."""
    return dataclasses.replace(machine, name=f"{machine.name}, two nodes of one", gpus=1, nodes=2)


class FusedStudy:
    """Everything that the paper's figures show, each made when first asked for.

    Args:
        machine: four GPUs of one node, and a network.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.across = scale_out(machine)

    @functools.cached_property
    def embeddings(self) -> list[FusedTimes]:
        """Figure 8, as :data:`EMBEDDINGS`."""
        return [predict_fused(self.machine, operator) for operator in EMBEDDINGS]

    @functools.cached_property
    def gemvs(self) -> list[FusedTimes]:
        """Figure 9, as :data:`GEMVS`."""
        return [predict_fused(self.machine, operator) for operator in GEMVS]

    @functools.cached_property
    def gemms(self) -> list[FusedTimes]:
        """Figure 10, as :data:`GEMMS`."""
        return [predict_fused(self.machine, operator) for operator in GEMMS]

    @functools.cached_property
    def embeddings_across(self) -> list[FusedTimes]:
        """Figure 12, as :data:`EMBEDDINGS`."""
        return [predict_fused(self.across, operator) for operator in EMBEDDINGS]

    def occupied_us(self, occupancy: float) -> float:
        """Figure 13: time of :data:`PROFILED` at an occupancy."""
        return predict_fused(self.across, PROFILED, occupancy=occupancy).fused.time_us

    def skew_percent(self, order: str) -> float:
        """Figure 14: by how much the second node ends later than the first, mean over :data:`EMBEDDINGS`."""
        return statistics.fmean(skew_percent(self.across, operator, order) for operator in EMBEDDINGS)

    def figures(self) -> dict[str, tuple[Sequence[FusedOperator], list[FusedTimes]]]:
        """Operators and times by the paper's figure."""
        return {
            "Figure 8: embedding + all-to-all, one node": (EMBEDDINGS, self.embeddings),
            "Figure 9: GEMV + all-reduce": (GEMVS, self.gemvs),
            "Figure 10: GEMM + all-to-all": (GEMMS, self.gemms),
            "Figure 12: embedding + all-to-all, two nodes": (EMBEDDINGS, self.embeddings_across),
        }


def skew_percent(machine: Machine, operator: FusedOperator, order: str) -> float:
    """By how much the last rank ends later than the first rank, percent of the first one's time."""
    ended = predict_fused(machine, operator, order).fused.ended_us
    return 100 * (ended[-1] / ended[0] - 1)
