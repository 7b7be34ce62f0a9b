"""Calls with lists of tensors, by CPU ranks and on GPUs: bytes against a reference, caching, refusals, mismatches."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import MOVING_DTYPES, REDUCING_DTYPES, any_bytes, close, numbers, reduced, same_bytes, versions_of
from marks import long
from on_ranks import BOTH_STREAMS, default_stream, everyones, on_ranks
from sweeps import communicator, place

from sidelane import Communicator
from sidelane.choice.candidate import SM, everything, takes_one_tensor
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


@on_ranks(1, 2, 3, long(4), kinds=MOVING, seed=1, count=5, special={"bcst", "swap"})
@on_ranks(2, 3, kinds=REDUCING, seed=2, count=4, special={"b2b", "pcpy"})
@on_ranks(8, kinds=MOVING[:1], seed=1, count=2, special={"bcst"})
@on_ranks(gpu=BOTH_STREAMS, kinds=MOVING, seed=0, count=5, special={"bcst", "swap"})
@on_ranks(gpu=BOTH_STREAMS, kinds=MOVING, seed=1, count=5, special={"bcst", "swap"})
@on_ranks(gpu=True, kinds=REDUCING, seed=1, count=4, special=None, timeout_s=150)
def test_random_lists(
    group: dist.ProcessGroup, kinds: Sequence[Kind], seed: int, count: int, special: set[str] | None
) -> None:
    """Random lists in every variant, each made twice; in symmetric memory those of ``special`` run."""
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
            variant = {Kind.ALL_GATHER: "bcst", Kind.BROADCAST: "bcst", Kind.ALL_TO_ALL: "swap"}.get(kind, "auto")
            for again in range(2):
                symmetric.fill(again)
                symmetric.call(variant=variant)
                symmetric.check(variant)
            choice = comm.last_choice()
            assert choice is not None
            ran.add(choice.candidate.variant)
    assert special is None or ran <= special, ran
    assert kinds == REDUCING or special is None or ran == special, ran
    assert everyones(group, ran) == [ran] * group.size(), "auto chooses alike on all ranks"


@on_ranks(3)
def test_the_same_as_torch_distributed(group: dist.ProcessGroup) -> None:
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


@on_ranks(3, gpu=default_stream)
def test_edges(group: dist.ProcessGroup) -> None:
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
        before = versions_of(pair)
        work = comm.all_reduce(pair, async_op=True)
        work.wait()
        assert versions_of(pair) == [version + 1 for version in before]
        assert [tensor.tolist() for tensor in pair] == [[n * (n - 1) / 2] * 3, [n * (n - 1) // 2]]
        comm.all_reduce(pair)
        copies = comm.last_submitted().counts
        comm.all_reduce(pair)
        assert comm.last_submitted().counts == copies
        assert "all_reduce" in comm.last_submitted().collective
        assert "2 tensors" in comm.last_submitted().collective


@on_ranks(2, gpu=default_stream)
def test_a_repeated_call_plans_nothing(group: dist.ProcessGroup) -> None:
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
        assert counts == [1, 1, 2, 2]


@on_ranks(3, seed=0, calls=60)
@on_ranks(3, seed=1, calls=60)
@on_ranks(gpu=BOTH_STREAMS, seed=3, calls=300, timeout_s=150)
def test_lists_and_single_tensors_in_turn(group: dist.ProcessGroup, seed: int, calls: int) -> None:
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


@on_ranks(long(2), 3, seed=3, rounds=12, variants={"b2b", "pcpy"})
@on_ranks(gpu=BOTH_STREAMS, seed=5, rounds=20, variants=None, timeout_s=150)
def test_batches_of_several_kinds(group: dist.ProcessGroup, seed: int, rounds: int, variants: set[str] | None) -> None:
    """Collectives of several kinds in one call, single tensors among them, each batch made twice."""
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
    assert variants in (None, ran), ran
    assert everyones(group, ran) == [ran] * group.size()


@on_ranks(2, gpu=default_stream)
def test_batches_that_are_refused(group: dist.ProcessGroup) -> None:
    """Batches that every rank refuses, that end with an error, or that differ between ranks; then one that works."""
    words = (
        "numbers 0 and 1 in the batch overlap",
        "numbers 0 and 1 in the batch overlap",
        "variant for lists (value='swap'",
        "(number 0 in the batch)",
        "tensors expected (value=int, allowed=torch.Tensor) (number 0 in the batch)",
        "by zero",
        "ranks made different calls",
    )
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
        for word, (kind, variant, fill) in zip(words, wrong, strict=True):
            with pytest.raises(kind, match=re.escape(word)), comm.batch(variant=variant) as batch:
                fill(batch)
            assert first.eq(0).all()
        with pytest.raises(RuntimeError):
            batch.all_reduce(first)
        with comm.batch():
            pass
        with comm.batch() as batch:
            batch.all_gather(first, shard)
            batch.all_reduce(second)
        assert first.eq(1).all()


@on_ranks(2, gpu=default_stream)
def test_what_is_refused(group: dist.ProcessGroup) -> None:
    """Calls that every rank refuses; the communicator works on."""
    words = (
        "lists of tensors, but not both (value=Tensor next to a list; the parts of one collective are one tensor here)",
        "lists of tensors, but not both (value=Tensor next to a list; the parts of one collective are one tensor here)",
        "(number 1 in the lists)",
        "one length (value=2, 1)",
        "(number 0 in the lists)",
        "variant for lists (value='relay'",
        "variant for lists (value='one_shot_narrow'",
        "writes into the peers' outputs",
        "numbers 0 and 1 in the lists overlap",
        "numbers 0 and 1 in the lists overlap",
        "numbers 0 and 1 in the lists overlap",
        "dtype (value=bool",
        "tensors expected (value=list, allowed=torch.Tensor)",
        "tensors expected (value=list, allowed=torch.Tensor)",
        "tensors expected (value=list, allowed=torch.Tensor)",
        "tensors expected (value=list, allowed=torch.Tensor)",
    )
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
        for word, (kind, call) in zip(words, wrong, strict=True):
            with pytest.raises(kind, match=re.escape(word)):
                call()
        comm.all_gather(outputs, inputs)
        same = torch.zeros(5)
        comm.all_gather(pairs(5, 5)[0], [same, same])  # to read one tensor twice is fine


@on_ranks(3, gpu=default_stream)
@pytest.mark.parametrize("debug", [False, True])
def test_different_lists(group: dist.ProcessGroup, debug: bool) -> None:
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
    assert "3 tensors" in texts[1] and "2 tensors" in texts[1]
    assert "int32" in texts[2] and "float32" in texts[2]


KERNELS = (*MOVING, *REDUCING)
SMALL, LARGE = (0, 1, 7, 257, 5003), (300_001, 262_144)


@on_ranks(gpu=default_stream, timeout_s=150)
@pytest.mark.parametrize("seed", range(3))
def test_lists_by_kernels(group: dist.ProcessGroup, seed: int) -> None:
    """Every kernel that takes lists, on few and on many bytes, each call made three times; then back to back."""
    with communicator(group) as comm, torch.cuda.stream(torch.cuda.Stream()):
        rng = random.Random(seed)
        for kind, sizes, symmetric in itertools.product(KERNELS, (SMALL, SMALL + LARGE), (None, True)):
            variants = [v.variant for v in everything(kind) if v.implementation == SM and not takes_one_tensor(v)]
            case = Case(comm, kind, rng, rng.randint(2, 6), symmetric, sizes, alike=True)
            for variant, again in itertools.product(variants, range(3)):
                case.fill(again)
                before = comm.submitted()
                case.call(variant=variant)
                case.check(variant, again)
                moved = any(size for size, *_ in case.drawn)
                assert comm.submitted().kernels - before.kernels == int(moved)
                assert comm.submitted().peer_copies == before.peer_copies
        long = Case(comm, Kind.ALL_GATHER, rng, 300, sizes=(1, 24, 4096), symmetric=False)
        long.fill(0)
        for _ in range(50):  # nobody waits for anybody on the host
            long.call(variant="one_shot")
        long.check("many tensors")
        with pytest.raises(ValueError, match="one collective, reduction and root"):
            comm.all_reduce([torch.zeros(3), torch.zeros(3, dtype=torch.int32)], variant="one_shot")
        comm.all_reduce(mixed := [torch.ones(3), torch.ones(3, dtype=torch.int32)])
        assert [tensor.tolist() for tensor in mixed] == [[comm.world_size] * 3] * 2


@on_ranks(gpu=default_stream, replays=20, timeout_s=150)
@pytest.mark.parametrize("seed", range(2))
def test_graphs_of_lists(group: dist.ProcessGroup, seed: int, replays: int) -> None:
    """Lists of every kind and a batch of all kinds in one graph, replayed with fresh inputs and eager calls between."""
    with communicator(group) as comm:
        rng = random.Random(seed)
        cases = [Case(comm, kind, rng, 4) for kind in (*MOVING, *REDUCING)]
        for symmetric in (None, True):
            cases += [Case(comm, kind, rng, 4, symmetric, SMALL + LARGE, alike=True) for kind in KERNELS]
        together = [Case(comm, kind, rng, 2) for kind in (*MOVING, *REDUCING)]
        single, own = torch.empty(comm.world_size, dtype=torch.int64), torch.full((1,), comm.rank)

        def fill(again: int) -> None:
            for case in (*cases, *together):
                case.fill(again)
            torch.cuda.synchronize()

        def make() -> None:
            for case in cases:
                case.call()
            comm.all_gather(single, own)
            with comm.batch() as batch:
                for case in together:
                    case.call(batch)

        def check(*told: object) -> None:
            for case in (*cases, *together):
                case.check(*told)

        fill(0)
        make()  # staging cannot be allocated while a graph is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            make()
        for number in range(replays):
            fill(number)
            if (number + comm.rank) % 5 == 0:
                torch.cuda._sleep(3_000_000)
            graph.replay()
            check("replay", number)
            if number % 3 == 0:
                fill(number + 1000)
                make()
                check("eager", number)
        for _ in range(50):  # back to back, nobody waits for anybody on the host
            graph.replay()
        torch.cuda.synchronize()
        comm.synchronize()


@on_ranks(gpu=True)
@pytest.mark.parametrize("count", [2, 100])
def test_a_list_has_the_handshake_of_one_tensor(group: dist.ProcessGroup, count: int) -> None:
    """What one tensor and a list of them give to the engines, in place in symmetric memory."""
    with communicator(group) as comm, torch.cuda.stream(torch.cuda.Stream()):
        n, rank, size = comm.world_size, comm.rank, 4096
        outputs = [comm.empty(n * size) for _ in range(count)]
        inputs = [output[rank * size : (rank + 1) * size] for output in outputs]
        found = []
        for out, given in ((outputs[0], inputs[0]), (outputs, inputs)):
            for index, tensor in enumerate(inputs):
                tensor.fill_(100 * rank + index)
            comm.all_gather(out, given, variant="b2b")
            found.append(comm.last_submitted().counts)
        for index, output in enumerate(outputs):
            right = torch.arange(n).mul(100).add(index).repeat_interleave(size)
            assert output.eq(right).all()
        one, many = found
        assert (many.writes, many.waits, many.calls) == (one.writes, one.waits, one.calls)
        assert many.peer_copies == count * one.peer_copies
        assert many.kernels == one.kernels == 0


@on_ranks(gpu=default_stream)
def test_tensors_dropped_during_asynchronous_calls(group: dist.ProcessGroup) -> None:
    """Tensors that nobody holds during asynchronous calls."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        kept = []
        for number in range(30):
            outputs = [torch.empty(n * 70_000) for _ in range(3)]
            inputs = [torch.full((70_000,), float(number + rank + k)) for k in range(3)]
            kept.append((number, outputs, comm.all_gather(outputs, inputs, async_op=True)))
            del inputs
            torch.full((3 * 70_000,), -1.0)  # would land in the memory of the inputs
            while len(kept) > 3:
                then, outputs, work = kept.pop(0)
                work.wait()
                for k, output in enumerate(outputs):
                    right = torch.arange(n).add(then + k).repeat_interleave(70_000)
                    assert output.eq(right).all()
        comm.synchronize()
