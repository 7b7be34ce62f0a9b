"""Files that a setting or an option names: only regular ones are opened, and they are written in one step."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from choices import KEY

from sidelane.c3 import measured_curves
from sidelane.choice import store
from sidelane.cli import recorder
from sidelane.user_files import write_whole
from sidelane_lab.harness import study
from sidelane_lab.machines import load
from sidelane_lab.traces.chakra import read_chakra
from sidelane_lab.traces.kineto import read_kineto

READERS: dict[str, Callable[[Path], object]] = {
    "profile": lambda path: store.in_force(str(path), KEY),
    "machine": lambda path: load.find(str(path)),
    "results": study.read,
    "times": lambda path: measured_curves.isolated_times(path, "cpu", 2),
    "recorder": recorder.read,
    "chakra": read_chakra,
    "kineto": read_kineto,
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """A reader that waits for the other end of a pipe ends with an error."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for the other end")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "named.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")  # which never ends
    else:
        pipe = path if kind == "pipe" else tmp_path / "pipe"
        os.mkfifo(pipe)
        if pipe is not path:
            path.symlink_to(pipe)
    with pytest.raises((ValueError, OSError)) as caught:
        READERS[reader](path)
    assert "named.json" in str(caught.value)


def test_a_link_to_a_file_is_followed_to_read(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("no profile")
    (tmp_path / "named.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(ValueError, match="named.json"):
        store.in_force(str(tmp_path / "named.json"), KEY)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_is_written_in_one_step_and_takes_the_place_of_a_link(tmp_path: Path, mode: int) -> None:
    real, path = tmp_path / "real", tmp_path / "folder" / "named"
    real.write_bytes(b"precious")
    path.parent.mkdir()
    path.symlink_to(real)
    write_whole(path, b"new", mode)
    assert (path.read_bytes(), real.read_bytes()) == (b"new", b"precious")
    assert not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == mode
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    path = tmp_path / "named"
    path.write_bytes(b"before")
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
