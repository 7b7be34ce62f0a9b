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


def collectives(world_size: int) -> list[Collective]:
    shards = [4 * (rank + 1) for rank in range(world_size)]
    even = [[8] * world_size] * world_size
    return [
        define.all_gather(shards),
        define.all_gather(shards, in_place=True),
        define.all_to_all(even),
        define.broadcast(12, world_size, 0, in_place=True),
        define.scatter(shards, world_size - 1),
        define.gather(shards, 0),
        define.reduce_scatter(shards, SUM),
        define.all_reduce(shards, SUM, in_place=True),
    ]


def programs(world_size: int) -> list[Program]:
    return [
        lower(build(collective, variant, transport), {Copy})
        for collective in collectives(world_size)
        for variant in variants(collective.kind)
        for transport in ([Transport.PUSH] if writes_into_outputs(variant) else list(Transport))
    ]
