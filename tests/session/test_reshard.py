"""All-to-alls with a layout by CPU ranks and on GPUs: bytes against permute, all-to-all, permute; caching, refusals."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import MOVING_DTYPES, any_bytes, same_bytes
from marks import long
from on_ranks import default_stream, on_ranks
from sweeps import communicator, place

from sidelane import Communicator
from sidelane.errors import MismatchError, PeerError
from sidelane.ops import library, reshard


class Reshard:
    """Tensors of one exchange. All ranks draw the same from ``rng``.

    Args:
        comm: that makes it.
        rng: draws shape, dimensions, and whether parts are as torch splits them, or sizes are given.
        dtype: of the tensors; None for any.
    """

    def __init__(self, comm: Communicator, rng: random.Random, dtype: torch.dtype | None = None) -> None:
        n, rank = comm.world_size, comm.rank
        self.comm, self.dtype = comm, dtype or rng.choice(MOVING_DTYPES)
        count = rng.randint(2, 5)
        self.scatter_dim, self.gather_dim = rng.sample(range(count), 2)
        self.shape = [rng.choice((1, 2, 3, 5)) for _ in range(count)]
        self.given = rng.random() < 0.4
        even = rng.random() < 0.5
        sizes = []
        for dim in (self.scatter_dim, self.gather_dim):
            size = n * rng.randint(1, 4) if even else rng.randint(0, 3 * n)
            if self.given and not even:
                sizes.append([rng.choice((0, 1, 2, 5)) for _ in range(n)])
                size = sum(sizes[-1])
            else:
                sizes.append([len(part) for part in torch.arange(size).tensor_split(n)])
            self.shape[dim] = size
        self.scattered, self.gathered = sizes
        shapes = [list(self.shape) for _ in range(2)]
        shapes[0][self.scatter_dim] = self.scattered[rank]
        shapes[1][self.gather_dim] = self.gathered[rank]
        self.output, self.input = (self._tensor(rng.random() < 0.5, shape) for shape in shapes)
        self.negative = rng.random() < 0.3

    def _tensor(self, symmetric: bool, shape: Sequence[int]) -> torch.Tensor:
        numel, most = torch.Size(shape).numel(), torch.Size(self.shape).numel()
        return place(self.comm, symmetric, most if symmetric else numel, self.dtype)[:numel].view(*shape)

    def fill(self, seed: int) -> None:
        self.input.copy_(any_bytes(seed, self.comm.rank, self.input.numel(), self.dtype).view(self.input.shape))
        self.output.view(torch.uint8).fill_(0x5A)

    @property
    def options(self) -> dict[str, Any]:
        less = len(self.shape) if self.negative else 0
        found: dict[str, Any] = {"scatter_dim": self.scatter_dim - less, "gather_dim": self.gather_dim - less}
        if self.given:
            found |= {"input_split_sizes": self.scattered, "output_split_sizes": self.gathered}
        return found

    def expected(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Permute, exchange by torch.distributed, and permute."""
        split = self.input.split(self.scattered, self.scatter_dim)
        sent = [part.contiguous().flatten().view(torch.uint8).cpu() for part in split]
        shapes = []
        for size in self.gathered:
            shape = list(self.output.shape)
            shape[self.gather_dim] = size
            shapes.append(shape)
        nbytes = [torch.Size(shape).numel() * self.dtype.itemsize for shape in shapes]
        came = torch.empty(sum(nbytes), dtype=torch.uint8, device="cpu")
        dist.all_to_all_single(came, torch.cat(sent), nbytes, [len(part) for part in sent], group=group)
        parts = [part.view(self.dtype).view(shape) for part, shape in zip(came.split(nbytes), shapes, strict=True)]
        wide = [part.view(torch.uint8).view(*part.shape, self.dtype.itemsize) for part in parts]
        return torch.cat(wide, self.gather_dim)

    def is_right(self, group: dist.ProcessGroup) -> bool:
        return same_bytes(self.output.view(torch.uint8).cpu(), self.expected(group))


@on_ranks(1, 2, 3, long(5), long(8), seed=2, count=12, every_dtype=False)
@on_ranks(2, seed=9, count=17, every_dtype=True)
@on_ranks(gpu=True, seed=0, count=40, every_dtype=False, timeout_s=150)
@on_ranks(gpu=True, seed=1, count=40, every_dtype=False, timeout_s=150)
def test_random_shapes(group: dist.ProcessGroup, seed: int, count: int, every_dtype: bool) -> None:
    """Exchanges of random shapes, each three times; a third of them asynchronous."""
    rng = random.Random(seed)
    with communicator(group) as comm:
        for number in range(count):
            case = Reshard(comm, rng, MOVING_DTYPES[number % len(MOVING_DTYPES)] if every_dtype else None)
            variant = rng.choice(("auto", "b2b", "pcpy", "striped"))
            for turn in range(3):
                case.fill(10 * number + turn)
                work = comm.all_to_all(case.output, case.input, **case.options, variant=variant, async_op=turn == 1)
                if work is not None:
                    work.wait()
                assert case.is_right(group), (number, turn, variant, case.shape, case.options, case.dtype)


