"""Programs as SDMA packets: every builder on emulated engines, races that are seen, and the papers' counts."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from marks import long
from ranks import RankPool
from sdma_emulator import Memory, PollTimeoutError, run_together
from sdma_world import Caller, World, address_of, addresses_of, sizes_of, words_of
from worlds import Rig

from sidelane.execute.base import Addresses, Pieces
from sidelane.program import ir
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, algorithms, build, build_batch, list_variants
from sidelane.program.builders.relay import relay
from sidelane.program.collective import (
    Buffer,
    Collective,
    Kind,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
    split_evenly,
)
from sidelane.program.transform import freeze, hold, lower
from sidelane.program.verify import verify
from sidelane_lab import sdma
from sidelane_lab.machines.load import find
from sidelane_lab.model.collectives import published_program
from sidelane_lab.sdma import PacketQueue, QueueWords, encode, fit
from sidelane_lab.sdma import packets as layout
from sidelane_lab.sdma.encode import _Encoder
from sidelane_lab.sim import simulate
from sidelane_lab.sim.prelaunch import prelaunch

SUM = Reduction(ReduceOp.SUM, "int32")


def collectives(n: int, draw: random.Random) -> Iterator[Collective]:
    """Yield programs of every kind, in place where that exists, of sizes that swaps can take and of odd ones."""
    uneven = [17 * rank + draw.randrange(3) * 500 for rank in range(n)]
    for in_place in (False, True):
        yield all_gather(uneven, in_place=in_place)
        yield all_to_all([[64 * 3] * n] * n, in_place=in_place)
        yield all_to_all([[70] * n] * n, in_place=in_place)
        yield broadcast(1001, n, root=n - 1, in_place=in_place)
        yield reduce_scatter([4 * 33] * n, Reduction(ReduceOp.SUM, "float32"), in_place=in_place)
        yield all_reduce(split_evenly(2 * 301, n, 2), Reduction(ReduceOp.AVG, "bfloat16"), in_place=in_place)
    yield scatter(uneven, root=0)
    yield gather(uneven, root=1 % n)


def programs(n: int, draw: random.Random) -> Iterator[tuple[ir.Program, ...]]:
    """Every algorithm of every collective, with a transport and a transform drawn at random."""
    for collective in collectives(n, draw):
        for algorithm in algorithms(collective.kind):
            transport = draw.choice(list(Transport))
            try:
                program = build(collective, algorithm.name, transport)
            except ValueError:  # with that transport
                staged = collective.in_place and collective.kind is Kind.ALL_TO_ALL and algorithm.name != "swap"
                program = build(collective, algorithm.name, Transport.STAGED if staged else Transport.PUSH)
            if draw.random() < 0.2:
                program = lower(program, {ir.Copy})
            change: Callable[[ir.Program], ir.Program] = draw.choice([prelaunch, hold, freeze, dataclasses.replace])
            yield (change(program),)
    yield (relay(broadcast(3000, n, 0, in_place=True), rounds=3),)
    for variant in list_variants(Kind.ALL_GATHER):
        parts = (all_gather([64] * n, in_place=True), all_gather([100] * n))
        yield (build_batch(Batch("all_gather", n, parts), variant, [Transport.PUSH] * 2),)


@pytest.mark.parametrize("n", [2, 3, 4, *map(long, (5, 6, 7, 8))])
def test_every_program_moves_the_right_bytes(n: int) -> None:
    """Each three times in a row, with engines in random order, on fresh inputs."""
    draw = random.Random(n)
    moved: Counter[str] = Counter()
    for turns in programs(n, draw):
        world = World(turns, draw.randrange(2**32))
        run_together(world.callers(), world.draw)
        moved[turns[0].variant.partition("+")[0]] += 1
    assert {"pcpy", "b2b", "bcst", "swap", "striped", "relay"} <= moved.keys()


def run_in_processes(group: dist.ProcessGroup, seed: int) -> int:
    """Every program with a process a rank: real races between the ranks, drawn ones between the engines of each."""
    rig = Rig(group)
    n, rank, ran = rig.world_size, rig.rank, 0
    for turns in programs(n, random.Random(seed)):
        fitted = tuple(map(fit, turns))
        memory, mine = Memory(), dict[str, torch.Tensor]()
        for name in sizes_of(fitted, 0):
            sizes = [sizes_of(fitted, peer)[name] for peer in range(n)]
            block = rig.memory.allocate(max(1, *sizes))
            for peer, tensor in enumerate(block.mapping):
                memory.map(address_of(peer, name), tensor[: sizes[peer]].numpy())
            mine[name] = block.tensor[: sizes[rank]]
        draw = random.Random(1000 * seed + rank)
        caller = Caller(fitted, rank, memory, mine, 3, draw)
        run_together([caller], draw, timeout_s=60)
        ran += 1
    rig.close()
    return ran


@pytest.mark.parametrize("n", [2, *map(long, range(3, 9))])
def test_ranks_in_processes_of_their_own(pool: RankPool, n: int) -> None:
    assert min(pool.run(run_in_processes, n, n, timeout_s=200)) > 50, "programs"


# Mistakes are seen.


def without(program: ir.Program, kind: type[ir.Wait] | type[ir.Signal], number: int) -> ir.Program:
    """Without a wait or signal of rank 0's first queue."""
    first = program.queues_of(0)[0]
    places = [index for index, command in enumerate(first.commands) if isinstance(command, kind)]
    left = [command for index, command in enumerate(first.commands) if index != places[number]]
    changed = dataclasses.replace(first, commands=tuple(left))
    return dataclasses.replace(program, queues=tuple(changed if queue is first else queue for queue in program.queues))


