"""``sidelane plan --model dlrm``: Figure 15 of the fused operators paper, a training pass of DLRM on 128 nodes.

The paper publishes one number, the mean over its configurations, and Table II. What it leaves open is swept one at a
time: batches and tables of its two-node figure stand in for those of this one. The mean over them is what is shown
next to the published one, with what each assumption makes of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane_lab.harness.drawing import BLACK, BLUE, COLOURS, RC, STYLES, VERMILLION, save_both
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress, say, say_written, tables_console
from sidelane_lab.machines.load import find, with_nodes
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.ranges import bands, ends, predict_each, variations
from sidelane_lab.machines.spec import Machine, NetworkTopology
from sidelane_lab.model.operators import SECTIONS
from sidelane_lab.model.panels import Panel, PublishedValue
from sidelane_lab.model.plan import parse_nodes
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.fused import BATCHES, FUSED_WORDS, NORMALISED, TABLES
from sidelane_lab.traces.chakra import write_chakra
from sidelane_lab.traces.dlrm import DlrmPass, DlrmTimes, dlrm_times

MACHINE = "mi210x1x128"
"""Machine of the catalogue that Figure 15 is about."""
SHARES = {"a link's": 1.0, "an axis's, two links": 0.5, "a node's, four links": 0.25}
"""Shares of the published 200 Gbit/s that a link of the torus has, by what they are taken to be."""
SWEPT_BATCHES, SWEPT_TABLES = (2, 8, 32, 128, 512), (1, 4, 16, 64, 256)
"""Samples and embedding tables of a node that the picture goes over."""
FEW, MANY = 0.1, 0.8
"""Shares of the MLP layers that the bottom MLP is taken to have at least and at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assumption:
    """Mean gains, in percent, with something that the paper leaves open taken in several ways, all else as usual."""

    name: str
    usual: str
    ways: dict[str, float]

    def row(self, usual_percent: float) -> dict[str, Any]:
        """Return an object of ``--json``."""
        low, high = self.ends(usual_percent)
        found = {"assumption": self.name, "usual": self.usual, "lower_percent": self.ways}
        return {**found, "low_percent": low, "high_percent": high}

    def ends(self, usual_percent: float) -> tuple[float, float]:
        """Return the least and the greatest gain."""
        found = (usual_percent, *self.ways.values())
        return min(found), max(found)


@dataclasses.dataclass(frozen=True, slots=True)
class DlrmStudy:
    """Predicted gains of a machine, in percent of the unfused pass.

    Attributes:
        shapes: times by samples and tables of a node, as in the paper's other figures.
        assumptions: what else the mean over these could be, what moves it most first.
        swept: gains by what the link speed is taken to be, and by samples and tables of a node.
    """

    shapes: dict[tuple[int, int], DlrmTimes]
    assumptions: tuple[Assumption, ...]
    swept: dict[str, dict[tuple[int, int], float]]

    @property
    def percent(self) -> float:
        """Mean gain over the shapes."""
        return statistics.fmean(one.lower_percent for one in self.shapes.values())

    @property
    def ends(self) -> tuple[float, float]:
        """Least and greatest mean gain, over all assumptions one at a time."""
        found = [end for one in self.assumptions for end in one.ends(self.percent)]
        return min(found), max(found)


