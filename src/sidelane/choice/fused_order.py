"""Orders in which a fused operator computes, and the order for embedding bags without measurements."""

from __future__ import annotations

from sidelane.choice.fused_heuristic import LINK_BYTES_PER_US, MEMORY_BYTES_PER_US

REMOTE_FIRST, OBLIVIOUS = "remote_first", "oblivious"
ORDERS = (REMOTE_FIRST, OBLIVIOUS)
"""Orders of work: first for the peers, which wait (the fused operators paper, section III.A), or by number."""


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
