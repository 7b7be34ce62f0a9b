"""Collectives in kernels, all but the kernels: what is chosen, what is launched, and what the watch makes of a spin."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from fake_driver import FakeDriver, Stream
from marks import needs_triton
from monitor import Monitor, RankMonitor
from started import start

from sidelane.device import layout
from sidelane.device.launch import LaunchSite
from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda import CudaExecutor, DriverFeatures
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.watch import STATUS
from sidelane.execute.submitted import Counts
from sidelane.memory.control import NO_CALL
from sidelane.program import collective as define
from sidelane.program import kernel_chunks
from sidelane.program.collective import Buffer, Collective, ReduceOp, Reduction
from sidelane.program.kernel import MOST_BLOCK_FLAG_BYTES, MOST_LL_BYTES, KernelProgram, Protocol, kernel_program

SUM = Reduction(ReduceOp.SUM, "float32")
KB, MB = 1 << 10, 1 << 20


# --- choosing ---------------------------------------------------------------------------------------------------------


def all_to_all(part: int, *, in_place: bool = False, ranks: int = 4) -> Collective:
    return define.all_to_all([[part] * ranks] * ranks, in_place=in_place)


@pytest.mark.parametrize(
    ("collective", "variant", "symmetric", "protocol", "staging"),
    [
        (define.all_gather([KB] * 4), "one_shot", True, Protocol.LL, 0),
        (define.all_gather([128 * KB] * 4), "one_shot", True, Protocol.LL, 0),
        (define.all_gather([256 * KB] * 4), "one_shot", True, Protocol.BLOCK_FLAGS, 0),
        (define.all_gather([64 * KB] * 8), "one_shot", True, Protocol.BLOCK_FLAGS, 0),
        (all_to_all(512 * KB, in_place=True), "one_shot", False, Protocol.BLOCK_FLAGS, 0),
        (define.reduce_scatter([512 * KB] * 4, SUM), "one_shot", True, Protocol.BLOCK_FLAGS, 0),
        (define.all_reduce([128 * KB] * 4, SUM), "one_shot", False, Protocol.BLOCK_FLAGS, 0),
        (define.all_reduce([128 * KB] * 4, SUM), "two_shot", False, Protocol.REDUCE, 512 * KB),
        (define.all_gather([MB] * 4), "one_shot", True, Protocol.PUSH, 0),
        (define.all_gather([MB + 1] * 4), "one_shot", False, Protocol.PULL, MB + 16),
        (define.all_gather([MB] * 4, in_place=True), "one_shot", True, Protocol.PUSH, 0),
        (all_to_all(MB), "one_shot", True, Protocol.PUSH, 0),
        (all_to_all(MB), "one_shot", False, Protocol.PULL, 4 * MB),
        (all_to_all(MB, in_place=True), "one_shot", True, Protocol.PULL, 4 * MB),
        (define.reduce_scatter([KB] * 4, SUM), "one_shot", False, Protocol.LL, 0),
        (define.reduce_scatter([MB] * 4, SUM), "one_shot", False, Protocol.REDUCE, 4 * MB),
        (define.reduce_scatter([MB] * 4, SUM), "one_shot", True, Protocol.DIRECT, 0),
        (define.reduce_scatter([MB] * 4, SUM, in_place=True), "one_shot", True, Protocol.DIRECT, 0),
        (define.reduce_scatter([MB + 4] * 4, SUM), "one_shot", True, Protocol.REDUCE, 4 * (MB + 16)),
        (define.all_reduce([KB] * 4, SUM), "one_shot", False, Protocol.LL, 0),
        (define.all_reduce([MB] * 4, SUM), "one_shot", False, Protocol.REDUCE, 4 * MB),
        (define.all_reduce([MB] * 4, SUM), "one_shot", True, Protocol.DIRECT, 0),
        (define.all_reduce([MB] * 4, SUM, in_place=True), "one_shot", True, Protocol.REDUCE, 4 * MB),
        (define.all_reduce([MB] * 4, SUM), "two_shot", True, Protocol.DIRECT, 0),
        (define.all_reduce([MB] * 4, SUM, in_place=True), "two_shot", True, Protocol.DIRECT, 0),
        (define.all_reduce([256, 44, 0, 0], SUM), "two_shot", False, Protocol.REDUCE, 4 * 256),
        (define.all_reduce([256, 44, 0, 0], SUM), "two_shot_push", True, Protocol.SEND, 3 * 16 * KB),
        (define.all_reduce([MB] * 4, SUM, in_place=True), "two_shot_push", True, Protocol.SEND, 3 * MB),
        (define.all_reduce([MB] * 4, SUM), "two_shot_push", False, Protocol.REDUCE, 4 * MB),
        (define.all_reduce([256 * MB] * 2, SUM), "two_shot_push", True, Protocol.SEND, 96 * MB),
        (define.all_reduce([MB], SUM), "two_shot_push", True, Protocol.SEND, MB),
        (define.all_reduce([0, 0], SUM), "two_shot_push", True, Protocol.SEND, 0),
        (define.broadcast(KB, 4, 3, in_place=True), "one_shot", False, Protocol.LL, 0),
        (define.broadcast(512 * KB, 4, 3, in_place=True), "one_shot", True, Protocol.BLOCK_FLAGS, 0),
        (define.broadcast(512 * KB + 1, 4, 3, in_place=True), "one_shot", False, Protocol.RELAY, 0),
        (define.broadcast(1536 * KB, 4, 3, in_place=True), "one_shot", True, Protocol.RELAY, 0),
        (define.broadcast(MB + 1, 2, 1, in_place=True), "one_shot", True, Protocol.PUSH, 0),
        (define.broadcast(2 * MB, 4, 3, in_place=True), "one_shot", True, Protocol.PUSH, 0),
        (define.broadcast(2 * MB + 1, 4, 3, in_place=True), "one_shot", False, Protocol.STAGE, 2 * MB + 16),
    ],
)
def test_which_kernel(collective: Collective, variant: str, symmetric: bool, protocol: Protocol, staging: int) -> None:
    program = kernel_program(collective, variant, symmetric_input=symmetric, symmetric_output=symmetric)
    assert (program.protocol, program.staging_bytes) == (protocol, staging)
    assert bool(program.remote_buffers()) == (protocol in (Protocol.PUSH, Protocol.DIRECT, Protocol.SEND))


def test_what_peers_touch_of_a_direct_reduction() -> None:
    def touched(collective: Collective, variant: str = "one_shot", *, output: bool = True) -> set[str]:
        program = kernel_program(collective, variant, symmetric_input=True, symmetric_output=output)
        return {str(buffer) for buffer in program.remote_buffers()}

    assert touched(define.reduce_scatter([MB] * 4, SUM), output=False) == {"input"}
    assert touched(define.reduce_scatter([MB] * 4, SUM, in_place=True)) == {"input"}
    assert touched(define.all_reduce([MB] * 4, SUM), output=False) == {"input"}
    assert touched(define.all_reduce([MB] * 4, SUM), "two_shot") == {"input", "output"}
    assert touched(define.all_reduce([MB] * 4, SUM, in_place=True), "two_shot") == {"output"}
    assert touched(define.all_reduce([MB] * 4, SUM), "two_shot_push") == {"output"}
    assert touched(define.all_reduce([MB] * 4, SUM), "two_shot", output=False) == set(), "results cannot be stored"


def test_chunks_have_signals_and_lie_inside_of_staging() -> None:
    assert kernel_chunks.MOST_CHUNKS == layout.PHASES - 2, "all phases but ready and done"
    rng = random.Random(11)
    sizes = [rng.randrange(1, 1 << rng.randrange(1, 37)) for _ in range(2000)]
    for shard, most_blocks in itertools.product((1, 2 << 30, (2 << 30) + 1, *sizes), (1, 10, 64, 128)):
        chunks = kernel_chunks.chunks_of(shard, most_blocks)
        assert chunks.count <= kernel_chunks.MOST_CHUNKS
        step = chunks.blocks * chunks.rounds
        assert (chunks.count - 1) * step < chunks.tiles <= chunks.count * step
        ends = [
            chunk % kernel_chunks.SLOTS * step + min(step, chunks.tiles - chunk * step) for chunk in range(chunks.count)
        ]
        assert max(ends) * kernel_chunks.TILE_BYTES == chunks.peer_bytes


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_cells_fit_into_their_slots(ranks: int, symmetric: bool) -> None:
    assert (MOST_LL_BYTES, MOST_BLOCK_FLAG_BYTES) == (layout.LL_PAYLOAD_BYTES, layout.BLOCK_SLOT_BYTES)
    sizes = [part for part in range(KB, 2 * MB, KB) if is_cells(define.all_gather([part] * ranks), symmetric)]
    assert sizes == list(range(KB, sizes[-1] + 1, KB)), "from small to large, there is one change"
    assert 32 * KB < sizes[-1] <= layout.LL_PAYLOAD_BYTES


def is_cells(collective: Collective, symmetric: bool) -> bool:
    return (
        kernel_program(collective, "one_shot", symmetric_input=symmetric, symmetric_output=symmetric).protocol
        is Protocol.LL
    )


def test_what_kernels_refuse() -> None:
    with pytest.raises(ValueError, match=r"ranks .*value=9, allowed=1\.\.8"):
        kernel_program(define.all_gather([4] * 9), "one_shot", symmetric_input=True, symmetric_output=True)
    with pytest.raises(ValueError, match="equal parts"):
        kernel_program(define.all_to_all([[1, 2], [3, 4]]), "one_shot", symmetric_input=True, symmetric_output=True)
    with pytest.raises(ValueError, match=r"broadcast: .*in place .value=out of place"):
        kernel_program(define.broadcast(4, 3, 1), "one_shot", symmetric_input=True, symmetric_output=True)


# --- launching --------------------------------------------------------------------------------------------------------


class KernelDriver(FakeDriver):
    """A kernel is whatever the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Callable[[tuple[int, ...]], None] = lambda arguments: None
        self.launched: list[tuple[Any, int]] = []

    def bind_kernel(
        self,
        function: Any,
        constants: Mapping[str, Any],
        arguments: Sequence[int],
        *,
        blocks: int,
        warps: int,
        stream: int,
    ) -> Bound:
        assert sorted(constants) == sorted(p.name for p in function.params if p.is_constexpr)
        assert len(arguments) + len(constants) == len(function.params)
        assert all(type(argument) is int for argument in arguments)

        def submit() -> None:
            self.launched.append((function, blocks))
            self.put("kernel", stream, lambda: self.kernel(tuple(arguments)))

        return submit, ()


