"""Sidelane groups in ``torch.distributed``: groups that torch did not make, and functions of torch that know no such.

- ``dist.split_group``: torch splits a group whose backend splits a communicator of one device, to which the default
  group must be bound. A Sidelane group needs neither: its parts are groups of their own, made with its store.
- ``dist.batch_isend_irecv``: NCCL must make the sends and receives of a batch together. Torch lets it do that if the
  type of a group is exactly its own. On any other group it makes them one after the other, and each may wait for a
  later one: two ranks that both send first never end.
- ``_set_pg_timeout``: torch sets the time-outs of the backends that it knows.
- ``FSDPParamGroup``: on GPUs, FSDP2 gathers and scatters shards of a Sidelane group as with ``sidelane.fsdp.enable``.
  FSDP2 may be imported later than Sidelane, and importing it takes longer than all of Sidelane.

The functions here take their places, and pass on calls for all other groups. A program that imported torch's function
before it made a group (``from torch.distributed import split_group``) still calls torch's.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from sidelane.integrations.fallback import make_other
from sidelane.integrations.ledger import SIDELANE
from sidelane.integrations.process_group import SidelaneGroup
from sidelane.memory.exchange import ranks_of, require_own
from sidelane.memory.liveness import known
from sidelane.modes import after_import, exclude_compilers, trace_as_groups

_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counters by group, not by name, so that processes agree that have made groups of one name from others before."""

_TORCHS = {
    name: getattr(c10d, name, None)  # split_group: torch 2.5 and later
    for name in ("split_group", "batch_isend_irecv", "_set_pg_timeout")
}

PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

FSDP_DEVICES = ("cuda",)
"""Devices on which FSDP2 is enabled by the group. CPU ranks hide nothing with it."""


def make_group(options: Any, backend_options: Any) -> SidelaneGroup:
    """Make a group for torch. ``options`` are its ``DistributedBackendOptions``, the others those of NCCL."""
    world, wider = dist.group.WORLD, None
    if world is not None:
        require_own(world, "process group")
    size, ranks = options.group_size, list(options.global_ranks_in_group)
    arguments = (options.store, options.group_rank, size)

    def other(timeout: timedelta) -> dist.ProcessGroup:
        return make_other(*arguments, timeout, options.group_id, ranks, backend_options)

    # A group without a list may be one of several worlds, whose ranks have other numbers.
    if ranks and world is not None and max(ranks) < world.size() and ranks[options.group_rank] == world.rank():
        found = known(world)
        wider = None if found is None else (found, ranks)
    timeout = None if options.timeout == default_pg_timeout else options.timeout  # the caller has named none
    return SidelaneGroup(*arguments, timeout, ranks or range(size), other, wider=wider)


def put_in_front(inner: dist.ProcessGroup) -> SidelaneGroup:
    """Make a group in front of another one, which makes all calls that Sidelane does not; see ``sidelane.wrap``."""
    name = f"{inner.group_name}/{SIDELANE}{_next_number(inner)}"
    store = dist.PrefixStore(f"{name}/", c10d._get_process_group_store(inner))
    ranks, wider = ranks_of(inner), known(inner)
    made = SidelaneGroup(
        *(store, inner.rank(), inner.size(), None, ranks, lambda timeout: inner),
        owned=False,
        wider=None if wider is None else (wider, range(inner.size())),
    )
    made.setGroupName(name)
    made.setGroupDesc(f"{inner.group_desc}, with Sidelane")
    devices = ",".join(f"{device.type}:{SIDELANE}" for device in inner._device_types)
    made.take_devices(devices)
    _add(made, dist.Backend(SIDELANE), devices)
    return made


