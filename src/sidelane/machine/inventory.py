"""Inventory of a machine in terms that fit every vendor. Vendor files fill it in."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledGpu:
    """One accelerator. A field is None if the vendor's libraries do not provide it.

    Attributes:
        index: number of the device in torch.
        name: name, as the vendor spells it.
        memory_bytes: size of the device memory in bytes.
        compute_units: number of SMs or CUs.
        copy_engines: number of DMA engines that the driver declares; not all of them may serve peers.
        links: number of active links to peers or to a switch.
        through_switch: the links end at a switch, which reaches every peer.
        power_cap_w: power limit in watts, which the clocks follow.
    """

    index: int
    name: str
    memory_bytes: int
    compute_units: int
    copy_engines: int | None = None
    links: int | None = None
    through_switch: bool | None = None
    power_cap_w: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerators:
    """Accelerators of one vendor in this machine.

    Attributes:
        device_type: name of the device type in torch.
        gpus: accelerators in torch's order.
        peer_access: ``peer_access[i][j]``: GPU i reaches the memory of GPU j (itself included).
        driver: version of the driver.
        library: name and version of the vendor's library of collectives.
        library_uses_copy_engines: that library can be told to move bytes with copy engines.
        symmetric_memory: torch can map memory of one rank into all others.
        notes: facts that could not be found, and how to make them available.
    """

    device_type: str
    gpus: tuple[InstalledGpu, ...]
    peer_access: tuple[tuple[bool, ...], ...]
    driver: str
    library: str
    library_uses_copy_engines: bool
    symmetric_memory: bool
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """Inventory of this machine.

    Attributes:
        processor: name of the processor.
        cores: number of cores that this process may use.
        memory_bytes: size of the host's memory in bytes.
        shared_memory_bytes: free bytes for memory that CPU ranks share.
        accelerators: accelerators; None if there is none that Sidelane drives.
    """

    processor: str
    cores: int
    memory_bytes: int
    shared_memory_bytes: int
    accelerators: Accelerators | None


def machine_name(device: str, count: int) -> str:
    """Return the short name of ``count`` devices.

    >>> machine_name("NVIDIA H200", 4), machine_name("AMD Instinct MI300X", 8), machine_name("NVIDIA A100-SXM4-80GB", 2)
    ('h200x4', 'mi300xx8', 'a100x2')
    """
    words = re.findall(r"[a-z0-9]+", device.lower())
    model = next((word for word in words if re.search(r"\d", word)), words[-1] if words else "gpu")
    return f"{model}x{count}"
