"""Rules for the fields of frozen values: what may stand there, in one plain form.

A rule is a function of a field's name and of what was given for it. It returns what is kept, or raises TypeError for
another kind of value and ValueError for a wrong one of the right kind; the text names the field. ``settle`` applies
rules to a value that is being made. Values that are made by the million look at the exact types first, and need no rule
then.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from enum import StrEnum
from typing import Any

Rule = Callable[[str, Any], Any]

put = object.__setattr__
"""Gives a frozen value a field. Classes of which there are millions have an ``__init__`` of their own by this: it costs
what that of ``dataclasses`` does without a check."""


def settle(made: object, **rules: Rule) -> None:
    """Replace fields of a frozen value by what their rules keep of them. For its ``__post_init__``.

    Raises:
        TypeError, ValueError: a rule refused what was given.
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
    """Keep a whole number of Python's; numpy's and others become one. Truth values are none."""
    if type(value) is int:
        return value
    if not (isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} (value={value!r}, allowed=whole numbers)")


def number(name: str, value: Any) -> float:
    """Keep a number, as one of Python's with a fraction."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} (value={value!r}, allowed=numbers)")
    return float(value)


def at_least(least: int) -> Rule:
    """Make a rule: a whole number that is not too small."""

    def rule(name: str, value: Any) -> int:
        kept = whole(name, value)
        if kept < least:
            raise ValueError(f"{name} (value={kept}, allowed={least} and more)")
        return kept

    return rule


def text(name: str, value: Any) -> str:
    """Keep a text; what is more than that, as a member of an enumeration, becomes one."""
    if not isinstance(value, str):
        raise TypeError(f"{name} (value={value!r}, allowed=text)")
    return value if type(value) is str else str.__str__(value)


def switch(name: str, value: Any) -> bool:
    """Keep True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} (value={value!r}, allowed=True, False)")
    return value


def one_of(kind: type[StrEnum]) -> Rule:
    """Make a rule: a member of an enumeration, also by its text."""
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
    """Make a rule: a value of exactly one of some classes; a subclass may mean something else than what is proved."""

    def rule(name: str, value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"{name} (value={value!r}, allowed={', '.join(kind.__name__ for kind in kinds)})")
        return value

    return rule


def optional(rule: Rule) -> Rule:
    """Make a rule: None, or what another rule keeps."""

    def of_some(name: str, value: Any) -> Any:
        return None if value is None else rule(name, value)

    return of_some


def several(rule: Rule, *plain: type) -> Rule:
    """Make a rule: any number of values in an order, each by a rule, as a tuple.

    Args:
        rule: of each.
        plain: classes whose values it keeps as they are.
    """
    kept_as_they_are = frozenset(plain)

    def of_all(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is tuple and kept_as_they_are.issuperset(map(type, value)):
            return value
        if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
            raise TypeError(f"{name} (value={value!r}, allowed=a tuple)")
        return tuple(rule(f"{name}[{number}]", one) for number, one in enumerate(value))

    return of_all
