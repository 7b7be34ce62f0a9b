"""The library of ``arena.c``: compiled when the first pool is made on a GPU, and kept like ``replay.c``."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import platform

from sidelane import forks
from sidelane.native.build import find_compiler, load_or_compile

ARENAS = 16
"""Largest number of pools that a process may have at once."""


class ArenaLibrary:
    """The functions of the library that ``arena.c`` compiles to.

    Args:
        path: path of the library, by which torch opens it again.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        library = ctypes.CDLL(path)
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
    library, words = load_or_compile(name, source, compiler, ArenaLibrary)
    if library is None:
        raise RuntimeError(words)
    return library


@forks.in_copies
def _begin_anew() -> None:
    """Forget the library in a forked copy."""
    load_arenas.cache_clear()
