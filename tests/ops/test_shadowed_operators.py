"""Kernels of fused operators do what their shadows say: written down by Triton's interpreter, on ranks as processes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeGuard

import pytest
import torch
import torch.distributed as dist
from accesses import BARRIER, LOAD, POLL, STORE, Access, recorded
from fused_ops import communicator, teams_of_programs
from marks import long
from ranks import Crew
from shadows import (
    fused_combine,
    fused_dispatch_gemm,
    fused_embedding,
    fused_gemm,
    fused_gemv,
    fused_rms_norm,
    token_rows,
)
from shadows.blocks import block_of

from sidelane import Communicator
from sidelane.device import layout
from sidelane.ops.decode_context import CombineAttention
from sidelane.ops.dispatch_gemm import AllToAllGemm
from sidelane.ops.embedding import EmbeddingAllToAll
from sidelane.ops.embedding_backward import EmbeddingBackward
from sidelane.ops.gemm import GemmAllToAll, TileSizes
from sidelane.ops.gemv import LANES, GemvAllReduce, Tiling
from sidelane.ops.rms_norm import AllReduceRmsNorm
from sidelane.ops.rms_norm_kernels import SLICE_BYTES
from sidelane.ops.token_rows import TokenRows
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, Copy, Flag, Program, Queue, Reduce, Signal, Wait
from sidelane.session.own_kernel import OwnKernel

Step = tuple[str, frozenset[object], frozenset[object]]
"""``signal`` or ``wait`` with flags as (rank, number), ``move`` with bytes read and written."""

SIGNAL, WAIT, MOVE = "signal", "wait", "move"
NOTHING: frozenset[object] = frozenset()
Places = Mapping[tuple[int, str], tuple[int, int]]
"""Address and bytes of each (rank, buffer); what lies elsewhere is the kernel's own input, or control."""


@dataclasses.dataclass
class Launched:
    """One launch on this rank, and what says what it should have done.

    Attributes:
        run: launches it.
        kernel: whose flags these are.
        places: where the buffers of the shadow are.
        shadows: of even and of odd generations, or one for all.
        cells: words that carry their own flags: cell c is flag c of the shadow.
        threads: the first flag that stands for a barrier of threads.
        sums: the first flag of cells in ``partials``, which no peer reaches.
    """

    run: Callable[[], object]
    kernel: OwnKernel
    places: Places
    shadows: Sequence[Program]
    cells: Places = dataclasses.field(default_factory=dict)
    threads: int = 1 << 40
    sums: int = 0

    def is_own(self, flag: tuple[int, int]) -> bool:
        """A rank has it from itself."""
        context = self.kernel.context.tolist()
        return flag[0] == context[layout.RANK] == flag[1] % context[layout.WORLD_SIZE]


def follow(group: dist.ProcessGroup, kind: str, mistake: str) -> int:
    """Hold each block of two launches against its shadow; how many steps they took. ``mistake`` is planted in it."""
    steps = 0
    with communicator(group) as comm:
        for launched in KINDS[kind](comm):
            for generation in range(1, 3):
                with recorded() as found:
                    launched.run()
                comm.synchronize()
                comm.barrier()
                shadow = launched.shadows[generation % len(launched.shadows)]
                queues = shadow.queues_of(comm.rank)
                for block, accesses in found.items():
                    mine = [queue for queue in queues if block_of(queue)[0] == block]
                    said = steps_said(planted(mine, mistake), {buffer for _, buffer in launched.places}, launched)
                    known = {command.flag for q in shadow.queues for command in q.commands if is_flag(command)}
                    barriers = sum(step[0] == BARRIER for step in said)
                    done = steps_of(accesses, launched, barriers=barriers, known=known)
                    where = f"rank {comm.rank}, generation {generation}, block {block}"
                    assert [step[0] for step in done] == [step[0] for step in said], where
                    for number, (one, other) in enumerate(zip(done, said, strict=True)):
                        for mine, theirs in zip(one[1:], other[1:], strict=True):
                            assert mine == theirs, (where, number, one[0], sorted(mine ^ theirs, key=str)[:5])
                    steps += len(said)
    return steps


