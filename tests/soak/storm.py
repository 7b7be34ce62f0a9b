"""A storm on one rank: ordinary tensors that come and go while peers reach them, with a call in each step."""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
import torch.distributed as dist

from sidelane.collectives.learning.protocol import MISSED, WENT_AHEAD
from sidelane.config import Config
from sidelane.session import Communicator
from sidelane.session.pools import SymmetricPool, pool
from soak import leftovers
from soak.account import Account, account
from soak.caller import Caller, Graph, Recorder, record
from soak.calls import Call
from soak.drawing import StormDrawing
from soak.episode import MODES, Storm
from soak.judge import Judge, Tally
from soak.memory import Bound, Memory, Values
from soak.seat import Seat
from soak.supply import Supply

SEASON = 2500
"""Steps with the same communicators and slots, and with what ranks have learnt."""

WARM_UP = 0.04
"""Share of the steps that come before the first look at memory: what the process takes once for all is there then. All
but what the driver keeps of the many graphs of a season: where there are several, the first of them is compared with.
"""

COMES_AGAIN, IS_ASYNCHRONOUS = 0.6, 0.08
"""Shares of steps: on tensors of a slot; asynchronous."""

REPLACES, FREES, STANDS_BY, EMPTIES, CHANGES_POOL, IS_LATE = 0.002, 0.4, 0.15, 0.004, 0.004, 0.005
"""Chance of a rank, before a step: to have other memory for its slot, to free a tensor of an earlier step, to have a
bystander, to give back its cache, to have another pool, to be late."""

CAPTURES, REPLAYS, LETS_GO = 0.002, 0.02, 0.0005
"""Chances of a step, for all ranks alike, that before it a graph is captured, replayed, let go of. A capture takes some
twenty steps."""

WARM_UP_CAPTURES = 0.02
"""The first of them before the first look at memory."""

MOST_KEPT = 24
"""Calls whose tensors are kept for a while."""

TOGETHER_EVERY = 32
"""Steps, behind which hosts wait for their devices, as in a program that looks at its loss."""

LOOK_EVERY = 64
"""Steps between two looks at how peers reach a tensor, and at how much of theirs is mapped here."""

MOST_MISSING = 32 << 20
"""Bytes of a GPU that may be missing behind a storm: drivers load code when it first runs."""

SAID = {WENT_AHEAD: "went ahead", MISSED: "missed"}
"""Names of counts, by the reason of a call's choice."""

MOST_GRAPHS = 4
"""Graphs at a time. The oldest goes for a new one."""

POOL_BYTES = 64 << 20
"""Bytes of a pool with symmetric memory: torch takes 2 MiB at a time from it, for each stream."""


class Where(StrEnum):
    """The memory in which the tensors of a graph lie."""

    SLOT = "tensors of a slot"
    ANY = "tensors that were there before"
    PRIVATE = "the graph's own memory"
    POOL = "a pool with symmetric memory"
    IN_POOL = "such a pool, made in the capture"


POOLED = (Where.POOL, Where.IN_POOL)


