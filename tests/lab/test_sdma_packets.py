"""SDMA packets: their words as the public headers lay them out, their limits, and both ways between bytes and text."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdma_emulator import Engine, Memory, MemoryFaultError, PacketError, PollTimeoutError, run_together

from sidelane_lab.sdma import Packet, decode, disassemble
from sidelane_lab.sdma import packets as layout

A, B, C = 0x1122334455667780, 0x0000A0B0C0D0E000, 0x00000102030405C0
LO, HI = 0x55667780, 0x11223344

# By hand from the headers: field by field, word by word.
WORDS = {
    (layout.COPY, "nbytes=4096", f"src={A}", f"dst={B}"): [1, 4095, 0, LO, HI, 0xC0D0E000, 0xA0B0],
    (layout.BROADCAST, "nbytes=1048576", f"src={A}", f"dst={B}", f"dst2={C}"): [
        *(0x08000001, 0xFFFFF, 0, LO, HI, 0xC0D0E000, 0xA0B0, 0x030405C0, 0x0102),
    ],
    (layout.SWAP, "nbytes=128", f"a={A}", f"b={B}"): [0x901, 127, 0, LO, HI, 0xC0D0E000, 0xA0B0],
    (layout.FENCE, f"address={A}", "value=7"): [5, LO, HI, 7],
    (layout.POLL, f"address={A}", "comparison=5", "value=7", "mask=4294967295", "interval=4", "retries=4095"): [
        *(0xD0000008, LO, HI, 7, 0xFFFFFFFF, 0x0FFF0004),
    ],
    (layout.ATOMIC, f"address={A}", "operation=47", f"value={2**33 + 1}"): [0x5E00000A, LO, HI, 1, 2, 0, 0, 0],
    (layout.TIMESTAMP, f"address={A}"): [0x20D, LO, HI],
}


def packet(format: layout.Format, *values: str) -> Packet:
    return Packet.of(format, **{name: int(value) for name, value in (text.split("=") for text in values)})


@pytest.mark.parametrize(("made", "words"), WORDS.items(), ids=[key[0].name for key in WORDS])
def test_words_are_those_of_the_headers(made: tuple[layout.Format, str], words: list[int]) -> None:
    assert packet(*made).to_bytes() == struct.pack(f"<{len(words)}I", *words)


@st.composite
def packets(draw: st.DrawFn) -> Packet:
    format = draw(st.sampled_from(layout.FORMATS))
    values = {}
    for field in format.fields:
        least, most = field.limits
        unit = field.alignment
        values[field.name] = unit * draw(st.integers(-(-least // unit), most // unit))
    if format is layout.BROADCAST:
        values["dst2"] = values["dst2"] // 32 * 32 + values["dst"] % 32
    return Packet.of(format, **values)


@given(st.lists(packets(), max_size=6))
@settings(deadline=None)
def test_bytes_and_packets_are_the_same(queue: list[Packet]) -> None:
    data = b"".join(found.to_bytes() for found in queue)
    assert list(decode(data)) == queue
    lines = disassemble(data).splitlines()
    assert [line.split()[1] for line in lines] == [found.format.name for found in queue]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ((layout.COPY, "nbytes=0"), r"nbytes \(value=0, allowed=1..1073741760\)"),
        ((layout.COPY, f"nbytes={2**30}"), "allowed=1..1073741760"),
        ((layout.BROADCAST, f"nbytes={2**20 + 1}"), "allowed=1..1048576"),
        ((layout.BROADCAST, "nbytes=8", "dst=64", "dst2=72"), "a multiple of 32 bytes apart"),
        ((layout.SWAP, "nbytes=64", "a=64", "b=32"), "b .value=0x20, allowed=multiples of 64"),
        ((layout.SWAP, "nbytes=100"), "nbytes .* allowed=multiples of 64"),
        ((layout.FENCE, "address=2"), "multiples of 4"),
        ((layout.FENCE, "value=4294967296"), "value"),
        ((layout.ATOMIC, "address=4"), "multiples of 8"),
        ((layout.TIMESTAMP, "address=16"), "multiples of 32"),
        ((layout.POLL, "comparison=7"), "comparison"),
        ((layout.COPY, "nbytes=1", f"src={2**64}"), "src"),
    ],
)
def test_limits(made: tuple[layout.Format, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        packet(*made)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([3], "packet at byte 0: first word"),
        ([0x50000008, 0, 0, 0, 0, 0], "first word"),  # a poll of a register
        ([5, 0, 0], "fence: bytes .value=12, allowed=16"),
        ([0x20D, 0, 0, 0x10005, 0, 0, 0], "packet at byte 12: fence: reserved bits"),
        ([0x901, 127, 0, 32, 0, 0, 0], "swap: a"),
    ],
)
def test_bytes_that_are_no_packet(words: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode(struct.pack(f"<{len(words)}I", *words))


# The emulator, which has a decoder of its own.

BASE, SIZE = 0x7E0000000000, 4096


def run(words: list[int]) -> np.ndarray:
    """Execute a queue on 4 KiB of random bytes."""
    memory = Memory()
    memory.map(BASE, np.random.default_rng(1).integers(0, 256, SIZE, np.uint8))
    engine = Engine("engine", struct.pack(f"<{len(words)}I", *words), memory, random.Random(3))
    run_together([engine], random.Random(4))
    return memory.at(BASE, SIZE)


def at(offset: int) -> tuple[int, int]:
    return (BASE + offset) & 0xFFFFFFFF, (BASE + offset) >> 32


def test_what_each_packet_does() -> None:
    before = run([]).copy()
    found = run(
        [
            *(1, 99, 0, *at(0), *at(1001)),
            *(0x08000001, 9, 0, *at(0), *at(2000), *at(2032)),
            *(0x901, 63, 0, *at(512), *at(640)),
            *(5, *at(0x900), 0xABCD),
            *(10 | 47 << 25, *at(0x908), 1, 0, 0, 0, 0),
            *(0x30000008 | 1 << 31, *at(0x900), 0xABCD, 0xFFFFFFFF, 0xFFF0004),
            *(0x20D, *at(0x920)),
            *(2 << 16, 99, 99),
        ]
    )
    wanted = before.copy()
    wanted[1001:1101] = before[:100]
    wanted[2000:2010] = wanted[2032:2042] = before[:10]
    wanted[512:576], wanted[640:704] = before[640:704], before[512:576]
    wanted[0x900:0x904] = [0xCD, 0xAB, 0, 0]
    wanted[0x908:0x910].view(np.uint64)[0] += 1
    assert found[0x920:0x928].view(np.uint64)[0] > 0
    wanted[0x920:0x928] = found[0x920:0x928]
    assert (found == wanted).all()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([3], "unknown operation 3/0"),
        ([0x101, 0, 0, *at(0), *at(64)], "unknown operation 1/1"),
        ([1, 0, 0, *at(0), *at(64)[:1]], "ends inside a packet"),
        ([1 | 1 << 18, 0, 0, *at(0), *at(64)], "reserved bits of a copy"),
        ([1, 0, 1 << 16, *at(0), *at(64)], "parameters of a copy"),
        ([1, 0x3FFFFFFF, 0, *at(0), *at(64)], "1073741824 bytes in one command"),
        ([1, 1 << 30, 0, *at(0), *at(64)], "reserved bits of a count"),
        ([1, 99, 0, *at(0), *at(64)], "overlap"),
        ([0x08000001, 1 << 20, 0, *at(0), *at(64), *at(128)], "1048577 bytes in one command"),
        ([0x08000001, 7, 0, *at(0), *at(64), *at(136)], "lie differently"),
        ([0x901, 63, 0, *at(0), *at(96)], "not aligned to 64"),
        ([0x901, 31, 0, *at(0), *at(128)], "not aligned to 64"),
        ([0x901, 127, 0, *at(0), *at(64)], "overlap"),
        ([5, *at(2), 0], "not aligned to 4"),
        ([10 | 15 << 25, *at(0), 1, 0, 0, 0, 0], "add to 64 bits"),
        ([10 | 47 << 25, *at(4), 1, 0, 0, 0, 0], "not aligned to 8"),
        ([0x20D, *at(16)], "not aligned to 32"),
        ([0x30000008, *at(0), 0, 0, 0xFFF0004], "a poll of a register"),
        ([0x90000008, *at(0), 0, 0, 0xFFF0004], "comparison 1"),
        ([0xB0000008, *at(0), 0, 0, 0x0010004], "gives up"),
        ([0xD0000008, *at(0), 1 << 31, 0, 0xFFF0004], "sign"),
    ],
)
def test_the_emulator_refuses(words: list[int], text: str) -> None:
    with pytest.raises(PacketError, match=text):
        run(words)


@pytest.mark.parametrize(
    "words", [[1, 99, 0, *at(0), *at(SIZE - 99)], [1, 99, 0, *at(SIZE - 99), *at(0)], [5, *at(SIZE), 0], [5, 0, 0, 0]]
)
def test_memory_ends(words: list[int]) -> None:
    with pytest.raises(MemoryFaultError, match="not mapped"):
        run(words)


def test_a_poll_that_nobody_satisfies_is_named() -> None:
    with pytest.raises(PollTimeoutError, match="engine at word 4 polls 0x7e0000000000 for 8, which holds 7"):
        run([5, *at(0), 7, 0xB0000008, *at(0), 8, 0xFFFFFFFF, 0xFFF0004])
