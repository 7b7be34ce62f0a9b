"""Predictions of fused operators as pictures: gains by shape, and next to what the fused operators paper publishes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane_lab.harness.drawing import BLACK, BLUE, GREY, RC, VERMILLION, save
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import published
from sidelane_lab.model.claims_fused import best, mean
from sidelane_lab.model.fused_study import FusedStudy
from sidelane_lab.model.operators import ORDERS

Spread = Callable[[Machine, Callable[[Machine], float], float], tuple[float, float]]
GAINS: tuple[tuple[str, str, Callable[[FusedStudy], float]], ...] = (
    ("FU-EMB-01", "embedding, one node: mean", lambda s: mean(s.embeddings)),
    ("FU-EMB-02", "embedding, one node: best", lambda s: best(s.embeddings)),
    ("FU-EMB-03", "embedding, two nodes: mean", lambda s: mean(s.embeddings_across)),
    ("FU-EMB-04", "embedding, two nodes: best", lambda s: best(s.embeddings_across)),
    ("FU-GEMV-01", "GEMV: mean", lambda s: mean(s.gemvs)),
    ("FU-GEMV-02", "GEMV: best", lambda s: best(s.gemvs)),
    ("FU-GEMM-01", "GEMM: mean", lambda s: mean(s.gemms)),
    ("FU-GEMM-02", "GEMM: best", lambda s: best(s.gemms)),
)
"""Claim, words, and its prediction at usual shapes: the paper's text has not all of them."""
OCCUPANCIES = tuple(eighths / 8 for eighths in range(1, 9))
LOWER = "time lower than unfused, %"


def draw_gains(machine: Machine, found: Sequence[tuple[str, float, float, float]], folder: Path) -> Path:
    """By how much each operator is faster fused: its name, least plausible gain, gain, and greatest, in percent."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 1.6 + 0.24 * len(found)), layout="constrained")
        axes = figure.subplots()
        for place, (_, low, value, high) in enumerate(found):
            axes.plot([low, high], [place, place], color=BLUE, linewidth=1.2)
            axes.plot(value, place, "o", color=BLUE, markersize=4)
        axes.set_yticks(range(len(found)), [name for name, *_ in found], fontsize=7)
        axes.invert_yaxis()
        axes.axvline(0, color=BLACK, linewidth=0.8)
        axes.set_xlabel(f"{LOWER} (lines: plausible)")
        axes.set_ylabel("operator and shape")
        axes.set_title(f"Fused operators on {machine.title}: predicted")
        save(figure, "fused-predicted", "", "", folder)
    return folder / "fused-predicted.png"


def draw_published(study: FusedStudy, spread: Spread, folder: Path) -> Path:
    """The paper's figures: gains, time over occupancy, and skew, published and predicted."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 6.4), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(1.2, 1))
        _gains(figure.add_subplot(grid[0, :]), study, spread)
        _occupancy(figure.add_subplot(grid[1, 0]), study, spread)
        _skew(figure.add_subplot(grid[1, 1]), study, spread)
        save(figure, "fused-published", "", "", folder)
    return folder / "fused-published.png"


def _gains(axes: Axes, study: FusedStudy, spread: Spread) -> None:
    for place, (claim_id, _, predict) in enumerate(GAINS):
        value = predict(study)
        low, high = spread(study.machine, _on(predict), value)
        axes.plot([value - low, value + high], [place, place], color=GREY, linewidth=1.2)
        axes.plot(value, place, "o", color=GREY, markersize=5)
        axes.plot(published()[claim_id]["value"], place, "D", color=VERMILLION, markersize=5)
    axes.plot([], [], "D", color=VERMILLION, label="published")
    axes.plot([], [], "o-", color=GREY, label="predicted, plausible values, at shapes that stand in for the paper's")
    axes.set_yticks(range(len(GAINS)), [words for _, words, _ in GAINS], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color=BLACK, linewidth=0.8)
    axes.set_xlabel(LOWER)
    axes.set_ylabel("operator")
    axes.set_title("Fused operators paper, figures 8, 9, 10 and 12")
    axes.legend(fontsize=7, loc="lower right")


def _occupancy(axes: Axes, study: FusedStudy, spread: Spread) -> None:
    def over_best(machine: Machine, share: float) -> float:
        changed = FusedStudy(machine)
        return changed.occupied_us(share) / changed.occupied_us(0.75)

    values = [over_best(study.machine, share) for share in OCCUPANCIES]
    ends = [
        spread(study.machine, functools.partial(over_best, share=share), value)
        for share, value in zip(OCCUPANCIES, values, strict=True)
    ]
    low = [value - below for value, (below, _) in zip(values, ends, strict=True)]
    high = [value + above for value, (_, above) in zip(values, ends, strict=True)]
    axes.fill_between(OCCUPANCIES, low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(OCCUPANCIES, values, "o-", color=BLUE, markersize=4)
    rise, fall = (published()[f"FU-OCC-0{number}"]["value"] for number in (2, 3))
    steps = ((0.25, 1 / (1 + rise / 100)), (0.75, 1.0), (0.875, 1 + fall / 100))
    axes.plot(*zip(*steps, strict=True), "D", color=VERMILLION, markersize=5)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("occupancy")
    axes.set_ylabel("time over that at 75%")
    axes.set_title("Figure 13: fitted")


def _on(predict: Callable[[FusedStudy], float]) -> Callable[[Machine], float]:
    """The same by machine."""
    return lambda machine: predict(FusedStudy(machine))


def _skew(axes: Axes, study: FusedStudy, spread: Spread) -> None:
    for place, (order, claim_id) in enumerate(zip(ORDERS, ("FU-SKEW-02", "FU-SKEW-01"), strict=True)):
        skew = study.skew_percent(order)
        ends = spread(study.machine, _on(functools.partial(FusedStudy.skew_percent, order=order)), skew)
        axes.bar(place - 0.2, skew, 0.35, color=BLUE, label="predicted" if place else None)
        below, above = ends
        axes.errorbar(place - 0.2, skew, [[below], [above]], fmt="none", ecolor=BLACK, elinewidth=0.8, capsize=2)
        value = published()[claim_id]["value"]
        axes.bar(place + 0.2, value, 0.35, color=VERMILLION, label="published" if place else None)
    axes.set_xticks(range(len(ORDERS)), ORDERS)
    axes.set_xlabel("order of the work")
    axes.set_ylabel("second node later, %")
    axes.set_title("Figure 14: not fitted; bags are not in the text")
    axes.legend(fontsize=7)
