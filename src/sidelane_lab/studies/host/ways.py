"""Ways to have an all-gather done whose host time can be measured: calls with nothing of a study around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from sidelane.collectives import Communicator
from sidelane_lab.baselines.candidate import (
    Binds,
    Entrant,
    Implementation,
    Tensors,
    candidates_of,
    nothing_to_wait_for,
    views,
)
from sidelane_lab.baselines.own import Dma, Kernels
from sidelane_lab.baselines.reference import Case


@dataclasses.dataclass(slots=True)
class Way:
    """One way to have an all-gather done.

    Attributes:
        operation: which call is timed; by the names of the result file, as all of the next three.
        tensors: where it reads and writes.
        call: what is timed. What it returns is called after it where somebody must wait for the end.
        communicator: whose call it is, if it is Sidelane's.
        open: makes what must be armed before each call; None for calls that need nothing.
    """

    operation: str
    implementation: str
    variant: str
    symmetric: bool
    tensors: Tensors
    call: Callable[[], object] = nothing_to_wait_for
    communicator: Communicator | None = None
    open: Callable[[], Armed] | None = None

    def __str__(self) -> str:
        return f"{self.operation} {self.implementation} {self.variant}".rstrip()


class Armed:
    """A prelaunched all-gather: armed before each trigger, and waited for after it."""

    def __init__(self, communicator: Communicator, tensors: Tensors, *, from_host: bool) -> None:
        assert tensors.output is not None
        self._handle = communicator.prepare_all_gather(tensors.output, tensors.input, host_trigger=from_host)
        self._from_host = from_host
        self.arm = self._handle.arm
        self.trigger = self._handle.trigger_from_host if from_host else self._handle.trigger

    def settle(self) -> None:
        """Order the caller's next work behind the end, which ``trigger`` does itself."""
        if self._from_host:
            self._handle.wait()

    def close(self) -> None:
        self._handle.close()


def ways_of(implementations: Iterable[Implementation], variants: tuple[str, ...], case: Case) -> Iterator[Way]:
    """Every way to do ``case``, an all-gather, out of place. Collective.

    Args:
        implementations: that take part, their buffers reserved.
        variants: of Sidelane's.
        case: what to do.
    """
    for implementation in implementations:
        for candidate in candidates_of(
            implementation, case.kind, only=variants, launches=(implementation.launches[0],)
        ):
            if candidate.in_place or candidate.prelaunch:
                continue
            if isinstance(implementation, Dma | Kernels):
                yield from (_own(implementation, candidate, tensors) for tensors in _both(implementation, case))
            else:
                yield _baseline(implementation, candidate, case)
        if isinstance(implementation, Dma):
            yield from _triggers(implementation, case)


def _triggers(own: Dma, case: Case) -> Iterator[Way]:
    for from_host in (False, True):
        for symmetric, tensors in _both(own, case):
            operation = "trigger_from_host" if from_host else "trigger"
            make = functools.partial(Armed, own.communicator, tensors, from_host=from_host)
            yield Way(operation, "dma", "b2b", symmetric, tensors, communicator=own.communicator, open=make)


def _both(own: Dma | Kernels, case: Case) -> Iterator[tuple[bool, Tensors]]:
    """Tensors in symmetric memory, and in ordinary memory."""
    yield True, own.tensors(case, Entrant(own.name))
    buffers = (
        torch.empty(size, dtype=torch.uint8, device=case.device) for size in (case.output_bytes, case.input_bytes)
    )
    yield False, views(case, False, *buffers)


def _own(own: Dma | Kernels, candidate: Entrant, where: tuple[bool, Tensors]) -> Way:
    symmetric, tensors = where
    communicator = own.communicator
    assert tensors.output is not None
    call = functools.partial(communicator.all_gather, tensors.output, tensors.input, variant=candidate.variant)
    return Way("all_gather", own.name, candidate.variant, symmetric, tensors, call, communicator)


def _baseline(implementation: Implementation, candidate: Entrant, case: Case) -> Way:
    tensors = implementation.tensors(case, candidate)
    symmetric = candidate.variant == "window" or implementation.name in ("nccl_ce", "symm_mem")
    given = (case, tensors, candidate.variant)
    call: Callable[[], object] = functools.partial(implementation.start, *given)  # gives back what to wait for
    if isinstance(implementation, Binds):
        call = implementation.bind(*given)
    return Way("all_gather", implementation.name, candidate.variant, symmetric, tensors, call)
