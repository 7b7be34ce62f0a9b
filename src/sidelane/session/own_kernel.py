"""The caller's own kernels: loaded with their own flags, and launched like collectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch

from sidelane import log
from sidelane.choice import Candidate, Choice
from sidelane.choice.candidate import SM
from sidelane.collectives.backend import KernelRunnable
from sidelane.collectives.call_cache import Key, PreparedCall
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import Calls
from sidelane.collectives.work import Work
from sidelane.device.layout import (
    CONTEXT_WORDS,
    COUNTERS,
    FLAG_COUNT,
    GENERATION,
    MAX_RANKS,
    RANK,
    REGIONS,
    STATUS,
    WORLD_SIZE,
    region_bytes,
)
from sidelane.errors import PeerError, UnavailableError
from sidelane.execute.base import CallerStream
from sidelane.fields import several, whole
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.storage import bytes_at, persistent
from sidelane.modes import untraced
from sidelane.program.kernel import KernelCall
from sidelane.session.entry import entry, repeated_entry

MOST_FLAGS = 1 << 20
MOST_LAUNCHES = 256
"""Number of launches of a kernel, by arguments that are no tensors, for which equal ones are counted."""

MOST_REMEMBERED = 64
"""Number of times that one launch is given to compiled code, for streams and alignments that change."""

MOST_RUNS = 4
"""Number of streams and alignments of one launch that are remembered at a time."""

MOST_GRID = (2**31 - 1, 65535, 65535)


class RepeatedLaunch:
    """A launch that may be repeated on other tensors of the same layouts.

    Attributes:
        indices: positions of these tensors among the kernel's arguments after the context.
        runs: functions that repeat it on tensors, for a stream and alignments each (``Repeats.launch``). The last
            one that was needed comes first.
        is_known: the last call is cached, but could not be repeated then (in a capture; behind another stream's work,
            where only Python orders streams).
    """

    __slots__ = ("_left", "indices", "is_known", "runs")

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices
        self.runs: tuple[Callable[..., bool | None], ...] = ()
        self.is_known = False
        self._left = MOST_REMEMBERED + 1

    def run(self, calls: Calls, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Repeat the launch on tensors. False: nothing was done. Raises PeerError and PeerTimeoutError."""
        made: bool | None = False
        try:
            for run in self.runs:
                made = run(*tensors)
                if made is not False:
                    break
            self.is_known = made is None
            return made is True
        except (PeerError, KeyboardInterrupt) as error:
            calls.fail(error)
            raise

    def is_worth_it(self) -> bool:
        """Return True if a launch is to be cached: it is new, was made before, and was not cached too often."""
        self._left -= not self.is_known
        return not self.is_known and 0 <= self._left < MOST_REMEMBERED

    def add(self, run: Callable[..., bool | None]) -> None:
        """Cache one more function in place of the oldest."""
        self.runs = (run, *self.runs[: MOST_RUNS - 1])


LaunchOnTensors = tuple[RepeatedLaunch, Sequence[torch.Tensor | None]]
"""A launch that may be repeated, and the tensors of a call of it, in the order of its indices; None where a tensor is
missing in each of its calls."""


