"""Provenance of a result: the machine, the code and the versions that a study ran on."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path

import torch

from sidelane.machine import local
from sidelane.machine.inventory import machine_name
from sidelane.machine.local import commit, installed_version, processor_name, software_versions

__all__ = [
    "accelerator_name",
    "command_line",
    "commit",
    "heading",
    "installed_version",
    "processor_name",
    "software_versions",
]


def command_line() -> str:
    """Return this process's command as a person would type it, without the folders of this machine."""
    program = Path(sys.argv[0])
    name = "sidelane" if program.name in ("sidelane", "__main__.py") else f"python {program.name}"
    return " ".join([name, *(shlex.quote(re.sub(r"(^|=)/(.*/)?", r"\1", argument)) for argument in sys.argv[1:])])


def accelerator_name() -> tuple[str, int]:
    """Return the full name of the accelerators here, and their number."""
    device_type, count = local.device_type_and_count()
    assert count, "results of a device type that this machine does not have"
    return str(torch.get_device_module(device_type).get_device_name(0)), count


def heading() -> list[str]:
    """Return the lines at the top of a text result: machine, date, commit and versions."""
    name = "cpu"
    if local.device_type_and_count()[1]:
        device, count = accelerator_name()
        name = f"{machine_name(device, count)} ({count} x {device})"
    software = ", ".join(f"{package} {version}" for package, version in software_versions().items())
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return [f"machine:  {name}", f"date:     {date}", f"commit:   {commit()}", f"software: {software}"]