def goes_wrong(program: ir.Program, seeds: int = 40) -> int:
    """In how many of random orders the bytes come out wrong."""
    wrong = 0
    for seed in range(seeds):
        world = World([program], seed)
        try:
            run_together(world.callers(), world.draw)
        except AssertionError as error:
            if "wrong bytes" not in str(error):
                raise
            wrong += 1
    return wrong


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("variant", ["b2b", "bcst"])
def test_a_wait_that_is_missing_is_a_race(variant: str, number: int) -> None:
    program = build(all_gather([512] * 3, in_place=True), variant)
    assert not goes_wrong(program)
    assert goes_wrong(without(program, ir.Wait, number))


def test_a_signal_that_comes_too_early_is_a_race() -> None:
    """In front of the moves that it announces."""
    program = build(all_gather([512] * 3, in_place=True), "pcpy")
    first = program.queues_of(0)[0]
    *before, copy, signal, last = first.commands
    assert isinstance(copy, ir.Copy) and isinstance(signal, ir.Signal)
    early = dataclasses.replace(first, commands=(*before, signal, copy, last))
    queues = tuple(early if queue is first else queue for queue in program.queues)
    assert goes_wrong(dataclasses.replace(program, queues=queues))


def test_a_queue_that_its_trigger_does_not_hold_is_a_race() -> None:
    program = prelaunch(build(all_gather([512] * 3), "pcpy", Transport.PULL))
    assert not goes_wrong(program)
    assert goes_wrong(without(program, ir.Wait, 0))


def test_a_signal_that_is_missing_is_a_poll_that_never_ends() -> None:
    world = World([without(build(all_gather([64] * 3), "b2b"), ir.Signal, 0)], seed=1)
    with pytest.raises(PollTimeoutError, match=r"rank 1 dma:0 at word \d+ polls 0x\w+ for 1, which holds 0"):
        run_together(world.callers(), world.draw)


def test_a_rank_that_does_not_come_is_a_poll_that_never_ends() -> None:
    world = World([build(all_to_all([[64] * 3] * 3), "swap")], seed=1)
    with pytest.raises(PollTimeoutError, match="rank 0 dma:0 .* polls"):
        run_together(world.callers()[:2], world.draw)