@untraced
class OwnKernel:
    """A Triton kernel that signals its peers by ``sidelane.device.context``. Made by ``Communicator.load_kernel``.

    Attributes:
        kernel: the function that ``triton.jit`` made.
        name: its name.
        flags: number of its flags for each sender.
        context: its first argument, an int64 tensor on the device.
    """

    def __init__(self, path: CallPath, kernel: Any, flags: int, shared_bytes: int = 0) -> None:
        self.kernel: Any = kernel
        self.name: str = kernel_name(kernel)
        self.flags: int = flags
        calls, device = path.calls, path.arguments.device
        self._path, self._calls, self._preparer = path, calls, path.preparer
        rank, backend = calls.control.rank, calls.backend
        block = backend.memory.allocate(region_bytes(flags) + shared_bytes)
        self._block: SymmetricBlock | None = block
        words = torch.zeros(CONTEXT_WORDS, dtype=torch.int64, device="cpu")
        words[RANK], words[WORLD_SIZE] = rank, len(block.addresses)
        words[STATUS], words[FLAG_COUNT] = backend.status_words, flags
        words[REGIONS : REGIONS + len(block.addresses)] = torch.tensor(block.addresses, device="cpu")
        self._launches: dict[Hashable, RepeatedLaunch] = {}
        self.context: torch.Tensor = persistent(device, lambda: words.to(device))
        self._compiled: set[str] = set()
        self._first: torch.cuda.Event | None = None  # behind the first launch on a GPU
        self._has_launched = self._has_ended = self._is_closed = False

    def __str__(self) -> str:
        return f"kernel {self.name}"

    range_name = property(__str__)
    """Name of its launches in profilers."""

    is_under_way = False  # a launch has no triggers

    @entry
    def launch(
        self,
        grid: Sequence[int],
        /,
        *arguments: Any,
        async_op: bool = False,
        alike: str = "",
        repeated: LaunchOnTensors | None = None,
        **options: Any,
    ) -> Work | None:
        """Launch the kernel on all ranks together: a call of the communicator, in the order of all calls.

        It runs in the caller's order of work; inside of a CUDA graph capture it becomes part of the graph.

        Args:
            grid: number of programs in one to three dimensions, the same on every rank.
            arguments: arguments after the context, of any type that Triton takes. Values may differ between ranks.
            async_op: return a :class:`Work` instead of ordering the caller behind it.
            alike: text that must be the same on every rank; like grid and options it is compared if it is new.
            repeated: cached launch with these layouts and numbers, for a caller that has found it and could not
                :meth:`repeat` it. None: it is found by the arguments.
            options: constants of the kernel and options of Triton's launcher (``num_warps``), the same on every rank.

        Raises:
            RuntimeError: it was closed, or its first launch did not call ``end``.
            ValueError: the grid is out of range.
            UnavailableError: this device cannot run it.
            Exception: Triton cannot compile it; nothing has been launched.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        calls = self._calls
        layout, indices, is_here = _layout_of(alike, grid, arguments, options, self.context.device)
        if repeated is None and not async_op and is_here:
            repeated = self._found(tuple(layout), indices, arguments)
            if repeated is not None and repeated[0].run(calls, repeated[1]):
                return None
        call = calls.number()
        caller = calls.backend.caller_stream()
        with calls.reporting_refusals(call, str(self)):
            if self._block is None:
                raise RuntimeError(f"a launch of {self}, which was closed")
            if not (self._has_ended or caller[1]):
                self._see_that_it_ends()
            key: Key = (self, caller[1], *layout, *(arguments[at].data_ptr() for at in indices))
            try:
                prepared, is_cachable = self._preparer.cache.prepared(key), True
            except TypeError:  # it is not hashable: of an argument of an unknown type, or refused below
                prepared, is_cachable = None, False
            if prepared is None:
                prepared = self._bind(_checked(grid), arguments, options, caller[1], alike)
        signature = prepared.signature
        # Compared where it is new: a rank whose kernel cannot be compiled launches nothing.
        calls.announce(call, signature, compares=signature not in self._compiled)
        self._compiled.add(signature)
        used = async_op or caller[1]
        tensors = tuple(part for part in arguments if isinstance(part, torch.Tensor)) if used else ()
        work = calls.run(prepared, call, async_op, tensors, (), caller)
        if is_cachable and cast("KernelRunnable", prepared.loaded).is_prepared:
            self._preparer.cache.entry(key).prepared = prepared
        if used:
            return work
        if not self._has_launched:
            self._has_launched = True
            if self.context.is_cuda:
                self._first = torch.cuda.Event()
                self._first.record()
        if repeated is not None and self._has_ended and repeated[0].is_worth_it():
            self._cache(repeated, arguments, prepared, caller)
        return None

    @repeated_entry
    def repeat(self, repeated: RepeatedLaunch, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Make a cached launch on other tensors of the same layouts. False: nothing was done.

        Raises:
            PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        return repeated.run(self._calls, tensors)

    def _found(self, layout: Key, indices: Sequence[int], arguments: tuple[Any, ...]) -> LaunchOnTensors | None:
        """Return the launch that differs only in tensor addresses, with the tensors; None if it cannot be cached."""
        if self._path.code() is None:
            return None
        try:
            repeated = self._launches.get(layout)
        except TypeError:
            return None
        if repeated is None:
            if len(self._launches) >= MOST_LAUNCHES:
                self._launches.clear()
            repeated = self._launches[layout] = RepeatedLaunch(indices)
        return repeated, [arguments[at] for at in indices]

    def _cache(
        self, repeated: LaunchOnTensors, arguments: tuple[Any, ...], prepared: PreparedCall, caller: CallerStream
    ) -> None:
        """Give a launch to compiled code, which repeats it."""
        launch, tensors = repeated
        repeats = self._path.code()
        pairs = zip(tensors, launch.indices, strict=True)
        if repeats is not None and all(_is_same(tensor, arguments[at]) for tensor, at in pairs):
            numbers = [1 + at for at in launch.indices]  # behind the context
            run = repeats.launch(prepared, caller, tensors, numbers, ((self, "_is_closed", False),))
            if run is not None:
                launch.add(run)

    def _bind(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any], captured: bool, alike: str
    ) -> PreparedCall:
        """Bind the kernel to arguments, and compile it if it is new."""
        values = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
        signature = f"{self} {grid}, {values}{alike and f', {alike}'}"
        call = KernelCall(
            self.kernel, self.name, grid, (self.context, *arguments), options, self._calls.backend.status_words
        )
        is_new = signature not in self._compiled
        runnable = self._calls.backend.bind_kernel_call(call, compiles=is_new)
        if is_new:
            log.calls.info("rank %d: %s", self._calls.control.rank, signature)
        choice = Choice(Candidate(SM, self.name), "a kernel of the caller's own", ())
        return PreparedCall(runnable, signature, captured, choice)

    def shared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes that follow the flags as a tensor on the device, and their addresses on all ranks, int64."""
        assert self._block is not None
        device, start = self.context.device, region_bytes(self.flags)
        addresses = torch.tensor([base + start for base in self._block.addresses], device="cpu")
        own, nbytes = int(addresses[self._calls.control.rank]), self._block.tensor.nbytes - start
        return bytes_at(own, nbytes, device), persistent(device, lambda: addresses.to(device))

    @property
    def counters(self) -> torch.Tensor:
        """Counters for ``begin_of`` and ``end_relaxed`` (``sidelane.device.context``): int32, on the device."""
        if self._block is None:
            raise RuntimeError(f"counters of {self}, which was closed")
        return self.context[COUNTERS:].view(torch.int32)

    def generation(self) -> int:
        """Return the number of launches that have ended on this rank, replays included. Waits for the caller's work."""
        if self._block is None:
            raise RuntimeError(f"generation of {self}, which was closed")
        return int(self.counters[GENERATION]) & 0xFFFFFFFF

    def _see_that_it_ends(self) -> None:
        """Refuse a kernel whose first launch has finished without ``end``. The host does not wait here.

        The generation of such a kernel never changes, so that signals of older launches would fulfil its waits.
        """
        if not self._has_launched or (self._first is not None and not self._first.query()):
            return
        with torch.cuda.stream(None if self._first is None else torch.cuda.Stream(self.context.device)):
            if not self.generation():
                raise RuntimeError(f"{self}: its first launch has not come to an end: each program must call end")
        self._first, self._has_ended = None, True

    def renew(self, call: int) -> None:
        """Do nothing: the flags hold generations of this kernel, not call numbers."""

    def close(self) -> None:
        """Release its flags, once this rank's calls have ended. Idempotent, not collective.

        Raises:
            PeerError, PeerTimeoutError: a call failed.
        """
        if self._block is None:
            return
        if not self._calls.closed and self._calls.failure is None:
            with self._calls.failing_for_good():
                self._calls.backend.synchronize()
        self._preparer.own_programs.discard(self)
        self._preparer.cache.forget_calls_of(self)
        self._block, self._is_closed = None, True
        self._launches.clear()

    def __enter__(self) -> OwnKernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_kernel(path: CallPath, kernel: Any, flags: int, shared_bytes: int = 0) -> OwnKernel:
    """Give a kernel its own flags. Collective. See ``Communicator.load_kernel``.

    With ``shared_bytes`` it has so many bytes more on each rank, zeroed, which peers reach (``OwnKernel.shared``).

    Communicators have up to 16 ranks, but kernels only 8: a kernel handles all ranks at once in ``MAX_RANKS`` lanes, a
    constant of the compiled kernel (``device/context``). Flags, context and status have as many words each.
    The kernels of collectives and of the fused operators, which are loaded here, have the same limit.
    """
    arguments = path.arguments

    def check() -> tuple[None, str]:
        if arguments.world_size > MAX_RANKS:
            raise UnavailableError(f"load_kernel: ranks (value={arguments.world_size}, allowed=1..{MAX_RANKS})")
        if isinstance(flags, bool) or not isinstance(flags, int):
            raise TypeError(f"load_kernel: flags (value={flags!r}, allowed=a number)")
        if not 0 <= flags <= MOST_FLAGS:
            raise ValueError(f"load_kernel: flags (value={flags}, allowed=0..{MOST_FLAGS})")
        if not callable(getattr(kernel, "__getitem__", None)) or not hasattr(kernel, "run"):
            raise TypeError(f"load_kernel: kernel (value={type(kernel).__name__}, allowed=a kernel of triton.jit)")
        shared = f", {shared_bytes} bytes" if shared_bytes else ""
        return None, f"load_kernel {kernel_name(kernel)}, {flags} flags{shared}"

    path.agree("load_kernel", check)
    with path.calls.making_ready():
        made = OwnKernel(path, kernel, flags, shared_bytes)
    path.preparer.own_programs.add(made)
    return made


