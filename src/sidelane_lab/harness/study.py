"""A study: what it declares about itself, and the result file that holds its rows.

A declaration stands at the end of the module that measures, and ``sidelane_lab.studies.STUDIES`` says which module that
is. The harness loads it by name when somebody runs the study, or reads a file of it; it imports no study itself.

A file is one JSON object: ``study, machine, gpus, device, ranks, date, commit, command, software, rows``.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from sidelane.cli.output import write_json
from sidelane.machine.inventory import machine_name
from sidelane.user_files import json_of
from sidelane_lab.harness.files import text_of
from sidelane_lab.harness.options import require
from sidelane_lab.harness.table import Table

if TYPE_CHECKING:
    from sidelane_lab.harness.launch import LaunchTarget

IMPLEMENTATIONS = ("nccl", "nccl_ctas", "nccl_ce", "symm_mem", "gloo", "dma", "sm", "auto")
MODEL = "model"
"""Launch of a row that is predicted."""

SEPARATE = "separate"
"""Variant of a list of tensors in a call for each."""

PRELAUNCHED = "+prelaunch"
"""End of the name of a variant that is prelaunched."""

AS_GOOD = 1.02
"""Ratio of two times below which the longer counts as good as the shorter."""

OF_LIBRARY = ("nccl", "nccl_ce", "gloo")

Allowed = tuple[tuple[str, Sequence[str]], ...]
"""Names of fields, each with the values that it may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatRow:
    """Flat row: its fields are the keys of the file, in their order.

    Attributes:
        renamed: keys that are not the names of their fields, by field.
        allowed: the values that fields may have.
        figures: fields that are there, finite and not negative, unless a ``note`` says why not; null of wrong results.
        commit: commit of the code that made the row, where it is not that of its file; a file that goes on has such.
    """

    renamed: ClassVar[dict[str, str]] = {}
    allowed: ClassVar[Allowed] = ()
    figures: ClassVar[tuple[str, ...]] = ()

    commit: str = dataclasses.field(default="", kw_only=True)

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name, values in self.allowed:
            require(where, self.renamed.get(name, name), getattr(self, name), values)
        note, correct = getattr(self, "note", ""), getattr(self, "correct", None)
        for name in self.figures:
            value = getattr(self, name)
            if value is None and not note:
                raise ValueError(f"{where}: a row without {name} needs a note that says why (value=None)")
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{where}: {name} must be finite and not negative (value={value})")
            if value is not None and correct is False:
                raise ValueError(f"{where}: {name} of a wrong result must not be given (value={value}, allowed=None)")

    def to_dict(self) -> dict[str, Any]:
        return {key: _plain(value) for key, value in self.exact().items()}

    def exact(self) -> dict[str, Any]:
        """Return the object of a file with numbers that are not rounded."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "commit"]
        of_row = {self.renamed.get(name, name): getattr(self, name) for name in names}
        return {**of_row, "commit": self.commit} if self.commit else of_row

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        """Make a row from the object of a file.

        Raises:
            ValueError: keys are missing or unknown, or a value is not allowed.
        """
        fields = {cls.renamed.get(field.name, field.name): field for field in dataclasses.fields(cls)}
        required = {key for key, field in fields.items() if field.default is dataclasses.MISSING}
        missing, unknown = sorted(required - set(row)), sorted(set(row) - set(fields))
        if missing or unknown:
            raise ValueError(f"{cls.__name__}: wrong keys (missing={missing}, unknown={unknown})")
        return cls(**{fields[key].name: value for key, value in row.items()})


def _plain(value: Any) -> Any:
    # Five significant digits are more than any clock here gives, and keep the files readable.
    return float(f"{value:.5g}") if isinstance(value, float) else value


R = TypeVar("R", bound=FlatRow)
ROOM = "sidelane_lab.studies"


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A picture on disk: ``name`` without ending; ``text`` says what it shows, for those who cannot see it."""

    name: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(Generic[R]):
    """A declared study.

    Attributes:
        name: in result files, and in ``STUDIES``.
        title: heading of its section in a report.
        legend: what readers of its tables must know.
        row: type of its rows.
        tables: shows rows.
        plots: draws rows into a folder.
        warning: what readers of one file must know besides; empty if nothing.
        measure: every rank's part, ``measure(rank, options, sender)``, which makes the rows; None where another study
            measures.
        predict: fills the rows for a described machine, ``predict(machine, options)``; None where no model does. It
            raises ValueError for a machine or options that the model does not speak to.
        predict_row: predicts what a measured row holds, ``predict_row(machine, row)``, given the row's own isolated
            times: several values where either of two things may come first, none where the model does not speak to
            it; None where no model does.
        progress: what is measured, in a few words, for the bar.
        check: refuses options that do not fit where the ranks would run, by ``ValueError``, before one starts.
        main: runs the study for its command, where more has to be done than ``running.run_study``; None elsewhere.
        key: what two rows of one thing have in common; None where no run goes on with the file of another.
    """

    name: str
    title: str
    legend: str
    row: type[R]
    tables: Callable[[Sequence[R]], list[Table]]
    plots: Callable[[Sequence[R], Results, Path], list[Picture]] = lambda rows, results, folder: []
    warning: Callable[[Results], str] = lambda results: ""
    measure: Callable[..., Any] | None = None
    predict: Callable[[Any, Any], Sequence[R]] | None = None
    predict_row: Callable[[Any, R], Sequence[float]] | None = None
    progress: str = ""
    check: Callable[[Any, LaunchTarget], object] = lambda options, place: None
    main: Callable[[Any], object] | None = None
    key: Callable[[R], Hashable] | None = None

    def rows_of(self, results: Results) -> tuple[R, ...]:
        """The rows of a file of this study.

        Raises:
            ValueError: it is of another study.
        """
        if results.study != self.name:
            raise ValueError(f"{self.name}: results (value={results.study!r}, allowed=a file of {self.name})")
        return tuple(row for row in results.rows if isinstance(row, self.row))