def test_dependent_moves_of_one_queue_need_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap as three copies: engines may overlap them unless a barrier stands between."""
    program = lower(build(all_to_all([[256] * 3] * 3, in_place=True), "swap"), {ir.Copy})
    assert not goes_wrong(program)
    names = [packet.format.name for queue in queues(program, 3) for packet in queue.packets]
    assert names.count("copy") == 9 and names.count("poll") == 2 * 3 + 2 * 3, "two barriers for each swap"
    monkeypatch.setattr(_Encoder, "_barrier", lambda self, move: iter(()))
    assert goes_wrong(program)


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_TO_ALL])
def test_programs_of_copies_need_no_barrier(kind: Kind) -> None:
    n = 8
    collective = all_gather([64] * n) if kind is Kind.ALL_GATHER else all_to_all([[64] * n] * n)
    for algorithm in algorithms(kind):
        if algorithm.through_host:
            continue  # its slots are used again
        program = build(collective, algorithm.name)
        waits = sum(isinstance(c, ir.Wait) for queue in program.queues for c in queue.commands)
        polls = sum(p.format is layout.POLL for queue in queues(program, n) for p in queue.packets)
        assert polls == waits, program.variant


# Counts.


def queues(program: ir.Program, n: int, epoch: int = 1) -> list[PacketQueue]:
    program = fit(program)
    addresses = addresses_of([program])
    return [queue for rank in range(n) for queue in encode(program, rank, addresses, words_of(rank), epoch)]


MOVES = (layout.COPY, layout.BROADCAST, layout.SWAP)
PAPER = {
    # Variant and collective: packets that move bytes, and engines, each with one sync command.
    ("pcpy", Kind.ALL_GATHER): (56, 56),
    ("pcpy", Kind.ALL_TO_ALL): (56, 56),
    ("bcst", Kind.ALL_GATHER): (32, 32),
    ("swap", Kind.ALL_TO_ALL): (28, 28),
    ("b2b", Kind.ALL_GATHER): (56, 8),
    ("b2b", Kind.ALL_TO_ALL): (56, 8),
}


@pytest.mark.parametrize(("variant", "kind"), PAPER, ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_commands_of_eight_gpus_are_those_of_the_paper(variant: str, kind: Kind, ahead: bool) -> None:
    """DMA collectives paper, 4.2: n(n-1) copies and engines; half with swaps; n(n-2)/2 broadcasts and n copies for
    even n; an engine a GPU and n(n-1) copies for b2b. Each engine ends with one atomic that the host polls, and a
    prelaunched one begins with a poll of its own.
    """
    n = 8
    collective = all_gather([4096] * n, in_place=True)
    if kind is Kind.ALL_TO_ALL:
        collective = all_to_all([[4096] * n] * n, in_place=variant == "swap", copies_own=variant == "swap")
    program = build(collective, variant)
    found = queues(prelaunch(program) if ahead else program, n)
    moves = [[packet.format.name for packet in queue.packets if packet.format in MOVES] for queue in found]
    assert (sum(map(len, moves)), len([names for names in moves if names])) == PAPER[variant, kind]
    assert all(queue.packets[-1].format is layout.ATOMIC for queue in found)
    assert sum(packet.format is layout.ATOMIC for queue in found for packet in queue.packets) == len(found)
    if ahead:
        heads = [queue.packets[0] for queue in found]
        assert {head.format for head in heads} == {layout.POLL}
        assert len({head["address"] for head in heads}) == len(found), "a trigger for each queue"
    kinds = Counter(name for names in moves for name in names)
    assert kinds == {"bcst": {"broadcast": 24, "copy": 8}, "swap": {"swap": 28}}.get(variant, {"copy": 56})


@pytest.mark.parametrize(("variant", "kind"), PAPER, ids=str)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("nbytes", [64 << 10, 64 << 20])
def test_what_is_simulated_are_these_packets(variant: str, kind: Kind, ahead: bool, nbytes: int) -> None:
    """The papers' variants as the model predicts them for MI300X: command by command what engines are given."""
    program = published_program(kind, nbytes, 8, variant, ahead)
    given = queues(program, 8)
    engines = {(queue.rank, queue.engine): queue for queue in program.queues}
    for queue in given:
        commands = engines[queue.rank, queue.engine].commands
        assert queue.commands == (*range(len(commands)), None), "a packet for each command, and the sync command"
    triggers = sum(packet.format is layout.POLL for queue in given for packet in queue.packets)
    simulated = simulate(program, find("mi300x8"))
    assert simulated.commands == sum(len(queue.packets) - 1 for queue in given) + triggers, "callers fire the triggers"


# What a packet cannot do.

ME = ir.Engine(ir.EngineKind.DMA)


def one(*commands: object, nbytes: int = 1 << 31, staging: int = 1 << 31) -> ir.Program:
    queue = ir.Queue(0, ME, commands)  # type: ignore[arg-type]
    return ir.Program(all_gather([nbytes] * 2, in_place=True), "own", (queue,), (staging,) * 2, 4)


def span(rank: int, nbytes: int, offset: int = 0, buffer: str = Buffer.OUTPUT) -> Span:
    return Span(rank, buffer, offset, nbytes)


