"""vLLM's plug-in with made-up modules of vLLM: what it replaces and says, and its communicators between ranks.

``make test-clients`` runs vLLM's own code.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expected import same_bytes
from on_ranks import on_ranks

from sidelane import config
from sidelane.config import Config
from sidelane.servers import vllm

OWN = "vllm.communicators.CudaCommunicator"
DEEP_EP = "; deep_ep: Sidelane's"


class Platform:
    device_type, device_name, rocm = "cuda", "cuda", False

    def is_rocm(self) -> bool:
        return self.rocm

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return OWN


class Theirs:
    """vLLM's communicator: calls come here in the end, and are counted."""

    def __init__(self, cpu_group: Any, device: Any = None, device_group: Any = None, unique_name: str = "") -> None:
        self.device, self.unique_name, self.world_size = device, unique_name, cpu_group.size()
        self.asked: list[str] = []
        self.ca_comm = SimpleNamespace(disabled=True)


METHODS = "all_reduce all_gather all_gatherv reduce_scatter reduce_scatterv reduce_scatterv_into_output broadcast"
for _name in [*METHODS.split(), "suspend", "resume", "destroy"]:
    setattr(Theirs, _name, lambda self, *_, _name=_name: self.asked.append(_name))


class Manager:
    def __init__(self) -> None:
        self.passes: list[Any] = []

    def configure(self, config: Any) -> None:
        self.passes = [SimpleNamespace()] + [type("RMSNormQuantFusionPass", (), {})()] * config


@contextlib.contextmanager
def server(version: str = "0.33.0", *, invariant: bool = False, **platform: Any) -> Iterator[dict[str, ModuleType]]:
    """Modules of vLLM, in which a plug-in is loaded for the first time."""
    modules: dict[str, ModuleType] = {}

    def module(name: str, **names: Any) -> None:
        modules[name] = ModuleType(name)
        vars(modules[name]).update(names)
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(modules[outer], inner, modules[name])

    for name in ("vllm", "vllm.utils", "vllm.compilation", "vllm.compilation.passes"):
        module(name)
    module("vllm.envs", VLLM_BATCH_INVARIANT=invariant, compile_factors=lambda: {"a": 1})
    module("vllm.version", __version__=version)
    module("vllm.platforms", current_platform=type("Here", (Platform,), platform)())
    module("vllm.utils.import_utils", resolve_obj_by_qualname={OWN: Theirs}.__getitem__)
    module(
        "vllm.compilation.passes.pass_manager",
        PostGradPassManager=type("Passes", (Manager,), {}),
        InductorPass=object,
        AllReduceFusionPass=object,
    )
    given: dict[str, str] = {}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(vllm, "_given", given):
        yield modules