def main(name: str = MACHINE, nodes: str = "", report: Path | None = None, json: Path | None = None) -> None:
    """Print the pass at every shape, and what each assumption makes of the mean gain.

    Args:
        name: of a machine in the catalogue, or a file; nodes of one GPU.
        nodes: number of them; empty: the machine's.
        report: folder for the numbers, a picture and the graphs as traces of Chakra; None: none.
        json: file for the numbers, or ``written.STDOUT``.

    Raises:
        ValueError: no such machine, nodes of several GPUs, or a number of nodes that its torus can not have.
    """
    machine = find(name)
    counts = parse_nodes(nodes) if nodes else (machine.nodes,)
    if len(counts) > 1:
        raise ValueError(f"plan: --nodes (value={nodes!r}, allowed=one number with --model dlrm)")
    machine = with_nodes(machine, counts[0])
    console = tables_console(json)
    with progress("simulating, over what the paper leaves open") as update:
        study = dlrm_study(machine, progress=update)
    for table in (shapes_table(machine, study), assumptions_table(study)):
        console.print(table.to_rich())
    for line in conclusions(study):
        say(console, line)
    files = write_report(json, report, "dlrm", machine, rows_of(study), f"dlrm-{machine.nodes}")
    if report is not None:
        draw(machine, study, report)
        one = study.shapes[max(study.shapes)]
        for word, graph in (("unfused", one.unfused), ("fused", one.fused)):
            files.append(write_chakra(report / f"dlrm-{word}.et", graph))
    say_written(files)


