"""The path of every call: number it, check its arguments, agree with the peers, prepare a program, start it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from sidelane.collectives.agreement import OFFER, compare
from sidelane.collectives.arguments import Arguments, Request
from sidelane.collectives.call_forms import AnyRequest, CallForm, SingleCall
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import generation
from sidelane.collectives.learning.board import LearningBoard
from sidelane.collectives.learning.mappings import default_limit_bytes
from sidelane.collectives.learning.protocol import Learning
from sidelane.collectives.list_calls import ListRequest
from sidelane.collectives.offers import Offer, Outcomes
from sidelane.collectives.plan import AnyAgreement
from sidelane.collectives.pool_tensors import PooledMemory
from sidelane.collectives.prepare import PreparedCall, Preparer
from sidelane.collectives.reach import Reach
from sidelane.collectives.repeat import Repeats
from sidelane.collectives.shape_cache import Shape, ShapeEntry, shape_of
from sidelane.collectives.uneven import UnevenCall
from sidelane.collectives.work import Work
from sidelane.errors import UnavailableError
from sidelane.execute.base import NO_STREAM, Place
from sidelane.memory.posts import MOST_TEXT_BYTES, SPLITS, PostedCall
from sidelane.program.shape import Beside, check_beside

T = TypeVar("T")
Key = tuple[Hashable, ...]

MOST_PLANNED = 1024
"""Largest number of remembered plans of calls whose programs depend on the memory that peers offer each time."""


class PlannedCall(NamedTuple):
    """A checked call before this rank has read the posts of its peers.

    Attributes:
        request: this rank's view of the call.
        agreement: the part that must be the same on all ranks.
        signature: text of the agreement, which the ranks compare.
        compares: see ``Reach.compares``.
    """

    request: AnyRequest
    agreement: AnyAgreement
    signature: str
    compares: bool


class Settled(NamedTuple):
    """The result of a call in which each rank posted an offer. The same posts lead to the same result again.

    Attributes:
        posts: posts of all ranks.
        drops: see :class:`Reach`.
        key: key of the prepared call that ran.
        outcomes: see ``Reach.note``.
    """

    posts: Sequence[PostedCall]
    drops: int
    key: Hashable
    outcomes: Outcomes


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """The state of one call while :meth:`CallPath.run` makes it.

    Attributes:
        number: number among the calls of the lane; a new one if the ranks had to map memory for the call.
        asked, variant, beside, async_op: the caller's arguments; see :meth:`CallPath.run`.
        remember: compiled code is to remember the call by its addresses.
        may_repeat: initial value of ``remember``; False for tensors in pools.
        place: the caller's stream, and whether it is captured.
        key: cache key that equal calls share.
        prepared: the loaded call, once there is one.
        planned: the plan that the ranks must still agree on; None for a known call.
        shape, shaped: the call without its addresses, and the program that calls of this shape run.
        offer: memory of this rank that peers may reach.
        is_tracked: the ranks learn addresses from this call.
        by_shape: compiled code is to remember the call by its shape.
    """

    number: int
    asked: CallForm
    variant: str
    beside: Beside | None
    async_op: bool
    remember: bool
    may_repeat: bool = False
    place: Place = NO_STREAM
    key: Key = ()
    prepared: PreparedCall | None = None
    planned: PlannedCall | None = None
    shape: Shape | None = None
    shaped: ShapeEntry | None = None
    offer: Offer | None = None
    is_tracked: bool = False
    by_shape: bool = False

    def __post_init__(self) -> None:
        self.may_repeat = self.remember


class CallPath:
    """The path that the calls of one lane take.

    Attributes:
        calls: numbers the calls and runs them.
        arguments: checks the tensors of callers.
        preparer: loads programs for calls.
        repeats: calls that compiled code repeats; None if there is no compiled code.
        reach: offers of pools and ordinary memory to peers, on GPUs in captures only; None without peers.
        learning: protocol for calls on ordinary memory that wait for no peer's host; None if it is off.

    Args:
        board: memory in which ranks post the addresses that they learn from; None if they do not learn.
    """

    def __init__(
        self, calls: Calls, arguments: Arguments, preparer: Preparer, board: LearningBoard | None = None
    ) -> None:
        self.calls, self.arguments, self.preparer = calls, arguments, preparer
        self.repeats = Repeats.of(calls, arguments, preparer)
        self._mapped = mapped = board is None and calls.backend.hosts_meet and calls.config.map_memory is not False
        self.reach: Reach | None = None
        if arguments.world_size > 1:
            offers = mapped or (board is not None and calls.config.map_memory is True)
            ordinary = calls.backend.ordinary if offers else None
            memory = PooledMemory(arguments.heap, arguments.rank, ordinary)
            self.reach = Reach(calls, memory, arguments.compared, captures_only=not mapped)
        self.learning: Learning | None = None
        if board is not None and calls.backend.ordinary is not None:
            pool_at, limit_bytes = arguments.heap.pool_at, calls.config.mapped_bytes
            self.learning = Learning(
                *(calls, preparer, board, calls.backend.ordinary),
                default_limit_bytes(arguments.device) if limit_bytes is None else limit_bytes,
                *(lambda tensor: pool_at(tensor.data_ptr()) is not None, self.repeats),
            )
        self._planned: dict[Hashable, PlannedCall] = {}
        self._settled: dict[Hashable, Settled] = {}

    def run(
        self, asked: CallForm, *, variant: str, beside: Beside | None, async_op: bool, remember: bool = False
    ) -> Work | None:
        """Make a call.

        Args:
            asked: kind and arguments of the call.
            variant: see ``Communicator.all_gather``.
            beside: see ``Communicator.all_gather``.
            async_op: see ``Communicator.all_gather``.
            remember: compiled code may make the call when it comes again.

        Raises:
            Exception: as ``Communicator.all_gather`` does.
        """
        calls = self.calls
        call = _Call(calls.number(), asked, variant, beside, async_op, remember)
        # Plain handlers here and in Calls.run: every call comes here, and a context manager costs a microsecond.
        try:
            self._ask(call)
        except Exception as error:
            calls.refuse(call.number, asked.name, error)
            raise
        except KeyboardInterrupt as error:
            calls.fail(error)
            raise
        try:
            self._announce_or_settle(call)
            if self.learning is not None and not call.place[1]:
                self._learn(call, self.learning)
            prepared = call.prepared or self._made_ready(call)
        except KeyboardInterrupt as error:
            calls.fail(error)
            raise
        work = calls.run(prepared, call.number, async_op, asked.tensors, asked.written(), call.place)
        if call.offer is not None and call.place[1]:
            self._guard(call, call.offer)
        if (call.remember or call.by_shape) and self.repeats is not None:
            try:
                self._remember(call, prepared, self.repeats)
            except KeyboardInterrupt as error:
                calls.fail(error)
                raise
        return work

    def _ask(self, call: _Call) -> None:
        """Find a call that was prepared with the same arguments or shape; else plan the call and its offer."""
        asked, place = call.asked, self.calls.backend.place()
        call.place = place
        call.key, call.prepared = self._recall(asked, call.variant, call.beside, place)
        pooled = self.arguments.pooled(asked.tensors)
        if pooled is not None:
            # Compiled code knows tensors by their addresses only, which do not tell whether one in a pool is symmetric.
            call.key, call.remember, call.may_repeat = (*call.key, pooled), False, False
            before = self._planned.get(call.key)
            compares = False in pooled and not call.async_op and (before is None or before.compares)
            call.prepared = None if compares else self.preparer.recall(call.key)
        if call.prepared is not None:
            return
        if pooled is None and not (self._mapped or place[1]) and isinstance(asked, SingleCall):
            call.shape = shape_of(self.arguments, call.key, asked.tensors)
            call.shaped = None if call.shape is None else self.preparer.shaped(call.shape)
            if call.shaped is not None:
                return
        call.planned = planned = self._plan(call)
        if not call.async_op:  # an asynchronous call does not wait for the hosts of its peers
            call.offer = self._offer(asked, planned, place[1])
        if pooled is not None and not planned.compares:
            self._keep(call.key, planned)

    def _announce_or_settle(self, call: _Call) -> None:
        """Post the call to the peers. If this rank offers memory, agree with them on the memory that they reach."""
        known = call.prepared or call.shaped
        if known is not None:
            self.calls.announce(call.number, known.signature, compares=False)
            return
        call.remember = False  # only a call that comes again is remembered
        planned = call.planned
        assert planned is not None
        if call.offer is None:
            is_new = not self.preparer.known(planned.agreement)
            self.calls.announce(call.number, planned.signature, compares=is_new)
        else:
            call.number, call.prepared = self._settle(call.number, call.key, call.asked, planned, call.offer)

    def _learn(self, call: _Call, learning: Learning) -> None:
        """Exchange addresses with the peers, if the ranks learn from this call, and use the program that follows."""
        known = call.prepared or call.shaped or call.planned
        assert known is not None
        call.is_tracked = learning.tracks(known.signature, lambda: self._plan(call).agreement)
        if not call.is_tracked:
            return
        request: Callable[[], AnyRequest]
        if call.shape is not None and call.shaped is not None:
            request = functools.partial(call.shaped.asked, call.shape.addresses)
        else:
            request = functools.partial(self._request, call)
        try:  # as in run: every tracked call of Python's comes here
            learnt = learning.attend(known.signature, call.number, call.key, request, call.asked.tensors, call.async_op)
        except BaseException:
            with self.calls.making_ready():
                raise
        if learnt is not None:
            call.prepared, call.remember = learnt, call.may_repeat

    def _made_ready(self, call: _Call) -> PreparedCall:
        """Prepare a call that is not known yet: by its shape, or from its plan."""
        shape, shaped, planned = call.shape, call.shaped, call.planned
        if shape is None or shaped is None:
            assert planned is not None
            return self._prepare(planned.agreement, planned.request, call.key, shape)
        try:
            again = call.remember and self.repeats is not None and self.repeats.comes_again
            prepared, again = self.preparer.prepare_shaped(shaped, shape, call.key, comes_again=again)
        except Exception:
            with self.calls.making_ready():
                raise
        call.by_shape = call.remember and not (again or call.is_tracked)
        call.remember = call.remember and again
        return prepared

    def _guard(self, call: _Call, offer: Offer) -> None:
        """Watch the memory of a captured call if peers have mapped it."""
        if self.reach is not None and self._settled[call.key].key != call.key:
            stands = functools.partial(self.reach.stand, offer.allocations)
            self.calls.guard_captured(call.asked.name, call.asked.tensors, stands)

    def _remember(self, call: _Call, prepared: PreparedCall, repeats: Repeats) -> None:
        """Let compiled code remember a call that may come again, by its addresses or by its shape."""
        tracked = None
        if call.by_shape and call.shape is not None and call.shaped is not None:
            repeats.remember_shape(call.key, call.shape, call.shaped, prepared, call.place)
        elif call.is_tracked and self.learning is not None and repeats.knows_by_address(call.key):
            tracked = self.learning.again(prepared.signature, call.key, prepared)
        if call.remember and (tracked is not None or not call.is_tracked):
            repeats.remember(call.key, prepared, call.place, asked=call.asked.repeated_as, tracked=tracked)

    def run_exchanged(self, uneven: UnevenCall, *, variant: str, beside: Beside | None, async_op: bool) -> Work | None:
        """Make a call whose ranks exchange split sizes each time. Raises as ``Communicator.all_to_all`` does."""
        calls = self.calls
        call = calls.number()
        try:
            with calls.telling_refusals(call, uneven.name):
                uneven.check_variant(variant, calls.backend.abilities)
                hint = self.hint(uneven.name, beside)
                place = calls.backend.place()
                text = uneven.text(self.arguments, variant, place[1], hint)
                offer = None
                if self.reach is not None:
                    room = MOST_TEXT_BYTES - 1 - len(text) - len(OFFER)
                    parts = (uneven.outline(self.arguments),)
                    offer = self.reach.offer(parts, uneven.tensors, room, place[1])
            calls.control.post_call(call, text + (OFFER + offer.text if offer else ""))
            posts = calls.posts(call)
            asked = uneven.settled(calls.control, call, posts)
            request = asked.request(self.arguments)
            addresses: Hashable = ()
            if self.reach is not None and offer is not None:
                texts = [post.differing.partition(OFFER)[2] for post in posts]
                signature = text.partition(SPLITS)[0]
                call, reached, outcomes = self.reach.settle(call, signature, offer, texts, (request,))
                if reached is not None:
                    request, addresses = reached[0], _where(reached)
                self.reach.note(offer, outcomes)
            key = (*self._recall(asked, variant, hint, place)[0], addresses, self.arguments.pooled(asked.tensors))
            prepared = self.preparer.recall(key)
            if prepared is None:
                prepared = self._prepare(asked.agreement(request, variant, place[1], hint), request, key)
        except KeyboardInterrupt as error:
            calls.fail(error)
            raise
        work = calls.run(prepared, call, async_op, asked.tensors, asked.written(), place)
        if offer is not None and place[1] and self.reach is not None and addresses:
            calls.guard_captured(asked.name, asked.tensors, functools.partial(self.reach.stand, offer.allocations))
        return work

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
        return call, found

    def _recall(
        self, asked: CallForm, variant: str, beside: Beside | None, place: Place
    ) -> tuple[Key, PreparedCall | None]:
        """Return the cache key of a call, and the call that was prepared under this key, if any."""
        key = (asked.name, variant, beside, asked.details, place[1], generation(), asked.identities())
        return key, self.preparer.recall(key)

    def hint(self, name: str, beside: Beside | None) -> Beside:
        """Return what runs next to the call, by its caller or by the settings. Raises ValueError for unknown names."""
        hint = self.calls.config.beside if beside is None else beside
        check_beside(name, hint)
        return hint

    def _plan(self, call: _Call) -> PlannedCall:
        """Return the plan of a call, checked here if it is new. Raises TypeError or ValueError for wrong arguments."""
        planned = self._planned.get(call.key)
        if planned is None:
            asked = call.asked
            asked.check_variant(call.variant, self.calls.backend.abilities)
            hint = self.hint(asked.name, call.beside)
            request = asked.request(self.arguments)
            agreement = asked.agreement(request, call.variant, call.place[1], hint)
            compares = self.reach is not None and self.reach.compares(_parts(request), asked.tensors)
            planned = PlannedCall(request, agreement, agreement.text(), compares)
        return planned

    def _offer(self, asked: CallForm, planned: PlannedCall, captured: bool) -> Offer | None:
        """Return the memory of this rank that its peers may reach in this call; None if it offers none."""
        if self.reach is None:
            return None
        room = MOST_TEXT_BYTES - 1 - len(planned.signature) - len(SPLITS)
        return self.reach.offer(_parts(planned.request), asked.tensors, room, captured)

    def _settle(
        self, call: int, key: Key, asked: CallForm, planned: PlannedCall, offer: Offer
    ) -> tuple[int, PreparedCall]:
        """Agree with the peers on the call and on the memory that they reach. Return its final number and program."""
        assert self.reach is not None
        request, agreement, signature, _ = self._keep(key, planned)
        self.calls.control.post_call(call, signature + SPLITS + offer.text)
        posts = self.calls.posts(call)
        settled = self._settled.get(key)
        same = settled is not None and settled.posts == posts and settled.drops == self.reach.drops
        if settled is not None and same:
            prepared = self.preparer.recall(settled.key)
            if prepared is not None:
                self.reach.hold(offer)
                self.reach.note(offer, settled.outcomes)
                return call, prepared
        compare(self.calls.control, call, posts)
        texts = [post.differing for post in posts]
        call, reached, outcomes = self.reach.settle(call, signature, offer, texts, _parts(request))
        if reached is not None:
            request = reached[0] if isinstance(request, Request) else ListRequest(tuple(reached))
            agreement = asked.agreement(request, agreement.variant, agreement.frozen, agreement.beside)
        full = key if reached is None else (*key, _where(reached))
        self._settled[key] = Settled(posts, self.reach.drops, full, outcomes)
        self.reach.note(offer, outcomes)
        return call, self.preparer.recall(full) or self._prepare(agreement, request, full)

    def _request(self, call: _Call) -> AnyRequest:
        """Return the request of a call, and remember its plan."""
        return self._keep(call.key, call.planned or self._plan(call)).request

    def _keep(self, key: Key, planned: PlannedCall) -> PlannedCall:
        """Remember a plan; the oldest one is forgotten if there are too many."""
        if key not in self._planned and len(self._planned) >= MOST_PLANNED:
            oldest = next(iter(self._planned))
            del self._planned[oldest]
            self._settled.pop(oldest, None)
        self._planned[key] = planned
        return planned

    def _prepare(
        self, agreement: AnyAgreement, request: AnyRequest, key: Hashable, shape: Shape | None = None
    ) -> PreparedCall:
        with self.calls.making_ready():
            return self.preparer.prepare(agreement, request, key, shape)


def _where(reached: Sequence[Request]) -> Hashable:
    """Return, as a cache key, the places at which peers reach the tensors: own addresses do not determine them."""
    return tuple((part.input.place, part.input.reached, part.output.place, part.output.reached) for part in reached)


def _parts(request: AnyRequest) -> tuple[Request, ...]:
    return (request,) if isinstance(request, Request) else request.parts
