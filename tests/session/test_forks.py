"""Forked copies of a process: what they have of their own, and what they leave to the process they are copies of."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import group_world
import nodes_world
import pytest
from cpu_calls import in_a_forked_copy
from group_world import leave
from marks import long
from ranks import crew

import sidelane
from interpreter import Interpreter
from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.exported import fetch

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="macOS: its libraries end a copy of a process with threads"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
PACKAGE = Path(sidelane.__file__).parent


def test_locks_are_free_in_a_copy() -> None:
    locks = [forks.lock(), forks.rlock()]
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with locks[0], locks[1]:
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        assert in_a_forked_copy(lambda: [lock.acquire(False) for lock in locks]) == "[True, True]"
        assert [lock.acquire(False) for lock in locks] == [False, False]
    finally:
        go_on.set()
        thread.join()


def test_no_module_has_a_lock_that_is_held_in_copies() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^\w+(: .*)? = threading\.R?Lock\(", path.read_text(), re.MULTILINE)
    }
    assert not found, f"forks.lock() makes such locks: {found}"


def test_a_copy_does_not_answer_in_the_place_of_its_parent(interpreter: Interpreter, tmp_path: Path) -> None:
    """Who asks a process that has ended for descriptors hears so at once, though a copy of it lives."""
    program = """
import os, sys, time
from sidelane.execute.cuda.exported import DescriptorServer
server = DescriptorServer()
copy = os.fork()
if copy == 0:
    os.close(1)
    os.close(2)
    time.sleep(60)
    os._exit(0)
print(copy, server.address)
"""
    copy, address = interpreter.run(program, tmp_path).split()
    try:
        os.kill(int(copy), 0)
        with pytest.raises(UnavailableError, match="Connection refused"):
            next(fetch(address, "token"))
    finally:
        os.kill(int(copy), 9)


@pytest.mark.timeout(720)
@pytest.mark.parametrize("copied", [group_world.copied, long(nodes_world.copied)], ids=["a node", "nodes"])
def test_what_copies_do_to_groups_changes_nothing_for_ranks(tmp_path: Path, copied: Callable[..., None]) -> None:
    with crew(4) as ranks:
        ranks.run(leave)
        ranks.run(copied, None, str(tmp_path), timeout_s=300)


def test_a_copy_ends_like_any_program_though_it_has_a_group(interpreter: Interpreter, tmp_path: Path) -> None:
    """Destructors of Gloo wait for threads, which are in the other process."""
    program = """
import os, signal, sys, time
import torch, torch.distributed as dist
import sidelane
sidelane.register()
dist.init_process_group("sidelane", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(3, dtype=torch.float64))
copy = os.fork()
if copy == 0:
    sys.exit(3)
deadline, ended = time.monotonic() + 30, (0, 0)
while ended[0] == 0 and time.monotonic() < deadline:
    ended = os.waitpid(copy, os.WNOHANG)
    time.sleep(0.01)
if ended[0] == 0:
    os.kill(copy, signal.SIGKILL)
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
print("hangs" if ended[0] == 0 else os.waitstatus_to_exitcode(ended[1]), flush=True)
os._exit(0)
"""
    assert interpreter.run(program, tmp_path).split() == ["3"]


def test_what_is_finalised_in_a_copy_is_not_the_parents() -> None:
    class Thing:
        def disown(self) -> None:
            said.append("disowned")

        def __del__(self) -> None:
            said.append("deleted")

    said: list[str] = []
    things = [Thing(), Thing()]
    forks.finalize(things[0], said.append, "finalised")
    things.append(Thing())
    forks.in_copies_of(things[1], Thing.disown)
    forks.in_copies_of(things[2], forks.never_finalize)

    def drop() -> list[str]:
        things.clear()
        return said

    assert in_a_forked_copy(drop) == "['disowned', 'deleted', 'deleted']"
    assert sorted(drop()) == ["deleted", "deleted", "deleted", "finalised"]
