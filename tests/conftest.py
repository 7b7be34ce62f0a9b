"""What every test can rely on."""

import gc
import os
import signal

import pytest

# Whoever starts tests in the background of a shell script starts them, and all processes of theirs, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Output as a pipe gets it, whoever looks on. Files in their order."""
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):  # xdist's workers get the first two
        os.environ.pop(name, None)
    # xdist would begin with the files of many tests, and end with the few that take minutes.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look through it for every test."""
    gc.collect()
    gc.freeze()
