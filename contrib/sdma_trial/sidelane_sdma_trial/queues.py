"""Queues of SDMA engines through ROCr: packets are written to their rings. Never run on AMD hardware.

ROCr has them since it has ``hsa_amd_queue_create`` (``hsa_ext_amd.h``, HSA AMD interface of mid-2026), which is where
the structures and constants below are from. Whoever submits packets keeps the ring: room, padding at its end, and one
store to the doorbell's signal behind the packets, with which ROCr publishes the write pointer and rings the doorbell.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from typing import Any

from sidelane.errors import Page, UnavailableError
from sidelane.memory.record import full_fence

LIBRARY_NAMES = ("libhsa-runtime64.so.1", "libhsa-runtime64.so")

QUEUE_BYTES = 256 << 10
"""Size of a ring in bytes."""

_SUCCESS, _DEVICE, _GPU = 0, 17, 1  # HSA_AGENT_INFO_DEVICE, HSA_DEVICE_TYPE_GPU
_BUS_ADDRESS, _DOMAIN = 0xA006, 0xA00F  # HSA_AMD_AGENT_INFO_BDFID, HSA_AMD_AGENT_INFO_DOMAIN
_VERSION, _SDMA, _NORMAL_PRIORITY, _ANY_ENGINE = 1, 1, 1, 0xFFFFFFFF


class QueueDescriptor(ctypes.Structure):
    """``hsa_amd_queue_create_desc_t``, version 1, with the arm of SDMA queues."""

    _fields_ = (
        ("version", ctypes.c_uint16),
        ("flags", ctypes.c_uint16),
        ("engine_type", ctypes.c_uint8),
        ("reserved_header", ctypes.c_uint8 * 3),
        ("queue_size_bytes", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
        ("callback", ctypes.c_void_p),
        ("callback_data", ctypes.c_void_p),
        ("queue", ctypes.c_void_p),
        ("engine_id", ctypes.c_uint32),
        ("reserved_engine", ctypes.c_uint32 * 7),
        ("traffic_class", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 20),
    )


class RingHeader(ctypes.Structure):
    """``hsa_queue_t``; the size of an SDMA queue is in bytes."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("base_address", ctypes.c_void_p),
        ("doorbell_signal", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("id", ctypes.c_uint64),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class GpuAgent:
    """A GPU as ROCr knows it.

    Attributes:
        handle: handle of the agent.
        domain: PCI domain.
        bus: PCI bus.
        device: PCI device.
    """

    handle: int
    domain: int
    bus: int
    device: int


class SdmaRuntime:
    """ROCr, as far as queues of SDMA engines go.

    Args:
        library: the loaded library; None loads it.

    Raises:
        UnavailableError: there is no ROCr, or one that offers no such queues.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = _load() if library is None else library
        if not hasattr(self._library, "hsa_amd_queue_create"):
            raise _unavailable("this ROCr has no hsa_amd_queue_create; a newer ROCm has")
        self._prototypes()
        self._call("hsa_init")
        self.agents = self._find_agents()

    def open(self, agent: GpuAgent, *, engine: int | None = None, nbytes: int = QUEUE_BYTES) -> SdmaQueue:
        """Create a queue.

        Args:
            agent: GPU whose engine executes it.
            engine: number of the engine; None leaves it to ROCr.
            nbytes: size of the ring, a power of two.

        Raises:
            UnavailableError: ROCr creates no such queue.
        """
        descriptor = QueueDescriptor(
            version=_VERSION,
            engine_type=_SDMA,
            queue_size_bytes=nbytes,
            priority=_NORMAL_PRIORITY,
            engine_id=_ANY_ENGINE if engine is None else engine,
        )
        self._call("hsa_amd_queue_create", agent.handle, ctypes.byref(descriptor), 1)
        return SdmaQueue(self._library, descriptor.queue)

    def close(self) -> None:
        """Release ROCr. Queues must be closed before."""
        self._call("hsa_shut_down")

    def _prototypes(self) -> None:
        library, handle, pointer = self._library, ctypes.c_uint64, ctypes.c_void_p
        for name, result, arguments in (
            ("hsa_init", ctypes.c_int, ()),
            ("hsa_shut_down", ctypes.c_int, ()),
            ("hsa_iterate_agents", ctypes.c_int, (_VISITOR, pointer)),
            ("hsa_agent_get_info", ctypes.c_int, (handle, ctypes.c_int, pointer)),
            ("hsa_amd_queue_create", ctypes.c_int, (handle, pointer, ctypes.c_uint32)),
            ("hsa_queue_destroy", ctypes.c_int, (pointer,)),
            ("hsa_queue_load_read_index_scacquire", ctypes.c_uint64, (pointer,)),
            ("hsa_queue_load_write_index_relaxed", ctypes.c_uint64, (pointer,)),
            ("hsa_signal_store_screlease", None, (handle, ctypes.c_int64)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise _unavailable(f"{name} returned {status:#x}")

    def _find_agents(self) -> tuple[GpuAgent, ...]:
        handles: list[int] = []

        def visit(handle: int, _: object) -> int:
            handles.append(handle)
            return _SUCCESS

        self._call("hsa_iterate_agents", _VISITOR(visit), None)
        return tuple(self._agent(handle) for handle in handles if self._info(handle, _DEVICE) == _GPU)

    def _agent(self, handle: int) -> GpuAgent:
        address = self._info(handle, _BUS_ADDRESS)
        return GpuAgent(handle, self._info(handle, _DOMAIN), address >> 8, address >> 3 & 31)

    def _info(self, handle: int, attribute: int) -> int:
        found = ctypes.c_uint32()
        self._call("hsa_agent_get_info", handle, attribute, ctypes.byref(found))
        return found.value


class SdmaQueue:
    """The ring of one queue, which one thread fills."""

    def __init__(self, library: Any, address: int) -> None:
        self._library, self._address = library, address
        header = RingHeader.from_address(address)
        self._base, self._nbytes, self._doorbell = header.base_address, header.size, header.doorbell_signal
        self._written = int(library.hsa_queue_load_write_index_relaxed(address))

    def submit(self, data: bytes, *, timeout_s: float = 10.0) -> None:
        """Hand packets over to the engine. What does not fit behind the last packet begins at the front of the ring.

        Raises:
            ValueError: no whole words, or more than half of the ring.
            TimeoutError: the engine has made no room in time.
        """
        if not data or len(data) % 4 or 2 * len(data) > self._nbytes:
            raise ValueError(
                f"submit: data (value={len(data)} bytes, allowed=whole words, at most {self._nbytes // 2})"
            )
        place = self._written % self._nbytes
        padding = self._nbytes - place if place + len(data) > self._nbytes else 0
        end = self._written + padding + len(data)
        deadline = time.monotonic() + timeout_s
        while end - self._read() >= self._nbytes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"submit: no room for {len(data)} bytes, {self.pending} bytes are not executed yet")
        # A word of 0 is a packet that does nothing.
        ctypes.memset(self._base + place, 0, padding)
        ctypes.memmove(self._base + (place + padding) % self._nbytes, data, len(data))
        full_fence()
        self._written = end
        self._library.hsa_signal_store_screlease(self._doorbell, end)

    @property
    def pending(self) -> int:
        """Bytes that the engine has not fetched yet. Fetched packets may still be under way."""
        return self._written - self._read()

    def close(self) -> None:
        """Destroy the queue, whatever is in it."""
        if self._address:
            self._library.hsa_queue_destroy(self._address)
            self._address = 0

    def _read(self) -> int:
        return int(self._library.hsa_queue_load_read_index_scacquire(self._address))


_VISITOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)


def _load() -> ctypes.CDLL:
    problems = []
    for name in LIBRARY_NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as problem:
            problems.append(str(problem))
    raise _unavailable(f"ROCr is not installed ({problems[0]})")


def _unavailable(problem: str) -> UnavailableError:
    return UnavailableError(f"queues of SDMA engines: {problem}", page=Page.INSTALLATION)
