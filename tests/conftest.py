"""What every test can rely on."""

import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from sidelane_lab.harness import processes

pytest_plugins = ("cpu_seconds", "on_ranks", "replay_fixtures")

# Programs and models are many small objects: the collector would look through them for a twentieth of the time.
gc.set_threshold(50_000, 20, 20)

# Whoever starts tests in the background of a shell script starts them, and all processes of theirs, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-ranks", action="store_true", help="skip tests when they start ranks or programs")


def pytest_configure(config: pytest.Config) -> None:
    """Output as a pipe gets it, whoever looks on. Files in their order."""
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):  # xdist's workers get the first two
        os.environ.pop(name, None)
    # xdist would begin with the files of many tests, and end with the few that take minutes.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays: the garbage collector need not look through it for every test."""
    gc.collect()
    gc.freeze()
    if session.items and not session.config.option.collectonly:
        import_ahead(session.config)


def import_ahead(config: pytest.Config) -> None:
    """Let ranks be forked from a server that has imported ``common/imported_ahead.py``, and starts with the first rank.

    A process that has looked for GPUs must not be forked: where there are any, ranks import for themselves.
    """
    import torch
    from cpu_seconds import servers

    from sidelane.native import load_replays

    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return
    processes.PRELOADED = ("imported_ahead", *processes.PRELOADED)
    processes.rank_context()
    server, capture = forkserver._forkserver, config.pluginmanager.getplugin("capturemanager")

    def ensure_running() -> None:
        """Start the server with stdout and stderr of the whole run, which outlive those of the test that needs it."""
        if config.option.no_ranks:
            pytest.skip("it starts ranks")
        if servers:
            return type(server).ensure_running(server)
        load_replays()  # compiled ahead: ranks would do so beside their first calls, and tests count what it makes
        streams = sys.stdout, sys.stderr  # a test may have others in their place, which would be lost
        try:
            with pytest.MonkeyPatch.context() as patch, capture.global_and_fixture_disabled():
                patch.setenv("PYTHONPATH", str(Path(__file__).with_name("common")), prepend=os.pathsep)
                type(server).ensure_running(server)
            servers.append(server._forkserver_pid)
        finally:
            sys.stdout, sys.stderr = streams

    server.ensure_running = ensure_running
