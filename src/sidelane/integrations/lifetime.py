"""Life of a process group: its communicators, from their making to its end, and calls that wait meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import config as settings
from sidelane import forks
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError
from sidelane.integrations.fallback import FailedPeers, kinds
from sidelane.integrations.ledger import SIDELANE
from sidelane.integrations.nodes.groups import NodeRanks
from sidelane.integrations.order import HostOrder, StreamOrder
from sidelane.integrations.works import absent_ranks
from sidelane.program.collective import MAX_NODE_RANKS
from sidelane.session import Communicator

if TYPE_CHECKING:
    from sidelane.integrations.nodes.communicator import NodesCommunicator  # groups on one node do without

ABORTED = "was aborted"
"""Text for the end of a group that did not wait for its calls."""


class GroupLifetime:
    """Maker and end of a group's communicators. Waiting calls query it (``works.HostWork``).

    Args:
        group: group that torch knows; this object does not keep it alive.
        other: group behind it.
        failed_peers: knows the processes that have died.
        here: ranks of the group; their settings have the time-out of Sidelane's calls.

    Attributes:
        other, failed_peers: see above.
        ranks: ranks of the group, in the world.
        rank: number of this rank in the group.
        nodes: nodes of the ranks.
        beside: ``Config.beside`` of the ranks.
        timeout: time-out of Sidelane's calls.
        name: name that torch gives the group.
        names: names of the other group's backends, by device.
        requested: devices and backends that the caller asked torch for, short and in full, both as torch writes them;
            None as long as only torch knows.
        owner: process that is the rank.
        orders: orders of calls, by device.
        communicators: communicators that were made, by device.
        refusals: reasons why devices have none, as far as they are known; "" for no reason.
        forgets: functions that drop the works, decisions and memory of calls, before the communicators are closed.
    """

    def __init__(
        self, group: dist.ProcessGroup, other: dist.ProcessGroup, failed_peers: FailedPeers, here: NodeRanks
    ) -> None:
        self._whose, self.other, self.failed_peers, self._here = weakref.ref(group), other, failed_peers, here
        self.ranks, self.rank, self.nodes = here.liveness.ranks, here.rank, here.nodes
        self.beside = here.config.beside
        self.timeout = timedelta(seconds=here.config.timeout_s)
        self.name = "undefined"
        self.names = {device.type: str(backend.name()).lower() for device, (_, backend) in kinds(other).items()}
        self.requested: tuple[str, str] | None = None
        self.owner = forks.Owner("process group")
        self._ended = ""  # words for its end
        # Only weak references here: connections and threads end with a group, not when garbage is collected.
        own = weakref.proxy(self)
        self.orders: dict[str, HostOrder | StreamOrder] = {
            "cpu": HostOrder(own),
            "cuda": StreamOrder(lambda: own.communicators["cuda"]),
        }
        self.communicators: dict[str, Communicator | NodesCommunicator] = {}
        self.refusals: dict[str, str] = {}
        self.forgets: tuple[Callable[[], None], ...] = ()
        self._making = forks.Mutex(lambda: ("a call", "the making of this group's communicator"))

    def take_name(self, name: str) -> None:
        """Set the name that torch gives the group."""
        self.name = name
        self.owner.what = f"process group {name}"

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, as long as the program has it."""
        found = self._whose()
        if found is None:
            raise self._refusal("was dropped")
        return found

    def check(self) -> None:
        """Raise a PeerError, which the peers receive, if the group has ended and waiting for peers is useless."""
        if self._ended:
            raise self._ending_error()

    def _ending_error(self) -> PeerError:
        return PeerError(f"process group {self.name} {self._ended} on rank {self.rank}", (self.rank,))

    def require(self) -> None:
        """Raise if the group can make no calls.

        Raises:
            CommunicatorClosedError: it was destroyed or aborted, or this process is a forked copy of the rank.
        """
        self.owner.require()
        if self._ended:
            raise self._refusal(self._ended)

    def _refusal(self, why: str) -> CommunicatorClosedError:
        return CommunicatorClosedError(f"process group {self.name} {why}: a new group can make calls")

    def finish(self) -> None:
        """Wait for the calls under way, and release everything."""
        for order in self.orders.values():
            order.close()
        self._end("was destroyed")

    def abort(self) -> None:
        """Release everything at once: calls under way fail, here and on the other ranks, and so do later ones."""
        self._end(ABORTED)
        for order in self.orders.values():
            order.close(wait=False)

    def _end(self, how: str) -> None:
        if not self._ended:
            self._ended = how
            self.failed_peers.liveness.leave(str(self._ending_error()))
        for forget in self.forgets:
            forget()
        communicators, self.communicators = self.communicators, {}
        for communicator in communicators.values():
            if how == ABORTED:
                _leave(communicator, self._ending_error())
            communicator.close()

    def explain(self, error: Exception) -> None:
        """Add details to the error of a call; raise if it is the end of the group."""
        if self._ended:
            raise self._refusal(self._ended) from error
        if self.ranks != tuple(range(len(self.ranks))):
            error.add_note(f"ranks of {self.name} are, in the world: {list(self.ranks)}")

    def requested_backends(self) -> tuple[str, str]:
        """Return the devices and backends of the group; see ``requested``."""
        if self.requested is None:  # torch notes it after it has made the group
            group = self.group
            self.requested = str(c10d._world.pg_map[group][0]), c10d._world.pg_backend_config[group]
        return self.requested

    def uses(self, device: str) -> str:
        """Return the reason why Sidelane does not take tensors of such a device; "" if it does."""
        known = self.refusals.get(device)
        if known is None:
            known = self.refusals[device] = self._unsupported_reason(device)
        return known

    def _unsupported_reason(self, device: str) -> str:
        most = max(map(len, self.nodes.members))
        if most > MAX_NODE_RANKS:
            return f"{most} ranks on a node, Sidelane takes {MAX_NODE_RANKS}"
        if device not in self.orders:
            return f"Sidelane does not know {device}"
        requested, config = self.requested_backends()
        if requested == SIDELANE:
            is_control = device == "cpu" and "cuda" in self.names
            return "tensors of the CPU, on a machine with GPUs (cpu:sidelane would take them)" if is_control else ""
        names = dict(pair.split(":") for pair in config.split(",")) if ":" in config else {}
        return (
            "" if names.get(device) == SIDELANE else f"{device} tensors are for {names.get(device, 'others')}, as asked"
        )

    def no_memory(self, device: str) -> str:
        """Return the reason why such a device has no Sidelane memory, as far as it is known; "" for no reason."""
        return "several nodes" if self.nodes.spans else self.uses(device)

    def communicator_for(self, where: torch.device | str | None) -> Communicator:
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
            why = why or self.refusals[device.type]
            raise UnavailableError(f"communicator: none for {device.type} tensors of {self.name}: {why}")
        return made

    def for_memory(self, device: torch.device) -> Communicator | None:
        """Return the communicator on a device, behind the calls of its thread: on all ranks alike. None for none."""
        self.require()
        order = self.orders[device.type]
        make = functools.partial(self.communicator, device)
        found = order.alone(make) if isinstance(order, HostOrder) else make()
        assert found is None or isinstance(found, Communicator)
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of calls, of existing communicators and of those to come."""
        self.timeout = timeout
        for communicator in list(self.communicators.values()):
            communicator.set_timeout(timeout.total_seconds())

    @property
    def debug(self) -> bool:
        """True if all calls are compared between the ranks: with ``SIDELANE_DEBUG``, or torch's ``DETAIL``."""
        return settings.current().debug or dist.get_debug_level() == dist.DebugLevel.DETAIL

    def config(self) -> settings.Config:
        """Return the settings of communicators that are made now."""
        return dataclasses.replace(settings.current(), timeout_s=self.timeout.total_seconds(), debug=self.debug)

    def communicator(self, where: torch.device) -> Communicator | NodesCommunicator | None:
        """Return the communicator of a device; None if the ranks found out together that there can be none."""
        made = self.communicators.get(where.type)
        return self._making.run(lambda: self._made(where)) if made is None else made

    def _made(self, where: torch.device) -> Communicator | NodesCommunicator | None:
        device = where.type
        if (made := self.communicators.get(device)) is not None:
            return made
        self.require()
        if self.refusals[device]:
            return None
        config = self.config()
        try:
            if self.nodes.spans:
                from sidelane.integrations.nodes.communicator import NodesCommunicator

                ranks = dataclasses.replace(self._here, config=config, name=self.group.group_name)
                made = NodesCommunicator(ranks, where)
            else:
                made = Communicator(self.group, device=where, config=config)
                made.heap.stages_others = True
        except UnavailableError as error:
            self.refusals[device] = str(error)
            return None
        except Exception as error:
            self.explain(error)
            raise
        self.communicators[device] = made
        if self._ended:  # meanwhile, by another thread
            self.communicators.pop(device, None)
            made.close()
            self.require()
        return made

    def late(self) -> tuple[str, Sequence[int]]:
        """Describe the ranks that have not come to the call that this rank is in."""
        communicator = self.communicators.get("cpu")
        if communicator is None:
            return "", ()
        if not isinstance(communicator, Communicator):
            return communicator.late()
        return absent_ranks(communicator.control)

    def leave(self, error: PeerError | KeyboardInterrupt) -> None:
        """End the communicator, whose thread would wait on, because of this rank, and tell its peers."""
        if (communicator := self.communicators.get("cpu")) is not None:
            _leave(communicator, error)


def _leave(communicator: Communicator | NodesCommunicator, error: PeerError | KeyboardInterrupt) -> None:
    """End a communicator because of this rank, and tell its peers."""
    if isinstance(communicator, Communicator):
        communicator.calls.fail(error)
    else:
        communicator.leave(error)
