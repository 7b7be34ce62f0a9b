"""Blocks of kernels on a compute unit: what they take of it, how many fit, and how fast a unit runs with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane_lab.machines.spec import Machine, Occupancy

SHARPNESS = 2.5
"""Sharpness of the bend between blocks that run at their own speed and a unit that is full: fitted to a GEMM of 132 to
16,384 blocks on an H100 (docs/lab/model.md)."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFootprint:
    """Room of a block on a compute unit: threads, registers (of all of them), kilobytes of shared memory."""

    threads: int
    registers: int
    shared_kb: float


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A kernel of independent blocks, a GEMM for example.

    Attributes:
        name: unique in a run.
        blocks: of it.
        block_us: a block's time with a unit to itself.
        saturation: how many times the speed of a block that has a unit to itself the unit reaches, at most.
        traffic_bytes: a block's bytes through the memory.
        cache_bytes: a block's bytes out of the cache that all units share.
        footprint: of a block.
        after: names of what must have ended before.
        priority: the greater goes first.
        delay_us: from then until its blocks can be placed.
    """

    name: str
    blocks: int
    block_us: float
    saturation: float
    traffic_bytes: float
    cache_bytes: float
    footprint: BlockFootprint
    after: tuple[str, ...] = ()
    priority: int = 0
    delay_us: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Channels:
    """A collective's kernel: blocks that carry a part of the bytes each, so that those which have a place progress.

    Attributes:
        alone_us: its time with nothing beside it.
        memory_gbps: that it moves through the memory then.
        need: blocks beyond which it gains nothing.

    The others are those of :class:`Grid`.
    """

    name: str
    blocks: int
    alone_us: float
    memory_gbps: float
    need: float
    footprint: BlockFootprint
    after: tuple[str, ...] = ()
    priority: int = 0
    delay_us: float = 0.0


def occupancy(machine: Machine) -> Occupancy:
    """Return the machine's figures of what fits on a compute unit.

    Raises:
        ValueError: it has none.
    """
    if machine.occupancy is None:
        raise ValueError(f"occupancy: of {machine.name} (value=none, allowed=a description with a section [occupancy])")
    return machine.occupancy


def most_blocks(machine: Machine, footprint: BlockFootprint) -> int:
    """Return blocks of a kind that a compute unit holds at once."""
    limits = occupancy(machine)
    most = min(
        limits.threads // footprint.threads,
        limits.registers // footprint.registers,
        machine.gpu.blocks_per_unit,
        machine.gpu.shared_kb // footprint.shared_kb if footprint.shared_kb else float("inf"),
    )
    return int(most)


def has_room(machine: Machine, held: Sequence[tuple[BlockFootprint, int]], new: BlockFootprint) -> bool:
    """True if a unit that holds some blocks (kind and number) has room for one more."""
    limits, gpu = occupancy(machine), machine.gpu
    return bool(
        sum(number for _, number in held) < gpu.blocks_per_unit
        and new.threads + sum(p.threads * number for p, number in held) <= limits.threads
        and new.registers + sum(p.registers * number for p, number in held) <= limits.registers
        and new.shared_kb + sum(p.shared_kb * number for p, number in held) <= gpu.shared_kb
    )


def share_of_speed(blocks: int, saturation: float) -> float:
    """Speed of each of some blocks on a unit, as a share of a lone one's; their sum is concave in their number."""
    return float((1.0 + (blocks / saturation) ** SHARPNESS) ** (-1.0 / SHARPNESS))
