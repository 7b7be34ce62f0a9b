"""Threads, memory, processes and files that ranks leave behind when they have ended. Without a /proc, less is seen."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Collection
from pathlib import Path

OWN_THREADS = ("sidelane-parent-watch", "sidelane-soak")
"""Prefixes of threads that are those of the processes that run the soak, not of the library."""

LASTING_THREADS = ("sidelane-descriptors",)
"""Prefix of a thread that answers peers as long as the process lives (``execute/cuda/exported.py``)."""


def of_this_process() -> list[str]:
    """Return the library's threads and shared memory in this process, whose communicators are all closed."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("sidelane")]
    left = [f"thread {name}" for name in threads if not name.startswith(OWN_THREADS + LASTING_THREADS)]
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        left += [f"mapping {line}" for line in lines if "memfd:sidelane" in line]
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                if "memfd:sidelane" in (target := os.readlink(f"/proc/self/fd/{entry}")):
                    left.append(f"descriptor {entry}: {target}")
    return left


def of_sessions(sessions: Collection[int]) -> list[str]:
    """Return processes of sessions whose leaders have ended: those that ranks have started and left alone."""
    left = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            text = entry.read_text()
            fields = text[text.rindex(")") + 2 :].split()  # from field 3 on: state, parent, group, session; proc(5)
            if int(fields[3]) in sessions and fields[0] not in "ZX":
                left.append(f"process {text[: text.rindex(')') + 1]} of session {fields[3]}")
    return left


def shared_names(pids: Collection[int] = ()) -> set[str]:
    """Return names in this machine's shared memory: the library's, and those that hold the number of a process."""
    with contextlib.suppress(OSError):
        names = os.listdir("/dev/shm")
        numbers = {str(pid) for pid in pids}
        return {name for name in names if "sidelane" in name or numbers & set(re.split(r"[^0-9A-Za-z]", name))}
    return set()


def files_in(folder: Path, *, all_of_them: bool) -> list[str]:
    """Return the files in a folder for temporary files. Without ``all_of_them``: only those that name the library."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(f"file {path}" for path in paths if all_of_them or "sidelane" in path)
