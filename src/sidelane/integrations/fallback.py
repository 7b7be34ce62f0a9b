"""The group behind a Sidelane group: Gloo for CPU tensors and NCCL for CUDA tensors, as torch would have made them."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import forks
from sidelane.errors import Page, PeerError, see
from sidelane.integrations.buffers import Registering
from sidelane.integrations.ledger import RowKey, maker_in_words
from sidelane.memory.liveness import DYING_S, Liveness

BackendType = dist.ProcessGroup.BackendType
_LATE = ("timed out", "timeout")
_OF_PEERS = ("connection", *_LATE, "closed", "peer", "nccl", "remote")
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Registering]] = weakref.WeakKeyDictionary()
"""Backends that were made here: torch forgets Python's part of a backend if nothing refers to it."""


def backends_of(group: dist.ProcessGroup) -> Sequence[Registering]:
    """Return the backends of a group that was made here, which can provide Sidelane's memory; others keep their own."""
    return _backends.get(group, ())


@functools.cache
def _registering(kind: type[Any]) -> type[Any]:
    """Return a backend class of torch that registers pools as Sidelane's memory."""
    return type(kind.__name__, (Registering, kind), {})


def make_other(
    store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int], options: Any
) -> dist.ProcessGroup:
    """Make an ordinary process group: Gloo for the CPU and, if torch finds GPUs, NCCL for them.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        size: number of ranks of the group.
        timeout: time-out of its calls.
        name: name of the group.
        ranks: ranks in the world; empty for all of it.
        options: options of NCCL; None for its defaults.
    """
    group = dist.ProcessGroup(dist.PrefixStore("other/", store), rank, size)
    gloo = _registering(dist.ProcessGroupGloo)(dist.PrefixStore("cpu/", store), rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    group._set_default_backend(BackendType.GLOO)
    group._register_backend(torch.device("cpu"), BackendType.GLOO, gloo)
    backends: list[Registering] = [gloo]
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = _nccl(dist.PrefixStore("cuda/", store), rank, size, timeout, name, ranks, options)
        group._set_default_backend(BackendType.NCCL)
        group._register_backend(torch.device("cuda"), BackendType.NCCL, nccl)
        backends += [nccl] if isinstance(nccl, Registering) else []
    _backends[group] = backends
    forks.in_copies_of(group, forks.never_finalize)  # its connections belong to the parent process
    return group


def _nccl(
    store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int], options: Any
) -> Any:
    nccl = dist.ProcessGroupNCCL
    if options is None:
        options = nccl.Options()
        options.is_high_priority_stream = False
    options._timeout = timeout
    if dist.is_initialized() and ranks:
        # Ranks outside of a group take part in a split of NCCL's communicator, if torch makes one.
        source = (
            c10d._get_split_source(c10d._get_default_group()) if c10d._get_default_group().bound_device_id else None
        )
        if source is not None:
            options.split_from, options.split_color = source, c10d._process_group_color(list(ranks))
    options.global_ranks_in_group, options.group_name = list(ranks), name
    try:
        made = _registering(nccl)(store, rank, size, options)
    except TypeError:  # this torch's NCCL cannot be a base class, but it can allocate memory itself
        made = nccl(store, rank, size, options)
    made._set_sequence_number_for_group()
    return made


@contextlib.contextmanager
def nccl_not_ending_the_process() -> Iterator[None]:
    """Disable NCCL's error handling for groups that are made meanwhile.
    Otherwise torch ends the process as soon as NCCL loses a peer, before Sidelane can name the peer.
    """
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"  # read when a group is made
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HANDLING]
        else:
            os.environ[_HANDLING] = before


def kinds(group: dist.ProcessGroup) -> dict[torch.device, tuple[Any, Any]]:
    """Return the backends of a group, with torch's names for their types, by device."""
    found: dict[torch.device, tuple[Any, Any]] = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        known = {"gloo": BackendType.GLOO, "nccl": BackendType.NCCL, "mpi": BackendType.MPI, "ucc": BackendType.UCC}
        found[device] = (known.get(str(backend.name()).lower(), BackendType.CUSTOM), backend)
    return found


class FailedPeers:
    """Names those that have died or left when the other group fails, and while it waits.

    Args:
        liveness: liveness of the group.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness, self.dead, self.gone = liveness, liveness.dead, liveness.gone

    def explain(self, error: Exception, peers: Sequence[int], row: RowKey | None = None) -> None:
        """Raise an error that names the dead, for an error of the other group; if all live, add a note to it.

        Args:
            error: the error.
            peers: ranks that the call needs.
            row: row of the report for the call, which the note repeats; None for no note.
        """
        text = str(error).lower()
        within_s = 0.0 if any(word in text for word in _LATE) else DYING_S
        if any(word in text for word in _OF_PEERS) and (gone := self.gone(peers, within_s=within_s)):
            raise PeerError(f"{'; '.join(gone.values())}: {error}", tuple(gone)) from error
        if row is not None:
            error.add_note(maker_in_words(row))
            see(error, Page.ERRORS)
