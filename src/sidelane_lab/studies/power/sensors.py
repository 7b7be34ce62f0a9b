"""Power counters of GPUs: NVML's and amdsmi's. The one of AMD has never run on AMD hardware."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from sidelane.errors import UnavailableError, missing
from sidelane.machine import amd, nvidia


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


def power_problem() -> str | None:
    """Return the reason why this machine's GPUs report no power, as far as is visible without using one; else None."""
    if nvidia.device_count():
        try:
            load_nvml()
        except UnavailableError as problem:
            return str(problem)
        return None
    if amd.device_count():
        try:
            importlib.import_module("amdsmi")
        except Exception as problem:  # the package may be there without the library behind it
            return f"power needs amdsmi, which is a part of ROCm ({problem})"
        return None
    return "there is no GPU here whose power could be read"


def power_sensor(index: int) -> PowerSensor:
    """Return the power counters of GPU ``index`` as torch counts.

    Raises:
        UnavailableError: the GPU has none.
    """
    if nvidia.device_count():
        return NvmlSensor(index)
    if amd.device_count():
        return AmdSmiSensor(index)
    raise UnavailableError("power: there is no GPU here")


class NvmlSensor:
    """Power counters of one GPU (see :class:`PowerSensor`).

    NVML's plain power reading is, from Ampere on, a mean over a second. Its field ``POWER_INSTANT`` is an instantaneous
    reading, and is taken if the GPU has it.

    Args:
        index: number of the GPU in torch. NVML counts all GPUs of the machine, torch those in
            ``CUDA_VISIBLE_DEVICES``, so the UUID makes the match.
        nvml: module ``pynvml``, or a substitute.
        uuid: UUID of the GPU; None takes torch's.

    Raises:
        UnavailableError: there is no NVML, no such GPU, or it does not report its power.
    """

    def __init__(self, index: int, *, nvml: Any = None, uuid: str | None = None) -> None:
        self._nvml = load_nvml() if nvml is None else nvml
        name = f"GPU-{torch.cuda.get_device_properties(index).uuid}" if uuid is None else uuid
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
        except Exception as problem:  # NVML has its own class for every error
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
    """Return the module ``pynvml``.

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


class AmdSmiSensor:
    """Power counters of one GPU (see :class:`PowerSensor`), read by amdsmi.

    Args:
        index: number of the GPU in torch.
        amdsmi: module ``amdsmi``, or a substitute.

    Raises:
        UnavailableError: amdsmi is not installed, or does not know the GPU.
    """

    averaged = True  # MI300X reports a mean over some milliseconds ("socket power")

    def __init__(self, index: int, *, amdsmi: Any = None) -> None:
        try:
            self._smi = importlib.import_module("amdsmi") if amdsmi is None else amdsmi
            self._smi.amdsmi_init()
            handles = list(self._smi.amdsmi_get_processor_handles())
            self._handle = amd.matching(handles, index, lambda handle: str(self._smi.amdsmi_get_gpu_device_bdf(handle)))
            if self._handle is None:
                raise LookupError(f"none of its {len(handles)} GPUs is at {amd.pci_address(index) or f'place {index}'}")
        except Exception as problem:
            raise UnavailableError(f"power: amdsmi does not know GPU {index}: {problem}") from problem
        self.watts()

    def watts(self) -> float:
        """Return the power in watts.

        Raises:
            UnavailableError: the GPU does not tell it.
        """
        try:
            found = self._smi.amdsmi_get_power_info(self._handle)
        except Exception as problem:
            raise UnavailableError(f"power: this GPU does not tell its power: {problem}") from problem
        for name in ("current_socket_power", "average_socket_power"):
            if isinstance(found.get(name), int | float) and found[name] > 0:
                return float(found[name])
        raise UnavailableError(f"power: amdsmi has no socket power of this GPU ({found})")

    def energy_mj(self) -> float | None:
        """Return the energy since the driver was loaded in millijoules; None if the GPU does not count it."""
        try:
            found = self._smi.amdsmi_get_energy_count(self._handle)
            total = found["energy_accumulator"] if "energy_accumulator" in found else found["power"]
            return float(total) * float(found["counter_resolution"]) / 1e3  # microjoules a count
        except Exception:
            return None

    def close(self) -> None:
        self._smi.amdsmi_shut_down()
