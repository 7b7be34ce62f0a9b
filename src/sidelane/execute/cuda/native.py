"""Prepared calls to the driver's library: arguments are converted to C once, and repeated calls take little time.

``cuda.bindings`` converts Python numbers and lists to C at every call. Here a call is a function of the library with
its arguments as C values; running it is one foreign call, some 0.3 us besides the driver's own time. Foreign calls
release the GIL: a full channel may block one for as long as a peer is late, and the watch thread must go on.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sidelane.errors import UnavailableError
from sidelane.execute.base import Addresses, DriverCall, Follower
from sidelane.execute.boxes import Box
from sidelane.program.wraparound import WORD_MASK

Bound = tuple[Callable[..., Any], tuple[Any, ...]]
"""A prepared call: a function with its arguments. It returns the driver's error code, which is false for success."""

_ALL_BITS = (1 << 64) - 1
_ADDRESS_BYTES = 8

MOST_INTEGERS = 8  # arguments of a call that C code makes: MOST_ARGUMENTS of native/replay.c

# cuda.h: CUstreamBatchMemOpParams is a union of six 64-bit words. Waits and writes of 32-bit words share a layout.
_OP_WORDS = 12
_KIND, _ADDRESS_LOW, _ADDRESS_HIGH, _VALUE, _FLAGS = 0, 2, 3, 4, 6  # 32-bit words of it, on little-endian machines
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_GEQ, _WAIT_EQ, _WRITE_DEFAULT = 0, 1, 0
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


@functools.cache
def require_native(name: str) -> Any:
    """Return a function of the driver's library.

    Raises:
        UnavailableError: the library has no such name.
    """
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        raise UnavailableError(f"the CUDA driver is too old: libcuda.so.1 has no {name}") from None


class Pointer(ctypes.c_void_p):
    """An address as an argument of a call, which keeps the memory behind it.

    Args:
        address: the address.
        memory: object to keep as long as this one lives.
    """

    def __init__(self, address: int, memory: object) -> None:
        super().__init__(address)
        self.memory = memory


class Located(int):
    """An address in a buffer that may move. The arguments of calls that are made of it note where it stands.

    Attributes:
        buffer: rank and name of the buffer.
    """

    buffer: tuple[int, str]

    @classmethod
    def of(cls, address: int, buffer: tuple[int, str]) -> Located:
        made = cls(address)
        made.buffer = buffer
        return made

    def __add__(self, nbytes: int) -> Located:
        return Located.of(int(self) + nbytes, self.buffer)

    __radd__ = __add__

    def __sub__(self, nbytes: int) -> Located:
        return Located.of(int(self) - nbytes, self.buffer)


def locate(addresses: Addresses, buffers: Iterable[tuple[int, str]]) -> Addresses:
    """Return the same addresses, those of ``buffers`` as :class:`Located`."""
    located = {buffer: Located.of(addresses.buffers[buffer], buffer) for buffer in buffers}
    return dataclasses.replace(addresses, buffers={**addresses.buffers, **located})


def note_located(argument: Any, values: Sequence[int], words: Iterable[int]) -> None:
    """Note in an argument, or in the memory behind it, which of its words hold a :class:`Located`.

    Args:
        argument: the argument or memory.
        values: values of words.
        words: address of each of these words; 0 for the argument itself.
    """
    if Located in map(type, values):
        argument.located = [(word, v) for word, v in zip(words, values, strict=True) if isinstance(v, Located)]


def address_argument(address: int) -> ctypes.c_void_p:
    """Return an address as an argument of a call."""
    argument = ctypes.c_void_p(address)
    if type(address) is Located:
        note_located(argument, (address,), (0,))
    return argument