class KernelMonitor(RankMonitor):
    """A death is no trouble while nothing is known to wait for it, as for a ``ControlBlock``."""

    def check_present(self, call: int) -> None:
        if call != NO_CALL or self.shared.aborted:
            super().check_present(call)


class Rank:
    """An executor of rank 0 of 3, with peers that are addresses only."""

    def __init__(self, timeout_s: float) -> None:
        self.monitor = Monitor(3)
        self.driver = KernelDriver()
        features = DriverFeatures("13.0", 3, stream_memory_ops=True, peer_writes=True)
        self.executor = CudaExecutor(0, None, KernelMonitor(self.monitor, 0), timeout_s, features, driver=self.driver)  # type: ignore[arg-type]
        self.stream = Stream(self.driver.create_stream())

    def load(self, collective: Collective, variant: str = "one_shot", *, frozen: bool = False, symmetric: bool = True):  # type: ignore[no-untyped-def]
        program = kernel_program(collective, variant, symmetric_input=symmetric, symmetric_output=symmetric)
        return self.executor.load_kernel(program, addresses(program), frozen=frozen)

    def status_words(self) -> Any:
        return self.executor.watch._words.array[STATUS:]


def addresses(program: KernelProgram) -> Addresses:
    ranks = range(program.world_size)
    bases = {(rank, buffer): MB * (10 * rank + 1 + list(Buffer).index(buffer)) for rank in ranks for buffer in Buffer}
    return Addresses(bases, (), tuple(64 * MB * (1 + rank) for rank in ranks))


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(getattr(request, "param", 30.0))
    yield made
    made.driver.kernel = lambda arguments: None
    made.executor.close()
    made.driver.stop()


