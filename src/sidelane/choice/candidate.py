"""What a call is, for the choice, and every way in which it could run.

A value is added to an axis by adding it to its tuple (``SM_VARIANTS``, ``LAUNCHES``, ``SIGNALS``) and, where it is not
legal for every call, a line to :func:`objection`. Backends say what their machine has of it (``Abilities``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from sidelane.config import BESIDE, COMPUTE, NOTHING
from sidelane.program.build import ALTERNATING, INTO_OUTPUTS, RELAY, variants
from sidelane.program.build.alternating import SLOT_BYTES
from sidelane.program.collective import REDUCING, Collective, Kind
from sidelane.program.kernel import MOST_RANKS, NARROW, PUSH
from sidelane.program.kernel_list import MOST_LISTED

DMA, SM = "dma", "sm"
IMPLEMENTATIONS = (DMA, SM)
"""Copy engines, and kernels that move the bytes themselves. In order of preference between equals."""

SM_VARIANTS: dict[Kind, tuple[str, ...]] = {
    Kind.ALL_GATHER: ("one_shot",),
    Kind.ALL_TO_ALL: ("one_shot",),
    Kind.BROADCAST: ("one_shot",),
    Kind.REDUCE_SCATTER: ("one_shot", "one_shot_narrow"),
    Kind.ALL_REDUCE: ("one_shot", "two_shot", "two_shot_push", "one_shot_narrow", "two_shot_narrow"),
}

CALLS, GRAPH = "calls", "graph"
LAUNCHES = (CALLS, GRAPH)
"""How an eager call reaches the device: as single driver calls, or as one cached graph. The first value is what a plain
variant name means."""

SIGNALS = ("memops",)
"""What signals and waits are made of: stream memory operations. The first value is what a plain name means."""

FIRST = "b2b"
"""One engine a rank: where peers share a copy engine, as on the machines measured so far, the variant to try first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Everything about a call that the choice looks at; the same on every rank.

    Attributes:
        kind: which collective.
        world_size: ranks in the group.
        nbytes: gathered size of an all_gather, the largest local buffer of the others.
        dtype: of the elements; it matters to the reducing collectives only.
        in_place: input and output share memory; of a list, of some tensor.
        symmetric: peers can write into the output (it lies at one place in symmetric memory); of a reduce_scatter read
            the input, of an all_reduce both.
        captured: into a graph of the caller's.
        beside: what runs next to it: ``nothing`` or ``compute``.
        even: every two ranks exchange the same number of bytes, the root and each of the others if there is one (the
            shards of an all_reduce may differ).
        listed: it is one with many tensors; ``nbytes`` are those of all, the rest is true of every one.
        tensors: how many.
        mixed: they are not all for one kind of collective; ``kind`` is that with the most bytes.
        uniform: they have one reduction and dtype, where they reduce, and one root, where they have any.
    """

    kind: Kind
    world_size: int
    nbytes: int
    dtype: str = "bfloat16"
    in_place: bool = False
    symmetric: bool = True
    captured: bool = False
    beside: str = NOTHING
    even: bool = True
    listed: bool = False
    tensors: int = 1
    mixed: bool = False
    uniform: bool = True

    @staticmethod
    def of(collective: Collective, dtype: str, *, symmetric: bool, captured: bool, beside: str) -> Call:
        """Describe a call of ``collective``."""
        check_beside(str(collective.kind), beside)
        sizes = {nbytes for row in collective.counts for nbytes in row}
        return Call(
            kind=collective.kind,
            world_size=collective.world_size,
            nbytes=collective.largest_buffer,
            dtype=dtype,
            in_place=collective.in_place,
            symmetric=symmetric,
            captured=captured,
            beside=beside,
            even=len(sizes) == 1 or collective.kind in (Kind.ALL_REDUCE, Kind.BROADCAST),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Abilities:
    """What a machine has; the same on every rank of a group. By default what every machine has."""

    implementations: tuple[str, ...] = (DMA,)
    launches: tuple[str, ...] = LAUNCHES[:1]
    signals: tuple[str, ...] = SIGNALS[:1]

    def include(self, candidate: Candidate) -> bool:
        """True if the candidate exists on the machine."""
        return (
            candidate.implementation in self.implementations
            and candidate.launch in self.launches
            and candidate.signals in self.signals
        )


EVERYTHING = Abilities(IMPLEMENTATIONS, LAUNCHES, SIGNALS)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a collective.

    Attributes:
        implementation: ``dma`` or ``sm``.
        variant: algorithm within it, as ``Communicator`` takes it.
        launch: how an eager call reaches the device, one of ``LAUNCHES``.
        signals: what its signals are made of, one of ``SIGNALS``.
    """

    implementation: str
    variant: str
    launch: str = LAUNCHES[0]
    signals: str = SIGNALS[0]

    @property
    def name(self) -> str:
        """What selects it as ``variant=`` of a call: ``b2b``, or with what is not the default, ``b2b+graph``.

        >>> Candidate("dma", "b2b", launch="graph").name
        'b2b+graph'
        """
        others = ((self.launch, LAUNCHES), (self.signals, SIGNALS))
        return "+".join([self.variant, *(value for value, allowed in others if value != allowed[0])])

    @property
    def launches_kernels(self) -> bool:
        """It takes compute units to move or to signal (not counting what the sum of a reduction takes)."""
        return self.implementation == SM or self.signals != SIGNALS[0]

    def __str__(self) -> str:
        return f"{self.implementation} {self.name}"


