"""Errors on a terminal, with the page to read at their end, and exit codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO, Any

import click

from sidelane import config
from sidelane.errors import SEE, Page, SidelaneError, page_of


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
        """Print it to stderr, behind the usage of the command."""
        path = "" if self.ctx is None else f"{self.ctx.command_path} --help, "
        usage = "" if self.ctx is None else f"{self.ctx.get_usage()}\n\n"
        see = f"{path}{Page.COMMANDS.shown}" if self.page is None else self.page.shown
        click.echo(f"{usage}Error: {self.format_message()}\n{SEE}{see}", file=file, err=file is None)


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
