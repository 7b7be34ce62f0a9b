"""What kernels that talk to each other do in tests, wherever the ranks are: each function is one rank's part.

``tests/interpreter`` runs it in processes under Triton's interpreter, ``tests/device`` in threads that share a GPU.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence

import torch
from expected import in_rank_order, orders_differ
from kernel_worlds import World

from sidelane.device import layout
from sidelane.device.launch import Launch
from sidelane.execute.base import Addresses, Pieces
from sidelane.execute.cuda.kernel_program import arrange
from sidelane.kernels.broadcast import TILE_BYTES
from sidelane.program import collective as define
from sidelane.program import kernel_chunks
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Collective, ReduceOp, Reduction
from sidelane.program.kernel import KernelProgram, Protocol

POISON = 0x5A
MOVING = {
    "LL": Protocol.LL,
    "LL once": Protocol.LL_ONCE,
    "block flags": Protocol.BLOCK_FLAGS,
    "pull": Protocol.PULL,
    "push": Protocol.PUSH,
    "host": Protocol.HOST,
}
REDUCING = {
    "LL": (Protocol.LL, "one_shot"),
    "LL once": (Protocol.LL_ONCE, "one_shot"),
    "block flags": (Protocol.BLOCK_FLAGS, "one_shot"),
    "one": (Protocol.REDUCE, "one_shot"),
    "two": (Protocol.REDUCE, "two_shot"),
    "direct": (Protocol.DIRECT, "one_shot"),
    "direct two": (Protocol.DIRECT, "two_shot"),
    "push two": (Protocol.SEND, "two_shot_push"),
    "host": (Protocol.HOST, "one_shot"),
}
BROADCASTING = MOVING | {"stage": Protocol.STAGE, "relay": Protocol.RELAY}

Reached = Mapping[tuple[int, Buffer], int]
"""Addresses of a collective's buffers by rank, as far as this rank reaches them."""


def arranged(
    world: World,
    protocol: Protocol,
    calls: Sequence[tuple[Collective, Reached]],
    variant: str = "one_shot",
    *,
    listed: bool = False,
    blocks: int | None = None,
) -> Launch:
    """The launch of a call with one tensor, or with a list; its staging is carved."""
    n, parts = world.world_size, tuple(part for part, _ in calls)
    batch = Batch("list", n, parts)
    program = KernelProgram(batch if listed else parts[0], variant, protocol, blocks or world.site.most_blocks)
    stagings = world.carve(program.staging_bytes)[1] if program.staging_bytes else ()
    buffers = {(rank, str(Buffer.STAGING)): address for rank, address in enumerate(stagings)}
    pieces = {}
    if listed:
        for rank, buffer in {place for _, reached in calls for place in reached}:
            starts = batch.starts(rank, buffer)
            rows = [
                (start, part.buffer_bytes(rank, buffer), at[rank, buffer])
                for start, (part, at) in zip(starts, calls, strict=True)
            ]
            pieces[rank, str(buffer)] = Pieces(*zip(*rows, strict=True))
    else:
        buffers |= {(rank, str(buffer)): address for (rank, buffer), address in calls[0][1].items()}
    work = arrange(
        program,
        dataclasses.replace(world.site, most_blocks=program.blocks),
        Addresses(buffers, (), world.arenas, pieces),
        world.store_table,
    )
    assert work is not None
    return work


def on_all_ranks(buffer: Buffer, addresses: Sequence[int]) -> Reached:
    return {(rank, buffer): address for rank, address in enumerate(addresses)}


def _here(world: World, buffer: Buffer, tensor: torch.Tensor) -> Reached:
    return {(world.rank, buffer): tensor.data_ptr()}


