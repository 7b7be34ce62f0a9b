"""All-to-alls that leave every rank's own part where it is, by CPU ranks and on GPUs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import MOVING_DTYPES, any_bytes, same_bytes
from marks import long
from on_ranks import default_stream, everyones, on_ranks
from sweeps import communicator, place

from sidelane import Communicator
from sidelane.choice.candidate import everything
from sidelane.errors import MismatchError, PeerError
from sidelane.program.builders import build
from sidelane.program.collective import Kind, all_to_all

VARIANTS = ("auto", "b2b", "pcpy", "striped")


class Exchange:
    """Tensors of one exchange of equal parts, with what must be in the output behind it.

    Args:
        comm: that makes it.
        seed: of the inputs.
        numel: of a part.
        dtype: of both tensors.
        symmetric: they are; else the input is ordinary memory, and the output too.
    """

    def __init__(self, comm: Communicator, seed: int, numel: int, dtype: torch.dtype, *, symmetric: bool) -> None:
        n, rank = comm.world_size, comm.rank
        self.output, self.input = (place(comm, symmetric, n * numel, dtype) for _ in range(2))
        self._own, self._numel = slice(rank * numel, (rank + 1) * numel), numel
        self._comm, self._dtype = comm, dtype
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Fresh inputs, and bytes in the output that nobody else has, of which the own part must stay."""
        n, rank = self._comm.world_size, self._comm.rank
        given = [any_bytes(seed, r, n * self._numel, self._dtype) for r in range(n)]
        left = any_bytes(seed + 500_000, rank, n * self._numel, self._dtype)
        self.output.view(torch.uint8).copy_(left.view(torch.uint8))
        self.input.view(torch.uint8).copy_(given[rank].view(torch.uint8))
        self._expected = torch.cat([tensor[self._own] for tensor in given])
        self._expected[self._own] = left[self._own]
        self._given = given[rank]

    def is_right(self) -> bool:
        return same_bytes(self.output, self._expected) and same_bytes(self.input, self._given)


@on_ranks(1, long(8), dtypes=(torch.bfloat16,), sizes=(37,))
@on_ranks(long(2), dtypes=tuple(MOVING_DTYPES), sizes=(37,))
@on_ranks(3, dtypes=(torch.bfloat16,), sizes=(1, 1023))
@on_ranks(gpu=True, dtypes=(torch.bfloat16, torch.uint8, torch.float64), sizes=(1, 4099, 1 << 20), timeout_s=150)
def test_own_parts_stay(group: dist.ProcessGroup, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]) -> None:
    """Every variant, symmetric and ordinary, each three times, so that what is remembered runs too; and in place."""
    checked = 0
    with communicator(group) as comm:
        names = {candidate.variant for candidate in everything(Kind.ALL_TO_ALL, comm.abilities)} | {"auto"}
        cases = itertools.product(dtypes, sizes, (False, True), [name for name in VARIANTS if name in names])
        for number, (dtype, numel, symmetric, variant) in enumerate(cases):
            case = Exchange(comm, number, numel, dtype, symmetric=symmetric)
            for turn in range(3):
                case.fill(10_000 * turn + number)
                options = {"variant": variant, "async_op": turn == 1}
                work = comm.all_to_all(case.output, case.input, copy_own_part=False, **options)
                if work is not None:
                    work.wait()
                assert case.is_right(), (dtype, numel, symmetric, variant, turn)
                checked += 1
            whole, usual = case.input.clone(), torch.empty_like(case.input)
            comm.all_to_all(usual, whole)
            comm.all_to_all(whole, whole, copy_own_part=False)
            assert same_bytes(whole, usual), "in place there is nothing to leave"
    assert checked >= 4 * 2 * 3 * len(dtypes) * len(sizes) and len(set(everyones(group, checked))) == 1


