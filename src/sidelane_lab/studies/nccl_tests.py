"""The study of collectives in the lines that nccl-tests prints: out of place and in place beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from sidelane.cli.help import MEASURE
from sidelane.cli.output import STDOUT, plain_errors
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Kind
from sidelane.sizes import parse_bytes
from sidelane_lab.harness.help import GroupedCommand, how, json_option, what, where
from sidelane_lab.harness.parameters import NameChoice, names, size, timeout_option
from sidelane_lab.harness.study import Results
from sidelane_lab.harness.table import grouped
from sidelane_lab.studies.collectives import STUDY, CollectiveOptions, CollectiveRow

COLLECTIVES = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter",
}
"""Our names of collectives, by the first words of nccl-tests' programs (``all_reduce_perf``)."""

DTYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "int32": "int32", "int64": "int64"}
"""Our names of types, by those of nccl-tests."""


SINGLE_VALUES = (
    (("-t", "--nthreads"), "1", "each process has one GPU: -g 8 starts eight"),
    (("-o", "--op"), "sum", "reductions add"),
    (("-r", "--root"), "0", "the root of a broadcast is rank 0"),
    (("-m", "--agg_iters"), "1", "calls are not aggregated"),
    (("-N", "--run_cycles"), "1", "more rounds: -n"),
    (("-z", "--blocking"), "0", "calls do not wait for the GPU"),
    (("-p", "--parallel_init"), "0", "each process initialises its own GPU"),
    (("-a", "--average"), "3", "a time is that of the slowest rank"),
)
"""Options of nccl-tests of which there is one value here: their names, that value, and the reason."""


