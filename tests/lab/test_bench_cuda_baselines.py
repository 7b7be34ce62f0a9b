"""The order of steps in the GPU baselines, with the GPU's libraries played by recorders."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane_lab.baselines import baselines_cuda
from sidelane_lab.baselines.baselines_cuda import Nccl, NcclCopyEngines
from sidelane_lab.baselines.candidate import (
    Entrant,
    Implementation,
    ReadyCall,
    Tensors,
    candidates_of,
    captured,
    nothing_to_wait_for,
    views,
)
from sidelane_lab.baselines.reference import POISON, Case

CPU = torch.device("cpu")


class Alone:
    """A meter of one rank."""

    def attempt(self, step: Callable[[], str | None]) -> str | None:
        try:
            error = step()
        except Exception as problem:
            error = str(problem)
        return None if error is None else f"rank 0: {error}"


class Library:
    """Stands for NCCL and for PyTorch's memory pools."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.free = 1 << 30
        group = SimpleNamespace(_get_backend=lambda device: self)

        @contextlib.contextmanager
        def use(pool: str) -> Iterator[None]:
            self.log.append(f"in {pool}")
            yield
            self.log.append(f"out of {pool}")

        monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
        monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.free))
        monkeypatch.setattr(dist, "ProcessGroup", SimpleNamespace)
        monkeypatch.setattr(
            dist, "new_group", lambda **options: self.log.append(f"group {options['backend']}") or group
        )
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: self.log.append("connect"))

    def register_mem_pool(self, pool: str, *, symm: bool) -> None:
        self.log.append(f"register {pool} symm={symm}")

    def deregister_mem_pool(self, pool: str) -> None:
        self.log.append(f"deregister {pool}")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    options = SimpleNamespace(config=SimpleNamespace(cta_policy=None))
    policy = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2, Options=lambda: options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", policy, raising=False)
    return Library(monkeypatch)


def test_windows_are_registered_once_with_both_buffers_in_the_pool(library: Library) -> None:
    nccl = NcclCopyEngines(CPU, 10.0, Alone())  # type: ignore[arg-type]
    nccl.reserve(1024, 512)
    nccl.close()
    pool = "pool of ncclMemAlloc"
    assert library.log == [
        "group nccl",
        "connect",
        f"in {pool}",
        f"out of {pool}",
        f"register {pool} symm=True",
        f"deregister {pool}",
    ]


def test_each_buffer_is_a_window_of_its_own(library: Library) -> None:
    nccl = NcclCopyEngines(CPU, 10.0, Alone())  # type: ignore[arg-type]
    nccl.reserve(1024, 512)
    case = Case(Kind.ALL_GATHER, 1024, torch.bfloat16, 1, 4, CPU)
    tensors = nccl.tensors(case, Entrant("nccl_ce", in_place=True))
    assert tensors.output is not None
    assert tensors.output.storage_offset() == 0
    assert tensors.output.untyped_storage().nbytes() >= 20 << 20
    assert tensors.input.data_ptr() - tensors.output.data_ptr() == 256


def test_without_the_policy_it_takes_no_part_and_says_what_is_missing(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(), raising=False)
    with pytest.raises(UnavailableError, match="NCCL_CTA_POLICY_ZERO"):
        NcclCopyEngines(CPU, 10.0, Alone())  # type: ignore[arg-type]
    assert library.log == []  # no group was made that peers would wait for


