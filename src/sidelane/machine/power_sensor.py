"""What a GPU tells of its power, whoever made it. ``machine.local.power_sensor`` opens one."""

from __future__ import annotations

from typing import Protocol


class PowerSensor(Protocol):
    """The counters of one GPU.

    Attributes:
        averaged: ``watts`` is a mean over about the last second, not of now.
    """

    @property
    def averaged(self) -> bool: ...

    def watts(self) -> float:
        """What the GPU draws.

        Raises:
            UnavailableError: it does not tell.
        """
        ...

    def energy_mj(self) -> float | None:
        """A counter of millijoules that only grows; None where there is none. It moves every 20 to 100 ms."""
        ...

    def close(self) -> None: ...
