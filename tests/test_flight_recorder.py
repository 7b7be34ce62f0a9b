"""The flight recorder: what the ranks write when one of them fails names that rank, here and in torch's analyser."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pickle
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from ranks import Crew, RankPool

import sidelane
from sidelane import Config, MismatchError, PeerError, cli, flight_recorder, ranges
from sidelane.cli.recorder import analyse, describe_recorded, read_dump
from sidelane.session import making

torchs = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")


@contextlib.contextmanager
def recording(folder: str) -> Iterator[None]:
    making._numbers.clear()  # ranks of the pool may have made different numbers of communicators for other tests
    flight_recorder.start(f"{folder}/")
    try:
        yield
    finally:
        flight_recorder.stop()
        assert not ranges.observers


def steps(comm: sidelane.Communicator, number: int) -> None:
    for _ in range(number):
        comm.all_reduce(torch.ones(4))
        comm.all_gather(torch.empty(comm.world_size, 3), torch.ones(3))


def one_is_late(group: dist.ProcessGroup, folder: str) -> None:
    """Rank 1 sleeps before its fifth call, for longer than the others wait."""
    with recording(folder), sidelane.Communicator(group, config=Config(timeout_s=1)) as comm:
        steps(comm, 2)
        if comm.rank == 1:
            time.sleep(2)
        with pytest.raises(PeerError):
            comm.all_to_all(torch.empty(comm.world_size), torch.ones(comm.world_size))


def one_dies(group: dist.ProcessGroup, folder: str) -> None:
    """Rank 2 is killed behind its fourth call; an asynchronous call finds it."""
    os.environ.update(SIDELANE_FLIGHT_RECORDER=folder + "/", SIDELANE_METRICS=folder + "/.calls-{rank}.prom")
    with sidelane.Communicator(group, config=Config(timeout_s=30)) as comm:
        steps(comm, 1)
        comm.all_reduce(torch.ones(4), async_op=True).wait()  # type: ignore[union-attr]
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)  # they have seen its last signals
        work = comm.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        with pytest.raises(PeerError):
            work.wait()


def one_differs(group: dist.ProcessGroup, folder: str) -> None:
    """Rank 0 makes another third call."""
    with recording(folder), sidelane.Communicator(group, config=Config(timeout_s=20)) as comm:
        steps(comm, 1)
        with pytest.raises(MismatchError):
            comm.all_reduce(torch.ones(8 if comm.rank else 9))
        own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
        dist.all_reduce(torch.ones(2), group=own)
        dist.barrier(group=own)
        dist.reduce(torch.ones(3), 0, group=own)  # Gloo's
        flight_recorder.dump()
        dist.destroy_process_group(own)


def files_of(folder: Path) -> list[str]:
    return sorted(str(file) for file in folder.iterdir() if not file.name.startswith("."))


def findings(folder: Path) -> list[tuple[str, tuple[int, ...], int]]:
    found = analyse([read_dump(Path(file)) for file in files_of(folder)])
    return [(one.kind, one.ranks, one.call) for one in found if one.kind != "failed"]


def said_by_torch(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What torch's analyser says about the dumps of a folder."""
    options = argparse.Namespace(
        trace_dir=str(folder), prefix=None, transform_ft=False, just_print_entries=False, verbose=False
    )
    options.allow_incomplete_ranks, options.mismatch_cap = True, 10
    details, version = loader.read_dir(options)
    logger = logging.getLogger("torch.distributed.flight_recorder.components.fr_logger")
    logger = logging.getLogger(getattr(getattr(torchs.logger, "logger", logger), "name", logger.name))
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, logger.name):
            torchs.build_db(details, options, version)
    finally:
        logger.removeHandler(caplog.handler)
    return caplog.text


