"""The driver API with error checks: the only code of this folder that uses a device (except the reducing kernel).

Every call that an invocation repeats is prepared once as a :class:`Bound`, a function with its arguments; running it
takes only the driver's own time. Handles and addresses are plain integers everywhere outside of this file.

Over 400 lines, since it has a method for each call of the driver, and another vendor's driver replaces it as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sidelane.errors import Page, SidelaneError, UnavailableError, missing
from sidelane.execute.base import CallerStream, Questions
from sidelane.execute.boxes import Box
from sidelane.execute.cuda import native
from sidelane.execute.cuda.kernel_launch import WARP_THREADS, KernelTarget, LoadedKernels, kernels_of
from sidelane.execute.cuda.native import (
    Bound,
    LaunchConfig,
    MemoryOps,
    Pointer,
    address_argument,
    address_array,
    require_native,
)
from sidelane.memory.release import DeferredRelease, deferred_bytes
from sidelane.memory.storage import persistent
from sidelane.program.collective import Reduction

if TYPE_CHECKING:
    from sidelane.execute.cuda.partition import UnitSplit


class SecondContext:
    """A stream with its own hardware channels, for memory operations that must run even if all other streams hang.

    It can write device memory of the first context, at the same addresses.

    Args:
        driver: driver of the device.
        api: ``cuda.bindings.driver``.
        first: the context that is current before and after every method.

    Raises:
        DriverError: the device has no memory for it.
    """

    def __init__(self, driver: Driver, api: Any, first: Any) -> None:
        self._driver, self._api, self._first = driver, api, first
        self._context = driver.call("cuCtxCreate", None, 0, driver.call("cuCtxGetDevice"))
        try:
            self._stream = driver.create_stream()
        finally:
            driver.call("cuCtxSetCurrent", first)

    def submit(self, batches: Sequence[MemoryOps]) -> None:
        """Run batches in order."""
        with self._entered():
            self._driver.submit(self._driver.bind_memory_ops(batch, self._stream) for batch in batches)

    def is_idle(self) -> bool:
        with self._entered():
            return self._driver.is_idle(self._stream)

    def close(self) -> None:
        """Destroy the context and its stream."""
        self._driver.call("cuCtxDestroy", self._context)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._driver.call("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxSetCurrent", self._first)


_SHARED_BYTES_WITHOUT_ASKING = 48 << 10
_MOST_HANDLES = 256
_ORDERING = (
    *("cuEventRecord", "cuStreamWaitEvent", "cuEventQuery", "cuEventCreate", "cuEventDestroy_v2"),
    "cuStreamIsCapturing",
)
_PEERS = 1
"""Flag ``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``: the memory may be on another GPU."""


_MEMORY_BLOCK_ID = 20  # CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: the number of a mapped piece


REDUCE_BLOCKS = 32
"""Largest number of thread blocks of a reduction: a quarter of an H200, enough to read peers' slots at memory speed."""


class DriverError(SidelaneError):
    """The driver refused a call. ``name`` is the driver's name of the error."""

    def __init__(self, name: str, call: str) -> None:
        self.name = name
        super().__init__(f"{call} failed: {name}")


