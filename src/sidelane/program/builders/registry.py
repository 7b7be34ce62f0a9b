"""Registry of algorithms for copy engines, and the numbering of flags that they share.

Each file of this folder declares its algorithms here. A new algorithm is a new file here that calls :func:`register`.
``build``, ``verify``, the choice, the commands and the tests use its declaration; no table elsewhere knows its name.

Flags have the same numbers in every program, so that all programs of a communicator can share flag memory.

A transfer moves bytes between two ranks; the *mover* is the rank whose engine executes it, the *partner* the other one.

- entry: the partner tells the mover that its side may be touched (its buffer is free, or its bytes are ready);
- exit: the mover tells the partner that it has finished.

Each flag has one writer in a program. Programs differ in their phases, so a flag of a later phase may be a local one of
another program, which its own rank writes while it is still in that call. Only signals that a rank gives after it
has heard from the other one, in the same call, may have a later phase; its first signal has phase 0, whose flags have
one meaning in all programs.

With 4 ranks, the exit of phase 1 that rank 2 writes has index 1*8 + 4 + 2 = 14 on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum

from sidelane.fields import an, one_of, plain_text, several, validate, whole
from sidelane.program.batch import Batch
from sidelane.program.collective import Collective, Kind
from sidelane.program.ir import EPOCH, MOVES, Copy, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.shape import CallShape


class Transport(StrEnum):
    """Rank that moves a chunk, and so the buffers that must be in symmetric memory.

    ``push``: the source writes into its peer's output (output symmetric). ``pull``: the destination reads its peer's
    input (input symmetric). ``staged``: the source copies its input to staging and its peers pull from there; none of
    the caller's buffers needs to be symmetric, for one more copy of the bytes that a rank sends.
    """

    PUSH = "push"
    PULL = "pull"
    STAGED = "staged"


_KIND, _TRANSPORT, _COLLECTIVE = one_of(Kind), one_of(Transport), an(Collective)
_KINDS = several(_KIND)


def no_objection(shape: CallShape) -> str:
    """Return no objection: the algorithm is legal for every call of its kinds."""
    return ""


def beside(program: Program) -> Program:
    """Copy the bytes that stay on their rank at the same time as those that travel: a pure step after the builders.

    A builder puts a rank's own part on a ``local`` engine, with no wait in front. This step adds a flag to wait for:
    the first DMA queue sets it when it begins to move. The local copy then overlaps the others::

        dma:0    entries | wait for entries | mark | copies to peers | exits | wait for exits
        local:0                               wait | own part

    Executors need no fork of their own for such a queue, and on GPUs the copy keeps out of the way of the signals. Own
    parts follow the last wait before a move of that queue; if it moves without a wait, they stay as they are.
    """
    mark = program.flag_count
    queues: list[Queue] = []
    marked = False
    for rank in range(program.world_size):
        given = program.queues_of(rank)
        first = next((queue for queue in given if queue.engine.kind is EngineKind.DMA), None)
        own = [queue for queue in given if _stays(queue)]
        place = _behind_waits(first) if first is not None else 0
        if first is None or not own or not place:
            queues += given
            continue
        flag, marked = Flag(rank, mark), True
        assert len(own) == 1, "builders put all of a rank's own part on one engine"
        changed = {
            first.engine: _inserted(first, place, Signal(flag, EPOCH)),
            own[0].engine: _inserted(own[0], 0, Wait(flag, EPOCH)),
        }
        queues += [changed.get(queue.engine, queue) for queue in given]
    return dataclasses.replace(program, queues=tuple(queues), flag_count=mark + marked)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to run some collectives on copy engines.

    Attributes:
        name: value of ``variant=`` that selects the algorithm.
        kinds: kinds of collectives that it runs.
        preference: rank among algorithms that are expected to be equally fast; the lowest is taken.
        assemble: function that makes the commands of a collective, before ``finish``.
        whole: function that makes a whole program, if it is more than that; None for ``finish(assemble(...))``.
        finish: steps behind ``assemble``, or behind the merging of many.
        into_outputs: ranks write into the outputs of others, which must be symmetric.
        merges: its programs have one handshake with every peer, so that those of many tensors can be merged.
        objection: function that returns the reason why a call is not legal; empty if it is.
        default_rule: function that returns the reason to take it without measurements; empty if there is none.
        whole_batch: function that makes the program of a batch; None to merge those of its parts.
        through_host: it is for staging in host memory, between GPUs that do not reach each other's.
    """

    name: str
    kinds: tuple[Kind, ...]
    preference: int
    assemble: Callable[[Collective, Transport], Program]
    whole: Callable[[Collective, Transport], Program] | None = None
    finish: Callable[[Program], Program] = beside
    into_outputs: bool = False
    merges: bool = True
    objection: Callable[[CallShape], str] = no_objection
    default_rule: Callable[[CallShape], str] = no_objection
    whole_batch: Callable[[Batch], Program] | None = None
    through_host: bool = False

    def __post_init__(self) -> None:
        validate(self, name=plain_text, kinds=_KINDS, preference=whole)