def moving(world: World) -> None:
    """Every kernel that moves bytes; calls follow each other at once, with odd delays."""
    delay = random.Random(world.rank)
    for call, (part, misalign) in enumerate([(1, 0), (48, 0), (4100, 0), (30, 2), (2051, 1), (40_000, 0)]):
        for distinct in (False, True) if call < 3 else (call % 2 == 0,):
            for way in MOVING:
                for in_place in (False, True) if call < 3 else (bool(call % 2),):
                    if distinct and (way == "LL once" or (in_place and way == "push")):
                        continue
                    if delay.random() < 0.2:
                        time.sleep(0.01 * delay.random())
                    _move(world, part, misalign, distinct, way, in_place, seed=call)
    walk = world.stumble(0.3, 0.03) if world.rank == 0 else lambda: None
    for call in range(15):  # the same staging again, at once
        # Five, so that each meets both parities, and block flags follow block flags: a pull lets ranks catch up.
        _move(world, 4096, 0, True, "pull" if call % 5 == 2 else "block flags", False, seed=call)
    walk()


def _move(world: World, part: int, misalign: int, distinct: bool, way: str, in_place: bool, seed: int) -> None:
    n, rank = world.world_size, world.rank
    inputs = [_bytes(seed, sender, n * part if distinct else part) for sender in range(n)]
    output, outputs = world.carve(n * part, misalign)
    output.fill_(POISON)
    margin = 32  # a kernel must not write there
    if in_place:
        input = output if distinct else output[rank * part : (rank + 1) * part]
    else:
        # Another alignment on each rank: nothing that ranks agree on may depend on it.
        input = torch.empty(len(inputs[rank]) + margin, dtype=torch.uint8, device=world.device)[
            rank % 3 : rank % 3 + len(inputs[rank])
        ]
    input.copy_(inputs[rank])
    reached = on_all_ranks(Buffer.OUTPUT, outputs) | ({} if in_place else _here(world, Buffer.INPUT, input))
    if distinct:
        call = define.all_to_all([[part] * n] * n, in_place=in_place)
    else:
        call = define.all_gather([part] * n, in_place=in_place)
    world.launch(arranged(world, MOVING[way], [(call, reached)]))
    parts = [data[rank * part : (rank + 1) * part] if distinct else data for data in inputs]
    where = f"rank {rank}: {way} part={part} misalign={misalign} distinct={distinct} in_place={in_place}"
    assert torch.equal(output.cpu(), torch.cat(parts)), where
    world.release()


def reducing(world: World, *dtype_names: str) -> None:
    """Every kernel that reduces; :func:`reducing_in_chunks` has the one of large messages."""
    delay = random.Random(world.rank)
    for dtype_name in dtype_names:
        _reduce_all(world, dtype_name, delay)


