"""A communicator's repeated calls go by way of C, with the same outcome as without: with a made-up driver, one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expected import versions_of
from fake_driver import FakeDriver
from loads import handover
from made_up_gpus import made_up_gpus
from native_driver import NativeDriver

from sidelane.collectives import call_cache, call_path, repeat
from sidelane.collectives.prepare import Staging
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, UnavailableError
from sidelane.native import load_replays
from sidelane.program.batch import Batch
from sidelane.session.communicator import Communicator


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    assert load_replays().module is not None, load_replays().words
    file: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclasses.dataclass
class Rank:
    comm: Communicator
    driver: FakeDriver

    def finish(self) -> None:
        self.comm.synchronize()
        self.driver.synchronize()


@contextlib.contextmanager
def one_rank(driver: FakeDriver | None = None, **config: Any) -> Iterator[Rank]:
    with (
        made_up_gpus(finish=False, driver=driver) as driver,
        Communicator(config=Config(profile="builtin", **config)) as comm,
    ):
        yield Rank(comm, driver)


@pytest.fixture
def rank() -> Iterator[Rank]:
    with one_rank() as made:
        yield made


def new() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.uint8)


def gather(rank: Rank, output: torch.Tensor, input: torch.Tensor, *, variant: str = "b2b") -> bool:
    """Call, see that it did what it should, and return whether C made it."""
    input.random_(0, 250)
    output.fill_(255)
    before = rank.comm.repeated_calls()
    rank.comm.all_gather(output, input, variant=variant)
    rank.finish()
    assert torch.equal(output, input)
    return rank.comm.repeated_calls() > before


def test_the_third_call_is_made_in_c(rank: Rank) -> None:
    output, input = new(), new()
    made = [gather(rank, output, input) for _ in range(80)]  # once around the ring of posts
    assert made[:4] == [False, False, True, True] and made[-1]
    # Peers may still have to read the post of the first call when that of the 65th replaces it: Python waits for them.
    assert 0 < made[4:].count(False) < 16 and sum(made) == rank.comm.repeated_calls()
    lists = [[torch.zeros(size, dtype=torch.uint8) for size in (16, 64, 256)] for _ in range(2)]
    for _ in range(4):
        rank.comm.all_to_all(*lists, variant="b2b")
    rank.finish()
    assert rank.comm.repeated_calls() == sum(made) + 2, "lists as well"


def walk(seed: int, driver: FakeDriver | None = None, **config: Any) -> tuple[list[object], list[int]]:
    """Make random calls on few tensors: what the driver, the ledger and autograd were told of each, and who made it."""
    draw, told, made = random.Random(seed), list[object](), list[int]()
    with one_rank(driver, **config) as rank:
        comm, driver = rank.comm, rank.driver
        sizes = (16, 64, 256)
        outputs, inputs = ([torch.zeros(size, dtype=torch.uint8) for size in sizes] for _ in range(2))
        spare = torch.zeros(8), torch.ones(8)
        streams = driver.caller, driver.create_stream()

        def batch(output: Any, input: Any, variant: str) -> None:
            with comm.batch() as both:
                both.all_to_all(output, input)
                both.all_gather(*spare)

        def captured(output: Any, input: Any, variant: str) -> None:
            driver.begin_capture()
            comm.all_gather(output, input, variant=variant)
            driver.replay(driver.end_capture())

        calls = {
            "gather": lambda *tensors, variant: comm.all_gather(*tensors, variant=variant),
            "exchange": lambda *tensors, variant: comm.all_to_all(*tensors, variant=variant),
            "captured": captured,
            "batch": batch,
        }
        for step in range(120):
            which = draw.randrange(5)
            output, input = (outputs, inputs) if which > 2 else (outputs[which], inputs[which])
            if which == 4:
                output, input = output[::-1], input[::-1]
            name = draw.choices([*calls], (10, 10, 1, 1))[0]
            if draw.random() < 0.1:
                driver.caller = draw.choice(streams)
            if draw.random() < 0.05:
                comm.empty(16)
            for tensor in (*inputs, *outputs):
                tensor.random_(0, 250)
            versions = versions_of(outputs)
            driver.submitted.clear()
            before = comm.repeated_calls()
            calls[name](output, input, variant=draw.choice(("b2b", "pcpy")))
            rank.finish()
            assert all(map(torch.equal, output, input)) if which > 2 else output.equal(input), (step, name)
            rose = [now - then for now, then in zip(versions_of(outputs), versions, strict=True)]
            made.append(comm.repeated_calls() - before)
            told.append((name, [*driver.submitted], rose, comm.submitted(), comm.last_submitted(), comm.last_choice()))
    return told, made


@pytest.mark.parametrize("seed", range(3))
def test_calls_are_the_same_whoever_makes_them(seed: int) -> None:
    """Compiled code that calls C functions or Python's, and Python alone, whether it compares all calls or not."""
    told, made = walk(seed)
    assert len(made) / 3 < sum(made) < len(made) - 10 and max(made) == 1
    for driver, config in ((NativeDriver(), {}), (None, {"native": False}), (None, {"debug": True})):
        others, theirs = walk(seed, driver, **config)
        for step, (one, other) in enumerate(zip(told, others, strict=True)):
            assert one == other, (step, config)
        assert theirs == (made if driver else [0] * len(made))


