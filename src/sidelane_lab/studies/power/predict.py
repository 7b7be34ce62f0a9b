"""``sidelane power --machine``: power and energy that the model predicts for a machine that need not be here.

Of collectives alone, or with ``--gemm`` of GEMMs next to collectives, under each strategy whose watts are described.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.harness.study import MODEL
from sidelane_lab.harness.table import Line, Table, number
from sidelane_lab.harness.terminal import say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import predict_study, write_report
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model import power
from sidelane_lab.model.collectives import IN_PLACE, PREDICTED_VARIANTS
from sidelane_lab.pairs.workload import Workload, parse_gemm
from sidelane_lab.studies.power.rows import LIBRARY, PowerOptions, PowerRow

TAKEN_FOR = "taken for an all_gather: as many bytes over the same links, and no figures of its own"
COLUMNS = (
    "<strategy",
    "time\nus",
    "again and\nagain, us",
    "mean\nW",
    "wanted\nW",
    "GEMM slower\nat the cap, %",
    "energy\nmJ",
    "plausible\nmJ",
)


def main(machine_name: str, options: PowerOptions) -> None:
    """Print, and write what the options ask for.

    Args:
        machine_name: in the catalogue, or a TOML or JSON file with a section ``power``.
        options: collectives, sizes, GEMMs next to them, and where to write.

    Raises:
        ValueError: no such machine, no power figures in its description, no such GEMM, or no model of a collective.
    """
    if not options.gemms:
        predict_study(machine_name, options)
        return
    machine, console = find(machine_name), tables_console(options.json)
    gemms = [parse_gemm(text.replace(",", "x")) for text in options.gemms]
    numbers = []
    for gemm, (kind, nbytes) in itertools.product(gemms, _asked(options)):
        workload = Workload(gemm, kind, nbytes)
        draws = [power.pair_power(machine, workload, strategy, ranges=True) for strategy in power.powered(machine)]
        console.print(pair_table(machine, workload, draws).to_rich())
        numbers += [_flat(workload, draw) for draw in draws]
    say_written(write_report(options.json, options.report, "power_pairs", machine, numbers))


def predicted_rows(machine: Machine, options: PowerOptions) -> list[PowerRow]:
    """Return the rows of a machine that is described.

    Raises:
        ValueError: no power figures in its description, several nodes, or no model of a collective.
    """
    return [row for kind, nbytes in _asked(options) for row in predicted(machine, kind, nbytes)]


def _asked(options: PowerOptions) -> Iterator[tuple[Kind, int]]:
    """Return collectives and sizes."""
    for kind in options.collectives:
        if kind not in PREDICTED_VARIANTS:
            measured = "" if options.gemms else "; without --machine it is measured"
            allowed = f"{', '.join(PREDICTED_VARIANTS)}{measured}"
            raise ValueError(f"power: no model speaks to this collective (value={kind}, allowed={allowed})")
    return itertools.product(options.collectives, options.sizes_on("cuda"))


def predicted(machine: Machine, kind: Kind, nbytes: int) -> list[PowerRow]:
    """The vendor library and every variant: the DMA collectives paper's as it ran them, reductions as communicators do.

    Raises:
        ValueError: the machine's description has no power figures.
    """
    library = _row(machine, kind, nbytes, LIBRARY, "", power.library_power(machine, kind, nbytes))
    rows = [dataclasses.replace(library, note=TAKEN_FOR) if kind is Kind.REDUCE_SCATTER else library]
    draw = power.hybrid_power if kind in REDUCING else power.dma_power
    for variant in PREDICTED_VARIANTS[kind]:
        rows.append(_row(machine, kind, nbytes, "dma", variant, draw(machine, kind, nbytes, variant)))
    return rows


def predict_row(machine: Machine, row: PowerRow) -> tuple[float, ...]:
    """Return watts of one GPU, in the place that is predicted: all_gather and all_reduce in place, others out of place.

    Nothing where the model does not speak to it.
    """
    kind = Kind(row.collective)
    if machine.power is None or kind not in PREDICTED_VARIANTS or row.in_place != (kind in IN_PLACE):
        return ()
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return (power.library_power(machine, kind, row.bytes).total_w,)
    if row.implementation != "dma" or row.variant not in PREDICTED_VARIANTS[kind]:
        return ()
    draw = power.hybrid_power if kind in REDUCING else power.dma_power
    return (draw(machine, kind, row.bytes, row.variant).total_w,)


def _row(
    machine: Machine, kind: Kind, nbytes: int, implementation: str, variant: str, draw: power.PowerDraw
) -> PowerRow:
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
        idle_watts=idle_w,
        energy_mj=energy_mj,
        energy_above_idle_mj=energy_mj - idle_w * machine.gpus * draw.time_us / 1e3,
    )


def pair_table(machine: Machine, workload: Workload, draws: Sequence[power.PairDraw]) -> Table:
    """One GPU's watts and energy under each strategy; the least energy is set off."""
    least = min(draw.energy_mj for draw in draws)
    lines = [
        Line(
            (
                draw.strategy,
                number(draw.time_us),
                number(draw.repeated_us),
                number(draw.watts),
                number(draw.wanted_w),
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
        f"idle {idle:.0f} W, the GEMM by itself {draws[0].gemm_w:.0f} W, the cap {cap:.0f} W; wanted: without the cap",
        "again and again: when the pair repeats and the GPU lowers its clocks to keep to the cap, as watts and energy",
        "slower: by how much operations then last longer than by themselves, for the least and most that energy falls",
        f"for the least energy: {power.choose_for_energy(draws).reason}",
        "plausible: over the ranges of the description's watts; times as sidelane c3 --machine predicts them",
    )
    return Table(title, COLUMNS, tuple(lines), notes)


def _slower(draw: power.PairDraw) -> str:
    least, most = draw.slower
    return f"{100 * least:.0f} .. {100 * most:.0f}" if most > 0 else ""


def _flat(workload: Workload, draw: power.PairDraw) -> dict[str, Any]:
    gemm = workload.gemm
    return {
        "gemm": gemm.tag or f"{gemm.m},{gemm.n},{gemm.k}",
        "collective": str(workload.collective),
        "bytes": workload.nbytes,
        **dataclasses.asdict(draw),
        "repeated_us": draw.repeated_us,
        "watts": draw.watts,
        "wanted_w": draw.wanted_w,
        "energy_mj": draw.energy_mj,
        "slower": [share if math.isfinite(share) else None for share in draw.slower],
    }
