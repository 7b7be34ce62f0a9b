"""Transports, which move the slices of a kernel between the ranks of different nodes.

Bytes follow their header on the same connection (:class:`SocketTransport`), or travel between the processes by
``torch.distributed`` (:class:`GroupTransport`: NCCL between GPUs).

A transport whose kernels reach the network card themselves (IBGDA, the device API of NCCL's GPU-initiated networking)
would have its place here too: its ``send`` would be a function of ``device`` in place of ``send_release``, with the
flag written behind the data by the card, and without ring and proxy. It is not built.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidelane.errors import PeerTimeoutError
from sidelane.ops.scale_out.connections import FarConnections, Gone


class SliceTransport(Protocol):
    """Moves the bytes of slices, for the two threads of a proxy: one sends, one receives.

    Attributes:
        uses_compute_units: it runs kernels on the GPU. Then no program of an operator may wait for it while others
            occupy the GPU: a ring must have room for all slices of a call.
        gives_up: function that returns True once it should wait no longer, and raise :class:`Gone`.
    """

    uses_compute_units: bool
    gives_up: Callable[[], bool]

    def attach(self) -> None:
        """Prepare a thread of the proxy."""
        ...

    def make_ready(self, values: torch.Tensor) -> None:
        """Make ready for values like these, [rows, columns], before any kernel waits: on a GPU, memory is allocated and
        kernels are loaded, which may wait for kernels that run.
        """
        ...

    def send(self, target: int, values: torch.Tensor) -> None:
        """Send contiguous values; return when they may be overwritten."""
        ...

    def receive(self, source: int, values: torch.Tensor) -> None:
        """Receive the next values from a rank, [rows, columns]; return when they are in place for all who look."""
        ...

    def close(self) -> None:
        """Release what it has made. Idempotent."""
        ...


class _Staging:
    """Memory of the device for values that arrive, by dtype: rows are copied from there to where they lie apart."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def make_ready(self, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        there = self._by_dtype.get(values.dtype)
        if there is None or there.numel() < values.numel():
            options = {"dtype": values.dtype, "device": values.device}
            self._by_dtype[values.dtype] = torch.zeros(values.numel(), **options)  # type: ignore[call-overload]
        values.copy_(self.like(values))
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """Return contiguous memory for such values, which the next use overwrites."""
        there = self._by_dtype.get(values.dtype)
        if there is None or there.numel() < values.numel():
            there = self._by_dtype[values.dtype] = values.new_empty(values.numel())
        return there[: values.numel()].view(values.shape)


class SocketTransport:
    """Sends slices behind their headers. Values of GPUs are copied by way of the host.

    Args:
        links: connections with the ranks of other nodes.
        device: device of the values.
    """

    def __init__(self, links: FarConnections, device: torch.device) -> None:
        self._links, self._device = links, device
        self.uses_compute_units = device.type == "cuda"  # a kernel copies rows that lie apart
        self.gives_up: Callable[[], bool] = lambda: False  # the links wait
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._staging = _Staging()

    def attach(self) -> None:
        """See :class:`SliceTransport`: the thread copies on a stream of its own."""
        if self._streams:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._streams.pop())

    def make_ready(self, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._staging.make_ready(values)

    def send(self, target: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._links.write(target, _bytes_of(values.cpu()))

    def receive(self, source: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        is_direct = values.device.type == "cpu" and values.is_contiguous()
        came = values if is_direct else torch.empty(values.shape, dtype=values.dtype, device="cpu")
        self._links.read(source, _bytes_of(came))
        if values.is_cuda and not values.is_contiguous():
            came = self._staging.like(values).copy_(came)
        if not is_direct:
            values.copy_(came)
            if values.is_cuda:
                torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """See :class:`SliceTransport`. The links are the proxy's."""


class GroupTransport:
    """Sends slices between processes by ``torch.distributed``: NCCL between GPUs, Gloo between CPU ranks.

    Two groups of the same ranks, one for each direction of a pair: NCCL runs the calls of a group between two ranks one
    after the other, so that two ranks that send before they receive would wait for each other.

    Args:
        up: group in which ranks send to those with higher numbers.
        down: group in which they send to those with lower numbers.
        rank: number of this rank.
        device: device of the values.
    """

    def __init__(self, up: dist.ProcessGroup, down: dist.ProcessGroup, rank: int, device: torch.device) -> None:
        self._groups, self._rank, self._device = (up, down), rank, device
        self.uses_compute_units = device.type == "cuda"
        self.gives_up: Callable[[], bool] = lambda: False
        self._staging = _Staging()

    def warm_up(self, fars: Sequence[int], timeout_s: float) -> None:
        """Connect every pair in both directions. Collective: memory is allocated, and kernels are loaded, which may not
        wait for an operator that waits for them.

        Raises:
            PeerTimeoutError: a rank did not answer within ``timeout_s``.
        """
        word, until = torch.zeros(1, device=self._device), time.monotonic() + timeout_s
        self.gives_up = lambda: time.monotonic() > until
        try:
            for group, is_up in zip(self._groups, (True, False), strict=True):
                works = []
                for far in sorted(fars):
                    sends = (far > self._rank) == is_up
                    works.append((far, group.send([word], far, 0) if sends else group.recv([word.clone()], far, 0)))
                for far, work in works:
                    self._wait(work, far)
        except Gone as gone:
            text = f"scale-out: rank {gone.rank} did not answer rank {self._rank} in {timeout_s:g} s"
            raise PeerTimeoutError(text, (gone.rank,)) from gone
        self.gives_up = lambda: False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def attach(self) -> None:
        """See :class:`SliceTransport`: the thread waits for its work on a stream of its own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device, priority=-1))

    def make_ready(self, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._staging.make_ready(values)

    def send(self, target: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._wait(self._groups[target < self._rank].send([values], target, 0), target)

    def receive(self, source: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        is_direct = values.is_contiguous()
        came = values if is_direct else self._staging.like(values)
        self._wait(self._groups[source > self._rank].recv([came], source, 0), source)
        if not is_direct:
            values.copy_(came)
            if values.is_cuda:
                torch.cuda.current_stream(self._device).synchronize()

    def _wait(self, work: Any, rank: int) -> None:
        """Wait for a transfer. The host of a GPU does so by looking: a stream's wait could not be given up."""
        if self._device.type != "cuda":
            try:
                work.wait()
            except RuntimeError as error:
                raise Gone(rank) from error
            return
        while not work.is_completed():
            if self.gives_up():
                raise Gone(rank)
            time.sleep(10e-6)
        work.wait()  # the thread's stream follows: what it copies next is there

    def close(self) -> None:
        """See :class:`SliceTransport`."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # a group that has failed
                group.abort()
        self._groups = ()  # type: ignore[assignment]


def _bytes_of(values: torch.Tensor) -> memoryview:
    found: Any = values.reshape(-1).view(torch.uint8).numpy()
    return memoryview(found)
