"""Compile ``replay.c`` with the machine's C compiler, once for each version of it and of Python, and load it.

Triton compiles its launchers on the same machines in the same way, so that where kernels run this does too. Nothing is
compiled when the package is installed: wheels stay pure, and a machine without a compiler does without.

What is loaded runs with all rights of this process. So it is kept in a folder, and in files, that belong to this user
and that nobody else can write; where the user's cache is not like that, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from sidelane.config import cache_folder
from sidelane.forks import OwnFolder

MODULE = "sidelane_replay"
TIMEOUT_S = 60.0
_FLAGS = ("-O2", "-shared", "-fPIC")
_MOST_LETTERS = 300


@dataclasses.dataclass(frozen=True)
class Replays:
    """What became of it.

    Attributes:
        module: what ``replay.c`` defines; None where it could not be had.
        words: how it was made, or why it was not.
    """

    module: ModuleType | None
    words: str


@functools.cache
def load_replays() -> Replays:
    """The module, compiled now if no earlier process of this user has. Takes half a second then. Raises nothing."""
    try:
        return _load_or_compile()
    except Exception as problem:  # whatever is wrong with the machine, Sidelane runs without
        return Replays(None, f"{type(problem).__name__}: {problem}"[:_MOST_LETTERS])


def _load_or_compile() -> Replays:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Replays(None, f"not for this Python ({sys.implementation.name}, with the GIL: the C code relies on it)")
    source = (importlib.resources.files("sidelane.native") / "replay.c").read_bytes()
    compiler = find_compiler()
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    made_for = repr((compiler, sys.version, platform.machine(), suffix))
    name = f"{MODULE}-{hashlib.blake2b(source + made_for.encode(), digest_size=8).hexdigest()}{suffix}"
    problem: Exception | None = None
    for folder in _folders():
        try:
            with folder as path:
                if (known := _load_earlier(path / name)) is not None:
                    return Replays(known, "compiled before")
                if not compiler:
                    return Replays(None, "no C compiler (looked for CC, cc, gcc, clang)")
                compile_to(path / name, source, compiler)
                return Replays(load(path / name), f"compiled by {Path(compiler[0]).name}")
        except (ImportError, OSError) as error:  # a home that is full, or cannot be written or run from
            problem = error
    assert problem is not None, "there are folders"
    raise problem


def find_compiler() -> tuple[str, ...]:
    """The command of a C compiler: the environment's ``CC``, or one that has a usual name; empty without one."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    return ()


def compile_to(path: Path, source: bytes, compiler: tuple[str, ...]) -> None:
    """Put the module there whole or not at all, unless another process has by now.

    Raises:
        RuntimeError: the compiler says so, or took longer than ``TIMEOUT_S``.
        OSError: it could not be run, or its output not be written.
    """
    with OwnFolder(f".{MODULE}-", path.parent) as temporary:
        text, binary = temporary / "source.c", temporary / path.name
        text.write_bytes(source)
        includes = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("include", "platinclude"))
        command = [*compiler, *_FLAGS, *(f"-I{folder}" for folder in includes), str(text), "-o", str(binary)]
        _run(command)
        binary.chmod(0o700)
        with binary.open("rb") as file:
            os.fsync(file.fileno())  # a crash of the machine must not leave a name without its bytes
        with contextlib.suppress(FileExistsError):
            os.link(binary, path)


def load(path: Path) -> ModuleType:
    """Load a compiled module.

    Raises:
        ImportError: it is not one for this Python, or not whole.
        PermissionError: somebody else can write it.
    """
    if not is_private(path):
        raise PermissionError(f"{path.name} can be written by others")
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _load_earlier(path: Path) -> ModuleType | None:
    """What an earlier process compiled; None if there is nothing of use, which is removed."""
    if not path.exists():
        return None
    try:
        return load(path)
    except ImportError:
        path.unlink()
        return None


def _folders() -> Iterator[contextlib.AbstractContextManager[Path]]:
    """The user's cache, then one for this process alone."""
    folder = private_cache()
    if folder is not None:
        yield contextlib.nullcontext(folder)
    yield OwnFolder("sidelane-")


def private_cache() -> Path | None:
    """The user's cache, if nobody else can write there."""
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if is_private(folder):
                return folder
    return None


def is_private(path: Path) -> bool:
    """True for what is this user's, and nobody else can write."""
    found = path.stat()
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _run(command: list[str]) -> None:
    # With all its children: what is killed alone leaves them, and their hold on the pipes, behind.
    name = Path(command[0]).name
    silent, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        command, stdin=silent, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        try:
            said, _ = child.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{name} took longer than {TIMEOUT_S:.0f} s") from None
            raise
    if child.returncode:
        raise RuntimeError(f"{name} failed: {said.decode(errors='replace').strip() or child.returncode}")
