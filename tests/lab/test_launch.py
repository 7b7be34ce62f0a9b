"""Ranks as processes: what comes back, and what is left when one fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from interpreter import Interpreter
from sidelane import Communicator, Config
from sidelane.config import override
from sidelane.machine import local
from sidelane_lab.harness import launch
from sidelane_lab.harness.launch import LaunchTarget, Rank, RankFailedError, choose_target, run_ranks

PATIENT_S = 60.0
"""However busy the machine is."""


def add_ranks(rank: Rank, offset: int) -> tuple[float, str]:
    total = torch.tensor(float(rank.rank + offset))
    dist.all_reduce(total)
    rank.say(f"rank {rank.rank} has {total.item():g}")
    return total.item(), str(rank.device)


def fail_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        raise LookupError("rank one has lost its way")
    dist.barrier()


def refuse(rank: Rank) -> None:
    raise ValueError("refuse: colour (value='blue', allowed=red)")


def die_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(7)
    dist.barrier()


def die_after_the_others_failed(rank: Rank, folder: str) -> None:
    seen = Path(folder, "seen")
    dist.barrier()  # else rank 1 may still be connecting when rank 0 is gone
    if rank.rank == 1:
        assert until(seen.exists)
        time.sleep(0.2)  # what rank 0 raised is on its way
        os._exit(7)
    seen.touch()
    raise LookupError("rank one does not answer")


def fail_unheard_on_rank_1(rank: Rank, folder: str) -> None:
    raised = Path(folder, "raised")
    if rank.rank == 1:
        raise SlowToTell(raised)
    assert until(raised.exists)
    raise LookupError("rank one does not answer")


class SlowToTell(Exception):
    """Its text is ready only after another rank has failed because of it."""

    def __init__(self, raised: Path) -> None:
        self.raised = raised

    def __str__(self) -> str:
        self.raised.touch()
        time.sleep(0.2)
        return "the first of all"


def fail_inside_a_communicator(rank: Rank) -> None:
    with Communicator(config=Config(timeout_s=20)) as communicator:
        communicator.all_reduce(torch.ones(3))
        try:
            if rank.rank == 1:
                raise LookupError("rank one has lost its way")
            communicator.all_reduce(torch.ones(3))
        finally:
            # Closed here, so that the peers hear of it; and then there is more to clean up than they have.
            communicator.close()
            time.sleep(0.2 * rank.rank)


def talk_for_ever(rank: Rank) -> None:
    while True:
        rank.say("x")
        if rank.rank:
            time.sleep(1)


def end_in_the_middle_of_a_line(rank: Rank) -> None:
    if rank.rank == 0:
        rank.say("a row")
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        rank.say("x" * (64 << 20))  # longer than the parent, which is busy with the row, leaves room for
    time.sleep(100)


def wait_for_nothing(rank: Rank, folder: str) -> None:
    """Deaf to being asked to end, as whoever waits inside of a library is."""
    launch.GRACE_S = PATIENT_S
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, f"rank{rank.rank}").write_text(str(os.getpid()))
    time.sleep(100)


def sleep_and_clean_up(rank: Rank, folder: str) -> None:
    launch.GRACE_S = PATIENT_S
    path = Path(folder, f"rank{rank.rank}")
    try:
        path.write_text(str(os.getpid()))  # from here on it may be interrupted
        time.sleep(100)
    finally:
        path.unlink(missing_ok=True)


def leave_nothing(rank: Rank) -> None:
    return None


@pytest.fixture
def every_rank_is_heard(monkeypatch: pytest.MonkeyPatch):
    """However busy the machine is: these tests are about who is at fault, not about how soon ranks tell of it."""
    monkeypatch.setattr(launch, "SETTLE_S", 60.0)


def no_children_left() -> bool:
    # Other tests keep ranks of their own, under other names.
    return not [child for child in multiprocessing.active_children() if child.name.startswith("sidelane-rank")]


def test_result_and_progress_are_those_of_rank_0():
    said: list[str] = []
    assert run_ranks(add_ranks, 2, 10, timeout_s=30, progress=said.append) == (21.0, "cpu")
    assert said == ["rank 0 has 21"]
    assert no_children_left()


def test_a_failing_rank_is_named_with_its_traceback():
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed") as caught:
        run_ranks(fail_on_rank_1, 2, timeout_s=30)
    assert caught.value.rank == 1
    assert "fail_on_rank_1" in str(caught.value)
    assert "LookupError: rank one has lost its way" in str(caught.value)
    assert caught.value.refused == ""
    assert no_children_left()


def test_refused_arguments_are_told_apart():
    with pytest.raises(RankFailedError) as caught:
        run_ranks(refuse, 1, timeout_s=30)
    assert caught.value.refused == "refuse: colour (value='blue', allowed=red)"


@pytest.mark.usefixtures("every_rank_is_heard")
def test_a_dead_rank_is_named_with_its_exit_code():
    with pytest.raises(RankFailedError, match="exit code 7") as caught:
        run_ranks(die_on_rank_1, 2, timeout_s=30)
    assert caught.value.rank == 1
    assert no_children_left()


@pytest.mark.usefixtures("every_rank_is_heard")
def test_a_rank_that_died_is_named_though_others_tell_of_it_first(tmp_path: Path):
    with pytest.raises(RankFailedError, match=r"^rank 1 of 2 failed:\nthe process ended with exit code 7") as caught:
        run_ranks(die_after_the_others_failed, 2, str(tmp_path), timeout_s=30)
    assert caught.value.rank == 1
    assert "rank 0 then failed too: LookupError: rank one does not answer" in str(caught.value)


@pytest.mark.usefixtures("every_rank_is_heard")
def test_the_rank_that_raised_first_is_named_though_it_is_heard_last(tmp_path: Path):
    with pytest.raises(RankFailedError, match="rank 0 then failed too: LookupError") as caught:
        run_ranks(fail_unheard_on_rank_1, 2, str(tmp_path), timeout_s=30)
    assert caught.value.rank == 1
    assert "SlowToTell: the first of all" in str(caught.value)


@pytest.mark.usefixtures("every_rank_is_heard")
def test_the_rank_with_an_error_of_its_own_is_named_though_it_cleans_up_longer():
    with pytest.raises(RankFailedError, match="rank 0 then failed too: .*rank 1 closed its communicator") as caught:
        run_ranks(fail_inside_a_communicator, 2, timeout_s=30)
    assert caught.value.rank == 1
    assert "LookupError: rank one has lost its way" in str(caught.value)


def test_ranks_that_talk_all_the_time_are_ended_too():
    until = time.monotonic() + 60

    def busy(line: str) -> None:
        assert time.monotonic() < until, "the time-out is not looked at"
        time.sleep(0.001)

    with pytest.raises(RankFailedError, match="not finished within 3 s"):
        run_ranks(talk_for_ever, 2, timeout_s=3, progress=busy)
    assert no_children_left()


def test_a_rank_that_ends_in_the_middle_of_a_line_is_one_that_died():
    said: list[str] = []

    def slow(line: str) -> None:
        said.append(line)
        time.sleep(1)

    with pytest.raises(RankFailedError, match="rank 0 of 2 failed:\nthe process ended with exit code -9"):
        run_ranks(end_in_the_middle_of_a_line, 2, timeout_s=30, progress=slow)
    assert said == ["a row"]


def test_ranks_that_do_not_finish_are_ended_and_clean_up(tmp_path: Path):
    with pytest.raises(RankFailedError, match=r"not finished within 3 s: rank\(s\) 0, 1"):
        run_ranks(sleep_and_clean_up, 2, str(tmp_path), timeout_s=3)
    assert no_children_left()
    assert list(tmp_path.iterdir()) == []


def parent_of(function: str, interpreter: Interpreter, folder: Path) -> tuple[int, list[int]]:
    """The id of a program that runs ``function`` on two ranks, a session of its own, and those of these at work."""
    script = (
        f"import os; os.setsid(); sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_launch import *\n"
        f"launch.GRACE_S = {PATIENT_S}\n"
        f"run_ranks({function}, 2, {str(folder)!r}, timeout_s=100)\n"
    )
    (parent,) = interpreter.start(script, folder, ())
    files = [folder / "rank0", folder / "rank1"]
    assert until(lambda: all(file.exists() and file.read_text() for file in files)), "ranks did not start"
    return parent, [int(file.read_text()) for file in files]


@pytest.mark.long
def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(interpreter: Interpreter, tmp_path: Path):
    parent, ranks = parent_of("wait_for_nothing", interpreter, tmp_path)
    for _ in range(2):
        os.killpg(parent, signal.SIGINT)
        time.sleep(0.5)
    interpreter.wait(60)
    assert until(lambda: not any(map(alive, ranks))), "ranks outlived their parent"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed parent"])
def test_ranks_end_with_their_parent(interpreter: Interpreter, tmp_path: Path, how: signal.Signals):
    parent, ranks = parent_of("sleep_and_clean_up", interpreter, tmp_path)
    if how is signal.SIGINT:
        os.killpg(parent, how)  # a terminal sends Ctrl-C to all of them
    else:
        os.kill(parent, how)
    codes, *_ = interpreter.wait(60)
    assert until(lambda: not any(map(alive, ranks))), "ranks outlived their parent"
    assert not list(tmp_path.glob("rank*")), "ranks did not clean up"
    if how is signal.SIGINT:
        errors = (tmp_path / "err-0").read_text()  # of the ranks as well, which have ended
        assert errors.count("KeyboardInterrupt") == 1, errors
    else:
        assert codes == [-how]


def until(condition, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        # A killed orphan may stay a zombie where nobody collects it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_torchrun_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_target() == LaunchTarget("cpu", 2)
    with pytest.raises(ValueError, match="torchrun"):
        choose_target(ranks=3)
    with pytest.raises(ValueError, match="torchrun"):
        run_ranks(leave_nothing, 3)


def test_one_gpu_is_enough_where_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "device_type_and_count", lambda: ("cuda", 1))
    assert choose_target(fewest=1) == choose_target(1, fewest=1) == LaunchTarget("cuda", 1)
    assert choose_target().on_cpu and choose_target(2, fewest=1) == LaunchTarget("cpu", 2)


def test_places():
    assert choose_target(3, "cpu") == LaunchTarget("cpu", 3)
    with pytest.raises(ValueError, match="device"):
        choose_target(device="tpu")
    with pytest.raises(ValueError, match="world_size"):
        LaunchTarget("cpu", 0)
    with pytest.raises(ValueError, match="fewer devices than ranks"):
        LaunchTarget("cuda", 1000)


def test_ranks_share_a_gpu_where_host_memory_is_between_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "device_type_and_count", lambda: ("cuda", 1))
    with override(Config(peers="host")):
        assert choose_target(2, "gpu").shares_devices and not choose_target(1, "gpu").shares_devices
    with pytest.raises(ValueError, match="fewer devices than ranks"):
        choose_target(2, "gpu")


def listening_outside(rank: Rank) -> list[str]:
    """Addresses other than the loopback's on which this process or its parent listen, while the ranks have a group."""
    dist.barrier()
    found = [f"{pid}: {address}" for pid in (os.getpid(), os.getppid()) for address in _listens(pid)]
    dist.barrier()
    everybody: list[list[str]] = [[] for _ in range(rank.world_size)]
    dist.all_gather_object(everybody, found)
    return [text for texts in everybody for text in texts]


def _listens(pid: int) -> list[str]:
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:
            continue  # closed meanwhile
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1], fields[3], fields[9]
            if state == "0A" and f"socket:[{inode}]" in own:
                found.append(address)
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="the kernel tells who listens")
def test_ranks_of_a_study_listen_to_nobody_else() -> None:
    listening = run_ranks(listening_outside, 2, timeout_s=30)
    assert listening, "the store and gloo do listen"
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    outside = [text for text in listening if not text.partition(": ")[2].startswith(loopback)]
    assert not outside
