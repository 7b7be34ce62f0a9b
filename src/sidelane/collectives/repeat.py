"""Repeated calls on GPUs, by way of compiled code (``native/replay.c``): what it is told, and when."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch

from sidelane.collectives import heap
from sidelane.collectives.arguments import Arguments
from sidelane.collectives.asked import Asked
from sidelane.collectives.calls import Calls, count_writes
from sidelane.collectives.prepare import Prepared, Preparer
from sidelane.collectives.shaped import Shape, Shaped, all_ordinary
from sidelane.execute.base import Place
from sidelane.memory.ordinary import Standing
from sidelane.native import Effect, Note, load_replays

MOST_TENSORS = 128
"""Of a call that is remembered, in all of its lists: ``MOST_TENSORS`` of ``native/replay.c``."""

MOST_MOVED = 2
"""Tensors of a call that is remembered by its shape."""

MOST_TOLD = 1024
"""Shapes that compiled code was told of, and places of callers with them; then it is told again."""


Guard = tuple[object, str, object]
"""Object, attribute, and the very object that lets a call pass."""


class TrackedRepeat(NamedTuple):
    """A tracked call (``learning``) as compiled code makes it again: see ``native/replay.c``.

    Attributes:
        tracked: guards; what begins it, told its signature and its post; these; whether it goes ahead; its memory has
            not been freed.
        turn: of the period that it goes ahead by: object, attribute, what it is in the call's turn, what it is next.
        notes: to take.
        holds: tells if nothing of it has been forgotten yet.
    """

    tracked: tuple[tuple[Guard, ...], Callable[[Any, bytes], object], object, bytes, bool, Standing]
    turn: tuple[object, str, int, int] | None
    notes: tuple[Note, ...]
    holds: Callable[[], bool]


class Repeats:
    """Remembers calls that were made twice, and tracked ones that were made once, to make them again.

    Threads may share it, as they do a communicator.

    Args:
        calls: of the communicator.
        arguments: likewise.
        preparer: likewise.
        replay: made by ``native/replay.c``.
        submitting: held while a call is made again.

    Attributes:
        submitting: as given.
        run: makes a call again: ``run(kind, tensors, details, variant, beside)``. With nothing done: False if it is not
            one that is remembered, or not the same any more; None if it is not its time: after a failure, inside a
            capture, behind work on another stream, or while another thread submits. Then Python makes it, or says what
            is wrong.
    """

    def __init__(
        self, calls: Calls, arguments: Arguments, preparer: Preparer, replay: Any, submitting: threading.Lock
    ) -> None:
        self.submitting = submitting
        self._calls, self._arguments, self._preparer = calls, arguments, preparer
        self._replay = replay
        self.run = replay.run
        self._told: set[Hashable] = set()
        preparer.keepers.append(self.forget)

    @property
    def hits(self) -> int:
        """How many calls that go ahead were made so."""
        return int(self._replay.hits)

    def forget(self) -> None:
        """Let go of all calls."""
        self._told.clear()
        self._replay.forget()

    @property
    def comes_again(self) -> bool:
        """True if the last call was not made by its shape because it was before: it is worth remembering."""
        return bool(self._replay.again)

    @property
    def moved(self) -> int:
        """How many calls were made by their shape."""
        return int(self._replay.moved)

    @property
    def tracked(self) -> int:
        """How many calls from which the ranks learn were made so, staged or ahead."""
        return int(self._replay.tracked)

    @staticmethod
    def of(calls: Calls, arguments: Arguments, preparer: Preparer) -> Repeats | None:
        """For a communicator; None where there is no use in it, or no compiler."""
        path = calls.backend.host_path()
        # With debug, every call is compared with the peers'.
        if path is None or calls.config.debug or not calls.config.native:
            return None
        module = load_replays().module
        if module is None:
            return None
        control, posts, questions = calls.control, calls.control.own_posts(), path.questions
        guards = (
            (calls, "closed", False),
            (calls, "failure", None),
            (calls, "armed", None),
            *path.guards,
        )
        replay = module.Replay(
            guards,
            *(questions.stream_of, questions.capturing, questions.current_device, questions.device),
            *(heap.generation_cell, path.last, (calls, "numbers")),
            *(tuple(posts.records), tuple(record.address for record in posts.records), posts.begun_address),
            *(control, control.post_call, posts.lock, path.lock.acquire, path.lock.release),
            *(count_writes, torch.Tensor),
        )
        return Repeats(calls, arguments, preparer, replay, path.lock)

    def knows_by_address(self, key: tuple[Hashable, ...]) -> bool:
        """True for a call that can be remembered, as far as its tensors go."""
        _, _, _, _, frozen, _, identities = key
        tensors = cast("tuple[tuple[Any, ...], ...]", identities)
        return not frozen and 0 < len(tensors) <= MOST_TENSORS and all(map(_is_ordinary, tensors))

    def remember(
        self,
        key: tuple[Hashable, ...],
        prepared: Prepared,
        place: Place,
        *,
        asked: Asked | None = None,
        tracked: TrackedRepeat | None = None,
    ) -> None:
        """Remember a call that has just been made, if it will be made the same way again.

        Args:
            key: kind, variant, beside, details, frozen, generation, identities of the tensors.
            prepared: what it ran as.
            place: where.
            asked: of a call with lists, what was; ``details`` says more than its own then.
            tracked: of one from which the ranks learn.
        """
        if not self.knows_by_address(key):
            return
        kind, variant, beside, details, _, _, tensors_asked = key
        identities = cast("tuple[tuple[Any, ...], ...]", tensors_asked)
        lists = 0
        if asked is not None:
            details, lists = asked.details, len(asked.given)
        repetition = prepared.loaded.repetition(place)
        signature = prepared.signature
        payload = self._calls.control.payload(signature)
        if repetition is None or payload is None:
            return
        turn = repetition.turn
        tensors = tuple(identity[:3] for identity in identities)
        # The number itself, not an equal one: it is compared by identity.
        generation = heap.generation_cell[0]
        if generation != key[5]:
            return  # memory was allocated since
        if tracked is not None and tracked.turn is not None:
            assert turn is None, "programs of calls that go ahead take no turns of their own"
            turn = tracked.turn
        notes = (*repetition.notes, (Effect.SET, self._calls, "last_choice", prepared.choice))
        if tracked is not None:
            notes = (*tracked.notes, *notes)
        self._replay.remember(
            *(kind, tensors, lists, details, variant, beside, generation, turn, place[0]),
            *(signature, payload, repetition.steps, repetition.words, notes, repetition.failed),
            *(None, prepared, None, None if tracked is None else tracked.tracked),
        )
        if tracked is not None and tracked.turn is not None:
            holds = tracked.holds()
        else:
            holds = self._preparer.recall(key) is prepared
        if not holds:  # another thread has moved staging, maybe before it was remembered
            self.forget()

    def remember_shape(
        self, key: tuple[Hashable, ...], shape: Shape, shaped: Shaped, prepared: Prepared, place: Place
    ) -> None:
        """Remember the shape of a call that was made by it: it is made again wherever its tensors lie.

        Args:
            key: as in :meth:`remember`.
            shape: of the call.
            shaped: what it runs as.
            prepared: that, at its addresses.
            place: where.
        """
        if not shape.ordinary or not self.knows_by_address(key) or len(shape.addresses) > MOST_MOVED:
            return
        turn = None if prepared.choice.candidate.takes_turns is False else self._preparer.turn
        told = (shape.key, place, turn)
        if told in self._told:
            return
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        self._told.add(told)
        repetition = prepared.loaded.movable(place, [buffer for buffer, _ in shaped.places])
        payload, generation = self._calls.control.payload(prepared.signature), heap.generation_cell[0]
        if repetition is None or payload is None or generation != key[5]:
            return
        tensor_of = dict(shaped.places)
        rows = tuple((tensor_of[each.buffer], *each[1:]) for each in repetition.followers)
        kind, variant, beside, details, _, _, identities = key
        tensors = tuple(identity[:3] for identity in cast("tuple[tuple[Any, ...], ...]", identities))
        notes = (*repetition.notes, (Effect.SET, self._calls, "last_choice", prepared.choice))
        admits = functools.partial(all_ordinary, self._arguments)
        self._replay.remember(
            *(kind, tensors, 0, details, variant, beside, generation, repetition.turn, place[0]),
            *(prepared.signature, payload, repetition.steps, repetition.words, notes, repetition.failed),
            *(None, prepared, (admits, shape.distance is not None, shape.distance or 0, rows)),
        )
        if not self._preparer.knows_shape(shape, shaped):  # another thread has moved staging
            self.forget()


def _is_ordinary(identity: tuple[Any, ...]) -> bool:
    """True for what ``collectives/arguments.py`` says of a tensor that has an address, is contiguous and real, and does
    not negate what it views.
    """
    match identity:
        case (address, _, dtype, True, False) | (address, _, dtype, True):
            return bool(address) and not dtype.is_complex
    return False
