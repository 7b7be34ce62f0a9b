"""Power and energy of an NVIDIA GPU, from NVML."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sidelane.errors import UnavailableError, missing


class NvmlSensor:
    """The counters of one GPU (see :class:`sidelane.machine.power_sensor.PowerSensor`).

    NVML's plain power reading is, from Ampere on, a mean over a second. Its field ``POWER_INSTANT`` is a reading of
    now, and is taken where the GPU has it.

    Args:
        index: of the GPU as torch counts. NVML counts all of the machine, torch those in ``CUDA_VISIBLE_DEVICES``, so
            the UUID makes the match.
        nvml: the module ``pynvml``, or one that stands in for it.
        uuid: of the GPU; None asks torch.

    Raises:
        UnavailableError: no NVML, no such GPU, or it does not tell its power.
    """

    def __init__(self, index: int, *, nvml: Any = None, uuid: str | None = None) -> None:
        self._nvml = load_nvml() if nvml is None else nvml
        name = f"GPU-{torch.cuda.get_device_properties(index).uuid}" if uuid is None else uuid
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
        except Exception as problem:  # every error of NVML is one of its own
            raise UnavailableError(f"power: NVML does not know GPU {index} ({name}): {problem}") from problem
        self._field = getattr(self._nvml, "NVML_FI_DEV_POWER_INSTANT", None)
        if self._field is not None and self._instant() is None:
            self._field = None
        self.watts()

    @property
    def averaged(self) -> bool:
        return self._field is None

    def watts(self) -> float:
        instant = self._instant()
        if instant is not None:
            return instant
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3
        except Exception as problem:
            raise UnavailableError(f"power: this GPU does not tell its power: {problem}") from problem

    def energy_mj(self) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except Exception:
            return None

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _instant(self) -> float | None:
        if self._field is None:
            return None
        try:
            (answer,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._field])
        except Exception:
            return None
        # In milliwatts, an unsigned integer; other types of value are laid over the same bytes.
        return float(answer.value.uiVal) / 1e3 if answer.nvmlReturn == self._nvml.NVML_SUCCESS else None


def load_nvml() -> Any:
    """The module ``pynvml``.

    Raises:
        UnavailableError: it is not installed, or finds no driver.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        nvml.nvmlShutdown()
    except Exception as problem:
        raise missing("power needs NVML", "pynvml", problem) from problem
    return nvml
