"""Rules that decide, from the arguments of a call, whether ranks learn from it where its ordinary tensors lie.

Two more conditions are known at run time only: whether peers can map the memory of each rank (``Communicator.reach``
tells it for a tensor), and whether addresses come again (``Communicator.last_choice`` tells it for a call).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from sidelane.choice import Candidate, Choice
from sidelane.choice.candidate import DMA
from sidelane.choice.choose import STAGING_BYTES_PER_US
from sidelane.collectives.heap import MAPPED
from sidelane.collectives.list_calls import ListAgreement
from sidelane.collectives.plan import AUTO, Agreement, AnyAgreement
from sidelane.program.batch import parts_of
from sidelane.program.builders.confirmed import can_be_confirmed
from sidelane.program.collective import REDUCING, Chunk, Kind
from sidelane.sizes import format_bytes

A = TypeVar("A", Agreement, ListAgreement, AnyAgreement)

NOTHING_TRAVELS = "nothing goes from one rank to another"
"""Reason for a call in which each rank keeps its bytes."""

VARIANTS = (AUTO, "b2b")
"""Variants of calls that can go ahead: all copies of a rank are on one engine."""

READING_TAKES, CONFIRMING_US = 1.05, 4.0
"""Factor on the expected time of pushes into symmetric memory, and microseconds to add for any size, that give the time
of copy engines that read mapped tensors. On two H200s (``results/h200x2/ordinary.json``) all-gathers of 16 MB took
44 us where 40 are expected, of 64 MB 110 (106), all-to-alls 45 (39) and 113 (106)."""

LEAST_BYTES = 1 << 20
"""Fewest bytes from rank to rank of calls from which ranks learn. Kernels move less as fast, from ordinary tensors."""


def why_not_learnt(agreement: AnyAgreement, copies: Callable[[AnyAgreement], bool]) -> str:
    """Return the reason why ranks do not learn from a call, so that it is staged; empty if they do learn from it.

    Args:
        agreement: the call.
        copies: returns True if copy engines that read mapped tensors are faster for it: see :func:`copies_suit`.
    """
    why = _why_never(agreement)
    if why:
        return why
    if isinstance(agreement, ListAgreement) and agreement.is_resharded:
        return "parts of its tensors lie in rows"
    parts = agreement.parts if isinstance(agreement, ListAgreement) else (agreement,)
    if any(part.input_place is not None or part.output_place is not None for part in parts):
        return "a tensor of it is symmetric"
    most = _most_bytes(agreement)
    if most < LEAST_BYTES:
        return (
            f"{format_bytes(most)} from rank to rank, less than {format_bytes(LEAST_BYTES)}: kernels move so little as "
            f"fast from ordinary tensors"
        )
    if not copies(agreement):
        return "a kernel takes ordinary tensors, staging included, as fast as copy engines read mapped ones"
    return ""


def copies_suit(agreement: AnyAgreement, chooses: Callable[[AnyAgreement], Choice]) -> bool:
    """Return True if copy engines that read mapped tensors are expected to take less time than the staged call.

    Args:
        agreement: the call on ordinary tensors.
        chooses: returns the choice for a call, with expected times.
    """
    staged, mapped = chooses(agreement), chooses(as_mapped(agreement))
    if DMA in (staged.candidate.implementation, mapped.candidate.implementation):
        return True
    copies_us, kernel_us = dict(mapped.table).get(Candidate(DMA, "b2b")), staged.table[0][1]
    if isinstance(agreement, ListAgreement) or copies_us is None or kernel_us is None:
        return False  # there are no measured times, as for lists
    collective = agreement.collective
    staged_bytes = max(collective.input_bytes(rank) for rank in range(collective.world_size))
    return READING_TAKES * copies_us + CONFIRMING_US < kernel_us + staged_bytes / STAGING_BYTES_PER_US


def as_mapped(agreement: A) -> A:
    """Return the same call on tensors that peers have mapped."""
    there: dict[str, Any] = {"input_place": (MAPPED, 0), "output_place": (MAPPED, 0)}
    if isinstance(agreement, ListAgreement):
        return dataclasses.replace(
            agreement, parts=tuple(dataclasses.replace(part, **there) for part in agreement.parts)
        )
    return dataclasses.replace(agreement, **there)


def _why_never(agreement: AnyAgreement) -> str:
    """Return the reason why a call can never go ahead; empty if it can, once its addresses are known."""
    if agreement.frozen:
        return "what is captured does not go ahead"
    if agreement.variant not in VARIANTS:
        return f"variant {agreement.variant} does not go ahead, {' and '.join(VARIANTS)} do"
    parts = [part for part, _ in parts_of(agreement.collective)]
    if any(part.kind in REDUCING for part in parts):
        return "reductions do not go ahead: what was added to a result cannot be taken back"
    if not any(chunk.src_rank != chunk.dst_rank for chunk in chunks_of(agreement)):
        return NOTHING_TRAVELS
    if not can_be_confirmed(agreement.collective):
        return f"{Kind.ALL_TO_ALL} in place overwrites what peers still read, and does not go ahead"
    return ""


def _most_bytes(agreement: AnyAgreement) -> int:
    """Return the largest number of bytes that one rank sends to another."""
    nbytes: collections.Counter[tuple[int, int]] = collections.Counter()
    for chunk in chunks_of(agreement):
        if chunk.src_rank != chunk.dst_rank:
            nbytes[chunk.src_rank, chunk.dst_rank] += chunk.nbytes
    return max(nbytes.values())


def chunks_of(agreement: AnyAgreement) -> Iterator[Chunk]:
    """Return the bytes that each rank sends to another one, or to itself."""
    parts = agreement.parts if isinstance(agreement, ListAgreement) else (agreement,)
    return (chunk for part in parts for chunk in part.collective.chunks())
