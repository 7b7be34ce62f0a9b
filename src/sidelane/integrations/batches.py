"""``dist.batch_isend_irecv`` on a Sidelane group: NCCL must make the sends and receives of a batch together.

Torch lets NCCL do that if the type of a group is exactly its own. On any other group it makes them one behind the
other, and each may wait for a later one: two ranks that both send first never end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane.modes import keep_compilers_out

_torchs = c10d.batch_isend_irecv


def take_over(kind: type[dist.ProcessGroup]) -> None:
    """Replace torch's function for batches on groups of a kind; torch still makes those on other groups."""

    @keep_compilers_out
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = _group_of(p2p_op_list)
        if not isinstance(group, kind) or not made_as_one(group, p2p_op_list[0].tensor.device):
            return _torchs(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, p2p_op_list[0].tensor.device, async_ops=True) as manager:
            for each in p2p_op_list:
                peer = "group_dst" if each.op is dist.isend else "group_src"
                each.op(each.tensor, group=each.group, tag=each.tag, **{peer: each.group_peer})
        return cast("list[dist.Work]", manager.works)

    batch_isend_irecv.__doc__ = _torchs.__doc__
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def made_as_one(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the group's backend for the device makes the sends and receives of a batch together."""
    return bool(group._get_backend(device).supports_coalescing)


def _group_of(given: Sequence[Any]) -> object:
    """Return the group of the first operation; None if the argument is invalid and torch must raise its error."""
    if not isinstance(given, list) or not given or not isinstance(given[0], dist.P2POp):
        return None
    return given[0].group if given[0].group is not None else c10d._get_default_group()
