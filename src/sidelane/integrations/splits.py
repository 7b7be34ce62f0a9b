"""Register groups that torch did not make in ``torch.distributed``; replace ``dist.split_group`` for Sidelane groups.

Torch splits a group whose backend splits a communicator of one device, to which the default group must be bound. A
Sidelane group needs neither: its parts are groups of their own, made with the store of the group. A program that
imported torch's function before it made a group (``from torch.distributed import split_group``) still calls torch's.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane.modes import keep_compilers_out

_torchs = getattr(c10d, "split_group", None)  # torch 2.5 and later
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


def take_over(kind: type[Any]) -> None:
    """Split groups of a kind by their own method ``split_group``; torch still splits those of other kinds."""

    @keep_compilers_out
    def split_group(
        parent_pg: dist.ProcessGroup | None = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **others: Any,
    ) -> Any:
        parent = parent_pg if parent_pg is not None else c10d._get_default_group()
        if not isinstance(parent, kind):
            assert _torchs is not None
            return _torchs(parent_pg, split_ranks, timeout, pg_options, group_desc, **others)
        if pg_options is not None or any(value is not None for value in others.values()):
            raise ValueError("split_group: pg_options and backend (allowed=None, on a Sidelane group)")
        parts = _checked(split_ranks, parent.size())
        number = next(_numbers.setdefault(parent, itertools.count()))
        part = next((part for part in parts if parent.rank() in part), None)
        if part is None:
            return None
        name = f"{parent.group_name}/split{number}.{parts.index(part)}"
        made = parent.split_group(part, timeout=timeout, group_name=name, group_desc=group_desc)
        backend, devices = c10d._world.pg_map[parent][0], c10d._world.pg_backend_config[parent]
        register(made, name, made.get_group_store(), backend, devices, made.world_ranks)
        return made

    split_group.__doc__ = getattr(_torchs, "__doc__", None)
    c10d.split_group = dist.split_group = split_group  # type: ignore[assignment]


def register(
    made: dist.ProcessGroup, name: str, store: dist.Store, backend: Any, devices: str, ranks: Sequence[int]
) -> None:
    """Register a group in torch that torch did not make.

    Args:
        made: the group.
        name: name by which functional collectives find it.
        store: store of its ranks alone.
        backend: result of ``dist.get_backend``.
        devices: devices and their backends, as torch writes them.
        ranks: ranks of the group, in the world.
    """
    world, tag = c10d._world, f"ptd:{name}"
    world.pg_map[made] = backend, store
    world.pg_names[made] = name  # type: ignore[assignment]
    world.pg_backend_config[made] = devices
    world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    world.tags_to_pg.setdefault("", []).append(made)
    world.tags_to_pg.setdefault(tag, []).append(made)
    world.pg_to_tag[made] = tag
    c10d._register_process_group(name, made)  # type: ignore[arg-type]


def _checked(parts: list[list[int]] | None, size: int) -> list[list[int]]:
    """Return each part in order. Raises ValueError for lists that are no split of so many ranks."""
    if not parts or not all(parts):
        raise ValueError(f"split_group: split_ranks (value={parts}, allowed=lists of one rank and more)")
    every = list(itertools.chain.from_iterable(parts))
    if len(set(every)) < len(every) or not set(every) <= set(range(size)):
        raise ValueError(f"split_group: split_ranks (value={parts}, allowed=ranks 0 to {size - 1} of the group, once)")
    return [sorted(part) for part in parts]
