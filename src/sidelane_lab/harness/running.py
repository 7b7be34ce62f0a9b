"""A study from options to a file: start the ranks, follow them, publish what they measured.

Rank 0 sends every row as soon as it has it. If a rank fails or hangs later, the rows until then are published all the
same, and then the error is raised: device time is too dear to lose.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import textwrap
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import rich.console
import rich.progress

from sidelane.cli.output import STDOUT
from sidelane.errors import Page, SidelaneError, UnavailableError
from sidelane.machine import local
from sidelane_lab.harness import report
from sidelane_lab.harness import study as result_files
from sidelane_lab.harness.launch import LaunchTarget, Rank, T, choose_target, run_ranks
from sidelane_lab.harness.options import StudyOptions
from sidelane_lab.harness.parameters import refuse_unwritable
from sidelane_lab.harness.regress import key_of, text_of
from sidelane_lab.harness.study import FlatRow, Picture, R, Results, Study, collect, study_of
from sidelane_lab.harness.terminal import progress_console, tables_console

if TYPE_CHECKING:
    from sidelane_lab.harness.measure import Meter

MOST_NAMED = 600
"""Characters of names of wrong rows in an error."""
RESUMES = " (the same command with --resume goes on with them)"
"""Words after the names of what a budget left out, where a study has that option."""

Show = Callable[[Results, rich.console.Console], None]
"""Type of what shows results on the console for tables."""


class Sender:
    """Rank 0's side of the channel to the user; on other ranks it does nothing.

    Args:
        rank: of this process.

    Attributes:
        steps: that the study will take; it is set before the first.
    """

    def __init__(self, rank: Rank) -> None:
        self.steps = 0
        self._rank = rank
        self._done = 0

    def step(self, text: str) -> None:
        """Say that the next step begins."""
        self._send({"step": self._done, "of": self.steps, "text": text})
        self._done += 1

    def steps_within(
        self, meter: Meter, items: Sequence[T], seconds: float | None, name: Callable[[T], str] = str, more: str = ""
    ) -> Iterator[T]:
        """Yield items until time is over, each as a step, and the first in any case. Collective.

        Args:
            meter: its first rank's clock decides for all.
            items: to go through.
            seconds: how long; None: without an end.
            name: names an item.
            more: is put after the names of those that are left: how to go on with them.
        """

        def over(left: Sequence[T]) -> None:
            self.note(f"{seconds:g} s are over; left: {'; '.join(map(name, left))}{more}")

        self.steps = len(items)
        for item in meter.within(items, math.inf if seconds is None else seconds, over, 1):
            self.step(name(item))
            yield item

    def row(self, row: FlatRow) -> None:
        """Hand over a row."""
        self._send({"row": row.to_dict()})

    def note(self, text: str) -> None:
        """Say something that is no row: a reason, a choice."""
        self._send({"note": text})

    def rounded(self, asked: Iterable[int], rounded: Callable[[int], int]) -> list[int]:
        """Return what is measured for sizes that were asked for, in ascending order; say which ones it is not.

        Args:
            asked: bytes.
            rounded: what is measured in place of a size.
        """
        taken = {nbytes: rounded(nbytes) for nbytes in asked}
        changed = [f"{nbytes} as {size}" for nbytes, size in taken.items() if size != nbytes]
        if changed:
            self.note(f"rounded up to bytes that {self._rank.world_size} ranks share evenly: {', '.join(changed)}")
        return sorted(set(taken.values()))

    def _send(self, message: dict[str, object]) -> None:
        if self._rank.rank == 0:
            self._rank.say(json.dumps(message))


class StudyFollower(Generic[R]):
    """The user's side: keeps rows, shows a bar on a terminal and one line a step elsewhere."""

    def __init__(
        self, row_type: type[R], console: rich.console.Console | None, grown: Callable[[], None] = lambda: None
    ) -> None:
        self.rows: list[R] = []
        self.notes: list[str] = []
        self._row_type: type[R] = row_type
        self._console = console
        self._grown = grown
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    @contextmanager
    def shown(self, title: str) -> Iterator[None]:
        """Show progress inside the ``with`` block."""
        if self._console is None or not self._console.is_terminal:
            yield
            return
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        with rich.progress.Progress(*columns, console=self._console, transient=True) as self._bar:
            self._task = self._bar.add_task(title, total=None)
            yield
        self._bar = self._task = None

    def __call__(self, line: str) -> None:
        message = json.loads(line)
        if "row" in message:
            self.rows.append(self._row_type.from_dict(message["row"]))
            self._grown()
        elif "note" in message:
            self.notes.append(message["note"])
            self._print(message["note"])
        elif self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=message["step"], total=message["of"], description=message["text"])
        else:
            self._print(f"[{message['step'] + 1}/{message['of']}] {message['text']}")

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False)