def find(kind: Kind, name: str) -> Candidate | None:
    """The candidate of ``kind`` with that :attr:`Candidate.name`; None if there is none."""
    return _by_name(kind).get(name)


def everything(kind: Kind, abilities: Abilities = EVERYTHING) -> tuple[Candidate, ...]:
    """Every candidate that a machine has for a collective, legal or not, in order of preference between equals."""
    return tuple(filter(abilities.include, _by_name(kind).values()))


def candidates(call: Call, abilities: Abilities = EVERYTHING) -> tuple[Candidate, ...]:
    """The legal ways to run a call, in order of preference between equals.

    Args:
        call: what is asked.
        abilities: of this machine.
    """
    return tuple(found for found in everything(call.kind, abilities) if not objection(call, found, abilities))


def objection(call: Call, candidate: Candidate, abilities: Abilities = EVERYTHING) -> str:
    """Why a candidate is not legal for a call; empty if it is."""
    if not abilities.include(candidate):
        return "not available on this machine"
    narrow = candidate.variant.endswith(NARROW)
    if call.beside == COMPUTE and candidate.launches_kernels and not narrow:
        return "takes compute units from what runs beside it"
    if call.beside != COMPUTE and narrow:
        return "leaves compute units to nobody: nothing runs beside it"
    if call.captured and candidate.launch == GRAPH:
        return "the call is part of a graph already"
    if candidate.variant in INTO_OUTPUTS and not call.symmetric and call.world_size > 1:
        return "writes into the peers' outputs, which are in ordinary memory"
    if candidate.variant.endswith(PUSH) and not call.symmetric and call.world_size > 1:
        return "needs input and output in symmetric memory: in ordinary memory it is two_shot"
    if candidate.variant == RELAY and call.world_size <= 2:
        return "has no third rank to relay to"
    if not call.even and (candidate.variant == "swap" or candidate.implementation == SM):
        return "needs equal counts between all ranks"
    if call.listed and takes_one_tensor(candidate):
        return "takes one tensor a call"
    if call.mixed and (candidate.implementation == SM or candidate.variant in ("bcst", "swap", "striped")):
        return "is not for every kind of collective in the batch"
    if call.tensors > MOST_LISTED and candidate.implementation == SM:
        return f"takes {MOST_LISTED} tensors at most"
    if not call.uniform and candidate.implementation == SM:
        return "runs one reduction of one dtype, or one root"
    if candidate.variant == ALTERNATING and (problem := _no_alternation(call)):
        return problem
    if candidate.implementation == SM and call.world_size > MOST_RANKS:
        return f"kernels address {MOST_RANKS} ranks at most"
    return ""


def takes_one_tensor(candidate: Candidate) -> bool:
    """True for what has no program for lists of tensors."""
    return candidate.variant in (ALTERNATING, RELAY) or candidate.variant.endswith((NARROW, PUSH))


def _no_alternation(call: Call) -> str:
    # An uneven all_gather might send it all from one rank.
    most = call.nbytes // call.world_size if call.kind is Kind.ALL_GATHER and call.even else call.nbytes
    if most > SLOT_BYTES:
        return f"copies what a rank sends into a slot of {SLOT_BYTES >> 20} MiB"
    # Other programs need this copy as well for outputs in ordinary memory, and for an all_to_all in place.
    copies_anyway = not call.symmetric or (call.kind is Kind.ALL_TO_ALL and call.in_place)
    if call.beside == COMPUTE and not copies_anyway:
        return "begins with a copy inside the rank, which may wait for what runs beside it"
    return ""


def check_beside(function: str, beside: str) -> None:
    """Refuse an unknown hint.

    Raises:
        ValueError: with the allowed ones.
    """
    if beside not in BESIDE:
        raise ValueError(f"{function}: beside (value={beside!r}, allowed={', '.join(BESIDE)})")


@functools.cache
def _by_name(kind: Kind) -> dict[str, Candidate]:
    alternating = () if kind in REDUCING else (ALTERNATING,)
    found = {DMA: (*variants(kind), *alternating), SM: SM_VARIANTS.get(kind, ())}
    axes = [
        Candidate(implementation, variant, launch, signals)
        for implementation in IMPLEMENTATIONS
        for variant in found[implementation]
        for launch, signals in itertools.product(
            LAUNCHES if implementation == DMA else LAUNCHES[:1], SIGNALS if implementation == DMA else SIGNALS[:1]
        )
    ]
    return {candidate.name: candidate for candidate in axes}
