"""What ranks execute in the tests of calls with lists: the same functions for CPU processes and for GPUs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import MOVING_DTYPES, REDUCING_DTYPES, any_bytes, close, numbers, reduced, same_bytes
from sweeps import communicator, place

from sidelane import Communicator
from sidelane.errors import MismatchError, PeerError
from sidelane.program.collective import Kind

MOVING = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST)
REDUCING = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


class Case:
    """Lists for one call, and what must be in the outputs afterwards.

    All ranks draw the same from ``rng``. Of each tensor: whether it is symmetric, in place, its size (one of ``sizes``)
    and its dtype. ``alike``: what reduces has one dtype, as kernels need it.
    """

    def __init__(
        self,
        comm: Communicator,
        kind: Kind,
        rng: random.Random,
        count: int,
        symmetric: bool | None = None,
        sizes: Sequence[int] = (0, 1, 7, 257, 1024, 5003),
        alike: bool = False,
    ) -> None:
        self.comm, self.kind = comm, kind
        self.root = rng.randrange(comm.world_size)
        self.op = rng.choice(("sum", "avg", "min", "max"))
        self.outputs: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        dtypes = MOVING_DTYPES if kind in MOVING else REDUCING_DTYPES
        dtypes = (rng.choice(dtypes),) if alike and kind in REDUCING else dtypes
        self.drawn = [
            (
                rng.choice(sizes),
                rng.choice(dtypes),
                rng.random() < 0.4,
                (rng.random() < 0.5) if symmetric is None else symmetric,
                (rng.random() < 0.5) if symmetric is None else symmetric,
            )
            for _ in range(count)
        ]
        for size, dtype, in_place, *places in self.drawn:
            self._make(size, dtype, in_place, places)

    def _make(self, size: int, dtype: torch.dtype, in_place: bool, places: Sequence[bool]) -> None:
        comm, kind = self.comm, self.kind
        n, own = comm.world_size, slice(comm.rank * size, (comm.rank + 1) * size)
        large, small = place(comm, places[0], n * size, dtype), place(comm, places[1], size, dtype)
        match kind:
            case Kind.ALL_GATHER:
                pair = (large, large[own] if in_place else small)
            case Kind.ALL_TO_ALL:
                pair = (large, large if in_place else place(comm, places[1], n * size, dtype))
            case Kind.BROADCAST:
                pair = (small, small)
            case Kind.REDUCE_SCATTER:
                pair = (large[own] if in_place else small, large)
            case _:
                pair = (small, small if in_place else place(comm, places[0], size, dtype))
        self.outputs.append(pair[0])
        self.inputs.append(pair[1])

    def fill(self, seed: int) -> None:
        """New inputs and poisoned outputs."""
        rank = self.comm.rank
        self.all_inputs = []
        for index, (output, input) in enumerate(zip(self.outputs, self.inputs, strict=True)):
            make = any_bytes if self.kind in MOVING else numbers
            given = [make(101 * seed + index, r, input.numel(), input.dtype) for r in range(self.comm.world_size)]
            output.view(torch.uint8).fill_(0x5A)
            if self.kind is not Kind.BROADCAST or rank == self.root:
                input.copy_(given[rank])
            self.all_inputs.append(given)

    def call(self, comm: Any = None, **options: Any) -> Any:
        """Make the call, or put it into a batch."""
        comm = comm if comm is not None else self.comm
        match self.kind:
            case Kind.ALL_GATHER | Kind.ALL_TO_ALL:
                return getattr(comm, self.kind)(self.outputs, self.inputs, **options)
            case Kind.BROADCAST:
                return comm.broadcast(self.outputs, root=self.root, **options)
            case Kind.REDUCE_SCATTER:
                return comm.reduce_scatter(self.outputs, tuple(self.inputs), op=self.op, **options)
        return comm.all_reduce(self.inputs, output=self.outputs, op=self.op, **options)

    def check(self, *told: object) -> None:
        """Compare every output, and every input that had to stay."""
        rank, n = self.comm.rank, self.comm.world_size
        for index, (output, input, given) in enumerate(zip(self.outputs, self.inputs, self.all_inputs, strict=True)):
            part = slice(rank * (input.numel() // n), (rank + 1) * (input.numel() // n))
            match self.kind:
                case Kind.ALL_GATHER:
                    right = torch.cat(given)
                case Kind.ALL_TO_ALL:
                    right = torch.cat([tensor[part] for tensor in given])
                case Kind.BROADCAST:
                    right = given[self.root]
                case Kind.REDUCE_SCATTER:
                    right = reduced(given, self.op)[part]
                case _:
                    right = reduced(given, self.op)
            message = (self.kind, index, self.drawn[index], *told)
            assert (same_bytes if self.kind in MOVING else close)(output, right), message
            apart = output.data_ptr() + output.nbytes <= input.data_ptr() or input.data_ptr() + input.nbytes <= (
                output.data_ptr()
            )
            if self.kind is not Kind.BROADCAST and apart:
                assert same_bytes(input, given[rank]), message


def lists(group: dist.ProcessGroup, kinds: Sequence[Kind], seed: int, count: int) -> set[str]:
    """Random lists in every variant, each made twice; the variants that ran."""
    ran = set()
    with communicator(group) as comm:
        rng = random.Random(seed)
        for kind in kinds:
            case = Case(comm, kind, rng, count)
            for number, variant in enumerate(("auto", "b2b", "pcpy")):
                for again in range(2):
                    case.fill(10 * number + again)
                    case.call(variant=variant)
                    case.check(variant, again)
            symmetric = Case(comm, kind, rng, count, symmetric=True)
            special = {Kind.ALL_GATHER: "bcst", Kind.BROADCAST: "bcst", Kind.ALL_TO_ALL: "swap"}.get(kind, "auto")
            for again in range(2):
                symmetric.fill(again)
                symmetric.call(variant=special)
                symmetric.check(special)
            choice = comm.last_choice()
            assert choice is not None
            ran.add(choice.candidate.variant)
    return ran


def against_torch(group: dist.ProcessGroup) -> None:
    """The same lists through torch.distributed, one collective a tensor."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        inputs = [numbers(7, rank, size, torch.float32) for size in (3, 100, 1)]
        outputs, expected = ([torch.empty(n * tensor.numel()) for tensor in inputs] for _ in range(2))
        comm.all_gather(outputs, inputs)
        for output, input, right in zip(outputs, inputs, expected, strict=True):
            dist.all_gather_into_tensor(right, input, group=group)
            assert torch.equal(output, right)
        shared = [tensor.clone() for tensor in inputs]
        comm.all_reduce(shared, op=dist.ReduceOp.MAX)
        for tensor, input in zip(shared, inputs, strict=True):
            dist.all_reduce(input, op=dist.ReduceOp.MAX, group=group)
            assert torch.equal(tensor, input)
        root = dist.get_global_rank(group, n - 1)
        comm.broadcast(
            shared_bytes := [any_bytes(3, rank, 50, torch.int16), any_bytes(4, rank, 1, torch.bool)], root=n - 1
        )
        for tensor, seed in zip(shared_bytes, (3, 4), strict=True):
            right = any_bytes(seed, rank, tensor.numel(), tensor.dtype)
            dist.broadcast(right.view(torch.uint8), root, group=group)
            assert same_bytes(tensor, right)