def test_a_late_rank_is_named(pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool.run(one_is_late, 2, str(tmp_path))
    assert [Path(file).name for file in files_of(tmp_path)] == ["sidelane_trace_rank_0", "sidelane_trace_rank_1"]
    assert findings(tmp_path) == [("late", (1,), 5)]
    ended = CliRunner().invoke(cli.main, ["recorder", *files_of(tmp_path)], prog_name="sidelane")
    assert ended.exit_code == 0, ended.output
    assert "rank 1 came " in ended.output and "to call 5, all_to_all of Float [2], started" in ended.output
    assert "rank 0 raised PeerTimeoutError: " in ended.output
    said_by_torch(tmp_path, caplog)


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    crew = Crew(3)
    try:
        crew.run(one_dies, 3, str(tmp_path), dying=(2,))
    finally:
        crew.kill()
    assert findings(tmp_path) == [("missing", (2,), 4)]
    assert 'error="PeerError"} 1' in (tmp_path / ".calls-0.prom").read_text()  # settings switch both on


def test_a_call_that_differs_is_named(pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool.run(one_differs, 3, str(tmp_path))
    assert findings(tmp_path) == [("differs", (0,), 3)]
    assert "SIZE_OR_SYNTAX_MISMATCH" in said_by_torch(tmp_path, caplog)
    calls = read_dump(tmp_path / "sidelane_trace_rank_2").calls
    texts = [[describe_recorded(entry) for entry in own.values()] for own in calls.values()]
    assert texts[0][:2] == ["all_reduce of Float [4], completed", "all_gather of Float [3], completed"]
    assert texts[0][2:] == ["all_reduce of Float [8], started"]
    assert texts[1][:2] == ["all_reduce of Float [2], completed", "barrier of Byte [0], completed"]
    assert texts[1][2:] == ["reduce of Float [3], completed"]


def test_the_ring_is_bounded_and_a_dump_has_torchs_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "3")
    monkeypatch.setattr(ranges, "world_rank", lambda: 7)
    with recording(str(tmp_path)):
        for number in range(5):
            with ranges.ObservedCall("all_reduce", [torch.ones(number)], [], (6, 7), "two"):
                pass
        file = flight_recorder.dump()
        with ranges.ObservedCall("all_gather", [torch.ones(4)], [torch.ones(2)], (6, 7), "two"):
            flight_recorder.dump()
    assert file == tmp_path / "sidelane_trace_rank_7"
    found: dict[str, Any] = pickle.loads(file.read_bytes())
    assert [(entry["collective_seq_id"], entry["state"]) for entry in found["entries"]] == [
        (4, "completed"),
        (5, "completed"),
        (6, "started"),
    ]
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is not None:
        assert set(pickle.loads(dump())) <= set(found)
    assert found["pg_config"]["two"]["ranks"] == "[6, 7]"
    assert found["pg_status"]["0"] == {
        "last_enqueued_collective": 6,
        "last_started_collective": 6,
        "last_completed_collective": 5,
    }


def test_names_of_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert flight_recorder.prefix_of("runs/dump_") == "runs/dump_"
    assert flight_recorder.prefix_of(str(tmp_path)) == f"{tmp_path}/sidelane_trace_rank_"
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/var/dumps/nccl_trace_rank_")
    assert flight_recorder.prefix_of("1") == "/var/dumps/sidelane_trace_rank_"
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/var/new/trace_")
    assert flight_recorder.prefix_of("1") == "/var/new/sidelane_trace_rank_"


def test_a_dump_is_the_users_alone_and_follows_no_link(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "dumps"
    own.write_text("precious")
    folder.mkdir()
    for name in ("trace_0", f".trace_0.{os.getpid()}"):  # the dump, and a name that one could guess
        (folder / name).symlink_to(own)
    file = flight_recorder.FlightRecorder(f"{folder}/trace_", 10).dump()
    assert file == folder / "trace_0" and not file.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert own.read_text() == "precious"
    assert sorted(one.name for one in folder.iterdir()) == sorted(["trace_0", f".trace_0.{os.getpid()}"])


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "trace_0"
    wrong.write_bytes(pickle.dumps(Path("x")))  # names a class, whose code would run
    ended = CliRunner().invoke(cli.main, ["recorder", str(wrong)], prog_name="sidelane")
    assert ended.exit_code and "no dump of a flight recorder" in ended.output
