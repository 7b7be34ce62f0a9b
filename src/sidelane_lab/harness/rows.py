"""Rows of result files. They are flat and their names are fixed, since other tools read them.

A time that does not exist is null and ``note`` says why: a variant that is wrong or could not run
is a row that says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Self

IMPLEMENTATIONS = ("nccl", "nccl_ctas", "nccl_ce", "symm_mem", "gloo", "dma", "sm", "auto")
LAUNCHES = ("eager", "graph")
MODEL = "model"
"""Launch of a row that is predicted."""

SEPARATE = "separate"
"""Variant of a list of tensors in a call for each."""

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
    """

    renamed: ClassVar[dict[str, str]] = {}
    allowed: ClassVar[Allowed] = ()
    figures: ClassVar[tuple[str, ...]] = ()

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
        names = [field.name for field in dataclasses.fields(self)]
        return {self.renamed.get(name, name): _plain(getattr(self, name)) for name in names}

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


def require_all(where: str, name: str, values: Collection[str], allowed: Collection[str]) -> None:
    """Refuse values that are not among ``allowed``, saying where and which."""
    unknown = [value for value in values if value not in allowed]
    if unknown:
        raise ValueError(f"{where}: {name} (value={', '.join(unknown)}, allowed={', '.join(allowed)})")


def require(where: str, name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not one of ``allowed``, saying where and which."""
    if value not in allowed:
        raise ValueError(f"{where}: {name} (value={value!r}, allowed={', '.join(allowed)})")
