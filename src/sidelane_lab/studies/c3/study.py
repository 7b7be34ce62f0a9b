"""The C3 study: pairs of a GEMM and a collective under every strategy, side by side in one run.

This module declares it. Ranks measure by ``bench``, pictures and predictions come from modules beside it; all are
imported by those who need them, so that reading or showing a file loads none of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sidelane.choice.candidate import DMA, SM
from sidelane.errors import UnavailableError
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.cli.c3 import C3Options, Key
from sidelane_lab.harness.launch import LaunchTarget, Rank, choose_target
from sidelane_lab.harness.running import Sender, rows_there, run_study
from sidelane_lab.harness.study import Picture, Results, Study
from sidelane_lab.studies.c3.rows import NOT_RUN, C3Row, c3_tables, too_few_cores

if TYPE_CHECKING:
    from sidelane_lab.machines.spec import Machine
    from sidelane_lab.pairs.isolated import Isolated


def main(options: C3Options) -> Results | None:
    """Run the study; see :func:`sidelane_lab.harness.running.run_study`.

    Raises:
        ValueError: also for an implementation or a variant that is not known here.
    """
    from sidelane_lab.baselines.roster import check_asked

    place = choose_target(options.ranks, options.device)
    check_asked(
        place.device_type,
        options.collectives,
        implementations=options.implementations,
        variants=options.variants,
        chosen_from=(DMA, SM),
        with_auto=True,
        with_others=True,
    )
    if options.energy_s is not None:
        check_energy(options.energy_s, options.collectives, place)
    known = rows_there(STUDY, options.json, place) if options.resume else ()
    done = frozenset(key_of_row(row) for row in known if not row.note.startswith(NOT_RUN))
    options = dataclasses.replace(options, known=isolated_here(options), done=done)
    further = None
    if options.timeline is not None and options.report is not None:
        from sidelane_lab.studies.c3.pictures import traced

        further = functools.partial(traced, options.timeline)
    return run_study(STUDY, options, known=known, further=further)


def check_energy(seconds: float, kinds: Sequence[Kind], place: LaunchTarget) -> None:
    """Refuse to measure energy where no counter tells it, and for sums, whose values would overflow.

    Raises:
        ValueError: too short a time, or a collective that adds values up.
        UnavailableError: CPU processes, or GPUs without counters.
    """
    from sidelane_lab.studies.power.rows import SETTLE_S
    from sidelane_lab.studies.power.sensors import power_problem

    if seconds <= 2 * SETTLE_S:
        raise ValueError(f"c3: --energy (value={seconds:g}, allowed=more than {2 * SETTLE_S:g} seconds)")
    if sums := [str(kind) for kind in kinds if kind in REDUCING]:
        raise ValueError(f"c3: collectives with --energy (value={', '.join(sums)}, allowed=those that only move bytes)")
    problem = "needs GPUs, and here ranks are CPU processes" if place.on_cpu else power_problem()
    if problem is not None:
        raise UnavailableError(f"c3 --energy: {problem} (sidelane power --gemm cb1 --machine h200x2 predicts instead)")


def isolated_here(options: C3Options) -> Isolated | None:
    """Return what heuristics and ``auto`` go by where the study would run: the file given, or the user's, if any."""
    from sidelane_lab.pairs.isolated import isolated_times

    place = choose_target(options.ranks, options.device)
    return isolated_times(options.isolated, place.device_type, place.world_size)


def _measure(rank: Rank, options: C3Options, sender: Sender) -> Iterator[C3Row]:
    """Make the rows. Collective."""
    from sidelane_lab.studies.c3.bench import measure

    yield from measure(rank, options, sender)


def _predict(machine: Machine, options: C3Options) -> list[C3Row]:
    """Fill the rows for a machine that is described."""
    from sidelane_lab.studies.c3.prediction import predicted_rows

    return predicted_rows(machine, options)


def _predict_row(machine: Machine, row: C3Row) -> tuple[float, ...]:
    """Predict a measured row from the times alone that it has."""
    from sidelane_lab.studies.c3.prediction import predict_together

    return predict_together(machine, row)


def _draw(rows: Sequence[C3Row], results: Results, folder: Path) -> list[Picture]:
    """Draw the pairs."""
    from sidelane_lab.studies.c3.pictures import draw_pairs

    return draw_pairs(rows, results, folder)


def key_of_row(row: C3Row) -> Key:
    """Return what rows of one pair under one strategy have in common."""
    return (row.gemm, row.m, row.n, row.k, row.dtype, row.collective, row.bytes, row.strategy)


STUDY = Study(
    name="c3",
    title="Computation and communication side by side",
    legend=(
        "speedup = (GEMM alone + best collective alone) / together; ideal = the same sum / the longer of the two; "
        "% of ideal = 100 (speedup - 1) / (ideal - 1). The best collective is the fastest of every implementation "
        "measured; '% of papers' ideal' takes NCCL's (Gloo's on CPUs) in its place, so that a faster one can pass 100."
    ),
    row=C3Row,
    tables=c3_tables,
    plots=_draw,
    warning=too_few_cores,
    key=key_of_row,
    measure=_measure,
    predict=_predict,
    predict_row=_predict_row,
    main=main,
    progress="computation and communication",
)
