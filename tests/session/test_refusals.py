"""What a communicator refuses, as one table of calls; ``goldens/refusals.txt`` has their errors.

All ranks make the call of a row, each with what is wrong on it; or rank 1 makes it while the others make the right one,
and hear of rank 1's mistake. After each row the ranks are in step, and nothing has been written.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, error_of
from on_ranks import everyones, on_ranks
from ranks import RankPool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sidelane
from goldens import check_golden
from sidelane import Communicator
from sidelane.config import COMPUTE, NOTHING, Config

RANKS = 3
f = torch.empty
Call = Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class Row:
    """A call that is refused, where ``s`` has the communicator, the number of ranks, ``odd`` (True on rank 1), tensors.

    Attributes:
        call: of all ranks, or of rank 1 alone.
        right: the call of the other ranks, which get a ``PeerError`` that names rank 1 and quotes it.
    """

    call: Call
    right: Call | None = None


def reduces(s: Any) -> None:
    s.comm.all_reduce(torch.ones(4))


def reduces_many(s: Any) -> None:
    s.comm.all_reduce(torch.ones(4096))


def resized(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(4096)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4096)


def splits(s: Any, received: Any, sent: Any, *, output: int = 0, input: int = 0) -> None:
    """Exchange one element with each rank, and so many more, as other splits have it."""
    s.comm.all_to_all(f(s.n + output), f(s.n + input), output_split_sizes=received, input_split_sizes=sent)


def prepares(s: Any, *tensors: Any, **options: Any) -> None:
    s.comm.prepare_all_gather(*(tensors or (s.out, f(5))), **options)


def batches(s: Any, *, wrong: bool) -> None:
    with s.comm.batch() as batch:
        batch.all_reduce(torch.ones(7))
        if wrong:
            batch.all_gather(f(s.n))


def enters_twice(s: Any) -> None:
    batch = s.comm.batch()
    for _ in range(2):
        with batch:
            batch.all_reduce(torch.ones(3))


def never() -> None:
    raise AssertionError("it ran")


ROWS: dict[str, Row] = {
    # sizes, dtypes and places of tensors
    "gather into too few": Row(lambda s: s.comm.all_gather(f(4 * s.n + 1), f(4))),
    "gather of two dtypes": Row(lambda s: s.comm.all_gather(f(4 * s.n), f(4, dtype=torch.float64))),
    "strides": Row(lambda s: s.comm.all_gather(f(4, s.n).t(), f(4))),
    "another device": Row(lambda s: s.comm.all_gather(f(4 * s.n, device="meta"), f(4, device="meta"))),
    "memory of another communicator": Row(lambda s: s.comm.all_gather(s.comm.empty(4 * s.n), s.foreign)),
    "in place on some ranks": Row(
        lambda s: s.comm.all_gather(s.whole[: 4 * s.n], s.whole[2:6] if s.rank else s.whole[6:10])
    ),
    "no tensor": Row(lambda s: s.comm.all_gather(None, f(4))),
    "uneven parts": Row(lambda s: s.comm.all_to_all(f(s.n + 1), f(s.n + 1))),
    "output over input": Row(lambda s: s.comm.all_to_all(s.whole[: 4 * s.n], s.whole[1 : 4 * s.n + 1])),
    "dtype of a reduction": Row(
        lambda s: s.comm.reduce_scatter(f(4, dtype=torch.float64), f(4 * s.n, dtype=torch.float64))
    ),
    "reduce into more": Row(lambda s: s.comm.all_reduce(f(4), output=f(5))),
    "scatter without an input": Row(lambda s: s.comm.scatter(f(4), None if s.rank == 0 else f(4 * s.n), root=0)),
    "gather at the root": Row(lambda s: s.comm.gather(f(4 * s.n + 1) if s.rank == 0 else f(1), f(4), root=0)),
    "output of one rank": Row(lambda s: s.comm.all_gather(s.out, f(6)), lambda s: s.comm.all_gather(s.out, f(5))),
    "sparse": Row(lambda s: s.comm.all_reduce(torch.eye(4).to_sparse()), reduces),
    "a list of numbers": Row(lambda s: s.comm.broadcast([1, 2], root=0), lambda s: s.comm.broadcast(f(3), root=0)),
    "conjugated later": Row(
        lambda s: s.comm.broadcast(torch.ones(4, dtype=torch.complex64).conj(), root=0),
        lambda s: s.comm.broadcast(f(2), root=0),
    ),
    "freed": Row(lambda s: s.comm.all_reduce(resized(0)), reduces_many),
    "shrunk": Row(lambda s: s.comm.all_reduce(resized(64)), reduces_many),
    "fake": Row(lambda s: s.comm.all_reduce(fake()), reduces_many),
    "traced": Row(
        lambda s: make_fx(lambda x: s.comm.all_reduce(x), tracing_mode="fake")(torch.ones(4096)), reduces_many
    ),
    "differentiated": Row(lambda s: torch.func.grad(lambda x: s.comm.all_reduce(x))(torch.ones(4096)), reduces_many),
    # options
    "variant of another kind": Row(lambda s: s.comm.all_gather(f(4 * s.n), f(4), variant="swap")),
    "variant for symmetric memory": Row(lambda s: s.comm.all_gather(f(4 * s.n), f(4), variant="bcst")),
    "variant for GPUs": Row(lambda s: s.comm.all_reduce(torch.ones(3), variant="one_shot")),
    "no variant": Row(lambda s: s.comm.all_reduce(torch.ones(3), variant=None)),
    "no such operation": Row(lambda s: s.comm.reduce_scatter(f(4), f(4 * s.n), op="product")),
    "operations": Row(lambda s: s.comm.all_reduce(torch.ones(4), op=["sum"]), reduces),
    "a root beyond the last rank": Row(lambda s: s.comm.broadcast(f(4), root=s.n)),
    **{
        f"root {root!r}": Row(lambda s, root=root: s.comm.broadcast(torch.ones(3), root=root))
        for root in (0.5, 1.0, "1", None)
    },
    "splits of one side": Row(lambda s: s.comm.all_to_all(f(s.n), f(s.n), input_split_sizes=[1] * s.n)),
    "splits of more than there is": Row(lambda s: splits(s, [1] * s.n, [2] * s.n)),
    "splits with fractions": Row(lambda s: splits(s, [1.0] * s.n, [1] * s.n)),
    "splits by a number": Row(lambda s: splits(s, s.n, [1] * s.n)),
    "splits by text": Row(lambda s: splits(s, "abc", [1] * s.n)),
    "time of a computation": Row(lambda s: s.comm.computation(us=10**400)),
    "size of a computation": Row(lambda s: s.comm.computation(gemm=(2**40, 2**40, 2**40, "float32"))),
    "a misspelt option": Row(lambda s: s.comm.all_reduce(torch.ones(4), asnyc_op=True), reduces),
    # calls that do not even fit the method
    "one argument too few": Row(
        lambda s: s.comm.all_gather(f(s.n)), lambda s: s.comm.all_gather(f(s.n), torch.ones(1))
    ),
    "no argument": Row(lambda s: s.comm.all_reduce(), reduces),
    "an unknown option": Row(lambda s: s.comm.empty(4, colour="blue"), lambda s: s.comm.empty(4)),
    "preparing with too few": Row(lambda s: s.comm.prepare_all_gather(f(s.n)), lambda s: prepares(s)),
    "in a batch": Row(lambda s: batches(s, wrong=True), lambda s: batches(s, wrong=False)),
    "a batch outside of its block": Row(lambda s: s.comm.batch().all_reduce(torch.ones(3))),
    "a batch entered twice": Row(enters_twice),
    # symmetric memory, pools, communicators
    "dtype by text": Row(lambda s: s.comm.empty(4, dtype="float32"), lambda s: s.comm.empty(4)),
    "less than nothing": Row(lambda s: s.comm.empty(-1), lambda s: s.comm.empty(1)),
    **{f"shape {size!r}": Row(lambda s, size=size: s.comm.empty(size)) for size in (1.5, "24", None, (2, 1.5), [[2]])},
    **{
        f"shape {number} of too many": Row(lambda s, size=size: s.comm.empty(*size))
        for number, size in enumerate(
            ((2**40, 2**40), (2**62,), (-(2**40), 2**40), (0, 2**64), (10**400,), (2**31, 2**31, 2**31))
        )
    },
    **{
        f"pool of {size!r}": Row(
            lambda s, size=size: sidelane.pool(s.comm, size), lambda s: sidelane.pool(s.comm, 1 << 20)
        )
        for size in ("1G", 2e9, "lots", True, 0, -5)
    },
    "a device of another name": Row(lambda s: Communicator(s.group, device="gpu")),
    # communicators that share memory
    "a name that is there": Row(lambda s: Communicator(s.comm, name="one")),
    "a device of its own": Row(lambda s: Communicator(s.comm, device="cpu")),
    "settings of its own": Row(lambda s: Communicator(s.comm, config=Config())),
    "names differ": Row(lambda s: Communicator(s.comm, name="two" if s.odd else "another")),
    "a call of what is closed": Row(lambda s: s.ended.all_gather(s.out, f(5))),
    "sharing what is closed": Row(lambda s: Communicator(s.closed, name="four")),
    "a call of what shared it": Row(lambda s: s.shared.barrier()),
    # collectives that overlap a computation
    **{
        f"overlap with {name}": Row(lambda s, collective=collective: sidelane.overlap(never, collective, s.comm))
        for name, collective in (
            ("none", None),
            ("a function of none", lambda: None),
            ("a function of two", lambda a, b: None),
        )
    },
    "strategies by text": Row(lambda s: sidelane.Overlap(s.comm, strategies="serial")),
    # calls of which each would be right
    "sizes differ": Row(lambda s: s.comm.all_gather(*((f(9 * s.n), f(9)) if s.odd else (s.out, f(5))))),
    "kinds differ": Row(
        lambda s: s.comm.all_reduce(torch.ones(6)) if s.rank else s.comm.broadcast(torch.ones(6), root=0)
    ),
    "elements differ": Row(lambda s: s.comm.all_reduce(torch.ones(4 + s.odd))),
    "dtypes differ": Row(lambda s: s.comm.all_reduce(torch.ones(4, dtype=torch.int32 if s.odd else torch.bfloat16))),
    "operations differ": Row(lambda s: s.comm.all_reduce(torch.ones(4), op="max" if s.odd else "sum")),
    "lists differ": Row(lambda s: s.comm.all_gather([f(s.n, 3 + s.odd)], [torch.ones(3 + s.odd)])),
    "splits differ": Row(lambda s: splits(s, [1, 1 + s.odd, 1], [1] * s.n, output=s.odd)),
    "parts differ": Row(lambda s: splits(s, [1] * s.n, [1 + s.odd, 1, 1], input=s.odd)),
    **{
        f"places differ in {kind}": Row(call)
        for kind, call in (  # peers read the inputs of reductions, and write the outputs of an all_reduce
            ("reduce_scatter", lambda s: s.comm.reduce_scatter(f(4), s.partly_symmetric)),
            ("all_reduce", lambda s: s.comm.all_reduce(s.partly_symmetric)),
        )
    },
    "symmetric memory differs": Row(lambda s: s.comm.empty(100 + s.rank)),
    "pools differ": Row(lambda s: sidelane.pool(s.comm, (4 + 4 * s.rank) << 20)),
    # calls that are prepared
    "preparing by auto": Row(lambda s: prepares(s, variant="auto")),
    "preparing by swap": Row(lambda s: prepares(s, variant="swap")),
    "preparing by bcst": Row(lambda s: prepares(s, variant="bcst")),
    "preparing what does not fit": Row(lambda s: prepares(s, s.out, f(6)), lambda s: prepares(s)),
    "preparing no tensor": Row(lambda s: prepares(s, None, f(5))),
    "preparing beside music": Row(lambda s: prepares(s, beside="music")),
    "prepared variants differ": Row(lambda s: prepares(s, variant="pcpy" if s.odd else "b2b")),
    "prepared for other computations": Row(lambda s: prepares(s, beside=(NOTHING, COMPUTE)[s.odd])),
    # a handle that is not armed
    "trigger before arm": Row(lambda s: s.handle.trigger()),
    "trigger from the host before arm": Row(lambda s: s.handle.trigger_from_host()),
    "wait before arm": Row(lambda s: s.handle.wait()),
    "trigger value before arm": Row(lambda s: s.handle.trigger_value),
}

ARMED: dict[str, Row] = {
    "arm twice": Row(lambda s: s.handle.arm()),
    "trigger that was not asked for": Row(lambda s: s.handle.trigger_from_host()),
    **{
        f"{name} while armed": Row(call)
        for name, call in (
            ("arm", lambda s: s.second.arm()),
            ("gather", lambda s: s.comm.all_gather(s.out, f(5))),
            ("reduce", reduces),
            ("exchange", lambda s: splits(s, [1] * s.n, [1] * s.n)),
            ("allocate", lambda s: s.comm.empty(3)),
            ("barrier", lambda s: s.comm.barrier()),
            ("synchronize", lambda s: s.comm.synchronize()),
            ("prepare", prepares),
        )
    },
    "wait before the trigger": Row(lambda s: s.handle.wait()),
}
"""While a handle is armed, in which nothing may come between."""

KERNELS: dict[str, Row] = {
    **{
        f"grid {grid}": Row(lambda s, grid=grid: s.push.launch(grid, *s.tiles, **s.constants))
        for grid in ((), (0,), (1, 1, 1, 1), (2**31,))
    },
    "addresses of ordinary memory": Row(lambda s: s.comm.peers(s.shard)),
    "a kernel that is none": Row(lambda s: s.comm.load_kernel(abs, flags=1)),
    "flags": Row(lambda s: s.comm.load_kernel(s.push.kernel, flags=-1)),
    "grids differ": Row(lambda s: s.push.launch((1 + s.odd,), *s.tiles, **s.constants)),
    "programs that never end": Row(lambda s: s.endless.launch((3,))),
}
"""Kernels of one's own."""

