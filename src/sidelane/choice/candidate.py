"""Candidates: every way in which a call could run.

Algorithms for copy engines declare for which calls they are legal (``program.builders``). A kernel is added to
``SM_VARIANTS`` and, if it is not legal for every call, as a line to :func:`illegal_reason`. Backends declare which of
them their machine has (``Abilities``).
"""

from __future__ import annotations

import dataclasses
import functools

from sidelane.config import COMPUTE
from sidelane.program.builders import Algorithm, algorithms, find_algorithm
from sidelane.program.builders.registry import for_every_kind, merges
from sidelane.program.collective import Kind
from sidelane.program.kernel import MOST_LISTED, MOST_RANKS, is_two_shot
from sidelane.program.shape import CallShape, Variant

DMA, SM = "dma", "sm"
IMPLEMENTATIONS = (DMA, SM)
"""Names of implementations: copy engines, and kernels that move the bytes. In order of preference between equals."""

SM_VARIANTS: dict[Kind, tuple[str, ...]] = {
    Kind.ALL_GATHER: ("one_shot",),
    Kind.ALL_TO_ALL: ("one_shot",),
    Kind.BROADCAST: ("one_shot",),
    Kind.REDUCE_SCATTER: ("one_shot", "one_shot_narrow"),
    Kind.ALL_REDUCE: ("one_shot", "two_shot", "two_shot_push", "one_shot_narrow", "two_shot_narrow"),
}

FIRST = "b2b"
"""Variant to try first: one engine a rank, since peers share a copy engine on the machines measured so far."""


BESIDE_KERNEL_KINDS, BESIDE_KERNEL_BYTES = (Kind.ALL_GATHER, Kind.ALL_TO_ALL), 4 << 20
"""Collectives, and bytes of their largest call of one tensor, that a kernel moves beside a computation. It takes
compute units, but for so short a time that the pair ends earlier than with copy engines: 1.19 (4 MiB) to 1.4 times
(1 KiB) as fast beside GEMMs, at any priority of its stream (results/h200x2/narrow-gather.txt)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of a machine; the same on every rank of a group. The default is what every machine has.

    Attributes:
        implementations: implementations that it has, of ``IMPLEMENTATIONS``.
        captures: callers can capture calls into graphs.
        kernels_have_run: kernels that move bytes have run on a machine of this kind. Elsewhere ``auto`` of a fused
            operator takes a kernel only if it was measured on this machine.
        through_host: host memory is between the GPUs, and no tensor of a caller is symmetric.
    """

    implementations: tuple[str, ...] = (DMA,)
    captures: bool = False
    kernels_have_run: bool = True
    through_host: bool = False

    def include(self, candidate: Candidate) -> bool:
        """Return True if the candidate exists on the machine."""
        if candidate.implementation not in self.implementations:
            return False
        return not (self.through_host and candidate.launches_kernels and is_two_shot(candidate.variant))


