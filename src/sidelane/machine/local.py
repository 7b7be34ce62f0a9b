"""Inspection of the machine that this process runs on."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch

from sidelane import config
from sidelane.machine import amd, nvidia
from sidelane.machine.inventory import Accelerators, Inventory
from sidelane.machine.peers import SHARED, PeerMemory, between
from sidelane.version import VERSION


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


def peers_here(device_type: str) -> PeerMemory:
    """Return the memory between the GPUs of this machine, by ``Config.peers`` and what they reach."""
    found = None if device_type == "cpu" else inspect().accelerators
    return SHARED if found is None else between(found, config.current().peers)


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


def peer_access(device: torch.device, ranks: int) -> tuple[str, dict[str, bool]]:
    """Return the identity of a GPU, and for other GPUs of this machine, by theirs, whether it reaches their memory.

    Args:
        device: the GPU; one that is none has the identity "".
        ranks: number of ranks. Where torch sees fewer GPUs, the vendor's library is asked about all others.
    """
    if device.type != "cuda":
        return "", {}
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    own = uuids[device.index]
    seen = {
        uuid: torch.cuda.can_device_access_peer(device.index, index)
        for index, uuid in enumerate(uuids)
        if index != device.index
    }
    return own, (nvidia.peers_by_driver(own) if len(uuids) < ranks else {}) | seen


def driver_versions() -> dict[str, str]:
    """Return the versions of drivers and vendor libraries of the devices here, by name."""
    found = _vendor()
    return {} if found is None else {name: text or "unknown" for name, text in found.reported_versions().items()}


def reported_versions() -> dict[str, str | None]:
    """Return the same for a bug report: also where no device can be used, and None for what is missing."""
    return {name: version for vendor in VENDORS for name, version in vendor.reported_versions().items()}


def commit() -> str:
    """Return ``SIDELANE_COMMIT`` if set (for copies of a checkout), else the checkout's commit, else ``unknown``."""
    package = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    if given := os.environ.get("SIDELANE_COMMIT"):
        return given
    try:
        # An installed copy may lie inside another repository.
        if Path(git("rev-parse", "--show-toplevel")) == package.parent.parent:
            dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
            return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        pass
    return "unknown"


def software_versions() -> dict[str, str]:
    """Return the versions of all software that may change a figure."""
    versions = {
        "sidelane": VERSION,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
    }
    for name in ("torch", "triton", "numpy", "cuda-bindings"):
        if (version := installed_version(name)) is not None:
            versions[name] = version
    return versions | driver_versions()


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """Return the name of the processor and the number of cores that this process may use."""
    return f"{processor()}, {cores()} cores"


def _vendor() -> Vendor | None:
    """Return the module of the vendor whose GPUs torch sees; None without any."""
    return next((vendor for vendor in VENDORS if vendor.device_count()), None)
