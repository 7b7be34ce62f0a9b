"""Prelaunched calls between CPU processes: right bytes over many rounds, misuse, peers that die or do not come."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pytest
import sweeps
import torch
import torch.distributed as dist
from cpu_calls import communicator, error_of
from expected import any_bytes, same_bytes
from made_up_gpus import made_up_gpus
from on_ranks import BOTH_STREAMS, on_ranks

from sidelane import PeerError
from sidelane.config import COMPUTE, NOTHING
from sidelane.errors import PeerTimeoutError
from sidelane.program.collective import Kind
from sidelane.session.prelaunch import Prelaunched


@on_ranks(1, 2, 4, gpu=BOTH_STREAMS)
def test_right_bytes(group: dist.ProcessGroup) -> None:
    """Every variant, place and trigger of the handles, with other calls between two of them."""
    with sweeps.communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        cases = [
            (Kind.ALL_GATHER, variant, symmetric, in_place)
            for variant in ("b2b", "pcpy", "bcst")
            for symmetric, in_place in ((True, False), (True, True), (False, False))
            if symmetric or variant != "bcst"
        ] + [
            (Kind.ALL_TO_ALL, variant, symmetric, in_place)
            for variant in ("b2b", "pcpy", "swap")
            for symmetric, in_place in ((True, False), (True, True), (False, False), (False, True))
            if symmetric or variant != "swap"
        ]
        for seed, (kind, variant, symmetric, in_place) in enumerate(cases):
            numel = 37 + seed
            output = sweeps.place(comm, symmetric, n * numel, torch.float32)
            if kind is Kind.ALL_GATHER:
                input = output[rank * numel : (rank + 1) * numel] if in_place else torch.empty(numel)
                prepare, sent = comm.prepare_all_gather, numel
            else:
                input = output if in_place else torch.empty(n * numel)
                prepare, sent = comm.prepare_all_to_all, n * numel
            host = bool(seed % 2)

            def produce(
                repeat: int,
                seed: int = seed,
                sent: int = sent,
                output: torch.Tensor = output,
                input: torch.Tensor = input,
            ) -> list[torch.Tensor]:
                inputs = [any_bytes(100 * seed + repeat, r, sent, torch.float32) for r in range(n)]
                output.zero_()
                input.copy_(inputs[rank])
                return inputs

            produce(0)  # a GPU cannot load kernels while a call is armed
            with prepare(output, input, variant=variant, host_trigger=host) as handle:
                for repeat in range(4):
                    if repeat % 2:
                        sweeps.delay()
                    handle.arm()
                    inputs = produce(repeat)
                    fire(handle, host and repeat % 2 == 0)
                    parts = inputs if kind is Kind.ALL_GATHER else [t.view(n, -1)[rank] for t in inputs]
                    assert same_bytes(output, torch.cat(parts)), (kind, variant, symmetric, in_place, repeat)
                    if repeat == 1:
                        total = torch.ones(3)
                        comm.all_reduce(total)
                        assert total.tolist() == [n] * 3


def fire(handle: Prelaunched, from_host: bool) -> None:
    """Trigger, and make the output readable for the caller's stream."""
    if not from_host:
        handle.trigger()
        return
    if torch.get_default_device().type == "cuda":
        torch.cuda.current_stream().synchronize()  # the trigger does not wait for who made the input
    handle.trigger_from_host()
    handle.wait()


@on_ranks(3, rounds=150)
@on_ranks(gpu=BOTH_STREAMS, rounds=300)
def test_many_rounds_back_to_back(group: dist.ProcessGroup, rounds: int) -> None:
    """Two handles in turn, with random delays, ranks running ahead of each other."""
    with sweeps.communicator(group) as comm:
        n, rank, numel = comm.world_size, comm.rank, 129
        gathered, shard = comm.empty(n * numel), torch.empty(numel)
        exchanged, source = torch.empty(n * numel), torch.empty(n * numel)
        with (
            comm.prepare_all_gather(gathered, shard) as gather,
            comm.prepare_all_to_all(exchanged, source, variant="pcpy") as exchange,
        ):
            for step in range(-1, rounds):
                sweeps.delay()
                if step < 0:  # a GPU cannot load kernels while a call is armed
                    shard.fill_(step)
                    source.view(n, numel).copy_(rank + torch.arange(n)[:, None].expand(n, numel))
                    source.view(n, numel).copy_(step + 1000 * rank + torch.arange(n)[:, None].expand(n, numel))
                    continue
                gather.arm()
                shard.fill_(step + 1000 * rank)
                gather.trigger()
                assert gathered.view(n, numel).eq(step + 1000 * torch.arange(n)[:, None]).all()
                exchange.arm()
                sweeps.delay()
                source.view(n, numel).copy_(step + 1000 * rank + torch.arange(n)[:, None].expand(n, numel))
                exchange.trigger()
                assert exchanged.view(n, numel).eq(step + rank + 1000 * torch.arange(n)[:, None]).all()