@on_ranks(2, long(4), seed=2, count=8)
@on_ranks(gpu=True, seed=3, count=10)
def test_three_tensors_in_one_call(group: dist.ProcessGroup, seed: int, count: int) -> None:
    """q, k and v in one call: of one layout, and of their own shapes and dtypes."""
    rng = random.Random(seed)
    n = group.size()
    with communicator(group) as comm:
        for number in range(count):
            cases = []
            for _ in range(3):
                case = Reshard(comm, rng)
                while case.given or len(case.shape) < 3:
                    case = Reshard(comm, rng)
                cases.append(case)
            dims = cases[0].scatter_dim, cases[0].gather_dim
            cases = [case for case in cases if (case.scatter_dim, case.gather_dim) == dims]
            for turn in range(2):
                for k, case in enumerate(cases):
                    case.fill(100 * number + 10 * turn + k)
                outputs, inputs = [case.output for case in cases], [case.input for case in cases]
                comm.all_to_all(outputs, inputs, scatter_dim=dims[0], gather_dim=dims[1])
                assert all(case.is_right(group) for case in cases), (number, turn, n)


@on_ranks(2, heads=4, positions=6)
@on_ranks(3, heads=8, positions=10)
@on_ranks(4, heads=8, positions=16)
def test_sequence_parallelism_there_and_back(group: dist.ProcessGroup, heads: int, positions: int) -> None:
    """Ulysses: q, k and v of a layer, with fewer heads in k and v, there and back again."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        own = len(torch.arange(positions).tensor_split(n)[rank])
        given, there, back = [], [], []
        for k, count in enumerate((heads, heads // 2, heads // 2)):
            mine = len(torch.arange(count).tensor_split(n)[rank])
            given.append(any_bytes(k, rank, 2 * own * count * 16, torch.bfloat16).view(2, own, count, 16))
            there.append(torch.empty(2, positions, mine, 16, dtype=torch.bfloat16))
            back.append(torch.empty_like(given[-1]))
        comm.all_to_all(there, given, scatter_dim=2, gather_dim=1)
        comm.all_to_all(back, there, scatter_dim=1, gather_dim=2)
        assert all(same_bytes(a, b) for a, b in zip(back, given, strict=True))
        for k, tensor in enumerate(there):
            everyone = []
            for r, part in enumerate(torch.arange(positions).tensor_split(n)):
                count = given[k].shape[2]
                drawn = any_bytes(k, r, 2 * len(part) * count * 16, torch.bfloat16).view(2, len(part), count, 16)
                everyone.append(drawn.tensor_split(n, 2)[rank])
            assert same_bytes(tensor, torch.cat(everyone, 1))


@on_ranks(3, gpu=True)
def test_own_parts_stay(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        given = any_bytes(1, rank, 3 * 4 * 2 * n, torch.int32).view(3, 4, 2 * n)
        output = torch.full((3, 4 * n, 2), 7, dtype=torch.int32)
        comm.all_to_all(output, given, scatter_dim=2, gather_dim=1, copy_own_part=False)
        for r in range(n):
            want = any_bytes(1, r, 3 * 4 * 2 * n, torch.int32).view(3, 4, 2 * n)[:, :, 2 * rank : 2 * rank + 2]
            part = output[:, 4 * r : 4 * r + 4]
            assert torch.equal(part, torch.full_like(part, 7) if r == rank else want)


@on_ranks(2)
def test_a_repeated_call_prepares_nothing(group: dist.ProcessGroup) -> None:
    """Calls of the same layout and tensors prepare one program; the same bytes in another shape need another."""
    with communicator(group) as comm:
        n = comm.world_size
        output, given = torch.empty(2, 4 * n, 3), torch.empty(2, 4, 3 * n)
        counts = []

        def prepared() -> int:
            return sum(entry.prepared is not None for entry in comm.preparer.cache)

        for _ in range(3):
            comm.all_to_all(output, given, scatter_dim=2, gather_dim=1)
            counts.append(prepared())
        comm.all_to_all(output.view(1, 8 * n, 3), given.view(1, 8, 3 * n), scatter_dim=2, gather_dim=1)
        counts.append(prepared())
        comm.all_to_all(output, given.view(2, 4 * n, 3))
        counts.append(prepared())
        assert counts == [1, 1, 1, 2, 3]


@on_ranks(2)
def test_what_is_refused(group: dist.ProcessGroup) -> None:
    """Each refusal on rank 0's own arguments is told to all; the last one, of ranks that differ, as well."""
    n, even = group.size(), {"scatter_dim": 2, "gather_dim": 1}
    with communicator(group) as comm:
        output, given = torch.empty(2, 4 * n, 3), torch.empty(2, 4, 3 * n)
        words = (
            "gather_dim (value=None, allowed=a whole number): scatter_dim and gather_dim go together",
            "gather_dim (value=1.5, allowed=a whole number",
            "scatter_dim (value=3, allowed=-3..2)",
            "scatter_dim and gather_dim must be two dimensions (value=1, -2)",
            "the same number of dimensions, 2 or more (input=[4, 6], output=[2, 8, 3])",
            "shape of input (value=[2, 4, 6] on rank 1 of 2, allowed=[2, 3, 6]); scatter_dim=2 by [3, 3]",
            "shape of input (value=[2, 4, 6] on rank",
            "input_split_sizes must be 2 sizes that add up to scatter_dim 2 (value=[6, 6], allowed sum=6)",
            "output_split_sizes (value='ab', allowed=2 whole numbers)",
            "one dtype",
            "must be contiguous",
            "must not overlap",
            "variant with scatter_dim and gather_dim (value='swap', allowed=auto, ",
            "(number 1 in the lists)",
            "lists of tensors, but not both",
        )
        cases: list[tuple[Any, Any, dict[str, Any]]] = [
            (output, given, {"scatter_dim": 2}),
            (output, given, {"gather_dim": 1.5, "scatter_dim": 2}),
            (output, given, {"scatter_dim": 3, "gather_dim": 1}),
            (output, given, {"scatter_dim": 1, "gather_dim": -2}),
            (output, given[0], even),
            (output[:, 1:].contiguous(), given, even),
            (output.view(4 * n, 2, 3), given, even),
            (output, given, {**even, "input_split_sizes": [3 * n] * n}),
            (output, given, {**even, "output_split_sizes": "ab"}),
            (output, given.double(), even),
            (output.transpose(0, 1).contiguous().transpose(0, 1), given, even),
            (output, output.view(2, 4, 3 * n), even),
            (output, given, {**even, "variant": "swap"}),
            ([output, output], [given, given[0]], even),
            ([output], given, even),
        ]
        for word, (out, in_, options) in zip(words, cases, strict=True):
            with pytest.raises((TypeError, ValueError, PeerError), match=re.escape(word)):
                comm.all_to_all(out, in_, **options)
        other = {"scatter_dim": 0, "gather_dim": 1} if comm.rank else {"scatter_dim": 1, "gather_dim": 0}
        square = torch.empty(n, n)
        with pytest.raises(MismatchError, match="ranks made different calls"):
            comm.all_to_all(torch.empty(1, n * n) if comm.rank else torch.empty(n * n, 1), square, **other)
        comm.all_to_all(output, given, **even)