@needs_triton
def test_one_launch_a_call_on_the_callers_stream(rank: Rank) -> None:
    loaded = rank.load(define.all_gather([KB] * 3))
    assert rank.driver.launched == []
    for epoch in (1, 2):
        start(loaded, epoch, rank.stream).wait()
    start(loaded, 3, Stream(0)).wait()
    kernel_calls = [call for call in rank.driver.submitted if call[0] == "kernel"]
    assert kernel_calls == [("kernel", rank.stream.cuda_stream)] * 2 + [("kernel", 0)]
    assert rank.driver.submitted == kernel_calls, "nothing but the kernel"
    assert rank.executor.ledger.total() == Counts(kernels=3, calls=3)
    assert rank.executor.ledger.last.implementation == "sm"


@needs_triton
def test_a_call_that_repeats_is_launched_as_a_graph(rank: Rank) -> None:
    loaded = rank.load(define.all_gather([KB] * 3))
    place = (rank.stream.cuda_stream, False)
    loaded.run(1, place)
    rank.driver.synchronize()
    found = loaded.repetition(place)
    assert len(rank.driver.graphs) == 1
    rank.driver.submitted.clear()
    for function, arguments, _ in found.steps:
        function(*arguments)
    rank.driver.synchronize()
    assert rank.driver.submitted == [("graph", place[0]), ("kernel", rank.executor.internal)], "the captured stream's"
    assert found.words == ()
    entries = [value for _, target, name, value in found.notes if target is rank.executor.ledger]
    assert entries[0].submitted.counts == Counts(kernels=1, graph_launches=1, calls=1)
    with pytest.raises(DriverError, match="CUDA_ERROR"):
        found.failed(0, DriverError("CUDA_ERROR_LAUNCH_FAILED", "cuGraphLaunch"))
    assert "all_gather" in str(rank.executor.watch.failure)


