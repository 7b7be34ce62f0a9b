# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The reducing kernel: N sources, one destination, all given as addresses.

Legend: N sources (1 to 16), count elements. Floats accumulate in float32 in the order of the sources and round once;
integers wrap. Any element count and any element-aligned address is right; where all addresses are 16-byte aligned,
accesses are 16 bytes wide. The source is portable Triton, so that the CPU interpreter runs it in tests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from sidelane.device.language import tl, triton
from sidelane.device.launch import Launch
from sidelane.device.memory import pointer
from sidelane.kernels.arithmetic import accumulate, finish, reduction_constants, widen
from sidelane.program.collective import MAX_NODE_RANKS, Reduction

WARPS = 16
_BLOCK_BYTES = (32768, 16384, 8192)
"""Bytes of each source that a thread block handles at a time; 8 KB is a 16-byte load for each thread.

With 32 blocks on an H200, four sources of 64 MiB take 270 us by 8 KB in 8 warps, 180 in 16, and 107 by 32 KB in 16.
"""
_MOST_IN_FLIGHT = 131072  # bytes of all sources a thread block: registers hold them


def arrange(dst: int, srcs: Sequence[int], nbytes: int, reduction: Reduction, blocks: int) -> Launch:
    """Make the launch that reduces ``nbytes`` of each source into ``dst``.

    Args:
        dst: address of the result; may be one of the sources.
        srcs: addresses of 1 to 16 sources, aligned to elements.
        nbytes: size of each, a multiple of the element size; a launch of 0 bytes only compiles and loads the kernel.
        reduction: operation and dtype.
        blocks: largest number of thread blocks.

    Raises:
        ValueError: there are too many sources, or ``nbytes`` is no multiple of the element size.
    """
    if not 1 <= len(srcs) <= MAX_NODE_RANKS:
        raise ValueError(f"arrange: sources (value={len(srcs)}, allowed=1..{MAX_NODE_RANKS})")
    if nbytes % reduction.element_bytes:
        raise ValueError(f"arrange: nbytes (value={nbytes}, allowed=multiples of {reduction.element_bytes})")
    # Unused places repeat an address: every launch has the same arguments.
    padded = (*srcs, *[dst] * (MAX_NODE_RANKS - len(srcs)))
    aligned = not any(address % 16 for address in (dst, *srcs))
    most, constants = _constants(len(srcs), nbytes, reduction, blocks, aligned)
    arguments = (dst, dst + nbytes, *padded)
    return Launch(KERNEL, most, WARPS, arguments, constants)


@functools.lru_cache(maxsize=1024)
def _constants(
    sources: int, nbytes: int, reduction: Reduction, blocks: int, aligned: bool
) -> tuple[int, dict[str, Any]]:
    """Return the number of thread blocks and the compile-time constants, which do not depend on the addresses."""
    fitting = [size for size in _BLOCK_BYTES if size * blocks <= nbytes and size * sources <= _MOST_IN_FLIGHT]
    block = (fitting or _BLOCK_BYTES[-1:])[0] // reduction.element_bytes
    elements = nbytes // reduction.element_bytes
    constants = {"N": sources, **reduction_constants(reduction), "ALIGNED": aligned, "BLOCK": block}
    return max(1, min(blocks, -(-elements // block))), constants


_ADDRESSES = ["dst", "end", *(f"s{index}" for index in range(MAX_NODE_RANKS))]


@triton.jit
def _combine(sources, offsets, mask, N: tl.constexpr, OP: tl.constexpr, FLOAT: tl.constexpr):
    """Combine elements ``offsets`` of the sources, in order."""
    result = widen(tl.load(sources[0] + offsets, mask=mask), FLOAT)
    for index in tl.static_range(1, N):
        result = accumulate(result, widen(tl.load(sources[index] + offsets, mask=mask), FLOAT), OP)
    return finish(result, N, OP, FLOAT)


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
        sources = sources + (pointer(addresses[index], DTYPE, ALIGNED),)
    target = pointer(dst, DTYPE, ALIGNED)
    count = (end - dst) // ELEMENT_BYTES
    whole = count // BLOCK
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64)
    block = first
    while block < whole:
        # Without a mask, or the compiler could not use wide accesses.
        offsets = block * BLOCK + lanes
        tl.store(target + offsets, _combine(sources, offsets, None, N, OP, FLOAT).to(DTYPE))
        block += tl.num_programs(0)
    if first == whole % tl.num_programs(0):
        offsets = whole * BLOCK + lanes
        mask = offsets < count
        tl.store(target + offsets, _combine(sources, offsets, mask, N, OP, FLOAT).to(DTYPE), mask=mask)


KERNEL: Any = _reduce_kernel
