"""Which protocols of kernels have a shadow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows.exchange import pull, push
from sidelane.program.shadows.parcels import parcels
from sidelane.program.shadows.reducing import direct, reduce, send

Shadow = Callable[[KernelProgram, int, int], tuple[Program, ...]]
"""From (program, blocks of the launch, bytes of a tile) to the programs of a kernel: one for every call, or several in
turn: number ``generation % len`` is that of a generation."""


def _alike(shadow: Callable[[KernelProgram, int, int], Program]) -> Shadow:
    """Of a kernel that does the same in all generations."""

    def shadows(program: KernelProgram, blocks: int, tile_bytes: int) -> tuple[Program, ...]:
        return (shadow(program, blocks, tile_bytes),)

    return shadows


SHADOWS: Mapping[Protocol, Shadow] = {
    Protocol.PUSH: _alike(push),
    Protocol.PULL: _alike(pull),
    Protocol.DIRECT: _alike(direct),
    Protocol.REDUCE: _alike(reduce),
    Protocol.SEND: _alike(send),
    Protocol.PARCELS: parcels,
}
"""Of each protocol that has one. A push of a broadcast has none."""
