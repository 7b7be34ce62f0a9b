"""Heuristics of fused operators, for machines and shapes without measurements: times of a GEMM and a collective by
method, and the order for embedding bags.

The figures are those of an H200, rounded (results/h200x1, results/h200x2). Only their ratios count: the time of a
product next to that of a byte between GPUs, and how much slower tiles of Triton are than the library's::

    unfused    product, then the collective
    fused      the longer one of both; products in rounds of tiles at 0.8 of the library's rate, or 0.6
    split      the longer one of both, and the travel of the last part; each part reads the weight and is a call
    split, with an all-reduce, whose kernels take units from the product: some of the all-reduce is hidden

With several experts a rank, pieces of rows end with tiles of their own. The library's grouped product has 0.7 of the
rate of a whole one, and its input or output is copied into order.
"""

from __future__ import annotations

import math

REMOTE_FIRST, OBLIVIOUS = "remote_first", "oblivious"
ORDERS = (REMOTE_FIRST, OBLIVIOUS)
"""Orders of work: first for the peers, which wait (the fused operators paper, section III.A), or by number."""

ROUTED = "gemm_all_to_all", "all_to_all_gemm"
"""Operators whose weight may be of several experts a rank."""

WITHOUT_KERNEL = "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"
"""Operators that are split or unfused: fused kernels took longer at every shape (docs/lab/kernels.md)."""

FLOPS_PER_US = {2: 700e6, 4: 50e6}
"""Rate of a product in operations a microsecond, by bytes of an element."""

UNITS, TILE, TILE_SPEED = 132, (128, 256), 0.8
DISPATCH_SPEED = 0.6
"""Relative rate of ``all_to_all_gemm``, whose tiles wait for their rows (0.5 to 0.68: results/h100x2/fused.json)."""

GROUPED_SPEED = 0.7
"""Relative rate of the library's product of several experts (0.62 to 0.77: results/h200x2/fused.json)."""

MEMORY_BYTES_PER_US = 4e6
LINK_BYTES_PER_US = 350e3
SPLIT_SPEED, PIECES = 0.95, 4
"""Relative rate of a product in parts, and the default number of pieces for each peer."""

ROW_PARTS, HIDDEN, ROW_PART_US = 2, 0.2, 30.0
"""Default number of parts of rows before all-reduces, share of all of these that products hide, and microseconds that a
further part costs (results/h200x2/gemm-all-reduce.txt)."""

CALL_US, PART_US = 5.0, 2.7
"""Microseconds of a separate collective, and of a part in a graph (results/h200x2/probes.txt)."""

EAGER_US = {"fused": 110.0, "split": 300.0, "unfused": 60.0}
"""Smallest time of an eager call in microseconds, which the host takes."""


def expected_us(
    op: str, world_size: int, sizes: tuple[int, ...], element_bytes: int, *, captured: bool, experts: int = 1
) -> dict[str, float] | None:
    """Return microseconds by method of the operator, fused first; None for an operator that the heuristic does not
    cover. ``experts`` is the number of experts of a rank.

    >>> expected_us("gemm_reduce_scatter", 2, (4096, 4096, 8192), 2, captured=False)
    {'split': 453.1, 'unfused': 493.6}
    >>> expected_us("gemm_all_reduce", 2, (64, 4096, 8192), 2, captured=True)["unfused"]
    25.2
    """
    if op not in ROUTED and op not in WITHOUT_KERNEL:
        return None
    rows, depth, columns = sizes
    n = world_size
    moved = rows * columns * (n - 1) / n
    if op == "gemm_all_reduce":
        moved *= 2
    elif op == "all_to_all_gemm":
        moved = rows * depth * (n - 1) / n
    elif op == "all_gather_gemm":
        moved = (n - 1) * rows * depth
        rows *= n
    rate = FLOPS_PER_US[4 if element_bytes >= 4 else 2]
    memory = element_bytes * (rows * depth + depth * columns + rows * columns) / MEMORY_BYTES_PER_US
    product = max(2 * rows * depth * columns / rate, memory)
    of_pieces = n * experts // 2 if experts > 1 else 0  # half of a tile is lost at the end of each
    rounds = max(1.0, (-(-rows // TILE[0]) + of_pieces) * -(-columns // TILE[1]) / UNITS)
    if op != "all_to_all_gemm":  # its tiles are handed out as programs become free
        rounds = math.ceil(rounds)
    speed = DISPATCH_SPEED if op == "all_to_all_gemm" else TILE_SPEED
    in_tiles = max(rounds * 2 * TILE[0] * TILE[1] * depth / (rate * speed / UNITS), memory)
    beside = moved * element_bytes / LINK_BYTES_PER_US
    parts = PIECES * (n - 1)
    in_parts = max(product / SPLIT_SPEED, (parts + 1) * depth * columns * element_bytes / MEMORY_BYTES_PER_US)
    last = beside / max(1, parts) + CALL_US + PART_US * parts
    grouped, copied = product, 0.0
    if experts > 1:
        grouped = product / GROUPED_SPEED
        copied = 2 * rows * (columns if op == "all_to_all_gemm" else depth) * element_bytes / MEMORY_BYTES_PER_US
    found = {
        "fused": max(in_tiles, beside),
        "split": max(in_parts, beside) + last,
        "unfused": grouped + copied + beside + CALL_US,
    }
    if op == "gemm_all_reduce":
        found["split"] = product + (1 - HIDDEN) * beside + ROW_PART_US * (ROW_PARTS - 1)
    if op in WITHOUT_KERNEL:
        del found["fused"]
    return {way: round(us if captured else max(us, EAGER_US[way]), 1) for way, us in found.items()}


def expected_order(world_size: int, pooling: int) -> tuple[str, str]:
    """Return the order for bags of so many rows each, with the reason.

    In the order of ranks all send to rank 0 at first, then all to rank 1, and so on: in one turn the bags of N - 1
    senders share the link of their receiver, while each loads the rows of its bags. Where that hides them, the order of
    ranks is faster, by 2 to 4% between two H200s; with slower links, the bags that peers wait for have to come first
    (docs/lab/measured.md, *Fused operators between two GPUs*). A bag is as large as a row.

    >>> [expected_order(2, pooling)[0] for pooling in (1, 8, 16, 70)], expected_order(4, 16)[0]
    (['remote_first', 'remote_first', 'oblivious', 'oblivious'], 'remote_first')
    """
    rows = (world_size - 1) * MEMORY_BYTES_PER_US / LINK_BYTES_PER_US  # loaded in the time in which a turn is sent
    longer = "longer" if pooling < rows else "no longer"
    why = f"to send a turn takes {longer} than to load it, as much as {rows:.3g} rows a bag (here {pooling})"
    return (REMOTE_FIRST if pooling < rows else OBLIVIOUS), why
