"""How far a campaign has come: one line that is rewritten on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import rich.console
import rich.progress
import rich.text

EVERY_S = 30.0


@contextlib.contextmanager
def shown(line: Callable[[], str], console: rich.console.Console | None) -> Iterator[None]:
    """Show what ``line`` returns, as long as the block runs; nothing without a console."""
    if console is None:
        yield
    elif console.is_terminal:
        columns = (rich.progress.SpinnerColumn(), _Said(line), rich.progress.TimeElapsedColumn())
        with rich.progress.Progress(*columns, console=console, transient=True) as progress:
            progress.add_task("soak", total=None)
            yield
    else:
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(EVERY_S):
                console.print(line(), markup=False, highlight=False)

        thread = threading.Thread(target=tell, name="sidelane-soak-shown", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _Said(rich.progress.ProgressColumn):
    """A column that says how things are whenever it is drawn."""

    max_refresh = 0.5

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        super().__init__()

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(self._line())
