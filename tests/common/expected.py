"""What each collective must give, computed on one rank from every rank's input, which is a function of a seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sidelane.program.collective import ReduceOp

MOVING_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Dtypes that collectives that reduce nothing are tried with; they take any."""

REDUCING_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def any_bytes(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes as a tensor of any dtype; compare with :func:`same_bytes`, since some are NaN."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    high, nbytes = (2, numel) if dtype is torch.bool else (256, numel * dtype.itemsize)
    drawn = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device()).view(dtype)


def numbers(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of a size that shows lost precision in the sum."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        drawn = (100 * torch.randn(numel, generator=generator, device="cpu")).to(dtype)
    else:
        drawn = torch.randint(-1_000_000, 1_000_000, (numel,), dtype=dtype, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def versions_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """How often autograd was told of a write to each tensor."""
    return [0 if tensor is None else tensor._version for tensor in tensors]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def orders_differ(rows: Sequence[torch.Tensor]) -> bool:
    """True if sums in the order of the ranks have other bits than those that begin with any other rank.

    Of two terms there is one sum.
    """
    wanted = in_rank_order(rows, ReduceOp.SUM)
    others = [in_rank_order([*rows[first:], *rows[:first]], ReduceOp.SUM) for first in range(1, len(rows))]
    return len(rows) < 3 or not any(same_bytes(wanted, other) for other in others)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in float64 or int64; floats are rounded to the dtype at the end."""
    dtype = inputs[0].dtype
    wide = torch.stack([tensor.to(torch.float64 if dtype.is_floating_point else torch.int64) for tensor in inputs])
    if op == "min":
        return wide.min(0).values.to(dtype)
    if op == "max":
        return wide.max(0).values.to(dtype)
    total = wide.sum(0)
    if op == "avg":
        total = total / len(inputs) if dtype.is_floating_point else torch.div(total, len(inputs), rounding_mode="trunc")
    return total.to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Integers and half precision exactly rounded from float32 sums: within one unit in the last place of the dtype."""
    if not actual.dtype.is_floating_point:
        return torch.equal(actual, expected)
    eps = torch.finfo(actual.dtype).eps
    a, b = actual.double(), expected.double()
    # float32 sums of 8 numbers of about 100 lose at most 8 * 2^-24 * 800 before they are rounded to the dtype.
    return bool(((a - b).abs() <= eps * b.abs() + 8 * 2**-24 * 3200).all())


def in_rank_order(rows: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce in the order of the ranks, floats in float32 and rounded once: bit for bit what a reduction must give."""
    dtype = rows[0].dtype
    wide = [row.float() for row in rows] if dtype.is_floating_point else list(rows)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        stack = torch.stack(wide)
        return (stack.amin(0) if op is ReduceOp.MIN else stack.amax(0)).to(dtype)
    total = wide[0].clone()
    for row in wide[1:]:
        total += row
    if op is ReduceOp.AVG and dtype.is_floating_point:
        # By a tensor: on GPUs torch divides by a number as it multiplies with its reciprocal, which rounds twice.
        total /= torch.full((), len(rows), dtype=torch.float32, device=total.device)
    elif op is ReduceOp.AVG:
        total = torch.div(total, len(rows), rounding_mode="trunc")
    return total.to(dtype)
