"""``sidelane power --machine M --gemm G``: watts and energy of GEMMs next to collectives, predicted."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidelane.c3.workload import Workload, parse_gemm
from sidelane.cli.table import Line, Table, number
from sidelane.cli.terminal import say_written, tables_console
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.pair_power import PairDraw, pair_power, powered
from sidelane_lab.papers.simulated.study import write_numbers

SPOKEN_TO = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, *REDUCING)
COLUMNS = (
    "<strategy",
    "time\nus",
    "mean\nW",
    "both at\nonce, W",
    "GEMM slower\nat the cap, %",
    "energy\nmJ",
    "plausible\nmJ",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsOptions:
    """What to predict: every GEMM with every collective of every size, under each strategy whose watts are described.

    Attributes:
        machine: name in the catalogue, or a TOML or JSON file with a section ``power``.
        gemms: tags of the ConCCL paper's Table I, or ``m,n,k``.
        collectives: of ``SPOKEN_TO``.
        sizes: bytes.
        json: file for the rows, or ``written.STDOUT``; None writes none.
        report: folder for the rows; None writes none.
    """

    machine: str
    gemms: tuple[str, ...]
    collectives: tuple[Kind, ...]
    sizes: tuple[int, ...]
    json: Path | None = None
    report: Path | None = None

    def __post_init__(self) -> None:
        for kind in self.collectives:
            if kind not in SPOKEN_TO:
                raise ValueError(f"power: collective beside a GEMM (value={kind}, allowed={', '.join(SPOKEN_TO)})")


def main(options: PairsOptions) -> int:
    """Print a table for each pair, and write what the options ask for.

    Returns:
        0.

    Raises:
        ValueError: no such machine, no power figures in its description, or no such GEMM.
    """
    machine = find(options.machine)
    gemms = [parse_gemm(text.replace(",", "x")) for text in options.gemms]
    console, rows = tables_console(options.json), []
    for gemm, kind, nbytes in itertools.product(gemms, options.collectives, options.sizes):
        workload = Workload(gemm, kind, nbytes)
        draws = [pair_power(machine, workload, strategy, ranges=True) for strategy in powered(machine)]
        console.print(pair_table(machine, workload, draws).to_rich())
        rows += [_flat(workload, draw) for draw in draws]
    files = [path for path in (options.json, options.report and options.report / "power_pairs.json") if path]
    for path in files:
        write_numbers(path, "power_pairs", machine, rows)
    say_written(files)
    return 0


def pair_table(machine: Machine, workload: Workload, draws: Sequence[PairDraw]) -> Table:
    """One GPU's watts and energy under each strategy; the least energy is set off."""
    least = min(draw.energy_mj for draw in draws)
    lines = [
        Line(
            (
                draw.strategy,
                number(draw.time_us),
                number(draw.watts),
                number(draw.wanted_w) if draw.both_us else "",
                _slower(draw),
                number(draw.energy_mj),
                f"{number(draw.low_mj)} .. {number(draw.high_mj)}",
            ),
            best=draw.energy_mj == least,
        )
        for draw in draws
    ]
    title = f"{workload.name} on {machine.title}: W and energy of one GPU, predicted"
    idle, cap = draws[0].idle_w, draws[0].cap_w
    notes = (
        f"idle {idle:.0f} W, the GEMM by itself {draws[0].gemm_w:.0f} W, the cap {cap:.0f} W; what is above it is cut",
        "slower: by how much operations last longer beside the collective to keep to the cap; times do not have it",
        "plausible: over the ranges of the description's watts; times as sidelane c3 --machine predicts them",
    )
    return Table(title, COLUMNS, tuple(lines), notes)


def _slower(draw: PairDraw) -> str:
    least, most = draw.slower
    return f"{100 * least:.0f} .. {100 * most:.0f}" if most > 0 else ""


def _flat(workload: Workload, draw: PairDraw) -> dict[str, Any]:
    gemm = workload.gemm
    return {
        "gemm": gemm.tag or f"{gemm.m},{gemm.n},{gemm.k}",
        "collective": str(workload.collective),
        "bytes": workload.nbytes,
        **dataclasses.asdict(draw),
        "watts": draw.watts,
        "wanted_w": draw.wanted_w,
        "energy_mj": draw.energy_mj,
        "slower": [share if math.isfinite(share) else None for share in draw.slower],
    }
