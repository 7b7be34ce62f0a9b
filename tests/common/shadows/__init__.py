"""Shadows: what a kernel moves and signals, block by block, as a program that ``verify`` can prove.

A kernel of a collective is Triton's language, which nothing proves. Its shadow has a queue for each thread block, with
the block's copies and flags in their order, and one for each thing that nothing orders with the rest of its block. A
test runs the kernel under Triton's interpreter, and holds what every block has read, written, signalled and waited for
against the shadow (``tests/interpreter/test_kernel_shadows.py``).

``docs/internals/kernels.md`` says what that proves, and what not.
"""

from shadows.by_protocol import shadows_of

__all__ = ["shadows_of"]