def address_array(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Return addresses as an array, which is an argument of a call."""
    array = (ctypes.c_void_p * len(addresses))(*addresses)
    if Located in map(type, addresses):
        first = ctypes.addressof(array)
        note_located(array, addresses, range(first, first + ctypes.sizeof(array), _ADDRESS_BYTES))
    return array


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h: a launch then has four arguments instead of eleven, each of which takes time."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


DEPENDENT = (ctypes.c_uint32 * 18)(6, 0, 1)
"""``CUlaunchAttribute`` of cuda.h, 72 bytes: attribute 6, programmatic stream serialization, is on."""


def bind_launch(function: int, arguments: int, config: LaunchConfig) -> Bound:
    """Prepare a kernel launch; ``arguments`` is the address of an array of its arguments' addresses, and is kept."""
    parts = (ctypes.byref(config), ctypes.c_void_p(function), Pointer(int(arguments), arguments), ctypes.c_void_p())
    return require_native("cuLaunchKernelEx"), parts


def _placed(side: str, *, in_planes: bool = False) -> tuple[tuple[str, Any], ...]:
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    kinds: dict[str, Any] = {"x_bytes": size, "y": size}
    if in_planes:
        kinds |= {"z": size, "lod": size}
    kinds |= {"memory_type": ctypes.c_int, "host": pointer, "device": pointer, "array": pointer}
    kinds |= {"reserved": pointer, "pitch": size, "height": size} if in_planes else {"pitch": size}
    return tuple((f"{side}_{name}", kind) for name, kind in kinds.items())


class Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of cuda.h: rows of bytes from one place on the device to another."""

    _fields_ = (
        *_placed("src"),
        *_placed("dst"),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def bind_rows(dst: int, src: int, pitches: tuple[int, int], nbytes: int, rows: int, stream: int) -> Bound:
    """Prepare a copy of ``rows`` rows of ``nbytes``; ``pitches``: bytes from row to row, at ``dst`` and at ``src``."""
    copy = Copy2D(
        src_memory_type=_DEVICE_MEMORY,
        src_device=src,
        src_pitch=pitches[1],
        dst_memory_type=_DEVICE_MEMORY,
        dst_device=dst,
        dst_pitch=pitches[0],
        width_bytes=nbytes,
        height=rows,
    )
    fields = Copy2D.dst_device.offset, Copy2D.src_device.offset
    note_located(copy, (dst, src), (ctypes.addressof(copy) + field for field in fields))
    return require_native("cuMemcpy2DAsync_v2"), (ctypes.byref(copy), ctypes.c_void_p(stream))


class Copy3D(ctypes.Structure):
    """``CUDA_MEMCPY3D`` of cuda.h: planes of rows of bytes."""

    _fields_ = (
        *_placed("src", in_planes=True),
        *_placed("dst", in_planes=True),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


def bind_planes(box: Box, stream: int) -> Bound:
    """Prepare a copy of planes of rows; distances from plane to plane are multiples of those from row to row."""
    copy = Copy3D(
        src_memory_type=_DEVICE_MEMORY,
        src_device=box.src,
        src_pitch=box.pitches[1],
        src_height=box.distances[1] // box.pitches[1],
        dst_memory_type=_DEVICE_MEMORY,
        dst_device=box.dst,
        dst_pitch=box.pitches[0],
        dst_height=box.distances[0] // box.pitches[0],
        width_bytes=box.width,
        height=box.rows,
        depth=box.planes,
    )
    return require_native("cuMemcpy3DAsync_v2"), (ctypes.byref(copy), ctypes.c_void_p(stream))


class MemoryOps:
    """Stream memory operations in one array of the driver's form, which the driver copies at submission.

    They are appended first and bound then. Values can be replaced between submissions.
    """

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._array: npt.NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def write(self, address: int, value: int) -> None:
        """Append a store of ``value`` at ``address``, after all earlier work of the stream is visible to all ranks.

        The driver's second interface has no write without that fence: NO_MEMORY_BARRIER is an invalid value in a batch.
        """
        self._append(_WRITE_VALUE_32, address, value, _WRITE_DEFAULT)

    def wait(self, address: int, value: int, *, equal: bool) -> None:
        """Append a wait until the word at ``address`` equals ``value``, or is at least that (modulo 2**32)."""
        self._append(_WAIT_VALUE_32, address, value, _WAIT_EQ if equal else _WAIT_GEQ)

    def setters(self, indices: Sequence[int]) -> list[Callable[[int], Any]]:
        """Return functions that set a 32-bit value in all of these operations.

        One function serves adjacent operations, since calling it takes longer than setting them.
        """
        array = self._sealed()
        return [array[run.start : run.stop, _VALUE].fill for run in _runs(sorted(indices))]

    def strided_words(self, indices: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the words of operations' values: (first address, distance in bytes, number), joined if adjacent."""
        array = self._sealed()
        first = array.ctypes.data + array.itemsize * _VALUE
        distance = array.itemsize * _OP_WORDS
        return [(first + distance * run.start, distance, len(run)) for run in _runs(sorted(indices))]

    def bind(self, stream: int, part: slice = slice(None)) -> Bound:
        """Prepare the submission of them, or of a ``part``, on a stream that is not the legacy default one."""
        array = self._sealed()[part]
        arguments = (Pointer(array.ctypes.data, array), ctypes.c_uint(0))
        function = require_native("cuStreamBatchMemOp_v2")
        return function, (ctypes.c_void_p(stream), ctypes.c_uint(len(array)), *arguments)

    def _append(self, kind: int, address: int, value: int, flags: int) -> None:
        assert self._array is None, "operations are appended before they are bound: their array has one place"
        row = [0] * _OP_WORDS
        row[_KIND], row[_VALUE], row[_FLAGS] = kind, value & WORD_MASK, flags
        row[_ADDRESS_LOW], row[_ADDRESS_HIGH] = address & WORD_MASK, address >> 32
        self._rows.append(row)

    def _sealed(self) -> npt.NDArray[np.uint32]:
        if self._array is None:
            self._array = np.array(self._rows, np.uint32).reshape(-1, _OP_WORDS)
        return self._array


def steps_of(calls: Iterable[Bound]) -> tuple[DriverCall, ...]:
    """Return prepared calls in the form of :class:`sidelane.execute.base.Repetition`."""
    return tuple((*(_integers(bound) or bound), bound) for bound in calls)


def movable_steps(
    calls: Sequence[Bound], addresses: Addresses
) -> tuple[tuple[DriverCall, ...], tuple[Follower, ...]] | None:
    """Return calls prepared for :func:`locate`, and the values in them that follow the addresses of buffers.

    None if Python must make one of the calls.
    """
    steps = steps_of(calls)
    if not all(isinstance(function, int) for function, _, _ in steps):
        return None
    return steps, tuple(
        Follower(value.buffer, (int(value) - addresses.buffers[value.buffer]) & _ALL_BITS, step, argument, word)
        for step, (_, arguments) in enumerate(calls)
        for argument, holder in enumerate(arguments)
        for word, value in _located_in(holder)
    )


def _located_in(argument: Any) -> Sequence[tuple[int, Located]]:
    memory = getattr(argument, "memory", None)  # of a pointer
    holder = memory if memory is not None else getattr(argument, "_obj", argument)  # of ctypes.byref
    found: Sequence[tuple[int, Located]] = getattr(holder, "located", ())
    return found


def _integers(bound: Bound) -> tuple[int, tuple[int, ...]] | None:
    """Return address and arguments of a prepared call as integers for C code; None if Python must make the call."""
    function, arguments = bound
    c_function: Any = ctypes._CFuncPtr  # type: ignore[attr-defined]  # the class of all of them, which stubs leave out
    if not isinstance(function, c_function) or len(arguments) > MOST_INTEGERS:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    values = tuple(value for value in map(_integer, arguments) if value is not None)
    return None if address is None or len(values) < len(arguments) else (address, values)


def _integer(argument: Any) -> int | None:
    if isinstance(argument, ctypes.Array | ctypes.Structure):  # passed by their address
        return ctypes.addressof(argument)
    referred = getattr(argument, "_obj", None)  # of ctypes.byref
    if referred is not None:
        return ctypes.addressof(referred)
    return (argument.value or 0) & _ALL_BITS if isinstance(argument, ctypes._SimpleCData) else None


def _runs(indices: Sequence[int]) -> list[range]:
    """Return adjacent indices as ranges.

    >>> _runs([0, 1, 2, 5, 7, 8])
    [range(0, 3), range(5, 6), range(7, 9)]
    """
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
