"""The log: a line for each communicator and each new call, one for each reason against Sidelane, none for repeats."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import sidelane
from interpreter import Interpreter
from sidelane import Config, log, ranges
from sidelane.choice.key import key_here
from sidelane.choice.store import user_file
from sidelane.config import from_environment


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.levelname} {record.getMessage()}")


@on_ranks(2)
def test_a_line_for_what_is_new(group: dist.ProcessGroup) -> None:
    lines, logger = Lines(), logging.getLogger("sidelane")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        with sidelane.Communicator(group, config=Config(timeout_s=30)) as comm:
            for _ in range(3):
                comm.all_gather(torch.empty(comm.world_size, 7), torch.ones(7))
                comm.all_reduce(torch.ones(5, dtype=torch.int32))
            comm.all_gather(torch.empty(comm.world_size, 8), torch.ones(8))
            assert comm.memory().own > 1 << 20
        own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
        for _ in range(2):
            dist.all_reduce(torch.ones(3, dtype=torch.float64), op=dist.ReduceOp.PRODUCT, group=own)
            dist.all_reduce(torch.ones(3), group=own)
        dist.destroy_process_group(own)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(logging.NOTSET)
    found, rank = lines.found, dist.get_rank(group)
    made = [line for line in found if "communicator of ranks" in line]
    calls = [line for line in found if line.startswith(f"INFO rank {rank}: ") and " ranks, " in line]
    others = [line for line in found if line.startswith("WARNING ")]
    assert made[0].startswith(f"INFO rank {rank} of 2 on cpu: communicator of ranks [")
    for part in ("it chooses by ", "; sidelane ", f"torch {torch.__version__}", "symmetric memory: "):
        assert part in made[0], made[0]
    assert [line.partition("(")[0] for line in calls[:3]] == [f"INFO rank {rank}: {k}" for k in KINDS]
    groups = [line for line in found if line.startswith("INFO group ")]
    assert len(groups) == 1 and ": all_reduce of float32 on cpu is made by sidelane: " in groups[0], groups
    grown = [line for line in found if "staging" in line]  # of the communicator, and of the group
    assert grown == ["INFO staging grows from 0 to 1M on each rank"] * 2, grown
    assert len(others) == 1 and "all_reduce of float64 on cpu is made by gloo: " in others[0], others


WARNING = "[sidelane] WARNING of use"
KINDS = ("all_gather", "all_reduce", "all_gather")

PROGRAM = """
import warnings
warnings.simplefilter("ignore")
from sidelane import config, log
config.show_log()
log.calls.info("of interest")
log.calls.warning("of use")
"""


@pytest.mark.parametrize(
    ("level", "printed"),
    [
        ("", []),
        ("warn", ["[sidelane] WARNING of use"]),
        ("INFO", ["[sidelane] INFO of interest", "[sidelane] WARNING of use"]),
    ],
)
def test_what_is_printed(
    level: str, printed: list[str], monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIDELANE_LOG", level)
    interpreter.start(PROGRAM, tmp_path, ())
    codes, said, (errors,) = interpreter.wait()
    assert (codes, said) == ([0], [""])
    assert errors.splitlines() == printed


COMMUNICATOR = """
import torch.distributed as dist
from sidelane import Communicator, Config
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with Communicator(device="cpu", config=Config(timeout_s=9)):
    pass
dist.destroy_process_group()
"""


def test_settings_of_a_communicator_do_not_hide_the_log(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDELANE_LOG", "INFO")
    interpreter.start(COMMUNICATOR, tmp_path, ())
    (code,), _, (errors,) = interpreter.wait()
    assert code == 0 and "[sidelane] INFO rank 0 of 1 on cpu: communicator of ranks [0]" in errors, errors
    monkeypatch.setenv("SIDELANE_LOG", "loud")
    interpreter.start(COMMUNICATOR, tmp_path, ())
    (code,), _, (errors,) = interpreter.wait()
    assert code and "SIDELANE_LOG: no such level" in errors


def test_a_handler_of_the_program_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, lines = logging.getLogger("sidelane"), Lines()
    monkeypatch.setattr(logger, "handlers", [lines])
    monkeypatch.setattr(logger, "level", logger.level)
    log.show(logging.INFO)
    assert logger.handlers == [lines] and logger.propagate
    logger.setLevel(logging.NOTSET)


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise LookupError("a handler of the program")


class Spoiled(Lines):
    def filter(self, record: logging.LogRecord) -> bool:
        raise LookupError("a filter of the program")


@on_ranks(2)
@pytest.mark.parametrize("handler", [Broken, Spoiled])
def test_a_log_of_the_program_that_fails_fails_no_call(
    group: dist.ProcessGroup, handler: type[logging.Handler]
) -> None:
    """Calls that are new log a line: those of a communicator and of a group, and those that go to Gloo."""
    broken, logger = handler(), logging.getLogger("sidelane")
    if dist.get_rank(group):
        logger.addHandler(broken)
    logger.setLevel(logging.INFO)
    try:
        with sidelane.Communicator(group, config=Config(timeout_s=30)) as comm:
            comm.all_reduce(torch.ones(5))
        own = dist.new_group(dist.get_process_group_ranks(group), backend="sidelane")
        for dtype in (torch.float32, torch.float64):
            dist.all_reduce(torch.ones(3, dtype=dtype), group=own)
        dist.destroy_process_group(own)
        ranges.observe(object())  # type: ignore[arg-type]  # each of its methods fails, and is logged
        try:
            with sidelane.Communicator(group, config=Config(timeout_s=30)) as comm:
                comm.all_reduce(torch.ones(5))
        finally:
            ranges.leave(ranges.observers[-1])
    finally:
        logger.removeHandler(broken)
        logger.setLevel(logging.NOTSET)


def test_a_log_that_fails_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log.calls.logger, "handlers", [Broken()])
    log.calls.warning("of use")
    assert "LookupError: a handler of the program" in capsys.readouterr().err
    lines = Lines()
    monkeypatch.setattr(log.calls.logger, "handlers", [lines])
    lines.setFormatter(logging.Formatter("%(filename)s"))
    lines.emit = lambda record: lines.found.append(lines.format(record))  # type: ignore[method-assign]
    log.calls.warning("of use")
    assert lines.found == [Path(__file__).name]


def test_levels_that_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"SIDELANE_LOG: no such level \(value='loud', allowed=DEBUG, INFO, WARN"):
        from_environment({"SIDELANE_LOG": "loud"})


@on_ranks(2)
def test_a_profile_that_is_not_used_is_a_warning(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """A file of the user's that is no profile, for two communicators."""
    lines, logger = Lines(), logging.getLogger("sidelane")
    logger.addHandler(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        if dist.get_rank(group) == 0:
            path = user_file(key_here("cpu"))
            assert path is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        for _ in range(2):
            sidelane.Communicator(group, config=Config(timeout_s=30)).close()
    logger.removeHandler(lines)
    unused = [line for line in lines.found if line.startswith("WARNING the profile of this user is not used: ")]
    assert len(unused) == (dist.get_rank(group) == 0), lines.found
