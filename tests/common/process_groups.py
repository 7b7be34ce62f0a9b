"""Groups of Sidelane in tests, next to those of Gloo.

Tensors of Sidelane's lie on the default device, those of the group that it is held against on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import sidelane
from sidelane.integrations import ledger

_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


@contextlib.contextmanager
def sidelane_group(members: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """The group of the pool with Sidelane in front of it, which the ranks keep."""
    if members not in _groups:
        _groups[members] = sidelane.wrap(members)
    ledger.reset()
    yield _groups[members]


def data(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of which every dtype holds the sum of a few exactly, so that the order of additions does not show."""
    made = torch.randint(-8, 8, (numel,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device(), dtype)


def on_cpu(call: Callable[[], Any]) -> Any:
    """Return the result of ``call`` with the CPU as the default device."""
    with torch.device("cpu"):
        return call()


def ended(work: dist.Work | None, is_async: bool) -> None:
    assert (work is not None) == is_async
    if work is not None:
        work.wait()
        on_host = isinstance(work, sidelane.Work) and torch.get_default_device().type == "cpu"
        assert work.is_completed() or not on_host  # Gloo's may say so later, and a stream waits in place of the host