def _single_value(flags: tuple[str, str], allowed: str, reason: str) -> Callable[[Any], Any]:
    """Declare an option of nccl-tests that is accepted with one value, so that lines of theirs run as they are."""

    def check(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value not in (None, allowed):
            raise click.BadParameter(f"(value={value}, allowed={allowed}: {reason})")

    return click.option(*flags, hidden=True, expose_value=False, callback=check)


def _accept_their_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for flags, allowed, reason in SINGLE_VALUES:
        command = _single_value(flags, allowed, reason)(command)
    return command


def _checked(context: click.Context, option: click.Parameter, value: int) -> None:
    if not value:
        click.echo("note: -c 0: outputs are checked all the same, outside of what is timed", err=True)


@click.command(
    "nccl-tests",
    cls=GroupedCommand,
    heading=MEASURE,
    examples=(
        (
            "sidelane nccl-tests all_reduce -b 8 -e 128M -f 2 -g 2",
            "for all_reduce_perf with these options",
        ),
        ("sidelane nccl-tests all_gather -b 1M -e 1G -f 4 --implementations auto,nccl", "Sidelane, and then NCCL"),
        ("sidelane nccl-tests alltoall -b 64K -e 64M -G 1", "calls in a CUDA graph"),
    ),
)
@click.argument("collective", type=NameChoice(list(COLLECTIVES)))
@what("-b", "--minbytes", callback=size, default="32M", metavar="SIZE", help="Smallest size, such as 64K.")
@what("-e", "--maxbytes", callback=size, default="32M", metavar="SIZE", help="Largest size.")
@what("-f", "--stepfactor", type=click.IntRange(2), metavar="N", help="Ratio of a size to the one before it.")
@what("-i", "--stepbytes", callback=size, metavar="SIZE", help="Each size less the one before it; 1M without -f.")
@what("-d", "--datatype", type=click.Choice(list(DTYPES)), default="float", help="Type of the elements.")
@what("-G", "--cudagraph", type=click.IntRange(0), default=0, metavar="N", help="Calls in a CUDA graph if N is not 0.")
@what("--implementations", callback=names, default="auto", metavar="NAME,...",
      help="One table each: auto (Sidelane), nccl, nccl_ce, symm_mem, gloo, dma, sm.")  # fmt: skip
@how("-n", "--iters", type=click.IntRange(1), default=20, help="Measured rounds.")
@how("-w", "--warmup_iters", type=click.IntRange(0), default=5, help="Rounds before them.")
@how(
    *("-c", "--check"),
    type=click.IntRange(0),
    default=1,
    expose_value=False,
    callback=_checked,
    help="Outputs are always checked, outside of what is timed.",
)
@timeout_option
@where("-g", "--ngpus", type=click.IntRange(1), default=None, show_default="every GPU", help="Processes to start.")
@json_option
@_accept_their_options
def nccl_tests(collective: str, datatype: str, json: Path | None, **options: Any) -> None:
    """Time a collective, and print the lines of nccl-tests.

    Sizes, counts, algbw and busbw are defined as there, with one line for each size asked; a time is the median over
    rounds of the slowest rank's. Each output is compared with a reference before and after it was timed.

    The last lines are a verdict: outputs that were wrong, the average, and the share of a link that the best size
    reached, where `sidelane machines` has the machine. Of -t, -o, -r, -m, -N, -z, -p and -a one value is accepted.
    """
    with plain_errors():
        main(COLLECTIVES[collective], DTYPES[datatype], datatype, json=json, **options)


STEP_BYTES = "1M"
MOST_SIZES = 1000
"""Sizes of a call at the most: all of them are measured, and thousands take hours."""

HEADING = (
    f"#{'':51}{'out-of-place':^33}{'in-place':^33}",
    f"#{'size':>11}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    + 2 * f"{'time':>9}{'algbw':>8}{'busbw':>8}{'#wrong':>8}",
    f"#{'(B)':>11}  {'(elements)':>12}{'':>26}" + 2 * f"{'(us)':>9}{'(GB/s)':>8}{'(GB/s)':>8}{'':>8}",
)


def main(
    collective: str,
    dtype: str,
    shown_dtype: str,
    *,
    minbytes: int,
    maxbytes: int,
    stepfactor: int | None,
    stepbytes: int | None,
    cudagraph: int,
    implementations: Sequence[str],
    iters: int,
    warmup_iters: int,
    ngpus: int | None,
    timeout_s: float,
    json: Path | None,
) -> None:
    """Measure, and print.

    Raises:
        SidelaneError: an output was wrong.
        RankFailedError: a rank failed. What had been measured until then is printed and written first, as it is at
            Ctrl-C and SIGTERM.
        UnavailableError: every row says why it has no time; they are printed and written first.
        ValueError: sizes or names are not allowed, or nothing of them can be measured here.
    """
    from sidelane_lab.harness import running

    options = CollectiveOptions(
        collectives=(Kind(collective),),
        sizes=tuple(sizes_of(minbytes, maxbytes, stepfactor, stepbytes)),
        dtype=dtype,
        launches=("graph" if cudagraph else "eager",),
        repeats=iters,
        warmup=warmup_iters,
        profile=False,
        implementations=tuple(implementations),
        ranks=ngpus,
        timeout_s=timeout_s,
        json=json,
    )

    def show(found: Results, console: object) -> None:
        if json != STDOUT:
            click.echo("\n".join(lines_of(found, STUDY.rows_of(found), shown_dtype, options.sizes)))

    if found := running.run_study(STUDY, options, show=show):
        running.require_right(STUDY.name, found.rows)


def sizes_of(smallest: int, largest: int, factor: int | None, step: int | None) -> Iterator[int]:
    """Yield the sizes of nccl-tests: each times a factor, or plus a step.

    >>> list(sizes_of(8, 40, 2, None)), list(sizes_of(8, 40, None, 16)), list(sizes_of(8, 8, None, None))
    ([8, 16, 32], [8, 24, 40], [8])

    Raises:
        ValueError: both are given, the step is 0, there is no size, or there are more than :data:`MOST_SIZES`.
    """
    if factor is not None and step is not None:
        raise ValueError(f"nccl-tests: -f and -i exclude each other (value=-f {factor}, -i {step})")
    if not 0 < smallest <= largest:
        raise ValueError(f"nccl-tests: -b must be above 0 and not above -e (value=-b {smallest}, -e {largest})")
    if step is not None and step < 1:
        raise ValueError(f"nccl-tests: -i must be above 0 (value={step})")
    added = parse_bytes(STEP_BYTES) if step is None else step
    count = (largest - smallest) // added + 1
    if factor is None and count > MOST_SIZES:
        raise ValueError(
            f"nccl-tests: number of sizes (value={count}, allowed={MOST_SIZES} at the most; a larger -i, or -f)"
        )
    size = smallest
    while size <= largest:
        yield size
        size = size + added if factor is None else size * factor


def lines_of(found: Results, rows: Sequence[CollectiveRow], dtype: str, sizes: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines: a table for each implementation and variant, and a verdict after it.

    There is a line for each of ``sizes``, as in nccl-tests: those that were rounded to one size have that one's.
    """
    yield f"# sidelane {found.software.get('sidelane', '')}: {found.ranks} ranks, {found.device}"
    for (implementation, variant), same in grouped(
        rows, lambda row: (row.implementation, "" if row.implementation == "auto" else row.variant)
    ):
        yield "#"
        yield f"# {same[0].collective}, {same[0].launch}, by {f'{implementation} {variant}'.rstrip()}"
        yield from HEADING
        before = 0
        for nbytes, places in grouped(same, lambda row: row.bytes):
            asked = sum(before < size <= nbytes for size in sizes)
            yield from max(asked, 1) * [_line(nbytes, places, found.ranks, dtype)]
            before = nbytes
        yield from _verdict(found, same)


def _line(nbytes: int, places: Sequence[CollectiveRow], ranks: int, dtype: str) -> str:
    kind = Kind(places[0].collective)
    shared = ranks if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1
    count = nbytes // ELEMENT_BYTES[places[0].dtype] // shared
    redop, root = "sum" if kind in REDUCING else "none", 0 if kind is Kind.BROADCAST else -1
    line = f"{nbytes:>12}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}"
    for in_place in (False, True):
        row = next((one for one in places if one.in_place is in_place), None)
        wrong = "N/A" if row is None or row.correct is None else str(int(not row.correct))
        if row is None or row.time_us is None or row.bus_gbps is None:
            line += f"{'N/A':>9}{'N/A':>8}{'N/A':>8}{wrong:>8}"
        else:
            time = f"{row.time_us:.2f}" if row.time_us < 1e4 else f"{row.time_us:.0f}"
            line += f"{time:>9}{nbytes / row.time_us / 1e3:>8.2f}{row.bus_gbps:>8.2f}{wrong:>8}"
    return line


def _verdict(found: Results, rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """Say what was wrong or refused, the average, and what share of its links a described machine reached."""
    from sidelane_lab.machines.load import machine_names, named
    from sidelane_lab.machines.spec import Topology

    wrong = sum(row.correct is False for row in rows)
    is_checked = any(row.correct is not None for row in rows)
    yield f"# Out of bounds values : {f'{wrong} FAILED' if wrong else '0 OK' if is_checked else 'N/A'}"
    speeds = [row.bus_gbps for row in rows if row.bus_gbps is not None]
    if speeds:
        yield f"# Avg bus bandwidth    : {sum(speeds) / len(speeds):.4g}"
    if speeds and found.machine in machine_names():
        links = named(found.machine).links
        usable = float(links.usable_gbps) * (found.ranks - 1 if links.topology is Topology.MESH else 1)
        known = f"{links.usable_gbps.source} for copies on {found.machine}"
        share = f"{100 * max(speeds) / usable:.0f}% of this link ({usable:.4g} GB/s, {known})"
        yield f"# Max bus bandwidth    : {max(speeds):.4g}, {share}"
    elif speeds:
        yield f"# Max bus bandwidth    : {max(speeds):.4g} (no share of a link: {found.machine} is not described)"
    for note in dict.fromkeys(row.note for row in rows if row.note):
        yield f"# {note}"
