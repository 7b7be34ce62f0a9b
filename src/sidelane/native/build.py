"""Compile ``replay.c`` with the machine's C compiler, once for each version of it and of Python, and load it.

Triton compiles its launchers in the same way, so that a machine that runs kernels has a compiler. Nothing is compiled
when the package is installed: wheels stay pure, and a machine without a compiler runs the Python code.

Loaded code runs with all rights of this process. So it is kept in a folder and files that belong to this user and that
nobody else can write. If the user's cache is not like that, every process compiles for itself.

The side effects of a repeated call, in the form that the module carries out, stand at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.machinery
import importlib.resources
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from sidelane import log, ranges
from sidelane.config import cache_folder
from sidelane.user_files import open_regular, write_whole

MODULE = "sidelane_replay"
TIMEOUT_S = 60.0
COMPILER_FLAGS = ("-O2", "-shared", "-fPIC")
_MOST_LETTERS = 300
_DIGEST_BYTES = 32

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Replays:
    """The result of compiling and loading ``replay.c``.

    Attributes:
        module: the module; None if it could not be compiled or loaded.
        words: description of how it was made, or why it was not.
    """

    module: ModuleType | None
    words: str


@functools.cache
def load_replays() -> Replays:
    """Load the module, compiled now (half a second) if no earlier process of this user has done so. Raises nothing."""
    try:
        found = _load_or_compile()
    except Exception as problem:  # Sidelane runs without the module, whatever is wrong with the machine
        one_line = " ".join(str(problem).split())  # compilers explain themselves in several
        found = Replays(None, f"{type(problem).__name__}: {one_line}"[:_MOST_LETTERS])
    if found.module is None:
        log.calls.warning("repeated calls are made in Python, which is slower: %s", found.words)
        ranges.notify("fell_back", "repeated calls", "Python", found.words)
    return found


def load_replays_soon() -> Replays | None:
    """Load the module if an earlier process has compiled it; else return None, and compile it on a thread meanwhile."""
    global _compiling
    if not load_replays.cache_info().currsize:
        if _compiling is not None and _compiling.is_alive():  # a forked copy has no thread of its parent
            return None
        if not _was_compiled():
            _compiling = threading.Thread(target=load_replays, name="sidelane-compiles", daemon=True)
            _compiling.start()
            return None
    return load_replays()


_compiling: threading.Thread | None = None


def _was_compiled() -> bool:
    """Return True unless a compiler has to run before the module can be loaded."""
    folder, compiler = private_cache(), find_compiler()
    return not compiler or (folder is not None and (folder / _name_of(_source(), compiler)).exists())


def _source() -> bytes:
    return (importlib.resources.files("sidelane.native") / "replay.c").read_bytes()


def _name_of(source: bytes, compiler: tuple[str, ...]) -> str:
    """Return the name of the module's file, after all that it is compiled from."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    made_for = repr((compiler, sys.version, platform.machine(), suffix))
    return f"{MODULE}-{hashlib.blake2b(source + made_for.encode(), digest_size=8).hexdigest()}{suffix}"


def _load_or_compile() -> Replays:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Replays(None, f"not for this Python ({sys.implementation.name}, with the GIL: the C code relies on it)")
    source, compiler = _source(), find_compiler()
    return Replays(*load_or_compile(_name_of(source, compiler), source, compiler, _import_module))


