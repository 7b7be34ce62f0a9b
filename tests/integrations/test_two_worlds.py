"""Groups that join processes of several worlds: ranks go by the group, never by the default group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import two_worlds
from ranks import Crew, crew


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(two_worlds.RANKS) as made:
        made.run(two_worlds.leave)
        yield made


@pytest.mark.parametrize("worlds", two_worlds.WORLDS)
@pytest.mark.parametrize(("wrapped", "is_listed"), [(False, True), (False, False), (True, True), (True, False)])
def test_calls_of_groups(ranks: Crew, tmp_path: Path, worlds: str, wrapped: bool, is_listed: bool) -> None:
    ranks.run(two_worlds.calls_of_groups, None, str(tmp_path), worlds, wrapped, is_listed)


@pytest.mark.parametrize("worlds", two_worlds.WORLDS)
def test_calls_of_communicators(ranks: Crew, tmp_path: Path, worlds: str) -> None:
    names = ranks.run(two_worlds.calls_of_communicators, None, str(tmp_path), worlds)
    assert len(set(names)) == 1, names


@pytest.mark.parametrize("worlds", two_worlds.WORLDS)
def test_parts(ranks: Crew, tmp_path: Path, worlds: str) -> None:
    ranks.run(two_worlds.parts, None, str(tmp_path), worlds)
