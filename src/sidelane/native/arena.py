"""The library of ``arena.c``: compiled when the first pool is made on a GPU, and kept like ``replay.c``."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import platform
from pathlib import Path

from sidelane import forks
from sidelane.forks import OwnFolder
from sidelane.native.build import compile_to, find_compiler, is_private, private_cache

ARENAS = 16
"""Largest number of pools that a process may have at once."""


class ArenaLibrary:
    """The functions of the library that ``arena.c`` compiles to.

    Args:
        path: path of the library.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self.open = library.sidelane_arena_open
        self.open.argtypes, self.open.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
        self.close = library.sidelane_arena_close
        self.close.argtypes, self.close.restype = [ctypes.c_int], ctypes.c_int
        self.used = library.sidelane_arena_used
        self.used.argtypes, self.used.restype = [ctypes.c_int], ctypes.c_size_t
        self.refused = library.sidelane_arena_refused
        self.refused.argtypes, self.refused.restype = [ctypes.c_int], ctypes.c_size_t

    @staticmethod
    def names(slot: int) -> tuple[str, str]:
        """Return the names of the functions by which torch allocates memory of a slot and frees it."""
        return f"sidelane_arena_malloc_{slot}", f"sidelane_arena_free_{slot}"


@functools.cache
def load_arenas() -> ArenaLibrary:
    """Load the library, compiled now unless an earlier process of this user has compiled it.

    Raises:
        RuntimeError: there is no C compiler, or it failed.
        OSError: the library cannot be written or loaded.
    """
    source = (importlib.resources.files("sidelane.native") / "arena.c").read_bytes()
    compiler = find_compiler()
    made_for = repr((compiler, platform.machine(), platform.libc_ver()))
    name = f"sidelane_arena-{hashlib.blake2b(source + made_for.encode(), digest_size=8).hexdigest()}.so"
    folder = private_cache() or _own_folder().path
    path = folder / name
    if path.exists() and is_private(path):
        try:
            return ArenaLibrary(path)
        except OSError:  # not whole
            path.unlink()
    if not compiler:
        raise RuntimeError("no C compiler (looked for CC, cc, gcc, clang)")
    compile_to(path, source, compiler)
    if not is_private(path):
        raise PermissionError(f"{path.name} can be written by others")
    return ArenaLibrary(path)


@functools.cache
def _own_folder() -> OwnFolder:
    """Return a folder of this process. It must persist: torch opens the library by its path when a pool is made."""
    return OwnFolder("sidelane-")


@forks.in_copies
def _begin_anew() -> None:
    """Forget the library in a forked copy: its folder is deleted with the process that made it."""
    load_arenas.cache_clear()
    _own_folder.cache_clear()
