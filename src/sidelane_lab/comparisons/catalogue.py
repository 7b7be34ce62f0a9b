"""The 26 figures of data and the four tables of the papers: captions in our words, and who predicts and measures each.

Papers have the numbers of their texts (docs/papers.md): ``000`` the ConCCL paper, whose other version ``002`` has the
same figures, ``001`` the fused operators paper, ``003`` the DMA collectives paper, ``004`` the overlap paper. Diagrams
and tables of equipment have no values, and are not here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.comparisons import panels
from sidelane_lab.comparisons.figure import MEASURED, PUBLISHED, AnyPanel, FigureComparison
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.operators import REMOTE_FIRST, predict_fused
from sidelane_lab.model.panels import Panel, PaperFigure, TimelinePanel
from sidelane_lab.model.study import SIZES, TABLE_II
from sidelane_lab.pairs.workload import TABLE_I, parse_gemm
from sidelane_lab.papers import conccl, dma, fused, overlap
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.dma import claimed_range
from sidelane_lab.papers.files import BETWEEN_NODES, CLASSES
from sidelane_lab.papers.measurements import FIFTH
from sidelane_lab.traces import dlrm_study

AG, AA = Kind.ALL_GATHER, Kind.ALL_TO_ALL
NO_PRELAUNCH = "nothing prelaunched, without the prelaunch.json that `sidelane prelaunch` writes"
NO_POINTS = "its points have no labels in the text: means and limits only"
NO_NUMBERS = "the text has no number of it"
STAND_INS = "the text has not all of the shapes: the mean and the best only"
MI300X, MI210X2 = conccl.MI300X, "mi210x1x2"


def _of_paper(figures: Sequence[PaperFigure], number: str) -> Callable[[Machine | None, bool, str], Sequence[Panel]]:
    figure = next(one for one in figures if number in one.numbers)

    def predict(machine: Machine | None, ranges: bool, version: str) -> Sequence[Panel]:
        assert machine is not None
        return figure.panels(machine, ranges)

    return predict


def _conccl(number: str) -> Callable[[Machine | None, bool, str], Sequence[Panel]]:
    return lambda machine, ranges, version: _of_paper(conccl.figures(version), number)(machine, ranges, version)


def _fused_timeline(machine: Machine | None, ranges: bool, version: str) -> Sequence[AnyPanel]:
    """Show the embedding that Figure 13 profiles on two nodes, with what the peer waits for first."""
    assert machine is not None
    across = machine if machine.nodes > 1 else fused.scale_out(machine)
    run = predict_fused(across, fused.PROFILED, REMOTE_FIRST, record=True).fused
    return [TimelinePanel(intervals=run.timeline, title=str(fused.PROFILED))]


def _overlap_timeline(machine: Machine | None, ranges: bool, version: str) -> Sequence[AnyPanel]:
    assert machine is not None
    pair, blocks = "mb-ar", overlap.BLOCKS[3]
    timeline = overlap.timeline_of(machine, pair, blocks, priority=True)
    return [
        TimelinePanel(
            intervals=timeline, title=f"{pair} with priority, {blocks} thread blocks; G: a GEMM, C: a collective"
        )
    ]


def _gemm_words(machine: Machine | None, ranges: bool, version: str) -> Mapping[str, str]:
    assert machine is not None
    context, lost = conccl.C3Context(machine), round(FIFTH * float(machine.gpu.units))
    return {tag: panels.alone_words(gemm_us(machine, parse_gemm(tag)), context.slowdown(tag, lost)) for tag in TABLE_I}


def _class_words(machine: Machine | None, ranges: bool, version: str) -> Mapping[str, str]:
    assert machine is not None
    return panels.class_words(conccl.pair_rows(machine, version))


def _best_words(kind: Kind) -> Callable[[Machine | None, bool, str], Mapping[str, str]]:
    def predict(machine: Machine | None, ranges: bool, version: str) -> Mapping[str, str]:
        assert machine is not None
        context = dma.DmaContext(machine)
        return {format_bytes(nbytes): context.to_take(kind, nbytes) for nbytes in SIZES}

    return predict


def _published_best(table: str) -> Callable[[], Mapping[str, str]]:
    def lines() -> Mapping[str, str]:
        found: dict[str, str] = {}
        for claim_id in _matching(rf"DM-{table}-\d"):
            claim = published()[claim_id]
            low, high = claimed_range(claim["claim"])
            found |= {format_bytes(n): claim["value"] for n in SIZES if low <= n < (high or 1 << 62)}
        return found

    return lines


def _matching(pattern: str) -> tuple[str, ...]:
    return tuple(claim_id for claim_id in published() if re.fullmatch(pattern, claim_id))


def _overlap_figure(number: str, caption: str, claims: tuple[str, ...], **missing: str) -> FigureComparison:
    figure = next(one for one in overlap.OVERLAP_FIGURES if one.number == number)
    return FigureComparison(
        number=f"004/{number}",
        caption=caption,
        claims=claims,
        predict=lambda machine, ranges, version: figure.panels(machine, ranges),
        study="occupancy",
        measure=figure.measured,
        missing={PUBLISHED: NO_POINTS, **missing},
    )


def _bars(number: str, caption: str, op: str, words: str, claims: tuple[str, ...]) -> FigureComparison:
    return FigureComparison(
        number=f"001/{number}",
        caption=caption,
        machine=fused.MACHINE,
        claims=claims,
        predict=_of_paper(fused.FIGURES, number),
        study="fused",
        measure=panels.bars(op, words, claims[0], claims[1]),
        missing={PUBLISHED: STAND_INS},
    )


def _speedups(number: str, caption: str, kind: Kind, claims: tuple[str, ...]) -> FigureComparison:
    return FigureComparison(
        number=f"003/{number}",
        caption=caption,
        machine=MI300X,
        claims=claims,
        predict=_of_paper(dma.PAPER.figures, number),
        study="collectives",
        measure=dma.SPEEDUPS[kind].measured,
        missing={PUBLISHED: NO_POINTS},
        fuller="prelaunch",
        lacking=NO_PRELAUNCH,
    )


CONCCL = (
    FigureComparison(
        number="000/T1",
        caption="GEMMs of the study, and what limits each",
        machine=MI300X,
        heading="GEMM",
        lines=panels.gemm_sizes,
        predict=_gemm_words,
        study="isolated",
        measure=panels.gemm_words,
        claims=_matching(r"C3-T1-.*"),
    ),
    FigureComparison(
        number="000/T2",
        caption="Pairs of a GEMM and a collective, by which of the two takes longer",
        machine=MI300X,
        heading="pair",
        lines=lambda: {name: str(c3_class) for name, c3_class in TABLE_II.items()},
        predict=_class_words,
        study="c3",
        measure=panels.class_words,
        claims=_matching(r"C3-T2-.*"),
    ),
    FigureComparison(
        number="000/5",
        caption="GEMMs that lose compute units, and collectives that have only some",
        machine=MI300X,
        claims=("C3-CU-01", "C3-CU-04", "C3-CU-05", "C3-CU-07", "C3-CU-08"),
        predict=_conccl("5"),
        study="isolated",
        measure=panels.compute_units,
        missing={PUBLISHED: NO_POINTS},
    ),
    FigureComparison(
        number="000/6",
        caption="Memory bandwidth that each kernel uses alone",
        machine=MI300X,
        claims=("C3-BW-01", "C3-BW-02"),
        predict=_conccl("6"),
        missing={
            PUBLISHED: NO_POINTS,
            MEASURED: "no study reads counters of memory traffic, and bytes over time would repeat what was assumed",
        },
    ),
    FigureComparison(
        number="000/7",
        caption="Ideal speedup of each pair",
        machine=MI300X,
        claims=("C3-ID-01", "C3-ID-02"),
        predict=_conccl("7"),
        study="c3",
        measure=panels.ideal,
        missing={PUBLISHED: NO_POINTS},
    ),
    FigureComparison(
        number="000/8",
        caption="Speedup of pairs with the library's collectives, by strategy",
        machine=MI300X,
        claims=_matching(r"C3-(BASE|SP|RP|SPRP)-\d+"),
        predict=_conccl("8"),
        study="c3",
        measure=panels.grouped(("c3_base", "c3_sp", "c3_rp", "c3_sp_rp")),
        further=CLASSES,
        measure_further=panels.grouped_by_bound(("c3_base", "c3_sp", "c3_rp")),
        missing={PUBLISHED: NO_POINTS},
    ),
    FigureComparison(
        number="000/9",
        caption="Collectives on copy engines over the library's, alone",
        machine=MI300X,
        claims=("CC-01", "CC-02"),
        predict=_conccl("9"),
        study="collectives",
        measure=panels.isolated,
        missing={PUBLISHED: NO_POINTS},
    ),
    FigureComparison(
        number="000/10",
        caption="Speedup of pairs with collectives on copy engines",
        machine=MI300X,
        claims=_matching(r"CC-0[3-7]|C3-BEST-01"),
        predict=_conccl("10"),
        study="c3",
        measure=panels.grouped(("c3_base", "conccl", "conccl_rp")),
        further=CLASSES,
        measure_further=panels.grouped_by_bound(("c3_base", "conccl", "conccl_rp")),
        missing={PUBLISHED: NO_POINTS},
    ),
)

FUSED = (
    _bars(
        *("8", "Fused embedding and all-to-all over the same unfused, in a node", "embedding_all_to_all"),
        *("batch, tables a GPU, pooling", ("FU-EMB-01", "FU-EMB-02")),
    ),
    _bars(
        *("9", "Fused GEMV and all-reduce over the same unfused", "gemv_all_reduce", "rows, columns, tokens"),
        ("FU-GEMV-01", "FU-GEMV-02", "FU-GEMV-03"),
    ),
    _bars(
        *("10", "Fused GEMM and all-to-all over the same unfused", "gemm_all_to_all", "rows a GPU, depth, columns"),
        ("FU-GEMM-01", "FU-GEMM-02"),
    ),
    FigureComparison(
        number="001/11",
        caption="When each rank of a fused embedding computes and sends",
        machine=MI210X2,
        claims=("FU-GRAN-02",),
        predict=_fused_timeline,
        missing={
            PUBLISHED: NO_NUMBERS,
            MEASURED: "profiles are not kept in result files: `sidelane fused --timeline FOLDER` draws them on GPUs",
        },
    ),
    FigureComparison(
        number="001/12",
        caption="Fused embedding and all-to-all over the same unfused, between two nodes",
        machine=MI210X2,
        claims=("FU-EMB-03", "FU-EMB-04", "FU-EMB-05"),
        predict=_of_paper(fused.FIGURES, "12"),
        study=BETWEEN_NODES,
        measure=panels.between_nodes,
        missing={PUBLISHED: STAND_INS, MEASURED: "two GPUs of one machine stand in for two nodes, over sockets"},
    ),
    FigureComparison(
        number="001/13",
        caption="Time of a fused embedding by occupancy",
        machine=MI210X2,
        claims=("FU-OCC-01", "FU-OCC-02", "FU-OCC-03"),
        predict=_of_paper(fused.FIGURES, "13"),
        study="fused",
        measure=panels.occupancy,
        missing={PUBLISHED: "three of its points follow from the text"},
    ),
    FigureComparison(
        number="001/14",
        caption="How far ranks end apart, by the order of the work",
        machine=MI210X2,
        claims=("FU-SKEW-01", "FU-SKEW-02"),
        predict=_of_paper(fused.FIGURES, "14"),
        study="fused",
        measure=panels.skew,
        missing={PUBLISHED: "means only", MEASURED: "inside a node"},
    ),
    FigureComparison(
        number="001/15",
        caption="A training pass of DLRM on 128 nodes, fused over unfused",
        machine=dlrm_study.MACHINE,
        claims=("FU-SIM-01",),
        predict=lambda machine, ranges, version: dlrm_study.pass_panels(machine, ranges),  # type: ignore[arg-type]
        missing={PUBLISHED: "the mean only", MEASURED: "there are no 128 nodes; the paper simulates them, too"},
    ),
)

DMA = (
    FigureComparison(
        number="003/T1",
        caption="The fastest way of an all-gather on copy engines, by size",
        machine=MI300X,
        heading="bytes",
        lines=_published_best("T1"),
        predict=_best_words(AG),
        study="collectives",
        measure=panels.best_words(AG),
        claims=_matching(r"DM-T1-\d"),
        fuller="prelaunch",
        lacking=NO_PRELAUNCH,
    ),
    FigureComparison(
        number="003/T2",
        caption="The fastest way of an all-to-all on copy engines, by size",
        machine=MI300X,
        heading="bytes",
        lines=_published_best("T2"),
        predict=_best_words(AA),
        study="collectives",
        measure=panels.best_words(AA),
        claims=_matching(r"DM-T2-\d"),
        fuller="prelaunch",
        lacking=NO_PRELAUNCH,
    ),
    FigureComparison(
        number="003/1",
        caption="All-gather on copy engines over the library, before and after the paper's optimizations",
        machine=MI300X,
        claims=("DM-PC-02", "DM-PC-03", "DM-FIN-01", "DM-FIN-03"),
        predict=_of_paper(dma.PAPER.figures, "1"),
        study="collectives",
        measure=dma.GAP.measured,
        missing={PUBLISHED: NO_POINTS},
        fuller="prelaunch",
        lacking=NO_PRELAUNCH,
    ),
    FigureComparison(
        number="003/6",
        caption="Phases of one copy between two GPUs",
        machine=MI300X,
        claims=_matching(r"DM-PH-\d+"),
        predict=_of_paper(dma.PAPER.figures, "6"),
        study="phases",
        measure=dma.PHASES.measured,
        missing={PUBLISHED: NO_POINTS, MEASURED: "the driver's call is all control: its scheduling is a part of it"},
    ),
    _speedups(
        *("13", "All-gather on copy engines over the library, by variant", AG),
        ("DM-PC-01", "DM-PC-02", "DM-BC-01", "DM-BC-02", "DM-BB-01", "DM-BB-05", "DM-PL-01", "DM-PL-03"),
    ),
    _speedups(
        *("14", "All-to-all on copy engines over the library, by variant", AA),
        ("DM-PC-01", "DM-PC-02", "DM-SW-01", "DM-SW-02", "DM-BB-01", "DM-BB-05", "DM-PL-01", "DM-PL-03"),
    ),
    FigureComparison(
        number="003/15",
        caption="Power of a GPU during an all-gather",
        machine=MI300X,
        claims=("DM-PW-01",),
        predict=_of_paper(dma.PAPER.figures, "15"),
        study="power",
        measure=panels.power,
        missing={PUBLISHED: NO_POINTS},
    ),
    FigureComparison(
        number="003/16",
        caption="A GEMM and then an all-gather: the library's time over that of copy engines",
        machine=MI300X,
        claims=("DM-SY-01",),
        predict=_of_paper(dma.PAPER.figures, "16"),
        study="chain",
        measure=panels.producer,
        missing={PUBLISHED: NO_POINTS, MEASURED: "a GEMM that reads the result follows; all three are in one graph"},
    ),
)

OVERLAP = (
    FigureComparison(
        number="004/1c",
        caption="When the iterations of a GEMM and a collective run",
        machine=overlap.PLATFORMS["A100"],
        predict=_overlap_timeline,
        missing={
            PUBLISHED: NO_NUMBERS,
            MEASURED: "traces of pipelined iterations are not kept in result files",
        },
    ),
    _overlap_figure("2", "Overlapped over sequential time, by thread blocks", ("RA-03", "RA-04", "RA-05", "RA-11")),
    _overlap_figure("3", "Time saved by priority, by thread blocks", ("RA-01", "RA-06", "RA-13", "RA-14")),
    _overlap_figure("4", "Overlap rate, by thread blocks", ("RA-02", "RA-12")),
    _overlap_figure("5", "Larger over smaller tiles beside an all-reduce, by thread blocks", ("RA-07",)),
    _overlap_figure("6", "Larger over smaller tiles beside an all-to-all, by thread blocks", ("RA-07", "RA-08")),
)

COMPARISONS: Mapping[str, FigureComparison] = {one.number: one for one in (*CONCCL, *FUSED, *DMA, *OVERLAP)}
"""All figures and tables, by number."""


def comparison_of(text: str) -> FigureComparison:
    """Return the figure or the table of a number: ``003/13``, ``3/13``, ``000/T2``, ``002/8``.

    Raises:
        ValueError: there is none, or it has no values.
    """
    paper, _, figure = text.strip().partition("/")
    paper = "000" if paper.zfill(3) == "002" else paper.zfill(3)
    figure = re.sub(r"^T", "T", figure.strip(), flags=re.IGNORECASE).replace("(", "").replace(")", "")
    found = COMPARISONS.get(f"{paper}/{figure}")
    if found is None:
        allowed = ", ".join(COMPARISONS)
        raise ValueError(f"figure: number (value={text!r}, allowed={allowed}: diagrams and equipment have no values)")
    return found
