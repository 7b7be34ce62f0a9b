"""Transport, which moves the slices of a kernel between the ranks of different nodes.

It sends them between the processes by ``torch.distributed``. Another one has the methods of :class:`GroupTransport`.

A transport whose kernels reach the network card themselves (IBGDA, the device API of NCCL's GPU-initiated networking)
would have its place here too: its ``send`` would be a function of ``device`` in place of ``send_release``, with a
word written behind the data by the card, and without proxy. It is not built.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sidelane.errors import PeerTimeoutError
from sidelane.ops.scale_out.connections import Gone

WINDOW = 16
"""Largest number of transfers that a proxy has under way in each direction. Staging memory is made for so many."""


class _Slot(NamedTuple):
    """Memory of the device for values that arrive, from where rows are copied to where they lie apart, and the event
    behind that copy (on a GPU).
    """

    memory: torch.Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, values: torch.Tensor) -> _Slot:
        """Make a slot for values like these."""
        copied = torch.cuda.Event() if values.is_cuda else None
        if copied is not None:
            copied.record()  # which makes it
        return cls(torch.zeros(values.numel(), dtype=values.dtype, device=values.device), copied)


class GroupTransport:
    """Sends slices between processes by ``torch.distributed``: NCCL between GPUs, Gloo between CPU ranks.

    A proxy has two threads, of which one sends and one receives. Each has up to ``WINDOW`` transfers under way. Those
    from one rank to another keep their order. A rank that is gone raises ``Gone``.

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
        self._slots: dict[torch.dtype, list[_Slot]] = {}

    def warm_up(self, remote_ranks: Sequence[int], timeout_s: float) -> None:
        """Connect every pair in both directions. Collective: memory is allocated, and kernels are loaded, which may not
        wait for an operator that waits for them.

        Raises:
            PeerTimeoutError: a rank did not answer within ``timeout_s``.
        """
        word, until = torch.zeros(1, device=self._device), time.monotonic() + timeout_s
        try:
            for group, is_up in zip(self._groups, (True, False), strict=True):
                works = []
                for remote in sorted(remote_ranks):
                    sends = (remote > self._rank) == is_up
                    work = group.send([word], remote, 0) if sends else group.recv([word.clone()], remote, 0)
                    works.append(Transfer(work, remote, self._can_be_polled))
                for transfer in works:
                    while not transfer.is_done():  # the wait of a stream could not be given up
                        if time.monotonic() > until:
                            raise Gone(transfer.rank)
                        time.sleep(10e-6)
                    transfer.finish()
        except Gone as gone:
            text = f"scale-out: rank {gone.rank} did not answer rank {self._rank} in {timeout_s:g} s"
            raise PeerTimeoutError(text, (gone.rank,)) from gone
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def attach(self) -> None:
        """Prepare a thread of the proxy: it waits for its work on a stream of its own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device, priority=-1))

    def make_ready(self, values: torch.Tensor) -> None:
        """Make ready for values like these, [rows, columns], before any kernel waits: on a GPU, memory is allocated and
        kernels are loaded, which may wait for kernels that run. Each transfer that may be under way has a slot.

        PyTorch copies rows that lie apart by a kernel, which the first such copy loads. The first slice of all would
        have that copy wait for the operator's kernel, which waits for the slice.
        """
        slots = self._slots.get(values.dtype, [])
        if len(slots) < WINDOW or slots[0].memory.numel() < values.numel():
            self._slots[values.dtype] = [_Slot.of(values) for _ in range(WINDOW)]
        apart = values.new_empty(2, 3)[:, :2]
        apart.copy_(values.new_zeros(2, 2))
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    def send(self, target: int, values: torch.Tensor) -> Transfer:
        """Begin to send contiguous values."""
        return Transfer(self._groups[target < self._rank].send([values], target, 0), target, self._can_be_polled)

    def receive(self, source: int, values: torch.Tensor) -> Transfer:
        """Begin to receive the next values from a rank, [rows, columns]."""
        group = self._groups[source > self._rank]
        if values.is_contiguous():
            return Transfer(group.recv([values], source, 0), source, self._can_be_polled)
        slots = self._slots[values.dtype]
        slot = slots.pop()
        work = group.recv([slot.memory[: values.numel()]], source, 0)
        return StagedTransfer(work, source, self._can_be_polled, slots, slot, values)

    def exchange(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Sequence[int], given_sizes: Sequence[int]
    ) -> Transfer:
        """Begin an all-to-all of all ranks of the group while no slices are under way: for operators that are not
        fused. Tensors are contiguous and have one dimension; sizes, one for each rank, are those of their parts.
        """
        # Gloo does not take every dtype, so these are bytes.
        to, by = ([size * output.itemsize for size in sizes] for sizes in (output_sizes, given_sizes))
        work = self._groups[0].alltoall_base(output.view(torch.uint8), given.view(torch.uint8), to, by)
        return Transfer(work, self._rank, self._can_be_polled)

    @property
    def _can_be_polled(self) -> bool:
        """NCCL tells whether a transfer has ended; Gloo only lets one wait for it."""
        return self._device.type == "cuda"

    def close(self) -> None:
        """Release what it has made. Idempotent."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # a group that has failed
                group.abort()
        self._groups = ()  # type: ignore[assignment]


class Transfer:
    """A slice under way. The thread that began it asks for its end.

    Args:
        work: what ``torch.distributed`` returned.
        rank: the other rank.
        can_be_polled: the work can be asked whether it has ended.
    """

    def __init__(self, work: Any, rank: int, can_be_polled: bool) -> None:
        self._work, self.rank, self._can_be_polled = work, rank, can_be_polled

    def is_done(self) -> bool:
        """Return True once :meth:`finish` need not wait, as far as the transport can tell. Raises :class:`Gone`."""
        return not self._can_be_polled or self._has_come()

    def finish(self) -> None:
        """End the transfer: what was sent may be overwritten, what was received is in place for all who look. Called
        once, after :meth:`is_done`. Raises :class:`Gone`.
        """
        try:
            self._work.wait()  # on a GPU, the thread's stream follows
        except RuntimeError as error:
            raise Gone(self.rank) from error

    def _has_come(self) -> bool:
        try:
            return bool(self._work.is_completed())
        except RuntimeError as error:
            raise Gone(self.rank) from error


class StagedTransfer(Transfer):
    """A transfer of values that arrive in a slot and are copied to where their rows lie apart."""

    def __init__(
        self, work: Any, rank: int, can_be_polled: bool, slots: list[_Slot], slot: _Slot, values: torch.Tensor
    ) -> None:
        super().__init__(work, rank, can_be_polled)
        self._slots, self._slot, self._values, self._is_copying = slots, slot, values, False

    def is_done(self) -> bool:
        """See :class:`Transfer`. On a GPU the copy begins when the bytes have come; other transfers go on."""
        copied = self._slot.copied
        if copied is None:
            return super().is_done()
        if not self._is_copying:
            if not self._has_come():
                return False
            self._copy()
            copied.record()
            self._is_copying = True
        return bool(copied.query())

    def finish(self) -> None:
        """See :class:`Transfer`."""
        if not self._is_copying:
            self._copy()
        self._slots.append(self._slot)

    def _copy(self) -> None:
        super().finish()
        self._values.copy_(self._slot.memory[: self._values.numel()].view(self._values.shape))