@needs_triton
def test_a_refused_launch_raises_when_the_kernel_before_has_ended(rank: Rank) -> None:
    loaded = rank.load(define.all_gather([KB] * 3))
    rank.driver.kernel = lambda arguments: time.sleep(0.2)
    start(loaded, 1, rank.stream)
    rank.driver.fail_next = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        start(loaded, 2, rank.stream)
    assert rank.driver.is_idle(rank.stream.cuda_stream)
    assert rank.monitor.aborted is not None


@needs_triton
def test_a_graph_goes_with_what_launches_it(rank: Rank) -> None:
    found = rank.load(define.all_gather([KB] * 3)).repetition((rank.stream.cuda_stream, False))
    assert len(rank.driver.graphs) == 1
    del found
    gc.collect()
    assert rank.driver.graphs == {}


@needs_triton
def test_a_call_from_an_urgent_stream_is_launched_as_it_is(rank: Rank) -> None:
    urgent = rank.driver.create_stream(urgent=True)
    found = rank.load(define.all_gather([KB] * 3)).repetition((urgent, False))
    assert rank.driver.graphs == {}, "its node would have the priority of another stream"
    ((function, arguments, _),) = found.steps
    function(*arguments)
    rank.driver.synchronize()
    assert rank.driver.submitted == [("kernel", urgent)]


@needs_triton
def test_what_a_graph_holds_does_not_repeat(rank: Rank) -> None:
    place = (rank.stream.cuda_stream, True)
    assert rank.load(define.all_gather([KB] * 3), frozen=True).repetition(place) is None
    assert rank.load(define.all_gather([0] * 3)).repetition(place) is None


