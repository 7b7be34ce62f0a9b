"""Run the tests that need GPUs and, if asked, write down what ran where. `make test-device` calls it.

Options that it does not know are pytest's. Lanes are processes side by side: tests wait more than they compute.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from outputs import file_to_write
from sidelane.machine import local
from sidelane_lab.harness import provenance

TESTS = Path(__file__).resolve().parent.parent / "tests" / "device"
MOST_CHARACTERS = 3000
ENDING_S = 5.0
"""For a lane that is interrupted to write what it has."""
UNFINISHED = "unfinished"
UNKNOWN_S = 5.0
"""Seconds of a test that no earlier run has timed."""
DURATIONS = TESTS.parent.parent / "results" / "h200x2" / "device-tests.txt"


def files() -> list[str]:
    """Return files of tests for GPUs. To collect the others as well would take each lane half a minute."""
    return [
        str(path)
        for path in sorted(TESTS.parent.rglob("test_*.py"))
        if path.parent == TESTS or re.search(r"^@on_ranks\([^@]*\bgpu=", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


class Share:
    """A pytest plugin that keeps one lane's part of the tests: pieces of files, shared out by their durations.

    Every lane collects all tests and finds the same parts. Tests of one file share the start of their ranks, so a piece
    is as long as half a lane.

    Args:
        lane, lanes: number of this lane, and of all.
        durations: seconds of tests in an earlier run, by name; others count as ``UNKNOWN_S``.
    """

    def __init__(self, lane: int, lanes: int, durations: Mapping[str, float]) -> None:
        self._lane, self._lanes, self._durations = lane, lanes, durations

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = set(parts([item.nodeid for item in items], self._lanes, self._durations)[self._lane])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


def parts(names: Sequence[str], lanes: int, durations: Mapping[str, float]) -> list[list[str]]:
    """Share tests out among lanes, the longest pieces first, each to the lane that has least to do.

    >>> parts(["a::1", "a::2", "b::1", "c::1"], 2, {"a::1": 9, "a::2": 9, "b::1": 8, "c::1": 2})
    [['a::1', 'b::1'], ['a::2', 'c::1']]
    """
    seconds = {name: durations.get(name, UNKNOWN_S) for name in names}
    most = sum(seconds.values()) / lanes / 2
    pieces: list[list[str]] = []
    for _, of_file in itertools.groupby(names, key=lambda name: name.partition("::")[0]):
        length = math.inf
        for name in of_file:
            if length + seconds[name] > most:
                pieces.append([])
                length = 0.0
            pieces[-1].append(name)
            length += seconds[name]
    shared: list[list[str]] = [[] for _ in range(lanes)]
    busy = [0.0] * lanes
    for piece in sorted(pieces, key=lambda piece: -sum(map(seconds.__getitem__, piece))):
        lane = busy.index(min(busy))
        shared[lane] += piece
        busy[lane] += sum(map(seconds.__getitem__, piece))
    return shared


def durations_of(summary: Path) -> dict[str, float]:
    """Return the seconds of the tests that a summary says have passed."""
    found = re.findall(r"^passed +([\d.]+) s  (\S.*)$", summary.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: float(seconds) for seconds, name in found}


class Summary:
    """A pytest plugin that keeps each test's outcome and duration, and says at once what failed: GPUs are lent by the
    minute, and a run that is cut short prints nothing at its end."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has three phases: its outcome is the first that is not "passed", its duration that of all.
        outcome, seconds = self.outcomes.get(report.nodeid, (UNFINISHED, 0.0))
        if outcome == UNFINISHED and report.outcome != "passed":
            outcome = report.outcome if report.when == "call" or report.outcome == "skipped" else "error"
        elif outcome == UNFINISHED and report.when == "teardown":
            outcome = report.outcome
        self.outcomes[report.nodeid] = (outcome, seconds + report.duration)
        if report.failed:
            print(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext[-MOST_CHARACTERS:]}", flush=True)

    def text(self, seconds: float) -> str:
        totals = Counter(outcome for outcome, _ in self.outcomes.values())
        lines = [
            *provenance.heading(),
            f"result:   {', '.join(f'{number} {name}' for name, number in sorted(totals.items()))} in {seconds:.0f} s",
            "",
            *(f"{outcome:8} {duration:7.2f} s  {name}" for name, (outcome, duration) in self.outcomes.items()),
        ]
        return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", type=file_to_write, help="file for what ran where")
    parser.add_argument("--lane", action="append", default=[], help="files, with commas between them; may be repeated")
    parser.add_argument("--lanes", type=int, default=0, help="share the tests out among so many lanes")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--durations", type=Path, default=DURATIONS, help="summary of an earlier run, for --lanes")
    parser.add_argument("tests", nargs="*", default=files(), help="files; default: all with tests for GPUs")
    arguments, options = parser.parse_known_args()
    if local.device_type_and_count()[1] == 0:
        print("[sidelane] no GPU that Sidelane drives: there is nothing to test here", file=sys.stderr)
        return 2
    # What `timeout` sends: end as after Ctrl-C, with a summary.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.lane or arguments.lanes:
        shared = ("--durations", str(arguments.durations), "--share")
        lanes = [lane.split(",") for lane in arguments.lane] or [
            [*arguments.tests, *shared, str(lane), str(arguments.lanes)] for lane in range(arguments.lanes)
        ]
        return in_lanes(lanes, options, arguments.summary)
    summary = Summary()
    plugins: list[object] = [summary]
    if arguments.share:
        lane, lanes = arguments.share
        plugins.append(Share(lane, lanes, durations_of(arguments.durations)))
    started = time.monotonic()
    code = pytest.main(["-m", "device", *arguments.tests, *options], plugins=plugins)
    if arguments.summary:
        arguments.summary.parent.mkdir(parents=True, exist_ok=True)
        arguments.summary.write_text(summary.text(time.monotonic() - started), encoding="utf-8")
        print(f"[sidelane] summary: {arguments.summary}")
    return int(code)


def in_lanes(lanes: Sequence[Sequence[str]], options: Sequence[str], summary: Path | None) -> int:
    """Run each lane in a process of its own, and put their summaries together; the first exit status that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.txt" for number in range(len(lanes))]
        commands = [
            [sys.executable, __file__, *tests, *options, "--summary", str(file)]
            for tests, file in zip(lanes, files, strict=True)
        ]
        processes = [subprocess.Popen(command) for command in commands]
        try:
            codes = [process.wait() for process in processes]
        except KeyboardInterrupt:
            codes = [_ended(process) for process in processes]
        if summary is not None:
            texts = [file.read_text(encoding="utf-8") for file in files if file.exists()]
            summary.parent.mkdir(parents=True, exist_ok=True)
            summary.write_text("\n".join(texts), encoding="utf-8")
            print(f"[sidelane] summary: {summary}")
    return next((code for code in codes if code), 0)


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for a lane that most likely was interrupted, too, as it is of the same group; then ask it; then kill it."""
    for further in (process.terminate, process.kill):
        try:
            return process.wait(ENDING_S) or 1
        except subprocess.TimeoutExpired:
            further()
    return process.wait() or 1


if __name__ == "__main__":
    sys.exit(main())