def edges(group: dist.ProcessGroup) -> None:
    """Empty lists, empty tensors, one tensor, tuples, modified tensors, asynchronous calls, counted calls."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        for empty in ([], ()):
            comm.all_gather(empty, empty)
            comm.all_to_all(empty, empty, variant="swap")
            comm.all_reduce(empty)
            assert comm.broadcast(empty, root=0, async_op=True).wait()
        comm.all_gather([torch.empty(0), torch.empty(0)], [torch.empty(0), torch.empty(0)])
        one = torch.full((2,), rank)
        (out,) = outputs = (torch.empty(2 * n, dtype=torch.int64),)
        comm.all_gather(outputs, [one])
        assert out.tolist() == [r for r in range(n) for _ in range(2)]
        pair = [torch.full((3,), float(rank)), torch.full((1,), rank)]
        before = [tensor._version for tensor in pair]
        work = comm.all_reduce(pair, async_op=True)
        work.wait()
        assert [tensor._version for tensor in pair] == [version + 1 for version in before]
        assert [tensor.tolist() for tensor in pair] == [[n * (n - 1) / 2] * 3, [n * (n - 1) // 2]]
        comm.all_reduce(pair)
        copies = comm.last_submitted().counts
        comm.all_reduce(pair)
        assert comm.last_submitted().counts == copies
        assert "all_reduce" in comm.last_submitted().collective
        assert "2 tensors" in comm.last_submitted().collective


def planned_once(group: dist.ProcessGroup) -> list[int]:
    """How often lists were looked at: only when a list is new, however often the call is made."""
    with communicator(group) as comm:
        seen = []
        original = type(comm.preparer).prepare

        def prepare(self: Any, *arguments: Any) -> Any:
            seen.append(arguments)
            return original(self, *arguments)

        comm.preparer.prepare = prepare.__get__(comm.preparer)  # type: ignore[method-assign]
        outputs, inputs = [torch.empty(4 * comm.world_size) for _ in range(3)], [torch.ones(4) for _ in range(3)]
        counts = []
        for call_inputs in (inputs, list(inputs), inputs[::-1], inputs):
            comm.all_gather(outputs, call_inputs)
            counts.append(len(seen))
        return counts


def streams_of_calls(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Lists, single tensors and variants in turn, with delays."""
    with communicator(group) as comm:
        rng = random.Random(seed)
        cases = [Case(comm, kind, rng, rng.randint(0, 4)) for kind in (*MOVING, *REDUCING) for _ in range(2)]
        single = torch.empty(3 * comm.world_size)
        delays = random.Random(1000 * seed + comm.rank)
        for number in range(calls):
            case = rng.choice(cases)
            case.fill(number)
            if delays.random() < 0.2:
                time.sleep(delays.random() * 0.003)
            if rng.random() < 0.5:
                comm.all_gather(single, torch.full((3,), float(comm.rank)), variant=rng.choice(("auto", "striped")))
            work = case.call(variant=rng.choice(("auto", "b2b", "pcpy")), async_op=rng.random() < 0.3)
            if work is not None:
                work.wait()
            case.check(number)


