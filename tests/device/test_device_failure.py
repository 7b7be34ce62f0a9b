"""Peers that die or do not come: an error that names them, in time, and streams that drain."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import interrupted_program
import pytest
import torch
import torch.distributed as dist
from device_cases import MEGABYTE, Setting, wait_for
from device_context import Context, Party
from device_pool import Pool, Ranks
from interrupted_program import shared_memory
from on_ranks import on_ranks
from started import start
from vendors import ONE_CHANNEL

from interpreter import Interpreter
from sidelane import Communicator, Config
from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.release import FlagRescue
from sidelane.execute.vendor import make_driver
from sidelane.program import collective as define
from sidelane.program.builders import build
from sidelane.program.ir import Program
from sidelane.program.transform import freeze


def peer_error(action: Callable[[], object]) -> PeerError:
    """The PeerError that ``action`` must raise."""
    try:
        action()
    except PeerError as error:
        return error
    raise AssertionError("no PeerError was raised")


@on_ranks(gpu=True, names="queue dma:0")
@on_ranks(gpu=True, environment=ONE_CHANNEL, names="")
def test_absent_peer(context: Context, names: str) -> None:
    """The last rank does not call; the others must say so and their streams must drain.

    With one hardware channel nothing of the stuck context gets through: neither the reading of flags nor their release.
    """
    context.used = 0
    party = Party(context, timeout_s=2.0)
    program = build(define.all_gather([MEGABYTE] * context.world_size), "b2b")
    setting = Setting(context, program)
    loaded = party.load(program, setting.buffers)
    last = context.world_size - 1
    start(loaded, party.next_epoch(), context.stream).wait()
    if context.rank != last:
        party.control.begin(2, "test")
        error = peer_error(start(loaded, party.next_epoch(), context.stream).wait)
        assert isinstance(error, PeerTimeoutError)
        assert error.ranks == (last,), f"names {error.ranks}: {error}"
        assert f"rank {last}" in str(error) and names in str(error), error
        drained = torch.cuda.Event()
        drained.record(context.stream)
        wait_for(drained.query, 5.0, "draining")
        peer_error(lambda: start(loaded, party.next_epoch(), context.stream))
    dist.barrier()
    party.close()


@on_ranks(gpu=True)
def test_absent_from_a_replay(context: Context) -> None:
    """The last rank does not replay its graph."""
    context.used, timeout_s = 0, 2.0
    party = Party(context, timeout_s=timeout_s)
    program = freeze(build(define.all_gather([MEGABYTE] * context.world_size), "b2b"))
    setting = Setting(context, program)
    loaded = party.load(program, setting.buffers, frozen=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=context.stream):
        start(loaded, party.next_epoch(), context.stream)
    last = context.world_size - 1
    with torch.cuda.stream(context.stream):
        for _ in range(1 if context.rank == last else 3):
            graph.replay()
        drained = torch.cuda.Event()
        drained.record()
    if context.rank != last:
        wait_for(drained.query, timeout_s + 10.0, "draining the replays")
        error = peer_error(party.executor.check)
        assert last in error.ranks, f"names {error.ranks}: {error}"
        assert str(error)
    dist.barrier()
    party.close()


def wait_for_a_dead_peer(context: Context, victim: int) -> str:
    """The victim sleeps until it is killed; the others call. The time-out is far away: the death must be noticed."""
    context.used = 0
    party = Party(context, timeout_s=600.0)
    program = build(define.all_gather([MEGABYTE] * context.world_size), "b2b")
    setting = Setting(context, program)
    loaded = party.load(program, setting.buffers)
    start(loaded, party.next_epoch(), context.stream).wait()
    dist.barrier()
    if context.rank == victim:
        time.sleep(1000)
    error = peer_error(start(loaded, party.next_epoch(), context.stream).wait)
    drained = torch.cuda.Event()
    drained.record(context.stream)
    wait_for(drained.query, 5.0, "draining")
    assert error.ranks == (victim,), f"names {error.ranks}: {error}"
    return str(error)


def interrupted(context: Context, where: str) -> tuple[str, str, tuple[int, ...]]:
    """Ctrl-C hits rank 0 while the last rank keeps all others waiting. The time-out would fail the test.

    In ``synchronize``: in the wait of the host for a queued call. In the ``first_call`` of a kind: in the comparison
    between the ranks. In its ``own_work``: between its calls, inside the ``with`` block.
    """
    device = context.device
    last = context.world_size - 1
    began = time.monotonic()
    outcome = ("", "no error was raised", ())
    try:
        with Communicator(device=device, config=Config(timeout_s=600)) as comm:
            output, shard = comm.empty(1000 * comm.world_size), torch.ones(1000, device=device)
            comm.all_gather(output, shard)
            comm.synchronize()
            if comm.rank == 0:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            if comm.rank == last:
                time.sleep(4)
            if where == "first_call":
                comm.all_reduce(shard)
            for _ in range(3):
                comm.all_gather(output, shard)
            while where == "own_work" and comm.rank == 0:
                time.sleep(0.01)
            comm.synchronize()
    except KeyboardInterrupt as error:
        outcome = (type(error).__name__, "", ())
    except PeerError as error:
        outcome = (type(error).__name__, str(error), error.ranks)
    torch.cuda.synchronize()  # hangs if the streams have not drained
    assert time.monotonic() - began < 40, "somebody waited for the time-out"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("sidelane-watch")]
    assert len(left) <= len(context.parties), f"threads that outlive the communicator: {left}"
    return outcome


def test_dead_peer(fresh_pool: type[Pool]) -> None:
    pool = fresh_pool()
    victim = len(pool.processes) - 1
    answers = pool.run_and_kill(victim, 3.0, wait_for_a_dead_peer, victim)  # the others hang in their call by then
    assert len(answers) == victim
    for message in answers:
        assert f"rank {victim}" in message and "died" in message and "queue dma:0" in message


@pytest.mark.parametrize("where", ["synchronize", "first_call", "own_work"])
def test_ctrl_c_in_one_rank(fresh_pool: type[Pool], where: str) -> None:
    """While its call waits for a peer: its streams drain, the others hear of it. The time-out is far away."""
    pool = fresh_pool()
    before = shared_memory()
    results = pool.run(interrupted, where, timeout_s=60.0)
    assert results[0][0] == "KeyboardInterrupt"
    for name, text, at_fault in results[1:]:
        assert name == "PeerError", text
        assert "rank 0 was interrupted" in text
        assert at_fault == (0,)
    pool.close()
    assert shared_memory() <= before


def test_ctrl_c_ends_all_processes_of_a_program(ranks: Ranks, interpreter: Interpreter, tmp_path: Path) -> None:
    """One that catches nothing, interrupted from outside in one process."""
    before = shared_memory()
    errors = interrupted_program.run(interpreter, ranks.world_size, "cuda", tmp_path)
    assert "KeyboardInterrupt" in errors[0]
    assert all("PeerError" in error and "rank 0 was interrupted" in error for error in errors[1:]), errors
    assert shared_memory() <= before


@on_ranks(gpu=True)
@pytest.mark.parametrize("streams", [5, 48])
def test_a_release_passes_stuck_streams(context: Context, streams: int) -> None:
    """Five leave channels free; 48 occupy all of them, so that only a second context gets through."""
    driver = make_driver(context.device)
    words, owner = driver.device_words(streams)
    rescue = FlagRescue(driver)
    collective = define.all_gather([0])
    stuck = [driver.create_stream(urgent=index % 2 == 0) for index in range(streams)]
    for index, stream in enumerate(stuck):
        ops = driver.memory_ops()
        ops.wait(words + 4 * index, 7, equal=False)
        driver.submit([driver.bind_memory_ops(ops, stream)])
    time.sleep(0.05)
    assert not any(map(driver.is_idle, stuck))
    rescue.register(Program(collective, "test", (), (0,), streams), 0, Addresses({}, (words,)))
    rescue.release(7)
    wait_for(lambda: all(map(driver.is_idle, stuck)), 10.0, "the release of stuck streams")
    for stream in stuck:
        driver.destroy_stream(stream)
    rescue.close()
    del owner


@on_ranks(gpu=True)
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_a_submission_that_is_refused_half_way(context: Context, number: int) -> None:
    """The driver refuses a call in the middle of a submission, and the rank closes at once: its stream drains."""
    context.used = 0
    party = Party(context)
    program = build(define.all_gather([MEGABYTE] * context.world_size), "b2b")
    loaded = party.load(program, Setting(context, program).buffers)
    driver, numbers = party.executor.driver, itertools.count()
    real = driver.submit

    def submit(calls: Iterable[Bound]) -> None:
        for call in calls:
            if next(numbers) == number:
                raise DriverError("CUDA_ERROR_UNKNOWN", "a call")
            real([call])

    dist.barrier()
    with mock.patch.object(driver, "submit", submit), contextlib.suppress(PeerError, DriverError):
        start(loaded, party.next_epoch(), context.stream)
    drained = torch.cuda.Event()
    drained.record(context.stream)
    party.close()
    wait_for(drained.query, 5.0, "draining")
    dist.barrier()


@on_ranks(gpu=True)
def test_words_outlive_their_owner(context: Context) -> None:
    """Words that a stream has yet to write are not handed out again, though nobody refers to them any more."""
    driver, stream = make_driver(context.device), make_driver(context.device).create_stream()
    gate = driver.host_words(1)
    host, (device, owner) = driver.host_words(5000), driver.device_words(5000)
    dropped = {host.address, device}
    ops = driver.memory_ops()
    ops.wait(gate.address, 1, equal=False)
    for address in dropped:
        ops.write(address, 7)
    driver.submit([driver.bind_memory_ops(ops, stream)])
    del host, owner
    others = [(driver.host_words(5000), driver.device_words(5000)) for _ in range(4)]
    gate.array[0] = 1
    wait_for(lambda: driver.is_idle(stream), 5.0, "two writes")
    assert not dropped & {address for words, (there, _) in others for address in (words.address, there)}
    assert not any(words.array.any() or there.any() for words, (_, there) in others)
    driver.destroy_stream(stream)
