"""How many held-out claims survive each uncertain number at both ends of its range: as a table and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane.cli.table import Line, Table
from sidelane_lab.harness.drawing import BLACK, BLUE, ORANGE, RC, save_both
from sidelane_lab.model.claims import Role, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Survival:
    """What the held-out claims come to with one number at one end of its range.

    Attributes:
        path: of the number, ``dma.trigger_us`` for example.
        source: of the number.
        value: at this end.
        high: which end.
        met: held-out claims that are met.
        of: held-out claims that are comparable.
        lost, won: ids of those that are missed, or met, at this end only.
    """

    path: str
    source: str
    value: float
    high: bool
    met: int
    of: int
    lost: tuple[str, ...] = ()
    won: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As ``claims-sensitivity.json`` has it."""
        return dataclasses.asdict(self)


def survival(
    path: str, source: str, value: float, high: bool, before: Sequence[Verdict], after: Sequence[Verdict]
) -> Survival:
    """Compare verdicts with a number at an end of its range with those at its value."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a.role is Role.HELD_OUT and not a.incomparable]
    lost = tuple(a.claim_id for a, b in pairs if a.ok and not b.ok)
    won = tuple(a.claim_id for a, b in pairs if b.ok and not a.ok)
    return Survival(path, source, value, high, sum(b.ok for _, b in pairs), len(pairs), lost, won)


def sensitivity_table(found: Sequence[Survival], met: int) -> Table:
    """A line for each number whose range changes a verdict, the most sensitive first."""
    lines = []
    moving, others = _moving(found)
    for path, (low, high) in moving.items():
        lost = sorted({*low.lost, *high.lost})
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        values = (f"{low.value:.4g}", str(low.met), f"{high.value:.4g}", str(high.met))
        lines.append(Line((path, low.source, *values, names)))
    columns = ("<number", "<source", "low", "met", "high", "met", "<missed there")
    title = f"Held-out claims met with one number at an end of its range ({met} of {found[0].of} at its value)"
    note = f"{others} other uncertain numbers change none"
    return Table(title, columns, tuple(lines), (note,))


def draw_sensitivity(found: Sequence[Survival], met: int, title: str, folder: Path) -> Path:
    """Both ends of each number whose range changes a verdict as marks on a line, the count at its value as a rule.

    Returns:
        The PNG; an SVG lies next to it.
    """
    ends, others = _moving(found)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(9, 1.8 + 0.22 * len(ends)), layout="constrained")
        axes = figure.subplots()
        for place, (low, high) in enumerate(ends.values()):
            axes.plot([low.met, high.met], [place, place], color=BLACK, linewidth=0.8)
            axes.plot(low.met, place, "<", color=BLUE, markersize=5)
            axes.plot(high.met, place, ">", color=ORANGE, markersize=5)
        axes.plot([], [], "<", color=BLUE, label="least plausible value")
        axes.plot([], [], ">", color=ORANGE, label="greatest plausible value")
        axes.axvline(met, color=BLACK, linewidth=0.8, linestyle=":", label="its value")
        axes.set_yticks(range(len(ends)), [f"{path} ({pair[0].source})" for path, pair in ends.items()], fontsize=8)
        axes.set_ylim(len(ends), -1)
        axes.set_xlim(0, found[0].of)
        axes.set_xlabel(f"held-out claims met, of {found[0].of} ({others} other uncertain numbers change none)")
        axes.set_ylabel("number of the description")
        axes.set_title(title)
        axes.legend(fontsize=7, loc="lower left")
        return save_both(figure, "claims-sensitivity", folder, dpi=130)


def _moving(found: Sequence[Survival]) -> tuple[dict[str, tuple[Survival, Survival]], int]:
    """Both ends of each number that changes a verdict, those that lose the most claims first; how many change none."""
    ends: dict[str, list[Survival]] = {}
    for one in found:
        ends.setdefault(one.path, []).append(one)
    order = sorted(ends, key=lambda path: min(one.met for one in ends[path]))
    moving = [path for path in order if any(one.lost or one.won for one in ends[path])]
    return {path: (ends[path][0], ends[path][1]) for path in moving}, len(ends) - len(moving)