def batches(group: dist.ProcessGroup, seed: int, rounds: int) -> set[str]:
    """Collectives of several kinds in one call, single tensors among them, each batch made twice; what ran."""
    ran = set()
    with communicator(group) as comm:
        rng = random.Random(seed)
        for number in range(rounds):
            cases = [Case(comm, rng.choice((*MOVING, *REDUCING)), rng, rng.randint(0, 3)) for _ in range(3)]
            variant = rng.choice(("auto", "b2b", "pcpy"))
            single = torch.empty(5 * comm.world_size)
            for again in range(2):
                for case in cases:
                    case.fill(100 * number + 10 * again)
                with comm.batch(variant=variant, async_op=number % 3 == 0) as batch:
                    for case in cases:
                        case.call(batch)
                    batch.all_gather(single, torch.full((5,), float(comm.rank + again)))
                assert (batch.work is not None) == (number % 3 == 0)
                if batch.work is not None:
                    batch.work.wait()
                for case in cases:
                    case.check(variant, number)
                assert single.tolist() == [float(r + again) for r in range(comm.world_size) for _ in range(5)]
            choice = comm.last_choice()
            assert choice is not None
            ran.add(choice.candidate.variant)
            comm.all_gather(single, torch.full((5,), 1.0))
            assert single.eq(1).all()
    return ran


