"""The way to fused operators among nodes: it finds the nodes of a group, and makes what their ranks need."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane.config import Config
from sidelane.integrations.fallback import make_other, nccl_not_ending_the_process
from sidelane.integrations.nodes.groups import find_nodes
from sidelane.memory.exchange import ranks_of, store_of
from sidelane.ops.scale_out import GroupTransport, ScaleOut
from sidelane.session import Communicator
from sidelane.session.making import group_for

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Number of times that each group was asked for, which makes the names in its store unique."""


@contextlib.contextmanager
def scale_out(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    config: Config | None = None,
) -> Iterator[ScaleOut]:
    """Make the ranks of a group ready for fused operators among its nodes, in a ``with`` block. Collective.

    Args:
        group: group of any backend; None for the default group.
        device: see :class:`sidelane.Communicator`.
        config: see :class:`sidelane.Communicator`; ``virtual_nodes`` counts.

    Raises:
        TypeError: ``group`` is no group.
        UnavailableError: a node lacks what a communicator needs; on all ranks alike.
        PeerError, PeerTimeoutError: a rank failed in another way; a rank did not come.
    """
    group = group_for("scale_out", group)
    config = config or settings.current()
    number = _made[group] = _made.get(group, 0) + 1
    rank, ranks = group.rank(), ranks_of(group)
    timeout = timedelta(seconds=config.timeout_s)
    store = dist.PrefixStore(f"sidelane/scale-out/{number}/", store_of(group))
    here = find_nodes(store, rank, ranks, None, config, name=f"{group.group_name}/scale-out/{number}")
    of = here.nodes.of
    with contextlib.ExitStack() as stack:
        own = here.own_node()
        stack.callback(own.close)
        # Each part is made on all ranks, or an error is raised on all.
        intra_node, _ = here.within("intra-node").made_by_all(
            lambda: stack.enter_context(Communicator(own, device=device, config=config))
        )

        def make_carrier() -> GroupTransport:
            with nccl_not_ending_the_process():
                up, down = (
                    make_other(way.store, rank, len(ranks), timeout, way.name, (), None)
                    for way in (here.within("up"), here.within("down"))
                )
            made = GroupTransport(up, down, rank, intra_node.device)
            stack.callback(made.close)  # also where what follows fails
            return made

        carrier, _ = here.within("carrier").made_by_all(make_carrier)
        carrier.warm_up([other for other in range(len(ranks)) if of[other] != of[rank]], config.timeout_s)
        everyone = here.everyone()
        stack.callback(everyone.close)
        yield stack.enter_context(ScaleOut(intra_node, everyone, of, transport=carrier))
