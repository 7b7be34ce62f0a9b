"""Chakra execution traces of MLCommons (``et_def.proto``): a file for each rank, read and written without protobuf.

A file is messages, each behind its length as a varint: metadata of the whole, and then nodes. It may be gzipped.

    message    fields                                                      of which are read
    metadata   version 1, attributes 2                                     none
    node       id 1, name 2, type 3, control dependencies 4, data          1 to 3, 5 to 7, 10
               dependencies 5, start 6 and duration 7 in microseconds,
               inputs 8, outputs 9, attributes 10
    attribute  name 1, description 2, one value 3 to 32 by its type        scalars: the odd numbers

Data dependencies order nodes, as in Chakra's own feeder. Control dependencies do not: they name callers, some of which
Chakra's converter for PyTorch leaves out of the file, and some of which wait for what they call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from sidelane_lab.traces.graph import NodeKind, TraceGraph, TraceNode, content_of

Value = int | float | str | bytes

TYPES = {
    1: NodeKind.MARK,
    2: NodeKind.MEMORY,
    3: NodeKind.MEMORY,
    4: NodeKind.COMPUTE,
    5: NodeKind.SEND,
    6: NodeKind.RECEIVE,
    7: NodeKind.COLLECTIVE,
}
"""Kinds by the schema's ``NodeType``. 0 is invalid."""
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_block",
    "barrier",
)
"""Names of collectives in the order of the schema's ``CollectiveCommType``."""
VERSION = "0.0.4"
"""Version that written files have."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""
UNPACKED = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}
"""Formats of attributes' values that have a fixed size, by field."""
WRITTEN = ((bool, 27), (int, 9), (float, 3), (str, 29))
"""Fields of attributes' values that are written, by the first type that fits."""


def read_chakra(path: Path) -> TraceGraph:
    """Read a trace of one rank.

    Raises:
        OSError: the file can not be read.
        ValueError: the file is cut or no Chakra trace, or its graph is not one that can run; the message names the
            node.
    """
    content = content_of(path)
    nodes: list[TraceNode] = []
    last = "the metadata"
    place = 0
    for number, (begin, end) in enumerate(_messages(content)):
        place = begin
        try:
            if end > len(content):
                raise _CutError
            if number:
                nodes.append(_node(content[begin:end]))
                last = str(nodes[-1])
            else:
                list(_fields(content[begin:end]))
        except (_CutError, UnicodeDecodeError, struct.error) as problem:
            text = f"(value=a message that is cut or damaged at byte {place} of {len(content)}, behind {last})"
            raise ValueError(f"replay: {path} must be a whole Chakra trace {text}") from problem
        except ValueError as problem:
            raise ValueError(f"replay: {path}: {problem}") from problem
    return TraceGraph(str(path), tuple(nodes))