@on_ranks(2, 5, seed=1, calls=20)
@on_ranks(gpu=True, seed=0, calls=60)
@on_ranks(gpu=True, seed=1, calls=60)
def test_in_every_form(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Alone, with split sizes, in lists and batches, by handles and as a loaded program, mixed with usual calls."""
    draw = random.Random(seed)  # the same on every rank
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        kept = Exchange(comm, seed, 33, torch.int16, symmetric=True)
        counts = [[66] * n] * n
        program = build(all_to_all(counts, copies_own=False), "b2b")
        run = comm.load(program, {"output": kept.output, "input": kept.input})
        handle = comm.prepare_all_to_all(kept.output, kept.input, copy_own_part=False)
        for call in range(calls):
            some = [
                Exchange(
                    comm, 1000 * call + k, draw.choice((0, 1, 7, 257)), torch.float32, symmetric=draw.random() < 0.5
                )
                for k in range(draw.choice((1, 3)))
            ]
            kept.fill(seed + call)
            form = draw.choice(("list", "batch", "handle", "loaded", "usual"))
            if form == "list":
                comm.all_to_all([one.output for one in some], [one.input for one in some], copy_own_part=False)
            elif form == "batch":
                gathered, shard = torch.empty(n), torch.full((1,), float(rank))
                with comm.batch() as batch:
                    batch.all_gather(gathered, shard)
                    for one in some:
                        batch.all_to_all(one.output, one.input, copy_own_part=False)
                assert gathered.tolist() == list(range(n))
            elif form == "handle":
                handle.arm()
                handle.trigger()
                handle.wait()
            elif form == "loaded":
                run()
            else:
                comm.all_to_all(kept.output, kept.input)
                exchanged = torch.cat(
                    [any_bytes(seed + call, r, n * 33, torch.int16)[33 * rank :][:33] for r in range(n)]
                )
                assert same_bytes(kept.output, exchanged)
            checked = [kept] if form in ("handle", "loaded") else some if form != "usual" else []
            assert all(one.is_right() for one in checked), (form, call)
            _uneven(comm, seed + call)
        handle.close()
        run.close()


def _uneven(comm: Communicator, seed: int) -> None:
    n, rank = comm.world_size, comm.rank
    counts = torch.randint(0, 5, (n, n), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    given = [any_bytes(seed, r, 3 * sum(counts[r]), torch.int32).view(-1, 3) for r in range(n)]
    received = [counts[r][rank] for r in range(n)]
    parts = [list(given[r].split(counts[r])) for r in range(n)]
    output = any_bytes(seed + 77, rank, 3 * sum(received), torch.int32).view(-1, 3)
    expected = torch.cat([output.split(received)[r].clone() if r == rank else parts[r][rank] for r in range(n)])
    splits = {"output_split_sizes": received, "input_split_sizes": counts[rank]}
    comm.all_to_all(output, given[rank], copy_own_part=False, **splits)
    assert torch.equal(output, expected)


@on_ranks(2, gpu=True)
def test_what_is_refused(group: dist.ProcessGroup) -> None:
    """With an error on every rank, before anything moved; the next call works."""
    with communicator(group) as comm:
        case = Exchange(comm, 3, 5, torch.float32, symmetric=True)
        before = case.output.clone()
        for wrong, kind, words in (
            ({"copy_own_part": "input"}, TypeError, "copy_own_part (value='input', allowed=True or False)"),
            ({"copy_own_part": []}, TypeError, "copy_own_part (value=[], allowed=True or False)"),
            ({"copy_own_part": False, "variant": "bcst"}, ValueError, "variant (value='bcst'"),
            ({"copy_own_part": False, "variant": "swap"}, ValueError, "swap: copies all of an input into its output"),
        ):
            with pytest.raises(kind) as found:
                comm.all_to_all(case.output, case.input, **wrong)
            assert words in str(found.value)
            assert same_bytes(case.output, before)
        splits = [5] * comm.world_size
        with pytest.raises(TypeError, match="copy_own_part"):
            comm.all_to_all(
                case.output, case.input, output_split_sizes=splits, input_split_sizes=splits, copy_own_part=None
            )
        comm.all_to_all(case.output, case.input, copy_own_part=False)
        assert case.is_right()


@on_ranks(3)
def test_ranks_that_differ(group: dist.ProcessGroup) -> None:
    """One leaves its own part, the others do not: nobody's bytes move."""
    with communicator(group) as comm:
        case = Exchange(comm, 4, 5, torch.float32, symmetric=True)
        before = case.output.clone()
        with pytest.raises((MismatchError, PeerError), match="own parts stay"):
            comm.all_to_all(case.output, case.input, copy_own_part=comm.rank > 0)
        assert same_bytes(case.output, before)


@on_ranks(gpu=default_stream, replays=6)
def test_in_graphs(group: dist.ProcessGroup, replays: int) -> None:
    """Captured and replayed, beside a computation and alone, with fresh bytes each time."""
    with communicator(group) as comm:
        ways = itertools.product(("b2b", "striped", "auto"), (True, False))
        for number, (variant, symmetric) in enumerate(ways):
            case = Exchange(comm, number, 70_000 + number, torch.bfloat16, symmetric=symmetric)
            options = {"copy_own_part": False, "variant": variant, "beside": "compute" if number % 2 else None}
            comm.all_to_all(case.output, case.input, **options)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                comm.all_to_all(case.output, case.input, **options)
            for replay in range(replays):
                case.fill(100 * replay + number)
                graph.replay()
                assert case.is_right(), (variant, symmetric, replay)


LARGE_BYTES = ((16 << 20) - 1, 16 << 20, (16 << 20) + 1, (40 << 20) + 77_777)
"""Of a part, around those from which on own parts are copied in rows."""


class LargeParts:
    """All-gathers or all-to-alls out of place of parts of so many bytes, fresh ones each time."""

    def __init__(self, comm: Communicator, nbytes: int, *, exchanges: bool, symmetric: bool, **options: Any) -> None:
        self.comm, self.nbytes, self.exchanges, self.options = comm, nbytes, exchanges, options
        self._make: Any = comm.empty if symmetric else torch.empty
        self.elsewhere()

    def elsewhere(self) -> None:
        """Lie at other addresses."""
        parts = self.comm.world_size if self.exchanges else 1
        sizes = parts * self.nbytes, self.comm.world_size * self.nbytes
        self.input, self.output = (self._make(size, dtype=torch.uint8) for size in sizes)

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.input.copy_(self._input_of(self.comm.rank))
        self.output.fill_(seed % 251)

    def once(self) -> None:
        call = self.comm.all_to_all if self.exchanges else self.comm.all_gather
        call(self.output, self.input, **self.options)

    def is_right(self) -> bool:
        place = self.comm.rank * self.exchanges
        parts = [self._input_of(rank)[place * self.nbytes :][: self.nbytes] for rank in range(self.comm.world_size)]
        return torch.equal(self.output, torch.cat(parts))

    def _input_of(self, rank: int) -> torch.Tensor:
        random = torch.Generator(self.input.device).manual_seed(1000 * self.seed + rank)
        return torch.randint(0, 256, self.input.shape, dtype=torch.uint8, generator=random)


@on_ranks(gpu=default_stream)
def test_large_ones_are_copied_in_rows(group: dist.ProcessGroup) -> None:
    """In symmetric and in ordinary memory, eager and in a graph, with and without a computation next to them."""
    with Communicator() as comm, torch.cuda.stream(torch.cuda.Stream()):
        ways = itertools.product(LARGE_BYTES, ("b2b", "striped"), (True, False), (None, "compute"))
        for number, (nbytes, variant, symmetric, beside) in enumerate(ways):
            exchanges = number % 2 == (number // 2) % 2
            case = LargeParts(comm, nbytes, exchanges=exchanges, symmetric=symmetric, variant=variant, beside=beside)
            for turn in range(2):
                case.fill(10 * number + turn)
                case.once()
                assert case.is_right(), (nbytes, variant, symmetric, beside, turn)
            kept = []
            for turn in range(2, 2 if symmetric else 6):
                kept.append((case.input, case.output))
                case.elsewhere()
                case.fill(10 * number + turn)
                case.once()
                assert case.is_right(), (nbytes, variant, symmetric, beside, "at new addresses", turn)
            kept.clear()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                case.once()
            for turn in range(6, 8):
                case.fill(10 * number + turn)
                graph.replay()
                assert case.is_right(), (nbytes, variant, symmetric, beside, "in a graph")
