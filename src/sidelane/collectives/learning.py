"""Which addresses come again from call to call, found out while no host waits for another one.

A call from which the ranks may learn, a *lesson*, runs as any other: by way of staging. Beside it each rank posts what
it would offer (``memory.lessons``), and reads what its peers have posted when it comes by. In a window of lessons that
is in step, all ranks go by the same posts of long ago, so that all know alike what was offered, what all have mapped,
and what comes next. Where that is known, calls go ahead: they read their peers' inputs where these are
expected. A host that is much earlier or later than its peers finds windows that are not in step: calls are staged
there, on all ranks.

A rank whose input lies elsewhere than its peers expect waits for what they post of this call, on the host. So does one
whose output is new to them. That is the only wait. docs/internals/reach.md says why this is safe;
tests/common/learn_model.py looks at all interleavings.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from sidelane.collectives.call_forms import AnyRequest
from sidelane.collectives.calls import Calls
from sidelane.collectives.confirming import Confirming, source_buffer
from sidelane.collectives.course import Course, Inputs, Source, Sources
from sidelane.collectives.knowledge import Knowledge
from sidelane.collectives.lesson import Said, heard
from sidelane.collectives.list_calls import ListRequest
from sidelane.collectives.mappings import Mappings, Name
from sidelane.collectives.offers import BUFFERS
from sidelane.collectives.plan import AnyAgreement
from sidelane.collectives.prepare import PreparedCall
from sidelane.collectives.reach_rules import why_not_learnt
from sidelane.collectives.repeat import Repeats
from sidelane.collectives.telling import Guard, LessonAgain, Subject, Telling, Turn, inputs_of, outputs_of
from sidelane.config import NOTHING
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError, UnavailableError
from sidelane.memory.lessons import WINDOW, LessonBoard, frontier, window_of
from sidelane.memory.ordinary import OrdinaryMemory
from sidelane.native import Effect, Note
from sidelane.program.batch import parts_of
from sidelane.program.builders.confirmed import NOBODY
from sidelane.program.collective import Buffer, Collective

READ_EVERY = 4
"""Lessons, in the first of which posts are read, and rank 0 judges. Compiled code reads once in a window."""

READS = 3
"""Lessons read for each one begun: more than one, so that whoever is late comes up."""

KEPT = 512
"""Lessons remembered until the ranks go by them."""

MOST_REMEMBERED = 4096
"""Calls, and posts."""

MOST_TURNS = 4
"""Calls of a period with the same tensors here that compiled code remembers, which has few places for them."""


@dataclasses.dataclass(slots=True, eq=False)
class Heard:
    """What all ranks have posted in one lesson: one object for posts that are the same.

    Attributes:
        said: by rank; empty if the ranks made different calls, or one posted nothing.
        names: owners and names of the allocations that are offered.
        is_plain: nothing is said but where tensors lie.
        may_wait: the call was not asynchronous on any rank.
        sources: where the inputs lie, once that was asked.
        since: ``Knowledge.drops`` at which everything offered here was known.
    """

    said: tuple[Said, ...]
    names: frozenset[Name]
    is_plain: bool
    may_wait: bool
    sources: Sources | None = None
    since: int = -1

    @staticmethod
    def of(said: tuple[Said, ...]) -> Heard:
        if any(each.call != said[0].call for each in said):
            said = ()
        names = frozenset((rank, name) for rank, each in enumerate(said) for name in each.handles)
        is_plain = not any(each.gone or each.failed or each.pending for each in said)
        return Heard(said, names, is_plain, not any(each.aside for each in said))


class Hit(NamedTuple):
    """A call that went ahead, and will again where the same is expected.

    Attributes:
        sources: that are expected.
        prepared: what it runs as.
        turns: of a period, for which compiled code was told of a call with the same tensors here.
    """

    sources: Sources
    prepared: PreparedCall
    turns: set[int]


class Learning:
    """Of one lane.

    Args:
        calls: of the lane.
        confirming: makes calls that go ahead.
        board: where the ranks post.
        memory: ordinary memory of the device.
        suits: whether copy engines should make a call once its tensors are mapped; alike on all ranks.
        is_pooled: whether a tensor lies in a pool, which is no ordinary memory.
        repeats: makes lessons again in compiled code; None without.

    Attributes:
        is_quiet: this rank has nothing to say in its next lesson but where its tensors lie.
    """

    def __init__(
        self,
        calls: Calls,
        confirming: Confirming,
        board: LessonBoard,
        memory: OrdinaryMemory,
        suits: Callable[[AnyAgreement], bool],
        is_pooled: Callable[[torch.Tensor], bool],
        repeats: Repeats | None,
    ) -> None:
        self._calls, self._confirming, self._board, self._suits = calls, confirming, board, suits
        self._rank, self._control = board.rank, calls.control
        self._mappings, self._memory = Mappings(memory), memory
        self._subjects: dict[str, Subject | None] = {}
        self._read, self._known_to, self._looked = 0, 0, 0
        self._begun: list[Subject | None] = [None] * KEPT  # by number, modulo that, what lessons were of
        self._queue: collections.deque[tuple[int, Heard]] = collections.deque(maxlen=KEPT)
        self._knowledge = Knowledge(board.rank, self._mappings)
        self._telling = Telling(board.rank, memory, self._mappings, is_pooled)
        self._last_ahead = 0
        self._parsed: dict[bytes, Said] = {}
        self._heard: dict[tuple[bytes, ...], Heard] = {}
        self._hits: dict[Hashable, Hit] = {}
        self.is_quiet = True
        self._repeats = repeats
        self._posts: Callable[[int], tuple[bytes, ...] | None] = board.posts
        if repeats is not None:
            self._posts = repeats.teach(board, self._begun, WINDOW, _weakly(self._open))
        confirming.forgets(self._hits.clear)

    def knows(self, text: str, agreement: Callable[[], AnyAgreement]) -> bool:
        """True if the ranks learn from calls of a signature; finds that out in its first call, on all ranks."""
        if text not in self._subjects:
            with self._calls.making_ready():
                self._note(agreement(), text)
        return self._subjects[text] is not None

    def attend(
        self,
        text: str,
        call: int,
        key: Hashable,
        asked: Callable[[], AnyRequest],
        tensors: Sequence[torch.Tensor | None],
        aside: bool,
    ) -> PreparedCall | None:
        """Take part in a lesson, before its call is started.

        Args:
            text: signature of the call, from which the ranks learn.
            call: its number.
            key: of what is asked, with the identities of the tensors.
            asked: what this rank asks.
            tensors: of the caller.
            aside: the call is asynchronous.

        Returns:
            What the call runs as if it goes ahead; None if it is staged.

        Raises:
            PeerError, PeerTimeoutError, MismatchError: this rank has missed, and its peers do not make the call.
        """
        subject = self._subjects[text]
        assert subject is not None
        begun = self._board.take()  # by compiled code, for a call that is to do something else now
        assert not begun or self._begun[self._board.lesson % KEPT] is subject, "who has begun a lesson makes its call"
        lesson = self._board.lesson + (not begun)
        if not begun and lesson % READ_EVERY == 1:
            self._catch_up(lesson)
        taught = self._telling.about(subject, lesson, key, asked, tensors, aside)
        if not begun:
            self._begin(subject, taught.post, call)
            self._board.take()
        period = subject.now
        if not isinstance(period, tuple):
            return None
        self._last_ahead = call
        sources = period[subject.turn]
        subject.turn = (subject.turn + 1) % len(period)
        mine = sources[self._rank]
        if taught.inputs == mine and self._reaches(self._rank, taught.outputs):
            known = self._hits.get(key)
            if known is not None and known.sources is sources:
                return known.prepared
            prepared = self._make(subject, key, asked(), sources, NOBODY, NOBODY, {})
            if len(self._hits) >= MOST_REMEMBERED:
                self._hits.clear()
            self._hits[key] = Hit(sources, prepared, set())
            return prepared
        return self._make(subject, key, asked(), sources, *self._hear(subject, lesson, call, sources))

    def again(self, text: str, key: Hashable, prepared: PreparedCall) -> LessonAgain | None:
        """What compiled code is told of a lesson that has just been made, if it may make it again."""
        subject, taught = self._subjects.get(text), self._telling.taught(key)
        if subject is None or taught is None or not self.is_quiet or subject.now is False:
            return None
        guards: tuple[Guard, ...] = (self, "is_quiet", True), (subject, "now", subject.now)
        turn: Turn | None = None
        notes: tuple[Note, ...] = ()
        hit = self._hits.get(key)
        if isinstance(subject.now, tuple):
            number = (subject.turn - 1) % len(subject.now)
            if hit is None or hit.prepared is not prepared or hit.sources is not subject.now[number]:
                return None  # it has missed
            if number not in hit.turns and len(hit.turns) >= MOST_TURNS:
                return None
            hit.turns.add(number)
            turn, notes = (subject, "turn", number, subject.turn), ((Effect.SET_NUMBER, self, "_last_ahead", None),)
        standing = self._memory.standing(taught.allocations)
        if standing is None:
            return None
        lesson = guards, taught.post, subject, turn is not None, standing
        return LessonAgain(lesson, turn, notes, lambda: self._hits.get(key) is hit)

    def _open(self, subject: Subject, post: bytes) -> None:
        """Begin the first lesson of a window for compiled code, which says the same of it as of others."""
        try:
            lesson = self._board.lesson + 1
            self._catch_up(lesson)
            self._telling.look(lesson)  # what has gone is said from the next lesson on
            self._begin(subject, post, self._control.begun(self._rank) + 1)
            if subject.now is False:  # since just now: its call is made, but as no lesson, so that nobody asks for it
                self._board.take()
        except BaseException:
            with self._calls.making_ready():
                raise

    def _begin(self, subject: Subject, post: bytes, call: int) -> None:
        lesson = self._board.lesson + 1
        self._board.say(post)
        self._begun[lesson % KEPT] = subject
        if lesson % WINDOW == 1:
            self._enter(window_of(lesson), call)
        if self._rank == 0 and lesson % READ_EVERY == 1:
            self._board.judge(lesson)
        self.is_quiet = not self._telling.note_news()

    def why(self, tensor: torch.Tensor) -> str | None:
        """Why peers cannot map a tensor; None if they can, as far as this rank knows."""
        found = self._telling.why(tensor)
        return found if isinstance(found, str) else self._knowledge.refused.get((self._rank, found.name))

    def close(self) -> None:
        """Let go of all that is kept. Nothing may be under way."""
        self._mappings.close()
        self._knowledge.close()
        self._telling.close()
        self._subjects.clear()
        self._hits.clear()

    def _note(self, agreement: AnyAgreement, text: str) -> None:
        """Find out whether the ranks learn from calls of a signature. Collective."""
        made = None
        if not why_not_learnt(agreement, self._suits):
            collective = agreement.collective
            parts = tuple(part for part, _ in parts_of(collective))
            with contextlib.suppress(UnavailableError):  # on all ranks alike
                self._confirming.make_room(collective)
                senders, alone = tuple(map(_senders, parts)), agreement.beside == NOTHING
                made = Subject(text, collective, parts, _digest(text), senders, alone, Course())
        self._subjects[text] = made

    # --- what all ranks know alike ------------------------------------------------------------------------------------

    def _catch_up(self, lesson: int) -> None:
        """Read what all have posted before this lesson, some of it."""
        last = min(lesson - 1, self._read + READS * (lesson - self._looked))
        first, self._looked = self._read, lesson
        while self._read < last:
            posts = self._posts(self._read + 1)
            if posts is None:
                break
            self._read += 1
            heard = self._heard.get(posts)
            self._queue.append((self._read, self._hear_all(posts) if heard is None else heard))
        if self._read > first:
            self._board.has_read(self._read)

    def _hear_all(self, posts: tuple[bytes, ...]) -> Heard:
        if len(self._heard) >= MOST_REMEMBERED:
            self._heard.clear()
        found = self._heard[posts] = Heard.of(tuple(map(self._said, posts)))
        return found

    def _said(self, payload: bytes) -> Said:
        found = self._parsed.get(payload)
        if found is None:
            if len(self._parsed) >= MOST_REMEMBERED:
                self._parsed.clear()
            found = self._parsed[payload] = heard(payload)
        return found

    def _enter(self, window: int, call: int) -> None:
        """Find out whether a window is in step, and what its calls do then. Waits for rank 0 if that is about to say
        it, which waits for nobody.
        """
        found = self._board.verdict(window)
        if found is None:
            self._wait(call, lambda: self._board.verdict(window) is not None, lambda: [0])
            found = self._board.verdict(window)
        self._mappings.let_go(self._control.ended(self._rank))
        if found:
            self._go_by(window)
        begun: collections.Counter[Subject | None] | None = None
        for subject in self._subjects.values():
            if subject is None:
                continue
            course = subject.course
            if not found or not course.is_known(self._knowledge.usable):
                subject.now = None
            elif subject.now is not course.period:  # else it goes on: turns are counted with each lesson
                if begun is None:
                    numbers = range(self._known_to + 1, self._board.lesson)
                    begun = collections.Counter(self._begun[lesson % KEPT] for lesson in numbers)
                subject.now, subject.turn = course.period, (course.next + begun[subject]) % len(course.period)

    def _go_by(self, window: int) -> None:
        """Know what all have posted up to the window's frontier, and map what is new."""
        last = frontier(window)
        first = last - KEPT // 2  # what was before is the same as nothing: others may have forgotten it
        if self._known_to < first:
            for subject in filter(None, self._subjects.values()):
                subject.course.forget()
        while self._queue and self._queue[0][0] <= last:
            lesson, heard = self._queue.popleft()
            if lesson > max(first, self._known_to):
                self._settle(window, self._begun[lesson % KEPT], heard)
                if lesson == last and heard.said and not any(each.pending for each in heard.said):
                    self._knowledge.note_mapped(window_of(last))
        self._known_to = last

    def _settle(self, window: int, subject: Subject | None, heard: Heard) -> None:
        """Take one lesson."""
        said = heard.said
        if not said:
            if subject is not None:
                subject.course.forget()
            return
        knowledge = self._knowledge
        if heard.since != knowledge.drops:
            gone = knowledge.hear(window, said, self._last_ahead)
            if gone:
                self._forget(gone)
            self._telling.heard(said[self._rank])
            if subject is not None:
                heard.sources = self._sources(subject, said)
                if heard.is_plain:  # the next time there is nothing to know but that it has come again
                    heard.since = knowledge.drops
        if subject is None:
            return
        subject.course.settled(heard.sources, heard.names, may_wait=heard.may_wait)
        if subject.course.given_up and subject.now is not False:
            self._subjects[subject.text] = None  # from the window on that has just begun, on all ranks
            subject.now = False

    def _forget(self, gone: Sequence[Name]) -> None:
        """What lies in memory that is mapped no more."""
        self._hits.clear()
        if self._repeats is not None:
            self._repeats.forget()
        for subject in filter(None, self._subjects.values()):
            for owner, name in gone:
                subject.course.drop(owner, name)

    def _sources(self, subject: Subject, said: tuple[Said, ...]) -> Sources | None:
        """Where the inputs of all ranks lie; None if one of them does not offer all of its tensors."""
        found: list[Inputs] = []
        for rank, each in enumerate(said):
            rows = zip(subject.parts, subject.senders, each.places, strict=False)
            lacks = any(rank in senders and row[source_buffer(part)] is None for part, senders, row in rows)
            if lacks or outputs_of(each.places) is None:
                return None
            found.append(inputs_of(subject, each.places, rank))
        return tuple(found)

    def _reaches(self, rank: int, outputs: Sequence[str] | None) -> bool:
        """True if all ranks have mapped the outputs of a rank."""
        return outputs is not None and all(self._knowledge.reaches(rank, name) for name in outputs)

    # --- calls that go ahead ------------------------------------------------------------------------------------------

    def _hear(
        self, subject: Subject, lesson: int, call: int, sources: Sources
    ) -> tuple[frozenset[int], frozenset[int], dict[int, list[int]]]:
        """Wait for all posts: ranks whose inputs lie elsewhere, ranks that miss, where the outputs of others lie."""
        self._wait(call, lambda: not self._board.absent(lesson), lambda: self._board.absent(lesson))
        posts = self._board.posts(lesson)
        assert posts, "in a window in step all ranks post"
        said = [self._said(payload) for payload in posts]
        for rank, each in enumerate(said):
            if each.call != subject.call:
                text = f"call {call}: ranks made different calls: here {subject.text}; rank {rank}: #{each.call}"
                self._calls.fail(PeerError(text, (rank,)))
                raise MismatchError(text)
        changed = frozenset(
            rank for rank, each in enumerate(said) if inputs_of(subject, each.places, rank) != sources[rank]
        )
        unheard = {rank for rank, each in enumerate(said) if not self._reaches(rank, outputs_of(each.places))}
        targets = {
            rank: [self._address(rank, row[Buffer.OUTPUT]) for row in each.places]
            for rank, each in enumerate(said)
            if rank not in changed and rank not in unheard and rank != self._rank
        }
        return changed, changed | unheard, targets

    def _make(
        self,
        subject: Subject,
        key: Hashable,
        request: AnyRequest,
        sources: Sources,
        changed: frozenset[int],
        waiting: frozenset[int],
        targets: dict[int, list[int]],
    ) -> PreparedCall:
        requests = request.parts if isinstance(request, ListRequest) else (request,)
        rows: list[dict[tuple[int, str], int]] = []
        for number, (part, asked) in enumerate(zip(subject.parts, requests, strict=True)):
            found: dict[tuple[int, str], int] = {}
            if self._rank in changed:
                found.update({(rank, Buffer.OUTPUT): places[number] for rank, places in targets.items()})
            for rank, inputs in enumerate(sources):
                source = inputs[number]
                if source is not None and rank != self._rank:
                    found[rank, source_buffer(part)] = self._address(rank, source)
            found.update({(self._rank, name): asked.region(name).address for name in BUFFERS})
            rows.append(found)
        program = subject.text, subject.collective, rows, changed, waiting
        return self._confirming.prepare(key, *program, alone=subject.alone)

    def _address(self, rank: int, place: Source | str) -> int:
        """Where this rank reaches what another one has said; 0 for a tensor without bytes."""
        return self._mappings.start((rank, place[0])) + place[1] if isinstance(place, tuple) else 0

    def _wait(self, call: int, done: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        began, timeout_s = time.monotonic(), self._calls.config.timeout_s
        with self._calls.failing_for_good():
            while not done():
                self._control.check(call)
                self._control.check_same(call)
                waited = time.monotonic() - began
                if waited > timeout_s:
                    ranks = missing()
                    who = "; ".join(self._control.describe(rank) for rank in ranks)
                    message = f"call {call}: waited {waited:.1f} s on rank {self._rank} for {who}"
                    culprits = self._control.at_fault(ranks)
                    self._control.abort(message, culprits, timed_out=True)
                    raise PeerTimeoutError(message, culprits)
                time.sleep(0 if waited < 200e-6 else min(max(waited / 8, 20e-6), 5e-3))


def _digest(text: str) -> str:
    """What tells a signature from others."""
    return text.rpartition("#")[2].partition(":")[0]


def _senders(collective: Collective) -> frozenset[int]:
    """Ranks whose inputs others read."""
    return frozenset(chunk.src_rank for chunk in collective.chunks() if chunk.src_rank != chunk.dst_rank)


def _weakly(method: Callable[[Subject, bytes], object]) -> Callable[[Subject, bytes], object]:
    """A method whose object is not kept by it: compiled code is kept by the object, and tells nobody what it keeps."""
    found = weakref.WeakMethod(method)

    def ask(subject: Subject, post: bytes) -> object:
        live = found()
        assert live is not None, "compiled code makes no lessons for who has gone"
        return live(subject, post)

    return ask