@needs_triton
def test_a_capture_holds_the_launch_itself(rank: Rank) -> None:
    loaded = rank.load(define.all_gather([KB] * 3), frozen=True)
    rank.driver.begin_capture()
    pending = start(loaded, 1, rank.stream)
    graph = rank.driver.end_capture()
    assert pending.done() and rank.driver.launched == []
    rank.driver.replay(graph)
    rank.driver.replay(graph)
    rank.driver.synchronize()
    assert len(rank.driver.launched) == 2
    rank.executor.synchronize()


@needs_triton
def test_nothing_to_move_launches_nothing(rank: Rank) -> None:
    start(rank.load(define.all_gather([0] * 3)), 1, rank.stream).wait()
    assert rank.driver.submitted == []


KERNELS = [
    (define.all_gather([MB] * 3), "one_shot"),
    (all_to_all(MB, ranks=3), "one_shot"),
    (all_to_all(MB, ranks=3, in_place=True), "one_shot"),
    (define.reduce_scatter([KB] * 3, SUM), "one_shot"),
    (define.reduce_scatter([MB] * 3, SUM, in_place=True), "one_shot"),
    (define.all_gather([256 * KB] * 3), "one_shot"),
    (define.reduce_scatter([256 * KB] * 3, SUM), "one_shot"),
    (define.all_reduce([MB] * 3, SUM), "one_shot"),
    (define.all_reduce([MB] * 3, SUM), "two_shot"),
    (define.all_reduce([MB] * 3, SUM, in_place=True), "two_shot_push"),
    (define.broadcast(KB, 3, 0, in_place=True), "one_shot"),
    (define.broadcast(512 * KB, 3, 1, in_place=True), "one_shot"),
    (define.broadcast(MB, 4, 1, in_place=True), "one_shot"),
    (define.broadcast(9 * MB, 3, 2, in_place=True), "one_shot"),
]


@needs_triton
@pytest.mark.parametrize(("collective", "variant"), KERNELS, ids=lambda value: str(value))
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_kernel_gets_its_arguments(rank: Rank, collective: Collective, variant: str, symmetric: bool) -> None:
    start(rank.load(collective, variant, symmetric=symmetric), 1, rank.stream).wait()
    assert len(rank.driver.launched) == 1


@needs_triton
@pytest.mark.parametrize(("collective", "variant"), KERNELS, ids=lambda value: str(value))
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_kernel_elsewhere_gets_what_it_would_get_anew(
    rank: Rank, collective: Collective, variant: str, symmetric: bool
) -> None:
    from sidelane.execute.cuda.kernel_program import arrange

    program = kernel_program(collective, variant, symmetric_input=symmetric, symmetric_output=symmetric)
    first, draw = addresses(program), random.Random(variant)
    known = rank.executor.load_kernel(program, first, frozen=False)
    for step in [16] * 20 + [1]:
        buffers = {key: base + step * draw.randrange(-1000, 1000) + (step < 16) for key, base in first.buffers.items()}
        there = dataclasses.replace(first, buffers=buffers)
        moved = rank.executor.load_kernel(program, there, frozen=False)
        words = rank.executor.status_words, rank.executor.counters
        site = LaunchSite(0, there.arenas, *words, program.blocks, rank.executor.features.shared_bytes)
        assert moved._launch == arrange(program, site, there, None)
        assert (moved._entry is known._entry) == (step == 16), (
            "kernels are compiled for aligned addresses or for others"
        )
        start(moved, 1, rank.stream).wait()
    assert rank.executor.load_kernel(program, first, frozen=True)._frozen


@needs_triton
def test_a_missing_address_is_found_when_loading(rank: Rank) -> None:
    program = kernel_program(define.all_gather([MB] * 3), "one_shot", symmetric_input=True, symmetric_output=True)
    given = addresses(program)
    buffers = {place: address for place, address in given.buffers.items() if place != (2, Buffer.OUTPUT)}
    with pytest.raises(ValueError, match="no address of buffer output of rank 2"):
        rank.executor.load_kernel(program, Addresses(buffers, (), given.arenas), frozen=False)


