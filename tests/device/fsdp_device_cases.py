"""Functions that ranks execute in ``test_device_fsdp``."""

from __future__ import annotations

import functools
from typing import Any

import fsdp_cases
import straight_cases
import torch
import torch.distributed as dist
from device_context import Context


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    return _on(context, fsdp_cases, name, *args)


def of_straight(context: Context, name: str, *args: Any) -> Any:
    """The same of what is gathered straight into parameters."""
    return _on(context, straight_cases, name, *args)


def in_two_dimensions(context: Context) -> Any:
    """The same where FSDP2 makes groups of its own, which take the default group's backend: here they have NCCL."""
    world = dist.distributed_c10d._get_default_group()
    known = dist.distributed_c10d._world.pg_map
    backend, store = known[world]
    known[world] = "cpu:gloo,cuda:nccl", store
    try:
        return of(context, "in_two_dimensions")
    finally:
        known[world] = backend, store


@functools.cache
def _library() -> dist.ProcessGroup:
    """A group of NCCL, by which models are trained without Sidelane: that of the pool is Gloo's, of host memory."""
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _on(context: Context, cases: Any, name: str, *args: Any) -> Any:
    torch.set_default_device(context.device)
    try:
        return getattr(cases, name)(_library(), *args)
    finally:
        torch.set_default_device(None)
