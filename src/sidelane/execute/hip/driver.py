"""The HIP runtime as a driver of the executor: the methods of ``execute.cuda.driver.Driver``, for AMD GPUs.

Four things differ from CUDA, as ROCm's sources have it:

- A batch of memory operations may run in any order, so that each is a call of its own.
- A wait for "at least" compares unsigned numbers. Flags therefore never wrap around: see ``HipExecutor.renew``.
- The streams of a priority share four hardware queues (``GPU_MAX_HW_QUEUES``). A wait is a kernel of one thread
  (``GPU_STREAMOPS_CP_WAIT=0``, the default), and so is a write.
- Contiguous bytes are moved by SDMA engines (``runtime.COPY_BY_ENGINES``), but rows at a distance by a kernel, whatever
  the call asks for (``KernelBlitManager::copyBufferRect``).

A call that fails is remembered for its thread (``hipGetLastError``), where torch finds it. So it is forgotten here.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sidelane.errors import UnavailableError
from sidelane.execute.boxes import Box
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.kernel_launch import KernelTarget, kernels_of
from sidelane.execute.cuda.native import Bound, MemoryOps, Pointer
from sidelane.execute.hip import runtime as hip
from sidelane.execute.hip.cu_mask import CuSplit
from sidelane.execute.hip.runtime import Runtime, load_runtime

_HANDLE, _INT = ctypes.c_void_p, ctypes.c_int
_WAVEFRONT_THREADS = 64  # of CDNA GPUs, the only ones with links between them
_LDS_BYTES = 64 << 10  # of a block on gfx942, where torch does not tell; gfx950 has 160 KiB

_WRITE = 2  # operation of a row of MemoryOps
_OPERATION, _ADDRESS_LOW, _ADDRESS_HIGH, _VALUE, _FLAGS = 0, 2, 3, 4, 6


class HipMemoryOps(MemoryOps):
    """Stream memory operations that are submitted one by one, in order; their values lie in one array all the same.

    Args:
        runtime: the HIP runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._write = runtime.functions["hipStreamWriteValue32"]
        self._wait = runtime.functions["hipStreamWaitValue32"]

    def bind(self, stream: int, part: slice = slice(None)) -> Bound:
        return self._submit, (stream, self._sealed()[part])

    def _submit(self, stream: int, rows: npt.NDArray[np.uint32]) -> int:
        for row in rows.tolist():
            address = row[_ADDRESS_HIGH] << 32 | row[_ADDRESS_LOW]
            if row[_OPERATION] == _WRITE:
                error = self._write(stream, address, row[_VALUE], 0)
            else:
                error = self._wait(stream, address, row[_VALUE], row[_FLAGS], hip.ALL_BITS)
            if error:
                return int(error)
        return 0


class SpareStream:
    """A stream of lowest priority, for writes that must run even if all other streams hang.

    Nothing else has that priority, of Sidelane or of torch, and each priority has hardware queues of its own. A stream
    with a CU mask has one, too, but waits for the legacy default stream, which waits for the streams that hang.

    Args:
        driver: driver of the device.
    """

    def __init__(self, driver: HipDriver) -> None:
        self._driver = driver
        self._stream = driver.make_stream(driver.lowest_priority)

    def submit(self, batches: Sequence[MemoryOps]) -> None:
        """Run batches in order."""
        self._driver.submit(self._driver.bind_memory_ops(batch, self._stream) for batch in batches)

    def is_idle(self) -> bool:
        return self._driver.is_idle(self._stream)

    def close(self) -> None:
        """Destroy the stream."""
        self._driver.destroy_stream(self._stream)


