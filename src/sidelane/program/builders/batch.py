"""Build one program for several collectives: the commands of each, with one entry and one exit handshake for all.

Each part is built by its own builder, with the transport that its own tensors allow, and then all are merged. A rank,
two parts, ``b2b``, the first pushed and the second staged::

    part 0   dma    entries | entered | push push push | exits | exited
    part 1   local  stage, entry, stage, entry, stage, entry
             dma              entered | pull pull pull | exits | exited

    merged   local  stage, entry, stage, entry, stage, entry
             dma              entered | push pull, push pull, push pull | exits | exited

This is correct because a flag means the same in all parts (``flags``): *entry* says that the partner's side may
be touched, now for every part, so it comes behind the last staging of any of them; *exit* says that everything has
been moved. ``verify`` proves the outcome like any other program.

All copies between two ranks follow each other, in the rotation of ``b2b``: ranks stay in step however the sizes differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

from sidelane.fields import an, one_of, plain_text, several
from sidelane.program import ir
from sidelane.program.batch import PIECE_ALIGNMENT, Batch
from sidelane.program.builders.registry import FlagPlan, FlagRole, Transport, beside, find_algorithm, list_variants
from sidelane.program.collective import Buffer, Collective, Kind, Span

_BATCH, _TRANSPORTS = an(Batch), several(one_of(Transport), Transport)


def build_batch(batch: Batch, variant: str, transports: Sequence[Transport]) -> ir.Program:
    """Build the program of a batch.

    Args:
        batch: collectives to run; there may be none.
        variant: name of the algorithm of every part, one of ``list_variants`` of its kind.
        transports: transport of each part, as in ``build``.

    Raises:
        TypeError: an argument has another type.
        ValueError: the variant does not exist for a part, or cannot run with its transport.
    """
    batch, variant = _BATCH("build_batch: batch", batch), plain_text("build_batch: variant", variant)
    transports = _TRANSPORTS("build_batch: transports", transports)
    built: dict[tuple[Collective, Transport], ir.Program] = {}  # layers of a model have the same few shapes
    programs = []
    finish: Callable[[ir.Program], ir.Program] = beside
    for part, transport in zip(batch.parts, transports, strict=True):
        algorithm = find_algorithm(part.kind, variant)
        if algorithm is None or algorithm.assemble is None or not algorithm.merges:
            allowed = ", ".join(list_variants(part.kind))
            raise ValueError(f"build_batch: variant of {part.kind} (value={variant!r}, allowed={allowed})")
        if algorithm.whole_batch is not None:
            return algorithm.whole_batch(batch)
        key = (part, transport)
        if key not in built:
            built[key] = algorithm.assemble(part, transport)
        programs.append(built[key])
        finish = algorithm.finish
    base = programs[0].variant if programs else variant
    return finish(_Merged(batch, base, programs).program())


class _Stage(IntEnum):
    """The order of the commands on an engine within one handshake."""

    ENTER = 0
    RELEASED = 1
    ENTERED = 2
    MOVE = 3
    EXIT = 4
    EXITED = 5
    REDUCE = 6


_SIGNALS = {FlagRole.ENTRY: _Stage.ENTER, FlagRole.EXIT: _Stage.EXIT}
_WAITS = {FlagRole.LOCAL: _Stage.RELEASED, FlagRole.ENTRY: _Stage.ENTERED, FlagRole.EXIT: _Stage.EXITED}


class _Merged:
    def __init__(self, batch: Batch, variant: str, programs: Sequence[ir.Program]) -> None:
        self.batch, self.variant, self.programs = batch, variant, programs
        self.world_size = batch.world_size
        self.plans = [FlagPlan(self.world_size, 2 if part.kind is Kind.ALL_REDUCE else 1) for part in batch.parts]
        self.flags = FlagPlan(self.world_size, max((plan.phases for plan in self.plans), default=0))
        self.local_flags = 0
        self.staging = [[0] * self.world_size for _ in programs]  # where the staging of each part begins
        self.staging_bytes = [0] * self.world_size
        for starts, program in zip(self.staging, programs, strict=True):
            for rank, nbytes in enumerate(program.staging_bytes):
                if nbytes:
                    starts[rank] = -(-self.staging_bytes[rank] // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
                    self.staging_bytes[rank] = starts[rank] + nbytes

    def program(self) -> ir.Program:
        by_rank: list[list[tuple[int, ir.Queue]]] = [[] for _ in range(self.world_size)]
        for part, program in enumerate(self.programs):
            for queue in program.queues:
                by_rank[queue.rank].append((part, queue))
        queues = [queue for rank, given in enumerate(by_rank) for queue in self._rank(rank, given)]
        return ir.Program(
            collective=self.batch,
            variant=self.variant,
            queues=tuple(queues),
            staging_bytes=tuple(self.staging_bytes),
            flag_count=self.flags.handshakes + self.local_flags,
        )

    def _rank(self, rank: int, given: Sequence[tuple[int, ir.Queue]]) -> Iterator[ir.Queue]:
        dma = [(part, queue) for part, queue in given if queue.engine.kind is ir.EngineKind.DMA]
        numbers = self._engines(rank, [queue for _, queue in dma])
        engine_of = {(part, queue.engine.index): number for (part, queue), number in zip(dma, numbers, strict=True)}

        def placed(kind: ir.EngineKind, number: int | None = None) -> list[list[ir.Command]]:
            return [
                list(self._placed(part, queue, engine_of))
                for part, queue in given
                if queue.engine.kind is kind and number in (None, engine_of.get((part, queue.engine.index)))
            ]

        behind_copies = _merge_at_signals(placed(ir.EngineKind.LOCAL))
        reducing = self._staged(rank, placed(ir.EngineKind.COMPUTE), set())
        done = {command for command in (*behind_copies, *reducing) if _is_partners(command, self.flags)}
        for number in sorted(set(numbers)):
            commands = self._staged(rank, placed(ir.EngineKind.DMA, number), done)
            done.update(command for command in commands if _is_partners(command, self.flags))
            yield ir.Queue(rank, ir.Engine(ir.EngineKind.DMA, number), tuple(commands))
        staged = max((n for n, command in enumerate(behind_copies, 1) if isinstance(command, ir.Signal)), default=0)
        filled = [commands for commands in (behind_copies[:staged], behind_copies[staged:]) if commands]
        for number, commands in enumerate(filled):
            yield ir.Queue(rank, ir.Engine(ir.EngineKind.LOCAL, number), tuple(commands))
        if reducing:
            yield ir.Queue(rank, ir.Engine(ir.EngineKind.COMPUTE), tuple(reducing))

    def _engines(self, rank: int, queues: Sequence[ir.Queue]) -> list[int]:
        """Return the engine of each queue: one for all of ``b2b``; otherwise queues that move for the same peer share
        one. A flag of the mover must be awaited by one engine, and raised after one engine has moved everything.
        """
        if self.variant == "b2b":
            return [0] * len(queues)
        moves = ([command for command in queue.commands if isinstance(command, ir.MOVES)] for queue in queues)
        peers = [{_distance(command, rank, self.world_size) for command in some} for some in moves]
        groups: list[set[int]] = []
        for near in filter(None, peers):
            touched = [group for group in groups if group & near]
            groups = [group for group in groups if not group & near] + [near.union(*touched)]
        groups.sort(key=min)
        return [next((n for n, group in enumerate(groups) if group & near), 0) for near in peers]

    def _staged(self, rank: int, parts: Iterable[Sequence[ir.Command]], done: set[ir.Command]) -> list[ir.Command]:
        """Return the commands of all parts, each once, in the order of their stages; ``done`` ones stand elsewhere."""
        syncs: dict[ir.Command, tuple[int, int]] = {}
        moves: list[tuple[tuple[int, int, int], ir.Command]] = []
        for part in parts:
            phase, stage = 0, int(_Stage.ENTER)
            for command in part:
                if isinstance(command, ir.Signal | ir.Wait):
                    if command not in syncs:
                        syncs[command] = self._stage(command)
                    phase, stage = syncs[command]
                else:
                    stage = _Stage.REDUCE if stage >= _Stage.EXITED else max(stage, _Stage.MOVE)
                    distance = 0 if isinstance(command, ir.Reduce) else _distance(command, rank, self.world_size)
                    moves.append(((phase, stage, distance), command))
        held = [((*key, 0), command) for command, key in syncs.items() if command not in done]
        return [command for _, command in sorted(held + moves, key=lambda entry: entry[0])]

    def _stage(self, command: ir.Signal | ir.Wait) -> tuple[int, int]:
        phase, role = self.flags.role(command.flag)
        return phase, _SIGNALS[role] if isinstance(command, ir.Signal) else _WAITS[role]

    def _placed(self, part: int, queue: ir.Queue, engine_of: Mapping[tuple[int, int], int]) -> Iterator[ir.Command]:
        """Yield the commands of a part's queue, on the buffers and flags of the batch.

        ``engine_of``: DMA engine of the batch for a part and the index of the engine there.
        """
        for command in queue.commands:
            if not isinstance(command, ir.Signal | ir.Wait):
                yield _on(command, {span: self._span(span, part) for span in ir.spans(command)})
            elif self.plans[part].role(command.flag)[1] is FlagRole.LOCAL:
                engine = engine_of[part, command.flag.index - self.plans[part].handshakes]
                self.local_flags = max(self.local_flags, engine + 1)
                yield dataclasses.replace(command, flag=self.flags.local(command.flag.rank, engine))
            else:
                yield command  # handshakes have the same flags in all programs

    def _span(self, span: Span, part: int) -> Span:
        if span.buffer == Buffer.STAGING:
            return dataclasses.replace(span, offset=span.offset + self.staging[part][span.rank])
        return self.batch.placed(part, span)


def _merge_at_signals(parts: Sequence[list[ir.Command]]) -> list[ir.Command]:
    """Merge copies inside a rank: put each signal, once, behind the commands before it in any part; then the rest."""
    merged: list[ir.Command] = []
    for signal in dict.fromkeys(command for part in parts for command in part if isinstance(command, ir.Signal)):
        for part in parts:
            if signal in part:
                before = part.index(signal)
                merged += [command for command in part[:before] if not isinstance(command, ir.Signal)]
                part[:before] = [command for command in part[:before] if isinstance(command, ir.Signal)]
        merged.append(signal)
    return merged + [command for part in parts for command in part if not isinstance(command, ir.Signal)]


def _on(command: ir.Command, placed: dict[Span, Span]) -> ir.Command:
    """Return the same command on other spans."""
    match command:
        case ir.Copy(dst, src):
            return ir.Copy(placed[dst], placed[src])
        case ir.Broadcast((first, second), src):
            return ir.Broadcast((placed[first], placed[second]), placed[src])
        case ir.Swap(a, b):
            return ir.Swap(placed[a], placed[b])
        case ir.Reduce(dst, srcs, reduction):
            return ir.Reduce(placed[dst], tuple(placed[src] for src in srcs), reduction)
        case _:
            return command


def _is_partners(command: ir.Command, flags: FlagPlan) -> bool:
    """Return True for a command that answers a mover: one a rank is enough, on the engine that needs it most."""
    if isinstance(command, ir.Signal):
        return flags.role(command.flag)[1] is FlagRole.ENTRY
    return isinstance(command, ir.Wait) and flags.role(command.flag)[1] is FlagRole.EXIT


def _distance(command: ir.Command, rank: int, world_size: int) -> int:
    """Return the distance from ``rank`` to the nearest peer of a move, on the circle of ranks."""
    return min((span.rank - rank) % world_size for span in ir.spans(command) if span.rank != rank)
