"""Key of a profile: hardware and software that change its times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from sidelane.machine.inventory import machine_name
from sidelane.machine.peers import PeerMemory
from sidelane.user_files import whole_in

CPU = "cpu"
HOST_MEMORY = "host memory"
"""Links of GPUs that reach each other through host memory, whose times are for nothing else."""
SOFTWARE = ("driver", "cuda", "nccl", "torch", "triton")


@dataclasses.dataclass(frozen=True, slots=True)
class MachineKey:
    """Properties of a machine that must be equal for a profile to be used.

    Attributes:
        device_type: type of the device, as torch names it.
        device: name of the GPUs, or of the processor.
        count: number of GPUs that the ranks can use, or of cores.
        links: description of the links between the GPUs, or ``HOST_MEMORY``; empty if it is not known.
        software: (name, version), by name.
    """

    device_type: str
    device: str
    count: int
    links: str = ""
    software: tuple[tuple[str, str], ...] = ()

    @property
    def short_name(self) -> str:
        """Short name of the machine, as in the folders under ``results/``, or as in the laboratory's catalogue."""
        host = "-host" if self.links == HOST_MEMORY else ""
        return CPU if self.device_type == CPU else machine_name(self.device, self.count) + host

    def between(self, peers: PeerMemory) -> MachineKey:
        """Return the key for times of collectives through this memory."""
        return dataclasses.replace(self, links=HOST_MEMORY) if peers.through_host else self

    def differences(self, here: MachineKey) -> tuple[str, ...]:
        """Return the differences on this machine, one phrase each. Properties that a side lacks are not compared."""
        unknown = f"not {HOST_MEMORY}" if HOST_MEMORY in (self.links, here.links) else ""
        pairs = [
            ("device type", self.device_type, here.device_type),
            ("device", self.device, here.device),
            ("count", self.count, here.count),
            ("links", self.links or unknown, here.links or unknown),
        ]
        ours, theirs = dict(here.software), dict(self.software)
        pairs += [(name, theirs.get(name, ""), ours.get(name, "")) for name in sorted({*ours, *theirs})]
        return tuple(f"{name} ({old} there, {new} here)" for name, old, new in pairs if old and new and old != new)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a profile's key."""
        return {**dataclasses.asdict(self), "software": dict(self.software)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> MachineKey:
        """Read the result of :meth:`to_dict`."""
        for name in ("device_type", "device", "links"):
            if not isinstance(content.get(name, ""), str):
                raise TypeError(f"{name} (value={content[name]!r}, allowed=a text)")
        software = tuple(sorted((str(name), str(version)) for name, version in content["software"].items()))
        return MachineKey(**{**content, "count": whole_in(content, "count"), "software": software})


def key_here(device_type: str, world_size: int = 1) -> MachineKey:
    """Return the key of this machine.

    Args:
        device_type: device type of the ranks' tensors.
        world_size: number of ranks on this machine: if each process sees one GPU only, there are that many.
    """
    links, software = _links_and_software(device_type)
    return dataclasses.replace(quick_key(device_type, world_size), links=links, software=software)


@functools.cache
def quick_key(device_type: str, world_size: int = 1) -> MachineKey:
    """Return the key of this machine as :func:`key_here` does, without links and software."""
    from sidelane.machine import local  # imports torch, which the command line does without

    names = () if device_type == CPU else local.device_names()
    device = ", ".join(dict.fromkeys(names)) or local.processor()
    count = len(names) or local.cores()
    return MachineKey(device_type, device, count if device_type == CPU else max(count, world_size))


@functools.cache
def _links_and_software(device_type: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    from sidelane.machine import local

    on_cpu = device_type == CPU
    versions = {} if on_cpu else local.driver_versions()
    for name in ("torch",) if on_cpu else ("torch", "triton"):  # no CPU collective runs a kernel
        if (version := local.installed_version(name)) is not None:
            versions[name] = version
    found = None if on_cpu else local.inspect().accelerators
    links = ""
    if found is not None and found.gpus[0].links is not None:
        first = found.gpus[0]
        kind = {True: "to a switch", False: "to peers", None: ""}[first.through_switch]
        links = f"{first.links} {kind}".strip() if first.links else "none"
    return links, tuple((name, versions[name]) for name in sorted(SOFTWARE) if name in versions)
