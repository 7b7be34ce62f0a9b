"""``sidelane tune --study c3``: GEMMs and collectives alone, by the units that they have (as the ConCCL paper, III).

The file grows row by row: what is in it is not measured again, so that a study that ran out of time, or was ended, goes
on where it stood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from sidelane.choice.candidate import DMA, SM
from sidelane.program.collective import Kind
from sidelane_lab.baselines.reference import rounded_bytes
from sidelane_lab.baselines.roster import make_roster
from sidelane_lab.harness.launch import Rank, choose_target
from sidelane_lab.harness.parameters import required
from sidelane_lab.harness.running import Sender, rows_there, run_study
from sidelane_lab.harness.study import Results, Study
from sidelane_lab.harness.terminal import progress_console
from sidelane_lab.pairs.isolated import BESIDE, COLLECTIVE, COUNTERS, GEMM, MEMORY, PAIR, isolated_file
from sidelane_lab.pairs.workload import LIBRARY, Gemm, parse_gemm
from sidelane_lab.studies.tune.command import IsolatedOptions
from sidelane_lab.studies.tune.counters import refuse_without
from sidelane_lab.studies.tune.isolated_measure import MEANS, Bench, IsolatedBatch
from sidelane_lab.studies.tune.isolated_rows import IsolatedRow, isolated_tables, key_of

GEMMS = {"cpu": ("cb1", "mb1"), "gpu": ("cb1", "cb3", "cb5", "mb1", "mb2")}
BUDGET_S = {"cpu": 60.0, "gpu": 240.0}
SETUP_S = 120.0
"""On top of the budget, before the whole is given up as hanging."""

MEMORY_BYTES = {"cpu": 8 << 20, "gpu": 1 << 30}
TRAFFIC_BYTES = {"cpu": 1 << 20, "gpu": 256 << 20}
PAIR_BYTES = {"cpu": 8 << 20, "gpu": 896 << 20}
"""Bytes of the collective next to a GEMM: enough for what is hidden to be seen."""
PAIRED = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE)
"""Those of the collectives that run next to GEMMs under every strategy: one that moves, one that also copies inside the
GPU, and one that reduces."""


def main(options: IsolatedOptions) -> Results | None:
    """Measure what the file does not have, and show what follows.

    Returns:
        Everything in the file; None on the other ranks under torchrun.

    Raises:
        FileNotFoundError: bytes are to be counted, and there is no ``ncu``.
        RankFailedError: a rank failed; the file has what was measured until then.
        ValueError: options do not fit this machine, or the file is of another machine.
    """
    if options.counters:
        refuse_without()
    place = choose_target(options.ranks, options.device, fewest=1)  # what a GPU does alone needs no other one
    where = "cpu" if place.on_cpu else "gpu"
    seconds = options.budget_s or BUDGET_S[where]
    path = options.output or required("tune", isolated_file(place.device_type, place.world_size), "--output, ")
    known = () if options.fresh else rows_there(STUDY, path, place, same_software=True)
    dtype = options.dtype if where == "gpu" else "float32"
    options = dataclasses.replace(
        options,
        budget_s=seconds,
        timeout_s=max(options.timeout_s, seconds + SETUP_S),
        gemms=options.gemms or GEMMS[where],
        sizes=options.sizes_on(place.device_type),
        output=path,
        done=frozenset(key_of(row) for row in known if row.dtype == dtype and row.time_us is not None),
    )
    progress = None if options.quiet else progress_console()
    if progress is not None and known:
        progress.print(f"goes on: {len(known)} rows are there ({path})", markup=False, soft_wrap=True)
    results = run_study(STUDY, options, place=place, known=known, grows=path)
    if progress is not None and results is not None:
        progress.print(f"kept: {path}", markup=False, soft_wrap=True)
    return results


def _measure(rank: Rank, options: IsolatedOptions, sender: Sender) -> Iterator[IsolatedRow]:
    """Make the rows. Collective."""
    on_cpu = rank.device.type == "cpu"
    wanted = tuple(name for name in (*LIBRARY, DMA, SM) if (name == "gloo") == on_cpu or name == DMA)
    every = batches_of(rank, options)
    bench = Bench(rank, make_roster(rank, wanted=wanted, timeout_s=options.step_s), every, options)
    batches = [one for one in every if not one.is_done(options.done)]
    sender.steps = len(batches)
    for name, reason in bench.roster.unavailable.items():
        sender.note(f"{name} takes no part: {reason}")
    assert options.budget_s is not None

    def over(left: Sequence[IsolatedBatch]) -> None:
        some = ", ".join(map(str, left[:3]))
        count = f"{len(left)} of {len(batches)}"
        sender.note(
            f"{options.budget_s:g} s are over: {count} steps are left ({some}, ...); the same command goes on with them"
        )

    for batch in bench.roster.meter.within(batches, options.budget_s, over):
        sender.step(str(batch))
        yield from list(bench.rows(batch))  # all or none: a file that has one of them has all
    bench.roster.close()


def batches_of(rank: Rank, options: IsolatedOptions) -> list[IsolatedBatch]:
    """Return everything; what runs next to GEMMs as soon as it can be judged, since a choice goes by that first."""
    where, gemms = "cpu" if rank.device.type == "cpu" else "gpu", _gemms_of(rank, options)
    if options.counters:
        return [IsolatedBatch(COUNTERS, gemm) for gemm in gemms]
    batches = [IsolatedBatch(MEMORY, nbytes=MEMORY_BYTES[where])]
    batches += [IsolatedBatch(GEMM, gemm, means=means) for gemm in gemms for means in MEANS]
    if rank.world_size > 1:
        sizes = dict.fromkeys(rounded_bytes(nbytes, rank.world_size) for nbytes in options.sizes)
        paired = rounded_bytes(PAIR_BYTES[where], rank.world_size)
        alone = [IsolatedBatch(COLLECTIVE, None, kind, nbytes) for kind in options.collectives for nbytes in sizes]
        kinds = [kind for kind in PAIRED if kind in options.collectives] or options.collectives
        batches += [one for one in alone if one.nbytes == paired]
        batches += [IsolatedBatch(PAIR, gemm, kind, paired) for gemm in gemms for kind in kinds]
        batches += [one for one in alone if one.nbytes != paired]
    traffic = rounded_bytes(TRAFFIC_BYTES[where], rank.world_size)
    makers = [*(["host"] if where == "gpu" else ["copy"]), *([DMA] if rank.world_size > 1 else [])]
    batches += [IsolatedBatch(BESIDE, gemm, nbytes=traffic, means=maker) for gemm in gemms for maker in makers]
    return batches


def _gemms_of(rank: Rank, options: IsolatedOptions) -> list[Gemm]:
    gemms = [parse_gemm(text, options.dtype) for text in options.gemms]
    return [gemm.for_cpu() for gemm in gemms] if rank.device.type == "cpu" else gemms


STUDY = Study(
    name="isolated",
    title="GEMMs and collectives alone",
    legend=(
        "Times over that with all compute units, by the units that a GEMM does without or a collective has; split:"
        " green contexts, which shut the others off; threads: of a CPU rank. Medians over rounds of the slowest rank."
    ),
    row=IsolatedRow,
    tables=isolated_tables,
    key=key_of,
    measure=_measure,
    main=main,
    progress="isolated times",
)
