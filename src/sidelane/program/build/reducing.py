"""Hybrid programs for the collectives that add: copy engines move the bytes, compute units reduce them.

A rank's peers push their chunks of its shard into slots of its staging buffer; its compute queue waits for all of them
and reduces in the order of the ranks, so that the result does not depend on who came first. An all_reduce leaves the
result in staging, from where the peers pull it into their outputs (paper 003, section 6.1, sketches the first half).
"""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.program.build.flags import FlagPlan
from sidelane.program.build.moving import rotation
from sidelane.program.collective import REDUCING, SLOT_ALIGNMENT, Buffer, Chunk, Collective, Kind, Span
from sidelane.program.ir import Command, Copy, Engine, EngineKind, Program, Queue, Reduce


def reduce(collective: Collective, variant: str = "b2b") -> Program:
    """Build a reduce_scatter or all_reduce.

    Args:
        collective: made by ``reduce_scatter`` or ``all_reduce``. Input and output may be ordinary memory.
        variant: ``pcpy`` (an engine for each peer) or ``b2b`` (one engine a rank).

    Raises:
        ValueError: another collective or variant.
    """
    if collective.kind not in REDUCING or collective.reduction is None:
        raise ValueError(f"reduce: collective (value={collective.kind}, allowed={', '.join(REDUCING)})")
    if variant not in ("pcpy", "b2b"):
        raise ValueError(f"reduce: variant (value={variant!r}, allowed='pcpy', 'b2b')")
    return _Reducing(collective, variant).program()


class _Reducing:
    def __init__(self, collective: Collective, variant: str) -> None:
        self.collective = collective
        self.variant = variant
        self.gathers = collective.kind is Kind.ALL_REDUCE
        self.flags = FlagPlan(collective.world_size, phases=2 if self.gathers else 1)
        self.shards = collective.counts[0]
        self.chunks = {(chunk.src_rank, chunk.dst_rank): chunk for chunk in collective.chunks()}

    def program(self) -> Program:
        world_size = self.collective.world_size
        queues: list[Queue] = []
        for rank in range(world_size):
            if world_size == 1:
                queues += self._copy_alone()
                continue
            peers = list(rotation(rank, world_size))
            groups = [[peer] for peer in peers] if self.variant == "pcpy" else [peers]
            dma = [commands for group in groups if (commands := self._dma(rank, group))]
            queues += [Queue(rank, Engine(EngineKind.DMA, i), tuple(commands)) for i, commands in enumerate(dma)]
            if self.shards[rank]:
                queues.append(Queue(rank, Engine(EngineKind.COMPUTE), tuple(self._compute(rank))))
        staging = tuple(self._slot(rank, world_size if self.gathers else world_size - 1) for rank in range(world_size))
        return Program(self.collective, self.variant, tuple(queues), staging, self.flags.handshakes)

    def _dma(self, rank: int, group: Sequence[int]) -> list[Command]:
        flags = self.flags
        reducers = [peer for peer in group if self.shards[peer]]
        commands: list[Command] = []
        if self.shards[rank]:
            commands += [flags.signal_entry(partner=rank, mover=peer) for peer in group]
        commands += [flags.wait_entry(partner=peer, mover=rank) for peer in reducers]
        commands += [Copy(self._slot_span(peer, rank), self._input_span(self.chunks[rank, peer])) for peer in reducers]
        commands += [flags.signal_exit(partner=peer, mover=rank) for peer in reducers]
        if self.gathers:
            for peer in reducers:
                commands.append(flags.wait_entry(partner=peer, mover=rank, phase=1))
                commands.append(Copy(self._output_span(self.chunks[peer, peer], rank), self._result_span(peer)))
                commands.append(flags.signal_exit(partner=peer, mover=rank, phase=1))
            if self.shards[rank]:
                commands += [flags.wait_exit(partner=rank, mover=peer, phase=1) for peer in group]
        return commands

    def _compute(self, rank: int) -> list[Command]:
        collective, flags = self.collective, self.flags
        assert collective.reduction is not None
        peers = list(rotation(rank, collective.world_size))
        own = self.chunks[rank, rank]
        output = self._output_span(own, rank)
        srcs = tuple(
            self._input_span(own) if src == rank else self._slot_span(rank, src) for src in range(collective.world_size)
        )
        waits = [flags.wait_exit(partner=rank, mover=peer) for peer in peers]
        if not self.gathers:
            return [*waits, Reduce(output, srcs, collective.reduction)]
        result = self._result_span(rank)
        releases = [flags.signal_entry(partner=rank, mover=peer, phase=1) for peer in peers]
        return [*waits, Reduce(result, srcs, collective.reduction), *releases, Copy(output, result)]

    def _copy_alone(self) -> list[Queue]:
        if self.collective.in_place or not self.chunks:
            return []
        own = self.chunks[0, 0]
        return [Queue(0, Engine(EngineKind.LOCAL), (Copy(self._output_span(own, 0), self._input_span(own)),))]

    def _slot(self, rank: int, index: int) -> int:
        """Offset of staging slot ``index`` on ``rank``."""
        return index * -(-self.shards[rank] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT if self.collective.world_size > 1 else 0

    def _slot_span(self, rank: int, src_rank: int) -> Span:
        """Where ``src_rank``'s chunk lands: slots go by rank and leave out the reducing rank itself."""
        index = src_rank - (src_rank > rank)
        return Span(rank, Buffer.STAGING, self._slot(rank, index), self.shards[rank])

    def _result_span(self, rank: int) -> Span:
        return Span(rank, Buffer.STAGING, self._slot(rank, self.collective.world_size - 1), self.shards[rank])

    def _input_span(self, chunk: Chunk) -> Span:
        return self.collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)

    def _output_span(self, chunk: Chunk, rank: int) -> Span:
        return self.collective.output_span(rank, chunk.dst_offset, chunk.nbytes)
