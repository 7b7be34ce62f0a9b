"""Operator calls that come again go by way of C: what is launched, on which arguments, and when Python launches.

On a made-up GPU of one rank, for which Triton compiles; nothing of a kernel runs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import own_kernels
from made_up_gpus import made_up_gpus
from made_up_launches import LaunchingDriver, made_up_launches
from torch._subclasses import FakeTensorMode

import sidelane
from sidelane import Communicator, Config, ops
from sidelane.errors import CommunicatorClosedError
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.kernel_launch import KernelTarget
from sidelane.native import load_replays
from sidelane.ops.gemv import GemvAllReduce
from sidelane.session.answers import lookup
from sidelane.session.own_kernel import OwnKernel, RepeatedLaunch

SOURCES = str(Path(sidelane.__file__).parent)
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    assert load_replays().module is not None, load_replays().words
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchingDriver]:
    with made_up_launches() as made, made_up_gpus(driver=made):
        yield made


@pytest.fixture
def comm(driver: LaunchingDriver) -> Iterator[Communicator]:
    with Communicator(config=Config(profile="builtin")) as made:
        yield made


def gemv(comm: Communicator, **more: Any) -> Callable[[], Any]:
    weight, x = torch.ones(96, 64, dtype=BF16), torch.ones(2, 64, dtype=BF16)
    return lambda: ops.gemv_all_reduce(comm, weight, x, method="fused", **more)


def gemv_scaled(comm: Communicator) -> Callable[[], Any]:
    weight, x = torch.ones(96, 80)[:, :64].to(torch.float8_e4m3fn), torch.ones(64)
    scale, out = torch.ones(96), torch.ones(96)
    return lambda: ops.gemv_all_reduce(comm, weight, x, scale=scale, out=out, method="fused")


def norm(comm: Communicator) -> Callable[[], Any]:
    x, weight = torch.ones(3, 64, dtype=BF16), torch.ones(64, dtype=BF16)
    return lambda: ops.all_reduce_rms_norm(comm, x, None, weight, method="fused")


def norm_in_8_bits(comm: Communicator) -> Callable[[], Any]:
    x, residual, weight = torch.ones(3, 64), torch.ones(3, 64), torch.ones(64)
    narrow = {"quantized": torch.ones(3, 64).to(torch.float8_e4m3fn), "scale": torch.ones(3, 1)}
    return lambda: ops.all_reduce_rms_norm(
        comm, x, residual, weight, residual_out=residual, schedule="pushed", method="fused", **narrow
    )


def combine(comm: Communicator) -> Callable[[], Any]:
    partial, lse = torch.ones(3, 4, 64, dtype=BF16), torch.ones(4, 3).t()
    return lambda: ops.combine_attention(comm, partial, lse, method="fused")


def embedding(comm: Communicator) -> Callable[[], Any]:
    tables = [torch.ones(9, 16) for _ in range(3)]
    indices, offsets = torch.zeros(24, dtype=torch.int64), torch.arange(13) * 2
    return lambda: ops.embedding_all_to_all(comm, tables, indices, offsets, method="fused")


def gemm(comm: Communicator) -> Callable[[], Any]:
    x, weight, counts = torch.ones(16, 64, dtype=BF16), torch.ones(96, 64, dtype=BF16), torch.full((1, 1), 16)
    return lambda: ops.gemm_all_to_all(comm, x, weight, counts, most_rows=16, method="fused")


def gemm_of_experts(comm: Communicator) -> Callable[[], Any]:
    x, weight, counts = torch.ones(16, 64, dtype=BF16), torch.ones(2, 96, 64, dtype=BF16), torch.tensor([[[9, 7]]])
    return lambda: ops.gemm_all_to_all(comm, x, weight, counts, most_rows=16, method="fused")


def dispatch(comm: Communicator) -> Callable[[], Any]:
    x, weight, counts = torch.ones(16, 80, dtype=BF16)[:, :64], torch.ones(96, 64, dtype=BF16), torch.full((1, 1), 16)
    return lambda: ops.all_to_all_gemm(comm, x, weight, counts, most_rows=16, method="fused")


def rows(comm: Communicator) -> Callable[[], Any]:
    x, counts = torch.ones(16, 64, dtype=BF16), torch.full((1, 1), 16)
    return lambda: ops.all_to_all_rows(comm, x, counts, most_rows=16)


def sums_of_rows(comm: Communicator) -> Callable[[], Any]:
    x, counts, terms = torch.ones(16, 64, dtype=BF16), torch.full((1, 1), 8), torch.arange(16).view(8, 2)
    factors = torch.ones(8, 2)
    return lambda: ops.all_to_all_rows(comm, x, counts, most_rows=8, terms=terms, factors=factors)


OPERATORS = (
    gemv,
    gemv_scaled,
    norm,
    norm_in_8_bits,
    combine,
    embedding,
    gemm,
    gemm_of_experts,
    dispatch,
    rows,
    sums_of_rows,
)


class Watched:
    """Tells which of a kernel's launches C made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.native: list[bool] = []
        self.may_repeat = True
        repeat = OwnKernel.repeat

        def seen(kernel: OwnKernel, again: RepeatedLaunch, tensors: Any) -> bool:
            made = self.may_repeat and repeat(kernel, again, tensors)
            self.native.append(made)
            return made

        patch.setattr(OwnKernel, "repeat", seen)

    def made(self, call: Callable[[], Any]) -> bool:
        """Call, and tell if C made it."""
        self.native.clear()
        call()
        return self.native == [True]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def repeated(watched: Watched, call: Callable[[], Any]) -> Callable[[], Any]:
    """Call until C makes the call."""
    for _ in range(4):
        if watched.made(call):
            return call
    raise AssertionError("it is always Python's")


