"""A control block of ranks that share a process: who has begun and ended which call, who is dead, who gave up."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from sidelane.errors import PeerError, PeerTimeoutError


class Monitor:
    """The state that the ranks of a made-up control block share.

    Attributes:
        aborted: the text of the first rank that gave up, the ranks at fault, and whether it was a time-out.
        refused: by whom, by call.
        warned: title and late ranks of waits that lasted longer than ``warn_s``, by rank and call.
    """

    def __init__(self, world_size: int) -> None:
        self.lock = threading.Lock()
        self.begun_calls, self.ended_calls = [0] * world_size, [0] * world_size
        self.notes: list[tuple[int, int, str]] = []
        self.aborted: tuple[str, tuple[int, ...], bool] | None = None
        self.dead: set[int] = set()
        self.refused: dict[int, int] = {}
        self.warn_s = 30.0
        self.warned: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    def of(self, rank: int) -> RankMonitor:
        return RankMonitor(self, rank)


class RankMonitor:
    """The methods of a ``ControlBlock`` that executors call."""

    def __init__(self, shared: Monitor, rank: int) -> None:
        self.shared, self.rank = shared, rank

    def begin(self, call: int, step: str) -> None:
        self.shared.begun_calls[self.rank] = call

    def note(self, call: int, step: str) -> None:
        with self.shared.lock:
            self.shared.notes.append((self.rank, call, step))

    def end(self, call: int) -> None:
        self.shared.ended_calls[self.rank] = call

    def check_present(self, call: int) -> None:
        if self.shared.aborted:
            text, ranks, timed_out = self.shared.aborted
            raise (PeerTimeoutError if timed_out else PeerError)(text, ranks)
        for rank in self.shared.dead:
            raise PeerError(f"rank {rank} died", (rank,))

    def check(self, call: int) -> None:
        self.check_present(call)
        if self.shared.refused.get(call, self.rank) != self.rank:
            rank = self.shared.refused[call]
            raise PeerError(f"rank {rank} refused call {call}", (rank,))

    def absent(self, call: int) -> Sequence[int]:
        return [rank for rank, begun in enumerate(self.shared.begun_calls) if begun < call]

    def at_fault(self, ranks: Sequence[int]) -> Sequence[int]:
        return ranks

    def lasts(self, call: int, title: str, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        if waited_s > self.shared.warn_s:
            self.shared.warned.setdefault((self.rank, call), (title, tuple(ranks)))

    def describe(self, rank: int, call: int = 0) -> str:
        return f"rank {rank} (in call {self.shared.begun_calls[rank]})"

    def abort(self, message: str, ranks: Sequence[int] = (), *, timed_out: bool = False) -> None:
        with self.shared.lock:
            if self.shared.aborted is None:
                text = f"rank {self.rank} gave up: {message}"
                self.shared.aborted = (text, tuple(ranks) or (self.rank,), timed_out)
