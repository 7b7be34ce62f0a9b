"""Figures 8 to 15 of the fused operators paper: published, predicted and measured.

Predictions are of shapes that stand in for the paper's; files have those that were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from sidelane_lab.machines.ranges import bands
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.operators import ORDERS, REMOTE_FIRST, SECTIONS, Embedding, Gemv, TiledGemm, predict_fused
from sidelane_lab.model.panels import Panel, PublishedValue, TimelinePanel
from sidelane_lab.papers import fused
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.figures import PaperFigure, declaration, declared
from sidelane_lab.papers.files import ResultFile
from sidelane_lab.papers.measurements import FusedReadings, normalised_between_nodes
from sidelane_lab.papers.rows import aligned, exact

MI210X2 = "mi210x1x2"
PROGRAMS = 16
"""Programs on a compute unit that count as full occupancy: the most that are measured."""
OCCUPANCIES = tuple(eighths / 8 for eighths in range(1, 9))


def _published(*claim_ids: str) -> PublishedValue:
    heights = tuple(published()[claim_id]["value"] for claim_id in claim_ids)
    return PublishedValue("published", heights, tuple(range(len(heights))), line="")


def _occupancy_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    def times(changed: Machine) -> dict[str, list[float]]:
        context = fused.FusedContext(changed)
        return {"predicted, fitted": [context.occupied_us(share) / context.occupied_us(0.75) for share in OCCUPANCIES]}

    rise, fall = (published()[f"FU-OCC-0{number}"]["value"] for number in (2, 3))
    heights = (1 / (1 + rise / 100), 1.0, 1 + fall / 100)
    return [
        Panel(
            curves=bands(machine, times, SECTIONS if ranges else ()),
            x=OCCUPANCIES,
            marks=[PublishedValue("published", heights, (0.25, 0.75, 0.875), line="")],
            log=False,
            low=0,
            xlabel="occupancy",
            ylabel="time over that at 75%",
        )
    ]


def _skew_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    def skews(changed: Machine) -> dict[str, list[float]]:
        return {
            "predicted; bags are not in the text": [fused.FusedContext(changed).skew_percent(order) for order in ORDERS]
        }

    return [
        Panel(
            curves=bands(machine, skews, SECTIONS if ranges else ()),
            x=ORDERS,
            marks=[_published("FU-SKEW-02", "FU-SKEW-01")],
            xlabel="order of the work",
            ylabel="second node later, %",
        )
    ]


def _bars(
    number: str,
    *,
    words: str,
    operators: tuple[Embedding, ...] | tuple[Gemv, ...] | tuple[TiledGemm, ...],
    measured_words: str,
    read: Callable[[ResultFile], Mapping[str, float]],
) -> PaperFigure:
    """Declare a figure of fused times over unfused ones, a bar a shape.

    Args:
        number: of the figure, whose first two claims are the mean and the best percent lower.
        words: below the predicted bars.
        operators: that are predicted; embeddings among the nodes of ``MI210X2`` where that is the machine.
        measured_words: below the bars of a file.
        read: these bars, by name.
    """
    said = declaration(number)
    mean_time, best_time = (1 - published()[claim_id]["value"] / 100 for claim_id in said["claims"][:2])
    marks = [
        PublishedValue("published: mean", (mean_time,), line="--"),
        PublishedValue("published: best", (best_time,), line=":"),
    ]

    def normalised(changed: Machine) -> dict[str, list[float]]:
        rows = fused.operator_rows(changed if said["machine"] == fused.MACHINE else fused.scale_out(changed), operators)
        return {fused.FUSED_WORDS: list(FusedReadings(rows).normalised(operators[0].name).values())}

    sizes = [(one.batch, one.tables) if isinstance(one, Embedding) else (one.rows, one.columns) for one in operators]
    names = [f"{first}\n{second}" for first, second in sizes]

    def predicted(machine: Machine, ranges: bool, version: str) -> list[Panel]:
        curves = bands(machine, normalised, SECTIONS if ranges else ())
        return [Panel(curves=curves, x=names, marks=marks, xlabel=words, **fused.NORMALISED)]

    def measured(file: ResultFile) -> list[Panel]:
        found = read(file)
        curves, high = {fused.FUSED_WORDS: exact(list(found.values()))}, max(1.35, 1.2 * max(found.values(), default=1))
        axis = {**fused.NORMALISED, "high": high}
        return [Panel(curves=curves, x=list(found), marks=marks, xlabel=measured_words, **axis)] if found else []

    return PaperFigure(**said, predict=predicted, measure=measured)


def _by_shape(op: str) -> Callable[[ResultFile], dict[str, float]]:
    return lambda file: {_short(shape): ratio for shape, ratio in FusedReadings(file).normalised(op).items()}


def _short(shape: str) -> str:
    r"""Return the numbers of a shape, below each other.

    >>> _short("batch 256, 64 tables a rank, pooling 70, dim 256"), _short("8192x4096, 16 tokens")
    ('256\n64\n70', '8192\n4096\n16')
    """
    cleaned = shape.partition(", dim")[0].partition(" a rank, rows")[0]
    numbers = [part for part in cleaned.replace("x", " ").replace(",", " ").split() if part.isdigit()]
    return "\n".join(numbers)


def _between_nodes(file: ResultFile) -> dict[str, float]:
    """Read times of two GPUs as two nodes, over sockets."""
    return {shape.replace(", ", "\n"): ratio for shape, ratio in normalised_between_nodes(file).items()}


def _measured_occupancy(file: ResultFile) -> list[Panel]:
    """Programs on a compute unit stand in for workgroups."""
    times = FusedReadings(file).by_programs()
    usual = round(0.75 * PROGRAMS)
    if usual not in times:
        return []
    curve = {count / PROGRAMS: us / times[usual] for count, us in times.items()}
    shares, bands = aligned({"measured": curve})
    words = f"share of {PROGRAMS} programs on a compute unit"
    return [Panel(curves=bands, x=shares, log=False, low=0, xlabel=words, ylabel="time over that at 75%")]


def _measured_skew(file: ResultFile) -> list[Panel]:
    readings = FusedReadings(file)
    found = {order: readings.skew_percent(order) for order in ORDERS}
    if not all(found.values()):
        return []
    curves = {f"measured, mean of {len(found[ORDERS[0]])} shapes": exact([statistics.fmean(v) for v in found.values()])}
    return [Panel(curves=curves, x=ORDERS, xlabel="order of the work", ylabel="ends of ranks apart, %")]


def _timeline(machine: Machine, ranges: bool, version: str) -> list[TimelinePanel]:
    """Show the embedding that Figure 13 profiles on two nodes, with what the peer waits for first."""
    across = machine if machine.nodes > 1 else fused.scale_out(machine)
    run = predict_fused(across, fused.PROFILED, REMOTE_FIRST, record=True).fused
    return [TimelinePanel(intervals=run.timeline, title=str(fused.PROFILED))]


def pass_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    """Return Figure 15: the fused pass over the unfused one, a bar for each number of samples and tables of a node."""

    def normalised(changed: Machine) -> dict[str, list[float]]:
        return {fused.FUSED_WORDS: list(fused.pass_ratios(changed).values())}

    mean = 1 - published()["FU-SIM-01"]["value"] / 100
    return [
        Panel(
            curves=bands(machine, normalised, SECTIONS if ranges else ()),
            x=list(fused.pass_ratios(machine)),
            marks=[PublishedValue("published: mean", (mean,), line="--")],
            xlabel="samples, and tables a node",
            **fused.NORMALISED,
        )
    ]


FIGURES = (
    _bars(
        "001/8",
        words="batch, and tables a GPU",
        operators=fused.EMBEDDINGS,
        measured_words="batch, tables a GPU, pooling",
        read=_by_shape("embedding_all_to_all"),
    ),
    _bars(
        "001/9",
        words="rows, and columns of all GPUs",
        operators=fused.GEMVS,
        measured_words="rows, columns, tokens",
        read=_by_shape("gemv_all_reduce"),
    ),
    _bars(
        "001/10",
        words="rows a GPU, and columns",
        operators=fused.GEMMS,
        measured_words="rows a GPU, depth, columns",
        read=_by_shape("gemm_all_to_all"),
    ),
    declared("001/11", predict=_timeline),
    _bars(
        "001/12",
        words="batch, and tables a GPU",
        operators=fused.EMBEDDINGS,
        measured_words="batch, tables a GPU, pooling",
        read=_between_nodes,
    ),
    declared("001/13", predict=_occupancy_panels, measure=_measured_occupancy),
    declared("001/14", predict=_skew_panels, measure=_measured_skew),
    declared("001/15", predict=pass_panels),
)
