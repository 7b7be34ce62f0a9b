"""Builders: counts of commands and engines as the DMA collectives paper gives them, shapes of the queues, refusals."""

from __future__ import annotations

import pytest

from sidelane.program.builders import Transport, build, variants
from sidelane.program.builders.moving import rotation, swap_issuer
from sidelane.program.builders.reducing import reduce
from sidelane.program.builders.relay import relay
from sidelane.program.collective import (
    Buffer,
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
from sidelane.program.ir import EPOCH, MOVES, Broadcast, Copy, EngineKind, Flag, Program, Reduce, Signal, Swap, Wait
from sidelane.program.transform import ended_by, freeze, held_by, hold, lower, release
from sidelane_lab.sim.prelaunch import prelaunch

FLOAT_SUM = Reduction(ReduceOp.SUM, "float32")


def count(program: Program, kind: type, rank: int | None = None) -> int:
    return sum(isinstance(c, kind) for q in program.queues for c in q.commands if rank in (None, q.rank))


def engines(program: Program) -> list[int]:
    """For each rank, the engines that move bytes between ranks."""
    return [
        sum(
            queue.engine.kind is EngineKind.DMA and any(isinstance(c, MOVES) for c in queue.commands)
            for queue in program.queues_of(rank)
        )
        for rank in range(program.world_size)
    ]


def equal_all_to_all(n: int, part: int, *, in_place: bool = False):
    return all_to_all([[part] * n] * n, in_place=in_place)


@pytest.mark.parametrize("n", range(1, 17))
class TestPaperCounts:
    """The DMA collectives paper, sections 4.2.1 to 4.2.4."""

    def test_pcpy(self, n: int) -> None:
        for collective in (all_gather([8] * n, in_place=True), equal_all_to_all(n, 8)):
            program = build(collective, "pcpy")
            own = 0 if collective.in_place else n
            assert count(program, Copy) == n * (n - 1) + own
            assert engines(program) == [n - 1] * n

    def test_bcst(self, n: int) -> None:
        program = build(all_gather([8] * n, in_place=True), "bcst")
        for rank in range(n):
            assert count(program, Broadcast, rank) == ((n - 2) // 2 if n % 2 == 0 else (n - 1) // 2)
            assert count(program, Copy, rank) == (1 if n % 2 == 0 else 0)
        assert engines(program) == [n // 2] * n

    def test_swap(self, n: int) -> None:
        program = build(equal_all_to_all(n, 8, in_place=True), "swap")
        assert count(program, Swap) == n * (n - 1) // 2
        assert count(program, Copy) == 0
        shares = [count(program, Swap, rank) for rank in range(n)]
        assert max(shares) - min(shares) <= 1
        assert engines(program) == shares

    def test_b2b(self, n: int) -> None:
        for collective in (all_gather([8] * n, in_place=True), equal_all_to_all(n, 8)):
            program = build(collective, "b2b")
            assert engines(program) == [1 if n > 1 else 0] * n
            assert sum(
                isinstance(c, Copy) for q in program.queues if q.engine.kind is EngineKind.DMA for c in q.commands
            ) == (n * (n - 1))


def test_b2b_serves_peers_in_rotated_order() -> None:
    program = build(all_gather([8] * 4, in_place=True), "b2b")
    (queue,) = program.queues_of(2)
    assert [c.dst.rank for c in queue.commands if isinstance(c, Copy)] == [3, 0, 1] == list(rotation(2, 4))


@pytest.mark.parametrize("n", range(2, 17))
def test_each_swap_has_one_issuer(n: int) -> None:
    for i in range(n):
        for j in range(i):
            assert swap_issuer(i, j, n) == swap_issuer(j, i, n) in (i, j)


@pytest.mark.parametrize(("n", "nbytes", "rounds"), [(2, 5000, 1), (3, 1000, 2), (4, 9 << 20, 3), (8, 200_001, 2)])
def test_a_relayed_broadcast_leaves_every_rank_but_the_last_once(n: int, nbytes: int, rounds: int) -> None:
    root = n - 1
    program = relay(broadcast(nbytes, n, root, in_place=True), rounds=rounds)
    copies = [
        (queue.rank, command) for queue in program.queues for command in queue.commands if isinstance(command, Copy)
    ]
    for rank in range(n):
        sent = [copy for mover, copy in copies if mover == rank]
        assert sum(copy.src.nbytes for copy in sent) == (nbytes if rank != (root - 1) % n else 0)
        assert {copy.dst.rank for copy in sent} <= {(rank + 1) % n}, "nobody else writes there"
    assert program.staging_bytes == (0,) * n and engines(program)[root] == 2


def test_a_collective_of_no_bytes_has_no_commands() -> None:
    for collective in (all_gather([0] * 4), equal_all_to_all(4, 0), broadcast(0, 4, 1), all_reduce([0] * 4, FLOAT_SUM)):
        for variant in variants(collective.kind):
            assert build(collective, variant).queues == ()


def test_one_rank_alone_copies_or_does_nothing() -> None:
    assert count(build(all_gather([8]), "b2b"), Copy) == 1
    assert build(all_gather([8], in_place=True), "b2b").queues == ()
    assert build(all_reduce([8], FLOAT_SUM, in_place=True), "b2b").queues == ()
    assert count(build(reduce_scatter([8], FLOAT_SUM), "b2b"), Copy) == 1


@pytest.mark.parametrize(
    ("transport", "remote"),
    [(Transport.PUSH, {Buffer.OUTPUT}), (Transport.PULL, {Buffer.INPUT}), (Transport.STAGED, {Buffer.STAGING})],
)
def test_a_transport_reaches_only_its_symmetric_buffer(transport: Transport, remote: set[Buffer]) -> None:
    for collective in (
        all_gather([8] * 4),
        equal_all_to_all(4, 8),
        broadcast(8, 4, 2),
        scatter([8] * 4, 0),
        gather([8] * 4, 3),
    ):
        for variant in ("pcpy", "b2b"):
            assert build(collective, variant, transport).remote_buffers() == remote


def test_a_staged_all_gather_stages_one_shard() -> None:
    program = build(all_gather([8, 16, 24]), "b2b", Transport.STAGED)
    assert program.staging_bytes == (8, 16, 24)


def test_reducing_needs_only_staging() -> None:
    for collective in (reduce_scatter([8] * 4, FLOAT_SUM), all_reduce([8] * 4, FLOAT_SUM, in_place=True)):
        program = build(collective, "b2b", Transport.STAGED)
        assert program.remote_buffers() == {Buffer.STAGING}
        # An all_reduce reduces twice: for the peers, into staging, and for itself.
        assert count(program, Reduce) == (4 if collective.kind is Kind.REDUCE_SCATTER else 8)


@pytest.mark.parametrize("variant", ["pcpy", "b2b"])
def test_results_are_pushed_into_symmetric_outputs(variant: str) -> None:
    program = build(all_reduce([8, 0, 8, 8], FLOAT_SUM), variant, Transport.PUSH)
    assert program.remote_buffers() == {Buffer.STAGING, Buffer.OUTPUT}
    assert count(program, Reduce) == 3, "each result is made once, in its place"
    copies = [c for q in program.queues for c in q.commands if isinstance(c, Copy)]
    results = [c for c in copies if c.dst.buffer is Buffer.OUTPUT]
    assert len(results) == len(copies) // 2 == 9
    assert all(c.src.buffer is Buffer.OUTPUT and c.src.rank != c.dst.rank for c in results)


@pytest.mark.parametrize(
    ("nbytes", "scatter", "gather"), [(8, 1, 1), ((32 << 20) - 256, 1, 1), (32 << 20, 2, 2), (1 << 30, 4, 2)]
)
def test_large_shards_are_reduced_in_pieces(nbytes: int, scatter: int, gather: int) -> None:
    program = build(all_reduce([nbytes] * 4, FLOAT_SUM), "b2b")
    assert count(program, Reduce) == 4 * gather
    program = build(reduce_scatter([nbytes] * 4, FLOAT_SUM), "b2b")
    assert count(program, Reduce) == 4 * scatter
    sizes = [c.dst.nbytes for q in program.queues_of(0) for c in q.commands if isinstance(c, Reduce)]
    assert sum(sizes) == nbytes
    assert sizes == sorted(sizes, reverse=True), "the last one shows, so it is the smallest"
    for queue in program.queues:
        if queue.engine.kind is EngineKind.DMA:
            moves = [position for position, c in enumerate(queue.commands) if isinstance(c, Copy)]
            between = queue.commands[moves[0] : moves[-1]]
            # Signals to peers are all that stands between copies: no wait.
            assert all(isinstance(c, Copy) or (isinstance(c, Signal) and c.flag.rank != queue.rank) for c in between)


def test_pieces_of_uneven_shards_are_never_empty() -> None:
    program = reduce(all_reduce([0, 100, 1000, 5000], FLOAT_SUM), "b2b", pieces=(4, 3, 2, 1))
    assert all(c.dst.nbytes for q in program.queues for c in q.commands if isinstance(c, Copy | Reduce))
    reductions = [sum(isinstance(c, Reduce) for q in program.queues_of(r) for c in q.commands) for r in range(4)]
    assert reductions == [0, 1, 3, 4]


def test_a_reduction_takes_the_ranks_in_order() -> None:
    program = build(reduce_scatter([8] * 4, FLOAT_SUM), "b2b")
    reduce = next(c for q in program.queues_of(2) for c in q.commands if isinstance(c, Reduce))
    assert [span.buffer for span in reduce.srcs] == [Buffer.STAGING, Buffer.STAGING, Buffer.INPUT, Buffer.STAGING]
    assert [span.offset for span in reduce.srcs] == [0, 256, 16, 512]


def test_lower_turns_a_broadcast_into_two_copies() -> None:
    program = lower(build(all_gather([8] * 5, in_place=True), "bcst"), {Copy})
    assert count(program, Broadcast) == 0
    assert count(program, Copy) == 20


def test_lower_saves_the_remote_bytes_of_a_swap_first() -> None:
    program = lower(build(equal_all_to_all(3, 8, in_place=True), "swap"), {Copy})
    copies = [c for q in program.queues_of(0) for c in q.commands if isinstance(c, Copy)]
    save, overwrite, land = copies
    assert (save.src, overwrite.dst) == (overwrite.dst, save.src)
    assert save.src.rank != 0 and save.dst.buffer is Buffer.STAGING and save.dst.rank == 0
    assert land.src == save.dst and land.dst == overwrite.src


def test_lower_leaves_native_commands() -> None:
    program = build(all_gather([8] * 5, in_place=True), "bcst")
    assert lower(program, {Copy, Broadcast}) == program


def test_prelaunch_holds_every_queue_behind_a_trigger_of_its_own() -> None:
    program = prelaunch(build(all_gather([8] * 4), "pcpy"))
    for rank in range(4):
        caller = [q for q in program.queues_of(rank) if q.engine.kind is EngineKind.CALLER]
        held = [q for q in program.queues_of(rank) if q.engine.kind is not EngineKind.CALLER]
        triggers = [q.commands[0] for q in held]
        assert all(isinstance(c, Wait) for c in triggers)
        fired = [c.flag for c in caller[0].commands if isinstance(c, Signal)]
        assert fired == [c.flag for c in triggers if isinstance(c, Wait)]
        assert len(set(fired)) == len(held) == 4
    assert program.prelaunched
    with pytest.raises(ValueError, match="prelaunched already"):
        prelaunch(program)


def test_hold_puts_all_queues_of_a_rank_behind_one_trigger() -> None:
    program = build(all_gather([8] * 4), "pcpy")
    held = hold(program)
    assert (held.flag_count, held.prelaunched) == (program.flag_count + 2, True)
    for rank in range(4):
        trigger = held_by(held, rank)
        assert trigger == Flag(rank, program.flag_count)
        assert ended_by(held, rank) == Flag(rank, program.flag_count + 1)
        assert ended_by(program, rank) is None and ended_by(prelaunch(program), rank) is None
        *engines, caller = held.queues_of(rank)
        assert [queue.commands[0] for queue in engines] == [Wait(trigger, EPOCH)] * 4
        assert (caller.engine.kind, caller.commands) == (EngineKind.CALLER, (Signal(trigger, EPOCH),))
    assert release(held).queues == release(prelaunch(program)).queues == program.queues
    assert held_by(program, 0) is None and held_by(prelaunch(program), 1) == Flag(1, program.flag_count)
    with pytest.raises(ValueError, match="hold: the program is prelaunched already"):
        hold(held)
    with pytest.raises(ValueError, match="release: the program has no triggers"):
        release(program)


def test_a_rank_that_does_nothing_is_held_too() -> None:
    program = build(all_gather([8], in_place=True), "b2b")
    assert not program.queues
    engine, caller = hold(program).queues
    assert engine.commands == (Wait(Flag(0, program.flag_count), EPOCH),)
    assert caller.commands == (Signal(Flag(0, program.flag_count), EPOCH),)


def test_freeze_leaves_no_epoch_and_resets_after_each_wait() -> None:
    program = freeze(build(all_reduce([8] * 4, FLOAT_SUM), "pcpy"))
    for queue in program.queues:
        for command, following in zip(queue.commands, [*queue.commands[1:], None], strict=True):
            if isinstance(command, Signal | Wait):
                assert command.value.per_epoch == 0
            if isinstance(command, Wait):
                assert isinstance(following, Signal) and following.flag == command.flag and following.value.base == 0


def test_relays_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="value=all_gather, allowed=broadcast"):
        relay(all_gather([8] * 4))
    with pytest.raises(ValueError, match="value=staged, allowed=push"):
        build(broadcast(8, 4, 0), "relay", Transport.STAGED)
    with pytest.raises(ValueError, match="rounds .value=0"):
        relay(broadcast(8, 4, 0), rounds=0)


def test_refusals_name_value_and_choice() -> None:
    with pytest.raises(ValueError, match=r"variant of scatter \(value='swap', allowed=b2b, striped, pcpy, chunked\)"):
        build(scatter([8] * 4, 0), "swap")
    with pytest.raises(ValueError, match="swap: all_to_all must exchange equal counts"):
        build(all_to_all([[1, 2], [3, 4]]), "swap")
    with pytest.raises(ValueError, match="allowed=staged, or the variant swap"):
        build(equal_all_to_all(2, 4, in_place=True), "b2b")
    with pytest.raises(ValueError, match=r"transport \(value=pull, allowed=push"):
        build(all_gather([8] * 4), "bcst", Transport.PULL)
    for pieces in ((), (1, 0)):
        with pytest.raises(ValueError, match=r"pieces \(value=.*, allowed=relative sizes of 1 or more\)"):
            reduce(all_reduce([8] * 4, FLOAT_SUM), pieces=pieces)
    with pytest.raises(ValueError, match=r"root \(value=4, allowed=0..3\)"):
        broadcast(8, 4, 4)
    with pytest.raises(ValueError, match=r"number of ranks \(value=4097, allowed=1..4096\)"):
        all_gather([1] * 4097)
    with pytest.raises(ValueError, match="whole float32 elements"):
        reduce_scatter([6, 6], FLOAT_SUM)
    with pytest.raises(ValueError, match="sizes must not be negative"):
        all_gather([4, -4])
    with pytest.raises(ValueError, match=r"dtype \(value='float64'"):
        Reduction(ReduceOp.SUM, "float64")
    with pytest.raises(ValueError, match="multiple of 4"):
        split_evenly(10, 2, granularity=4)


@pytest.mark.parametrize("kind", Kind)
def test_every_named_variant_can_be_built(kind: Kind) -> None:
    definition = {
        Kind.ALL_GATHER: all_gather([8] * 4),
        Kind.ALL_TO_ALL: equal_all_to_all(4, 8),
        Kind.BROADCAST: broadcast(8, 4, 1),
        Kind.SCATTER: scatter([8] * 4, 1),
        Kind.GATHER: gather([8] * 4, 1),
        Kind.REDUCE_SCATTER: reduce_scatter([8] * 4, FLOAT_SUM),
        Kind.ALL_REDUCE: all_reduce([8] * 4, FLOAT_SUM),
    }[kind]
    for variant in variants(kind):
        assert build(definition, variant).variant == variant
