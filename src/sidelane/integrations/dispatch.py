"""Dispatch of a group's calls: to Sidelane if it has the operation, otherwise to the other group."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane import forks, ranges
from sidelane.collectives.calls import Calls
from sidelane.collectives.prepare import StagingError
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.config import start_observers
from sidelane.errors import UnavailableError, in_no_order
from sidelane.integrations import calls
from sidelane.integrations.buffers import exchanged
from sidelane.integrations.calls import GroupCall, GroupOperation, RepeatKey
from sidelane.integrations.fallback import backends_of
from sidelane.integrations.ledger import SIDELANE, Ledger, RowKey, maker_in_words
from sidelane.integrations.lifetime import GroupLifetime
from sidelane.integrations.nodes.topology import FLAT, HIERARCHICAL, choose_steps
from sidelane.integrations.order import HostOrder, RepeatedCall, StreamOrder, are_plain
from sidelane.integrations.works import EndedWork, JoinedWork, OtherWork
from sidelane.memory.heap import are_outside
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane.sizes import format_bytes

SMALL_BYTES = 4096
"""Bytes of asynchronous calls up to which their works are kept a while."""

MOST_CACHED = 256

MOST_STAGED: Mapping[GroupOperation, tuple[float, float]] = MappingProxyType(
    {
        calls.ALL_TO_ALL: (48 << 20, 4 << 20),
        **dict.fromkeys(
            (
                *(calls.ALL_GATHER, calls.ALL_GATHER_LIST, calls.ALL_GATHER_COALESCED),
                *(calls.REDUCE_SCATTER, calls.REDUCE_SCATTER_LIST, calls.REDUCE_SCATTER_COALESCED),
                *(calls.ALL_REDUCE, calls.ALL_REDUCE_LIST, calls.ALL_REDUCE_COALESCED, calls.ALL_REDUCE_OF_ONE),
            ),
            (math.inf, 4 << 20),
        ),
        **dict.fromkeys((calls.ALL_TO_ALL_UNEVEN, calls.ALL_TO_ALL_LIST), (-1, -1)),
        calls.BROADCAST: (math.inf, math.inf),
    }
)
"""Bytes above which NCCL makes a call on ordinary tensors, synchronous and asynchronous, as staging takes longer.

