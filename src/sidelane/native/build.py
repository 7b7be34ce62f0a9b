"""Compile ``replay.c`` with the machine's C compiler, once for each version of it and of Python, and load it.

Triton compiles its launchers on the same machines in the same way, so that where kernels run this does too. Nothing is
compiled when the package is installed: wheels stay pure, and a machine without a compiler does without.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.resources
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from sidelane.config import cache_folder

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
    """The module, compiled now if no earlier process of this user has. Takes a second then. Raises nothing."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Replays(None, f"not for this Python ({sys.implementation.name}, with the GIL: the C code relies on it)")
    source = (importlib.resources.files("sidelane.native") / "replay.c").read_bytes()
    compiler = find_compiler()
    digest = hashlib.blake2b(source + repr((compiler, sys.version)).encode(), digest_size=8).hexdigest()
    name = f"{MODULE}-{digest}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    with tempfile.TemporaryDirectory(prefix="sidelane-") as temporary:
        for folder in (cache_folder(), Path(temporary)):
            path = folder / name
            try:
                return Replays(load(path), "compiled before")
            except (ImportError, OSError):  # not there, or cut short
                pass
            if not compiler:
                return Replays(None, "no C compiler (looked for CC, cc, gcc, clang)")
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                compile_to(path, source, compiler)
                return Replays(load(path), f"compiled by {Path(compiler[0]).name}")
            except PermissionError:
                continue  # a home that cannot be written: once for this process alone
            except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as problem:
                return Replays(None, f"{type(problem).__name__}: {problem}"[:_MOST_LETTERS])
    return Replays(None, "no folder to compile in")


def find_compiler() -> tuple[str, ...]:
    """The command of a C compiler: the environment's ``CC``, or one that has a usual name; empty without one."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    return ()


def compile_to(path: Path, source: bytes, compiler: tuple[str, ...]) -> None:
    """Write the module whole or not at all: ranks may do so at the same time.

    Raises:
        RuntimeError: the compiler says so.
        OSError, subprocess.SubprocessError: it could not be run, or took longer than ``TIMEOUT_S``.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{MODULE}-") as temporary:
        text, binary = Path(temporary) / "replay.c", Path(temporary) / path.name
        text.write_bytes(source)
        include = sysconfig.get_paths()["include"]
        command = [*compiler, *_FLAGS, f"-I{include}", str(text), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{Path(compiler[0]).name} failed: {done.stderr.strip() or done.returncode}")
        os.replace(binary, path)


def load(path: Path) -> ModuleType:
    """Load a compiled module.

    Raises:
        ImportError, OSError: there is none, or it is not one for this Python.
    """
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
