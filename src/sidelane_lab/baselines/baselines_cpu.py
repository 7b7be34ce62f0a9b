"""The baseline on CPUs: Gloo, through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidelane.program.collective import Kind
from sidelane_lab.baselines.candidate import (
    COALESCED,
    Entrant,
    Lists,
    Tensors,
    all_gather,
    coalesced,
    reduce_scatter,
    separately,
    views,
)
from sidelane_lab.baselines.reference import ROOT, Case


class Gloo:
    """Gloo's collectives on ordinary tensors. Every call is asynchronous, so that a GEMM can run next to it.

    A list is one coalesced operation where torch has it for Gloo, elsewhere calls that are all begun before the first
    one is waited for.
    """

    name = "gloo"
    launches: tuple[str, ...] = ("eager",)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._output: torch.Tensor | None = None
        self._input: torch.Tensor | None = None

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        supported = {
            Kind.ALL_GATHER: (False, True),
            Kind.ALL_TO_ALL: (False,),
            Kind.REDUCE_SCATTER: (False,),
            Kind.ALL_REDUCE: (True,),
            Kind.BROADCAST: (True,),
        }
        return ("",) if in_place in supported.get(kind, ()) else ()

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        self._output = torch.empty(output_bytes, dtype=torch.uint8)
        self._input = torch.empty(input_bytes, dtype=torch.uint8)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        assert self._output is not None, "reserve comes first"
        assert self._input is not None
        return views(case, candidate.in_place, self._output, self._input)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        output, input = tensors.output, tensors.input
        assert output is not None
        work: dist.Work
        match case.kind:
            case Kind.ALL_GATHER:
                work = all_gather(output, input, group=self._group, async_op=True)
            case Kind.ALL_TO_ALL:
                work = dist.all_to_all_single(output, input, group=self._group, async_op=True)
            case Kind.REDUCE_SCATTER:
                work = reduce_scatter(output, input, group=self._group, async_op=True)
            case Kind.ALL_REDUCE:
                work = dist.all_reduce(output, group=self._group, async_op=True)
            case _:
                work = dist.broadcast(output, group_src=ROOT, group=self._group, async_op=True)
        return lambda: _wait(work)

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return tuple(name for one in self.variants(kind, in_place) for name in (one, separately(one)))

    def start_list(self, lists: Lists, variant: str) -> Callable[[], None]:
        calls = list(zip(lists.parts, lists.pairs, strict=True))
        if calls[0][0].kind not in COALESCED:
            waits = [self.start(part, pair, variant) for part, pair in calls]
            return lambda: _each(waits)
        with coalesced(self._group, async_ops=True) as begun:
            for part, pair in calls:
                self.start(part, pair, variant)
        return lambda: _wait(begun)

    def close(self) -> None:
        self._output = self._input = None


def _wait(work: Any) -> None:
    work.wait()


def _each(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()
