"""A computation and collectives of one's own on streams, seen without a device: who runs where, who waits for whom."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from made_up_device import FakeDevice

from sidelane.c3 import launch, overlap, partitions
from sidelane.c3.launch import saved_for_backward
from sidelane.c3.partitions import PairStreams
from sidelane.c3.strategies import LaunchMode, named, strategies
from sidelane.choice.candidate import EVERYTHING
from sidelane.choice.store import builtin
from sidelane.config import Config
from sidelane.errors import UnavailableError
from sidelane.execute.cuda import partition
from sidelane.program.shape import Computation

GPU = torch.device("cuda", 0)


class Parts:
    """Partitions of a made-up GPU."""

    units = 132

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.made = device, {8}

    def objection(self) -> str:
        return ""

    def is_ready(self, units: int) -> bool:
        return units in self.made

    def streams(self, units: int, usual: PairStreams, *, confine: bool) -> PairStreams:
        stream: Any = self.device.stream
        gemm = stream(f"gemm_without_{units}")
        mine = (stream(f"own_{units}"), stream(f"own_urgent_{units}")) if confine else (usual.collective, usual.urgent)
        return PairStreams(gemm, *mine)


class Comm:
    device = GPU

    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device, self._name = device, name

    def all_gather(self, *tensors: Any, beside: str, async_op: bool) -> None:
        self._device.queue(f"{self._name} beside {beside}")()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice(monkeypatch)
    sides: dict[Any, Any] = {}

    def side(device: Any, urgent: bool) -> Any:
        return sides.setdefault(urgent, fake.stream("urgent" if urgent else "side"))

    caller = fake.stream()
    current = torch.cuda.current_stream
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *d: caller if fake.current == "caller" else current())
    asked, properties = [0], types.SimpleNamespace(multi_processor_count=132)  # of a made-up cuBLAS's handle
    library = types.SimpleNamespace(
        cublasGetSmCountTarget=lambda handle, found: setattr(found.contents, "value", asked[-1]),
        cublasSetSmCountTarget=lambda handle, units: (
            asked.append(getattr(units, "value", units)) or fake.log.append(f"cuBLAS: {asked[-1]} units")
        ),
    )
    for owner, name, made_up in (
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_blas_handle", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (launch, "side_stream", side),
        (launch, "partitions_of", lambda device: (Parts(fake), "")),
        (partition, "cublas", lambda: library),
        (partitions, "cublas", lambda: library),
    ):
        monkeypatch.setattr(owner, name, made_up)
    return fake


def launched(device: FakeDevice, way: LaunchMode) -> list[str]:
    comm: Any = Comm(device, "gather")
    launch.run(way, device.queue("compute"), lambda comm: comm.all_gather(), comm)
    return device.log


def test_units_of_their_own(device: FakeDevice) -> None:
    assert launched(device, LaunchMode(named("collective_first_partition"), 8)) == [
        "caller: record e1",
        "own_8: wait e1",
        "gemm_without_8: wait e1",
        "own_8: record e2",
        "own_8: gather beside nothing",
        "gemm_without_8: wait e2",
        "gemm_without_8: compute",
        "caller: join own_8",
        "caller: join gemm_without_8",
    ]


def test_the_computation_first(device: FakeDevice) -> None:
    assert launched(device, LaunchMode(named("partition"), 16))[3:7] == [
        "gemm_without_16: record e2",
        "gemm_without_16: compute",
        "own_16: wait e2",
        "own_16: gather beside nothing",
    ]


def test_copy_engines_keep_their_lane(device: FakeDevice) -> None:
    log = launched(device, LaunchMode(named("copy_engines_partition"), 8))
    assert "side: gather beside compute" in log and "gemm_without_8: compute" in log
    assert log[-2:] == ["caller: join side", "caller: join gemm_without_8"]


def test_cublas_leaves_units_to_sums(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for while the computation is launched, on the usual streams, which a graph may capture at once."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launch.can_run(LaunchMode(named("copy_engines_sums"), 4), GPU)
    assert launched(device, LaunchMode(named("copy_engines_sums"), 4)) == [
        *("caller: record e1", "side: wait e1", "cuBLAS: 128 units", "caller: compute", "cuBLAS: 0 units"),
        *("side: gather beside compute", "caller: join side"),
    ]


def test_cublas_gets_back_the_units_that_it_had(device: FakeDevice) -> None:
    """After an error, and where another request is around this one."""
    with partition.spared(100), pytest.raises(ZeroDivisionError):
        launch.run(LaunchMode(named("copy_engines_sums"), 16), lambda: 1 // 0, print, Comm(device, ""))  # type: ignore[arg-type]
    assert [line for line in device.log if "cuBLAS" in line] == [f"cuBLAS: {units} units" for units in (32, 116, 32, 0)]


def test_a_process_without_one_cublas_asks_for_nothing(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "cublas", lambda: None)
    assert not launch.can_run(LaunchMode(named("copy_engines_sums"), 4), GPU)
    with pytest.raises(ValueError, match="copy_engines_sums.*there is no cuBLAS of torch alone"):
        overlap.possible("copy_engines_sums", GPU)


def test_lanes_are_joined_after_a_failure(device: FakeDevice) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        launch.run(
            LaunchMode(named("collective_first_partition"), 8),
            fail,
            lambda comm: comm.all_gather(),
            Comm(device, "gather"),
        )  # type: ignore[arg-type]
    assert device.log[-2:] == ["caller: join own_8", "caller: join gemm_without_8"]


def test_a_capture_holds_no_making_of_lanes(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnavailableError, match="partition with 16 units has no streams yet.*call it once before"):
        launched(device, LaunchMode(named("partition"), 16))
    assert "compute" not in " ".join(device.log), "nothing was launched"
    launched(device, LaunchMode(named("partition"), 8))


def test_which_ways_there_are(device: FakeDevice) -> None:
    """By the value: a GPU runs what takes units, with each power of two of a sweep; calls cannot be told all."""
    names = [one.name for one in strategies() if not launch.unsupported_reason(one, GPU)]
    assert set(names) == {*overlap.NAMES, *overlap.ON_GPUS}
    taking = {"partition", "collective_first_partition", "copy_engines_partition", "copy_engines_sums"}
    assert {*overlap.ON_GPUS} == taking
    for name, able in (("partition", {8, 16, 32, 64}), ("copy_engines_sums", {4, 8, 16})):
        assert {units for units in range(132) if launch.can_run(LaunchMode(named(name), units), GPU)} == able
    assert launch.can_run(LaunchMode(named("collective_first")), GPU) and not launch.can_run(
        LaunchMode(named("collective_first"), 8), GPU
    )
    fewest = [overlap.possible(name, GPU).units for name in ("partition", "copy_engines_sums")]
    assert fewest == [8, 4] and overlap.possible("partition", GPU, 24).units == 24
    for name, units in (("copy_engines", 8), ("partition", 0)):
        with pytest.raises(ValueError, match=r"overlap: units \(value="):
            overlap.possible(name, GPU, units)
    with pytest.raises(ValueError, match="allowed=copy_engines, .*, partition, .*copy_engines_sums.*told to run so"):
        overlap.possible("nccl_copy_engines", GPU)


class Recorded:
    is_cuda = True

    def __init__(self) -> None:
        self.on: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.on.append(stream)


def test_what_backward_needs_is_recorded_and_hooks_of_others_go_on_working(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    weight, lane = torch.randn(3, 3, requires_grad=True), types.SimpleNamespace()
    x = torch.randn(3, 3)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append("packed")
        return 2 * tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed / 2):
        with saved_for_backward(lane):  # type: ignore[arg-type]
            y = x @ weight
        assert kept == ["packed"]
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.t() @ torch.ones(3, 3))
    seen: list[Any] = []
    monkeypatch.setattr(
        torch.autograd.graph, "saved_tensors_hooks", lambda *hooks: seen.append(hooks) or contextlib.nullcontext()
    )
    with saved_for_backward(lane):  # type: ignore[arg-type]
        pass
    recorded = Recorded()
    assert seen[0][0](recorded) is recorded and recorded.on == [lane]
    with torch.no_grad(), saved_for_backward(lane):  # type: ignore[arg-type]
        pass
    assert len(seen) == 1, "nothing is saved without gradients"


def test_auto_leaves_units_to_the_sums_of_a_large_reduction(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a capture, since nothing is made for it; not where the same bits are asked for in every run."""
    comm: Any = types.SimpleNamespace(device=GPU, world_size=2, abilities=EVERYTHING, cache={}, config=Config())
    comm.profile = types.SimpleNamespace(profile=builtin("h200x2"))
    product, large = Computation(5569.0, (16384, 16384, 8192, "bfloat16")), ("all_reduce", 512 << 20)

    def taken(product: Computation, moves: tuple[str, int]) -> str:
        return str(overlap.choose_overlap(comm, product, moves).candidate)

    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert taken(product, large) == "copy_engines_sums with 4 units"
    assert overlap.choose_overlap(comm, product, [large]) is overlap.choose_overlap(comm, product, large)
    assert [
        taken(Computation(2000.0, product.gemm), large),
        taken(product, ("all_gather", 512 << 20)),
        taken(Computation(2.0), ("all_gather", 8 << 20)),
    ] == ["copy_engines_sums with 8 units", "copy_engines", "serial"]
    for torch_says, config in ((True, Config()), (False, Config(deterministic=True))):
        comm.config = config
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda says=torch_says: says)
        assert taken(product, large) == "copy_engines"
