"""Every kernel that has a shadow, in every way that it is for."""

from __future__ import annotations

from collections.abc import Iterator

from shadows import shadows_of

from sidelane.program import collective
from sidelane.program.batch import Batch, parts_of
from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram, Protocol

FLOATS = collective.Reduction(collective.ReduceOp.SUM, "float32")
"""Which are added in the order of the ranks, or else are something else."""

MOVING = (Protocol.LL, Protocol.BLOCK_FLAGS, Protocol.PUSH, Protocol.PULL, Protocol.HOST)
REDUCING = (Protocol.LL, Protocol.BLOCK_FLAGS, Protocol.DIRECT, Protocol.REDUCE, Protocol.HOST)
SENDING = (Protocol.LL, Protocol.BLOCK_FLAGS, Protocol.RELAY, Protocol.PUSH, Protocol.STAGE, Protocol.HOST)
"""Broadcasts."""


def kernels(n: int, part: int, blocks: int, reduction: collective.Reduction = FLOATS) -> Iterator[KernelProgram]:
    """Kernels with so many bytes from rank to rank, about.

    Args:
        n: ranks.
        part: bytes from rank to rank; where they reduce, what is near to them in whole elements.
        blocks: of a launch, at most.
        reduction: what to reduce.
    """
    yield from _single(n, part, blocks, reduction)
    yield from _lists(n, part, blocks, reduction)


def half_of(names: set[str], which: str) -> list[str]:
    """Return the ``first`` or ``second`` half of the names of kernels, in turn; all of them for any other word."""
    start, step = {"first": (0, 2), "second": (1, 2)}.get(which, (0, 1))
    return sorted(names)[start::step]


def _single(n: int, part: int, blocks: int, reduction: collective.Reduction) -> Iterator[KernelProgram]:
    few = part // 4 + 1  # each word is two commands
    for in_place in (False, True):
        for protocol in MOVING:
            nbytes = few if protocol is Protocol.LL else part
            yield KernelProgram(collective.all_gather([nbytes] * n, in_place=in_place), "one_shot", protocol, blocks)
            if not (protocol is Protocol.PUSH and in_place):
                exchange = collective.all_to_all([[nbytes] * n] * n, in_place=in_place)
                yield KernelProgram(exchange, "one_shot", protocol, blocks)
        for protocol in REDUCING:
            nbytes = _whole(few if protocol is Protocol.LL else part, reduction)
            scatter = collective.reduce_scatter([nbytes] * n, reduction, in_place=in_place)
            yield KernelProgram(scatter, "one_shot", protocol, blocks)
            shards = [0] * (n - 1) + [nbytes] if protocol is Protocol.LL else _shorter(nbytes, n, reduction)
            reduce = collective.all_reduce(shards, reduction, in_place=in_place)
            if not (protocol is Protocol.DIRECT and in_place):
                yield KernelProgram(reduce, "one_shot", protocol, blocks)
            if protocol in (Protocol.DIRECT, Protocol.REDUCE):
                yield KernelProgram(reduce, "two_shot", protocol, blocks)
        for nbytes in (few, part + 40) if 1 < n < 4 else (few,) * (n > 1):  # in one turn, and in several
            yield KernelProgram(
                collective.all_gather([nbytes] * n, in_place=in_place), "one_shot", Protocol.LL_ONCE, blocks
            )
            reduce = collective.all_reduce([0] * (n - 1) + [_whole(nbytes, reduction)], reduction, in_place=in_place)
            yield KernelProgram(reduce, "one_shot", Protocol.LL_ONCE, blocks)
        nbytes = _whole(part, reduction)
        for shards in (_shorter(nbytes, n, reduction), [4 * nbytes] * n):  # up to five chunks
            sent = collective.all_reduce(shards, reduction, in_place=in_place)
            yield KernelProgram(sent, "two_shot_push", Protocol.SEND, blocks)
    for protocol in SENDING:
        if n > 2 or protocol is not Protocol.RELAY:
            nbytes = {Protocol.LL: few, Protocol.BLOCK_FLAGS: part}.get(protocol, 3 * part)
            root = n // 2
            yield KernelProgram(collective.broadcast(nbytes, n, root, in_place=True), "one_shot", protocol, blocks)


def _lists(n: int, part: int, blocks: int, reduction: collective.Reduction) -> Iterator[KernelProgram]:
    """Of tensors of different sizes, one of them empty."""
    sizes = (part, 0, part // 2 + 1)
    whole = [_whole(nbytes, reduction) for nbytes in sizes]
    element = reduction.element_bytes

    def program(parts: list[collective.Collective], variant: str, protocol: Protocol) -> KernelProgram:
        return KernelProgram(Batch(f"list of {parts[0].kind}", n, tuple(parts)), variant, protocol, blocks)

    for in_place in (False, True):
        gathers = [collective.all_gather([size] * n, in_place=in_place) for size in sizes]
        exchanges = [collective.all_to_all([[size] * n] * n, in_place=in_place) for size in sizes]
        scatters = [collective.reduce_scatter([size] * n, reduction, in_place=in_place) for size in whole]
        reduces = [
            collective.all_reduce(collective.split_evenly(n * size, n, element), reduction, in_place=in_place)
            for size in whole
        ]
        for protocol in MOVING[1:]:
            yield program(gathers, "one_shot", protocol)
            if not (protocol is Protocol.PUSH and in_place):
                yield program(exchanges, "one_shot", protocol)
        for protocol in REDUCING[1:]:
            yield program(scatters, "one_shot", protocol)
            if not (protocol is Protocol.DIRECT and in_place):
                yield program(reduces, "one_shot", protocol)
            if protocol in (Protocol.DIRECT, Protocol.REDUCE):
                yield program(reduces, "two_shot", protocol)
    for protocol in (Protocol.BLOCK_FLAGS, Protocol.PUSH, Protocol.STAGE, Protocol.HOST):
        yield program([collective.broadcast(3 * size, n, n - 1, in_place=True) for size in sizes], "one_shot", protocol)


def _shorter(nbytes: int, n: int, reduction: collective.Reduction) -> list[int]:
    """Shards, the last one a third of the others."""
    return [nbytes] * (n - 1) + [_whole(nbytes // 3, reduction)]


def _whole(nbytes: int, reduction: collective.Reduction) -> int:
    """The next size of whole elements."""
    return -(-nbytes // reduction.element_bytes) * reduction.element_bytes


def name_of(kernel: KernelProgram) -> str:
    """The protocol, and whether it is of a list or a broadcast."""
    broadcasts = kinds_of(kernel)[0] is collective.Kind.BROADCAST
    return f"{'list of ' * kernel.listed}{'broadcast ' * broadcasts}{kernel.protocol}"


def kinds_of(kernel: KernelProgram) -> tuple[collective.Kind, bool]:
    """What a kernel does, and whether it does so in place."""
    part = next(part for part, _ in parts_of(kernel.collective))
    return part.kind, part.in_place


def shadow(kernel: KernelProgram, tile_bytes: int) -> tuple[Program, ...]:
    """On as many blocks as it may have."""
    return shadows_of(kernel, kernel.blocks, tile_bytes)
