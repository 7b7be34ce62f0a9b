"""Output of a command: results to a file, atomically, or to stdout; errors to a terminal, with the page to read."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from sidelane import config
from sidelane.errors import SEE, Page, SidelaneError, page_of
from sidelane.user_files import write_whole

STDOUT = Path("-")
"""Path that stands for stdout."""


JSON_HELP = "Write the figures here as JSON; - prints them, and nothing else."
"""Help of the option ``--json`` of all commands."""

json_option = click.option(
    "--json",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    metavar="FILE",
    is_flag=False,
    flag_value="-",
    help=JSON_HELP,
)
"""Option of a command that writes its figures as one JSON object."""


def write_json(target: str | os.PathLike[str], content: Any, *, allow_nan: bool = True) -> Path:
    """Write an object as JSON.

    Args:
        target: file, whose folder is made; or ``STDOUT``.
        content: value that ``json`` can write.
        allow_nan: write numbers that JSON does not have, too.

    Returns:
        Path of the target.
    """
    return write_text(target, json.dumps(content, indent=1, allow_nan=allow_nan) + "\n")


def write_text(target: str | os.PathLike[str], text: str) -> Path:
    """Write a file atomically, making its folder; or write to stdout, or into an existing device or pipe."""
    path = Path(target)
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return path
    if is_special(path):
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return path
    write_whole(path, text.encode())
    return path


def is_special(path: Path) -> bool:
    """Return True for a device or a pipe, such as /dev/null, which must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


class FailedError(click.ClickException):
    """Failure that the user's input did not cause: exit code 1.

    Args:
        message: description of the failure.
        page: page to read.
    """

    def __init__(self, message: str, page: Page) -> None:
        super().__init__(message)
        self.page = page

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it to stderr."""
        click.echo(f"Error: {self.format_message()}\n{SEE}{self.page.shown}", file=file, err=file is None)


class MisusedError(click.UsageError):
    """Invalid input of the user: exit code 2.

    Args:
        message: given value and allowed values.
        context: context of the command.
        page: page to read; None: the help of the command, and the page of all commands.
    """

    def __init__(self, message: str, context: click.Context | None = None, page: Page | None = None) -> None:
        super().__init__(message, context)
        self.page = page

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it to stderr, and what to read."""
        path = "" if self.ctx is None else f"{self.ctx.command_path} --help, "
        see = f"{path}{Page.COMMANDS.shown}" if self.page is None else self.page.shown
        click.echo(f"Error: {self.format_message()}\n{SEE}{see}", file=file, err=file is None)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors that have an explanation into one line: exit code 2 for invalid requests, 1 for failures.

    Settings are read first: ranks that cannot read them would take no part in a study, and it would go on without them.
    """
    context = click.get_current_context()
    if context.obj:  # --traceback
        yield
        return
    try:
        config.current()
        yield
    except (ValueError, TypeError) as problem:
        raise MisusedError(str(problem), context, page_of(problem)) from problem
    except BrokenPipeError:
        raise  # the reader of the pipe has closed it, and click prints nothing
    except OSError as problem:
        raise FailedError(str(problem), Page.ERRORS) from problem
    except SidelaneError as problem:
        if refused := getattr(problem, "refused", ""):  # by a rank of a study: it could not use its arguments
            raise MisusedError(f"{refused} (sidelane --traceback shows where)", context) from problem
        raise FailedError(str(problem), page_of(problem) or Page.ERRORS) from problem