def refused_batches(group: dist.ProcessGroup) -> list[str]:
    """Batches that every rank refuses, that end with an error, or that differ between ranks; then one that works."""
    texts = []
    with communicator(group) as comm:
        n = comm.world_size
        first, second, shard = torch.zeros(n), torch.zeros(n), torch.ones(1)
        whole = torch.zeros(n * n)
        wrong: list[tuple[type[Exception], str, Callable[[Any], object]]] = [
            (ValueError, "auto", lambda batch: (batch.all_gather(first, shard), batch.all_reduce(first))),
            (ValueError, "auto", lambda batch: (batch.all_gather(first, shard), batch.all_gather(whole, first))),
            (ValueError, "swap", lambda batch: (batch.all_to_all(first, second), batch.all_gather(whole, shard))),
            (ValueError, "auto", lambda batch: batch.all_gather(first, second)),
            (TypeError, "auto", lambda batch: batch.broadcast(3, root=0)),
            (ZeroDivisionError, "auto", lambda batch: (batch.all_gather(first, shard), 1 // 0)),
            (
                MismatchError,
                "auto",
                lambda batch: batch.all_gather(first, shard) if comm.rank else batch.all_to_all(first, second),
            ),
        ]
        for kind, variant, fill in wrong:
            with pytest.raises(kind) as caught, comm.batch(variant=variant) as batch:
                fill(batch)
            texts.append(str(caught.value))
            assert first.eq(0).all()
        with pytest.raises(RuntimeError):
            batch.all_reduce(first)
        with comm.batch():
            pass
        with comm.batch() as batch:
            batch.all_gather(first, shard)
            batch.all_reduce(second)
        assert first.eq(1).all()
    return texts


def refused(group: dist.ProcessGroup) -> list[str]:
    """Calls that every rank refuses; the communicator works on."""
    texts = []
    with communicator(group) as comm:
        n = comm.world_size

        def pairs(*sizes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            return [torch.zeros(n * size) for size in sizes], [torch.zeros(size) for size in sizes]

        outputs, inputs = pairs(4, 5)
        shared = torch.zeros(2 * n * 4)
        overlapping = [shared[: n * 4], shared[n * 4 - 1 : 2 * n * 4 - 1]]
        wrong: list[tuple[type[Exception], Callable[[], object]]] = [
            (TypeError, lambda: comm.all_gather(outputs, inputs[0])),
            (TypeError, lambda: comm.all_gather(outputs[0], inputs)),
            (TypeError, lambda: comm.all_gather(outputs, [inputs[0], 3])),
            (ValueError, lambda: comm.all_gather(outputs, inputs[:1])),
            (ValueError, lambda: comm.all_gather(outputs, inputs[::-1])),
            (ValueError, lambda: comm.all_gather(outputs, inputs, variant="relay")),
            (ValueError, lambda: comm.all_gather(outputs, inputs, variant="one_shot_narrow")),
            (ValueError, lambda: comm.all_gather(outputs, inputs, variant="bcst")),
            (ValueError, lambda: comm.all_gather(overlapping, pairs(4, 4)[1])),
            (ValueError, lambda: comm.all_gather([outputs[0], outputs[1]], [inputs[0], outputs[0][:5]])),
            (ValueError, lambda: comm.broadcast([inputs[0], inputs[0]], root=0)),
            (ValueError, lambda: comm.all_reduce([torch.zeros(2, dtype=torch.bool)])),
            (TypeError, lambda: comm.all_to_all(outputs, outputs, output_split_sizes=[1], input_split_sizes=[1])),
            (TypeError, lambda: comm.scatter(inputs, outputs, root=0)),
            (TypeError, lambda: comm.gather(outputs, inputs, root=0)),
            (TypeError, lambda: comm.prepare_all_gather(outputs, inputs)),
        ]
        for kind, call in wrong:
            with pytest.raises(kind) as caught:
                call()
            texts.append(str(caught.value))
        comm.all_gather(outputs, inputs)
        same = torch.zeros(5)
        comm.all_gather(pairs(5, 5)[0], [same, same])  # to read one tensor twice is fine
    return texts


def different(group: dist.ProcessGroup, debug: bool) -> list[str]:
    """Calls in which one rank's list is another one: all ranks hear of it, and go on."""
    texts = []
    with communicator(group, debug=debug) as comm:
        n, odd = comm.world_size, comm.rank == 1

        def gather(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
            comm.all_gather(
                [torch.zeros(n * k, dtype=dtype) for k in sizes], [torch.zeros(k, dtype=dtype) for k in sizes]
            )

        gather((1, 2, 3))
        calls: list[Callable[[], object]] = [
            lambda: gather((5, 6) if odd else (6, 5)),
            lambda: gather((5, 6) if odd else (5, 6, 1)),
            lambda: gather((7, 8), torch.int32 if odd else torch.float32),
            lambda: comm.broadcast([torch.zeros(9)], root=int(odd)),
            lambda: comm.all_reduce(torch.zeros(9)) if odd else comm.all_reduce([torch.zeros(9)]),
        ]
        for call in calls:
            with pytest.raises(MismatchError) as caught:
                call()
            texts.append(str(caught.value))
        with pytest.raises(ValueError if odd else PeerError):
            comm.all_gather([torch.zeros(n * 4)], [torch.zeros(3 if odd else 4)])
        gather((4, 5))
        if debug:  # a repeated call against another repeated one
            with pytest.raises(MismatchError):
                gather((4, 5) if odd else (1, 2, 3))
        gather((1, 2, 3))
    return texts
