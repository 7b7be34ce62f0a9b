"""Files that a setting or an option names: only regular ones are opened, and they are written in one step."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from choices import KEY
from click.testing import CliRunner

from sidelane import cli
from sidelane.choice import store
from sidelane.cli import recorder
from sidelane.user_files import write_whole
from sidelane_lab.harness import study
from sidelane_lab.machines import load
from sidelane_lab.pairs.isolated import isolated_times
from sidelane_lab.traces.kineto import read_kineto
from sidelane_lab.traces.strategies import plan_trace

READERS: dict[str, Callable[[Path], object]] = {
    "profile": lambda path: store.in_force(str(path), KEY),
    "machine": lambda path: load.find(str(path)),
    "results": study.read,
    "times": lambda path: isolated_times(path, "cpu", 2),
    "recorder": recorder.read_dump,
    "kineto": read_kineto,
}


TIMES = {"state": "started", "time_created_ns": 1 << 60, "is_p2p": False}
CALLS = [
    {"process_group": (group, "default_pg"), "collective_seq_id": number, "profiling_name": "nccl:all_reduce"}
    | {"input_sizes": [[4, 2]], "input_dtypes": ["Float"], **TIMES}
    for group in ("0", "1")
    for number in (1, 2, 3)
]
DUMP = {
    "version": "2.4",
    "pg_config": {name: {"name": name, "ranks": "[0, 1]"} for name in ("0", "1")},
    "entries": CALLS,
    "sidelane": {"rank": 1, "failures": [{"text": "PeerError: rank 0 is gone", "ranks": [0]}]},
}
KERNEL = {"ph": "X", "cat": "kernel", "tid": 7}
EVENTS = [
    {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 1.0, "dur": 9.0, "tid": 3}
    | {"args": {"Input Dims": [[16, 2]], "Input type": ["float"]}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2.0, "dur": 2.0, "tid": 3}
    | {"args": {"correlation": 77}},
    {**KERNEL, "name": "gemm", "ts": 100.0, "dur": 50.0, "args": {"stream": 7, "device": 0}},
    {**KERNEL, "name": "ncclKernel_SendRecv", "ts": 150.0, "dur": 30.0, "args": {"stream": 20, "correlation": 77}},
    {**KERNEL, "name": "ncclDevKernel_AllGather", "ts": 190.0, "dur": 30.0}
    | {"args": {"stream": 20, "In msg nelems": 1024, "dtype": "BFloat16", "Group size": 8}},
]
DAMAGES = 300
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 3.5, 1e308, 10**300, float("nan"), "", "\x1b[31m", "\ud800", "[0,"),
    *([], [[]], {}, {"a": 1}, [10**17] * 9),
)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Bytes that were changed, cut out, put in twice, or made up."""
    begin, length = chance.randrange(len(content)), chance.choice((1, 1, 2, 8, 40))
    middle = content[begin : begin + length]
    made = chance.choice((b"", chance.randbytes(length), middle * 2, b"\x1b[31m", b"\xff" * length))
    return content[:begin] + made + content[begin + length :] if chance.random() < 0.9 else content[:begin]


def with_something_odd(value: Any, chance: random.Random) -> Any:
    """A copy of plain values of which one is another one."""
    if not isinstance(value, dict | list | tuple) or not value or chance.random() < 0.1:
        return chance.choice(ODD)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    chosen = chance.choice(list(keys))
    if isinstance(value, dict) and chance.random() < 0.1:
        return {key: one for key, one in value.items() if key != chosen}
    made = [(key, with_something_odd(value[key], chance) if key == chosen else value[key]) for key in keys]
    return dict(made) if isinstance(value, dict) else type(value)(one for _, one in made)


def damages(kind: str, count: int, seed: int = 1) -> Iterator[bytes]:
    """Damaged files of a kind."""
    chance = random.Random(seed)
    for number in range(count):
        if kind == "recorder":
            protocol = (2, 4)[number % 2]  # torch's, and ours
            values = with_something_odd(DUMP, chance) if number % 3 else DUMP
            content = pickle.dumps(values, protocol)
        else:
            values = with_something_odd({"traceEvents": EVENTS}, chance) if number % 3 else {"traceEvents": EVENTS}
            content = json.dumps(values).encode()
        yield damaged(content, chance) if number % 3 != 1 else content


@pytest.fixture
def bounded() -> Iterator[None]:
    """A reader that waits for the other end of a pipe ends with an error."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for the other end")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
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


@pytest.mark.usefixtures("bounded")
def test_damaged_dumps_are_refused_or_read(tmp_path: Path) -> None:
    """By the command: no traceback, no escape code, and nothing of a file runs."""
    good, bad = tmp_path / "dump_0", tmp_path / "dump_1"
    good.write_bytes(pickle.dumps({**DUMP, "sidelane": {"rank": 0}}))
    codes = []
    for number, content in enumerate(damages("recorder", DAMAGES)):
        bad.write_bytes(content)
        ended = CliRunner().invoke(cli.main, ["recorder", str(good), str(bad), *["--json", "-"] * (number % 7 == 0)])
        assert isinstance(ended.exception, SystemExit | None), (number, ended.exc_info)
        assert ended.exit_code in (0, 2) and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", ended.output), number
        codes.append(ended.exit_code)
    assert DAMAGES / 10 < sum(codes) / 2 < DAMAGES


@pytest.mark.parametrize(
    "damaged",
    [
        pickle.dumps(print),
        b"\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x10.",  # bytes of a pebibyte
        b"\x80\x02]r\xff\xff\xff\xff.",  # kept under a number for which the reader in C makes room
        pickle.dumps({**DUMP, "pg_config": {"0": {"ranks": "[0, 1"}}}),
        pickle.dumps({**DUMP, "pg_config": {"0": {"ranks": "__import__('os')"}}}),
        pickle.dumps({**DUMP, "entries": [{**CALLS[0], "input_sizes": [["\x1b[31m"]]}]}),
        pickle.dumps({**DUMP, "entries": [{**CALLS[0], "process_group": ()}]}),
    ],
)
def test_what_is_no_dump_is_refused_in_a_sentence(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "dump_1").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"dump_1: no dump of a flight recorder \([^\x1b]*\)$"):
        recorder.read_dump(tmp_path / "dump_1")


@pytest.mark.usefixtures("bounded")
def test_damaged_traces_are_refused_or_take_a_time_that_a_step_has(tmp_path: Path) -> None:
    path, machine, read = tmp_path / "trace.json", load.named("h200x4"), 0
    refusals: set[int] = set()
    for number, content in enumerate(damages("kineto", DAMAGES)):
        path.write_bytes(content)
        try:
            found = plan_trace(machine, read_kineto(path), is_same=False)
        except ValueError as problem:
            refusals.add(str(problem).replace(path.name, "NAME", 1).count("NAME"))
        else:
            assert 0 <= found.library_us <= 1e10, (number, found.library_us)
            read += 1
    assert DAMAGES / 20 < read < DAMAGES and refusals == {1}, "each names the file"
