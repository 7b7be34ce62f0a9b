"""Counts of the house that may only fall; ``tools/house.py`` makes them. Lower a bound here whenever a count falls."""

from __future__ import annotations

import ast
import importlib
import sys
from types import ModuleType

import pytest

MOST_COMPLEX = 25
AMBIGUOUS = 0
BANNED = 0


@pytest.fixture(scope="module")
def house() -> ModuleType:
    sys.path.insert(0, "tools")
    try:
        return importlib.import_module("house")
    finally:
        sys.path.remove("tools")


def test_decisions_are_counted(house: ModuleType) -> None:
    text = "def f(x):\n if x and x > 1:\n  return [y for y in x if y]\n for z in x:\n  def g(): return 1 if z else 0\n"
    function = ast.parse(text).body[0]
    assert house.complexity(function) == 1 + 2 + 2 + 1


def test_no_function_becomes_more_complex(house: ModuleType) -> None:
    found = house.functions(house.LIBRARY)
    assert found[0][0] <= MOST_COMPLEX, found[0]


def test_no_class_name_gets_another_meaning(house: ModuleType) -> None:
    assert len(house.ambiguous_classes(house.LIBRARY, house.LABORATORY)) <= AMBIGUOUS


def test_docstrings_become_sentences(house: ModuleType) -> None:
    found = [*house.banned_docstrings(house.LIBRARY), *house.banned_docstrings(house.LABORATORY)]
    assert len(found) <= BANNED, "a docstring begins with a verb, a noun or an article"


def test_the_page_is_of_this_house(house: ModuleType) -> None:
    page = house.PAGE.read_text(encoding="utf-8")
    assert page.startswith(house.head() + "\n")
