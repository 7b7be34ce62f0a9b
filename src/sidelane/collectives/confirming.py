"""Calls that read where their peers' inputs are expected (``program/builders/confirmed``), made ready to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

from sidelane.choice import Candidate, Choice
from sidelane.choice.candidate import DMA
from sidelane.collectives.calls import Calls
from sidelane.collectives.pieces import pieces_of
from sidelane.collectives.prepare import PreparedCall, Preparer
from sidelane.program.batch import Batch
from sidelane.program.builders.confirmed import CONFIRMED, NOBODY, confirmed
from sidelane.program.collective import Buffer, Collective
from sidelane.program.ir import Program
from sidelane.program.verify import verify

WENT_AHEAD = "peers' inputs are read where they come again, so that no host waits for another one"
ELSEWHERE = "this rank's input is not where its peers read it, so that it writes to their outputs"
NEW_OUTPUT = "this rank's output is new to its peers, so that it waits for what they say"


class Confirming:
    """Of one lane.

    Args:
        calls: of the lane.
        preparer: likewise.
    """

    def __init__(self, calls: Calls, preparer: Preparer) -> None:
        self._calls, self._preparer = calls, preparer
        self._rank = calls.control.rank
        self._programs: dict[Hashable, Program] = {}

    def forgets(self, forget: Callable[[], object]) -> None:
        """Call something when what was prepared is void."""
        self._preparer.keepers.append(forget)

    def make_room(self, collective: Collective | Batch) -> None:
        """Have the staging of such calls. Collective where there is less. Raises UnavailableError, on all ranks."""
        with self._calls.making_ready():
            self._preparer.make_room(self._program(collective, NOBODY, NOBODY, alone=True))

    def prepare(
        self,
        key: Hashable,
        text: str,
        collective: Collective | Batch,
        addresses: Sequence[Mapping[tuple[int, str], int]],
        changed: frozenset[int],
        waiting: frozenset[int],
        *,
        alone: bool,
    ) -> PreparedCall:
        """A call at addresses; see ``confirmed`` for who has changed and who waits.

        Args:
            key: of what is asked, with the identities of the tensors.
            text: its signature.
            collective: what it does.
            addresses: of tensors, by rank and buffer; of each part of a batch.
            changed: ranks whose inputs lie elsewhere.
            waiting: these, and other ranks that know of it.
            alone: nothing is said to compute next to it.
        """
        full = (key, CONFIRMED, changed, waiting, tuple(tuple(each.items()) for each in addresses))
        prepared = self._preparer.recall(full)
        if prepared is None:
            with self._calls.making_ready():
                program = self._program(collective, changed, waiting, alone=alone)
                choice = choice_of(changed, waiting, self._rank)
                if isinstance(collective, Batch):
                    pieces = pieces_of(collective, addresses)
                    prepared = self._preparer.bind(program, {}, text, choice, full, pieces=pieces)
                else:
                    prepared = self._preparer.bind(program, addresses[0], text, choice, full)
        return prepared

    def close(self) -> None:
        """Forget all programs."""
        self._programs.clear()

    def _program(
        self, collective: Collective | Batch, changed: frozenset[int], waiting: frozenset[int], *, alone: bool
    ) -> Program:
        key = collective, changed, waiting
        found = self._programs.get((*key, alone))
        if found is None:
            like = self._programs.get((*key, not alone))  # which does the same: one proof holds for both
            found = dataclasses.replace(like or confirmed(*key), alone=alone)
            self._programs[(*key, alone)] = found
            if like is None and self._calls.config.verify:
                verify(confirmed(*key, elsewhere=True))
        return found


def source_buffer(collective: Collective) -> Buffer:
    """The buffer in which a rank's input lies."""
    return Buffer.OUTPUT if collective.in_place else Buffer.INPUT


def choice_of(changed: frozenset[int], waiting: frozenset[int], rank: int) -> Choice:
    """What a rank runs such a call as; see ``confirmed`` for who has changed and who waits."""
    why = ELSEWHERE if rank in changed else NEW_OUTPUT if rank in waiting else WENT_AHEAD
    return Choice(Candidate(DMA, "b2b"), why, ())
