"""Shadows: what a kernel moves and signals, block by block, as a program that ``verify`` can prove.

A kernel of a collective is Triton's language, which nothing proves. Its shadow has a queue for each thread block, with
the block's copies and flags in their order. A test runs the kernel under Triton's interpreter, and holds what every
block has read, written, signalled and waited for against the shadow (``tests/interpreter/test_shadows.py``).

Protocols that have none yet: see ``docs/internals/kernels.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows.exchange import pull, push

SHADOWS: Mapping[Protocol, Callable[[KernelProgram, int, int], Program]] = {Protocol.PUSH: push, Protocol.PULL: pull}
"""Makes the shadow of a kernel with (program, blocks of the launch, bytes of a tile)."""

__all__ = ["SHADOWS", "pull", "push"]