def write_chakra(path: Path, nodes: Iterable[TraceNode]) -> Path:
    """Write a trace of one rank.

    The schema has whole microseconds and no sizes of groups. Two attributes of ours have them, which other readers pass
    over: ``duration_us`` with fractions, and ``comm_ranks``.
    """
    metadata = _field(1, VERSION) + _field(2, _attribute("schema", "1.0.2-chakra.0.0.4"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(_encoded(len(one)) + one for one in (metadata, *map(_written, nodes))))
    return path


class _CutError(Exception):
    """A message ends before its fields do."""


def _messages(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each message; the last end may lie behind the end of the file."""
    place = 0
    while place < len(content):
        try:
            size, begin = _varint(content, place)
        except _CutError:
            size, begin = 1, len(content)
        place = begin + size
        yield begin, place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number and the place behind it."""
    value = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise _CutError


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number of each field, and its value: a varint as a number, everything else as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        wire = key & 7
        if wire == VARINT:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if wire == LENGTH:
            size, place = _varint(data, place)
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
        else:
            raise _CutError
        if place + size > len(data):
            raise _CutError
        yield key >> 3, data[place : place + size]
        place += size


def _numbers(value: int | bytes) -> list[int]:
    """Return the members of a repeated field, packed or not."""
    if isinstance(value, int):
        return [value]
    found, place = [], 0
    while place < len(value):
        number, place = _varint(value, place)
        found.append(number)
    return found


def _node(data: bytes) -> TraceNode:
    ident = kind = start = duration = 0
    name = ""
    after: list[int] = []
    attributes: dict[str, Value] = {}
    for field, value in _fields(data):
        if field == 5:
            after += _numbers(value)
        elif isinstance(value, bytes):
            if field == 2:
                name = value.decode()
            elif field == 10:
                attributes |= _attribute_of(value)
        elif field == 1:
            ident = value
        elif field == 3:
            kind = value
        elif field == 6:
            start = value
        elif field == 7:
            duration = value
    where = f"node {ident} {name!r}"
    if kind not in TYPES:
        raise ValueError(f"{where} needs a type (value={kind}, allowed={min(TYPES)}..{max(TYPES)})")
    collective = ""
    if TYPES[kind] is NodeKind.COLLECTIVE and "comm_type" in attributes:
        collective = _collective(where, attributes["comm_type"])
    lane = attributes.get("stream", attributes.get("tid", ""))
    return TraceNode(
        ident,
        name,
        TYPES[kind],
        tuple(dict.fromkeys(after)),
        _number(where, attributes, "duration_us") or float(duration),
        float(start),
        bool(attributes.get("is_cpu_op", False)),
        str(lane),
        collective,
        int(_number(where, attributes, "comm_size") or _number(where, attributes, "tensor_size")),
        int(_number(where, attributes, "num_ops")),
        int(_number(where, attributes, "comm_ranks")),
    )


def _collective(where: str, value: Value) -> str:
    if not isinstance(value, int) or not 0 <= value < len(COLLECTIVES):
        raise ValueError(f"{where} needs a known comm_type (value={value!r}, allowed=0..{len(COLLECTIVES) - 1})")
    return COLLECTIVES[value]


def _number(where: str, attributes: dict[str, Value], name: str) -> float:
    value = attributes.get(name, 0)
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{where} needs a number as {name} (value={value!r}, allowed=0 or more)")
    return value


def _attribute_of(data: bytes) -> dict[str, Value]:
    """Return an attribute's name and value; nothing where the value is a list."""
    name = ""
    found: Value | None = None
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            name = value.decode()
        elif isinstance(value, int):
            found = _signed(field, value)
        elif field in UNPACKED:
            found = struct.unpack(UNPACKED[field], value)[0]
        elif field in (29, 31):
            found = value.decode() if field == 29 else value
    return {} if found is None else {name: found}


def _signed(field: int, value: int) -> int:
    if field in (15, 17):  # zigzag
        return (value >> 1) ^ -(value & 1)
    if field in (7, 9) and value >= 1 << 63:
        return value - (1 << 64)
    return value


def _written(node: TraceNode) -> bytes:
    kinds = {kind: number for number, kind in TYPES.items()}
    attributes: dict[str, Value] = {"is_cpu_op": node.on_host, "duration_us": node.duration_us}
    if node.collective:
        attributes["comm_type"] = COLLECTIVES.index(node.collective)
    if node.nbytes:
        attributes["comm_size" if node.kind is NodeKind.COLLECTIVE else "tensor_size"] = node.nbytes
    if node.ranks:
        attributes["comm_ranks"] = node.ranks
    if node.flops:
        attributes["num_ops"] = node.flops
    if node.lane:
        attributes["stream"] = node.lane
    parts = [_field(1, node.ident), _field(2, node.name), _field(3, kinds[node.kind])]
    if node.after:
        parts.append(_field(5, b"".join(map(_encoded, node.after))))
    parts += [_field(6, round(node.start_us)), _field(7, round(node.duration_us))]
    parts += [_field(10, _attribute(name, value)) for name, value in attributes.items()]
    return b"".join(parts)


def _attribute(name: str, value: Value) -> bytes:
    number = next(number for kind, number in WRITTEN if isinstance(value, kind))
    return _field(1, name) + _field(number, value)


def _field(number: int, value: Value) -> bytes:
    if isinstance(value, float):
        return _encoded(number << 3 | FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return _encoded(number << 3 | VARINT) + _encoded(value)
    data = value.encode() if isinstance(value, str) else value
    return _encoded(number << 3 | LENGTH) + _encoded(len(data)) + data


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
