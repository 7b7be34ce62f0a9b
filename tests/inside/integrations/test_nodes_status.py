"""Who is named when a call on streams does not end: by made-up clocks, one process and no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.integrations.nodes.groups import NodeRanks
from sidelane.integrations.nodes.status import NodesStatus, NodesWatchdog
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.order import HostOrder


class FakeLiveness:
    """Knows who has died, and does something else whenever it is asked."""

    def __init__(self, asked: Callable[[], object] = lambda: None) -> None:
        self.gone: list[int] = []
        self.ranks = range(4)
        self._asked = asked

    def dead(self, peers: Sequence[int]) -> list[int]:
        self._asked()
        return [rank for rank in self.gone if rank in peers]


def status_of(rank: int, store: dist.Store, liveness: Any, timeout_s: float = 0.3) -> NodesStatus:
    ranks = NodeRanks(store, rank, Nodes.named("aabb"), liveness, Config(timeout_s=timeout_s), "ranks")
    return NodesStatus(ranks, lambda: None)


def watchdog_of(liveness: FakeLiveness, timeout_s: float) -> NodesWatchdog:
    made = NodesWatchdog(status_of(0, dist.HashStore(), liveness, timeout_s), lambda: None, lambda error: None)
    made._thread = object()  # type: ignore[assignment]  # which would look by itself
    return made


def test_who_has_come_to_the_call_is_not_named_though_its_part_has_ended() -> None:
    store = dist.HashStore()
    others = {rank: status_of(rank, store, FakeLiveness()) for rank in (1, 2, 3)}

    def answers() -> None:
        for rank, calls in ((1, 7), (2, 6), (3, 8)):  # rank 2 has not come to the seventh call
            others[rank].calls = calls
            others[rank].answer()

    asks = status_of(0, store, FakeLiveness(answers))
    asks.calls = 7
    found = asks.agree(PeerTimeoutError("late", ()))
    assert isinstance(found, PeerTimeoutError) and found.ranks == (2,)
    assert str(found).startswith("rank 2 (rank 2 of the world, node 1) did not answer: late")
    assert others[3].gone(()) == [2], "and all say the same"


class Stream:
    """What a mark asks."""

    def __init__(self) -> None:
        self.begun = self.ended = False


def test_a_call_has_its_time_from_where_it_begins_to_run() -> None:
    watchdog = watchdog_of(FakeLiveness(), 10)
    first, second = Stream(), Stream()
    for stream in (first, second):
        watchdog.begin(lambda stream=stream: stream.begun, lambda stream=stream: stream.ended)  # type: ignore[misc]
    assert watchdog.look(0) is None and watchdog.look(100) is None, "it waits for the work in front of it"
    first.begun = True
    assert watchdog.look(101) is None and watchdog.look(110) is None
    first.ended = second.begun = True
    assert watchdog.look(112) is None and watchdog.look(121) is None, "each has a time of its own"
    assert isinstance(watchdog.look(123), PeerTimeoutError)
    second.ended = True
    assert watchdog.look(200) is None


def test_a_death_ends_a_call_soon_but_not_one_that_ends_well() -> None:
    liveness, stream = FakeLiveness(), Stream()
    watchdog = watchdog_of(liveness, 600)
    liveness.gone = [1]
    assert watchdog.look(0) is None, "nobody waits for it"
    stream.begun = True
    watchdog.begin(lambda: stream.begun, lambda: stream.ended)
    assert watchdog.look(1) is None and watchdog.look(2) is None
    found = watchdog.look(4)
    assert isinstance(found, PeerError) and not isinstance(found, PeerTimeoutError)
    stream.ended = True
    assert watchdog.look(9) is None


@pytest.mark.parametrize("in_call", [True, False])
def test_what_the_watchdog_ends_is_said_once(in_call: bool) -> None:
    """By the call under way if it fails meanwhile, which takes seconds; else by the next one."""
    made = NodesCommunicator.__new__(NodesCommunicator)
    made.rank, made.world_size, made.device = 0, 4, torch.device("cpu")
    made.own, made.calls, made.owner, made._order = mock.Mock(), mock.Mock(), mock.Mock(), HostOrder(made)
    made.calls.config = Config()
    made.status = status_of(0, dist.HashStore(), FakeLiveness())
    ended = PeerTimeoutError("rank 3 did not answer", (3,))

    def run(*arguments: object) -> None:
        made._let_go(ended)
        raise PeerError("the same, as this rank saw it", (3,))

    made.steps, made.on_streams = mock.Mock(), False
    made._run_steps = run  # type: ignore[method-assign]
    if not in_call:
        made._let_go(ended)
    tensor = torch.ones(4)
    with pytest.raises(PeerTimeoutError, match="rank 3 did not answer") as caught:
        made.all_reduce(tensor)
    assert caught.value.ranks == (3,)
    made._let_go(PeerError("later"))
    for _ in range(2):
        with pytest.raises(CommunicatorClosedError, match="rank 3 did not answer"):
            made.all_reduce(tensor)
