"""Computation beside communication as a picture: by tokens, with the published mean (arXiv 2507.03114)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane_lab.harness.drawing import BLACK, BLUE, RC, STYLES, VERMILLION, save_both
from sidelane_lab.model.claims import published
from sidelane_lab.model.layer import Step
from sidelane_lab.model.slowdown import MODELS, SEQUENCE, TOKENS, overlapped, platforms, plausible

MEAN, MOST = "CO-01", "CO-02"


def draw_slowdown(folder: Path) -> Path:
    """A panel for each GPU: percent by which kernels take longer, with bands of what the descriptions leave open."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        machines = platforms()
        for axes, (name, machine) in zip(figure.subplots(1, len(machines), sharey=True), machines.items(), strict=True):
            for model, colour, (dash, marker) in zip(MODELS, (BLUE, VERMILLION), STYLES, strict=False):
                steps = [Step(model, tokens, SEQUENCE) for tokens in TOKENS]
                low, high = zip(*(plausible(machine, step) for step in steps), strict=True)
                values = [overlapped(machine, step).slower for step in steps]
                axes.fill_between(TOKENS, low, high, color=colour, alpha=0.15, linewidth=0)
                axes.plot(TOKENS, values, color=colour, linestyle=dash, marker=marker, markersize=3.5, label=model.name)
            for claim, line, words in ((MEAN, ":", "published: mean of all"), (MOST, "--", "published: most of all")):
                axes.axhline(published()[claim]["value"], color=BLACK, linewidth=0.9, linestyle=line, label=words)
            axes.set_xscale("log", base=2)
            axes.set_xticks(TOKENS, [str(tokens) for tokens in TOKENS])
            axes.set_title(name)
            axes.set_xlabel("tokens a rank")
        figure.axes[0].set_ylim(bottom=0)
        figure.axes[0].set_ylabel("kernels take longer, %")
        figure.axes[0].legend(fontsize=7)
        title = "Training steps next to the library's collectives, predicted (bands: plausible numbers)"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        return save_both(figure, "slowdown", folder)
