"""Which addresses come again from call to call, found out while no host waits for another one.

A call from which the ranks may learn, a *lesson*, runs as any other: by way of staging. Beside it each rank posts what
it would offer (``memory.lessons``), and reads what its peers have posted when it comes by. In a window of lessons that
is in step, all ranks go by the same posts of long ago, so that all know alike what was offered, what all have mapped,
and what comes next. Where that is known, calls go ahead (``ahead``): they read their peers' inputs where these are
expected. A host that is much earlier or later than its peers finds windows that are not in step: calls are staged
there, on all ranks.

A rank whose input lies elsewhere than its peers expect waits for what they post of this call, on the host. So does one
whose output is new to them. That is the only wait. docs/internals/reach.md says why this is safe;
tests/program/learn_model.py looks at all interleavings.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Hashable, Sequence

import torch

from sidelane.collectives.arguments import Request
from sidelane.collectives.calls import Calls
from sidelane.collectives.confirming import Confirming, source_buffer
from sidelane.collectives.course import Course
from sidelane.collectives.knowledge import Knowledge
from sidelane.collectives.lesson import Said, heard
from sidelane.collectives.mappings import Mappings
from sidelane.collectives.offered import BUFFERS
from sidelane.collectives.pattern import Sources
from sidelane.collectives.plan import AUTO, Agreement, AnyAgreement
from sidelane.collectives.prepare import Prepared
from sidelane.collectives.telling import Subject, Telling
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError, UnavailableError
from sidelane.memory.lessons import LessonBoard, frontier, window_of
from sidelane.memory.ordinary import OrdinaryMemory
from sidelane.program.builders.confirmed import NOBODY, can_be_confirmed
from sidelane.program.collective import Buffer, Collective

LEAST_BYTES = 1 << 20
"""From rank to rank. Less goes by kernels, which take ordinary tensors as they are."""

READS = 3
"""Lessons read in one lesson: more than one, so that whoever is late comes up."""

KEPT = 512
"""Lessons remembered until the ranks go by them."""

MOST_REMEMBERED = 4096
"""Calls, and posts."""


class Learning:
    """Of one lane.

    Args:
        calls: of the lane.
        confirming: makes calls that go ahead.
        board: where the ranks post.
        memory: ordinary memory of the device.
        suits: whether copy engines should make a call once its tensors are mapped; alike on all ranks.
        is_pooled: whether a tensor lies in a pool, which is no ordinary memory.
    """

    def __init__(
        self,
        calls: Calls,
        confirming: Confirming,
        board: LessonBoard,
        memory: OrdinaryMemory,
        suits: Callable[[Agreement], bool],
        is_pooled: Callable[[torch.Tensor], bool],
    ) -> None:
        self._calls, self._confirming, self._board, self._suits = calls, confirming, board, suits
        self._rank, self._control = board.rank, calls.control
        self._mappings = Mappings(memory)
        self._subjects: dict[str, Subject | None] = {}
        self._lesson, self._read, self._known_to = 0, 0, 0
        self._in_step = False
        self._begun: dict[int, str] = {}  # by lesson, of those not gone by yet, the signature
        self._since: collections.Counter[str] = collections.Counter()  # lessons begun behind ``known_to``, by text
        self._queue: collections.deque[tuple[int, tuple[Said, ...]]] = collections.deque(maxlen=KEPT)
        self._knowledge = Knowledge(board.rank, self._mappings)
        self._telling = Telling(memory, self._mappings, is_pooled)
        self._last_ahead = 0
        self._heard: dict[bytes, Said] = {}
        self._prepared: dict[Hashable, tuple[Sources, Prepared]] = {}
        confirming.forgets(self._prepared.clear)

    def subject(self, text: str) -> Subject | None:
        """What calls of a signature teach; None if they do not."""
        return self._subjects.get(text)

    def knows(self, text: str) -> bool:
        """True if :meth:`begin` was told of a signature."""
        return text in self._subjects

    def begin(self, agreement: AnyAgreement, text: str) -> None:
        """Find out whether the ranks learn from calls of a signature. In its first call, on all ranks."""
        if text not in self._subjects:
            teaches = (
                isinstance(agreement, Agreement)
                and not agreement.frozen
                and agreement.input_place is None
                and agreement.output_place is None
                and agreement.variant in (AUTO, "b2b")
                and can_be_confirmed(agreement.collective)
                and most_bytes(agreement.collective) >= LEAST_BYTES
                and self._suits(agreement)
            )
            made = None
            if teaches:
                assert isinstance(agreement, Agreement)
                with contextlib.suppress(UnavailableError):  # on all ranks alike
                    self._confirming.make_room(agreement.collective)
                    chunks = agreement.collective.chunks()
                    senders = frozenset(c.src_rank for c in chunks if c.src_rank != c.dst_rank)
                    made = Subject(text, agreement.collective, text.rpartition("#")[2], senders, Course())
            self._subjects[text] = made

    def attend(
        self,
        subject: Subject,
        call: int,
        key: Hashable,
        asked: Callable[[], Request],
        tensors: Sequence[torch.Tensor | None],
        aside: bool,
    ) -> Prepared | None:
        """Take part in a lesson, before its call is started.

        Args:
            subject: of the call.
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
        lesson = self._lesson = self._lesson + 1
        self._catch_up(lesson)
        taught = self._telling.about(subject, lesson, key, asked, tensors, aside)
        self._board.say(lesson, taught.post)
        window = window_of(lesson)
        if window != window_of(lesson - 1):
            self._in_step = self._enter(window, call)
            self._mappings.let_go(self._control.ended(self._rank))
            if self._in_step:
                self._go_by(window)
        if self._rank == 0:
            self._board.judge(lesson)
        later = self._since[subject.text]
        self._since[subject.text] += 1
        self._begun[lesson] = subject.text
        if len(self._begun) > KEPT:
            del self._begun[next(iter(self._begun))]
        if not (self._in_step and subject.course.is_known(self._knowledge.usable)):
            return None
        self._last_ahead = call
        sources = subject.course.expected(later)
        mine = sources[self._rank]
        output = taught.output
        hits = (mine is None or taught.input == mine) and output is not None
        hits = hits and self._knowledge.reaches(self._rank, output or "")
        if hits:
            known = self._prepared.get(key)
            if known is not None and known[0] is sources:
                return known[1]
            prepared = self._make(subject, key, asked(), sources, NOBODY, NOBODY, {})
            if len(self._prepared) >= MOST_REMEMBERED:
                self._prepared.clear()
            self._prepared[key] = sources, prepared
            return prepared
        return self._make(subject, key, asked(), sources, *self._hear(subject, lesson, call, sources))

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
        self._prepared.clear()

    # --- what all ranks know alike ------------------------------------------------------------------------------------

    def _catch_up(self, lesson: int) -> None:
        """Read what all have posted before this lesson, some of it."""
        for _ in range(READS):
            if self._read + 1 >= lesson:
                return
            posts = self._board.posts(self._read + 1)
            if posts is None:
                return
            self._read += 1
            said = tuple(map(self._parsed, posts))
            alike = bool(said) and all(each.call == said[0].call for each in said)
            self._queue.append((self._read, said if alike else ()))
            self._board.has_read(self._read)

    def _parsed(self, payload: bytes) -> Said:
        found = self._heard.get(payload)
        if found is None:
            if len(self._heard) >= MOST_REMEMBERED:
                self._heard.clear()
            found = self._heard[payload] = heard(payload)
        return found

    def _enter(self, window: int, call: int) -> bool:
        """Whether a window is in step. Waits for rank 0 if that is about to say it, which waits for nobody."""
        found = self._board.verdict(window)
        if found is None:
            self._wait(call, lambda: self._board.verdict(window) is not None, lambda: [0])
        return bool(self._board.verdict(window))

    def _go_by(self, window: int) -> None:
        """Know what all have posted up to the window's frontier, and map what is new."""
        last = frontier(window)
        first = last - KEPT // 2  # what was before is the same as nothing: others may have forgotten it
        if self._known_to < first:
            for subject in filter(None, self._subjects.values()):
                subject.course.forget()
        while self._queue and self._queue[0][0] <= last:
            lesson, said = self._queue.popleft()
            if lesson > max(first, self._known_to):
                self._settle(window, self._begun.get(lesson, ""), said)
                if lesson == last and said and not any(each.pending for each in said):
                    self._knowledge.note_mapped(window_of(last))
        self._known_to = last
        for lesson in [lesson for lesson in self._begun if lesson <= last]:
            del self._begun[lesson]
        self._since = collections.Counter(self._begun.values())

    def _settle(self, window: int, text: str, said: tuple[Said, ...]) -> None:
        """Take one lesson."""
        subject = self._subjects.get(text)
        if not said:
            if subject is not None:
                subject.course.forget()
            return
        gone = self._knowledge.hear(window, said, self._last_ahead)
        if gone:
            self._prepared.clear()
            for each_subject in filter(None, self._subjects.values()):
                for owner, name in gone:
                    each_subject.course.drop(owner, name)
        self._telling.heard(said[self._rank])
        if subject is not None:
            may_wait = not any(each.aside for each in said)
            names = frozenset((rank, name) for rank, each in enumerate(said) for name in each.handles)
            subject.course.settled(self._sources(subject, said), names, may_wait=may_wait)
            if subject.course.given_up:
                self._subjects[text] = None  # from the window on that has just begun, on all ranks

    def _sources(self, subject: Subject, said: tuple[Said, ...]) -> Sources | None:
        """Where the inputs of all ranks lie; None if one of them offers nothing."""
        buffer = source_buffer(subject.collective)
        found: list[tuple[str, int] | None] = []
        for rank, each in enumerate(said):
            place = each.places[buffer] if rank in subject.senders else ""
            if place is None or each.places[Buffer.OUTPUT] is None:
                return None
            found.append(place if isinstance(place, tuple) else None)
        return tuple(found)

    # --- calls that go ahead ------------------------------------------------------------------------------------------

    def _hear(
        self, subject: Subject, lesson: int, call: int, sources: Sources
    ) -> tuple[frozenset[int], frozenset[int], dict[int, int]]:
        """Wait for all posts: ranks whose inputs lie elsewhere, ranks that miss, where the outputs of others lie."""
        self._wait(call, lambda: not self._board.absent(lesson), lambda: self._board.absent(lesson))
        posts = self._board.posts(lesson)
        assert posts, "in a window in step all ranks post"
        said = [self._parsed(payload) for payload in posts]
        for rank, each in enumerate(said):
            if each.call != subject.call:
                text = f"call {call}: ranks made different calls: here {subject.text}; rank {rank}: #{each.call}"
                self._calls.fail(PeerError(text, (rank,)))
                raise MismatchError(text)
        buffer = source_buffer(subject.collective)
        changed = frozenset(
            rank for rank, each in enumerate(said) if sources[rank] is not None and each.places[buffer] != sources[rank]
        )
        waiting, targets = set(changed), {}
        for rank, each in enumerate(said):
            place = each.places[Buffer.OUTPUT]
            if place is None or not self._knowledge.reaches(rank, place[0] if place else ""):
                waiting.add(rank)
            elif isinstance(place, tuple) and rank not in changed and rank != self._rank:
                targets[rank] = self._mappings.start((rank, place[0])) + place[1]
        return changed, frozenset(waiting), targets

    def _make(
        self,
        subject: Subject,
        key: Hashable,
        request: Request,
        sources: Sources,
        changed: frozenset[int],
        waiting: frozenset[int],
        targets: dict[int, int],
    ) -> Prepared:
        addresses: dict[tuple[int, str], int] = {}
        buffer = source_buffer(subject.collective)
        if self._rank in changed:
            addresses.update({(rank, Buffer.OUTPUT): address for rank, address in targets.items()})
        for rank, source in enumerate(sources):
            if source is not None and rank != self._rank:
                addresses[rank, buffer] = self._mappings.start((rank, source[0])) + source[1]
        addresses.update({(self._rank, name): request.region(name).address for name in BUFFERS})
        return self._confirming.prepare(key, subject.text, subject.collective, addresses, changed, waiting)

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


def most_bytes(collective: Collective) -> int:
    """That go from one rank to another."""
    return max(chunk.nbytes for chunk in collective.chunks() if chunk.src_rank != chunk.dst_rank)
