"""What four ranks do whose default group is a Sidelane group; each scenario makes it and takes it down again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from cpu_calls import in_a_forked_copy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sidelane
from sidelane import config
from sidelane.errors import CommunicatorClosedError, MismatchError, PeerError, PeerTimeoutError
from sidelane.integrations import ledger


@contextlib.contextmanager
def world(store: str, backend: str = "sidelane", timeout_s: float = 30) -> Iterator[tuple[int, int]]:
    """The default group, in the place of the one that the crew has made."""
    rank, size = int(os.environ["TEST_RANK"]), int(os.environ["TEST_SIZE"])
    sidelane.register()
    ledger.reset()
    dist.init_process_group(
        backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield rank, size
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def leave(group: dist.ProcessGroup) -> None:
    """Forget the crew's own default group."""
    os.environ["TEST_RANK"], os.environ["TEST_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()


def forms(group: dist.ProcessGroup, folder: str) -> None:
    """How a user may ask for it, and where tensors of the CPU go then."""
    for number, (form, where) in enumerate(
        [
            ("sidelane", "sidelane"),
            ("cpu:sidelane", "sidelane"),
            ("cuda:sidelane,cpu:gloo", "gloo"),
            ("cpu:gloo,cuda:sidelane", "gloo"),
        ]
    ):
        with world(f"{folder}/form{number}", form) as (_, size):
            for group in (dist.group.WORLD, dist.new_group()):
                tensor = torch.ones(3)
                dist.all_reduce(tensor, group=group)
                assert tensor.eq(size).all()
            assert dist.get_backend() == form and dist.get_backend_config(group)
            rows = sidelane.report().rows
            assert [row.where for row in rows] == [where] * 2, (form, rows)
            assert where == "sidelane" or rows[0].why == "cpu tensors are for gloo, as asked"
        assert not dist.is_initialized()


def replaced(group: dist.ProcessGroup, folder: str) -> None:
    """Two ranks begin anew with two others, which have made none of what these have; names of torch begin anew, too."""

    def use() -> None:
        size, gloo = dist.get_world_size(), dist.group.WORLD
        for _ in range(2):
            with sidelane.Communicator(gloo, device="cpu", config=sidelane.Config(timeout_s=10)) as comm:
                tensor = torch.ones(3)
                comm.all_reduce(tensor)
                assert tensor.eq(size).all()
            ours = sidelane.wrap(gloo)
            dist.all_reduce(tensor, group=ours)
            assert tensor.eq(size * size).all()
            names.append(ours.group_name)

    names: list[str] = []
    dist.distributed_c10d._world.group_count = 0  # as in a process that has made no group
    rank = int(os.environ["TEST_RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_SIZE", "2")
        if rank < 2:
            with world(f"{folder}/before", "gloo"):
                use()
            names.clear()
        patch.setenv("TEST_RANK", str(rank // 2))
        with world(f"{folder}/after{rank % 2}", "gloo"):
            use()
            everywhere: list[list[str]] = [[], []]
            dist.all_gather_object(everywhere, names)
            assert everywhere == [names, names]


def parts(group: dist.ProcessGroup, folder: str) -> None:
    """Groups of some ranks, that do not lie next to each other, and a mesh of them."""
    from torch.distributed.tensor import Shard, distribute_tensor

    with world(f"{folder}/parts") as (rank, _):
        outer, inner = dist.new_group([0, 3]), dist.new_group([3, 1])
        for part, ranks in ((outer, [0, 3]), (inner, [1, 3])):
            tensor = torch.full((5,), float(rank))
            dist.all_reduce(tensor, group=part)  # which only warns on a rank that is not in it
            assert tensor.eq(sum(ranks) if rank in ranks else rank).all()
            if rank in ranks:
                assert dist.get_process_group_ranks(part) == ranks
                gathered = [torch.empty(2) for _ in ranks]
                dist.all_gather(gathered, torch.full((2,), float(rank)), group=part)
                assert [each[0].item() for each in gathered] == ranks
                told = torch.full((4,), rank)
                dist.broadcast(told, src=3, group=part)
                assert told.eq(3).all()
                work = dist.all_reduce(tensor, group=part, async_op=True)
                dist.all_reduce(torch.ones(2, dtype=torch.float64), group=part)
                assert work is not None and work.wait()
        assert outer is None or outer is dist.GroupMember.NON_GROUP_MEMBER or outer.size() == 2
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))
        full = torch.arange(64.0).view(8, 8)
        spread = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
        assert spread.to_local().shape == (4, 4)
        assert torch.equal(spread.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), full)
        sums = spread.sum(0).full_tensor()
        assert torch.equal(sums, full.sum(0))
        assert mesh.get_group("far").size() == 2
        hybrid(rank, mesh)
        split(rank, dist.group.WORLD)
        assert ((0, 3) in {row.ranks for row in sidelane.report().rows}) == (rank in (0, 3))
        dist.destroy_process_group(outer)


def hybrid(rank: int, mesh: DeviceMesh) -> None:
    """FSDP2 on a mesh of two dimensions: shards in one, copies in the other; with the gradient of all ranks."""
    torch.manual_seed(0)
    net = fully_shard(torch.nn.Linear(6, 4, bias=False), mesh=mesh)
    x = torch.arange(12.0).view(2, 6) + rank
    net(x).sum().backward()
    grad = net.weight.grad
    assert isinstance(grad, DTensor)
    everywhere = torch.arange(12.0).view(2, 6).sum(0) + 2 * (0 + 1 + 2 + 3) / 4
    torch.testing.assert_close(grad.full_tensor(), everywhere.expand(4, 6))
    made = {(row.operation, row.ranks) for row in sidelane.report().rows if row.where == "sidelane"}
    near, far = ((0, 1) if rank < 2 else (2, 3)), ((0, 2) if rank % 2 == 0 else (1, 3))
    assert {("reduce_scatter_tensor", near), ("all_reduce", far)} <= made


def split(rank: int, everyone: Any) -> None:
    """``dist.split_group``, which gives each rank its part; of a part, too, and without some ranks."""
    mine = dist.split_group(split_ranks=[[2, 0], [1, 3]], timeout=timedelta(seconds=20))
    assert mine is not None and mine.rank() == rank // 2 and mine.size() == 2
    assert dist.get_process_group_ranks(mine) == [rank % 2, 2 + rank % 2]
    assert dist.get_backend(mine) == dist.get_backend(everyone)
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=mine)
    assert tensor.eq(2 + 2 * (rank % 2)).all()
    gathered = functional.all_gather_tensor(torch.full((1,), float(rank)), 0, mine)  # which finds it by its name
    assert gathered.tolist() == [rank % 2, 2 + rank % 2]
    again, alone = dist.split_group(mine, [[0, 1]], group_desc="both"), dist.split_group(mine, [[1]])
    assert again is not None and again.group_desc == "both" and (alone is not None) == (rank >= 2)
    dist.broadcast(tensor.fill_(rank), src=2 + rank % 2, group=again)
    assert tensor.eq(2 + rank % 2).all()
    for wrong in ([], [[]], [[0, 1], [1]], [[0, 4]]):
        with pytest.raises(ValueError, match="split_ranks"):
            dist.split_group(everyone, wrong)
    assert [row.where for row in sidelane.report().rows if row.group == mine.group_name] == ["sidelane"] * 2
    for part in (alone, again, mine):
        if part is not None:
            dist.destroy_process_group(part)


