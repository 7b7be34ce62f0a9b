"""Records: a reader gets a whole one or none, whatever the writer does meanwhile."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from ranks import RankPool

from sidelane.memory.host_shared import SharedBytes
from sidelane.memory.record import Record


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


@pytest.mark.parametrize("position", [8, 16, 24, 28, 32, 36])
def test_every_changed_byte_is_noticed(position: int) -> None:
    memory, record = fresh()
    record.write(7, 1, b"hello")
    memory[position] ^= 1
    assert record.read() is None


def test_a_writer_that_died_at_work_leaves_no_record_and_its_successor_does() -> None:
    memory, record = fresh()
    record.write(7, 1, b"hello")
    memory[0] += 1  # the writer has announced a change and was killed
    assert record.read() is None
    record.write(8, 1, b"hallo")
    assert record.read() == (8, 1, b"hallo")


def write_or_read(group: dist.ProcessGroup, seconds: float) -> int:
    """Rank 0 writes as fast as it can; the others read. Number and payload must belong together."""
    shared = SharedBytes(group, 2048)
    record = Record(shared.view(0))
    rank, count, last = dist.get_rank(group), 0, 0
    dist.barrier(group)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        count += 1
        if rank == 0:
            record.write(count, count % 5, bytes([count % 251]) * (count % 2000))
        elif (got := record.read()) is not None:
            number, status, payload = got
            assert number >= last, "records came out of order"
            assert status == number % 5
            assert payload == bytes([number % 251]) * (number % 2000), "torn"
            last = number
    return last if rank else count


def test_no_torn_reads_between_processes(pool: RankPool) -> None:
    written, *read = pool.run(write_or_read, 3, 1.5)
    assert written > 100
    assert all(1 <= last <= written for last in read)
