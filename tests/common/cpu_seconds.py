"""CPU seconds of each test, of all processes that it uses, and a bound for them.

Seconds on a clock depend on what else a machine does. CPU seconds hardly do, unless ranks wait for each other on busy
cores, which adds half. The start of what tests share, such as the server from which ranks are forked, is no part of the
test that needs it first. Sanitizers and coverage have no bound.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

SHOWN = 10

servers: list[int] = []
"""Processes that all tests share. What they have done themselves is no part of a test; what their children do is."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-cpu-seconds", type=float, default=float("inf"), help="fail tests that take more")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its descendants, those that have ended included (Linux)."""
    ticks, waiting = 0, [str(os.getpid())]
    while waiting:
        process = waiting.pop()
        with contextlib.suppress(OSError):  # it has ended meanwhile, or there is no such file
            with open(f"/proc/{process}/stat") as stat:
                own_and_ended = stat.read().rpartition(")")[2].split()[11:15]
            ticks += sum(map(int, own_and_ended[2 * (int(process) in servers) :]))
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as children:
                    waiting += children.read().split()
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = cpu_seconds()
    yield
    spent = cpu_seconds() - before
    item.user_properties.append(("cpu_s", spent))
    most = item.config.option.most_cpu_seconds
    if spent > most and not any(map(item.get_closest_marker, ("long", "device"))):
        pytest.fail(f"{spent:.1f} CPU seconds (allowed={most:g}): make it cheaper, or mark it `long` and say why")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the dearest tests."""
    passed = terminalreporter.getreports("passed")
    spent = sorted(((seconds, each.nodeid) for each in passed for _, seconds in each.user_properties), reverse=True)
    terminalreporter.section(f"most CPU seconds, of {sum(seconds for seconds, _ in spent):.0f}")
    for seconds, name in spent[:SHOWN]:
        terminalreporter.line(f"{seconds:6.2f} {name}")
