"""MachineKey of a profile: hardware and software that change its times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from sidelane.machine.inventory import machine_name
from sidelane.user_files import whole_in

CPU = "cpu"
SOFTWARE = ("driver", "cuda", "nccl", "torch", "triton")


@dataclasses.dataclass(frozen=True, slots=True)
class MachineKey:
    """Properties of a machine that must be equal for a profile to be used.

    Attributes:
        device_type: type of the device, as torch names it.
        device: name of the GPUs, or of the processor.
        count: number of GPUs that the ranks can use, or of cores.
        links: description of the links between the GPUs; empty if it is not known.
        software: (name, version), by name.
    """

    device_type: str
    device: str
    count: int
    links: str = ""
    software: tuple[tuple[str, str], ...] = ()

    @property
    def short_name(self) -> str:
        """Short name of the machine, as in the folders under ``results/``."""
        return CPU if self.device_type == CPU else machine_name(self.device, self.count)

    def differences(self, here: MachineKey) -> tuple[str, ...]:
        """Return the differences on this machine, one phrase each. Properties that a side lacks are not compared."""
        pairs = [
            ("device type", self.device_type, here.device_type),
            ("device", self.device, here.device),
            ("count", self.count, here.count),
            ("links", self.links, here.links),
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
    found = _here(device_type)
    return found if device_type == CPU else dataclasses.replace(found, count=max(found.count, world_size))


def quick_key(device_type: str, world_size: int = 1) -> MachineKey:
    """Return the key of this machine as :func:`key_here` does, without links and software."""
    found = _device_here(device_type)
    return found if device_type == CPU else dataclasses.replace(found, count=max(found.count, world_size))


def _device_here(device_type: str) -> MachineKey:
    from sidelane.machine import local  # imports torch, which the command line does without

    names = local.device_names() if device_type != CPU else ()
    if not names:
        return MachineKey(device_type, local.processor(), local.cores())
    return MachineKey(device_type, ", ".join(dict.fromkeys(names)), len(names))


@functools.cache
def _here(device_type: str) -> MachineKey:
    from sidelane.machine import local  # imports torch, which the command line does without

    versions = local.driver_versions() if device_type != CPU else {}
    for name in ("torch", "triton"):
        if name == "triton" and device_type == CPU:
            continue  # no CPU collective runs a kernel
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    software = tuple(sorted((name, versions[name]) for name in SOFTWARE if name in versions))
    found = local.inspect().accelerators if device_type != CPU else None
    links = ""
    if found is not None and found.gpus[0].links is not None:
        first = found.gpus[0]
        kind = {True: "to a switch", False: "to peers", None: ""}[first.through_switch]
        links = f"{first.links} {kind}".strip() if first.links else "none"
    return dataclasses.replace(_device_here(device_type), links=links, software=software)
