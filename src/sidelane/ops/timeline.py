"""Timelines of the programs of fused operators: computing, sending, waiting, each on a lane of its own."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch

from sidelane.device.stamps import KINDS
from sidelane.errors import UnavailableError
from sidelane.execute.timeline import Interval, write_chrome_trace
from sidelane.session import Communicator

LOCAL = "local"
"""Label of computation for the rank itself."""

END = KINDS.index("end")
MOST_STAMPS = 1 << 20


class Timeline:
    """Time stamps of every fused operator that all ranks call inside of ``with``. Collective.

    ::

        with ops.Timeline(comm) as timeline:
            ops.gemv_all_reduce(comm, weight, x)
        timeline.write("gemv.trace.json")  # for Perfetto

    Kernels with stamps are other kernels, compiled when first used and slower for small tiles; without a timeline
    kernels contain no stamps. The times of a GPU are those of its own global timer, and clocks of different GPUs are
    not aligned; CPU ranks have the clock of their host.

    Args:
        comm: communicator of the ranks.
        most_stamps: largest number of stamps of a program in one call; later ones are left out.

    Attributes:
        intervals: intervals of all ranks, once ``with`` has ended: group ``rank r``, lane ``workgroup w``, label
            ``compute for rank 1``, ``send to rank 1``, ``local``, ``add`` or ``wait``. Time 0 is the first stamp.
        dropped: number of stamps that had no place.

    Raises:
        ValueError: the number of stamps is out of range.
        RuntimeError: inside of another timeline of the communicator.
        UnavailableError: an operator is captured into a graph.
    """

    def __init__(self, comm: Communicator, *, most_stamps: int = 1024) -> None:
        if not 2 <= most_stamps <= MOST_STAMPS:
            raise ValueError(f"Timeline: most_stamps (value={most_stamps}, allowed=2..{MOST_STAMPS})")
        self.intervals: tuple[Interval, ...] = ()
        self.dropped = 0
        self._comm, self._most = comm, most_stamps
        self._buffers: list[torch.Tensor] = []

    def __enter__(self) -> Timeline:
        if Timeline in self._comm.cache:
            raise RuntimeError("Timeline: one inside of another; one is recorded at a time")
        self._buffers.clear()
        self._comm.cache[Timeline] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._comm.cache.pop(Timeline, None)
        if kind is None:
            self._collect()
        self._buffers.clear()

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the intervals as a Chrome trace, which Perfetto reads. Any rank may."""
        return write_chrome_trace(path, self.intervals)

    def buffer(self, programs: int) -> torch.Tensor:
        """Return the buffer for the stamps of one launch (``device.stamps``)."""
        device = self._comm.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnavailableError("Timeline: calls are eager; an operator is inside of a capture")
        made = torch.zeros(1 + programs * (1 + 2 * self._most), dtype=torch.int64, device=device)
        made[0] = self._most
        self._buffers.append(made)
        return made

    def _collect(self) -> None:
        comm = self._comm
        everyone = []
        for own in self._buffers:
            of_all = torch.empty(comm.world_size * own.numel(), dtype=torch.int64, device=comm.device)
            comm.all_gather(of_all, own)
            everyone.append(of_all.view(comm.world_size, -1))
        comm.synchronize()
        found: list[tuple[int, int, int, int, int]] = []  # rank, workgroup, code, from, to
        for of_all in everyone:
            for rank, words in enumerate(of_all.cpu()[:, 1:].view(comm.world_size, -1, 1 + 2 * self._most)):
                for workgroup, (count, *pairs) in enumerate(words.tolist()):
                    there = min(count, self._most)
                    self.dropped += count - there
                    times, codes = pairs[0 : 2 * there : 2], pairs[1 : 2 * there : 2]
                    spans = zip(codes, times, times[1:], strict=False)
                    found += [(rank, workgroup, code, start, stop) for code, start, stop in spans if code % 8 != END]
        first = min((start for *_, start, _ in found), default=0)
        self.intervals = tuple(
            Interval(
                f"rank {rank}",
                f"workgroup {workgroup}",
                label_of(code, rank),
                (start - first) / 1e3,
                (stop - first) / 1e3,
            )
            for rank, workgroup, code, start, stop in sorted(found)
        )


def stamps_of(comm: Communicator, programs: int) -> tuple[torch.Tensor | None, str]:
    """Return a buffer for the stamps of a launch if there is a timeline, and the word that ranks compare."""
    timeline: Timeline | None = comm.cache.get(Timeline)
    return (None, "") if timeline is None else (timeline.buffer(programs), " with stamps")


def label_of(code: int, rank: int) -> str:
    """Return the label of a stamp.

    >>> label_of(8 * (1 + 1) + KINDS.index("compute"), 0), label_of(8 * (1 + 1) + KINDS.index("compute"), 1)
    ('compute for rank 1', 'local')
    >>> label_of(8 * (1 + 1) + KINDS.index("send"), 0), label_of(KINDS.index("wait"), 0)
    ('send to rank 1', 'wait')
    """
    kind, peer = KINDS[code % 8], code // 8 - 1
    if kind == "compute" and peer == rank:
        return LOCAL
    return kind if peer < 0 else f"{kind} {'for' if kind in ('compute', 'wait') else 'to'} rank {peer}"
