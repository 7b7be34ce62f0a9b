"""FSDP2 takes the buffers of its collectives from the group that makes them, without a line in the program.

torch asks a group's backend for memory where a program calls ``set_allocate_memory_from_process_group_for_comm(True)``.
Here a parameter group whose shards belong to a Sidelane group asks from the start, on GPUs. FSDP2 may be imported later
than Sidelane, and importing it takes longer than all of Sidelane, so a hook waits for its import.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

DEVICES = ("cuda",)
"""Devices on which parameter groups ask. CPU ranks would allocate collectively for each call, which takes longer."""


def take_over(kind: type[Any]) -> None:
    """Let FSDP2 ask groups of this kind for memory: at once if FSDP2 is imported, else when it is."""
    module = sys.modules.get(PARAM_GROUP)
    if module is None:
        sys.meta_path.insert(0, _AfterImport(kind))
    else:
        _ask_groups(module, kind)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finder of one module, which changes that module behind its import."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls :func:`_ask_groups` at its end."""
        if fullname != PARAM_GROUP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _ask_groups(module, self._kind)

            loader.exec_module = exec_module
        return spec


def _ask_groups(module: Any, kind: type[Any]) -> None:
    """Give the parameter groups of ``module`` collectives that ask groups of a kind for memory."""
    params, gather, scatter = (
        getattr(module, name, None) for name in ("FSDPParamGroup", "DefaultAllGather", "DefaultReduceScatter")
    )
    if params is None or gather is None or scatter is None or not hasattr(params, "_all_gather_process_group"):
        return  # another torch: programs may still ask for the memory themselves
    classes = type("GroupAllGather", (_Asking, gather), {}), type("GroupReduceScatter", (_Asking, scatter), {})
    begin = params.__init__

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        own = self._all_gather_comm, self._reduce_scatter_comm
        is_ours = isinstance(getattr(self.mesh_info, "shard_process_group", None), kind)
        if is_ours and self.device.type in DEVICES and tuple(map(type, own)) == (gather, scatter):
            self._all_gather_comm, self._reduce_scatter_comm = (
                made(weakref.ref(self), name)
                for made, name in zip(
                    classes, ("_all_gather_process_group", "_reduce_scatter_process_group"), strict=True
                )
            )

    params.__init__ = __init__


class _Asking:
    """Source of the buffers of a parameter group: the backend of the group that its next call belongs to.

    Args:
        params: torch's ``FSDPParamGroup``.
        group: name of its attribute that is that group.
    """

    def __init__(self, params: weakref.ref[Any], group: str) -> None:
        self._params, self._name = params, group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of a shape; symmetric memory if the group has some. Collective."""
        lengths, params = [int(length) for length in size], self._params()
        backend: Any = None if params is None else getattr(params, self._name)._get_backend(device)
        if backend is not None and backend.supports_tensor_alloc(device):
            numel = torch.Size(lengths).numel()
            found: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
            return found.view(lengths)
        return torch.empty(lengths, dtype=dtype, device=device)