class HipDriver(Driver):
    """Calls to the HIP runtime for one device.

    Raises:
        UnavailableError: there is no HIP runtime, or it is too old.
    """

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.runtime = load_runtime() if runtime is None else runtime
        with self.current():
            low, high = _INT(), _INT()
            self.runtime.call("hipDeviceGetStreamPriorityRange", ctypes.addressof(low), ctypes.addressof(high))
        self.lowest_priority = low.value
        self._normal_priority, self._highest_priority = min(0, low.value), high.value
        self._kernels = None

    # --- made once ----------------------------------------------------------------------------------------------------

    def create_stream(self, *, urgent: bool = False) -> int:
        return self.make_stream(self._highest_priority if urgent else self._normal_priority)

    def make_stream(self, priority: int) -> int:
        """Make a stream of a priority that does not synchronise with the legacy default stream."""
        return int(self.runtime.query(_HANDLE, "hipStreamCreateWithPriority", hip.STREAM_NON_BLOCKING, priority))

    def destroy_stream(self, stream: int) -> None:
        self.runtime.call("hipStreamDestroy", stream)

    def create_event(self, *, timing: bool = False) -> int:
        flags = 0 if timing else hip.EVENT_DISABLE_TIMING
        return int(self.runtime.query(_HANDLE, "hipEventCreateWithFlags", flags))

    def destroy_event(self, event: int) -> None:
        self.runtime.call("hipEventDestroy", event)

    def allocate(self, nbytes: int) -> int:
        return int(self.runtime.query(_HANDLE, "hipMalloc", nbytes))

    def free(self, address: int) -> None:
        self.runtime.call("hipFree", address)

    def allocation_at(self, address: int) -> tuple[int, int, int] | None:
        number = self.allocation_number(address)
        start, nbytes = _HANDLE(), ctypes.c_size_t()
        arguments = (ctypes.addressof(start), ctypes.addressof(nbytes), address)
        if not number or self.runtime.functions["hipMemGetAddressRange"](*arguments):
            self.runtime.forget_error()
            return None
        return number, start.value or 0, nbytes.value

    def piece_at(self, address: int) -> tuple[int, int] | None:
        """Return None: memory that is composed of pieces is not exported here, it is staged."""
        return None

    def allocation_number(self, address: int) -> int:
        number = ctypes.c_uint64()
        if self.runtime.functions["hipPointerGetAttribute"](ctypes.addressof(number), hip.BUFFER_ID, address):
            self.runtime.forget_error()
            return 0
        return number.value

    def export(self, start: int) -> bytes:
        with self.relaxed_capture():
            return bytes(self.runtime.query(hip.IpcHandle, "hipIpcGetMemHandle", start))

    def open_exported(self, handle: bytes) -> int:
        with self.relaxed_capture():
            opened = hip.IpcHandle.from_buffer_copy(handle)
            return int(self.runtime.query(_HANDLE, "hipIpcOpenMemHandle", opened, hip.IPC_LAZY_PEER_ACCESS))

    def close_exported(self, start: int) -> None:
        with self.relaxed_capture():
            self.runtime.call("hipIpcCloseMemHandle", start)

    def upload(self, address: int, values: npt.NDArray[np.int64], stream: int) -> None:
        self.runtime.call("hipMemcpyHtoDAsync", address, values.ctypes.data, values.nbytes, stream)
        self.runtime.call("hipStreamSynchronize", stream)

    def load_function(self, image: bytes, name: str, shared_bytes: int) -> int:
        module = self.runtime.query(_HANDLE, "hipModuleLoadData", image)
        return int(self.runtime.query(_HANDLE, "hipModuleGetFunction", module, name.encode()))

    def count_parameters(self, function: int) -> int | None:
        """Return None: the runtime does not tell, and reads as many arguments as the kernel has."""
        return None

    def kernel_target(self) -> KernelTarget:
        name = torch.cuda.get_device_properties(self.index).gcnArchName.partition(":")[0]
        return KernelTarget("hip", name, _WAVEFRONT_THREADS)

    def memory_ops(self) -> MemoryOps:
        return HipMemoryOps(self.runtime)

    # --- prepared calls -----------------------------------------------------------------------------------------------

    def bind_copy(self, dst: int, src: int, nbytes: int, stream: int) -> Bound:
        return self._bind("hipMemcpyAsync", dst, src, nbytes, hip.COPY_BY_ENGINES, stream)

    def bind_copies(self, copies: Sequence[tuple[int, int, int]], stream: int) -> Bound:
        calls = [self.bind_copy(*copy, stream) for copy in copies]

        def submit() -> int:
            return next((error for function, arguments in calls if (error := function(*arguments))), 0)

        return submit, ()

    def bind_rows(self, dst: int, src: int, pitches: tuple[int, int], nbytes: int, rows: int, stream: int) -> Bound:
        places = (dst, pitches[0], src, pitches[1])
        return self._bind("hipMemcpy2DAsync", *places, nbytes, rows, hip.DEVICE_TO_DEVICE, stream)

    def bind_planes(self, box: Box, stream: int) -> Bound:
        copy = hip.PlaneCopy(extent=(box.width, box.rows, box.planes), kind=hip.DEVICE_TO_DEVICE)
        copy.dst, copy.src = (
            hip.PitchedPointer(address, pitch, box.width, distance // pitch)
            for address, pitch, distance in zip((box.dst, box.src), box.pitches, box.distances, strict=True)
        )
        return self.runtime.functions["hipMemcpy3DAsync"], (Pointer(ctypes.addressof(copy), copy), _HANDLE(stream))

    def bind_record(self, event: int, stream: int, *, external: bool = False) -> Bound:
        if external:
            return self._bind("hipEventRecordWithFlags", event, stream, hip.EVENT_RECORD_EXTERNAL)
        return self._bind("hipEventRecord", event, stream)

    def bind_wait(self, event: int, stream: int) -> Bound:
        return self._bind("hipStreamWaitEvent", stream, event, 0)

    def kernels(self) -> Any:
        if self._kernels is None:
            self._kernels = kernels_of(self.index, self)
        return self._kernels

    def most_resident(self, function: int, threads: int, shared_bytes: int) -> int:
        name = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self.runtime.query(_INT, name, function, threads, shared_bytes))

    def allow_shared(self, function: int, shared_bytes: int) -> None:
        """Do nothing: a block may take the whole local memory without asking."""

    def bind_launch(
        self,
        function: int,
        arguments: int,
        *,
        blocks: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        dependent: bool = False,
    ) -> Bound:
        packed = Pointer(int(arguments), arguments)
        name = "hipModuleLaunchKernel"
        return self.runtime.functions[name], (function, *blocks, threads, 1, 1, shared_bytes, stream, packed, None)

    def make_graph(self, calls: Iterable[Bound], stream: int) -> int:
        self.runtime.call("hipStreamBeginCapture", stream, hip.CAPTURE_RELAXED)
        graph = _HANDLE()
        try:
            self.submit(calls)
        finally:
            self.runtime.call("hipStreamEndCapture", stream, ctypes.addressof(graph))
        executable = self.runtime.query(_HANDLE, "hipGraphInstantiate", graph, None, None, 0)
        self.runtime.call("hipGraphDestroy", graph)
        return int(executable)

    def destroy_graph(self, graph: int) -> None:
        self.runtime.call("hipGraphExecDestroy", graph)

    def bind_graph(self, graph: int, stream: int, *, owner: object = None) -> Bound:
        return self.runtime.functions["hipGraphLaunch"], (Pointer(graph, owner), _HANDLE(stream))

    # --- used by every call -------------------------------------------------------------------------------------------

    def refused(self, function: Any, error: int) -> DriverError:
        return self.runtime.error(int(error), getattr(function, "__name__", "a call"))

    def is_capturing(self, stream: int) -> bool:
        if stream == 0:
            return False
        status = _INT()
        self.runtime.call("hipStreamIsCapturing", stream, ctypes.addressof(status))
        return status.value == hip.CAPTURE_ACTIVE

    def has_normal_priority(self, stream: int) -> bool:
        priority = _INT()
        self.runtime.call("hipStreamGetPriority", stream, ctypes.addressof(priority))
        return bool(priority.value == self._normal_priority)

    def capture_of(self, stream: int) -> int:
        if stream == 0:
            return 0
        status, number = _INT(), ctypes.c_uint64()
        arguments = (stream, ctypes.addressof(status), ctypes.addressof(number))
        self.runtime.call("hipStreamGetCaptureInfo", *arguments)
        return number.value if status.value == hip.CAPTURE_ACTIVE else 0

    # --- used rarely --------------------------------------------------------------------------------------------------

    def is_idle(self, stream: int) -> bool:
        return self._is_over("hipStreamQuery", stream)

    def has_passed(self, event: int) -> bool:
        return self._is_over("hipEventQuery", event)

    def elapsed_us(self, first: int, second: int) -> float:
        return 1000.0 * float(self.runtime.query(ctypes.c_float, "hipEventElapsedTime", first, second))

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        previous = self._exchange_mode(hip.CAPTURE_RELAXED)
        try:
            yield
        finally:
            self._exchange_mode(previous)

    def second_context(self) -> Any:
        return SpareStream(self)

    def split_units(self, units: int) -> Any:
        return CuSplit(self.runtime, units, self.attribute("MULTIPROCESSOR_COUNT"))

    def attach_thread(self) -> None:
        self.runtime.call("hipSetDevice", self.index)
        self._exchange_mode(hip.CAPTURE_RELAXED)

    def attribute(self, name: str) -> int:
        """Return a device attribute, named as CUDA's without its prefix.

        Raises:
            UnavailableError: this driver does not know it.
        """
        if name == "MULTIPROCESSOR_COUNT":
            return int(torch.cuda.get_device_properties(self.index).multi_processor_count)
        if name == "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN":
            properties = torch.cuda.get_device_properties(self.index)
            return int(getattr(properties, "shared_memory_per_block", _LDS_BYTES))
        if name == "ASYNC_ENGINE_COUNT":
            from sidelane.machine import amd

            return amd.engine_counts().get(self.index, 0)  # as the kernel's topology lists them
        raise UnavailableError(f"the HIP runtime has no device attribute {name}")

    def version(self) -> int:
        """Return the runtime's version as CUDA would have it, 1000 * major + 10 * minor."""
        number = int(self.runtime.query(_INT, "hipDriverGetVersion"))
        return 1000 * (number // 10_000_000) + 10 * (number // 100_000 % 100)

    def call(self, function: str, *arguments: Any) -> Any:
        raise UnavailableError(f"{function}: there is no CUDA driver on an AMD GPU")

    def _bind(self, name: str, *arguments: Any) -> Bound:
        function = self.runtime.functions[name]
        values = (kind(value) for kind, value in zip(function.argtypes, arguments, strict=True))
        return function, tuple(values)

    def _is_over(self, name: str, handle: int) -> bool:
        error = self.runtime.functions[name](handle)
        if error and error != hip.NOT_READY:
            raise self.runtime.error(error, name)
        return not error

    def _exchange_mode(self, mode: int) -> int:
        exchanged = _INT(mode)
        self.runtime.call("hipThreadExchangeStreamCaptureMode", ctypes.addressof(exchanged))
        return exchanged.value
