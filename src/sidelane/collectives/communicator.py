"""The communicator: collectives with the semantics of torch.distributed, run as programs on copy engines.

A little over 400 lines, since the documentation of each collective stands with it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from sidelane import config as settings
from sidelane.choice import Choice
from sidelane.choice.candidate import check_beside
from sidelane.collectives.agree import agree_on_splits, compare, with_splits
from sidelane.collectives.arguments import Arguments, Request, check_tensors, identity
from sidelane.collectives.backend import Work
from sidelane.collectives.devices import choose_device, make_backend
from sidelane.collectives.heap import SymmetricHeap, generation
from sidelane.collectives.plan import AUTO, Agreement, Planner, check_variant
from sidelane.collectives.prepare import Prepared, Preparer
from sidelane.collectives.profile import agree_on_profile
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError
from sidelane.execute.submitted import Counts, Submitted
from sidelane.memory.control import ControlBlock
from sidelane.program.collective import Kind


class Communicator:
    """Collectives among the ranks of a process group on one node.

    Every rank of the group makes the communicator and makes the same calls in the same order. A call takes its place in
    the caller's order of work: on CPUs it returns when it is done, on GPUs it is queued on the current stream (inside a
    CUDA graph capture it becomes part of the graph). ``async_op=True`` returns a :class:`Work` instead.

    Tensors are contiguous and on the communicator's device. Ordinary tensors are fine everywhere; tensors from
    :meth:`empty` save a copy, and in-place calls save the copy of a rank's own part (docs/programs.md lists both).
    Autograd takes what a call writes as modified in place, as it does with torch.distributed.

    Args:
        group: the control plane, of any backend; None for the default group. All its ranks must be on one machine.
        device: where the tensors are. None: the current CUDA device where there is one, else the CPU.
        config: settings; None for those in force (``sidelane.config``).

    Attributes:
        abilities: what ``auto`` chooses among.
        profile: the measured times that it chooses by, rank 0's.

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
        self.abilities = self._backend.abilities
        self.profile = agree_on_profile(chosen, self.device.type, self.config.profile)
        planner = Planner(
            self._backend.executor.capabilities,
            verify_programs=self.config.verify,
            profile=self.profile.profile,
            abilities=self.abilities,
        )
        self._preparer = Preparer(self.rank, self._heap, self._backend, planner)
        self._call_numbers = itertools.count(1)
        self._last_choice: Choice | None = None
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
        with self._failing_for_good():
            block = self._heap.allocate(max(nbytes, 1))
        return block.tensor[:nbytes].view(dtype).view(shape)

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        async_op: bool = False,
        variant: str = AUTO,
        beside: str | None = None,
    ) -> Work | None:
        """Concatenate every rank's ``input`` into everyone's ``output`` (torch: ``all_gather_into_tensor``).

        Args:
            output: ``world_size`` times the elements of ``input``, same dtype (any).
            input: this rank's shard. In place if it is its own part of ``output``.
            async_op: return a :class:`Work` instead of ordering the caller behind the collective.
            variant: ``pcpy``, ``b2b``, ``bcst`` (``output`` symmetric), or ``auto`` (docs/choice.md).
            beside: for ``auto``: ``nothing`` runs next to it, or ``compute``, which wants all compute units. None takes
                ``Config.beside``.

        Raises:
            ValueError, TypeError: wrong arguments; nothing has moved.
            MismatchError, PeerError, PeerTimeoutError: see docs/failure.md.
        """
        return self._call(Kind.ALL_GATHER, (output, input), (), variant, beside, async_op)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        variant: str = AUTO,
        beside: str | None = None,
    ) -> Work | None:
        """Send part j of ``input`` to rank j, receive part i of ``output`` from rank i (torch: ``all_to_all_single``).

        Args:
            output: of ``input``'s dtype. In place if both are the same bytes (equal parts only).
            input: any dtype.
            output_split_sizes: rows of dimension 0 from each rank; None, like the next one, for equal parts.
            input_split_sizes: rows of dimension 0 for each rank. The ranks compare them on the host at every call.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``swap`` (``output`` symmetric, equal counts), or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        if output_split_sizes is None and input_split_sizes is None:
            return self._call(Kind.ALL_TO_ALL, (output, input), (), variant, beside, async_op)
        try:
            return self._call_uneven(output, input, output_split_sizes, input_split_sizes, variant, beside, async_op)
        except KeyboardInterrupt as error:
            self._fail(error)
            raise

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: str | dist.ReduceOp = "sum",
        async_op: bool = False,
        variant: str = AUTO,
        beside: str | None = None,
    ) -> Work | None:
        """Reduce part j of everyone's ``input`` into rank j's ``output`` (torch: ``reduce_scatter_tensor``).

        Args:
            output: this rank's part. In place if it is its own part of ``input``.
            input: ``world_size`` times the elements of ``output``; float32, float16, bfloat16, int32 or int64.
            op: ``sum``, ``avg``, ``min`` or ``max`` (torch's ``ReduceOp`` too), in float32 for floats, in rank order.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b`` or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.REDUCE_SCATTER, (output, input), (op,), variant, beside, async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str | dist.ReduceOp = "sum",
        output: torch.Tensor | None = None,
        async_op: bool = False,
        variant: str = AUTO,
        beside: str | None = None,
    ) -> Work | None:
        """Reduce everyone's ``tensor`` and give everyone the result, in ``output`` or in place.

        Args:
            tensor: any number of elements; dtypes as for :meth:`reduce_scatter`.
            op: see :meth:`reduce_scatter`.
            output: same number of elements and dtype; None for in place.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b`` or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        target = tensor if output is None else output
        return self._call(Kind.ALL_REDUCE, (target, tensor), (op,), variant, beside, async_op)

    def broadcast(
        self, tensor: torch.Tensor, *, root: int, async_op: bool = False, variant: str = AUTO, beside: str | None = None
    ) -> Work | None:
        """Replace everyone's ``tensor`` by that of ``root`` (a rank of the group).

        Args:
            tensor: same number of elements and dtype (any) on every rank.
            root: rank of the group whose bytes everyone gets.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``bcst`` (``tensor`` symmetric), or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.BROADCAST, (tensor,), (root,), variant, beside, async_op)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None = None,
        *,
        root: int,
        async_op: bool = False,
        variant: str = AUTO,
        beside: str | None = None,
    ) -> Work | None:
        """Give rank j part j of the root's ``input``, which is None on the other ranks.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.SCATTER, (output, input), (root,), variant, beside, async_op)

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        *,
        root: int,
        async_op: bool = False,
        variant: str = AUTO,
        beside: str | None = None,
    ) -> Work | None:
        """Concatenate every rank's ``input`` into the root's ``output``, which is None on the other ranks.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.GATHER, (output, input), (root,), variant, beside, async_op)

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

    def last_choice(self) -> Choice | None:
        """How this rank's last call was run, and why; None before the first call."""
        return self._last_choice

    def last_submitted(self) -> Submitted | None:
        """What this rank's last call gave to its engines, by class of engine; None before the first call."""
        return self._backend.executor.ledger.last

    def submitted(self) -> Counts:
        """The same for all calls since the communicator was made, without those that were captured into graphs."""
        return self._backend.executor.ledger.total()

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
        if isinstance(error, KeyboardInterrupt) and not self._closed and self._failure is None:
            # The peers may be in a call that this rank will not make, and it in one that they do not come to.
            self._fail(error)
        self.close()

    def _call(
        self,
        kind: Kind,
        tensors: tuple[torch.Tensor | None, ...],
        details: tuple[Hashable, ...],
        variant: str,
        beside: str | None,
        async_op: bool,
    ) -> Work | None:
        self._require_open()
        call = next(self._call_numbers)
        # Plain handlers here and in _run: these lines run in every call, and a context manager costs a microsecond.
        try:
            frozen = self._backend.capturing()
            key = (kind, variant, beside, details, frozen, generation(), *map(identity, tensors))
            prepared = self._preparer.recall(key)
            if prepared is None:
                check_variant(kind, variant, self.abilities)
                check_beside(kind, hint := self.config.beside if beside is None else beside)
                request: Request = getattr(self._arguments, kind)(*tensors, *details)
        except Exception as error:
            self._refuse(call, kind, error)
            raise
        except KeyboardInterrupt as error:
            self._fail(error)
            raise
        try:
            if prepared is None:
                prepared = self._prepare(call, Agreement.of(request, variant, frozen, hint), request, key)
            else:
                self._control.post_call(call, prepared.signature)
                if self.config.debug:
                    self._agree(call)
        except KeyboardInterrupt as error:
            self._fail(error)
            raise
        return self._run(prepared, call, async_op, tensors)

    def _prepare(self, call: int, agreement: Agreement, request: Request, key: Hashable) -> Prepared:
        self._control.post_call(call, agreement.text())
        if self.config.debug or not self._preparer.known(agreement):
            self._agree(call)
        with self._failing_for_good():
            return self._preparer.prepare(agreement, request, key)

    def _call_uneven(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        variant: str,
        beside: str | None,
        async_op: bool,
    ) -> Work | None:
        self._require_open()
        call = next(self._call_numbers)
        with self._telling_refusals(call, Kind.ALL_TO_ALL):
            check_variant(Kind.ALL_TO_ALL, variant, self.abilities)
            check_beside(Kind.ALL_TO_ALL, hint := self.config.beside if beside is None else beside)
            check_tensors("all_to_all", output, input)
            if output_splits is None or input_splits is None:
                raise ValueError("all_to_all: give both output_split_sizes and input_split_sizes, or none")
            sizes = self._arguments.split_bytes(output, input, output_splits, input_splits)
            frozen = self._backend.capturing()
            head = f"all_to_all with split sizes of {input.dtype}, variant {variant}"
            head += f", beside {hint}" + ", captured" * frozen
            regions = (self._heap.locate(output), self._heap.locate(input))
        self._control.post_call(call, with_splits(head, *sizes, *regions))
        with self._failing_for_good():
            posts = self._control.calls_of_all(call, self.config.timeout_s)
        agreed = agree_on_splits(self._control, call, posts)
        key = (agreed, variant, hint, frozen, generation(), identity(output), identity(input))
        prepared = self._preparer.recall(key)
        if prepared is None:
            request = self._arguments.all_to_all_uneven(output, input, agreed)
            with self._failing_for_good():
                prepared = self._preparer.prepare(Agreement.of(request, variant, frozen, hint), request, key)
        return self._run(prepared, call, async_op, (output, input))

    def _run(
        self, prepared: Prepared, call: int, async_op: bool, tensors: tuple[torch.Tensor | None, ...]
    ) -> Work | None:
        given = [tensor for tensor in tensors if tensor is not None]
        try:
            work = self._backend.run(prepared.loaded, call, async_op, given, prepared.frozen)
        except (PeerError, KeyboardInterrupt) as error:
            self._fail(error)
            raise
        self._last_choice = prepared.choice
        written = tensors[0]  # all calls name what they write first
        if written is not None:
            increment_version(written)
        return work

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
