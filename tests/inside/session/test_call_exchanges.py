"""What ranks exchange to share memory: who fails, dies or means something else there is named at once."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import json
import os
import pickle
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, outcome
from on_ranks import everyones, on_ranks
from ranks import crew, shared_memory

import sidelane
from sidelane import MismatchError, PeerError, PeerTimeoutError, config, version
from sidelane.integrations.nodes.groups import NodeGroup, find_nodes
from sidelane.memory import exchange as exchanges
from sidelane.memory import host_shared
from sidelane.memory.exchange import Exchange
from sidelane.memory.store_values import Post, value_of
from sidelane.session import making as profiles


@on_ranks(1, 2, 5)
def test_everybody_hears_what_everybody_says(group: dist.ProcessGroup) -> None:
    exchange = Exchange(group, 20.0)
    large = "x" * (3 << 20)
    found = [exchange("ranks", lambda: exchange.rank), exchange("bytes", lambda: large[: 1000 * exchange.rank])]
    assert [found[0], list(map(len, found[1]))] == [list(range(group.size())), [1000 * rank for rank in found[0]]]


@on_ranks(2)
def test_a_rank_that_sees_late_that_all_are_there_keeps_nothing(group: dist.ProcessGroup) -> None:
    exchange = Exchange(group, 20.0)

    def blind(what: str, missing: Any) -> None:
        while exchange._decided() is None:
            time.sleep(0.001)
        raise PeerError(f"{what}: the others do not wait", missing())

    def call() -> weakref.ref[Exchange]:
        mine = Exchange(group, 20.0)  # anything that the caller alone has
        assert exchange("ranks", lambda: exchange.rank) == [0, 1]
        return weakref.ref(mine)

    if exchange.rank:
        exchange.wait_for = blind  # type: ignore[method-assign]
    gc.disable()
    try:
        assert [call()() is None for _ in range(3)] == [True] * 3
    finally:
        gc.enable()


RAW, SHOWN = "\x1b[2J\x9b31m\rred\u202e", r"\x1b[2J\x9b31m\rred\u202e"
"""Characters that act on a terminal, and how users see them."""


@on_ranks(2)
def test_what_peers_say_does_not_act_on_terminals(group: dist.ProcessGroup) -> None:
    """Rank 1 refuses an exchange with such a text, is about such a thing, and refuses a call with it."""
    exchange, found = Exchange(group, 20.0), list[str]()

    def make() -> int:
        if exchange.rank:
            raise ValueError(RAW)
        return 1

    for step in (lambda: exchange("numbers", make), lambda: Exchange(group, 20.0)(RAW[:2] * exchange.rank, int)):
        with pytest.raises((PeerError, MismatchError, ValueError)) as caught:
            step()
        found.append(str(caught.value))
    with communicator(group) as comm:
        calls = comm.calls
        refusing = calls.reporting_refusals(calls.number(), "all_reduce") if comm.rank else contextlib.nullcontext()
        with pytest.raises((PeerError, ValueError)) as caught, refusing:
            if comm.rank:
                raise ValueError(RAW)
            comm.all_reduce(torch.ones(4))
        dist.barrier(group)
    found.append(str(caught.value))
    if exchange.rank == 0:
        assert found[0].endswith(f"rank 1: ValueError: {SHOWN}"), found
        assert r"rank 1: \x1b[" in found[1] and SHOWN in found[2], found


@on_ranks(3)
def test_exchanges_are_compared(group: dist.ProcessGroup) -> None:
    exchange = Exchange(group, 20.0)
    with pytest.raises(MismatchError) as caught:
        exchange("apples" if exchange.rank else "pears", lambda: 1)
    assert exchange("fruit", lambda: exchange.rank) == [0, 1, 2]
    text = str(caught.value)
    if exchange.rank == 0:
        assert "rank 0 is about: pears; rank 1: apples" in text and "exchange 1 of communicator" in text
    if exchange.rank == 1:
        assert "rank 1 is about: apples; rank 0: pears" in text


@on_ranks(3)
def test_what_fails_on_one_rank_is_told_to_all(group: dist.ProcessGroup) -> None:
    exchange = Exchange(group, 20.0)

    def make() -> int:
        if exchange.rank == 2:
            raise LookupError("no key")
        return 1

    name, ranks, text = outcome(exchange, "keys", make)
    if exchange.rank == 2:
        assert (name, ranks, text) == ("LookupError", (), "no key")
    else:
        assert (name, ranks) == ("PeerError", (2,))
        assert "keys: not every rank can take part: rank 2: LookupError: no key" in text


@on_ranks(3)
def test_who_does_not_come_is_named_and_may_come_to_the_next(group: dist.ProcessGroup) -> None:
    """A rank that does not come is named; the next communicator is the one that the others wait for then."""
    rank = dist.get_rank(group)
    if rank != 1:
        exchange = Exchange(group, 1.0)
        with pytest.raises(PeerTimeoutError) as caught:
            exchange("lunch", lambda: rank)
        text = str(caught.value)
        if rank == 0:
            assert "(lunch, exchange 1 of communicator" in text and "waited 1." in text
            assert "for rank 1: all ranks of a group" in text and caught.value.ranks == (1,)
    dist.barrier(group)
    assert Exchange(group, 20.0)("dinner", lambda: rank) == [0, 1, 2]


@on_ranks(2)
def test_ranks_agree_whatever_they_have_made_before(group: dist.ProcessGroup) -> None:
    """Torch names the groups of those who begin anew as those before them: ``0`` is the first of any process."""
    rank, store = dist.get_rank(group), exchanges.store_of(group)

    def group_of(name: str) -> NodeGroup:
        return NodeGroup(dist.PrefixStore(name, store), rank, [0, 1], "0")

    made = [group_of("of a world that has ended") for _ in range(3 * rank)]
    for earlier in made:
        Exchange(earlier, 20.0)
    for _ in range(2):  # the second time in a store where there are communicators of those before them
        again = group_of("new")
        made.append(again)
        for each in range(3):
            assert Exchange(again, 5.0)("lunch", lambda each=each: (rank, each)) == [(0, each), (1, each)]
        dist.barrier(group)  # as ranks meet when they make a group
    for each_group in made:
        each_group.close()


@on_ranks(3)
@pytest.mark.parametrize("interrupted", [False, True])
def test_ranks_agree_on_what_became_of_a_communicator(group: dist.ProcessGroup, interrupted: bool) -> None:
    """Rank 0 gives up when rank 1 has heard of it already; rank 2 comes later, when all are there for rank 1."""
    rank, store = dist.get_rank(group), exchanges.store_of(group)
    key = f"gave up, {interrupted}"
    if rank == 0:
        exchange = Exchange(group, 20.0 if interrupted else 2.0)

        def interrupt() -> None:
            store.wait([f"{key}: heard"])
            raise KeyboardInterrupt

        exchange.look = interrupt if interrupted else None
        with pytest.raises(KeyboardInterrupt if interrupted else PeerTimeoutError):
            exchange("lunch", lambda: rank)
        store.set(key, "")
    if rank == 1:
        exchange = Exchange(group, 20.0)

        def look() -> None:  # called behind a look at what the others have posted
            store.set(f"{key}: heard", "")
            store.wait([key])

        exchange.look = look
        with pytest.raises(PeerError, match="lunch: another rank gave up: ") as caught:
            exchange("lunch", lambda: rank)
        error = caught.value
        expected = (PeerError, (0,)) if interrupted else (PeerTimeoutError, (2,))
        assert (type(error), error.ranks) == expected
    if rank == 2:
        store.wait([key])
        if interrupted:
            with pytest.raises(PeerError, match="another rank gave up: KeyboardInterrupt"):
                Exchange(group, 20.0)("lunch", lambda: rank)
    for _ in range(2):
        assert Exchange(group, 20.0)("dinner", lambda: rank) == [0, 1, 2]


@on_ranks(3)
def test_a_rank_that_is_late_in_making_a_communicator_gets_the_error_of_its_peers(group: dist.ProcessGroup) -> None:
    """A rank comes late to a later exchange of a communicator: to one that it then could not do, or could."""
    rank, store = dist.get_rank(group), exchanges.store_of(group)
    found = []
    for number, (late, module, name, before) in enumerate(
        [
            (1, host_shared, "_reserve", 0),
            (1, host_shared.SharedBytes, "_attach", 0),
            (0, host_shared.SharedBytes, "_attach", 0),
            (0, profiles, "choice_of_rank", 0),
            (1, exchanges.Exchange, "_post", 2),
        ]
    ):
        real, key, calls = getattr(module, name), f"late {number}", itertools.count()

        def stopped(*args: Any, real: Any = real, key: str = key, calls: Any = calls, before: int = before) -> Any:
            if next(calls) == before:
                store.wait([key])
            return real(*args)

        with pytest.MonkeyPatch.context() as patch:
            if rank == late:
                patch.setattr(module, name, stopped)
            found.append(outcome(communicator, group, timeout_s=1.0))
            if rank != late:
                store.add(f"{key} given up", 1)
                if store.add(f"{key} given up", 0) == dist.get_world_size(group) - 1:
                    store.set(key, "")
        with communicator(group) as comm:
            comm.barrier()
    assert [(name, ranks) for name, ranks, _ in found] == [("PeerTimeoutError", (late,)) for late in (1, 1, 0, 0, 1)], (
        found
    )


class Bomb:
    """A pickle that writes a file where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@on_ranks(2)
