"""What the fused operators paper claims, as the model predicts it.

Only Figure 13, time over occupancy, was fitted to. A mean over shapes is compared where the text has what decides it,
and it never has: of embeddings it names batches, tables and the dimension, but the pooling of the simulation only; of
GEMVs the rows, of GEMMs nothing. Those are predicted at usual shapes (:mod:`sidelane_lab.model.fused_study`), and not
compared. What holds for any of them is: signs, orders, and where the gain is least.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from sidelane_lab.model.claims import Check, Role
from sidelane_lab.model.fused_study import EMBEDDINGS, GEMVS, FusedStudy
from sidelane_lab.model.operators import OBLIVIOUS, REMOTE_FIRST, FusedTimes
from sidelane_lab.model.workgroups import fused_figures

MACHINE = "mi210x4"
"""Of the paper, in the catalogue."""
SECTIONS = frozenset({"gpu", "links", "library", "matmul", "fused"})
"""Of a description, whose numbers matter to fused operators."""
SMALL_BATCH = 256
"""Where the text says that the gain exceeds what hiding all communication gives (IV-C)."""


def mean(times: Sequence[FusedTimes]) -> float:
    """Percent by which fused times are lower, mean over shapes."""
    return statistics.fmean(one.lower_percent for one in times)


def best(times: Sequence[FusedTimes]) -> float:
    """The same for the shape that gains most."""
    return max(one.lower_percent for one in times)


def checks() -> list[Check[FusedStudy]]:
    """Every claim of the paper that the model speaks to."""
    inp, fit, held = Role.INPUT, Role.FITTED, Role.HELD_OUT
    bags = "rows of a bag are not in the text (Table II's 70 are the simulation's), and the figure follows from them"
    gemv = "the matrices' columns are not in the text, and the gain follows from them"
    gemm = "no dimension of the matrices is in the text, and the gain follows from them"
    found: list[Check[FusedStudy]] = [
        Check("FU-HW-01", inp, lambda s: _one_node(s)),
        Check("FU-HW-02", inp, lambda s: _two_nodes(s)),
        Check("FU-SUM-01", held, lambda s: _extremes(s), incomparable=f"its lower end is the GEMM's: {gemm}"),
        Check("FU-EMB-01", held, lambda s: mean(s.embeddings), incomparable=bags),
        Check("FU-EMB-02", held, lambda s: best(s.embeddings), incomparable=bags),
        Check("FU-EMB-03", held, lambda s: mean(s.embeddings_across), incomparable=bags),
        Check("FU-EMB-04", held, lambda s: best(s.embeddings_across), incomparable=bags),
        Check("FU-EMB-05", held, lambda s: _beats_hiding(s)),
        Check("FU-GEMV-01", held, lambda s: mean(s.gemvs), incomparable=gemv),
        Check("FU-GEMV-02", held, lambda s: best(s.gemvs), incomparable=gemv),
        Check("FU-GEMV-03", held, lambda s: {"M": _least(s)}),
        Check("FU-GEMM-01", held, lambda s: mean(s.gemms), incomparable=gemm),
        Check("FU-GEMM-02", held, lambda s: best(s.gemms), incomparable=gemm),
        Check("FU-OCC-01", inp, lambda s: 100 * (1 - fused_figures(s.machine).kept_share)),
        Check("FU-OCC-02", fit, lambda s: 100 * (s.occupied_us(0.75) / s.occupied_us(0.25) - 1)),
        Check("FU-OCC-03", fit, lambda s: 100 * (s.occupied_us(0.875) / s.occupied_us(0.75) - 1)),
        Check("FU-SKEW-01", held, lambda s: s.skew_percent(OBLIVIOUS), incomparable=bags),
        Check("FU-SKEW-02", held, lambda s: s.skew_percent(REMOTE_FIRST)),
    ]
    return [dataclasses.replace(check, miss=MISSES.get(check.claim_id, "")) for check in found]


MISSES = {
    "FU-SKEW-02": "two equal nodes that send first do the same, whatever the bags: the model has no noise",
}

GIVEN = {
    "FU-GRAN-01": "bags of model.operators.Embedding(2048, 256, 70) over its slice_bags",
    "FU-GRAN-02": "model.operators.Embedding takes a slice's bags as an argument",
}
"""Claims that the model repeats."""

SIMULATED = "128 nodes in a simulator: batches, tables and the torus's sides are not stated"
NOT_MODELLED = {
    **dict.fromkeys(("FU-SIM-01", "FU-SIM-02", "FU-SIM-03"), SIMULATED),
    "FU-SIM-04": "how the paper measured",
    **dict.fromkeys(("FU-PRI-01", "FU-PRI-02", "FU-PRI-03"), "prior work"),
}


def _one_node(study: FusedStudy) -> dict[str, object]:
    machine = study.machine
    both_ways = 2 * float(machine.links.usable_gbps)
    return {"gpus": machine.gpus, "gpu": machine.title.split()[-1], "link_GBps": both_ways}


def _two_nodes(study: FusedStudy) -> dict[str, float]:
    machine = study.across
    return {"nodes": machine.nodes, "gpus_per_node": machine.gpus, "ib_GBps": float(machine.links.network_gbps)}


def _extremes(study: FusedStudy) -> list[float]:
    means = [mean(times) for _, times in study.figures().values()]
    return [min(means), max(means)]


def _beats_hiding(study: FusedStudy) -> bool:
    """True if no small batch, fused, takes as long as computation or collective alone."""
    pairs = zip(EMBEDDINGS, study.embeddings_across, strict=True)
    return all(one.fused.time_us < one.bound_us for operator, one in pairs if operator.batch == SMALL_BATCH)


def _least(study: FusedStudy) -> int:
    """Rows of the GEMV that gains least."""
    pairs = zip(GEMVS, study.gemvs, strict=True)
    return min(pairs, key=lambda pair: pair[1].lower_percent)[0].rows