FIRED: dict[str, Row] = {
    "trigger twice": Row(lambda s: s.handle.trigger()),
    "arm what is closed": Row(lambda s: (s.handle.close(), s.handle.arm())),
}


Found = dict[str, tuple[str, tuple[int, ...], str]]
"""The type of the error, the ranks at fault and the text, as this rank has them, of each row."""


def errors_of(s: Any, rows: dict[str, Row], *, calls_are_allowed: bool) -> Found:
    found, before = {}, s.out.clone()
    for name, row in rows.items():
        error = error_of(row.call if s.odd or row.right is None else row.right, s)
        text = re.sub(r"call \d+", "call N", re.sub(r"of communicator \S+:", "of communicator X:", str(error)))
        found[name] = type(error).__name__, tuple(getattr(error, "ranks", ())), text
        assert s.out.equal(before) and s.symmetric.eq(1).all(), f"bytes have moved: {name}"
        if calls_are_allowed:
            s.comm.all_reduce(total := torch.ones(3))
            assert total.tolist() == [s.n] * 3, name
    return found


def refused(group: dist.ProcessGroup, debug: bool) -> Found:
    """Make all calls."""
    with communicator(group, debug=debug) as comm, communicator(group) as other:
        n, rank = comm.world_size, comm.rank
        symmetric, exchanged = comm.empty(4 * n).fill_(1), f(2 * n)
        s = SimpleNamespace(group=group, comm=comm, n=n, rank=rank, odd=rank == 1, symmetric=symmetric)
        s.out, s.whole, s.foreign = torch.full((5 * n,), -1.0), f(8 * n), other.empty(4)
        s.partly_symmetric = symmetric.clone() if s.odd else symmetric
        _, s.ended, s.closed = Communicator(comm, name="one"), Communicator(comm, name="ended"), communicator(group)
        s.shared = Communicator(s.closed, name="shared")
        s.ended.close()
        s.closed.close()
        with (
            comm.prepare_all_gather(s.out, torch.full((5,), float(rank))) as s.handle,
            comm.prepare_all_to_all(exchanged, exchanged.clone()) as s.second,
        ):
            found = errors_of(s, ROWS, calls_are_allowed=True)
            s.handle.arm()
            found |= errors_of(s, ARMED, calls_are_allowed=False)
            s.handle.trigger()
            assert s.out.view(n, 5).eq(torch.arange(n)[:, None]).all()
            return found | errors_of(s, FIRED, calls_are_allowed=True)


