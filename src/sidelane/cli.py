"""The command ``sidelane``: look at a machine, measure collectives, measure computation next to communication, and
predict both for machines that are not here.

What a command needs is imported when it runs, so that help is there at once.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from sidelane import __version__
from sidelane.c3.strategy import STRATEGIES
from sidelane.c3.workload import GEMM_DTYPES, TABLE_I, format_bytes, parse_bytes, parse_gemm, parse_workload
from sidelane.config import BESIDE, NOTHING
from sidelane.errors import SidelaneError
from sidelane.program.collective import ELEMENT_BYTES, Kind

C = TypeVar("C", bound=Callable[..., Any])
DEMO_WORKLOADS = ("cb1_512M", "cb1_896M")
DEVICES = ("auto", "gpu", "cpu")
DEMO_MACHINE = "mi300x8"
ALL = "all"
VERSIONS = ("000", "002")
# What ``sidelane phases`` knows; bench.phases_programs has the same names.
PHASED = ("copy", "copies", "all_gather", "all_gather_in_place", "all_to_all")
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
    """Options that every study has that compares implementations."""
    option = click.option(
        "--implementations",
        metavar="NAME,...",
        callback=names,
        default="",
        help="Keep these: nccl, nccl_ce, symm_mem, gloo, dma, sm, auto. Default: all that this machine has.",
    )
    return option(measuring_options(command))


def measuring_options(command: C) -> C:
    """Options that every study has."""
    options = (
        click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: every GPU, or a few on the CPU."),
        click.option(
            "--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more."
        ),
        click.option(
            "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows here."
        ),
        click.option(
            "--report", type=click.Path(file_okay=False, path_type=Path), help="Write page and pictures here."
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=1),
            default=600.0,
            show_default=True,
            help="Seconds for all of it.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


# For studies that can be predicted instead of measured.
machine_option = click.option(
    "--machine",
    metavar="NAME_OR_FILE",
    help="Predict it for this machine instead: of the catalogue (sidelane machines), or a TOML or JSON file.",
)
prediction_report = click.option(
    "--report", type=click.Path(file_okay=False, path_type=Path), help="Write numbers and pictures here."
)


def given(name: str) -> bool:
    """True if the caller wrote this parameter of the running command."""
    return click.get_current_context().get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def refuse_beside_machine(*allowed: str) -> None:
    """Refuse what says how to measure, where ``--machine`` asks for a prediction. ``allowed``: names of parameters.

    Raises:
        ValueError: the caller gave something else.
    """
    parameters = {option.name or "": option for option in click.get_current_context().command.params}
    for name, option in parameters.items():
        if name not in ("machine", *allowed) and given(name):
            fine = ", ".join(parameters[other].opts[0] for other in allowed)
            raise ValueError(f"{option.opts[0]} does not go with --machine, which only predicts (allowed={fine})")


class Commands(click.Group):
    """Lists every command with its whole first sentence, which click would cut to a line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.commands[name].help or "") for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split("\n\n")[0].split())) for name, text in commands])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="sidelane", message="sidelane %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """Collectives on the side lane, next to computation: look at this machine, and measure.

    Begin with: sidelane demo
    """
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
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", show_default=True)
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="",
    help="Of Sidelane's: pcpy, bcst, swap, b2b, b2b+prelaunch, ... Default: all; prelaunched only b2b up to 1M.",
)
@click.option("--launch", type=click.Choice(["eager", "graph", "both"]), default="both", show_default=True)
@click.option(
    "--place",
    type=click.Choice(["in", "out", "both"]),
    default="both",
    show_default=True,
    help="Keep calls in place, out of place, or both.",
)
@click.option("--iterations", type=click.IntRange(min=1), default=15, show_default=True, help="Measured rounds.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Rounds before them.")
@click.option("--profile/--no-profile", default=True, help="On GPUs: look which implementations launched kernels.")
@machine_option
@study_options
def collective(
    collectives: tuple[str, ...],
    min_bytes: int,
    max_bytes: int | None,
    factor: int,
    launch: str,
    place: str,
    iterations: int,
    machine: str | None,
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure collectives over sizes: every implementation and variant, checked before it is timed.

    With --machine: predict paper 003's study (all_gather and all_to_all, 1K to 4G) for a machine that need not be here.
    """
    with plain_errors():
        if machine is not None:
            refuse_beside_machine("report")
            from sidelane.bench import sim_study

            sys.exit(sim_study.collective_main(sim_study.Options(machine, others["report"])))

        from sidelane.bench import collective_bench
        from sidelane.bench.launch import choose_place

        on_cpu = choose_place(others["ranks"], others["device"]).on_cpu
        sizes = tuple(sizes_between(min_bytes, max_bytes or (16 << 20 if on_cpu else 4 << 30), factor))
        kinds = KINDS if ALL in collectives else collectives
        collective_bench.main(
            collective_bench.CollectiveOptions(
                collectives=tuple(map(Kind, kinds)),
                sizes=sizes,
                launches=() if launch == "both" else (launch,),
                places=() if place == "both" else (place,),
                repeats=iterations,
                json=json_file,
                **others,
            )
        )