def run(options: StudyOptions) -> object:
    """Run the study that the options are of, as its command does. Returns what the study returns.

    Raises:
        SidelaneError: an output was wrong. All rows are published first.
    """
    study = study_of(options.study)
    found = run_study(study, options) if study.main is None else study.main(options)
    if isinstance(found, Results):
        require_right(study.name, found.rows)
    return found


def run_study(
    study: Study[R],
    options: StudyOptions,
    *,
    place: LaunchTarget | None = None,
    known: Sequence[R] = (),
    grows: Path | None = None,
    further: Callable[[Sequence[R], Path], Sequence[Picture]] | None = None,
    show: Show = report.show,
) -> Results | None:
    """Let every rank measure, and publish the rows that rank 0 sends.

    Args:
        study: what to run.
        options: its options.
        place: where to run it; None chooses by the options.
        known: rows that are there already; of what is measured again the new one counts (``Study.key``).
        grows: file that is written anew with every row; None and ``STDOUT`` are not.
        further: puts pictures into the folder of the report that are drawn from no rows.
        show: shows what was measured.

    Returns:
        The results; None on the other ranks under torchrun.

    Raises:
        RankFailedError: a rank failed. What had been measured until then is published first, as it is at Ctrl-C
            and where ``timeout`` ends the process (SIGTERM, which is a KeyboardInterrupt here).
        UnavailableError: every row says why it has no figure; they are published first.
        ValueError: options do not fit this machine, or leave nothing to measure.
    """
    place = place or choose_target(options.ranks, options.device)
    study.check(options, place)
    check_targets(options)
    refuse_unwritable(study.name, grows)
    progress, tables = (None, None) if options.quiet else (progress_console(), tables_console(options.json))
    empty = collect(study.name, (), device_type=place.device_type, ranks=place.world_size, command=options.command)

    def results() -> Results:
        rows = merged(study.key, [*known, *follower.rows])
        return dataclasses.replace(empty, rows=rows)

    def grown() -> None:
        if grows is not None and grows != STDOUT:
            result_files.write(grows, results())

    follower: StudyFollower[R] = StudyFollower(study.row, progress, grown)
    if progress is not None and place.on_cpu and place.world_size > local.cores():
        progress.print(f"{place.world_size} ranks on {local.cores()} cores: they take turns, which takes long")
    failure: BaseException | None = None
    try:
        with interrupted_by_sigterm():
            assert study.measure is not None, study.name
            if not follow(follower, study.measure, options, place, study.progress):
                return None
    except (Exception, KeyboardInterrupt) as error:  # under torchrun it is whatever the rank raised
        if not follower.rows:
            raise
        failure = error
    found = results()
    if not found.rows:
        raise ValueError(f"{study.name}: nothing that was asked for can run here ({selection_of(options)})")
    rows = study.rows_of(found)
    pictures = () if further is None or options.report is None else further(rows, options.report)
    publish(found, options, tables, pictures, show)
    if progress is not None and options.report is not None:
        progress.print(f"report: {options.report / report.PAGE}", markup=False)
    if failure is not None:
        raise failure
    require_measured(study.name, follower.rows)
    return found


def require_measured(study: str, rows: Sequence[FlatRow]) -> None:
    """Refuse rows of which each says why it has no figure: a script must not take them for a measurement. Wrong ones
    are one: ``require_right`` refuses them.

    Raises:
        UnavailableError: with their reasons.
    """
    if not rows or any(
        not row.figures
        or getattr(row, "correct", None) is False
        or any(getattr(row, name) is not None for name in row.figures)
        for row in rows
    ):
        return
    notes = dict.fromkeys(note for note in (getattr(row, "note", "") for row in rows) if note)
    why = "; ".join(notes) or "no row says why"
    raise UnavailableError(f"{study}: nothing was measured ({why})", page=Page.COMMANDS)


