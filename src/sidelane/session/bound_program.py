"""The caller's own programs: proved, bound to named buffers, and called like collectives."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Set
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, cast

import torch

from sidelane.choice import Candidate, Choice
from sidelane.choice.candidate import DMA
from sidelane.collectives.arguments import Arguments
from sidelane.collectives.call_cache import PreparedCall
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import Calls
from sidelane.collectives.prepare import Preparer
from sidelane.collectives.work import Work
from sidelane.errors import ProgramError, SidelaneError, UnavailableError
from sidelane.execute.base import Addresses, CallerStream
from sidelane.memory.heap import Region, SymmetricBlock
from sidelane.modes import untraced
from sidelane.program import transform
from sidelane.program.collective import Buffer
from sidelane.program.contract import Contract
from sidelane.program.ir import EPOCH, Move, Program, Signal, SignalOp, Value, Wait, describe, has_epochs, writes
from sidelane.program.verify import verify
from sidelane.program.wraparound import WORD_BYTES, WORD_MASK, as_int32
from sidelane.session.entry import entry

if TYPE_CHECKING:
    from sidelane.collectives.backend_cuda import CudaMarkedWork


@dataclasses.dataclass(frozen=True)
class NamedBuffers:
    """The tensors of one rank for a program.

    Attributes:
        program: the program.
        tensors: tensors by name of the buffer.
        regions: regions of the tensors, by name.
        remote: names of the buffers that engines of peers read or write.
    """

    program: Program
    tensors: Mapping[str, torch.Tensor]
    regions: Mapping[str, Region]
    remote: frozenset[str]

    @staticmethod
    def check(program: Program, given: Mapping[str, torch.Tensor], arguments: Arguments) -> NamedBuffers:
        """Check the tensors of a program, and find their regions.

        Raises:
            TypeError: ``program`` is no program, or ``given`` is no mapping from names to tensors.
            ValueError: the number of ranks differs; or a buffer is missing, unknown, too small, not contiguous, on
                another device, overlaps another one, or is not symmetric although peers use it.
        """
        if not isinstance(program, Program):
            raise TypeError(f"load: program (value={type(program).__name__}, allowed=sidelane.program.ir.Program)")
        if program.world_size != arguments.world_size:
            raise ValueError(f"load: ranks of the program (value={program.world_size}, have={arguments.world_size})")
        if not isinstance(given, Mapping):
            raise TypeError(f"load: buffers (value={type(given).__name__}, allowed=a mapping from names to tensors)")
        definition = program.collective
        names = definition.bound if isinstance(definition, Contract) else definition.names
        remote = program.remote_buffers().intersection(names)
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"load: {program.collective} has no such buffers (value={unknown}, allowed={names})")
        sizes = {name: program.buffer_bytes(arguments.rank, name) for name in names}
        needed = [name for name in names if sizes[name] or name in remote]
        missing = [name for name in needed if name not in given]
        if missing:
            raise ValueError(f"load: buffers of rank {arguments.rank} are missing (value={missing}, needed={needed})")
        tensors = {name: given[name] for name in needed}
        regions = dict(zip(needed, arguments.regions("load", *tensors.values()), strict=True))
        for name, region in regions.items():
            if region.nbytes < sizes[name]:
                raise ValueError(f"load: buffer {name!r} (value={region.nbytes} bytes, allowed={sizes[name]} and more)")
            if name in remote and not region.symmetric:
                raise ValueError(
                    f"load: buffer {name!r} is touched by peers, so that it must be symmetric memory on every rank "
                    "(allowed=tensors of Communicator.empty)"
                )
        for (a, one), (b, other) in itertools.combinations(regions.items(), 2):
            if arguments.overlap(one, other):
                raise ValueError(f"load: buffers {a!r} and {b!r} overlap")
        return NamedBuffers(program, tensors, regions, remote)

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the program writes on some rank."""
        names = {span.buffer for queue in self.program.queues for command in queue.commands for span in writes(command)}
        return tuple(tensor for name, tensor in self.tensors.items() if name in names)

    @property
    def signature(self) -> str:
        """The signature that must be the same on all ranks."""
        locations = {name: self.regions[name].location for name in sorted(self.remote)}
        text = f"{self.program!r} {locations}"
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        return f"{self.program.collective} {self.program.variant} #{digest}"


