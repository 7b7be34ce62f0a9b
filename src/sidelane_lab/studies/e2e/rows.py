"""Rows of the end-to-end study, as tables and pictures."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from sidelane_lab.cli.e2e import WORKLOADS
from sidelane_lab.harness.report import Cell, tables_by
from sidelane_lab.harness.study import FlatRow, Picture, Results
from sidelane_lab.harness.table import Table, grouped
from sidelane_lab.studies.steps import EAGER, GRAPH, NONE, makers_of, spread_ms

MOST_SIZES = 8
"""Number of sizes beside each other in a picture."""

HIGHEST = 200.0
"""Percent of the library's time at which bars of a picture end; their labels have what they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadRow(FlatRow):
    """A step of a workload, by who communicates.

    Attributes:
        workload: ``attention``, ``decode``, ``experts``, ``mlp`` or ``recommendation``.
        size: name of the size, as ``--sizes`` takes it.
        way: ``nccl``, on CPUs ``gloo``; ``group``: the same code on ``dist.new_group(backend="sidelane")``;
            ``operators``: Sidelane's fused operators or layouts; others as the workload says; ``none``: no
            communication.
        launch: ``eager``, or ``graph``: in a CUDA graph.
        nccl: version that is loaded; empty on CPUs.
        step_ms: time of a step, median over the rounds of the slowest rank.
        fastest_ms: time of the fastest of these rounds.
        slowest_ms: time of the slowest of these rounds.
        rounds: number of rounds.
        unit: unit of ``per_second``: ``tokens`` or ``samples``.
        per_second: units that all ranks finish in a second.
        over_percent: percent by which a step takes longer than the library's in the same round, median.
        exposed_ms: time by which a step takes longer than ``none`` in the same round, median.
        exposed_percent: share of the step that is exposed.
        recovered_percent: share of the library's exposed time that this way hides or saves.
        predicted_ms: time by which the model of the described machine expects a step to be longer than ``none``, or the
            time of sizes without ``none``. The model adds up transfers and the kernels that a way has for them, without
            the host, and was not fitted to these rows. Null for ways that are not modelled, and where the machine is
            not described.
        made_by: makers of the calls of a Sidelane process group in a step, with the variant or the reason against it,
            as ``sidelane.report()`` says on the first rank.
        difference: norm of the difference from the library's result over the norm of that, the largest of all ranks.
        correct: True if the difference is within the tolerance of the workload; null where nothing is communicated.
        facts: figures of the workload at this size, by name with the unit in it.
        note: reason why there is no time, or a remark.
    """

    allowed = (("workload", WORKLOADS), ("launch", (EAGER, GRAPH)))
    figures = ("step_ms",)

    workload: str
    size: str
    way: str
    launch: str
    nccl: str
    step_ms: float | None
    fastest_ms: float | None
    slowest_ms: float | None
    rounds: int
    unit: str
    per_second: float | None
    over_percent: float | None
    exposed_ms: float | None
    exposed_percent: float | None
    recovered_percent: float | None
    predicted_ms: float | None
    made_by: str
    difference: float | None
    correct: bool | None
    facts: dict[str, float]
    note: str = ""

    @property
    def off_percent(self) -> float | None:
        """Difference of what was predicted from what was measured, in percent of the step."""
        measured = self.step_ms if self.exposed_ms is None else self.exposed_ms
        if self.predicted_ms is None or self.step_ms is None or measured is None:
            return None
        return 100 * (self.predicted_ms - measured) / self.step_ms


def case_of(row: WorkloadRow) -> tuple[str, str, str]:
    """Return what the rows of one size have in common."""
    return row.workload, row.size, row.nccl


COLUMNS: Mapping[str, Cell] = {
    "<launch": "launch",
    "<way": "way",
    "step\nms": "step_ms:.3f",
    "fastest-\nslowest": spread_ms,
    "units\na second": "per_second:.4g",
    "over the\nlibrary %": "over_percent:+.1f",
    "exposed\nms": "exposed_ms:.3f",
    "of the\nstep %": "exposed_percent:.1f",
    "recovered\n%": "recovered_percent:.0f",
    "predicted\nms": "predicted_ms:.3f",
    "off\n%": "off_percent:+.1f",
    "<calls by": makers_of,
    "difference": "difference:.1e",
    "<correct": "correct",
}


def _title(row: WorkloadRow) -> str:
    facts = ", ".join(f"{name} {value:g}" for name, value in row.facts.items())
    return f"{row.workload}, {row.size}: {row.unit}{', ' + facts if facts else ''}"


def step_tables(rows: Sequence[WorkloadRow]) -> list[Table]:
    """Make a table for each size of a workload."""
    return tables_by(
        rows,
        case_of,
        _title,
        COLUMNS,
        keys=2,
        groups=lambda row: row.launch,
        least=lambda row: None if row.way == NONE else row.step_ms,
    )


def draw_steps(rows: Sequence[WorkloadRow], results: Results, folder: Path) -> list[Picture]:
    """Draw a picture for each workload and launch: the step of every size by every way, next to the library's."""
    from matplotlib.figure import Figure

    from sidelane_lab.harness.drawing import COLOURS, PLATE, plain_name, save_titled

    pictures = []
    for (workload, launch), alike in grouped(rows, lambda row: (row.workload, row.launch), ordered=False):
        cases = grouped([row for row in alike if row.over_percent is not None], case_of, ordered=False)
        if not cases:
            continue
        makers = grouped(dict.fromkeys(row.way for row in alike), lambda way: way.split(", ")[0], ordered=False)
        looks = {
            way: {"color": COLOURS[maker], "alpha": 0.6**place}
            for maker, ways in makers
            for place, way in enumerate(ways)
        }
        most, lines = max(len(same) for _, same in cases), -(-len(cases) // MOST_SIZES)
        width = max(7.0, 0.5 + 0.15 * (most + 2) * min(len(cases), MOST_SIZES))
        figure = Figure(figsize=(width, 1.0 + 3.0 * lines), layout="constrained")
        for line, axes in enumerate(figure.subplots(lines, squeeze=False)[:, 0]):
            some = cases[line * MOST_SIZES : (line + 1) * MOST_SIZES]
            for at, (_, same) in enumerate(some):
                for place, row in enumerate(same):
                    x, share = at + (place - (len(same) - 1) / 2) * 0.84 / most, 100 + (row.over_percent or 0.0)
                    axes.bar(x, min(share, HIGHEST), 0.77 / most, label=plain_name(row.way), **looks[row.way])
                    axes.text(
                        x, min(share, HIGHEST) + 1, f"{share:.0f}", ha="center", va="bottom", fontsize=6, bbox=PLATE
                    )
            axes.axhline(100, color="black", linewidth=0.6, zorder=0)
            names = [
                textwrap.fill(size.replace("b-", "b "), max(12, 2 * most), break_on_hyphens=False)
                for (_, size, _), _ in some
            ]
            axes.set_xticks(range(len(some)), names, fontsize=7)
            axes.set_ylabel("time of a step, % of NCCL's", fontsize=8)
        shown = {
            label: bar for axes in figure.axes for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(shown.values(), shown, ncols=4, fontsize=7, frameon=False, loc="outside lower center")
        text = f"Time of a step of {workload} at each size by each way, {launch}, in percent of the library's."
        title = f"{workload.capitalize()}, {'in CUDA graphs' if launch == GRAPH else launch}: {results.where}"
        pictures.append(save_titled(figure, f"e2e-{workload}-{launch}", title, text, folder))
    return pictures
