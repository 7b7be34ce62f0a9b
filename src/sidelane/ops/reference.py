"""The unfused equivalents of a GEMV, a norm and embedding bags: PyTorch's operators, and a collective after them.

They are these operators' method ``unfused``, and take the arguments of their fused operator. The GEMMs' are those of
``pipelined_gemm``, which compute where the collective reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from sidelane.program.collective import split_evenly
from sidelane.session import Communicator

LARGEST_FLOAT8 = 448.0
"""Largest number of float8_e4m3fn."""

LEAST_LARGEST = 1e-4
"""Least value to which a largest element is taken, so that zeros have a scale."""


def gemv_all_reduce(
    comm: Communicator, weight: torch.Tensor, x: torch.Tensor, *, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``all_reduce(x @ weight.T)``; see :func:`sidelane.ops.gemv_all_reduce`."""
    if weight.dtype != x.dtype:  # of 8 bits
        wide = weight.float()
        weight = (wide if scale is None else wide * scale.view(-1, 1)).to(x.dtype)
    result = product(x, weight)
    comm.all_reduce(result)
    return result


def all_reduce_rms_norm(
    comm: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    quantized: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``all_reduce``, an addition and ``rms_norm``; see :func:`sidelane.ops.all_reduce_rms_norm`."""
    total = x.clone()
    comm.all_reduce(total)
    if residual is not None:
        total += residual
    y = functional.rms_norm(total, weight.shape, weight, eps).to(x.dtype)  # under autocast it is float32
    if quantized is not None and scale is not None:
        wide, most = y.float(), torch.finfo(quantized.dtype).max
        if scale.dim() == 2:
            scale.copy_((wide.abs().amax(1, keepdim=True) / most).clamp_min(1e-12))
        quantized.copy_((wide / scale).clamp(-most, most))
    return y, total


def embedding_all_to_all(
    comm: Communicator,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    counts: Sequence[int],
    *,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one ``embedding_bag`` a table, an all-to-all, and a copy; see :func:`sidelane.ops.embedding_all_to_all`.

    ``counts`` is the number of tables of each rank.
    """
    batch, dim = (offsets.numel() - 1) // len(tables), tables[0].shape[1]
    samples = split_evenly(batch, comm.world_size)
    pooled = []
    for number, table in enumerate(tables):
        starts = offsets[number * batch : (number + 1) * batch + 1]
        first, stop = int(starts[0]), int(starts[-1])
        factors = None if per_sample_weights is None else per_sample_weights[first:stop].to(table.dtype)
        bags = functional.embedding_bag(
            indices[first:stop].long(),
            table,
            (starts - first).long(),
            mode=mode,
            per_sample_weights=factors,
            include_last_offset=True,
        )
        pooled.append(bags.split(samples))
    sent = torch.cat([bags[rank] for rank in range(comm.world_size) for bags in pooled])
    local = samples[comm.rank]
    output = sent.new_empty(sum(counts) * local, dim)
    comm.all_to_all(
        output,
        sent,
        output_split_sizes=[count * local for count in counts],
        input_split_sizes=[len(tables) * size for size in samples],
    )
    return output.view(sum(counts), local, dim).transpose(0, 1).reshape(local, sum(counts) * dim)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``linear(x, weight)`` by ``mm``, for matrices: ``linear`` takes the host twice as long.

    Also under ``torch.autocast`` in the dtype of both, as the other methods of an operator do.
    """
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return product(x, weight)
    return torch.mm(x, weight.t()) if x.dim() == 2 else functional.linear(x, weight)


def float8_and_scales(x: torch.Tensor, scaled: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as float8_e4m3fn, and a float32 scale for every so many elements; see ``float8_rows``."""
    rows, columns = x.shape
    parts = functional.pad(x.float(), (0, -columns % scaled)).view(rows, -1, scaled)
    largest = parts.abs().amax(-1).clamp(min=LEAST_LARGEST)
    values = (parts * (LARGEST_FLOAT8 / largest)[..., None]).to(torch.float8_e4m3fn)
    return values.view(rows, -1)[:, :columns], largest / LARGEST_FLOAT8
