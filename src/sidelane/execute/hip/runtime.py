"""The HIP runtime's library through ctypes: prototypes, constants and errors.

Names, prototypes and values are those of ``hip_runtime_api.h`` and ``driver_types.h`` (ROCm 6 and 7). What the runtime
does where it differs from CUDA was read in ROCm's public sources (``hip_stream_ops.cpp``, ``amdblit.cl``) and has not
been tried on hardware.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from sidelane.errors import Page, UnavailableError
from sidelane.execute.cuda.driver import DriverError

LIBRARY_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")

NOT_READY = 600  # hipErrorNotReady
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
EVENT_RECORD_EXTERNAL = 1
CAPTURE_RELAXED = 2
CAPTURE_ACTIVE = 1
IPC_LAZY_PEER_ACCESS = 1
COPY_BY_ENGINES = 1024
"""``hipMemcpyDeviceToDeviceNoCU``: a contiguous copy that the runtime gives to an SDMA engine. Early runtimes give one
of up to 16 KiB (``GPU_FORCE_BLIT_COPY_SIZE``) to a kernel all the same."""

DEVICE_TO_DEVICE = 3
"""``hipMemcpyDeviceToDevice``, for rows at a distance: a kernel copies them, and early runtimes know no other kind."""

WAIT_GREATER_OR_EQUAL, WAIT_EQUAL = 0, 1
"""Comparisons of ``hipStreamWaitValue32``. The first is one of unsigned numbers and not cyclic, unlike CUDA's."""

ALL_BITS = 0xFFFFFFFF
BUFFER_ID = 7  # of hipPointer_attribute; the size of a range has only 32 bits there

_INT, _UINT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_OUT = _POINTER  # an address to which a result is written


class IpcHandle(ctypes.Structure):
    """``hipIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class PitchedPointer(ctypes.Structure):
    """``hipPitchedPtr``."""

    _fields_ = (("pointer", _POINTER), ("pitch", _SIZE), ("width", _SIZE), ("height", _SIZE))


class PlaneCopy(ctypes.Structure):
    """``hipMemcpy3DParms``."""

    _fields_ = (
        ("src_array", _POINTER),
        ("src_position", _SIZE * 3),
        ("src", PitchedPointer),
        ("dst_array", _POINTER),
        ("dst_position", _SIZE * 3),
        ("dst", PitchedPointer),
        ("extent", _SIZE * 3),
        ("kind", _INT),
    )


PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "hipDeviceGetStreamPriorityRange": (_OUT, _OUT),
    "hipDriverGetVersion": (_OUT,),
    "hipEventCreateWithFlags": (_OUT, _UINT),
    "hipEventDestroy": (_POINTER,),
    "hipEventElapsedTime": (_OUT, _POINTER, _POINTER),
    "hipEventQuery": (_POINTER,),
    "hipEventRecord": (_POINTER, _POINTER),
    "hipEventRecordWithFlags": (_POINTER, _POINTER, _UINT),
    "hipExtStreamCreateWithCUMask": (_OUT, _UINT, _POINTER),
    "hipFree": (_POINTER,),
    "hipGetLastError": (),
    "hipGraphDestroy": (_POINTER,),
    "hipGraphExecDestroy": (_POINTER,),
    "hipGraphInstantiate": (_OUT, _POINTER, _POINTER, _POINTER, _SIZE),
    "hipGraphLaunch": (_POINTER, _POINTER),
    "hipIpcCloseMemHandle": (_POINTER,),
    "hipIpcGetMemHandle": (_OUT, _POINTER),
    "hipIpcOpenMemHandle": (_OUT, IpcHandle, _UINT),
    "hipMalloc": (_OUT, _SIZE),
    "hipMemGetAddressRange": (_OUT, _OUT, _POINTER),
    "hipMemcpy2DAsync": (_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _POINTER),
    "hipMemcpy3DAsync": (_POINTER, _POINTER),
    "hipMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
    "hipMemcpyHtoDAsync": (_POINTER, _POINTER, _SIZE, _POINTER),
    "hipModuleGetFunction": (_OUT, _POINTER, ctypes.c_char_p),
    "hipModuleLaunchKernel": (_POINTER, *[_UINT] * 6, _UINT, _POINTER, _POINTER, _POINTER),
    "hipModuleLoadData": (_OUT, ctypes.c_char_p),
    "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor": (_OUT, _POINTER, _INT, _SIZE),
    "hipPointerGetAttribute": (_OUT, _INT, _POINTER),
    "hipSetDevice": (_INT,),
    "hipStreamBeginCapture": (_POINTER, _INT),
    "hipStreamCreateWithPriority": (_OUT, _UINT, _INT),
    "hipStreamDestroy": (_POINTER,),
    "hipStreamEndCapture": (_POINTER, _OUT),
    "hipStreamGetCaptureInfo": (_POINTER, _OUT, _OUT),
    "hipStreamGetPriority": (_POINTER, _OUT),
    "hipStreamIsCapturing": (_POINTER, _OUT),
    "hipStreamQuery": (_POINTER,),
    "hipStreamSynchronize": (_POINTER,),
    "hipStreamWaitEvent": (_POINTER, _POINTER, _UINT),
    "hipStreamWaitValue32": (_POINTER, _POINTER, _UINT, _UINT, _UINT),
    "hipStreamWriteValue32": (_POINTER, _POINTER, _UINT, _UINT),
    "hipThreadExchangeStreamCaptureMode": (_OUT,),
}


class Runtime:
    """Functions of the HIP runtime as ctypes functions, by name; each returns an error code, 0 for success.

    Args:
        library: the loaded library.

    Raises:
        UnavailableError: the library lacks a function.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.functions: dict[str, Any] = {}
        for name, arguments in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError as problem:
                raise UnavailableError(f"the HIP runtime is too old: it has no {name}") from problem
            function.argtypes, function.restype = arguments, ctypes.c_int
            self.functions[name] = function
        self._name = library.hipGetErrorName
        self._name.argtypes, self._name.restype = (_INT,), ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            DriverError: it refused.
        """
        error = self.functions[name](*arguments)
        if error:
            raise self.error(error, name)

    def query(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Call a function whose first argument is the address of its result, and return that result."""
        found = kind()
        self.call(name, ctypes.addressof(found), *arguments)
        return found if isinstance(found, ctypes.Structure) else found.value

    def forget_error(self) -> None:
        """Forget that a call of this thread failed: torch asks for that behind its launches, and would raise it."""
        self.functions["hipGetLastError"]()

    def error(self, code: int, name: str) -> DriverError:
        """Return the exception for an error code of a function."""
        self.forget_error()
        text = self._name(code)
        return DriverError(text.decode() if text else f"error {code}", name)


@functools.cache
def load_runtime() -> Runtime:
    """Load the HIP runtime that torch uses, or the system's.

    Raises:
        UnavailableError: there is none, or it is too old.
    """
    for name in LIBRARY_NAMES:
        try:
            return Runtime(ctypes.CDLL(name))
        except OSError:
            continue
    raise UnavailableError(f"there is no HIP runtime ({', '.join(LIBRARY_NAMES)})", page=Page.INSTALLATION)
