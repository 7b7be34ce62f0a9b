"""Launches of Triton kernels on a made-up GPU: Triton compiles for an H100, and nothing of the kernel runs.

A launch is written down with the words of its arguments, and counts as ended: its generation grows.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_driver import FakeDriver
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as triton_driver

from sidelane.device.layout import COUNTERS, GENERATION
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.kernel_launch import KernelTarget, PackedArguments
from sidelane.execute.cuda.native import Bound

FIRST_FUNCTION = 1 << 40
HIDDEN = 4  # arguments that are appended to a kernel's, where nobody knows how many there are


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch. ``by``: ``triton`` or ``driver``; ``words``: of its arguments."""

    by: str
    name: str
    function: int
    words: tuple[int, ...]
    stream: int


class LaunchingDriver(FakeDriver):
    """A made-up driver that launches kernels, too.

    Attributes:
        launches: all launches so far, in the order of submission; those of graphs at each replay.
        target: kind of GPU that it says it is.
        refuses: name of the error of the next prepared launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.names: dict[int, str] = {}
        self.target = KernelTarget("cuda", 90, 32)
        self.refuses = ""

    def kernel_target(self) -> KernelTarget:
        return self.target

    def attribute(self, name: str) -> int:
        assert name == "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
        return 227 << 10

    def count_parameters(self, function: int) -> int | None:
        return None

    def bind_launch(self, function: int, arguments: int, *, stream: int, **shape: Any) -> Bound:
        assert isinstance(arguments, PackedArguments)
        return _BoundLaunch(self, function, arguments, stream), ()

    def launched(self, by: str, function: int, words: tuple[int, ...], stream: int) -> None:
        """Write down a launch, which has ended at once."""
        generation = ctypes.c_uint32.from_address(words[0] + 8 * COUNTERS + 4 * GENERATION)
        generation.value += 1
        self.launches.append(Launch(by, self.names[function], function, words, stream))
        self.put("launch", stream, lambda: None)


class _BoundLaunch:
    """A prepared launch, which copies its arguments when it is submitted or captured, as the driver does."""

    def __init__(self, driver: LaunchingDriver, function: int, arguments: PackedArguments, stream: int) -> None:
        self._driver, self._function, self._arguments, self._stream = driver, function, arguments, stream

    def __call__(self) -> None:
        if name := self._driver.refuses:
            self._driver.refuses = ""
            raise DriverError(name, "cuLaunchKernelEx")
        self.captured()()

    def captured(self) -> Any:
        words = tuple(self._arguments.values)
        return lambda: self._driver.launched("driver", self._function, words, self._stream)


class _TritonDriver:
    """Triton's driver of a GPU that is none."""

    def __init__(self, device: LaunchingDriver) -> None:
        self._device = device
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            load_binary=self._load,
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return id(self._device)  # its own cache of compiled kernels, whose functions are of this device

    def get_current_stream(self, device: int) -> int:
        return self._device.caller

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _load(self, name: str, *_: Any) -> tuple[Any, ...]:
        function = FIRST_FUNCTION + len(self._device.names)
        self._device.names[function] = name
        return object(), function, 32, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
            arguments = given[4:]
            kinds = list(src.signature.values())
            words = tuple(_word(part) for kind, part in zip(kinds, arguments, strict=True) if kind != "constexpr")
            words += (0,) * HIDDEN
            if self._device.graph is None:
                self._device.launched("triton", function, words, stream)
            else:
                self._device.graph.append(lambda: self._device.launched("triton", function, words, stream))

        return launch


def _word(part: Any) -> int:
    """An argument, as the driver gets it."""
    if isinstance(part, torch.Tensor):
        return part.data_ptr()
    return struct.unpack("<i", struct.pack("<f", part))[0] if isinstance(part, float) else int(part)


@contextmanager
def made_up_launches() -> Iterator[LaunchingDriver]:
    """Let Triton compile for a made-up GPU, on whose driver communicators of ``made_up_gpus`` launch."""
    device = LaunchingDriver()
    before = triton_driver._active
    triton_driver.set_active(_TritonDriver(device))
    with mock.patch("triton.compiler.compiler.max_shared_mem", return_value=227 << 10):
        try:
            yield device
        finally:
            triton_driver._active = before
