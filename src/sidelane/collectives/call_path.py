"""The path that every call takes: its number, what is asked, what the ranks agree on, what is made of it, its start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from sidelane.collectives.agree import OFFER, compare
from sidelane.collectives.arguments import Arguments, Request
from sidelane.collectives.asked import AnyRequest, Form, SingleCall
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import generation
from sidelane.collectives.learning.board import LearningBoard
from sidelane.collectives.learning.mappings import default_limit_bytes
from sidelane.collectives.learning.protocol import Learning
from sidelane.collectives.listed import ListRequest
from sidelane.collectives.offered import Offer, Outcomes
from sidelane.collectives.plan import AnyAgreement
from sidelane.collectives.pooled import PooledMemory
from sidelane.collectives.prepare import Prepared, Preparer
from sidelane.collectives.reach import Reach
from sidelane.collectives.repeat import Repeats
from sidelane.collectives.shaped import Shape, Shaped, shape_of
from sidelane.collectives.uneven import UnevenCall
from sidelane.collectives.work import Work
from sidelane.errors import UnavailableError
from sidelane.execute.base import NO_STREAM, Place
from sidelane.memory.posts import MOST_TEXT_BYTES, SPLITS, PostedCall
from sidelane.program.shape import Beside, check_beside

T = TypeVar("T")
Key = tuple[Hashable, ...]

MOST_PLANNED = 1024
"""Calls of which it is remembered what is asked, while what they run as depends on what peers offer each time."""


class Planned(NamedTuple):
    """A call before its peers have been heard; ``signature`` is of the agreement, ``compares`` as in ``Reach``."""

    request: AnyRequest
    agreement: AnyAgreement
    signature: str
    compares: bool


class Settled(NamedTuple):
    """What came of a call of which each rank tells its part every time: the same, if all of them tell the same again.

    Attributes:
        posts: of all ranks.
        drops: see :class:`Reach`.
        key: of what it ran as.
        outcomes: see ``Reach.note``.
    """

    posts: Sequence[PostedCall]
    drops: int
    key: Hashable
    outcomes: Outcomes


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """A call on its way.

    Attributes:
        number: among the calls of the lane; another one once memory was agreed on.
        asked, variant, beside, async_op: of the caller; see :meth:`CallPath.run`.
        remember: compiled code is to be told of it.
        may_repeat: what ``remember`` was in the beginning, but in pools.
        place: where the caller stands.
        key: what calls that are alike have in common.
        prepared: what it runs as, once that is known.
        planned: what is to be agreed on; None where that is known.
        shape, shaped: what it is known by wherever its tensors lie, and what runs then.
        offer: memory that peers may reach.
        is_tracked: the ranks learn from it.
        by_shape: compiled code is to be told of its shape.
    """

    number: int
    asked: Form
    variant: str
    beside: Beside | None
    async_op: bool
    remember: bool
    may_repeat: bool = False
    place: Place = NO_STREAM
    key: Key = ()
    prepared: Prepared | None = None
    planned: Planned | None = None
    shape: Shape | None = None
    shaped: Shaped | None = None
    offer: Offer | None = None
    is_tracked: bool = False
    by_shape: bool = False

    def __post_init__(self) -> None:
        self.may_repeat = self.remember


class CallPath:
    """Of one lane.

    Attributes:
        calls: numbers and runs them.
        arguments: checks what callers pass.
        preparer: makes them ready.
        repeats: those that compiled code makes again; None where there is none.
        reach: how peers get at pools and ordinary memory, on GPUs in captures only; None without peers.
        learning: finds out which addresses of ordinary memory come again; None where ranks do not learn.

    Args:
        board: where ranks post what they learn from; None where they do not.
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
        self._planned: dict[Hashable, Planned] = {}
        self._settled: dict[Hashable, Settled] = {}

    def run(
        self, asked: Form, *, variant: str, beside: Beside | None, async_op: bool, remember: bool = False
    ) -> Work | None:
        """Make a call.

        Args:
            asked: what the caller asks for.
            variant: see ``Communicator.all_gather``.
            beside: likewise.
            async_op: likewise.
            remember: compiled code may make it when it comes again.

        Raises:
            As ``Communicator.all_gather``.
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
        """Find what an earlier call like this one prepared, or what its shape is known by; else plan it, and offer."""
        asked, place = call.asked, self.calls.backend.place()
        call.place = place
        call.key, call.prepared = self._recall(asked, call.variant, call.beside, place)
        pooled = self.arguments.pooled(asked.tensors)
        if pooled is not None:
            # Compiled code knows tensors by their addresses only, which say nothing in a pool.
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
        if not call.async_op:  # an asynchronous call waits for nobody's host
            call.offer = self._offer(asked, planned, place[1])
        if pooled is not None and not planned.compares:
            self._keep(call.key, planned)

    def _announce_or_settle(self, call: _Call) -> None:
        """Tell the peers of the call; where this rank offers memory, agree with them on what they reach."""
        known = call.prepared or call.shaped
        if known is not None:
            self._announce(call.number, known.signature, again=True)
            return
        call.remember = False  # until it comes again
        planned = call.planned
        assert planned is not None
        if call.offer is None:
            self._announce(call.number, planned.signature, again=self.preparer.known(planned.agreement))
        else:
            call.number, call.prepared = self._settle(call.number, call.key, call.asked, planned, call.offer)

    def _learn(self, call: _Call, learning: Learning) -> None:
        """Post the call, if the ranks learn from it, and go by what they have learnt."""
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

    def _made_ready(self, call: _Call) -> Prepared:
        """Make a call ready that nothing was prepared for: by its shape, or from its plan."""
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
        """Look after the memory of a call that was captured, where peers have mapped it."""
        if self.reach is not None and self._settled[call.key].key != call.key:
            stands = functools.partial(self.reach.stand, offer.allocations)
            self.calls.guard_captured(call.asked.name, call.asked.tensors, stands)

    def _remember(self, call: _Call, prepared: Prepared, repeats: Repeats) -> None:
        """Tell compiled code of a call that may come again, by its addresses or by its shape."""
        tracked = None
        if call.by_shape and call.shape is not None and call.shaped is not None:
            repeats.remember_shape(call.key, call.shape, call.shaped, prepared, call.place)
        elif call.is_tracked and self.learning is not None and repeats.knows_by_address(call.key):
            tracked = self.learning.again(prepared.signature, call.key, prepared)
        if call.remember and (tracked is not None or not call.is_tracked):
            repeats.remember(call.key, prepared, call.place, asked=call.asked.repeated_as, tracked=tracked)

    def run_exchanged(self, uneven: UnevenCall, *, variant: str, beside: Beside | None, async_op: bool) -> Work | None:
        """Make a call of which each rank tells its part every time. Raises as ``Communicator.all_to_all`` does."""
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
        """Come to what all ranks do together outside of graphs, as loading a program is; for what follows it.

        Args:
            name: of what they do.
            check: whether this rank can, and what all of them must have alike; it may raise.

        Returns:
            The number of the call, and what ``check`` found.

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
        with calls.failing_for_good():
            calls.control.post_call(call, signature)
        calls.agree(call)
        return call, found

    def _recall(self, asked: Form, variant: str, beside: Beside | None, place: Place) -> tuple[Key, Prepared | None]:
        """What an earlier call like this one prepared, and what calls that are alike have in common."""
        key = (asked.name, variant, beside, asked.details, place[1], generation(), asked.identities())
        return key, self.preparer.recall(key)

    def hint(self, name: str, beside: Beside | None) -> Beside:
        """What the caller says runs next to the call. Raises ValueError for what there is not."""
        hint = self.calls.config.beside if beside is None else beside
        check_beside(name, hint)
        return hint

    def _announce(self, call: int, signature: str, *, again: bool) -> None:
        """Tell the peers; compare with them where that is new, or always with ``Config.debug``."""
        self.calls.control.post_call(call, signature)
        if self.calls.config.debug or not again:
            self.calls.agree(call)

    def _plan(self, call: _Call) -> Planned:
        """What is asked and to be agreed on. Raises what the caller did wrong."""
        planned = self._planned.get(call.key)
        if planned is None:
            asked = call.asked
            asked.check_variant(call.variant, self.calls.backend.abilities)
            hint = self.hint(asked.name, call.beside)
            request = asked.request(self.arguments)
            agreement = asked.agreement(request, call.variant, call.place[1], hint)
            compares = self.reach is not None and self.reach.compares(_parts(request), asked.tensors)
            planned = Planned(request, agreement, agreement.text(), compares)
        return planned

    def _offer(self, asked: Form, planned: Planned, captured: bool) -> Offer | None:
        """Memory of this rank that its peers may reach in this call. Captures wait for hosts, whoever learns."""
        if self.reach is None:
            return None
        room = MOST_TEXT_BYTES - 1 - len(planned.signature) - len(SPLITS)
        return self.reach.offer(_parts(planned.request), asked.tensors, room, captured)

    def _settle(self, call: int, key: Key, asked: Form, planned: Planned, offer: Offer) -> tuple[int, Prepared]:
        """Agree on the memory that peers reach, with the call; its number from now on, and what it runs as."""
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
        """What is asked."""
        return self._keep(call.key, call.planned or self._plan(call)).request

    def _keep(self, key: Key, planned: Planned) -> Planned:
        """Remember what is asked."""
        if key not in self._planned and len(self._planned) >= MOST_PLANNED:
            oldest = next(iter(self._planned))
            del self._planned[oldest]
            self._settled.pop(oldest, None)
        self._planned[key] = planned
        return planned

    def _prepare(
        self, agreement: AnyAgreement, request: AnyRequest, key: Hashable, shape: Shape | None = None
    ) -> Prepared:
        with self.calls.making_ready():
            return self.preparer.prepare(agreement, request, key, shape)


def _where(reached: Sequence[Request]) -> Hashable:
    """Where peers reach the tensors of a call, which this rank's addresses alone do not say."""
    return tuple((part.input.place, part.input.reached, part.output.place, part.output.reached) for part in reached)


def _parts(request: AnyRequest) -> tuple[Request, ...]:
    return (request,) if isinstance(request, Request) else request.parts
