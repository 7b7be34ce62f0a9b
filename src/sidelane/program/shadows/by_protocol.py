"""Which protocols of kernels have a shadow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidelane.program.ir import Program
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows.exchange import pull, push
from sidelane.program.shadows.reducing import direct, reduce

SHADOWS: Mapping[Protocol, Callable[[KernelProgram, int, int], Program]] = {
    Protocol.PUSH: push,
    Protocol.PULL: pull,
    Protocol.DIRECT: direct,
    Protocol.REDUCE: reduce,
}
"""Makes the shadow of a kernel with (program, blocks of the launch, bytes of a tile)."""
