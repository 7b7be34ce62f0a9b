"""Choice of the memory through which the GPUs of a communicator reach each other: their own, or host memory.

Each rank names its GPU and those that its GPU reaches. All ranks decide by the same posts: one pair of ranks without
access, and host memory is between all of them. A pair that no rank knows about counts as one with access, since a
process that sees its own GPU only may well map the memory of the others; making the memory then tells.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from sidelane.config import CHOSEN, HOST, name_of
from sidelane.machine.inventory import Accelerators

GpuAccess = tuple[str, Mapping[str, bool]]
"""Identity of a rank's GPU, and for other GPUs by their identity whether it reaches their memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory through which the GPUs of all ranks reach each other; the same on all ranks.

    Attributes:
        through_host: it is host memory, and GPUs do not use each other's.
        reason: reason for it, in words.
        is_mixed: some pairs of GPUs reach each other's memory, and take host memory all the same.

    >>> str(PeerMemory(True, "no GPU reaches another one's memory"))
    "host memory (no GPU reaches another one's memory)"
    """

    through_host: bool = False
    reason: str = "CPU ranks share it"
    is_mixed: bool = False

    def __str__(self) -> str:
        return f"{'host memory' if self.through_host else 'their own memory'} ({self.reason})"


SHARED = PeerMemory()
"""Memory between CPU ranks."""


def between(found: Accelerators, setting: str) -> PeerMemory:
    """Return the memory between the GPUs of this machine, a rank on each, without the ranks."""
    if setting != CHOSEN:
        return forced(setting)
    rows = [{str(peer): reached for peer, reached in enumerate(row)} for row in found.peer_access]
    return decide([(str(gpu), row) for gpu, row in enumerate(rows)])


def forced(setting: str) -> PeerMemory:
    """Return the memory that a setting other than ``auto`` asks for."""
    return PeerMemory(setting == HOST, f"{name_of('peers', setting)} is {setting!r}")


def decide(ranks: Sequence[GpuAccess]) -> PeerMemory:
    """Return the memory between the GPUs of these ranks, at least one.

    >>> decide([("a", {})]).through_host
    False
    >>> decide([("a", {"b": False}), ("b", {"a": False})]).reason
    "no GPU reaches another one's memory"
    >>> decide([("a", {"b": True}), ("b", {"a": True})]).reason
    "all GPUs reach each other's memory"
    """
    pairs = list(itertools.combinations(range(len(ranks)), 2))
    known = {pair: _reach(*(ranks[rank] for rank in pair)) for pair in pairs}
    without = [pair for pair, reached in known.items() if reached is False]
    unknown = [pair for pair, reached in known.items() if reached is None]
    if without and len(without) == len(pairs):
        return PeerMemory(True, "no GPU reaches another one's memory")
    if without:
        first = f"{len(without)} of {len(pairs)} pairs of GPUs do not reach each other's memory"
        named = ", ".join(f"{low} and {high}" for low, high in without[:4])
        reason = f"{first} (ranks {named}{', ...' if without[4:] else ''}), so all pairs take it"
        return PeerMemory(True, reason, is_mixed=True)
    if unknown:
        return PeerMemory(False, f"no rank sees the GPUs of {len(unknown)} of {len(pairs)} pairs, which may reach it")
    return PeerMemory(False, "all GPUs reach each other's memory")


def _reach(low: GpuAccess, high: GpuAccess) -> bool | None:
    """Return whether two ranks' GPUs reach each other's memory; None if neither rank knows. One GPU reaches itself."""
    if low[0] == high[0]:
        return True
    found = [reached for reached in (low[1].get(high[0]), high[1].get(low[0])) if reached is not None]
    return all(found) if found else None