def late(group: dist.ProcessGroup, folder: str) -> None:
    """A wait with a time-out names who has not come, and the call goes on; that of the group ends it."""
    with world(f"{folder}/late", timeout_s=6) as (rank, size):
        told = dist.PrefixStore("told", dist.distributed_c10d._get_default_store())
        tensor = torch.ones(6)
        dist.all_reduce(tensor)
        if rank == 2:
            told.wait(["that I am late"])
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if rank == 0:
            missing: tuple[int, ...] = ()
            while missing != (2,):  # the others may come a little later than this one, too
                with pytest.raises(PeerTimeoutError, match=r"has not ended within 0.1 s; .*rank 2 \(pid") as caught:
                    work.wait(timedelta(milliseconds=100))
                missing = caught.value.ranks
            assert not work.is_completed()
            told.set("that I am late", "")
        assert work.wait()
        assert tensor.eq(size * size).all()
        if rank == 1:
            told.wait([f"that {other} gave up" for other in (0, 2, 3)])
            return
        with pytest.raises(PeerError, match="rank 1") as without:
            dist.all_reduce(tensor)
        assert without.value.ranks == (1,)
        told.set(f"that {rank} gave up", "")


def timeout_is_set(group: dist.ProcessGroup, folder: str) -> None:
    """``_set_pg_timeout`` reaches calls of a communicator that there is."""
    with world(f"{folder}/timeout is set") as (rank, size):
        dist.all_reduce(torch.ones(3))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
        told = dist.PrefixStore("told", dist.distributed_c10d._get_default_store())
        if rank:
            with pytest.raises(PeerError, match="waited 0.5 s; rank 0"):
                dist.all_reduce(torch.ones(3))
            told.set(f"that {rank} gave up", "")
        else:
            told.wait([f"that {other} gave up" for other in range(1, size)])


