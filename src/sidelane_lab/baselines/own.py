"""Sidelane's own collectives as implementations of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from sidelane.choice.candidate import DMA, SM, applicable, find, takes_one_tensor
from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane.session import Communicator, Work
from sidelane_lab.baselines.candidate import Entrant, Lists, Tensors, nothing_to_wait_for, views
from sidelane_lab.baselines.listed import separately
from sidelane_lab.baselines.reference import ROOT, Case

Given = torch.Tensor | list[torch.Tensor]


class Dma:
    """Sidelane's own collectives by copy engines, on symmetric tensors."""

    name = "dma"

    def __init__(self, communicator: Communicator, *, with_auto: bool = False) -> None:
        self.launches: tuple[str, ...] = ("eager",) if communicator.device.type == "cpu" else ("eager", "graph")
        self._communicator = communicator
        self._auto = ("auto",) if with_auto else ()
        self._output: torch.Tensor | None = None
        self._input: torch.Tensor | None = None

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        if self._auto and in_place and kind is Kind.ALL_TO_ALL:
            return ()  # it overwrites its input: next to a computation that is another call (``InPlace``)
        names = _names(kind, in_place, self._communicator, DMA)
        return self._auto + names if names else ()

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return _that_take_lists(kind, self.variants(kind, in_place))

    @property
    def communicator(self) -> Communicator:
        """Whose collectives these are."""
        return self._communicator

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        have = [0 if buffer is None else buffer.nbytes for buffer in (self._output, self._input)]
        if have[0] >= output_bytes and have[1] >= input_bytes:
            return  # asked before, by an implementation that shares them
        self._output = self._communicator.empty(output_bytes, dtype=torch.uint8)
        self._input = self._communicator.empty(input_bytes, dtype=torch.uint8)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        assert self._output is not None, "reserve comes first"
        assert self._input is not None
        return views(case, candidate.in_place, self._output, self._input)

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], Work | None]:
        output, input = tensors.output, tensors.input
        assert output is not None
        return self._bind(case.kind, output, input, variant)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        work = self.bind(case, tensors, variant)()
        return nothing_to_wait_for if work is None else work.synchronize

    def start_list(self, lists: Lists, variant: str) -> Callable[[], None]:
        work = self._bind(lists.parts[0].kind, lists.outputs, lists.inputs, variant)()
        return nothing_to_wait_for if work is None else work.synchronize

    def _bind(self, kind: Kind, output: Given, input: Given, variant: str) -> Callable[[], Work | None]:
        options: dict[str, Any] = {"variant": variant}
        if self._communicator.device.type == "cpu":
            options["async_op"] = True  # a synchronous call returns when it has ended, and nothing could run next to it
        return bound_call(self._communicator, kind, output, input, **options)

    def close(self) -> None:
        self._communicator.close()


class Kernels:
    """Sidelane's collectives that kernels run, with the communicator and the buffers of :class:`Dma`.

    Raises:
        UnavailableError: this machine does not have them.
    """

    name = SM

    def __init__(self, dma: Dma) -> None:
        if SM not in dma.communicator.abilities.implementations:
            raise UnavailableError("this device or this installation has no kernels for collectives")
        self.launches = dma.launches
        self._dma = dma

    @property
    def communicator(self) -> Communicator:
        """Whose collectives these are."""
        return self._dma.communicator

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return _names(kind, in_place, self._dma.communicator, SM)

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return _that_take_lists(kind, self.variants(kind, in_place))

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        self._dma.reserve(output_bytes, input_bytes)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        return self._dma.tensors(case, candidate)

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], object]:
        return self._dma.bind(case, tensors, variant)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        return self._dma.start(case, tensors, variant)

    def start_list(self, lists: Lists, variant: str) -> Callable[[], None]:
        return self._dma.start_list(lists, variant)

    def close(self) -> None:
        self._dma.close()


class Auto(Kernels):
    """Sidelane's own choice among its collectives. Its rows name what it chose as their variant."""

    name = "auto"

    def __init__(self, dma: Dma) -> None:
        self.launches = dma.launches
        self._dma = dma

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("auto",) if self._dma.variants(kind, in_place) else ()

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        """The list in one call, and for comparison a call for each tensor, which may run as something else."""
        return tuple(name for auto in self.variants(kind, in_place) for name in (auto, separately(auto)))

    def chosen(self) -> str:
        """What the last call was run as."""
        choice = self._dma.communicator.last_choice()
        assert choice is not None, "a call comes first"
        return choice.candidate.variant


class OwnPartLeft(Kernels):
    """All-to-alls on copy engines that leave every rank's own part in its input."""

    name = "dma_left"
    leaves_own_part = True

    def __init__(self, dma: Dma) -> None:
        self.launches = dma.launches
        self._dma = dma

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("auto",) if kind is Kind.ALL_TO_ALL and not in_place else ()

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ()

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], object]:
        return self._call(tensors, variant)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        work = self._call(tensors, variant)()
        return nothing_to_wait_for if work is None else work.synchronize

    def _call(self, tensors: Tensors, variant: str) -> Callable[[], Work | None]:
        waits = self.communicator.device.type != "cpu"  # as ``Dma`` has it
        options: dict[str, Any] = {"variant": variant, "async_op": not waits, "copy_own_part": False}
        assert tensors.output is not None
        return partial(self.communicator.all_to_all, tensors.output, tensors.input, **options)


class InPlace(Kernels):
    """All-to-alls on copy engines whose input and output are the same bytes."""

    name = "dma_in_place"

    def __init__(self, dma: Dma) -> None:
        self.launches = dma.launches
        self._dma = dma

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("auto",) if kind is Kind.ALL_TO_ALL and in_place else ()

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ()


def bound_call(
    communicator: Communicator, kind: Kind, output: Given, input: Given, **options: Any
) -> Callable[[], Work | None]:
    """What makes a call of Sidelane's, and nothing else.

    Args:
        communicator: whose call.
        kind: which collective.
        output: what it writes; of a broadcast all that there is.
        input: what it reads.
        options: of the call, such as ``variant``.
    """
    match kind:
        case Kind.ALL_REDUCE:
            return partial(communicator.all_reduce, input, output=output, **options)
        case Kind.BROADCAST:
            return partial(communicator.broadcast, output, root=ROOT, **options)
    collective: Callable[..., Work | None] = getattr(communicator, kind)
    return partial(collective, output, input, **options)


def _that_take_lists(kind: Kind, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if (one := find(kind, name)) is None or not takes_one_tensor(one))


def _names(kind: Kind, in_place: bool, communicator: Communicator, implementation: str) -> tuple[str, ...]:
    if kind is Kind.BROADCAST and not in_place:
        return ()
    found = applicable(kind, communicator.world_size, communicator.abilities)
    return tuple(candidate.variant for candidate in found if candidate.implementation == implementation)
