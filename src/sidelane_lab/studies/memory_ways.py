"""Ways to have a collective done that differ in the memory of the caller's tensors, each with tensors of its own.

    symmetric   Sidelane's ``auto`` on tensors of ``Communicator.empty``
    staged      the same on ordinary tensors
    library     NCCL on ordinary tensors; on CPU ranks Gloo

Each of Sidelane's has a communicator of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane.collectives.plan import AUTO
from sidelane.config import COMPUTE, NOTHING
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import Binds, Entrant, Implementation, ReadyCall, Tensors, nothing_to_wait_for
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import Roster, bound_call
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter

SYMMETRIC, STAGED = "symmetric", "staged"

PLACES: Mapping[Kind, tuple[bool, ...]] = MappingProxyType(
    {
        Kind.ALL_GATHER: (False, True),
        Kind.ALL_TO_ALL: (False,),
        Kind.REDUCE_SCATTER: (False,),
        Kind.ALL_REDUCE: (False, True),  # torch's has no output
    }
)
"""Where calls are measured: out of place, in place."""


class OwnWay(Implementation):
    """Sidelane's ``auto`` on tensors that peers reach in one way.

    Args:
        reach: which; see the top of this file.
        communicator: of this way alone.
    """

    name = AUTO
    launches: tuple[str, ...] = ("eager",)

    def __init__(self, reach: str, communicator: Communicator) -> None:
        self.reach, self.communicator = reach, communicator
        self._beside, self.device = NOTHING, communicator.device
        # On CPUs a call blocks its caller, so a thread makes it where a computation is to run next to it.
        self._thread = ThreadPoolExecutor(1) if communicator.device.type == "cpu" else None

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return (self.reach,)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes as this way has them. Collective where they are symmetric."""
        if self.reach == SYMMETRIC:
            return self.communicator.empty(nbytes, dtype=torch.uint8)
        return super().memory(nbytes)

    def bind(self, case: Case, tensors: Tensors, variant: str = "") -> Callable[[], object]:
        output, input = tensors.output, tensors.input
        assert output is not None
        return bound_call(self.communicator, case.kind, output, input, beside=self._beside)

    def start(self, case: Case, tensors: Tensors, variant: str = "") -> Callable[[], None]:
        call = self.bind(case, tensors)
        if self._thread is None:
            call()
            return nothing_to_wait_for
        begun = self._thread.submit(call)
        return lambda: _wait(begun)

    def next_to_computation(self) -> OwnWay:
        """Return the same with calls that say that a computation runs next to them."""
        other = copy.copy(self)
        other._beside = COMPUTE
        return other

    def objection(self, tensors: Tensors) -> str | None:
        """Say why peers do not reach these tensors as they should; known behind the first call."""
        for tensor in (tensors.output, tensors.input):
            found = self.communicator.reach(tensor) if tensor is not None else None
            if found is not None and found.how != self.reach:
                return f"not {self.reach}, but {found}"
        return None

    def said(self) -> tuple[str, str]:
        """Return what the last call was run as, and why."""
        choice = self.communicator.last_choice()
        assert choice is not None, "a call comes first"
        return choice.candidate.variant, choice.reason

    def close(self) -> None:
        super().close()
        if self._thread is not None:
            self._thread.shutdown()
        self.communicator.close()


class LibraryWay(Implementation):
    """A library on ordinary tensors.

    Args:
        library: whose calls; its own buffers are not used.
        device: of this rank.
    """

    launches: tuple[str, ...] = ("eager",)
    reach = ""

    def __init__(self, library: Implementation, device: torch.device) -> None:
        self.name = library.name
        self._library, self.device = library, device

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("",) if "" in self._library.variants(kind, in_place) else ()

    def bind(self, case: Case, tensors: Tensors, variant: str = "") -> Callable[[], object]:
        if isinstance(self._library, Binds):
            return self._library.bind(case, tensors, "")
        return lambda: self._library.start(case, tensors, "")()

    def start(self, case: Case, tensors: Tensors, variant: str = "") -> Callable[[], None]:
        return self._library.start(case, tensors, "")

    def next_to_computation(self) -> LibraryWay:
        """Return itself: it knows nothing of that."""
        return self

    def objection(self, tensors: Tensors) -> str | None:
        """Return None: it takes any."""
        return None

    def said(self) -> tuple[str, str]:
        """Return nothing: it does not say."""
        return "", ""

    def close(self) -> None:
        super().close()
        self._library.close()


Way = OwnWay | LibraryWay


class OrdinaryCall(ReadyCall):
    """A call on tensors that peers reach as its row says.

    Attributes:
        said: the variant that the last right call ran as, and why.
    """

    said = ("", "")

    def __init__(self, candidate: Entrant, case: Case, way: Way, calls: int = 1) -> None:
        super().__init__(candidate, case, way, calls)
        self._way = way

    def error(self, seed: int) -> str | None:
        return super().error(seed) or self._way.objection(self.tensors)

    def settle(self) -> None:
        self.said = self._way.said()


def make_ways(
    rank: Rank, meter: Meter, timeout_s: float, group: dist.ProcessGroup | None = None
) -> tuple[Roster, dict[str, Way]]:
    """Make the ways of this machine, in a roster and by the same names; what cannot be made is among its unavailable.

    Args:
        rank: of this process.
        meter: of this rank.
        timeout_s: longest that one step may take, on the device or for a peer.
        group: of the ranks; None for the default group.
    """
    roster, made = Roster(meter), {}

    def add(name: str, make: Callable[[], Way]) -> None:
        def step() -> Way:
            made[name] = make()
            return made[name]

        roster.add(name, step)

    def own(reach: str) -> Way:
        config = dataclasses.replace(settings.current(), timeout_s=timeout_s, beside=NOTHING)
        return OwnWay(reach, Communicator(group, device=rank.device, config=config))

    for reach in (SYMMETRIC, STAGED):
        add(reach, functools.partial(own, reach))
    add("gloo" if rank.device.type == "cpu" else "nccl", lambda: _library(rank, meter, group))
    return roster, {name: way for name, way in made.items() if name in roster.implementations}


def _library(rank: Rank, meter: Meter, group: dist.ProcessGroup | None) -> LibraryWay:
    if rank.device.type == "cpu":
        from sidelane_lab.baselines.baselines_cpu import Gloo

        return LibraryWay(Gloo(group), rank.device)
    from sidelane_lab.baselines.baselines_cuda import Nccl

    return LibraryWay(Nccl(rank.device, meter, group), rank.device)


def _wait(begun: Any) -> None:
    begun.result()
