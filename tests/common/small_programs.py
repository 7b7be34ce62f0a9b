"""Small programs of every kind, variant and transport, as executors of copies get them."""

from __future__ import annotations

from sidelane.program import collective as define
from sidelane.program.builders import Transport, build, variants, writes_into_outputs
from sidelane.program.collective import Collective, ReduceOp, Reduction
from sidelane.program.ir import Copy, Program
from sidelane.program.transform import lower

SUM = Reduction(ReduceOp.SUM, "int32")


def all_gather(world_size: int, nbytes: int = 64, *, in_place: bool = False) -> Collective:
    return define.all_gather([nbytes] * world_size, in_place=in_place)


def programs(world_size: int) -> list[Program]:
    shards = [4 * (3 + rank) for rank in range(world_size)]
    odd = [[1 + (i * 3 + j) % 5 for j in range(world_size)] for i in range(world_size)]
    even = [[8] * world_size] * world_size
    last = world_size - 1
    cases: list[tuple[Collective, list[Transport]]] = [
        (define.all_gather([5 * rank for rank in range(world_size)]), list(Transport)),
        (define.all_gather(shards, in_place=True), [Transport.PUSH, Transport.PULL]),
        (define.all_to_all(odd), list(Transport)),
        (define.all_to_all(even), [Transport.PUSH]),
        (define.all_to_all(even, in_place=True), [Transport.STAGED]),
        (define.broadcast(13, world_size, min(1, last), in_place=True), [Transport.PUSH]),
        (define.scatter(shards, 0), [Transport.PULL]),
        (define.gather(shards, last), [Transport.STAGED]),
        (define.reduce_scatter(shards, SUM), [Transport.PUSH, Transport.STAGED]),
        (define.all_reduce(shards, SUM, in_place=True), [Transport.PUSH, Transport.STAGED]),
    ]
    return [
        lower(build(collective, variant, transport), {Copy})
        for collective, transports in cases
        for variant in variants(collective.kind)
        for transport in transports
        if variant != "swap" or collective.counts == tuple(map(tuple, even))
        if not writes_into_outputs(variant) or transport is Transport.PUSH
    ]
