"""Words between a kernel and the proxy of its rank: which slices are ready to leave, and whether a call is over.

A handle has its words in host memory, 32 bits each. They hold generations of launches, so none is ever reset::

    kernel   OPENED: its output may be written | READY, one for each slice that it sends: the slice may leave
    host     OVER: all slices have left and arrived

Each word has one writer. On a GPU they are pinned host memory, where no atomic operation of the GPU would be atomic for
the host. What a slice is (``Slices``) both sides know from the handle: a word needs no description beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sidelane.memory.record import full_fence
from sidelane.memory.release import deferred_bytes
from sidelane.memory.storage import persistent
from sidelane.program.wraparound import as_int32

OPENED, READY, OVER, STOP, STATUS, LOCAL_RANKS, ACQUIRED = range(7)
"""Indices of the 64-bit words of a kernel's inter-node context: addresses of a handle's words, OVER 0 if all ranks are
on this node; of the word that is not 0 once all waits end; of the status; of each rank's number on this node (-1:
elsewhere); and a word on which programs acquire."""

CONTEXT_WORDS = 7

LINE_WORDS = 16
"""Words of a cache line. Words of the kernel and words of the host have lines of their own."""


SLICE_BYTES = 1 << 20, 8 << 20
"""Least and largest number of bytes of a slice unless the caller sets its samples; one that all samples of all tables
for a rank lie below is smaller. A transfer of the least takes longer than the work of the hosts for it."""

SLICES = 8
"""Number of slices that the bytes for a rank are cut into, between these bounds: the first one leaves early, and each
is long enough for the network to be at its full rate (docs/internals/scale-out.md)."""


class Outgoing(NamedTuple):
    """A slice that this rank sends. ``number``: among those for its ``target``. It has ``size`` elements of the send
    buffer from ``first`` on; none if there is no such slice.
    """

    target: int
    number: int
    first: int
    size: int


class Arriving(NamedTuple):
    """A slice that arrives: ``rows`` of ``columns`` elements of the output, of which the first one is at ``first``; no
    rows if there is no such slice.
    """

    first: int
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a handle.

    Attributes:
        sent: those that this rank sends, in the order of their words.
        came: those that arrive, by their sender, in the order of their numbers.
        stride: distance of the rows of an arriving slice, in elements.
    """

    sent: tuple[Outgoing, ...]
    came: Mapping[int, tuple[Arriving, ...]]
    stride: int


def slice_of(samples: int, tables: int, row_bytes: int, slice_bags: int | None = None) -> tuple[int, int]:
    """Return the number of samples and of tables of a slice: samples that the caller set, of one table, or as many as
    an eighth of the bytes for a rank holds (``SLICE_BYTES`` bound it), first samples and then tables.

    Args:
        samples: largest number of samples of a rank.
        tables: largest number of tables of a rank.
        row_bytes: bytes of a sample of a table.
        slice_bags: samples that the caller set, if any.

    >>> slice_of(2048, 64, 512), slice_of(2048, 4, 1024), slice_of(64, 32, 1024), slice_of(64, 4, 1024, 16)
    ((2048, 8), (1024, 1), (64, 16), (16, 1))
    """
    if slice_bags:
        return min(samples, slice_bags), 1
    least, most = SLICE_BYTES
    nbytes = max(least, min(most, samples * tables * row_bytes // SLICES))
    bags = min(samples, max(1, nbytes // row_bytes))
    return bags, max(1, nbytes // (row_bytes * bags))


def slices_between(
    rank: int,
    remote_ranks: Sequence[int],
    counts: Sequence[int],
    samples: Sequence[int],
    dim: int,
    cut: tuple[int, int],
) -> Slices:
    """Return the slices of a rank and for it. Numbers count groups of tables, and in each groups of samples.

    Args:
        rank: the rank.
        remote_ranks: ranks on other nodes.
        counts: number of tables of each rank.
        samples: number of samples of each rank.
        dim: D, number of elements of a bag.
        cut: number of samples and of tables of a slice.

    >>> found = slices_between(0, (1,), (2, 1), (2, 2), 8, (2, 1))
    >>> found.sent
    (Outgoing(target=1, number=0, first=32, size=16), Outgoing(target=1, number=1, first=48, size=16))
    >>> found.came, found.stride
    ({1: (Arriving(first=16, rows=2, columns=8),)}, 24)
    """
    bags, some = cut

    def parts(owner: int, getter: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the first table, the tables, the first sample and the samples of each slice; none of those with which
        ranks with more samples go on.
        """
        for table in range(0, counts[owner], some):
            for sample in range(0, samples[0], bags):  # the first rank has most
                yield table, min(some, counts[owner] - table), sample, max(0, min(bags, samples[getter] - sample))

    sent, starts, width = [], list(itertools.accumulate(counts, initial=0)), sum(counts) * dim
    for target in remote_ranks:
        before = sum(samples[:target]) * counts[rank]
        for number, (table, tables, sample, part) in enumerate(parts(rank, target)):
            first = (before + table * samples[target] + sample * tables) * dim
            sent.append(Outgoing(target, number, first, part * tables * dim))
    came = {
        source: tuple(
            Arriving(sample * width + (starts[source] + table) * dim, part, tables * dim)
            for table, tables, sample, part in parts(source, rank)
        )
        for source in remote_ranks
    }
    return Slices(tuple(sent), came, width)


class HandleWords:
    """The words of a handle, in host memory.

    Args:
        slices: slices of the handle.
        device: device of its kernel.
    """

    def __init__(self, slices: Slices, device: torch.device) -> None:
        self.slices = slices
        self._over = -(-(1 + len(slices.sent)) // LINE_WORDS) * LINE_WORDS
        self._tensor = host_words(self._over + 1, device)
        self._words: npt.NDArray[np.int32] = self._tensor.numpy()
        self._exists = np.array([slice.size > 0 for slice in slices.sent], bool)

    def addresses(self) -> dict[int, int]:
        """Return the addresses of the words, by their indices in an inter-node context."""
        first = self._tensor.data_ptr()
        over = first + 4 * self._over
        return {OPENED: first, READY: first + 4, OVER: over if self.slices.came else 0}

    def is_open(self, epoch: int) -> bool:
        """Return True once the kernel lets others write in this generation."""
        return int(self._words[0]) == as_int32(epoch)

    def unsent(self) -> npt.NDArray[np.bool_]:
        """Return which slices there are, for :meth:`take_ready`."""
        return self._exists.copy()

    def take_ready(self, epoch: int, unsent: npt.NDArray[np.bool_], most: int) -> list[Outgoing]:
        """Return up to so many slices of a generation that may leave, and take them from ``unsent``."""
        ready = self._words[1 : 1 + len(unsent)] == as_int32(epoch)
        numbers = np.flatnonzero(ready & unsent)[:most].tolist()
        if numbers:
            unsent[numbers] = False
            full_fence()  # their bytes are read behind their words
        return [self.slices.sent[number] for number in numbers]

    def end(self, epoch: int) -> None:
        """Tell the kernel that all slices of a generation have left and arrived."""
        full_fence()
        self._words[self._over] = as_int32(epoch)


def host_words(count: int, device: torch.device) -> torch.Tensor:
    """Return words of host memory, int32 zeros, which kernels of the device reach by the same address."""
    pinned = device.type == "cuda"
    words = persistent(
        torch.device("cpu"), lambda: torch.zeros(count, dtype=torch.int32, device="cpu", pin_memory=pinned)
    )
    # Kernels may poll or write pinned words after the last reference: they are released behind the idle device.
    return deferred_bytes(words, device).view(torch.int32) if pinned else words