def test_what_others_write_to_the_store_is_data(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """In the place of what rank 1 says: what others may write to the store."""
    rank, store, found = dist.get_rank(group), exchanges.store_of(group), []
    own = version.VERSION
    strange: list[bytes | str] = [pickle.dumps(Bomb(f"{tmp_path}/went off")), b"\xff\x00", b"", "[" * 100_000, "{}"]
    strange += ["NaN", f'["{own}", "", "shared memory", "", 7]', f'["{own}", 1, 2, 3, 4]', f'["{own}"]']
    for text in strange:
        if rank == 1:
            exchange = Exchange(group, 20.0)
            exchange.own_store.set("1/1", text)  # type: ignore[union-attr]
        else:
            found.append(outcome(communicator, group, timeout_s=5.0))
        dist.barrier(group)
    for number, text in enumerate(strange):
        # The group asks its ranks who they are.
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                said = text.replace("shared memory", "process group") if isinstance(text, str) else text
                real = json.dumps
                patch.setattr(
                    json, "dumps", lambda its, said=said, real=real: said if isinstance(its, Post) else real(its)
                )
            words, timeout = dist.PrefixStore(f"nodes {number}/", store), datetime.timedelta(seconds=5)
            found.append(outcome(find_nodes, words, rank, (0, 1), timeout, config.current()))
    assert not list(tmp_path.iterdir())
    if rank == 0:
        assert {(name, ranks) for name, ranks, _ in found} == {("PeerError", (1,))}, found
        assert len(found) == 18


@on_ranks(3)
def test_ranks_of_two_versions_say_so(group: dist.ProcessGroup) -> None:
    found, before = [], shared_memory()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(version, "VERSION", "9.9")
        found.append(outcome(communicator, group))
        found.append(outcome(sidelane.wrap, group))
        assert set(shared_memory()) <= set(before)
    with communicator(group) as comm:
        comm.barrier()
    for what, (name, _, text) in zip(("Communicator", "wrap"), found, strict=True):
        rest = f"rank 0: {version.VERSION}; rank 1: 9.9; rank 2: {version.VERSION}; install one version on all ranks"
        assert name == "MismatchError" and text.startswith(f"{what} (")
        assert text.endswith(f": ranks run different versions of Sidelane: {rest}")


@on_ranks(3, timeout_s=100)
def test_exchanges_of_two_threads_do_not_meet(group: dist.ProcessGroup) -> None:
    """Two communicators' worth of exchanges on one group, at random times: neither meets the other's."""
    several = [Exchange(group, 20.0) for _ in range(2)]
    found: list[list[Any]] = [[], []]

    def talk(which: int) -> None:
        for k in range(40):
            time.sleep(1e-3 * ((7 * k + 3 * which + several[0].rank) % 5))
            found[which].append(several[which](f"step {k}", lambda k=k: (which, k, several[which].rank)))

    threads = [threading.Thread(target=talk, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for which in range(2):
        assert found[which] == [[(which, k, rank) for rank in range(3)] for k in range(40)]


@on_ranks(2)
def test_the_store_does_not_fill_up(group: dist.ProcessGroup) -> None:
    exchange = Exchange(group, 20.0)
    for k in range(30):
        exchange(f"step {k}", lambda: "x" * 1000)
    dist.barrier(group)
    keys = [f"{k}/{what}" for k in range(2, 31) for what in (exchange.rank, "outcome")]
    assert sum(exchange.own_store.check([key]) for key in keys) == 2  # type: ignore[union-attr]


def test_a_group_without_a_store_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: None)
        with pytest.raises(exchanges.UnavailableError, match="the group was made without a store"):
            exchanges.store_of(object())  # type: ignore[arg-type]


@on_ranks(3)
@pytest.mark.parametrize("text", ['{"format": ' + "[" * 200_000, "{", '{"format": 1, "curves": [], "key": Infinity}'])
def test_a_profile_that_is_none_is_refused_by_all(group: dist.ProcessGroup, text: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sidelane-test-") as folder:
        profile = os.path.join(folder, "p.json") if dist.get_rank(group) == 0 else None
        if profile is not None:
            Path(profile).write_text(text)
        found = outcome(communicator, group, profile=profile)
    with communicator(group) as comm:  # the group is as good as before
        comm.barrier()
    name, _, why = found
    assert name == "ValueError" and "not a profile" in why


@on_ranks(3)
def test_ranks_with_other_tables_are_refused_by_all(group: dist.ProcessGroup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 2:
            patch.setattr(profiles, "builtin_digest", lambda: "another")
        name, _, why = outcome(communicator, group)
        assert name == "ValueError" and "with different tables of times" in why


@on_ranks(3)
@pytest.mark.parametrize("where", ["staging", "offer", "plan"])
def test_a_rank_that_fails_inside_an_exchange_says_why(group: dist.ProcessGroup, where: str) -> None:
    """Rank 1 fails in an exchange that only this library makes; its peers are in that exchange then."""
    with pytest.MonkeyPatch.context() as patch:
        wrong = dist.get_rank(group) == 1

        def fail(*_: Any, **__: Any) -> Any:
            raise RecursionError("too deep here")

        comm = communicator(group)
        numel = 5 << 18
        if where == "staging" and wrong:
            patch.setattr(host_shared, "_reserve", fail)
        if where == "offer" and wrong:
            patch.setattr(host_shared, "_offer", fail)
        if where == "plan" and wrong:
            patch.setattr("sidelane.collectives.plan.make_program", fail)
        name, ranks, why = outcome(comm.all_reduce, torch.ones(numel))
    later = outcome(comm.barrier)[0]
    comm.close()
    if wrong:
        assert (name, ranks, why) == ("RecursionError", (), "too deep here")
        assert later in ("CommunicatorClosedError", "PeerError")
    else:
        assert (name, ranks, later) == ("PeerError", (1,), "CommunicatorClosedError")
        assert "RecursionError: too deep here" in why


@on_ranks(3)
def test_a_rank_that_fails_between_exchanges_says_why(group: dist.ProcessGroup) -> None:
    """Rank 1 gets no thread, or no memory, where no exchange is under way; its peers wait in the next one."""
    found = []
    for error in (RuntimeError("can't start new thread"), MemoryError("no memory"), OSError(24, "Too many open files")):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank(group) == 1:

                def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
                    raise error

                patch.setattr("sidelane.session.communicator.make_backend", fail)
            found.append(outcome(communicator, group))
        with communicator(group) as comm:
            comm.barrier()
    first, wrong, last = everyones(group, found)
    assert [name for name, _, _ in wrong] == ["RuntimeError", "MemoryError", "OSError"]
    for told in (first, last):  # by rank 1 itself, or by the other one that was told before
        for (name, ranks, text), (own, _, why) in zip(told, wrong, strict=True):
            assert (name, ranks) == ("PeerError", (1,)) and f"rank 1: {own}: {why}" in text, text


@on_ranks(3)
def test_a_rank_that_gets_no_thread_for_its_call_says_so(group: dist.ProcessGroup) -> None:
    """Rank 1 gets no thread where it runs its call."""
    for async_op in (False, True):
        comm = communicator(group)
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:

                def fail(self: threading.Thread) -> None:
                    raise RuntimeError("can't start new thread")

                patch.setattr(threading.Thread, "start", fail)

            def call(async_op: bool = async_op, comm: Any = comm) -> None:
                work = comm.all_reduce(torch.ones(300), async_op=async_op)
                if work is not None:
                    work.wait()

            name, ranks, text = outcome(call)
            if comm.rank == 1:
                assert name == "RuntimeError"
            else:
                assert (name, ranks) == ("PeerError", (1,)) and "can't start new thread" in text
        comm.close()


def dying_in_an_exchange(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
    comm = communicator(group)
    if comm.rank == 1:
        host_shared._reserve = lambda *_: os._exit(5)  # type: ignore[assignment]
    found = outcome(comm.empty, 100)
    comm.close()
    return found[0], found[1]


def test_a_rank_that_dies_inside_an_exchange_is_named() -> None:
    with crew(3) as ranks:
        first, code, last = ranks.run(dying_in_an_exchange, dying=(1,))
    assert code == 5
    for name, ranks in (first, last):
        assert (name, ranks) == ("PeerError", (1,))


class Forgetting:
    """A store in which another rank deletes a key as soon as somebody has seen it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        for key in keys:
            self._store.delete_key(key)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_value_that_another_rank_deletes_is_not_waited_for(tmp_path: Path) -> None:
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 1), dist.TCPStore("localhost", 0, 1, True)):
        store.set_timeout(datetime.timedelta(seconds=1))
        prefixed = dist.PrefixStore("a", store)
        assert value_of(prefixed, "key") is None
        prefixed.set("key", "value")
        assert value_of(Forgetting(prefixed), "key") == b"value"  # type: ignore[arg-type]
        prefixed.delete_key("key")
        assert value_of(prefixed, "key") is None
