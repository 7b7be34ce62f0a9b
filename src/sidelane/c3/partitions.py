"""Streams of a pair on an accelerator, and partitions that keep a GEMM off some compute units."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from sidelane.c3.strategies import SPARED, Partition
from sidelane.errors import SidelaneError
from sidelane.execute.cuda.partition import cublas
from sidelane.execute.vendor import make_driver

if TYPE_CHECKING:
    from sidelane.execute.cuda.partition import UnitSplit

SMALLEST_SHARE = 8
"""Smallest number of units in a sweep of partitions (ConCCL paper, V-B); Hopper partitions SMs in this granularity."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairStreams:
    """Streams of pairs; make them once a process, since torch hands out a limited number in turn.

    Attributes:
        gemm: stream of the GEMM.
        collective: stream of a collective without priority.
        urgent: stream of a collective that goes before the GEMM.
    """

    gemm: torch.cuda.Stream
    collective: torch.cuda.Stream
    urgent: torch.cuda.Stream


class DevicePartitions:
    """Partitions of a GPU, by green contexts (NVIDIA) or CU masks (AMD); each is made once.

    Args:
        device: current device.

    Attributes:
        units: number of units of the device.

    Raises:
        UnavailableError: the vendor's library is missing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = make_driver(device)
        self.units = self._driver.attribute("MULTIPROCESSOR_COUNT")
        self._splits: dict[int, UnitSplit] = {}

    @staticmethod
    def on(device: torch.device) -> tuple[DevicePartitions | None, str]:
        """Return the partitions of a device, or None and the reason."""
        if device.type == "cpu":
            return None, "on a CPU no units are taken from a GEMM (no green contexts)"
        try:
            return DevicePartitions(device), ""
        except SidelaneError as problem:
            return None, str(problem)

    def objection(self) -> str:
        """Return the reason why there are no partitions, which is found out by making one; empty if there are."""
        try:
            self._split(SMALLEST_SHARE)
        except SidelaneError as problem:
            return str(problem)
        return ""

    def streams(self, units: int, usual: PairStreams, *, confine: bool) -> PairStreams:
        """Return streams for a pair whose GEMM lacks ``units``; with ``confine``, the collective gets only these.

        Raises:
            UnavailableError, DriverError: no such partition.
        """
        split = self._split(units)
        gemm = self._stream(split.left.stream)
        if not confine:
            return dataclasses.replace(usual, gemm=gemm)
        return PairStreams(gemm, self._stream(split.taken.stream), self._stream(split.taken.urgent))

    def is_ready(self, units: int) -> bool:
        """Return True if the streams of a partition need not be made first."""
        return units in self._splits

    def _split(self, units: int) -> UnitSplit:
        if units not in self._splits:
            self._splits[units] = self._driver.split_units(units)
        return self._splits[units]

    def _stream(self, handle: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(handle, device=self._device)


def shares(units: int) -> tuple[int, ...]:
    """Return the numbers of units to try to take from a GEMM: powers of two up to half of a device's.

    >>> shares(132)
    (8, 16, 32, 64)
    """
    powers = (SMALLEST_SHARE << k for k in range(units.bit_length()))
    return tuple(power for power in powers if 2 * power <= units)


def units_to_try(partition: Partition, units: int) -> tuple[int, ...]:
    """Return the numbers of units to try to take from a GEMM on a device with ``units``."""
    return SPARED if partition.requested else shares(units)


def why_none(partition: Partition, partitions: DevicePartitions | None, absent: str) -> str:
    """Return the reason why a device gives no units; empty if it does.

    Args:
        partition: way in which units are taken.
        partitions: partitions of the device; None for ``absent``.
        absent: reason why it has none.
    """
    return (
        absent
        if partitions is None
        else partitions.objection()
        if not partition.requested
        else "there is no cuBLAS of torch alone, which could leave SMs to others"
        if cublas() is None
        else ""
    )