@main.command()
@click.argument("pairs", nargs=-1)
@click.option("--gemm", "gemms", multiple=True, help=f"{', '.join(TABLE_I)} (paper's Table I), or m,n,k. Repeatable.")
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    metavar="SIZE",
    callback=size,
    help="With --gemm: of the collective. Repeatable. On CPUs divided as the GEMM is, see --full-size.",
)
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice(KINDS),
    default=("all_gather", "all_to_all"),
    help="Repeatable. Default: all_gather and all_to_all.",
)
@click.option("--dtype", type=click.Choice(GEMM_DTYPES), default="bfloat16", help="On GPUs; CPUs take float32.")
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
@click.option(
    "--full-size",
    is_flag=True,
    help="On CPUs: take GEMM and bytes as given. Otherwise every dimension of a GEMM that takes a core longer than "
    "some tens of ms is divided by 2, 4, 8, ..., and the bytes by the same number; the table has the sizes that ran.",
)
@click.option("--warmup", type=click.IntRange(min=0), default=6, show_default=True, help="Rounds before the measured.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True, help="Measured rounds.")
@machine_option
@click.option(
    "--version",
    type=click.Choice(VERSIONS),
    default="000",
    show_default=True,
    help="Of paper 000 (docs/model.md), with --machine.",
)
@study_options
def c3(
    pairs: tuple[str, ...],
    gemms: tuple[str, ...],
    sizes: tuple[int, ...],
    collectives: tuple[str, ...],
    machine: str | None,
    version: str,
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure a GEMM next to a collective under every strategy.

    PAIRS are written as the paper does: cb1_896M, mb2_3.25G, 4096x4096x4096_64M. --gemm and --bytes give the same, each
    GEMM with each size. Without any: cb1_896M.

    With --machine: predict them for a machine that need not be here; without any, the paper's whole study (with
    --report about a minute, for the plausible ranges). --collective, --version and --report go with it.
    """
    with plain_errors():
        workloads = [*pairs, *pairs_of(gemms, sizes)]
        kinds = tuple(map(Kind, collectives))
        for pair in workloads:
            parse_workload(pair)

        if machine is not None:
            predict_c3(machine, workloads, kinds, version, others["report"])
        if given("version"):
            raise ValueError("--version chooses between versions of the paper; it needs --machine")

        from sidelane.bench import c3_bench

        workloads = workloads or ["cb1_896M"]
        c3_bench.main(c3_bench.C3Options(workloads=tuple(workloads), collectives=kinds, json=json_file, **others))


@main.command()
@click.option("--operation", "operations", multiple=True, type=click.Choice(PHASED), help="Repeatable. Default: all.")
@click.option("--min-bytes", metavar="SIZE", callback=size, default="1K", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, help="Largest size. Default: 1G on GPUs, 4M on CPUs.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option(
    "--variants",
    metavar="NAME,...",
    callback=names,
    default="b2b",
    show_default=True,
    help="pcpy, bcst, swap, b2b, b2b+graph, b2b+prelaunch, ...",
)
@click.option("--launch", type=click.Choice(["eager", "graph", "both"]), default="both", show_default=True)
@click.option("--calls", type=click.IntRange(min=1), default=31, show_default=True, help="Measured calls of each.")
@click.option("--warmup", type=click.IntRange(min=1), default=4, show_default=True, help="Calls before them.")
@click.option("--predict", metavar="NAME_OR_FILE", default="", help="Machine to predict beside what is measured.")
@machine_option
@measuring_options
def phases(
    operations: tuple[str, ...],
    min_bytes: int,
    max_bytes: int | None,
    factor: int,
    variants: tuple[str, ...],
    launch: str,
    machine: str | None,
    json_file: Path | None,
    **others: Any,
) -> None:
    """Show where one transfer and one collective spend their time: control, schedule, copy, sync.

    Measured by time stamps around the copies and by the host's clock, one call at a time, next to what the simulator
    predicts for the same programs. With --machine: predicted only, for a machine that need not be here.
    """
    with plain_errors():
        chosen = operations or PHASED
        if machine is not None:
            allowed = ("operations", "min_bytes", "max_bytes", "factor", "variants", "json_file", "report")
            refuse_beside_machine(*allowed)
            from sidelane.bench import phases_predict

            sizes = tuple(sizes_between(min_bytes, max_bytes or 1 << 30, factor))
            sys.exit(
                phases_predict.main(
                    phases_predict.PredictOptions(
                        machine=machine,
                        operations=chosen,
                        variants=variants,
                        sizes=sizes,
                        json=json_file,
                        report=others["report"],
                    )
                )
            )

        from sidelane.bench import phases_bench
        from sidelane.bench.launch import choose_place

        place = choose_place(others["ranks"], others["device"])
        phases_bench.main(
            phases_bench.PhasesOptions(
                operations=chosen,
                sizes=tuple(sizes_between(min_bytes, max_bytes or (4 << 20 if place.on_cpu else 1 << 30), factor)),
                variants=variants,
                launches=() if launch == "both" else (launch,),
                json=json_file,
                **others,
            )
        )


@main.command()
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice(KINDS),
    default=("all_gather", "all_to_all"),
    help="Repeatable. Default: all_gather and all_to_all.",
)
@click.option("--min-bytes", metavar="SIZE", callback=size, default="64M", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, default="1G", show_default=True, help="Largest size.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option("--variants", metavar="NAME,...", callback=names, default="b2b", show_default=True, help="Of Sidelane's.")
@click.option("--launch", type=click.Choice(["eager", "graph"]), default="graph", show_default=True)
@click.option("--place", "places", type=click.Choice(["in", "out", "both"]), default="both", show_default=True)
@click.option("--seconds", type=float, default=0.7, show_default=True, help="That each runs in a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--fill",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="A collectives.json of this machine whose energies to fill in from this study.",
)
@machine_option
@study_options
def power(
    collectives: tuple[str, ...],
    min_bytes: int,
    max_bytes: int,
    factor: int,
    places: str,
    machine: str | None,
    json_file: Path | None,
    **others: Any,
) -> None:
    """Measure power and energy of collectives: every implementation back to back, with the GPUs' counters read.

    With --machine: predict them, as paper 003 ran its variants, for a machine that need not be here.
    """
    with plain_errors():
        kinds = tuple(map(Kind, collectives))
        sizes = tuple(sizes_between(min_bytes, max_bytes, factor))
        if machine is not None:
            refuse_beside_machine("collectives", "min_bytes", "max_bytes", "factor", "json_file", "report")
            from sidelane.bench import power_predict

            asked = power_predict.PredictOptions(
                machine=machine, collectives=kinds, sizes=sizes, json=json_file, report=others["report"]
            )
            sys.exit(power_predict.main(asked))

        from sidelane.bench import power_bench

        power_bench.main(
            power_bench.PowerOptions(
                collectives=kinds,
                sizes=sizes,
                places=() if places == "both" else (places,),
                json=json_file,
                **others,
            )
        )


@main.command()
@click.option("--min-bytes", metavar="SIZE", callback=size, default="1M", show_default=True, help="Smallest size.")
@click.option("--max-bytes", metavar="SIZE", callback=size, help="Largest size. Default: 256M on GPUs, 4M on CPUs.")
@click.option("--factor", type=click.IntRange(min=2), default=4, show_default=True, help="A size over the one before.")
@click.option("--variants", metavar="NAME,...", callback=names, default="", help="Of Sidelane's. Default: all.")
@click.option("--launch", type=click.Choice(["eager", "graph", "both"]), default="both", show_default=True)
@study_options
def chain(
    min_bytes: int, max_bytes: int | None, factor: int, launch: str, json_file: Path | None, **others: Any
) -> None:
    """Measure a GEMM, an all-gather of what it made, and a GEMM that reads it, with no host in between."""
    with plain_errors():
        from sidelane.bench import chain_bench
        from sidelane.bench.launch import choose_place

        on_cpu = choose_place(others["ranks"], others["device"]).on_cpu
        largest = max_bytes if max_bytes is not None else 4 << 20 if on_cpu else 256 << 20
        chain_bench.main(
            chain_bench.ChainOptions(
                sizes=tuple(sizes_between(min_bytes, largest, factor)),
                launches=() if launch == "both" else (launch,),
                json=json_file,
                **others,
            )
        )


@main.command()
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice([*KINDS, ALL]),
    default=(ALL,),
    help="May be repeated. Default: all. A profile keeps what it had of the others.",
)
@click.option("--quick", is_flag=True, help="Wide steps between the sizes, few rounds: half a minute on GPUs.")
@click.option("--seconds", "budget_s", type=click.FloatRange(min=1), help="For measuring; what is left out is said.")
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: every GPU, or a few on the CPU.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the profile here. Default: where every communicator of this user finds it.",
)
@click.option(
    "--from-results",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Do not measure: take the times of this file of `sidelane collective --json`; needs --output.",
)
def tune(collectives: tuple[str, ...], from_results: Path | None, output: Path | None, **others: Any) -> None:
    """Measure how each collective runs best on this machine, and keep it for `auto`.

    Every candidate, eager and in graphs, in and out of place, 1K to 256M (16M on CPUs); outputs are checked before and
    after they are timed. Says which choices change.
    """
    with plain_errors():
        from sidelane.bench import tune as tuning

        if from_results is not None:
            if output is None:
                raise ValueError("--from-results needs --output: it says nothing about this machine")
            profile = tuning.from_results(from_results, output)
            click.echo(f"{len(profile.curves)} curves of {profile.machine}: {output}")
            return
        kinds = KINDS if ALL in collectives else collectives
        tuning.main(tuning.TuneOptions(collectives=tuple(map(Kind, kinds)), output=output, **others))


@main.command()
@click.argument("collective", type=click.Choice([kind.value for kind in Kind]))
@click.argument("nbytes", metavar="SIZE", callback=size)
@click.option("--in-place", is_flag=True, help="Input and output share memory.")
@click.option("--graph", "captured", is_flag=True, help="The call is captured into a graph.")
@click.option("--ordinary", is_flag=True, help="The tensors are not in symmetric memory.")
@click.option("--beside", type=click.Choice(BESIDE), default=NOTHING, show_default=True, help="What runs next to it.")
@click.option("--dtype", type=click.Choice(list(ELEMENT_BYTES)), default="bfloat16", show_default=True)
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks. Default: as measured, or those of this machine.")
@click.option("--machine", metavar="NAME_OR_FILE", help="For a machine that need not be here: h200x4, mi300x8, ...")
@click.option(
    "--profile", type=click.Path(dir_okay=False, path_type=Path), help="Choose by this file of `sidelane tune`."
)
def explain(collective: str, **others: Any) -> None:
    """Show what `auto` takes for a call, why, what else it could take, and what would be submitted.

    SIZE is the gathered size of an all_gather and the local buffer of the others: 64K, 1M. Needs no GPU.
    """
    with plain_errors():
        from sidelane.bench import explain as explaining

        explaining.main(explaining.ExplainOptions(kind=Kind(collective), **others))


@main.command()
@click.option("--ranks", type=click.IntRange(min=1), help="Processes. Default: every GPU, or a few on the CPU.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto: GPUs if there are two or more.")
@click.option("--report", type=click.Path(file_okay=False, path_type=Path), default=Path("report"), show_default=True)
def demo(ranks: int | None, device: str, report: Path) -> None:
    """Look at this machine, then measure a GEMM next to a collective and write a report.

    Without GPUs the bytes travel between CPU processes; what GPUs would give is then predicted, for eight MI300X.
    """
    with plain_errors():
        from sidelane.bench import c3_bench, info
        from sidelane.bench.launch import choose_place

        info.main(probe=False)
        c3_bench.main(c3_bench.C3Options(workloads=DEMO_WORKLOADS, ranks=ranks, device=device, report=report))
        if choose_place(ranks, device).on_cpu:
            from sidelane.bench import sim_study

            sim_study.preview(DEMO_MACHINE)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def machines(as_json: bool) -> None:
    """List the machines that can be predicted."""
    with plain_errors():
        from sidelane.bench import machine_list

        machine_list.main(as_json=as_json)


@main.command()
@click.option("--machine", metavar="NAME_OR_FILE", default=DEMO_MACHINE, help="Default: mi300x8, the papers' machine.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, and nothing else.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), help="Folder of measurements.")
@click.option("--version", type=click.Choice(VERSIONS), default="000", show_default=True, help="Of paper 000.")
@click.option(
    "--report", type=click.Path(file_okay=False, path_type=Path), help="Write claims.json and a picture here."
)
@click.option(
    "--ranges/--no-ranges",
    default=None,
    help="Also predict over the plausible values of the machine's numbers: about a minute instead of two seconds. "
    "Default: with them, except with --json and no --report.",
)
def claims(machine: str, as_json: bool, results: Path, version: str, report: Path | None, ranges: bool | None) -> None:
    """Hold predictions against what papers claim, or, of other machines, against measurements (results/<machine>).

    The exit code is 1 if a claim has no role, or if a number was fitted to a held-out claim. Wrong predictions are
    shown, not punished.
    """
    with plain_errors():
        from sidelane.bench import claims

        with_ranges = (not as_json or report is not None) if ranges is None else ranges
        sys.exit(claims.main(claims.Options(machine, as_json, results, version, report, with_ranges)))


@main.command()
@click.option(
    "--machine", required=True, metavar="NAME_OR_FILE", help="Of the catalogue (sidelane machines), or a file."
)
@prediction_report
def pipeline(machine: str, report: Path | None) -> None:
    """Predict pipelined iterations of a GEMM and a collective (paper 004): tiles, thread blocks, priority."""
    with plain_errors():
        from sidelane.bench import sim_overlap

        sys.exit(sim_overlap.main(machine, report))


def predict_c3(machine: str, pairs: list[str], kinds: tuple[Kind, ...], version: str, report: Path | None) -> NoReturn:
    """What ``sidelane c3 --machine`` does. Without pairs: the whole study, which has its own collectives.

    Raises:
        ValueError: options that do not go together, or no such machine.
    """
    if pairs:
        refuse_beside_machine("pairs", "gemms", "sizes", "collectives", "report")
    else:
        refuse_beside_machine("version", "report")
    from sidelane.bench import sim_study

    workloads = [parse_workload(pair, kind) for kind in kinds for pair in pairs]
    sys.exit(sim_study.c3_main(sim_study.Options(machine, report, version), workloads))


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
