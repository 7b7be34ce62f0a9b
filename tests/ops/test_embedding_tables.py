"""Lists of tables that an operator has looked at before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sidelane.ops import embedding_tables
from sidelane.ops.embedding_tables import MOST_CHECKED, checked


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tables were looked at, each time that any were."""
    found: list[int] = []
    check = embedding_tables._check_tables

    def counting(comm: object, tables: list[torch.Tensor]) -> None:
        found.append(len(tables))
        check(comm, tables)

    monkeypatch.setattr(embedding_tables, "_check_tables", counting)
    return found


def communicator() -> SimpleNamespace:
    return SimpleNamespace(device=torch.device("cpu"), kept={})


def tables_of(count: int) -> list[torch.Tensor]:
    return [torch.zeros(10 + number, 8) for number in range(count)]


def test_the_same_tables_are_looked_at_once(looks: list[int]) -> None:
    comm, tables = communicator(), tables_of(3)
    first = checked(comm, tables)
    assert checked(comm, list(tables)) is first and checked(comm, tuple(tables)) is first
    assert looks == [3]


def other_memory(tables: list[torch.Tensor]) -> None:
    tables[1].data = torch.zeros(11, 8)


def other_shape(tables: list[torch.Tensor]) -> None:
    tables[1].data = tables[1].view(22, 4)


def smaller(tables: list[torch.Tensor]) -> None:
    tables[2].resize_(5, 8)


def another_one(tables: list[torch.Tensor]) -> None:
    tables[2] = torch.zeros(12, 8)


def one_more(tables: list[torch.Tensor]) -> None:
    tables.append(torch.zeros(2, 8))


def one_less(tables: list[torch.Tensor]) -> None:
    tables.pop()


@pytest.mark.parametrize("change", [other_memory, smaller, another_one, one_more, one_less])
def test_what_has_changed_is_looked_at_again(change, looks: list[int]) -> None:
    comm, tables = communicator(), tables_of(3)
    before = checked(comm, tables)
    change(tables)
    after = checked(comm, tables)
    assert looks == [3, len(tables)] and after.key != before.key
    assert after.key == checked(communicator(), tables).key


def test_what_is_wrong_now_is_refused_though_it_was_right(looks: list[int]) -> None:
    comm, tables = communicator(), tables_of(3)
    checked(comm, tables)
    other_shape(tables)
    with pytest.raises(ValueError, match=r"table 1 \(value=4, .* allowed=8"):
        checked(comm, tables)
    with pytest.raises(TypeError, match="value=list"):
        checked(comm, [])


def test_lists_that_change_with_every_call_do_not_pile_up() -> None:
    comm = communicator()
    for _ in range(MOST_CHECKED + 5):
        checked(comm, tables_of(1))
    assert len(comm.kept[checked]) <= MOST_CHECKED
