"""The CPU executor with a process a rank: every kind of program in shared memory, and what happens when one fails."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from marks import long
from on_ranks import on_ranks
from ranks import crew
from worlds import Rig, holdings, random_delays

from sidelane.errors import PeerError
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import (
    Collective,
    Kind,
    ReduceOp,
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
    split_evenly,
)
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import freeze, lower
from sidelane_lab.sim.prelaunch import prelaunch


def collectives(n: int) -> Iterator[Collective]:
    """One of each kind, of odd and uneven sizes, in place where that exists."""
    uneven = [17 * rank + (rank % 3) * 1000 for rank in range(n)]
    for in_place in (False, True):
        yield all_gather(uneven, in_place=in_place)
        yield all_to_all([[5 + i + j for j in range(n)] for i in range(n)], in_place=in_place)
        yield broadcast(70_001, n, root=n - 1, in_place=in_place)
        yield reduce_scatter([4 * 33] * n, Reduction(ReduceOp.SUM, "float32"), in_place=in_place)
        yield all_reduce(split_evenly(2 * 3001, n, 2), Reduction(ReduceOp.AVG, "bfloat16"), in_place=in_place)
    yield scatter(uneven, root=0)
    yield gather(uneven, root=1 % n)


def programs(n: int, seed: int) -> Iterator[Program]:
    """Every variant of every collective, with transports and transforms drawn at random."""
    draw = random.Random(seed)
    for collective in collectives(n):
        for variant in variants(collective.kind):
            transports = [Transport.PUSH]
            if variant in ("pcpy", "b2b", "striped") and collective.reduction is None:
                if not collective.in_place:
                    transports = list(Transport)
                elif collective.kind is Kind.ALL_TO_ALL:
                    transports = [Transport.STAGED]
            program = build(collective, variant, draw.choice(transports))
            if draw.random() < 0.4:
                program = lower(program, {Copy})
            if draw.random() < 0.4:
                program = prelaunch(program)
            yield program


@on_ranks(1, long(2), 3, long(5), long(8))
def test_every_kind_of_program_moves_the_right_bytes(group: dist.ProcessGroup) -> None:
    """Each program twice, interleaved, while ranks dawdle; all in the same flags, with epochs that sometimes jump."""
    seed = dist.get_world_size(group)
    rig = Rig(group, delay=random_delays(seed + dist.get_rank(group), 0.05))
    loaded = [rig.load(program) for program in programs(rig.world_size, seed)]
    order = loaded * 2
    random.Random(seed).shuffle(order)
    epoch = 0
    for index, each in enumerate(order):
        epoch += 1 + index % 2
        each.run_checked(epoch)
    rig.close()
    assert len(loaded) > 20


@on_ranks(4)
def test_frozen_programs_reset_their_flags(group: dist.ProcessGroup) -> None:
    rig = Rig(group, delay=random_delays(dist.get_rank(group)))
    n = rig.world_size
    kinds = [all_gather([99] * n, in_place=True), all_to_all([[64] * n] * n), reduce_scatter([8] * n, SUM)]
    loaded = [rig.load(freeze(build(kind, "b2b"))) for kind in kinds]
    for call in range(1, 31):
        loaded[call % 3].run_checked(call)
    rig.close()


SUM = Reduction(ReduceOp.SUM, "int32")


@on_ranks(4, invocations=200)
def test_200_invocations_back_to_back_with_random_delays(group: dist.ProcessGroup, invocations: int) -> None:
    """Nothing orders the ranks but the programs; one rank at a time is slow."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    rig = Rig(group, delay=random_delays(rank, probability=0.03))
    loaded = [
        rig.load(build(all_gather([257] * n), "pcpy", Transport.PULL)),
        rig.load(build(all_to_all([[100] * n] * n), "swap")),
        rig.load(build(all_reduce(split_evenly(4 * 50, n, 4), SUM), "b2b")),
    ]
    for epoch in range(1, invocations + 1):
        if random.Random(epoch).randrange(n) == rank:
            time.sleep(random.random() * 0.005)
        loaded[epoch % 3].run_checked(epoch)
    rig.close()


@on_ranks(3)
def test_large_messages(group: dist.ProcessGroup) -> None:
    """Several pieces a copy, and engines that really overlap."""
    rig = Rig(group)
    n = rig.world_size
    loaded = rig.load(build(all_gather([9_000_001] * n), "pcpy"))
    reduce = rig.load(build(all_reduce(split_evenly(4 * 1_000_003, n, 4), Reduction(ReduceOp.MAX, "float32")), "pcpy"))
    loaded.run_checked(1)
    reduce.run_checked(2)
    rig.close()


