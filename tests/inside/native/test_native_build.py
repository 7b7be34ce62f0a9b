"""Compiling the helper: once, whole, by whatever compiler there is, and never an error where there is none."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from types import ModuleType

import pytest
from homeless import leave_home
from marks import long

from interpreter import Interpreter
from sidelane import config
from sidelane.native import build
from sidelane.native.build import Replays


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    # Half the time; nobody runs what is made here.
    monkeypatch.setattr(build, "COMPILER_FLAGS", ("-O0", *build.COMPILER_FLAGS[1:]))
    return tmp_path / "cache" / "sidelane"


def load() -> Replays:
    return build.load_replays.__wrapped__()


def test_it_is_compiled_once(cache: Path) -> None:
    first = load()
    assert first.module is not None
    assert first.words.startswith("compiled by ")
    (file,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    made = file.stat().st_mtime_ns
    assert load().words == "compiled before"
    assert file.stat().st_mtime_ns == made


@pytest.mark.long
def test_ranks_may_compile_at_the_same_time(cache: Path, interpreter: Interpreter, tmp_path: Path) -> None:
    script = "from sidelane.native import load_replays as load; r = load(); assert r.module.Replay, r; print(r.words)"
    interpreter.start(script, tmp_path, (), ())
    codes, words, errors = interpreter.wait()
    assert codes == [0, 0], (words, errors)
    assert len(list(cache.iterdir())) == 1, "nothing but the module is left"


SOON = """
import threading, time
from sidelane.native import build
began = time.monotonic()
found, calls = build.load_replays_soon(), 0
waited = found is None
while found is None and time.monotonic() - began < 60:
    calls += 1
    found = build.load_replays_soon()
    time.sleep(0.001)
print(waited, [one.name for one in threading.enumerate()].count("sidelane-compiles"), found.module.Replay.__name__)
"""


def test_callers_go_on_while_it_is_compiled(cache: Path, interpreter: Interpreter, tmp_path: Path) -> None:
    for waited in (True, False):
        said = interpreter.run(SOON, tmp_path).split()
        assert said in ([str(waited), "0", "Replay"], [str(waited), "1", "Replay"]), said
    assert len(list(cache.iterdir())) == 1


def test_without_a_compiler_nobody_waits_for_one(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PATH", "")
    build.load_replays.cache_clear()
    try:
        found = build.load_replays_soon()
        assert found == Replays(None, "no C compiler (looked for CC, cc, gcc, clang)")
    finally:
        build.load_replays.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (None, "no C compiler (looked for CC, cc, gcc, clang)"),
        ("echo no such; echo header >&2; exit 3", "RuntimeError: mycc failed: no such header"),
    ],
)
def test_without_a_compiler_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cache: Path,
    tmp_path: Path,
    compiler: str | None,
    words: str,
) -> None:
    monkeypatch.setenv("PATH", "")
    if compiler is not None:
        path = tmp_path / "mycc"
        path.write_text(f"#!/bin/sh\n{compiler}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", f"{path} -m64")
    build.load_replays.cache_clear()
    try:
        assert build.load_replays() == Replays(None, words)
        assert build.load_replays_soon() == build.load_replays()
    finally:
        build.load_replays.cache_clear()
    assert list(cache.iterdir()) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"repeated calls are made in Python, which is slower: {words}"


AGAIN = """
import sys
from pathlib import Path
from sidelane.native import build
build.COMPILER_FLAGS = ("-O0", *build.COMPILER_FLAGS[1:])
file, whole = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes()
for length in map(int, sys.argv[2:]):
    file.unlink()  # this process has it loaded
    file.write_bytes(whole[:length] if length >= 0 else whole[:length] + b"changed"[length:])
    file.chmod(0o700)
    found = build.load_replays.__wrapped__()
    print(found.words, found.module is not None and file.read_bytes()[:4] == whole[:4])
