"""Records: a reader gets a whole one or none, whatever the writer does meanwhile."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from on_ranks import everyones, on_ranks

from sidelane.memory import record as records
from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import SharedBytes
from sidelane.memory.record import Record

HEADER = Record.HEADER_BYTES
PAYLOADS = [bytes([number]) * (number * 37 % 2000) for number in range(251)]


def fresh(payload_bytes: int = 100) -> tuple[bytearray, Record]:
    memory = bytearray(Record.HEADER_BYTES + payload_bytes)
    return memory, Record(memoryview(memory))


def test_blank_then_written_then_replaced() -> None:
    _, record = fresh()
    assert record.is_blank
    assert record.read() is None
    record.write(7, 1, b"hello")
    assert not record.is_blank
    assert record.number == 7
    assert record.read() == (7, 1, b"hello")
    record.write(2**63, 0, b"")
    assert record.read() == (2**63, 0, b"")
    record.write(8, 2, bytes(range(100)))
    assert record.read() == (8, 2, bytes(range(100)))


def test_a_payload_that_does_not_fit_is_refused() -> None:
    _, record = fresh(10)
    with pytest.raises(ValueError, match=r"payload bytes \(value=11, allowed=..10\)"):
        record.write(1, 0, bytes(11))
    assert record.is_blank


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("position", [8, 15, 16, 19, 20, 23, 24, 31, 32, 36])
def test_every_changed_byte_is_noticed(position: int, again: bool) -> None:
    memory, record = fresh()
    payload = b"hello"
    record.write(7, 1, payload)
    if again:
        record.write(8, 1, payload)
    memory[position] ^= 1
    assert record.read() is None


def test_ctrl_c_within_a_fence_harms_no_later_one() -> None:
    _, record = fresh()
    record.write(1, 0, b"hello")
    lock = records._own.lock
    lock.acquire(False)
    lock.release()  # as if it had come between release and acquire
    record.write(2, 0, b"world")
    assert record.read() == (2, 0, b"world")


def test_a_writer_that_died_at_work_leaves_no_record_and_its_successor_does() -> None:
    memory, record = fresh()
    record.write(7, 1, b"hello")
    memory[0] += 1  # the writer has announced a change and was killed
    assert record.read() is None
    record.write(8, 1, b"hallo")
    assert record.read() == (8, 1, b"hallo")


def test_a_write_of_another_number_stores_two_words() -> None:
    memory, record = fresh()
    payload = b"hello"
    record.write(7, 1, payload)
    before = bytes(memory)
    record.write(2**40 + 1, 1, payload)
    assert record.read() == (2**40 + 1, 1, payload)
    changed = {i // 8 for i in range(len(memory)) if memory[i] != before[i]}
    assert changed == {1, 3}
    memory[8:16] = before[8:16]  # as a reader may see it that comes in between
    assert record.read() is None
    record.write(9, 0, payload)
    assert record.read() == (9, 0, payload), "another status"
    record.write(10, 0, b"hallo")
    record.write(11, 0, payload)
    assert record.read() == (11, 0, payload)


def test_a_write_that_was_interrupted_is_written_whole_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, record = fresh()
    payload = b"hello"
    record.write(7, 1, payload)
    with monkeypatch.context() as patch:
        patch.setattr("sidelane.memory.record.zlib.crc32", interrupt)
        with pytest.raises(KeyboardInterrupt):
            record.write(8, 1, b"other")
    memory[HEADER:] = bytes(len(memory) - HEADER)
    record.write(9, 1, payload)
    assert record.read() == (9, 1, payload)


def interrupt(*arguments: object) -> int:
    raise KeyboardInterrupt


@on_ranks(3)
def test_no_torn_reads_between_processes(group: dist.ProcessGroup) -> None:
    """Rank 0 writes as fast as it can, each payload a few times; the others read. All must belong together."""
    shared = SharedBytes(Exchange(group, 60.0), 2048)
    record = Record(shared.view(0))
    rank, count, last = dist.get_rank(group), 0, 0
    dist.barrier(group)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        count += 1
        if rank == 0:
            record.write(count, count // 9 % 5, PAYLOADS[count // 3 % len(PAYLOADS)])
        elif (got := record.read()) is not None:
            number, status, payload = got
            assert number >= last, "records came out of order"
            assert status == number // 9 % 5
            assert payload == PAYLOADS[number // 3 % len(PAYLOADS)], "torn"
            last = number
    written, *read = everyones(group, last if rank else count)
    assert written > 100 and all(1 <= last <= written for last in read)