def _reduce_all(world: World, dtype_name: str, delay: random.Random) -> None:
    for call, op in enumerate(ReduceOp):
        for count in (7, 2503) if op is ReduceOp.SUM else (501,):
            for scatter in (True, False):
                for way in REDUCING:
                    if way.endswith(("two", "once")) and scatter:
                        continue
                    is_other = scatter != bool((call + len(way)) // 2 % 2)
                    if op is not ReduceOp.SUM and is_other and not way.endswith("two"):
                        continue
                    if delay.random() < 0.2:
                        time.sleep(0.01 * delay.random())
                    places = (False, True) if op is ReduceOp.SUM and count == 7 else (bool((call + len(way)) % 2),)
                    for in_place in places:
                        if in_place and way == "direct" and not scatter:
                            continue
                        _reduce(world, Reduction(op, dtype_name), count, scatter, way, in_place, seed=call)


def reducing_in_chunks(world: World, dtype_name: str) -> None:
    """More chunks than their slots, while rank 0 pauses so long that the others could get two chunks ahead."""
    reduction = Reduction(ReduceOp.SUM, dtype_name)
    shard_bytes = 82 * kernel_chunks.TILE_BYTES - 100 * reduction.element_bytes
    assert kernel_chunks.chunks_of(shard_bytes, 1).count > 2 * kernel_chunks.SLOTS
    walk = world.stumble(0.1, 0.2) if world.rank == 0 else lambda: None
    for call in range(1 if world.device.type == "cpu" else 2):  # the interpreter is slow
        count = world.world_size * shard_bytes // reduction.element_bytes - call
        _reduce(world, reduction, count, False, "push two", bool(call), seed=call, most_blocks=1)
    walk()


def _reduce(
    world: World,
    reduction: Reduction,
    count: int,
    scatter: bool,
    way: str,
    in_place: bool,
    seed: int,
    most_blocks: int | None = None,
) -> None:
    n, rank, element = world.world_size, world.rank, reduction.element_bytes
    dtype = getattr(torch, reduction.dtype)
    length = count * n if scatter else count
    inputs = [_numbers(seed + count, sender, length, dtype) for sender in range(n)]
    mine = inputs[rank].clone()
    reached = way.startswith(("direct", "push"))
    # Elements are aligned to themselves, and to nothing else; on each rank otherwise, but where peers come for them.
    shift = seed % 2 if reached else rank % 2
    room, inputs_at = world.carve((length + 8) * element)
    room = room.view(dtype).fill_(77)
    input = room[shift : shift + length]
    input.copy_(mine)
    margins, outputs_at = world.carve((count + 8) * element)
    margins = margins.view(dtype).fill_(77)
    output = margins[3 : 3 + count]
    if in_place:
        output = input[rank * count : (rank + 1) * count] if scatter else input
    nbytes, (protocol, variant) = count * element, REDUCING[way]
    inputs_at, outputs_at = (
        tuple(base + begin * element for base in bases) for bases, begin in ((inputs_at, shift), (outputs_at, 3))
    )
    shared = Buffer.INPUT if scatter else Buffer.OUTPUT
    memory = {shared: inputs_at} if in_place else {Buffer.INPUT: inputs_at, Buffer.OUTPUT: outputs_at}
    reachable = {
        (peer, buffer): at[peer] for buffer, at in memory.items() for peer in range(n) if reached or peer == rank
    }
    if scatter:
        call = define.reduce_scatter([nbytes] * n, reduction, in_place=in_place)
    else:
        unit = 16 if way == "two" else element
        shard = max(unit, -(-nbytes // (unit * n)) * unit)
        shards = [max(0, min(shard, nbytes - peer * shard)) for peer in range(n)]
        call = define.all_reduce(shards, reduction, in_place=in_place)
    world.launch(arranged(world, protocol, [(call, reachable)], variant, blocks=most_blocks))
    parts = [data[rank * count : (rank + 1) * count] if scatter else data for data in inputs]
    where = f"rank {rank}: {way} {reduction} count={count} scatter={scatter} in_place={in_place}"
    _compare(output, in_rank_order(parts, reduction.op), where)
    _require_other_bits(parts, reduction)
    if not in_place:
        assert torch.equal(input.cpu(), mine) or dtype.is_floating_point, f"{where}: the input has changed"
        assert (margins[:3] == 77).all() and (margins[3 + count :] == 77).all(), f"{where}: wrote beyond its bytes"
    world.release()


def broadcasting(world: World) -> None:
    """Every kernel that broadcasts, from every root, one tensor and several, and other kernels between."""
    delay = random.Random(world.rank)
    draw = random.Random(6)  # alike on all ranks
    ways = ("LL", "block flags", "push", "stage", "host", *["relay"] * (world.world_size > 2))
    for call in range(12):
        if delay.random() < 0.3:
            time.sleep(0.01 * delay.random())
        way, root = ways[call % len(ways)], draw.randrange(world.world_size)
        tiles = draw.choice((0, 1, 3, 8, 17))
        sizes = [tiles * TILE_BYTES + draw.choice((1, 48, 4100, 2051)) if way in ("push", "stage", "host") else 4099]
        if way == "relay":
            sizes = [draw.choice((1, 4096, 20_000, 50_001))]
        elif draw.random() < 0.5:
            sizes += [draw.choice((1, 30, 64, 5000, 40_000)) for _ in range(draw.randint(0, 4))]
            sizes = [min(nbytes, 40_000) if way in ("LL", "block flags") else nbytes for nbytes in sizes]
        _broadcast(world, sizes, way, root, seed=call)
        if draw.random() < 0.3:
            _move(world, 100, 0, True, draw.choice(("LL", "block flags", "pull")), False, seed=call)
    walk = world.stumble(0.3, 0.03) if world.rank == 0 else lambda: None
    for call in range(12):  # a root hears nothing of its peers' data, and must not run away from them
        way = ("LL", "LL", "block flags", "block flags", ways[-1], ways[-1])[call % 6]
        _broadcast(world, [4096], way, call // 3 % 2, seed=call)
    walk()


def _broadcast(world: World, sizes: list[int], way: str, root: int, seed: int) -> None:
    root %= world.world_size
    margin, held, calls = 64, [], []
    for number, nbytes in enumerate(sizes):
        odd = number % 2 * (1 if way == "push" else 1 + world.rank)  # peers reach it at one place
        room, addresses = world.carve(nbytes + 2 * margin)
        data = room.fill_(POISON)[margin + odd : margin + odd + nbytes]
        wanted = _bytes(seed + number, root, nbytes)
        data.copy_(wanted if world.rank == root else _bytes(seed + number, root + 1, nbytes))
        reached = tuple(base + margin + odd for base in addresses)
        held.append((data, room, wanted))
        call = define.broadcast(nbytes, world.world_size, root, in_place=True)
        here = _here(world, Buffer.OUTPUT, data)
        calls.append((call, on_all_ranks(Buffer.OUTPUT, reached) if way == "push" else here))
    listed = len(sizes) > 1
    protocol = Protocol.BLOCK_FLAGS if listed and way == "LL" else BROADCASTING[way]
    world.launch(arranged(world, protocol, calls, listed=listed))
    for data, room, wanted in held:
        where = f"rank {world.rank}: broadcast {way} {sizes=} {root=} {seed=}"
        assert torch.equal(data.cpu(), wanted), where
        first = data.data_ptr() - room.data_ptr()
        rest = torch.cat([room[:first], room[first + len(data) :]])
        assert (rest == POISON).all(), f"{where}: wrote beyond its bytes"
    world.release()


def lists(world: World, calls: str = "4", first: str = "0") -> None:
    """Lists of tensors by one kernel: every kind, odd sizes next to even ones, calls at once after each other."""
    delay = random.Random(world.rank)
    draw = random.Random(5)  # alike on all ranks
    for call in range(int(first), int(calls)):
        counts = [draw.choice((1, 3, 8, 64, 700, 2503)) for _ in range(draw.randint(1, 5))]
        for kind in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "two_shot"):
            for way in ("block flags", "pull", "symmetric", "host"):
                in_place = bool(call % 2)
                if kind == "two_shot" and way in ("block flags", "host"):
                    continue
                if way == "symmetric" and in_place and kind in ("all_to_all", "all_reduce"):
                    continue
                if delay.random() < 0.2:
                    time.sleep(0.01 * delay.random())
                reduction = Reduction(draw.choice(list(ReduceOp)), draw.choice(("float32", "int64", "bfloat16")))
                _list(world, kind, counts, reduction, way, in_place=in_place, seed=call)


def _list(
    world: World, kind: str, counts: list[int], reduction: Reduction, way: str, *, in_place: bool, seed: int
) -> None:
    n, rank, dtype = world.world_size, world.rank, getattr(torch, reduction.dtype)
    element, gathers = reduction.element_bytes, kind in ("all_gather", "all_to_all")
    distinct = kind in ("all_to_all", "reduce_scatter")
    symmetric = way == "symmetric"
    margin, checks, calls = 5, [], []

    def room_of(count: int, shift: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """A tensor, the room that it lies in, and its addresses on all ranks."""
        nbytes = (count + 2 * margin + 4) * element
        room, addresses = (
            world.carve(nbytes)
            if symmetric
            else (torch.empty(nbytes, dtype=torch.uint8, device=world.device), (0,) * n)
        )
        room = room.view(dtype).fill_(77)
        begin = margin + shift
        return room[begin : begin + count], room, tuple(base + begin * element for base in addresses)

    for number, count in enumerate(counts):
        nbytes, shift = count * element, (number + (0 if symmetric else rank)) % 2 * 3
        inputs = [_numbers(seed + 10 * number, sender, count * (n if distinct else 1), dtype) for sender in range(n)]
        output, margins, outputs_at = room_of(count * n if gathers else count, shift)
        input, _, inputs_at = room_of(len(inputs[rank]), number % 2)
        own = slice(rank * count, (rank + 1) * count)
        if in_place and kind == "reduce_scatter":
            output, margins = input[own], output
        elif in_place:
            input = output[own] if kind == "all_gather" else output
            inputs_at = outputs_at
        input.copy_(inputs[rank])
        if kind == "all_gather":
            call = define.all_gather([nbytes] * n, in_place=in_place)
        elif kind == "all_to_all":
            call = define.all_to_all([[nbytes] * n] * n, in_place=in_place)
        elif distinct:
            call = define.reduce_scatter([nbytes] * n, reduction, in_place=in_place)
        else:
            call = define.all_reduce(define.split_evenly(nbytes, n, element), reduction, in_place=in_place)
        memory = {Buffer.INPUT: (input, inputs_at), Buffer.OUTPUT: (output, outputs_at)}
        reached = {}
        for buffer in memory if not in_place else (Buffer.INPUT if kind == "reduce_scatter" else Buffer.OUTPUT,):
            tensor, bases = memory[buffer]
            reached |= on_all_ranks(buffer, bases) if symmetric else _here(world, buffer, tensor)
        calls.append((call, reached))
        parts = [data[own] if distinct else data for data in inputs]
        wanted = torch.cat(parts) if gathers else in_rank_order(parts, reduction.op)
        if not gathers:
            _require_other_bits(parts, reduction)
        checks.append((output, wanted, margins, input))
    protocol = {
        "block flags": Protocol.BLOCK_FLAGS,
        "pull": Protocol.PULL if gathers else Protocol.REDUCE,
        "symmetric": Protocol.PUSH if gathers else Protocol.DIRECT,
        "host": Protocol.HOST,
    }[way]
    variant = "two_shot" if kind == "two_shot" else "one_shot"
    world.launch(arranged(world, protocol, calls, variant, listed=True))
    for number, (output, wanted, margins, _) in enumerate(checks):
        where = f"rank {rank}: {kind} {reduction} counts={counts} number={number} {way} {in_place=} {seed=}"
        if gathers:
            assert torch.equal(output.cpu().view(torch.uint8), wanted.view(torch.uint8)), where
        else:
            _compare(output, wanted, where)
        first = (output.data_ptr() - margins.data_ptr()) // element
        if 0 <= first < len(margins):
            rest = torch.cat([margins[:first], margins[first + len(output) :]])
            assert (rest == 77).all(), f"{where}: wrote beyond its bytes"
    world.release()


def generations_wrap(world: World) -> None:
    """Behind the largest generation comes one that is not that of untouched memory, and slots still alternate."""
    start = -4  # as if 2**32 - 4 calls had been
    offset = world.site.counters - world.base
    counters = world.whole[offset : offset + 4 * layout.MAX_BLOCKS].view(torch.int32)
    counters.fill_(start)
    seen = []
    for seed in range(6):  # flags of phases that nobody has used are 0, which is near these generations
        if seed % 2:
            _broadcast(world, [3 * TILE_BYTES + 1], "push", seed % 3, seed)
        else:
            _move(world, 100, 0, True, ("LL", "push", "block flags")[seed % 3], False, seed)
        seen.append(int(counters[0]))
        assert (counters == counters[0]).all(), "all blocks tick together"
    assert seen == [-3, -2, -1, 2, 3, 4]


# --- data -------------------------------------------------------------------------------------------------------------


def _bytes(seed: int, rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


def _numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        values = (100 * torch.randn(count, generator=generator)).to(dtype)
        values[count // 2 :: 500] = float("nan") if rank == 1 else 1
        return values
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=dtype)


def _require_other_bits(parts: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Require that the comparison, which is exact for float32, finds a sum that begins with another rank."""
    if (reduction.op, reduction.dtype) == (ReduceOp.SUM, "float32") and len(parts[0]) > 500:
        assert orders_differ([part.nan_to_num() for part in parts]), "the numbers do not tell orders apart"


def _compare(found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    # The interpreter truncates to bfloat16 where hardware rounds to nearest: one unit in the last place.
    found = found.cpu()
    tolerance = 2**-7 if found.dtype is torch.bfloat16 else 0
    if tolerance:
        found, wanted = found.float(), wanted.float()
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )
