"""The baseline on CPUs: Gloo, through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidelane.program.collective import Kind
from sidelane_lab.baselines import candidate
from sidelane_lab.baselines.reference import Case

PLACES = {
    Kind.ALL_GATHER: (False, True),
    Kind.ALL_TO_ALL: (False,),
    Kind.REDUCE_SCATTER: (False,),
    Kind.ALL_REDUCE: (True,),
    Kind.BROADCAST: (True,),
}
"""Collectives, out of place and in place."""


class Gloo(candidate.Implementation):
    """Gloo's collectives on ordinary tensors. Every call is asynchronous, so that a GEMM can run next to it.

    A list is one coalesced operation where torch has it for Gloo, elsewhere calls that are all begun before the first
    one is waited for.
    """

    name = "gloo"
    launches: tuple[str, ...] = ("eager",)
    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("",) if in_place in PLACES.get(kind, ()) else ()

    def start(self, case: Case, tensors: candidate.Tensors, variant: str) -> Callable[[], None]:
        assert tensors.output is not None
        work = candidate.library_call(case.kind, tensors.output, tensors.input, group=self._group, async_op=True)()
        return lambda: _wait(work)

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return tuple(name for one in self.variants(kind, in_place) for name in (one, candidate.separately(one)))

    def start_list(self, lists: candidate.TensorLists, variant: str) -> Callable[[], None]:
        calls = list(zip(lists.parts, lists.pairs, strict=True))
        if calls[0][0].kind not in candidate.COALESCED:
            waits = [self.start(part, pair, variant) for part, pair in calls]
            return lambda: _each(waits)
        with candidate.coalesced(self._group, async_ops=True) as begun:
            for part, pair in calls:
                self.start(part, pair, variant)
        return lambda: _wait(begun)


def _wait(work: Any) -> None:
    work.wait()


def _each(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()
