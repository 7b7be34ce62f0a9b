"""Symmetric buffers that FSDP2 takes and drops, for its calls; and how it asks a process group for them.

``FSDPModule.set_allocate_memory_from_process_group_for_comm`` asks a group's backend for memory. The backends behind a
Sidelane group answer with symmetric memory, which the group's calls move without a copy to stage it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sidelane.errors import UnavailableError
from sidelane.memory.storage import storage_of
from sidelane.session import Communicator


class FsdpBuffers:
    """Symmetric buffers that FSDP2 takes and drops, by stream and size."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._free: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._lent: dict[int, bool] = {}  # by address: whether it comes back

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A symmetric buffer, which comes back when its last view has gone. Collective where all of them are in use.

        Where there is no room for one it is ordinary memory, on all ranks alike, and calls stage it.

        FSDP2 takes and drops its buffers in one order on all ranks, and orders the stream on which it takes one behind
        the work on those that it has dropped, as torch's allocator wants it, too. So what is free is free on all; but
        for what other backends were given: their threads let go of it when they get to it (Gloo's some time after
        ``wait`` has returned), so that goes back to the pool, whose ranks compare what they have dropped.
        """
        nbytes = max(1, math.prod(size) * dtype.itemsize)
        cuda = self._comm.device.type == "cuda"
        free = self._free.setdefault((torch.cuda.current_stream().cuda_stream if cuda else 0, nbytes), [])
        try:
            whole = free.pop(0) if free else self._comm.empty(nbytes, dtype=torch.uint8)
        except UnavailableError:
            return torch.empty(*size, dtype=dtype, device=self._comm.device)
        self._lent[whole.data_ptr()] = True
        part = storage_of(whole, 0, nbytes, lambda: self._came_back(free, whole))
        return part[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)

    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        """Another backend was given this tensor."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._lent:
            self._lent[address] = False

    def clear(self) -> None:
        """Let go of what is free."""
        self._free.clear()

    def _came_back(self, free: list[torch.Tensor], whole: torch.Tensor) -> None:
        if self._lent.pop(whole.data_ptr()):
            free.append(whole)


class BufferSource(Protocol):
    """Who has symmetric memory."""

    def has(self, device: torch.device) -> bool:
        """On such a device; alike on all ranks."""
        ...

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Of so many elements. Collective."""
        ...


class Allocating:
    """What a backend of torch answers when it is asked for memory; in front of its own class.

    Attributes:
        source: has it, as long as its group lives; None for ordinary memory.
    """

    source: Callable[[], BufferSource | None] = staticmethod(lambda: None)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """There is memory for calls on such a device."""
        source = self.source()
        return source is not None and source.has(torch.device(device))

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of so many elements. Collective."""
        source = self.source()
        if source is None:
            return torch.empty(size, dtype=dtype, device=device)
        return source.take(size, dtype, torch.device(device))


class Communicators(Protocol):
    """Who has the communicators of a group."""

    def for_memory(self, device: torch.device) -> Communicator | None:
        """That of the group on a device, which is made where there is none; None where there can be none."""
        ...

    def no_memory(self, device: str) -> str:
        """Why there is none on such a device, as far as one knows; "" for no reason."""
        ...


class GroupMemory:
    """Symmetric memory of the communicators of a group. Ranks take and drop it in one order, as FSDP2 does.

    An allocation behind one that is as many times as large as there are ranks gets ordinary memory: it is what FSDP2
    scatters into, which becomes the gradient, and is dropped when the program likes.

    Args:
        size: of the group.
        communicators: of the group.
    """

    def __init__(self, size: int, communicators: Communicators) -> None:
        self._size, self._communicators = size, communicators
        self._buffers: dict[str, FsdpBuffers] = {}
        self._last: int | None = None

    def has(self, device: torch.device) -> bool:
        return not self._communicators.no_memory(device.type)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_output, self._last = self._last == numel * self._size, numel
        made = None if is_output else self._communicators.for_memory(device)
        if made is None:
            self._last = None if is_output else numel
            return torch.empty(numel, dtype=dtype, device=device)
        if device.type == "cpu":  # threads that make calls let go of tensors when they get to it
            try:
                return made.empty(numel, dtype=dtype)
            except UnavailableError:
                return torch.empty(numel, dtype=dtype, device=device)
        return self._buffers.setdefault(device.type, FsdpBuffers(made)).take([numel], dtype)

    def went_elsewhere(self, tensors: Sequence[torch.Tensor]) -> None:
        """Another backend was given these."""
        for buffers in self._buffers.values():
            for tensor in tensors:
                if tensor.layout is torch.strided:  # others have no storage
                    buffers.is_not_to_come_back(tensor)

    def clear(self) -> None:
        """Let go of what is free."""
        self._buffers.clear()
