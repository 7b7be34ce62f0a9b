"""Inputs and references for any collective that moves bytes, by its own definition (``Collective.chunks``)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from sidelane.program.collective import Buffer, Collective
from sidelane_lab.baselines.reference import poison

Views = Callable[[str, int], torch.Tensor]
"""The first bytes of a buffer of this rank."""


def fill(collective: Collective, rank: int, views: Views, seed: int) -> None:
    """Poison this rank's output, then write its input, which may lie in it."""
    for buffer in (Buffer.OUTPUT, Buffer.INPUT):
        nbytes = collective.buffer_bytes(rank, buffer)
        if nbytes:
            poison(views(buffer, nbytes))
    span = collective.input_span(rank, 0, collective.input_bytes(rank))
    if span.nbytes:
        part = views(span.buffer, span.end)[span.offset :]
        part.copy_(_input(collective, rank, seed, part.device))


def error(collective: Collective, rank: int, views: Views, seed: int, *, own_chunk: bool) -> str | None:
    """What is wrong with this rank's output; None if nothing is. Waits for the device.

    Args:
        collective: that was run.
        rank: of this process.
        views: of its buffers.
        seed: that all ranks filled their inputs with.
        own_chunk: the rank's own part must be there too; bare transfers do not copy it.
    """
    source_of = functools.cache(
        lambda source: _input(collective, source, seed, views(Buffer.OUTPUT, collective.output_bytes(rank)).device)
    )
    for chunk in collective.chunks():
        if chunk.dst_rank != rank or (chunk.src_rank == rank and not own_chunk):
            continue
        span = collective.output_span(rank, chunk.dst_offset, chunk.nbytes)
        found = views(span.buffer, span.end)[span.offset :]
        expected = source_of(chunk.src_rank)[chunk.src_offset : chunk.src_offset + chunk.nbytes]
        if not torch.equal(found, expected):
            wrong = int((found != expected).sum())
            return f"{wrong} of {chunk.nbytes} bytes from rank {chunk.src_rank} are wrong"
    return None


def _input(collective: Collective, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    nbytes = collective.input_bytes(rank)
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    generator = torch.Generator(device=device).manual_seed(64 * seed + rank)
    (data.view(torch.int64) if nbytes % 8 == 0 else data).random_(generator=generator)
    return data
