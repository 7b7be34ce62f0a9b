"""What ranks do with ordinary tensors that peers may reach."""

from __future__ import annotations

import gc
import mmap
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checked_calls import REDUCING, CheckedCall
from pieces import MadeUpPieces, memory_of

from sidelane import Communicator, Config
from sidelane.collectives import backend_cpu, call_cache
from sidelane.errors import UnavailableError
from sidelane.memory.storage import exchange_memory

KINDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather")
MAPPING = Config(timeout_s=30, map_memory=True)
SIZES = (1, 33, 5000, 70_000)
SEGMENTS = (1, 5000, 70_000, 3 << 20, 5 << 20)
"""So that memory of GPUs is allocated anew, and freed: torch keeps what is smaller than 10 MB together."""

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


def calls_on_mapped_memory(comm: Communicator) -> int:
    """How many of the calls that are remembered reach what peers have offered."""
    return sum(entry.settled is not None and entry.settled.is_mapped for entry in comm.lane.preparer.cache)


def shared(numel: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Ordinary memory that other processes can map, from some element on."""
    whole = torch.empty(offset + numel, dtype=dtype)
    return (whole if whole.is_cuda else whole.share_memory_())[offset:]


def private(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ordinary memory that other processes cannot map."""
    if not on_gpus():
        return torch.empty(numel, dtype=dtype)
    nbytes = -(-numel * dtype.itemsize // 512) * 512
    found: torch.Tensor = next(_carved(nbytes)) if nbytes else torch.empty(0)
    return found.view(dtype)[:numel]


def on_gpus() -> bool:
    return torch.get_default_device().type == "cuda"


_arena: list[Any] = []


def _carved(nbytes: int) -> Iterator[torch.Tensor]:
    """Bytes of an arena of the driver's pools, which it does not export; one after the other, and again."""
    from cuda.bindings import driver

    if not _arena:
        error, address = driver.cuMemAllocAsync(1 << 28, 0)
        assert not error
        interface = {"shape": (1 << 28,), "typestr": "|u1", "data": (int(address), False), "version": 3}
        holder = type("Arena", (), {"__cuda_array_interface__": interface})()
        _arena[:] = [torch.as_tensor(holder, device=torch.get_default_device()), 0]
    arena, used = _arena
    start = used if used + nbytes <= arena.nbytes else 0
    _arena[1] = start + nbytes
    yield arena[start : start + nbytes]


def every_kind(group: dist.ProcessGroup, seed: int, sizes: tuple[int, ...]) -> dict[str, int]:
    """Each collective on tensors that all ranks can reach, that some can, and that none can; bytes of staging after the
    first."""
    staging = {}
    with Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm:
        draw = random.Random(seed)
        for reachable in ("all", "some", "none"):
            for size in sizes:
                for kind in KINDS:
                    _one(comm, kind, size, reachable, draw)
            staging[reachable] = comm.lane.preparer._staging.nbytes
        assert comm._path.reach is not None
    return staging


def _one(comm: Communicator, kind: str, size: int, reachable: str, draw: random.Random) -> None:
    n, seed, root = comm.world_size, draw.randrange(10**9), draw.randrange(comm.world_size)
    dtype = draw.choice((torch.float32, torch.int32) if kind in REDUCING else DTYPES)
    in_place, offset, unshared = draw.random() < 0.4, draw.choice((0, 3)), draw.randrange(n)
    is_shared = reachable == "all" or (reachable == "some" and comm.rank != unshared)

    def make(what: str, numel: int) -> torch.Tensor:
        return shared(numel, dtype, offset) if is_shared else private(numel, dtype)

    CheckedCall(comm, kind, size, dtype, make, seed=seed, root=root, in_place=in_place).run()


def storm(
    group: dist.ProcessGroup, seed: int, steps: int, make: Callable[[int, torch.dtype], torch.Tensor] = shared
) -> tuple[int, int]:
    """Tensors come and go on each rank as they like, at addresses that were others' before; collectives on them by two
    communicators, some of them asynchronous. Mappings of the peers at the end, and calls that were not staged."""
    late, draw = random.Random(100 * seed + dist.get_rank(group)), random.Random(seed)
    mapped = 0
    with (
        Communicator(group, device=torch.get_default_device(), config=MAPPING) as first,
        Communicator(group, device=torch.get_default_device(), config=MAPPING) as second,
    ):
        n, rank = first.world_size, first.rank
        kept: list[Any] = []
        for step in range(steps):
            comm, size = draw.choice((first, second)), draw.choice(SEGMENTS if on_gpus() else SIZES)
            keeps, is_async, is_any_private = draw.random() < 0.5, draw.random() < 0.15, draw.random() < 0.1
            is_in_place = draw.random() < 0.3
            if kept and late.random() < 0.5:
                del kept[late.randrange(len(kept))]
            comes_again = keeps and kept and len(kept[-1]) == n * size
            output = kept[-1] if comes_again else make(n * size, torch.float32)
            if is_any_private and late.random() < 0.5:
                output = private(n * size)
            output.fill_(-1)
            if is_in_place:
                input = output[rank * size : (rank + 1) * size]
            else:
                input = make(size, torch.float32) if late.random() < 0.7 else private(size)
            input.fill_(step + 1000 * rank)
            work = comm.all_gather(output, input, async_op=is_async)
            if work is not None:
                work.wait()
            expected = [float(step + 1000 * peer) for peer in range(n)]
            assert output.view(n, size)[:, -1].tolist() == expected, step
            assert output.view(n, size)[:, 0].tolist() == expected, step
            if late.random() < 0.6:
                kept.append(output)
            mapped += calls_on_mapped_memory(comm) > 0
            del output, input
            if late.random() < 0.05:
                gc.collect()
                if on_gpus():
                    torch.cuda.empty_cache()
        kept.clear()
        if on_gpus():
            torch.cuda.empty_cache()
        for comm in (first, second):  # what has gone is said with the next offer
            last = make(4 * n, torch.int32)
            comm.all_gather(last, last[4 * rank : 4 * rank + 4])
        dist.barrier(group)
        left = sum(len(comm._path.reach._known) for comm in (first, second))  # type: ignore[union-attr]
    return left, mapped


def storm_of_pieces(group: dist.ProcessGroup, seed: int, steps: int) -> tuple[int, int]:
    """The same in memory of a made-up driver, of which tensors have several pieces each, and nothing is left of it."""
    pieces = MadeUpPieces(4096)
    with mock.patch.object(backend_cpu, "SharedTensors", return_value=memory_of(pieces)):
        found = storm(group, seed, steps, pieces.tensor)
    gc.collect()
    assert not pieces.mapped and not pieces.reserved, "what peers have given is unmapped"
    assert not pieces.counts, "what was freed here is retained by nobody"
    return found


def mapped_here() -> int:
    """Memory of others that this process has mapped, and on CPU ranks of its own."""
    if on_gpus():
        from sidelane.execute.cuda import ordinary

        return len(ordinary.opened)
    return Path("/proc/self/maps").read_text().count("/dev/shm/torch_")


def nothing_is_left(group: dist.ProcessGroup) -> tuple[int, int, int]:
    """Files that are mapped while peers offer them, beyond those before; behind a call with another one, when the
    tensors have gone; and when the communicator has."""
    gc.collect()
    before = mapped_here()
    with Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm:
        n, rank = comm.world_size, comm.rank
        tensors = [shared(n * 1000, torch.float32) for _ in range(5)]
        for tensor in tensors:
            comm.all_gather(tensor, tensor[1000 * rank : 1000 * rank + 1000])
        during = mapped_here() - before
        tensor = None  # type: ignore[assignment]
        tensors.clear()
        if on_gpus():
            torch.cuda.empty_cache()
        last = shared(n, torch.float32)
        comm.all_gather(last, last[rank : rank + 1])
        dist.barrier(group)
        del last
        gc.collect()
        then = mapped_here() - before
    gc.collect()
    return during, then, mapped_here() - before


def at_the_address_of(gone: torch.Tensor, value: float) -> torch.Tensor:
    """Replace a shared tensor by a new one at its address, in another file, although its storage lives on."""
    address, numel = gone.data_ptr(), gone.numel()
    other = torch.zeros(numel).share_memory_()
    exchange_memory(gone.untyped_storage(), other.untyped_storage())
    del other
    tried: list[torch.Tensor] = []
    while not tried or tried[-1].data_ptr() != address:
        assert len(tried) < 100, "the kernel maps it elsewhere"
        tried.append(torch.full((numel,), value).share_memory_())
    return tried[-1]


def addresses_come_again(group: dist.ProcessGroup, way: str) -> int:
    """Memory of tensors is exchanged and freed, and new memory lies at its address: each call has the right bytes."""
    with Communicator(group, device=torch.device("cpu"), config=MAPPING) as comm:
        rank, n = comm.rank, comm.world_size
        kept = [torch.full((n * 5000,), -1.0).share_memory_()]
        first, last = kept[0].data_ptr(), 0
        for step in range(6):
            each = kept[-1]
            each[5000 * rank : 5000 * rank + 5000] = 10 * step + rank
            comm.all_gather(each, each[5000 * rank : 5000 * rank + 5000])
            assert each[::5000].tolist() == [10 * step + peer for peer in range(n)], step
            dist.barrier(group)
            made = at_the_address_of(each, -1.0)
            if way == "back":  # the first storage has the address again, and not its memory
                exchange_memory(each.untyped_storage(), made.untyped_storage())
                made = each
            kept.append(made)
            assert made.data_ptr() == first
            last = calls_on_mapped_memory(comm)
        return last


def one_cannot_map(group: dist.ProcessGroup) -> tuple[str, int]:
    """A rank that may not open what its peers offer: all ranks stage that, and go on."""
    rank = dist.get_rank(group)
    with Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm:
        n = comm.world_size
        assert comm._backend.ordinary is not None
        allowed = comm._backend.ordinary.map

        def refuse(handle: str, name: str) -> Any:
            raise UnavailableError("planted")

        tensor, other = shared(n * 100, torch.float32), shared(n * 100, torch.float32)
        for step in range(3):
            if rank == 1:
                comm._backend.ordinary.map = refuse if step == 0 else allowed  # type: ignore[method-assign]
            for each in (tensor, other) if step else (tensor,):
                each.fill_(-1)
                each[100 * rank : 100 * rank + 100] = step + rank
                comm.all_gather(each, each[100 * rank : 100 * rank + 100])
                assert each[::100].tolist() == [step + peer for peer in range(n)]
        return str(comm.reach(tensor)), len(comm._path.reach._refused)  # type: ignore[union-attr]


def answers(group: dist.ProcessGroup) -> list[str]:
    """What a communicator says of tensors."""
    found = []
    with Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm:
        found += [str(comm.reach(each)) for each in (comm.empty(4), shared(4, torch.float32), private(4))]
        found.append(str(comm.reach(torch.zeros(0))))
        for _ in range(3):
            output, input = shared(4 * comm.world_size, torch.float32), shared(4, torch.float32).fill_(comm.rank)
            comm.all_gather(output, input)
            comm.all_gather(
                output, private(4).fill_(0)
            )  # where the output is reached, it does not matter where inputs are
            comm.all_to_all(output, shared(4 * comm.world_size, torch.float32))
            comm.gather(private(4 * comm.world_size) if comm.rank == 0 else None, input, root=0)
        assert comm.lane.preparer._staging.nbytes == 0, "nothing was staged"
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=30, map_memory=False)) as comm:
        tensor = shared(comm.world_size, torch.float32).fill_(comm.rank)
        comm.all_gather(tensor, tensor[comm.rank : comm.rank + 1])
        assert tensor.tolist() == list(range(comm.world_size))
        found.append(str(comm.reach(tensor)))
    return found


