"""Programs that take turns, with real bytes: through the communicator, and as graphs would run them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import sweeps
import torch
import torch.distributed as dist
from marks import long
from ranks import RankPool
from worlds import POISON, LocalWorld, check, fill, random_delays, wrong_bytes

from sidelane import Communicator, Config
from sidelane.collectives.alternate import OPENING, AlternatingProgram, CallTurns
from sidelane.execute.base import NO_STREAM, Addresses, Place
from sidelane.execute.cpu import CpuExecutor
from sidelane.program.builders import build
from sidelane.program.builders.alternating import SLOT_BYTES, alternation, flags_of
from sidelane.program.collective import (
    Buffer,
    Collective,
    all_gather,
    all_to_all,
    broadcast,
    gather,
    scatter,
)
from sidelane.program.ir import Program, Queue
from sidelane.program.transform import freeze

# --- through the communicator -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "seed"), [long(2, 1), (3, 2), long(8, 4)])
def test_calls_of_every_kind_in_turn(pool: RankPool, n: int, seed: int) -> None:
    pool.run(sweeps.alternating, n, seed, {2: 1000, 3: 300, 4: 600, 8: 80}[n], timeout_s=150)


def what_ran(group: dist.ProcessGroup) -> list[Any]:
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        whole = torch.empty(n * 8)
        part = whole[rank * 8 : rank * 8 + 8].fill_(float(rank))
        comm.all_gather(whole, part, variant="alternating")
        assert whole.view(n, 8)[:, 0].tolist() == [float(r) for r in range(n)]
        last, choice = comm.last_submitted(), comm.last_choice()
        assert last is not None
        assert choice is not None
        counts = last.counts
        return [
            last.variant,
            choice.candidate.variant,
            counts.local_copies,
            counts.peer_copies,
            counts.writes,
            counts.waits,
            counts.kernels,
        ]


def test_one_handshake_is_what_runs(pool: RankPool) -> None:
    assert pool.run(what_ran, 4) == [["alternating", "alternating", 2, 3, 4, 4, 0]] * 4


def refusals(group: dist.ProcessGroup) -> None:
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        n = comm.world_size
        big, out = torch.zeros(SLOT_BYTES + 1, dtype=torch.uint8), torch.empty(n * (SLOT_BYTES + 1), dtype=torch.uint8)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"sends in all_gather.*allowed=..{SLOT_BYTES}"):
                comm.all_gather(out, big, variant="alternating")
            with pytest.raises(ValueError, match="takes turns"):
                comm.all_gather(out[:n], big[:1], variant="alternating+prelaunch")
            with pytest.raises(ValueError, match="allowed=auto, b2b"):
                comm.all_reduce(big, variant="alternating")
            # A refused call takes no turn.
            comm.all_gather(out[:n], big[:1].fill_(comm.rank), variant="alternating")
            assert out[:n].tolist() == list(range(n))
        comm.all_gather(out[:-n], big[1:], variant="alternating")
        assert out[-n - 1] == 0


def test_what_cannot_take_turns_is_refused_and_takes_none(pool: RankPool) -> None:
    pool.run(refusals, 3)


def alone(group: dist.ProcessGroup) -> None:
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        out = torch.empty(4)
        for value in (1.0, 2.0, 3.0):
            comm.all_gather(out, torch.full((4,), value), variant="alternating")
            assert out.eq(value).all()
            comm.all_to_all(out, out, variant="alternating")


def test_one_rank_alone(pool: RankPool) -> None:
    pool.run(alone, 1)


# --- whose turn it is -------------------------------------------------------------------------------------------------


def test_eager_calls_take_turns_and_every_capture_begins_with_an_opening() -> None:
    captures = iter((7, 7, 7, 7, 8, 7, 7, 9, 9))
    turns = CallTurns(lambda place: next(captures))
    assert [turns.eager(NO_STREAM) for _ in range(3)] == [0, 1, 0]
    # 7 goes on after 8 has begun: an opening may follow anything, so it has another one.
    assert [turns.captured(NO_STREAM) for _ in range(9)] == [OPENING, 1, 0, 1, OPENING, OPENING, 1, OPENING, 1]
    assert turns.eager(NO_STREAM) == 1, "graphs have turns of their own"


class Recorder:
    """A loaded program that only says that it ran."""

    def __init__(self, program: Program, log: list[tuple[str, int]]) -> None:
        self.program, self.log = program, log

    def run(self, epoch: int, place: Place) -> None:
        self.log.append((self.program.variant, epoch))


def test_calls_of_different_programs_share_their_turns() -> None:
    log: list[tuple[str, int]] = []
    loads: list[Program] = []

    def load(program: Program) -> Any:
        loads.append(program)
        return Recorder(program, log)

    captures = iter((1, 1, 1, 2))
    turns = CallTurns(lambda place: next(captures))
    collectives = [all_gather([8] * 2), all_to_all([[4] * 2] * 2)]
    calls = [AlternatingProgram(alternation(c, frozen=False), load, turns, captured=False) for c in collectives]
    assert len(loads) == 4, "both turns, before the first call"
    graph = [AlternatingProgram(alternation(c, frozen=True), load, turns, captured=True) for c in collectives]
    assert len(loads) == 4, "in a graph only what is needed"
    for epoch, call in enumerate((calls[0], calls[1], calls[1], *graph, graph[0], graph[0]), start=1):
        call.run(epoch, NO_STREAM)
    names = [variant for variant, _ in log]
    assert names == ["alternating"] * 3 + [f"alternating{end}+frozen" for end in ("+opening", "", "", "+opening")]
    assert loads[4:] == [graph[0]._programs[OPENING], graph[1]._programs[1], graph[0]._programs[0]]


# --- as graphs would run them -----------------------------------------------------------------------------------------

SLOT = 4096
FLAG_SETS = 2
ORDINARY = 256


class Call(NamedTuple):
    """A program with the memory that it works on, on every rank."""

    program: Program
    memory: dict[tuple[int, Buffer], torch.Tensor]
    loaded: list[Any]


class Stage:
    """Ranks as threads, with slots and flags laid out as a communicator does."""

    def __init__(self, world: LocalWorld, n: int) -> None:
        self.n, self.executors = n, world.executors
        self.slots = [torch.full((4 * SLOT,), POISON, dtype=torch.uint8) for _ in range(n)]
        self.flags = [torch.zeros(2 * ORDINARY + FLAG_SETS * flags_of(n), dtype=torch.int32) for _ in range(n)]

    def load(self, program: Program, flags: int, slots: int | None) -> Call:
        memory = {
            (rank, buffer): torch.empty(program.buffer_bytes(rank, buffer), dtype=torch.uint8)
            for rank in range(self.n)
            for buffer in Buffer
        }
        if slots is not None:
            memory |= {(rank, Buffer.STAGING): self.slots[rank][2 * SLOT * slots :] for rank in range(self.n)}
        buffers = {place: tensor.data_ptr() for place, tensor in memory.items()}
        addresses = Addresses(buffers, tuple(words.data_ptr() + 4 * flags for words in self.flags))
        executors: Sequence[CpuExecutor] = self.executors
        return Call(program, memory, [executor.load(program, addresses) for executor in executors])

    def turns(self, collective: Collective, *, frozen: bool, flag_set: int) -> list[Call]:
        made = alternation(collective, frozen=frozen, slot_bytes=SLOT)
        programs = [*made.turns] if made.opening is None else [*made.turns, made.opening]
        base = 2 * ORDINARY + flag_set * flags_of(self.n)
        return [self.load(program, base, int(frozen)) for program in programs]

    def run(self, calls: Sequence[Call]) -> None:
        """Every rank makes all calls, back to back, in a thread of its own; what it then has is checked."""
        problems: list[BaseException] = []

        def rank_thread(rank: int) -> None:
            try:
                for epoch, call in enumerate(calls, start=1):
                    collective = call.program.collective
                    input, output = call.memory[rank, Buffer.INPUT], call.memory[rank, Buffer.OUTPUT]
                    fill(collective, rank, epoch, input, output)
                    call.loaded[rank].start(epoch).wait()
                    check(collective, rank, epoch, input, output)
                    input.fill_(POISON)  # a peer that still read it would see this
                    output.fill_(POISON)
            except BaseException as error:
                problems.append(error)
                for executor in self.executors:
                    executor.close()

        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive()
        if problems:
            raise problems[0]


def some_collectives(n: int) -> list[Collective]:
    return [
        all_gather([70 + 13 * rank for rank in range(n)], in_place=True),
        all_gather([0, *[33] * (n - 1)]),
        all_to_all([[5 * (i + 2 * j) % 29 for j in range(n)] for i in range(n)]),
        all_to_all([[21 + i + j for j in range(n)] for i in range(n)], in_place=True),
        broadcast(101, n, 1, in_place=True),
        scatter([17] * n, 0),
        gather([40 + rank for rank in range(n)], n - 1),
    ]


@pytest.mark.parametrize(("n", "seed"), [(2, 0), (3, 1), long(4, 2), long(5, 3)])
def test_graphs_and_eager_calls_with_random_delays(n: int, seed: int) -> None:
    """Graphs of 1 to 4 calls are replayed; eager calls and ordinary programs come between."""
    draw = random.Random(seed)
    delays = {rank: random_delays(seed + rank, 0.02, 0.001) for rank in range(n)}
    with LocalWorld(n, delays=delays) as world:
        stage = Stage(world, n)
        pool = some_collectives(n)
        eager = [stage.turns(c, frozen=False, flag_set=0) for c in pool]
        captured = [stage.turns(c, frozen=True, flag_set=1) for c in pool]
        ordinary = [stage.load(build(c, "b2b"), 0, None) for c in pool[:3]]
        ordinary += [stage.load(freeze(build(c, "pcpy")), ORDINARY, None) for c in pool[:3]]
        graphs = [
            [draw.choice(captured)[OPENING if call == 0 else call % 2] for call in range(length)]
            for length in (1, 2, 3, 4, 1, 3)
        ]

        def sequence() -> Iterator[Call]:
            turn = 0
            for _ in range(300):
                choice = draw.random()
                if choice < 0.4:
                    yield from draw.choice(graphs)
                elif choice < 0.9:
                    yield draw.choice(eager)[turn]
                    turn = 1 - turn
                else:
                    yield draw.choice(ordinary)

        stage.run(list(sequence()))


def late_reader(before: Callable[[Queue, int], bool], seconds: float) -> Callable[[Queue, int], None]:
    def delay(queue: Queue, index: int) -> None:
        if before(queue, index):
            threading.Event().wait(seconds)

    return delay


@pytest.mark.parametrize("in_turn", [True, False])
def test_out_of_turn_a_slow_rank_reads_the_next_call(in_turn: bool) -> None:
    """What ``verify`` refuses goes wrong: rank 1 pulls late, rank 0 has copied its next input into the slot by then."""
    collective, n = all_gather([64] * 2), 2
    program = alternation(collective, frozen=False, slot_bytes=SLOT).turns[0]
    pulling = len(program.queues_of(1)[0].commands) - 1
    delay = late_reader(lambda queue, index: index == pulling, 0.5)
    with LocalWorld(n, delays={1: delay}) as world:
        stage = Stage(world, n)
        even, odd = stage.turns(collective, frozen=False, flag_set=0)
        wrong = 0
        done: list[int] = []

        def rank_thread(rank: int) -> None:
            nonlocal wrong
            for epoch, call in enumerate((even, odd if in_turn else even), start=1):
                memory = call.memory[rank, Buffer.INPUT], call.memory[rank, Buffer.OUTPUT]
                fill(collective, rank, epoch, *memory)
                call.loaded[rank].start(epoch).wait()
                wrong += wrong_bytes(collective, rank, epoch, *memory)
            done.append(rank)

        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert sorted(done) == [0, 1]
        assert (wrong == 0) is in_turn
