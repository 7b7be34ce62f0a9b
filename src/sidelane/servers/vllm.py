"""vLLM with Sidelane: ``VLLM_PLUGINS=sidelane vllm serve ...`` (docs/guide/vllm.md).

vLLM calls :func:`register` in each of its processes. The function lets the platform name a subclass of its class of
communicators, which makes collectives by a :class:`sidelane.servers.group.ServerGroup`, and puts a pass of
:mod:`sidelane.servers.vllm_norm` where vLLM fuses all-reduces and norms. What Sidelane does not take is vLLM's, as
before.
"""

# mypy: disable-error-code="misc, no-any-return, import-not-found, import-untyped"
# vLLM is not installed where types are checked.

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from sidelane.servers import setting
from sidelane.servers.group import ServerGroup
from sidelane.servers.setting import NAME, line, misfit
from sidelane.version import VERSION

FIRST, LAST = "0.22.0", "0.33.0"
"""Versions of vLLM that fit: the first and the last one whose classes the tests have been run with."""

LOG = logging.getLogger(f"vllm.{NAME}")
PLATFORMS = ("cuda", "cpu")
_WITHOUT_COLLECTIVES = ("world", "pp")
_NAMED = "sidelane.servers.vllm.DeviceCommunicator"
_given: dict[str, str] = {}


def register() -> None:
    """Replace what vLLM's processes take from their platform, if vLLM was asked to use Sidelane. Idempotent.

    It is the entry point ``sidelane`` of the group ``vllm.general_plugins``. It raises nothing: vLLM would not start.
    """
    setting.register("vllm", "VLLM_PLUGINS", _replace)


def _replace() -> None:
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.version import __version__ as version

    platform = type(current_platform)
    if platform.get_device_communicator_cls() == _NAMED:
        return
    problem = misfit("vllm", version, FIRST, LAST)
    if current_platform.device_type not in PLATFORMS or current_platform.is_rocm():
        problem = f"{problem or 'its platform'} (value={current_platform.device_name}, allowed={', '.join(PLATFORMS)})"
    if problem:
        LOG.warning(line("vllm", version, [], {"everything": problem}))
        return
    kept: dict[str, str] = {}
    _given["communicator"] = own = platform.get_device_communicator_cls()
    replaced = [own.rpartition(".")[2]]
    if envs.VLLM_BATCH_INVARIANT:
        kept["AllReduceFusionPass"] = "batch-invariant mode: the operator does not round the sum, which vLLM does"
    else:
        from sidelane.servers.vllm_norm import install

        install()
        replaced.append("AllReduceFusionPass")
    platform.get_device_communicator_cls = classmethod(lambda cls: _NAMED)
    platform.use_custom_op_collectives = classmethod(lambda cls: True)  # compiled code makes calls whole, on CPUs, too
    factors = envs.compile_factors
    envs.compile_factors = lambda: {**factors(), NAME: VERSION}  # key of the cache of compiled models
    _given["line"] = line("vllm", version, replaced, kept)
    _log()


def _log() -> None:
    """Write the line about what was replaced, once in a process: some set up vLLM's logger after its plug-ins."""
    if "line" in _given and LOG.isEnabledFor(logging.INFO):
        LOG.info(_given.pop("line"))


def __getattr__(name: str) -> Any:
    """Return ``DeviceCommunicator``, which vLLM looks up by its name: it is made when vLLM has been imported."""
    if name != "DeviceCommunicator" or not _given:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return device_communicator(resolve_obj_by_qualname(_given["communicator"]))


@functools.cache
def device_communicator(base: Any) -> Any:
    """Return the subclass of a class of vLLM's communicators that makes collectives by Sidelane.

    Args:
        base: ``CudaCommunicator`` or ``CpuCommunicator``.
    """
    from vllm import envs

    class DeviceCommunicator(base):
        """vLLM's communicator of a group. A call that ``sidelane`` does not take is that of the base class.

        Attributes:
            sidelane: collectives by Sidelane; None for groups that only send and receive.
        """

        sidelane: ServerGroup | None = None

        def __init__(self, cpu_group: Any, *args: Any, **options: Any) -> None:
            super().__init__(cpu_group, *args, **options)
            _log()
            kind = self.unique_name.partition(":")[0]
            if self.world_size == 1 or kind in _WITHOUT_COLLECTIVES:
                return
            theirs = getattr(self, "ca_comm", None)
            self.sidelane = ServerGroup(
                cpu_group, self.device, then=theirs, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT)
            )
            if self.sidelane.reason:
                LOG.warning("Sidelane: group %s stays vLLM's: %s", self.unique_name, self.sidelane.reason)
            if theirs is not None:
                self.ca_comm = self.sidelane

        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            found = None if self.sidelane is None else self.sidelane.all_reduce(input_)
            if found is not None:
                return found
            own = input_ if input_.is_cuda else input_.clone()  # vLLM's for CPUs adds in place, operators must not
            return super().all_reduce(own)

        def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            dim %= max(input_.dim(), 1)
            found = None if self.sidelane is None else self.sidelane.all_gather(input_.contiguous())
            if found is None:
                return super().all_gather(input_, dim)
            if dim == 0:
                return found
            shape = list(input_.shape)
            shape[dim] *= self.world_size
            return found.view(self.world_size, *input_.shape).movedim(0, dim).reshape(shape)

        def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
            inputs = [input_] if isinstance(input_, torch.Tensor) else input_
            if dim == 0 and self.sidelane is not None and all(each.dim() for each in inputs):
                found = [self.sidelane.all_gatherv(each, sizes or [each.shape[0]] * self.world_size) for each in inputs]
                if all(each is not None for each in found):
                    return found[0] if isinstance(input_, torch.Tensor) else found
            return super().all_gatherv(input_, dim, sizes)

        def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            found = self._reduced(input_, dim, None)
            return super().reduce_scatter(input_, dim) if found is None else found

        def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
            found = self._reduced(input_, dim, sizes)
            return super().reduce_scatterv(input_, dim, sizes) if found is None else found

        def reduce_scatterv_into_output(
            self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
        ) -> torch.Tensor:
            found = self._reduced(input_, dim, sizes, output if dim == 0 else None)
            if found is None:
                return super().reduce_scatterv_into_output(input_, output, dim, sizes)
            return found if found is output else output.copy_(found)

        def _reduced(
            self, input_: torch.Tensor, dim: int, sizes: Sequence[int] | None, output: torch.Tensor | None = None
        ) -> torch.Tensor | None:
            if self.sidelane is None:
                return None
            rows = input_.movedim(dim, 0).contiguous()
            if sizes is None and rows.shape[0] % self.world_size:
                return None
            parts = [rows.shape[0] // self.world_size] * self.world_size if sizes is None else sizes
            found = self.sidelane.reduce_scatterv(rows, parts, output)
            return found if found is None or found is output else found.movedim(0, dim).contiguous()

        def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
            found = None if self.sidelane is None else self.sidelane.broadcast(tensor, src)
            return super().broadcast(tensor, src) if found is None else found

        def suspend(self) -> None:
            super().suspend()
            if self.sidelane is not None and (why := self.sidelane.suspend()):
                LOG.warning("Sidelane: group %s was not suspended: %s", self.unique_name, why)

        def resume(self) -> None:
            super().resume()
            if self.sidelane is not None and (why := self.sidelane.resume()):
                LOG.warning("Sidelane: group %s was not resumed: %s", self.unique_name, why)

        def destroy(self) -> None:
            super().destroy()
            if self.sidelane is not None:
                self.sidelane.close()

    return DeviceCommunicator
