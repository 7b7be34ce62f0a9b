"""Works: results of the process group's calls, with torch's interface."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.collectives.work import NO_TIMEOUT, CallFuture, FutureWork, Work, timed_out
from sidelane.errors import PeerTimeoutError, SidelaneError, anew
from sidelane.integrations.ledger import RowKey
from sidelane.memory.control import ControlBlock
from sidelane.memory.ending import give_up_if_it_ends
from sidelane.modes import untraced

_LOOK_S = 0.5
_PATIENCE_S = 2.0  # a rank may have completed its part before it ended: its bytes may still be on their way
_GAVE_UP = "Operation timed out"  # torch's text for a wait that ends before its call


class EndedWork(Work):
    """A call that has ended, or that is ordered on the caller's stream already."""

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        dist.Work.__init__(self)
        self.outputs = tuple(outputs)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done; on GPUs, its callbacks come behind the current stream."""
        devices: list[Any] = list({tensor.device for tensor in self.outputs if tensor.is_cuda})
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(list(self.outputs))
        return future


def absent_ranks(control: ControlBlock) -> tuple[str, list[int]]:
    """Return the ranks that have not come to the call that this rank is in: text for a time-out, and their numbers."""
    ranks = [rank for rank in control.absent(control.begun(control.rank)) if rank != control.rank]
    return "".join(f"; {control.describe(rank)}" for rank in ranks), ranks


class HostWork(FutureWork):
    """A call that runs on a thread of this process.

    Args:
        future: future of the call.
        outputs: tensors that it writes.
        timeout: time-out of a ``wait`` without one; 0 for none.
        guard: group that a wait queries: ``lifetime.GroupLifetime``, or the communicator of several nodes.
    """

    def __init__(
        self,
        future: CallFuture,
        outputs: Sequence[torch.Tensor],
        timeout: timedelta,
        guard: Any,
    ) -> None:
        super().__init__()
        self.outputs = tuple(outputs)
        self._future, self._timeout, self._guard, self._maker = future, timeout, guard, os.getpid()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if os.getpid() != self._maker and not self._future.done():
            raise forks.refusal("call under way", self._maker)  # the thread that would end it runs only in the parent
        limit = timeout if timeout > NO_TIMEOUT else self._timeout
        try:
            done = self._future.has_ended(limit.total_seconds() if limit > NO_TIMEOUT else None)
        except KeyboardInterrupt as error:
            self._guard.leave(error)
            raise
        if not done:
            text, ranks = self._guard.late()
            raise PeerTimeoutError(f"{timed_out(limit, self.outputs)}{text}", ranks)
        self._raise()
        return True

    def _raise(self) -> None:
        error = self._future.exception()
        if error is not None:
            raise anew(error)


@untraced
class OtherWork(dist.Work):
    """A call of the group behind this one; its errors name the ranks that have died.

    Args:
        work: work that the other group returned.
        watch: registry of peers that have died or left: ``fallback.FailedPeers``, or the status of several nodes.
        peers: ranks that the call needs.
        looks: check the peers while it waits, too: Gloo notices a death only if it talks to the dead rank itself. This
            is for calls only whose ``wait`` has no side effects when it times out. A timed-out send or receive of Gloo
            ends the call and every connection of the group; one of NCCL may abort its communicator.
        copies: tensors of the caller with the contiguous ones that the call writes, to copy back when it has ended.
        row: row of the report for the call, which its errors repeat; None for none.

    Attributes:
        tensors: tensors of a call that a later one may come behind before the caller waits for it.
        stands_for: the caller's tensors by the identities of the copies that the call writes in their place.
        waited: function that is told of the caller's wait; None for none.
    """

    tensors: Sequence[torch.Tensor] = ()
    stands_for: Mapping[int, torch.Tensor] = MappingProxyType({})
    waited: Callable[[OtherWork], None] | None = None

    def __init__(
        self,
        work: dist.Work,
        watch: Any,
        peers: Sequence[int],
        *,
        looks: bool = False,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        row: RowKey | None = None,
    ) -> None:
        super().__init__()
        self._work, self._watch, self._peers, self._row = work, watch, peers, row
        self._looks, self._maker = looks, os.getpid()
        if copies:
            self._copies, self._copying = list(copies), threading.Lock()
            self.stands_for = {id(copy): tensor for tensor, copy in copies}

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if os.getpid() != self._maker and not self._work.is_completed():
            raise forks.refusal("call under way", self._maker)
        try:
            done = self._wait_looking(timeout) if self._looks else self._work.wait(timeout)
            if self.stands_for:
                self._copy_back()
            if self.waited is not None:
                self.waited(self)
                self.tensors = ()
            return done
        except SidelaneError:
            raise
        except RuntimeError as error:
            self._watch.explain(error, self._peers, self._row)
            raise

    def precede(self) -> None:
        """Let the current stream wait, for a later call. NCCL's work holds its tensors until then only."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._watch.explain(error, self._peers, self._row)
            raise
        for tensor in self.tensors:
            if tensor.is_cuda and tensor.layout is torch.strided:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _wait_looking(self, timeout: timedelta) -> bool:
        began, noticed = time.monotonic(), math.inf
        limit = timeout.total_seconds() if timeout > NO_TIMEOUT else math.inf
        while True:
            left = limit - (time.monotonic() - began)
            try:
                return self._work.wait(timedelta(seconds=max(min(_LOOK_S, left), 1e-3)))
            except RuntimeError as error:
                if _GAVE_UP not in str(error) or time.monotonic() - began >= limit:
                    raise
            give_up_if_it_ends()
            if self._watch.gone(self._peers):
                noticed = min(noticed, time.monotonic())
                if time.monotonic() - noticed > _PATIENCE_S:
                    raise RuntimeError("connection closed: a peer is gone")

    def _copy_back(self) -> None:
        """Copy what the call has written to the caller's tensors, once."""
        with self._copying:
            while self._copies:
                tensor, copy = self._copies.pop()
                tensor.data.copy_(copy)

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        if self.stands_for and self._work.is_success():
            self._copy_back()
        return True

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        self.is_completed()
        return [self.stands_for.get(id(each), each) for each in self._work.result()]

    def synchronize(self) -> None:
        self._work.synchronize()
        if self.stands_for:
            self._copy_back()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> Any:
        future = self._work.get_future()
        if not self.stands_for:
            return future

        def ended(future: torch.futures.Future[Any]) -> list[torch.Tensor]:
            outputs = future.value()  # raises the call's error
            self._copy_back()
            return [self.stands_for.get(id(each), each) for each in outputs]

        return future.then(ended)


class JoinedWork(Work):
    """Several calls that were made as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Any:
        joined = torch.futures.collect_all([work.get_future() for work in self._works])
        return joined.then(lambda futures: [output for each in futures.value() for output in each.value()])