"""


def test_a_file_that_is_not_whole_is_made_again(cache: Path, interpreter: Interpreter, tmp_path: Path) -> None:
    """In a process of its own: to load one that is cut short is a bus error. Negative: its last bytes are changed."""
    assert load().module is not None
    (file,) = cache.iterdir()
    nbytes = file.stat().st_size
    lengths = [0, 4096, nbytes - 1, -5]
    said = interpreter.run(AGAIN, tmp_path, str(file), *map(str, lengths)).splitlines()
    assert len(said) == len(lengths)
    assert all(line.startswith("compiled by ") and line.endswith(" True") for line in said), said


@pytest.mark.parametrize(
    ("step", "error"),
    [
        long("write_whole", PermissionError(13, "read-only")),
        ("write_whole", OSError(28, "full")),
        long("_import_module", ImportError("noexec")),
    ],
    ids=str,
)
def test_a_home_that_is_of_no_use(monkeypatch: pytest.MonkeyPatch, cache: Path, step: str, error: Exception) -> None:
    real = getattr(build, step)

    def refuse(path: Path | str, *rest: object) -> object:
        if Path(path if isinstance(path, Path) else os.readlink(path)).parent == cache:
            raise error
        return real(path, *rest)

    monkeypatch.setattr(build, step, refuse)
    found = load()
    assert found.module is not None, found.words
    assert found.module.Replay is not None


def test_why_a_module_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "emptycc"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "int x;" | cc -x c -shared -fPIC - -o "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = load()
    assert found.module is None
    assert "PyInit" in found.words, found.words


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_home(monkeypatch)
    assert config.cache_folder() is None
    assert load().module is not None


@pytest.mark.parametrize("what", [long("folder"), "file", "another user", "link", "pipe"])
def test_what_others_can_write_is_not_loaded(cache: Path, what: str) -> None:
    assert load().module is not None
    (file,) = cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o700
    if what in ("folder", "file"):
        (cache if what == "folder" else file).chmod(0o777)
    elif what == "another user":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(file, 12345, -1)
    elif what == "link":
        file.rename(cache.with_name("elsewhere"))
        file.symlink_to(cache.with_name("elsewhere"))
    else:
        file.unlink()
        os.mkfifo(file)
    found = load()
    assert found.module is not None
    assert found.words.startswith("compiled by")
    if what != "folder":  # which is left alone
        assert file.is_file() and not file.is_symlink() and file.stat().st_uid == os.geteuid()
        assert load().words == "compiled before"


def test_a_file_that_takes_the_place_of_the_checked_one_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others can do this where they may write to the parent of the user's cache."""
    assert load().module is not None
    (file,) = cache.iterdir()
    checked = file.stat().st_ino
    loaded: list[int] = []
    real = build._import_module

    def swap_and_import(path: str) -> ModuleType:
        cache.rename(cache.with_name("away"))
        cache.mkdir()
        file.write_bytes(b"of somebody else")
        loaded.append(os.stat(path).st_ino)
        return real(path)

    monkeypatch.setattr(build, "_import_module", swap_and_import)
    found = load()
    assert found.module is not None and found.words == "compiled before"
    assert loaded == [checked]


def test_a_compiler_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    compiler = tmp_path / "hang"
    compiler.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "TIMEOUT_S", 1.0)
    assert load() == Replays(None, "RuntimeError: hang took longer than 1 s")
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}")
    deadline = time.monotonic() + 10
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline, "it is left behind"
        time.sleep(0.01)


@pytest.mark.parametrize("command", ['gcc "', "/dev/null"])
def test_nothing_that_is_wrong_with_the_machine_gets_out(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CC", command)
    found = load()
    assert (found.module is None) == (command != "/dev/null"), found.words


def test_the_switch_is_in_the_environment() -> None:
    assert config.from_environment({}).native
    assert not config.from_environment({"SIDELANE_NATIVE": "0"}).native
    with pytest.raises(ValueError, match="SIDELANE_NATIVE"):
        config.from_environment({"SIDELANE_NATIVE": "no"})
