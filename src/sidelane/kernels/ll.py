# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Collectives of few bytes by the LL protocol: words of data with their own flags, one pass, no handshake.

    rank 0   input -> flagged words in slot 0 of every peer | wait for words in own slots -> (reduce ->) output
    rank 1   input -> flagged words in slot 1 of every peer | wait for words in own slots -> (reduce ->) output

A flagged word is an aligned cell of 8 bytes: 4 low bytes of data and 4 high bytes of generation. Hardware stores and
loads such a cell atomically, so that a reader that finds the awaited generation has found the data, too. It needs
neither a fence nor a second message, doubles the bytes on the link, and is the fastest protocol for few bytes. (The
technique is NCCL's protocol "LL".)

A rank has two slots for each sender, for even and odd generations. Two suffice, however far ranks run ahead. A rank
writes generation g + 2 after its kernel of g + 1 has ended, so after it received data of g + 1 from every peer. A peer
sends these from its kernel of g + 1, which its stream starts when its kernel of g has ended. So the peer has read all
data of generation g in the slot to which g + 2 is written. The argument has two conditions for every generation: each
rank waits for data from each peer, and the kernels of a rank never overlap. Where a kernel is launched ahead
(``DEPENDENT``, which ``compile_for`` sets), its blocks may be there before the kernel before it has ended, but
they wait for that end before they load or store anything. No kernel after it is launched ahead by it. In a broadcast
the root receives no data::

    root    data -> flagged words into its slot on every peer | all here?
    others  wait for words in the root's slot -> data         | all here?

``all here``: each rank signals at its beginning that its kernel runs, and waits for the same signal of all, which has
usually come by then. The wait keeps ranks from running two generations ahead.

Equivalent, on rank r, where part r of an input is all of it unless each rank gets its own part::

    output[s] = part r of the input of rank s               all_gather, all_to_all
    output = reduce over ranks s of part r of the input of rank s      all_reduce, reduce_scatter
    data = data of the root                                 broadcast

In place is allowed: a block sends all bytes that it overwrites before it writes.

``ONCE``: arenas are in host memory, where a store costs the sender's link and a load the reader's. So a rank stores
words that all peers need once, into the slot for the next rank in its own arena, and all peers wait for them there. The
argument above holds for that slot as well: whoever stores there in generation g + 2 has received data of g + 1 from
every rank that may have read it in g. A block with several tiles waits for one behind the sends of the next one,
since bytes of both directions cross PCIe at once: an all-reduce of 256 KiB between two H200s takes 19.3 us so, and 21.6
with all sends first.

Legend: N ranks; PEERS the power of two from N - 1 on; DISTINCT if each rank gets its own part; WORDS a tile; ONE if no
block has more tiles; WHOLE if all tiles are full; OP is empty where bytes only move; UNIT and ALIGNED as in ``memory``.
"""

from __future__ import annotations

from sidelane.device import layout
from sidelane.device.flagged import cells_of, late_flags
from sidelane.device.flags import (
    POLLS,
    abort_word,
    addresses_of,
    end_generation,
    next_generation,
    relaxed_signal,
    relaxed_wait,
    report_late,
)
from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch, LaunchSite, padded, unit_bytes
from sidelane.device.memory import load_words, pointer, store_words
from sidelane.kernels.arithmetic import accumulate, finish, reduction_constants, widen
from sidelane.program.collective import Reduction

LL_OFFSET = tl.constexpr(layout.LL_OFFSET)
LL_SLOT_BYTES = tl.constexpr(layout.LL_SLOT_BYTES)

WORDS_PER_TILE, WARPS = 512, 8
FEW_WORDS_PER_TILE = 128
"""Words of a tile where a launch has a block for each such tile, up to 32 KiB. A block then has a warp for each peer:
between two GPUs a single one, which decides without others whether all words are there. On two H200s an all-reduce of
512 bytes takes 2.3 us, and 2.5 with large tiles (results/notes/kernels.md)."""


def arrange(
    site: LaunchSite,
    output: int,
    input: int,
    part_bytes: int,
    reduction: Reduction | None,
    *,
    distinct: bool,
    once: bool = False,
) -> Launch:
    """Make the launch that moves or reduces one part for each pair of ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        output: address of ``world_size`` parts, or of one that is reduced.
        input: address of one part, or of ``world_size`` parts if ``distinct``.
        part_bytes: 1 to ``LL_PAYLOAD_BYTES``, whole elements.
        reduction: operation and dtype; None where bytes only move.
        distinct: each peer gets its own part (all_to_all, reduce_scatter), else all get the same.
        once: peers read one copy, in the arena of the sender.

    Raises:
        ValueError: a part is too large or empty.
    """
    blocks, warps, constants = _tiles(site, part_bytes, unit_bytes(output, input, part_bytes))
    constants |= {"DISTINCT": distinct, "ONCE": once, "DEPENDENT": False, **reduction_constants(reduction)}
    arguments = (output, input, part_bytes, part_bytes if distinct else 0, site.rank, site.status, site.counters)
    return Launch(_ll, blocks, warps, arguments + padded(site.rotated(site.arenas)), constants)


def arrange_broadcast(site: LaunchSite, data: int, nbytes: int, root: int) -> Launch:
    """Make the launch that sends the bytes of the root to all other ranks.

    Args:
        site: rank, arenas and blocks of the launch.
        data: address of the bytes, on this rank.
        nbytes: 1 to ``LL_PAYLOAD_BYTES``.
        root: rank whose bytes all ranks get.

    Raises:
        ValueError: there are too many bytes, or none.
    """
    blocks, warps, constants = _tiles(site, nbytes, unit_bytes(data, nbytes))
    del constants["PEERS"], constants["ONE"]
    arguments = (data, nbytes, site.rank, root, site.status, site.counters)
    return Launch(_ll_broadcast, blocks, warps, arguments + padded(site.rotated(site.arenas)), constants)


def _tiles(site: LaunchSite, part_bytes: int, unit: int) -> tuple[int, int, dict[str, object]]:
    """Return the number of thread blocks and of warps, and the constants that follow from the size of a part.

    Raises:
        ValueError: a part is empty or too large.
    """
    if not 1 <= part_bytes <= layout.LL_PAYLOAD_BYTES:
        raise ValueError(f"ll: part_bytes (value={part_bytes}, allowed=1..{layout.LL_PAYLOAD_BYTES})")
    peers = 1 << max(0, site.world_size - 2).bit_length()
    words, warps = FEW_WORDS_PER_TILE, peers
    if part_bytes > layout.CELL_PAYLOAD_BYTES * words * site.most_blocks:
        words, warps = WORDS_PER_TILE, WARPS
    tile_bytes = layout.CELL_PAYLOAD_BYTES * words
    tiles = -(-part_bytes // tile_bytes)
    constants: dict[str, object] = {
        "N": site.world_size,
        "PEERS": peers,
        "WORDS": words,
        "ONE": tiles <= site.most_blocks,
        "WHOLE": part_bytes % tile_bytes == 0,
        "UNIT": min(unit, layout.CELL_PAYLOAD_BYTES),
        "ALIGNED": unit == 16,
    }
    return site.blocks(tiles), warps, constants


@triton.jit
def ll_slot(arena, generation, sender, N: tl.constexpr):
    """Return the address of the slot for ``sender`` in an arena of N ranks."""
    return arena + LL_OFFSET + ((generation & 1) * N + sender).to(tl.int64) * LL_SLOT_BYTES


@triton.jit
def words_there(index, words, WHOLE: tl.constexpr):
    """Return which ``index`` are below ``words``; with WHOLE all, which lets the compiler make wide accesses."""
    return tl.full(index.shape, True, tl.int1) if WHOLE else index < words


@triton.jit
def elements_of(words, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr):
    """Convert int32[W] to wide[W, 2] for elements of 2 bytes, wide[W] for 4, wide[W / 2] for 8."""
    if ELEMENT_BYTES == 2:
        pair = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
        return widen(pair.to(DTYPE, bitcast=True), FLOAT)
    elif ELEMENT_BYTES == 4:
        return widen(words.to(DTYPE, bitcast=True), FLOAT)
    else:
        low, high = tl.split(tl.reshape(words, (words.shape[0] // 2, 2)))
        return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def words_of(values, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr):
    """Convert wide values to words: the inverse of :func:`elements_of`."""
    if ELEMENT_BYTES == 2:
        low, high = tl.split(values.to(DTYPE).to(tl.int16, bitcast=True))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    elif ELEMENT_BYTES == 4:
        return values.to(DTYPE).to(tl.int32, bitcast=True)
    else:
        return tl.reshape(tl.join(values.to(tl.int32), (values >> 32).to(tl.int32)), (values.shape[0] * 2,))


@triton.jit
def _ll(
    output, input, part_bytes, stride, rank, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, PEERS: tl.constexpr, DISTINCT: tl.constexpr, ONCE: tl.constexpr, WORDS: tl.constexpr,
    ONE: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, OP: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(counters)
    own_input = input + rank * stride
    count = (part_bytes + 3) // 4
    first = tl.program_id(0).to(tl.int64) * WORDS
    step = tl.num_programs(0) * WORDS
    tiles = 1 if ONE else tl.cdiv(count - first, step)
    lanes = tl.arange(0, WORDS)
    turns = tl.arange(0, PEERS)[:, None]
    senders = (rank + 1 + turns) % N
    slots = ll_slot(p0, generation, 0, N)
    offsets = senders.to(tl.int64) * (LL_SLOT_BYTES // 8)
    if ONCE and N == 2:  # its alignment is known, for wide loads
        slots, offsets = ll_slot(p1, generation, rank, N), offsets * 0
    elif ONCE:
        for turn in tl.static_range(1, N):
            slot = ll_slot(peers[turn], generation, (rank + turn + 1) % N, N)
            offsets = tl.where(turns == turn - 1, (slot - slots) // 8, offsets)
        offsets = tl.multiple_of(offsets, (16, 16))
    spent = tl.full((), 0, tl.int32)

    if ONCE and not ONE:
        for tile in range(tiles + 1):
            if tile < tiles:
                _send(output, input, part_bytes, stride, rank, peers, generation, first + tile * step + lanes, N,
                      DISTINCT, ONCE, WHOLE, UNIT, ALIGNED, OP)  # fmt: skip
            if tile > 0:
                if (tile < tiles) | (tiles == 1):  # the last one has been passed already
                    tl.debug_barrier()  # as below
                index = first + (tile - 1) * step + lanes
                spent = _receive(output, own_input, part_bytes, rank, slots, offsets, senders, turns, generation,
                                 status, spent, index, N, PEERS, WHOLE, UNIT, ALIGNED, OP, DTYPE,
                                 ELEMENT_BYTES, FLOAT)  # fmt: skip
        end_generation(counters, generation)
    else:
        for tile in range(tiles):
            _send(output, input, part_bytes, stride, rank, peers, generation, first + tile * step + lanes, N, DISTINCT,
                  ONCE, WHOLE, UNIT, ALIGNED, OP)  # fmt: skip
        # A barrier of threads: others may have read above the bytes that are written below.
        end_generation(counters, generation)
        for tile in range(tiles):
            spent = _receive(output, own_input, part_bytes, rank, slots, offsets, senders, turns, generation, status,
                             spent, first + tile * step + lanes, N, PEERS, WHOLE, UNIT, ALIGNED, OP, DTYPE,
                             ELEMENT_BYTES, FLOAT)  # fmt: skip


@triton.jit
def _send(
    output, input, part_bytes, stride, rank, peers, generation, index,
    N: tl.constexpr, DISTINCT: tl.constexpr, ONCE: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
    ALIGNED: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Send the words of a tile to all peers; where bytes only move, copy those that stay here."""
    own_input = input + rank * stride
    there = words_there(index, (part_bytes + 3) // 4, WHOLE)
    if OP == "" or not DISTINCT:
        words = load_words(own_input, index, part_bytes, UNIT, ALIGNED, WHOLE)
        if OP == "":
            own = words
    if ONCE:
        _put(ll_slot(peers[0], generation, (rank + 1) % N, N), index, words, generation, there)
    for turn in tl.static_range(1, 1 if ONCE else N):
        if DISTINCT:
            peer = (rank + turn) % N
            words = load_words(input + peer * stride, index, part_bytes, UNIT, ALIGNED, WHOLE)
        _put(ll_slot(peers[turn], generation, rank, N), index, words, generation, there)
    if OP == "":
        store_words(output + rank * part_bytes, index, own, part_bytes, there, UNIT, ALIGNED, WHOLE)


@triton.jit
def _receive(
    output, own_input, part_bytes, rank, slots, offsets, senders, turns, generation, status, spent, index,
    N: tl.constexpr, PEERS: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Wait for the words of a tile from all peers, and write them, or what they are reduced to; return ``spent``."""
    there = words_there(index, (part_bytes + 3) // 4, WHOLE)
    mask = there[None, :] if PEERS == N - 1 else (turns < N - 1) & there[None, :]
    if OP != "":
        own = load_words(own_input, index, part_bytes, UNIT, ALIGNED, WHOLE)
    words, spent = _wait(slots, offsets, senders, index[None, :], mask, generation, status, spent)
    if OP == "":
        store_words(output + senders * part_bytes, index[None, :], words, part_bytes, mask, UNIT, False, WHOLE)
    else:
        # Rows one by one, in the order of the ranks.
        senders_there = tl.where(turns < N - 1, senders, -1)
        result = _elements_from(0, senders_there, words, rank, own, DTYPE, ELEMENT_BYTES, FLOAT)
        for sender in tl.static_range(1, N):
            more = _elements_from(sender, senders_there, words, rank, own, DTYPE, ELEMENT_BYTES, FLOAT)
            result = accumulate(result, more, OP)
        result = words_of(finish(result, N, OP, FLOAT), DTYPE, ELEMENT_BYTES)
        store_words(output, index, result, part_bytes, there, UNIT, ALIGNED, WHOLE)
    return spent


@triton.jit
def _ll_broadcast(
    data, nbytes, rank, root, status, counters,
    p0, p1, p2, p3, p4, p5, p6, p7,
    N: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    generation = next_generation(counters)
    spent = tl.full((), 0, tl.int32)
    relaxed_signal(addresses_of(peers, N), rank, generation, 0, N)
    count = (nbytes + 3) // 4
    start = tl.program_id(0).to(tl.int64) * WORDS
    step = tl.num_programs(0) * WORDS
    if rank == root:
        lanes = tl.arange(0, WORDS)
        while start < count:
            index = start + lanes
            there = words_there(index, count, WHOLE)
            words = load_words(data, index, nbytes, UNIT, ALIGNED, WHOLE)
            for turn in tl.static_range(1, N):
                _put(ll_slot(peers[turn], generation, rank, N), index, words, generation, there)
            start += step
    else:
        sender = tl.zeros([1, 1], tl.int64) + root
        slots, offsets = ll_slot(p0, generation, 0, N), sender * (LL_SLOT_BYTES // 8)
        while start < count:
            index = start + tl.arange(0, WORDS)[None, :]
            there = words_there(index, count, WHOLE)
            words, spent = _wait(slots, offsets, sender, index, there, generation, status, spent)
            store_words(data, index, words, nbytes, there, UNIT, ALIGNED, WHOLE)
            start += step
    relaxed_wait(p0, generation, status, spent, 0, N)
    end_generation(counters, generation)


@triton.jit
def _put(slot_address, index, words, generation, mask):
    """Send int32 ``words`` as flagged words ``index``. Relaxed: they arrive in any order."""
    tl.store(pointer(slot_address, tl.int64, True) + index, cells_of(words, generation), mask=mask)


@triton.jit
def _wait(slot_address, offsets, ranks, index, mask, generation, status, spent):
    """Wait for flagged words ``index`` (int[1, W]) from ``ranks`` (int[R, 1]), and return their data, int32[R, W].

    ``offsets``, int64[R, 1]: cells from ``slot_address`` to the slot with the words of each of these ranks.

    Relaxed: other memory is not ordered. Elements outside of ``mask`` are undefined, and all are undefined if the host
    has told the kernel to give up.

    Returns:
        The data, and ``spent`` (see ``flags``).
    """
    places = pointer(slot_address, tl.int64, True) + offsets + index
    cells = tl.load(places, mask=mask, other=0, volatile=True)
    late = late_flags(cells, mask, generation)
    polls = 0
    while (tl.max(late) != 0) & (spent == 0):
        cells = tl.load(places, mask=mask, other=0, volatile=True)
        late = late_flags(cells, mask, generation)
        polls += 1
        if polls % POLLS == 0:
            report_late(status, tl.reshape(ranks, late.shape), late, generation)
            spent = abort_word(status)  # the warps decide together: they computed late together
    return cells.to(tl.int32), spent


@triton.jit
def _elements_from(
    sender, senders, words, rank, own, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr
):
    """Return the wide elements of one sender, whose row of ``words`` is the sum over rows that are 0 but for it."""
    row = tl.sum(tl.where(senders == sender, words, 0), axis=0)
    return elements_of(tl.where(rank == sender, own, row), DTYPE, ELEMENT_BYTES, FLOAT)


KERNELS = (_ll, _ll_broadcast)
