"""The protocol by which ranks learn which addresses come again, and then copy from them without staging.

A call from which the ranks learn is *tracked*. It runs as any other, by way of staging. Beside it each rank posts where
its tensors lie (``report``), on a board that all ranks read when they come by (``board``). In a window of tracked calls
that is in step, all ranks go by the same posts of long ago. So all know alike what was offered, what all have mapped,
and what comes next (``knowledge``). Where that is known, calls go *ahead*: each rank reads its peers' inputs where
these are expected, and what it has read counts once their owner has confirmed the place
(``program/builders/confirmed``). A host that is much earlier or later than its peers finds windows that are not in
step: calls are staged there, on all ranks.

A rank whose input lies elsewhere than its peers expect *misses*: it waits, on the host, for what they post of this
call, and writes to the outputs that they offer in it. A rank whose output is new to its peers misses, too. No host
waits otherwise. Memory that was freed goes back to its owner at once (``mappings``).

docs/internals/reach.md says why this is safe; tests/common/learn_model.py visits all interleavings.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from sidelane.choice import Candidate, Choice
from sidelane.choice.candidate import DMA
from sidelane.collectives.call_cache import AnyRequest, CallEntry, Hit, Key, PreparedCall
from sidelane.collectives.calls import Calls
from sidelane.collectives.learning.board import MOST_REMEMBERED, WINDOW, LearningBoard, frontier, window_of
from sidelane.collectives.learning.knowledge import (
    Inputs,
    Knowledge,
    Names,
    Source,
    Sources,
    TrackedSignature,
    outputs_of,
    source_buffer,
)
from sidelane.collectives.learning.mappings import Mappings
from sidelane.collectives.learning.report import Reporter, Round, read_post, read_round
from sidelane.collectives.list_calls import ListRequest
from sidelane.collectives.offers import BUFFERS
from sidelane.collectives.pieces import NO_PIECES, pieces_of
from sidelane.collectives.plan import AnyAgreement
from sidelane.collectives.prepare import Preparer
from sidelane.collectives.reach_rules import why_not_learnt
from sidelane.collectives.repeat import Repeats, TrackedRepeat
from sidelane.config import NOTHING
from sidelane.errors import MismatchError, PeerError, UnavailableError
from sidelane.memory.ordinary import OrdinaryMemory
from sidelane.memory.posts import DIGEST
from sidelane.native import Effect, Note
from sidelane.program.batch import Batch, parts_of
from sidelane.program.builders.confirmed import CONFIRMED, NOBODY, confirmed
from sidelane.program.collective import Buffer, Collective
from sidelane.program.ir import Program
from sidelane.program.verify import verify

READ_EVERY = 4
"""Tracked calls, in the first of which posts are read, and rank 0 judges."""

KEPT = 512
"""Tracked calls remembered until the ranks go by them."""

MOST_SIGNATURES = 1024
"""Signatures that are known at a time. At one more the older half is forgotten, in the same call on all ranks."""

MOST_TURNS = 4
"""Calls of a period with the same tensors here that compiled code remembers, which has few places for them."""

WENT_AHEAD = "peers' inputs are read where they come again, so that no host waits for another one"
MISSED = "this rank's tensors are not where its peers expect them, so that it waits for what they say"


class Learning:
    """The protocol in one lane.

    Args:
        limit_bytes: most bytes of this rank's memory that peers may have mapped.
        is_pooled: tells of a tensor if it lies in a pool, which is no ordinary memory.

    Attributes:
        repeats: makes tracked calls again in compiled code; None as long as there is none.
        is_quiet: this rank has nothing to say in its next tracked call but where its tensors lie.
    """

    def __init__(
        self,
        calls: Calls,
        preparer: Preparer,
        board: LearningBoard,
        memory: OrdinaryMemory,
        limit_bytes: int,
        is_pooled: Callable[[torch.Tensor], bool],
    ) -> None:
        self._calls, self._preparer, self._board, self._memory = calls, preparer, board, memory
        self._rank, self._control = board.rank, calls.control
        self.repeats: Repeats | None = None
        ended = functools.partial(calls.control.ended, board.rank)
        self._mappings = Mappings(memory, board, limit_bytes, ended, _weakly(self._find_last_ahead))
        self._knowledge = Knowledge(board.rank, self._mappings)
        self._reporter = Reporter(board.rank, memory, self._mappings, is_pooled)
        self._round = functools.lru_cache(MOST_REMEMBERED)(read_round)  # most posts are the same as before
        self._programs = AheadPrograms(calls, preparer)
        self._signatures: dict[str, TrackedSignature | None] = {}
        self._begun: list[TrackedSignature | None] = [None] * KEPT  # by number, modulo that
        self._queue: collections.deque[tuple[int, Round]] = collections.deque(maxlen=KEPT)
        self._read, self._known_to = 0, 0
        self._is_begun = False  # a tracked call by compiled code, which is still to be made
        self._last_ahead, self._era = 0, object()  # another era whenever memory of peers is unmapped
        self.is_quiet = True

    def tracks(self, text: str, agreement: Callable[[], AnyAgreement]) -> bool:
        """Tell if the ranks learn from calls of a signature; finds that out in its first call, on all ranks."""
        if text not in self._signatures:
            with self._calls.making_ready():
                self._note(agreement(), text)
        return self._signatures[text] is not None

    def attend(
        self,
        text: str,
        call: int,
        entry: CallEntry,
        asked: Callable[[], AnyRequest],
        tensors: Sequence[torch.Tensor | None],
        is_async: bool,
    ) -> PreparedCall | None:
        """Post a tracked call, before it is started; what it runs as if it goes ahead, None if it is staged.

        ``text`` is its signature, ``call`` its number, ``entry`` all that is known of it on the same tensors.

        Raises:
            PeerError, PeerTimeoutError, MismatchError: this rank has missed, and its peers do not make the call.
        """
        signature, board = self._signatures[text], self._board
        assert signature is not None
        report = self._reporter.report(signature, entry, asked, tensors, is_async)
        if not self._is_begun:  # by compiled code, for a call that is to do something else now
            self._begin(signature, report.post, call)
        assert self._begun[board.number % KEPT] is signature, "a call that has begun is made"
        self._is_begun, period = False, signature.now
        if not isinstance(period, tuple):
            return None
        self._last_ahead = call  # before it is looked up where peers' memory is mapped: see _find_last_ahead
        sources = period[signature.turn]
        signature.turn = (signature.turn + 1) % len(period)
        if not self._hits_with(self._rank, sources, report.inputs, report.outputs):
            return self._make(signature, entry.key, asked(), sources, *self._hear(signature, call, sources))
        hit, era = entry.hit, self._era
        if hit is None or hit.sources is not sources or hit.era is not era:
            prepared = self._make(signature, entry.key, asked(), sources, NOBODY, {})
            hit = entry.hit = Hit(sources, prepared, set(), era)
        return hit.prepared

    def again(self, text: str, entry: CallEntry, prepared: PreparedCall) -> TrackedRepeat | None:
        """Describe a tracked call that has just been made to compiled code, if that may make it again."""
        signature, report = self._signatures.get(text), entry.report
        if signature is None or report is None or report.is_async or not self.is_quiet or signature.now is False:
            return None
        guards = (self, "is_quiet", True), (signature, "now", signature.now)
        turn, hit = None, entry.hit
        notes: list[Note] = [(Effect.SET, self, "_is_begun", False)]
        if isinstance(signature.now, tuple):
            number = (signature.turn - 1) % len(signature.now)
            if hit is None or hit.prepared is not prepared or hit.sources is not signature.now[number]:
                return None  # it has missed
            if number not in hit.turns and len(hit.turns) >= MOST_TURNS:
                return None
            hit.turns.add(number)
            turn = signature, "turn", number, signature.turn
            notes.append((Effect.SET_NUMBER, self, "_last_ahead", None))
        standing = self._memory.standing(report.allocations)
        if standing is None:
            return None

        def holds() -> bool:
            kept = self._preparer.cache.get(entry.key)
            return kept is entry and entry.hit is hit and hit is not None and hit.era is self._era

        tracked = guards, self._begin_again, signature, report.post, turn is not None, standing
        return TrackedRepeat(tracked, turn, tuple(notes), holds)

    def why(self, tensor: torch.Tensor) -> str | None:
        """Say why peers cannot map a tensor; None if they can, as far as this rank knows."""
        found = self._memory.allocation_of(tensor)
        return found if isinstance(found, str) else self._knowledge.refused.get((self._rank, found.name))

    def close(self) -> None:
        """Let go of all that is kept. Nothing may be under way."""
        self._mappings.close()
        self._signatures.clear()

    def _find_last_ahead(self) -> int:
        """In the thread of mappings, once memory was freed: void what is known of calls, and return the last one that
        went ahead, or is about to.

        A call notes its number before it looks where memory is mapped. Compiled code notes it afterwards, with the lock
        held in which it makes the call.
        """
        self._era = object()  # what is made ready at the same time holds no longer than that
        if self.repeats is None:
            return self._last_ahead
        self.repeats.forget()
        with self.repeats.submitting:
            return self._last_ahead

    def _begin_again(self, signature: TrackedSignature, post: bytes) -> None:
        """Begin a tracked call for compiled code, which says the same of it as before."""
        try:
            self._begin(signature, post, 0)
            # If there is no use in it since just now, its call is made, but untracked, so that nobody asks for it.
            self._is_begun = signature.now is not False
        except BaseException:
            with self._calls.making_ready():
                raise

    def _begin(self, signature: TrackedSignature, post: bytes, call: int) -> None:
        """Begin a tracked call; one of number 0 is the next one of the lane."""
        board = self._board
        if board.number % READ_EVERY == 0:
            self._catch_up()
        board.post(post)
        number = board.number
        self._begun[number % KEPT] = signature
        if number % WINDOW == 1:
            self._enter(window_of(number), call or self._control.begun(self._rank) + 1)
        if number % READ_EVERY == 1:
            if self._rank == 0:
                board.judge(number)
            self.is_quiet = not self._reporter.has_news

    def _note(self, agreement: AnyAgreement, text: str) -> None:
        """Find out if the ranks learn from calls of a signature. Collective."""
        made = None
        if not why_not_learnt(agreement, self._preparer.copies_mapped):
            collective = agreement.collective
            parts = tuple(part for part, _ in parts_of(collective))
            senders, alone = tuple(map(_senders, parts)), agreement.beside == NOTHING
            digest = text.rpartition("#")[2].partition(":")[0]
            found = TrackedSignature(text, collective, parts, digest, senders, alone)
            with contextlib.suppress(UnavailableError):  # on all ranks alike
                self._programs.make_room(found)
                made = found
        self._signatures[text] = made
        if len(self._signatures) > MOST_SIGNATURES:
            self._forget_older_half()

    def _forget_older_half(self) -> None:
        """Forget signatures; their next calls are noted as new ones, on all ranks alike."""
        for text in list(itertools.islice(self._signatures, MOST_SIGNATURES // 2)):
            signature = self._signatures.pop(text)
            if signature is not None:
                signature.now = False  # its calls that have begun are made, and teach nothing
        if self.repeats is not None:  # compiled code does not ask if a call is tracked
            self.repeats.forget()

    # --- what all ranks know alike ------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Read what all have posted, as far as it is there."""
        while self._read < self._board.number and (payloads := self._board.posts(self._read + 1)) is not None:
            self._read += 1
            self._queue.append((self._read, self._round(payloads)))
        self._board.has_read(self._read)

    def _enter(self, window: int, call: int) -> None:
        """Find out if a window is in step, and what its calls do then. Waits for rank 0 if that is about to say it,
        which waits for nobody.
        """
        found = self._board.verdict(window)
        if found is None:
            self._wait(call, lambda: [0] if self._board.verdict(window) is None else [])
            found = self._board.verdict(window)
        if found:
            self._go_by(window)
        begun: collections.Counter[TrackedSignature | None] | None = None
        for signature in filter(None, self._signatures.values()):
            finder = signature.finder
            if not found or not finder.is_known(self._knowledge.usable):
                signature.now = None
            elif signature.now is not finder.period:  # else it goes on: turns are counted with each call
                if begun is None:
                    numbers = range(self._known_to + 1, self._board.number)
                    begun = collections.Counter(self._begun[number % KEPT] for number in numbers)
                signature.now = finder.period
                signature.turn = (finder.next + begun[signature]) % len(finder.period)

    def _go_by(self, window: int) -> None:
        """Know what all have posted up to the window's frontier, and map what is new."""
        last = frontier(window)
        first = last - KEPT // 2  # what was before is the same as nothing: others may have forgotten it
        if self._known_to < first:
            for signature in filter(None, self._signatures.values()):
                signature.finder.forget()
        while self._queue and self._queue[0][0] <= last:
            number, heard = self._queue.popleft()
            if number > max(first, self._known_to):
                self._settle(window, self._begun[number % KEPT], heard)
                if number == last and heard.posts and not any(each.pending for each in heard.posts):
                    self._knowledge.note_mapped(window_of(last))
        self._known_to = last

    def _settle(self, window: int, signature: TrackedSignature | None, heard: Round) -> None:
        """Take one tracked call."""
        if not heard.posts:
            if signature is not None:
                signature.finder.forget()
            return
        knowledge = self._knowledge
        if heard.known_at != knowledge.drops:
            freed = knowledge.hear(window, heard.posts)
            if freed:
                self._drop(freed)
            self._reporter.heard(heard.posts[self._rank])
            if signature is not None:
                heard.sources = signature.sources(heard.posts)
                if heard.is_plain:  # the next time there is nothing to know but that it has come again
                    heard.known_at = knowledge.drops
        if signature is None:
            return
        signature.finder.settle(heard.sources, heard.names, may_wait=heard.may_wait)
        if signature.finder.given_up and signature.now is not False:
            self._signatures[signature.text] = None  # from the window on that has just begun, on all ranks
            signature.now = False

    def _drop(self, freed: Names) -> None:
        self._era = object()
        if self.repeats is not None:
            self.repeats.forget()
        for signature in filter(None, self._signatures.values()):
            signature.finder.drop(freed)

    # --- calls that go ahead ------------------------------------------------------------------------------------------

    def _hear(
        self, signature: TrackedSignature, call: int, sources: Sources
    ) -> tuple[frozenset[int], dict[int, list[int]]]:
        """Wait for all posts; the ranks that miss, and where the outputs of the others lie."""
        number = self._board.number
        self._wait(call, lambda: self._board.absent(number))
        payloads = self._board.posts(number)
        assert payloads, "in a window in step all ranks post"
        posts = list(map(read_post, payloads))
        for rank, each in enumerate(posts):
            if each.call != signature.call:
                here = DIGEST.sub("", signature.text)
                text = f"call {call}: ranks made different calls: here {here}; rank {rank}: another"
                self._calls.fail(PeerError(text, (rank,)))
                raise MismatchError(text)
        targets: dict[int, list[int]] = {}
        for rank, each in enumerate(posts):
            if self._hits_with(rank, sources, signature.inputs(each.places, rank), outputs_of(each.places)):
                addresses = [self._address(rank, row[Buffer.OUTPUT]) for row in each.places]
                assert None not in addresses, "no output is freed before its call has ended"
                targets[rank] = [address for address in addresses if address is not None]
        return frozenset(range(len(posts))).difference(targets), targets

    def _hits_with(self, rank: int, sources: Sources, inputs: Inputs, outputs: Sequence[str] | None) -> bool:
        """Tell if a rank's inputs lie where they are expected, and all ranks have mapped its outputs."""
        return inputs == sources[rank] and self._knowledge.reaches(rank, outputs)

    def _make(
        self,
        signature: TrackedSignature,
        key: Key,
        request: AnyRequest,
        sources: Sources,
        missing: frozenset[int],
        targets: dict[int, list[int]],
    ) -> PreparedCall:
        requests = request.parts if isinstance(request, ListRequest) else (request,)
        rows: list[dict[tuple[int, str], int]] = []
        freed: set[int] = set()  # ranks whose inputs lay in memory that they have freed
        for number, (part, asked) in enumerate(zip(signature.parts, requests, strict=True)):
            found: dict[tuple[int, str], int] = {}
            found.update({(rank, Buffer.OUTPUT): places[number] for rank, places in targets.items()})
            for rank, inputs in enumerate(sources):
                if inputs[number] is None or rank == self._rank:
                    continue
                address = self._address(rank, inputs[number])
                if address is None:
                    freed.add(rank)
                else:
                    found[rank, source_buffer(part)] = address
            found.update({(self._rank, name): asked.region(name).address for name in BUFFERS})
            rows.append(found)
        assert not missing or freed <= missing, "an input lies in no memory that its owner has freed"
        return self._programs.prepare(key, signature, rows, missing or frozenset(freed), self._rank in missing)

    def _address(self, rank: int, place: Source | str) -> int | None:
        """Return where this rank reaches what another one has said, 0 without bytes; None if that was freed."""
        if not isinstance(place, tuple):
            return 0
        start = self._mappings.start((rank, place[0]))
        return None if start is None else start + place[1]

    def _wait(self, call: int, missing: Callable[[], Sequence[int]]) -> None:
        """Wait until ``missing`` names no rank any more."""
        began, timeout_s = time.monotonic(), self._calls.config.timeout_s
        with self._calls.failing_for_good():
            while ranks := missing():
                self._control.check(call)
                self._control.check_same(call)
                self._control.wait_on(call, "offers", ranks, began, timeout_s)


