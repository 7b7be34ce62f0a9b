"""The command ``sidelane``: look at a machine, measure collectives, measure computation next to communication.

What a command needs is imported when it runs, so that help is there at once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from sidelane import __version__
from sidelane.c3.strategy import STRATEGIES
from sidelane.c3.workload import TABLE_I, format_bytes, parse_bytes, parse_gemm, parse_workload
from sidelane.errors import SidelaneError
from sidelane.program.collective import ELEMENT_BYTES, Kind

C = TypeVar("C", bound=Callable[..., Any])
DEMO_WORKLOADS = ("cb1_512M", "cb1_896M")
DEVICES = ("auto", "gpu", "cpu")
ALL = "all"
# Those that every implementation has a counterpart for. Plain strings: click would show the names of enum members.
KINDS = tuple(kind.value for kind in Kind if kind not in (Kind.SCATTER, Kind.GATHER))


def size(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Read ``1K``, ``64M``, ``4G`` or a plain number of bytes; several where the option may be repeated."""
    try:
        return tuple(map(parse_bytes, value)) if isinstance(value, tuple) else value and parse_bytes(value)
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from problem


def names(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """Read names separated by commas."""
    return tuple(filter(None, (part.strip() for part in value.split(","))))


def study_options(command: C) -> C:
    """Options that every study has."""
    options = (
        click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: every GPU, or a few on the CPU."),
        click.option(
            "--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more."
        ),
        click.option(
            "--implementations",
            metavar="NAME,...",
            callback=names,
            default="",
            help="Keep these: nccl, nccl_ce, symm_mem, gloo, dma.",
        ),
        click.option(
            "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows here."
        ),
        click.option(
            "--report", type=click.Path(file_okay=False, path_type=Path), help="Write page and pictures here."
        ),
        click.option(
            "--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, help="Seconds for all of it."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="sidelane", message="sidelane %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """Collectives on the side lane, next to computation: look at this machine, and measure."""
    context.obj = traceback


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--probe/--no-probe", default=True, help="Ask the driver on every GPU what it can do; takes seconds.")
def info(as_json: bool, probe: bool) -> None:
    """Show what this machine offers and what Sidelane will use."""
    with plain_errors():
        from sidelane.bench import info

        info.main(as_json=as_json, probe=probe)


@main.command()
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice([*KINDS, ALL]),
    default=("all_gather", "all_to_all"),
    help="May be repeated. Default: all_gather and all_to_all.",
)
@click.option("--min-bytes", metavar="SIZE", callback=size, default="1K", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, help="Largest size. Default: 4G on GPUs, 16M on CPUs.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="From size to size.")
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", show_default=True)
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="",
    help="Of Sidelane's: pcpy, bcst, swap, b2b, b2b+prelaunch, ...",
)
@click.option("--launch", type=click.Choice(["eager", "graph", "both"]), default="both", show_default=True)
@click.option("--iterations", type=click.IntRange(min=1), default=15, show_default=True, help="Measured rounds.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Rounds before them.")
@click.option("--profile/--no-profile", default=True, help="On GPUs: look which implementations launched kernels.")
@study_options
def collective(
    collectives: tuple[str, ...],
    min_bytes: int,
    max_bytes: int | None,
    factor: int,
    launch: str,
    iterations: int,
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure collectives over sizes: every implementation and variant, checked before it is timed."""
    with plain_errors():
        from sidelane.bench import collective_bench
        from sidelane.bench.launch import choose_place

        place = choose_place(others["ranks"], others["device"])
        sizes = tuple(sizes_between(min_bytes, max_bytes or (16 << 20 if place.on_cpu else 4 << 30), factor))
        kinds = KINDS if ALL in collectives else collectives
        collective_bench.main(
            collective_bench.CollectiveOptions(
                collectives=tuple(map(Kind, kinds)),
                sizes=sizes,
                launches=() if launch == "both" else (launch,),
                repeats=iterations,
                json=json_file,
                **others,
            )
        )


@main.command()
@click.argument("pairs", nargs=-1)
@click.option("--gemm", "gemms", multiple=True, help=f"{', '.join(TABLE_I)} (paper's Table I), or m,n,k. Repeatable.")
@click.option(
    "--bytes", "sizes", multiple=True, metavar="SIZE", callback=size, help="With --gemm: of the collective. Repeatable."
)
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice(KINDS),
    default=("all_gather", "all_to_all"),
    help="Repeatable. Default: all_gather and all_to_all.",
)
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", help="On GPUs; CPUs take float32.")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    type=click.Choice([strategy.name for strategy in STRATEGIES]),
    help="Repeatable. Default: all.",
)
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="auto",
    help="Of Sidelane's collectives; the best is reported.",
)
@click.option("--full-size", is_flag=True, help="Do not scale the GEMM down for CPUs.")
@click.option("--warmup", type=click.IntRange(min=0), default=6, show_default=True, help="Rounds before the measured.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True, help="Measured rounds.")
@study_options
def c3(
    pairs: tuple[str, ...],
    gemms: tuple[str, ...],
    sizes: tuple[int, ...],
    collectives: tuple[str, ...],
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure a GEMM next to a collective under every strategy.

    PAIRS are written as the paper does: cb1_896M, mb2_3.25G, 4096x4096x4096_64M. --gemm and --bytes give the same, each
    GEMM with each size. Without any: cb1_896M.
    """
    with plain_errors():
        workloads = [*pairs, *pairs_of(gemms, sizes)] or ["cb1_896M"]
        for pair in workloads:
            parse_workload(pair)

        from sidelane.bench import c3_bench

        kinds = tuple(map(Kind, collectives))
        c3_bench.main(c3_bench.C3Options(workloads=tuple(workloads), collectives=kinds, json=json_file, **others))


@main.command()
@click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: every GPU, or a few on the CPU.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more.")
@click.option("--report", type=click.Path(file_okay=False, path_type=Path), default=Path("report"), show_default=True)
def demo(ranks: int | None, device: str, report: Path) -> None:
    """Look at this machine, then measure a GEMM next to a collective and write a report."""
    with plain_errors():
        from sidelane.bench import c3_bench, info

        info.main(probe=False)
        c3_bench.main(c3_bench.C3Options(workloads=DEMO_WORKLOADS, ranks=ranks, device=device, report=report))


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors that have an explanation into one line: exit code 2 for what the user asked, 1 for what happened."""
    if click.get_current_context().obj:  # --traceback
        yield
        return
    try:
        yield
    except (ValueError, TypeError) as problem:
        raise click.UsageError(str(problem)) from problem
    except SidelaneError as problem:
        from sidelane.bench.launch import RankFailedError

        if isinstance(problem, RankFailedError) and problem.refused:
            raise click.UsageError(f"{problem.refused} (sidelane --traceback shows where)") from problem
        raise click.ClickException(str(problem)) from problem


def sizes_between(smallest: int, largest: int, factor: int) -> Iterator[int]:
    """Sizes from ``smallest`` up to ``largest``, each ``factor`` times the one before.

    >>> list(sizes_between(1024, 100_000, 4))
    [1024, 4096, 16384, 65536]

    Raises:
        ValueError: there is none.
    """
    if not 1 <= smallest <= largest:
        raise ValueError(f"sizes: nothing from {format_bytes(smallest)} to {format_bytes(largest)}")
    return itertools.takewhile(lambda size: size <= largest, (smallest * factor**power for power in itertools.count()))


def pairs_of(gemms: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    """Every GEMM with every size, as the paper writes them.

    >>> pairs_of(("cb1", "512,512,2048"), (1024,))
    ['cb1_1K', '512x512x2048_1K']

    Raises:
        ValueError: one of the two is missing, or a GEMM is not one.
    """
    if bool(gemms) != bool(sizes):
        raise ValueError("--gemm and --bytes belong together (one of them is missing)")
    names = [parse_gemm(text.replace(",", "x")).name for text in gemms]
    return [f"{name}_{format_bytes(size)}" for name in names for size in sizes]
