"""The command ``sidelane nccl-tests``: a collective in the form of NVIDIA's nccl-tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sidelane.cli.help import MEASURE
from sidelane.cli.output import plain_errors
from sidelane_lab.harness.help import GroupedCommand, how, json_option, what, where
from sidelane_lab.harness.options import loaded
from sidelane_lab.harness.parameters import NameChoice, names, size, timeout_option

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

    Sizes, counts, algbw and busbw are defined as there; a time is the median over rounds of the slowest rank's. Each
    output is compared with a reference before and after it was timed. The exit code is 1 if one is wrong,
    and if nothing was measured.

    The last lines are a verdict: outputs that were wrong, the average, and the share of a link that the best size
    reached, where `sidelane machines` has the machine. Of -t, -o, -r, -m, -N, -z, -p and -a one value is accepted.
    """
    with plain_errors():
        main = loaded("studies.nccl_tests").main
        sys.exit(main(COLLECTIVES[collective], DTYPES[datatype], datatype, json=json, **options))
