"""The communicator: collectives with the semantics of torch.distributed, run as programs on copy engines.

Over 400 lines, since the documentation of each collective stands with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
import torch.distributed as dist

from sidelane import forks, log, metrics
from sidelane.choice import Choice
from sidelane.choice.candidate import FIRST, Abilities
from sidelane.choice.key import key_here
from sidelane.choice.store import InForce
from sidelane.collectives.agreement import LISTED
from sidelane.collectives.arguments import Arguments
from sidelane.collectives.backend import Backend
from sidelane.collectives.call_forms import CallForm, SingleCall, UnevenCall, own_part
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import Calls, compare, count_writes
from sidelane.collectives.plan import AUTO, Planner
from sidelane.collectives.pool_offsets import Reached
from sidelane.collectives.prepare import OwnProgram, Preparer
from sidelane.collectives.repeat import Repeats
from sidelane.collectives.side_stream import StreamMark
from sidelane.collectives.work import Work
from sidelane.config import Config
from sidelane.errors import (
    CommunicatorClosedError,
    MismatchError,
    Page,
    PeerError,
    SidelaneError,
    UnavailableError,
    explained,
)
from sidelane.execute.submitted import Counts, Submitted
from sidelane.memory.allocator import MemoryUse
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange, ranks_of
from sidelane.memory.heap import LaneMemory, SymmetricHeap
from sidelane.memory.posts import SPLITS
from sidelane.memory.release import release_dropped
from sidelane.memory.storage import persistent
from sidelane.modes import is_in_modes, leaving_modes, untraced
from sidelane.program.collective import Kind
from sidelane.program.ir import Program
from sidelane.program.shape import Beside, Computation
from sidelane.session.beside import computation_of, own_time_us
from sidelane.session.entry import entry, repeated_entry
from sidelane.session.lists import Batched, ListedCall, ReshardCall, Tensors
from sidelane.session.making import agree_on_profile, make_backend, resolve_arguments
from sidelane.session.own_kernel import OwnKernel, load_kernel
from sidelane.sizes import format_bytes
from sidelane.version import VERSION

if TYPE_CHECKING:  # a process group makes its first call without these
    from sidelane.session.bound_program import BoundProgram
    from sidelane.session.prelaunch import Prelaunched

_NO_MEMORY_TO_SHARE = "Communicator: the one that it would share memory with was closed"
_MOST_BYTES = 2**63 - 1
"""Largest number of bytes of a tensor in torch."""


@functools.cache
def _warn_once(note: str) -> None:
    log.calls.warning("%s", note)


@untraced
class Communicator:
    """Collectives among the ranks of a process group on one node.

    Every rank of the group makes the communicator and makes the same calls in the same order, one at a time: threads
    may take turns, or have a communicator each, but two threads that call at once are an error. A call runs in the
    caller's order of work: on CPUs it returns when it is done, on GPUs it is queued on the current stream (inside a
    CUDA graph capture it becomes part of the graph). ``async_op=True`` returns a :class:`Work` instead.

    Tensors must be contiguous and on the communicator's device. All calls accept ordinary tensors; tensors from
    :meth:`empty` save a copy, and in-place calls save the copy of a rank's own part (docs/internals/programs.md).
    Autograd treats the outputs of a call as modified in place, as it does with torch.distributed.

    :meth:`all_gather`, :meth:`all_to_all`, :meth:`broadcast`, :meth:`reduce_scatter` and :meth:`all_reduce` also take a
    list (or tuple) wherever they take a tensor: a call for each tensor, run as one (docs/internals/programs.md).

    Args:
        group: the control plane, of any backend; None for the default group. All its ranks must be on one machine.
            Or another communicator, to share its memory in an order of calls of its own (docs/guide/lanes.md).
        device: device of the tensors. None: the current CUDA device if there is one, else the CPU.
        config: settings; None for those in force (``sidelane.config``).
        name: name in errors, the same on every rank, unique among those that share memory. None: its number.

    Attributes:
        name: its name.
        ranks: the group's ranks in the default group; 0 to size - 1 if the group joins several worlds.
        heap: symmetric memory.
        derived: communicators that were made from this one and share its memory, closed ones included.
        abilities: implementations that ``auto`` chooses among.
        cache: cache in which operators that consist of calls keep objects until :meth:`close`, by their own keys.
        operator_number: number by which operators of PyTorch know it; None before it has one (``ops.library``).
        profile: measured times of rank 0, by which ``auto`` chooses.
        control: control block in which the ranks post their calls.
        backend: memory and executor of the device.
        allocations: symmetric memory of :meth:`empty`.
        arguments: checks the tensors of callers.
        preparer: loads programs, and owns the memory that they share.
        calls: numbers and runs calls.
        path: the path that every call takes.
        pools: number of pools that were made; the same on all ranks.

    Raises:
        ValueError: the group has more than 16 ranks; or a device or setting does not exist, or another
            communicator has the name, and then the other ranks raise PeerError with the reason.
        CommunicatorClosedError: the first of the communicators that share memory was closed.
        MismatchError: another rank gave another name.
        UnavailableError: the ranks are on several machines, or the device lacks symmetric memory.
        PeerError, PeerTimeoutError: a rank failed, or did not make the communicator in time.
    """

    @explained(Page.ERRORS)
    def __init__(
        self,
        group: dist.ProcessGroup | Communicator | None = None,
        *,
        device: torch.device | str | int | None = None,
        config: Config | None = None,
        name: str | None = None,
    ) -> None:
        first = (group._first or group) if isinstance(group, Communicator) else None
        self._first = first
        if first is None:
            given = cast("dist.ProcessGroup | None", group)
            self._group, self._title, self.device, self.config = resolve_arguments(given, device, config)
        elif device is None and config is None:
            self._group, self._title, self.device, self.config = first._group, first._title, first.device, first.config
        else:
            raise ValueError("Communicator: a communicator that shares another one takes neither device nor config")
        self.rank: int = self._group.rank()
        self.world_size: int = self._group.size()
        self.ranks: tuple[int, ...] = ranks_of(self._group)
        self.heap: SymmetricHeap = SymmetricHeap(owner=f"ranks {list(self.ranks)}") if first is None else first.heap
        self.derived: list[Communicator] = []
        self._numbers = itertools.count(1)  # of these; failed attempts count
        self._making = forks.Mutex(lambda: ("Communicator", "the making of a communicator"))
        self._is_closed = False
        self._barrier_tensor: torch.Tensor | None = None
        self._peers: dict[tuple[int, int], torch.Tensor] = {}  # by block and offset
        self.cache: dict[Hashable, Any] = {}
        self.operator_number: int | None = None
        self.pools: int = 0
        if first is None:
            leaving_modes(self._join)(name)
            return
        leaving_modes(first._making.run)(lambda: self._join(name))
        if first._is_closed:  # by another thread in the meantime
            self.close()
            raise CommunicatorClosedError(_NO_MEMORY_TO_SHARE)

    def _join(self, name: str | None) -> None:
        """Become the next order of calls, together with the communicators of the other ranks."""
        first, number = self._first, 0
        if first is not None:
            if first._is_closed:
                raise CommunicatorClosedError(_NO_MEMORY_TO_SHARE)
            number = next(first._numbers)  # before anything can fail on one rank, so that attempts count on all of them
        exchange = Exchange(self._group, self.config.timeout_s, warn_s=self.config.warn_s)
        self.name: str = f"lane {number}" if name is None else name
        is_made = False
        try:
            if first is not None and any(other.name == name for other in (first, *first.derived)):
                allowed = "another one for each communicator"
                raise ValueError(f"Communicator: name (value={name!r}, allowed={allowed})")
            if name is not None:
                exchange(f"lane {name!r}", lambda: None)
            self._make(exchange, number)
            is_made = True
            exchange("a lane that is made", lambda: None)  # a lane that any rank lacks is none
        except BaseException as error:
            if not isinstance(error, PeerError | MismatchError):  # which all ranks raise
                exchange.refuse(error)
            if is_made:
                self._release()
            raise
        if first is not None:
            first.derived.append(self)

    def _make(self, exchange: Exchange, number: int) -> None:
        self.control = ControlBlock(exchange)
        try:
            like = None if self._first is None else self._first.backend
            config = self.config
            self.backend: Backend = make_backend(
                *(exchange, self.device, self.control, config.timeout_s),
                like=like,
                peers=config.peers,
                memory_bytes=config.memory_bytes,
            )
            try:
                self._complete(exchange, number)
            except BaseException:
                self.backend.close()
                raise
        except BaseException as error:  # peers may wait where they look at the control block alone
            at_fault = error.ranks if isinstance(error, PeerError) else ()
            self.control.abort(f"rank {self.rank}: {type(error).__name__}: {error}", at_fault)
            self.control.close()
            raise

    def _complete(self, exchange: Exchange, number: int) -> None:
        first, backend, config, heap = self._first, self.backend, self.config, self.heap
        self.allocations = LaneMemory(heap, backend.memory, number, self.world_size, config.memory_bytes)
        self.arguments = Arguments(self.rank, self.world_size, self.device, heap)
        self.profile: InForce = (
            agree_on_profile(exchange, self.device.type, config.profile, backend.peers)
            if first is None
            else first.profile
        )
        self.abilities: Abilities = backend.abilities
        planner = Planner(
            backend.executor.capabilities,
            profile=self.profile.profile,
            abilities=backend.abilities,
            chosen_by=self.profile.where,
        )
        self.preparer = Preparer(self.rank, heap, backend, planner)
        self.calls = self._calls = Calls(
            *(self.control, backend, config, self.preparer.renew, heap.hold, self.ranks),
            self._title + (f", {self.name}" if number else ""),
        )
        self.control.world_ranks = self.ranks
        self.path = CallPath(self.calls, self.arguments, self.preparer)
        self._repeats = self.path.repeats  # of its own, for speed: every call reads it
        if log.calls.isEnabledFor(logging.INFO):
            self._log()
        if self.rank == 0 and not number:  # whose profile counts
            for note in (*self.profile.notes, *([str(backend.peers)] if backend.peers.is_mixed else [])):
                _warn_once(note)

    def _log(self) -> None:
        config = self.config
        machine = key_here(self.device.type, self.world_size)
        versions = ", ".join(f"{name} {version}" for name, version in (("sidelane", VERSION), *machine.software))
        most = "what the device has" if config.memory_bytes is None else format_bytes(config.memory_bytes)
        log.calls.info(
            "rank %d of %d on %s: communicator of ranks %s, lane %r; it chooses by %s; a wait for a peer ends in %g s; "
            "%d x %s%s; %s; between ranks: %s; symmetric memory: %s for its calls, for tensors up to %s",
            *(self.rank, self.world_size, self.device, list(self.ranks), self.name),
            *(self.profile.where, config.timeout_s, machine.count, machine.device),
            *(machine.links and f", {machine.links}", versions, self.backend.peers),
            *(format_bytes(self.preparer.own_bytes), most),
        )

    @entry
    def empty(self, *size: SupportsIndex | Sequence[SupportsIndex], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make an uninitialised tensor in symmetric memory. Collective: same size and dtype on every rank.

        Its bytes come from a pool that grows when it is full. They are reused once the tensor and its views have been
        deleted on all ranks, while earlier calls may still be using them, as with torch's own allocator. Tensors that
        a graph has captured are kept until :meth:`close`. GPUs that reach each other through host memory alone
        (``Config.peers``) have none: there it is a tensor of ``torch.empty``, which calls stage.

        Args:
            size: shape, as in ``torch.empty``.
            dtype: any dtype with a fixed element size.

        Raises:
            MismatchError: the sizes differ between ranks; nothing was allocated.
            PeerTimeoutError: a rank did not make the call in time.
            UnavailableError: there is no more memory, or ``Config.memory_bytes`` are reserved; on all ranks alike.
        """
        return self._empty(size, dtype)

    def _empty(self, size: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        call = self.calls.number()
        with self.calls.reporting_refusals(call, "empty"):
            shape = _shape(size)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"empty: dtype (value={dtype!r}, allowed=a torch.dtype)")
            if any(length < 0 for length in shape):
                raise ValueError(f"empty: size (value={shape}, allowed=lengths of 0 and more)")
            nbytes = math.prod(shape) * dtype.itemsize
            if max(nbytes, *shape, 0) > _MOST_BYTES:
                raise ValueError(f"empty: size (value={shape} of {dtype}, allowed=..{_MOST_BYTES} bytes)")
            if self.backend.caller_stream()[1]:
                raise UnavailableError("empty: symmetric memory cannot be allocated while a graph is captured")
        memory, most = self.allocations, self.config.memory_bytes
        title = f"empty of {nbytes} bytes" + (f", of {most} at most" if most is not None else "")
        with self.calls.failing_for_good():
            self.control.post_call(call, title + SPLITS + memory.what_is_dropped())
        posts = self.calls.posts(call)
        compare(self.control, call, posts)
        if self.backend.peers.through_host:
            return torch.empty(shape, dtype=dtype, device=self.device)
        with self.calls.making_ready():
            tensor, is_used_again = memory.allocate(max(nbytes, 1), [post.differing for post in posts])
            self.backend.note_stream()
            if is_used_again:
                first = self._first or self
                for each in (first, *first.derived):
                    if not each.calls.closed:
                        each.backend.follow_all()
        return tensor[:nbytes].view(dtype).view(shape)

    def memory(self) -> MemoryUse:
        """Return the bytes of symmetric memory that :meth:`empty` and calls have reserved, and how many are in use."""
        return dataclasses.replace(self.allocations.use(), own=self.preparer.own_bytes)

    @repeated_entry
    def all_gather(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: bool = False,
        variant: str = AUTO,
        beside: Beside | None = None,
    ) -> Work | None:
        """Concatenate every rank's ``input`` into everyone's ``output`` (torch: ``all_gather_into_tensor``).

        Args:
            output: ``world_size`` times the elements of ``input``, same dtype (any). Or a list, as ``input`` then is.
            input: this rank's shard. In place if it is its own part of ``output``.
            async_op: return a :class:`Work` instead of ordering the caller behind the collective.
            variant: ``pcpy``, ``b2b``, ``striped``, ``bcst`` (``output`` symmetric), ``one_shot``
                (a kernel, GPUs only: docs/internals/protocols.md), or ``auto`` (docs/internals/choice.md).
            beside: for ``auto``, the work that runs next to the call: ``nothing``; ``compute``, which uses all compute
                units; or a result of :meth:`computation`. None takes ``Config.beside``.

        Raises:
            ValueError, TypeError: wrong arguments; nothing has moved.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        return self._call(Kind.ALL_GATHER, (output, input), (), variant, beside, async_op)

    @repeated_entry
    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        scatter_dim: int | None = None,
        gather_dim: int | None = None,
        copy_own_part: bool = True,
        async_op: bool = False,
        variant: str = AUTO,
        beside: Beside | None = None,
    ) -> Work | None:
        """Send part j of ``input`` to rank j, receive part i of ``output`` from rank i (torch: ``all_to_all_single``).

        Args:
            output: of ``input``'s dtype. In place if both are the same bytes (equal parts only).
            input: any dtype.
            output_split_sizes: rows of dimension 0 from each rank; None, like the next one, for equal parts.
            input_split_sizes: rows of dimension 0 for each rank. The ranks compare them on the host at every call.
            scatter_dim: dimension of which part j of ``input`` is a slice. It makes this the exchange of sequence
                parallelism, together with the next one: with 2 and 1, [B, S/N, H, D] becomes [B, S, H/N, D], and with 1
                and 2 it comes back. Nothing is permuted before or after, and copy engines move everything. Not in
                place.
            gather_dim: dimension along which the parts are put together in ``output``. A length of these two that N
                does not divide is split as by ``torch.tensor_split``, or by the split sizes: ``input_split_sizes`` are
                those of ``scatter_dim`` then, and ``output_split_sizes`` of this one, the same on every rank.
            copy_own_part: False leaves part r of rank r in ``input`` only: its place in ``output`` is not written, and
                the part is not read. The same on all ranks. Next to a GEMM this copy is the most expensive one
                (docs/guide/overlap.md). Copy engines only; a call in place has no such copy anyway.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``striped``, ``swap`` (``output`` symmetric, equal counts),
                ``one_shot`` (equal counts), or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        if output_split_sizes is input_split_sizes is None and scatter_dim is gather_dim is None:
            return self._call(Kind.ALL_TO_ALL, (output, input), own_part(copy_own_part), variant, beside, async_op)
        tensors: Any = (output, input)  # lists are refused there
        splits = output_split_sizes, input_split_sizes
        if scatter_dim is not None or gather_dim is not None:
            form = ReshardCall(tensors, (scatter_dim, gather_dim), splits, copy_own_part, self.world_size)
            return self._run(form, variant, beside, async_op)
        uneven = UnevenCall(tensors, splits, copy_own_part, self.world_size)
        return self._run(uneven, variant, beside, async_op)

    @repeated_entry
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        *,
        op: str | dist.ReduceOp = "sum",
        async_op: bool = False,
        variant: str = AUTO,
        beside: Beside | None = None,
    ) -> Work | None:
        """Reduce part j of everyone's ``input`` into rank j's ``output`` (torch: ``reduce_scatter_tensor``).

        Args:
            output: this rank's part. In place if it is its own part of ``input``.
            input: ``world_size`` times the elements of ``output``; float32, float16, bfloat16, int32 or int64. At one
                place of symmetric memory on all ranks, or in ordinary memory on all: peers may read it.
            op: ``sum``, ``avg``, ``min`` or ``max`` (torch's ``ReduceOp`` too), in float32 for floats, in rank order.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``one_shot``, ``one_shot_narrow`` or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.REDUCE_SCATTER, (output, input), (op,), variant, beside, async_op)

    @repeated_entry
    def all_reduce(
        self,
        tensor: Tensors,
        *,
        op: str | dist.ReduceOp = "sum",
        output: Tensors | None = None,
        async_op: bool = False,
        variant: str = AUTO,
        beside: Beside | None = None,
    ) -> Work | None:
        """Reduce everyone's ``tensor`` and give everyone the result, in ``output`` or in place.

        Args:
            tensor: any number of elements; dtypes as for :meth:`reduce_scatter`. Like ``output``, at one place of
                symmetric memory on all ranks, or in ordinary memory on all.
            op: see :meth:`reduce_scatter`.
            output: same number of elements and dtype; None for in place.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``one_shot``, ``two_shot``, ``two_shot_push``,
                ``one_shot_narrow``, ``two_shot_narrow`` or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        target = tensor if output is None else output
        return self._call(Kind.ALL_REDUCE, (target, tensor), (op,), variant, beside, async_op)

    @repeated_entry
    def broadcast(
        self,
        tensor: Tensors,
        *,
        root: int = 0,
        async_op: bool = False,
        variant: str = AUTO,
        beside: Beside | None = None,
    ) -> Work | None:
        """Replace everyone's ``tensor`` with that of ``root`` (a rank of the group).

        Args:
            tensor: same number of elements and dtype (any) on every rank.
            root: rank of the group whose bytes everyone gets.
            async_op: see :meth:`all_gather`.
            beside: see :meth:`all_gather`.
            variant: ``pcpy``, ``b2b``, ``striped``, ``relay`` and ``bcst`` (``tensor`` symmetric),
                ``one_shot`` (a kernel, on GPUs) or ``auto``.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.BROADCAST, (tensor,), (root,), variant, beside, async_op)

    @repeated_entry
    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None = None,
        *,
        root: int = 0,
        async_op: bool = False,
        variant: str = AUTO,
        beside: Beside | None = None,
    ) -> Work | None:
        """Give rank j part j of the root's ``input``, which is None on the other ranks.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.SCATTER, (output, input), (root,), variant, beside, async_op)

    @repeated_entry
    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        *,
        root: int = 0,
        async_op: bool = False,
        variant: str = AUTO,
        beside: Beside | None = None,
    ) -> Work | None:
        """Concatenate every rank's ``input`` into the root's ``output``, which is None on the other ranks.

        Raises:
            As :meth:`all_gather`.
        """
        return self._call(Kind.GATHER, (output, input), (root,), variant, beside, async_op)

    def batch(self, *, variant: str = AUTO, beside: Beside | None = None, async_op: bool = False) -> Batched:
        """Collect collectives of any kinds in a ``with`` block, and run them as one call when it ends.

            with comm.batch() as batch:
                batch.all_gather(weights, shards)
                batch.all_to_all(tokens_out, tokens)

        Args:
            variant: of all: ``b2b``, ``pcpy``, any other that every kind in the block has for lists, or ``auto``.
            beside: see :meth:`all_gather`.
            async_op: ``batch.work`` is then a :class:`Work`.

        Raises:
            As :meth:`all_gather`, when the block ends.
        """
        return Batched(self.path, variant=variant, beside=beside, async_op=async_op)

    @entry
    def prepare_all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        variant: str = FIRST,
        host_trigger: bool = False,
        beside: Beside | None = None,
    ) -> Prelaunched:
        """Make an :meth:`all_gather` ready to be submitted ahead of its call and fired later. Collective.

        Args:
            output: see :meth:`all_gather`; the handle keeps it.
            input: see :meth:`all_gather`; the handle keeps it.
            variant: of copy engines: ``b2b``, ``pcpy``, ``bcst`` (``output`` symmetric).
            host_trigger: allow ``trigger_from_host()``.
            beside: see :meth:`all_gather`.

        Returns:
            The handle (docs/internals/prelaunch.md), to be used in a ``with`` block.

        Raises:
            Exception: as :meth:`all_gather`.
            UnavailableError: inside a capture, or if the armed call would block its own trigger.
        """
        from sidelane.session.prelaunch import prepare_prelaunched

        asked = SingleCall(Kind.ALL_GATHER, (output, input), ())
        return prepare_prelaunched(self.path, asked, variant, host_trigger, beside)

    @entry
    def prepare_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        copy_own_part: bool = True,
        variant: str = FIRST,
        host_trigger: bool = False,
        beside: Beside | None = None,
    ) -> Prelaunched:
        """Make an :meth:`all_to_all` of equal parts ready; see :meth:`prepare_all_gather`. Also ``swap``."""
        from sidelane.session.prelaunch import prepare_prelaunched

        asked = SingleCall(Kind.ALL_TO_ALL, (output, input), own_part(copy_own_part))
        return prepare_prelaunched(self.path, asked, variant, host_trigger, beside)

    @entry
    def load(self, program: Program, buffers: Mapping[str, torch.Tensor]) -> BoundProgram:
        """Prove the caller's own program and bind it to tensors, to call it like a collective. Collective.

        Args:
            program: the same on every rank (docs/internals/programs.md). Its claim is a collective, with the buffers
                ``input`` and ``output``, or a :class:`sidelane.program.contract.Contract` with buffers of any names.
            buffers: this rank's tensors by name: any dtype, contiguous, at least as large as in the program. A buffer
                that engines of peers use must be symmetric memory (:meth:`empty`) at one place on every rank, even on
                ranks that have no bytes in it.

        Returns:
            A callable: ``run = communicator.load(program, buffers)``, then ``run()`` on every rank.

        Raises:
            ProgramError: the proof failed; the text names ranks, commands and bytes.
            ValueError, TypeError: wrong buffers; nothing was allocated.
            UnavailableError: inside a capture, or the device cannot run a command of it.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        from sidelane.session.bound_program import bind_program

        return bind_program(self.path, program, buffers)

    @entry
    def load_kernel(self, kernel: Any, *, flags: int) -> OwnKernel:
        """Give the caller's own Triton kernel its flags, with which it synchronizes with its peers. Collective.

        Args:
            kernel: made by ``triton.jit``. Its first argument is the context, for the functions of
                ``sidelane.device.context``. CPU ranks run it by Triton's interpreter, with ``TRITON_INTERPRET=1``.
            flags: number of flags that it has for each sender.

        Returns:
            The kernel, to be launched on every rank (docs/guide/own-kernels.md):
            ``push = communicator.load_kernel(push_tiles, flags=8)``, then
            ``push.launch((8,), communicator.peers(output), shard, TILE=1024)``.

        Raises:
            TypeError, ValueError: ``kernel`` is no kernel, or ``flags`` is out of range; nothing was allocated.
            UnavailableError: inside a capture, or more than 8 ranks.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        return load_kernel(self.path, kernel, flags)

    @leaving_modes
    def peers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the addresses of a symmetric tensor on all ranks, int64[world_size] on its device. Not collective.

        Raises:
            ValueError: the tensor is not symmetric memory, or not contiguous.
            UnavailableError: a graph is being captured, and the tensor is new; or GPUs reach each other through host
                memory alone (``Config.peers``).
        """
        (region,) = self.arguments.regions("peers", tensor)
        if self.backend.peers.through_host:
            raise UnavailableError(f"peers: these GPUs reach each other through {self.backend.peers}")
        if region.location is None:
            raise ValueError(
                "peers: the tensor must be symmetric memory (value=ordinary memory, "
                "allowed=tensors of Communicator.empty)"
            )
        found = self._peers.get(region.location)
        if found is None:
            if self.backend.caller_stream()[1]:
                raise UnavailableError(
                    "peers: of a new tensor, while a graph is captured; call it once before the capture"
                )
            addresses = torch.tensor(self.heap.addresses(region), dtype=torch.int64, device="cpu")
            found = self._peers[region.location] = persistent(self.device, lambda: addresses.to(self.device))
        return found

    @leaving_modes
    def location(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the block number and offset in bytes of a symmetric tensor; None for ordinary memory. Not collective.

        :meth:`peers` returns the addresses of the tensors at the same place on all ranks.

        Raises:
            ValueError: the tensor is not contiguous, or symmetric memory of another communicator.
        """
        return self.arguments.regions("location", tensor)[0].location

    @entry
    def refuse(self, name: str, error: Exception) -> None:
        """Tell the peers that this rank does not make its next call, and why: they raise PeerError with the reason.

        For operators that are made of calls, and check their arguments before the first one.
        """
        self.calls.refuse(self.calls.number(), name, error)

    @leaving_modes
    def reach(self, tensor: torch.Tensor) -> Reached:
        """Return how peers reach a tensor (``symmetric`` or ``staged``), and why. Not collective.

        A tensor in a :func:`sidelane.pool` is ``symmetric`` once the ranks have found it at one place on all of them.

        Raises:
            ValueError: no call accepts this tensor.
        """
        (region,) = self.arguments.regions("reach", tensor)
        if region.symmetric:
            return Reached("symmetric")
        return Reached("staged", self.arguments.pool_offsets.why_staged(tensor))

    @entry
    def computation(self, *, gemm: tuple[int, int, int, str] | None = None, us: float | None = None) -> Computation:
        """Describe the computation beside calls, for their ``beside=``: ``auto`` then weighs how much of either hides.

        Collective: the slowest rank's time counts on all ranks. It takes one small collective and, for a GEMM, a few
        runs of it on the current stream, whose matrices are freed again; call it once and keep the result.

        Args:
            gemm: (m, n, k, dtype): m x k times k x n, with torch's name of the dtype (``bfloat16``).
            us: instead of ``gemm``, the time of the computation in microseconds.

        Raises:
            ValueError: both or none of them are given; or a dimension, dtype or time is wrong.
            UnavailableError: a graph is being captured.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        _, own_us = self.path.agree("computation", lambda: (own_time_us(gemm, us, self.device), f"computation {gemm}"))
        slowest = torch.tensor([own_us], dtype=torch.float32, device=self.device)
        self._call(Kind.ALL_REDUCE, (slowest, slowest), ("max",), AUTO, None, False)
        return computation_of(slowest.item(), gemm, self.device)

    @entry
    def barrier(self) -> None:
        """Order the caller's next work after everything that all ranks had queued before their barrier."""
        if self._barrier_tensor is None:
            self._barrier_tensor = self._empty((self.world_size,), torch.uint8)
        tensor = self._barrier_tensor
        self._call(Kind.ALL_GATHER, (tensor, tensor[self.rank : self.rank + 1]), (), AUTO, None, False)

    def synchronize(self) -> None:
        """Block the host until every call has finished on this rank.

        Raises:
            PeerError, PeerTimeoutError: a peer failed.
        """
        self.calls.require_open()
        with self.calls.failing_for_good():
            self.backend.synchronize()

    @entry
    def agree(self, name: str, text: str) -> None:
        """Compare a text with the peers', as that of a new call. Collective.

        Args:
            name: name of what is compared, for errors.
            text: text that must be the same on all ranks.

        Raises:
            UnavailableError: inside a capture.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        self.path.agree(name, lambda: (None, text))

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time-out of waits for peers on this rank, including those of calls under way.

        Args:
            timeout_s: time-out in seconds, > 0.
        """
        self.calls.config = dataclasses.replace(self.calls.config, timeout_s=timeout_s)
        self.backend.set_timeout(timeout_s)

    def last_choice(self) -> Choice | None:
        """Return the candidate that ran this rank's last call, and the reason; None before the first call."""
        return self.calls.last_choice

    def last_submitted(self) -> Submitted | None:
        """Return the commands of this rank's last call, by class of engine; None before the first call."""
        return self.backend.executor.ledger.last

    def submitted(self) -> Counts:
        """Return the sum of :meth:`last_submitted` over all calls, without those that were captured into graphs."""
        return self.backend.executor.ledger.total()

    def repeated_calls(self) -> int:
        """Return how many calls of this rank compiled code has repeated, own kernels included; 0 without it."""
        return 0 if self.path.repeats is None else int(self.path.repeats.replay.made)

    def close(self) -> None:
        """Release threads, streams and memory, and close the communicators that share the memory of this one.

        Idempotent. Not a collective: peers may close later.
        """
        if self._first is None:
            self._is_closed = True
            metrics.flush()
            for other in self.derived:
                other.close()
        self.cache.clear()
        self._peers.clear()
        self._barrier_tensor = None
        if self.calls.forked:  # the memory belongs to the parent
            return
        if not self.calls.closed:
            self._release()
        if self._first is None:
            self.derived.clear()
            self.heap.close()
            release_dropped()

    def _release(self) -> None:
        calls = self.calls
        for program in self._programs_under_way():  # which fires the triggers that are left
            with contextlib.suppress(SidelaneError):
                program.close()
        calls.closed, calls.failure = True, None  # the frames of a failure would keep these objects alive
        if self.path.repeats is not None:
            self.path.repeats.forget()
        self.backend.close()
        self.preparer.close()
        self.allocations.close()
        self.control.close()

    def _programs_under_way(self) -> list[OwnProgram]:
        """Return the programs of callers whose last call is under way, an armed one first: others may come behind it.

        All others are closed without a wait: the peers may never make the calls that this rank has begun.
        """
        found = [program for program in self.preparer.own_programs if program.is_under_way]
        return sorted(found, key=lambda program: program is not self.calls.armed)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for other in self.derived:
            other.__exit__(kind, error, trace)
        calls = self.calls
        if isinstance(error, KeyboardInterrupt) and not calls.closed and calls.failure is None:
            # This rank and its peers may be in different calls, which none of them can complete.
            calls.fail(error)
        if error is not None:
            for program in self._programs_under_way():
                program.__exit__(kind, error, trace)
        self.close()

    def repeat_call(
        self,
        kind: Kind,
        tensors: tuple[torch.Tensor, ...],
        details: tuple[Hashable, ...],
        aside: int,
        beside: Beside | None = None,
    ) -> StreamMark | bool | None:
        """Make a call that compiled code remembers; return False or None, with nothing done, if Python has to make it.

        It spares a process group the way through the methods. Autograd is not told of what is written.

        Args:
            kind: kind of the call.
            tensors: plain tensors, the output first.
            details: its reduction or root, as the methods pass it on.
            aside: handle of a stream beside the caller's, on which the call comes behind the caller's work so far and
                returns its mark; 0 for the caller's stream.
            beside: see :meth:`all_gather`.

        Raises:
            PeerError, PeerTimeoutError: a peer failed.
        """
        repeats, entrance = self._repeats, self.calls.entrance
        if repeats is None or not entrance.acquire(False):
            return False
        try:
            made: StreamMark | bool | None = repeats.run(kind, tensors, details, AUTO, beside, aside)
        except (PeerError, KeyboardInterrupt) as error:
            self.calls.fail(error)
            raise
        finally:
            entrance.release()
        return made

    def _call(
        self,
        kind: Kind,
        tensors: tuple[Any, ...],
        details: tuple[Hashable, ...],
        variant: str,
        beside: Beside | None,
        async_op: bool,
        is_aside: bool = False,
    ) -> Work | None:
        """Make a call. ``is_aside``: it is asynchronous, and the current stream is that of asynchronous calls."""
        repeats = self._repeats
        if repeats is not None:
            call, backend = (kind, tensors, details, variant, beside), repeats.backend
            is_beside = async_op and not is_aside
            try:
                made = repeats.run(*call, backend.aside.handle) if is_beside else repeats.run(*call)
                if made:
                    return _work_of(repeats, tensors, made) if async_op else None
                if is_beside and not self.backend.caller_stream()[1]:
                    return backend.aside.run(lambda: self._call(*call, async_op, is_aside=True))
                if made is None or is_beside:
                    repeats = None  # the call may be remembered already, and run again later; or it is captured
            except (PeerError, KeyboardInterrupt) as error:
                self.calls.fail(error)
                raise
        single = SingleCall(kind, tensors, details)
        is_listed = kind in LISTED and any(isinstance(tensor, list | tuple) for tensor in tensors)
        asked = ListedCall(kind, [single], self.world_size) if is_listed else single
        return self._run(asked, variant, beside, async_op, remember=repeats is not None)

    def _run(
        self, asked: CallForm, variant: str, beside: Beside | None, async_op: bool, remember: bool = False
    ) -> Work | None:
        if self._repeats is None:
            self._repeats = self.path.repeats  # it may have been compiled by now
        run = leaving_modes(self.path.run) if is_in_modes() else self.path.run
        return run(asked, variant=variant, beside=beside, async_op=async_op, remember=remember)


def _work_of(repeats: Repeats, tensors: tuple[Any, ...], mark: Any) -> Work:
    """Return the work of an asynchronous call that compiled code has made; what it writes comes first."""
    columns = [one if isinstance(one, list | tuple) else (one,) for one in tensors]
    used, outputs = [tensor for column in columns for tensor in column], tuple(columns[0])
    if mark is True:  # made on the stream of asynchronous calls, as the current one
        mark = None
    else:
        count_writes(outputs)
    return repeats.backend.work_on(repeats.backend.aside, used, outputs, mark)


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    lengths: Any = size
    if len(size) == 1:
        try:
            operator.index(size[0])
        except TypeError:
            lengths = size[0]
    try:
        return tuple(map(operator.index, lengths))
    except TypeError:
        raise TypeError(f"empty: size (value={lengths!r}, allowed=whole numbers, or one sequence of them)") from None
