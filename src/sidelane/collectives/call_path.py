"""The path of every call: number it, check its arguments, agree with the peers, prepare a program, start it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from sidelane import log
from sidelane.collectives.arguments import Arguments, identities
from sidelane.collectives.call_cache import (
    ComparedCall,
    Key,
    PlannedCall,
    PreparedCall,
    Shape,
    ShapeProgram,
    shape_of,
)
from sidelane.collectives.call_forms import CallForm, SingleCall
from sidelane.collectives.calls import Calls
from sidelane.collectives.pool_offsets import NOT_COMPARED, OFFSETS, Outcomes, PostedOffsets
from sidelane.collectives.prepare import Preparer
from sidelane.collectives.repeat import Repeats
from sidelane.collectives.work import Work
from sidelane.errors import UnavailableError
from sidelane.execute.base import CallerStream
from sidelane.memory.heap import generation
from sidelane.memory.posts import MOST_TEXT_BYTES, SPLITS, PostedCall
from sidelane.native import load_replays_soon
from sidelane.program.shape import Beside, check_beside

if TYPE_CHECKING:
    from sidelane.collectives.backend_cuda import CudaBackend

T = TypeVar("T")


class _Found(NamedTuple):
    """A call as this rank knows it before it has told its peers.

    Attributes:
        caller: the caller's stream, and whether it is captured.
        key: cache key that equal calls share.
        is_pooled: a tensor lies in a pool.
        shape: the call without its addresses, if other calls of the shape may run the same program.
        known: the call as it was prepared for the same tensors, the program of its shape, or else its plan.
        offsets: offsets of this rank's tensors in pools, for the ranks to compare.
    """

    caller: CallerStream
    key: Key
    is_pooled: bool
    shape: Shape | None
    known: PreparedCall | ShapeProgram | PlannedCall
    offsets: PostedOffsets | None = None


class CallPath:
    """The path that the calls of one lane take.

    Attributes:
        calls: numbers the calls and runs them.
        arguments: checks the tensors of callers.
        preparer: loads programs for calls.
        repeats: calls that compiled code repeats; None as long as there is no compiled code.
    """

    def __init__(self, calls: Calls, arguments: Arguments, preparer: Preparer) -> None:
        self.calls, self.arguments, self.preparer, self._cache = calls, arguments, preparer, preparer.cache
        self.repeats: Repeats | None = None
        # With debug, every call is compared with the peers'.
        gains = calls.config.native and not calls.config.debug
        self._questions = calls.backend.questions() if gains else None
        self._pool_offsets = arguments.pool_offsets
        self.code()

    def code(self) -> Repeats | None:
        """Return compiled code's calls; None as long as there is no compiled code.

        The first process of a user compiles it beside its first calls. No rank can tell which of them have it: a call
        posts and does the same in Python.
        """
        if self._questions is not None and (found := load_replays_soon()) is not None:
            questions, self._questions = self._questions, None
            if found.module is not None:
                backend = cast("CudaBackend", self.calls.backend)
                self.repeats = Repeats(found.module, questions, backend, self.calls, self.arguments, self.preparer)
        return self.repeats

    def run(
        self, call_form: CallForm, *, variant: str, beside: Beside | None, async_op: bool, remember: bool = False
    ) -> Work | None:
        """Make a call.

        Args:
            call_form: kind and arguments of the call.
            variant: see ``Communicator.all_gather``.
            beside: see ``Communicator.all_gather``.
            async_op: see ``Communicator.all_gather``.
            remember: compiled code does not know the call, and may make it when it is repeated.

        Raises:
            Exception: as ``Communicator.all_gather`` does.
        """
        calls = self.calls
        if self._questions is not None:
            self.code()
        number = calls.number()
        try:  # plainly, as in Calls.run: every call comes here, and a context manager costs a microsecond
            try:
                found = self._find(call_form, variant, beside, async_op)
            except Exception as error:
                calls.refuse(number, call_form.name, error)
                raise
            known, is_repeated = found.known, True
            if isinstance(known, PlannedCall) and (call_form.exchanges or found.offsets is not None):
                prepared = self._exchange(number, call_form, found, known)
                is_repeated = False
            else:
                is_new = isinstance(known, PlannedCall) and not self.preparer.planner.known(known.agreement)
                calls.announce(number, known.signature, compares=is_new)
                if isinstance(known, PreparedCall):
                    prepared = known
                else:
                    prepared, is_repeated = self._prepare(found, known)
            work = calls.run(prepared, number, async_op, call_form.tensors, call_form.written(), found.caller)
            if remember and self.repeats is not None:
                # Compiled code knows tensors by their addresses, and those in pools by their storages, too.
                program = known if isinstance(known, ShapeProgram) else None
                if is_repeated and not (async_op and found.is_pooled and NOT_COMPARED in str(found.key[-1])):
                    storages = self._pool_offsets.storages(call_form.tensors) if found.is_pooled else ()
                    self.repeats.remember(
                        found.key, prepared, found.caller, call_form=call_form.repeated_as, storages=storages
                    )
                elif program is not None:
                    self.repeats.remember(found.key, prepared, found.caller, shape=found.shape, program=program)
        except KeyboardInterrupt as error:
            calls.fail(error)
            raise
        return work

    def _find(self, call_form: CallForm, variant: str, beside: Beside | None, async_op: bool) -> _Found:
        """Find a call that was prepared with the same arguments or shape; else plan it."""
        caller = self.calls.backend.caller_stream()
        known_by = identities(call_form.tensors)
        key: Key = (call_form.name, variant, beside, call_form.details, caller[1], generation(), known_by)
        reasons = self._pool_offsets.reasons(call_form.tensors) if self.arguments.heap.pools else None
        if reasons is not None:  # addresses do not tell whether a tensor in a pool is symmetric
            key = (*key, reasons)
        is_pooled, shape = reasons is not None, None
        entry = self._cache.get(key)
        # A call on tensors in pools runs as it did before if the ranks need not compare their offsets.
        if (
            entry is not None
            and entry.prepared is not None
            and (not is_pooled or async_op or (entry.planned is not None and not entry.planned.compares))
        ):
            return _Found(caller, key, is_pooled, None, entry.prepared)
        if not is_pooled and not caller[1] and isinstance(call_form, SingleCall):
            shape = shape_of(self.arguments, key, call_form.tensors)
            program = None if shape is None else self.preparer.program_of(shape)
            if program is not None:
                return _Found(caller, key, False, shape, program)
        entry = self._cache.entry(key)
        if entry.planned is None:
            entry.planned = self._plan(call_form, variant, beside, captured=caller[1])
        planned, offsets = entry.planned, None
        # An asynchronous call does not wait for the hosts of its peers, unless it exchanges sizes anyway.
        if planned.compares and (call_form.exchanges or not async_op):
            room = MOST_TEXT_BYTES - 1 - len(planned.signature + SPLITS + planned.exchanged + OFFSETS)
            offsets = self._pool_offsets.posted(planned.requests, call_form.tensors, room)
        return _Found(caller, key, is_pooled, shape, planned, offsets)

    def _plan(self, call_form: CallForm, variant: str, beside: Beside | None, *, captured: bool) -> PlannedCall:
        """Check a call that is new. Raises TypeError or ValueError for wrong arguments."""
        call_form.check_variant(variant, self.calls.backend.abilities)
        hint = self.hint(call_form.name, beside)
        requests = call_form.requests(self.arguments)
        agreement = call_form.agreement(requests, variant, captured, hint)
        return PlannedCall(
            requests, agreement, *call_form.posted(agreement), self._pool_offsets.compares(requests, call_form.tensors)
        )

    def _exchange(self, number: int, call_form: CallForm, found: _Found, planned: PlannedCall) -> PreparedCall:
        """Exchange split sizes and offsets in pools with the peers, and prepare the call that follows from them."""
        calls, offsets = self.calls, found.offsets
        shown = "" if offsets is None else OFFSETS + offsets.text
        calls.control.post_call(number, planned.signature + SPLITS + planned.exchanged + shown)
        posts = calls.posts(number)
        compared = self._cache.entry(found.key).compared
        if compared is None or compared.posts != posts:
            compared = self._compare(number, call_form, found, planned, posts)
            self._cache.entry(found.key).compared = compared
        known_in_c = offsets is not None and self._pool_offsets.note(offsets, compared.outcomes)
        if known_in_c and self.repeats is not None:
            self.repeats.forget()
        return compared.prepared

    def _compare(
        self, number: int, call_form: CallForm, found: _Found, planned: PlannedCall, posts: Sequence[PostedCall]
    ) -> ComparedCall:
        """Compare the posts of all ranks, and prepare the call that follows from them."""
        exchanged, requests = call_form.compared(self.calls.control, number, posts, planned.requests)
        key = found.key if exchanged is None else (*found.key, exchanged)
        outcomes: Outcomes = ()
        if found.offsets is not None:
            texts = [post.differing.partition(OFFSETS)[2] for post in posts]
            reached, outcomes = self._pool_offsets.compare(texts, requests)
            if reached is not None:
                key, requests = (*key, tuple(part.locations for part in reached)), tuple(reached)
        prepared = self._cache.prepared(key)
        if prepared is None:
            known = planned.agreement
            agreement = call_form.agreement(requests, known.variant, known.frozen, known.beside)
            with self.calls.making_ready():
                prepared = self.preparer.prepare(agreement, requests, key)
        return ComparedCall(posts, prepared, outcomes)

    def _prepare(self, found: _Found, known: ShapeProgram | PlannedCall) -> tuple[PreparedCall, bool]:
        """Prepare a call by its shape, or from its plan. Return it, and whether it was made before."""
        if isinstance(known, PlannedCall):
            with self.calls.making_ready():
                return self.preparer.prepare(known.agreement, known.requests, found.key, found.shape), False
        assert found.shape is not None
        try:
            return self.preparer.prepare_at(known, found.shape, found.key)
        except Exception:
            with self.calls.making_ready():
                raise

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
        with calls.reporting_refusals(call, name):
            if calls.backend.caller_stream()[1]:
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
