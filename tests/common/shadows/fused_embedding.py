"""Shadows of ``ops/embedding.py`` and its backward. Bags are bytes of inputs; counters of arrivals are flags that are
added to.

Any block may come first or last. Here block 0 says that its rank is ready, and the block that ends the launch is the
last one by number: it waits for the arrivals of the others, which is what being last says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shadows.blocks import copied, others, rotated
from shadows.own_grid import OwnGrid
from sidelane.program.collective import Buffer, Span, split_evenly
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Command, Copy, Flag, Program, Signal, SignalOp, Value, Wait

READY, DONE = range(2)
ONE = Value(1)


def embedding_all_to_all(
    counts: Sequence[int],
    blocks: int,
    batch: int,
    vector_bytes: int,
    *,
    remote_first: bool | Sequence[bool] = True,
) -> Program:
    """Bags go into the outputs of their samples' ranks.

    Args:
        counts: tables of each rank.
        blocks: of a grid.
        batch: samples of all ranks.
        vector_bytes: of a bag.
        remote_first: bags for others come first; where ranks have orders of their own, of each rank.
    """
    n, samples = len(counts), split_evenly(batch, len(counts))
    flags = 2
    grid = OwnGrid(n, blocks, vector_bytes)
    first_tables, first_samples = _starts(counts), _starts(samples)

    def bag(rank: int, peer: int, number: int) -> tuple[Span, Span]:
        """Where a bag lies, and where it belongs."""
        table, sample = divmod(number, samples[peer])
        at = table * batch + first_samples[peer] + sample
        to = sample * sum(counts) + first_tables[rank] + table
        return (
            Span(rank, "bags", at * vector_bytes, vector_bytes),
            Span(peer, "output", to * vector_bytes, vector_bytes),
        )

    def word(rank: int, flag: int, sender: int) -> Flag:
        return Flag(rank, flag * n + sender)

    def told(rank: int, flag: int) -> Iterator[Command]:
        for peer in rotated(rank, n):
            yield Signal(word(peer, flag, rank), EPOCH)

    def work(block: int, rank: int) -> Iterator[tuple[int, list[int]]]:
        """For each rank in turn, the numbers of the bags of a block."""
        number = block
        first = remote_first if isinstance(remote_first, bool) else remote_first[rank]
        for peer in rotated((rank + 1) % n, n) if first else range(n):
            bags = samples[peer] * counts[rank]
            mine = list(range(number, bags, blocks))
            yield peer, mine
            number += len(mine) * blocks - bags

    def commands(rank: int, block: int) -> Iterator[Command]:
        if block == 0:
            yield from told(rank, READY)
        for peer, mine in work(block, rank):
            if mine:
                yield Wait(word(rank, READY, peer), EPOCH)
            for number in mine:
                src, dst = bag(rank, peer, number)
                yield from copied(dst, src)
        arrivals = Flag(rank, flags * n)
        yield Signal(arrivals, ONE, SignalOp.ADD)
        if block == blocks - 1:
            yield Wait(arrivals, Value(blocks))  # all have arrived, and the counter begins anew
            yield Signal(arrivals, Value(0))
            yield from told(rank, DONE)
            for sender in range(n):
                yield Wait(word(rank, DONE, sender), EPOCH)

    sizes = {
        "bags": [count * batch * vector_bytes for count in counts],
        "output": [size * sum(counts) * vector_bytes for size in samples],
    }
    moves = [
        bag(rank, peer, number)
        for rank, peer in itertools.product(range(n), range(n))
        for number in range(samples[peer] * counts[rank])
    ]
    results = [Result(dst, (src,)) for src, dst in moves]
    contract = Contract.of("embedding_all_to_all", sizes, results)
    return grid.made(contract, "embedding_all_to_all", commands, staging_bytes=0, flags=flags * n + 1)


def backward(counts: Sequence[int], blocks: int, batch: int, vector_bytes: int) -> Program:
    """Gradients of bags go to the owners of the tables; ``rows`` stands for what these scatter them into.

    Args:
        counts: tables of each rank.
        blocks: of a grid.
        batch: samples of all ranks.
        vector_bytes: of a bag.
    """
    n, samples = len(counts), split_evenly(batch, len(counts))
    grid = OwnGrid(n, blocks, vector_bytes)
    first_tables, first_samples = _starts(counts), _starts(samples)

    def grad(sample_rank: int, owner: int, number: int) -> Span:
        table, sample = divmod(number, samples[sample_rank])
        at = sample * sum(counts) + first_tables[owner] + table
        return Span(sample_rank, "grads", at * vector_bytes, vector_bytes)

    def row(sample_rank: int, owner: int, number: int, buffer: str) -> Span:
        table, sample = divmod(number, samples[sample_rank])
        at = table * batch + first_samples[sample_rank] + sample
        return Span(owner, buffer, at * vector_bytes, vector_bytes)

    def commands(rank: int, block: int) -> Iterator[Command]:
        yield from grid.tell(rank, block, READY, but=rank)
        for peer in others(rank, n):
            yield grid.hear_from(peer, rank, block, READY)
            for number in range(block, samples[rank] * counts[peer], blocks):
                yield Copy(row(rank, peer, number, Buffer.STAGING), grad(rank, peer, number))
            yield Signal(grid.flag(peer, DONE, block, rank), EPOCH)
        for sender in rotated(rank, n):
            if sender != rank:
                yield grid.hear_from(sender, rank, block, DONE)
            for number in range(block, samples[sender] * counts[rank], blocks):
                came = grad(rank, rank, number) if sender == rank else row(sender, rank, number, Buffer.STAGING)
                yield Copy(row(sender, rank, number, "rows"), came)

    row_bytes = [count * batch * vector_bytes for count in counts]
    sizes = {"grads": [size * sum(counts) * vector_bytes for size in samples], "rows": row_bytes}
    results = [
        Result(row(sender, owner, number, "rows"), (grad(sender, owner, number),))
        for sender, owner in itertools.product(range(n), range(n))
        for number in range(samples[sender] * counts[owner])
    ]
    contract = Contract.of("embedding_all_to_all backward", sizes, results)
    return grid.made(
        contract,
        "embedding_all_to_all backward",
        commands,
        staging_bytes=max(row_bytes),
        flags=grid.flag_count(2),
    )


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes[:-1], initial=0))