def test_a_window_that_cannot_be_had_is_an_error_with_the_reason(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = NcclCopyEngines(CPU, 10.0, Alone())  # type: ignore[arg-type]

    def refuse(pool: str, *, symm: bool) -> None:
        raise RuntimeError("no symmetric memory")

    monkeypatch.setattr(library, "register_mem_pool", refuse)
    with pytest.raises(UnavailableError, match="rank 0: no symmetric memory"):
        nccl.reserve(1024, 512)


def test_windows_leave_room_for_what_is_compared_with_them(library: Library) -> None:
    nccl = NcclCopyEngines(CPU, 10.0, Alone())  # type: ignore[arg-type]
    library.free = 3071
    with pytest.raises(UnavailableError, match="1536 of 3071 bytes leave no room for those of 1 others"):
        nccl.reserve(1024, 512)
    library.free = 3072
    nccl.reserve(1024, 512)


def test_what_nccl_cannot_do_in_place_is_not_tried() -> None:
    ways = {(c.in_place, c.launch) for c in candidates_of(Nccl(CPU, Alone()), Kind.ALL_TO_ALL)}  # type: ignore[arg-type]
    assert ways == {(False, "eager"), (False, "graph")}
    assert NcclCopyEngines.places.keys() == {Kind.ALL_GATHER, Kind.ALL_TO_ALL}


def test_a_choice_of_sidelanes_variants_leaves_the_baselines_alone() -> None:
    nccl = candidates_of(Nccl(CPU, Alone()), Kind.ALL_GATHER, only=("auto",), launches=("eager",))  # type: ignore[arg-type]
    assert {(c.variant, c.in_place) for c in nccl} == {("", False), ("", True), ("window", False), ("window", True)}


class Recorder(Implementation):
    """An implementation whose calls are counted, and graphs that count them."""

    name, launches = "dma", ("eager", "graph")

    def __init__(self) -> None:
        self.log: list[str] = []
        self.output, self.input = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
        self.fails = False

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        return views(case, candidate.in_place, self.output, self.input)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        if self.fails:
            raise ValueError("not in a capture")
        self.log.append("call")
        return nothing_to_wait_for


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    class Graph:
        def capture_begin(self, *, capture_error_mode: str) -> None:
            recorder.log.append(f"begin {capture_error_mode}")

        def capture_end(self) -> None:
            recorder.log.append("end")
            if recorder.log[-2].startswith("begin"):
                warnings.warn("The CUDA Graph is empty.", stacklevel=2)

        def replay(self) -> None:
            recorder.log.append("replay")

        def reset(self) -> None:
            recorder.log.append("reset")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return recorder


def prepared_graph(recorder: Recorder, calls: int) -> ReadyCall:
    case = Case(Kind.ALL_GATHER, 64, torch.uint8, 0, 2, CPU)
    return ReadyCall(Entrant("dma", "b2b", False, "graph"), case, recorder, calls)  # type: ignore[arg-type]


def test_a_graph_to_time_holds_all_calls_and_a_graph_to_check_one(recorder: Recorder) -> None:
    prepared = prepared_graph(recorder, calls=3)
    prepared.capture()
    assert recorder.log == ["begin thread_local", "call", "call", "call", "end", "begin thread_local", "call", "end"]
    job = prepared.job()
    assert (job.repeats, job.calls) == (1, 3)
    recorder.log.clear()
    job.run()
    prepared.run()
    assert recorder.log == ["replay", "replay"]
    prepared.close()
    prepared.run()
    assert recorder.log[2:] == ["reset", "reset", "call"]


def test_one_call_needs_one_graph(recorder: Recorder) -> None:
    prepared = prepared_graph(recorder, calls=1)
    prepared.capture()
    assert recorder.log == ["begin thread_local", "call", "end"]
    assert (prepared.job().repeats, prepared.job().calls) == (1, 1)


def test_a_capture_that_fails_is_ended_and_one_of_nothing_fails(recorder: Recorder) -> None:
    recorder.fails = True
    with pytest.raises(ValueError, match="not in a capture"):
        prepared_graph(recorder, calls=2).capture()
    assert recorder.log == ["begin thread_local", "end"]
    with pytest.raises(UserWarning, match="is empty"):
        captured(lambda: None, 2)


def test_outputs_are_poisoned_before_inputs_are_filled(recorder: Recorder) -> None:
    case = Case(Kind.ALL_GATHER, 64, torch.uint8, 1, 2, CPU)
    ReadyCall(Entrant("dma", "b2b", True), case, recorder).fill(5)  # type: ignore[arg-type]
    assert recorder.output[:32].eq(POISON).all()
    assert not recorder.output[32:].eq(POISON).all()  # in place, the input is part of the output


def test_marks_and_copies_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.autograd import DeviceType

    events = [
        SimpleNamespace(name=name, device_type=kind)
        for name, kind in (
            ("Memcpy PtoP (Device -> Device)", DeviceType.CUDA),
            ("Memset (Device)", DeviceType.CUDA),
            ("nccl:_all_gather_base", DeviceType.CUDA),
            ("ncclDevKernel_AllGather_RING_LL(...)", DeviceType.CUDA),
            ("cudaLaunchKernelExC", DeviceType.CPU),
        )
    ]

    @contextlib.contextmanager
    def profile(activities: Any) -> Iterator[Any]:
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr("torch.profiler.profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran: list[int] = []
    assert baselines_cuda.kernels_of(lambda: ran.append(1)) == ["ncclDevKernel_AllGather_RING_LL(...)"]
    assert ran == [1]