def studies() -> Mapping[str, str]:
    """The module of every study, by the study's name."""
    found: Mapping[str, str] = importlib.import_module(ROOM).STUDIES
    return found


@functools.cache
def study_of(name: str) -> Study[Any]:
    """The declaration of a study; its module is imported now.

    Raises:
        ValueError: no such study.
    """
    require("study_of", "study", name, tuple(studies()))
    module = importlib.import_module(studies()[name])
    return next(one for one in vars(module).values() if isinstance(one, Study) and one.name == name)


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """A study's file. Make it with :func:`collect`, which looks up what the machine is.

    Attributes:
        study: name of the study, one of ``STUDIES``.
        machine: short name, as the folders under ``results/`` have it (``h200x4``, ``cpu``).
        gpus: number of GPUs that took part; 0 when ranks were CPU processes.
        device: full name of the GPU or processor; of predicted rows the title of the description.
        ranks: processes that took part; 0 in a prediction.
        date: time at which the study ended, in UTC, ISO 8601.
        commit: commit of the code that ran, with ``-dirty`` if files differed; ``unknown`` outside a checkout.
        command: command that runs it again.
        software: versions of packages, by name.
        rows: rows of the study, all of one type.
    """

    study: str
    machine: str
    gpus: int
    device: str
    ranks: int
    date: str
    commit: str
    command: str
    software: dict[str, str]
    rows: tuple[FlatRow, ...]

    def __post_init__(self) -> None:
        row_type = study_of(self.study).row
        wrong = {type(row).__name__ for row in self.rows if type(row) is not row_type}
        if wrong:
            raise ValueError(f"Results: rows of {self.study} (value={wrong}, allowed={row_type.__name__})")

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "rows": [row.to_dict() for row in self.rows]}

    @property
    def on_cpu(self) -> bool:
        return self.gpus == 0

    @property
    def where(self) -> str:
        """The ranks and the machine, for titles; of a prediction the machine."""
        return f"{self.ranks} {'processes on' if self.on_cpu else 'x'} {self.device}" if self.ranks else self.device


def collect(study: str, rows: Sequence[FlatRow], *, device_type: str, ranks: int, command: str = "") -> Results:
    """Put rows together with what this machine and this installation are. Call it in the parent or on one rank.

    Args:
        study: name of the study, one of ``STUDIES``.
        rows: what was measured.
        device_type: of the ranks' tensors: ``cpu`` or the accelerator's name in torch.
        ranks: processes that took part.
        command: what to type to run it again; empty takes this process's command line.
    """
    from sidelane_lab.harness import provenance  # it loads PyTorch, and declarations do without

    on_cpu = device_type == "cpu"
    device, count = (provenance.processor_name(), 0) if on_cpu else provenance.accelerator_name()
    return Results(
        study=study,
        machine="cpu" if on_cpu else machine_name(device, count),
        gpus=0 if on_cpu else ranks,
        device=device,
        ranks=ranks,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=provenance.commit(),
        command=command or provenance.command_line(),
        software=provenance.software_versions(),
        rows=tuple(rows),
    )


def write(path: str | os.PathLike[str], results: Results) -> Path:
    """Write the file whole or not at all, making its folder; or to stdout (``written.STDOUT``)."""
    return write_json(path, results.to_dict(), allow_nan=False)


def read(path: str | os.PathLike[str]) -> Results:
    """Read a file back, checking keys and values.

    Raises:
        ValueError: it is not a result file; the text names the file and what is wrong.
    """
    try:
        content = json_of(text_of(path))
        row_type = study_of(content["study"]).row
        rows = [row_type.from_dict(row) for row in content.pop("rows")]
        return Results(**content, rows=tuple(rows))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
        raise ValueError(f"read: not a result file (value={os.fspath(path)!r}): {problem}") from problem
