"""How much memory a process may still take, and what it lacks where the system refuses it something.

The kernel grants shared memory beyond what there is, and kills someone later.
"""

from __future__ import annotations

import errno
from pathlib import Path

_LIMITS = {
    errno.EMFILE: "files that this process may have open (ulimit -n)",
    errno.ENFILE: "files that this machine may have open (/proc/sys/fs/file-max)",
    errno.ENOSPC: "memory, or room where the file lies",
    errno.ENOMEM: "memory, or mappings (/proc/sys/vm/max_map_count)",
    errno.EDQUOT: "room for this user",
    errno.EACCES: "permissions of this user",
    errno.EPERM: "permissions of this user",
}


def available_bytes() -> int | None:
    """Memory that can be taken without swapping or hitting a container's limit; None where the system does not tell."""
    limits = [value for value in (_machine(), *_control_groups()) if value is not None]
    return min(limits, default=None)


def lacking(error: OSError) -> str:
    """What the system said, and what there is too little of.

    >>> lacking(OSError(errno.EMFILE, "Too many open files"))
    'no more files that this process may have open (ulimit -n): [Errno 24] Too many open files'
    """
    limit = _LIMITS.get(error.errno or 0)
    return str(error) if limit is None else f"no more {limit}: {error}"


def _machine() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups() -> list[int | None]:
    """Room in the memory control groups of this process: versions 2 and 1, seen from outside and from inside."""
    rooms: list[int | None] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders, names = ("/sys/fs/cgroup" + path, "/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folders = ("/sys/fs/cgroup/memory" + path, "/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        rooms.extend(_room(Path(folder), *names) for folder in folders)
    return rooms


def _room(folder: Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not (limit.isdigit() and usage.isdigit()):  # "max", or no such group
        return None
    # File pages that nobody uses count as usage and go when memory is asked for.
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    return max(0, int(limit) - int(usage) + int(statistics.get("inactive_file", 0)))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
