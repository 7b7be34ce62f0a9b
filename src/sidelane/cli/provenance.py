"""Provenance of a result: the machine, the code and the versions that a study ran on."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

from sidelane.machine import local
from sidelane.machine.inventory import machine_name
from sidelane.version import VERSION


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


def command_line() -> str:
    """Return this process's command as a person would type it, without the folders of this machine."""
    program = Path(sys.argv[0])
    name = "sidelane" if program.name in ("sidelane", "__main__.py") else f"python {program.name}"
    return " ".join([name, *(shlex.quote(re.sub(r"(^|=)/(.*/)?", r"\1", argument)) for argument in sys.argv[1:])])


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
    return versions | local.software_versions()


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def accelerator_name() -> tuple[str, int]:
    """Return the full name of the accelerators here, and their number."""
    device_type, count = local.device_type_and_count()
    assert count, "results of a device type that this machine does not have"
    return str(torch.get_device_module(device_type).get_device_name(0)), count


def processor_name() -> str:
    """Return the name of the processor and the number of cores that this process may use."""
    return f"{local.processor()}, {local.cores()} cores"


def heading() -> list[str]:
    """Return the lines at the top of a text result: machine, date, commit and versions."""
    name = "cpu"
    if local.device_type_and_count()[1]:
        device, count = accelerator_name()
        name = f"{machine_name(device, count)} ({count} x {device})"
    software = ", ".join(f"{package} {version}" for package, version in software_versions().items())
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return [f"machine:  {name}", f"date:     {date}", f"commit:   {commit()}", f"software: {software}"]
