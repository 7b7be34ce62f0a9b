"""The path of every call: number it, check its arguments, agree with the peers, prepare a program, start it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from sidelane import log
from sidelane.collectives.arguments import Arguments, Request
from sidelane.collectives.call_cache import (
    CallEntry,
    Key,
    PlannedCall,
    PreparedCall,
    SettledCall,
    Shape,
    ShapeProgram,
    shape_of,
)
from sidelane.collectives.call_forms import CallForm, SingleCall
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import generation
from sidelane.collectives.pool_places import PLACES, Outcomes, PoolPlaces, PostedPlaces
from sidelane.collectives.prepare import Preparer
from sidelane.collectives.repeat import Repeats
from sidelane.collectives.work import Work
from sidelane.errors import UnavailableError
from sidelane.execute.base import NO_STREAM, Place
from sidelane.memory.posts import MOST_TEXT_BYTES, SPLITS, PostedCall
from sidelane.native import load_replays_soon
from sidelane.program.shape import Beside, check_beside

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """The state of one call while :meth:`CallPath.run` makes it.

    Attributes:
        number: number among the calls of the lane; a new one if the ranks had to map memory for the call.
        asked, variant, beside, async_op, remember: the caller's arguments; see :meth:`CallPath.run`.
        place: the caller's stream, and whether it is captured.
        key: cache key that equal calls share.
        is_pooled: a tensor lies in a pool.
        signature: text that the ranks compare.
        prepared: the loaded call, once there is one.
        shape, program: the call without its addresses, and the program that calls of this shape run.
        planned: the plan, for a call that is known neither by its tensors nor by its shape.
        places: places of this rank's tensors in pools, for the ranks to compare.
        comes_again: the same call on the same tensors was made before.
    """

    number: int
    asked: CallForm
    variant: str
    beside: Beside | None
    async_op: bool
    remember: bool
    place: Place = NO_STREAM
    key: Key = ()
    is_pooled: bool = False
    signature: str = ""
    prepared: PreparedCall | None = None
    shape: Shape | None = None
    program: ShapeProgram | None = None
    planned: PlannedCall | None = None
    places: PostedPlaces | None = None
    comes_again: bool = False


class CallPath:
    """The path that the calls of one lane take.

    Attributes:
        calls: numbers the calls and runs them.
        arguments: checks the tensors of callers.
        preparer: loads programs for calls.
        repeats: calls that compiled code repeats; None as long as there is no compiled code.
        places: compares the places of tensors in pools; None without peers.
    """

    def __init__(self, calls: Calls, arguments: Arguments, preparer: Preparer) -> None:
        self.calls, self.arguments, self.preparer, self._cache = calls, arguments, preparer, preparer.cache
        self.repeats: Repeats | None = None
        # With debug, every call is compared with the peers'.
        gains = calls.config.native and not calls.config.debug
        self._host_path = calls.backend.host_path() if gains else None
        self.places = PoolPlaces(arguments.heap, arguments.compared) if arguments.world_size > 1 else None
        self._find_code()

    def _find_code(self) -> None:
        """Take up compiled code once there is some: the first process of a user compiles it beside its first calls.

        No rank can tell which of them have it: a call posts and does the same in Python.
        """
        path, found = self._host_path, None
        if path is not None and (found := load_replays_soon()) is not None:
            self._host_path = None
            if found.module is not None:
                self.repeats = Repeats.of(found.module, path, self.calls, self.arguments, self.preparer)

    def code(self) -> Repeats | None:
        """Return compiled code's calls; None as long as there is no compiled code."""
        if self._host_path is not None:
            self._find_code()
        return self.repeats

    def run(
        self, asked: CallForm, *, variant: str, beside: Beside | None, async_op: bool, remember: bool = False
    ) -> Work | None:
        """Make a call.

        Args:
            asked: kind and arguments of the call.
            variant: see ``Communicator.all_gather``.
            beside: see ``Communicator.all_gather``.
            async_op: see ``Communicator.all_gather``.
            remember: compiled code does not know the call, and may make it when it comes again.

        Raises:
            Exception: as ``Communicator.all_gather`` does.
        """
        calls = self.calls
        if self._host_path is not None:
            self._find_code()
        call = _Call(calls.number(), asked, variant, beside, async_op, remember)
        try:  # plainly, as in Calls.run: every call comes here, and a context manager costs a microsecond
            try:
                self._look_up(call)
            except Exception as error:
                calls.refuse(call.number, asked.name, error)
                raise
            self._agree(call)
            prepared = call.prepared or self._prepare(call)
            work = calls.run(prepared, call.number, async_op, asked.tensors, asked.written(), call.place)
            if remember and self.repeats is not None:
                self._remember(call, prepared, self.repeats)
        except KeyboardInterrupt as error:
            calls.fail(error)
            raise
        return work

    def _look_up(self, call: _Call) -> None:
        """Find a call that was prepared with the same arguments or shape; else plan it."""
        asked, variant, place = call.asked, call.variant, self.calls.backend.place()
        key: Key = (asked.name, variant, call.beside, asked.details, place[1], generation(), asked.identities())
        pooled = self.arguments.pooled(asked.tensors)
        if pooled is not None:  # addresses do not tell whether a tensor in a pool is symmetric
            key = (*key, pooled)
        call.place, call.key, call.is_pooled = place, key, pooled is not None
        entry = self._cache.get(key)
        if entry is not None and entry.prepared is not None and (pooled is None or _is_final(entry, call.async_op)):
            call.prepared, call.signature, call.comes_again = entry.prepared, entry.prepared.signature, True
            return
        if pooled is None and not place[1] and isinstance(asked, SingleCall):
            call.shape = shape_of(self.arguments, key, asked.tensors)
            call.program = None if call.shape is None else self.preparer.program_of(call.shape)
            if call.program is not None:
                call.signature = call.program.signature
                return
        call.planned = planned = self._plan(call)
        call.signature = planned.signature
        # An asynchronous call does not wait for the hosts of its peers, unless it exchanges sizes anyway.
        if self.places is not None and planned.compares and (asked.exchanges or not call.async_op):
            room = MOST_TEXT_BYTES - 1 - len(planned.signature + SPLITS + planned.exchanged + PLACES)
            call.places = self.places.posted(planned.requests, asked.tensors, room)

    def _plan(self, call: _Call) -> PlannedCall:
        """Return the plan of a call, checked here if it is new. Raises TypeError or ValueError for wrong arguments."""
        asked = call.asked
        entry = self._cache.entry(call.key)
        if entry.planned is None:
            asked.check_variant(call.variant, self.calls.backend.abilities)
            beside = self.hint(asked.name, call.beside)
            requests = asked.requests(self.arguments)
            agreement = asked.agreement(requests, call.variant, call.place[1], beside)
            signature, exchanged = asked.posted(agreement)
            compares = self.places is not None and self.places.compares(requests, asked.tensors)
            entry.planned = PlannedCall(requests, agreement, signature, exchanged, compares)
        return entry.planned

    def _agree(self, call: _Call) -> None:
        """Post the call to the peers. What is new, or needs more than its signature, is agreed on with them."""
        planned = call.planned
        if planned is not None and (call.asked.exchanges or call.places is not None):
            self._exchange(call, planned)
        else:
            is_new = planned is not None and not self.preparer.planner.known(planned.agreement)
            self.calls.announce(call.number, call.signature, compares=is_new)

    def _exchange(self, call: _Call, planned: PlannedCall) -> None:
        """Exchange split sizes and places in pools with the peers, and prepare the call that follows from them."""
        calls, places = self.calls, call.places
        shown = "" if places is None else PLACES + places.text
        calls.control.post_call(call.number, call.signature + SPLITS + planned.exchanged + shown)
        posts = calls.posts(call.number)
        settled = self._cache.entry(call.key).settled
        if settled is None or settled.posts != posts:
            settled = self._cache.entry(call.key).settled = self._settle(call, planned, posts)
        if self.places is not None and places is not None:
            self.places.note(places, settled.outcomes)
        call.prepared = settled.prepared

    def _settle(self, call: _Call, planned: PlannedCall, posts: Sequence[PostedCall]) -> SettledCall:
        """Compare the posts of all ranks, and prepare the call that follows from them."""
        asked = call.asked.settled(self.calls.control, call.number, posts)
        key, requests = call.key, planned.requests
        if asked is not call.asked:
            key, requests = (*key, asked.details), asked.requests(self.arguments)
        reached: list[Request] | None = None
        outcomes: Outcomes = ()
        if self.places is not None and call.places is not None:
            texts = [post.differing.partition(PLACES)[2] for post in posts]
            reached, outcomes = self.places.settle(texts, requests)
        if reached is not None:
            key, requests = (*key, tuple(part.places for part in reached)), tuple(reached)
        prepared = self._cache.prepared(key)
        if prepared is None:
            agreement = asked.agreement(requests, call.variant, call.place[1], planned.agreement.beside)
            with self.calls.making_ready():
                prepared = self.preparer.prepare(agreement, requests, key)
        return SettledCall(posts, prepared, outcomes)

    def _prepare(self, call: _Call) -> PreparedCall:
        """Prepare a call that is not known yet: by its shape, or from its plan."""
        if call.shape is None or call.program is None:
            planned = call.planned
            assert planned is not None
            with self.calls.making_ready():
                return self.preparer.prepare(planned.agreement, planned.requests, call.key, call.shape)
        try:
            again = call.remember and self.repeats is not None and self.repeats.comes_again
            prepared, call.comes_again = self.preparer.prepare_at(call.program, call.shape, call.key, comes_again=again)
        except Exception:
            with self.calls.making_ready():
                raise
        return prepared

    def _remember(self, call: _Call, prepared: PreparedCall, repeats: Repeats) -> None:
        """Let compiled code remember a call that may come again, by its addresses or by its shape."""
        if call.is_pooled:
            return  # compiled code knows tensors by their addresses only
        if call.comes_again:
            repeats.remember(call.key, prepared, call.place, asked=call.asked.repeated_as)
        elif call.shape is not None and call.program is not None:
            repeats.remember_shape(call.key, call.shape, call.program, prepared, call.place)

    def agree(self, name: str, check: Callable[[], tuple[T, str]]) -> tuple[int, T]:
        """Start an action that all ranks take together outside of graphs, such as loading a program.

        Args:
            name: name of the action, for errors.
            check: returns this rank's result, and the signature that must be the same on all ranks; it may raise.

        Returns:
            The number of the call, and the result of ``check``.

        Raises:
            UnavailableError: inside a capture.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        calls = self.calls
        call = calls.number()
        with calls.telling_refusals(call, name):
            if calls.backend.place()[1]:
                raise UnavailableError(
                    f"{name}: not while a graph is captured: nothing can be allocated or agreed on there"
                )
            found, signature = check()
        calls.announce(call, signature, compares=True)
        log.calls.info("rank %d: %s", calls.control.rank, signature)
        return call, found

    def hint(self, name: str, beside: Beside | None) -> Beside:
        """Return what runs next to the call, by its caller or by the settings. Raises ValueError for unknown names."""
        hint = self.calls.config.beside if beside is None else beside
        check_beside(name, hint)
        return hint


def _is_final(entry: CallEntry, async_op: bool) -> bool:
    """Return True if a call on tensors in pools runs as it did before: the ranks need not compare their places."""
    return async_op or (entry.planned is not None and not entry.planned.compares)