@pytest.mark.parametrize("debug", [False, True])
def test_refusals(pool: RankPool, debug: bool) -> None:
    first, odd, last = pool.run(refused, RANKS, debug)
    for name, row in {**ROWS, **ARMED, **FIRED}.items():
        (kind, _, text), peers = odd[name], (first[name], last[name])
        if row.right is not None:
            assert peers == (("PeerError", (1,), f"call N: rank 1 refused it: {kind}: {text}"),) * 2, name
        else:
            assert [peer[0] for peer in peers] == [kind] * 2, (name, peers)
        assert not re.search(r"#[0-9a-f]{12}", text), "digests, by which ranks compare calls, say nothing to a reader"
    check_golden("refusals", texts_of(odd))


def texts_of(found: Found) -> dict[str, str]:
    return {name: f"{kind}: {text}" for name, (kind, _, text) in found.items()}


@on_ranks(RANKS, interpreted=True, gpu=True)
def test_refusals_of_kernels(group: dist.ProcessGroup) -> None:
    from own_kernels import TILE, never_ends, push_tiles

    with communicator(group, device=torch.get_default_device()) as comm:
        n, rank = comm.world_size, comm.rank
        s = SimpleNamespace(comm=comm, n=n, rank=rank, odd=rank == 1, shard=torch.full((10,), 1.0 + rank))
        s.out, s.symmetric = comm.empty(10 * n).fill_(-1), comm.empty(1).fill_(1)
        s.tiles, s.constants = (comm.peers(s.out), s.shard, 10), {"TILE": TILE}
        s.push, s.endless = comm.load_kernel(push_tiles, flags=4), comm.load_kernel(never_ends, flags=0)
        s.endless.launch((3,))
        comm.synchronize()
        found = errors_of(s, KERNELS, calls_are_allowed=True)
        s.push.launch((2,), *s.tiles, **s.constants)
        comm.synchronize()
        assert s.out.view(n, 10)[:, 0].tolist() == [1.0 + peer for peer in range(n)]
    assert [kind for kind, _, _ in found.values()] == [kind for kind, _, _ in everyones(group, found)[0].values()]
    if rank == 1:
        check_golden("refusals-kernels", texts_of(found))