@on_ranks(3, gpu=BOTH_STREAMS)
def test_staging_may_move_between_two_calls(group: dist.ProcessGroup) -> None:
    """A call between two triggers needs more staging than there was."""
    with sweeps.communicator(group) as comm:
        n, rank, numel = comm.world_size, comm.rank, 1000
        output, shard = torch.empty(n * numel), torch.zeros(numel)
        shard.fill_(rank)
        with comm.prepare_all_gather(output, shard) as handle:
            for step, between in enumerate((1 << 10, 1 << 20, 3 << 20)):
                handle.arm()
                shard.fill_(10 * step + rank)
                handle.trigger()
                assert output.view(n, numel).eq(10 * step + torch.arange(n)[:, None]).all()
                large, whole = torch.full((between,), float(rank)), torch.empty(n * between)
                comm.all_gather(whole, large)
                assert whole.view(n, between).eq(torch.arange(n)[:, None]).all()


@on_ranks(3)
def test_what_is_armed_can_be_cancelled(group: dist.ProcessGroup) -> None:
    """Handles that all ranks close armed leave no trace."""
    with communicator(group) as comm:
        n = comm.world_size
        out, shard = torch.full((4 * n,), -1.0), torch.full((4,), float(comm.rank))
        for _ in range(3):
            with comm.prepare_all_gather(out, shard) as handle:
                handle.arm()
            assert not handle.armed
            assert (out == -1).all()
        comm.all_gather(out, shard)
        assert out.view(n, 4).eq(torch.arange(n)[:, None]).all()
        left = comm.prepare_all_gather(out, shard)
        left.arm()  # close() of the communicator ends it


@on_ranks(3)
def test_an_exception_before_the_trigger_reaches_the_peers(group: dist.ProcessGroup) -> None:
    with communicator(group, timeout_s=30) as comm:
        n = comm.world_size
        out, shard = torch.empty(4 * n), torch.ones(4)
        words = "^'the producer'$" if comm.rank == 1 else "rank 1 left prelaunched all_gather.*KeyError: 'the producer'"
        with (
            pytest.raises(KeyError if comm.rank == 1 else PeerError, match=words),
            comm.prepare_all_gather(out, shard) as handle,
        ):
            handle.arm()
            if comm.rank == 1:
                raise KeyError("the producer")
            handle.trigger()
        assert error_of(comm.all_gather, out, shard)


@on_ranks(2, timeout_s=100)
def test_handles_on_the_path_of_gpus(group: dist.ProcessGroup) -> None:
    """Handles on the path of GPUs, with made-up drivers: the three triggers, calls in between, what is refused."""
    texts = []
    with made_up_gpus(finish=False) as driver, communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        out, shard = comm.empty(4 * n), torch.full((4,), -1.0)
        exchanged, source = torch.empty(2 * n), torch.empty(2 * n)
        total, whole = torch.ones(3), torch.empty(4 * n)
        with (
            comm.prepare_all_gather(out, shard, host_trigger=True) as gather,
            comm.prepare_all_to_all(exchanged, source, variant="pcpy") as exchange,
        ):
            for step in range(9):
                gather.arm()
                assert gather.armed and type(error_of(exchange.arm)) is RuntimeError
                texts.append(str(error_of(comm.all_reduce, total)))
                out.fill_(-1)
                time.sleep(0.002 * (rank + step) % 5)
                assert out.eq(-1).all(), "bytes moved before the trigger"
                shard.fill_(10 * step + rank)
                if step % 3 == 0:
                    gather.trigger()
                elif step % 3 == 1:
                    gather.trigger_from_host()
                    gather.wait()
                else:
                    ctypes.c_uint32.from_address(gather.trigger_address).value = gather.trigger_value
                    gather.wait()
                assert not gather.armed
                driver.synchronize()
                assert out.view(n, 4).eq(10 * step + torch.arange(n)[:, None]).all(), step
                if step % 2:
                    comm.all_gather(whole, shard)
                    driver.synchronize()
                    assert whole.equal(out)
                exchange.arm()
                source.view(n, 2).copy_(100 * rank + 10 * step + torch.arange(n)[:, None].expand(n, 2))
                exchange.trigger()
                driver.synchronize()
                assert exchanged.view(n, 2).eq(100 * torch.arange(n)[:, None] + 10 * step + rank).all(), step
            gather.arm()
            driver.begin_capture()
            texts += [str(error_of(method)) for method in (gather.trigger, gather.wait)]
            assert driver.end_capture() == []
            gather.trigger()
            driver.begin_capture()
            texts.append(str(error_of(exchange.arm)))
            assert driver.end_capture() == []
            shard.fill_(rank)
            gather.arm()  # closing fires it
        driver.synchronize()
        assert out.view(n, 4).eq(torch.arange(n)[:, None]).all()
        left = comm.prepare_all_gather(out, shard)
        left.arm()  # close() of the communicator fires it
    *busy, fired, waited, armed = texts
    assert len(busy) == 9 and all("another call while a prelaunched one waits for its trigger" in one for one in busy)
    assert "trigger: prelaunched all_gather" in fired and "wait: prelaunched all_gather" in waited
    assert "while a graph is captured" in armed