@on_ranks(2)
def test_what_the_function_refuses_on_one_rank_is_told_to_the_other(group: dist.ProcessGroup) -> None:
    """Mistakes of one rank alone are told to the other, which makes the call."""
    mistakes: dict[str, dict[str, Any]] = {
        "scatter_dim (value=3, allowed=-3..2)": {"tensors": torch.empty(2, 2, 2), "scatter_dim": 3},
        "the same number of dimensions": {"tensors": [torch.empty(2, 2), torch.empty(2)]},
        "gather_length (value=-1, allowed=0": {"gather_length": -1},
    }
    with communicator(group) as comm:
        for text, wrong in mistakes.items():
            given = {"tensors": torch.empty(2, 2), "scatter_dim": 1, "gather_dim": 0} | (wrong if comm.rank else {})
            with pytest.raises((ValueError, PeerError), match=re.escape(text)):
                reshard(comm, given.pop("tensors"), **given)


@on_ranks(2)
def test_tensors_that_are_conjugated_later(group: dist.ProcessGroup) -> None:
    """Tensors whose conjugation or sign torch has put off."""
    with communicator(group) as comm:
        n = comm.world_size
        given = torch.randn(2, 2 * n, dtype=torch.complex64)
        for lazy in (given.conj(), given.conj().imag):
            found = reshard(comm, lazy, scatter_dim=1, gather_dim=0)
            whole = reshard(comm, lazy.resolve_conj().resolve_neg().clone(), scatter_dim=1, gather_dim=0)
            assert torch.equal(found, whole)