@on_ranks(3)
def test_two_executors_in_one_process(group: dist.ProcessGroup) -> None:
    """Two executors of one group at once, and one of a part of it, each with its own memory and epochs."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    first, second = Rig(group), Rig(group, delay=random_delays(rank))
    one = first.load(build(all_gather([300] * n), "pcpy"))
    two = second.load(build(all_to_all([[300] * n] * n), "pcpy"))
    for epoch in range(1, 21):
        pendings = [(one, one.start(epoch)), (two, two.start(100 + epoch))]
        for loaded, pending in pendings if rank % 2 else reversed(pendings):
            loaded.finish(epoch if loaded is one else 100 + epoch, pending)
    first.close()
    two.run_checked(200)  # the other one is closed, by now or soon, on every rank
    second.close()


# --- failures ---------------------------------------------------------------------------------------------------------

Seen = tuple[str, tuple[int, ...], str]


def seen(error: BaseException) -> Seen:
    ranks = error.ranks if isinstance(error, PeerError) else ()
    return type(error).__name__, ranks, str(error)


def leftovers(rig: Rig) -> list[str]:
    """Close, and look for what is still there of this rig."""
    mine = [line for line in holdings() if line not in rig.before]
    assert any("memfd" in line for line in mine)
    rig.close()
    rig.__dict__.clear()
    gc.collect()
    return [line for line in holdings() if line in mine]


@on_ranks(3)
def test_a_rank_that_waits_itself_is_not_to_blame(group: dist.ProcessGroup) -> None:
    """Rank 2 stays away; rank 1 waits for it in call 1, and rank 0, which needed nothing from 2, for both in call 2."""
    rig = Rig(group, timeout_s=2.0 if dist.get_rank(group) == 0 else 60.0)
    result: Seen | None = None
    chain = rig.load(build(all_to_all([[0, 0, 0], [50, 0, 0], [0, 50, 0]]), "pcpy"))
    everyone = rig.load(build(all_gather([100] * rig.world_size), "pcpy"))
    try:
        if rig.rank == 2:
            dist.barrier(group)  # until the others have given up
        chain.run_checked(1)
        everyone.run_checked(2)
    except PeerError as error:
        result = seen(error)
        error.__traceback__ = None
    if rig.rank != 2:
        dist.barrier(group)
    del chain, everyone
    dist.barrier(group)
    assert leftovers(rig) == []
    kind, ranks, text = result
    assert (kind, ranks) == ("PeerTimeoutError", (2,)), text
    assert "rank 1 (pid" in text and "in call 1" in text and "have not come" in text


def interrupt_one(group: dist.ProcessGroup) -> tuple[Seen, list[str]]:
    """Ctrl-C on rank 1 while it waits for rank 2, which does not come; rank 0 waits for both."""
    rig = Rig(group, timeout_s=60)
    loaded = rig.load(build(all_gather([100] * 3), "pcpy"))
    if rig.rank == 2:
        while True:
            try:
                rig.control.check(1)
                time.sleep(0.01)
            except PeerError as error:
                result = seen(error)
                error.__traceback__ = None
                break
    else:
        pending = loaded.start(1)
        if rig.rank == 1:
            threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises((KeyboardInterrupt, PeerError)) as caught:
            pending.wait()
        assert pending.done()
        result = seen(caught.value)
        del pending, caught
    del loaded
    dist.barrier(group)
    return result, leftovers(rig)


def test_an_interrupt_stops_the_engines_and_is_told_to_the_peers() -> None:
    with crew(3) as own:
        results = own.run(interrupt_one, None, timeout_s=40)
    assert results[1] == (("KeyboardInterrupt", (), ""), [])
    for (kind, ranks, text), left in (results[0], results[2]):
        assert (kind, ranks) == ("PeerError", (1,))
        assert text.startswith("rank 1 gave up: rank 1 was interrupted in all_gather(3 ranks, 300 bytes")
        assert left == []


@on_ranks(3)
def test_after_a_refused_call_the_next_one_works(group: dist.ProcessGroup) -> None:
    """A refused call fails everywhere, and the next one works: nobody has moved beyond what was agreed."""
    rig = Rig(group, timeout_s=60)
    loaded = rig.load(build(all_gather([100] * rig.world_size), "pcpy"))
    for epoch in range(1, 7):
        if epoch % 2:
            loaded.run_checked(epoch)
        elif rig.rank == 1:
            rig.control.post_call(epoch, "all_gather", refusal="TypeError: a list")
        else:
            with pytest.raises(PeerError) as caught:
                loaded.run_checked(epoch)
            text = f"rank 1 refused call {epoch}, all_gather: TypeError: a list"
            assert seen(caught.value) == ("PeerError", (1,), text)
    rig.close()


def exit_while_running(group: dist.ProcessGroup) -> None:
    """The interpreter ends with a call under way and nothing closed: threads must stop before memory goes."""
    rig = Rig(group, timeout_s=60)
    loaded = rig.load(build(all_gather([100] * 2), "pcpy"))
    if rig.rank == 0:
        kept.append((rig, loaded, loaded.start(1)))
    dist.barrier(group)


kept: list[object] = []


def test_a_process_ends_cleanly_with_a_call_under_way() -> None:
    with crew(2) as own:
        own.run(exit_while_running, None)
        own.close()
        assert [process.exitcode for process in own.processes] == [0, 0]


def test_kinds_are_all_covered() -> None:
    assert {collective.kind for collective in collectives(3)} == set(Kind)
