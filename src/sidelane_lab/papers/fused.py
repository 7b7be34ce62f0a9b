"""The fused operators paper: its operators on four MI210, and on two nodes of one. Its study, claims and figures.

Only Figure 13, time over occupancy, was fitted to. Labels of the figures are lost in the text. What is known of the
shapes, and what stands in for the rest, was written down before anything was compared:

    embedding   batches and tables that the text names (256, 1024, 2048; 256 tables), and those between and below;
                dimension 256 (section IV), pooling 70 (Table II)
    GEMV        up to M = 64K (IV-B): widths H of transformers, the second layer of an MLP whose 4 H columns are spread
                over the ranks (Figure 3)
    GEMM        the second layer of an expert, from 4 H to H, for usual H and tokens; each row goes to two ranks

A mean over shapes is compared where the text has what decides it, and it never has: of embeddings it names batches,
tables and the dimension, but the pooling of the simulation only; of GEMVs the rows, of GEMMs nothing. Those are
predicted at these shapes, and not compared. What holds for any of them is: signs, orders, and where the gain is least.
What is published lies between the predictions of two plausible values of what the text lacks (``OPEN``); which of them
the paper has cannot be known, so that it proves little.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.operators import (
    OBLIVIOUS,
    REMOTE_FIRST,
    SECTIONS,
    Embedding,
    Gemv,
    OperatorModel,
    TiledGemm,
    predict_fused,
)
from sidelane_lab.model.workgroups import fused_figures
from sidelane_lab.papers.claims import (
    OF_THE_MACHINE,
    Claim,
    ClaimReading,
    ClaimRole,
    Paper,
    unjudged,
)
from sidelane_lab.papers.files import BETWEEN_NODES, ResultFile
from sidelane_lab.papers.measurements import FusedReadings, normalised_between_nodes
from sidelane_lab.papers.rows import in_file
from sidelane_lab.studies.fused.predict import compared_rows
from sidelane_lab.traces.dlrm import DlrmPass, dlrm_passes
from sidelane_lab.traces.schedule import end_us

BATCHES, TABLES, POOLING = (256, 512, 1024, 2048), (64, 128, 256), 70
ROWS = (8192, 16384, 32768, 65536)
WIDTHS, TOKENS = (1024, 2048, 4096), (2048, 4096, 8192)


def embeddings_of(pooling: int = POOLING) -> tuple[Embedding, ...]:
    """Return the embeddings with so many rows in a bag."""
    return tuple(Embedding(batch, tables, pooling) for batch in BATCHES for tables in TABLES)


def gemvs_of(columns: int = 0) -> tuple[Gemv, ...]:
    """Return the GEMVs with so many columns on each of four GPUs; 0: as many as rows."""
    return tuple(Gemv(rows, 4 * (columns or rows)) for rows in ROWS)


def gemms_of(widths: Sequence[int] = WIDTHS) -> tuple[TiledGemm, ...]:
    """Return the GEMMs of experts of some hidden sizes."""
    return tuple(TiledGemm(tokens, 4 * h, h, copies=2, by_library=False) for h in widths for tokens in TOKENS)


EMBEDDINGS, GEMVS, GEMMS = embeddings_of(), gemvs_of(), gemms_of()
PROFILED = Embedding(1024, 256, POOLING)
"""The operator whose time over occupancy is published (Figure 13)."""


def scale_out(machine: Machine) -> Machine:
    """Two nodes with one of a machine's GPUs each, joined by its network."""
    return dataclasses.replace(machine, name=f"{machine.name}, two nodes of one", gpus=1, nodes=2)


