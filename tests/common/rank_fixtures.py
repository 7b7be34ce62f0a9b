from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Crew, RankPool

from interpreter import Interpreter


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks that all tests share."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Crew]:
    """Processes that interpret kernels; this one does not, nor does anybody whom it starts later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        found = Crew(4)
    yield found
    found.close()


@pytest.fixture(scope="session")
def shared_interpreter() -> Iterator[list[Interpreter]]:
    """The interpreter of :func:`interpreter`, if one has been started."""
    started: list[Interpreter] = []
    yield started
    for each in started:
        each.close()


@pytest.fixture
def interpreter(shared_interpreter: list[Interpreter]) -> Interpreter:
    """An interpreter whose copies are programs; another one after a test whose programs had to be killed."""
    if not shared_interpreter or shared_interpreter[0].closed:
        shared_interpreter[:] = [Interpreter()]
    return shared_interpreter[0]
