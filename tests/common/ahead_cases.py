"""What ranks do with ordinary tensors whose addresses come again from call to call."""

from __future__ import annotations

import collections
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
from reach_cases import MAPPING, mapped_here, on_gpus, private, shared

from sidelane import Communicator, Config
from sidelane.collectives import ahead, backend_cpu
from sidelane.collectives.ahead import INPUT_ELSEWHERE, OUTPUT_UNKNOWN, Ahead

SIZES = (1, 33, 5000)
SEGMENTS = (1, 5000, 3 << 20)
"""On GPUs, where torch keeps together what is smaller than 10 MB."""

KINDS = ("all_gather", "all_gather in place", "all_to_all", "broadcast", "gather", "scatter")


@contextmanager
def ahead_of_peers(lag: int = 4) -> Iterator[collections.Counter[str]]:
    """CPU ranks go by the protocol of GPUs, and are heard after fewer calls; how often they did what."""
    said: collections.Counter[str] = collections.Counter()
    real_say, real_post, real_settled = Ahead._say, Ahead._post_hit, Ahead.settled

    def say(self: Ahead, *args: Any) -> str:
        text = real_say(self, *args)
        if text in (INPUT_ELSEWHERE, OUTPUT_UNKNOWN):
            said[text] += 1
        return text

    def post_hit(self: Ahead, *args: Any) -> None:
        said["hits"] += 1
        real_post(self, *args)

    def settled(self: Ahead, *args: Any) -> bool:
        said["waits"] += 1
        return real_settled(self, *args)

    with (
        mock.patch.object(backend_cpu.CpuBackend, "hosts_meet", False),
        mock.patch.object(ahead, "LAG", lag),
        mock.patch.object(Ahead, "_say", say),
        mock.patch.object(Ahead, "_post_hit", post_hit),
        mock.patch.object(Ahead, "settled", settled),
    ):
        yield said


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


def what_comes_again(group: dist.ProcessGroup, layers: int) -> tuple[int, int, int]:
    """A model of some layers, again and again. Calls for which hosts waited, others, and of these such that missed."""
    with (
        ahead_of_peers(lag=32) as said,
        Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm,
    ):
        n, rank = comm.world_size, comm.rank
        slots = [Slot(kind, 700, n, rank) for _ in range(layers) for kind in KINDS[:3]]
        for step in range(8):
            for slot in slots:
                slot.run(comm, step, async_op=step > 5)
        choice = comm.last_choice()
        assert choice is not None and "no host waits" in choice.reason
        return said["waits"], said["hits"] + by_c(comm), said[INPUT_ELSEWHERE] + said[OUTPUT_UNKNOWN]


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


def storm(group: dist.ProcessGroup, seed: int, steps: int) -> tuple[dict[str, int], int]:
    """Calls of two communicators that come again, and tensors that some ranks replace: for good or for a call, by new
    memory, by memory that peers know, or by such that they cannot map. What ranks did, and what is left mapped."""
    draw, late = random.Random(seed), random.Random(100 * seed + dist.get_rank(group))
    gc.collect()
    before = mapped_here()
    with (
        ahead_of_peers(lag=draw.choice((1, 4, 9))) as said,
        Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm,
        Communicator(group, device=torch.get_default_device(), config=MAPPING) as second,
    ):
        n, rank, extra = comm.world_size, comm.rank, None
        slots = [Slot(kind, draw.choice(SEGMENTS if on_gpus() else SIZES), n, rank) for kind in KINDS]
        slots += [Slot("all_gather", slots[0].size, n, rank) for _ in range(2)]
        spare = [slot.new(offset=3) for slot in slots for _ in range(2)]
        for step in range(steps):
            share = 0.01 if step % 30 > 5 else 0.2  # of calls before which a rank replaces a tensor
            for number, slot in some_replaced(slots, spare, late, share):
                slot.run(second if number % 3 == 2 else comm, step, async_op=draw.random() < 0.1)
            if draw.random() < 0.1:
                extra = comm.empty(n, dtype=torch.int32)
                for _ in range(draw.randrange(1, 90)):  # posts are replaced
                    comm.all_gather(extra, extra[rank : rank + 1])
            if late.random() < 0.2:
                gc.collect()
                if on_gpus():
                    torch.cuda.empty_cache()
        said["by C"] = by_c(comm, second)
    said["hits"] += said["by C"]
    del slots, slot, spare, extra
    gc.collect()
    return dict(said), mapped_here() - before


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
    """Calls that nobody looks at before the end, some of them missed, with hosts that are late now and then. What the
    ranks did; and bytes that are wrong."""
    late = random.Random(dist.get_rank(group))
    config = Config(timeout_s=60, map_memory=True)
    device = torch.get_default_device()
    with ahead_of_peers(lag=16) as said, Communicator(group, device=device, config=config) as comm:
        n, rank, size = comm.world_size, comm.rank, 300_000
        inputs = [shared(size, torch.int32) for _ in range(4)]
        outputs = [shared(n * size, torch.int32).view(n, size) for _ in range(3)]
        wrong = torch.zeros((), dtype=torch.int64)
        ranks = torch.arange(n, dtype=torch.int32).view(n, 1)
        for step in range(steps):
            input = inputs[step % 2] if late.random() > 0.03 else inputs[2 + late.randrange(2)]
            output = outputs[late.randrange(3)]
            input.fill_(16 * step + rank)
            output.fill_(-1)
            comm.all_gather(output, input)
            wrong += (output != 16 * step + ranks).sum()
            input.fill_(-2)  # as soon as the call has ended
            if late.random() < 0.02:
                time.sleep(0.02)
        found = int(wrong.item())
        said["by C"] = by_c(comm)
    said["hits"] += said["by C"]
    return dict(said), found


def goes_wrong(group: dist.ProcessGroup, how: str, debug: bool) -> tuple[str, tuple[int, ...], str]:
    """Rank 1 does not make a call that goes ahead, in which rank 2 misses. What the others raise, and what then."""
    config = Config(timeout_s=0.5 if how == "stays away" else 30.0, map_memory=True, debug=debug)
    with ahead_of_peers() as said, Communicator(group, device="cpu", config=config) as comm:
        n, rank = comm.world_size, comm.rank
        slot, other = Slot("all_gather", 50, n, rank), Slot("all_to_all", 50, n, rank)
        for step in range(6):
            slot.run(comm, step), other.run(comm, step)
        assert said["hits"] > 0
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
        then = ""
        if how != "stays away" or rank != 1:
            try:
                slot.run(comm, 8)
            except Exception as error:
                then = type(error).__name__
        dist.barrier(group)
    return name, ranks, then


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


def goes_on_behind_refusals(group: dist.ProcessGroup, who: str, refused: int) -> Refused:
    """See :func:`with_refusals_between`."""
    with ahead_of_peers(lag=32) as said, Communicator(group, config=MAPPING) as comm:
        return with_refusals_between(comm, lambda: said["hits"], 100, who, refused)
