"""Tensors that stay, made where no memory pool of the calling thread gets hold of them.

``torch.compile(mode="reduce-overhead")`` runs compiled code once in the memory pool of the graph that it captures next,
and refuses whatever is left in there that is no output. What an operator makes at its first call and keeps (contexts,
counters, addresses) would be. Such pools take what their thread allocates, on its stream; so another thread makes it.

That waits for what it makes, on a stream of its own: a default stream may wait for peers that wait for this rank.

Nor is what is kept of ``torch.inference_mode``, should the first call be made there: later ones could not write to it.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """What ``make`` returns, its content written.

    Args:
        device: where ``make`` allocates. On CPUs the caller's thread calls it, as in a capture, whose mode may not let
            another one allocate.
        make: makes tensors; not the default device's but this one's.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # which is a thread's own
            return make()

    # Of this thread: another one has its own current device.
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
