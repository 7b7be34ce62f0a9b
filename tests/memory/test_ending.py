"""Programs that end while a thread of Sidelane is inside of torch: Python ends it then, and that ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreter import Interpreter

ALONE = """
import sys, threading, time, torch, torch.distributed as dist
from datetime import timedelta
from sidelane import Communicator
from sidelane.integrations.order import HostOrder
from sidelane.memory import ending

ending.GRACE_S = 1.0
here, there = torch.ones(1 << 20), torch.ones(1 << 20)
begun, told = threading.Event(), threading.Event()

class Guard:
    rank, late = 0, None
    def leave(self, error):
        print("told")
        told.set()

def copies(seconds):
    def job():
        until = time.monotonic() + seconds
        while time.monotonic() < until and not told.is_set():
            there.copy_(here)
            begun.set()
        print("left")
    return job
"""

OF_GROUPS = """
order = HostOrder(Guard())
order.run(copies(SECONDS), [here], [there], True, timedelta(0))
last = order.run(lambda: print("called"), [here], [there], True, timedelta(0))
begun.wait()
"""

OF_COMMUNICATORS = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = Communicator(device="cpu")
comm.backend.submit(copies(SECONDS))
begun.wait()
"""

PAIR = """
import sys, torch, torch.distributed as dist, sidelane
path, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
group = sidelane.wrap()
tensor = torch.ones(1 << 20)
HOW
works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(50)]
"""


def ended(interpreter: Interpreter, code: str, folder: Path, *arguments: tuple[object, ...]) -> list[str]:
    interpreter.start(code, folder, *arguments)
    codes, said, errors = interpreter.wait()
    assert not any(codes) and "terminate called" not in "".join(errors), (codes, errors)
    return said


@pytest.mark.parametrize(
    ("of", "seconds", "said"),
    [
        pytest.param(OF_GROUPS, 0.6, "left called", marks=pytest.mark.long, id="group"),
        pytest.param(OF_GROUPS, 60, "told left", id="group, told"),
        pytest.param(OF_COMMUNICATORS, 0.6, "left", id="communicator"),
    ],
)
def test_a_thread_leaves_torch_before_the_end(
    interpreter: Interpreter, tmp_path: Path, of: str, seconds: float, said: str
) -> None:
    (text,) = ended(interpreter, ALONE + of.replace("SECONDS", str(seconds)), tmp_path, ())
    assert text.split() == said.split()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("", id="first"),
        pytest.param("dist.all_reduce(tensor, group=group)", marks=pytest.mark.long, id="known"),
        pytest.param("if rank: sys.exit()", id="alone"),
    ],
)
def test_an_open_group_ends_with_the_program(interpreter: Interpreter, tmp_path: Path, how: str) -> None:
    ended(interpreter, PAIR.replace("HOW", how), tmp_path, *((tmp_path / "store", rank) for rank in range(2)))
