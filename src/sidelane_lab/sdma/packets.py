"""Layout of the SDMA packets of gfx942 (MI300X), as one table; the encoder and the disassembler read nothing else.

A packet is a row of 32-bit words, lowest byte first. The table takes it as one number, in which a field begins at bit
``32 * word + bit``. Facts are from public headers, whose commits docs/guide/amd.md names:

- ROCr ``sdma_registers.h``: layouts of copies, swap, fence, poll, atomic and timestamp; a swap's addresses are
  multiples of 64 on gfx94x; the destinations of a broadcast have the same lowest five bits.
- ROCr ``amd_blit_sdma.cpp``, ``amd_gpu_agent.cpp``: counts are bytes less one; 30 bits of count from gfx940 on; 0xfff
  retries poll for ever; timestamps at multiples of 32 bytes; broadcasts of up to 1 MiB.
- Linux ``vega10_sdma_pkt_open.h``, ``sdma_v4_4_2.c``: a fence's address is a multiple of 4.
- Linux ``cikd.h``: the numbers of a poll's comparisons (ROCr and Linux use 3, which is ``==``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from sidelane.sizes import format_bytes

MAX_COPY_BYTES = (1 << 30) - 64
"""Bytes of the largest copy or swap. Linux takes 2**30 for copies, ROCr 2**30 - 1, and 2**30 - 32 for swaps; this is
the largest number under all three that keeps the pieces of a split move aligned."""

MAX_BROADCAST_BYTES = 1 << 20
"""Bytes of the largest broadcast. The field has room for 2**30, but ROCr sent none beyond 1 MiB when it had one limit;
today it prefers copies from 16 KiB on."""

DESTINATIONS_ALIGNMENT = 32
"""Bytes in whose multiples the destinations of a broadcast differ."""

SWAP_ALIGNMENT = 64
"""Bytes of which a swap's addresses are multiples, and here its size too: what becomes of a tail is not published."""

FOREVER = 0xFFF
"""Number of retries with which a poll never gives up."""

EQUAL, AT_LEAST = 3, 5
"""Numbers of the two comparisons that programs use."""

ADD_64 = 47
"""Number of the atomic operation that adds to 64 bits."""

