"""Lists of tables that an operator has looked at before, and the order in which their bags leave."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from sidelane.choice.fused import ORDERS
from sidelane.ops import embedding_tables
from sidelane.ops.embedding import choose_order
from sidelane.ops.embedding_tables import MOST_CHECKED, checked
from sidelane_lab.harness.study import read
from sidelane_lab.studies.fused.rows import FusedRow

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tables were looked at, each time that any were."""
    found: list[int] = []
    check = embedding_tables.check_tables

    def counting(comm: object, tables: list[torch.Tensor]) -> None:
        found.append(len(tables))
        check(comm, tables)

    monkeypatch.setattr(embedding_tables, "check_tables", counting)
    return found


def communicator() -> SimpleNamespace:
    return SimpleNamespace(device=torch.device("cpu"), cache={})


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
    assert len(comm.cache[checked]) <= MOST_CHECKED


@pytest.mark.parametrize("machine", ["h100x2", "h200x2"])
def test_orders_by_the_rule_are_the_measured_ones(machine: str) -> None:
    """Where one is faster by 2% and more; in graphs, as eager calls are the host's."""
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in read(RESULTS / machine / "fused.json").rows:
        assert isinstance(row, FusedRow)
        chosen = (row.op, row.implementation, row.launch) == (embedding_tables.NAME, "fused", "graph")
        if chosen and row.schedule in ORDERS and row.time_us is not None:
            times.setdefault(tuple(map(int, re.findall(r"\d+", row.shape)[:3])), {})[row.schedule] = row.time_us
    assert len(times) == 7
    for sizes, by_order in times.items():
        assert by_order[choose_order(2, sizes).candidate] <= 1.02 * min(by_order.values()), (sizes, by_order)


def test_orders_among_many_ranks() -> None:
    assert choose_order(8, (64, 64, 79)).candidate == ORDERS[0]  # seven senders for one link
    assert choose_order(1, (64, 64, 1)).candidate == ORDERS[1]
