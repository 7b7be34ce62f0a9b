"""What kernels that talk to each other do in tests, wherever the ranks are: each function is one rank's part.

``tests/interpreter`` runs it in processes under Triton's interpreter, ``tests/device`` in threads that share a GPU.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

import torch
from expected import in_rank_order, orders_differ
from kernel_worlds import World

from sidelane.device import layout
from sidelane.kernels import block_flags, broadcast, direct, ll, staged
from sidelane.kernels.tile_table import Piece, Tiles, TileTable
from sidelane.program import reduce_chunks
from sidelane.program.collective import ReduceOp, Reduction

POISON = 0x5A
STRIDES = ("input_stride", "output_stride")


def moving(world: World) -> None:
    """Every kernel that moves bytes; calls follow each other at once, with odd delays."""
    delay = random.Random(world.rank)
    for call, (part, misalign) in enumerate([(1, 0), (48, 0), (4100, 0), (30, 2), (2051, 1), (40_000, 0)]):
        for distinct in (False, True):
            for way in ("LL", "block flags", "pull", "push"):
                for in_place in (False, True) if call < 3 else (bool(call % 2),):
                    if in_place and distinct and way == "push":
                        continue
                    if delay.random() < 0.2:
                        time.sleep(0.01 * delay.random())
                    _move(world, part, misalign, distinct, way, in_place, seed=call)
    walk = world.stumble(0.3, 0.03) if world.rank == 0 else lambda: None
    for call in range(15):  # the same staging again, at once
        # Five, so that each meets both parities, and block flags follow block flags: a pull lets ranks catch up.
        _move(
            world,
            4096,
            0,
            True,
            ("block flags", "block flags", "pull", "block flags", "block flags")[call % 5],
            False,
            seed=call,
        )
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
    own_parts = (world.site.rotated(tuple(base + rank * part for base in outputs)),) if way == "push" else ()
    piece = Piece(input.data_ptr(), output.data_ptr(), part, part if distinct else 0, part, groups=own_parts)
    if way == "LL":
        work = ll.arrange(world.site, output.data_ptr(), input.data_ptr(), part, None, distinct=distinct)
    elif way == "block flags":
        work = block_flags.arrange(world.site, Tiles.of(piece, block_flags.TILE_BYTES), None, distinct=distinct)
    elif way == "push":
        work = direct.arrange_push(world.site, Tiles.of(piece, direct.MOVED_TILE_BYTES), distinct=distinct)
    else:
        each = _aligned(part)
        _, stagings = world.carve(each * (n if distinct else 1))
        tiles = Tiles.of(piece, staged.tile_bytes(None))
        work = staged.arrange(world.site, tiles, stagings, each, 0, None, distinct=distinct, gather=False)
    world.launch(work)
    parts = [data[rank * part : (rank + 1) * part] if distinct else data for data in inputs]
    where = f"rank {rank}: {way} part={part} misalign={misalign} distinct={distinct} in_place={in_place}"
    assert torch.equal(output.cpu(), torch.cat(parts)), where
    world.release()


def reducing(world: World, *dtype_names: str) -> None:
    """Every kernel that reduces."""
    delay = random.Random(world.rank)
    for dtype_name in dtype_names:
        _reduce_all(world, dtype_name, delay)
    _reduce_in_chunks(world, dtype_names[0])


def _reduce_all(world: World, dtype_name: str, delay: random.Random) -> None:
    for call, op in enumerate(ReduceOp):
        for count in (7, 2503) if op is ReduceOp.SUM else (501,):
            for scatter in (True, False):
                for way in ("LL", "block flags", "one", "two", "direct", "direct two", "push two"):
                    if way.endswith("two") and scatter:
                        continue
                    if delay.random() < 0.2:
                        time.sleep(0.01 * delay.random())
                    places = (False, True) if op is ReduceOp.SUM and count == 7 else (bool((call + len(way)) % 2),)
                    for in_place in places:
                        if in_place and way == "direct" and not scatter:
                            continue
                        _reduce(world, Reduction(op, dtype_name), count, scatter, way, in_place, seed=call)


def _reduce_in_chunks(world: World, dtype_name: str) -> None:
    """More chunks than their slots, while rank 0 pauses so long that the others could get two chunks ahead."""
    reduction = Reduction(ReduceOp.SUM, dtype_name)
    shard_bytes = 82 * reduce_chunks.TILE_BYTES - 100 * reduction.element_bytes
    assert reduce_chunks.chunks_of(shard_bytes, 1).count > 2 * reduce_chunks.SLOTS
    walk = world.stumble(0.1, 0.2) if world.rank == 0 else lambda: None
    for call in range(2):
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
    site = dataclasses.replace(world.site, most_blocks=most_blocks or world.site.most_blocks)
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
    nbytes = count * element
    target, source, total = output.data_ptr(), input.data_ptr(), length * element
    piece = Piece(source, target, nbytes, nbytes if scatter else 0)
    if way == "LL":
        work = ll.arrange(site, target, source, nbytes, reduction, distinct=scatter)
    elif way == "block flags":
        tiles = Tiles.of_reduction(piece, block_flags.TILE_BYTES, total, gather=False)
        work = block_flags.arrange(site, tiles, reduction, distinct=scatter)
    elif reached:
        gather = way.endswith("two")
        shard = max(element, -(-count // n) * element) if gather else nbytes
        inputs_at = tuple(base + shift * element for base in inputs_at)
        outputs_at = inputs_at if in_place else tuple(base + 3 * element for base in outputs_at)
        if way == "push two":
            _, stagings = world.carve(max(1, n - 1) * reduce_chunks.chunks_of(shard, site.most_blocks).peer_bytes)
            work = direct.arrange_send(site, outputs_at, source, stagings, shard, total, reduction)
        else:
            begin, tile_bytes = rank * shard if gather or scatter else 0, direct.tile_bytes(site, listed=False)
            groups = (tuple(base + begin for base in inputs_at),)
            groups += (site.rotated(tuple(base + begin for base in outputs_at)),) * gather
            shard_piece = Piece(source, target, max(0, min(total - begin, shard)), groups=groups)
            work = direct.arrange(
                site, Tiles.of(shard_piece, tile_bytes), -(-shard // tile_bytes), reduction, gather=gather
            )
    else:
        gather = way == "two"
        shard = max(16, -(-nbytes // (16 * n)) * 16) if gather else nbytes
        _, stagings = world.carve(n * _aligned(shard))
        piece = dataclasses.replace(piece, nbytes=shard, **dict.fromkeys(STRIDES, shard) if gather else {})
        tiles = Tiles.of_reduction(piece, staged.tile_bytes(reduction), total, gather=gather)
        distinct = scatter or gather
        work = staged.arrange(
            site, tiles, stagings, _aligned(shard), total, reduction, distinct=distinct, gather=gather
        )
    world.launch(work)
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
    ways = ("LL", "block flags", "push", "stage", *["relay"] * (world.world_size > 2))
    for call in range(18):
        if delay.random() < 0.3:
            time.sleep(0.01 * delay.random())
        way, root = draw.choice(ways), draw.randrange(world.world_size)
        tiles = draw.choice((0, 1, 3, 8, 17))
        sizes = [tiles * broadcast.TILE_BYTES + draw.choice((1, 48, 4100, 2051)) if way in ("push", "stage") else 4099]
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
    margin, place, held, pieces = 64, 0, [], []
    for number, nbytes in enumerate(sizes):
        odd = number % 2 * (1 if way == "push" else 1 + world.rank)  # peers reach it at one place
        room, addresses = world.carve(nbytes + 2 * margin)
        data = room.fill_(POISON)[margin + odd : margin + odd + nbytes]
        wanted = _bytes(seed + number, root, nbytes)
        data.copy_(wanted if world.rank == root else _bytes(seed + number, root + 1, nbytes))
        reached = tuple(base + margin + odd for base in addresses)
        held.append((data, room, wanted, reached))
        groups = (broadcast.from_root(reached, root),) if way == "push" else ()
        pieces.append(Piece(data.data_ptr(), data.data_ptr(), nbytes, place=place, groups=groups))
        place += _aligned(nbytes)
    stagings = world.carve(place)[1] if way == "stage" else None
    pushed = way in ("push", "stage")
    tiles = _tiles(world, pieces, broadcast.TILE_BYTES if pushed else block_flags.TILE_BYTES)
    given = (held[0][0].data_ptr(), sizes[0], root)
    if pushed:
        work = broadcast.arrange_push(world.site, tiles, root, stagings)
    elif way == "relay":
        work = broadcast.arrange_relay(world.site, *given)
    elif way == "LL" and len(sizes) == 1:
        work = ll.arrange_broadcast(world.site, *given)
    else:
        work = block_flags.arrange_broadcast(world.site, tiles, root)
    world.launch(work)
    for data, room, wanted, _ in held:
        where = f"rank {world.rank}: broadcast {way} {sizes=} {root=} {seed=}"
        assert torch.equal(data.cpu(), wanted), where
        first = data.data_ptr() - room.data_ptr()
        rest = torch.cat([room[:first], room[first + len(data) :]])
        assert (rest == POISON).all(), f"{where}: wrote beyond its bytes"
    world.release()


def lists(world: World) -> None:
    """Lists of tensors by one kernel: every kind, odd sizes next to even ones, calls at once after each other."""
    delay = random.Random(world.rank)
    draw = random.Random(5)  # alike on all ranks
    for call in range(4):
        counts = [draw.choice((1, 3, 8, 64, 700, 2503)) for _ in range(draw.randint(1, 5))]
        for kind in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "two_shot"):
            for way in ("block flags", "pull", "symmetric"):
                in_place = bool(call % 2)
                if (kind, way) == ("two_shot", "block flags"):
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
    margin, place, checks, pieces = 5, 0, [], []

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
        own, moved = slice(rank * count, (rank + 1) * count), [rank * nbytes] * n
        if in_place and kind == "reduce_scatter":
            output, margins = input[own], output
        elif in_place:
            input = output[own] if kind == "all_gather" else output
            inputs_at = outputs_at
        input.copy_(inputs[rank])
        groups: tuple[tuple[int, ...], ...] = ()
        if symmetric and gathers:
            groups = (world.site.rotated(tuple(base + there for base, there in zip(outputs_at, moved, strict=True))),)
        elif symmetric:
            read = rank * nbytes if distinct else 0
            groups = (tuple(base + read for base in inputs_at),)
            groups += (world.site.rotated(outputs_at),) * (kind == "two_shot")
        strides = {"input_stride": nbytes if distinct else 0, "output_stride": nbytes if gathers else 0}
        pieces.append(Piece(input.data_ptr(), output.data_ptr(), nbytes, **strides, place=place, groups=groups))
        place += _aligned(nbytes)
        parts = [data[own] if distinct else data for data in inputs]
        wanted = torch.cat(parts) if gathers else in_rank_order(parts, reduction.op)
        if not gathers:
            _require_other_bits(parts, reduction)
        checks.append((output, wanted, margins, input))
    operation = None if gathers else reduction
    _launch_list(world, way, pieces, place, operation, distinct=distinct, gather=kind == "two_shot")
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


def _launch_list(
    world: World,
    way: str,
    pieces: list[Piece],
    place: int,
    reduction: Reduction | None,
    *,
    distinct: bool,
    gather: bool,
) -> None:
    site = world.site
    tile_bytes = {
        "block flags": block_flags.TILE_BYTES,
        "pull": staged.tile_bytes(reduction),
        "symmetric": direct.MOVED_TILE_BYTES if reduction is None else direct.tile_bytes(site, listed=True),
    }[way]
    tiles = _tiles(world, pieces, tile_bytes, listed=True)
    if way == "block flags":
        work = block_flags.arrange(site, tiles, reduction, distinct=distinct)
    elif way == "pull":
        _, stagings = world.carve(place * (world.world_size if distinct else 1))
        work = staged.arrange(site, tiles, stagings, place, 0, reduction, distinct=distinct, gather=gather)
    elif reduction is None:
        work = direct.arrange_push(site, tiles, distinct=distinct)
    else:
        largest = -(-tiles.count // site.world_size) if gather else tiles.count
        work = direct.arrange(site, tiles, largest, reduction, gather=gather)
    world.launch(work)


def _tiles(world: World, pieces: list[Piece], tile_bytes: int, *, listed: bool = False) -> Tiles:
    """The tiles of one piece, or in a table, which stays until the kernel has ended."""
    if len(pieces) == 1 and not listed:
        return Tiles.of(pieces[0], tile_bytes)
    table = TileTable.of(pieces, tile_bytes)
    return table.at(world.place_table(table.values))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def generations_wrap(world: World) -> None:
    """Behind the largest generation comes one that is not that of untouched memory, and slots still alternate."""
    start = -4  # as if 2**32 - 4 calls had been
    offset = world.arenas[world.rank] - world.base
    counters = world.whole[offset : offset + 4 * layout.MAX_BLOCKS].view(torch.int32)
    counters.fill_(start)
    seen = []
    for seed in range(6):  # flags of phases that nobody has used are 0, which is near these generations
        if seed % 2:
            _broadcast(world, [3 * broadcast.TILE_BYTES + 1], "push", seed % 3, seed)
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
