"""The rules by which peers reach ordinary tensors in a call, as far as what is asked decides it, and in words.

What else decides it is whether peers can map the memory of each rank (``Communicator.reach`` says so of a tensor), and
whether addresses come again (``Communicator.last_choice`` says so of a call).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from sidelane.choice import Candidate, Choice
from sidelane.choice.candidate import DMA
from sidelane.choice.choose import STAGING_BYTES_PER_US
from sidelane.collectives.heap import MAPPED as MAPPED_BLOCK
from sidelane.collectives.listed import ListAgreement
from sidelane.collectives.plan import AUTO, Agreement, AnyAgreement
from sidelane.config import LEARN
from sidelane.memory.posts import MOST_TEXT_BYTES
from sidelane.program.batch import parts_of
from sidelane.program.builders.confirmed import can_be_confirmed
from sidelane.program.collective import REDUCING, Chunk, Kind
from sidelane.sizes import format_bytes

A = TypeVar("A", Agreement, ListAgreement, AnyAgreement)
MapMemory = bool | Literal["learn"]
"""Values of ``Config.map_memory``."""

STAGED, MAPPED = "staged", "mapped"
NOTHING_TRAVELS = "nothing goes from one rank to another"

VARIANTS = (AUTO, "b2b")
"""Of calls that can go ahead: the copies of a rank stand on one engine."""

READING_TAKES, CONFIRMING_US = 1.05, 4.0
"""What copy engines take that read mapped tensors, over the expected time, which is of pushes into symmetric memory;
and what comes to it, whatever the size. On two H200s (``results/h200x2/ordinary.json``) all-gathers of 16 MB took 44 us
where 40 are expected, of 64 MB 110 (106), all-to-alls 45 (39) and 113 (106)."""

LEAST_BYTES = 1 << 20
"""From rank to rank, of calls from which ranks learn. Less goes by kernels, which take ordinary tensors as they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How peers reach the ordinary tensors of a call.

    Attributes:
        setting: value of ``Config.map_memory``.
        how: ``staged``, or ``mapped`` where all ranks have memory that their peers can map.
        goes_ahead: once addresses have come again peers read each other's inputs, and no host waits for another one.
        why: in words.
    """

    setting: MapMemory
    how: str
    goes_ahead: bool
    why: str


def way_of(
    agreement: AnyAgreement, setting: MapMemory, copies: Callable[[AnyAgreement], bool], *, hosts_meet: bool
) -> Way:
    """How peers reach the ordinary tensors of a call that is not asynchronous.

    Args:
        agreement: the call on tensors that peers do not reach.
        setting: value of ``Config.map_memory``.
        copies: see :func:`why_not_learnt`.
        hosts_meet: a call blocks its caller until its peers have come anyway, as between CPU ranks.
    """
    if setting is False:
        return Way(setting, STAGED, False, "the setting lets peers map nothing")
    if not any(chunk.src_rank != chunk.dst_rank for chunk in _chunks(agreement)):
        return Way(setting, STAGED, False, NOTHING_TRAVELS)
    learns = setting == LEARN or not hosts_meet
    if learns and not agreement.frozen:
        why = why_not_learnt(agreement, copies)
        if why:
            return Way(setting, STAGED, False, why)
        why = "once its addresses have come again, staged until then; no host waits while that is found out"
        return Way(setting, MAPPED, True, why + _limit(agreement))
    if agreement.frozen and setting == LEARN:
        return Way(setting, STAGED, False, "the setting maps nothing in captures")
    if agreement.frozen:
        return Way(setting, MAPPED, False, "the ranks agree once, in the capture; replays use the same memory")
    limit = _limit(agreement)
    return Way(setting, MAPPED, False, f"what is offered in each call, for which ranks meet anyway{limit}")


def why_not_learnt(agreement: AnyAgreement, copies: Callable[[AnyAgreement], bool]) -> str:
    """Why ranks do not learn from such calls with ``map_memory="learn"``, so that they are staged; empty if they do.

    Args:
        agreement: the call.
        copies: whether copy engines that read mapped tensors suit it: see :func:`copies_suit`.
    """
    why = _why_never(agreement)
    if why:
        return why
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
    """Whether copy engines that read mapped tensors take less time than a call takes by way of staging.

    Args:
        agreement: the call on ordinary tensors.
        chooses: what would run for a call, with expected times.
    """
    staged, mapped = chooses(agreement), chooses(as_mapped(agreement))
    if DMA in (staged.candidate.implementation, mapped.candidate.implementation):
        return True
    copies_us, kernel_us = dict(mapped.table).get(Candidate(DMA, "b2b")), staged.table[0][1]
    if isinstance(agreement, ListAgreement) or copies_us is None or kernel_us is None:
        return False  # nothing was measured, as of lists
    collective = agreement.collective
    staged_bytes = max(collective.input_bytes(rank) for rank in range(collective.world_size))
    return READING_TAKES * copies_us + CONFIRMING_US < kernel_us + staged_bytes / STAGING_BYTES_PER_US


def as_mapped(agreement: A) -> A:
    """The same call on tensors that peers have mapped."""
    there: dict[str, Any] = {"input_place": (MAPPED_BLOCK, 0), "output_place": (MAPPED_BLOCK, 0)}
    if isinstance(agreement, ListAgreement):
        return dataclasses.replace(
            agreement, parts=tuple(dataclasses.replace(part, **there) for part in agreement.parts)
        )
    return dataclasses.replace(agreement, **there)


def _why_never(agreement: AnyAgreement) -> str:
    """Why a call waits for nobody neither once its addresses are known; empty for one that may go ahead then."""
    if agreement.frozen:
        return "what is captured does not go ahead"
    if agreement.variant not in VARIANTS:
        return f"variant {agreement.variant} does not go ahead, {' and '.join(VARIANTS)} do"
    parts = [part for part, _ in parts_of(agreement.collective)]
    if any(part.kind in REDUCING for part in parts):
        return "reductions do not go ahead: what was added to a result cannot be taken back"
    if not any(chunk.src_rank != chunk.dst_rank for chunk in _chunks(agreement)):
        return NOTHING_TRAVELS
    if not can_be_confirmed(agreement.collective):
        return f"{Kind.ALL_TO_ALL} in place overwrites what peers still read, and does not go ahead"
    return ""


def _limit(agreement: AnyAgreement) -> str:
    if not isinstance(agreement, ListAgreement):
        return ""
    return f"; staged where the list's description takes more than {format_bytes(MOST_TEXT_BYTES)}"


def _most_bytes(agreement: AnyAgreement) -> int:
    """That go from one rank to another."""
    nbytes: collections.Counter[tuple[int, int]] = collections.Counter()
    for chunk in _chunks(agreement):
        if chunk.src_rank != chunk.dst_rank:
            nbytes[chunk.src_rank, chunk.dst_rank] += chunk.nbytes
    return max(nbytes.values())


def _chunks(agreement: AnyAgreement) -> Iterator[Chunk]:
    parts = agreement.parts if isinstance(agreement, ListAgreement) else (agreement,)
    return (chunk for part in parts for chunk in part.collective.chunks())
