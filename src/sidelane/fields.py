"""Rules for the fields of frozen values: the allowed values, in one plain form.

A rule is a function of a field's name and of the given value. It returns the value to keep, or raises TypeError for
another kind of value and ValueError for a wrong one of the right kind; the text names the field. ``validate`` applies
rules to a value that is being made. Classes with millions of values check the exact types first, and then need no
rule.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from enum import StrEnum
from typing import Any

Rule = Callable[[str, Any], Any]

put = object.__setattr__
"""Function that sets a field of a frozen value. Classes with millions of values have an ``__init__`` of their own with
it: it costs as much as that of ``dataclasses`` without a check."""


def validate(made: object, **rules: Rule) -> None:
    """Replace fields of a frozen value by the results of their rules. For its ``__post_init__``.

    Raises:
        TypeError, ValueError: a rule refused the given value.
    """
    for field, rule in rules.items():
        given = getattr(made, field)
        try:
            kept = rule(field, given)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"{type(made).__name__}: {problem}") from None
        if kept is not given:
            put(made, field, kept)


def whole(name: str, value: Any) -> int:
    """Return a whole number as Python's ``int``; numpy's and others are converted. Truth values are refused."""
    if type(value) is int:
        return value
    if not (isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} (value={value!r}, allowed=whole numbers)")


def number(name: str, value: Any) -> float:
    """Return a number as Python's ``float``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} (value={value!r}, allowed=numbers)")
    return float(value)


def at_least(least: int) -> Rule:
    """Make a rule for a whole number that is not too small."""

    def rule(name: str, value: Any) -> int:
        kept = whole(name, value)
        if kept < least:
            raise ValueError(f"{name} (value={kept}, allowed={least} and more)")
        return kept

    return rule


def plain_text(name: str, value: Any) -> str:
    """Return a plain text; a subclass, such as a member of an enumeration, is converted."""
    if not isinstance(value, str):
        raise TypeError(f"{name} (value={value!r}, allowed=text)")
    return value if type(value) is str else str.__str__(value)


def switch(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} (value={value!r}, allowed=True, False)")
    return value


def one_of(kind: type[StrEnum]) -> Rule:
    """Make a rule for a member of an enumeration, also given by its text."""
    members = {member.value: member for member in kind}

    def rule(name: str, value: Any) -> StrEnum:
        if type(value) is kind:
            return value
        if not isinstance(value, str):
            raise TypeError(f"{name} (value={value!r}, allowed={', '.join(members)})")
        member = members.get(str.__str__(value))
        if member is None:
            raise ValueError(f"{name} (value={value!r}, allowed={', '.join(members)})")
        return member

    return rule


def an(*kinds: type) -> Rule:
    """Make a rule for a value of exactly one of some classes; a subclass may have another meaning."""

    def rule(name: str, value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"{name} (value={value!r}, allowed={', '.join(kind.__name__ for kind in kinds)})")
        return value

    return rule


def optional(rule: Rule) -> Rule:
    """Make a rule for None, or a value of another rule."""

    def of_some(name: str, value: Any) -> Any:
        return None if value is None else rule(name, value)

    return of_some


def several(rule: Rule, *plain: type) -> Rule:
    """Make a rule for an ordered collection of values, each by a rule, kept as a tuple.

    Args:
        rule: rule of each value.
        plain: classes whose values the rule keeps unchanged.
    """
    kept_as_they_are = frozenset(plain)

    def of_all(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is tuple and kept_as_they_are.issuperset(map(type, value)):
            return value
        if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
            raise TypeError(f"{name} (value={value!r}, allowed=a tuple)")
        return tuple(rule(f"{name}[{number}]", one) for number, one in enumerate(value))

    return of_all
