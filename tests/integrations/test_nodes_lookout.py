"""Who is named when a call on streams does not end: by made-up clocks, one process and no device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError
from sidelane.integrations.nodes.communicator import NodesCommunicator, _NearError
from sidelane.integrations.nodes.failures import RollCall
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.nodes.watchdog import Lookout


class Witness:
    """Knows who has died, and does something else whenever it is asked."""

    def __init__(self, asked: Callable[[], object] = lambda: None) -> None:
        self.gone: list[int] = []
        self._asked = asked

    def dead(self, peers: Sequence[int]) -> list[int]:
        self._asked()
        return [rank for rank in self.gone if rank in peers]


def roll_of(rank: int, store: dist.Store, witness: Any) -> RollCall:
    return RollCall(store, rank, Nodes.named("aabb"), range(4), witness, timedelta(seconds=0.3))


def test_who_has_come_to_the_call_is_not_named_though_its_part_has_ended() -> None:
    store = dist.HashStore()
    others = {rank: roll_of(rank, store, Witness()) for rank in (1, 2, 3)}

    def answers() -> None:
        for rank, calls in ((1, 7), (2, 6), (3, 8)):  # rank 2 has not come to the seventh call
            others[rank].answer(calls)

    found = roll_of(0, store, Witness(answers)).settle(PeerTimeoutError("late", ()), calls=7)
    assert isinstance(found, PeerTimeoutError) and found.ranks == (2,)
    assert str(found).startswith("rank 2 (rank 2 of the world, node 1) did not answer: late")
    assert others[3].known() == [2], "and all say the same"


class Stream:
    """What a mark asks."""

    def __init__(self) -> None:
        self.begun = self.ended = False


def test_a_call_has_its_time_from_where_it_begins_to_run() -> None:
    witness = Witness()
    lookout = Lookout(roll_of(0, dist.HashStore(), witness), timedelta(seconds=10), lambda: None, lambda error: None)
    lookout._thread = object()  # type: ignore[assignment]  # which would look by itself
    first, second = Stream(), Stream()
    for stream in (first, second):
        lookout.begin(lambda stream=stream: stream.begun, lambda stream=stream: stream.ended)  # type: ignore[misc]
    assert lookout.look(0) is None and lookout.look(100) is None, "it waits for the work in front of it"
    first.begun = True
    assert lookout.look(101) is None and lookout.look(110) is None
    first.ended = second.begun = True
    assert lookout.look(112) is None and lookout.look(121) is None, "each has a time of its own"
    assert isinstance(lookout.look(123), PeerTimeoutError)
    second.ended = True
    assert lookout.look(200) is None


def test_a_death_ends_a_call_soon_but_not_one_that_ends_well() -> None:
    witness, stream = Witness(), Stream()
    lookout = Lookout(roll_of(0, dist.HashStore(), witness), timedelta(seconds=600), lambda: None, lambda error: None)
    lookout._thread = object()  # type: ignore[assignment]
    witness.gone = [1]
    assert lookout.look(0) is None, "nobody waits for it"
    stream.begun = True
    lookout.begin(lambda: stream.begun, lambda: stream.ended)
    assert lookout.look(1) is None and lookout.look(2) is None
    found = lookout.look(4)
    assert isinstance(found, PeerError) and not isinstance(found, PeerTimeoutError)
    stream.ended = True
    assert lookout.look(9) is None


def test_what_ended_a_call_is_said_once_though_the_thread_ends_while_the_call_settles() -> None:
    made = NodesCommunicator.__new__(NodesCommunicator)
    ended = PeerTimeoutError("rank 3 did not answer", (3,))

    def settle(error: Exception, *arguments: object, **options: object) -> PeerError:
        made._end(ended)
        return PeerError("the same, as this rank saw it", (3,))

    made.rank, made.device, made.near, made._far = 0, torch.device("cpu"), mock.Mock(), None
    made.lane, made.lookout = mock.Mock(), mock.Mock()
    made.lane.calls.config = Config()
    made.nodes, made._node = Nodes.named("aabb"), 0
    made._roll = mock.Mock(settle=settle)
    made._failure = made._unsaid = None
    made._telling, made.owner = threading.Lock(), mock.Mock()
    assert made._fail(_NearError(PeerError("closed by a peer", (1,)))) is ended
    made._end(PeerError("later"))
    tensor = torch.ones(4)
    for _ in range(2):
        with pytest.raises(CommunicatorClosedError, match="rank 3 did not answer"):
            made.all_reduce(tensor)
