"""TorchRec with a plug-in: the buffers of its all-to-all lie in Sidelane's symmetric memory, so no call stages them.

TorchRec asks a class for the two buffers and for the call. A subclass takes the buffers from a pool.

torchrun --nproc-per-node 2 tests/clients/torchrec_pool.py sidelane
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from client import BACKEND
from torchrec.distributed import comm_ops

import sidelane


class PooledBuffers(comm_ops.DefaultAll2AllSingle):
    """Buffers in a pool; the call stays that of ``torch.distributed``."""

    pool: sidelane.SymmetricPool | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if PooledBuffers.pool is None:  # collective: every rank comes here in its first exchange
            PooledBuffers.pool = sidelane.pool(dist.group.WORLD.communicator(device), 16 << 20)
        with PooledBuffers.pool:
            return torch.empty(size, dtype=dtype, device=device)


if BACKEND == "sidelane":
    comm_ops.DefaultAll2AllSingle = PooledBuffers
import torchrec_embeddings  # noqa: F401 (the program itself)