_COMPARISONS = ("always", "<", "<=", "==", "!=", ">=", ">")


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """Bits of a packet.

    Attributes:
        name: name of the field.
        word: index of the word in which it begins.
        bit: lowest bit in that word.
        bits: number of bits; those of an address go on in the next word.
        less: the packet holds the value less this number.
        alignment: number of which the value must be a multiple.
        most: largest value, where that is not what the bits can hold.
    """

    name: str
    word: int
    bit: int = 0
    bits: int = 32
    less: int = 0
    alignment: int = 1
    most: int | None = None

    @property
    def shift(self) -> int:
        return 32 * self.word + self.bit

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest value."""
        room = (1 << self.bits) - 1 + self.less
        return self.less, room if self.most is None else min(self.most, room)


def _address(name: str, word: int, alignment: int = 1) -> Field:
    return Field(name, word, bits=64, alignment=alignment)


def _count(most: int, alignment: int = 1) -> Field:
    return Field("nbytes", 1, bits=30, less=1, alignment=alignment, most=most)


_BROADCAST_BIT, _MEMORY_BIT = 1 << 27, 1 << 31


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """One kind of packet.

    Attributes:
        name: name of the kind.
        words: number of words.
        operation: number in bits 0 to 7.
        suboperation: number in bits 8 to 15.
        fields: fields that a packet fills in, in the order of their text.
        marks: further bits of the first word that are always set.
        telling: bits of the first word that tell it from others of the same operation.
    """

    name: str
    words: int
    operation: int
    suboperation: int = 0
    fields: tuple[Field, ...] = ()
    marks: int = 0
    telling: int = 0

    @property
    def head(self) -> int:
        """First word of a packet whose other fields are 0."""
        return self.operation | self.suboperation << 8 | self.marks

    def matches(self, word: int) -> bool:
        """Return True if a packet of this kind begins with that word."""
        return (word ^ self.head) & (0xFFFF | self.telling) == 0


COPY = Format(
    *("copy", 7, 1),
    fields=(_count(MAX_COPY_BYTES), _address("dst", 5), _address("src", 3)),
    telling=_BROADCAST_BIT,
)
BROADCAST = Format(
    *("broadcast", 9, 1),
    fields=(_count(MAX_BROADCAST_BYTES), _address("dst", 5), _address("dst2", 7), _address("src", 3)),
    marks=_BROADCAST_BIT,
    telling=_BROADCAST_BIT,
)
SWAP = Format(
    *("swap", 7, 1, 9),
    fields=(
        _count(MAX_COPY_BYTES, SWAP_ALIGNMENT),
        _address("a", 3, SWAP_ALIGNMENT),
        _address("b", 5, SWAP_ALIGNMENT),
    ),
)
FENCE = Format("fence", 4, 5, fields=(_address("address", 1, 4), Field("value", 3)))
POLL = Format(
    *("poll", 6, 8),
    fields=(
        _address("address", 1, 4),
        Field("comparison", 0, 28, 3, most=len(_COMPARISONS) - 1),
        Field("value", 3),
        Field("mask", 4),
        Field("interval", 5, 0, 16),
        Field("retries", 5, 16, 12),
    ),
    marks=_MEMORY_BIT,
    telling=_MEMORY_BIT,
)
ATOMIC = Format(
    *("atomic", 8, 10),
    fields=(
        _address("address", 1, 8),
        Field("operation", 0, 25, 7),
        Field("value", 3, bits=64),
        Field("compared", 5, bits=64),
        Field("interval", 7, bits=13),
    ),
)
TIMESTAMP = Format("timestamp", 3, 13, 2, fields=(_address("address", 1, 32),))
FORMATS = (COPY, BROADCAST, SWAP, FENCE, POLL, ATOMIC, TIMESTAMP)

_IN_HEXADECIMAL = frozenset({"address", "dst", "dst2", "src", "a", "b", "mask"})


@dataclasses.dataclass(frozen=True, slots=True)
class Packet:
    """One command of a queue.

    Attributes:
        format: kind of the packet.
        values: value of each field, in the order of ``format.fields``.

    Raises:
        ValueError: a value is out of its limits or not aligned.
    """

    format: Format
    values: tuple[int, ...]

    @classmethod
    def of(cls, format: Format, /, **values: int) -> Packet:
        """Make a packet; fields that are not named are 0."""
        names = {field.name for field in format.fields}
        assert values.keys() <= names, f"{format.name} has {names}"
        return cls(format, tuple(values.get(field.name, 0) for field in format.fields))

    def __post_init__(self) -> None:
        for field, value in zip(self.format.fields, self.values, strict=True):
            least, most = field.limits
            if not least <= value <= most:
                raise ValueError(f"{self.format.name}: {field.name} (value={value}, allowed={least}..{most})")
            if value % field.alignment:
                raise ValueError(
                    f"{self.format.name}: {field.name} (value={value:#x}, allowed=multiples of {field.alignment})"
                )
        if self.format is BROADCAST and (self["dst"] - self["dst2"]) % DESTINATIONS_ALIGNMENT:
            raise ValueError(
                f"broadcast: destinations (value={self['dst']:#x}, {self['dst2']:#x}, allowed=a multiple of "
                f"{DESTINATIONS_ALIGNMENT} bytes apart)"
            )

    def __getitem__(self, name: str) -> int:
        """Return the value of a field."""
        return next(value for field, value in zip(self.format.fields, self.values, strict=True) if field.name == name)

    def to_bytes(self) -> bytes:
        """Return the packet as the engine reads it."""
        number = self.format.head
        for field, value in zip(self.format.fields, self.values, strict=True):
            number |= value - field.less << field.shift
        return number.to_bytes(4 * self.format.words, "little")

    def __str__(self) -> str:
        parts = [self.format.name]
        for field, value in zip(self.format.fields, self.values, strict=True):
            if field.name in _IN_HEXADECIMAL:
                parts.append(f"{field.name}={value:#x}")
            elif field.name == "comparison":
                parts.append(f"until {_COMPARISONS[value]}")
            elif field.name == "nbytes":
                parts.append(format_bytes(value))
            elif value or field.name == "value":
                parts.append(f"{field.name}={value}")
        return " ".join(parts)


def decode(data: bytes) -> tuple[Packet, ...]:
    """Return the packets of a queue's bytes.

    Raises:
        ValueError: bytes that are no packet of this table; the text names their place.
    """
    return tuple(packet for _, packet in _decoded(data))


def disassemble(data: bytes) -> str:
    """Return the text of a queue's bytes: one line a packet, behind its offset.

    >>> fence = Packet.of(FENCE, address=0x7E0100000040, value=3)
    >>> print(disassemble(fence.to_bytes()))
    0x0000  fence address=0x7e0100000040 value=3
    """
    return "\n".join(f"{offset:#06x}  {packet}" for offset, packet in _decoded(data))


def _decoded(data: bytes) -> Iterator[tuple[int, Packet]]:
    offset = 0
    while offset < len(data):
        try:
            packet = _first(data[offset:])
        except ValueError as error:
            raise ValueError(f"decode: packet at byte {offset}: {error}") from None
        yield offset, packet
        offset += len(packet.to_bytes())


def _first(data: bytes) -> Packet:
    head = int.from_bytes(data[:4], "little")
    format = next((format for format in FORMATS if format.matches(head)), None)
    if format is None:
        raise ValueError(f"first word (value={head:#010x}, allowed={', '.join(format.name for format in FORMATS)})")
    size = 4 * format.words
    if len(data) < size:
        raise ValueError(f"{format.name}: bytes (value={len(data)}, allowed={size})")
    number = int.from_bytes(data[:size], "little")
    values = {field.name: (number >> field.shift & (1 << field.bits) - 1) + field.less for field in format.fields}
    packet = Packet.of(format, **values)
    if packet.to_bytes() != data[:size]:
        raise ValueError(f"{format.name}: reserved bits are set (value={data[:size].hex()})")
    return packet