def require_right(study: str, rows: Sequence[FlatRow]) -> None:
    """Refuse wrong rows of any study: a script that reads only the exit status must see them.

    Raises:
        SidelaneError: with the names and values that tell the wrong rows from the others, in so few characters that
            the end of a log has all of it (``tools/node/session.py``).
    """
    if wrong := [row for row in rows if getattr(row, "correct", None) is False]:
        keys = [key_of(row) for row in rows]
        common = [pair for pair in keys[0] if all(pair in key for key in keys)] if len(rows) > 1 else []
        names = "; ".join(text_of(key_of(row), common) for row in wrong)
        named = textwrap.shorten(names, MOST_NAMED, placeholder=" ...")
        raise SidelaneError(f"{study}: {len(wrong)} of {len(rows)} rows are WRONG: {named}", page=Page.COMMANDS)


def follow(
    follower: StudyFollower[R],
    measure: Callable[..., Iterable[FlatRow]],
    options: StudyOptions,
    place: LaunchTarget,
    progress: str,
) -> bool:
    """Run ``measure(rank, options, sender)`` on every rank; ``follower`` shows and keeps what rank 0 sends.

    Returns:
        False on the other ranks under torchrun.

    Raises:
        RankFailedError: a rank failed.
    """
    with follower.shown(progress):
        finished = run_ranks(
            _measure,
            place.world_size,
            measure,
            options,
            device_type=place.device_type,
            timeout_s=options.timeout_s,
            progress=follower,
        )
    return finished is not None


def _measure(rank: Rank, measure: Callable[..., Iterable[FlatRow]], options: StudyOptions) -> int:
    """Send the rows of a rank. Returns their number."""
    sender, count = Sender(rank), 0
    for row in measure(rank, options, sender):
        sender.row(row)
        count += 1
    return count


def merged(key: Callable[[R], Hashable] | None, rows: Sequence[R]) -> tuple[R, ...]:
    """Rows; of those that have a key in common the last, in the place of the first."""
    return tuple(rows) if key is None else tuple({key(row): row for row in rows}.values())


def rows_there(study: Study[R], path: Path | None, place: LaunchTarget, *, same_software: bool = False) -> Sequence[R]:
    """The rows of a file that a study goes on with, each with the commit that made it; none where there is no file.

    Raises:
        ValueError: it is of another study, of another machine or, if that matters, of other software.
    """
    if path is None or path == STDOUT or not path.exists():
        return ()
    found = result_files.read(path)
    here = collect(study.name, (), device_type=place.device_type, ranks=place.world_size)
    theirs, ours = [(one.study, one.device, one.ranks) for one in (found, here)]
    if theirs != ours or (same_software and found.software != here.software):
        more = " with the same software" if same_software else ""
        raise ValueError(f"{study.name}: {path} was measured elsewhere (value={theirs}, allowed={ours}{more})")
    made_by = "" if found.commit == here.commit else found.commit
    return [dataclasses.replace(row, commit=row.commit or made_by) for row in study.rows_of(found)]


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM be a KeyboardInterrupt inside the ``with`` block, where nobody else has asked for the signal."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def selection_of(options: StudyOptions) -> str:
    """Say what narrows a study down."""
    names = ("collectives", "cases", "implementations", "variants", "launches", "places")
    given = [(name, getattr(options, name, ())) for name in names]
    return ", ".join(f"{name}={', '.join(value)}" for name, value in given if value)


def check_targets(options: StudyOptions) -> None:
    """Find out that what is measured could not be written, before it is measured.

    Raises:
        ValueError: with the option and the reason.
    """
    refuse_unwritable("--json", options.json)
    for name in ("report", "timeline"):
        refuse_unwritable(f"--{name}", getattr(options, name, None), is_folder=True)


def publish(
    results: Results,
    options: StudyOptions,
    tables: rich.console.Console | None,
    further: Sequence[Picture] = (),
    show: Show = report.show,
) -> None:
    """Show the tables, and write what the options ask for; neither is lost because the other fails.

    ``further``: pictures that lie in the folder of the report.
    """
    try:
        if tables is not None:
            show(results, tables)
    finally:
        if options.json is not None:
            result_files.write(options.json, results)
    if options.report is not None:
        report.write(options.report, results, further)
