"""The shadow of each kernel, by protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shadows.block_flags import block_flags, relay
from shadows.broadcast import broadcast
from shadows.exchange import pull, push
from shadows.ll import ll
from shadows.reducing import direct, reduce, send
from shadows.tensors import root_of
from shadows.through_host import through_host
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram, Protocol

Shadow = Callable[[KernelProgram, int, int], tuple[Program, ...]]


def _alike(shadow: Callable[[KernelProgram, int, int], Program]) -> Shadow:
    """Of a kernel that does the same in all generations."""

    def shadows(program: KernelProgram, blocks: int, tile_bytes: int) -> tuple[Program, ...]:
        return (shadow(program, blocks, tile_bytes),)

    return shadows


SHADOWS: Mapping[Protocol, Shadow] = {
    Protocol.LL: ll,
    Protocol.LL_ONCE: ll,
    Protocol.BLOCK_FLAGS: block_flags,
    Protocol.RELAY: relay,
    Protocol.PUSH: _alike(push),
    Protocol.STAGE: _alike(broadcast),
    Protocol.PULL: _alike(pull),
    Protocol.REDUCE: _alike(reduce),
    Protocol.DIRECT: _alike(direct),
    Protocol.SEND: _alike(send),
    Protocol.HOST: _alike(through_host),
}


def shadows_of(program: KernelProgram, blocks: int, tile_bytes: int) -> tuple[Program, ...]:
    """What a kernel does, as a program.

    Args:
        program: of one tensor or a list, with bytes to move.
        blocks: of the launch.
        tile_bytes: what a block moves at a time.

    Returns:
        One program for every call, or several in turn: number ``generation % len`` is that of a generation.
    """
    pushes = program.protocol is Protocol.PUSH and root_of(program) is not None
    return SHADOWS[Protocol.STAGE if pushes else program.protocol](program, blocks, tile_bytes)
