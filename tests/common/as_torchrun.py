"""A program between processes, with the environment that torchrun gives."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import forked


def run_program(program: Path, folder: Path, arguments: Sequence[str] = (), world_size: int = 2) -> str:
    """Run a program on CPU ranks, in ``folder``; see :func:`forked.run`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return forked.run(program, arguments, folder, *ranks)
