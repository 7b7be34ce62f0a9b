"""A program between processes, with the environment that torchrun gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import forked
import torch.distributed as dist

from sidelane_lab.harness.launch import HOST, store_on_loopback


def run_program(program: Path, folder: Path, arguments: Sequence[str] = (), world_size: int = 2) -> str:
    """Run a program on CPU ranks, in ``folder``; see :func:`forked.run`."""
    store = store_on_loopback()  # lives until the program has ended
    shared = {**address(store), "WORLD_SIZE": str(world_size)}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return forked.run(program, arguments, folder, *ranks)


def address(store: dist.TCPStore) -> dict[str, str]:
    """Return variables with which ranks meet in a store of this process, as in that of torchrun's agent.

    A port that this process only looks up for rank 0 could be taken by another process before rank 0 listens there.
    """
    return {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
