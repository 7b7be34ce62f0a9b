"""Ways in which FSDP2 communicates on one model: each is attached once, and switched on for its steps.

A way is a gather and a scatter for each of FSDP2's groups of parameters, in the places where FSDP2 keeps its own. What
gathers straight into parameters replaces functions of torch, too, for as long as it is on.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from sidelane import config as settings
from sidelane import fsdp
from sidelane.errors import UnavailableError
from sidelane.integrations import direct_gather, fsdp_calls
from sidelane.integrations.direct_gather import DirectGather
from sidelane.integrations.fsdp_group import FsdpGroup
from sidelane.program.shape import Beside
from sidelane_lab.baselines.baselines_cuda import NcclCopyEngines, Windows
from sidelane_lab.baselines.candidate import all_gather
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.fsdp.cases import FLOORS

BUFFERS = 2
"""Gathered layers that FSDP2 has at once: one that is copied out, and the next."""


class BufferTurns:
    """Two buffers of each size, in turn: a gather comes behind the copy-out of the one before the last."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def next(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer whose turn it is; new ones are made when a size comes for the first time."""
        made = self._buffers.setdefault((numel, dtype), [])
        if len(made) < BUFFERS:
            made.append(torch.empty(numel, dtype=dtype, device=device))
            return made[-1]
        made.append(made.pop(0))
        return made[-1]


