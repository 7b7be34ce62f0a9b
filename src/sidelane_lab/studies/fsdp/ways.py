"""Ways in which FSDP2 communicates on one model: each is attached once, and switched on for its steps.

A way is a gather and a scatter for each of FSDP2's groups of parameters, in the places where FSDP2 keeps its own. What
gathers straight into parameters replaces functions of torch, too, for as long as it is on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from sidelane import config as settings
from sidelane.cli.launch import Rank
from sidelane.errors import UnavailableError
from sidelane.integrations import direct_gather, fsdp
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.fsdp.still import StillGather, StillScatter, StraightStill

LIBRARY_NAMES = {"cpu": "gloo"}
"""What the group's own backend is called; elsewhere ``nccl``."""

STILL, STRAIGHT_STILL = "compute_only", "compute_only_straight"
FLOORS = (STILL, STRAIGHT_STILL)
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
class Way:
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
            into = getattr(gather, "straight", None)
            if into is not None:
                into.take_over()

    def leave(self) -> None:
        """Switch it off. Nothing may be under way."""
        for gather in self.gathers:
            into = getattr(gather, "straight", None)
            if into is not None:
                into.give_back()


class Ways:
    """All ways of a study on one model; at most one is on.

    Args:
        model: that FSDP2 shards.
        rank: of this process.
        meter: ranks agree through it about what could be attached.
        engines: NCCL on copy engines, where there is any.
        timeout_s: of Sidelane's waits.

    Attributes:
        attached: by name.
    """

    def __init__(
        self, model: nn.Module, rank: Rank, meter: Meter, engines: Callable[[], Any] | None, timeout_s: float
    ) -> None:
        self._model, self._rank, self._meter, self._engines = model, rank, meter, engines
        self._config = dataclasses.replace(settings.current(), timeout_s=timeout_s)
        self._params = fsdp._param_groups(model)
        self._group: dist.ProcessGroup = self._params[0].mesh_info.shard_process_group
        self._library = (
            [params._all_gather_comm for params in self._params],
            [params._reduce_scatter_comm for params in self._params],
        )
        self._on: Way | None = None
        self._close: list[Way] = []
        self.attached: dict[str, Way] = {}

    def attach(self, name: str) -> str | None:
        """Make a way on all ranks. Collective.

        Returns:
            Why it cannot be there, or None.
        """
        made: list[Way] = []
        problem = self._meter.attempt(lambda: made.append(self._make(name)))
        if problem is None:
            self.attached[name] = made[0]
        return problem

    def switch(self, name: str) -> Way:
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

    def _make(self, name: str) -> Way:
        gathers, scatters = self._library
        count = len(self._params)
        if name == ENGINES:
            if self._engines is None:
                raise UnavailableError("there is no NCCL on this device")
            gather = self._engines().gather_of(self._params)
            return Way(name, self._params, [gather] * count, scatters, gather.note, lambda: gather.held)
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
            return Way(name, self._params, still, [StillScatter(self._group)] * count, lambda: NOTHING_MOVES)
        return Way(name, self._params, gathers, scatters)

    def _sidelane(self, straight_into_parameters: bool) -> Way:
        """Sidelane for both collectives, switched off; what gathers alike is shared."""
        name = "sidelane" if straight_into_parameters else "sidelane_copies"
        for way in self._close:
            if way.name == name:
                return way
        self._leave()
        for params, gather, scatter in zip(self._params, *self._library, strict=True):
            params._all_gather_comm, params._reduce_scatter_comm = gather, scatter
        enabled = fsdp.enable(self._model, config=self._config, straight_into_parameters=straight_into_parameters)
        copied = direct_gather.objection() if straight_into_parameters else None

        def note() -> str:
            elsewhere = [f"{one.calls} calls went elsewhere: {one.what}" for one in enabled.elsewhere.values()]
            return "; ".join([*([f"parameters are copied out: {copied}"] if copied else []), *elsewhere])

        way = Way(
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
    """Of one of FSDP2's groups of parameters."""
    numel: int = sum(param._sharded_param_data.numel() for param in params.fsdp_params)
    return numel * dtype.itemsize * ranks
