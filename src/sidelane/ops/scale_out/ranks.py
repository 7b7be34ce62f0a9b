"""The ranks of several nodes, for fused operators: a communicator within the node, and a proxy for the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.errors import (
    CommunicatorClosedError,
    MismatchError,
    PeerError,
    PeerTimeoutError,
    SidelaneError,
    UnavailableError,
    anew,
)
from sidelane.memory.exchange import Exchange
from sidelane.memory.storage import persistent
from sidelane.ops.handle import is_captured
from sidelane.ops.scale_out import words
from sidelane.ops.scale_out.connections import Gone, InterNodeConnections
from sidelane.ops.scale_out.proxy import InterNodeCall, Proxy
from sidelane.ops.scale_out.transport import GroupTransport
from sidelane.ops.scale_out.words import HandleWords
from sidelane.session import Communicator

_GRACE_S = 1.0
"""Seconds in which the cause of a failure on this node may arrive from another one."""

_STEP_S = 0.5


class ScaleOut:
    """Ranks of several nodes that run fused operators (``sidelane.ops.scale_out``). Collective.

    Every rank makes the same calls in the same order. A call that fails, or that one rank refuses, ends it for all.

    Args:
        intra_node: communicator of the ranks of this node, in the order of their numbers in the group.
        group: all ranks; it needs a store only.
        nodes: number of the node of each rank.
        transport: moves slices between nodes.

    Attributes:
        device, config: those of ``intra_node``.
        remote_ranks: ranks on other nodes, those behind this one first.
        local_ranks: number of each rank on this node; -1 for ranks on other ones.
        order: ranks in the order in which a kernel sends: other nodes first, this rank last.
        transport, proxy: what moves the slices.
        cache: operators' objects, by their own keys, until :meth:`close`.
        operator_number: number by which operators of PyTorch know it; None before it has one.

    Raises:
        PeerError, PeerTimeoutError: a rank of another node did not come.
    """

    def __init__(
        self,
        intra_node: Communicator,
        group: dist.ProcessGroup,
        nodes: Sequence[int],
        *,
        transport: GroupTransport,
    ) -> None:
        rank = group.rank()
        self.intra_node, self.rank, self.world_size, self.nodes = intra_node, rank, len(nodes), tuple(nodes)
        self.device, self.config = intra_node.device, intra_node.config
        own = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        behind = [(rank + turn) % len(nodes) for turn in range(1, len(nodes) + 1)]
        self.remote_ranks = tuple(other for other in behind if other not in own)
        self.local_ranks = tuple(own.index(other) if other in own else -1 for other in range(len(nodes)))
        self.order = (*self.remote_ranks, *(other for other in behind if other in own))
        local_ranks, device = self.local_ranks, self.device
        self._local_ranks = persistent(device, lambda: torch.tensor(local_ranks, dtype=torch.int32, device=device))
        self.cache: dict[Hashable, Any] = {}
        self.operator_number: int | None = None
        self.owner = forks.Owner("ranks of several nodes")
        self._own, self._is_closed = tuple(own), False
        self._exchange = Exchange(group, self.config.timeout_s, warn_s=self.config.warn_s)
        self._links = InterNodeConnections(
            *(rank, self.remote_ranks, lambda own: self._exchange("connections of several nodes", lambda: own)),
            timeout_s=self.config.timeout_s,
        )
        self.transport = transport
        try:
            self.proxy = Proxy(
                *(rank, self.remote_ranks, self._links, self.transport, self.device),
                timeout_s=self.config.timeout_s,
                failed=self._end_intra_node,
            )
            self.proxy.start()
        except BaseException:
            self._links.close()
            raise
        self._exchange.look = self.require_open

    def require_open(self) -> None:
        """Raise if there can be no more calls.

        Raises:
            CommunicatorClosedError: it was closed, or this is a forked copy, or a call failed before.
            PeerError: a rank has failed since the last call.
        """
        self.owner.require()
        if self._is_closed:
            raise CommunicatorClosedError("scale-out: closed; calls come before close()")
        if self.proxy.failure is not None:
            raise anew(self.proxy.failure)

    def exchange(self, what: str, word: Any) -> list[Any]:
        """Return the words of all ranks, in their order: JSON, with tuples for lists. Collective.

        Args:
            what: subject, for errors; the same on all ranks.
            word: word of this rank, of one form on all ranks.

        Raises:
            MismatchError: ranks are in different calls.
            PeerError, PeerTimeoutError: a rank failed, or did not come.
        """
        self.require_open()
        try:
            return self._exchange(what, lambda: word)
        except PeerError as error:
            raise anew(self.proxy.fail(error)) from error
        except MismatchError as error:
            raise self._differ(str(error), (self.rank,)) from error

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        *,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
    ) -> None:
        """Exchange parts of tensors of one dimension with all ranks, for operators that are not fused. Collective.

        The host waits for its end.

        Raises:
            MismatchError: ranks are in different calls, or differ in their sizes.
            PeerError, PeerTimeoutError: a rank failed, or did not come.
        """
        posted = self.exchange("all-to-all among nodes", tuple(input_split_sizes))
        unlike = [other for other, sizes in enumerate(posted) if sizes[self.rank] != output_split_sizes[other]]
        if unlike:
            shown = f"value={posted[unlike[0]][self.rank]}, allowed={output_split_sizes[unlike[0]]}"
            what = f"all-to-all among nodes: size of the part of rank {unlike[0]} for rank {self.rank}"
            raise self._differ(f"{what} ({shown})", unlike)
        with self.naming(), contextlib.suppress(Gone):
            transfer = self.transport.exchange(output, given, output_split_sizes, input_split_sizes)
            until = time.monotonic() + self.config.timeout_s
            while not transfer.is_done():
                self.require_open()
                if time.monotonic() > until:
                    raise Gone(self.rank)
                time.sleep(20e-6)
            transfer.finish()
            return
        # Connections tell which rank has died. A rank that is stuck does not come again.
        self.exchange("an all-to-all among nodes, which failed", 0)
        failed = PeerError(f"scale-out: rank {self.rank}: an all-to-all among nodes failed", (self.rank,))
        raise anew(self.proxy.fail(failed))

    def agree(self, what: str, word: Any) -> None:
        """Raise unless all ranks say the same. Collective.

        Args:
            what: what they agree on, for errors; the same on all ranks.
            word: word of this rank, as for :meth:`exchange`.

        Raises:
            MismatchError: another rank says something else; there are no more calls.
            PeerError, PeerTimeoutError: a rank failed, or did not come.
        """
        posted = self.exchange(what, word)
        unlike = [other for other, each in enumerate(posted) if each != posted[self.rank]]
        if unlike:
            shown = f"value={posted[unlike[0]]!r}, here={posted[self.rank]!r}"
            raise self._differ(f"{what}: rank {unlike[0]} has other arguments ({shown})", unlike)

    def refuse(self, name: str, error: Exception) -> None:
        """Tell all ranks that this one does not make its next call, and why: they raise PeerError with the reason."""
        self._give_up(f"{name}: rank {self.rank} refused it", error)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Let errors of the node's communicator name the ranks of the group; they end the calls of all."""
        self.require_open()
        try:
            yield
        except (PeerError, CommunicatorClosedError) as error:
            if self.proxy.failure is not None:
                raise anew(self.proxy.failure) from error
            raise anew(self._explain(error)) from error
        except Exception as error:
            self._give_up(f"rank {self.rank} failed", error)
            raise
        except KeyboardInterrupt as error:
            self._give_up(f"rank {self.rank} was interrupted", error)
            raise

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Gather a few numbers of all ranks, by the store; see ``Communicator.all_gather``."""
        found = self.exchange(f"all_gather of {input.numel()} numbers", input.reshape(-1).tolist())
        output.copy_(torch.tensor(found, dtype=output.dtype, device=output.device).view(output.shape))

    def inter_node_context(self, handle: HandleWords) -> torch.Tensor:
        """Return the inter-node context of a handle's kernel (``words``), int64 on the device."""
        there = handle.addresses() | {
            words.STOP: self.proxy.stop.data_ptr(),
            words.STATUS: self.intra_node.backend.status_words,
            words.LOCAL_RANKS: self._local_ranks.data_ptr(),
        }
        row = [there.get(index, 0) for index in range(words.CONTEXT_WORDS)]
        return persistent(self.device, lambda: torch.tensor(row, dtype=torch.int64, device=self.device))

    @contextlib.contextmanager
    def calling(self, call: InterNodeCall) -> Iterator[None]:
        """Begin a call, whose kernel is launched inside, and block the host until all slices have left and arrived; the
        kernel then ends by itself.

        Streams share few hardware channels (``execute/cuda/release.py``). What the host queued behind a kernel that
        waits for the proxy could hold up the proxy's own commands, and so could the loading of another kernel.

        Raises:
            UnavailableError: inside of a capture.
            PeerError, PeerTimeoutError: a rank failed, or did not come.
        """
        self.require_open()
        if is_captured(self.intra_node):
            raise UnavailableError(
                "scale-out: calls are eager, since the proxy learns of each from the host; a graph is captured"
            )
        self.proxy.begin(call)
        with self.naming():
            yield
            while not (call.over.wait(_STEP_S) or self._is_closed or self.proxy.failure is not None):
                self.proxy.watch()
                if self.device.type == "cuda":
                    backend: Any = self.intra_node.backend
                    if backend.executor.watch.failure is not None:
                        self.intra_node.synchronize()  # which raises it
        self.require_open()

    def synchronize(self) -> None:
        """Block the host until every call has finished on this rank.

        Raises:
            PeerError, PeerTimeoutError: a rank failed.
        """
        with self.naming():
            self.intra_node.synchronize()
        self.require_open()

    def close(self) -> None:
        """End the proxy and its connections; ``intra_node`` stays open. Idempotent. Not a collective."""
        if self._is_closed or self.owner.is_copied:
            return
        self._is_closed = True
        self.cache.clear()
        self._exchange.look = None  # which refers to this object
        self.proxy.close()

    def __enter__(self) -> ScaleOut:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, PeerError):
            self._give_up(f"rank {self.rank} left", error)
        self.close()

    def _explain(self, error: SidelaneError) -> PeerError:
        """Return the error that all ranks raise for one of the node's communicator."""
        kind, until = type(error) if isinstance(error, PeerTimeoutError) else PeerError, time.monotonic() + _GRACE_S
        if type(error) is PeerError:
            while self.remote_ranks and self.proxy.failure is None and time.monotonic() < until:
                time.sleep(0.01)  # another node may know the rank at fault
        return self.proxy.fail(kind(str(error), [self._own[other] for other in getattr(error, "ranks", ())]))

    def _differ(self, text: str, ranks: Sequence[int]) -> MismatchError:
        """Return the error of ranks that are in different calls, which ends the calls of all."""
        self.proxy.fail(PeerError(text, ranks))
        return MismatchError(text)

    def _give_up(self, what: str, error: BaseException) -> None:
        """Tell all ranks, wherever they wait for this one, that it makes no more calls, and why."""
        text = f"{what}: {type(error).__name__}: {error}"
        self._exchange.refuse(self.proxy.fail(PeerError(text, (self.rank,))))

    def _end_intra_node(self, error: PeerError) -> None:
        """Fail the node's communicator, from any thread: kernels there end, and the next call raises."""
        self.intra_node.calls.fail(PeerError(str(error)))  # without ranks, which would be those of the node
        if self.device.type == "cuda":
            backend: Any = self.intra_node.backend
            backend.executor.watch.fail(error)