def steps_of(accesses: Sequence[Access], launched: Launched, *, barriers: int, known: set[Flag]) -> list[Step]:
    """What a block has done to the buffers of the shadow, and to flags; so many barriers of threads are looked at.

    ``known``: flags of the shadow. By others a rank tells itself what it does not wait for.
    """
    found: list[Step] = []
    for access in accesses:
        addresses = [int(address) for address in access.addresses]
        own_flags = frozenset(
            (place[0], place[2] // 8 + launched.sums * (place[1] == "partials"))
            for place in (place_of(a, launched.cells) for a in addresses)
            if place
        )
        if own_flags:
            add(found, (WAIT if access.what == POLL else SIGNAL, own_flags, NOTHING))
            continue
        if access.what == BARRIER:
            if barriers and found:  # not the one in front of a signal
                add(found, (BARRIER, NOTHING, NOTHING))
                barriers -= 1
            continue
        if access.what in (LOAD, POLL, STORE):
            found_at = [place for place in (place_of(address, launched.places) for address in addresses) if place]
            bytes_ = frozenset((*place[:2], place[2] + k) for place in found_at for k in range(access.item_bytes))
            if bytes_:
                add(found, (MOVE, bytes_, NOTHING) if access.what == LOAD else (MOVE, NOTHING, bytes_))
            continue
        flags = frozenset(flag for flag in (flag_of(a, launched.kernel) for a in addresses) if flag)
        flags = frozenset(flag for flag in flags if Flag(*flag) in known or not launched.is_own(flag))
        if flags:
            add(found, (SIGNAL if access.is_exchange else WAIT, flags, frozenset()))
    return found


def is_flag(command: Command) -> TypeGuard[Signal | Wait]:
    return isinstance(command, Signal | Wait)


def place_of(address: int, places: Places) -> tuple[int, str, int] | None:
    """Rank, buffer and offset."""
    for (rank, buffer), (start, nbytes) in places.items():
        if start <= address < start + nbytes:
            return rank, buffer, address - start
    return None


def flag_of(address: int, kernel: OwnKernel) -> tuple[int, int] | None:
    """Rank and number of a flag, as shadows count them: one for each sender."""
    context = kernel.context.tolist()
    for rank in range(context[layout.WORLD_SIZE]):
        place = address - context[layout.REGIONS + rank] - layout.REGION_FLAGS_OFFSET
        number, sender = divmod(place // 4, layout.MAX_RANKS)
        if 0 <= number < kernel.flags:
            return rank, number * context[layout.WORLD_SIZE] + sender
    return None


def steps_said(queues: Sequence[Queue], known: set[str], launched: Launched) -> list[Step]:
    """What a shadow says that a block does, what is apart first; its inputs are computed, and nobody loads them."""
    found: list[Step] = []
    for command in (command for queue in (*queues[1:], queues[0]) for command in queue.commands):
        match command:
            case Signal(flag) | Wait(flag) if flag.index >= launched.threads:
                if isinstance(command, Wait):
                    add(found, (BARRIER, NOTHING, NOTHING))
            case Signal(flag):
                add(found, (SIGNAL, frozenset([(flag.rank, flag.index)]), NOTHING))
            case Wait(flag):
                add(found, (WAIT, frozenset([(flag.rank, flag.index)]), NOTHING))
            case Copy(dst, src):
                if {dst.buffer, src.buffer} & known:
                    add(found, moved((src,), dst, found, known))
            case Reduce(dst, srcs):
                add(found, moved(srcs, dst, found, known))
    return found


def moved(srcs: Sequence[Span], dst: Span, steps: list[Step], known: set[str]) -> Step:
    """What was written in the same step is at hand: a block that stores it once more does not load it."""
    at_hand = steps[-1][2] if steps and steps[-1][0] == MOVE else frozenset()
    reads = frozenset(byte for src in srcs if src.buffer in known for byte in bytes_of(src))
    return MOVE, reads - at_hand, frozenset(bytes_of(dst)) if dst.buffer in known else NOTHING


def add(steps: list[Step], new: Step) -> None:
    """Neighbours of one sort are one step."""
    if steps and steps[-1][0] == new[0]:
        what, first, second = steps.pop()
        new = (what, first | new[1], second | new[2])
    steps.append(new)


def bytes_of(span: Span) -> Iterator[object]:
    return ((span.rank, str(span.buffer), offset) for offset in range(span.offset, span.end))


def planted(queues: Sequence[Queue], mistake: str) -> list[Queue]:
    """A block's shadow with a mistake: a copy left out, a signal in front of copies or of another flag, or a cell that
    is not sent, or not waited for.
    """
    queue, *apart = queues
    if mistake == "sent":
        return [queue, *apart[1:]]
    commands = list(queue.commands)
    copies = [number for number, command in enumerate(commands) if isinstance(command, Copy | Reduce)]
    signals = [number for number, command in enumerate(commands) if isinstance(command, Signal)]
    if mistake == "copy" and copies:
        del commands[copies[-1]]
    elif mistake == "order" and copies:
        commands.insert(copies[0], commands.pop(signals[-1]))
    elif mistake == "waited":
        del commands[max(number for number, command in enumerate(commands) if isinstance(command, Wait))]
    elif mistake == "flag":
        signal = commands[signals[0]]
        assert isinstance(signal, Signal)
        commands[signals[0]] = Signal(Flag(signal.flag.rank, signal.flag.index + 1), signal.value)
    return [dataclasses.replace(queue, commands=tuple(commands)), *apart]


def placed(comm: Communicator, buffer: str, tensor: torch.Tensor, nbytes: int = 0) -> Places:
    """``nbytes``: of the largest one of all ranks, where that is not this one."""
    return {
        (rank, buffer): (address, nbytes or tensor.nbytes) for rank, address in enumerate(comm.peers(tensor).tolist())
    }


def cells_at(addresses: torch.Tensor, cells: torch.Tensor) -> Places:
    return {(rank, "cells"): (address, cells.nbytes) for rank, address in enumerate(addresses.tolist())}


def gemv(comm: Communicator) -> Iterator[Launched]:
    """Tiles of two rows, the last of one; of three tokens in sixteen places a block waits twice."""
    n, rows, weight = comm.world_size, 59, torch.ones(59, 16)
    for tokens, tiling in ((1, Tiling(2, 16, 1, 1)), (3, Tiling(16, 16, 1, 1))):
        handle = GemvAllReduce(comm, rows, tokens, torch.float32, tiling=tiling)
        x, out = torch.ones(tokens, 16), torch.empty(tokens, rows)
        sizes = {"tile_rows": tiling.rows, "lanes": LANES, "tokens": tokens, "padded": handle.padded}
        assert handle.programs > 1 and (tokens == 1 or handle.rows_each * handle.padded > LANES)
        yield Launched(
            functools.partial(handle.run, None, weight, x, None, out),
            handle.kernel,
            {(comm.rank, str(Buffer.OUTPUT)): (out.data_ptr(), out.nbytes)},
            fused_gemv.cells(n, rows, handle.rows_each, **sizes),
            cells_at(handle.addresses, handle.cells),
        )


def rms_norm(comm: Communicator) -> Iterator[Launched]:
    """In cells: five rows of three words, in three blocks at most; three rows of two slices, in a block and in two."""
    yield norm_in_cells(comm, 5, 3)
    yield norm_in_cells(comm, 3, 130)


def rms_norm_of_teams(comm: Communicator) -> Iterator[Launched]:
    """In cells: three rows of two slices, the second shorter, in two teams of two blocks; two rows, one for a team."""
    with teams_of_programs(5):
        yield norm_in_cells(comm, 3, 130)
        yield norm_in_cells(comm, 2, 130)


def norm_in_cells(comm: Communicator, rows: int, words: int) -> Launched:
    handle = AllReduceRmsNorm(comm, rows, words, torch.float32, schedule="cells")
    x, weight, out = torch.ones(rows, words), torch.ones(words), torch.empty(rows, words)
    sizes, (partials,) = {"slice_words": SLICE_BYTES // 4, "parts": handle.options["PARTS"]}, handle.partials
    return Launched(
        lambda: handle.run(None, x, None, weight, None, out, None, None, 1e-6),
        handle.kernel,
        {(comm.rank, str(Buffer.OUTPUT)): (out.data_ptr(), out.nbytes)},
        fused_rms_norm.cells(comm.world_size, handle.programs, rows, words, counts=False, **sizes),
        {**cells_at(handle.addresses, handle.came), (comm.rank, "partials"): (partials.data_ptr(), partials.nbytes)},
        fused_rms_norm.loaded_flags(comm.world_size, rows, words, SLICE_BYTES // 4),
        fused_rms_norm.sum_flags(comm.world_size, rows, words),
    )


def rms_norm_pushed(comm: Communicator) -> Iterator[Launched]:
    """Five rows of three words, in three blocks at most."""
    rows, words = 5, 3
    handle = AllReduceRmsNorm(comm, rows, words, torch.float32, schedule="pushed")
    x, weight, out = torch.ones(rows, words), torch.ones(words), torch.empty(rows, words)
    yield Launched(
        lambda: handle.run(None, x, None, weight, None, out, None, None, 1e-6),
        handle.kernel,
        {
            (comm.rank, str(Buffer.OUTPUT)): (out.data_ptr(), out.nbytes),
            **placed(comm, str(Buffer.STAGING), handle.came),
        },
        fused_rms_norm.pushed(comm.world_size, handle.programs, rows, 4 * words),
    )


def combine(comm: Communicator) -> Iterator[Launched]:
    """A token of more heads than the ranks divide, in three blocks at most; rows with one and two cells behind them."""
    n = comm.world_size
    for heads, words in ((4 * n + 1, 3), (n + 1, 4)):
        handle = CombineAttention(comm, 1, heads, words, torch.float32)
        own = len(range(heads)[comm.rank :: n])
        out, lse = torch.empty(1, own, words), torch.zeros(1, heads)
        partial, of_out, pitch = torch.ones(1, heads, words), torch.empty(1, own), handle.options["PITCH"]
        yield Launched(
            functools.partial(handle.run, None, partial, lse, out, of_out, 2.0),
            handle.kernel,
            {(comm.rank, str(Buffer.OUTPUT)): (out.data_ptr(), out.nbytes)},
            fused_combine.cells(n, handle.programs, heads, words, pitch, counts=False),
            placed(comm, "cells", handle.cells),
            fused_combine.loaded_flags(n, heads, pitch),
        )


def embedding(comm: Communicator) -> Iterator[Launched]:
    """Uneven tables and an uneven batch; bags of one row of 16 bytes, in three blocks."""
    n, dim = comm.world_size, 4
    counts, batch = [1 + rank % 2 for rank in range(n)], 3 * n + 1
    tables = [torch.ones(3, dim) for _ in range(counts[comm.rank])]
    indices, offsets = torch.zeros(len(tables) * batch).long(), torch.arange(len(tables) * batch + 1)
    handle = EmbeddingAllToAll(comm, tables, batch, "sum")
    for order in ("remote_first", "oblivious"):
        shadow = fused_embedding.embedding_all_to_all(
            counts, handle.programs, batch, 4 * dim, remote_first=order == "remote_first"
        )
        yield Launched(
            lambda order=order: handle.run(order, None, indices, offsets, None),  # type: ignore[misc]
            handle.kernel,
            placed(comm, "output", handle.output, 4 * sum(counts) * 4 * dim),
            [without_counters(shadow, handle.kernel.flags * n)],
        )


def embedding_backward(comm: Communicator) -> Iterator[Launched]:
    n, dim = comm.world_size, 4
    counts, batch = [1 + rank % 2 for rank in range(n)], 3 * n + 1
    tables = [torch.ones(3, dim) for _ in range(counts[comm.rank])]
    indices, offsets = torch.zeros(len(tables) * batch).long(), torch.arange(len(tables) * batch + 1)
    handle = EmbeddingBackward(comm, tables, batch)
    grad = torch.ones(handle.tables.output_shape)
    yield Launched(
        lambda: handle.run(grad, indices, offsets, None, "sum", sparse=False),
        handle.kernel,
        placed(comm, str(Buffer.STAGING), handle.arrived),
        [fused_embedding.backward(counts, handle.programs, batch, 4 * dim)],
    )


def gemm(comm: Communicator) -> Iterator[Launched]:
    """Skewed rows, three tiles next to each other of 16 columns."""
    n, columns = comm.world_size, 48
    counts = [[(5 * sender + 17 * peer) % 40 for peer in range(n)] for sender in range(n)]
    most = max(sum(row) for row in zip(*counts, strict=True))
    handle = GemmAllToAll(comm, most, columns, torch.float32, tiles=TileSizes(16, 16, 16, 1, 1, group=2))
    x, weight = torch.ones(sum(counts[comm.rank]), 8), torch.ones(columns, 8)
    shadow = fused_gemm.gemm_all_to_all(counts, handle.programs, 16, 3, 64, group=2)
    yield Launched(
        lambda: handle.run(x, weight, torch.tensor(counts)),
        handle.kernel,
        placed(comm, "output", handle.output),
        [without_counters(shadow, handle.kernel.flags * n)],
    )


def dispatch_gemm(comm: Communicator) -> Iterator[Launched]:
    """One to three tiles of whole rows for a rank, three tiles next to each other."""
    n, depth, columns, tiles = comm.world_size, 16, 48, TileSizes(16, 16, 16, 1, 1, group=2)
    counts = [[16 + 16 * ((sender + 2 * peer) % 3) for peer in range(n)] for sender in range(n)]
    most = max(sum(row) for row in zip(*counts, strict=True))
    handle = AllToAllGemm(comm, most, depth, columns, torch.float32, tiles=tiles)
    x, weight = torch.ones(sum(counts[comm.rank]), depth), torch.ones(columns, depth)
    shadow = fused_dispatch_gemm.all_to_all_gemm(counts, handle.programs, 16, 3, 4 * depth, group=2, by_one=True)
    places = placed(comm, "gathered", handle.gathered)
    yield Launched(lambda: handle.run(x, weight, torch.tensor(counts)), handle.kernel, places, [shadow])


def tokens(comm: Communicator) -> Iterator[Launched]:
    """Skewed rows, two tiles next to each other of 16 columns, and one of the rows beside them or none."""
    n, tiles = comm.world_size, TileSizes(16, 16, 16, 1, 1, group=2)
    counts = [[(7 * sender + 23 * peer + 20) % 50 for peer in range(n)] for sender in range(n)]
    got = [sum(row) for row in zip(*counts, strict=True)]
    rows = sum(counts[comm.rank])
    places = torch.arange(rows, dtype=torch.int32)[:, None], torch.tensor(counts, dtype=torch.int32)
    handle = TokenRows(comm, max(got), 32, 24, tiles=tiles)
    for units, across in itertools.product((64, 4), (1, 0)):
        x, beside = (torch.ones(rows, columns, dtype=torch.int16) for columns in (32, 16 * across))
        shadow = token_rows.exchange_rows(
            *(counts, handle.programs, 16, (2, across), 32), most_rows=max(got), group=2, copies=units == 64
        )
        yield Launched(
            functools.partial(handle.run, x, beside, *places, got[comm.rank], (0, 0), units),
            handle.kernel,
            placed(comm, "output", handle.output),
            [without_counters(shadow, (handle.kernel.flags if units == 64 else 2) * n)],
        )


def without_counters(program: Program, flags: int) -> Program:
    """Arrivals are counted in memory of the rank's own."""

    def is_kernels(command: Command) -> bool:
        return not (isinstance(command, Signal | Wait) and command.flag.index >= flags)

    queues = tuple(
        dataclasses.replace(queue, commands=tuple(filter(is_kernels, queue.commands))) for queue in program.queues
    )
    return dataclasses.replace(program, queues=queues)


KINDS: Mapping[str, Callable[[Communicator], Iterator[Launched]]] = {
    "gemv": gemv,
    "rms_norm": rms_norm,
    "rms_norm_of_teams": rms_norm_of_teams,
    "rms_norm_pushed": rms_norm_pushed,
    "combine": combine,
    "embedding": embedding,
    "embedding_backward": embedding_backward,
    "gemm": gemm,
    "dispatch_gemm": dispatch_gemm,
    "tokens": tokens,
}


SHADOWED = ("gemv", "rms_norm", "combine", "embedding", "embedding_backward", "gemm", "dispatch_gemm", "tokens")


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("rms_norm_pushed", 2),
        ("rms_norm_of_teams", 2),
        ("rms_norm_pushed", 3),
        *((kind, 3) for kind in SHADOWED),
        *(long(kind, 2) for kind in SHADOWED),
    ],
)
def test_every_block_does_what_its_shadow_says(four: Crew, kind: str, world_size: int) -> None:
    assert all(steps > 10 for steps in four.run(follow, world_size, kind, "none"))


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        *(
            ("combine", "sent"),
            ("combine", "waited"),
            ("gemv", "copy"),
            ("gemv", "sent"),
            ("gemv", "waited"),
            ("embedding_backward", "flag"),
        ),
        *(("rms_norm", "sent"), ("rms_norm", "waited"), ("rms_norm_pushed", "copy"), ("rms_norm_pushed", "order")),
        *(("rms_norm_of_teams", "sent"), ("rms_norm_of_teams", "waited"), ("rms_norm_of_teams", "flag")),
        *(("dispatch_gemm", "copy"), ("dispatch_gemm", "order"), ("dispatch_gemm", "waited")),
        *(("tokens", "copy"), ("tokens", "order"), ("tokens", "waited"), ("tokens", "flag")),
    ],
)
def test_a_shadow_that_says_something_else_is_noticed(four: Crew, kind: str, mistake: str) -> None:
    with pytest.raises(AssertionError, match="generation 1, block"):
        four.run(follow, 2, kind, mistake)
