"""Floors of a training step: FSDP2 as it is, with collectives that move nothing.

Buffers hold what gathered parameters would hold: the shards of the other ranks are copies of this rank's, made once for
each buffer. A GEMM on zeros draws less power and runs faster, so that zeros would be no floor (docs/lab/hardware.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from sidelane.integrations.direct_gather import Straight, Tensors
from sidelane.integrations.ring import Ring
from sidelane.program.shape import Beside

BUFFERS = 2
"""Gathered layers that FSDP2 has at once: one that is copied out, and the next."""


class Turns:
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
        straight: None: there is a copy-out.
    """

    straight: Straight | None = None

    def __init__(self) -> None:
        self._turns = Turns()
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
        self._group, self._turns = group, Turns()
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
        self, output: Tensors, input: Tensors, *, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """As a communicator's."""
        outputs, inputs = list(output), list(input)
        if outputs[0].data_ptr() not in self._filled:
            self._filled.add(outputs[0].data_ptr())
            for one, own in zip(outputs, inputs, strict=True):
                fill_others(one, own, self.rank, self.world_size)
        return None


class StraightStill:
    """Gathers nothing, straight into the parameters: a gather for each of FSDP2's groups, and one ring for all."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._lane = group, StillLane(group)
        self._ring = Ring(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device), device)

    def gather(self, params: Any) -> StillGather:
        """For one of FSDP2's groups of parameters."""
        gather = StillGather()
        gather.straight = Straight(params, self._lane, self._ring, self._group, lambda *_: None, lambda _: "")
        return gather


def fill_others(output: torch.Tensor, own: torch.Tensor, rank: int, ranks: int) -> None:
    """Copy a rank's shard to where those of the others would be."""
    if own.numel():
        for other, part in enumerate(output.view(ranks, -1)):
            if other != rank:
                part.copy_(own.view(-1))
