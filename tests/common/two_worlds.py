"""Calls of three ranks in a group that joins processes of several worlds, as trainers and servers of RLHF meet.

Their ranks in the default group, if there is one, have nothing to do with those in the group.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from group_world import leave
from torch.distributed import distributed_c10d as c10d

import sidelane

__all__ = ["calls_of_communicators", "calls_of_groups", "check_calls", "leave", "parts"]

RANKS = 3
TIMEOUT = timedelta(seconds=20)
WORLDS = {
    "permuted": ((0, 0), (0, 1), (0, 2)),
    "equal numbers": ((0, 0), (0, 1), (1, 0)),
    "no default group": (None, None, None),
}
"""World and rank in it, for each process."""


@contextlib.contextmanager
def joint(folder: str, worlds: str, backend: str, *, is_listed: bool) -> Iterator[dist.ProcessGroup]:
    """A group of all processes in which each has the next one's number, and the default groups that they have.

    ``is_listed``: torch's table has the ranks as numbers of the group, as frameworks write it; else it has none.
    """
    sidelane.register()
    process = int(os.environ["TEST_RANK"])
    own, everyone = WORLDS[worlds][process], [each for each in WORLDS[worlds] if each is not None]
    if own is not None:
        world, rank = own
        size = sum(each[0] == world for each in everyone)
        store = dist.FileStore(f"{folder}/world{world}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    number = (process + 1) % RANKS
    store = dist.PrefixStore("joint", dist.FileStore(f"{folder}/joint", RANKS))
    made, _ = c10d._new_process_group_helper(
        *(RANKS, number, [], dist.Backend(backend), store), group_name="joint", timeout=TIMEOUT
    )
    if is_listed:
        c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(RANKS)}
    assert made.rank() == number
    try:
        yield made
    finally:
        dist.barrier(made)
        c10d._world.pg_group_ranks.setdefault(made, {})  # torch's own end of a group asks for it
        dist.destroy_process_group(made)
        if own is not None:
            dist.destroy_process_group()


def calls_of_groups(group: object, folder: str, worlds: str, wrapped: bool, is_listed: bool) -> None:
    """Every collective of a Sidelane group, made by torch or by ``wrap``, and such as it hands to Gloo."""
    with joint(folder, worlds, "gloo" if wrapped else "sidelane", is_listed=is_listed) as joined:
        used = sidelane.wrap(joined) if wrapped else joined
        check_calls(used, RANKS)
        if wrapped:
            dist.barrier(used)
            dist.destroy_process_group(used)


def calls_of_communicators(group: object, folder: str, worlds: str) -> str:
    """Every collective of a communicator; return its name."""
    with joint(folder, worlds, "gloo", is_listed=True) as joined:
        rank = joined.rank()
        with sidelane.Communicator(joined) as comm:
            assert (comm.rank, comm.world_size) == (rank, RANKS)
            mine, every = torch.full((5,), rank, dtype=torch.uint8), torch.arange(RANKS, dtype=torch.uint8)
            output = torch.empty(RANKS * 5, dtype=torch.uint8)
            comm.all_gather(output, mine)
            assert torch.equal(output, every.repeat_interleave(5))
            comm.all_to_all(output, (every * 10 + rank).repeat_interleave(5))
            assert torch.equal(output, (rank * 10 + every).repeat_interleave(5))
            part, numbers = torch.empty(5), torch.arange(RANKS).float()
            comm.reduce_scatter(part, numbers.repeat_interleave(5))
            assert part.eq(RANKS * rank).all()
            for root in range(RANKS):
                value = torch.full((3,), float(rank))
                comm.broadcast(value, root=root)
                assert value.eq(root).all()
            return comm.calls.name


def parts(group: object, folder: str, worlds: str) -> None:
    """Parts of such a group, by ``split_group``, and a group of a part's own default group beside it."""
    with joint(folder, worlds, "sidelane", is_listed=True) as joined:
        rank = joined.rank()
        part = dist.split_group(joined, [[0, 2], [1]])
        assert (part.rank(), part.size()) == ((0, 0, 1)[rank], (2, 1, 2)[rank])
        value = torch.full((3,), float(rank))
        dist.all_reduce(value, group=part)
        assert value.eq((2, 1, 2)[rank]).all()
        check_calls(joined, RANKS)
        dist.barrier(joined)
        dist.destroy_process_group(part)


def check_calls(used: dist.ProcessGroup, size: int) -> None:
    """Check every call by the numbers that ranks of the group bring."""
    rank, every = used.rank(), torch.arange(size).float()
    for root in range(size):
        for dtype in (torch.float32, torch.float64):
            value = torch.full((4,), rank, dtype=dtype)
            dist.broadcast(value, group_src=root, group=used)
            assert value.eq(root).all(), value
        found = torch.full((2,), -1.0)
        dist.scatter(
            found, list(every.repeat(2, 1).T.contiguous()) if rank == root else None, group_src=root, group=used
        )
        assert found.eq(rank).all(), found
        found = every + 10 * rank
        dist.reduce(found, group_dst=root, group=used)
        assert rank != root or torch.equal(found, every * size + 10 * every.sum()), found
    gathered = torch.empty(size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=used)
    assert torch.equal(gathered, every), gathered
    listed = [torch.empty(1) for _ in range(size)]
    dist.all_gather(listed, torch.tensor([float(rank)]), group=used)
    assert torch.equal(torch.cat(listed), every), listed
    for dtype in (torch.float32, torch.float64):
        part = torch.empty(1, dtype=dtype)
        dist.reduce_scatter_tensor(part, every.to(dtype), group=used)
        assert part.item() == size * rank, part
        total = (every + rank).to(dtype)
        dist.all_reduce(total, group=used)
        assert torch.equal(total, (every * size + every.sum()).to(dtype)), total
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, every + 10 * rank, group=used)
    assert torch.equal(swapped, rank + 10 * every), swapped
    if used not in c10d._world.pg_group_ranks:  # torch asks its table for the names of senders
        return
    sent, came = torch.tensor([float(rank)]), torch.empty(1)
    if rank % 2 == 0:  # NCCL makes the sends and receives of a rank one after the other
        dist.send(sent, group_dst=(rank + 1) % size, group=used)
    dist.recv(came, group_src=(rank - 1) % size, group=used)
    if rank % 2:
        dist.send(sent, group_dst=(rank + 1) % size, group=used)
    assert came.item() == (rank - 1) % size, came