def registered(modules: dict[str, ModuleType], caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm.sidelane"):
        vllm.register()
    return modules["vllm.platforms"].current_platform.get_device_communicator_cls(), caplog.messages


def test_nothing_changes_unless_it_is_named(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDELANE_SERVERS", raising=False)
    for value in (None, "other"):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if value:
            monkeypatch.setenv("VLLM_PLUGINS", value)
        with server() as modules:
            assert registered(modules, caplog) == (OWN, [])


def test_a_switch_that_is_none_stops_no_server(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("SIDELANE_SERVERS", "yes")
    with server() as modules:
        name, (line,) = registered(modules, caplog)
        assert name == OWN and "nothing was replaced" in line and "SIDELANE_SERVERS: not a switch" in caplog.text


def test_what_is_replaced_is_said_once(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "sidelane")
    with server() as modules:
        name, (line,) = registered(modules, caplog)
        assert name == "sidelane.servers.vllm.DeviceCommunicator" and issubclass(vllm.DeviceCommunicator, Theirs)
        assert line.endswith(f" in vllm 0.33.0: replaced: CudaCommunicator, AllReduceFusionPass{DEEP_EP}")
        assert modules["vllm.platforms"].current_platform.use_custom_op_collectives()
        assert set(modules["vllm.envs"].compile_factors()) == {"a", "sidelane"}, "another cache of compiled models"
        passes = modules["vllm.compilation.passes.pass_manager"]
        for quantizes in (0, 1):
            manager = passes.PostGradPassManager()
            manager.configure(quantizes)
            assert type(manager.passes[1]).__name__ == "AllReduceNormPass" and len(manager.passes) == 2 + quantizes
        assert registered(modules, caplog) == (name, [])
    with server(invariant=True) as modules:
        _, (line,) = registered(modules, caplog)
        assert "replaced: CudaCommunicator; as before: AllReduceFusionPass (batch-invariant mode: " in line
        assert modules["vllm.compilation.passes.pass_manager"].AllReduceFusionPass is object


def test_what_does_not_fit_is_refused(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDELANE_SERVERS", "1")
    for options, reason in (
        ({"version": "0.21.3"}, "vllm 0.21.3 does not fit (allowed=0.22.0..0.33.0)"),
        ({"rocm": True, "device_name": "rocm"}, "(value=rocm, allowed=cuda, cpu)"),
        ({"device_type": "xpu", "device_name": "xpu"}, "(value=xpu, allowed=cuda, cpu)"),
    ):
        with server(**options) as modules:
            name, (line,) = registered(modules, caplog)
            assert name == OWN and "replaced: nothing; as before: everything (" in line and reason in line
            assert "deep_ep" not in sys.modules and "deep_ep" not in line
    with server() as modules:
        modules["vllm.envs"].__dict__.pop("VLLM_BATCH_INVARIANT")  # as in a version that nobody has seen
        name, (line,) = registered(modules, caplog)
        assert name == OWN and "nothing was replaced" in line


@on_ranks(2, 3)
def test_calls_of_its_communicators(group: dist.ProcessGroup) -> None:
    """Every method, along any dimension; what Sidelane does not take comes to vLLM's class with its arguments."""
    n, rank = group.size(), group.rank()
    with server(), config.override(Config(timeout_s=60)), torch.inference_mode():
        comm = vllm.device_communicator(Theirs)(group, torch.device("cpu"), unique_name="tp:0")
        assert comm.ca_comm is comm.sidelane
        ones = [torch.full((2 * n, 3, n), float(each + 1)) for each in range(n)]
        mine, total = ones[rank].clone(), torch.full((2 * n, 3, n), float(n * (n + 1) // 2))
        assert same_bytes(comm.all_reduce(mine), total) and same_bytes(mine, ones[rank])
        for dim in (0, 1, 2, -1):
            assert same_bytes(comm.all_gather(mine, dim), torch.cat(ones, dim))
        for dim in (0, 2, -1):
            assert same_bytes(comm.reduce_scatter(mine, dim), total.chunk(n, dim)[rank].contiguous())
        sizes = [2 * n - n + 1, *[1] * (n - 1)]
        assert same_bytes(comm.reduce_scatterv(mine, 0, sizes), total.split(sizes)[rank])
        output = torch.empty(sizes[rank], 3, n)
        assert comm.reduce_scatterv_into_output(mine, output, 0, sizes) is output
        assert same_bytes(output, total.split(sizes)[rank])
        parts = [each[: sizes[place]] for place, each in enumerate(ones)]
        gathered = comm.all_gatherv([parts[rank], parts[rank].half()], 0, sizes)
        assert same_bytes(gathered[0], torch.cat(parts)) and same_bytes(gathered[1], torch.cat(parts).half())
        assert same_bytes(comm.all_gatherv(mine), torch.cat(ones))
        sent = mine.clone()
        assert comm.broadcast(sent, 1) is sent and same_bytes(sent, ones[1])
        assert comm.asked == []
        wide = mine.double()
        comm.all_reduce(wide), comm.reduce_scatter(wide, 0), comm.reduce_scatterv(wide, 0, sizes)
        comm.all_gatherv(mine, 1), comm.reduce_scatter(mine[:-1], 0), comm.all_gather(mine[:0], 0)
        names = ["all_reduce", "reduce_scatter", "reduce_scatterv", "all_gatherv", "reduce_scatter", "all_gather"]
        assert comm.asked == names
        comm.suspend()
        assert comm.sidelane.memory_bytes() == 0
        comm.resume()
        assert same_bytes(comm.all_reduce(mine), total)
        comm.destroy()
        assert comm.asked[len(names) :] == ["suspend", "resume", "destroy"] and comm.sidelane.comm is None
        alone = vllm.device_communicator(Theirs)(group, torch.device("cpu"), unique_name="pp:0")
        assert alone.sidelane is None and alone.all_reduce(mine) is None and alone.asked == ["all_reduce"]


@on_ranks(2)
def test_sums_that_vllms_kernel_makes_faster(group: dist.ProcessGroup) -> None:
    """Between two ranks vLLM's own object stays, and takes what the figures give back, if it takes such a tensor."""

    class WithKernel(Theirs):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.ca_comm = SimpleNamespace(disabled=False, should_custom_ar=lambda inp: inp.nbytes < 8 << 20)

    with server(), config.override(Config(timeout_s=60)), torch.inference_mode():
        comm = vllm.device_communicator(WithKernel)(group, torch.device("cpu"), unique_name="tp:0")
        assert not comm.ca_comm.disabled and comm.ca_comm is not comm.sidelane
        for size, calls in ((vllm.GIVEN_BACK_BYTES - 4, 0), (vllm.GIVEN_BACK_BYTES, 1), (8 << 20, 1)):
            comm.all_reduce(torch.ones(size // 4))
            assert comm.asked == ["all_reduce"] * calls, size
        comm.destroy()
