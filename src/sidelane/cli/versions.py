"""Versions of the code and of what it runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from sidelane.machine import local
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


def processor_name() -> str:
    """Return the name of the processor and the number of cores that this process may use."""
    return f"{local.processor()}, {local.cores()} cores"