@on_ranks(2, gpu=True, timeout_s=150)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_is_the_way_back(group: dist.ProcessGroup, compiled: bool) -> None:
    """The functional operator against slices of everyone's tensors, and its gradients, which are the way back."""
    with communicator(group) as comm:
        library.number_of(comm)
        n, rank = comm.world_size, comm.rank
        positions, heads = 2 * n + 1, (3 * n + 1, n, n)
        own = len(torch.arange(positions).tensor_split(n)[rank])
        options = {"scatter_dim": -2, "gather_dim": 1, "gather_length": positions}
        run = torch.compile(reshard, backend="aot_eager", fullgraph=True) if compiled else reshard

        def everyone(seed: int, count: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(2, positions, count, 4, generator=generator, device="cpu")
            return drawn.to(torch.get_default_device())

        wholes = [everyone(k, count) for k, count in enumerate(heads)]
        given = [whole.tensor_split(n, 1)[rank].clone().requires_grad_() for whole in wholes]
        assert all(tensor.shape[1] == own for tensor in given)
        found = run(comm, given, **options)
        for tensor, whole in zip(found, wholes, strict=True):
            assert torch.equal(tensor, whole.tensor_split(n, 2)[rank])
        # The last result has no gradient of its own.
        sum((tensor * tensor).sum() / 2 for tensor in found[:2]).backward()
        for tensor in given[:2]:
            assert torch.equal(tensor.grad, tensor.detach())
        assert given[2].grad is None or not given[2].grad.any()
        one = given[0].detach().requires_grad_()
        run(comm, one, **options).sum().backward()
        assert torch.equal(one.grad, torch.ones_like(one))
        with communicator(group) as other:  # compiled code tells communicators apart
            numbers = library.number_of(comm), library.number_of(other)
            before = comm.calls.numbers.__length_hint__(), other.calls.numbers.__length_hint__()
            run(other, one, **options)
            after = comm.calls.numbers.__length_hint__(), other.calls.numbers.__length_hint__()
            assert numbers[0] != numbers[1] and after[0] == before[0] and after[1] < before[1]
        with pytest.raises(ValueError, match=r"scatter_dim \(value=4, allowed=-4..3\)"):
            reshard(comm, one, scatter_dim=4, gather_dim=1)


SHAPES = ((1, 4096, 8, 128), (2, 1021, 8, 64), (3, 64, 8, 40))
"""Shapes of the whole tensor of [batch, positions, heads, size]: rows of 128 bytes to 8 KiB."""


@on_ranks(gpu=default_stream, replays=6, timeout_s=150)
def test_there_and_back_in_graphs(group: dist.ProcessGroup, replays: int) -> None:
    """Three tensors there and back, eager and captured and replayed, with fresh bytes each time."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        for shape, symmetric in itertools.product(SHAPES, (True, False)):
            batch, positions, heads, size = shape
            own = (positions + n - 1 - rank) // n
            most = torch.Size(shape).numel()

            def make(*lengths: int, symmetric: bool = symmetric, most: int = most) -> torch.Tensor:
                numel = torch.Size(lengths).numel()
                whole = (
                    comm.empty(most, dtype=torch.bfloat16) if symmetric else torch.empty(numel, dtype=torch.bfloat16)
                )
                return whole[:numel].view(lengths)

            given = [make(batch, own, heads, size) for _ in range(3)]
            there = [make(batch, positions, (heads + n - 1 - rank) // n, size) for _ in range(3)]
            back = [make(batch, own, heads, size) for _ in range(3)]

            def calls(given: Any = given, there: Any = there, back: Any = back) -> None:
                comm.all_to_all(there, given, scatter_dim=2, gather_dim=1)
                comm.all_to_all(back, there, scatter_dim=1, gather_dim=2)

            calls()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
            for turn in range(replays):
                wholes = [any_bytes(10 * turn + k, 0, most, torch.bfloat16).view(shape) for k in range(3)]
                for tensor, whole in zip(given, wholes, strict=True):
                    tensor.copy_(whole.tensor_split(n, 1)[rank])
                for tensor in (*there, *back):
                    tensor.view(torch.uint8).fill_(turn)
                graph.replay() if turn % 2 else calls()
                for k, whole in enumerate(wholes):
                    want = whole.tensor_split(n, 2)[rank]
                    bits = torch.int16
                    assert torch.equal(there[k].view(bits), want.contiguous().view(bits)), (shape, symmetric, turn)
                    assert torch.equal(back[k].view(bits), given[k].view(bits)), (shape, symmetric, turn)
