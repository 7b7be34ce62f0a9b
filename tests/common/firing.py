"""Kernels that fire triggers, and what ranks do with them in tests: the same on GPUs and under Triton's interpreter.

A rank's tensors are on its default device, which the processes for GPUs set.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

SIZE = 64


# What changes from call to call must not choose between kernels: one that is loaded while a call is armed waits for it.
@triton.jit(do_not_specialize=["address", "value"])
def fire(address, value):
    """Store what fires a prelaunched call, after all that this block has read and written."""
    tl.debug_barrier()
    word = tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, tl.cast(value, tl.int32), sem="release", scope="sys")


@triton.jit(do_not_specialize=["seed", "address", "value"])
def produce_and_fire(input, seed, count, done, address, value, SIZE: tl.constexpr):
    """Fill ``input`` with ``seed`` and a running number; the last block to end fires from inside the kernel."""
    block = tl.program_id(0)
    offsets = block * SIZE + tl.arange(0, SIZE)
    tl.store(input + offsets, (offsets + seed).to(tl.float32), mask=offsets < count)
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        word = tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(word, tl.cast(value, tl.int32), sem="release", scope="sys")


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel; the interpreter's must not copy tensors, whose bytes peers fetch before it has ended."""
    if isinstance(kernel, triton.JITFunction):
        kernel[(programs,)](*arguments, **options)
        return
    from sidelane.device.triton_interpreter import run_interpreted

    run_interpreted(kernel, (programs,), arguments, options)
