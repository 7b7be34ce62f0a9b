"""Power counters of a GPU of any vendor. ``machine.local.power_sensor`` opens one."""

from __future__ import annotations

from typing import Protocol


class PowerSensor(Protocol):
    """Power counters of one GPU.

    Attributes:
        averaged: ``watts`` is a mean over about the last second, not instantaneous.
    """

    @property
    def averaged(self) -> bool: ...

    def watts(self) -> float:
        """Return the power in watts.

        Raises:
            UnavailableError: the GPU does not report it.
        """
        ...

    def energy_mj(self) -> float | None:
        """Return a counter of millijoules that only grows; None if there is none. It moves every 20 to 100 ms."""
        ...

    def close(self) -> None: ...
