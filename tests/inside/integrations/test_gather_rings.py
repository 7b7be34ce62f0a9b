"""Why FSDP2's gathers keep their entry handshake: what a ring of buffers proves of a peer's buffer, and what not."""

from __future__ import annotations

import pytest
import torch
from gather_rings import ring_of_gathers

from sidelane.errors import ProgramError
from sidelane.integrations.fsdp_group import Ring
from sidelane.program.verify import verify
from sidelane_lab.machines.load import named
from sidelane_lab.sim.simulate import simulate


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_entries_need_no_more_than_a_free_buffer(ranks: int, slots: int) -> None:
    for behind in range(1, slots + 1):
        verify(ring_of_gathers(ranks, slots, 24, behind=behind, entries=True), invocations=3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_ring_that_is_a_buffer_longer_than_a_gather_waits_for_needs_no_entries(ranks: int, slots: int) -> None:
    for behind in range(1, slots):
        verify(ring_of_gathers(ranks, slots, 24, behind=behind, entries=False), invocations=3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_ring_as_long_as_a_gather_waits_for_is_a_race_without_entries(ranks: int, slots: int) -> None:
    """The counterexample: a peer's gather k - 1, which was heard, began before it had read what gather k overwrites."""
    with pytest.raises(ProgramError, match=r"race on staging@0.* nothing orders rank 0 local:0 .* and rank 1 dma:0"):
        verify(ring_of_gathers(ranks, slots, 24, behind=slots, entries=False), invocations=3)


@pytest.mark.parametrize("entries", [False, True])
def test_a_part_that_was_not_waited_for_is_refused(entries: bool) -> None:
    with pytest.raises(ProgramError, match="unpaired signal|race"):
        verify(ring_of_gathers(3, 3, 24, behind=2, entries=entries, unheard=True))


def test_safe_without_entries_in_two_buffers_is_slower_than_with_them() -> None:
    """A gather then waits for the read of the one before, and nothing runs beside anything."""
    machine, nbytes = named("h200x2"), 64 << 20
    times = {
        (slots, behind, entries): simulate(
            ring_of_gathers(2, slots, nbytes, behind=behind, entries=entries, rounds=6 // slots, reads=3), machine
        ).time_us
        for slots, behind, entries in [(2, 2, True), (2, 1, False), (3, 2, False)]
    }
    assert times[2, 1, False] > 1.2 * times[2, 2, True]
    assert times[3, 2, False] == pytest.approx(times[2, 2, True], rel=0.05)  # a layer of memory, for nearly nothing


class Stream:
    """A stream that only remembers."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Recorded:
    """A stream of the computation, whose events are numbers."""

    def __init__(self) -> None:
        self.events = 0

    def record_event(self) -> int:
        self.events += 1
        return self.events


def test_no_gather_of_fsdp_is_proved_by_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FSDP2's order, three steps of four layers: the ring takes two buffers, and each gather is the first that is
    ordered behind the release of its own. So what a peer's earlier gathers tell proves nothing about its buffer."""
    ring, compute = Ring(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), torch.device("cpu")), Recorded()
    monkeypatch.setattr(ring._handle, "current_stream", lambda: compute)
    stream, made = Stream(), set()

    def gather(*, at_once: bool) -> object:
        before = len(stream.waited)
        whole, free = ring.take(64, stream, at_once=at_once)
        made.add(whole.data_ptr())
        for event in stream.waited[before:]:
            assert event not in stream.waited[:before]
        return free

    layers = 4
    for step in range(3):
        free = None
        for layer in range(layers):  # each is gathered when the one before has been queued, and freed
            taken = gather(at_once=step > 0 and layer == 0)
            taken()  # type: ignore[operator]
        free = gather(at_once=True)
        for _ in range(layers - 1):  # each is gathered in front of the computation of the one behind
            ahead = gather(at_once=True)
            free()  # type: ignore[operator]
            free = ahead
        free()  # type: ignore[operator]
    assert len(made) == 2 and len(stream.waited) == 3 * 2 * layers - 2
