"""Inspection of the machine that this process runs on."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path
from typing import Protocol

import torch

from sidelane.machine import amd, nvidia
from sidelane.machine.inventory import Accelerators, Inventory


class Vendor(Protocol):
    """A module with the GPUs of one vendor; each function does what its namesake here does."""

    DEVICE_TYPE: str

    def device_count(self) -> int: ...

    def inspect(self) -> Accelerators: ...

    def reported_versions(self) -> dict[str, str | None]: ...


SHARED_MEMORY = Path("/dev/shm")
# Vendors whose devices Sidelane has an executor for. torch may know others; they do not count here.
VENDORS: tuple[Vendor, ...] = (nvidia, amd)


def device_type_and_count() -> tuple[str, int]:
    """Return the name in torch and the number of accelerators for ranks; ``("cpu", 0)`` without any."""
    vendor = _vendor()
    return ("cpu", 0) if vendor is None else (vendor.DEVICE_TYPE, vendor.device_count())


def device_names() -> tuple[str, ...]:
    """Return the names of the accelerators, as :func:`inspect` does, without initialising more than torch has."""
    _, count = device_type_and_count()
    return tuple(torch.cuda.get_device_properties(index).name for index in range(count))


def inspect() -> Inventory:
    """Return the inventory of this machine. Initialises the vendor's driver; takes up to a second."""
    found = _vendor()
    return Inventory(
        processor=processor(),
        cores=cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        accelerators=found.inspect() if found else None,
    )


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return name.group(1).strip() if name else platform.machine()


def software_versions() -> dict[str, str]:
    """Return the versions of drivers and vendor libraries of the devices here, by name."""
    found = _vendor()
    return {} if found is None else {name: text or "unknown" for name, text in found.reported_versions().items()}


def reported_versions() -> dict[str, str | None]:
    """Return the same for a bug report: also where no device can be used, and None for what is missing."""
    return {name: version for vendor in VENDORS for name, version in vendor.reported_versions().items()}


def _vendor() -> Vendor | None:
    """Return the module of the vendor whose GPUs torch sees; None without any."""
    return next((vendor for vendor in VENDORS if vendor.device_count()), None)
