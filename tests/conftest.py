"""What every test can rely on."""

import signal

import pytest

# Whoever starts tests in the background of a shell script starts them, and all processes of theirs, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Files in their order: xdist would begin with those of many tests, and end with the few that take minutes."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
