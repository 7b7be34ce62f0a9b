"""Published against predicted, as a picture: one mark for each claim that is a number, with its plausible range."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane_lab.harness.drawing import BLACK, BLUE, GREEN, ORANGE, PURPLE, RC, save_both
from sidelane_lab.model.claims import Role, Verdict, numbers

SHADES = {Role.INPUT: ORANGE, Role.FITTED: GREEN, Role.SEEN: PURPLE, Role.HELD_OUT: BLUE}
LEFT, RIGHT = 0.2, 10
"""Ends of the picture; what goes beyond has an arrow there."""
MOST = 150
"""Numbers that have a line each; more of them share one by what they are about."""
MARKS = {Role.INPUT: "^", Role.FITTED: "s", Role.SEEN: "D", Role.HELD_OUT: "o"}


def draw_claims(verdicts: Sequence[Verdict], title: str, folder: Path) -> Path:
    """Draw predicted over published, on a logarithmic scale; 1 is right. Inputs are left out, which are always right,
    what is no number but a limit, and what cannot be compared.

    Returns:
        The PNG; an SVG lies next to it.
    """
    marks = [
        mark
        for verdict in verdicts
        if verdict.role is not Role.INPUT and verdict.error is not None and not verdict.incomparable
        for mark in _marks(verdict)
    ]
    names = [_group(name) if len(marks) > MOST else name for name, *_ in marks]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))} if len(marks) > MOST else {}
    lines = list(places) or names
    with mpl.rc_context(RC):
        figure = Figure(figsize=(9, 1.4 + 0.17 * len(lines)), layout="constrained")
        axes = figure.subplots()
        for number, (_, role, ratio, low, high) in enumerate(marks):
            place = places.get(names[number], number)
            axes.plot([low, high], [place, place], color=SHADES[role], linewidth=1.2)
            for end, beyond, mark in ((LEFT, low < LEFT, "<"), (RIGHT, high > RIGHT, ">")):
                if beyond:  # goes on outside of the picture
                    axes.plot(end, place, color=SHADES[role], marker=mark, markersize=6, clip_on=False)
            axes.plot(ratio, place, color=SHADES[role], marker=MARKS[role], markersize=4, linestyle="none")
        for role in (Role.FITTED, Role.SEEN, Role.HELD_OUT):
            axes.plot([], [], color=SHADES[role], marker=MARKS[role], linestyle="none", label=str(role))
        axes.axvline(1, color=BLACK, linewidth=0.8)
        axes.axvspan(0.75, 1.25, color="#eeeeee", zorder=0)
        axes.set_xscale("log", base=2)
        ticks = (0.25, 0.5, 0.75, 1, 1.25, 2, 4)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlim(LEFT, RIGHT)
        axes.set_yticks(range(len(lines)), lines, fontsize=6)
        axes.set_ylim(len(lines), -1)
        axes.set_ylabel("what was measured, at all sizes" if places else "claim, and which number of it")
        axes.set_xlabel("predicted / published or measured (grey: within 25%)")
        axes.set_title(title)
        axes.legend(fontsize=7)
        return save_both(figure, "claims", folder, dpi=130)


def _group(name: str) -> str:
    """What a row of measurements is about, without its sizes and places."""
    parts = [
        part for part in name.split("/") if not part[:1].isdigit() and "of place" not in part and part != "in place"
    ]
    return " ".join(part for part in parts if not re.search(r"\d[KMG]?$", part))


def _marks(verdict: Verdict) -> list[tuple[str, Role, float, float, float]]:
    """Name, role, ratio and its range for each number of a claim that has a ratio."""
    claimed, predicted = numbers(verdict.claimed), numbers(verdict.predicted)
    low, high = numbers(verdict.low), numbers(verdict.high)
    return [
        (
            f"{verdict.claim_id.partition('/')[2] or verdict.claim_id} {key.strip('/')}".strip(),
            verdict.role,
            predicted[key] / value,
            max(low.get(key, predicted[key]), 1e-3 * value) / value,
            high.get(key, predicted[key]) / value,
        )
        for key, value in claimed.items()
        if value > 0 and predicted.get(key, 0) > 0
    ]