@on_ranks(RANKS)
def test_what_is_accepted(group: dist.ProcessGroup) -> None:
    """Make calls that look like some of those."""

    def keyword(comm: Any, *, scale: int = 1) -> int:
        return scale

    class Step:
        def both(self, comm: Any) -> int:
            return 2

    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        sizes: Any = (2, 3), ([2, 3],), (torch.Size((2, 3)),), (np.int64(2), 3)
        assert all(comm.empty(*size).shape == (2, 3) for size in sizes)
        assert [comm.empty(*size).shape for size in ((np.int64(2),), (), (0, 2**40))] == [(2,), (), (0, 2**40)]
        fine: list[Any] = [keyword, Step().both, lambda *comms: 3, lambda comm, more=4: more]
        assert [sidelane.overlap(lambda: 0, each, comm)[1] for each in fine] == [1, 2, 3, 4]
        # What counts as a whole number, on one rank and not on another.
        tensor = torch.full((3,), float(rank))
        comm.broadcast(tensor, root=np.int64(1) if rank else 1)
        assert tensor.tolist() == [1.0] * 3
        counts = (np.ones(n, dtype=np.int64), torch.ones(n, dtype=torch.int64), [1] * n)[rank]
        output = f(n)
        comm.all_to_all(output, torch.arange(n) + 10.0 * rank, output_split_sizes=counts, input_split_sizes=counts)
        assert output.tolist() == [10.0 * source + rank for source in range(n)]
        comm.all_reduce(tensor, op=dist.ReduceOp(dist.ReduceOp.SUM))
        assert tensor.tolist() == [n] * 3
