"""``sidelane power --machine``: power and energy that the model predicts for a machine that need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import matplotlib as mpl

from sidelane.cli.terminal import say_written, tables_console
from sidelane.program.builders import variants
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.harness.drawing import RC
from sidelane_lab.harness.study import MODEL
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.power import Draw, dma_power, hybrid_power, library_power
from sidelane_lab.model.published import PUBLISHED_VARIANTS
from sidelane_lab.papers.simulated.bands import Curves, bands
from sidelane_lab.papers.simulated.curves import BANDS
from sidelane_lab.papers.simulated.study import write_numbers
from sidelane_lab.studies.power.rows import LIBRARY, Ends, PowerRow, draw_power, power_tables

PREDICTED_VARIANTS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {**PUBLISHED_VARIANTS, **{kind: variants(kind) for kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)}}
)
"""Of the copy engines, by collective. No model speaks to the power of Sidelane's kernels, nor to a broadcast."""

TAKEN_FOR = "taken for an all_gather: as many bytes over the same links, and no figures of its own"

IN_PLACE = (Kind.ALL_GATHER, Kind.ALL_REDUCE)
"""Where both places exist, the one that is predicted: what the DMA collectives paper ran, and what the library has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """What to predict.

    Attributes:
        machine: name in the catalogue, or a TOML or JSON file with a section ``power``.
        collectives: keys of ``PREDICTED_VARIANTS``.
        sizes: bytes.
        json: file for the rows, or ``written.STDOUT``; None writes none.
        report: folder for pictures and the rows; None writes none.
    """

    machine: str
    collectives: tuple[Kind, ...]
    sizes: tuple[int, ...]
    json: Path | None = None
    report: Path | None = None


def main(options: PredictOptions) -> int:
    """Print, and write what the options ask for.

    Returns:
        0.

    Raises:
        ValueError: no such machine, no power figures in its description, or another collective.
    """
    for kind in options.collectives:
        if kind not in PREDICTED_VARIANTS:
            allowed = f"{', '.join(PREDICTED_VARIANTS)}; without --machine it is measured"
            raise ValueError(f"power: no model speaks to this collective (value={kind}, allowed={allowed})")
    machine = find(options.machine)
    console = tables_console(options.json)
    rows = [row for kind in options.collectives for nbytes in options.sizes for row in predicted(machine, kind, nbytes)]
    console.print(f"Power and energy predicted for {machine.title}", style="bold")
    for table in power_tables(rows):
        console.print(table.to_rich())
    files = [path for path in (options.json, options.report and options.report / "power_predicted.json") if path]
    for path in files:
        write_numbers(path, "power", machine, [row.to_dict() for row in rows])
    if options.report is not None:
        with mpl.rc_context(RC):
            draw_power(rows, f"{machine.title}, predicted ({BANDS})", options.report, plausible(machine, rows))
    say_written(files)
    return 0


def predicted(machine: Machine, kind: Kind, nbytes: int) -> list[PowerRow]:
    """The vendor library and every variant: the DMA collectives paper's as it ran them, reductions as communicators do.

    Raises:
        ValueError: the machine's description has no power figures.
    """
    library = _row(machine, kind, nbytes, LIBRARY, "", library_power(machine, kind, nbytes))
    rows = [dataclasses.replace(library, note=TAKEN_FOR) if kind is Kind.REDUCE_SCATTER else library]
    draw = hybrid_power if kind in REDUCING else dma_power
    for variant in PREDICTED_VARIANTS[kind]:
        rows.append(_row(machine, kind, nbytes, "dma", variant, draw(machine, kind, nbytes, variant)))
    return rows


def plausible(machine: Machine, rows: Sequence[PowerRow]) -> dict[PowerRow, Ends]:
    """Least and most watts and energy of every row, over the plausible values of the watts by component."""
    asked = list(dict.fromkeys((Kind(row.collective), row.bytes) for row in rows))

    def curves(changed: Machine) -> Curves[int]:
        found = [row for kind, nbytes in asked for row in predicted(changed, kind, nbytes)]
        return {place: [row.watts or 0.0, row.energy_mj or 0.0] for place, row in enumerate(found)}

    around = bands(machine, curves, ("power",))
    found: dict[PowerRow, Ends] = {}
    for place, row in enumerate(rows):
        watts, energy = zip(around[place].low, around[place].high, strict=True)
        found[row] = watts, energy
    return found


def _row(machine: Machine, kind: Kind, nbytes: int, implementation: str, variant: str, draw: Draw) -> PowerRow:
    assert machine.power is not None, "the model refuses a machine without"
    idle_w = float(machine.power.idle_w)
    energy_mj = draw.energy_mj * machine.gpus
    return PowerRow(
        collective=kind,
        bytes=nbytes,
        implementation=implementation,
        variant=variant,
        in_place=kind in IN_PLACE,
        launch=MODEL,
        time_us=draw.time_us,
        watts=draw.total_w,
        watts_sampled=None,
        idle_watts=idle_w,
        energy_mj=energy_mj,
        energy_above_idle_mj=energy_mj - idle_w * machine.gpus * draw.time_us / 1e3,
        counters_agree_percent=None,
    )
