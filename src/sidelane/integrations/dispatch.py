"""Dispatch of a group's calls: to Sidelane if it has the operation, otherwise to the other group."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import config as settings
from sidelane import forks, ranges
from sidelane.collectives.call_cache import all_ordinary
from sidelane.collectives.calls import Calls
from sidelane.collectives.side_stream import SideStream
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError, in_no_order
from sidelane.integrations import calls
from sidelane.integrations.buffers import GroupMemory
from sidelane.integrations.calls import GroupCall
from sidelane.integrations.fallback import Witness, name_of_backend
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.order import HostOrder, StreamOrder
from sidelane.integrations.repeat import Key, RepeatedCall, are_plain
from sidelane.integrations.works import JoinedWork, OtherWork, StreamWork
from sidelane.program.collective import MAX_NODE_RANKS
from sidelane.session import Communicator
from sidelane.session.session import start_observers
from sidelane.sizes import format_bytes

if TYPE_CHECKING:
    from sidelane.integrations.nodes.communicator import NodesCommunicator  # groups on one node do without

SMALL_BYTES = 4096
"""Bytes of asynchronous calls up to which their works are kept a while."""

MOST_KEPT = 256

STAGED_BYTES = 48 << 20
"""Bytes from which NCCL makes an all-to-all of ordinary tensors: staging takes longer. On two H200s, 64 MB take 137 us
by NCCL, 153 staged and 101 in symmetric memory; 1 GB takes 1618, 1794 and 1401 (results/h200x2/ordinary.json). All
other collectives are faster staged than by NCCL, at every size measured."""

ABORTED = "was aborted"
"""Text for the end of a group that did not wait for its calls."""


class Dispatcher:
    """Maker of the calls of one group. Waiting calls query it (``order.Guard``).

    Args:
        group: group that torch knows; this object does not keep it alive.
        other: group behind it.
        witness: knows the processes that have died.
        ranks: ranks of the group, in the world.
        timeout: time-out of Sidelane's calls.
        nodes: nodes of the ranks.

    Attributes:
        ledger: counts of the calls, by their maker.
        memory: symmetric memory for users of the group.
        names: names of the other group's backends, by device.
        timeout: time-out of communicators to come.
        owner: process that is the rank.
        asked: devices and backends that the caller asked torch for, short and in full, both as torch writes them; None
            as long as only torch knows.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        other: dist.ProcessGroup,
        witness: Witness,
        ranks: Sequence[int],
        nodes: Nodes,
        timeout: timedelta,
    ) -> None:
        self.ledger, self.timeout = Ledger(ranks), timeout
        self.asked: tuple[str, str] | None = None
        self.names = {device.type: name_of_backend(other, device.type) for device in other._device_types}
        self._whose, self._witness, self._ranks, self._nodes = weakref.ref(group), witness, tuple(ranks), nodes
        self._ended = ""  # words for its end
        # Only weak references here: connections and threads end with a group, not when garbage is collected.
        own = weakref.proxy(self)
        self._orders: dict[str, HostOrder | StreamOrder] = {"cpu": HostOrder(own), "cuda": StreamOrder(own)}
        self._communicators: dict[str, Communicator | NodesCommunicator] = {}
        self.memory = GroupMemory(len(self._ranks), own)
        self._refusals: dict[str, str] = {}
        self._making = forks.Turn(lambda: ("a call", "the making of this group's communicator"))
        self._can_capture = torch.cuda.is_available()
        self._coalescing: list[dist.Work] | None = None
        # If torch's compiled code gets a work made in Python, it waits by the Python half, which it does not keep.
        # DDP's reducer waited for ever for the number of ranks that have not joined
        # (``divide_by_initial_world_size=False``).
        self._kept: collections.deque[dist.Work] = collections.deque(maxlen=MOST_KEPT)
        self._repeated: dict[Key, RepeatedCall] = {}
        self._agreed: set[Hashable] = set()  # calls of ordinary tensors that all ranks leave to the other backend
        self.owner = forks.Owner("process group")
        self._rank, self._name = group.rank(), ""
        with contextlib.suppress(ValueError):  # of a setting: the first communicator tells the peers, too
            start_observers()  # now, for the first call to be seen as a whole
        forks.telling(self)

    def take_name(self, name: str) -> None:
        """Set the name that torch gives the group."""
        self._name = self.ledger.group = name
        self.owner.what = f"process group {name}"

    def what_was_asked(self) -> tuple[str, str]:
        """Return the devices and backends of the group; see ``asked``."""
        if self.asked is None:  # torch notes it after it has made the group
            group = self._group
            self.asked = str(c10d._world.pg_map[group][0]), c10d._world.pg_backend_config[group]
        return self.asked

    @property
    def _group(self) -> dist.ProcessGroup:
        found = self._whose()
        if found is None:
            raise self._refusal("was dropped")
        return found

    def check(self) -> None:
        """Raise a PeerError, which the peers receive, if the group has ended and waiting for peers is useless."""
        if self._ended:
            raise self._told()

    def _told(self) -> PeerError:
        return PeerError(f"process group {self._name} {self._ended} on rank {self._rank}", (self._rank,))

    def require(self) -> None:
        """Raise if the group can make no calls.

        Raises:
            CommunicatorClosedError: it was destroyed or aborted, or this process is a forked copy of the rank.
        """
        self.owner.require()
        if self._ended:
            raise self._refusal(self._ended)

    def _refusal(self, why: str) -> CommunicatorClosedError:
        return CommunicatorClosedError(f"process group {self._name} {why} (allowed=calls before that, and a new group)")

    def disown(self) -> None:
        """Forget repeated calls in a forked copy, so that all calls are refused in one place."""
        self._repeated.clear()

    def begin_coalescing(self) -> None:
        """Keep the works that :meth:`run` and :meth:`pass_on` return from here on."""
        self.require()
        self._coalescing = []

    def end_coalescing(self) -> list[dist.Work]:
        """Return the works kept since :meth:`begin_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        return works

    def finish(self) -> None:
        """Wait for the calls under way, and release everything."""
        for order in self._orders.values():
            order.close()
        self._end("was destroyed")

    def abort(self) -> None:
        """Release everything at once: calls under way fail, here and on the other ranks, and so do later ones."""
        self._end(ABORTED)
        for order in self._orders.values():
            order.close(wait=False)

    def _end(self, how: str) -> None:
        if not self._ended:
            self._ended = how
            self._witness.liveness.leave(str(self._told()))
        self._kept.clear()
        self._repeated.clear()
        self.memory.clear()
        communicators, self._communicators = self._communicators, {}
        for communicator in communicators.values():
            if how == ABORTED:
                _leave(communicator, self._told())
            communicator.close()

    def launch(
        self,
        name: str,
        detail: Hashable,
        tensors: Sequence[torch.Tensor],
        opts: Any,
        make: Callable[[], GroupCall],
        observed: ranges.ObservedCall | None = None,
    ) -> dist.Work:
        """Make a call like an earlier one, or else as :meth:`run` does.

        Args:
            name: name of the operation, one of ``repeat.OPERATIONS``.
            detail: its reduction or root; None where it has neither.
            tensors: tensors of the call, the output first; of one dtype and device if it is like another.
            opts: options of torch.
            make: function that puts the call together.
            observed: the call, for those that observe it; None if nobody does, or to begin it here.
        """
        if observed is None and ranges.is_active():
            with ranges.ObservedCall(name, tensors[:1], tensors[1:], self._ranks, self._name) as observed:
                observed.work = made = self.launch(name, detail, tensors, opts, make, observed)
                return made
        device = tensors[0].device
        key = (name, detail, tensors[0].dtype, device)
        repeated = self._repeated.get(key)
        if (
            repeated is None
            or opts.timeout > NO_TIMEOUT
            or self._coalescing is not None
            or (name == "all_to_all_single" and tensors[0].nbytes >= STAGED_BYTES)  # see _slower_staged
            or (device.type == "cpu" and self._captures())
        ):
            return self._run(_keyed(make(), key), observed)
        is_async = opts.asyncOp
        try:
            work = self._orders[device.type].repeat(repeated, tensors, is_async)
        except Exception as error:
            self._explain(error)
            raise
        if work is None:
            return self._run(_keyed(make(), key), observed)
        nbytes = tensors[0].nbytes if len(tensors) == 1 else max(tensors[0].nbytes, tensors[1].nbytes)
        choice = repeated.calls.last_choice
        assert choice is not None
        if choice is not repeated.choice:
            repeated.take_choice(choice)
        self.ledger.note(repeated.row, choice.reason, nbytes)
        if is_async and nbytes <= SMALL_BYTES:
            self._kept.append(work)
        if observed is not None:
            observed.maker = self._maker(tensors)
        return work

    def _maker(self, tensors: Sequence[torch.Tensor]) -> Calls | None:
        """Return the calls of the communicator of such tensors; None if there is none yet."""
        made = self._communicators.get(tensors[0].device.type if tensors else "cpu")
        return None if made is None else made.lane.calls

    def _captures(self) -> bool:
        """Return True if the current stream is captured into a graph."""
        return self._can_capture and torch.cuda.is_current_stream_capturing()

    def run(self, call: GroupCall) -> dist.Work:
        """Make a call of all ranks, in its order. Profilers of torch see it by its name, and those that record shapes
        also get the fields that ``record_param_comms`` has for calls in C++: sizes, data type and group.
        """
        if not ranges.is_active():
            return self._run(call)
        read = [tensor for tensor in call.tensors if all(tensor is not output for output in call.outputs)]
        with ranges.ObservedCall(call.name, call.outputs, read, self._ranks, self._name) as observed:
            observed.work = work = self._run(call, observed)
            return work

    def _run(self, call: GroupCall, observed: ranges.ObservedCall | None = None) -> dist.Work:
        self.require()
        device = call.tensors[0].device.type if call.tensors else "cpu"
        call.refusal = call.refusal or self.uses(device) or self._across(call) or self._slower_staged(call, device)
        if (call.refusal or self._nodes.spans) and settings.current().deterministic and call.adds_floats:
            why = f"{self.names.get(device, 'none')} would make it ({call.refusal})"
            raise in_no_order(call.name, why if call.refusal else "it adds up sums of several nodes")
        if self._captures():
            self._refuse_in_graph(call, device)
        order = self._orders.get(device)
        if order is None:
            work = self._make_other(call, device)
        elif call.refusal:
            work = order.other(lambda: self._make_other(call, device), call.is_async)
        else:
            work = order.run(lambda: self._make(call, device), call.tensors, call.outputs, call.is_async, call.timeout)
        if self._coalescing is not None:
            self._coalescing.append(work)
        if call.is_async and call.nbytes <= SMALL_BYTES:
            self._kept.append(work)
        if observed is not None and not call.refusal:
            observed.maker = self._maker(call.tensors)
        return work

    def _across(self, call: GroupCall) -> str:
        """Return the reason why a call of a group on several nodes takes no steps within nodes; "" if it does."""
        if not self._nodes.spans:
            return ""
        from sidelane.integrations.nodes.choose import FLAT, choose_steps

        choice = choose_steps(call.across, call.nbytes, self._nodes, without=call.flat or call.name)
        if choice.name == FLAT:
            return f"{FLAT}: {choice.reason}"
        call.reason = choice.reason
        return ""

    def _slower_staged(self, call: GroupCall, device: str) -> str:
        """Return the reason why the other backend makes a call on ordinary tensors, as staging takes longer; "" if not.

        Collective for the first call of a size: the ranks find out together if some of them have symmetric tensors.
        """
        if call.key is None or call.name != "all_to_all_single" or call.nbytes < STAGED_BYTES:
            return ""
        if self.names.get(device) != "nccl" or self._nodes.spans:
            return ""
        if self._captures():
            return ""
        made = self._communicator(call.tensors[0].device)
        if not isinstance(made, Communicator) or made.config.beside != settings.NOTHING:
            return ""
        if not are_plain(call.tensors, *call.key[2:]) or not all_ordinary(made.lane.arguments, call.tensors):
            return ""
        text = f"{call.name} of {call.nbytes} bytes of ordinary {call.key[2]}"
        if text not in self._agreed:
            made.lane.agree(call.name, text)
            self._agreed.add(text)
        return f"ordinary tensors of {format_bytes(STAGED_BYTES)} and more; in a sidelane.pool Sidelane makes it"

    def pass_on(self, call: GroupCall, peers: Sequence[int]) -> dist.Work:
        """Make a call between two ranks, in no order with the calls of all.

        Args:
            call: call of two ranks.
            peers: the other rank, or all ranks that it may be.
        """
        self.require()
        if self._captures():
            self._refuse_in_graph(call, call.tensors[0].device.type)
        work = self._make_other(call, call.tensors[0].device.type, peers)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _refuse_in_graph(self, call: GroupCall, device: str) -> None:
        """Raise for a call that the graph under capture would not hold; no step has run."""
        maker = self.names.get(device, "none") if call.refusal or call.job is None else SIDELANE
        if device == "cpu":
            why = "tensors of the CPU, which replays would not touch (allowed=before the capture, or behind it)"
        elif maker not in (SIDELANE, "nccl"):
            why = f"{maker} makes it, on the host ({call.refusal or 'Sidelane has no such operation'})"
        elif maker == SIDELANE and device not in self._communicators:
            why = "the group's first call that Sidelane makes (allowed=one before the capture)"
        else:
            return
        raise UnavailableError(f"{call.name}: not while a graph is captured: {why}")

    def _make(self, call: GroupCall, device: str) -> None:
        """Make a call in its turn, by Sidelane if the ranks can."""
        communicator = self._communicator(call.tensors[0].device if call.tensors else torch.device(device))
        if communicator is None:
            call.refusal = self._refusals[device]
            self._make_other(call, device).wait()
            return
        assert call.job is not None
        try:
            call.job(cast(Communicator, communicator))  # a method that both kinds of communicator have
        except Exception as error:
            self._explain(error)
            raise
        if not isinstance(communicator, Communicator):
            from sidelane.integrations.nodes.choose import HIERARCHICAL

            self._note(call, device, SIDELANE, HIERARCHICAL, call.reason)
            return
        choice = communicator.last_choice()
        assert choice is not None
        self._note(call, device, SIDELANE, choice.candidate.variant, choice.reason)
        if call.key is not None:
            self._repeated[call.key] = RepeatedCall(communicator, call.key, call.options)

    def _explain(self, error: Exception) -> None:
        """Add details to the error of a call; raise if it is the end of the group."""
        if self._ended:
            raise self._refusal(self._ended) from error
        if self._ranks != tuple(range(len(self._ranks))):
            error.add_note(f"ranks of {self._name} are, in the world: {list(self._ranks)}")

    def _make_other(self, call: GroupCall, device: str, peers: Sequence[int] | None = None) -> dist.Work:
        name, is_of_all = self.names.get(device, "none"), peers is None
        needed = range(len(self._ranks)) if peers is None else peers
        self.memory.went_elsewhere(call.tensors)
        self._note(call, device, name, call.refusal)
        try:
            if name == "nccl":  # it refuses tensors that are not contiguous, on this rank, in words
                work, copies = call.other(), calls.Copies()
            else:
                work, copies = calls.call_contiguous(call.other, call.outputs)
        except RuntimeError as error:
            self._witness.explain(error, needed)
            raise
        if work is None:
            return JoinedWork([])
        return OtherWork(work, self._witness, needed, looks=is_of_all and name == "gloo", copies=copies)

    def _note(self, call: GroupCall, device: str, where: str, why: str, reason: str = "") -> None:
        dtype = calls.name_of(call.tensors[0].dtype) if call.nbytes else ""
        self.ledger.note((call.name, dtype, device, where, why), reason, call.nbytes)

    def uses(self, device: str) -> str:
        """Return the reason why Sidelane does not take tensors of such a device; "" if it does."""
        known = self._refusals.get(device)
        if known is None:
            known = self._refusals[device] = self._settle(device)
        return known

    def _settle(self, device: str) -> str:
        most = max(map(len, self._nodes.members))
        if most > MAX_NODE_RANKS:
            return f"{most} ranks on a node, Sidelane takes {MAX_NODE_RANKS}"
        if device not in self._orders:
            return f"Sidelane does not know {device}"
        asked, config = self.what_was_asked()
        if asked == SIDELANE:
            is_control = device == "cpu" and "cuda" in self.names
            return "tensors of the CPU, on a machine with GPUs (cpu:sidelane would take them)" if is_control else ""
        names = dict(pair.split(":") for pair in config.split(",")) if ":" in config else {}
        return (
            "" if names.get(device) == SIDELANE else f"{device} tensors are for {names.get(device, 'others')}, as asked"
        )

    def no_memory(self, device: str) -> str:
        """Return the reason why such a device has no Sidelane memory, as far as it is known; "" for no reason."""
        return "several nodes" if self._nodes.spans else self.uses(device)

    def communicator(self, where: torch.device | str | None) -> Communicator:
        """See ``SidelaneGroup.communicator``."""
        has_gpus = torch.cuda.is_available()
        device = torch.device(where or ("cuda" if has_gpus and "cuda" in self.names else "cpu"))
        why = self.no_memory(device.type)
        if device.type == "cuda" and not has_gpus:
            why = "this machine has no GPU"
        elif device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        made = None if why else self.for_memory(device)
        if made is None:
            why = why or self._refusals[device.type]
            raise UnavailableError(f"communicator: none for {device.type} tensors of {self._name}: {why}")
        return made

    def for_memory(self, device: torch.device) -> Communicator | None:
        """Return the communicator on a device, behind the calls of its thread: on all ranks alike. None for none."""
        self.require()
        order = self._orders[device.type]
        make = functools.partial(self._communicator, device)
        found = order.alone(make) if isinstance(order, HostOrder) else make()
        assert found is None or isinstance(found, Communicator)
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of calls, of existing communicators and of those to come."""
        self.timeout = timeout
        for communicator in list(self._communicators.values()):
            communicator.lane.set_timeout(timeout.total_seconds())
            if not isinstance(communicator, Communicator):
                communicator.status.timeout_s = timeout.total_seconds()

    def _communicator(self, where: torch.device) -> Communicator | NodesCommunicator | None:
        """Return the communicator of a device; None if the ranks found out together that there can be none."""
        made = self._communicators.get(where.type)
        return self._making.run(lambda: self._made(where)) if made is None else made

    def _made(self, where: torch.device) -> Communicator | NodesCommunicator | None:
        device = where.type
        made = self._communicators.get(device)
        if made is None:
            self.require()
        if made is None and not self._refusals[device]:
            config = settings_for(self.timeout)
            try:
                made = self._communicators[device] = self._make_communicator(where, config)
            except UnavailableError as error:
                self._refusals[device] = str(error)
            except Exception as error:
                self._explain(error)
                raise
            if self._ended and made is not None:  # meanwhile, by another thread
                self._communicators.pop(device, None)
                made.close()
                self.require()
        return made

    def _make_communicator(self, device: torch.device, config: Config) -> Communicator | NodesCommunicator:
        if not self._nodes.spans:
            return Communicator(self._group, device=device, config=config)
        from sidelane.integrations.nodes.communicator import NodesCommunicator

        group = self._group
        store, rank, name = group.get_group_store(), group.rank(), group.group_name
        return NodesCommunicator(
            store, rank, self._ranks, self._nodes, device=device, config=config, witness=self._witness, name=name
        )

    def late(self) -> tuple[str, Sequence[int]]:
        """Describe the ranks that have not come to the call that this rank is in."""
        communicator = self._communicators.get("cpu")
        if communicator is None:
            return "", ()
        if not isinstance(communicator, Communicator):
            return communicator.late()
        control = communicator.lane.control
        ranks = [rank for rank in control.absent(control.begun(control.rank)) if rank != control.rank]
        return "".join(f"; {control.describe(rank)}" for rank in ranks), ranks

    def interrupted(self, error: KeyboardInterrupt) -> None:
        """End the communicator, whose thread would wait on."""
        self._leave(error)

    def ends(self) -> None:
        """End the communicator at the interpreter's exit, and tell its peers."""
        self._leave(PeerError(f"rank {self._rank} ended without waiting for its asynchronous calls", (self._rank,)))

    def _leave(self, error: PeerError | KeyboardInterrupt) -> None:
        if (communicator := self._communicators.get("cpu")) is not None:
            _leave(communicator, error)

    def work_on(self, side: SideStream, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> dist.Work:
        """Return the work of a call that is queued on a stream, which uses these tensors."""
        communicator = self._communicators.get("cuda")
        if communicator is None:
            return StreamWork(side.stream, tensors, outputs)
        backend: Any = communicator.lane.backend
        work: dist.Work = backend.work_on(side, tensors, tuple(outputs))
        return work


def _leave(communicator: Communicator | NodesCommunicator, error: PeerError | KeyboardInterrupt) -> None:
    """End a communicator because of this rank, and tell its peers."""
    if isinstance(communicator, Communicator):
        communicator.lane.calls.fail(error)
    else:
        communicator.leave(error)


def _keyed(call: GroupCall, key: Key) -> GroupCall:
    """Return a call that is remembered by its key, if calls like it may be."""
    call.key = key if call.repeats else None
    return call


def settings_for(timeout: timedelta) -> Config:
    """Return the settings of a group's communicator: those in force, with the time-out of the group."""
    config = dataclasses.replace(settings.current(), timeout_s=timeout.total_seconds())
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        config = dataclasses.replace(config, debug=True)
    return config
