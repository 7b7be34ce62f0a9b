"""How much memory a process may still take. The kernel grants shared memory beyond that and kills someone later."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Memory that can be taken without swapping or hitting a container's limit; None where the system does not tell."""
    limits = [value for value in (_machine(), *_control_groups()) if value is not None]
    return min(limits, default=None)


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
