"""Memory that a process may still allocate, and reasons in words when the system refuses a resource.

Both are needed since the kernel overcommits shared memory, and kills a process later.
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
    """Return the bytes that can be allocated without swapping or exceeding a container's limit; None if unknown."""
    limits = [value for value in (_machine(), *_control_groups()) if value is not None]
    return min(limits, default=None)


def lacking(error: OSError) -> str:
    """Return the text of a system error, with the resource that is exhausted.

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
    """Return the free bytes in the memory control groups of this process: versions 2 and 1, from outside and inside."""
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
    # Inactive file pages count as usage, but the kernel drops them when memory is allocated.
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    return max(0, int(limit) - int(usage) + int(statistics.get("inactive_file", 0)))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
