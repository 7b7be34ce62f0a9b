"""Who is at fault, and what is refused, where it is easy to blame another rank or to go on with nonsense."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator, outcome
from on_ranks import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from interpreter import Interpreter
from sidelane import Communicator, CommunicatorClosedError, UnavailableError
from sidelane.collectives.calls import compare
from sidelane.memory import host_shared
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.memory.posts import RING_CALLS


@on_ranks(3)
def test_who_repeats_a_refusal_is_not_at_fault(group: dist.ProcessGroup) -> None:
    control = ControlBlock(Exchange(group, 60.0))
    found = []
    control.post_call(1, "all_gather", refusal="ValueError: odd" if control.rank == 2 else None)
    control.post_call(2, f"all_gather of {5 if control.rank == 1 else 4}")
    for call in (1, 2):
        if control.rank == 1:
            found.append(outcome(compare, control, call, control.calls_of_all(call, 20.0)))
        dist.barrier(group)
        if control.rank == 0:
            found.append(outcome(compare, control, call, control.calls_of_all(call, 20.0)))
            found.append(outcome(control.check, call))
        dist.barrier(group)
    refused = ("PeerError", (2,), "call 1: rank 2 refused it: ValueError: odd")
    different = "call 2: ranks made different calls: rank 0: all_gather of 4; rank 1: all_gather of 5"
    mismatch, at_fault = ("MismatchError", (), different), ("PeerError", (1,), different)
    assert found == [[refused, refused, mismatch, at_fault], [refused, mismatch], []][control.rank]


class Seeing(TorchDispatchMode):
    """Notes the operations of its thread; refuses them where told to."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.refuses, self.seen = refuses, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        if self.refuses:
            raise RuntimeError(f"no {func} here")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def functionalizing() -> Iterator[None]:
    torch._C._functorch._func_increment_nesting(True)
    try:
        yield
    finally:
        torch._C._functorch._func_decrement_nesting()


MODES = (
    FakeTensorMode,
    functools.partial(FakeTensorMode, allow_non_fake_inputs=True),
    functools.partial(Seeing, refuses=True),
    functools.partial(torch.device, "meta"),
    functionalizing,
)


@on_ranks(2)
def test_the_modes_of_a_caller_are_not_those_of_a_call(group: dist.ProcessGroup) -> None:
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    seen = []
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        total = n * (n - 1) / 2
        for number, mode in enumerate(MODES):
            ordinary, shared = torch.full((300 + number,), float(rank)), torch.full((5000 + number,), float(rank))
            listed, parts = [torch.full((2 + number,), float(rank))] * 2, torch.full((n, 2 + number), float(rank))
            listed[1], gathered = listed[1].clone(), torch.empty(n, 2 + number)
            shared.share_memory_()
            with mode() if rank == 0 else contextlib.nullcontext():  # type: ignore[attr-defined]
                symmetric = comm.empty(9 + number)
                comm.barrier()
                comm.all_reduce(ordinary)
                comm.all_reduce(shared)
                comm.all_reduce(listed)
                comm.all_to_all(gathered, parts, output_split_sizes=[1] * n, input_split_sizes=[1] * n)
                with comm.batch(async_op=True) as batch:
                    batch.all_reduce(ordinary)
                batch.work.wait()
                assert comm.computation(us=5.0).us == 5.0
                peers = comm.peers(symmetric)
            assert type(peers) is type(symmetric) is torch.Tensor and peers.tolist()[rank] == symmetric.data_ptr()
            comm.all_reduce(symmetric.fill_(rank))
            assert gathered[:, 0].tolist() == list(range(n))
            for tensor, right in ((ordinary, n * total), (shared, total), (listed[0], total), (listed[1], total)):
                assert tensor.eq(right).all()
            assert symmetric.eq(total).all()
        for reduce in (comm.all_reduce, functools.partial(dist.all_reduce, group=group)):
            counter, mode = FlopCounterMode(display=False), Seeing()
            with counter, mode:
                tensor = torch.ones(4, 4) @ torch.ones(4, 4)
                reduce(tensor)
            assert tensor.eq(4 * n).all() and counter.get_total_flops() == 128
            seen.append(mode.seen)
    own, gloo = seen
    assert own == [name for name in gloo if not name.startswith("c10d.")]


