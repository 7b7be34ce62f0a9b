"""Process group: it sends calls to a communicator of Sidelane or to Gloo or NCCL, all in one order.

A Python ``ProcessGroup`` takes the place of torch's own, for all devices. Its methods are those that torch calls, from
Python (``torch.distributed``) and from C++ (DDP's reducer, functional collectives). Some have two names: torch 2.13 has
given them new ones.
"""

# mypy: disable-error-code="override, assignment"
# torch declares each of these twice, for callers with options and for callers with a root or an operation.

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import forks
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.config import Config
from sidelane.integrations import calls
from sidelane.integrations.dispatch import GroupDispatcher
from sidelane.integrations.fallback import FailedPeers, kinds, make_other
from sidelane.integrations.ledger import SIDELANE
from sidelane.integrations.lifetime import GroupLifetime
from sidelane.integrations.nodes.groups import find_nodes
from sidelane.memory.liveness import Wider, known, set_liveness
from sidelane.modes import untraced
from sidelane.session import Communicator

GivenTensors = Sequence[torch.Tensor] | torch.Tensor


@untraced
class SidelaneGroup(dist.ProcessGroup):
    """A process group with Sidelane's collectives; made by torch, or by :func:`sidelane.wrap`.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        size: number of ranks of the group.
        timeout: time-out of calls; None for that of the settings.
        ranks: ranks of the group, in the world.
        other: function that returns the group for all other calls, with a time-out.
        owned: ``other`` is closed with this group.
        wider: liveness of a group that contains this one (``memory.liveness``); None for none.

    Attributes:
        fsdp_lanes: lanes of FSDP2's calls on shards of this group; none before the first (``sidelane.fsdp``).

    Raises:
        ValueError: a setting is not allowed; the other ranks raise PeerError with the reason.
        UnavailableError: the store keeps no values.
        PeerError: a rank died, or did not come.
    """

    fsdp_lanes: Sequence[Communicator] = ()

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta | None,
        ranks: Sequence[int],
        other: Callable[[timedelta], dist.ProcessGroup],
        *,
        owned: bool = True,
        wider: Wider | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form with a store makes an object whose methods torch would not call
        self._store, self.world_ranks = store, tuple(ranks)
        here = find_nodes(store, rank, self.world_ranks, timeout, wider=wider)
        set_liveness(self, here.liveness)
        failed_peers = FailedPeers(here.liveness)
        try:
            self._other, self._owned = other(timedelta(seconds=here.config.timeout_s)), owned
        except RuntimeError as error:  # a rank that has met the others may end while they connect
            failed_peers.explain(error, range(size))
            raise
        self._lifetime, self._description = GroupLifetime(self, self._other, failed_peers, here), "undefined"
        self.bound_device_id = self._other.bound_device_id  # registering a backend sets it
        for device, (kind, backend) in kinds(self._other).items():
            self._register_backend(device, kind, backend)
            self._set_default_backend(kind)
        self._dispatcher = GroupDispatcher(self._lifetime)
        # In a forked copy, the end of a connection would close the parent's, and the wait for threads would not end.
        for group in (self, self._other):
            forks.in_copies_of(group, forks.never_finalize)

    # --- interface of a group for torch -------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of the backend in torch."""
        return SIDELANE

    def take_devices(self, requested: str, config: str | None = None) -> None:
        """Set the group's devices and backends: the caller's request, short and in full, both as torch writes it."""
        self._lifetime.requested = requested, config or requested

    def communicator(self, device: torch.device | str | None = None) -> Communicator:
        """Return the communicator for a device's tensors (None: the current GPU's, else the CPU's). Collective.

        Raises:
            UnavailableError: Sidelane makes no calls on such tensors, or the group is on several nodes.
        """
        return self._lifetime.communicator_for(device)

    def getGroupName(self) -> str:
        """Return the name that torch has set; functional collectives find the group by it."""
        return self._lifetime.name

    def setGroupName(self, name: str) -> None:
        """Set the name; torch calls this when the group is made."""
        self._lifetime.take_name(name)
        self._dispatcher.ledger.group = name
        if self._owned:
            self._other._set_group_name(name)  # type: ignore[arg-type]

    def getGroupDesc(self) -> str:
        """Return the description that torch has set."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description; torch calls this when the group is made."""
        self._description = description
        if self._owned:
            self._other._set_group_desc(description)

    def config(self) -> Config:
        """Return the settings of communicators for this group, with its time-out."""
        return self._lifetime.config()

    def at_end(self, function: Callable[[], None]) -> None:
        """Call a function before the group's communicators are closed."""
        self._lifetime.forgets += (function,)

    def check(self) -> None:
        """Raise if the group has ended; called while the ranks make a communicator."""
        self._lifetime.check()

    def get_group_store(self) -> dist.Store:
        """Return the store of these ranks alone."""
        return self._store

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> SidelaneGroup | None:
        """Make a group of some of these ranks (numbers in this group); None on the others. See ``dist.split_group``."""
        self._lifetime.require()
        if self.rank() not in new_ranks:
            return None
        chosen = sorted(new_ranks)
        ranks = [self.world_ranks[rank] for rank in chosen]
        name = group_name or f"{self.group_name}:split:{'-'.join(map(str, chosen))}"
        store = dist.PrefixStore(f"{name}/", self._store)
        arguments, wider = (store, chosen.index(self.rank()), len(chosen)), known(self)
        assert wider is not None

        def other(timeout: timedelta) -> dist.ProcessGroup:
            # Of the default group's NCCL communicator nothing is split: these ranks may be of several worlds.
            return make_other(*arguments, timeout, name, (), None)

        made = SidelaneGroup(*arguments, timeout or self._lifetime.timeout, ranks, other, wider=(wider, chosen))
        made.take_devices(*self._lifetime.requested_backends())
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self.group_desc}:split")
        return made

    def shutdown(self) -> None:
        """Wait for the calls under way, and release everything; no effect in a forked copy."""
        if self._lifetime.owner.is_copied:
            return
        self._lifetime.finish()
        if self._owned:
            self._other.shutdown()

    def abort(self) -> None:
        """Release everything at once: calls under way fail, here and on the other ranks, and so do later ones.

        No effect in a forked copy.
        """
        if self._lifetime.owner.is_copied:
            return
        self._lifetime.abort()
        if self._owned:
            self._other.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of calls: Sidelane's, Gloo's and NCCL's. torch's ``_set_pg_timeout`` calls it.

        Among several nodes it applies to the calls within a node, and to the watchdog for late ranks elsewhere.
        """
        self._lifetime.set_timeout(timeout)
        for lane in self.fsdp_lanes:
            lane.set_timeout(timeout.total_seconds())
        self._other.set_timeout(timeout)

    # --- collectives --------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Make an ``all_gather_into_tensor``."""
        opts = opts or c10d.AllgatherOptions()
        return self._dispatcher.launch(calls.ALL_GATHER, (output,), (input,), opts, (output, input, opts))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Make several ``all_gather_into_tensor``; functional collectives make a single one so."""
        if len(outputs) == len(inputs) == 1:
            return self.all_gather_single(outputs[0], inputs[0], opts)
        opts = opts or c10d.AllgatherOptions()
        return self._dispatcher.launch(calls.ALL_GATHER_COALESCED, outputs, inputs, opts, (outputs, inputs, opts))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Any, inputs: GivenTensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Make an ``all_gather``."""
        opts, inputs = _options(c10d.AllgatherOptions, opts, timeout), _listed(inputs)
        nested = outputs if isinstance(outputs[0], list | tuple) else [outputs]
        is_one = len(inputs) == 1
        operation = calls.ALL_GATHER_LIST if is_one else calls.ALL_GATHER_LIST.lacking
        return self._dispatcher.launch(operation, nested[0] if is_one else [], inputs, opts, (nested, inputs, opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Make an ``all_to_all_single``; split sizes are given on all ranks, or on none."""
        opts = _options(dist.AllToAllOptions, opts, timeout)
        sizes = [list(given) if given is not None else [] for given in (output_split_sizes, input_split_sizes)]
        operation, args = calls.ALL_TO_ALL_UNEVEN if any(sizes) else calls.ALL_TO_ALL, (output, input, *sizes, opts)
        return self._dispatcher.launch(operation, (output,), (input,), opts, args, operation.flat)

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Make an ``all_to_all``."""
        opts = _options(dist.AllToAllOptions, opts, timeout)
        return self._dispatcher.launch(calls.ALL_TO_ALL_LIST, outputs, inputs, opts, (outputs, inputs, opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Make a ``reduce_scatter_tensor``."""
        opts = opts or dist.ReduceScatterOptions()
        return self._dispatcher.launch(
            calls.REDUCE_SCATTER, (output,), (input,), opts, (output, input, opts), opts.reduceOp.op
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Make several ``reduce_scatter_tensor``; functional collectives make a single one so."""
        if len(outputs) == len(inputs) == 1:
            return self.reduce_scatter_single(outputs[0], inputs[0], opts)
        opts = opts or dist.ReduceScatterOptions()
        return self._dispatcher.launch(
            calls.REDUCE_SCATTER_COALESCED, outputs, inputs, opts, (outputs, inputs, opts), opts.reduceOp.op
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: GivenTensors, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Make a ``reduce_scatter``."""
        opts, outputs = _options(dist.ReduceScatterOptions, opts, timeout), _listed(outputs)
        nested = inputs if isinstance(inputs[0], list | tuple) else [inputs]
        is_one, args = len(outputs) == 1, (outputs, nested, opts)
        operation = calls.REDUCE_SCATTER_LIST if is_one else calls.REDUCE_SCATTER_LIST.lacking
        return self._dispatcher.launch(operation, outputs, nested[0] if is_one else [], opts, args, opts.reduceOp.op)

    def allreduce(self, tensors: GivenTensors, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Make an ``all_reduce``."""
        if timeout is not None or not isinstance(opts, dist.AllreduceOptions):
            opts = _options(dist.AllreduceOptions, opts, timeout)
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        operation = calls.ALL_REDUCE if len(tensors) == 1 else calls.ALL_REDUCE_LIST
        return self._dispatcher.launch(operation, tensors, (), opts, (tensors, opts), opts.reduceOp.op)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Make several ``all_reduce``."""
        opts = opts or dist.AllreduceCoalescedOptions()
        operation = calls.ALL_REDUCE_COALESCED if len(tensors) != 1 else calls.ALL_REDUCE_OF_ONE
        return self._dispatcher.launch(operation, tensors, (), opts, (tensors, opts), opts.reduceOp.op)

    def broadcast(
        self, tensors: GivenTensors, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> dist.Work:
        """Make a ``broadcast``."""
        opts, tensors = _options(dist.BroadcastOptions, opts, timeout, root), _listed(tensors)
        operation = calls.BROADCAST if len(tensors) == 1 and not opts.rootTensor else calls.BROADCAST.lacking
        return self._dispatcher.launch(operation, tensors, (), opts, (tensors, opts), opts.rootRank)

    def scatter(
        self, outputs: GivenTensors, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> dist.Work:
        """Make a ``scatter``; ``inputs`` is empty except on the root."""
        opts, outputs = _options(dist.ScatterOptions, opts, timeout, root), _listed(outputs)
        nested = [inputs] if len(inputs) and isinstance(inputs[0], torch.Tensor) else inputs
        return self._dispatcher.launch(calls.SCATTER, outputs, [*nested, []][0], opts, (outputs, nested, opts))

    def gather(
        self, outputs: Any, inputs: GivenTensors, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> dist.Work:
        """Make a ``gather``; ``outputs`` is empty except on the root."""
        opts, inputs = _options(dist.GatherOptions, opts, timeout, root), _listed(inputs)
        nested = [outputs] if len(outputs) and isinstance(outputs[0], torch.Tensor) else outputs
        return self._dispatcher.launch(calls.GATHER, [*nested, []][0], inputs, opts, (nested, inputs, opts))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Make a ``barrier``; on GPUs the host waits for it, as it does with NCCL."""
        self._lifetime.require()
        opts = _options(dist.BarrierOptions, opts, timeout)
        device = torch.device("cpu")
        if opts.device is not None:
            device = opts.device
        elif opts.device_ids and "cuda" in self._lifetime.names:
            device = torch.device("cuda", opts.device_ids[0])
        elif self._lifetime.uses("cpu") and "cuda" in self._lifetime.names:
            device = torch.device("cuda", torch.cuda.current_device())
        stands_for_it = torch.empty(0, dtype=torch.uint8, device=device)
        return self._dispatcher.launch(calls.BARRIER, (), (stands_for_it,), opts, (opts,))

    # --- operations that Sidelane lacks -------------------------------------------------------------------------------

    def reduce(
        self, tensors: GivenTensors, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> dist.Work:
        """Make a ``reduce``."""
        opts, tensors = _options(dist.ReduceOptions, opts, timeout, root), _listed(tensors)
        return self._dispatcher.launch(calls.REDUCE, tensors, (), opts, (tensors, opts))

    def allgather_coalesced(self, outputs: Any, inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Make an ``all_gather_coalesced``, which torch has deprecated."""
        opts, written = opts or c10d.AllgatherOptions(), [each for row in outputs for each in row]
        return self._dispatcher.launch(calls.ALL_GATHER_OF_LISTS, written, inputs, opts, (outputs, inputs, opts))

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Make a ``send`` to a rank of the group."""
        return self._dispatcher.pass_on(calls.SEND, (), tensors, (tensors, dst, tag), [dst])

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Make a ``recv`` from a rank of the group."""
        return self._dispatcher.pass_on(calls.RECV, tensors, (), (tensors, src, tag), [src])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        """Make a ``recv`` from any rank that sends."""
        return self._dispatcher.pass_on(calls.RECV_ANYSOURCE, tensors, (), (tensors, tag), range(self.size()))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Make Gloo's ``monitored_barrier``."""
        self._lifetime.require()
        self._other.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]

    def _start_coalescing(self, device: torch.device) -> None:
        self._dispatcher.begin_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._dispatcher.end_coalescing(device)


def _listed(tensors: GivenTensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


_GIVEN = {
    dist.AllreduceOptions: "reduceOp",
    dist.ReduceScatterOptions: "reduceOp",
    **dict.fromkeys((dist.BroadcastOptions, dist.GatherOptions, dist.ReduceOptions, dist.ScatterOptions), "rootRank"),
}
"""Option that callers may give in place of all, by the class of the options."""


def _options(kind: type[Any], opts: Any, timeout: timedelta | None, root: int = 0) -> Any:
    """Return torch's options of a call, of which the caller may have given all, one (``_GIVEN``) or none.

    Args:
        kind: class of the options.
        opts: the caller's argument.
        timeout: the caller's other argument; it counts if it is one.
        root: root of a call that has one, if ``opts`` is None.
    """
    name = _GIVEN.get(kind)
    if opts is None or (name is not None and not isinstance(opts, kind)):
        opts, given = kind(), root if opts is None and name == "rootRank" else opts
        if name is not None and given is not None:
            setattr(opts, name, given)
    if timeout is not None and timeout > NO_TIMEOUT:
        opts.timeout = timeout
    return opts