class AheadPrograms:
    """The programs of calls that go ahead in one lane, made ready to run."""

    def __init__(self, calls: Calls, preparer: Preparer) -> None:
        self._calls, self._preparer = calls, preparer
        self._programs: dict[Hashable, Program] = {}

    def make_room(self, signature: TrackedSignature) -> None:
        """Have the staging of such calls. Collective where there is less. Raises UnavailableError, on all ranks."""
        with self._calls.making_ready():
            self._preparer.make_room(self._program(signature, NOBODY, NOBODY))

    def prepare(
        self,
        key: Key,
        signature: TrackedSignature,
        addresses: Sequence[Mapping[tuple[int, str], int]],
        missing: frozenset[int] = NOBODY,
        misses: bool = False,
    ) -> PreparedCall:
        """Make a call ready.

        Args:
            key: of what is asked, with the identities of the tensors.
            signature: of the call.
            addresses: of tensors, by rank and buffer, of each part.
            missing: ranks that miss, as far as is known; see ``confirmed``.
            misses: this rank does. Else nothing is read of the ranks that do.
        """
        full = (key, CONFIRMED, missing, misses, tuple(tuple(each.items()) for each in addresses))
        prepared = self._preparer.cache.prepared(full)
        if prepared is None:
            with self._calls.making_ready():
                program = self._program(signature, missing, NOBODY if misses else missing)
                collective, buffers, pieces = signature.collective, addresses[0], NO_PIECES
                if isinstance(collective, Batch):
                    buffers, pieces = {}, pieces_of(collective, addresses)
                prepared = self._preparer.bind(
                    program, buffers, signature.text, choice_of(misses=misses), full, pieces=pieces
                )
        return prepared

    def _program(self, signature: TrackedSignature, missing: frozenset[int], unread: frozenset[int]) -> Program:
        key, collective = (signature.collective, missing, unread), signature.collective
        found = self._programs.get((*key, signature.alone))
        if found is None:
            proved = (*key, not signature.alone) in self._programs  # which does the same
            if self._calls.config.verify and not proved:
                verify(confirmed(collective, missing, elsewhere=True, unread=unread))
            found = dataclasses.replace(confirmed(collective, missing, unread=unread), alone=signature.alone)
            if len(self._programs) >= MOST_SIGNATURES:
                del self._programs[next(iter(self._programs))]
            self._programs[(*key, signature.alone)] = found
        return found


def choice_of(*, misses: bool) -> Choice:
    """Say what a rank runs a call as that goes ahead, in which it misses or not."""
    return Choice(Candidate(DMA, "b2b"), MISSED if misses else WENT_AHEAD, ())


def _senders(collective: Collective) -> frozenset[int]:
    """Return the ranks whose inputs others read."""
    return frozenset(chunk.src_rank for chunk in collective.chunks() if chunk.src_rank != chunk.dst_rank)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does not keep its object, and does nothing once that has gone: threads and compiled code
    keep it.
    """
    found = weakref.WeakMethod(method)

    def ask(*args: object) -> Any:
        live = found()
        return None if live is None else live(*args)

    return ask