@functools.lru_cache(maxsize=256)
def pass_ratios(machine: Machine) -> dict[str, float]:
    """Return times of fused passes of DLRM over unfused ones (Figure 15), by samples and tables of a node."""
    shapes = [(max(1, batch // machine.nodes), count) for batch in BATCHES for count in TABLES]
    passes = {f"{batch}\n{count}": dlrm_passes(machine, DlrmPass(batch=batch, tables=count)) for batch, count in shapes}
    return {words: end_us(fused) / end_us(unfused) for words, (unfused, fused) in passes.items()}


@functools.lru_cache(maxsize=256)
def operator_rows(machine: Machine, operators: tuple[OperatorModel, ...]) -> ResultFile:
    """Return the rows that the model fills for operators, unfused and fused."""
    return in_file(machine, "fused", compared_rows(machine, operators))


class FusedContext:
    """Numbers of one machine that claims are about, with what the text lacks as it is assumed.

    Args:
        machine: four GPUs of one node, and a network.
        pooling: rows of a bag.
        columns: of a GEMV on a GPU; 0: as many as rows.
        widths: hidden sizes of experts.
    """

    def __init__(
        self, machine: Machine, pooling: int = POOLING, columns: int = 0, widths: Sequence[int] = WIDTHS
    ) -> None:
        self.machine, self.across = machine, scale_out(machine)
        self._embeddings = embeddings_of(pooling)
        self._in_a_node = (*self._embeddings, *gemvs_of(columns), *gemms_of(widths))

    def rows(self, study: str) -> ResultFile:
        """Return the rows of the operators in a node (Figures 8 to 10)."""
        return operator_rows(self.machine, self._in_a_node)

    @property
    def between(self) -> FusedReadings:
        """Embeddings between two nodes (Figure 12)."""
        return FusedReadings(operator_rows(self.across, self._embeddings))

    def occupied_us(self, occupancy: float) -> float:
        """Figure 13: time of :data:`PROFILED` at an occupancy."""
        return predict_fused(self.across, PROFILED, occupancy=occupancy).fused.time_us

    def skew_percent(self, order: str) -> float:
        """Figure 14: by how much the second node ends later than the first, mean over :data:`EMBEDDINGS`."""
        return statistics.fmean(skew_percent(self.across, operator, order) for operator in self._embeddings)


def skew_percent(machine: Machine, operator: OperatorModel, order: str) -> float:
    """Return by how much the last rank ends later than the first rank, percent of the first one's time."""
    ended = predict_fused(machine, operator, order).fused.ended_us
    return 100 * (ended[-1] / ended[0] - 1)


MACHINE, DLRM_MACHINE = "mi210x4", "mi210x1x128"
"""The paper's machine of four, and that of its simulation, in the catalogue."""
SMALL_BATCH = "batch 256"
"""Where the text says that the gain exceeds what hiding all communication gives (IV-C)."""

EMBEDDING, GEMV, GEMM = "embedding_all_to_all", "gemv_all_reduce", "gemm_all_to_all"
STRONGER = "the unfused baseline is the fastest kernel with the library's collective, in a graph"
ONE_MACHINE = "two GPUs of one machine stand in for nodes, over sockets; the copies of the unfused way count"
IN_A_NODE = "inside a node, not between nodes"
PROGRAMS_WORDS = "programs on a unit, of 16, stand in for the occupancy"
OPEN: dict[str, tuple[str, str, tuple[int, int]]] = {
    "FU-EMB-01": ("rows of a bag", "pooling", (40, 70)),
    "FU-EMB-02": ("rows of a bag", "pooling", (40, 70)),
    "FU-EMB-03": ("rows of a bag", "pooling", (70, 140)),
    "FU-EMB-04": ("rows of a bag", "pooling", (20, 40)),
    "FU-GEMV-01": ("columns of a matrix on a GPU", "columns", (1024, 2048)),
    "FU-GEMV-02": ("columns of a matrix on a GPU", "columns", (512, 1024)),
    "FU-GEMM-01": ("hidden sizes of an expert", "widths", (1024, 2048)),
    "FU-GEMM-02": ("hidden sizes of an expert", "widths", (512, 1024)),
    "FU-SKEW-01": ("rows of a bag", "pooling", (40, 70)),
}
"""Unknowns of the text that decide a claim: in words, as an argument of the context, and two values of it whose
predictions have the published number between them."""


def _open(
    claim_id: str, predict: Callable[[FusedContext], float], measured: ClaimReading | str = ""
) -> Claim[FusedContext]:
    words, _, (low, high) = OPEN[claim_id]
    reason = f"{words} are not in the text, and decide: predictions at {low} and {high} have it between them"
    return Claim(claim_id, ClaimRole.HELD_OUT, predict, measured, incomparable=reason)


def fused(read: Callable[[FusedReadings], Any], differs: str) -> ClaimReading:
    """Return a formula over fused operators."""
    return ClaimReading("fused", lambda file: read(FusedReadings(file)), differs)


def claims() -> list[Claim[FusedContext]]:
    """Every claim of the paper."""
    inp, fit, held = ClaimRole.INPUT, ClaimRole.FITTED, ClaimRole.HELD_OUT
    found: list[Claim[FusedContext]] = [
        Claim("FU-HW-01", inp, lambda s: _one_node(s), OF_THE_MACHINE),
        Claim("FU-HW-02", inp, lambda s: _two_nodes(s), OF_THE_MACHINE),
        Claim(
            "FU-SUM-01",
            held,
            lambda s: _extreme_means(FusedReadings(s.rows("fused")), statistics.fmean(s.between.lower(EMBEDDING))),
            fused(_extreme_means, STRONGER),  # our file of two nodes is of another study
            incomparable="its ends are FU-GEMM-01 and FU-EMB-03",
        ),
        _open("FU-EMB-01", fused(_lower(EMBEDDING), STRONGER)),
        _open("FU-EMB-02", fused(_lower(EMBEDDING, max), STRONGER)),
        # Rows of nodes.json are those of a script, with transports in place of implementations.
        _open(
            "FU-EMB-03",
            lambda s: statistics.fmean(s.between.lower(EMBEDDING)),
            ClaimReading(BETWEEN_NODES, _between_nodes(statistics.fmean), ONE_MACHINE),
        ),
        _open(
            "FU-EMB-04",
            lambda s: max(s.between.lower(EMBEDDING)),
            ClaimReading(BETWEEN_NODES, _between_nodes(max), ONE_MACHINE),
        ),
        Claim(
            "FU-EMB-05",
            held,
            lambda s: max(s.between.bound_shares(EMBEDDING, SMALL_BATCH)) < 1,
            fused(lambda f: min(f.bound_shares(EMBEDDING, SMALL_BATCH)) < 1, IN_A_NODE),  # of the fastest schedule
        ),
        _open("FU-GEMV-01", fused(_lower(GEMV), STRONGER)),
        _open("FU-GEMV-02", fused(_lower(GEMV, max), STRONGER)),
        Claim("FU-GEMV-03", held, fused(_least_gemv, "rows of the matrix that gains least")),
        _open("FU-GEMM-01", fused(_lower(GEMM), STRONGER)),
        _open("FU-GEMM-02", fused(_lower(GEMM, max), STRONGER)),
        Claim(
            "FU-OCC-01",
            inp,
            lambda s: 100 * (1 - fused_figures(s.machine).kept_share),
            "registers of an AMD kernel; Triton decides ours",
        ),
        # The model has shares of an occupancy, our file whole programs on a unit.
        Claim(
            "FU-OCC-02",
            fit,
            lambda s: 100 * (s.occupied_us(0.75) / s.occupied_us(0.25) - 1),
            fused(_by_programs(4, 12), PROGRAMS_WORDS),
        ),
        Claim(
            "FU-OCC-03",
            fit,
            lambda s: 100 * (s.occupied_us(0.875) / s.occupied_us(0.75) - 1),
            fused(_by_programs(12, 14), PROGRAMS_WORDS),
        ),
        # The paper compares the second node with the first; ranks of a node have no first, and their ends lie apart.
        _open(
            "FU-SKEW-01",
            lambda s: s.skew_percent(OBLIVIOUS),
            fused(lambda f: statistics.fmean(f.skew_percent("oblivious")), IN_A_NODE),
        ),
        Claim(
            "FU-SKEW-02",
            held,
            lambda s: s.skew_percent(REMOTE_FIRST),
            fused(lambda f: statistics.fmean(f.skew_percent("remote_first")), "inside a node"),
            miss="two equal nodes that send first do the same, whatever the bags: the model has no noise",
        ),
        Claim(
            "FU-SIM-01",
            ClaimRole.SEEN,
            lambda s: 100 * (1 - statistics.fmean(pass_ratios(named(DLRM_MACHINE)).values())),
            "there are no 128 nodes",
            miss="batches and tables of a node are not in the text, and twelve shapes that may be meant gain 11 to 49%",
        ),
        *unjudged("001"),
    ]
    return found


def _lower(op: str, choose: Callable[[list[float]], float] = statistics.fmean) -> Callable[[FusedReadings], float]:
    """Return a formula of the percent by which fused times are lower: the mean over shapes, or another choice."""
    return lambda fused: choose(fused.lower(op))


def _extreme_means(fused: FusedReadings, *others: float) -> list[float]:
    found = [*(statistics.fmean(fused.lower(op)) for op in (EMBEDDING, GEMV, GEMM)), *others]
    return [min(found), max(found)]


def _least_gemv(fused: FusedReadings) -> dict[str, int]:
    ratios = fused.normalised(GEMV)
    return {"M": int(max(ratios, key=ratios.__getitem__).partition("x")[0])}


def _between_nodes(choose: Callable[[list[float]], float]) -> Callable[[ResultFile], float]:
    return lambda file: choose([100 * (1 - ratio) for ratio in normalised_between_nodes(file).values()])


def _by_programs(before: int, after: int) -> Callable[[FusedReadings], float]:
    return lambda fused: 100 * (fused.by_programs()[after] / fused.by_programs()[before] - 1)


def _one_node(context: FusedContext) -> dict[str, object]:
    machine = context.machine
    both_ways = 2 * float(machine.links.usable_gbps)
    return {"gpus": machine.gpus, "gpu": machine.title.split()[-1], "link_GBps": both_ways}


def _two_nodes(context: FusedContext) -> dict[str, float]:
    machine = context.across
    return {"nodes": machine.nodes, "gpus_per_node": machine.gpus, "ib_GBps": float(machine.links.network_gbps)}


FUSED_WORDS = "fused over unfused"
NORMALISED: dict[str, Any] = {"level": 1, "low": 0, "high": 1.35, "ylabel": "time over that unfused"}
"""Axis of panels of normalised times."""
PAPER = Paper(
    numbers=("001",),
    machine=MACHINE,
    context=lambda machine, version: FusedContext(machine),
    claims=claims(),
    sections=SECTIONS,
)