@exclude_compilers
def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **others: Any,
) -> Any:
    """Split a Sidelane group by its own method, and other groups by torch's function."""
    parent = parent_pg if parent_pg is not None else c10d._get_default_group()
    if not isinstance(parent, SidelaneGroup):
        return _TORCHS["split_group"](parent_pg, split_ranks, timeout, pg_options, group_desc, **others)  # type: ignore[misc]
    if pg_options is not None or any(value is not None for value in others.values()):
        raise ValueError("split_group: pg_options and backend of a Sidelane group (allowed=None)")
    size, every = parent.size(), list(itertools.chain.from_iterable(split_ranks or []))
    if not split_ranks or not all(split_ranks):
        raise ValueError(f"split_group: split_ranks (value={split_ranks}, allowed=non-empty lists of ranks)")
    if len(set(every)) < len(every) or not set(every) <= set(range(size)):
        allowed = f"ranks 0 to {size - 1} of the group, once"
        raise ValueError(f"split_group: split_ranks (value={split_ranks}, allowed={allowed})")
    number = _next_number(parent)
    for place, part in enumerate(split_ranks):
        if parent.rank() in part:
            name = f"{parent.group_name}/split{number}.{place}"
            made = parent.split_group(part, timeout=timeout, group_name=name, group_desc=group_desc)
            assert made is not None
            _add(made, c10d._world.pg_map[parent][0], c10d._world.pg_backend_config[parent])
            return made
    return None


@exclude_compilers
def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """Make the sends and receives of a batch together where the backend of a Sidelane group does; else by torch's."""
    group = _group_of(p2p_op_list)
    if not isinstance(group, SidelaneGroup) or not made_as_one(group, p2p_op_list[0].tensor.device):
        return _TORCHS["batch_isend_irecv"](p2p_op_list)  # type: ignore[misc,no-any-return]
    c10d._check_p2p_op_list(p2p_op_list)
    with c10d._coalescing_manager(group, p2p_op_list[0].tensor.device, async_ops=True) as manager:
        for each in p2p_op_list:
            peer = "group_dst" if each.op is dist.isend else "group_src"
            each.op(each.tensor, group=each.group, tag=each.tag, **{peer: each.group_peer})
    return cast("list[dist.Work]", manager.works)


def made_as_one(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the group's backend for the device makes the sends and receives of a batch together."""
    return bool(group._get_backend(device).supports_coalescing)


def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    chosen = c10d._get_default_group() if group is None else group
    if isinstance(chosen, SidelaneGroup):
        chosen.set_timeout(timeout)
    else:
        _TORCHS["_set_pg_timeout"](timeout, group)  # type: ignore[misc]


def enable_fsdp(module: Any) -> None:
    """Let parameter groups of FSDP2, whose module this is, make their calls by Sidelane if their group is one.

    FSDP2 prepares them before their first gather, when it knows the root module.
    """
    prepare = module.FSDPParamGroup.lazy_init

    def lazy_init(self: Any) -> None:
        prepare(self)
        group = getattr(self.mesh_info, "shard_process_group", None)
        if isinstance(group, SidelaneGroup) and self.device.type in FSDP_DEVICES:
            from sidelane.integrations.fsdp_calls import enable_by_group

            enable_by_group(self, group)

    module.FSDPParamGroup.lazy_init = lazy_init


def _group_of(given: Sequence[Any]) -> object:
    """Return the group of the first operation; None if the argument is invalid and torch must raise its error."""
    if not isinstance(given, list) or not given or not isinstance(given[0], dist.P2POp):
        return None
    return given[0].group if given[0].group is not None else c10d._get_default_group()


def _next_number(group: dist.ProcessGroup) -> int:
    """Return the number of groups that have been made from this one."""
    return next(_numbers.setdefault(group, itertools.count()))


def _add(made: SidelaneGroup, backend: Any, devices: str) -> None:
    """Add a group to torch's list of groups.

    Args:
        made: the group.
        backend: result of ``dist.get_backend``.
        devices: devices and their backends, as torch writes them.
    """
    world, name = c10d._world, made.group_name
    world.pg_map[made] = backend, made.get_group_store()
    world.pg_names[made] = name
    world.pg_backend_config[made] = devices
    world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(made.world_ranks)}
    world.pg_to_tag[made] = f"ptd:{name}"
    for tag in ("", f"ptd:{name}"):
        world.tags_to_pg.setdefault(tag, []).append(made)
    c10d._register_process_group(name, made)


for _ours in (split_group, batch_isend_irecv, _set_pg_timeout):
    _name = _ours.__name__
    _ours.__doc__ = getattr(_TORCHS[_name], "__doc__", None)
    setattr(c10d, _name, _ours)
    if hasattr(dist, _name):
        setattr(dist, _name, _ours)
trace_as_groups(SidelaneGroup)
after_import(PARAM_GROUP, enable_fsdp)