def sent_late(group: dist.ProcessGroup, folder: str) -> None:
    """A receive waits as long as the group does, one with a time-out of its own as long as that; as with Gloo."""
    said: dict[str, list[str]] = {}
    for backend in ("gloo", "sidelane"):
        with world(f"{folder}/sent late by {backend}", backend) as (rank, _):
            tensor, peer = torch.full((5,), float(rank)), rank ^ 1
            late = functools.partial(time.sleep, 0.7)  # longer than between two looks at the peers
            told = dist.PrefixStore("told", dist.distributed_c10d._get_default_store())
            if rank % 2:
                late()
                dist.send(tensor, peer)
                late()
                works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer)])
                works[0].wait()
                late()
                dist.all_reduce(torch.ones(5, dtype=torch.float64))
                told.wait([f"that {peer} is through"])
            else:
                received, other = torch.empty(5), torch.ones(5, dtype=torch.float64)
                assert dist.recv(received, None if rank else peer) == peer
                assert received.eq(peer).all()
                received.zero_()
                works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer)])
                works[0].wait()
                assert received.eq(peer).all()
                work = dist.all_reduce(other, async_op=True)  # which Gloo makes on both
                said[backend] = [gave_up(work, 0.1)]
                work.wait()  # type: ignore[union-attr]
                assert other.eq(4).all()
                lost = dist.irecv(received, peer)
                said[backend] += [gave_up(lost, 0.2), gave_up(lost, 0.2)]  # from then on there are no connections
                told.set(f"that {rank} is through", "")
    assert said.get("gloo") == said.get("sidelane"), said


def gave_up(work: Any, seconds: float) -> str:
    """What a wait raises that has a time-out."""
    with pytest.raises(RuntimeError) as caught:
        work.wait(timedelta(seconds=seconds))
    return f"{type(caught.value).__name__}: {caught.value}"


def given_back(group: dist.ProcessGroup, folder: str, rounds: int = 2) -> None:
    """A group that has ended gives everything back at once, whatever it was used for, with no garbage collected."""
    gc.disable()
    try:
        for number in range(rounds):
            for way in (calls, part_of, fails, aborted):
                before = held()
                with world(f"{folder}/{way.__name__}{number}", timeout_s=10) as (rank, size):
                    gone = weakref.ref(dist.group.WORLD)
                    way(rank, size)
                assert gone() is None, (way, gc.get_referrers(gone()))
                until = time.monotonic() + 5  # what ends an aborted call ends by itself
                while number and any(map(operator.gt, now := held(), before)):  # of the last way something may go late
                    assert time.monotonic() < until, (way, before, now)
                    time.sleep(0.01)
    finally:
        gc.enable()