class HostWords:
    """Pinned host memory of 32-bit words, readable by host threads while streams write it.

    Streams may write it after the last reference: it is released as symmetric memory is (``memory/release.py``).

    Attributes:
        array: the words, uint32.
        address: their address for streams.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        # Under unified addressing, which every supported GPU has, host and device use one address.
        words = torch.zeros(count, dtype=torch.int32, device="cpu", pin_memory=True)
        self._owner = DeferredRelease(words.untyped_storage(), device)
        self.array: npt.NDArray[np.uint32] = words.numpy().view(np.uint32)
        self.address: int = words.data_ptr()


class Driver:
    """Driver calls for one device.

    Raises:
        UnavailableError: ``cuda.bindings`` is not installed, or has no driver to talk to.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._api = load_api()
        with torch.cuda.device(self.index):
            torch.cuda.current_stream().synchronize()  # makes the context
            self._context = self.call("cuCtxGetCurrent")
            low, high = self.call("cuCtxGetStreamPriorityRange")
        self._normal_priority, self._highest_priority = min(0, low), high
        self._no_timing = int(self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._external = int(self._api.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)
        self._not_ready = self._api.CUresult.CUDA_ERROR_NOT_READY
        self._relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._kernels: LoadedKernels | None = None
        self._handles: dict[int, Any] = {}  # of streams

    # --- made once ----------------------------------------------------------------------------------------------------

    def create_stream(self, *, urgent: bool = False) -> int:
        """Make a stream that does not synchronise with the legacy default stream. ``urgent``: of highest priority."""
        priority = self._highest_priority if urgent else self._normal_priority
        non_blocking = int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self.call("cuStreamCreateWithPriority", non_blocking, priority))

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy", self._api.CUstream(stream))

    def create_event(self, *, timing: bool = False) -> int:
        return int(self.call("cuEventCreate", 0 if timing else self._no_timing))

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy", self._api.CUevent(event))

    def host_words(self, count: int) -> HostWords:
        return HostWords(count, torch.device("cuda", self.index))

    def device_words(self, count: int) -> tuple[int, object]:
        """Allocate zeroed words of device memory, released as :class:`HostWords` are.

        Returns:
            Their address, and a tensor that keeps them alive.
        """
        device = torch.device("cuda", self.index)
        words = persistent(device, lambda: torch.zeros(count, dtype=torch.int32, device=device))
        torch.cuda.current_stream(self.index).synchronize()
        return words.data_ptr(), deferred_bytes(words).view(torch.int32)

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, and return its address. Torch might take it from the pool of a captured graph."""
        return int(self.call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Free memory of :meth:`allocate`; waits for the device."""
        self.call("cuMemFree", self._api.CUdeviceptr(address))

    def allocation_at(self, address: int) -> tuple[int, int, int] | None:
        """Return number, first byte and size of the allocation that holds an address; None if there is none."""
        kinds = self._api.CUpointer_attribute
        number, start, size = (
            self._api.cuPointerGetAttribute(kind, self._api.CUdeviceptr(address))
            for kind in (
                kinds.CU_POINTER_ATTRIBUTE_BUFFER_ID,
                kinds.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            )
        )
        if any(error for error, *_ in (number, start, size)):
            return None
        return int(number[1]), int(start[1]), int(size[1])

    def piece_at(self, address: int) -> tuple[int, int] | None:
        """Return first byte and size of the mapping that holds an address; None if there is none.

        If ``cuMemMap`` has mapped pieces side by side, :meth:`allocation_at` returns the whole reserved range. The
        binding does not know these attributes (cuda-bindings 13.3), but the library does.
        """
        kinds = self._api.CUpointer_attribute
        ask, found = require_native("cuPointerGetAttribute"), []
        for kind in (kinds.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, kinds.CU_POINTER_ATTRIBUTE_MAPPING_SIZE):
            value = ctypes.c_uint64()
            if ask(ctypes.byref(value), ctypes.c_int(int(kind)), ctypes.c_uint64(address)):
                return None
            found.append(value.value)
        return found[0], found[1]

    def allocation_number(self, address: int) -> int:
        """Return the number of the allocation that holds an address; 0 if there is none."""
        kind = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        error, number = self._api.cuPointerGetAttribute(kind, self._api.CUdeviceptr(address))
        return 0 if error else int(number)

    def export(self, start: int) -> bytes:
        """Return the handle by which another process of this machine maps an allocation. Raises DriverError."""
        with self.relaxed_capture():  # it may be called while a graph is captured
            return bytes(self.call("cuIpcGetMemHandle", self._api.CUdeviceptr(start)).reserved)

    def open_exported(self, handle: bytes) -> int:
        """Map an allocation of another process, and return its address. At times waits for the device, some 20 ms."""
        opened = self._api.CUipcMemHandle()
        opened.reserved = handle
        with self.relaxed_capture():
            return int(self.call("cuIpcOpenMemHandle", opened, _PEERS))

    def close_exported(self, start: int) -> None:
        """Unmap an allocation of :meth:`open_exported`, which no call may be using."""
        with self.relaxed_capture():
            self.call("cuIpcCloseMemHandle", self._api.CUdeviceptr(start))

    def upload(self, address: int, values: npt.NDArray[np.int64], stream: int) -> None:
        """Copy values to device memory behind the work of ``stream``, and wait for the copy."""
        self.call("cuMemcpyHtoDAsync", address, values.ctypes.data, values.nbytes, self._handle(stream))
        self.call("cuStreamSynchronize", self._handle(stream))

    def load_function(self, image: bytes, name: str, shared_bytes: int) -> int:
        """Load the kernel ``name`` of a binary permanently, so that its launches load nothing."""
        function = self.call("cuModuleGetFunction", self.call("cuModuleLoadData", image), name.encode())
        if shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
            attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, attribute, shared_bytes)
        self.call("cuFuncLoad", function)
        return int(function)

    def kernel_target(self) -> KernelTarget:
        """Return the kind of GPU for which kernels are compiled."""
        major, minor = (self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        return KernelTarget("cuda", 10 * major + minor, WARP_THREADS)

    def count_parameters(self, function: int) -> int | None:
        """Return the number of parameters of a kernel; None if the driver does not tell."""
        for index in itertools.count():
            error, *_ = self._api.cuFuncGetParamInfo(self._api.CUfunction(function), index)
            if error:  # an index too large
                return index
        raise AssertionError

    def memory_ops(self) -> MemoryOps:
        """Return an empty batch."""
        return MemoryOps()

    # --- prepared calls -----------------------------------------------------------------------------------------------

    def bind_memory_ops(self, ops: MemoryOps, stream: int, part: slice = slice(None)) -> Bound:
        """Prepare the submission of ``ops``, or of a part of them. Not on the legacy default stream."""
        return ops.bind(stream, part)

    def bind_copy(self, dst: int, src: int, nbytes: int, stream: int) -> Bound:
        sides = address_argument(dst), address_argument(src)
        return require_native("cuMemcpyAsync"), (*sides, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))

    def bind_copies(self, copies: Sequence[tuple[int, int, int]], stream: int) -> Bound:
        """Prepare unordered copies (dst, src, bytes) as one call. Not on the legacy default stream.

        Raises:
            UnavailableError: the driver is from before CUDA 13.
        """
        dsts, srcs, sizes = zip(*copies, strict=True)
        count = len(copies)
        arrays = address_array(dsts), address_array(srcs)
        order = (self._copy_order, (ctypes.c_size_t * 1)(0), ctypes.c_size_t(1))
        lengths = (ctypes.c_size_t * count)(*sizes)
        function = require_native("cuMemcpyBatchAsync_v2")
        return function, (*arrays, lengths, ctypes.c_size_t(count), *order, ctypes.c_void_p(stream))

    @functools.cached_property
    def _copy_attributes(self) -> Any:
        """The attributes of all copies that are submitted as one call."""
        attributes = self._api.CUmemcpyAttributes()
        attributes.srcAccessOrder = self._api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # A hint to leave the SMs to computations; it costs nothing.
        attributes.flags = int(self._api.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        return attributes

    @functools.cached_property
    def _copy_order(self) -> Pointer:
        return Pointer(int(self._copy_attributes.getPtr()), self._copy_attributes)

    def bind_rows(self, dst: int, src: int, pitches: tuple[int, int], nbytes: int, rows: int, stream: int) -> Bound:
        """Prepare one copy of rows; see :func:`sidelane.execute.cuda.native.bind_rows`."""
        return native.bind_rows(dst, src, pitches, nbytes, rows, stream)

    def bind_planes(self, box: Box, stream: int) -> Bound:
        """Prepare one copy of planes; see :func:`sidelane.execute.cuda.native.bind_planes`."""
        return native.bind_planes(box, stream)

    def bind_record(self, event: int, stream: int, *, external: bool = False) -> Bound:
        """Prepare the record of an event. ``external``: in a capture it becomes a node that records at every replay."""
        handles = (ctypes.c_void_p(event), ctypes.c_void_p(stream))
        if external:
            return require_native("cuEventRecordWithFlags"), (*handles, ctypes.c_uint(self._external))
        return require_native("cuEventRecord"), handles

    def bind_wait(self, event: int, stream: int) -> Bound:
        return require_native("cuStreamWaitEvent"), (ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def bind_reduce(self, dst: int, srcs: Sequence[int], nbytes: int, reduction: Reduction, stream: int) -> Bound:
        """Prepare a launch of the reducing kernel.

        Raises:
            UnavailableError: Triton is not installed.
        """
        from sidelane.execute.cuda import reduce

        launch = reduce.arrange(dst, srcs, nbytes, reduction, REDUCE_BLOCKS)
        return self.bind_kernel(
            launch.kernel, launch.constants, launch.arguments, blocks=launch.blocks, warps=launch.warps, stream=stream
        )

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
        """Prepare a launch of a Triton kernel whose arguments are 64-bit integers (``kernel_launch``); compiles it now.

        Raises:
            UnavailableError: Triton is not installed.
        """
        bound: Bound = self.kernels().load(function, constants, warps).bind(arguments, blocks=blocks, stream=stream)
        return bound

    def kernels(self) -> LoadedKernels:
        """Return the loaded Triton kernels of the context, which all drivers of the device share."""
        if self._kernels is None:
            self._kernels = kernels_of(int(self._context), self)
        return self._kernels

    def most_resident(self, function: int, threads: int, shared_bytes: int) -> int:
        """Return the number of blocks of a kernel that an SM holds at once."""
        handle = self._api.CUfunction(function)
        return int(self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", handle, threads, shared_bytes))

    def allow_shared(self, function: int, shared_bytes: int) -> None:
        """Set the largest shared memory of a kernel's blocks in bytes."""
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", self._api.CUfunction(function), attribute, shared_bytes)

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
        """Prepare a launch of a function; ``arguments`` is the address of an array of the arguments' addresses.

        ``dependent``: blocks may start before the kernel ahead of it has ended; the function waits for that itself.
        """
        attributes = ctypes.addressof(native.DEPENDENT) if dependent else None
        config = LaunchConfig(blocks, (threads, 1, 1), shared_bytes, stream, attributes, int(dependent))
        return native.bind_launch(function, arguments, config)

    def make_graph(self, calls: Iterable[Bound], stream: int) -> int:
        """Record calls that are bound to ``stream`` (and to streams that fork from it) as an executable graph."""
        handle = self._api.CUstream(stream)
        self.call("cuStreamBeginCapture", handle, self._relaxed)
        try:
            self.submit(calls)
        finally:
            graph = self.call("cuStreamEndCapture", handle)
        executable = self.call("cuGraphInstantiate", graph, 0)
        self.call("cuGraphDestroy", graph)
        return int(executable)

    def destroy_graph(self, graph: int) -> None:
        self.call("cuGraphExecDestroy", self._api.CUgraphExec(graph))

    def bind_graph(self, graph: int, stream: int, *, owner: object = None) -> Bound:
        """Prepare a launch of an executable graph. Launches of one graph never overlap. ``owner``: object to keep."""
        return require_native("cuGraphLaunch"), (Pointer(graph, owner), ctypes.c_void_p(stream))

    # --- used by every call -------------------------------------------------------------------------------------------

    def submit(self, calls: Iterable[Bound]) -> None:
        """Run prepared calls in order. The context of the device must be current.

        Raises:
            DriverError: the driver refused one; those before it have been submitted.
        """
        for function, arguments in calls:
            error = function(*arguments)
            if error:
                raise self.refused(function, error)

    def refused(self, function: Any, error: int) -> DriverError:
        """Return the exception for the error code of a prepared call."""
        try:
            name = self._name(self._api.CUresult(error))
        except ValueError:  # the code is newer than the binding
            name = f"error {error}"
        return DriverError(name, getattr(function, "__name__", "a call"))

    def is_capturing(self, stream: int) -> bool:
        """Return True while ``stream`` is being captured. The legacy default stream cannot be captured."""
        return stream != 0 and bool(self.call("cuStreamIsCapturing", self._handle(stream)))

    def has_normal_priority(self, stream: int) -> bool:
        """Return True if a stream has normal priority."""
        return bool(self.call("cuStreamGetPriority", self._handle(stream)) == self._normal_priority)

    def caller_stream(self) -> CallerStream:
        """Return torch's current stream on the device, and whether it is captured. Every call uses it."""
        handle = _raw_stream(self.index)
        if not handle:  # it cannot be captured, and the query fails while another stream is captured
            return handle, False
        if _is_current_capturing is None or _current_device() != self.index:
            return handle, self.is_capturing(handle)
        return handle, _is_current_capturing()

    def questions(self) -> Questions | None:
        """Return the functions that :meth:`caller_stream` calls, for compiled code; None if torch is too old."""
        if _is_current_capturing is None:
            return None
        functions = [require_native(name) for name in _ORDERING]
        addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        return Questions(_raw_stream, _is_current_capturing, _current_device, self.index, (functions, *addresses))

    def capture_of(self, stream: int) -> int:
        """Return the number of the capture that ``stream`` is in, unique in this process; 0 outside of captures."""
        if stream == 0:
            return 0
        # The values after the number differ between versions of the driver's interface.
        status, number, *_ = self.call("cuStreamGetCaptureInfo", self._handle(stream))
        return int(number) if status else 0

    def is_current(self) -> bool:
        """Return True if this is the calling thread's current device."""
        return _current_device() == self.index

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Make the device current for a ``with`` block; cheap if it is current already."""
        if self.is_current():
            return _NOTHING
        return torch.cuda.device(self.index)

    def _handle(self, stream: int) -> Any:
        handle = self._handles.get(stream)
        if handle is None:
            if len(self._handles) >= _MOST_HANDLES:
                self._handles.clear()
            handle = self._handles[stream] = self._api.CUstream(stream)
        return handle

    # --- used rarely --------------------------------------------------------------------------------------------------

    def is_idle(self, stream: int) -> bool:
        """Return True if all work of ``stream`` has ended."""
        return self._has_ended("cuStreamQuery", self._api.CUstream(stream))

    def has_passed(self, event: int) -> bool:
        """Return True once the device has reached the last record of an event."""
        return self._has_ended("cuEventQuery", self._api.CUevent(event))

    def _has_ended(self, query: str, handle: Any) -> bool:
        error = getattr(self._api, query)(handle)[0]
        if error and error != self._not_ready:
            raise DriverError(self._name(error), query)
        return not error

    def elapsed_us(self, first: int, second: int) -> float:
        """Return the microseconds between two events made with ``timing``; both must have been reached."""
        events = (self._api.CUevent(first), self._api.CUevent(second))
        return 1000.0 * float(self.call("cuEventElapsedTime", *events))

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Allow this thread to allocate and to load kernels while a stream of the process is being captured."""
        previous = self.call("cuThreadExchangeStreamCaptureMode", self._relaxed)
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", previous)

    def second_context(self) -> SecondContext:
        """Make another context on the device (see :class:`SecondContext`)."""
        return SecondContext(self, self._api, self._context)

    def split_units(self, units: int) -> UnitSplit:
        """Divide the device's SMs into two sets (see ``partition``)."""
        from sidelane.execute.cuda.partition import UnitSplit

        return UnitSplit(self, self._api, units)

    def priorities(self) -> tuple[int, int]:
        """Return the priorities of a normal and of an urgent stream."""
        return self._normal_priority, self._highest_priority

    def attach_thread(self) -> None:
        """Let the calling thread use the device from now on, without invalidating captures of other threads."""
        self.call("cuCtxSetCurrent", self._context)
        self.call("cuThreadExchangeStreamCaptureMode", self._relaxed)

    def attribute(self, name: str) -> int:
        """Return a device attribute, named without its prefix (``ASYNC_ENGINE_COUNT``)."""
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self.call("cuCtxGetDevice")))

    def version(self) -> int:
        """Return the newest CUDA version that the driver supports, as 1000 * major + 10 * minor."""
        return int(self.call("cuDriverGetVersion"))

    def call(self, function: str, *arguments: Any) -> Any:
        """Call the driver, check its error code, and return its other values."""
        error, *values = getattr(self._api, function)(*arguments)
        if error:
            raise DriverError(self._name(error), function)
        return values[0] if len(values) == 1 else tuple(values)

    def _name(self, error: Any) -> str:
        unknown, name = self._api.cuGetErrorName(error)
        return f"error {int(error)}" if unknown else name.decode()


@functools.cache
def load_api() -> Any:
    """Import and initialise ``cuda.bindings.driver``.

    Raises:
        UnavailableError: it is not installed, or there is no driver.
    """
    try:
        from cuda.bindings import driver

        (error,) = driver.cuInit(0)
    except ImportError as problem:
        raise missing("copy engines need cuda-bindings", "cuda.bindings", problem) from problem
    except RuntimeError as problem:
        raise UnavailableError(f"copy engines need a CUDA driver: {problem}", page=Page.INSTALLATION) from problem
    if error:
        raise UnavailableError(f"the CUDA driver does not start (cuInit: {error})", page=Page.INSTALLATION)
    return driver


def _find_current_stream(index: int) -> int:
    """Return the handle of torch's current stream; 0 is the legacy default stream."""
    return int(torch.cuda.current_stream(index).cuda_stream)


# Functions of torch's compiler. They make no torch object, which would take two microseconds. CPU builds lack them.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _find_current_stream)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_is_current_capturing: Callable[[], bool] | None = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
