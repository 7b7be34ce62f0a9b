"""Compiled kernels that later processes find in the user's cache, and load without Triton. No GPU."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from homeless import leave_home
from marks import needs_triton

from interpreter import Interpreter
from sidelane.device import flags, language
from sidelane.device.language import Constant
from sidelane.errors import UnavailableError
from sidelane.execute.cuda import kernel_launch
from sidelane.execute.cuda.kernel_launch import KernelBinary, KernelTarget, compiled
from sidelane.kernels import direct, ll

CONSTANTS = {"N": 2, "CELLS": 512}
LL, LL_BROADCAST = ll.KERNELS
IMAGE = b"\x7fELF\n" + bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sidelane"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace Triton's compiler, and return the names of the kernels that it was asked for."""
    found: list[str] = []

    def compile_for(target: Any, function: Any, constants: Any, warps: int, stages: int | None) -> SimpleNamespace:
        found.append(f"{function.__name__} {sorted(constants.items())} {target.arch} {warps} {stages}")
        metadata = SimpleNamespace(name=function.__name__, num_warps=warps, shared=len(found))
        return SimpleNamespace(asm={"cubin": IMAGE}, metadata=metadata)

    monkeypatch.setattr(kernel_launch, "compile_for", compile_for)
    backends = SimpleNamespace(GPUTarget=lambda kind, arch, warp: SimpleNamespace(arch=arch))
    monkeypatch.setitem(sys.modules, "triton.backends.compiler", backends)
    monkeypatch.setattr(kernel_launch, "compiler_digest", lambda: "3.6")
    return found


def get(**changed: Any) -> KernelBinary:
    given = {
        "target": KernelTarget("cuda", 90, 32),
        "function": LL,
        "constants": CONSTANTS,
        "warps": 8,
        "stages": None,
    }
    return compiled(**{**given, **changed})


def test_a_kernel_is_compiled_once(made: list[str], cache: Path) -> None:
    first = get()
    assert get() == first and first.image == IMAGE
    assert len(made) == 1
    (file,) = cache.iterdir()
    assert file.name.startswith("ll-") and file.suffix == ".cubin"


def test_what_changes_the_binary_changes_its_file(
    made: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get()
    others: list[dict[str, Any]] = [
        {"target": KernelTarget("cuda", 100, 32)},
        {"target": KernelTarget("hip", "gfx942", 64)},
        {"function": LL_BROADCAST},
        {"constants": {**CONSTANTS, "N": 4}},
        {"warps": 4},
        {"stages": 3},
    ]
    for changed in others:
        get(**changed)
    changes = [
        lambda patch: patch.setattr(kernel_launch, "compiler_digest", lambda: "3.7"),
        lambda patch: patch.setenv("DISABLE_PTXAS_OPT", "1"),
        lambda patch: patch.setattr(flags, "POLLS", Constant(7)),  # of a module whose functions the kernel calls
        lambda patch: patch.setattr(kernel_launch, "file_digest", lambda path: "another" * (path == flags.__file__)),
        lambda patch: patch.setattr(KernelBinary, "__slots__", ("name", "image")),  # a file of an earlier version
        lambda patch: patch.setattr(kernel_launch, "DEPENDENT_ON", ()),
        lambda patch: patch.setenv("TRITON_CACHE_DIR", "/elsewhere"),  # which is no matter
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            get()
    assert len(made) == len(others) + len(changes) == len(list(cache.iterdir()))
    get()
    assert len(made) == len(others) + len(changes)


def test_a_kernels_source_is_that_of_all_that_it_calls(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (_, reduces, _), digest = direct.KERNELS, kernel_launch.file_digest
    get(function=reduces)
    with monkeypatch.context() as patch:  # what it asks while it is compiled
        patch.setattr(kernel_launch, "file_digest", lambda path: digest(path) + "!" * (path == language.__file__))
        get(function=reduces)
    assert len(made) == 2
    reduces.made()
    get(function=reduces)
    assert len(made) == 2, "Triton's kernel is made of the same source"


@pytest.mark.parametrize("harm", ["cut", "changed", "empty", "foreign", "head", "link", "pipe"])
def test_a_file_that_is_not_whole_or_not_ours_is_replaced(harm: str, made: list[str], cache: Path) -> None:
    first = get()
    (file,) = cache.iterdir()
    stored = file.read_bytes()
    assert KernelBinary.of_bytes(stored) == first
    if harm == "foreign":
        file.chmod(0o666)
    elif harm == "link":
        file.symlink_to(file.rename(cache.with_name("elsewhere")))
    elif harm == "pipe":
        file.unlink()
        os.mkfifo(file, 0o600)
    else:
        cut = {"cut": stored[:-1], "changed": stored[:-1] + b"!", "empty": b"", "head": b"0" + stored[1:]}
        file.write_bytes(cut[harm])
    assert get().image == first.image
    assert len(made) == 2
    assert file.stat().st_mode & 0o777 == 0o600
    get()
    assert len(made) == 2 and [file] == list(cache.iterdir())


def test_without_a_folder_of_this_user_every_process_compiles(
    made: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get()
    cache.chmod(0o777)  # others could put kernels there
    get()
    assert len(made) == 2
    leave_home(monkeypatch)
    get()
    assert len(made) == 3


def test_a_folder_that_cannot_be_written_is_no_error(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    get()
    get()
    assert len(made) == 2


def test_writers_at_once_leave_one_whole_file(made: list[str], cache: Path) -> None:
    get()
    (place,) = cache.iterdir()
    torn: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                if KernelBinary.of_bytes(stored := place.read_bytes()) is None:
                    torn.append(stored[:100])

    def write() -> None:
        for _ in range(4):
            place.unlink(missing_ok=True)
            get()

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=write) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(20)
    done.set()
    reader.join(20)
    assert not torn and len(made) > 8
    assert [place] == list(cache.iterdir())


def test_without_triton_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(kernel_launch, "compiler_digest", kernel_launch.compiler_digest.__wrapped__)
    for name in [name for name in sys.modules if name.startswith("triton.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnavailableError, match="kernels need Triton"):
        get()


PROGRAM = """
import sys
import sidelane.execute.cuda.kernel_program  # all that a collective in a kernel imports
from sidelane.execute.cuda.kernel_launch import KernelTarget, compiled
from sidelane.device.launch import LaunchSite
from sidelane.kernels import ll
from sidelane.program.collective import Reduction
site = LaunchSite(0, (1 << 20, 1 << 21), 4096, 8192, 4)
launch = ll.arrange(site, 1 << 22, 1 << 23, 4096, Reduction("sum", "bfloat16"), distinct=False)
found = compiled(KernelTarget("cuda", 90, 32), launch.kernel, launch.constants, launch.warps, None)
print(found.name, found.warps, found.shared_bytes, len(found.image), "triton" in sys.modules)
"""


@needs_triton
def test_a_second_process_does_without_triton(
    cache: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    first, second = (interpreter.run(PROGRAM, tmp_path).split() for _ in range(2))
    *found, imported = first
    assert imported == "True"
    assert second == [*found, "False"]
