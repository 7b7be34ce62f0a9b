"""DDP whose gradients are averaged by Sidelane: a communication hook.

DDP hands over a bucket of gradients as soon as backward has filled it. The hook has it averaged where it lies, on a
stream of its own, while backward goes on. A bucket lies at one address for as long as DDP keeps it, so that on GPUs
peers soon read it without staging (``Config.map_memory``).
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from sidelane import config as settings
from sidelane.collectives.allocator import MemoryUse
from sidelane.collectives.learning.mappings import default_limit_bytes
from sidelane.collectives.side_stream import SideStream
from sidelane.collectives.work import Work
from sidelane.config import COMPUTE, Config, learning
from sidelane.errors import Page, explained, in_no_order, see
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.modes import keep_compilers_out
from sidelane.program.collective import ELEMENT_BYTES, Kind, ReduceOp
from sidelane.session import Communicator, Session

OPERATION = "ddp all_reduce"


@explained(Page.ONE_LINE)
def enable(model: DistributedDataParallel, *, config: Config | None = None) -> "EnabledDdp":
    """Let Sidelane average the gradients of a model. Collective.

    Gradients are those of the group's own backend, but for the order in which a sum of more than two ranks is rounded.
    Sparse gradients and dtypes that Sidelane does not add (float64) go to the group's own backend;
    ``sidelane.report()`` says so.

    Args:
        model: model without a communication hook. It keeps this one for good, as DDP requires. ``Join`` divides by all
            ranks: torch does not give a hook the number of ranks that have ended, by which
            ``divide_by_initial_world_size=False`` divides, so a backward within such a ``Join`` is an error on every
            rank.
        config: settings; None for those in force.

    Returns:
        Handle of the change; :meth:`EnabledDdp.disable` gives the gradients to the group's own backend again.

    Raises:
        ValueError: this is no DDP model, it has a hook already, or is in such a ``Join``.
        As :class:`sidelane.Session`. After any of these the model is as it was.
    """
    if not isinstance(model, DistributedDataParallel):
        text = f"ddp.enable: model (value=a {type(model).__name__}, allowed=a DistributedDataParallel)"
        raise see(ValueError(text), Page.ONE_LINE)
    if model._comm_hooks:
        text = "ddp.enable: model (value=one with a communication hook, allowed=one without)"
        raise see(ValueError(text), Page.ONE_LINE)
    enabled = EnabledDdp(model)
    enabled._refuse_join()
    try:
        enabled._begin(next(model.parameters()).device, config)
        model.register_comm_hook(enabled, _hook)
    except BaseException:
        model._comm_hooks.clear()  # torch has noted the hook before it refuses it
        enabled.disable()
        raise
    return enabled


class EnabledDdp:
    """Handle of a model whose gradients Sidelane averages; :func:`enable` returns it.

    Attributes:
        calls: number of buckets that Sidelane has averaged.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model, self._group = weakref.ref(model), model.process_group
        self._session: Session | None = None
        self._comm: Communicator | None = None
        self._side: SideStream | None = None
        self._buckets: dict[int, Bucket] = {}  # by their numbers
        self._ledger = Ledger(dist.get_process_group_ranks(self._group))
        self._ledger.group = self._group.group_name
        self.calls: int = 0

    def memory(self) -> MemoryUse:
        """Return the symmetric memory of the calls: staging for buckets that peers do not reach where they lie."""
        return self._comm.memory() if self._comm is not None else MemoryUse(0, 0, None)

    def disable(self) -> None:
        """Give the gradients back to the group's own backend, and free the memory. Idempotent. Not within backward.

        DDP itself keeps the averages of the last backward, until its next one or until the model goes.
        """
        self._buckets.clear()
        session, self._session, self._comm = self._session, None, None
        if session is not None:
            session.close()

    def __enter__(self) -> "EnabledDdp":
        return self

    def __exit__(self, *failure: object) -> None:
        self.disable()

    def _begin(self, device: torch.device, config: Config | None) -> None:
        self._session = Session(self._group, device=device, config=self._settings(device, config))
        self._comm = Communicator(self._session.lane("ddp"))
        self._side = SideStream(device) if device.type == "cuda" else None

    def _settings(self, device: torch.device, config: Config | None) -> Config:
        """Return the settings, under which peers may map all buckets twice: as they are first, and rebuilt."""
        config = learning(config or settings.current(), device.type)
        if config.mapped_bytes is not None or device.type != "cuda":
            return config
        model = self._model()
        assert model is not None
        buckets = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        return dataclasses.replace(config, mapped_bytes=default_limit_bytes(device) + 2 * buckets)

    def _refuse_join(self) -> None:
        """Raise within a ``Join`` that divides by fewer ranks, which torch does only without a hook; on all ranks."""
        model = self._model()
        if model is None or not model._join_config.enable or getattr(model, "_divide_by_initial_world_size", True):
            return
        text = "ddp.enable: Join with divide_by_initial_world_size (value=False, allowed=True)"
        raise see(ValueError(text), Page.ONE_LINE)

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._refuse_join()
        future = self._started(bucket)
        if self._side is not None and bucket.is_last():
            self._side.join()  # DDP reads no average before the last bucket was handed over
        return future

    def _started(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the average of a bucket, which may still be under way on the side stream."""
        gradients, known = bucket.buffer(), self._buckets.get(bucket.index())
        if known is None or known.gradients is not gradients:
            if known is not None:
                self._buckets.clear()  # DDP makes other buckets after the first step
            made = self._bucket(gradients)
            if made is None:
                return allreduce_hook(self._group, bucket)
            known = self._buckets[bucket.index()] = made
        self.calls += 1
        self._ledger.note(known.row, "", known.nbytes)
        if self._side is None:
            work: Work = known.average()
            return work.get_future().then(_first)
        self._side.follow()
        if not known.average_compiled(self._side.handle):
            # The first time may wait for the hosts of peers, which make the same calls in the same order.
            self._side.run(known.average)
        return known.done

    def _bucket(self, gradients: torch.Tensor) -> "Bucket | None":
        """Return what averages a bucket; None if the group's own backend does."""
        dtype, dense = str(gradients.dtype).removeprefix("torch."), gradients.layout is torch.strided
        comm, why = self._comm, self._objection(dtype, dense)
        where = SIDELANE if why is None else dist.get_backend(self._group)
        row = (OPERATION, dtype, gradients.device.type, where, why or "a communication hook")
        if why is None and comm is not None:
            return Bucket(comm, gradients, row, is_async=self._side is None)
        if comm is not None and comm.config.deterministic:
            raise in_no_order("ddp all_reduce", f"{dist.get_backend(self._group)} would make it ({why})")
        if where != SIDELANE:  # a Sidelane group notes its calls itself
            self._ledger.note(row, "", gradients.nbytes if dense else 0)
        return None

    def _objection(self, dtype: str, dense: bool) -> str | None:
        """Return the reason why a bucket goes to the group's own backend; None if it does not."""
        if self._comm is None:
            return "disabled"
        if not dense:
            return "a sparse bucket"
        return None if dtype in ELEMENT_BYTES else f"avg of {dtype}"


class Bucket:
    """A bucket of gradients that Sidelane averages.

    Args:
        comm: communicator that does it.
        gradients: gradients of the bucket, which DDP keeps at one place.
        row: row of the report.
        is_async: the host goes on meanwhile, by a thread.

    Attributes:
        average: function that starts it, in place.
        average_compiled: function that does so on a stream, if compiled code remembers the call; it returns if it did.
        done: future that is done: on GPUs, streams order those who read the averages.
        nbytes: bytes of the gradients.
    """

    def __init__(
        self, comm: Communicator, gradients: torch.Tensor, row: tuple[str, str, str, str, str], *, is_async: bool
    ) -> None:
        self.gradients, self.row, self.nbytes = gradients, row, gradients.nbytes
        self.average: Callable[[], Any] = functools.partial(
            comm.all_reduce, gradients, op=ReduceOp.AVG, async_op=is_async, beside=COMPUTE
        )
        call = Kind.ALL_REDUCE, (gradients, gradients), (ReduceOp.AVG,)
        self.average_compiled: Callable[[int], bool] = functools.partial(comm.make_again, *call, beside=COMPUTE)
        self.done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.done.set_result(gradients)


# DDP inspects the type annotations of its hook, so they must be types, not text.
@keep_compilers_out
def _hook(enabled: EnabledDdp, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return enabled._average(bucket)


def _first(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]