@pytest.mark.parametrize("make", OPERATORS)
def test_a_call_seen_before_takes_few_calls_of_python(comm: Communicator, make: Any) -> None:
    call = make(comm)
    for _ in range(4):
        call()
    functions: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(SOURCES):
            functions.append(frame.f_code.co_name if event == "call" else argument.__qualname__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert "Launch.run" in functions
    assert len(functions) <= 30, functions


@pytest.mark.parametrize("make", OPERATORS)
def test_c_launches_what_python_does(comm: Communicator, driver: LaunchingDriver, watched: Watched, make: Any) -> None:
    call = repeated(watched, make(comm))
    told = []
    for native in (True, False, True):
        watched.may_repeat = native
        driver.launches.clear()
        before, posted = comm.submitted(), comm.control.begun(0)
        found = call()
        assert watched.made(lambda: None) is False
        (launch,) = driver.launches
        results = [each.data_ptr() for each in (found if isinstance(found, tuple) else (found,))]
        words = ["a result" if word in results else word for word in launch.words]
        assert comm.control.begun(0) == posted + 1
        assert comm.submitted().kernels == before.kernels + 1
        submitted, choice = comm.last_submitted(), comm.last_choice()
        told.append((launch.function, launch.stream, words, submitted, choice))
        in_place = dict.fromkeys((embedding, gemm, gemm_of_experts, rows, sums_of_rows), 0)
        assert words.count("a result") == {**in_place, norm: 2, norm_in_8_bits: 3, combine: 2}.get(make, 1)
    assert told[0] == told[1] == told[2]


def test_tensors_elsewhere(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    """At other addresses, of other alignments, of other layouts."""
    weight, memory = torch.ones(96, 64, dtype=BF16), torch.ones(5, 64, dtype=BF16)

    def call(x: torch.Tensor, weight: torch.Tensor = weight) -> int:
        driver.launches.clear()
        out = ops.gemv_all_reduce(comm, weight, x, method="fused")
        (launch,) = driver.launches
        assert launch.words[3:6] == (out.data_ptr(), weight.data_ptr(), x.data_ptr())
        return launch.function

    aligned = repeated(watched, lambda: call(memory[:2]))
    assert watched.made(lambda: call(memory[3:5])), "16 bytes are as good as any"
    assert watched.made(lambda: call(memory[:2], torch.nn.Parameter(weight))) is False, "another type"
    shifted = memory.flatten()[1:129].view(2, 64)
    assert not watched.made(lambda: call(shifted))
    assert call(shifted) != call(memory[:2]), "Triton compiles by alignment"
    assert watched.made(lambda: call(shifted))
    assert watched.made(aligned), "both are remembered"
    for _ in range(20):  # more than are remembered at a time, which are not remembered for ever
        for first in range(7):
            call(memory.flatten()[first + 1 : first + 129].view(2, 64))
    assert not all(watched.made(lambda at=at: call(memory.flatten()[at : at + 128].view(2, 64))) for at in range(7))
    wide = torch.ones(2, 70, dtype=BF16)[:, :64]
    repeated(watched, lambda: call(wide))
    assert driver.launches[-1].words[9] == 70, "the distance of its rows"
    repeated(watched, lambda: call(memory[0]))


def test_counts_of_the_host_share_a_launch(
    comm: Communicator, driver: LaunchingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts that no call had are checked, and the launch is C's all the same."""
    x, weight, native, run = torch.ones(16, 64, dtype=BF16), torch.ones(96, 64, dtype=BF16), [False], RepeatedLaunch.run

    def seen(*given: Any) -> bool:
        native.append(run(*given))
        return native[-1]

    monkeypatch.setattr(RepeatedLaunch, "run", seen)
    for op in (ops.gemm_all_to_all, ops.all_to_all_gemm):
        for rows in range(16):
            op(comm, x, weight, [[rows]], most_rows=16, method="fused")
            assert native[-1] is (rows > 2), (op.__name__, rows)


def test_numbers_that_are_no_layouts(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    x, weight = torch.ones(3, 64), torch.ones(64)

    def call(eps: Any) -> tuple[int, ...]:
        ops.all_reduce_rms_norm(comm, x, x, weight, eps=eps, method="fused")
        return driver.launches[-1].words[-20:]

    repeated(watched, lambda: call(0.5))
    half = call(0.5)
    assert not watched.made(lambda: call(0.25))
    repeated(watched, lambda: call(0.25))
    assert call(0.25) != half
    repeated(watched, lambda: call(1))


def test_bags_of_any_number_of_indices(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    tables, offsets = [torch.ones(9, 16) for _ in range(3)], torch.arange(13)

    def call(many: int, tables: list[torch.Tensor] = tables, **more: Any) -> torch.Tensor:
        indices = torch.zeros(many, dtype=torch.int64)
        found = ops.embedding_all_to_all(comm, tables, indices, offsets, method="fused", **more)
        assert driver.launches[-1].words[4:6] == (indices.data_ptr(), offsets.data_ptr())
        return found

    repeated(watched, lambda: call(12))
    assert watched.made(lambda: call(50))
    assert not watched.made(lambda: call(0)), "of which there is no address"
    assert not watched.made(lambda: call(12, order="oblivious"))
    assert not watched.made(lambda: call(12, [*tables[:2], torch.ones(9, 16)])), "other tables"
    assert watched.made(lambda: call(12))
    with pytest.raises(ValueError, match="per_sample_weights"):
        call(12, per_sample_weights=torch.ones(11))
    weights = torch.ones(12)
    repeated(watched, lambda: call(12, per_sample_weights=weights))
    with pytest.raises(ValueError, match="per_sample_weights"):
        call(12, per_sample_weights=torch.ones(11))


def test_kernels_of_ones_own(comm: Communicator, driver: LaunchingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered by their numbers and by what their tensors are; tensors may be others."""
    push, output = comm.load_kernel(own_kernels.push_tiles, flags=4), comm.empty(64)
    native: list[bool] = []
    run = RepeatedLaunch.run

    def seen(again: RepeatedLaunch, calls: Any, tensors: Any) -> bool:
        native.append(run(again, calls, tensors))
        return native[-1]

    monkeypatch.setattr(RepeatedLaunch, "run", seen)

    def call(count: Any = 60, grid: Any = (2,), shard: torch.Tensor | None = None, **options: Any) -> bool:
        shard = torch.ones(64) if shard is None else shard
        native.clear()
        push.launch(grid, comm.peers(output), shard, count, **{"TILE": 64, **options})
        assert driver.launches[-1].words[1:4] == (comm.peers(output).data_ptr(), shard.data_ptr(), int(count))
        return native == [True]

    def settle(**given: Any) -> None:
        for _ in range(4):
            if call(**given):
                return
        raise AssertionError("it is always Python's")

    settle()
    kinds: tuple[dict[str, Any], ...] = (
        {"count": 61},
        {"grid": (3,)},
        {"TILE": 32},
        {"num_warps": 8},
        {"shard": torch.ones(64).half()},
        {"alike": "other"},
    )
    for given in kinds:
        assert not call(**given), given
        settle(**given)
    assert all(call(**given) for given in kinds)
    with pytest.raises(TypeError, match="grid .value=2, allowed=a tuple"):
        push.launch(2, comm.peers(output), output, 60, TILE=64)  # type: ignore[arg-type]
    assert call()
    elsewhere = torch.ones(64, device="meta")
    for _ in range(4):
        call(shard=elsewhere)
        assert native == [], "Triton's launcher refuses what is on no GPU"
    push.close()
    with pytest.raises(RuntimeError, match="closed"):
        call()


@pytest.mark.parametrize("by_c", [True, False])
def test_another_stream(driver: LaunchingDriver, watched: Watched, monkeypatch: pytest.MonkeyPatch, by_c: bool) -> None:
    """Behind the other stream's work C orders a launch that it knows on this one; or Python, where C cannot."""
    if not by_c:
        monkeypatch.setattr(driver, "questions", lambda: LaunchingDriver.questions(driver)._replace(streams=()))
    with Communicator(config=Config(profile="builtin")) as comm:
        call = repeated(watched, gemv(comm))
        first, driver.caller = driver.caller, driver.create_stream()
        ordered = [("record", first), ("wait", driver.caller), ("launch", driver.caller)]
        driver.submitted.clear()
        assert not watched.made(call)
        assert driver.submitted == ordered
        repeated(watched, call)
        assert driver.launches[-1].stream == driver.caller
        for _ in range(8):  # each launch stays cached
            first, driver.caller = driver.caller, first
            ordered = [("record", first), ("wait", driver.caller), ("launch", driver.caller)]
            driver.submitted.clear()
            assert watched.made(call) == by_c
            assert driver.submitted == ordered
            assert watched.made(call)
            assert driver.submitted == [*ordered, ordered[-1]]
        (launch,) = comm.cache[lookup].values()
        assert len(launch.args[0].runs) == 2
        comm.all_reduce(torch.ones(4))
        assert watched.made(call)
        driver.device_is_current = False
        assert not watched.made(call)
        driver.device_is_current = True
        assert watched.made(call)


def test_captures_are_pythons(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    call = repeated(watched, gemv(comm))
    driver.launches.clear()
    driver.begin_capture()
    inside = call()
    graph = driver.end_capture()
    assert watched.native[-1] is False
    assert driver.launches == []
    outside = call()
    assert watched.native[-1] is True
    driver.replay(graph)
    assert [launch.words[3] for launch in driver.launches] == [outside.data_ptr(), inside.data_ptr()]


def test_closed_handles_and_communicators(driver: LaunchingDriver, watched: Watched) -> None:
    comm = Communicator(config=Config(profile="builtin"))
    call = repeated(watched, gemv(comm))
    other = repeated(watched, norm(comm))
    (handle,) = [each for each in comm.cache.values() if isinstance(each, GemvAllReduce)]
    handle.close()
    with pytest.raises(RuntimeError, match="closed"):
        call()
    assert watched.made(other)
    comm.close()
    with pytest.raises(CommunicatorClosedError):
        other()


def test_a_forked_copy(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    call = repeated(watched, gemv(comm))
    driver.launches.clear()
    driver.is_copy = True  # asking for the device fails in it
    comm.calls.disown()
    with pytest.raises(CommunicatorClosedError, match="fork"):
        call()
    assert driver.launches == []
    driver.is_copy = False


def test_what_the_driver_refuses(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    call = repeated(watched, gemv(comm))
    driver.refuses = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        call()
    with pytest.raises(sidelane.errors.SidelaneError, match="kernel .* could not submit it"):
        call()


def test_one_call_at_a_time(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    call = repeated(watched, gemv(comm))
    inner = norm(comm)
    inner()
    repeat = driver.launched

    def inside(*given: Any) -> None:  # as a signal handler does
        driver.launched = repeat  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="inside"):
            inner()
        repeat(*given)

    driver.launched = inside  # type: ignore[method-assign]
    assert watched.made(call)
    inner()
    comm.calls.entrance.acquire()
    try:
        with pytest.raises(RuntimeError, match="another thread"):
            call()
    finally:
        comm.calls.entrance.release()


def test_debugging_compares_every_call(driver: LaunchingDriver, watched: Watched) -> None:
    for config in (Config(profile="builtin", debug=True), Config(profile="builtin", native=False)):
        with Communicator(config=config) as comm:
            for make in (gemv, embedding):
                call = make(comm)
                assert not any(watched.made(call) for _ in range(5))


def test_other_gpus_compile_by_sizes(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    driver.target = KernelTarget("hip", "gfx942", 64)
    call = gemv(comm)
    assert not any(watched.made(call) for _ in range(5))


def test_profilers_see_it(comm: Communicator, watched: Watched) -> None:
    call = repeated(watched, gemv(comm))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    ranges = [event.name for event in profile.events() if event.name.startswith("sidelane:")]
    assert len(ranges) == 1
    assert ranges[0].startswith("sidelane:kernel ")


def test_timelines_have_their_stamps(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    call = repeated(watched, gemv(comm))
    plain = driver.launches[-1].function
    comm.cache[ops.Timeline] = ops.Timeline(comm)
    for _ in range(3):
        assert not watched.made(call)
        assert driver.launches[-1].function != plain
    del comm.cache[ops.Timeline]
    assert watched.made(call)
    assert driver.launches[-1].function == plain


def test_modes_and_tensors_of_other_types(comm: Communicator, driver: LaunchingDriver, watched: Watched) -> None:
    class Named(torch.Tensor):
        pass

    weight, x = torch.ones(96, 64, dtype=BF16), torch.ones(2, 64, dtype=BF16)
    call = repeated(watched, lambda: ops.gemv_all_reduce(comm, weight, x, method="fused"))
    named = x.as_subclass(Named)
    assert not watched.made(lambda: ops.gemv_all_reduce(comm, weight, named, method="fused"))
    assert driver.launches[-1].words[5] == x.data_ptr()
    with torch.device("meta"):
        found = call()
        assert found.device == comm.device
    with torch.inference_mode():
        assert call().is_inference()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not watched.made(call), "the result has no memory"
    needs = x.clone().requires_grad_()
    assert not ops.gemv_all_reduce(comm, weight, needs, method="fused").requires_grad
    assert watched.made(call)


def test_nothing_keeps_a_communicator(driver: LaunchingDriver, watched: Watched) -> None:
    comm = Communicator(config=Config(profile="builtin"))
    for make in OPERATORS:
        repeated(watched, make(comm))
    comm.close()
    gone = weakref.ref(comm)
    path = weakref.ref(comm.path)
    del comm, make
    gc.collect()
    assert gone() is None
    assert path() is None
