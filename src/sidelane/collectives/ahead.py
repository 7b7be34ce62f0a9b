"""Calls on ordinary memory that wait for no peer's host, since addresses come again from call to call.

The ranks that offer memory for each call (``reach``) remember where the inputs of calls that are alike have lain, and
find out after how many calls they lie there again (``pattern``). From then on each rank reads its peers' inputs where
they are expected, at once; its output is its own affair. A rank *hits* where its own input lies where its peers expect
it, and says so on the device, without which no peer ends the call. A rank that does not, *misses*: it waits for the
posts of all ranks, lets its peers read what they must, and writes the right bytes into their outputs, where each has
offered it for this very call (``program/builders/confirmed.py``).

So what is read at an address of an earlier call may be wrong and counts for nothing then; what is written goes where
it was offered for this call. A mapping is closed when this rank's calls that may have read by it have ended.

Whoever has missed, or has freed what peers have mapped, wishes to be heard. ``LAG`` calls later all ranks know of it,
and offer and wait again. docs/internals/reach.md says why this is safe; tests/program/ahead_model.py looks at all
interleavings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from sidelane.collectives.agree import compare
from sidelane.collectives.arguments import Request
from sidelane.collectives.asked import AnyRequest
from sidelane.collectives.calls import Calls
from sidelane.collectives.confirming import Confirming, source_buffer
from sidelane.collectives.offered import Found, Heard
from sidelane.collectives.pattern import Pattern, Source, Sources, State, Turn
from sidelane.collectives.plan import AnyAgreement
from sidelane.collectives.prepare import Prepared
from sidelane.collectives.reach import Reach
from sidelane.collectives.reaching import why_not_ahead
from sidelane.config import NOTHING
from sidelane.errors import PeerError, UnavailableError
from sidelane.memory.ordinary import Allocation, Mapping, Standing
from sidelane.memory.posts import MOST_WISHES, SPLITS, PostedCall
from sidelane.native import Effect, Note
from sidelane.program.builders.confirmed import NOBODY
from sidelane.program.collective import Buffer, Collective

LAG = 32
"""A host is ahead of its peers by no more than so many calls, and hears in each what was wished for so long ago. Half
of what is on record of a rank (``RING_CALLS``)."""

LOOKS = 4
"""A look at whether something was freed, every so many calls; as many at once where compiled code asks, one call in
``LOOK_EVERY`` of ``repeat.py``."""

MOST_TURNS = 4
"""Calls of a period with the same tensors here that compiled code remembers, which has few places for them."""

MOST_HITS = 4096
"""Remembered."""

OUTPUT_UNKNOWN, INPUT_ELSEWHERE = "output", "input"
"""What a rank posts that misses: peers cannot write to its output; or its input is not where it is expected. One that
hits posts where its output lies, as JSON."""


class Known(NamedTuple):
    """Of calls that are alike.

    Attributes:
        pattern: of their inputs.
        collective: what they do.
        alone: nothing is said to compute next to them.
        wish: number by which ranks wish to be heard.
        since: the first call that went ahead since all have last been heard.
    """

    pattern: Pattern
    collective: Collective
    alone: bool
    wish: int
    since: int


class Expected(NamedTuple):
    """A call that goes ahead.

    Attributes:
        text: its signature.
        known: of calls like it.
        sources: where the inputs of all ranks are expected.
    """

    text: str
    known: Known
    sources: Sources


class Hit(NamedTuple):
    """A call that hit, and will again while the same is expected of it and the memory is what it was.

    Attributes:
        sources: see :class:`Expected`.
        allocations: in which the tensors of this rank lie.
        post: what is said of it.
        prepared: what it runs as.
        period: that it was in.
        turns: of that, for which compiled code was told of a call with the same tensors here.
    """

    sources: Sources
    allocations: tuple[Allocation, ...]
    post: str
    prepared: Prepared
    period: tuple[Sources, ...]
    turns: set[int]


class Again(NamedTuple):
    """A hit as compiled code makes it again: see ``native/replay.c``.

    Attributes:
        post: what is said of it.
        standing: its memory has not been freed.
        turn: of the pattern.
        condition: guards of what is expected; asks Python whether it must make the next one; how far behind, in calls,
            peers may be; the first call whose wishes count; where all ranks say what they have begun, and wish for;
            where the post is kept.
        notes: to take.
        holds: whether nothing of it has been forgotten yet.
    """

    post: str
    standing: Standing
    turn: Turn
    condition: tuple[Any, ...]
    notes: tuple[Note, ...]
    holds: Callable[[], bool]


class Ahead:
    """Of one lane.

    Args:
        calls: of the lane.
        confirming: makes them ready.
        reach: what peers have mapped.

    Attributes:
        forget: told when what compiled code makes again may not be made so any more.
    """

    def __init__(self, calls: Calls, confirming: Confirming, reach: Reach) -> None:
        self._calls, self._confirming, self._reach = calls, confirming, reach
        self._control = calls.control
        self._rank = calls.control.rank
        self._known: dict[str, Known] = {}
        self._wishes = itertools.count()
        self._retired: list[tuple[int, Mapping]] = []  # with the last call that may read by it
        self._last = 0
        self._looked = 0  # in which call
        self._sees_gone = False  # what peers have mapped, and nobody has wished for yet
        self.forget: Callable[[], object] = lambda: None
        self._hits: dict[Hashable, Hit] = {}
        confirming.forgets(self._hits.clear)
        reach.dropped = self._drop

    def expects(self, text: str, call: int) -> Expected | None:
        """What is expected of a call with a signature; None if its ranks wait for each other, or stage.

        Every call with the signature, outside of captures, asks once, on all ranks.

        Raises:
            PeerError, PeerTimeoutError: a rank is ``LAG`` calls behind and does not come.
        """
        known = self._known.get(text)
        if known is None or known.pattern.state is not State.AHEAD:
            return None
        long_ago = call - LAG
        if self._control.behind(long_ago):
            with self._calls.failing_for_good():
                self._control.wait_for(long_ago, self._calls.config.timeout_s)
        if any(known.since <= wish <= long_ago for wish in self._control.wishes(known.wish)):
            known.pattern.pause()
            self.forget()
            return None
        return Expected(text, known, known.pattern.expected())

    def gives_up(self, text: str) -> bool:
        """True if nothing came again in calls with a signature for so long that they are staged."""
        known = self._known.get(text)
        return known is not None and known.pattern.state is State.GIVEN_UP

    def settled(self, call: int, text: str, agreement: AnyAgreement, sources: Sources | None) -> bool:
        """Take where inputs lay in a call for which all ranks have offered memory. Collective where it is True.

        Args:
            call: its last number.
            text: its signature.
            agreement: what all ranks asked for.
            sources: see :meth:`sources`.

        Returns:
            Whether calls with that signature go ahead from the next one on, and did not until now.
        """
        self._let_go()
        known = self._known.get(text)
        if sources is None:
            return False
        if known is None:
            collective = agreement.collective
            assert isinstance(collective, Collective)
            known = self._known[text] = Known(Pattern(), collective, agreement.beside == NOTHING, -1, 0)
        if not known.pattern.settled(sources):
            return False
        wish = known.wish if known.wish >= 0 else next(self._wishes)
        try:
            if wish >= MOST_WISHES:
                raise UnavailableError(f"calls that go ahead (value={wish + 1} signatures, allowed={MOST_WISHES})")
            self._confirming.make_room(known.collective)
        except UnavailableError:  # on all ranks alike
            known.pattern.give_up()
            return False
        self._known[text] = known._replace(wish=wish, since=call + 1)
        return True

    def sources(self, agreement: AnyAgreement, texts: Sequence[str]) -> Sources | None:
        """Where inputs lie, from what all ranks have offered for a call; None where no call of the kind goes ahead."""
        collective = agreement.collective
        if not all(texts) or why_not_ahead(agreement):
            return None
        assert isinstance(collective, Collective)
        heard = [Heard.of(text) for text in texts]
        buffer, senders = (
            source_buffer(collective),
            {c.src_rank for c in collective.chunks() if c.src_rank != c.dst_rank},
        )
        found: list[Source] = []
        for rank, each in enumerate(heard):
            place = each.places[buffer][0]
            if rank not in senders:
                found.append(None)
            elif not place or len(place) > 2:  # what lies in pools may be symmetric the next time
                return None
            else:
                name, offset = each.handles[place[0]][0], place[1]
                if self._reach.address(rank, name, offset) is None:
                    return None
                found.append((name, offset))
        return tuple(found)

    def make(
        self, call: int, key: Hashable, expected: Expected, request: AnyRequest, tensors: Sequence[torch.Tensor | None]
    ) -> Prepared:
        """Post a call that goes ahead, and make it ready to run.

        Args:
            call: its number.
            key: of what is asked, with the identities of the tensors.
            expected: of it.
            request: what this rank asks.
            tensors: of the caller.

        Raises:
            PeerError, PeerTimeoutError, MismatchError: this rank has missed, and its peers do not make the call, some
                of whose engines have begun. The communicator is of no use any more.
        """
        self._last = call
        if call >= self._looked + LOOKS:
            self._looked = call
            self._let_go()
            self._sees_gone = self._sees_gone or self._reach.looks_gone()
        if self._sees_gone:
            self._sees_gone = False
            self._wish(expected.known, call)
        hit = self._hits.get(key)
        if hit is not None and hit.sources == expected.sources and self._reach.stand(hit.allocations):
            self._post_hit(call, hit.post)
            return hit.prepared
        assert isinstance(request, Request), "calls with lists have other signatures"
        with self._calls.making_ready():
            found = self._reach.found(request, tensors)
            said = self._say(found, expected)
        post = expected.text + SPLITS + said
        if said in (OUTPUT_UNKNOWN, INPUT_ELSEWHERE):
            self._wish(expected.known, call)
            self._control.post_call(call, post)
            return self._prepare(key, expected, request, *self._hear(call))
        self._post_hit(call, post)
        prepared = self._prepare(key, expected, request, NOBODY, NOBODY, {})
        allocations = tuple({place.allocation for place in found.values() if isinstance(place, Found)})
        if all(allocation.kept is None for allocation in allocations):  # of several pieces: is_gone looks at one
            if len(self._hits) >= MOST_HITS:
                self._hits.clear()
            period = expected.known.pattern.period
            turns = set() if hit is None or hit.period is not period else hit.turns
            self._hits[key] = Hit(expected.sources, allocations, post, prepared, period, turns)
        return prepared

    def again(self, key: Hashable, prepared: Prepared, expected: Expected) -> Again | None:
        """The call that :meth:`make` has made, for compiled code; None if it is not to be made again like that."""
        hit, known = self._hits.get(key), expected.known
        if hit is None or hit.prepared is not prepared or hit.sources != expected.sources:
            return None
        turn, guards = known.pattern.turn(), known.pattern.guards()
        if turn[2] not in hit.turns and len(hit.turns) >= MOST_TURNS:
            return None
        standing = self._reach.standing(hit.allocations)
        if standing is None:
            return None
        hit.turns.add(turn[2])
        control, notes = self._control, ((Effect.SET_NUMBER, self, "_last", None),)
        condition = guards, self._look, LAG, known.since, control.said_by_all(known.wish), control.kept()
        return Again(hit.post, standing, turn, condition, notes, lambda: self._hits.get(key) is hit)

    def _look(self) -> bool:
        """True if Python must make the next call that goes ahead. Asked with the executor's lock held, so that nothing
        is let go of here, which may take the device's time.
        """
        if not self._sees_gone:
            self._sees_gone = any(self._reach.looks_gone() for _ in range(LOOKS))
        return self._sees_gone or bool(self._retired)

    def _post_hit(self, call: int, post: str) -> None:
        self._control.post_call(call, post)
        self._control.keep_post(call)
        if self._calls.config.debug:
            self._compare(call)

    def close(self) -> None:
        """Let go of all that is kept. Nothing may be under way."""
        self._known.clear()
        self._forget_hits()
        self._retired.clear()

    def _say(self, found: dict[Buffer, Found | int | None], expected: Expected) -> str:
        """What to post of this rank's memory."""
        input, mine = found[source_buffer(expected.known.collective)], expected.sources[self._rank]
        if mine is not None and not (isinstance(input, Found) and (input.allocation.name, input.offset) == mine):
            return INPUT_ELSEWHERE
        output = found[Buffer.OUTPUT]
        if not isinstance(output, Found):
            return json.dumps(None) if output == 0 else OUTPUT_UNKNOWN
        name, offset = output.allocation.name, output.offset
        return OUTPUT_UNKNOWN if self._reach.address(self._rank, name, offset) is None else json.dumps((name, offset))

    def _wish(self, known: Known, call: int) -> None:
        """Once since all have last been heard."""
        if self._control.wishes(known.wish)[self._rank] < known.since:
            self._control.wish(known.wish, call)

    def _hear(self, call: int) -> tuple[frozenset[int], frozenset[int], dict[int, int]]:
        """Wait for all posts: ranks whose inputs lie elsewhere, ranks that miss, where the outputs of others lie."""
        said = [post.differing for post in self._compare(call)]
        changed = frozenset(rank for rank, text in enumerate(said) if text == INPUT_ELSEWHERE)
        waiting = changed | {rank for rank, text in enumerate(said) if text == OUTPUT_UNKNOWN}
        targets = {}
        for rank, text in enumerate(said):
            if rank not in waiting and (place := json.loads(text)) is not None:
                address = self._reach.address(rank, *place)
                assert address is not None, "all ranks know alike what all have mapped"
                targets[rank] = address
        return changed, waiting, targets

    def _compare(self, call: int) -> Sequence[PostedCall]:
        """Wait for all posts. Where they differ, ranks do not expect the same any more: that ends the communicator."""
        posts = self._calls.posts(call)
        try:
            compare(self._control, call, posts)
        except Exception as error:
            self._calls.fail(PeerError(str(error), _culprits(posts)))
            raise
        return posts

    def _prepare(
        self,
        key: Hashable,
        expected: Expected,
        request: Request,
        changed: frozenset[int],
        waiting: frozenset[int],
        targets: dict[int, int],
    ) -> Prepared:
        collective = expected.known.collective
        buffer = source_buffer(collective)
        addresses: dict[tuple[int, str], int] = {}
        if self._rank in changed:
            addresses.update({(rank, Buffer.OUTPUT): address for rank, address in targets.items()})
        for rank, source in enumerate(expected.sources):
            if source is not None and rank != self._rank:
                address = self._reach.address(rank, *source)
                assert address is not None, "what is mapped no more is not expected"
                addresses[rank, buffer] = address
        addresses.update({(self._rank, name): request.region(name).address for name in (Buffer.INPUT, Buffer.OUTPUT)})
        alone = expected.known.alone
        return self._confirming.prepare(key, expected.text, collective, (addresses,), changed, waiting, alone=alone)

    def _drop(self, rank: int, name: str, mapping: Mapping | None) -> None:
        self._forget_hits()
        for known in self._known.values():
            known.pattern.drop(rank, name)
        if mapping is not None and self._control.ended(self._rank) < self._last:
            self._retired.append((self._last, mapping))

    def _forget_hits(self) -> None:
        self._hits.clear()
        self.forget()

    def _let_go(self) -> None:
        """Of mappings by which nothing reads any more."""
        if self._retired:
            ended = self._control.ended(self._rank)
            self._retired = [(last, mapping) for last, mapping in self._retired if last > ended]


def _culprits(posts: Sequence[PostedCall]) -> list[int]:
    refused = [post.rank for post in posts if post.refusal is not None and post.blames is None]
    return refused or [post.rank for post in posts if post.common != posts[0].common]