def held() -> tuple[int, int, int]:
    """Descriptors, threads and shared mappings of this process."""
    shared = sum(line.split()[1].endswith("s") for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared


def calls(rank: int, size: int) -> None:
    """Calls of all kinds; some of them are under way when the group ends."""
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    dist.barrier()
    for _ in range(3):
        dist.all_reduce(torch.ones(3), async_op=True)


def part_of(rank: int, size: int) -> None:
    """Groups beside the first one, and a communicator; only some are destroyed."""
    part, both = dist.new_group(), dist.split_group(None, [[0, 1], [2, 3]])
    around, mesh = sidelane.wrap(part), init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))
    for each in (part, both, around, mesh.get_group("far")):
        dist.all_reduce(torch.ones(3), group=each)
    dist.destroy_process_group(around)
    dist.destroy_process_group(part)
    with sidelane.Communicator(device="cpu") as comm:
        comm.all_reduce(comm.empty(5))
        ended = weakref.ref(comm)
    del comm
    assert ended() is None


def fails(rank: int, size: int) -> None:
    """A call that is refused, and one that fails while it is waited for: errors keep what has led to them."""
    with pytest.raises((ValueError, PeerError)):
        dist.all_gather_into_tensor(torch.empty(size * 4 + (rank == 1)), torch.ones(4))
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    with pytest.raises(MismatchError):
        work.wait()  # type: ignore[union-attr]


def aborted(rank: int, size: int) -> None:
    """Calls under way fail at once and so do later ones, here and on the rank that hears of it."""
    told, world_group = dist.PrefixStore("told", dist.distributed_c10d._get_default_store()), dist.group.WORLD
    part = dist.new_group()  # of which this would be the first call
    dist.all_reduce(torch.ones(3))
    if rank == 3:
        told.wait([f"that {other} has aborted" for other in range(3)])
        with pytest.raises(PeerError, match=r"process group 0 was aborted on rank 0"):
            dist.all_reduce(torch.ones(3))
    else:
        works = [dist.all_reduce(torch.ones(length), async_op=True) for length in (3, 4)]  # a known one, and a new one
        works.append(dist.all_reduce(torch.ones(3), group=part, async_op=True))
        time.sleep(0.05)
        if rank:
            told.wait([f"that {rank - 1} has aborted"])  # who is first is named
        dist.distributed_c10d._abort_process_group()
        told.set(f"that {rank} has aborted", "")
        for work in works:  # on some ranks they fail since the first one has aborted
            with pytest.raises((CommunicatorClosedError, PeerError), match=r"process group \S+ was aborted"):
                work.wait()  # type: ignore[union-attr]
        for use in (world_group.barrier, lambda: world_group.allreduce([torch.ones(3)])):  # type: ignore[union-attr]
            with pytest.raises(CommunicatorClosedError, match=r"^process group 0 was aborted"):
                use()


def refused(group: dist.ProcessGroup, folder: str) -> None:
    """A wrong call on one rank is an error on all, and the group goes on."""
    with world(f"{folder}/refused") as (rank, size):
        output = torch.empty(size * 4 + (rank == 1))
        with pytest.raises((ValueError, PeerError), match=r"allowed output=16|rank 1 refused"):
            dist.all_gather_into_tensor(output, torch.ones(4))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.eq(size).all()


def compared(group: dist.ProcessGroup, folder: str) -> None:
    """Torch's debug levels: INFO changes nothing; at DETAIL every call is compared before it runs, so that a wrong
    one harms nothing."""
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        with world(f"{folder}/informed") as (rank, size):
            torch.manual_seed(0)
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
            net(torch.full((1, 3), float(rank))).sum().backward()
            assert net.module.weight.grad is not None
            assert net.module.weight.grad.eq(sum(range(size)) / size).all()
            assert net._get_ddp_logging_data()["backend_name"] == "sidelane"
            dist.all_reduce(torch.ones(2, dtype=torch.float64))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with world(f"{folder}/compared") as (rank, size):
            tensor = torch.ones(3)
            for _ in range(3):
                dist.all_reduce(tensor.fill_(1))
            with pytest.raises(MismatchError, match="rank 0: all_reduce"):
                dist.all_reduce(torch.ones(3 + (rank == 0)))
            dist.all_reduce(tensor)
            assert tensor.eq(size * size).all()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def copied(group: dist.ProcessGroup, folder: str) -> None:
    """What forked copies do to a group is an error at once, and changes nothing for the ranks."""
    with world(f"{folder}/copied", timeout_s=150) as (rank, size):  # forks take seconds on a loaded machine
        copies(rank, size, torch.ones(6), f"{folder}/of copies")