def of_other_libraries(group: dist.ProcessGroup, folder: str) -> tuple[list[str], bool]:
    """Memory that torch did not make: a file that is mapped, and torch's own by way of DLPack. How peers reach it, and
    whether a call was right in which one rank has it and the others have memory that peers map."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    with open(f"{folder}/bytes-{rank}", "w+b") as file:
        file.truncate(4 * n * 1000)
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), 4 * n * 1000), dtype=torch.float32)
    ours = shared(n * 1000, torch.float32)
    given = torch.from_dlpack(ours)
    with Communicator(group, config=MAPPING) as comm:
        said = [str(comm.reach(each)) for each in (mapped, given)]
        right = True
        for step in range(4):
            output = mapped if step % 2 == 0 and rank == 0 else given if step == 1 and rank == 1 else ours
            output.fill_(-1)
            output[rank * 1000 : (rank + 1) * 1000] = step + rank
            comm.all_gather(output, output[rank * 1000 : (rank + 1) * 1000])
            right &= output.view(n, 1000).unique(dim=1).flatten().tolist() == [step + peer for peer in range(n)]
    return said, right


def asynchronous_ones_wait_for_nobody(group: dist.ProcessGroup) -> None:
    """Rank 0 starts a call and then tells its peers to come: a call that waited for their hosts would never return."""
    with Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm:
        n, rank = comm.world_size, comm.rank
        tensor = shared(n * 10, torch.float32)
        for step in range(3):
            tensor.fill_(-1)
            tensor[10 * rank : 10 * rank + 10] = step + rank
            if rank and step:  # the first one of its kind is agreed on
                dist.barrier(group)
            # The ranks that come late need not be asynchronous themselves.
            work = comm.all_gather(tensor, tensor[10 * rank : 10 * rank + 10], async_op=rank == 0)
            if rank == 0:
                assert work is not None
                if step:
                    time.sleep(0.01)
                    dist.barrier(group)
                work.wait()
            assert tensor[::10].tolist() == [step + peer for peer in range(n)]


def lists(group: dist.ProcessGroup, seed: int, rounds: int) -> int:
    """Lists, batches of several kinds and uneven exchanges of tensors of which each rank has some in shared memory."""
    draw, late = random.Random(seed), random.Random(100 * seed + dist.get_rank(group))
    mapped = 0
    kept = mock.patch.object(call_cache, "MOST_NEW", 4096)  # for the count in the end
    with kept, Communicator(group, device=torch.get_default_device(), config=MAPPING) as comm:
        n, rank = comm.world_size, comm.rank

        def make(numel: int) -> torch.Tensor:
            return shared(numel, torch.int32) if late.random() < share else private(numel, torch.int32)

        for step in range(rounds):
            share = draw.choice((0.0, 0.8, 1.0, 1.0))
            sizes = [draw.choice((1, 7, 300)) for _ in range(draw.randrange(1, 4))]
            inputs = [make(size).fill_(step + 1000 * rank) for size in sizes]
            outputs = [make(n * size) for size in sizes]
            exchanged = [make(n * size) for size in sizes]
            if draw.random() < 0.5:
                comm.all_gather(outputs, inputs)
                comm.all_to_all(exchanged, outputs)
            else:
                summed = make(50).fill_(rank + step)
                with comm.batch() as batch:
                    batch.all_gather(outputs, inputs)
                    batch.all_reduce(summed)
                assert summed.tolist() == [n * step + sum(range(n))] * 50, step
                with comm.batch() as batch:
                    batch.all_to_all(exchanged, outputs)
            for size, output, other in zip(sizes, outputs, exchanged, strict=True):
                assert output.view(n, size)[:, -1].tolist() == [step + 1000 * peer for peer in range(n)], step
                assert other.view(n, size).tolist() == [[step + 1000 * rank] * size] * n, step
            counts = [[draw.randrange(4) for _ in range(n)] for _ in range(n)]
            sent, expected = counts[rank], [row[rank] for row in counts]
            source, target = make(sum(sent)).fill_(step + rank), make(sum(expected)).fill_(-1)
            work = comm.all_to_all(
                target, source, input_split_sizes=sent, output_split_sizes=expected, async_op=draw.random() < 0.3
            )
            if work is not None:
                work.wait()
            assert target.tolist() == [step + peer for peer in range(n) for _ in range(expected[peer])], step
        mapped += calls_on_mapped_memory(comm)
    return mapped
