"""Calls by the billion: flags are 32-bit words, and one that nobody has set for long must not count as set."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from counting import skip
from cpu_calls import communicator
from on_ranks import everyones, on_ranks
from ranks import RankPool

from sidelane import Communicator, PeerError
from sidelane.program.ir import RENEWAL_CALLS


def kept(comm: Communicator, name: str, *size: int) -> torch.Tensor:
    """Symmetric memory of a communicator that its calls share."""
    if name not in comm.cache:
        comm.cache[name] = comm.empty(*size, dtype=torch.int32)
    return comm.cache[name]


def call_all(comm: Communicator, seed: int, *, late: int) -> None:
    """Every program that a rank could be let through early in: its peers are late."""
    n, rank = comm.world_size, comm.rank
    for number, variant in enumerate(("b2b", "relay", "pcpy", "striped", "swap")):
        if rank == late:
            time.sleep(0.02)
        value = 1000 * seed + 10 * number
        if variant == "relay":
            tensor = kept(comm, variant, 3 * 1024)
            tensor.fill_(value if rank == 0 else -1)
            comm.broadcast(tensor, root=0, variant=variant)
            assert tensor.eq(value).all()
            continue
        if variant == "swap":
            tensor = kept(comm, variant, n, 5)
            tensor[:] = torch.arange(n, dtype=torch.int32)[:, None] + value + 100 * rank
            comm.all_to_all(tensor, tensor, variant=variant)
            assert tensor[:, 0].tolist() == [value + rank + 100 * r for r in range(n)]
            continue
        output = torch.full((n * 7,), -1, dtype=torch.int32)
        comm.all_gather(output, torch.full((7,), value + rank, dtype=torch.int32), variant=variant)
        assert output.view(n, 7)[:, 3].tolist() == [value + r for r in range(n)], (variant, seed)
    total = torch.full((5,), rank + seed, dtype=torch.int32)
    comm.all_reduce(total)
    assert total[0] == sum(range(n)) + n * seed


@on_ranks(3)
def test_flags_that_nobody_set_for_billions_of_calls(group: dist.ProcessGroup) -> None:
    """Those of one program are as old as the last renewal lets them be, while others run."""
    with communicator(group) as comm:
        call_all(comm, 1, late=1)
        for seed, number in enumerate(AROUND, 2):
            skip(comm, number)
            for again in range(2):
                call_all(comm, 10 * seed + again, late=(seed + again) % comm.world_size)
            assert 0 <= comm.calls.number() - number < 200, number


AROUND = [2**26 - 10, 2**30, 2**31 - 9, 2**31 + 3, 3 * 2**30, 2**32 - 9, 2**32 + 5, 2**33]


def without_renewals(group: dist.ProcessGroup, variant: str) -> str:
    """The mistake that renewals are for. It must show, or the test above shows nothing."""
    with communicator(group, timeout_s=5) as comm:
        n, rank = comm.world_size, comm.rank
        shard, output = torch.zeros(64, dtype=torch.int32), torch.zeros(64 * n, dtype=torch.int32)
        comm.all_gather(output, shard, variant=variant)
        comm.barrier()
        comm.calls.count_from(2**31 + 100)
        try:
            for k in range(4):
                if rank == 1:
                    time.sleep(0.1)
                shard.fill_(10 * k + rank + 1)
                comm.all_gather(output.fill_(-1), shard, variant=variant)
                if output.view(n, 64)[:, 0].tolist() != [10 * k + r + 1 for r in range(n)]:
                    return "wrong bytes"
        except PeerError as error:
            return type(error).__name__
    return "right"


def test_without_renewals_calls_go_wrong(pool: RankPool) -> None:
    found = pool.run(without_renewals, 2, "b2b")
    assert "wrong bytes" in found or "PeerTimeoutError" in found or "PeerError" in found


@on_ranks(3)
@pytest.mark.parametrize("seed", range(3))
def test_a_renewal_may_fall_anywhere(group: dist.ProcessGroup, seed: int) -> None:
    """Asynchronous calls, handles, lists, refusals and empty() where a renewal falls in between."""
    rng = random.Random(seed)
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        block = comm.empty(n, 3, dtype=torch.int64)
        for turn in range(12):
            comm.calls.count_from((turn + 1) * RENEWAL_CALLS - rng.randint(0, 4))
            works = []
            for k in range(6):
                what = rng.randrange(6)
                tensor = torch.full((4,), turn + k + rank, dtype=torch.int64)
                if what == 0:
                    works.append((comm.all_reduce(tensor, async_op=True), tensor, n * (turn + k) + sum(range(n))))
                elif what == 1:
                    with comm.prepare_all_gather(block, block[rank]) as handle:
                        handle.arm()
                        block[rank] = turn + rank
                        handle.trigger()
                        assert block[:, 0].tolist() == [turn + r for r in range(n)]
                elif what == 2:
                    comm.all_reduce([tensor, tensor.clone()])
                    assert tensor[0] == n * (turn + k) + sum(range(n))
                elif what == 3:
                    with pytest.raises((ValueError, PeerError)):
                        comm.all_gather(torch.empty(n * 4 + (rank == 0)), torch.empty(4))
                elif what == 4:
                    assert comm.empty(4).shape == (4,)
                else:
                    comm.all_to_all(
                        torch.empty(n), torch.ones(n), output_split_sizes=[1] * n, input_split_sizes=[1] * n
                    )
            for work, tensor, right in works:
                work.wait()
                assert tensor[0] == right
        number = comm.calls.number()
        assert everyones(group, number) == [number] * n and number > 12 * RENEWAL_CALLS - 10


@on_ranks(2)
def test_a_renewal_names_who_does_not_come(group: dist.ProcessGroup) -> None:
    comm = communicator(group, timeout_s=2)
    comm.barrier()
    comm.calls.count_from(RENEWAL_CALLS - 1)
    comm.calls.number()
    if dist.get_rank(group) == 1:
        dist.barrier(group)  # until the other one has given up
        comm.close()
        return
    with pytest.raises(PeerError) as caught:
        comm.all_reduce(torch.ones(3))
    comm.close()
    dist.barrier(group)
    text = str(caught.value)
    assert "renewal of flags: all calls have ended" in text and "rank 1 (pid" in text
