"""Wrapping of an existing process group, with Sidelane in front of it."""

from __future__ import annotations

import itertools
import weakref

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane.integrations import splits
from sidelane.integrations.ledger import SIDELANE as NAME
from sidelane.integrations.process_group import SidelaneGroup
from sidelane.integrations.registration import register
from sidelane.memory.exchange import ranks_of, require_own
from sidelane.memory.liveness import known
from sidelane.modes import keep_compilers_out
from sidelane.session.session import group_for

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counters by group, not by name, so that processes agree that have wrapped different groups of one name before."""


@keep_compilers_out
def wrap(group: dist.ProcessGroup | None = None) -> SidelaneGroup:
    """Put Sidelane in front of a process group: it makes the calls that it has, and ``group`` makes all others.

    Every rank of ``group`` wraps it. The result is a group like those of ``dist.new_group``: pass it as
    ``group=`` wherever torch takes one, and destroy it with ``dist.destroy_process_group(wrapped)``; ``group`` stays.

    Args:
        group: group of any backend; None for the default group.

    Returns:
        Group for the calls.

    Raises:
        TypeError: ``group`` is no process group.
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: this process is not in the group.
        CommunicatorClosedError: it is a forked copy of one that is.
    """
    inner = group_for("wrap", group)
    require_own(inner, "wrap")
    register()
    number = next(_made.setdefault(inner, itertools.count()))
    name = f"{inner.group_name}/{NAME}{number}"
    store = dist.PrefixStore(f"{name}/", c10d._get_process_group_store(inner))
    ranks, wider = ranks_of(inner), known(inner)
    made = SidelaneGroup(
        *(store, inner.rank(), inner.size(), None, ranks, lambda timeout: inner),
        owned=False,
        wider=None if wider is None else (wider, range(inner.size())),
    )
    made.setGroupName(name)
    made.setGroupDesc(f"{inner.group_desc}, with Sidelane")
    devices = ",".join(f"{device.type}:{NAME}" for device in inner._device_types)
    made.take_devices(devices)
    splits.register(made, name, store, dist.Backend(NAME), devices, ranks)
    return made
