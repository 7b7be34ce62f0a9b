"""Persistent tensors, allocated outside of any memory pool of the calling thread.

``torch.compile(mode="reduce-overhead")`` runs compiled code once in the memory pool of the graph that it captures next,
and refuses tensors that remain there and are no outputs. Tensors that an operator makes at its first call and keeps
(contexts, counters, addresses) would remain. Such pools serve allocations of their own thread, on its stream. So
another thread allocates persistent tensors.

That thread waits for their content on a stream of its own: a default stream may wait for peers that wait for this rank.

Persistent tensors are no inference tensors even if the first call is made in ``torch.inference_mode``, since later
calls could not write to them.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """Return the tensors that ``make`` returns, allocated persistently and with their content written.

    Args:
        device: device on which ``make`` allocates. On CPUs the caller's thread calls ``make``; also in a capture,
            whose mode may forbid allocations of other threads.
        make: makes the tensors on this device, not on torch's default device.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # the mode is thread-local: other threads need not leave it
            return make()

    # Found here, since another thread has its own current device.
    index = torch.cuda.current_device() if device.index is None else device.index

    def apart() -> T:
        stream = _stream_of(index)
        with torch.cuda.device(index), torch.cuda.stream(stream):
            made = make()
            stream.synchronize()
            return made

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(apart).result()


@functools.cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)