def kernel_name(kernel: Any) -> str:
    """Return the name of a function that ``triton.jit`` made."""
    function = getattr(kernel, "fn", kernel)
    while hasattr(function, "fn"):  # of an autotuner
        function = function.fn
    return str(getattr(function, "__name__", type(kernel).__name__))


def _layout_of(
    alike: str, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any], device: torch.device
) -> tuple[list[Any], list[int], bool]:
    """Return all that a launch depends on but addresses, positions of tensors, and whether all are on the device.

    >>> one, other, third = (_layout_of("", (1,), (), {"BY": by}, torch.device("cpu"))[0] for by in (0, 0.0, -0.0))
    >>> one == other, other == third  # Triton compiles another kernel for each
    (False, False)
    """
    layout: list[Any] = [alike, *(grid if isinstance(grid, tuple | list) else [_number_of(grid)])]
    layout += [(name, type(one), one.hex() if isinstance(one, float) else one) for name, one in options.items()]
    indices: list[int] = []
    is_here = True
    for at, part in enumerate(arguments):
        if isinstance(part, torch.Tensor):
            if part.device != device:  # Triton's launcher looks at each of them
                is_here = False
            layout.append(part.dtype)
            indices.append(at)
        else:
            layout.append(_number_of(part))
    return layout, indices, is_here


def _number_of(part: object) -> Any:
    """Return a key of an argument that is no tensor; an unhashable one of an unknown type."""
    if isinstance(part, float):
        return part.hex()  # 0.0 equals -0.0
    if isinstance(part, int):
        return part, type(part)
    return None if part is None else []


def _is_same(tensor: torch.Tensor | None, argument: Any) -> bool:
    """Return True if an argument is a tensor, or a view of all of it, or both are None."""
    if tensor is None or argument is None:
        return argument is tensor
    return isinstance(argument, torch.Tensor) and argument.data_ptr() == tensor.data_ptr()


_GRID = several(whole, int)


def _checked(grid: Sequence[int]) -> tuple[int, ...]:
    shape: tuple[int, ...] = _GRID("launch: grid", grid)
    if not 1 <= len(shape) <= 3 or any(not 1 <= length <= most for length, most in zip(shape, MOST_GRID, strict=False)):
        raise ValueError(f"launch: grid (value={tuple(grid)}, allowed=one to three numbers of programs, from 1)")
    return shape
