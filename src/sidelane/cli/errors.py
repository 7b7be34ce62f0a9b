"""Errors in words for a terminal, and exit codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from sidelane.errors import SidelaneError


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
    except BrokenPipeError:
        raise  # who reads has seen enough, and click says nothing
    except OSError as problem:
        raise click.ClickException(str(problem)) from problem
    except SidelaneError as problem:
        from sidelane.bench.running.launch import RankFailedError

        if isinstance(problem, RankFailedError) and problem.refused:
            raise click.UsageError(f"{problem.refused} (sidelane --traceback shows where)") from problem
        raise click.ClickException(str(problem)) from problem
