"""The communicator: collectives with the semantics of torch.distributed, run as programs on copy engines.

A little over 400 lines, since the documentation of each collective stands with it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane.collectives.agree import agree_on_splits, compare, with_splits
from sidelane.collectives.arguments import Arguments, Request, check_tensors, identity
from sidelane.collectives.backend import Work
from sidelane.collectives.devices import choose_device, make_backend
from sidelane.collectives.heap import SymmetricHeap, generation
from sidelane.collectives.plan import AUTO, Agreement, Planner, check_variant
from sidelane.collectives.prepare import Prepared, Preparer
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError
from sidelane.memory.control import ControlBlock
from sidelane.program.collective import Kind


class Communicator:
    """Collectives among the ranks of a process group on one node.

    Every rank of the group makes the communicator and makes the same calls in the same order. A call takes its place in
    the caller's order of work: on CPUs it returns when it is done, on GPUs it is queued on the current stream (inside a
    CUDA graph capture it becomes part of the graph). ``async_op=True`` returns a :class:`Work` instead.

    Tensors are contiguous and on the communicator's device. Ordinary tensors are fine everywhere; tensors from
    :meth:`empty` save a copy, and in-place calls save the copy of a rank's own part (docs/programs.md lists both).

    Args:
        group: the control plane, of any backend; None for the default group. All its ranks must be on one machine.
        device: where the tensors are. None: the current CUDA device where there is one, else the CPU.
        config: settings; None for those in force (``sidelane.config``).

    Raises:
        UnavailableError: the ranks are on several machines, or the device lacks symmetric memory.
        PeerTimeoutError: a rank of the group did not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | int | None = None,
        config: Config | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Communicator: torch.distributed is not initialised (call init_process_group first)")
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None
        self.rank: int = dist.get_rank(chosen)
        self.world_size: int = dist.get_world_size(chosen)
        if self.rank < 0:
            raise ValueError("Communicator: this rank is not in the group")
        self.device = choose_device(device)
        self.config = config if config is not None else settings.current()
        self._control = ControlBlock(chosen)
        self._backend = make_backend(chosen, self.rank, self.device, self._control, self.config.timeout_s)
        self._heap = SymmetricHeap(self._backend.memory, owner=f"ranks {dist.get_process_group_ranks(chosen)}")
        self._arguments = Arguments(self.rank, self.world_size, self.device, self._heap)
        planner = Planner(self._backend.executor.capabilities, verify_programs=self.config.verify)
        self._preparer = Preparer(self.rank, self._heap, self._backend, planner)
        self._call_numbers = itertools.count(1)
        self._barrier_tensor: torch.Tensor | None = None
        self._failure: BaseException | None = None
        self._closed = False

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make an uninitialised tensor in symmetric memory. Collective: same size and dtype on every rank.

        The memory belongs to the communicator until :meth:`close`; allocate once and reuse.

        Args:
            size: shape, as in ``torch.empty``.
            dtype: any that torch has a size for.

        Raises:
            MismatchError: ranks asked for different sizes; nothing was allocated.
            PeerTimeoutError: a rank did not come.
            UnavailableError: the device does not have the memory.
        """
        self._require_open()
        call = next(self._call_numbers)
        with self._telling_refusals(call, "empty"):
            shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"empty: dtype (value={dtype!r}, allowed=a torch.dtype)")
            if any(length < 0 for length in shape):
                raise ValueError(f"empty: size (value={tuple(shape)}, allowed=lengths of 0 and more)")
            if self._backend.capturing():
                raise UnavailableError("empty: symmetric memory cannot be allocated while a graph is captured")
            nbytes = shape.numel() * dtype.itemsize
        self._control.post_call(call, f"empty of {nbytes} bytes")
        self._agree(call)
        block = self._heap.allocate(max(nbytes, 1))
        return block.tensor[:nbytes].view(dtype).view(shape)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, variant: str = AUTO
    ) -> Work | None:
        """Concatenate every rank's ``input`` into everyone's ``output`` (torch: ``all_gather_into_tensor``).

        Args:
            output: ``world_size`` times the elements of ``input``, same dtype (any).
            input: this rank's shard. In place if it is its own part of ``output``.
            async_op: return a :class:`Work` instead of ordering the caller behind the collective.
            variant: ``pcpy``, ``b2b``, ``bcst`` (``output`` symmetric), or ``auto``.

        Raises:
            ValueError, TypeError: wrong arguments; nothing has moved.
            MismatchError, PeerError, PeerTimeoutError: see docs/failure.md.
        """
        return self._call(
            Kind.ALL_GATHER, lambda: self._arguments.all_gather(output, input), (output, input), variant, async_op
        )

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        variant: str = AUTO,
    ) -> Work | None:
        """Send part j of ``input`` to rank j, receive part i of ``output`` from rank i (torch: ``all_to_all_single``).

        Args:
            output: of ``input``'s dtype. In place if both are the same bytes (equal parts only).
            input: any dtype.
            output_split_sizes: rows of dimension 0 from each rank; None, like the next one, for equal parts.
            input_split_sizes: rows of dimension 0 for each rank. The ranks compare them on the host at every call.
            async_op: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``swap`` (``output`` symmetric, equal counts), or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        if output_split_sizes is None and input_split_sizes is None:
            return self._call(
                Kind.ALL_TO_ALL, lambda: self._arguments.all_to_all(output, input), (output, input), variant, async_op
            )
        return self._call_uneven(output, input, output_split_sizes, input_split_sizes, variant, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: str | dist.ReduceOp = "sum",
        async_op: bool = False,
        variant: str = AUTO,
    ) -> Work | None:
        """Reduce part j of everyone's ``input`` into rank j's ``output`` (torch: ``reduce_scatter_tensor``).

        Args:
            output: this rank's part. In place if it is its own part of ``input``.
            input: ``world_size`` times the elements of ``output``; float32, float16, bfloat16, int32 or int64.
            op: ``sum``, ``avg``, ``min`` or ``max`` (torch's ``ReduceOp`` too), in float32 for floats, in rank order.
            async_op: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b`` or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(
            Kind.REDUCE_SCATTER,
            lambda: self._arguments.reduce_scatter(output, input, op),
            (output, input),
            variant,
            async_op,
            op,
        )

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str | dist.ReduceOp = "sum",
        output: torch.Tensor | None = None,
        async_op: bool = False,
        variant: str = AUTO,
    ) -> Work | None:
        """Reduce everyone's ``tensor`` and give everyone the result, in ``output`` or in place.

        Args:
            tensor: any number of elements; dtypes as for :meth:`reduce_scatter`.
            op: see :meth:`reduce_scatter`.
            output: same number of elements and dtype; None for in place.
            async_op: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b`` or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        target = tensor if output is None else output
        return self._call(
            Kind.ALL_REDUCE,
            lambda: self._arguments.all_reduce(target, tensor, op),
            (target, tensor),
            variant,
            async_op,
            op,
        )

    def broadcast(self, tensor: torch.Tensor, *, root: int, async_op: bool = False, variant: str = AUTO) -> Work | None:
        """Replace everyone's ``tensor`` by that of ``root`` (a rank of the group).

        Args:
            tensor: same number of elements and dtype (any) on every rank.
            root: rank of the group whose bytes everyone gets.
            async_op: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``bcst`` (``tensor`` symmetric), or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(
            Kind.BROADCAST, lambda: self._arguments.broadcast(tensor, root), (tensor,), variant, async_op, root
        )

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None = None,
        *,
        root: int,
        async_op: bool = False,
        variant: str = AUTO,
    ) -> Work | None:
        """Give rank j part j of the root's ``input``, which is None on the other ranks.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(
            Kind.SCATTER, lambda: self._arguments.scatter(output, input, root), (output, input), variant, async_op, root
        )

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        *,
        root: int,
        async_op: bool = False,
        variant: str = AUTO,
    ) -> Work | None:
        """Concatenate every rank's ``input`` into the root's ``output``, which is None on the other ranks.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(
            Kind.GATHER, lambda: self._arguments.gather(output, input, root), (output, input), variant, async_op, root
        )

    def barrier(self) -> None:
        """Order the caller's next work behind everything that all ranks had queued before their barrier."""
        if self._barrier_tensor is None:
            self._barrier_tensor = self.empty(self.world_size, dtype=torch.uint8)
        tensor = self._barrier_tensor
        self.all_gather(tensor, tensor[self.rank : self.rank + 1])

    def synchronize(self) -> None:
        """Block the host until every call has finished on this rank.

        Raises:
            PeerError, PeerTimeoutError: a peer failed.
        """
        self._require_open()
        with self._failing_for_good():
            self._backend.synchronize()

    def close(self) -> None:
        """Release threads, streams and memory. Idempotent. Not a collective: peers may close later."""
        if self._closed:
            return
        self._closed = True
        self._backend.close()
        self._preparer.close()
        self._heap.close()
        self._control.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self,
        kind: Kind,
        describe: Callable[[], Request],
        tensors: tuple[torch.Tensor | None, ...],
        variant: str,
        async_op: bool,
        detail: Hashable = None,
    ) -> Work | None:
        self._require_open()
        call = next(self._call_numbers)
        # Plain handlers here and in _run: these lines run in every call, and a context manager costs a microsecond.
        try:
            frozen = self._backend.capturing()
            key = (kind, variant, detail, frozen, generation(), *map(identity, tensors))
            prepared = self._preparer.recall(key)
            if prepared is None:
                check_variant(kind, variant)
                request = describe()
        except Exception as error:
            self._refuse(call, kind, error)
            raise
        if prepared is None:
            prepared = self._prepare(call, Agreement.of(request, variant, frozen), request, key)
        else:
            self._control.post_call(call, prepared.signature)
            if self.config.debug:
                self._agree(call)
        return self._run(prepared, call, async_op, tensors)

    def _prepare(self, call: int, agreement: Agreement, request: Request, key: Hashable) -> Prepared:
        self._control.post_call(call, agreement.text())
        if self.config.debug or not self._preparer.known(agreement):
            self._agree(call)
        return self._preparer.prepare(agreement, request, key)

    def _call_uneven(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        variant: str,
        async_op: bool,
    ) -> Work | None:
        self._require_open()
        call = next(self._call_numbers)
        with self._telling_refusals(call, Kind.ALL_TO_ALL):
            check_variant(Kind.ALL_TO_ALL, variant)
            check_tensors("all_to_all", output, input)
            if output_splits is None or input_splits is None:
                raise ValueError("all_to_all: give both output_split_sizes and input_split_sizes, or none")
            sizes = self._arguments.split_bytes(output, input, output_splits, input_splits)
            frozen = self._backend.capturing()
            head = f"all_to_all with split sizes of {input.dtype}, variant {variant}" + ", captured" * frozen
            regions = (self._heap.locate(output), self._heap.locate(input))
        self._control.post_call(call, with_splits(head, *sizes, *regions))
        with self._failing_for_good():
            posts = self._control.calls_of_all(call, self.config.timeout_s)
        agreed = agree_on_splits(self._control, call, posts)
        key = (agreed, variant, frozen, generation(), identity(output), identity(input))
        prepared = self._preparer.recall(key)
        if prepared is None:
            request = self._arguments.all_to_all_uneven(output, input, agreed)
            prepared = self._preparer.prepare(Agreement.of(request, variant, frozen), request, key)
        return self._run(prepared, call, async_op, (output, input))

    def _run(
        self, prepared: Prepared, call: int, async_op: bool, tensors: tuple[torch.Tensor | None, ...]
    ) -> Work | None:
        given = [tensor for tensor in tensors if tensor is not None]
        try:
            return self._backend.run(prepared.loaded, call, async_op, given, prepared.frozen)
        except (PeerError, KeyboardInterrupt) as error:
            self._fail(error)
            raise

    def _agree(self, call: int) -> None:
        """Wait until every rank has posted ``call``, and compare."""
        with self._failing_for_good():
            posts = self._control.calls_of_all(call, self.config.timeout_s)
        compare(self._control, call, posts)  # an error here leaves all ranks in step: nothing has begun

    @contextlib.contextmanager
    def _telling_refusals(self, call: int, name: str) -> Iterator[None]:
        """Whatever keeps this rank from making the call, its peers are told."""
        try:
            yield
        except Exception as error:
            self._refuse(call, name, error)
            raise

    def _refuse(self, call: int, name: str, error: Exception) -> None:
        self._control.post_call(call, name, refusal=f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """A failed peer, or Ctrl-C in a wait for the peers, ends the communicator."""
        try:
            yield
        except (PeerError, KeyboardInterrupt) as error:
            self._fail(error)
            raise

    def _fail(self, error: PeerError | KeyboardInterrupt) -> None:
        self._failure = error
        if isinstance(error, KeyboardInterrupt):
            self._control.abort(f"rank {self.rank} was interrupted", (self.rank,))

    def _require_open(self) -> None:
        if self._closed:
            raise CommunicatorClosedError("Communicator: closed")
        if self._failure is not None:
            raise CommunicatorClosedError(
                f"Communicator: unusable since a call failed: {self._failure}"
            ) from self._failure
