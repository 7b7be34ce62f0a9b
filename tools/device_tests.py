"""Run the tests that need GPUs and, if asked, write down what ran where. `make test-device` calls it.

Options that it does not know are pytest's. Lanes are processes side by side: tests wait more than they compute.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from outputs import file_to_write
from sidelane.cli import provenance
from sidelane.machine import local

TESTS = Path(__file__).resolve().parent.parent / "tests" / "device"
MOST_CHARACTERS = 3000
ENDING_S = 5.0
"""For a lane that is interrupted to write what it has."""
UNFINISHED = "unfinished"


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
    parser.add_argument("tests", nargs="*", default=[str(TESTS)], help="files; default: tests/device")
    arguments, options = parser.parse_known_args()
    if local.device_type_and_count()[1] == 0:
        print("[sidelane] no GPU that Sidelane drives: there is nothing to test here", file=sys.stderr)
        return 2
    # What `timeout` sends: end as after Ctrl-C, with a summary.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.lane:
        return in_lanes([lane.split(",") for lane in arguments.lane], options, arguments.summary)
    summary = Summary()
    started = time.monotonic()
    code = pytest.main([*arguments.tests, *options], plugins=[summary])
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
