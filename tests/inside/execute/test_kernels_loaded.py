"""Kernels that a device has loaded, which all drivers of a process share; the driver is made up."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from sidelane.execute.cuda import kernel_launch
from sidelane.execute.cuda.kernel_launch import KernelTarget, LoadedKernels, kernels_of
from sidelane.execute.cuda.native import Bound


class Loader:
    """Numbers what is loaded."""

    def __init__(self, loaded: list[str]) -> None:
        self.loaded = loaded

    def kernel_target(self) -> KernelTarget:
        return KernelTarget("cuda", 90, 32)

    def load_function(self, image: bytes, name: str, shared_bytes: int) -> int:
        self.loaded.append(name)
        return len(self.loaded)

    def count_parameters(self, function: int) -> int:
        return 1

    def bind_launch(self, function: int, arguments: int, **options: Any) -> Bound:
        return options.get, ()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is loaded, in a process that has loaded nothing."""

    def compile_for(target: Any, function: Any, constants: Any, warps: int, stages: int | None) -> SimpleNamespace:
        metadata = SimpleNamespace(name=f"{function} {dict(constants)}", num_warps=warps, shared=0)
        return SimpleNamespace(asm={"cubin": b"", "ptx": constants.get("TEXT", "")}, metadata=metadata)

    monkeypatch.setattr(kernel_launch, "compile_for", compile_for)
    monkeypatch.setattr(kernel_launch, "_kernels", {})
    return []


def test_drivers_of_a_context_load_a_kernel_once(loaded: list[str]) -> None:
    """Each communicator had loaded its kernels anew, and nobody unloads them."""
    handles = set()
    for _ in range(15):  # communicators, each with a driver of its own
        kernels = kernels_of(1, Loader(loaded))
        handles |= {kernels.load("push", {"BLOCK": block}, 4).function for block in (128, 256)}
    assert loaded == ["push {'BLOCK': 128}", "push {'BLOCK': 256}"] and handles == {1, 2}
    assert kernels_of(2, Loader(loaded)).load("push", {"BLOCK": 128}, 4).function == 3


def test_threads_that_load_one_kernel_go_by_one(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=10)
    real_load = Loader.load_function

    def load_function(self: Loader, image: bytes, name: str, shared_bytes: int) -> int:
        both.wait()  # the other one does not wait for this one to have loaded it
        return real_load(self, image, name, shared_bytes)

    monkeypatch.setattr(Loader, "load_function", load_function)
    kernels, found = LoadedKernels(Loader(loaded)), []
    threads = [threading.Thread(target=lambda: found.append(kernels.load("pull", {}, 4))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 2 and found[0] is found[1] is kernels.load("pull", {}, 4)


def test_only_a_kernel_that_waits_is_launched_ahead_of_an_end(loaded: list[str]) -> None:
    kernels = kernels_of(1, Loader(loaded))
    for text in ("griddepcontrol.wait ;", "griddepcontrol.launch_dependents ;", ""):
        option, _ = kernels.load("push", {"TEXT": text}, 4).bind([0], blocks=1, stream=0)
        assert option("dependent") == ("wait" in text)


class Constants(dict[str, int]):
    """A dictionary that weak references may refer to."""


def test_many_constants_are_known_by_what_they_are(loaded: list[str]) -> None:
    kernels, most, kept = kernels_of(1, Loader(loaded)), kernel_launch.MOST_CONSTANTS, []
    for _ in range(2):
        for block in range(most + 10):
            kernels.load("push", constants := Constants(BLOCK=block), 4)
            kept.append(weakref.ref(constants))
            del constants
    assert len(loaded) == most + 10
    assert sum(each() is not None for each in kept) == most
