"""Rows of collectives that run alone, as nccl-tests has them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sidelane_lab.harness.rows import IMPLEMENTATIONS, LAUNCHES, SEPARATE, Allowed, FlatRow


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveRow(FlatRow):
    """One line of a table like that of nccl-tests.

    Attributes:
        bytes: gathered size for an all_gather, the whole local buffer for the others.
        variant: algorithm within the implementation (``pcpy``, ``b2b``, ...; empty where there is one only). With
            ``separate`` or ``+separate``: a call for each tensor of the list, one behind the other, instead of one call
            (NCCL: one group of calls) with all of them.
        time_us: of all calls for the bytes, median over the rounds of the slowest rank's time; p10_us and p90_us
            likewise.
        bus_gbps: see :func:`bus_gbps`.
        energy_mj: of all GPUs for one call; None when it was not measured.
        correct: outputs were compared with a reference in this run; None when it could not run.
        note: why there is no time, or what to know about this one.
        tensors: that share the bytes: 1 where a call takes one tensor, as in files without this key; otherwise the
            length of a list.
    """

    allowed: ClassVar[Allowed] = (("launch", LAUNCHES), ("implementation", IMPLEMENTATIONS))
    figures: ClassVar[tuple[str, ...]] = ("time_us", "bus_gbps")

    collective: str
    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    prelaunch: bool
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    bus_gbps: float | None
    energy_mj: float | None
    correct: bool | None
    note: str = ""
    tensors: int = 1

    def __post_init__(self) -> None:
        FlatRow.__post_init__(self)
        if self.bytes < 0:
            raise ValueError(f"CollectiveRow: bytes must not be negative (value={self.bytes})")
        if self.tensors < 1:
            raise ValueError(f"CollectiveRow: tensors (value={self.tensors}, allowed=1 and more)")

    @property
    def separate(self) -> bool:
        """A list, in a call for each tensor."""
        return self.variant.rpartition("+")[2] == SEPARATE


def bus_gbps(collective: str, nbytes: int, ranks: int, time_us: float) -> float:
    """Bus bandwidth as nccl-tests defines it (its PERFORMANCE.md): comparable over collectives and numbers of ranks.

    >>> bus_gbps("all_gather", 4_000_000_000, 4, 10_000.0)
    300.0
    """
    shares = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    return nbytes / (time_us * 1e3) * shares.get(collective, (ranks - 1) / ranks)
