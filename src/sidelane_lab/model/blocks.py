"""Blocks of kernels on a compute unit: what they take of it, how many fit, and how fast a unit runs with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from sidelane_lab.machines.spec import Machine, Occupancy

SHARPNESS = 2.5
"""Sharpness of the bend between blocks that run at their own speed and a unit that is full: fitted to a GEMM of 132 to
16,384 blocks on an H100 (results/notes/model.md)."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFootprint:
    """Room of a block on a compute unit: threads, registers (of all of them), kilobytes of shared memory."""

    threads: int
    registers: int
    shared_kb: float


def occupancy(machine: Machine) -> Occupancy:
    """Return the machine's figures of what fits on a compute unit.

    Raises:
        ValueError: it has none.
    """
    if machine.occupancy is None:
        raise ValueError(f"occupancy: of {machine.name} (value=none, allowed=a description with a section [occupancy])")
    return machine.occupancy


def most_blocks(machine: Machine, new: BlockFootprint | None, held: Iterable[BlockFootprint | None] = ()) -> int:
    """Return how many blocks of a kind a compute unit has room for beside the blocks that it holds.

    A footprint of None is a whole unit's.
    """
    mine = list(held)
    if new is None or None in mine:
        return 0 if mine else 1
    limits, gpu = occupancy(machine), machine.gpu
    room = [
        gpu.blocks_per_unit - len(mine),
        (limits.threads - sum(one.threads for one in mine if one)) // new.threads,
        (limits.registers - sum(one.registers for one in mine if one)) // new.registers,
    ]
    if new.shared_kb:
        room.append((gpu.shared_kb - sum(one.shared_kb for one in mine if one)) // new.shared_kb)
    return max(0, int(min(room)))


def share_of_speed(blocks: int, saturation: float) -> float:
    """Speed of each of some blocks on a unit, as a share of a lone one's; their sum is concave in their number."""
    return float((1.0 + (blocks / saturation) ** SHARPNESS) ** (-1.0 / SHARPNESS))
