# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The reducing kernel: N sources, one destination, all given as addresses. Import it late: it needs Triton.

Legend: N sources (1 to 16), count elements. Floats accumulate in float32 in the order of the sources and round once;
integers wrap. Any element count and any element-aligned address is right; where all addresses are 16-byte aligned,
accesses are 16 bytes wide. The source is portable Triton, so that the CPU interpreter runs it in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from sidelane.program.collective import MAX_WORLD_SIZE, Reduction

_BLOCK_BYTES = 8192  # of each source that a thread block handles at a time: two 16-byte loads for each of 256 threads
_WARPS = 8
_DTYPES = {
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "int32": tl.int32,
    "int64": tl.int64,
}


def launch_reduce(dst: int, srcs: Sequence[int], nbytes: int, reduction: Reduction, *, blocks: int) -> None:
    """Reduce ``nbytes`` of each source into ``dst`` on torch's current stream of the current device.

    Args:
        dst: address; may be one of the sources.
        srcs: addresses, 1 to 16, aligned to elements.
        nbytes: a multiple of the element size; 0 launches a kernel that does nothing (it compiles and loads it).
        reduction: operation and dtype.
        blocks: most thread blocks to use.

    Raises:
        ValueError: too many sources, or bytes that are no whole number of elements.
    """
    if not 1 <= len(srcs) <= MAX_WORLD_SIZE:
        raise ValueError(f"launch_reduce: sources (value={len(srcs)}, allowed=1..{MAX_WORLD_SIZE})")
    if nbytes % reduction.element_bytes:
        raise ValueError(f"launch_reduce: nbytes (value={nbytes}, allowed=multiples of {reduction.element_bytes})")
    block = _BLOCK_BYTES // reduction.element_bytes
    elements = nbytes // reduction.element_bytes
    grid = (max(1, min(blocks, -(-elements // block))),)
    # Unused places repeat an address, so that every launch has the same types. The end is an address for the same
    # reason: a count would be a 32-bit or a 64-bit integer, and two kernels would be compiled.
    padded = (*srcs, *[dst] * (MAX_WORLD_SIZE - len(srcs)))
    kernel: Any = _reduce_kernel
    kernel[grid](
        dst,
        dst + nbytes,
        *padded,
        N=len(srcs),
        OP=str(reduction.op),
        DTYPE=_DTYPES[reduction.dtype],
        ELEMENT_BYTES=reduction.element_bytes,
        FLOAT=reduction.dtype in ("float32", "float16", "bfloat16"),
        ALIGNED=all(address % 16 == 0 for address in (dst, *srcs)),
        BLOCK=block,
        num_warps=_WARPS,
    )


_ADDRESSES = ["dst", "end", *(f"s{index}" for index in range(MAX_WORLD_SIZE))]


@triton.jit
def _combine(sources, offsets, mask, N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, FLOAT: tl.constexpr):
    """Combine elements ``offsets`` of the sources, in order."""
    result = _load(sources[0], offsets, mask, DTYPE, FLOAT)
    for index in tl.static_range(1, N):
        value = _load(sources[index], offsets, mask, DTYPE, FLOAT)
        if OP == "min":
            # A comparison with NaN is false: the first test lets a NaN in, the second never replaces one.
            result = tl.where((value != value) | (value < result), value, result)
        elif OP == "max":
            result = tl.where((value != value) | (value > result), value, result)
        else:
            result += value
    if OP == "avg":
        # Float: the IEEE quotient. Integer: Triton's // truncates towards zero.
        result = tl.div_rn(result, tl.full(result.shape, N, tl.float32)) if FLOAT else result // N
    return result


@triton.jit
def _load(source, offsets, mask, DTYPE: tl.constexpr, FLOAT: tl.constexpr):
    value = tl.load(source + offsets, mask=mask)
    return value.to(tl.float32) if FLOAT else value


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit(do_not_specialize=_ADDRESSES)
def _reduce_kernel(
    dst, end,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, FLOAT: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    addresses = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
    sources = ()
    for index in tl.static_range(N):
        sources = sources + (_pointer(addresses[index], DTYPE, ALIGNED),)  # noqa: RUF005  Triton has no unpacking
    target = _pointer(dst, DTYPE, ALIGNED)
    count = (end - dst) // ELEMENT_BYTES
    whole = count // BLOCK
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64)
    block = first
    while block < whole:
        # Without a mask, or the compiler could not use wide accesses.
        offsets = block * BLOCK + lanes
        tl.store(target + offsets, _combine(sources, offsets, None, N, OP, DTYPE, FLOAT).to(DTYPE))
        block += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        offsets = whole * BLOCK + lanes
        mask = offsets < count
        tl.store(target + offsets, _combine(sources, offsets, mask, N, OP, DTYPE, FLOAT).to(DTYPE), mask=mask)
