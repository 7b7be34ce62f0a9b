"""Options that several commands have, and the parsing of their values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sidelane.choice.store import NO_HOME
from sidelane.cli.output import STDOUT
from sidelane.errors import Page, see
from sidelane.program.collective import Kind
from sidelane.sizes import exact_bytes, format_bytes, parse_bytes
from sidelane_lab.harness.files import Written, why_unwritable
from sidelane_lab.harness.help import how, output, where

DEVICES = ("auto", "gpu", "cpu")
ALL = "all"
VERSIONS = ("000", "002")
# Collectives that every implementation has. Plain strings: click would show the names of enum members.
KINDS = tuple(kind.value for kind in Kind if kind not in (Kind.SCATTER, Kind.GATHER))


class NameChoice(click.Choice[str]):
    """Type of one of some names, in which case, hyphens and underscores do not matter: ``allreduce``, ``70B``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name that is meant."""
        meant = [name for name in self.choices if _plain(name) == _plain(str(value))]
        return super().convert(meant[0] if meant else value, param, ctx)


def _plain(name: str) -> str:
    return (
        name.lower()
        .replace("-", "")
        .replace("_", "")
        .replace("bf16", "bfloat16")
        .replace("fp32", "float32")
        .replace("fsdp2", "fsdp")
    )


def size(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Read ``1K``, ``64M``, ``1.2G`` or a plain number of bytes; several if the option may be repeated.
    Rounded sizes are reported on stderr.
    """
    if value is None:
        return None
    texts = value if isinstance(value, tuple) else (value,)
    try:
        sizes = tuple(map(parse_bytes, texts))
        say_rounding(*texts)
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from problem
    return sizes if isinstance(value, tuple) else sizes[0]


def say_rounding(*texts: str) -> None:
    """Report on stderr the sizes that are rounded.

    Raises:
        ValueError: a text is no size.
    """
    for text in filter(None, map(rounding, texts)):
        click.echo(f"note: {text}", err=True)


def rounding(text: str) -> str:
    """Return a note about a size that is rounded; empty if it is taken as it is written.

    >>> rounding("1.2G"), rounding("1.5G")
    ('1.2G is taken as 1288490192 bytes, whole elements of any dtype', '')

    Raises:
        ValueError: as for :func:`parse_bytes`.
    """
    nbytes = parse_bytes(text)
    return "" if nbytes == exact_bytes(text) else f"{text} is taken as {nbytes} bytes, whole elements of any dtype"


def names(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """Read names separated by commas, each once."""
    return tuple(dict.fromkeys(filter(None, (part.strip() for part in value.split(",")))))


def shapes(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Read ``2048,128,20`` as three whole numbers; the option may be repeated."""
    found = []
    for text in value:
        try:
            found.append(tuple(int(part) for part in text.split(",")))
        except ValueError as problem:
            raise click.BadParameter(f"{text!r} (allowed=whole numbers with commas, such as 2048,128,20)") from problem
    return tuple(found)


ranks_option = where(
    "--ranks", type=click.IntRange(min=1), show_default="every GPU, or a few on the CPU", help="Processes to start."
)
device_option = where(
    "--device", type=click.Choice(DEVICES), default="auto", help="auto takes GPUs if there are two or more."
)
timeout_option = how("--timeout", "timeout_s", type=click.FloatRange(min=1), default=600, help="Seconds for all of it.")
report_option = output(
    "--report",
    type=Written(is_folder=True),
    metavar="FOLDER",
    help="Write a page with tables and pictures here.",
)


def given(name: str) -> bool:
    """Return True if the caller gave this parameter of the running command."""
    return click.get_current_context().get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def refuse_beside_machine(*allowed: str) -> None:
    """Refuse options of measurements if ``--machine`` requests a prediction. ``allowed``: names of parameters.

    Raises:
        ValueError: the caller gave another option.
    """
    parameters = {option.name or "": option for option in click.get_current_context().command.params}
    for name, option in parameters.items():
        if name not in ("machine", *allowed) and given(name):
            fine = ", ".join(parameters[other].opts[0] for other in allowed)
            raise ValueError(f"{option.opts[0]} does not go with --machine, which only predicts (allowed={fine})")


def sizes_between(smallest: int, largest: int, factor: int) -> Iterator[int]:
    """Return the sizes from ``smallest`` up to ``largest``, each ``factor`` times the one before.

    >>> list(sizes_between(1024, 100_000, 4))
    [1024, 4096, 16384, 65536]

    Raises:
        ValueError: there is no such size.
    """
    if not 1 <= smallest <= largest:
        raise ValueError(
            f"sizes: nothing from {format_bytes(smallest)} to {format_bytes(largest)} (--min-bytes, --max-bytes)"
        )
    return itertools.takewhile(lambda size: size <= largest, (smallest * factor**power for power in itertools.count()))


def refuse_unwritable(what: str, target: str | os.PathLike[str] | None, *, is_folder: bool = False) -> None:
    """Raise before a measurement whose results would be lost.

    Args:
        what: name of the target for the user.
        target: path; None, like ``STDOUT``, can be written.
        is_folder: files are to be written into it.

    Raises:
        ValueError: it cannot be written.
    """
    if target is None or (Path(target) == STDOUT and not is_folder):
        return
    problem = why_unwritable(target, is_folder=is_folder)
    if problem is not None:
        raise ValueError(f"{what}: {problem}")


def required(what: str, path: Path | None, instead: str = "") -> Path:
    """Return the place of a file of this user.

    Args:
        what: name of the writer, for the error.
        path: place of the file, if there is one.
        instead: another way to name a place; "" for none.

    Raises:
        ValueError: there is none.
    """
    if path is None:
        allowed = f"{instead}XDG_CONFIG_HOME as an absolute path, or HOME"
        text = f"{what}: a place for files of this user (value=none: {NO_HOME}, allowed={allowed})"
        raise see(ValueError(text), Page.TUNING)
    return path
