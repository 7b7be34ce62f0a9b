"""Chakra traces, from bytes that an encoder of this file writes by the published schema."""

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sidelane_lab.traces.chakra import read_chakra, write_chakra
from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode

COMPUTE, SEND, COLLECTIVE = 4, 5, 7
ALL_GATHER = 2


def varint(value: int) -> bytes:
    low, rest = value % 128, value // 128
    return bytes([low]) if not rest else bytes([low + 128]) + varint(rest)


def field(number: int, value: int | bytes | float | str) -> bytes:
    match value:
        case float():
            return varint(number * 8 + 1) + struct.pack("<d", value)
        case int():
            return varint(number * 8) + varint(value % 2**64)
        case str():
            return field(number, value.encode())
        case _:
            return varint(number * 8 + 2) + varint(len(value)) + value


def attribute(name: str, number: int, value: Any) -> bytes:
    return field(10, field(1, name) + field(number, value))


def node(ident: int, name: str, kind: int, after: Sequence[int] = (), us: int = 0, more: bytes = b"") -> bytes:
    depends = b"".join(field(5, one) for one in after)  # not packed
    return field(1, ident) + field(2, name) + field(3, kind) + depends + field(7, us) + more


def whole(*nodes: bytes) -> bytes:
    return b"".join(varint(len(one)) + one for one in (field(1, "0.0.4"), *nodes))


def collective(ident: int, name: str, kind: int, nbytes: int, after: Sequence[int] = (), us: int = 0) -> bytes:
    more = attribute("comm_type", 9, kind) + attribute("comm_size", 9, nbytes) + attribute("is_cpu_op", 27, 0)
    return node(ident, name, COLLECTIVE, after, us, more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank.0.et"


def test_nodes_are_read(path: Path) -> None:
    packed = field(5, varint(7) + varint(300))
    more = attribute("is_cpu_op", 27, 1) + attribute("tid", 7, 3) + attribute("num_ops", 13, 10**12)
    lists = attribute("involved_dim", 28, field(1, b"\1\0")) + attribute("x", 3, 1.5) + attribute("y", 15, 5)
    inputs = field(8, field(1, "[1]"))
    content = whole(
        node(300, "gemm", COMPUTE, us=12, more=field(6, 1_000)),
        collective(7, "gather", ALL_GATHER, 1 << 20, after=[300]),
        node(8, "loss", COMPUTE, us=5, more=packed + more + lists + inputs),
    )
    for data in (content, gzip.compress(content)):
        path.write_bytes(data)
        assert read_chakra(path).nodes == (
            TraceNode(300, "gemm", NodeKind.COMPUTE, (), 12.0, 1000.0),
            TraceNode(7, "gather", NodeKind.COLLECTIVE, (300,), collective="all_gather", nbytes=1 << 20),
            TraceNode(8, "loss", NodeKind.COMPUTE, (7, 300), 5.0, on_host=True, lane="3", flops=10**12),
        )


def test_control_dependencies_name_callers_that_may_be_missing(path: Path) -> None:
    path.write_bytes(whole(node(1, "called", COMPUTE, us=1, more=field(4, 99))))
    assert read_chakra(path).nodes[0].after == ()


def test_nodes_come_in_an_order_in_which_they_can_run(path: Path) -> None:
    path.write_bytes(whole(node(1, "last", COMPUTE, [3]), node(2, "first", COMPUTE), node(3, "middle", COMPUTE, [2])))
    assert [one.name for one in read_chakra(path).nodes] == ["first", "middle", "last"]


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([], "needs nodes"),
        ([node(1, "a", COMPUTE), node(1, "b", COMPUTE)], "node 1 'a', node 1 'b'"),
        ([node(1, "a", COMPUTE, [5])], "node 1 'a' waits for a missing node .value=5"),
        ([node(1, "a", COMPUTE, [3]), node(2, "b", COMPUTE, [1]), node(3, "c", COMPUTE, [2])], "'a' -> node 3 'c'"),
        ([node(1, "self", COMPUTE, [1])], "node 1 'self' -> node 1 'self'"),
        ([node(4, "odd", 9)], "node 4 'odd' needs a type .value=9"),
        ([collective(4, "odd", 77, 1)], "node 4 'odd' needs a known comm_type .value=77"),
        ([collective(4, "less", ALL_GATHER, -1)], "node 4 'less' needs a number as comm_size .value=-1"),
        ([node(4, "x", COMPUTE, more=attribute("num_ops", 29, "many"))], "node 4 'x' needs a number as num_ops"),
    ],
)
def test_graphs_that_can_not_run_are_refused_by_name(path: Path, nodes: list[bytes], problem: str) -> None:
    path.write_bytes(whole(*nodes))
    with pytest.raises(ValueError, match=problem):
        read_chakra(path)


def test_files_that_are_cut_are_refused_wherever_they_end(path: Path) -> None:
    parts = [whole(node(1, "a", COMPUTE, us=3)), whole(node(1, "a", COMPUTE, us=3), collective(2, "b", 0, 99, [1]))]
    boundary = len(parts[0])
    for end in range(1, len(parts[1])):
        path.write_bytes(parts[1][:end])
        if end == boundary:
            assert len(read_chakra(path).nodes) == 1  # nothing tells this from a whole file
            continue
        with pytest.raises(ValueError, match="behind node 1 'a'" if end > boundary else "rank.0.et"):
            read_chakra(path)
    path.write_bytes(gzip.compress(parts[1])[:-9])
    with pytest.raises(ValueError, match="whole gzip file"):
        read_chakra(path)


@pytest.mark.parametrize("content", [b"\xff" * 40, b"\x03\xff\xff\xff", b"\x02\x0b\x00", bytes(range(256)) * 3])
def test_other_files_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match="rank.0.et"):
        read_chakra(path)


def test_what_is_written_is_read(path: Path) -> None:
    nodes = (
        TraceNode(1, "gemm", NodeKind.COMPUTE, (), 12.25, 0.0, lane="7", nbytes=1 << 33, flops=1 << 40),
        TraceNode(2, "gather", NodeKind.COLLECTIVE, (1,), 3.5, 12.0, collective="all_gather", nbytes=300, ranks=8),
        TraceNode(1 << 40, "launch", NodeKind.COMPUTE, (1, 2), 0.5, 16.0, on_host=True),
        TraceNode(3, "process group", NodeKind.MARK, start_us=17.0),
    )
    assert read_chakra(write_chakra(path, nodes)) == TraceGraph(str(path), nodes)
