# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Time stamps: what each program of a kernel was doing, and since when.

A program writes, into a row of its own, the time and what it does *from then on*, until its next stamp; ``END`` is the
last. Without a buffer (None) nothing is compiled, and the kernel is what it was without stamps::

    stamp(stamps, COMPUTE, peer)      # ... a tile for a peer
    stamp(stamps, SEND, peer)         # ... its stores
    stamp(stamps, END)

A buffer is int64: ``most``, and for each program how many stamps there were, then as many as ``most`` pairs of a time
in nanoseconds and ``8 * (peer + 1) + what``. Stamps beyond that are counted only.
"""

from __future__ import annotations

import time

import numpy as np
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.runtime.interpreter import TensorHandle

KINDS = ("compute", "send", "wait", "add", "end")
"""In the order of their numbers."""

COMPUTE = tl.constexpr(KINDS.index("compute"))
SEND = tl.constexpr(KINDS.index("send"))
WAIT = tl.constexpr(KINDS.index("wait"))
ADD = tl.constexpr(KINDS.index("add"))
END = tl.constexpr(KINDS.index("end"))


def _host_clock() -> tl.tensor:
    """The host's clock, which the processes of a host share, for kernels that are interpreted."""
    return tl.tensor(TensorHandle(np.array([time.monotonic_ns()], np.int64), tl.int64), tl.int64)


_clock_ns = _host_clock if triton.knobs.runtime.interpret else globaltimer


@triton.jit
def stamp(stamps, WHAT: tl.constexpr, peer=-1, MEETS: tl.constexpr = True):
    """From here on this program does WHAT, for ``peer`` or, with -1, for nobody in particular. Its threads meet here.

    ``stamps``: the buffer, or None. MEETS: False where a barrier would keep Triton from loading ahead in a loop.
    """
    if stamps is not None:
        if MEETS:
            tl.debug_barrier()  # all threads have come here
        most = tl.load(stamps)
        row = stamps + 1 + tl.program_id(0) * (1 + 2 * most)
        number = tl.atomic_add(row, 1, sem="relaxed", scope="gpu")
        place = row + 1 + 2 * number
        tl.store(place, _clock_ns(), mask=number < most)
        tl.store(place + 1, 8 * (peer + 1) + WHAT, mask=number < most)