@on_ranks(1, timeout_s=100)
def test_a_compiler_breaks_its_graph_at_a_call(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:

        def step(x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            comm.all_reduce(doubled)
            return doubled + 1

        found = torch.compile(step, backend="eager")(torch.ones(3))
        whole = torch.compile(step, backend="eager", fullgraph=True)
        _, _, text = outcome(whole, torch.ones(4))
        comm.barrier()
        assert found[0] == 2 + 1
        assert "a call of Sidelane runs as it is" in text


@on_ranks(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_devices_that_are_not_there(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"^Communicator: device \(value=cuda, allowed=cpu\): "):
        Communicator(group, device="cuda")


def test_more_ranks_than_a_communicator_takes() -> None:
    group = dist.ProcessGroup(0, 17)
    known = c10d._world.pg_map
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known, group, ("gloo", dist.HashStore()))
        with pytest.raises(ValueError, match=r"ranks of the group \(value=17, allowed=1\.\.16\)"):
            Communicator(group, device="cpu")
        patch.delitem(known, group)
        with pytest.raises(ValueError, match=r"the group was destroyed, or was not made by torch\.distributed"):
            Communicator(group, device="cpu")


@on_ranks(2)
def test_kernels_are_refused(group: dist.ProcessGroup) -> None:
    """Variants that are kernels, before anything moves."""
    with communicator(group) as comm:
        n = comm.world_size
        whole, part = torch.full((4 * n,), -1.0), torch.ones(4)
        for call in (
            lambda: comm.all_gather(whole, part, variant="one_shot"),
            lambda: comm.all_to_all(whole, whole, variant="one_shot"),
            lambda: comm.reduce_scatter(part, whole, variant="one_shot"),
            lambda: comm.all_reduce(whole, variant="two_shot"),
        ):
            with pytest.raises(ValueError, match=r"variant \(value=.*allowed=auto, b2b"):
                call()
        assert whole.eq(-1).all() and part.eq(1).all()
        comm.all_reduce(part)  # the ranks are still in step
        assert part.eq(n).all()


@on_ranks(3)
def test_a_call_that_one_rank_refused_holds_nobody_up_later(group: dist.ProcessGroup) -> None:
    """Posts of a compared call are kept for who is late to compare it; who refused it never does."""
    with communicator(group) as comm:
        total = torch.ones(3)
        comm.all_reduce(total)
        wrong = torch.empty(5 if comm.rank == 1 else 3 * comm.world_size)
        refusal = outcome(comm.all_gather, wrong, torch.ones(3))
        assert refusal[0] == ("ValueError" if comm.rank == 1 else "PeerError")
        began = time.monotonic()
        for _ in range(3 * RING_CALLS):
            comm.all_reduce(total)
        assert time.monotonic() - began < 15, "the time-out is 20 s"


@on_ranks(3)
@pytest.mark.parametrize(
    ("environment", "arguments", "error", "text"),
    [
        ({}, {"device": "xpu"}, "ValueError", "device (value=xpu, allowed=cpu, cuda)"),
        ({}, {"config": 20}, "TypeError", "config (value=20, allowed=a sidelane.Config, None)"),
        ({"SIDELANE_TIMEOUT_S": "never"}, {}, "ValueError", "SIDELANE_TIMEOUT_S"),
    ],
    ids=["device", "config", "setting"],
)
def test_a_rank_that_cannot_make_a_communicator_is_named(
    group: dist.ProcessGroup, environment: dict[str, str], arguments: dict[str, object], error: str, text: str
) -> None:
    given: dict[str, object] = {"device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 2:
            given |= arguments
            patch.setattr("sidelane.config._stack", [])  # what an earlier test has read of the environment
            for name, value in environment.items():
                patch.setenv(name, value)
        name, ranks, why = outcome(Communicator, group, **given)
    assert text in why
    assert name == error if dist.get_rank(group) == 2 else (name, ranks) == ("PeerError", (2,))


@on_ranks(3)
def test_a_call_that_found_no_memory_is_compared_again(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n, part = comm.world_size, 3 << 18
        output, shard = torch.empty(n * part), torch.ones(part)
        comm.all_reduce(torch.ones(3))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_shared, "available_bytes", lambda: 1000)
            with pytest.raises(UnavailableError, match=r"allowed=1\.\.1000\)"):
                comm.all_gather(output, shard)
        # The call has failed on all ranks: it is not one that they know. Rank 1 gets it wrong, and the others hear of
        # it before they allocate what rank 1 does not.
        text = outcome(comm.all_gather, output, shard[1:] if comm.rank == 1 else shard)[2]
        assert comm.rank == 1 or "rank 1 refused it" in text
        comm.all_gather(output, shard)
        assert bool((output == 1).all())


@on_ranks(2)
@pytest.mark.parametrize("symmetric", [False, True], ids=["ordinary", "symmetric"])
def test_known_calls_that_differ_do_not_pass_for_one(group: dist.ProcessGroup, symmetric: bool) -> None:
    """The bytes of all ranks fit somehow: only what they posted tells."""
    comm = communicator(group)
    n = comm.world_size
    empty = comm.empty if symmetric else torch.empty
    calls = [(empty(n * elements), torch.ones(elements)) for elements in (4, 8)]
    for output, shard in calls:
        comm.all_gather(output, shard)
    found = outcome(comm.all_gather, *calls[comm.rank == 1])
    assert outcome(comm.all_gather, *calls[0])[0] == "CommunicatorClosedError"
    comm.close()
    name, _, text = found
    assert name == "PeerError"
    assert "ranks made different calls" in text and "32 bytes" in text and "64 bytes" in text


@on_ranks(2)
def test_who_goes_on_hears_that_its_peer_does_not(group: dist.ProcessGroup) -> None:
    """Rank 1 refuses a call that rank 0 knows, and so does not wait for: rank 0's communicator is unusable."""
    comm = communicator(group, timeout_s=60)
    output, shard = torch.empty(2 * comm.world_size), torch.ones(2)
    comm.all_gather(output, shard)
    found = [outcome(comm.all_gather, output, shard[comm.rank :]), outcome(comm.all_gather, output, shard)]
    comm.close()
    names = [name for name, _, _ in found]
    if comm.rank == 0:
        assert names == ["PeerError", "CommunicatorClosedError"]
    else:
        assert names == ["ValueError", "PeerError"] and found[1][1] == (1,)
        assert "rank 0 gave up: rank 1 refused call 2" in found[1][2]


@on_ranks(2)
def test_calls_that_a_close_overtakes_say_so(group: dist.ProcessGroup) -> None:
    for pause_s in (0.0, 0.0, 0.001, 0.003):
        comm = communicator(group)
        output, shard = torch.empty(5 * comm.world_size), torch.empty(5)
        comm.all_gather(output, shard)
        dist.barrier(group)
        if comm.rank == 0:
            works = [comm.all_gather(output, shard, async_op=True) for _ in range(2)]
            time.sleep(pause_s)
            comm.close()
            for work in works:
                with pytest.raises(CommunicatorClosedError):
                    work.wait()
        dist.barrier(group)
        comm.close()


@on_ranks(2)
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS: its libraries end a forked copy of a process with threads")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_the_end_of_a_forked_copy_is_not_that_of_its_rank(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        output, shard = torch.empty(5 * comm.world_size), torch.ones(5)
        comm.all_gather(output, shard)
        dist.barrier(group)
        if comm.rank == 0:
            work = comm.all_gather(output, shard, async_op=True)
            time.sleep(0.1)
            child = os.fork()
            if child == 0:
                try:
                    comm.close()  # as it would be at the end of a process
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            dist.barrier(group)
            work.wait()
        else:
            dist.barrier(group)
            comm.all_gather(output, shard)
        comm.all_gather(output, shard)


# Rank 0's program ends by an exception, with a call under way and without a `with` block.
PROGRAM = """
import sys, time, torch, torch.distributed as dist
from sidelane import Communicator, Config, PeerError

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
communicator = Communicator(device="cpu", config=Config(timeout_s=300))
output, shard = torch.zeros(10), torch.ones(5)
communicator.all_gather(output, shard)
dist.barrier()
if rank == 0:
    work = communicator.all_gather(output, shard, async_op=True)
    raise LookupError("rank 0 has lost its way")
time.sleep(1)
try:
    communicator.all_gather(output, shard)
except PeerError as error:
    print(error.ranks)
"""


def test_a_program_that_ends_by_an_exception_does_not_wait_for_its_calls(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    interpreter.start(PROGRAM, tmp_path, *((rank, tmp_path / "store") for rank in range(2)))
    _, (_, said), (errors, _) = interpreter.wait()  # the calls' time-out is 300 s
    assert "LookupError: rank 0 has lost its way" in errors
    assert said.strip() == "(0,)"
