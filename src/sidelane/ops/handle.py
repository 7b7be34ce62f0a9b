"""Common parts of fused operators: objects kept on a communicator, turns of their buffers, and checks of arguments
before any transfer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from sidelane.errors import UnavailableError
from sidelane.execute.base import CallerStream
from sidelane.ops.timeline import Timeline
from sidelane.session import Communicator
from sidelane.session.own_kernel import OwnKernel, RepeatedLaunch, load_kernel

H = TypeVar("H")


class RefusingRanks(Protocol):
    """A communicator, or the ranks of several nodes."""

    def refuse(self, name: str, error: Exception) -> None:
        """See ``Communicator.refuse``."""
        ...


_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if kernels of this process are interpreted; Triton reads the same variable when it makes them."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)

AMD_UNIT_SIMDS = 4
"""Number of SIMD units of a compute unit of CDNA GPUs, among which it spreads its wavefronts (``waves_per_eu``)."""

INTERPRETED_PROGRAMS = 3
"""Programs of a grid on CPU ranks, which run one after the other: enough for them to differ."""


class KernelHandle:
    """A kernel, and the other resources of an operator for a shape."""

    comm: Communicator
    kernel: OwnKernel

    def _repeats(self, repeated: RepeatedLaunch | None, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Make the cached launch on tensors. False without one, and while a timeline is recorded: nothing was done."""
        if repeated is None or not repeated.runs or Timeline in self.comm.cache:
            return False
        return self.kernel.repeat(repeated, tensors)

    def close(self) -> None:
        """Release flags and workspace, once this rank's calls have ended. Idempotent, and no collective."""
        self.kernel.close()


class BufferLock:
    """Context manager around each use of an operator's buffers, whatever streams the uses come on. A use on another
    stream waits for the end of the one before, on the device.

    Calls of a communicator are ordered behind each other, but an operator's computation before and after a call is work
    of the caller's stream: a second use on another stream would overwrite bytes that the first one still sends::

        stream A   compute into the buffer | its copies, on a stream of the lane | read the results | end
        stream B                                                                          | compute into the buffer

    Uses on one stream follow each other anyway, and cost no call of the driver. Once there have been two streams, the
    end of each use is an event. The first time the event stands behind all work that the other stream had by then, as
    between calls of a communicator.

    A graph under capture can wait for nothing outside of it, so each capture has a lock of its own.
    The caller orders its replays.

    Args:
        caller: function that returns the caller's stream and whether it is captured.
        capture_of: function that returns the number of the capture of a caller's stream, never used twice.
        stream: function that returns the caller's stream; called only if it has changed.
    """

    def __init__(
        self, caller: Callable[[], CallerStream], capture_of: Callable[[CallerStream], int], stream: Callable[[], Any]
    ) -> None:
        self._caller_of, self._capture_of, self._stream_of = caller, capture_of, stream
        self._last: dict[int, _Use] = {}  # of eager calls, under 0, and of the latest capture
        self._caller: CallerStream = (0, False)
        self._capture = 0
        self._has_several = False

    def __enter__(self) -> None:
        caller = self._caller = self._caller_of()
        capture = self._capture = self._capture_of(caller) if caller[1] else 0
        last = self._last.get(capture)
        if last is None or last.caller == caller:
            return
        self._has_several = True
        ended = last.ended
        if ended is None and self._capture_of(last.caller) == capture:
            ended = last.stream.record_event()
        if ended is not None:  # otherwise a graph was begun there since, which nothing outside can follow
            self._stream_of().wait_event(ended)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        caller, capture = self._caller, self._capture
        if capture and kind is not None:
            return  # that graph will not exist
        last = self._last.get(capture)
        if last is not None and last.caller == caller and not self._has_several:
            return
        if last is None or last.caller != caller:
            if capture:  # earlier captures have ended
                self._last = {number: use for number, use in self._last.items() if number in (0, capture)}
            last = self._last[capture] = _Use(caller, self._stream_of())
        if self._has_several:
            last.ended = last.stream.record_event()


class _Use:
    """The last use of a capture, or of all eager calls. ``ended``: event of its end, None until it is needed."""

    __slots__ = ("caller", "ended", "stream")

    def __init__(self, caller: CallerStream, stream: Any) -> None:
        self.caller, self.stream = caller, stream
        self.ended: Any = None


def buffer_lock(comm: Communicator) -> BufferLock:
    """Return the lock of an operator's buffers. On CPU ranks calls end before they return, and share one stream."""
    backend, device = comm.backend, comm.device
    if device.type == "cpu":
        return BufferLock(backend.caller_stream, backend.capture_of, lambda: None)
    return BufferLock(backend.caller_stream, backend.capture_of, lambda: torch.cuda.current_stream(device))


@contextlib.contextmanager
def reporting_refusals(comm: RefusingRanks, name: str) -> Iterator[None]:
    """Tell the peers about an exception inside: it keeps this rank from its next call."""
    try:
        yield
    except Exception as error:
        comm.refuse(name, error)
        raise