def play(
    storm: Storm,
    seed: int,
    timeout_s: float,
    seat: Seat,
    tally: Tally,
    group: dist.ProcessGroup | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Make all steps, count, and look at what is left.

    Args:
        storm: the steps and the setting.
        seed: the seed of everything that is random.
        timeout_s: the communicators' time-out.
        seat: this rank's.
        tally: takes the counts (``__main__.ABOUT`` says what they mean).
        group: the ranks; None: all there are.
        recorder: captures graphs; None: on GPUs torch's, and none between CPU ranks, which capture nothing.
    """
    if recorder is None and seat.device.type != "cpu":
        recorder = record
    player = _Player(storm, seed, timeout_s, seat, tally, group, recorder)
    warm_up = max(1, int(storm.steps * WARM_UP))
    looks = [player.taken()]
    player.captures = WARM_UP_CAPTURES
    player.season(warm_up)
    player.captures = CAPTURES
    looks.append(player.taken())
    for left in range(storm.steps - warm_up, 0, -SEASON):
        player.season(min(left, SEASON))
        looks.append(player.taken())
    noted, warm, first, last = tally.noted, looks[1], looks[2 if len(looks) > 3 else 1], looks[-1]
    missing, still = last.taken - first.taken, last.ours_since(looks[0])
    noted["bytes missing"], noted["mapped at the end"] = missing, leftovers.opened()
    noted["bystanders"], noted["stale"] = player.supply.bystanders, player.standing.wrong
    tally.compared_bytes = player.judge.compared_bytes + player.standing.compared_bytes
    tally.wrong = player.judge.wrong + player.standing.wrong
    if seat.device.type != "cpu":
        for number, look in enumerate(looks[1:]):
            noted[f"bytes behind season {number}"] = look.taken - warm.taken
        for name, nbytes in last.held.items():
            noted[f"bytes held, {name}"] = nbytes
    allowed = 0 if seat.device.type == "cpu" else MOST_MISSING
    if missing > allowed:
        words = f"{missing} bytes of memory are missing behind a storm (allowed={allowed}; all programs count)"
        tally.fail(f"{words}: {last.since(first)}")
    if still:
        tally.fail(f"communicators are closed, and their memory is held (value={still}): {last.since(looks[0])}")
    if noted["mapped at the end"]:
        tally.fail(f"{noted['mapped at the end']} allocations of other ranks are still mapped (allowed=0)")


class _Player:
    def __init__(
        self,
        storm: Storm,
        seed: int,
        timeout_s: float,
        seat: Seat,
        tally: Tally,
        group: dist.ProcessGroup | None,
        recorder: Recorder | None,
    ) -> None:
        self._recorder, self._has_pools = recorder, not storm.expandable
        self.captures = CAPTURES
        self._seat, self._tally, self._device, self._group = seat, tally, seat.device, group
        self._config = Config(timeout_s=timeout_s, profile="builtin", map_memory=MODES[storm.map_memory])
        self._draw = random.Random(f"sidelane storm {seed} {storm}")
        self._late = random.Random(f"sidelane storm {seed} {storm} {seat.rank}")
        self._on_cpu = self._device.type == "cpu"
        self._drawing = StormDrawing(self._draw, seat.world_size, on_cpu=self._on_cpu)
        self.judge = Judge(self._device, tally.describe, self._finish_calls)
        self.standing = Judge(self._device, tally.describe, self._finish_calls)
        self.supply = Supply(self._device, self._late, self.standing)
        self._communicators: list[Communicator] = []
        self._values = Values(self._device)

    def season(self, steps: int) -> None:
        """Make communicators, slots, and so many steps with them."""
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(Communicator(self._group, device=self._device, config=self._config))
            lane = stack.enter_context(Communicator(first.lane.session.lane()))
            other = stack.enter_context(Communicator(self._group, device=self._device, config=self._config))
            self._communicators[:] = [first, lane, other]
            callers = [
                Caller(each, Memory(each, 4096, self._values, self.supply.tensor), self.judge, self._tally)
                for each in self._communicators
            ]
            self._steps(steps, callers, self._graphs(first))
            self.judge.settle()
            self.supply.close()
            if not self._on_cpu:
                segments = sum(each.get("is_expandable", False) for each in torch.cuda.memory_snapshot())
                noted = self._tally.noted
                noted["expandable segments at most"] = max(noted["expandable segments at most"], segments)
        self._communicators.clear()

    def taken(self) -> Account:
        """Return what this rank's memory lacks, when all have let go of what they can."""
        self._values = Values(self._device)
        return account(self._device, self._group)

    def _graphs(self, first: Communicator) -> StormGraphs | None:
        """Return those of a season; with a pool where torch has such beside its segments of several pieces."""
        if self._recorder is None:
            return None
        made = pool(first, POOL_BYTES) if self._has_pools else None
        return StormGraphs(self._recorder, self.supply, made, self._tally.noted)

    def _steps(self, steps: int, callers: Sequence[Caller], graphs: StormGraphs | None) -> None:
        draw, late = self._draw, self._late
        slots = [(draw.choice(callers), call) for call in self._drawing.slots()]
        bound = [caller.memory.bind_anew(call) for caller, call in slots]
        kept: collections.deque[Sequence[Bound]] = collections.deque()
        turn = 0
        for step in range(steps):
            is_async, key = draw.random() < IS_ASYNCHRONOUS, draw.getrandbits(62)
            comes_again = draw.random() < COMES_AGAIN
            if late.random() < IS_LATE:
                time.sleep(0.002)
            self._come_and_go(kept)
            if graphs is not None:
                try:
                    kept += self._with_graphs(graphs, callers, slots, bound)
                except Exception as error:
                    error.add_note(f"before step {step}: {graphs.last}")
                    raise
            if comes_again:
                number, turn = turn, (turn + 1) % len(slots)
                caller, call = slots[number]
                if late.random() < REPLACES:
                    bound[number] = caller.memory.bind_anew(call)
                    self._tally.noted["replaced"] += 1
                self._make(caller, call, key, bound[number], is_async, step)
            else:
                caller, call = draw.choice(callers), self._drawing.fresh()
                tensors = caller.memory.bind_anew(call)
                self._make(caller, call, key, tensors, is_async, step)
                kept.append(tensors)
            if step % TOGETHER_EVERY == 0 and not self._on_cpu:
                torch.cuda.current_stream().synchronize()
            self._seat.beat(self._tally.calls.total())
        if graphs is not None:
            graphs.clear()

    def _with_graphs(
        self,
        graphs: StormGraphs,
        callers: Sequence[Caller],
        slots: Sequence[tuple[Caller, Call]],
        bound: Sequence[Sequence[Bound]],
    ) -> list[Sequence[Bound]]:
        """Capture, replay and let go of graphs before a step. Returns tensors that nobody needs any more."""
        draw = self._draw
        captures, replays, lets_go = draw.random() < self.captures, draw.random() < REPLAYS, draw.random() < LETS_GO
        gone: list[Sequence[Bound]] = []
        if captures:
            caller, key = draw.choice(callers), draw.getrandbits(62)
            where = draw.choice(graphs.places(in_pool=caller is not callers[-1]))
            if where is Where.SLOT:
                number = draw.randrange(len(slots))
                caller, call = slots[number]
                gone += graphs.capture(caller, (call,), key, where, bound[number])
            else:
                gone += graphs.capture(caller, self._drawing.captured(fits=where in POOLED), key, where)
        if replays and len(graphs):
            graphs.replay(draw.randrange(len(graphs)), draw.getrandbits(62))
        if lets_go and len(graphs):
            gone += graphs.drop(draw.randrange(len(graphs)))
        return gone

    def _come_and_go(self, kept: collections.deque[Sequence[Bound]]) -> None:
        """Do what a program does between two calls, by this rank's own chance."""
        late, noted = self._late, self._tally.noted
        while len(kept) > MOST_KEPT or (kept and late.random() < FREES):
            del kept[late.randrange(len(kept))]
        if late.random() < STANDS_BY:
            self.supply.stand_by()
        if late.random() < CHANGES_POOL:
            noted["pools"] += self.supply.new_pool()
        if late.random() < EMPTIES:
            noted["caches emptied"] += 1
            if self._on_cpu:
                gc.collect()
            else:
                torch.cuda.empty_cache()

    def _make(self, caller: Caller, call: Call, key: int, bound: Sequence[Bound], is_async: bool, step: int) -> None:
        noted = self._tally.noted
        try:
            caller.once(call, key, bound, asynchronous=is_async)
        except Exception as error:
            error.add_note(f"in step {step}: {call}{', asynchronous' if is_async else ''}")
            raise
        choice = caller.communicator.last_choice()
        noted[SAID.get(choice.reason, "others") if choice is not None else "others"] += 1
        if step % LOOK_EVERY == 0:
            noted["mapped at most"] = max(noted["mapped at most"], leftovers.opened())
            for each in bound:
                if each.guarded is not None:
                    noted[f"output {caller.communicator.reach(each.guarded).how}"] += 1

    def _finish_calls(self) -> None:
        for communicator in self._communicators:
            communicator.synchronize()


class StormGraphs:
    """The graphs of one rank, in one season. All ranks capture, replay and let go alike.

    A graph keeps its tensors, so that none is replayed whose tensors were freed; who lets go of it gets them.

    Args:
        record: captures.
        supply: makes tensors.
        pool: symmetric memory; None where there can be none.
        noted: counts graphs, by memory, and replays.
    """

    def __init__(
        self, record: Recorder, supply: Supply, pool: SymmetricPool | None, noted: collections.Counter[str]
    ) -> None:
        self._record, self._supply, self._pool, self._noted = record, supply, pool, noted
        self._graphs: list[tuple[Graph, Where]] = []
        self.last = "nothing"  # done last, in words

    def __len__(self) -> int:
        return len(self._graphs)

    def places(self, *, in_pool: bool) -> list[Where]:
        """Return memory for a graph. ``in_pool``: its calls are of the pool's session."""
        return [where for where in Where if where not in POOLED or (in_pool and self._pool is not None)]

    def capture(
        self, caller: Caller, calls: Sequence[Call], key: int, where: Where, slot: Sequence[Bound] | None = None
    ) -> list[Sequence[Bound]]:
        """Capture calls, each of which is made once before, since a capture can allocate nothing for Sidelane.

        ``slot``: tensors of the only call, with ``Where.SLOT``. Returns tensors of the graphs that had to go.
        """
        self.last = f"a capture on {where}: {'; '.join(map(str, calls))}"
        gone: list[Sequence[Bound]] = []
        pooled = [number for number, (_, other) in enumerate(self._graphs) if where in POOLED and other in POOLED]
        if pooled or len(self._graphs) >= MOST_GRAPHS:  # the pool has room for the tensors of one
            gone = self.drop(pooled[0] if pooled else 0)
        bound = [slot] if slot is not None else self._bind(caller, calls, where)
        for number, (call, each) in enumerate(zip(calls, bound, strict=True)):
            caller.once(call, key + number, each)
        captured = bound

        def act() -> None:
            nonlocal captured
            if where in (Where.PRIVATE, Where.IN_POOL):
                captured = self._bind(caller, calls, Where.PRIVATE)
            caller.start_all(calls, captured)

        replay = self._record(act, self._pool if where is Where.IN_POOL else None)
        self._graphs.append((Graph(caller, calls, captured, replay), where))
        self._noted["graphs"] += 1
        self._noted[f"graphs on {where}"] += 1
        return gone

    def replay(self, number: int, key: int) -> None:
        """Replay a graph on new inputs, and check it."""
        graph, where = self._graphs[number]
        self.last = f"a replay on {where}: {'; '.join(map(str, graph.calls))}"
        graph.replay(key)
        self._noted["replays"] += 1
        self._noted["replayed calls"] += len(graph.calls)

    def drop(self, number: int) -> list[Sequence[Bound]]:
        """Let go of a graph, once it has ended. Returns its tensors, but none in a pool, where there is little room."""
        if self._supply.on_gpu:
            torch.cuda.synchronize()
        graph, where = self._graphs.pop(number)
        self._noted["graphs let go of"] += 1
        return [] if where in POOLED else list(graph.bound)

    def clear(self) -> None:
        """Let go of all of them, and of the pool."""
        while self._graphs:
            self.drop(0)
        self._pool = None

    def _bind(self, caller: Caller, calls: Sequence[Call], where: Where) -> list[Sequence[Bound]]:
        make: Callable[[int], torch.Tensor] | None = self._supply.plain
        if where in POOLED:
            make = self._pooled
        elif where is not Where.PRIVATE:
            make = None
        with self._supply.only(make):
            return [caller.memory.bind_anew(call) for call in calls]

    def _pooled(self, nbytes: int) -> torch.Tensor:
        assert self._pool is not None
        with self._pool:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._supply.device)