@needs_triton
def test_synchronize_waits_for_the_kernel(rank: Rank) -> None:
    held = threading.Event()
    rank.driver.kernel = lambda arguments: held.wait(10)  # type: ignore[assignment,return-value]
    pending = start(rank.load(define.all_gather([KB] * 3)), 1, rank.stream)
    waiter = threading.Thread(target=rank.executor.synchronize)
    waiter.start()
    time.sleep(0.05)
    assert waiter.is_alive() and not pending.done()
    held.set()
    waiter.join(10)
    assert not waiter.is_alive() and pending.done()


# --- a kernel that spins ----------------------------------------------------------------------------------------------


def spin(rank: Rank, late: int, generation: Callable[[], int]) -> Callable[[tuple[int, ...]], None]:
    """A kernel that waits for data of ``late`` and says so, until it is told to give up."""

    def kernel(arguments: tuple[int, ...]) -> None:
        status = rank.status_words()
        deadline = time.monotonic() + 20
        while not status[layout.ABORT] and time.monotonic() < deadline:
            status[layout.WAITING + late] = generation()
            time.sleep(1e-4)

    return kernel


@needs_triton
@pytest.mark.parametrize("rank", [0.4], indirect=True)
def test_a_spin_that_does_not_end_names_the_rank_and_is_ended(rank: Rank) -> None:
    rank.driver.kernel = spin(rank, 2, lambda: 7)
    loaded = rank.load(define.all_gather([KB] * 3))
    pending = start(loaded, 5, rank.stream)
    with pytest.raises(
        PeerTimeoutError, match=r"generation 7; last started: all_gather.*one_shot, call 5.*rank 2"
    ) as caught:
        pending.wait()
    assert caught.value.ranks == (2,)
    rank.driver.synchronize()
    assert rank.monitor.aborted is not None and rank.monitor.aborted[1:] == ((2,), True), "the peers are told"
    with pytest.raises(PeerTimeoutError):
        start(loaded, 6, rank.stream)
    assert len(rank.driver.launched) == 1


@needs_triton
@pytest.mark.parametrize("rank", [0.4], indirect=True)
def test_a_spin_that_gets_on_is_none(rank: Rank) -> None:
    """A graph that is replayed again and again may spin at every look, each time in another generation."""
    begin = time.monotonic()
    rank.driver.kernel = spin(rank, 1, lambda: 1 + int(20 * (time.monotonic() - begin)))
    start(rank.load(define.all_gather([KB] * 3)), 1, rank.stream)
    time.sleep(1.2)
    rank.executor.check()
    rank.status_words()[layout.ABORT] = 1
    rank.driver.synchronize()
    rank.executor.synchronize()


@needs_triton
def test_a_call_that_a_peer_refuses_does_not_end_the_one_before(rank: Rank) -> None:
    """Every rank hears of the refusal, and other calls follow; meanwhile a late peer may keep a kernel waiting."""
    rank.driver.kernel = spin(rank, 1, lambda: 7)
    loaded = rank.load(define.all_gather([KB] * 3))
    start(loaded, 5, rank.stream)
    rank.monitor.refused[6] = 1
    time.sleep(0.8)
    rank.executor.check()
    rank.monitor.refused[5] = 1  # which this rank has begun: its kernel waits for ever
    with pytest.raises(PeerError, match=r"rank 1 refused call 5 \(seen by rank 0 in a kernel"):
        rank.executor.synchronize()
    rank.driver.synchronize()


@needs_triton
def test_a_dead_peer_ends_a_spin_long_before_the_time_out(rank: Rank) -> None:
    rank.driver.kernel = spin(rank, 1, lambda: 3)
    pending = start(rank.load(define.all_gather([KB] * 3)), 1, rank.stream)
    rank.monitor.dead.add(1)
    with pytest.raises(PeerError, match=r"rank 1 died .*seen by rank 0 in a kernel .*data of ranks \[1\]") as caught:
        pending.wait()
    assert not isinstance(caught.value, PeerTimeoutError)
    rank.driver.synchronize()
