"""Dispatch of a group's calls: to Sidelane if it has the operation, otherwise to the other group."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane import forks, ranges
from sidelane.collectives.call_cache import all_ordinary
from sidelane.collectives.calls import Calls
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.config import start_observers
from sidelane.errors import UnavailableError, in_no_order
from sidelane.integrations import calls
from sidelane.integrations.calls import GroupCall, GroupOperation, RepeatKey
from sidelane.integrations.fallback import backends_of
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.integrations.lifetime import GroupLifetime
from sidelane.integrations.nodes.topology import FLAT, HIERARCHICAL, choose_steps
from sidelane.integrations.order import RepeatedCall, StreamOrder, are_plain
from sidelane.integrations.works import EndedWork, JoinedWork, OtherWork
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane.sizes import format_bytes

SMALL_BYTES = 4096
"""Bytes of asynchronous calls up to which their works are kept a while."""

MOST_CACHED = 256

STAGED_BYTES = 48 << 20
"""Bytes from which NCCL makes an all-to-all of ordinary tensors: staging takes longer. On two H200s, 64 MB take 137 us
with NCCL, 153 staged and 101 in symmetric memory; 256 MB 472, 467 and 365; 1 GB 1618, 1794 and 1401. All other
collectives are faster staged than with NCCL there, at every size measured (results/h200x2/ordinary.json)."""


class GroupDispatcher:
    """Maker of the calls of one group: a communicator, or the other group.

    Args:
        life: communicators and facts of the group.

    Attributes:
        life: see above.
        ledger: counts of the calls, by their maker.
        names: names of the other group's backends, by device.
    """

    def __init__(self, life: GroupLifetime) -> None:
        self.life, self.ledger = life, Ledger(life.ranks)
        self.names, self._allocating = life.names, backends_of(life.other)
        for backend in self._allocating:
            backend.life = weakref.ref(life)  # which refers to the other group, and that to this backend
        self._can_capture = torch.cuda.is_available()
        self._coalescing: list[dist.Work] | None = None
        self._other_coalesces = False  # NCCL has begun to
        # If torch's compiled code gets a work made in Python, it waits by the Python half, which it does not keep.
        # DDP's reducer waited for ever for the number of ranks that have not joined
        # (``divide_by_initial_world_size=False``).
        self._held: collections.deque[dist.Work] = collections.deque(maxlen=MOST_CACHED)
        self._repeated: dict[RepeatKey, RepeatedCall] = {}
        self._agreed: set[Hashable] = set()  # calls of ordinary tensors that all ranks leave to the other backend
        life.forgets = (self._held.clear, self._repeated.clear, *(backend.clear for backend in self._allocating))
        with contextlib.suppress(ValueError):  # of a setting: the first communicator tells the peers, too
            start_observers()  # now, for the first call to be seen as a whole
        forks.in_copies_of(self, lambda made: made._repeated.clear())  # so that all calls are refused in one place

    def begin_coalescing(self, device: torch.device) -> None:
        """Keep the works that :meth:`launch` and :meth:`pass_on` return from here on."""
        self.life.require()
        self._coalescing, self._other_coalesces = [], False

    def end_coalescing(self, device: torch.device) -> dist.Work:
        """Return the works kept since :meth:`begin_coalescing`, as one."""
        self.life.require()
        works, self._coalescing = self._coalescing or [], None
        if self._other_coalesces:
            last = self.life.other._end_coalescing(device)
            works = [*works, last] if last is not None else works
        return works[0] if len(works) == 1 else JoinedWork(works)

    def launch(
        self,
        operation: GroupOperation,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
        args: Sequence[Any],
        detail: Hashable = None,
        observed: ranges.ObservedCall | None = None,
    ) -> dist.Work:
        """Make a call of all ranks in its order, with the decisions of an earlier call like it if there was one.

        Profilers of torch see it by its name, and those that record shapes also get the fields that
        ``record_param_comms`` has for calls in C++: sizes, data type and group.

        Args:
            operation: operation of the call.
            outputs: tensors that are written.
            inputs: tensors that are only read.
            opts: options of torch.
            args: arguments of the other group's method.
            detail: reduction or root of an operation that repeats and has one.
            observed: the call, for those that observe it; None if nobody does, or to begin it here.
        """
        if observed is None and ranges.is_active():
            with ranges.ObservedCall(operation.name, outputs, inputs, self.life.ranks, self.life.name) as observed:
                observed.work = made = self.launch(operation, outputs, inputs, opts, args, detail, observed)
                return made
        if not (operation.repeats and outputs):
            return self._run(GroupCall(operation, outputs, inputs, opts, args), observed)
        tensors, first = (*outputs, *inputs), outputs[0]
        nbytes, device = first.nbytes, first.device
        key = (operation.name, detail, first.dtype, device)
        repeated = self._repeated.get(key)
        if (
            repeated is None
            or (operation is calls.ALL_TO_ALL and nbytes >= STAGED_BYTES)  # see _slower_staged
            or (device.type == "cpu" and (opts.timeout > NO_TIMEOUT or self._captures()))
        ):
            return self._run(GroupCall(operation, outputs, inputs, opts, args, key), observed)
        is_async = opts.asyncOp
        try:
            work = repeated.order.repeat(repeated, tensors, is_async)
        except Exception as error:
            self.life.explain(error)
            raise
        if work is None:
            return self._run(GroupCall(operation, outputs, inputs, opts, args, key), observed)
        if repeated.has_lists:
            nbytes = max(sum(tensor.nbytes for tensor in side) for side in (outputs, inputs))
        elif inputs:
            nbytes = max(nbytes, tensors[1].nbytes)
        choice = repeated.calls.last_choice
        assert choice is not None
        if choice is not repeated.choice:
            repeated.take_choice(choice)
        self.ledger.note(repeated.row, choice.reason, nbytes)
        if is_async and nbytes <= SMALL_BYTES:
            self._held.append(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        if observed is not None:
            observed.maker = self._maker(tensors)
        return work

    def _maker(self, tensors: Sequence[torch.Tensor]) -> Calls | None:
        """Return the calls of the communicator of such tensors; None if there is none yet."""
        made = self.life.communicators.get(tensors[0].device.type if tensors else "cpu")
        return None if made is None else made.calls

    def _captures(self) -> bool:
        """Return True if the current stream is captured into a graph."""
        return self._can_capture and torch.cuda.is_current_stream_capturing()

    def _run(self, call: GroupCall, observed: ranges.ObservedCall | None) -> dist.Work:
        self.life.require()
        device = call.tensors[0].device.type if call.tensors else "cpu"
        call.refusal = call.refusal or self.life.uses(device) or self._across(call) or self._slower_staged(call, device)
        if self._captures():
            self._refuse_in_graph(call, device)
        order = self.life.orders.get(device)
        if (
            isinstance(order, StreamOrder)
            and not call.refusal
            and self.life.communicator(call.tensors[0].device) is None
        ):
            call.refusal = self.life.refusals[device]  # on the host, calls find that out in their turn
        self._require_order(call, device)
        if order is None:
            work = self._make_other(call, device)
        elif call.refusal:
            work = order.other(lambda: self._make_other(call, device), call.is_async)
        else:
            work = order.run(lambda: self._make(call, device), call.tensors, call.outputs, call.is_async, call.timeout)
        if self._coalescing is not None:
            self._coalescing.append(work)
        if call.is_async and call.nbytes <= SMALL_BYTES:
            self._held.append(work)
        if observed is not None and not call.refusal:
            observed.maker = self._maker(call.tensors)
        return work

    def _require_order(self, call: GroupCall, device: str) -> None:
        """Raise for a sum whose terms are added in no fixed order, if the settings ask for one."""
        if (call.refusal or self.life.nodes.spans) and settings.current().deterministic and call.adds_floats:
            why = f"{self.names.get(device, 'none')} would make it ({call.refusal})"
            raise in_no_order(call.operation.name, why if call.refusal else "it adds up sums of several nodes")

    def _across(self, call: GroupCall) -> str:
        """Return the reason why a call of a group on several nodes takes no steps within nodes; "" if it does."""
        if not self.life.nodes.spans:
            return ""
        flat = call.operation.flat
        choice = choose_steps(None if flat else Kind(call.operation.kind), call.nbytes, self.life.nodes, without=flat)
        if choice.name == FLAT:
            return f"{FLAT}: {choice.reason}"
        call.reason = choice.reason
        return ""

    def _slower_staged(self, call: GroupCall, device: str) -> str:
        """Return the reason why the other backend makes a call on ordinary tensors, as staging takes longer; "" if not.

        Collective for the first call of a size: the ranks find out together if some of them have symmetric tensors.
        """
        if call.key is None or call.operation is not calls.ALL_TO_ALL or call.nbytes < STAGED_BYTES:
            return ""
        if self.names.get(device) != "nccl" or self.life.nodes.spans:
            return ""
        text = f"{call.operation.name} of {call.nbytes} bytes of ordinary {call.key[2]}"
        if self._captures() and text not in self._agreed:
            return ""  # nothing can be agreed on there; a call like it before the capture would have been
        made = self.life.communicator(call.tensors[0].device)
        if not isinstance(made, Communicator) or made.config.beside != settings.NOTHING:
            return ""
        if not are_plain(call.tensors, *call.key[2:]) or not all_ordinary(made.arguments, call.tensors):
            return ""
        if text not in self._agreed:
            made.agree(call.operation.name, text)
            self._agreed.add(text)
        return f"ordinary tensors of {format_bytes(STAGED_BYTES)} and more; in a sidelane.pool Sidelane makes it"

    def pass_on(
        self,
        operation: GroupOperation,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        args: Sequence[Any],
        peers: Sequence[int],
    ) -> dist.Work:
        """Make a call between two ranks, in no order with the calls of all.

        Args:
            operation: see :meth:`launch`.
            outputs: see :meth:`launch`.
            inputs: see :meth:`launch`.
            args: see :meth:`launch`.
            peers: the other rank, or all ranks that it may be.
        """
        self.life.require()
        call = GroupCall(operation, outputs, inputs, None, args)
        if self._captures():
            self._refuse_in_graph(call, call.tensors[0].device.type)
        work = self._make_other(call, call.tensors[0].device.type, peers)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _refuse_in_graph(self, call: GroupCall, device: str) -> None:
        """Raise for a call that the graph under capture would not hold; no step has run."""
        maker = self.names.get(device, "none") if call.refusal else SIDELANE
        if device == "cpu":
            why = "tensors of the CPU, which replays would not touch: make it before the capture or after it"
        elif maker not in (SIDELANE, "nccl"):
            why = f"{maker} makes it, on the host ({call.refusal})"
        elif maker == SIDELANE and device not in self.life.communicators:
            why = "the group's first call that Sidelane makes: make one before the capture"
        else:
            return
        raise UnavailableError(f"{call.operation.name}: not while a graph is captured: {why}")

    def _make(self, call: GroupCall, device: str) -> None:
        """Make a call in its turn, by Sidelane if the ranks can."""
        communicator = self.life.communicator(call.tensors[0].device if call.tensors else torch.device(device))
        if communicator is None:
            call.refusal = self.life.refusals[device]
            self._require_order(call, device)
            self._make_other(call, device).wait()
            return
        try:
            call.make(cast(Communicator, communicator))  # a method that both kinds of communicator have
        except Exception as error:
            self.life.explain(error)
            raise
        if not isinstance(communicator, Communicator):
            self._note(call, device, SIDELANE, HIERARCHICAL, call.reason)
            return
        choice = communicator.last_choice()
        assert choice is not None
        self._note(call, device, SIDELANE, choice.candidate.variant, choice.reason)
        if call.key is not None:
            self._repeated[call.key] = RepeatedCall(communicator, call, self.life.orders[device])

    def _make_other(self, call: GroupCall, device: str, peers: Sequence[int] | None = None) -> dist.Work:
        name, is_of_all = self.names.get(device, "none"), peers is None
        needed = range(len(self.life.ranks)) if peers is None else peers
        for backend in self._allocating:
            backend.went_elsewhere(call.tensors)
        self._note(call, device, name, call.refusal)
        try:
            args, copies = call.args, calls.Copies()
            if name == "nccl" and self._coalescing is not None and not self._other_coalesces and call.tensors:
                self.life.other._start_coalescing(call.tensors[0].device)
                self._other_coalesces = True
            if name != "nccl":  # which refuses tensors that are not contiguous, on this rank, in words
                args, copies = calls.contiguous_arguments(call)
            work = getattr(self.life.other, call.operation.method)(*args)
        except RuntimeError as error:
            self.life.failed_peers.explain(error, needed)
            raise
        if work is None:
            return EndedWork()
        return OtherWork(work, self.life.failed_peers, needed, looks=is_of_all and name == "gloo", copies=copies)

    def _note(self, call: GroupCall, device: str, where: str, why: str, reason: str = "") -> None:
        dtype = calls.dtype_name(call.tensors[0].dtype) if call.nbytes else ""
        self.ledger.note((call.operation.name, dtype, device, where, why), reason, call.nbytes)
