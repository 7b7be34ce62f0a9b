"""What ``async_op=True`` returns is a ``torch.distributed.Work``, to wait for, to ask, and to hang callbacks on."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import sweeps
import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane import Communicator, Config
from sidelane.errors import PeerError, PeerTimeoutError


def test_work_is_what_torch_expects(pool: RankPool) -> None:
    pool.run(sweeps.works, 3)


def waits_for_a_late_peer(group: dist.ProcessGroup) -> float:
    with Communicator(group, device="cpu", config=Config(timeout_s=30)) as comm:
        tensor = torch.ones(4)
        comm.all_reduce(tensor)
        if dist.get_rank(group) == 1:
            time.sleep(1.0)
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        waited = 0.0
        if dist.get_rank(group) == 0:
            began = time.monotonic()
            with pytest.raises(PeerTimeoutError, match=r"shape \(4,\)\) has not ended within 0.1 s"):
                work.wait(timedelta(milliseconds=100))
            waited = time.monotonic() - began
            assert not work.is_completed() and work.exception() is None and not work.is_success()
        assert work.wait(timedelta(seconds=20))
        assert torch.equal(tensor, torch.full((4,), 4.0))
        return waited


def test_a_wait_with_a_time_out_gives_up_and_the_collective_goes_on(pool: RankPool) -> None:
    waited, _ = pool.run(waits_for_a_late_peer, 2)
    assert waited >= 0.1


def fails(group: dist.ProcessGroup) -> str:
    with Communicator(group, device="cpu", config=Config(timeout_s=1)) as comm:
        tensor = torch.ones(4)
        comm.all_reduce(tensor)
        if dist.get_rank(group) == 1:
            dist.barrier(group)  # until the other one has given up
            return ""
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future()
        with pytest.raises(RuntimeError, match="rank 1 .* has not come"):
            future.wait()
        with pytest.raises(RuntimeError, match="rank 1 .* has not come"):
            torch.futures.collect_all([future]).wait()  # C++ sees the error, too, and no result
        assert work.is_completed() and not work.is_success()
        with pytest.raises(PeerError):
            work.result()
        dist.barrier(group)
        return type(work.exception()).__name__


def test_a_failure_goes_to_whoever_asks(pool: RankPool) -> None:
    assert pool.run(fails, 2)[0] == "PeerTimeoutError"
