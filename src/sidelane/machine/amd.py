"""AMD GPUs: their properties from torch and the kernel's topology (sysfs). Never run on AMD hardware."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sidelane.machine.inventory import Accelerators, InstalledGpu

DEVICE_TYPE = "cuda"  # the name that torch for ROCm uses
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
XGMI = 11  # type of a link in the topology

T = TypeVar("T")


def device_count() -> int:
    """Return the number of GPUs that a torch for ROCm sees; 0 with any other torch."""
    return torch.cuda.device_count() if torch.version.hip and torch.cuda.is_available() else 0


def inspect() -> Accelerators:
    """Return the properties of the GPUs of this machine (there is at least one)."""
    count = device_count()
    engines, links = engine_counts(), link_counts()
    notes = ["Sidelane has never run on AMD hardware: see docs/guide/amd.md"]
    if not engines:
        notes.append(f"engines and links are not known: {TOPOLOGY} does not list these GPUs")
    gpus = tuple(_gpu(index, engines, links) for index in range(count))
    peer_access = tuple(
        tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count)
    )
    return Accelerators(
        device_type=DEVICE_TYPE,
        gpus=gpus,
        peer_access=peer_access,
        driver=f"ROCm {torch.version.hip}",
        library=f"RCCL {_rccl_version()}",
        library_uses_copy_engines=False,
        symmetric_memory=True,
        notes=tuple(notes),
    )


def reported_versions() -> dict[str, str | None]:
    """Return what torch was built with, also where no GPU can be used; None with any other torch."""
    return {"rocm": torch.version.hip, "rccl": _rccl_version() if torch.version.hip else None}


@functools.cache
def engine_counts() -> Mapping[int, int]:
    """Return the number of SDMA engines by GPU, those for XGMI links included; empty without a topology."""
    return {
        index: node.get("num_sdma_engines", 0) + node.get("num_sdma_xgmi_engines", 0)
        for index, (_, node) in _gpu_nodes().items()
    }


@functools.cache
def link_counts() -> Mapping[int, int]:
    """Return the number of XGMI links to other GPUs by GPU; empty without a topology."""
    nodes = _gpu_nodes()
    names = {folder.name for folder, _ in nodes.values()}
    found = {}
    for index, (folder, _) in nodes.items():
        links = map(_properties, (folder / "io_links").glob("*/properties"))
        found[index] = sum(link.get("type") == XGMI and str(link.get("node_to")) in names for link in links)
    return found if any(found.values()) else {}


def _gpu(index: int, engines: Mapping[int, int], links: Mapping[int, int]) -> InstalledGpu:
    properties = torch.cuda.get_device_properties(index)
    return InstalledGpu(
        index=index,
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_units=properties.multi_processor_count,
        copy_engines=engines.get(index),
        links=links.get(index, 0) if links else None,
        through_switch=False if links else None,
        power_cap_w=None,
    )


def _rccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"


_Node = tuple[Path, dict[str, int]]


def _gpu_nodes() -> dict[int, _Node]:
    """Return folder and properties in the topology of each GPU that torch sees; nodes without SIMDs are processors."""
    if not TOPOLOGY.is_dir():
        return {}
    folders = sorted((one for one in TOPOLOGY.iterdir() if one.name.isdigit()), key=lambda one: int(one.name))
    nodes = [(folder, _properties(folder / "properties")) for folder in folders]
    nodes = [(folder, values) for folder, values in nodes if values.get("simd_count", 0) > 0]
    found = {index: matching(nodes, index, _address_of_node) for index in range(device_count())}
    return {index: node for index, node in found.items() if node is not None}


def _address_of_node(node: _Node) -> str:
    _, values = node
    location = values.get("location_id", 0)  # bus, device and function in 8, 5 and 3 bits
    return f"{values.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"


def matching(found: Sequence[T], index: int, address_of: Callable[[T], str]) -> T | None:
    """Return the one that is the GPU of a number in torch, by PCI address; None if there is none.

    ``HIP_VISIBLE_DEVICES`` renumbers GPUs in torch, but not elsewhere. Partitions of a GPU share an address, but for
    its function, which torch does not tell: they are alike in order. A torch that tells no address numbers all alike.
    """
    address = pci_address(index)
    if address is None:
        return found[index] if index < len(found) else None
    alike = [one for one in found if address_of(one).lower().startswith(address)]
    before = sum(pci_address(other) == address for other in range(index))
    return alike[min(before, len(alike) - 1)] if alike else None


def pci_address(index: int) -> str | None:
    """Return domain, bus and device of a GPU as ``0000:c1:00``; None if torch does not tell."""
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks some
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"


def _properties(file: Path) -> dict[str, int]:
    """Read a file of lines ``name number``."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
