"""A program as users write it, a process a rank, in which Ctrl-C hits rank 0 while the last rank keeps all waiting."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from interpreter import Interpreter
from sidelane import Communicator, Config

START_S, END_S = 120.0, 60.0


PROGRAM = """
import sys
from pathlib import Path
import interrupted_program
interrupted_program.main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
"""


def run(interpreter: Interpreter, world_size: int, device_type: str, folder: Path) -> list[str]:
    """Run it; what each rank wrote to stderr. All must have failed by themselves, none may have to be killed."""
    arguments = [(world_size, device_type, folder, rank) for rank in range(world_size)]
    processes = interpreter.start(PROGRAM, folder, *arguments)
    deadline = time.monotonic() + START_S
    while not all((folder / f"ready-{rank}").exists() for rank in range(world_size)):
        assert time.monotonic() < deadline, "no start"
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(processes[0], signal.SIGINT)
    codes, _, errors = interpreter.wait(END_S)
    # Python ends by the signal itself after a KeyboardInterrupt that nobody caught.
    assert codes[0] == -signal.SIGINT and codes[1:] == [1] * (world_size - 1), (codes, errors)
    return errors


def shared_memory() -> set[str]:
    """Names in the shared memory of this machine, of Sidelane and of torch."""
    with contextlib.suppress(FileNotFoundError):
        return {name for name in os.listdir("/dev/shm") if "sidelane" in name or "torch" in name}
    return set()


def main(world_size: int, device_type: str, folder: Path, rank: int) -> None:
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())  # one for all, where there is but one
        torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with Communicator(device=device, config=Config(timeout_s=1000)) as comm:
        tensor = comm.empty(1000).fill_(1)
        comm.all_reduce(tensor)
        comm.synchronize()
        (folder / f"ready-{rank}").touch()
        if rank == world_size - 1:
            time.sleep(4)
        comm.all_reduce(tensor)
        comm.synchronize()