def copies(rank: int, size: int, tensor: torch.Tensor, store: str) -> None:
    """See :func:`copied`."""
    gloo = torch.zeros(5, dtype=torch.float64)
    told = dist.PrefixStore("told", dist.distributed_c10d._get_default_store())
    part = dist.new_group([0, 1])

    def calls() -> None:
        dist.all_reduce(tensor.fill_(1))
        assert tensor.eq(size).all()
        for work in (dist.all_reduce(tensor, async_op=True), dist.all_reduce(gloo, async_op=True)):
            work.wait()  # type: ignore[union-attr]
        assert tensor.eq(size * size).all()
        if rank < 2:
            dist.all_reduce(tensor.fill_(1), group=part)

    calls()
    ended = dist.all_reduce(tensor, async_op=True)
    assert ended is not None and ended.wait()
    uses: list[Callable[[], object]] = [
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True),
        lambda: dist.all_reduce(gloo),
        lambda: dist.all_reduce(gloo, async_op=True),
        lambda: dist.all_gather_object([None] * size, 1),
        lambda: dist.barrier(),
        lambda: dist.send(tensor, (rank + 1) % size),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, (rank + 1) % size)]),
        lambda: dist.group.WORLD.monitored_barrier(),  # type: ignore[union-attr]
        lambda: dist.new_group(),
        lambda: dist.split_group(None, [list(range(size))]),
        lambda: sidelane.wrap(),
        lambda: sidelane.Communicator(dist.group.WORLD, device="cpu"),
        lambda: functional.all_reduce(tensor, "sum", dist.group.WORLD).sum(),
    ]
    for number, use in enumerate(uses):
        text = in_a_forked_copy(use)
        assert text.startswith("CommunicatorClosedError: "), (number, text)
        assert f"it was made in another process (pid {os.getpid()}), of which this one" in text, (number, text)
    calls()
    if rank == 0:  # the others are late: threads of this process make the calls
        works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(gloo, async_op=True)]
        for work in works:
            text = in_a_forked_copy(lambda work=work: work.wait())
            assert text.startswith("CommunicatorClosedError: call under way: it was made in another process"), text
        told.set("that all may come", "")
        for work in works:
            work.wait()  # type: ignore[union-attr]
    else:
        told.wait(["that all may come"])
        dist.all_reduce(tensor)
        dist.all_reduce(gloo)

    def goes_on() -> str:
        assert ended.wait()
        if rank < 2:
            dist.destroy_process_group(part)
        dist.destroy_process_group()
        with config.override(dataclasses.replace(config.current(), virtual_nodes=None)), world(store, timeout_s=100):
            for form in (torch.float32, torch.float64):
                own = torch.ones(7, dtype=form)
                dist.all_reduce(own)
                dist.all_reduce(own, async_op=True).wait()  # type: ignore[union-attr]
                assert own.eq(size * size).all(), own
        return "fine"

    text = in_a_forked_copy(goes_on, 110)
    assert text == "fine", text
    calls()


def dies(group: dist.ProcessGroup, folder: str) -> None:
    """The others name the rank that has died, whoever makes the call."""
    with world(f"{folder}/dies") as (rank, _):
        behind = dist.new_group()
        for group in (dist.group.WORLD, behind):
            dist.all_reduce(torch.ones(6), group=group)
            dist.all_reduce(torch.ones(6, dtype=torch.float64), group=group)
        if rank == 2:
            os._exit(7)
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(torch.ones(6)),
            lambda: dist.all_reduce(torch.ones(6), group=behind, async_op=True).wait(),  # type: ignore[union-attr]
            lambda: dist.all_reduce(torch.ones(6, dtype=torch.float64), group=behind),
            lambda: dist.recv(torch.ones(6), 2),
        ]
        for call in calls:
            with pytest.raises(PeerError, match="rank 2 .*(died|dead)") as caught:
                call()
            assert caught.value.ranks == (2,)
