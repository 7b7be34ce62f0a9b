"""Repeated calls in C: what they tell the peers."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from replay_host import PAYLOAD, RING, Host

from sidelane.memory.record import Record


def test_calls_are_posted_for_the_peers(host: Host) -> None:
    host.remember()
    seen = []
    for number in range(1, 4 * RING):
        assert host.run()
        view = memoryview(host.memory)[64 * (number % RING) :]
        seen.append(Record(view[:64]).read())
        assert host.begun.value == number
    assert seen == [(number, 0, PAYLOAD) for number in range(1, 4 * RING)]
    assert host.posted == [], "all of it in C"


@pytest.mark.parametrize("change", ["another payload", "an equal payload", "a refusal", "a writer that died"])
def test_what_a_record_holds_otherwise_is_replaced(host: Host, change: str) -> None:
    host.remember()
    for _ in range(RING):
        host.run()
    payload = {"another payload": b"broadcast\0", "an equal payload": bytes(bytearray(PAYLOAD))}.get(change, PAYLOAD)
    record, view = host.records[1], memoryview(host.memory)[64:128]
    record.write(1, int(change == "a refusal"), payload)
    if change == "a writer that died":
        host.memory[64] += 1
        record.written = None
    assert host.run()
    assert Record(view).read() == (RING + 1, 0, PAYLOAD)
    assert (record.written, record.status) == (PAYLOAD, 0) and record.written is PAYLOAD
    record.write(RING + 2, 0, PAYLOAD)  # as one that repeats: number and tie alone
    assert Record(view).read() == (RING + 2, 0, PAYLOAD), "Python goes on where C left it"
    assert host.posted == []


def test_a_payload_that_no_record_has_room_for_is_refused(host: Host) -> None:
    with pytest.raises(ValueError, match=r"payload bytes .value=33, allowed=..32"):
        host.remember(payload=bytes(33))


def test_records_of_any_length_are_what_python_reads(module: ModuleType) -> None:
    host, draw = Host(module), random.Random(3)
    room = 32 + 2048
    memory = bytearray(RING * room)
    views = [memoryview(memory)[room * i : room * (i + 1)] for i in range(RING)]
    host.use(views)
    payloads = [draw.randbytes(length) for length in [*range(40), 255, 1000, 2047, 2048]]
    for call in range(1, 300):
        payload = draw.choice(payloads)
        host.remember(payload=payload)
        assert host.run()
        assert Record(views[call % RING]).read() == (call, 0, payload)


def test_what_peers_may_not_have_read_is_replaced_by_python(host: Host) -> None:
    host.remember()
    for _ in range(2 * RING):
        host.run()
    host.posted.clear()
    host.unread = 2 * RING + 2
    # Its post is replaced by that of call 3 * RING + 2 = 14: Python makes it, which waits for peers without a lock.
    assert [host.run() for _ in range(7)] == [True] * 5 + [None] * 2
    assert host.posted == []
    for _ in range(10):  # calls that some rank refused take numbers too
        next(host.numbers)
    host.begun.value = 2 * RING  # as if they were many
    assert host.run()
    assert len(host.posted) == 1, "Python posts, whatever begun says"


def test_python_posts_while_another_thread_does(host: Host) -> None:
    host.remember()
    for _ in range(RING):
        host.run()
    host.posted.clear()
    host.post_lock.acquire()  # which Python's post, a stub here, would wait for
    assert host.run()
    assert host.posted == [(RING + 1, "all_gather")]