@on_ranks(3, timeout_s=100)
@pytest.mark.parametrize("arms", [False, True])
def test_a_rank_on_the_path_of_gpus_that_never_arms_or_fires_is_named(group: dist.ProcessGroup, arms: bool) -> None:
    """Rank 1 never fires, or does not even arm."""
    with made_up_gpus() as driver:
        comm = communicator(group, timeout_s=2)
        out, shard = comm.empty(4 * comm.world_size), torch.ones(4)
        handle = comm.prepare_all_gather(out, shard)
        if comm.rank != 1 or arms:
            handle.arm()
        error: BaseException | None = None
        if comm.rank != 1:
            handle.trigger()
            error = error_of(comm.synchronize)
        dist.barrier(group)  # until the others have given up
        if comm.rank == 1 and arms:
            error = error_of(lambda: (handle.trigger(), comm.synchronize()))
        driver.synchronize()
        comm.close()
    if comm.rank != 1 or arms:  # then it hears of it when it comes
        assert isinstance(error, PeerTimeoutError) and error.ranks == (1,), error
        assert comm.rank == 1 or ("rank 1" in str(error) and "all_gather" in str(error)), error


@on_ranks(2)
@pytest.mark.parametrize(
    ("setting", "beside", "alone"),
    [(NOTHING, None, True), (COMPUTE, None, False), (NOTHING, COMPUTE, False), (COMPUTE, NOTHING, True)],
)
def test_handles_know_what_runs_next_to_them(
    group: dist.ProcessGroup, setting: str, beside: str | None, alone: bool
) -> None:
    """Whether handles are of programs that nothing computes next to."""
    n = dist.get_world_size(group)
    with communicator(group, beside=setting) as comm:
        for prepare in (comm.prepare_all_gather, comm.prepare_all_to_all):
            output = torch.empty(8 * n)
            input = torch.ones(8 if prepare == comm.prepare_all_gather else 8 * n)
            with prepare(output, input, beside=beside) as handle:
                assert handle.program.alone == alone
                handle.arm()
                handle.trigger()
                assert output.eq(1).all()


@on_ranks(2, timeout_s=30)
@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_next_handle_is_armed_before_the_wait_for_one(group: dist.ProcessGroup, on_gpus: bool) -> None:
    """A call that the host has fired is waited for while the next one is armed, whose trigger comes behind that."""
    with made_up_gpus() if on_gpus else contextlib.nullcontext() as driver, communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        outs, shards = [comm.empty(4 * n) for _ in range(2)], [torch.empty(4) for _ in range(2)]
        with (
            comm.prepare_all_gather(outs[0], shards[0], host_trigger=True) as first,
            comm.prepare_all_gather(outs[1], shards[1]) as second,
        ):
            for step in range(4):
                first.arm()
                shards[0].fill_(10 * step + rank)
                first.trigger_from_host()
                second.arm()
                first.wait()
                shards[1].fill_(10 * step - rank)
                second.trigger()
                if driver is not None:
                    driver.synchronize()
                assert outs[0].view(n, 4).eq(10 * step + torch.arange(n)[:, None]).all(), step
                assert outs[1].view(n, 4).eq(10 * step - torch.arange(n)[:, None]).all(), step