def dlrm_study(
    machine: Machine,
    batches: Sequence[int] = BATCHES,
    tables: Sequence[int] = TABLES,
    progress: Callable[[str], None] = lambda text: None,
) -> DlrmStudy:
    """Predict a pass at all shapes, under every assumption.

    Args:
        machine: nodes of one GPU.
        batches: samples of all nodes.
        tables: embedding tables of a node.
        progress: is called with each step.
    """
    shapes = [(max(1, batch // machine.nodes), count) for batch in batches for count in tables]
    usual = {shape: dlrm_times(machine, _pass(shape)) for shape in shapes}

    def mean(changed: Machine, **fields: Any) -> float:
        return statistics.fmean(dlrm_times(changed, _pass(shape, **fields)).lower_percent for shape in shapes)

    gains = {f"{b} samples, {t} tables": one.lower_percent for (b, t), one in usual.items()}
    found = [Assumption("samples and tables of a node", "the mean of 12", gains)]
    for assumption in _assumptions(machine, mean):
        progress(assumption.name)
        found.append(assumption)
    usual_percent = statistics.fmean(gains.values())
    found.append(_of_description(machine, mean, usual_percent, progress))
    swept = {
        words: {
            (batch, count): dlrm_times(_shared(machine, share), _pass((batch, count))).lower_percent
            for batch in SWEPT_BATCHES
            for count in SWEPT_TABLES
        }
        for words, share in SHARES.items()
    }

    def moved(one: Assumption) -> float:
        low, high = one.ends(usual_percent)
        return high - low

    return DlrmStudy(usual, tuple(sorted(found, key=moved, reverse=True)), swept)


def pass_panels(machine: Machine, ranges: bool) -> list[Panel]:
    """Return Figure 15: the fused pass over the unfused one, a bar for each number of samples and tables of a node."""
    shapes = [(max(1, batch // machine.nodes), count) for batch in BATCHES for count in TABLES]

    def normalised(changed: Machine) -> dict[str, list[float]]:
        return {FUSED_WORDS: [1 - dlrm_times(changed, _pass(shape)).lower_percent / 100 for shape in shapes]}

    mean = 1 - published()["FU-SIM-01"]["value"] / 100
    return [
        Panel(
            curves=bands(machine, normalised, SECTIONS if ranges else ()),
            x=[f"{batch}\n{count}" for batch, count in shapes],
            marks=[PublishedValue("published: mean", (mean,), line="--")],
            xlabel="samples, and tables a node",
            **NORMALISED,
        )
    ]


def _pass(shape: tuple[int, int], **fields: Any) -> DlrmPass:
    return DlrmPass(batch=shape[0], tables=shape[1], **fields)


def _shared(machine: Machine, share: float) -> Machine:
    """Return a machine whose links have a share of their speed."""
    return machine.with_value("links.network_gbps", share * float(machine.links.network_gbps))


def _assumptions(machine: Machine, mean: Callable[..., float]) -> Iterator[Assumption]:
    """Yield what the paper leaves open of the pass and of the network."""
    layers = DlrmPass().layers
    speeds = list(SHARES)
    slower = {words: mean(_shared(machine, SHARES[words])) for words in speeds[1:]}
    yield Assumption("speed of the network", f"200 Gbit/s is {speeds[0]}", slower)
    if machine.links.network is NetworkTopology.TORUS:
        row = int(machine.links.torus_row)
        sides = [side for side in range(row, machine.nodes + 1) if machine.nodes % side == 0][1:3]
        longer = {
            f"{side} x {machine.nodes // side}": mean(machine.with_value("links.torus_row", side)) for side in sides
        }
        yield Assumption("sides of the torus", f"{row} x {machine.nodes // row}", longer)
        ring = {"one ring through all": mean(machine, axis_rings=False)}
        yield Assumption("all-reduces", "rings along both axes", ring)
    yield Assumption("embeddings, unfused", "a kernel a table", {"one kernel": mean(machine, at_once=True)})
    waits = {"nothing": mean(machine, waits=True)}
    yield Assumption("beside the end of a fused kernel", "MLPs run", waits)
    bottoms = {f"{count} layers": mean(machine, bottom=count) for count in (int(FEW * layers), int(MANY * layers))}
    yield Assumption("bottom MLP", f"{DlrmPass().bottom} of {layers} layers", bottoms)
    yield Assumption("rows of an update", "read and written", {"moved once": mean(machine, moves=1)})


def _of_description(
    machine: Machine, mean: Callable[..., float], usual: float, progress: Callable[[str], None]
) -> Assumption:
    """Return the ends that all other uncertain numbers of the description span: squares add."""
    spoken_of = ("links.network_gbps", "links.torus_row")
    others = (one for one in variations(machine, SECTIONS) if one.path not in spoken_of)
    varied = [found for _, found in predict_each(others, lambda one: mean(one.machine), progress)]
    low, high = ends(usual, varied)
    return Assumption("numbers of the description", "their values", {"together, least": low, "together, most": high})


def rows_of(study: DlrmStudy) -> list[dict[str, Any]]:
    """Return what ``--json`` writes: the mean beside the published one, assumptions, shapes, and the sweep."""
    low, high = study.ends
    figures = {"lower_percent": study.percent, "low_percent": low, "high_percent": high}
    found: list[dict[str, Any]] = [{"row": "mean", **figures, "published_percent": published()["FU-SIM-01"]["value"]}]
    found += [{"row": "assumption", **one.row(study.percent)} for one in study.assumptions]
    for (batch, tables), times in study.shapes.items():
        us = {"unfused_us": times.unfused_us, "fused_us": times.fused_us, "lower_percent": times.lower_percent}
        found.append({"row": "shape", "batch": batch, "tables": tables, **us})
    for words, gains in study.swept.items():
        for (batch, tables), percent in gains.items():
            where = {"batch": batch, "tables": tables, "network": words}
            found.append({"row": "sweep", **where, "lower_percent": percent})
    return found


def shapes_table(machine: Machine, study: DlrmStudy) -> Table:
    """Make a table of the pass at each shape, unfused and fused."""
    lines = []
    for (batch, tables), one in study.shapes.items():
        cells = (str(batch), str(tables), f"{one.unfused_us / 1e3:.2f}", f"{one.fused_us / 1e3:.2f}")
        lines.append(Line((*cells, f"{one.lower_percent:.0f}")))
    columns = ("samples\na node", "tables\na node", "unfused\nms", "fused\nms", "lower\n%")
    notes = (
        "43 MLP layers of 682, rows of 92 elements, 70 a bag: Table II of the fused operators paper",
        "samples and tables: those of its other figures stand in for what Figure 15 does not state",
        "left out: the interaction of features, the loss, the MLPs' optimizer; kernels that slow each other down",
    )
    return Table(f"A training pass of DLRM on {machine.title}: predicted", columns, tuple(lines), notes, keys=2)


def assumptions_table(study: DlrmStudy) -> Table:
    """Make a table of the mean gain by assumption."""
    lines = []
    for one in study.assumptions:
        low, high = one.ends(study.percent)
        ways = sorted(one.ways.items(), key=lambda item: item[1])
        kept = ways if len(ways) < 4 else [ways[0], ways[-1]]
        words = "; ".join(f"{name}: {percent:.0f}" for name, percent in kept)
        lines.append(Line((one.name, one.usual, f"{low:.0f} .. {high:.0f}", words)))
    low, high = study.ends
    title = f"Lower by {study.percent:.0f}%, the mean over samples and tables; {low:.0f} to {high:.0f}% by assumption"
    columns = ("<what is not stated", "<taken as", "lower\n%", "<otherwise")
    return Table(title, columns, tuple(lines), ("one assumption at a time; what moves the mean most comes first",))


def conclusions(study: DlrmStudy) -> list[str]:
    """Say how the prediction stands to the published number."""
    claimed = published()["FU-SIM-01"]["value"]
    low, high = study.ends
    inside = "inside" if low <= claimed <= high else "outside of"
    network = next(one for one in study.assumptions if one.name == "speed of the network")
    ways = {network.usual: study.percent} | {f"200 Gbit/s is {words}": gain for words, gain in network.ways.items()}
    nearest = min(ways, key=lambda words: abs(ways[words] - claimed))
    return [
        f"Published: {claimed}%, {inside} the range.",
        f"Nearest by the network's speed: {ways[nearest]:.0f}%, where {nearest}.",
    ]


def draw(machine: Machine, study: DlrmStudy, folder: Path) -> Path:
    """Draw gains over the tables of a node by what the link speed is taken to be, and the mean by assumption."""
    claimed = published()["FU-SIM-01"]["value"]
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_sweep(left, study)
        _draw_assumptions(right, study)
        left.axhline(claimed, color=BLACK, linestyle=":", linewidth=1.2, label=f"published: {claimed}%")
        right.axvline(claimed, color=BLACK, linestyle=":", linewidth=1.2, label=f"published: {claimed}%")
        for axes in (left, right):
            axes.legend(fontsize=7)
        title = f"A training pass of DLRM on {machine.title}, fused against unfused: predicted"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        return save_both(figure, f"dlrm-{machine.nodes}", folder)


def _draw_sweep(axes: Axes, study: DlrmStudy) -> None:
    colours = list(dict.fromkeys(COLOURS.values()))[: len(SHARES)]
    for (words, gains), colour, (dash, mark) in zip(study.swept.items(), colours, STYLES, strict=False):
        sizes = sorted({batch * tables for batch, tables in gains})
        alike = [[gain for (b, t), gain in gains.items() if b * t == size] for size in sizes]
        axes.fill_between(sizes, list(map(min, alike)), list(map(max, alike)), color=colour, alpha=0.15, linewidth=0)
        means = list(map(statistics.fmean, alike))
        axes.plot(sizes, means, color=colour, linestyle=dash, marker=mark, markersize=4, label=f"200 Gbit/s: {words}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("samples x tables of a node (bands: by samples)")
    axes.set_ylabel("time lower than unfused, %")
    axes.set_title("by size, and by what the network's speed is of")


def _draw_assumptions(axes: Axes, study: DlrmStudy) -> None:
    for place, one in enumerate(study.assumptions):
        low, high = one.ends(study.percent)
        axes.plot([low, high], [place, place], color=BLUE, linewidth=1.4)
        axes.plot(list(one.ways.values()), [place] * len(one.ways), "|", color=BLUE, markersize=8)
        axes.plot(study.percent, place, "o", color=VERMILLION, markersize=4)
    axes.set_yticks(range(len(study.assumptions)), [one.name for one in study.assumptions], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("mean time lower than unfused, %")
    axes.set_title("by what is not stated, one at a time")