EVERYTHING = Abilities(IMPLEMENTATIONS, captures=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a collective.

    Attributes:
        implementation: ``dma`` or ``sm``.
        variant: algorithm within it, unique among all of a collective; ``variant=`` of a call selects it.
    """

    implementation: str
    variant: str

    @property
    def launches_kernels(self) -> bool:
        """True if it takes compute units to move the bytes (not counting those for the sum of a reduction)."""
        return self.implementation == SM

    def algorithm(self, kind: Kind) -> Algorithm | None:
        """Return the builder of its programs; None for kernels."""
        return find_algorithm(kind, self.variant) if self.implementation == DMA else None

    def __str__(self) -> str:
        return f"{self.implementation} {self.variant}"

    @property
    def mover(self) -> str:
        """Name of what moves the bytes, with the variant, in words."""
        return f"{'a kernel' if self.launches_kernels else 'copy engines'} ({self.variant})"


def find(kind: Kind, name: str) -> Candidate | None:
    """Return the candidate of ``kind`` with that variant; None if there is none."""
    return _by_name(kind).get(name)


def everything(kind: Kind, abilities: Abilities = EVERYTHING) -> tuple[Candidate, ...]:
    """Return every candidate that a machine has for a collective, legal or not, the preferred ones first."""
    return tuple(filter(abilities.include, _by_name(kind).values()))


def candidates(call: CallShape, abilities: Abilities = EVERYTHING) -> tuple[Candidate, ...]:
    """Return the legal ways to run a call, in order of preference between equals.

    Args:
        call: shape of the call.
        abilities: abilities of this machine.
    """
    return tuple(found for found in everything(call.kind, abilities) if not illegal_reason(call, found, abilities))


def illegal_reason(call: CallShape, candidate: Candidate, abilities: Abilities = EVERYTHING) -> str:
    """Return the reason why a candidate is not legal for a call; empty if it is."""
    if not abilities.include(candidate):
        return "not available on this machine"
    narrow = Variant.of(candidate.variant).narrow
    small = call.kind in BESIDE_KERNEL_KINDS and not call.listed and call.nbytes <= BESIDE_KERNEL_BYTES
    if call.beside == COMPUTE and call.computation is None and candidate.launches_kernels and not (narrow or small):
        return "takes compute units from what runs beside it"
    if call.beside != COMPUTE and narrow:
        return "leaves compute units to nobody: nothing runs beside it"
    if call.listed and takes_one_tensor(candidate):
        return "takes one tensor a call"
    if call.resharded and not reshards(candidate):
        return "takes contiguous parts only"
    algorithm = candidate.algorithm(call.kind)
    if algorithm is not None and algorithm.through_host and not abilities.through_host:
        return "is for host memory between GPUs"
    return _of_kernel(call, candidate) if algorithm is None else _of_algorithm(call, algorithm)


def _of_algorithm(call: CallShape, algorithm: Algorithm) -> str:
    if algorithm.into_outputs and not call.symmetric and call.world_size > 1:
        return "writes into the peers' outputs, which are in ordinary memory"
    if call.mixed and not for_every_kind(algorithm.name):
        return "is not for every kind of collective in the batch"
    return algorithm.objection(call)


def _of_kernel(call: CallShape, candidate: Candidate) -> str:
    if Variant.of(candidate.variant).pushes and not call.symmetric and call.world_size > 1:
        return "needs input and output in symmetric memory: in ordinary memory it is two_shot"
    if not call.even:
        return "needs equal counts between all ranks"
    if not call.copies_own:
        return "copies a rank's own part, too"
    if call.mixed:
        return "is not for every kind of collective in the batch"
    if call.tensors > MOST_LISTED:
        return f"takes {MOST_LISTED} tensors at most"
    if not call.uniform:
        return "runs one reduction of one dtype, or one root"
    if call.world_size > MOST_RANKS:
        return f"kernels address {MOST_RANKS} ranks at most"
    return ""


def takes_one_tensor(candidate: Candidate) -> bool:
    """Return True for a candidate without programs for lists of tensors."""
    if candidate.implementation == DMA:
        return not merges(candidate.variant)
    variant = Variant.of(candidate.variant)
    return variant.narrow or variant.pushes


def reshards(candidate: Candidate) -> bool:
    """Return True for a candidate whose programs copy, and do nothing else with bytes: parts may lie in rows."""
    return candidate.implementation == DMA and not takes_one_tensor(candidate) and candidate.variant != "swap"


def _by_name(kind: Kind) -> dict[str, Candidate]:
    return _by_name_of(kind, algorithms(kind))  # one more may have been registered


@functools.cache
def _by_name_of(kind: Kind, registered: tuple[Algorithm, ...]) -> dict[str, Candidate]:
    found = [Candidate(DMA, algorithm.name) for algorithm in registered]
    found += [Candidate(SM, variant) for variant in SM_VARIANTS.get(kind, ())]
    return {candidate.variant: candidate for candidate in found}
