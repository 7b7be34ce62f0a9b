"""What a machine offers, in words that fit every vendor. Vendor files fill these in."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledGpu:
    """One accelerator. A field is None where the vendor's libraries do not say.

    Attributes:
        index: as torch counts devices.
        name: as the vendor spells it.
        memory_bytes: of the device.
        compute_units: SMs or CUs.
        copy_engines: DMA engines that the driver declares; how many of them serve peers is another matter.
        links: active links to peers or to a switch.
        through_switch: the links end at a switch, which reaches every peer.
        power_cap_w: limit that the clocks follow.
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
    """The accelerators of one vendor in this machine.

    Attributes:
        device_type: their name in torch.
        gpus: in torch's order.
        peer_access: ``peer_access[i][j]``: GPU i reaches the memory of GPU j (itself included).
        pair_links: direct links between GPUs i and j; None where a switch or nothing is between them.
        driver: version of the driver.
        library: the vendor's library of collectives with its version.
        library_uses_copy_engines: that library can be told to move bytes with copy engines.
        symmetric_memory: torch can map memory of one rank into all others.
        notes: what could not be looked up, and how to make it so.
    """

    device_type: str
    gpus: tuple[InstalledGpu, ...]
    peer_access: tuple[tuple[bool, ...], ...]
    pair_links: tuple[tuple[int, ...], ...] | None
    driver: str
    library: str
    library_uses_copy_engines: bool
    symmetric_memory: bool
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """This machine.

    Attributes:
        processor: name of the processor.
        cores: that this process may use.
        memory_bytes: of the host.
        shared_memory_bytes: free for memory that CPU ranks share.
        accelerators: None when there is none that Sidelane drives.
    """

    processor: str
    cores: int
    memory_bytes: int
    shared_memory_bytes: int
    accelerators: Accelerators | None


def machine_name(device: str, count: int) -> str:
    """Short name of ``count`` devices.

    >>> machine_name("NVIDIA H200", 4), machine_name("AMD Instinct MI300X", 8), machine_name("NVIDIA A100-SXM4-80GB", 2)
    ('h200x4', 'mi300xx8', 'a100x2')
    """
    words = re.findall(r"[a-z0-9]+", device.lower())
    model = next((word for word in words if re.search(r"\d", word)), words[-1] if words else "gpu")
    return f"{model}x{count}"