def load_or_compile(
    name: str, source: bytes, compiler: tuple[str, ...], load: Callable[[str], T]
) -> tuple[T | None, str]:
    """Load a library that an earlier process of this user has kept, or else compile it, and keep it.

    Args:
        name: name of the file, after all that it is compiled from.
        source: text in C.
        compiler: command of the compiler; empty if there is none.
        load: loads the library at a path, which persists as long as this process.

    Returns:
        The result of ``load`` and how the library was made; or None, and the reason.

    Raises:
        RuntimeError: the compiler failed, or took longer than ``TIMEOUT_S``.
        ImportError, OSError: the compiler could not be run, or no folder holds a library that can be loaded.
    """
    kept = private_cache()
    if kept is not None:
        with contextlib.suppress(ImportError, OSError):  # there is none, or none that is as it should be
            return _load_whole(kept / name, load), "compiled before"
    if not compiler:
        return None, "no C compiler (looked for CC, cc, gcc, clang)"
    with _own_folder() as own:  # where nobody else can put a file under the compiler
        content = _compile(own, source, compiler)
        places = [own] if kept is None else [kept, own]
        while True:
            try:
                place = places.pop(0) / name
                write_whole(place, content + _digest(name, content), 0o700)
                return _load_whole(place, load), f"compiled by {Path(compiler[0]).name}"
            except (ImportError, OSError):  # the home folder is full, read-only or mounted noexec
                if not places:
                    raise


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """Make a folder, and remove it. A forked copy, which has none of the other threads, does not come to the end."""
    path = Path(tempfile.mkdtemp(prefix="sidelane-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def find_compiler() -> tuple[str, ...]:
    """Return the command of a C compiler: ``CC`` of the environment, or a usual name; empty if there is none."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    return ()


def compiler_version() -> str | None:
    """Return the first line that the C compiler prints of itself; None if there is none, or it prints nothing."""
    command = find_compiler()
    if not command:
        return None
    try:
        output = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        return f"{Path(command[0]).name} fails: {type(problem).__name__}"
    return next(iter(output.stdout.splitlines()), None)


def _compile(folder: Path, source: bytes, compiler: tuple[str, ...]) -> bytes:
    """Return the library that a source compiles to. ``folder``: for files meanwhile. Raises RuntimeError, OSError."""
    text, binary = folder / "source.c", folder / "binary"
    text.write_bytes(source)
    includes = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("include", "platinclude"))
    _run([*compiler, *COMPILER_FLAGS, *(f"-I{folder}" for folder in includes), str(text), "-o", str(binary)])
    return binary.read_bytes()


def _load_whole(path: Path, load: Callable[[str], T]) -> T:
    """Load a library if it is whole, and this user alone can write it.

    Whatever takes the place of the file meanwhile, what is checked is what is loaded: the loader gets the path of the
    open descriptor. It stays open, even if the loader fails: loaders know libraries by their paths.

    Raises:
        OSError: there is no such file, or others can write it.
        ImportError: it is not whole, or cannot be loaded.
    """
    descriptor = open_private(path)
    with open(os.dup(descriptor), "rb") as file:
        stored = file.read()
    content = stored[:-_DIGEST_BYTES]
    if stored != content + _digest(path.name, content):
        os.close(descriptor)
        raise ImportError(f"{path.name} is not whole (value={len(stored)} bytes)")
    return load(f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else str(path))


def _digest(name: str, content: bytes) -> bytes:
    """Return the bytes behind a library in its file, which loaders do not read: who has them has all of it."""
    return hashlib.blake2b(name.encode() + content, digest_size=_DIGEST_BYTES).digest()


def _import_module(path: str) -> ModuleType:
    """Import a compiled module. Raises ImportError: the module is for another Python."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def private_cache() -> Path | None:
    """Return the user's cache folder; None if other users can write there."""
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_private(folder.stat()):
                return folder
    return None


def open_private(path: Path) -> int:
    """Open a file of this user, no link, to read it, and return its descriptor.

    Raises:
        OSError: there is no such file, or it is no regular one.
        PermissionError: it belongs to another user, or others can write it.
    """
    descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    if not _is_private(os.fstat(descriptor)):
        os.close(descriptor)
        raise PermissionError(f"{path.name} can be written by others")
    return descriptor


def _is_private(found: os.stat_result) -> bool:
    """Return True if a file or folder belongs to this user, and nobody else can write it."""
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _run(command: list[str]) -> None:
    # In a session of its own, to be killed with all its children, which would otherwise keep the pipes open.
    name = Path(command[0]).name
    silent, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        command, stdin=silent, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        try:
            output, _ = child.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{name} took longer than {TIMEOUT_S:.0f} s") from None
            raise
    if child.returncode:
        raise RuntimeError(f"{name} failed: {output.decode(errors='replace').strip() or child.returncode}")


class Effect(enum.IntEnum):
    """Kind of a side effect on the target, name and value of a :data:`Note`."""

    SET = 0
    """``target.name = value``"""
    SET_NUMBER = 1
    """``target.name = number of the call``"""
    SET_PAIR = 2
    """``target.name = (number of the call, value)``"""
    APPEND_PAIR = 3
    """``target((number of the call, value))``: a bound ``append``"""
    COUNT = 4
    """``target[0] += 1``, of a list"""


Note = tuple[Effect, Any, str, Any]
"""A side effect: (effect, target, name, value)."""
