"""What ranks do with ordinary tensors while they learn, without waiting, which addresses come again."""

from __future__ import annotations

import collections
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pieces import MadeUpPieces, memory_of
from reach_cases import mapped_here, on_gpus, private, shared

import sidelane
from sidelane import Communicator, Config
from sidelane import config as settings
from sidelane.collectives import backend_cpu, reach_rules
from sidelane.collectives.learning import mappings, protocol
from sidelane.collectives.learning.mappings import Mappings
from sidelane.collectives.learning.protocol import AheadPrograms, Learning
from sidelane.collectives.prepare import Preparer
from sidelane.errors import UnavailableError
from sidelane.integrations import ledger

SIZES = (1, 33, 5000)
SEGMENTS = (1, 5000, 3 << 20)
"""On GPUs, where torch keeps together what is smaller than 10 MB."""

KINDS = ("all_gather", "all_gather in place", "all_to_all", "broadcast", "gather", "scatter")


def by_c(*comms: Communicator) -> int:
    """Hits that compiled code has made, which are not among those that are counted otherwise."""
    return sum(comm._repeats.hits for comm in comms if comm._repeats is not None)


class Slot:
    """A call that comes again, on tensors of its own."""

    def __init__(self, kind: str, size: int, n: int, rank: int) -> None:
        self.kind, self.size, self.n, self.rank = kind, size, n, rank
        self.output, self.input = self.new(), self.new()

    def new(self, *, is_private: bool = False, offset: int = 0) -> torch.Tensor:
        make = private if is_private else shared
        whole: torch.Tensor = make(self.n * self.size + offset, torch.int32)
        return whole[offset:]

    def run(self, comm: Communicator, step: int, *, async_op: bool = False) -> None:
        n, rank, size, output, input = self.n, self.rank, self.size, self.output, self.input
        output.fill_(-1)
        root = self.size % n
        sent = [1000 * step + 10 * rank + peer for peer in range(n)]
        came = [1000 * step + 10 * peer + rank for peer in range(n)]
        alike = [1000 * step + 10 * peer for peer in range(n)]
        input.view(n, size).copy_(torch.tensor(sent, dtype=torch.int32).view(n, 1).expand(n, size))
        part = input[:size]
        part_sent = sent[0]
        work: Any = None
        if self.kind == "all_gather":
            work, expected = comm.all_gather(output, part, async_op=async_op), alike
        elif self.kind == "all_gather in place":
            own = output[rank * size : (rank + 1) * size].fill_(part_sent)
            work, expected = comm.all_gather(output, own, async_op=async_op), alike
        elif self.kind == "all_to_all":
            work, expected = comm.all_to_all(output, input, async_op=async_op), came
        elif self.kind == "broadcast":
            if rank == root:
                output.copy_(input)
            work = comm.broadcast(output, root=root, async_op=async_op)
            expected = [1000 * step + 10 * root + peer for peer in range(n)]
        elif self.kind == "gather":
            into = output if rank == root else None
            work = comm.gather(into, part, root=root, async_op=async_op)
            expected = alike if rank == root else [-1] * n
        else:
            given = input if rank == root else None
            work = comm.scatter(output[:size], given, root=root, async_op=async_op)
            expected = [1000 * step + 10 * root + rank, *[-1] * (n - 1)]
        if work is not None:
            work.wait()
        found = output.view(n, size)
        for column in (0, size // 2, -1):
            assert found[:, column].tolist() == expected, (self.kind, step, found[:, column].tolist(), expected)


def some_replaced(
    slots: Sequence[Slot], spare: Sequence[torch.Tensor], late: random.Random, share: float
) -> Iterator[tuple[int, Slot]]:
    """Slots by number, for a call of each, of which this rank has replaced some: for good or for that call, by new
    memory, by memory that peers know, or by such that they cannot map."""
    for number, slot in enumerate(slots):
        kept = slot.output, slot.input
        name = late.choice(("output", "input"))
        how = late.random() if late.random() < share else 1.0
        if how < 0.25:
            setattr(slot, name, slot.new(offset=late.choice((0, 3))))
        elif how < 0.5:
            setattr(slot, name, spare[2 * number + (name == "input")])
        elif how < 0.65:
            setattr(slot, name, slot.new(is_private=True))
        elif how < 0.9:
            slot.output, slot.input = slot.new(), slot.new()
        yield number, slot
        if 0.5 <= how < 0.65 or (how < 1 and late.random() < 0.5):
            slot.output, slot.input = kept
        del kept


Refused = tuple[float, list[str], int, int]
"""Seconds of the calls behind refused ones, what became of these, and how many of the calls went ahead before and
behind."""


def with_refusals_between(comm: Communicator, hits: Callable[[], int], steps: int, who: str, refused: int) -> Refused:
    """Calls until they go ahead, then some in a row that rank 1 refuses, or all ranks do, then the first ones again."""
    slot, raised = Slot("all_gather", 700, comm.world_size, comm.rank), set()
    for step in range(steps):
        slot.run(comm, step)
    before = hits()
    for number in range(refused):
        bad = who == "all" or comm.rank == 1
        try:
            comm.all_gather(torch.empty((3 + number) * comm.world_size + bad), torch.empty(3 + number))
            raised.add("")
        except Exception as error:
            raised.add(type(error).__name__)
    began = time.monotonic()
    for step in range(steps):
        slot.run(comm, step)
    return time.monotonic() - began, sorted(raised), before, hits() - before


LISTS = ("all_gather", "all_to_all")
LEARNING = Config(timeout_s=30, map_memory="learn")


class ListSlot(Slot):
    """A list of an all-gather as usual, one of nothing and one in place; or of two all-to-alls. What is replaced of a
    slot are the tensors of the first."""

    def __init__(self, kind: str, size: int, n: int, rank: int) -> None:
        super().__init__(kind, size, n, rank)
        self.more = [self.new(), self.new()]
        self.nothing = torch.empty(0, dtype=torch.int32, device=self.output.device)

    def run(self, comm: Communicator, step: int, *, async_op: bool = False) -> None:
        n, rank, size = self.n, self.rank, self.size
        rows = [1000 * step + 10 * peer for peer in range(n)]
        filled = torch.tensor([1000 * step + 10 * rank + peer for peer in range(n)], dtype=torch.int32)
        for output in (self.output, self.more[0]):
            output.fill_(-1)
        if self.kind == "all_gather":
            own = self.more[0].view(n, size)[rank].fill_(rows[rank] + 1)
            outputs, inputs = [self.output, self.nothing, self.more[0]], [self.input[:size], self.nothing, own]
            self.input.fill_(rows[rank])
            work, expected = (
                comm.all_gather(outputs, inputs, async_op=async_op, variant="b2b"),
                [rows, [row + 1 for row in rows]],
            )
        else:
            for number, input in enumerate((self.input, self.more[1])):
                input.view(n, size).copy_((filled + 500 * number).to(input.device).view(n, 1).expand(n, size))
            outputs, inputs = [self.output, self.more[0]], [self.input, self.more[1]]
            came = [row + rank for row in rows]
            work, expected = (
                comm.all_to_all(outputs, inputs, async_op=async_op, variant="b2b"),
                [came, [each + 500 for each in came]],
            )
        if work is not None:
            work.wait()
        for output, of_ranks in zip((self.output, self.more[0]), expected, strict=True):
            for column in (0, size // 2, -1):
                assert output.view(n, size)[:, column].tolist() == of_ranks, (self.kind, step)


@contextmanager
def counted(least_bytes: int = 0) -> Iterator[collections.Counter[str]]:
    """Small calls teach as well, and those that a machine's times give to kernels; how often this rank did what."""
    said: collections.Counter[str] = collections.Counter()
    real_attend, real_hear = Learning.attend, Learning._hear

    def attend(self: Learning, *args: Any) -> Any:
        before = said["misses"]
        found = real_attend(self, *args)
        said["staged" if found is None else "hits" if said["misses"] == before else "missed"] += 1
        return found

    def hear(self: Learning, *args: Any) -> Any:
        said["misses"] += 1
        return real_hear(self, *args)

    with (
        mock.patch.object(reach_rules, "LEAST_BYTES", least_bytes),
        mock.patch.object(Preparer, "copies_mapped", return_value=True),
        mock.patch.object(Learning, "attend", attend),
        mock.patch.object(Learning, "_hear", hear),
    ):
        yield said


def done(said: collections.Counter[str], *comms: Communicator) -> dict[str, int]:
    """What this rank did, by compiled code as well."""
    lessons = sum(comm._repeats.tracked for comm in comms if comm._repeats is not None)
    hits = by_c(*comms)
    found = collections.Counter({"hits": hits, "staged": lessons - hits, "by C": lessons}) + said
    return dict(found)


def what_comes_again(group: dist.ProcessGroup, layers: int, steps: int) -> dict[str, int]:
    """A model of some layers, again and again."""
    with counted() as said, Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm:
        n, rank = comm.world_size, comm.rank
        slots = [Slot(kind, 700, n, rank) for _ in range(layers) for kind in KINDS[:2]]
        slots += [ListSlot("all_gather", 300, n, rank) for _ in range(layers)]
        for step in range(steps):
            for slot in slots:
                slot.run(comm, step, async_op=step % 3 == 2)
            time.sleep(0.001)  # for the thread that maps
        choice = comm.last_choice()
        assert choice is not None and "no host waits" in choice.reason
        assert str(comm.reach(slots[0].output)).startswith("mapped")
        return done(said, comm)


def sizes_between(group: dist.ProcessGroup, most: int, steps: int) -> tuple[dict[str, int], int]:
    """A loop around two calls, with one of a size that never comes again in each turn. What this rank did, and the
    number of signatures that it knows in the end."""
    with (
        counted() as said,
        mock.patch.object(protocol, "MOST_SIGNATURES", most),
        Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm,
    ):
        n, rank = comm.world_size, comm.rank
        slots, other = [Slot(kind, 700, n, rank) for kind in KINDS[:2]], Slot("all_gather", 1000, n, rank)
        for step in range(steps):
            for slot in slots:
                slot.run(comm, step)
            size = 300 + step
            comm.all_gather(other.output[: n * size], other.input[:size].fill_(step + rank))
            assert other.output[: n * size : size].tolist() == [step + peer for peer in range(n)]
            time.sleep(0.001)  # for the thread that maps
        assert comm.lane.path.learning is not None
        return done(said, comm), len(comm.lane.path.learning._signatures)


def lists_come_again(group: dist.ProcessGroup, kind: str, calls: int) -> tuple[dict[str, int], list[bool]]:
    """A loop around a list, of which rank 1 replaces one tensor in one call in the end. What this rank did, and whether
    the calls in the end were made ahead of what peers say."""
    with counted() as said, Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm:
        slot = ListSlot(kind, 300, comm.world_size, comm.rank)
        for step in range(calls):
            slot.run(comm, step)
            dist.barrier(group)  # hosts stay together
        ahead = []
        for step in range(3):
            kept = slot.input
            if step == 1 and comm.rank == 1:
                slot.input = slot.new()
            slot.run(comm, step)
            slot.input = kept
            choice = comm.last_choice()
            ahead.append(choice is not None and "no host waits" in choice.reason)
            dist.barrier(group)
        return done(said, comm), ahead


GivenBack = tuple[float, dict[str, int], dict[str, int], dict[str, int]]
"""Seconds; and what this rank did before memory was freed, in the calls behind that, and in the end."""


def gives_back(group: dist.ProcessGroup, size: int) -> GivenBack:
    """A loop around one call, until rank 0 frees its tensors. Nobody makes a call until peers have given back what they
    had mapped of it; then all go on, first as if it was expected where it lay."""
    if on_gpus():
        torch.cuda.empty_cache()  # tensors get segments of their own
    with counted() as said, Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm:
        slot = Slot("all_gather", size, comm.world_size, comm.rank)

        def calls(count: int) -> dict[str, int]:
            for step in range(count):
                slot.run(comm, step)
                dist.barrier(group)  # hosts stay together
            return done(said, comm)

        before, reached = calls(150), mapped_here()
        dist.barrier(group)
        began = time.monotonic()
        if comm.rank == 0:
            del slot.output, slot.input
            gc.collect()
            if on_gpus():
                torch.cuda.empty_cache()
        while comm.rank != 0 and mapped_here() > reached - (1 if on_gpus() else 2):
            assert time.monotonic() < began + 20, "peers keep what was freed"
            time.sleep(0.01)
        seconds = time.monotonic() - began
        dist.barrier(group)
        if comm.rank == 0:
            slot.output, slot.input = slot.new(), slot.new()
        return seconds, before, calls(5), calls(150)


def is_limited(group: dist.ProcessGroup, size: int) -> list[str]:
    """Two loops, of which the limit of what peers may map lets one go ahead. Why their last calls ran as they did."""
    room = dataclasses.replace(LEARNING, mapped_bytes=3 * 4 * size * dist.get_world_size(group))
    with counted(), Communicator(group, device=torch.get_default_device(), config=room) as comm:
        slots, reasons = [Slot(kind, size, comm.world_size, comm.rank) for kind in ("all_gather", "all_to_all")], []
        for slot in slots:
            for step in range(150):
                slot.run(comm, step)
                dist.barrier(group)
        for slot in slots:
            slot.run(comm, 7)
            choice = comm.last_choice()
            reasons.append("" if choice is None else choice.reason)
        return reasons


def storm(group: dist.ProcessGroup, seed: int, steps: int) -> tuple[dict[str, int], int]:
    """Calls of two communicators that come again, and tensors that some ranks replace: for good or for a call, by new
    memory, by memory that peers know, or by such that they cannot map; hosts that are late, also while they make a call
    ready; mappings that fail or take their time; what is freed is given back soon. What this rank did, and what is left
    mapped."""
    draw, late = random.Random(seed), random.Random(100 * seed + dist.get_rank(group))
    gc.collect()
    before = mapped_here()
    real_map = Mappings.map

    def map_or_fail(self: Mappings, name: Any, handle: str) -> None:
        real_map(self, name, "nonsense" if late.random() < 0.02 else handle)

    real_prepare = AheadPrograms.prepare

    def prepare_late(self: AheadPrograms, *args: Any) -> Any:
        if late.random() < 0.1:
            time.sleep(0.01)
        return real_prepare(self, *args)

    with (
        counted() as said,
        mock.patch.object(Mappings, "map", map_or_fail),
        mock.patch.object(mappings, "LOOK_S", 0.2 if on_gpus() else 0.002),
        mock.patch.object(AheadPrograms, "prepare", prepare_late),
        Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm,
        Communicator(group, device=torch.get_default_device(), config=LEARNING) as second,
    ):
        n, rank, extra = comm.world_size, comm.rank, None
        slots = [Slot(kind, draw.choice(SEGMENTS if on_gpus() else SIZES), n, rank) for kind in KINDS]
        slots += [Slot("all_gather", slots[0].size, n, rank) for _ in range(2)]
        slots += [ListSlot(kind, draw.choice(SEGMENTS if on_gpus() else SIZES), n, rank) for kind in LISTS]
        spare = [slot.new(offset=3) for slot in slots for _ in range(2)]
        for step in range(steps):
            share = 0.01 if step % 40 > 3 else 0.2  # of calls before which a rank replaces a tensor
            for number, slot in some_replaced(slots, spare, late, share):
                slot.run(second if number % 3 == 2 else comm, step, async_op=draw.random() < 0.1)
            if draw.random() < 0.1:
                extra = comm.empty(n, dtype=torch.int32)
                for _ in range(draw.randrange(1, 90)):  # calls that teach nothing
                    comm.all_gather(extra, extra[rank : rank + 1])
            if late.random() < 0.1:
                time.sleep(0.002)
            if late.random() < 0.2:
                gc.collect()
                if on_gpus():
                    torch.cuda.empty_cache()
        found = done(said, comm, second)
    del slots, slot, spare, extra
    gc.collect()
    return found, mapped_here() - before


def storm_of_pieces(group: dist.ProcessGroup, seed: int, steps: int) -> dict[str, int]:
    """The same in memory of a made-up driver: tensors of several pieces, of which those freed last are given out first,
    and nothing is left of it."""
    pieces = MadeUpPieces(1 << 14)
    with (
        mock.patch.object(backend_cpu, "SharedTensors", return_value=memory_of(pieces)),
        mock.patch(f"{__name__}.shared", pieces.tensor),
    ):
        said, _ = storm(group, seed, steps)
    gc.collect()
    assert not pieces.mapped and not pieces.reserved, "what peers have given is unmapped"
    assert not pieces.counts, "what was freed here is retained by nobody"
    return said


def hosts_run_ahead(group: dist.ProcessGroup, steps: int) -> tuple[dict[str, int], int]:
    """Asynchronous calls that nobody waits for before the end, with hosts that are late now and then, by more than
    is on record. What this rank did; and bytes that are wrong."""
    late = random.Random(dist.get_rank(group))
    with counted() as said, Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm:
        n, rank, size = comm.world_size, comm.rank, 200
        inputs = [shared(size, torch.int32) for _ in range(2)]
        outputs = shared(100 * n * size, torch.int32).view(100, n, size)
        expected = torch.arange(n, dtype=torch.int32).view(1, n, 1)
        wrong = 0
        for step in range(steps):
            if late.random() < 0.2:
                time.sleep(0.01)
            burst = 100 if step % 5 == 4 else 8
            for input in inputs:
                input.fill_(16 * step + rank)
            outputs.fill_(-1)
            works = []
            for number in range(burst):
                if late.random() < 0.01:
                    time.sleep(0.01)
                works.append(comm.all_gather(outputs[number], inputs[number % 2], async_op=True))
            for work in works:
                assert work is not None
                work.wait()
            wrong += int((outputs[:burst] != 16 * step + expected).sum())
        return done(said, comm), wrong


def two_orders(group: dist.ProcessGroup, calls: int) -> dict[str, int]:
    """Asynchronous calls on two lanes, in one order on rank 0 and in the other one elsewhere, more of them than are on
    record: a host that waited for its peers' hosts would wait for ever."""
    with (
        counted() as said,
        Communicator(group, device=torch.get_default_device(), config=LEARNING) as first,
        Communicator(group, device=torch.get_default_device(), config=LEARNING) as second,
    ):
        n, rank = first.world_size, first.rank
        tensors = [shared(n * 50, torch.int32).view(n, 50) for _ in range(2)]
        inputs = [shared(50, torch.int32) for _ in range(2)]
        lanes = [(first, tensors[0], inputs[0]), (second, tensors[1], inputs[1])]
        for comm, output, input in lanes:  # which is agreed on, and learnt
            for _ in range(calls):
                comm.all_gather(output, input.fill_(rank))
        works = []
        for comm, output, input in lanes if rank == 0 else lanes[::-1]:
            works += [comm.all_gather(output, input, async_op=True) for _ in range(calls)]
        for work in works:
            assert work is not None
            work.wait()
        for output in tensors:
            assert output[:, -1].tolist() == list(range(n))
        return done(said, first, second)


def one_cannot_map(group: dist.ProcessGroup) -> tuple[str, dict[str, int]]:
    """Rank 1 may not open what its peers offer: all ranks go on staging that."""
    with counted() as said, Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm:
        n, rank = comm.world_size, comm.rank

        def refuse(handle: str, name: str) -> Any:
            raise UnavailableError("planted")

        assert comm._backend.ordinary is not None
        if rank == 1:
            comm._backend.ordinary.map = refuse  # type: ignore[method-assign]
        slot = Slot("all_gather", 100, n, rank)
        for step in range(150):
            slot.run(comm, step)
        return str(comm.reach(slot.output)), done(said, comm)


def goes_wrong(group: dist.ProcessGroup, how: str) -> tuple[str, tuple[int, ...]]:
    """Rank 1 does not make a call that goes ahead, in which rank 2 misses. What this rank raises."""
    config = Config(timeout_s=3.0 if how == "stays away" else 30.0, map_memory="learn")
    with counted() as said, Communicator(group, device=torch.get_default_device(), config=config) as comm:
        n, rank = comm.world_size, comm.rank
        slot, other = Slot("all_gather", 50, n, rank), Slot("all_to_all", 50, n, rank)
        for step in range(120):
            slot.run(comm, step), other.run(comm, step)
        assert done(said, comm)["hits"] > 0
        if rank == 2:
            slot.input = slot.new()
        name, ranks = "", ()
        try:
            if rank != 1:
                slot.run(comm, 7)
            elif how == "refuses":
                comm.all_gather(slot.output, slot.output[:7])
            elif how == "makes another":
                other.run(comm, 7)
        except Exception as error:
            name, ranks = type(error).__name__, tuple(getattr(error, "ranks", ()))
        dist.barrier(group)
    return name, ranks


def goes_on_behind_refusals(group: dist.ProcessGroup, who: str, refused: int) -> Refused:
    """See :func:`with_refusals_between`."""
    with counted() as said, Communicator(group, device=torch.get_default_device(), config=LEARNING) as comm:
        return with_refusals_between(comm, lambda: done(said, comm).get("hits", 0), 400, who, refused)


def in_a_group(group: dist.ProcessGroup, calls: int) -> list[str]:
    """A process group's calls, which come again. What its report says of them."""
    with counted(), settings.override(LEARNING):
        made = sidelane.wrap(group)
        n, rank = group.size(), group.rank()
        output, input = shared(n * 50, torch.int32), shared(50, torch.int32)
        ledger.reset()
        for step in range(calls):
            dist.all_gather_into_tensor(output, input.fill_(step + rank), group=made)
            assert output[49::50].tolist() == [step + peer for peer in range(n)]
            dist.barrier(group)
        found = [row.why for row in sidelane.report().rows if row.operation == "all_gather_into_tensor"]
        dist.destroy_process_group(made)
        return found