class StillGather(AllGather):
    """Gathers nothing. FSDP2 copies shards in, and parameters out.

    Attributes:
        direct: None: there is a copy-out.
    """

    direct: DirectGather | None = None

    def __init__(self) -> None:
        self._turns = BufferTurns()
        self._filled: set[int] = set()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._turns.next(math.prod(int(length) for length in size), dtype, device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if output_tensor.data_ptr() not in self._filled:
            self._filled.add(output_tensor.data_ptr())
            fill_others(output_tensor, input_tensor, group.rank(), group.size())
        return None


class StillScatter(ReduceScatter):
    """Reduces nothing: this rank's part of its own gradients is what comes out, where it is.

    Its buffers are its own: FSDP2 would free one before it has read what came out, which is elsewhere otherwise. With
    gradients that are added in float32 it is the gradient, which a later layer then overwrites.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._turns = group, BufferTurns()
        self._input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP2 asks for the input, and then for the output.
        numel, given = math.prod(int(length) for length in size), self._input
        if given is not None and numel * self._group.size() == given.numel():
            self._input = None
            return given.view(self._group.size(), numel)[self._group.rank()]
        self._input = self._turns.next(numel, dtype, device)
        return self._input

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return None


class StillLane:
    """A lane whose gathers move nothing: shards are copied into their places, and nothing is copied out."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._filled: set[int] = set()

    def all_gather(
        self,
        output: Sequence[torch.Tensor],
        input: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
        beside: Beside | None = None,
    ) -> dist.Work | None:
        """Gather as a communicator does."""
        outputs, inputs = list(output), list(input)
        if outputs[0].data_ptr() not in self._filled:
            self._filled.add(outputs[0].data_ptr())
            for one, own in zip(outputs, inputs, strict=True):
                fill_others(one, own, self.rank, self.world_size)
        return None


class StraightStill:
    """Gathers nothing, straight into the parameters: a gather for each of FSDP2's groups, and one ring for all."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        still: Any = StillLane(group)
        self._calls = FsdpGroup(group, device, collections.Counter(), (still, still))

    def gather(self, params: Any) -> StillGather:
        """For one of FSDP2's groups of parameters."""
        gather = StillGather()
        gather.direct = DirectGather(params, self._calls)
        return gather


def fill_others(output: torch.Tensor, own: torch.Tensor, rank: int, ranks: int) -> None:
    """Copy a rank's shard to where those of the others would be."""
    if own.numel():
        for other, part in enumerate(output.view(ranks, -1)):
            if other != rank:
                part.copy_(own.view(-1))


LIBRARY_NAMES = {"cpu": "gloo"}
"""Names of the group's own backend is called; elsewhere ``nccl``."""

STILL, STRAIGHT_STILL = FLOORS
OWN = ("sidelane_ag", "sidelane", "sidelane_copies")
ENGINES = "nccl_ce"


def names_on(device_type: str) -> tuple[str, ...]:
    """Implementations of a kind of device, in the order of a study.

    >>> names_on("cpu")
    ('gloo', 'sidelane_ag', 'sidelane', 'sidelane_copies', 'compute_only', 'compute_only_straight')
    """
    library = LIBRARY_NAMES.get(device_type, "nccl")
    return (library, *(() if device_type == "cpu" else (ENGINES,)), *OWN, *FLOORS)


@dataclasses.dataclass(frozen=True)
class CommunicationWay:
    """A way to communicate.

    Attributes:
        name: of the implementation.
        params: FSDP2's groups of parameters.
        gathers, scatters: one for each of them.
        note: what to know about it.
        held: bytes that it keeps from step to step.
        close: lets go of them. Collective, while the way is on.
    """

    name: str
    params: Sequence[Any]
    gathers: Sequence[AllGather]
    scatters: Sequence[ReduceScatter]
    note: Callable[[], str] = lambda: ""
    held: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None

    def enter(self) -> None:
        """Have FSDP2 communicate so. Nothing may be under way, and no other way be on."""
        for params, gather, scatter in zip(self.params, self.gathers, self.scatters, strict=True):
            params._all_gather_comm, params._reduce_scatter_comm = gather, scatter
            into = getattr(gather, "direct", None)
            if into is not None:
                into.take_over()

    def leave(self) -> None:
        """Switch it off. Nothing may be under way."""
        for gather in self.gathers:
            into = getattr(gather, "direct", None)
            if into is not None:
                into.return_all()


class CommunicationWays:
    """All ways of a study on one model; at most one is on.

    Args:
        model: that FSDP2 shards.
        rank: of this process.
        engines: makes NCCL on copy engines, or returns it where it is made.
        timeout_s: of Sidelane's waits.

    Attributes:
        attached: by name.
    """

    def __init__(self, model: nn.Module, rank: Rank, engines: Callable[[], Any], timeout_s: float) -> None:
        self._model, self._rank, self._engines = model, rank, engines
        self._config = dataclasses.replace(settings.current(), timeout_s=timeout_s)
        self._params = fsdp_calls.param_groups(model)
        self._group: dist.ProcessGroup = self._params[0].mesh_info.shard_process_group
        self._library = (
            [params._all_gather_comm for params in self._params],
            [params._reduce_scatter_comm for params in self._params],
        )
        self._on: CommunicationWay | None = None
        self._close: list[CommunicationWay] = []
        self.attached: dict[str, CommunicationWay] = {}

    def attach(self, name: str) -> None:
        """Make a way. Collective."""
        self.attached[name] = self._make(name)

    def switch(self, name: str) -> CommunicationWay:
        """Have FSDP2 communicate in a way that is attached."""
        way = self.attached[name]
        if way is not self._on:
            self._leave()
            way.enter()
            self._on = way
        return way

    def close(self) -> None:
        """Let go of everything. Collective. Not after a failure: releasing can wait for a peer."""
        for way in reversed(self._close):
            self._leave()
            way.enter()  # as it was when it was made
            way.close()
        self._leave()
        self._close.clear()
        self.attached.clear()

    def _leave(self) -> None:
        if self._on is not None:
            self._on.leave()
        self._on = None

    def _make(self, name: str) -> CommunicationWay:
        gathers, scatters = self._library
        count = len(self._params)
        if name == ENGINES:
            gather = self._engines().gather_of(self._params)
            return CommunicationWay(name, self._params, [gather] * count, scatters, gather.note, lambda: gather.held)
        if name == "sidelane_ag":
            own = self._sidelane(True)
            return dataclasses.replace(own, name=name, scatters=scatters)
        if name in OWN:
            return dataclasses.replace(self._sidelane(name != "sidelane_copies"), name=name)
        if name in FLOORS:
            objection = direct_gather.objection() if name == STRAIGHT_STILL else None
            if objection is not None:
                raise UnavailableError(objection)
            still: list[AllGather] = [StillGather()] * count
            if name == STRAIGHT_STILL:
                into = StraightStill(self._group, self._rank.device)
                still = [into.gather(one) for one in self._params]
            return CommunicationWay(
                name, self._params, still, [StillScatter(self._group)] * count, lambda: NOTHING_MOVES
            )
        return CommunicationWay(name, self._params, gathers, scatters)

    def _sidelane(self, zero_copy: bool) -> CommunicationWay:
        """Sidelane for both collectives, switched off; what gathers alike is shared."""
        name = "sidelane" if zero_copy else "sidelane_copies"
        for way in self._close:
            if way.name == name:
                return way
        self._leave()
        for params, gather, scatter in zip(self._params, *self._library, strict=True):
            params._all_gather_comm, params._reduce_scatter_comm = gather, scatter
        enabled = fsdp.enable(self._model, config=self._config, zero_copy=zero_copy)
        copied = direct_gather.objection() if zero_copy else None

        def note() -> str:
            elsewhere = [f"{calls} calls went elsewhere: {what}" for what, calls in enabled.elsewhere.items()]
            return "; ".join([*([f"parameters are copied out: {copied}"] if copied else []), *elsewhere])

        way = CommunicationWay(
            name,
            self._params,
            [params._all_gather_comm for params in self._params],
            [params._reduce_scatter_comm for params in self._params],
            note,
            lambda: sum((enabled.memory().reserved, enabled.memory().own)),
            enabled.disable,
        )
        way.leave()
        self._close.append(way)
        return way


NOTHING_MOVES = "collectives are skipped, so that loss and gradients are not the model's"


def gathered_bytes(params: Any, dtype: torch.dtype, ranks: int) -> int:
    """Return the gathered bytes of one of FSDP2's groups of parameters."""
    numel: int = sum(param._sharded_param_data.numel() for param in params.fsdp_params)
    return numel * dtype.itemsize * ranks


class NcclEngines:
    """The communicator of a study, and its windows by size, which the cases share.

    Args:
        device: of this rank.
        timeout_s: of its process group.
        meter: ranks agree through it before each step that is collective.

    Raises:
        UnavailableError: on every rank, if any rank could not make the communicator.
    """

    def __init__(self, device: torch.device, timeout_s: float, meter: Meter) -> None:
        self._device, self._meter = device, meter
        self._nccl = NcclCopyEngines(device, timeout_s, meter)
        self._windows: dict[int, Windows] = {}

    def gather_of(self, params: Sequence[Any]) -> WindowGather:
        """A gather for some of FSDP2's groups of parameters. Collective.

        Raises:
            UnavailableError: on every rank, if any rank could not make the windows.
        """
        group = self._nccl.group
        assert group is not None
        sizes = {gathered_bytes(one, torch.bfloat16, group.size()) for one in params}
        for nbytes in sorted(sizes - set(self._windows)):
            self._windows[nbytes] = Windows(self._device, self._meter, group, nbytes, nbytes)
        return WindowGather(group, {nbytes: self._windows[nbytes] for nbytes in sizes})

    def close(self) -> None:
        """Let go of the windows. Collective."""
        for windows in self._windows.values():
            windows.close()
        self._windows.clear()


class WindowGather(AllGather):
    """Gathers in windows, in turn.

    Attributes:
        held: bytes of the windows.
    """

    def __init__(self, group: dist.ProcessGroup, windows: dict[int, Windows]) -> None:
        self._group, self._windows = group, windows
        self._turns = dict.fromkeys(windows, 0)
        self._outside = 0
        self.held = sum(2 * nbytes for nbytes in windows)

    def note(self) -> str:
        """Say what went otherwise than it was to."""
        return f"{self._outside} gathers had no window" if self._outside else ""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nbytes = math.prod(int(length) for length in size) * dtype.itemsize
        if nbytes not in self._windows:
            self._outside += 1
            return torch.empty(*size, dtype=dtype, device=device)
        # FSDP2 copies a gathered layer out before it begins the gather behind the next: two windows take turns.
        self._turns[nbytes] ^= 1
        return self._windows[nbytes].buffers[self._turns[nbytes]][:nbytes].view(dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = all_gather(output_tensor, input_tensor, group=self._group, async_op=async_op)
        return work