def test_large_moves_are_split() -> None:
    nbytes = (1 << 31) + 128
    largest = layout.MAX_COPY_BYTES
    copies = encode_one(fit(one(ir.Copy(span(1, nbytes), span(0, nbytes)))))
    assert [packet["nbytes"] for packet in copies] == [largest, largest, nbytes - 2 * largest]
    assert [packet["dst"] - copies[0]["dst"] for packet in copies] == [0, largest, 2 * largest]
    swaps = encode_one(fit(one(ir.Swap(span(1, nbytes), span(0, nbytes)))))
    assert [packet["a"] % 64 for packet in swaps] == [0, 0, 0]
    parts = encode_one(fit(one(ir.Broadcast((span(0, 3 << 20, 4 << 20), span(1, 3 << 20)), span(0, 3 << 20)))))
    assert [packet["nbytes"] for packet in parts] == [1 << 20] * 3
    assert encode_one(fit(one(ir.Copy(span(1, 0), span(0, 0))))) == []
    with pytest.raises(ValueError, match="command 0 .*nbytes .value=2147483776, allowed=1..1073741760"):
        encode_one(one(ir.Copy(span(1, nbytes), span(0, nbytes))))


@pytest.mark.parametrize("variant", ["bcst", "b2b"])
def test_programs_that_were_split_are_proved(variant: str) -> None:
    program = fit(build(all_gather([(1 << 31) + 1000] * 4, in_place=True), variant))
    verify(program)
    assert sum(isinstance(c, ir.Copy | ir.Broadcast) for queue in program.queues for c in queue.commands) > 4 * 3 * 2


def encode_one(program: ir.Program, epoch: int = 1, addresses: Addresses | None = None) -> list[layout.Packet]:
    words = QueueWords(address_of(0, "words"))
    (queue,) = encode(program, 0, addresses or addresses_of([program]), words, epoch)
    return list(queue.packets)


def test_moves_that_do_not_fit_become_copies() -> None:
    odd = one(ir.Swap(span(1, 100), span(0, 100)), ir.Broadcast((span(0, 8, 200), span(1, 8)), span(0, 8)))
    names = [packet.format.name for packet in queues(odd, 1)[0].packets]
    barrier = ["fence", "poll"]
    three = ["copy", *barrier, "copy", *barrier, "copy"]
    assert names == [*three, *barrier, "copy", "copy", "fence", "atomic"], "which ends with its barriers' word at 0"
    with pytest.raises(ValueError, match="command 0 .swap .*nbytes .value=0x64, allowed=multiples of 64"):
        encode_one(odd)
    even = one(ir.Swap(span(1, 128), span(0, 128)), ir.Broadcast((span(0, 8, 224), span(1, 8)), span(0, 8, 512)))
    assert fit(even) == even


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (ir.Signal(ir.Flag(1, 0), ir.EPOCH, ir.SignalOp.ADD), "signal that sets"),
        (ir.Wait(ir.Flag(1, 0), ir.EPOCH), "a flag of another rank"),
        (ir.Stamp(0), "words.stamps"),
    ],
)
def test_commands_without_a_packet(command: object, text: str) -> None:
    with pytest.raises(ValueError, match=f"encode: rank 0 dma:0 command 0 .*{text}"):
        encode_one(one(command))


def test_values_end_where_a_sign_would_begin() -> None:
    wait = one(ir.Wait(ir.Flag(0, 0), ir.EPOCH))
    assert encode_one(wait, 2**31 - 1)[0]["value"] == 2**31 - 1
    with pytest.raises(ValueError, match="value=2147483648, allowed=0..2147483647: polls do not wrap"):
        encode_one(wait, 2**31)


def test_addresses_that_are_missing_or_in_rows() -> None:
    copy = one(ir.Copy(span(1, 64), span(0, 64)))
    with pytest.raises(ValueError, match="no address for the output of rank 1"):
        encode_one(copy, addresses=Addresses({(0, Buffer.OUTPUT): 1 << 40}, (0, 0)))
    rows = Pieces((0,), (64,), (1 << 40,), rows=((8, 16),))
    with pytest.raises(ValueError, match="rows"):
        encode_one(copy, addresses=Addresses({}, (0, 0), pieces={(0, Buffer.OUTPUT): rows}))


def test_stamps_are_timestamps() -> None:
    program = one(ir.Stamp(0), ir.Stamp(3))
    (queue,) = encode(program, 0, addresses_of([program]), words_of(0), 1)
    assert [packet.format.name for packet in queue.packets] == ["timestamp", "timestamp", "atomic"]
    assert queue.packets[1]["address"] - queue.packets[0]["address"] == 3 * 32
    assert sdma.decode(queue.to_bytes()) == queue.packets