P = TypeVar("P", bound="LoadedProgram")

_ALIGNMENT = 256
EAGER, CAPTURED = range(2)
"""Numbers of the flag regions: captured programs have their own, since replays do not follow the calls between them."""


class LoadedProgram:
    """A program with flags and staging of its own, at tensors of this rank, whose caller fires triggers of it.

    Attributes:
        program: the program.
        triggers: number of triggers that this rank fires in each call.
        arrivals: number of arrivals that this rank may wait for in each call.
    """

    def __init__(self, calls: Calls, preparer: Preparer, forms: Forms, buffers: NamedBuffers, choice: Choice) -> None:
        self.program: Program = buffers.program
        program = self.program
        self._calls, self._preparer, self._forms, self._choice = calls, preparer, forms, choice
        flag_bytes = -(-program.flag_count * WORD_BYTES // _ALIGNMENT) * _ALIGNMENT
        staging_bytes = max(forms.eager.staging_bytes)
        self._block: SymmetricBlock | None = calls.backend.memory.allocate(max(1, 2 * flag_bytes + staging_bytes))
        begins = self._block.addresses
        addresses: dict[tuple[int, str], int] = {
            (rank, Buffer.STAGING): base + 2 * flag_bytes for rank, base in enumerate(begins)
        }
        for name, region in buffers.regions.items():
            reached = preparer.reach(region, name in buffers.remote)
            addresses.update({(rank, name): address for rank, address in reached.items()})
        self._addresses = [
            Addresses(addresses, tuple(base + region * flag_bytes for base in begins)) for region in (EAGER, CAPTURED)
        ]
        self._last_signals = _last_signals(program, calls.control.rank)
        self._name = f"{program.collective} {program.variant}"
        self._signature, self._written = buffers.signature, buffers.written
        self._tensors: tuple[torch.Tensor, ...] = tuple(buffers.tensors.values())
        eager = self._prepare(forms.eager, EAGER)
        self._prepared: list[PreparedCall | None] = [eager, None]
        flag = self._addresses[EAGER].flag
        self._words = [[(flag(signal.flag), signal.value) for signal in signals] for signals in forms.triggers]
        self._unfired: set[int] = set()
        self._works: list[Work | None] = [None, None]  # of the last call with callers outside of graphs, and in one
        try:
            self._triggers = [calls.backend.bind_trigger(words, eager.loaded) for words in self._words]
        except UnavailableError:
            self._release()  # else the watch would store to flags whose memory is dropped
            raise
        self._arrivals = [
            calls.backend.bind_arrival([(flag(wait.flag), wait.value) for wait in waits], eager.loaded)
            for waits in forms.arrivals
        ]
        self.triggers: int = len(self._triggers)
        self.arrivals: int = len(self._arrivals)
        self._has_callers = bool(self.triggers or self.arrivals)
        self._epoch = 0
        self._capture = 0  # number of the capture that the last call of all went into

    def __str__(self) -> str:
        return self._name

    range_name = property(__str__)
    """Name of its calls in profilers."""

    @property
    def is_under_way(self) -> bool:
        """True while triggers of its last call are left, or the work of that call has not ended."""
        work = self._works[EAGER] if self._calls.failure is None else None
        return bool(self._unfired) or (work is not None and not work.is_completed())

    def renew(self, call: int) -> None:
        """Set flags that hold call numbers as if ``call`` had set them, while the program runs on no rank."""
        if self._block is None:
            return
        words = self._block.tensor[: WORD_BYTES * self.program.flag_count].view(torch.int32)
        for index, value in self._last_signals.items():
            words[index] = as_int32(value.at(call))

    def close(self) -> None:
        """Fire the triggers that are left, wait for this rank's calls, and release memory and tensors. Idempotent."""
        if self._block is None or self._calls.forked:
            return
        if not self._calls.closed and self._calls.failure is not None:
            with contextlib.suppress(SidelaneError):
                self._calls.backend.synchronize()  # threads of CPU ranks poll its flags until they see the failure
        elif not self._calls.closed:
            with self._calls.failing_for_good():
                for number in sorted(self._unfired):  # waits that are submitted to streams cannot be cancelled
                    self._triggers[number].fire_from_host(self._epoch)
                self._synchronize()
                if (work := self._works[EAGER]) is not None:
                    work.wait()
        self._release()

    def _release(self) -> None:
        """Release memory and tensors, while no call is under way."""
        rank, block = self._calls.control.rank, self._block
        assert block is not None
        self._calls.backend.forget_flags([each.flags[rank] for each in self._addresses], block)
        self._preparer.own_programs.discard(self)
        self._prepared, self._block, self._written, self._tensors = [None, None], None, (), ()
        self._triggers, self._arrivals, self._works = [], [], [None, None]
        self._unfired.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._unfired and self._calls.failure is None:
            self._calls.fail_untriggered(f"{self}, call {self._epoch}", error)
        with contextlib.suppress(SidelaneError):  # the first error is the one to see
            self.close()

    def _synchronize(self) -> None:
        """Block the host until this rank's calls of the program have ended."""
        self._calls.backend.synchronize()

    def _caller_stream(self, method: str) -> CallerStream:
        """Return the caller's stream. Raises ValueError unless it is in the capture of the call, or both in none."""
        backend = self._calls.backend
        caller = backend.caller_stream()
        if (backend.capture_of(caller) if caller[1] else 0) != self._capture:
            inside, outside = "inside of the graph that has the call", "outside of graphs, as the call"
            raise ValueError(f"{method}: {self} (allowed={inside if self._capture else outside})")
        return caller

    def _prepare(self, program: Program, region: int) -> PreparedCall:
        captured = region == CAPTURED
        loaded = self._calls.backend.executor.load(program, self._addresses[region], captured=captured)
        return PreparedCall(loaded, self._signature + ", captured" * captured, captured, self._choice)


@untraced
class BoundProgram(LoadedProgram):
    """A program bound to buffers of the ranks. Made by :meth:`Communicator.load`.

    Calling it is a call of the communicator: every rank makes it, in the order of all calls. It runs in the caller's
    order of work; inside of a CUDA graph capture it becomes part of the graph. It has its own flags and staging, and
    keeps them and the tensors until :meth:`close`.

    A program in which callers signal or wait (``sidelane.program.transform``) is started ahead, by
    ``async_op=True``. Each :meth:`trigger` releases the commands that wait for it; after the last one, the caller waits
    for the ``Work``. Bytes that callers read while it is under way are ready after :meth:`wait_for_arrival`. In a
    graph, where the number of one call cannot be written, triggers and arrivals are dependencies.

    Attributes:
        program: the program.
        triggers: number of triggers that this rank fires in each call.
        arrivals: number of arrivals that this rank may wait for in each call.
    """

    @entry
    def __call__(self, *, async_op: bool = False) -> Work | None:
        """Run the program once, all ranks together.

        Args:
            async_op: return a :class:`Work` instead of ordering the caller behind it.

        Raises:
            RuntimeError: it was closed, or triggers of its last call have not been fired.
            ValueError: it has triggers and ``async_op`` is False: the caller would wait before firing them.
            UnavailableError: it cannot be captured; nothing has been submitted.
            MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        calls = self._calls
        call = calls.number()
        caller = calls.backend.caller_stream()
        region = CAPTURED if caller[1] else EAGER
        with calls.reporting_refusals(call, self._name):
            if self._block is None:
                raise RuntimeError(f"a call of {self}, which was closed")
            capture = self._begin(async_op, caller) if self._has_callers else 0
            prepared = self._prepared[region]
            if prepared is None:
                prepared = self._prepared[region] = self._prepare(self._forms.for_a_graph(), CAPTURED)
        calls.announce(call, prepared.signature, compares=False)
        work = calls.run(prepared, call, async_op, self._tensors, self._written, caller)
        if self._has_callers:
            self._epoch, self._unfired, self._capture = call, set(range(self.triggers)), capture
            self._works[region] = work
        return work

    def trigger(self, number: int) -> None:
        """Fire a trigger after the caller's work so far, which has computed the bytes that it releases.

        Args:
            number: number of the trigger, which is that of the ``caller`` engine of this rank; each once per call.

        Raises:
            RuntimeError: no call is under way, or the trigger has been fired in this call.
            ValueError: there is no such trigger, or a graph is being captured that the call is not in.
            PeerError, PeerTimeoutError: a peer failed.
        """
        self._check_number("trigger", number)
        caller = self._caller_stream("trigger")
        with self._calls.failing_for_good():
            if caller[1]:
                cast("CudaMarkedWork", self._works[CAPTURED]).mark(number, caller)
            else:
                self._triggers[number].fire(self._epoch, caller)
        self._unfired.discard(number)

    def trigger_from_host(self, number: int) -> None:
        """Fire a trigger at once (see :meth:`trigger`). The work that computes its bytes must have ended."""
        self._check_number("trigger_from_host", number)
        self._refuse_graphs("trigger_from_host")
        with self._calls.failing_for_good():
            self._triggers[number].fire_from_host(self._epoch)
        self._unfired.discard(number)

    def trigger_by_kernel(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return (address, value) of each flag that a kernel of this rank stores to fire a trigger.

        The kernel stores 32 bits, release, at system scope. The trigger counts as fired from here on: if the kernel is
        never launched, the call times out. On CPU ranks Triton's interpreter runs the kernel, in this process. Raises
        as :meth:`trigger`.
        """
        self._check_number("trigger_by_kernel", number)
        self._refuse_graphs("trigger_by_kernel")
        self._unfired.discard(number)
        return tuple((address, value.at(self._epoch) & WORD_MASK) for address, value in self._words[number])

    def wait_for_arrival(self, number: int) -> None:
        """Order the caller's next work after an arrival, so that it may read the bytes. CPU ranks wait for the end.

        Args:
            number: number of the arrival, in the order of the ``caller`` engines of this rank that wait.

        Raises:
            RuntimeError: no call with ``async_op=True`` is under way; or, in a graph, not all of its triggers have been
                fired.
            ValueError: there is no such arrival, or a graph is being captured that the call is not in.
            PeerError, PeerTimeoutError: a peer failed.
        """
        if not 0 <= number < self.arrivals:
            raise ValueError(f"wait_for_arrival: number (value={number!r}, allowed={[*range(self.arrivals)]})")
        work = self._works[CAPTURED if self._capture else EAGER]
        if work is None:
            raise RuntimeError(f"wait_for_arrival: {self} is not under way: call it with async_op=True before")
        caller = self._caller_stream("wait_for_arrival")
        with self._calls.failing_for_good():
            if caller[1]:
                cast("CudaMarkedWork", work).follow(number, caller)
            else:
                self._arrivals[number].follow(self._epoch, caller, work)

    def close(self) -> None:
        """Release its memory and the tensors, once this rank's calls have ended. Idempotent, not collective.

        Raises:
            PeerError, PeerTimeoutError: a call failed.
        """
        if self._capture:  # this rank has ended that capture without the program
            self._unfired.clear()
        super().close()

    def _begin(self, async_op: bool, caller: CallerStream) -> int:
        """Check that a call with triggers or arrivals may begin. Return the number of the capture that it goes into."""
        capture = self._calls.backend.capture_of(caller) if caller[1] else 0
        if self._unfired and self._capture in (0, capture):
            raise RuntimeError(f"a call of {self}, which waits for its triggers {sorted(self._unfired)}")
        if self.triggers and not async_op:
            raise ValueError(f"a call of {self}, which has triggers to be fired meanwhile (allowed=async_op=True)")
        before = self._works[CAPTURED if capture else EAGER]
        if before is not None and self.triggers and capture in (0, self._capture):
            before.wait()  # the caller overwrites bytes that the previous call has read
        return capture

    def _refuse_graphs(self, method: str) -> None:
        if self._capture:
            raise ValueError(f"{method}: {self} in a graph, which would repeat what one call stores (allowed=trigger)")

    def _check_number(self, method: str, number: int) -> None:
        if not 0 <= number < self.triggers:
            raise ValueError(f"{method}: number (value={number!r}, allowed={[*range(self.triggers)]})")
        if number not in self._unfired:
            state = "closed" if self._block is None else "fired in this call" if self._epoch else "never called"
            raise RuntimeError(f"{method}: trigger {number} of {self} is fired once in each call (value={state})")


@dataclasses.dataclass(frozen=True)
class Forms:
    """The proved programs that run for a caller's program, outside of captures and in them.

    Attributes:
        program: program in moves that the engines support.
        captures: the device has graphs.
        eager: program outside of captures, without the commands of callers.
        triggers: signals of each trigger of this rank.
        arrivals: waits of each arrival of this rank.
    """

    program: Program
    captures: bool
    eager: Program
    triggers: tuple[tuple[Signal, ...], ...] = ()
    arrivals: tuple[tuple[Wait, ...], ...] = ()

    @staticmethod
    def of(program: Program, rank: int, capabilities: Set[type[Move]], *, captures: bool) -> Forms:
        """Make the forms of a program, and prove them.

        Args:
            program: the caller's program.
            rank: rank whose triggers and arrivals are returned.
            capabilities: moves that the engines support; others are lowered to these.
            captures: see the attribute.

        Raises:
            ProgramError: the program is wrong.
            ValueError: a command of a caller is neither a trigger nor an arrival.
            UnavailableError: no executor runs one of its commands.
        """
        verify(program)
        adds = [c for queue in program.queues for c in queue.commands if isinstance(c, Signal) and c.op is SignalOp.ADD]
        if adds:
            raise UnavailableError(f"load: engines cannot add to flags (value={describe(adds[0])}, allowed=set)")
        lowered = transform.lower(program, capabilities)
        if lowered is not program:
            verify(lowered)
        return Forms.proved(lowered, rank, captures=captures)

    @staticmethod
    def proved(program: Program, rank: int, *, captures: bool) -> Forms:
        """Make the forms of a program whose moves the engines support. Arguments and errors are those of :meth:`of`."""
        triggers, arrivals = transform.triggers_of(program, rank), transform.arrivals_of(program, rank)
        return Forms(program, captures, transform.without_callers(program), triggers, arrivals)

    def for_a_graph(self) -> Program:
        """Make the program to capture; few programs are captured. Raises UnavailableError if it cannot be captured."""
        problem: object = "its commands wait for a trigger" if self.program.prelaunched else "there are no graphs"
        if self.captures and not self.program.prelaunched:
            try:
                if self.eager is self.program and not has_epochs(self.program):
                    return self.program
                frozen = transform.freeze(self.program)
                verify(frozen)
                return transform.flags_of_callers(frozen)
            except (ValueError, ProgramError) as error:
                problem = error
        raise UnavailableError(f"{self.eager.collective} {self.eager.variant} cannot be captured: {problem}")


def bind_program(path: CallPath, program: Program, buffers: Mapping[str, torch.Tensor]) -> BoundProgram:
    """Prove a program and bind it to buffers. Collective. See :meth:`Communicator.load`."""
    arguments, backend = path.arguments, path.calls.backend

    def check() -> tuple[tuple[NamedBuffers, Forms], str]:
        found = NamedBuffers.check(program, buffers, arguments)
        moves, captures = backend.executor.capabilities.moves, backend.abilities.captures
        forms = Forms.of(program, arguments.rank, moves, captures=captures)
        return (found, forms), f"load {found.signature}"

    call, (found, forms) = path.agree("load", check)
    choice = Choice(Candidate(DMA, program.variant), "a program of the caller's own", ())
    return load_program(BoundProgram, path, call, forms, found, choice)


def load_program(form: type[P], path: CallPath, call: int, forms: Forms, buffers: NamedBuffers, choice: Choice) -> P:
    """Allocate the memory of a program on which the ranks agreed in ``call``, and load it there. Collective."""
    calls = path.calls
    ready = calls.number()
    with calls.failing_for_good(), calls.reporting_refusals(ready, "load"):
        loaded = form(calls, path.preparer, forms, buffers, choice)
        loaded.renew(call)  # new flags hold 0, which counts as signalled for a call number beyond 2**31
        calls.backend.wait_for_stores()
    try:
        calls.announce(ready, f"load {buffers.signature}: flags are ready", compares=True)
    except BaseException:  # another rank could not load it
        loaded._release()
        raise
    path.preparer.own_programs.add(loaded)
    return loaded


def _last_signals(program: Program, rank: int) -> dict[int, Value]:
    """Return the value that an invocation leaves in each flag of a rank that holds call numbers, by flag index."""
    found: dict[int, Value] = {}
    for queue in program.queues:
        for command in queue.commands:
            if isinstance(command, Signal) and command.op is SignalOp.SET and command.flag.rank == rank:
                value, index = command.value, command.flag.index
                if value.per_epoch and (index not in found or found[index].base < value.base):
                    found[index] = value
    if (ended := transform.ended_by(program, rank)) is not None:
        found[ended.index] = EPOCH
    return found
