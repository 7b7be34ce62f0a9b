"""Collectives of several kinds in one call, collected in a ``with`` block (``Communicator.batch``)."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist

from sidelane.collectives.call_forms import CallRequest, own_part
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.list_calls import BATCH
from sidelane.collectives.work import Work
from sidelane.modes import untraced
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside
from sidelane.session.entry import entry
from sidelane.session.lists import ListedCall, Tensors


@untraced
class Batched:
    """Collects collectives, and runs all of them as one call when its ``with`` block ends (``Communicator.batch``).

    Its methods take the arguments of the communicator's methods, lists included; they check and return nothing.
    The collectives have no order among each other: none may read or write the bytes that another one writes. A block
    that ends with an error runs none of them.

    Attributes:
        work: with ``async_op=True`` the :class:`Work` of the call, from the end of the block on.
    """

    def __init__(self, path: CallPath, *, variant: str, beside: Beside | None, async_op: bool) -> None:
        self.work: Work | None = None
        self._path, self._calls = path, path.calls
        self._variant, self._beside, self._async_op = variant, beside, async_op
        self._asked: list[CallRequest] = []
        self._is_open = self._has_ended = False

    def all_gather(self, output: Tensors, input: Tensors) -> None:
        """See ``Communicator.all_gather``."""
        self._ask(CallRequest(Kind.ALL_GATHER, (output, input)))

    def all_to_all(self, output: Tensors, input: Tensors, *, copy_own_part: bool = True) -> None:
        """See ``Communicator.all_to_all``; equal parts."""
        self._ask(CallRequest(Kind.ALL_TO_ALL, (output, input), own_part(copy_own_part)))

    def reduce_scatter(self, output: Tensors, input: Tensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.reduce_scatter``."""
        self._ask(CallRequest(Kind.REDUCE_SCATTER, (output, input), (op,)))

    def all_reduce(self, tensor: Tensors, *, op: str | dist.ReduceOp = "sum", output: Tensors | None = None) -> None:
        """See ``Communicator.all_reduce``."""
        self._ask(CallRequest(Kind.ALL_REDUCE, (tensor if output is None else output, tensor), (op,)))

    def broadcast(self, tensor: Tensors, *, root: int) -> None:
        """See ``Communicator.broadcast``; roots may differ from one to another."""
        self._ask(CallRequest(Kind.BROADCAST, (tensor,), (root,)))

    def _ask(self, asked: CallRequest) -> None:
        if not self._is_open:
            where = "behind the end of the block" if self._has_ended else "without a with block"
            raise RuntimeError(f"batch: {asked.kind} {where} (allowed=inside of one)")
        self._asked.append(asked)

    def __enter__(self) -> Batched:
        if self._is_open or self._has_ended:
            raise RuntimeError("batch: entered a second time (allowed=once; each call has a batch of its own)")
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open, self._has_ended = False, True
        self._run(error)

    @entry
    def _run(self, error: BaseException | None) -> None:
        calls = self._calls
        if error is not None:
            # The peers may have ended their blocks without an error: this block takes its place in the order of calls.
            if isinstance(error, Exception) and not calls.closed and calls.failure is None and calls.armed is None:
                calls.refuse(calls.number(), BATCH, error)
            return
        asked = ListedCall(BATCH, self._asked, self._path.arguments.world_size)
        self.work = self._path.run(asked, variant=self._variant, beside=self._beside, async_op=self._async_op)