On two H200s an all-to-all of 64 MB takes 137 us with NCCL, 153 staged and 101 in symmetric memory, one of 1 GB 1618,
1794 and 1401; all other collectives alone are faster staged than with NCCL (results/h200x2/ordinary.json). Asynchronous
calls run beside a computation, with which the copies take turns: steps of DDP took 0.1 to 1.1% longer staged
(results/h200x2/clients.json), those of Megatron-core's distributed optimizer up to 4%. Sizes of parts are exchanged by
the hosts, since a rank knows its own only: equal ones here say nothing of those elsewhere. That takes 250 to 1,000 us
more than NCCL's call (results/h200x2/group-forms.txt), and symmetric memory saves 35 us of 64 MiB. So NCCL makes all
such calls, wherever their tensors lie: a choice by their size or place would differ among the ranks.
"""

NEVER = (math.inf, math.inf)
NO_ROW = ("", "", "", "", "")


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
        self.names, self._registering = life.names, backends_of(life.other)
        for backend in self._registering:
            backend.life = weakref.ref(life)  # which refers to the other group, and that to this backend
        self._can_capture = torch.cuda.is_available()
        self._coalescing: list[dist.Work] | None = None
        self._other_coalesces, self._handed = False, NO_ROW  # NCCL has begun to; last call of it that peers can read
        # If torch's compiled code gets a work made in Python, it waits by the Python half, which it does not keep.
        # DDP's reducer waited for ever for the number of ranks that have not joined
        # (``divide_by_initial_world_size=False``).
        self._held: collections.deque[dist.Work] = collections.deque(maxlen=MOST_CACHED)
        self._repeated: dict[RepeatKey, RepeatedCall] = {}
        # Rows of calls on ordinary tensors that all ranks leave to NCCL, as they have agreed, also by their size.
        # A row without a reason: NCCL cannot make them.
        self._left: dict[tuple[RepeatKey, bool, int], RowKey] = {}
        cached = self._held.clear, self._repeated.clear, self._left.clear
        life.forgets = (*cached, *(backend.clear for backend in self._registering))
        with contextlib.suppress(ValueError):  # of a setting: the first communicator tells the peers, too
            start_observers()  # now, for the first call to be seen as a whole
        # In forked copies, so that all calls are refused in one place.
        forks.in_copies_of(self, lambda made: [cache.clear() for cache in (made._repeated, made._left)])

    def begin_coalescing(self, device: torch.device) -> None:
        """Keep the works that :meth:`launch` and :meth:`pass_on` return from here on."""
        self.life.require()
        self._coalescing, self._other_coalesces = [], False

    def end_coalescing(self, device: torch.device) -> dist.Work:
        """Return the works kept since :meth:`begin_coalescing`, as one."""
        self.life.require()
        works, self._coalescing = self._coalescing or [], None
        last = self.life.other._end_coalescing(device) if self._other_coalesces else None
        if last is not None:
            # The library's works inside end with the last one, and only that can be waited for.
            inside = [work for work in works if isinstance(work, OtherWork)]
            made = OtherWork(last, self.life.failed_peers, range(len(self.life.ranks)))
            tensors = [tensor for work in inside for tensor in work.tensors]  # none of synchronous calls
            self.life.orders[device.type].other(lambda: made, tensors, bool(tensors))
            works = [made, *(work for work in works if not isinstance(work, OtherWork) or work.stands_for)]
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
        # A sparse tensor has no nbytes.
        if not (operation in MOST_STAGED and outputs) or outputs[0].layout is not torch.strided:
            return self._run(GroupCall(operation, outputs, inputs, opts, args), observed)
        tensors, first = (*outputs, *inputs), outputs[0]
        device, is_async = first.device, opts.asyncOp
        key = (operation.name, detail, first.dtype, device)
        repeated, has_lists = self._repeated.get(key), operation.has_lists
        nbytes = calls.larger_bytes(outputs, inputs) if has_lists else max(first.nbytes, tensors[-1].nbytes)
        is_left = nbytes > MOST_STAGED[operation][is_async] and self._may_leave(operation, tensors)
        row = self._left.get((key, is_async, nbytes * operation.repeats), NO_ROW) if is_left else NO_ROW
        if row[-1] and are_plain(tensors, first.dtype, device) and not self._is_looked_at():
            self.ledger.note(row, "", nbytes)
            self._hand_over(row)
            if self._coalescing is not None:
                self._coalesce(device)
            # The backend's own method, since torch's dispatcher in front of it takes as long as all of this.
            method = getattr(self.life.other._get_backend(device), operation.method, None)
            make = functools.partial(self._make_by_library, operation.method, args, row, method=method)
            made = self.life.orders[device.type].other(make, tensors, is_async, captures=False)
            return self._collect(made, is_async, nbytes)
        on_thread = device.type == "cpu" and (opts.timeout > NO_TIMEOUT or self._captures())
        work = None
        if not is_left and not on_thread and repeated is not None:
            try:
                work = repeated.order.repeat(repeated, tensors, is_async)
            except Exception as error:
                self.life.explain(error)
                raise
        if work is None or repeated is None:
            return self._run(GroupCall(operation, outputs, inputs, opts, args, key), observed)
        choice = repeated.calls.last_choice
        if choice is not repeated.choice:
            repeated.take_choice(choice)
        self.ledger.note(repeated.row, choice.reason, nbytes)
        if observed is not None:
            observed.maker = self._maker(tensors)
        return self._collect(work, is_async, nbytes) if is_async or self._coalescing is not None else work

    def _collect(self, work: dist.Work, is_async: bool, nbytes: int) -> dist.Work:
        """Add a work to the lists that need it, and return it."""
        if is_async and nbytes <= SMALL_BYTES:
            self._held.append(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _maker(self, tensors: Sequence[torch.Tensor]) -> Calls | None:
        """Return the calls of the communicator of such tensors; None if there is none yet."""
        made = self.life.communicators.get(tensors[0].device.type if tensors else "cpu")
        return None if made is None else made.calls

    def _is_looked_at(self) -> bool:
        """Return True if calls that NCCL makes are looked at each time: in captures, and with debug."""
        return self._captures() or self.life.debug

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
        # With debug, all calls of all ranks are compared. On CPUs that takes its turn among asynchronous calls.
        is_compared = call.refusal and self.life.debug and not (self.life.no_memory(device) or self._captures())
        if is_compared and device != "cpu":
            self._compare(call, device, self.life.communicator(call.tensors[0].device))
        if order is None:
            work = self._make_other(call, device)
        elif call.refusal and not (is_compared and device == "cpu"):
            make = functools.partial(self._make_other, call, device)
            work = (
                order.run(lambda: make().wait(), call.tensors, call.outputs, call.is_async, call.timeout)
                if isinstance(order, HostOrder) and order.precedes_others()  # one order of Gloo's calls on all ranks
                else order.other(make, call.tensors, call.is_async)
            )
        else:
            work = order.run(lambda: self._make(call, device), call.tensors, call.outputs, call.is_async, call.timeout)
        if observed is not None and not call.refusal:
            observed.maker = self._maker(call.tensors)
        collects = call.is_async or self._coalescing is not None
        return self._collect(work, call.is_async, call.nbytes) if collects else work

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
        kind = None if flat else Kind(call.operation.kind)
        beside = self.life.beside != settings.NOTHING
        choice = choose_steps(kind, call.nbytes, self.life.nodes, beside=beside, without=flat)
        if choice.name == FLAT:
            return f"{FLAT}: {choice.reason}"
        call.reason = choice.reason
        return ""

    def _slower_staged(self, call: GroupCall, device: str) -> str:
        """Return the reason why NCCL makes a call on ordinary tensors, as staging takes longer; "" if it does not.

        Collective for the first call of a size: the ranks find out together if some of them have symmetric tensors. In
        later calls nothing is compared: a rank with a symmetric tensor makes a call that the others wait for in NCCL.
        """
        most = MOST_STAGED.get(call.operation, NEVER)[call.is_async]
        if call.nbytes <= most or self.names.get(device) != "nccl":
            return ""
        first, kind, operation = call.tensors[0], "asynchronous, " if call.is_async else "", call.operation
        name, is_sized, key = operation.name, operation.repeats, _key_of_left(call)
        row = self._left.get(key)
        if self._captures() and (call.is_async or row is None or not is_sized):
            return ""  # in a capture nothing can be agreed on, and no caller waits for the host
        made, may_leave = self.life.communicator(first.device), self._may_leave(operation, call.tensors)
        if not isinstance(made, Communicator) or not may_leave or (made.config.deterministic and call.adds_floats):
            return ""
        if row is None:
            made.agree(name, f"{name} of {call.nbytes if is_sized else 'any'} bytes of {kind}ordinary {first.dtype}")
            if len(self._left) == MOST_CACHED:
                self._left.clear()
            # NCCL refuses ranks that share a GPU, on which programs are tried.
            gpu = str(torch.cuda.get_device_properties(first.device).uuid) if first.is_cuda else self.life.rank
            is_shared = len(set(exchanged(made, gpu))) < len(self.life.ranks)
            why = f"{kind}ordinary tensors of more than {format_bytes(int(most))}; in a sidelane.pool Sidelane makes it"
            why = why if is_sized else f"{kind}parts of sizes that peers do not know"
            head = name, calls.dtype_name(first.dtype), device, self.names[device]
            row = self._left[key] = (*head, "" if is_shared else why)
        if not row[-1]:
            return ""
        # NCCL takes contiguous tensors only. Copies of others are made, and copied back, on the caller's stream.
        call.make_contiguous()
        return row[-1]

    def _may_leave(self, operation: GroupOperation, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if NCCL may make a call: its sizes differ among the ranks, or all of its tensors are ordinary."""
        device = tensors[0].device.type
        made = self.life.communicators.get(device)
        # Through host memory NCCL stages all of it as well, and the sizes are of GPUs with peers.
        return (
            isinstance(made, Communicator)
            and (self.names.get(device), made.config.beside) == ("nccl", settings.NOTHING)
            and len(self.life.ranks) > 1
            and not made.backend.peers.through_host
            and (not operation.repeats or are_outside([each.data_ptr() for each in tensors if each.is_contiguous()]))
        )

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
        return self._collect(self._make_other(call, call.tensors[0].device.type, peers), False, call.nbytes)

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
        try:
            if call.refusal:
                self._compare(call, device, communicator)
            else:
                call.make(cast(Communicator, communicator))  # a method that both kinds of communicator have
        except Exception as error:
            # NCCL has made the calls before this capture, which therefore have left no staging.
            row = self._left.get(_key_of_left(call), NO_ROW) if isinstance(error, StagingError) else NO_ROW
            if not row[-1] or self._coalescing is not None:
                self.life.explain(error)
                raise
            call.refusal = row[-1]
            call.make_contiguous()
        if call.refusal:
            self._make_other(call, device).wait()
            return
        if not isinstance(communicator, Communicator):
            self.ledger.note(self._row(call, device, HIERARCHICAL), call.reason, call.nbytes)
            return
        choice, self.ledger.peers = communicator.last_choice(), communicator.backend.peers
        assert choice is not None
        self.ledger.note(self._row(call, device, choice.candidate.variant), choice.reason, call.nbytes)
        if call.key is not None and call.operation.repeats:
            self._repeated[call.key] = RepeatedCall(communicator, call, self.life.orders[device])

    def _make_other(self, call: GroupCall, device: str, peers: Sequence[int] | None = None) -> dist.Work:
        name, is_of_all = self.names.get(device, "none"), peers is None
        needed = range(len(self.life.ranks)) if peers is None else peers
        row = self._row(call, device)
        self.ledger.note(row, "", call.nbytes)
        if is_of_all:
            self._hand_over(row)
        if name == "nccl" and self._coalescing is not None and call.tensors:
            self._coalesce(call.tensors[0].device)
        if name != "nccl":  # which refuses tensors that are not contiguous, on this rank, in words
            call.make_contiguous()
        looks = is_of_all and name == "gloo"
        return self._make_by_library(call.operation.method, call.args, row, needed, looks=looks, copies=call.copies)

    def _make_by_library(
        self,
        name: str,
        args: Sequence[Any],
        row: RowKey,
        needed: Sequence[int] | None = None,
        method: Callable[..., dist.Work | None] | None = None,
        **options: Any,
    ) -> dist.Work:
        """Make a call of the other group; see :class:`sidelane.integrations.works.OtherWork`. It needs all ranks."""
        needed = range(len(self.life.ranks)) if needed is None else needed
        try:
            work = (method or getattr(self.life.other, name))(*args)
        except (RuntimeError, TypeError, ValueError) as error:
            self.life.failed_peers.explain(error, needed, row)
            raise
        if work is None:
            return EndedWork()
        return OtherWork(work, self.life.failed_peers, needed, row=row, **options)

    def _coalesce(self, device: torch.device) -> None:
        """Let NCCL make its calls as one from here on, up to the end of those that are coalesced."""
        if not self._other_coalesces:
            self.life.other._start_coalescing(device)
            self._other_coalesces = True

    def _hand_over(self, row: RowKey) -> None:
        """Let ranks that wait for this one know its last call of the other group; before a communicator, its kind."""
        made = self.life.communicators.get(row[2])
        if isinstance(made, Communicator) and row != self._handed:  # each call comes here, and the words take time
            self._handed = row
            made.control.hand_over(f"it may be in a call that it handed over: {maker_in_words(row)}")
        elif made is None and getattr(self.ledger.sums.get(row), "calls", 0) == 1 and not self.life.uses(row[2]):
            self.life.failed_peers.liveness.hand_over(f"it may be in a call that it handed over: {maker_in_words(row)}")

    def _compare(self, call: GroupCall, device: str, communicator: object) -> None:
        """Compare a call that the other group makes with the calls of the peers, before it begins."""
        if isinstance(communicator, Communicator):
            sizes = [("bytes", call.nbytes), *call.options.items()] * call.operation.repeats  # others' may differ
            words = [maker_in_words(self._row(call, device)), *(f"{name} {size}" for name, size in sizes)]
            communicator.agree(call.operation.name, ", ".join(words))

    def _row(self, call: GroupCall, device: str, choice: str = "") -> RowKey:
        """Return the row of a call: Sidelane's with the variant that it chose, or else the other group's."""
        maker = (SIDELANE, choice) if choice else (self.names.get(device, "none"), call.refusal)
        return call.operation.name, calls.dtype_name(call.tensors[0].dtype) if call.nbytes else "", device, *maker


def _key_of_left(call: GroupCall) -> tuple[RepeatKey, bool, int]:
    """Return the key of the row of calls like this one that NCCL makes."""
    first = call.tensors[0]
    key = call.key or (call.operation.name, None, first.dtype, first.device)
    return key, call.is_async, call.nbytes * call.operation.repeats