@contextlib.contextmanager
def refusing_tiles(name: str, tiles: object) -> Iterator[None]:
    """Raise UnavailableError if Triton cannot make the kernel that is launched inside, or this GPU has no room for it.

    Args:
        name: name of the operator.
        tiles: tile sizes of the kernel.
    """
    try:
        yield
    except Exception as error:
        from triton.compiler.errors import CompilationError  # a kernel was launched, so Triton is there
        from triton.runtime.errors import OutOfResources, PTXASError

        # Triton's passes fail with a bare RuntimeError.
        if isinstance(error, CompilationError | OutOfResources | PTXASError) or (
            type(error) is RuntimeError and "PassManager" in str(error)
        ):
            said = str(error).strip().partition("\n")[0]
            problem = f"Triton cannot make the kernel, try other tile sizes (value={tiles}): {said}"
            raise UnavailableError(f"{name}: {problem}") from error
        raise


def is_captured(comm: Communicator) -> bool:
    """Return True while a graph records the caller's stream."""
    return comm.device.type == "cuda" and _is_capturing()


def cached_object(comm: Communicator, key: Hashable, make: Callable[[], H]) -> H:
    """Return an operator's object in the cache of a communicator; all ranks make it together on first use.

    It is made outside of inference mode, so that later calls in any mode can write to it.
    """
    found: H | None = comm.cache.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = comm.cache[key] = make()
    return found


def compare_shapes(comm: Communicator, name: str, shape: Hashable) -> None:
    """Compare an operator's shape with the peers' where it is not that of this rank's last call. Not in a capture.

    Calls that are known are not compared, so that ranks of different shapes would wait for each other in vain. Here a
    rank whose shape has changed waits for the hosts of its peers, and raises MismatchError; a peer whose shape is the
    old one raises PeerError with the same text while it waits.

    Args:
        comm: communicator of the ranks.
        name: name of the operator, or of its part.
        shape: all that must be the same on every rank.
    """
    if comm.cache.get((compare_shapes, name)) != shape and not is_captured(comm):
        comm.agree(name, f"{name}: {shape}")
        comm.cache[compare_shapes, name] = shape


def load_with_cells(comm: Communicator, kernel: Any, count: int) -> tuple[OwnKernel, torch.Tensor, torch.Tensor]:
    """Load a kernel, and make cells (``device/flagged.py``), all 0, in memory that peers reach. Collective.

    Args:
        comm: communicator of the ranks.
        kernel: the function that ``triton.jit`` made; it needs no flags.
        count: number of cells on each rank.

    Returns:
        The kernel, the cells of this rank, and the addresses of those of all ranks.
    """
    if comm.backend.peers.through_host:
        loaded = load_kernel(comm.path, kernel, 0, 8 * count)
        own, addresses = loaded.shared()
        return loaded, own.view(torch.int64), addresses
    cells = comm.empty(count, dtype=torch.int64)
    cells.zero_()
    loaded = comm.load_kernel(kernel, flags=0)
    addresses = comm.peers(cells)  # now, as the first launch may be captured
    comm.barrier()  # all cells are 0 before any is written
    return loaded, cells, addresses


def programs_of(comm: Communicator, needed: int, per_unit: int) -> int:
    """Return the programs of a persistent grid: at most ``needed``, and ``per_unit`` on each compute unit."""
    if comm.device.type == "cpu":
        return max(1, min(needed, INTERPRETED_PROGRAMS))
    units = torch.cuda.get_device_properties(comm.device).multi_processor_count
    return max(1, min(needed, units * per_unit))


def register_limit(registers: int, warps: int, per_unit: int) -> dict[str, int]:
    """Return the option of Triton with which ``per_unit`` programs fit on a compute unit at the same time.

    Args:
        registers: number of registers of a thread with which they fit on NVIDIA GPUs.
        warps: number of warps of a program.
        per_unit: number of programs on a compute unit.
    """
    if torch.version.hip is None:
        return {"maxnreg": registers}
    return {"waves_per_eu": -(-warps * per_unit // AMD_UNIT_SIMDS)}


def check_tensor(
    name: str, what: str, tensor: object, device: torch.device, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...]
) -> torch.Tensor:
    """Return an object as the tensor that it is, of such dtypes and dimensions on the device.

    Raises:
        TypeError: it is no tensor, or has another dtype.
        ValueError: it is on another device, or has other dimensions.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: {what} (value={type(tensor).__name__}, allowed=a tensor)")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype of {what} (value={tensor.dtype}, allowed={', '.join(map(str, dtypes))})")
    if tensor.device != device:
        raise ValueError(f"{name}: device of {what} (value={tensor.device}, allowed={device})")
    if tensor.dim() not in dims:
        allowed = " or ".join(map(str, dims))
        raise ValueError(f"{name}: dimensions of {what} (value={tensor.dim()}, allowed={allowed})")
    return tensor


def check_choice(name: str, what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not allowed. Raises ValueError."""
    if value not in allowed:
        raise ValueError(f"{name}: {what} (value={value!r}, allowed={', '.join(allowed)})")


def check_tiles(name: str, what: str, value: object, kind: type) -> None:
    """Refuse tile sizes of a kernel that are of another type. Raises TypeError."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}: {what} (value={value!r}, allowed={kind.__name__}, None)")


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is no less.

    >>> [power_of_two(number) for number in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << max(0, number - 1).bit_length()