def test_lists_that_come_and_go_are_forgotten(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_NEW", 0)
    monkeypatch.setattr(call_cache, "MOST_BYTES", 24000)  # four calls with lists
    kept = [[torch.zeros(size, dtype=torch.uint8) for size in (16, 32)] for _ in range(6)]
    single, recent = new(), rank.comm.preparer.cache
    for turn in range(18):
        tensors = kept[turn % 6]
        rank.comm.all_to_all(tensors, tensors, variant="b2b")
        gather(rank, single, new())
        calls = [entry.prepared for entry in recent if entry.prepared is not None]
        assert sum(isinstance(prepared.loaded.program.collective, Batch) for prepared in calls) <= 4
        assert recent.nbytes <= 24000
    rank.finish()


def test_compiled_code_keeps_no_more_bytes_than_it_may(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "MOST_BYTES", 30000)
    remembered = []
    for pair in [(new(), new()) for _ in range(40)]:
        for _ in range(4):
            gather(rank, *pair)
        remembered.append(rank.comm.path.repeats.replay.remembered)
    assert max(remembered) <= 10 and remembered.count(1) > 3, "all are forgotten together"
    assert rank.comm.repeated_calls() > 2 * 30, "most are made in C all the same"


def move_staging(rank: Rank) -> None:
    """Make a call that needs more staging, as only calls between several ranks do."""
    with mock.patch.object(Staging, "reserve", return_value=True):
        gather(rank, *torch.zeros(2, 80, dtype=torch.uint8))


def test_staging_that_moves_takes_remembered_calls_with_it(rank: Rank) -> None:
    output, input = new(), new()
    assert [gather(rank, output, input) for _ in range(3)] == [False, False, True]
    move_staging(rank)
    assert not gather(rank, output, input), "it would run where staging was"


def test_what_is_void_by_the_time_it_is_remembered_is_forgotten(rank: Rank) -> None:
    """Another thread may move staging between a call and its being remembered."""
    output, input = new(), new()
    gather(rank, output, input)
    repeats = rank.comm.path.repeats
    replay = repeats.replay

    class Late:
        made = 0
        run, forget = replay.run, replay.forget

        def remember(self, *arguments: Any) -> None:
            rank.comm.preparer.cache.clear()
            replay.remember(*arguments)

    repeats.replay = Late()
    gather(rank, output, input)
    assert replay.remembered == 0


def test_new_symmetric_memory_makes_calls_be_looked_at_again(rank: Rank) -> None:
    output, input = new(), new()
    assert [gather(rank, output, input) for _ in range(3)] == [False, False, True]
    rank.comm.empty(16)
    assert not gather(rank, output, input)


def test_what_is_wrong_is_said_by_python(rank: Rank) -> None:
    output, input = new(), new()
    for _ in range(3):
        gather(rank, output, input)
    with pytest.raises(ValueError, match="variant"):
        rank.comm.all_gather(output, input, variant="none")
    with pytest.raises(ValueError, match="output must hold"):
        rank.comm.all_gather(output[:32], input)
    assert gather(rank, output, input)
    rank.comm.close()
    with pytest.raises(CommunicatorClosedError):
        rank.comm.all_gather(output, input, variant="b2b")


def test_a_forked_copy_asks_torch_for_nothing(rank: Rank) -> None:
    output, input = new(), new()
    assert [gather(rank, output, input) for _ in range(3)][-1]
    rank.comm.calls.failure = CommunicatorClosedError("a copy")
    rank.driver.is_copy = True
    try:
        with pytest.raises(CommunicatorClosedError, match="a copy"):
            rank.comm.all_gather(output, input, variant="b2b")
    finally:
        rank.driver.is_copy, rank.comm.calls.failure = False, None


def test_a_call_that_the_driver_refuses_ends_the_communicator(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    output, input = new(), new()
    assert [gather(rank, output, input) for _ in range(3)][-1]

    def refuse(kind: str, stream: int, work: Any) -> None:
        raise OSError("the driver says no")

    monkeypatch.setattr(rank.driver, "put", refuse)
    with pytest.raises(OSError, match="says no"):
        rank.comm.all_gather(output, input, variant="b2b")
    monkeypatch.undo()
    with pytest.raises(Exception, match="could not submit it: OSError: the driver says no"):
        rank.comm.all_gather(output, input, variant="b2b")


def test_code_that_is_compiled_meanwhile_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    real_load = call_path.load_replays_soon
    monkeypatch.setattr(call_path, "load_replays_soon", lambda: None)
    output, input = new(), new()
    with one_rank() as rank:
        for _ in range(4):
            gather(rank, output, input)
        assert not rank.comm.repeated_calls()
        monkeypatch.setattr(call_path, "load_replays_soon", real_load)
        for _ in range(3):
            gather(rank, output, input)
        monkeypatch.setattr(call_path, "load_replays_soon", lambda: pytest.fail("asked again"))
        assert all(gather(rank, output, input) for _ in range(3))


def test_a_remembered_call_keeps_what_it_runs(rank: Rank) -> None:
    output, input = new(), new()
    for variant in ("b2b", "pcpy"):
        for _ in range(3):
            gather(rank, output, input, variant=variant)
    rank.comm.preparer.cache.forget_calls_of("all_gather")  # as if many other calls had come
    gc.collect()
    for variant in ("b2b", "pcpy"):
        assert gather(rank, output, input, variant=variant)


def test_a_program_of_ones_own_runs_eager_and_captured(rank: Rank) -> None:
    """On streams, with its own flags; in a graph as it is frozen, which replays next to eager calls."""
    driver, cache, inbox = rank.driver, torch.zeros(4100, dtype=torch.uint8), torch.zeros(4032, dtype=torch.uint8)
    run = rank.comm.load(handover(1), {"cache": cache, "inbox": inbox})

    def handed_over(call: Any) -> None:
        cache.random_(0, 250)
        inbox.fill_(255)
        call()
        rank.finish()
        assert torch.equal(inbox[16:4016], cache[64:4064])
        assert inbox[:16].eq(255).all()
        assert inbox[4016:].eq(255).all()

    for _ in range(3):
        handed_over(run)
    last = rank.comm.last_submitted()
    assert last is not None and last.counts.kernels == 0
    driver.begin_capture()
    run()
    graph = driver.end_capture()
    for _ in range(3):
        handed_over(lambda: driver.replay(graph))
        handed_over(run)
    choice = rank.comm.last_choice()
    assert choice is not None and choice.reason == "a program of the caller's own"
    run.close()


def test_a_program_that_cannot_be_captured_says_so(rank: Rank) -> None:
    tensors = {"cache": torch.zeros(4100, dtype=torch.uint8), "inbox": torch.zeros(4032, dtype=torch.uint8)}
    run = rank.comm.load(handover(1, slope=2), tensors)
    run()
    rank.driver.begin_capture()
    with pytest.raises(UnavailableError, match=r"handover.* cannot be captured: freeze: cannot freeze .*2\*epoch"):
        run()
    with pytest.raises(UnavailableError, match="load: not while a graph is captured"):
        rank.comm.load(handover(1), tensors)
    assert rank.driver.end_capture() == []
    run()
    rank.finish()


def test_calls_from_two_streams_are_not_remembered_again_and_again(rank: Rank) -> None:
    output, input, replay = new(), new(), rank.comm.path.repeats.replay
    streams = rank.driver.caller, rank.driver.create_stream()
    for turn in range(40):
        rank.driver.caller = streams[turn % 2]
        made = gather(rank, output, input)
        assert made or turn < 4, "each call is ordered behind the last one, in C"
    assert replay.remembered == 2
