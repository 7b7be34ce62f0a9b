"""Options that several commands have, and how what is typed is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from sidelane.c3.workload import format_bytes, parse_bytes
from sidelane.program.collective import Kind

C = TypeVar("C", bound=Callable[..., Any])
DEVICES = ("auto", "gpu", "cpu")
ALL = "all"
VERSIONS = ("000", "002")
# Those that every implementation has a counterpart for. Plain strings: click would show the names of enum members.
KINDS = tuple(kind.value for kind in Kind if kind not in (Kind.SCATTER, Kind.GATHER))


def size(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Read ``1K``, ``64M``, ``4G`` or a plain number of bytes; several where the option may be repeated."""
    try:
        return (
            tuple(map(parse_bytes, value))
            if isinstance(value, tuple)
            else value
            if value is None
            else parse_bytes(value)
        )
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from problem


def names(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """Read names separated by commas, each once."""
    return tuple(dict.fromkeys(filter(None, (part.strip() for part in value.split(",")))))


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
moved_collectives = click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice(KINDS),
    default=("all_gather", "all_to_all"),
    help="Repeatable. Default: all_gather and all_to_all.",
)

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


def sizes_between(smallest: int, largest: int, factor: int) -> Iterator[int]:
    """Sizes from ``smallest`` up to ``largest``, each ``factor`` times the one before.

    >>> list(sizes_between(1024, 100_000, 4))
    [1024, 4096, 16384, 65536]

    Raises:
        ValueError: there is none.
    """
    if not 1 <= smallest <= largest:
        raise ValueError(
            f"sizes: nothing from {format_bytes(smallest)} to {format_bytes(largest)} (--min-bytes, --max-bytes)"
        )
    return itertools.takewhile(lambda size: size <= largest, (smallest * factor**power for power in itertools.count()))