registered: dict[tuple[Kind, str], Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    """Register an algorithm.

    Raises:
        ValueError: another algorithm has that name for one of its kinds.
    """
    for kind in algorithm.kinds:
        if registered.setdefault((kind, algorithm.name), algorithm) is not algorithm:
            raise ValueError(f"register: another algorithm for {kind} has this name (value={algorithm.name!r})")
    return algorithm


def algorithms(kind: Kind) -> tuple[Algorithm, ...]:
    """Return all algorithms for a collective, by preference."""
    kind = _KIND("algorithms: kind", kind)
    found = [algorithm for (of, _), algorithm in registered.items() if of is kind]
    return tuple(sorted(found, key=lambda algorithm: (algorithm.preference, algorithm.name)))


def find_algorithm(kind: Kind, name: str) -> Algorithm | None:
    """Return the algorithm of that name for a collective; None if there is none."""
    return registered.get((_KIND("find_algorithm: kind", kind), plain_text("find_algorithm: name", name)))


def variants(kind: Kind) -> tuple[str, ...]:
    """Return the names of algorithms, by preference."""
    return tuple(algorithm.name for algorithm in algorithms(kind))


def list_variants(kind: Kind) -> tuple[str, ...]:
    """Return those of :func:`variants` that run batches, with one handshake for all parts."""
    return tuple(algorithm.name for algorithm in algorithms(kind) if algorithm.merges)


def merges(name: str) -> bool:
    """Return True if programs of that algorithm can be merged into one for many tensors, whatever the collective."""
    return all(algorithm.merges for (_, known), algorithm in registered.items() if known == name)


def for_every_kind(name: str) -> bool:
    """Return True if every collective has an algorithm of that name, so that a batch of several kinds can use it."""
    return all((kind, name) in registered for kind in Kind)


def writes_into_outputs(variant: str) -> bool:
    """Return True if ranks write into the outputs of others in that algorithm, which must be symmetric then."""
    return any(algorithm.into_outputs for (_, name), algorithm in registered.items() if name == variant)


def build(collective: Collective, variant: str, transport: Transport = Transport.PUSH) -> Program:
    """Build the program of a collective.

    Args:
        collective: collective to run (see ``program.collective``).
        variant: one of ``variants(collective.kind)``.
        transport: transport that the symmetric buffers allow. Reducing collectives always begin with staging.

    Raises:
        TypeError: an argument has another type.
        ValueError: the variant does not exist for this collective, or cannot run with this transport.
    """
    collective, transport = _COLLECTIVE("build: collective", collective), _TRANSPORT("build: transport", transport)
    algorithm = find_algorithm(collective.kind, plain_text("build: variant", variant))
    if algorithm is None:
        allowed = ", ".join(variants(collective.kind))
        raise ValueError(f"build: variant of {collective.kind} (value={variant!r}, allowed={allowed})")
    if algorithm.whole is not None:
        return algorithm.whole(collective, transport)
    return algorithm.finish(algorithm.assemble(collective, transport))


class FlagRole(StrEnum):
    """Purpose of a flag."""

    ENTRY = "entry"
    EXIT = "exit"
    LOCAL = "local"


@dataclasses.dataclass(frozen=True, slots=True)
class FlagPlan:
    """Flags of a program: ``phases`` handshakes between all pairs, then one flag for each queue of the own rank."""

    world_size: int
    phases: int

    @property
    def handshakes(self) -> int:
        """Number of flags that handshakes use; local flags come after them."""
        return 2 * self.world_size * self.phases

    def signal_entry(self, partner: int, mover: int, phase: int = 0) -> Signal:
        return Signal(self._entry(partner, mover, phase), EPOCH)

    def wait_entry(self, partner: int, mover: int, phase: int = 0) -> Wait:
        return Wait(self._entry(partner, mover, phase), EPOCH)

    def signal_exit(self, partner: int, mover: int, phase: int = 0) -> Signal:
        return Signal(self._exit(partner, mover, phase), EPOCH)

    def wait_exit(self, partner: int, mover: int, phase: int = 0) -> Wait:
        return Wait(self._exit(partner, mover, phase), EPOCH)

    def role(self, flag: Flag) -> tuple[int, FlagRole]:
        """Return the phase of a flag (0 for local ones) and its role.

        >>> FlagPlan(world_size=4, phases=2).role(Flag(rank=0, index=14))
        (1, <FlagRole.EXIT: 'exit'>)
        """
        if flag.index >= self.handshakes:
            return 0, FlagRole.LOCAL
        phase, index = divmod(flag.index, 2 * self.world_size)
        return phase, FlagRole.ENTRY if index < self.world_size else FlagRole.EXIT

    def local(self, rank: int, queue: int) -> Flag:
        """Return the flag by which another engine of ``rank`` releases its DMA queue number ``queue``."""
        return Flag(rank, self.handshakes + queue)

    def _entry(self, partner: int, mover: int, phase: int) -> Flag:
        return Flag(mover, 2 * self.world_size * phase + partner)

    def _exit(self, partner: int, mover: int, phase: int) -> Flag:
        return Flag(partner, 2 * self.world_size * phase + self.world_size + mover)


def _stays(queue: Queue) -> bool:
    return queue.engine.kind is EngineKind.LOCAL and all(isinstance(command, Copy) for command in queue.commands)


def _behind_waits(queue: Queue) -> int:
    """Return the position behind the last wait that a move follows; 0 if there is none."""
    moves = [index for index, command in enumerate(queue.commands) if isinstance(command, MOVES)]
    before = queue.commands[: moves[-1]] if moves else ()
    return max((index for index, command in enumerate(before, 1) if isinstance(command, Wait)), default=0)


def _inserted(queue: Queue, place: int, command: Signal | Wait) -> Queue:
    return dataclasses.replace(queue, commands=(*queue.commands[:place], command, *queue.commands[place:]))
